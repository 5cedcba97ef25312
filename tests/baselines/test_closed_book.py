"""The closed-book T5 on toy text: what span corruption hides, that it learns, and the folders it comes from."""

import dataclasses
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
from safetensors.torch import load, load_file, save_file
from small_project import QUESTIONS
from small_world import (
    DOCUMENTS,
    MemoryCheckpoints,
    MemoryJournal,
    World,
    build_world,
    killed_and_resumed,
    same_parameters,
    tiny_context,
    tiny_optimiser,
    write_documents,
)
from torch import Tensor

from realmops.artifacts import atomic_folder
from realmops.baselines import t5
from realmops.baselines.t5 import (
    FILE,
    NOISE_DENSITY,
    SENTINELS,
    ClosedBook,
    drop_regex_questions,
    finetune,
    pretrain,
    span_corruption,
)
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.hub import T5, encoder_files
from realmops.options import ClosedBookOptions
from realmops.questions.answer_matching import normalize_answer
from realmops.questions.question_sets import Question
from realmops.readers.sources import list_sources
from realmops.train.loop import TENSORS, epoch_steps

ASKED = [Question(str(n), question, (answer,)) for n, (question, answer) in enumerate(QUESTIONS["train"])]
FP32, CPU = torch.float32, torch.device("cpu")
MARKS = np.array([900, 901, 902, 903])


def options(**changes: Any) -> ClosedBookOptions:
    values: dict[str, Any] = {
        "init": "small", "steps": 7, "epochs": 60, "checkpoint_every": 100,
    }  # fmt: skip
    return ClosedBookOptions(**{**values, **changes})


@pytest.fixture(scope="module", autouse=True)
def small_sizes() -> Iterator[None]:
    sizes = {"PASSAGE_WORDPIECES": 48, "QUESTION_WORDPIECES": 24, "ANSWER_WORDPIECES": 8}
    with mock.patch.multiple(t5, BATCH_SIZE=8, LEARNING_RATE=1e-2, **sizes):
        yield


def small(snapshot: Snapshot, seed: int = 0, width: int = 16, **changes: Any) -> ClosedBook:
    shape = transformers.BertConfig(
        hidden_size=width, num_hidden_layers=1, num_attention_heads=2, intermediate_size=2 * width
    )
    return ClosedBook.build(options(**changes), snapshot, shape, seed)


@pytest.fixture(scope="module")
def learned(world: World) -> ClosedBook:
    model = small(world.snapshot)
    finetune(tiny_context(), model, ASKED, options(), tiny_optimiser())
    return model


# ---- span corruption


class Drawn:
    """A generator whose permutations begin as given."""

    def __init__(self, *permutations: list[int]) -> None:
        self.permutations = list(permutations)

    def permutation(self, count: int) -> np.ndarray:
        first = self.permutations.pop(0)
        assert max(first, default=0) < count
        return np.array([*first, *(n for n in range(count) if n not in first)])


def restored(inputs: np.ndarray, target: np.ndarray, marks: np.ndarray = MARKS) -> list[int]:
    """The text again: each sentinel of the input gives way to what stands behind it in the target."""
    spans: dict[int, list[int]] = {}
    for token in target.tolist():
        if token in marks:
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    return [t for token in inputs.tolist() for t in (spans.pop(token) if token in marks else [token])]


def test_span_corruption_by_hand() -> None:
    """Of 40 pieces 6 are hidden, in 2 spans: cut 2 + 4, with 2, 7 and 25 pieces before, between and behind."""
    rng: Any = Drawn([1], [9, 2])
    inputs, target = span_corruption(np.arange(40), MARKS, rng)
    assert inputs.tolist() == [0, 1, 900, *range(4, 11), 901, *range(15, 40)]
    assert target.tolist() == [900, 2, 3, 901, 11, 12, 13, 14]
    assert restored(inputs, target) == list(range(40))


@pytest.mark.parametrize(("length", "hidden", "spans"), [(1, 1, 1), (2, 1, 1), (9, 1, 1), (20, 3, 1), (60, 9, 3)])
def test_span_corruption_can_be_undone(length: int, hidden: int, spans: int) -> None:
    """15 % in spans of 3 on average; every place is hidden at times, the first and the last among them."""
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


def test_a_long_text_has_as_many_spans_as_there_are_sentinels() -> None:
    inputs, target = span_corruption(np.arange(100), MARKS, np.random.default_rng(0))
    assert restored(inputs, target) == list(range(100))
    assert len(target) == 15 + 4


class Spy(ClosedBook):
    """Keeps what it was asked to learn."""

    def loss(self, inputs: Any, targets: Any, dtype: torch.dtype) -> tuple[Tensor, dict[str, float]]:
        self.__dict__.setdefault("asked", []).extend(zip(inputs, targets, strict=True))
        return super().loss(inputs, targets, dtype)


def spied(model: ClosedBook) -> Any:
    return Spy(**{field.name: getattr(model, field.name) for field in dataclasses.fields(model)})


def pieces(world: World, number: int) -> list[int]:
    return [*world.snapshot.title_tokens(number).tolist(), *world.snapshot.body(number).tolist()]


def test_pretraining_is_over_titles_and_bodies(world: World) -> None:
    """Every passage is drawn, whole, with an end behind input and target; 15 % of its pieces are the target."""
    spy = spied(small(world.snapshot))
    pretrain(tiny_context(), spy, world.snapshot, options(steps=15), tiny_optimiser())
    texts, marks = [], spy.sentinel_ids
    for inputs, target in spy.asked:
        assert inputs[-1] == target[-1] == spy.eos_id == world.special.sep
        texts.append(tuple(restored(inputs[:-1], target[:-1], marks)))
    assert set(texts) == {tuple(pieces(world, n)) for n in range(len(world.snapshot))}
    hidden = sum(int((~np.isin(target[:-1], marks)).sum()) for _, target in spy.asked)
    assert hidden / sum(map(len, texts)) == pytest.approx(NOISE_DENSITY, abs=0.02)


def test_a_passage_that_is_too_long_is_seen_part_by_part(world: World) -> None:
    """12 places: title, 9 pieces of the body or fewer from anywhere, and the end."""
    spy = spied(small(world.snapshot))
    with mock.patch.object(t5, "PASSAGE_WORDPIECES", 12):
        pretrain(tiny_context(), spy, world.snapshot, options(steps=60), tiny_optimiser())
    title, body = world.snapshot.title_tokens(3).tolist(), world.snapshot.body(3).tolist()
    assert (len(title), len(body) > 12) == (1, True)
    texts = [restored(inputs[:-1], target[:-1], spy.sentinel_ids) for inputs, target in spy.asked]
    parts = {tuple(text[1:]) for text in texts if text[0] == title[0] and len(text) == 11}
    assert parts == {tuple(body[start : start + 10]) for start in range(len(body) - 9)}


def test_pretraining_learns_what_two_passages_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, journal = build_world(tmp_path, DOCUMENTS[:2]).snapshot, MemoryJournal()
    monkeypatch.setattr(t5, "LEARNING_RATE", 3e-3)
    chosen = options(steps=130)
    pretrain(tiny_context(journal=journal), small(snapshot, width=32), snapshot, chosen, tiny_optimiser())
    loss, accuracy = journal.values("loss"), journal.values("accuracy")
    assert np.mean(loss[-10:]) < 0.4 * np.mean(loss[:10])
    assert np.mean(accuracy[:10]) < 0.3 < 0.5 < np.mean(accuracy[-10:])


# ---- answers as text


def test_the_blanks_of_an_answer_come_back(tmp_path: Path) -> None:
    """WordPiece alone knows "12,340" as three words with blanks between them, of another normal form."""
    text = "It cost 12,340 in the U.S. on March 12, 1931. Twenty-five (old) men & O'Neill paid."
    documents = (("Price", text, ("March 12, 1931",)), ("Price", text, ("March 12, 1931",)))
    snapshot = build_world(tmp_path, documents).snapshot
    with mock.patch.object(t5, "ANSWER_WORDPIECES", 60):
        model = small(snapshot)
    for answer in ("12,340", "U.S.", "March 12, 1931", "Twenty-five (old) men", "O'Neill & men", "it"):
        target = model.encode_target(answer)
        assert model.decode(target.tolist()) == answer.lower()
        assert target[-1] == model.eos_id
        assert normalize_answer(snapshot.tokenizer.decode(snapshot.tokenizer.encode("12,340").ids)) == "12 340"
    names = [model.tokenizer.id_to_token(int(i)) for i in model.encode_target("U.S.")]
    assert names == ["u", "<join>", ".", "<join>", "s", "<join>", ".", "[SEP]"]
    cut = dataclasses.replace(small(snapshot), answer_wordpieces=4).encode_target("U.S.")
    assert [model.tokenizer.id_to_token(int(i)) for i in cut] == ["u", "<join>", ".", "[SEP]"]


def test_special_names_in_a_text_are_text(world: World) -> None:
    model = small(world.snapshot)
    special = {model.pad_id, model.eos_id, *model.sentinel_ids.tolist(), model.tokenizer.token_to_id("<join>")}
    assert not special & set(model.encode("<extra_id_0> [SEP] [PAD] <join>").tolist())


# ---- learning and answering


def test_it_learns_questions_by_heart(learned: ClosedBook) -> None:
    told: list[int] = []
    answers = learned.answer(ASKED, batch_size=4, progress=told.append)
    assert [answer.text for answer in answers] == [q.answers[0].lower() for q in ASKED]
    assert all(np.log(0.5) < answer.log_p < 0 for answer in answers)
    assert told == [4, 2]


@pytest.mark.parametrize("trained", [True, False])
def test_an_answer_is_the_most_likely_piece_each_time(learned: ClosedBook, world: World, trained: bool) -> None:
    """Piece by piece without a cache; the logarithms of all its pieces, with the end where it came to one."""
    model = learned if trained else dataclasses.replace(small(world.snapshot), answer_wordpieces=3)
    answers = model.answer(ASKED, batch_size=4)
    ended = 0
    for question, answer in zip(ASKED, answers, strict=True):
        ids = torch.from_numpy(model.encode_question(question.question))[None]
        written, total = [model.pad_id], 0.0
        with torch.no_grad():
            while len(written) <= model.answer_wordpieces and model.eos_id not in written:
                logits_V = model.net(input_ids=ids, decoder_input_ids=torch.tensor([written])).logits[0, -1]
                best = int(logits_V.argmax())
                total += float(logits_V.double().log_softmax(-1)[best])
                written.append(best)
        ended += model.eos_id in written
        assert answer.text == model.decode(written)
        assert answer.log_p == pytest.approx(total, abs=1e-4)
    assert ended == len(ASKED) if trained else ended < len(ASKED)


def other_passages(folder: Path, world: World) -> Snapshot:
    """Half of the passages, with the vocabulary of all."""
    corpus = list_sources(write_documents(folder / "documents.jsonl", DOCUMENTS[6:]), "auto")
    with atomic_folder(folder / "snapshot") as stage:
        write_snapshot(corpus, stage, vocabulary=world.snapshot.vocabulary, block_wordpieces=48)
    return Snapshot.open(folder / "snapshot")


def test_passages_are_nothing_to_it_once_the_vocabulary_is_made(
    world: World, learned: ClosedBook, tmp_path: Path
) -> None:
    snapshot = other_passages(tmp_path, world)
    assert snapshot.corpus_hash != world.snapshot.corpus_hash
    model = small(snapshot)
    finetune(tiny_context(), model, ASKED, options(), tiny_optimiser())
    assert model.answer(ASKED, batch_size=4) == learned.answer(ASKED, batch_size=4)


def test_each_answer_is_drawn_in_its_turn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = spied(small(world.snapshot))
    capital = Question("capital", "What is the capital of Norway?", ("Oslo", "Oslo in Norway"))
    monkeypatch.setattr(t5, "BATCH_SIZE", 2)
    chosen = options(epochs=20)
    finetune(tiny_context(), spy, [capital, ASKED[1], ASKED[2]], chosen, tiny_optimiser())
    assert len(spy.asked) == 60
    question = spy.encode_question(capital.question).tolist()
    drawn = [spy.decode(target.tolist()) for inputs, target in spy.asked if inputs.tolist() == question]
    assert len(drawn) == 20
    assert 4 <= drawn.count("oslo") <= 16
    assert drawn.count("oslo") + drawn.count("oslo in norway") == 20


def test_answers_that_are_expressions_are_left_out(world: World) -> None:
    expression = Question("year", "When?", (r"19\d\d",), is_regex=True)
    assert drop_regex_questions([expression, *ASKED]) == ASKED
    assert epoch_steps(len(ASKED), 4, 1.5) == 3
    spy = spied(small(world.snapshot))
    finetune(tiny_context(), spy, [expression, *ASKED], options(epochs=1), tiny_optimiser())
    assert len(spy.asked) == len(ASKED)
    with pytest.raises(ValueError, match=r"the answers of all 1 training questions are regular expressions"):
        finetune(tiny_context(), spy, [expression], options(), tiny_optimiser())


def test_half_precision_is_near(world: World) -> None:
    model = small(world.snapshot)
    sides = [model.encode_question(ASKED[0].question)], [model.encode_target("Oslo")]
    whole, half = (model.loss(*sides, dtype)[0].item() for dtype in (FP32, torch.bfloat16))
    assert whole != half
    assert half == pytest.approx(whole, rel=0.02)


def test_the_small_model_has_the_readers_shape_and_its_seed(world: World) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model, again, other = small(world.snapshot), small(world.snapshot), small(world.snapshot, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    config = model.net.config
    assert (config.d_model, config.num_layers, config.num_decoder_layers, config.num_heads) == (16, 1, 1, 2)
    assert (config.d_kv, config.d_ff, config.dropout_rate) == (8, 32, 0.0)
    assert config.vocab_size == len(world.snapshot.vocabulary) + 1 + len(SENTINELS)
    assert torch.equal(model.net.shared.weight, again.net.shared.weight)
    assert not torch.equal(model.net.shared.weight, other.net.shared.weight)


# ---- killed and started again


def t5_folder(folder: Path, dropout: float = 0.0, **changes: Any) -> Path:
    """A T5 and its own tokenizer, Unigram over the toy questions' words, as transformers saves them."""
    words = sorted({word for q in ASKED for word in (q.question + " " + q.answers[0]).split()})
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocabulary += [(f"▁{word}", -3.0) for word in words] + [(name, 0.0) for name in reversed(SENTINELS)]
    transformers.T5Tokenizer(vocab=vocabulary).save_pretrained(folder)
    config: dict[str, Any] = {"vocab_size": len(vocabulary) + 4, "dropout_rate": dropout, **changes}
    shape = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, **config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.T5ForConditionalGeneration(shape).save_pretrained(folder)
    return folder


def test_dropout_is_for_learning_alone(world: World, tmp_path: Path) -> None:
    model = small(world.snapshot, init=str(t5_folder(tmp_path, dropout=0.2)))
    sides = [model.encode_question(ASKED[0].question)], [model.encode_target("Oslo")]
    for _ in range(2):
        assert model.loss(*sides, FP32)[0].item() != model.loss(*sides, FP32)[0].item()
        assert model.answer(ASKED, batch_size=6) == model.answer(ASKED, batch_size=6)


@pytest.mark.parametrize("training", ["pretrain", "finetune", "finetune with dropout"])
def test_killed_and_started_again_it_ends_with_the_same_bits(
    world: World, tmp_path: Path, training: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = str(t5_folder(tmp_path, dropout=0.2)) if "dropout" in training else "small"

    def process(**surroundings: Any) -> ClosedBook:
        monkeypatch.setattr(t5, "BATCH_SIZE", 3)
        chosen = options(init=init, epochs=3, checkpoint_every=2)
        model = small(world.snapshot, init=init)
        train, text = (pretrain, world.snapshot) if training == "pretrain" else (finetune, ASKED)
        train(tiny_context(**surroundings), model, text, chosen, tiny_optimiser())
        return model

    start, whole, journal = small(world.snapshot, init=init), MemoryCheckpoints(), MemoryJournal()
    expected, (model, rest) = process(checkpoints=whole, journal=journal), killed_and_resumed(process, 5)
    same_parameters(model.net, expected.net)
    assert rest.without_times() == journal.without_times()
    assert model.net.lm_head.weight is model.net.shared.weight
    assert not torch.equal(model.net.shared.weight, start.net.shared.weight)
    names = load(whole.saved[4][TENSORS])
    assert sorted(name for name in names if any(part in name for part in ("shared", "lm_head", "embed_tokens"))) == [
        f"{kind}.closed_book.shared.weight" for kind in "mpv"
    ]


# ---- folders


def test_a_saved_model_gives_the_same_answers(world: World, learned: ClosedBook, tmp_path: Path) -> None:
    """With the vocabulary that it learned with; another one is refused."""
    learned.save(tmp_path)
    again = ClosedBook.open(tmp_path, world.snapshot, CPU)
    assert again.answer(ASKED, batch_size=4) == learned.answer(ASKED, batch_size=4)
    assert again.net.config.dropout_rate == 0.0
    assert not list(tmp_path.glob("*.bin"))
    assert json.loads((tmp_path / FILE).read_text())["vocabulary_hash"] == world.snapshot.vocabulary_hash
    edit(tmp_path / FILE, vocabulary_hash="0" * 64)
    with pytest.raises(
        ValueError, match=r"trained with the vocabulary 000000000000, but the snapshot has [0-9a-f]{12};"
    ):
        ClosedBook.open(tmp_path, world.snapshot, CPU)


def test_a_t5_of_transformers_with_its_own_tokenizer(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same loss as transformers' own from the same text; then it learns, is saved, and answers the same."""
    folder = t5_folder(tmp_path / "t5")
    monkeypatch.setattr(t5, "BATCH_SIZE", 6)
    chosen = options(init=str(folder))
    model = ClosedBook.build(chosen, world.snapshot, transformers.BertConfig(), seed=0)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    theirs.config.decoder_start_token_id = 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for question in ASKED:
        given = tokenizer(question.question, return_tensors="pt")
        wanted = tokenizer(question.answers[0], return_tensors="pt").input_ids
        ours, _ = model.loss(
            [model.encode_question(question.question)], [model.encode_target(question.answers[0])], FP32
        )
        assert ours.item() == pytest.approx(theirs(**given, labels=wanted).loss.item(), rel=1e-5)
    assert model.sentinel_ids.tolist() == tokenizer.convert_tokens_to_ids(list(SENTINELS))
    finetune(tiny_context(), model, ASKED, chosen, tiny_optimiser())
    answers = model.answer(ASKED, batch_size=6)
    assert [answer.text for answer in answers] == [q.answers[0] for q in ASKED], "capitals and all"
    (tmp_path / "saved").mkdir()
    model.save(tmp_path / "saved")
    assert ClosedBook.open(tmp_path / "saved", world.snapshot, CPU).answer(ASKED, batch_size=6) == answers


def t5_of_version_1_1(folder: Path) -> Path:
    """Gated GELU, no shared output layer, no scaling before it; here in half precision."""
    t5_folder(folder, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.randn(weights["shared.weight"].shape, generator=torch.Generator().manual_seed(0))
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", tie_word_embeddings=False, dtype="bfloat16")
    return folder


def test_an_output_layer_of_its_own_stays_apart(world: World, tmp_path: Path) -> None:
    """Also after being saved; half precision becomes single."""
    folder = t5_of_version_1_1(tmp_path / "t5")
    model, weights = small(world.snapshot, init=str(folder)), load_file(folder / "model.safetensors")
    assert {parameter.dtype for parameter in model.net.parameters()} == {FP32}
    assert torch.equal(model.net.lm_head.weight, weights["lm_head.weight"].float())
    assert torch.equal(model.net.shared.weight, weights["shared.weight"].float())
    (tmp_path / "saved").mkdir()
    model.save(tmp_path / "saved")
    again = ClosedBook.open(tmp_path / "saved", world.snapshot, CPU)
    assert again.answer(ASKED, batch_size=6) == model.answer(ASKED, batch_size=6)
    assert not again.net.config.scale_decoder_outputs


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def without(path: Path, part: str) -> None:
    kept = {name: tensor for name, tensor in load_file(path).items() if part not in name}
    save_file(kept, path, metadata={"format": "pt"})


def other_tokenizer(folder: Path) -> None:
    tokenizer: Mapping[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = [entry for entry in tokenizer["model"]["vocab"] if entry[0] != SENTINELS[7]]
    added = [entry for entry in tokenizer["added_tokens"] if entry["content"] not in SENTINELS]
    model = {**tokenizer["model"], "vocab": vocabulary}
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "model": model, "added_tokens": added}))


BROKEN = {
    "family": (
        lambda f: edit(f / "config.json", model_type="mt5"),
        r"config\.json: model_type is 'mt5'; only T5 models are supported",
    ),
    "no tokenizer": (
        lambda f: os.rename(f / "tokenizer.json", f / "spiece.model"),
        r"lacks tokenizer\.json; the folder of a T5 has config\.json, model\.safetensors, and tokenizer\.json",
    ),
    "pickle": (
        lambda f: os.rename(f / "model.safetensors", f / "pytorch_model.bin"),
        r"lacks model\.safetensors; the folder of a T5",
    ),
    "cut weights": (
        lambda f: os.truncate(f / "model.safetensors", 900),
        r": T5 model cannot be loaded \(.*download it",
    ),
    "no decoder": (
        lambda f: without(f / "model.safetensors", "decoder"),
        r": parameter decoder\.block\.0\.layer\.0\.SelfAttention\.k\.weight is missing; download it again",
    ),
    "cut tokenizer": (
        lambda f: os.truncate(f / "tokenizer.json", 90),
        r": T5 model cannot be loaded \(.*download it again",
    ),
    "no sentinel": (
        other_tokenizer,
        r"tokenizer\.json: tokenizer does not match this T5, .* <extra_id_0> to <extra_id_99>",
    ),
    "few embeddings": (
        lambda f: t5_folder(f, vocab_size=90),
        r"tokenizer\.json: tokenizer does not match this T5, .* 90 piece",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_folder_that_is_no_t5_is_named(world: World, tmp_path: Path, kind: str) -> None:
    damage, message = BROKEN[kind]
    damage(t5_folder(tmp_path))
    with pytest.raises(ValueError, match=message) as error:
        small(world.snapshot, init=str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_the_files_that_it_depends_on(tmp_path: Path) -> None:
    folder = t5_folder(tmp_path)
    assert sorted(encoder_files(str(folder), T5)) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert encoder_files("small", T5) == {}


def test_it_is_silent(world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "saved").mkdir()
    folder = t5_of_version_1_1(tmp_path / "t5")
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_progress_bar()
    capfd.readouterr()
    model = small(world.snapshot, init=str(folder))
    model.answer(ASKED, batch_size=4)
    model.save(tmp_path / "saved")
    ClosedBook.open(tmp_path / "saved", world.snapshot, CPU).answer(ASKED, batch_size=4)
    assert capfd.readouterr() == ("", "")
    assert transformers.logging.get_verbosity() == transformers.logging.ERROR, "its handler is older than capfd"
