"""Published readers: the answers of transformers' question answering pipeline, properties, files and errors.

benchmarks/reader_fixture.py made the fixture with transformers 4.57.3, the last one with this pipeline.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_readers import (
    ANSWER,
    FAMILIES,
    LIMIT,
    NAMES,
    TOWNS,
    WORDS,
    build_model,
    questions_and_passages,
    write_reader,
    write_tokenizer,
)
from tokenizers import processors

from realmops.devices import freeze_linear_weights
from realmops.hub import READER, encoder_folder
from realmops.model.extractive_reader import ExtractiveReader, PassageSpans, load_extractive_reader
from realmops.train.reader_training import passages_loss

FIXTURE = Path(__file__).parents[1] / "fixtures" / "peer_readers.safetensors"
FP32 = torch.float32
CLOSE = {"rtol": 1e-3, "atol": 1e-9}
STRIDE = min(LIMIT // 2, 128)
FAMILY = pytest.mark.parametrize("family", FAMILIES)
BEST = 10
STEPS = 150  # of the trained reader
Spans = list[tuple[float, int, int]]  # score, start and end character


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ExtractiveReader]:
    folder, opened = tmp_path_factory.mktemp("readers"), dict[str, ExtractiveReader]()

    def reader(family: str) -> ExtractiveReader:
        if family not in opened:
            opened[family] = load_extractive_reader(write_reader(folder / family, family)).eval()
        return opened[family]

    return reader


@pytest.fixture(scope="module")
def peer() -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in load_file(FIXTURE).items()}


def read(
    reader: ExtractiveReader, pairs: Sequence[tuple[str, str]], limit: int = LIMIT, dtype: torch.dtype = FP32
) -> list[PassageSpans]:
    return reader.read(pairs, limit=limit, answer_wordpieces=ANSWER, dtype=dtype)


def ranked(spans: PassageSpans) -> Spans:
    order = np.argsort(-spans.log_p, kind="stable")
    return [(float(np.exp(spans.log_p[s])), *spans.chars[s].tolist()) for s in order]


def same_answers(ours: PassageSpans, best: Spans, null: float, windows: int) -> None:
    """The best span, the ten best and the null answer; overlapping windows may divide all scores by the same number."""
    mine = ranked(ours)
    scores = np.array([score for score, *_ in mine[: len(best)]])
    ratio = scores[0] / best[0][0]
    assert ratio < 1 + 1e-3 if windows > 1 else ratio == pytest.approx(1, rel=1e-3)
    np.testing.assert_allclose(scores, ratio * np.array([score for score, *_ in best]), **CLOSE)
    assert mine[0][1:] == best[0][1:]
    scores_of: dict[tuple[int, int], list[float]] = {}
    for score, start, end in mine:
        scores_of.setdefault((start, end), []).append(score)
    for score, start, end in best:
        assert any(abs(other - ratio * score) < 1e-3 * score for other in scores_of[start, end]), (start, end)
    np.testing.assert_allclose(np.exp(ours.log_null), ratio * null, **CLOSE)
    total = np.exp(np.logaddexp.reduce([*ours.log_p, ours.log_null]))
    assert total < 1 + 1e-6
    assert ratio > 1 - 1e-3 or total == pytest.approx(1), "scores are divided only by a sum above 1"


def select_starts_ends(
    start_L: np.ndarray, end_L: np.ndarray, undesired_L: np.ndarray, longest: int
) -> tuple[np.ndarray, float]:
    """Line by line ``select_starts_ends`` and ``decode_spans``, without their limit to the best ones.

    Returns the scores of all spans, L x L, 0 for those that cannot be answers, and the null answer's score.
    """
    start_L = np.where(undesired_L, -10000.0, start_L)
    end_L = np.where(undesired_L, -10000.0, end_L)
    start_L = np.exp(start_L - start_L.max())
    start_L = start_L / start_L.sum()
    end_L = np.exp(end_L - end_L.max())
    end_L = end_L / end_L.sum()
    null = float(start_L[0] * end_L[0])
    start_L[0] = end_L[0] = 0.0
    outer_LL = np.matmul(start_L[:, None], end_L[None, :])
    candidates_LL = np.tril(np.triu(outer_LL), longest - 1)
    return candidates_LL * ~undesired_L[:, None] * ~undesired_L[None, :], null


@torch.no_grad()
def reference(
    model: Any, tokenizer: Any, question: str, passage: str, *, segments: bool, limit: int = LIMIT
) -> tuple[Spans, float, int]:
    """All spans, best first, the null answer's score and the number of windows: the pipeline, one pair at a time.

    Follows ``preprocess``, ``_forward`` and ``postprocess`` of ``QuestionAnsweringPipeline`` in transformers 4.57.3
    (pipelines/question_answering.py), with ``align_to_words=False`` and ``handle_impossible_answer=True``. Each span
    counts once, with its best window, before the pipeline adds the scores of equal texts; spans leave out blanks at
    their ends.
    """
    encoded = tokenizer(
        text=question, text_pair=passage, padding="do_not_pad", truncation="only_second", max_length=limit,
        stride=min(limit // 2, 128), return_token_type_ids=True, return_overflowing_tokens=True,
        return_offsets_mapping=True, return_special_tokens_mask=True,
    )  # fmt: skip
    scores: dict[tuple[int, int], tuple[float, int, int]] = {}
    min_null, offset, number = 1_000_000.0, 0, len(encoded["input_ids"])
    for window in range(number):
        sequence_ids = encoded.sequence_ids(window)
        p_mask = [token != 1 for token in sequence_ids]
        for cls in np.nonzero(np.array(encoded["input_ids"][window]) == tokenizer.cls_token_id)[0]:
            p_mask[cls] = False
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if segments else [])]
        output = model(**{name: torch.tensor(encoded[name][window])[None] for name in names})
        start_L, end_L = output.start_logits[0].numpy(), output.end_logits[0].numpy()
        candidates_LL, null = select_starts_ends(start_L, end_L, np.array(p_mask), ANSWER)
        min_null = min(min_null, null)
        first = sequence_ids.index(1) if 1 in sequence_ids else 0
        for s, e in np.argwhere(candidates_LL > 0).tolist():
            start, end = encoded["offset_mapping"][window][s][0], encoded["offset_mapping"][window][e][1]
            text = passage[start:end]
            if text.strip():
                start, end = start + len(text) - len(text.lstrip()), end - len(text) + len(text.rstrip())
                span, score = (offset + s - first, offset + e - first), float(candidates_LL[s, e])
                scores[span] = max(scores.get(span, (0.0, 0, 0)), (score, start, end))
        offset += sequence_ids.count(1) - min(limit // 2, 128)
    return sorted(scores.values(), reverse=True), min_null, number


def test_the_pairs_are_those_of_the_fixture() -> None:
    with safe_open(FIXTURE, "np") as file:
        metadata = file.metadata()
    pairs = questions_and_passages(range(500))
    assert hashlib.sha256(json.dumps(pairs).encode()).hexdigest() == metadata["pairs"]
    assert metadata["transformers"] == "4.57.3"
    passages = "".join(passage for _, passage in pairs)
    assert all(part in passages for part in ("\n\n", "\t", "  ", "\u00a0", "ë", "東", "🙂", "1931", "—"))


@FAMILY
def test_spans_are_those_of_transformers_pipeline(
    family: str, readers: Callable[[str], ExtractiveReader], peer: dict[str, np.ndarray]
) -> None:
    """500 pairs, a fifth of them with several windows: ten best spans, null answer and the pipeline's own answer."""
    numbers, windows, start_NT, length_NT, score_NT, null_N, answer_N3 = (
        peer[f"{family}/{name}"]
        for name in ("numbers", "windows", "start_NT", "length_NT", "score_NT", "null_N", "answer_N3")
    )
    assert len(numbers) == 500
    assert (windows > 1).sum() > 80
    assert (windows > 3).any()
    pairs = questions_and_passages(numbers)
    for n, ours in enumerate(read(readers(family), pairs)):
        columns = (score_NT[n], start_NT[n].astype(int), start_NT[n].astype(int) + length_NT[n])
        best = [(float(score), int(start), int(end)) for score, start, end in zip(*columns, strict=True) if score > 0]
        assert len(best) == BEST or len(ours.log_p) == len(best)
        same_answers(ours, best, float(null_N[n]), int(windows[n]))
        start, end, score = int(answer_N3[n, 0]), int(answer_N3[n, 1]), float(answer_N3[n, 2])
        text = pairs[n][1][start:end]
        is_null = score == pytest.approx(float(null_N[n]), rel=1e-6)
        if windows[n] == 1 and (text.strip() or is_null):  # of several windows, it adds the scores of equal texts
            p, low, high = max(ranked(ours)[0], (float(np.exp(ours.log_null)), 0, 0))
            assert (p, pairs[n][1][low:high]) == (pytest.approx(score, rel=1e-3), text.strip())


@FAMILY
def test_the_reference_is_the_pipeline(
    family: str, readers: Callable[[str], ExtractiveReader], peer: dict[str, np.ndarray]
) -> None:
    """On every fifth pair; it is then compared on a trained reader."""
    reader = readers(family)
    model, segments = build_model(family), FAMILIES[family].segments
    for n in range(0, 500, 5):
        [(question, passage)] = questions_and_passages([peer[f"{family}/numbers"][n]])
        spans, null, windows = reference(model, reader.tokenizer, question, passage, segments=segments)
        best = peer[f"{family}/score_NT"][n]
        np.testing.assert_allclose([score for score, *_ in spans[:BEST]], best[best > 0], **CLOSE)
        start, length = (int(peer[f"{family}/{name}_NT"][n, 0]) for name in ("start", "length"))
        assert spans[0][1:] == (start, start + length)
        assert null == pytest.approx(float(peer[f"{family}/null_N"][n]), rel=1e-3, abs=1e-9)
        assert windows == peer[f"{family}/windows"][n]


# ---- a trained reader

FACTS = (TOWNS, tuple(str(year) for year in range(1900, 1999)), NAMES)
FILLERS = [word for word in WORDS if word not in NAMES + TOWNS]
ASKED = ("where was it", "when was it", "who was it")


def typed_pair(number: int) -> tuple[str, str, str]:
    """Question, passage with a town, a year and a name, and the one that is asked for; sometimes it is left out."""
    random = np.random.RandomState(number)
    kind = random.randint(3)
    words = [FILLERS[random.randint(len(FILLERS))] for _ in range(4 + random.randint(8))]
    answer = ""
    for n, facts in enumerate(FACTS):
        fact = facts[random.randint(len(facts))]
        if n != kind or random.random_sample() < 0.8:
            words.insert(random.randint(len(words) + 1), fact)
            answer = fact if n == kind else answer
    return ASKED[kind], " ".join(words) + ".", answer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader that learned in some seconds which words are towns, years and names."""
    folder = write_reader(tmp_path_factory.mktemp("trained") / "reader", "bert")
    reader = load_extractive_reader(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in reader.named_parameters():
            parameter.normal_(std=0.1) if parameter.ndim > 1 else parameter.fill_("norm" in name.lower())
    asked = SimpleNamespace(reader=reader, options=SimpleNamespace(answer_wordpieces=ANSWER), dtype=FP32)
    asked.device = reader.device
    optimiser = torch.optim.Adam(reader.parameters(), 3e-3)
    reader.set_dropout(0.0)
    for step in range(STEPS):
        pairs = [typed_pair(10_000 + 24 * step + n) for n in range(24)]
        pairs = [(question, passage, (answer,) if answer else ()) for question, passage, answer in pairs]
        loss, _ = passages_loss(asked, pairs, ["token_boundary"] * len(pairs))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * (1 - step / STEPS)
    reader.save(folder)
    return folder


def test_a_trained_reader_answers_as_the_pipeline_would(trained: Path) -> None:
    """500 unseen pairs: the answers are right, and those of the reference to the last span."""
    reader = load_extractive_reader(trained).eval()
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(trained).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained)
    drawn = [typed_pair(number) for number in range(500)]
    right = 0
    for (question, passage, answer), ours in zip(drawn, read(reader, [pair[:2] for pair in drawn]), strict=True):
        spans, null, windows = reference(model, tokenizer, question, passage, segments=True)
        mine = ranked(ours)
        np.testing.assert_allclose([score for score, *_ in mine], [score for score, *_ in spans], **CLOSE)
        if spans[0][0] - spans[1][0] > 1e-3 * spans[0][0]:
            assert mine[0][1:] == spans[0][1:]
        same_answers(ours, spans[:BEST], null, windows) if spans[0][0] > 2 * spans[1][0] else None
        score, start, end = mine[0]
        right += (passage[start:end] if score > np.exp(ours.log_null) else "") == answer
    assert right > 200, right  # by chance: some 5
    assert sum(not answer for *_, answer in drawn) < 150, "most have an answer"


# ---- properties


def flat(spans: Sequence[PassageSpans]) -> np.ndarray:
    return np.concatenate([np.column_stack([part.chars, part.log_p]).ravel() for part in spans])


def test_threads_read_as_one_after_another(tmp_path: Path) -> None:
    folder = write_reader(tmp_path, "roberta")
    pairs = questions_and_passages(range(24))
    alone = load_extractive_reader(folder).eval()
    expected = [flat(read(alone, pairs[n : n + 3], limit=60 + n)) for n in range(0, 24, 3)]
    together = load_extractive_reader(folder).eval()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: flat(read(together, pairs[n : n + 3], limit=60 + n)), range(0, 24, 3)))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_batch_is_read_as_its_pairs_alone(readers: Callable[[str], ExtractiveReader]) -> None:
    pairs = questions_and_passages(range(20))
    for ours, pair in zip(read(readers("bert"), pairs), pairs, strict=True):
        [alone] = read(readers("bert"), [pair])
        np.testing.assert_allclose(flat([ours]), flat([alone]), rtol=1e-4, atol=1e-4)


def test_windows_cover_the_passage(readers: Callable[[str], ExtractiveReader]) -> None:
    """A passage that fits has one window; one more wordpiece makes a second, which shares half a window."""
    reader = readers("bert")
    room = LIMIT - 3 - len(reader.tokenize("who was").ids)
    assert len(reader.tokenize("norway").ids) == 1
    [window] = reader.windows([("who was", "norway " * room)], LIMIT)
    assert (window.end - window.first, len(window.encoding.ids), window.offset) == (room, LIMIT, 0)
    windows = reader.windows([("who was", "norway " * (room + 1))], LIMIT)
    assert [window.part for window in windows] == [slice(0, room), slice(room - STRIDE, room + 1)]
    [short, *_, last] = reader.windows([("who", ""), ("who was", "norway " * 500)], LIMIT)
    assert (short.pair, short.first, short.end, short.null_positions) == (0, 0, 0, (0,))
    assert (last.pair, last.part.stop) == (1, 500)
    [ours] = read(reader, [("who was", "norway " * 500)])
    assert len(ours.log_p) == sum(min(ANSWER, 500 - n) for n in range(500))


@pytest.mark.parametrize("limit", [24, 60, LIMIT])
def test_a_long_question_is_cut(readers: Callable[[str], ExtractiveReader], limit: int) -> None:
    """Windows then still advance, by at least a 32nd of a window."""
    reader = readers("bert")
    most = reader.longest_question(limit)
    assert 0 < most <= limit // 2
    passage = "the town of rain " * 40
    asked = " ".join(["in"] * 300)
    windows = reader.windows([(asked, passage)], limit)
    assert windows[0].encoding.sequence_ids.count(0) == most
    assert windows[1].offset >= max(1, limit // 32)
    np.testing.assert_array_equal(
        flat(read(reader, [(asked, passage)], limit)), flat(read(reader, [(" ".join(["in"] * most), passage)], limit))
    )


@FAMILY
def test_spans_have_no_blanks_at_their_ends(family: str, readers: Callable[[str], ExtractiveReader]) -> None:
    pairs = [("who?", " \n the  poet\t (1931) .  é東京 \u00a0 "), ("who?", "  \n "), ("who?", "x"), ("?", ".")]
    whole, blank, letter, mark = read(readers(family), pairs)
    texts = [pairs[0][1][start:end] for start, end in whole.chars.tolist()]
    assert all(text and text == text.strip() for text in texts)
    assert "(1931)" in texts
    assert (len(blank.log_p), blank.chars.shape) == (0, (0, 2))
    assert blank.log_null == pytest.approx(0.0, abs=1e-6) or family in ("roberta", "deberta-v2", "albert")
    for part in (letter, mark):
        assert part.chars.tolist()[-1] == [0, 1]


def left_padded(folder: Path, model_class: str = "XLNetForQuestionAnsweringSimple") -> Path:
    """An XLNet: passage, question, [SEP] and [CLS]; padding on the left."""
    folder.mkdir(parents=True)
    write_tokenizer(folder, "bert", padding_side="left", tokenizer_class="PreTrainedTokenizerFast")
    tokenizer = FAMILIES["bert"].tokenizer()
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP] [CLS]", pair="$A [SEP] $B:1 [SEP]:1 [CLS]:2", special_tokens=ids
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = transformers.XLNetConfig(
        vocab_size=tokenizer.get_vocab_size(), d_model=32, n_layer=2, n_head=4, d_inner=48, pad_token_id=0,
        start_n_top=2, end_n_top=2, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, model_class)(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def test_a_reader_with_padding_on_the_left_reads_passages_first(tmp_path: Path) -> None:
    """The scores are those of each sequence without padding; the question is never an answer."""
    folder = left_padded(tmp_path / "xlnet")
    reader = load_extractive_reader(folder).eval()
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    pairs = [pair for pair in questions_and_passages(range(40)) if pair[1].strip()]
    windows = reader.windows(pairs, LIMIT)
    assert len(windows) > len(pairs)
    for (question, passage), ours in zip(pairs, read(reader, pairs), strict=True):
        best: dict[tuple[int, int], float] = {}
        nulls = []
        for window in reader.windows([(question, passage)], LIMIT):
            encoding = window.encoding
            assert (window.first, window.null_positions) == (0, (len(encoding.ids) - 1,))
            ids, types = (torch.tensor([values]) for values in (encoding.ids, encoding.type_ids))
            out = model(input_ids=ids, token_type_ids=types)
            kept = [*range(window.end), len(encoding.ids) - 1]
            start, end = (logits[0, kept].softmax(-1).tolist() for logits in (out.start_logits, out.end_logits))
            nulls.append(start[-1] * end[-1])
            for first in range(window.end):
                for last in range(first, min(first + ANSWER, window.end)):
                    span = (encoding.offsets[first][0], encoding.offsets[last][1])
                    best[span] = max(best.get(span, 0.0), start[first] * end[last])
        excess = max(1.0, sum(best.values()) + min(nulls)) if len(nulls) > 1 else 1.0
        mine = dict(zip(map(tuple, ours.chars.tolist()), np.exp(ours.log_p), strict=True))
        assert mine.keys() == best.keys()
        np.testing.assert_allclose([mine[span] * excess for span in best], list(best.values()), rtol=1e-3, atol=1e-7)
        assert np.exp(ours.log_null) * excess == pytest.approx(min(nulls), rel=1e-3, abs=1e-9)


def test_a_reader_without_cls_has_no_null_answer(tmp_path: Path) -> None:
    folder = write_reader(tmp_path, "bert")
    tokenizer = FAMILIES["bert"].tokenizer()
    ids = [("[SEP]", tokenizer.token_to_id("[SEP]"))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", pair="$A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    about = json.loads((folder / "tokenizer_config.json").read_text())
    del about["cls_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "tokenizer_class": "PreTrainedTokenizerFast"}))
    reader = load_extractive_reader(folder).eval()
    [window] = reader.windows([("who?", "the poet")], LIMIT)
    assert window.null_positions == ()
    one, none = read(reader, [("who?", "the poet"), ("who?", " ")])
    assert one.log_null == none.log_null == -np.inf
    assert len(none.log_p) == 0
    assert 0 < np.exp(one.log_p).sum() < 1 + 1e-6
    assert not np.isnan(one.log_p).any()


def test_the_head_computes_in_fp32(readers: Callable[[str], ExtractiveReader], tmp_path: Path) -> None:
    """Under autocast, and after the other layers are cast to bf16; the answers stay close."""
    reader = load_extractive_reader(write_reader(tmp_path, "bert")).eval()
    freeze_linear_weights(reader, torch.bfloat16)
    assert reader.head.weight.dtype == FP32
    linear = next(part for part in reader.modules() if isinstance(part, torch.nn.Linear))
    assert linear.weight.dtype == torch.bfloat16
    pairs = [pair for pair in questions_and_passages(range(30)) if pair[1].strip()]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert reader.log_probabilities(reader.windows(pairs[:2], LIMIT))[0].dtype == FP32
        assert reader.head(torch.ones(1, 1, 32, dtype=torch.bfloat16)).dtype == FP32
    exact = read(readers("bert"), pairs)
    for ours, theirs in zip(read(reader, pairs, dtype=torch.bfloat16), exact, strict=True):
        np.testing.assert_array_equal(ours.chars, theirs.chars)
        np.testing.assert_allclose(ours.log_p, theirs.log_p, atol=1.0)


@FAMILY
def test_a_saved_reader_is_the_same_and_opens_in_transformers(family: str, tmp_path: Path) -> None:
    first = load_extractive_reader(write_reader(tmp_path / "first", family)).eval()
    pairs = questions_and_passages(range(20))
    expected = flat(read(first, pairs))
    folders = [tmp_path / "second", tmp_path / "third"]
    reader = first
    for folder in folders:
        folder.mkdir()
        reader.save(folder)
        reader = load_extractive_reader(folder).eval()
        np.testing.assert_array_equal(flat(read(reader, pairs)), expected)
    names = sorted(path.name for path in folders[0].iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(names)
    assert names == sorted(path.name for path in folders[1].iterdir())
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
        assert (folders[0] / name).stat().st_mode == (folders[0] / "config.json").stat().st_mode
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folders[0]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[0])
    question, passage = pairs[5]
    spans, null, windows = reference(model, tokenizer, question, passage, segments=FAMILIES[family].segments)
    same_answers(read(first, [pairs[5]])[0], spans[:1], null, windows)


# ---- files


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def without_head(weights: dict[str, torch.Tensor]) -> None:
    for name in ("qa_outputs.weight", "qa_outputs.bias"):
        del weights[name]


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "encoder": (
        lambda folder: edit_weights(folder, without_head),
        r"{folder} has no trained span head \(qa_outputs\.bias\): it is an encoder, not a reader; set reader\.init",
    ),
    "code": (
        lambda folder: edit_json(folder / "config.json", model_type="custom", auto_map={"AutoModel": "code.Model"}),
        r"{folder}/config\.json: model_type 'custom' needs custom code \(auto_map\), which is never executed",
    ),
    "images": (
        lambda folder: edit_json(folder / "config.json", model_type="vit"),
        r"{folder}/config\.json: model_type 'vit' reads no spans; set reader\.init to a model",
    ),
    "slow": (
        lambda folder: (
            (folder / "tokenizer.json").unlink(),
            edit_json(folder / "tokenizer_config.json", tokenizer_class="CanineTokenizer"),
        ),
        r"{folder}: CanineTokenizer gives no character offsets",
    ),
    "lost": (
        lambda folder: edit_weights(folder, lambda weights: weights.pop("bert.encoder.layer.1.output.dense.weight")),
        r"{folder}: the parameter bert\.encoder\.layer\.1\.output\.dense\.weight is missing; download the folder again",
    ),
    "nan": (
        lambda folder: edit_weights(folder, lambda weights: weights["qa_outputs.weight"].view(-1)[3].fill_(torch.nan)),
        r"{folder}: the parameter qa_outputs\.weight has a value that is not finite; choose other weights",
    ),
    "tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{{}"),
        r"{folder}: transformers cannot open its tokenizer \(",
    ),
    "shape": (
        lambda folder: edit_weights(folder, lambda weights: weights.update({"qa_outputs.bias": torch.zeros(3)})),
        r"{folder}: transformers cannot open it \(",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_named(case: str, tmp_path: Path) -> None:
    folder = write_reader(tmp_path / "reader", "bert")
    change, message = BROKEN[case]
    change(folder)
    with pytest.raises(ValueError, match=message.replace("{folder}", re.escape(str(folder)))):
        load_extractive_reader(folder)


def test_a_beam_head_is_no_span_head(tmp_path: Path) -> None:
    folder = left_padded(tmp_path / "beam", "XLNetForQuestionAnswering")
    with pytest.raises(ValueError, match=r"beam has no trained span head \(qa_outputs\.bias\)"):
        load_extractive_reader(folder)


def test_weights_of_torch_are_refused(tmp_path: Path) -> None:
    folder = write_reader(tmp_path / "reader", "bert")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"reader lacks model\.safetensors; a reader of answer spans's folder has"):
        encoder_folder(str(folder), READER)


def test_a_new_head_depends_on_the_seed(tmp_path: Path) -> None:
    folder = write_reader(tmp_path / "encoder", "bert")
    edit_weights(folder, without_head)
    warned: list[str] = []
    heads = [load_extractive_reader(folder, seed=seed, warn=warned.append).head.weight for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert 0.01 < heads[0].std() < 0.03
    assert warned == [f"{folder} has no span head: a new one is trained"] * 3
