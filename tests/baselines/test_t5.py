"""The closed-book T5 on toy text: span corruption, learning, and the folders that it is loaded from."""

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_project import QUESTIONS
from small_world import (
    World,
    build_world,
    same_parameters,
    tiny_context,
)

from realmops.baselines import t5
from realmops.baselines.t5 import (
    NOISE_DENSITY,
    SENTINELS,
    ClosedBook,
    drop_regex_questions,
    finetune,
    pretrain,
    span_corruption,
)
from realmops.corpus.snapshot_reader import Snapshot
from realmops.options import ClosedBookOptions
from realmops.questions.question_sets import Question
from realmops.train.loop import LossAndMetrics

ASKED = [Question(str(n), question, (answer,)) for n, (question, answer) in enumerate(QUESTIONS["train"])]
FP32, CPU = torch.float32, torch.device("cpu")
MARKS = np.array([900, 901, 902, 903])


def options(**changes: Any) -> ClosedBookOptions:
    return ClosedBookOptions(**{"init": "small", "steps": 7, "epochs": 60, **changes})


@pytest.fixture(scope="module", autouse=True)
def small_sizes() -> Iterator[None]:
    sizes = {"PASSAGE_WORDPIECES": 48, "QUESTION_WORDPIECES": 24, "ANSWER_WORDPIECES": 8}
    with mock.patch.multiple(t5, BATCH_SIZE=8, LEARNING_RATE=1e-2, **sizes):
        yield


def build(snapshot: Snapshot, seed: int = 0, **changes: Any) -> ClosedBook:
    shape = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return ClosedBook.build(options(**changes), snapshot, shape, seed)


@pytest.fixture(scope="module")
def trained(world: World) -> ClosedBook:
    model = build(world.snapshot)
    finetune(tiny_context(), model, ASKED, options())
    return model


# ---- span corruption


def restored(inputs: np.ndarray, target: np.ndarray, marks: np.ndarray = MARKS) -> list[int]:
    """Return the text: each sentinel of the input replaced by what follows it in the target."""
    spans: dict[int, list[int]] = {}
    for token in target.tolist():
        if token in marks:
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    return [t for token in inputs.tolist() for t in (spans.pop(token) if token in marks else [token])]


@pytest.mark.parametrize(
    ("length", "hidden", "spans"), [(1, 1, 1), (2, 1, 1), (9, 1, 1), (20, 3, 1), (60, 9, 3), (100, 15, 4)]
)
def test_span_corruption_hides_15_percent_in_spans_of_3(length: int, hidden: int, spans: int) -> None:
    """Nothing is lost, spans are not adjacent nor more than the sentinels, and every place is hidden at times."""
    text, seen = np.arange(100, 100 + length), set()
    for seed in range(300):
        inputs, target = span_corruption(text, MARKS, np.random.default_rng(seed))
        assert restored(inputs, target) == text.tolist()
        marks = [token for token in inputs.tolist() if token in MARKS]
        assert marks == MARKS[:spans].tolist() == [token for token in target.tolist() if token in MARKS]
        assert not any(a in MARKS and b in MARKS for a, b in itertools.pairwise(inputs))
        assert (len(inputs), len(target)) == (length - hidden + spans, hidden + spans)
        seen.update(set(target.tolist()) - set(MARKS.tolist()))
    assert seen == set(text.tolist())


class Spy(ClosedBook):
    """Records what it is trained on."""

    def loss(self, inputs: Any, targets: Any, dtype: torch.dtype) -> LossAndMetrics:
        self.__dict__.setdefault("pairs", []).extend(zip(inputs, targets, strict=True))
        return super().loss(inputs, targets, dtype)


def spy_on(model: ClosedBook) -> Any:
    return Spy(model.net, model.tokenizer)


def test_pretraining_is_over_titles_and_bodies(world: World) -> None:
    spy = spy_on(build(world.snapshot))
    pretrain(tiny_context(), spy, world.snapshot, options(steps=15))
    texts, marks = set(), spy.sentinel_ids
    for inputs, target in spy.pairs:
        assert inputs[-1] == target[-1] == spy.eos_id == world.special.sep
        texts.add(tuple(restored(inputs[:-1], target[:-1], marks)))
    snapshot = world.snapshot
    assert texts == {(*snapshot.title_tokens(n).tolist(), *snapshot.body(n).tolist()) for n in range(len(snapshot))}
    hidden = sum(int((~np.isin(target[:-1], marks)).sum()) for _, target in spy.pairs)
    whole = sum(len(restored(inputs[:-1], target[:-1], marks)) for inputs, target in spy.pairs)
    assert hidden / whole == pytest.approx(NOISE_DENSITY, abs=0.02)


def test_every_part_of_a_long_passage_is_drawn(world: World) -> None:
    """12 places: title, 10 pieces of the body from anywhere, and the end."""
    spy = spy_on(build(world.snapshot))
    with mock.patch.object(t5, "PASSAGE_WORDPIECES", 12):
        pretrain(tiny_context(), spy, world.snapshot, options(steps=60))
    [title], body = world.snapshot.title_tokens(3).tolist(), world.snapshot.body(3).tolist()
    texts = [restored(inputs[:-1], target[:-1], spy.sentinel_ids) for inputs, target in spy.pairs]
    parts = {tuple(text[1:]) for text in texts if text[0] == title and len(text) == 11}
    assert parts == {tuple(body[start : start + 10]) for start in range(len(body) - 9)}


# ---- questions and answers


def test_an_answer_keeps_its_spaces_and_special_names_are_text(tmp_path: Path) -> None:
    """WordPiece alone decodes "12,340" as three words."""
    text = "It cost 12,340 in the U.S. on March 12, 1931. Twenty-five (old) men & O'Neill paid."
    documents = (("Price", text, ("March 12, 1931",)), ("Price", text, ("March 12, 1931",)))
    model = build(build_world(tmp_path, documents).snapshot)
    with mock.patch.object(t5, "ANSWER_WORDPIECES", 60):
        for answer in ("12,340", "U.S.", "March 12, 1931", "Twenty-five (old) men", "O'Neill & men", "it"):
            target = model.encode_target(answer)
            assert (model.decode(target.tolist()), target[-1]) == (answer.lower(), model.eos_id)
    names = [model.tokenizer.id_to_token(int(i)) for i in model.encode_target("U.S.")]
    assert names == ["u", "<join>", ".", "<join>", "s", "<join>", ".", "[SEP]"], "cut to 8"
    special = {model.pad_id, model.eos_id, *model.sentinel_ids.tolist(), model.tokenizer.token_to_id("<join>")}
    assert not special & set(model.encode("<extra_id_0> [SEP] [PAD] <join>").tolist())


def test_finetuning_learns_its_questions(trained: ClosedBook) -> None:
    counted: list[int] = []
    answers = trained.answer(ASKED, batch_size=4, progress=counted.append)
    assert [answer.text for answer in answers] == [q.answers[0].lower() for q in ASKED]
    assert all(np.log(0.5) < answer.log_p < 0 for answer in answers)
    assert counted == [4, 2]


@pytest.mark.parametrize("is_trained", [True, False])
def test_decoding_is_greedy_and_sums_log_probabilities(
    trained: ClosedBook, world: World, is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piece by piece without a cache; the end of sequence is included where it is reached."""
    if not is_trained:
        monkeypatch.setattr(t5, "ANSWER_WORDPIECES", 3)
    model, ended = trained if is_trained else build(world.snapshot), 0
    for question, answer in zip(ASKED, model.answer(ASKED, batch_size=4), strict=True):
        ids = torch.from_numpy(model.encode_question(question.question))[None]
        written, total = [model.pad_id], 0.0
        with torch.no_grad():
            while len(written) <= t5.ANSWER_WORDPIECES and model.eos_id not in written:
                logits_V = model.net(input_ids=ids, decoder_input_ids=torch.tensor([written])).logits[0, -1]
                best = int(logits_V.argmax())
                total += float(logits_V.double().log_softmax(-1)[best])
                written.append(best)
        ended += model.eos_id in written
        assert answer.text == model.decode(written)
        assert answer.log_p == pytest.approx(total, abs=1e-4)
    assert ended == len(ASKED) if is_trained else ended < len(ASKED)


def test_each_answer_of_a_question_is_drawn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = spy_on(build(world.snapshot))
    capital = Question("capital", "What is the capital of Norway?", ("Oslo", "Oslo in Norway"))
    monkeypatch.setattr(t5, "BATCH_SIZE", 2)
    finetune(tiny_context(), spy, [capital, ASKED[1], ASKED[2]], options(epochs=20))
    question = spy.encode_question(capital.question).tolist()
    drawn = [spy.decode(target.tolist()) for inputs, target in spy.pairs if inputs.tolist() == question]
    assert (len(spy.pairs), len(drawn)) == (60, 20)
    assert 4 <= drawn.count("oslo") <= 16
    assert drawn.count("oslo") + drawn.count("oslo in norway") == 20


def test_regular_expressions_are_no_targets() -> None:
    expression = Question("year", "When?", (r"19\d\d",), is_regex=True)
    assert drop_regex_questions([expression, *ASKED]) == ASKED
    with pytest.raises(ValueError, match=r"the answers of all 1 training questions are regular expressions"):
        drop_regex_questions([expression])


def test_the_small_model_has_the_readers_shape_and_its_seed(world: World) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model, again, other = build(world.snapshot), build(world.snapshot), build(world.snapshot, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    config = model.net.config
    assert (config.d_model, config.num_layers, config.num_decoder_layers, config.num_heads) == (16, 1, 1, 2)
    assert (config.d_kv, config.d_ff, config.dropout_rate) == (8, 32, 0.0)
    assert config.vocab_size == len(world.snapshot.vocabulary) + 1 + len(SENTINELS)
    assert torch.equal(model.net.shared.weight, again.net.shared.weight)
    assert not torch.equal(model.net.shared.weight, other.net.shared.weight)


def t5_folder(folder: Path, dropout: float = 0.0, **changes: Any) -> Path:
    """A T5 with its own tokenizer, Unigram over the words of ``ASKED``, as transformers saves them."""
    words = sorted({word for q in ASKED for word in (q.question + " " + q.answers[0]).split()})
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocabulary += [(f"▁{word}", -3.0) for word in words] + [(name, 0.0) for name in reversed(SENTINELS)]
    transformers.T5Tokenizer(vocab=vocabulary).save_pretrained(folder)
    config: dict[str, Any] = {"vocab_size": len(vocabulary) + 4, "dropout_rate": dropout, **changes}
    shape = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, **config
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.T5ForConditionalGeneration(shape).save_pretrained(folder)
    return folder


# ---- folders


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def t5_of_version_1_1(folder: Path) -> Path:
    """Gated GELU, an output layer that is not shared, without scaling before it; in half precision."""
    t5_folder(folder, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.randn(weights["shared.weight"].shape, generator=torch.Generator().manual_seed(0))
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", tie_word_embeddings=False, dtype="bfloat16")
    return folder


@pytest.mark.parametrize("make", [t5_folder, t5_of_version_1_1])
def test_a_published_t5_has_transformers_loss_and_is_saved_as_a_reader(world: World, tmp_path: Path, make: Any) -> None:
    folder = make(tmp_path / "t5")
    model = build(world.snapshot, init=str(folder))
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=FP32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for question in ASKED:
        inputs = tokenizer(question.question, return_tensors="pt")
        labels = tokenizer(question.answers[0], return_tensors="pt").input_ids
        sides = [model.encode_question(question.question)], [model.encode_target(question.answers[0])]
        assert model.loss(*sides, FP32)[0].item() == pytest.approx(
            theirs(**inputs, labels=labels).loss.item(), rel=1e-5
        )
    assert model.sentinel_ids.tolist() == tokenizer.convert_tokens_to_ids(list(SENTINELS))
    with mock.patch.object(t5, "BATCH_SIZE", 6):
        finetune(tiny_context(), model, ASKED, options(init=str(folder)))
    answers = model.answer(ASKED, batch_size=6)
    assert [answer.text for answer in answers] == [q.answers[0] for q in ASKED], "with capitals"
    model.save(tmp_path / "saved")
    assert ClosedBook.open(tmp_path / "saved", CPU).answer(ASKED, batch_size=6) == answers
    library = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved/reader")
    same_parameters(library, model.net)


def without(path: Path, part: str) -> None:
    kept = {name: tensor for name, tensor in load_file(path).items() if part not in name}
    save_file(kept, path, metadata={"format": "pt"})


def replace_tokenizer(folder: Path) -> None:
    tokenizer: Mapping[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = [entry for entry in tokenizer["model"]["vocab"] if entry[0] != SENTINELS[7]]
    added = [entry for entry in tokenizer["added_tokens"] if entry["content"] not in SENTINELS]
    edit(folder / "tokenizer.json", model={**tokenizer["model"], "vocab": vocabulary}, added_tokens=added)


DAMAGES = {
    "family": (lambda f: edit(f / "config.json", model_type="mt5"), r"model_type is 'mt5'; only T5 models"),
    "pickle": (lambda f: os.rename(f / "model.safetensors", f / "pytorch_model.bin"), r"lacks model\.safetensors"),
    "weights": (lambda f: os.truncate(f / "model.safetensors", 900), r"model\.safetensors"),
    "decoder": (lambda f: without(f / "model.safetensors", "decoder"), r"decoder\.block\.0\..* is missing; download"),
    "tokenizer": (lambda f: os.truncate(f / "tokenizer.json", 90), r"tokenizer cannot be opened .*download it again"),
    "sentinel": (replace_tokenizer, r"tokenizer does not match this T5, .* <extra_id_0> to <extra_id_99>"),
    "embeddings": (lambda f: t5_folder(f, vocab_size=90), r"tokenizer does not match this T5, .* 90 piece"),
}


@pytest.mark.parametrize("part", DAMAGES)
def test_a_folder_that_is_no_t5_is_refused_with_its_name(world: World, tmp_path: Path, part: str) -> None:
    damage, message = DAMAGES[part]
    damage(t5_folder(tmp_path))
    with pytest.raises(ValueError, match=message) as error:
        build(world.snapshot, init=str(tmp_path))
    assert str(tmp_path) in str(error.value)
