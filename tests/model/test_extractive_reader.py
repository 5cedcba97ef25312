"""Published readers: equal to transformers' pipeline, windows, blanks, saving, damaged folders.

benchmarks/reader_fixture.py made the fixture with transformers 4.57.3; transformers 5 has no such pipeline.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from small_encoders import change_weights, edit_json
from small_readers import ANSWER, FAMILIES, LIMIT, PADDING_LEAKS, questions_and_passages, write_reader
from small_world import at_once
from tokenizers import processors

from realmops.devices import freeze_linear_weights
from realmops.model.extractive_reader import ExtractiveReader, PassageSpans, load_extractive_reader

FIXTURE = Path(__file__).parents[1] / "fixtures" / "peer_readers.safetensors"
FP32 = torch.float32
STRIDE = min(LIMIT // 2, 128)
CLOSE = {"rtol": 1e-3, "atol": 1e-9}
FAMILY = pytest.mark.parametrize("family", FAMILIES)
Spans = list[tuple[float, int, int]]  # score, start and end character


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ExtractiveReader]:
    folder, opened = tmp_path_factory.mktemp("readers"), dict[str, ExtractiveReader]()

    def reader(family: str) -> ExtractiveReader:
        if family not in opened:
            opened[family] = load_extractive_reader(write_reader(folder / family, family)).eval()
        return opened[family]

    return reader


def read(
    reader: ExtractiveReader, pairs: Sequence[tuple[str, str]], limit: int = LIMIT, dtype: torch.dtype = FP32
) -> list[PassageSpans]:
    return reader.read(pairs, limit=limit, answer_wordpieces=ANSWER, dtype=dtype)


def flat(spans: Sequence[PassageSpans]) -> np.ndarray:
    return np.concatenate([np.column_stack([part.chars, part.log_p]).ravel() for part in spans])


# ---- transformers' pipeline


def ranked(spans: PassageSpans) -> Spans:
    order = np.argsort(-spans.log_p, kind="stable")
    return [(float(np.exp(spans.log_p[s])), *spans.chars[s].tolist()) for s in order]


@pytest.fixture(scope="module")
def peer() -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in load_file(FIXTURE).items()}


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


@FAMILY
def test_spans_equal_those_of_the_pipeline(
    family: str, readers: Callable[[str], ExtractiveReader], peer: dict[str, np.ndarray]
) -> None:
    """500 pairs, a fifth of them with several windows: ten best spans, null answer and the pipeline's own answer."""
    with safe_open(FIXTURE, "np") as file:
        metadata = file.metadata()
    digest = hashlib.sha256(json.dumps(questions_and_passages(range(500))).encode()).hexdigest()
    assert (metadata["pairs"], metadata["transformers"]) == (digest, "4.57.3")
    numbers, windows, start_NT, length_NT, score_NT, null_N, answer_N3 = (
        peer[f"{family}/{name}"]
        for name in ("numbers", "windows", "start_NT", "length_NT", "score_NT", "null_N", "answer_N3")
    )
    assert (windows > 1).sum() > 80
    assert (windows > 3).any()
    pairs = questions_and_passages(numbers)
    for n, ours in enumerate(read(readers(family), pairs)):
        columns = (score_NT[n], start_NT[n].astype(int), start_NT[n].astype(int) + length_NT[n])
        best = [(float(score), int(start), int(end)) for score, start, end in zip(*columns, strict=True) if score > 0]
        assert len(best) == 10 or len(ours.log_p) == len(best)
        same_answers(ours, best, float(null_N[n]), int(windows[n]))
        start, end, score = int(answer_N3[n, 0]), int(answer_N3[n, 1]), float(answer_N3[n, 2])
        text = pairs[n][1][start:end]
        is_null = score == pytest.approx(float(null_N[n]), rel=1e-6)
        if windows[n] == 1 and (text.strip() or is_null):  # of several windows, it adds the scores of equal texts
            p, low, high = max(ranked(ours)[0], (float(np.exp(ours.log_null)), 0, 0))
            assert (p, pairs[n][1][low:high]) == (pytest.approx(score, rel=1e-3), text.strip())


# ---- windows


def test_concurrent_reading_equals_sequential_reading(tmp_path: Path) -> None:
    folder, pairs = write_reader(tmp_path, "roberta"), questions_and_passages(range(24))

    def spans(reader: ExtractiveReader, n: int) -> np.ndarray:
        return flat(read(reader, pairs[n : n + 3], limit=60 + n))

    alone, shared = (load_extractive_reader(folder).eval() for _ in range(2))
    expected = [spans(alone, n) for n in range(0, 24, 3)]
    for ours, other in zip(at_once(*(partial(spans, shared, n) for n in range(0, 24, 3))), expected, strict=True):
        np.testing.assert_array_equal(ours, other)


@pytest.mark.parametrize("family", [*FAMILIES, *PADDING_LEAKS])
def test_a_passage_has_the_same_spans_alone_and_among_others(family: str, tmp_path: Path) -> None:
    """When questions are answered, and in the scores that training learns from."""
    warnings: list[str] = []
    reader = load_extractive_reader(write_reader(tmp_path, family), warn=warnings.append).eval()
    assert ["reads passages one by one" in warning for warning in warnings] == [True] * (family in PADDING_LEAKS)
    pairs = questions_and_passages(range(12))
    for together, pair in zip(read(reader, pairs), pairs, strict=True):
        [alone] = read(reader, [pair])
        np.testing.assert_allclose(flat([together]), flat([alone]), rtol=0, atol=1e-4)
    windows = reader.windows(pairs, LIMIT)
    with torch.no_grad():
        for n, (log_start_L, log_end_L) in enumerate(zip(*reader.log_probabilities(windows), strict=True)):
            size = len(windows[n].encoding.ids)
            for row_L, [alone_L] in zip((log_start_L, log_end_L), reader.log_probabilities([windows[n]]), strict=True):
                torch.testing.assert_close(row_L[:size], alone_L, rtol=0, atol=1e-4)
                assert bool((row_L[size:] == -torch.inf).all())


def test_windows_cover_the_passage(readers: Callable[[str], ExtractiveReader]) -> None:
    """A passage that fits has one window; one more wordpiece makes a second, which shares half a window."""
    reader = readers("bert")
    room = LIMIT - 3 - len(reader.tokenize("who was").ids)
    assert len(reader.tokenize("norway").ids) == 1
    [window] = reader.windows([("who was", "norway " * room)], LIMIT)
    assert (window.end - window.first, len(window.encoding.ids), window.offset) == (room, LIMIT, 0)
    windows = reader.windows([("who was", "norway " * (room + 1))], LIMIT)
    parts = [(window.offset, window.end - window.first) for window in windows]
    assert parts == [(0, room), (room - STRIDE, STRIDE + 1)]
    [short, *_, last] = reader.windows([("who", ""), ("who was", "norway " * 500)], LIMIT)
    assert (short.pair, short.first, short.end, short.null_positions) == (0, 0, 0, (0,))
    assert (last.pair, last.offset + last.end - last.first) == (1, 500)
    [ours] = read(reader, [("who was", "norway " * 500)])
    assert len(ours.log_p) == sum(min(ANSWER, 500 - n) for n in range(500))


@pytest.mark.parametrize("limit", [24, 60, LIMIT])
def test_a_long_question_is_cut(readers: Callable[[str], ExtractiveReader], limit: int) -> None:
    """Between characters, of which wordpieces of bytes can be a part; windows still advance, by at least a 32nd."""
    passage = "the town of rain " * 40
    for window in readers("roberta").windows([("a" * (limit % 7) + "東京🙂" * 30, passage)], 60):
        assert 0 < window.encoding.sequence_ids.count(0) <= readers("roberta").longest_question(60)
    reader, asked = readers("bert"), " ".join(["in"] * 300)
    most = reader.longest_question(limit)
    assert 0 < most <= limit // 2
    first, second, *_ = reader.windows([(asked, passage)], limit)
    assert (first.encoding.sequence_ids.count(0), second.offset >= max(1, limit // 32)) == (most, True)
    whole, same = (read(reader, [(text, passage)], limit) for text in (asked, " ".join(["in"] * most)))
    np.testing.assert_array_equal(flat(whole), flat(same))


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


def test_a_reader_without_cls_has_no_null_answer(tmp_path: Path) -> None:
    folder, tokenizer = write_reader(tmp_path, "bert"), FAMILIES["bert"].tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", pair="$A [SEP] $B:1 [SEP]:1", special_tokens=[("[SEP]", tokenizer.token_to_id("[SEP]"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", cls_token=None, tokenizer_class="PreTrainedTokenizerFast")
    reader = load_extractive_reader(folder).eval()
    [window] = reader.windows([("who?", "the poet")], LIMIT)
    assert window.null_positions == ()
    spans, blank = read(reader, [("who?", "the poet"), ("who?", " ")])
    assert spans.log_null == blank.log_null == -np.inf
    assert len(blank.log_p) == 0
    assert 0 < np.exp(spans.log_p).sum() < 1 + 1e-6


def test_the_head_computes_in_fp32(readers: Callable[[str], ExtractiveReader], tmp_path: Path) -> None:
    """Under autocast, and after the other layers are cast to bf16; the answers stay near."""
    reader = load_extractive_reader(write_reader(tmp_path, "bert")).eval()
    freeze_linear_weights(reader, torch.bfloat16)
    assert reader.head.weight.dtype == FP32
    pairs = [pair for pair in questions_and_passages(range(30)) if pair[1].strip()]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert reader.log_probabilities(reader.windows(pairs[:2], LIMIT))[0].dtype == FP32
    exact = read(readers("bert"), pairs)
    for ours, other in zip(read(reader, pairs, dtype=torch.bfloat16), exact, strict=True):
        np.testing.assert_array_equal(ours.chars, other.chars)
        np.testing.assert_allclose(ours.log_p, other.log_p, atol=1.0)


@FAMILY
def test_a_saved_reader_is_unchanged_and_opens_in_transformers(family: str, tmp_path: Path) -> None:
    first, pairs = (
        load_extractive_reader(write_reader(tmp_path / "first", family)).eval(),
        questions_and_passages(range(20)),
    )
    reader, folders = first, [tmp_path / "second", tmp_path / "third"]
    for folder in folders:
        folder.mkdir()
        reader.save(folder)
        reader = load_extractive_reader(folder).eval()
        np.testing.assert_array_equal(flat(read(reader, pairs)), flat(read(first, pairs)))
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(path.name for path in folders[1].iterdir())
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
        assert (folders[0] / name).stat().st_mode == (folders[0] / "config.json").stat().st_mode
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folders[0]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[0])
    [window] = first.windows([pairs[5]], LIMIT)
    encoded = tokenizer(*pairs[5], return_tensors="pt", return_token_type_ids=FAMILIES[family].segments)
    kept = [*window.null_positions[:1], *range(window.first, window.end)]
    with torch.no_grad():
        out = model(**encoded)
        for ours, peer in zip(first.log_probabilities([window]), (out.start_logits, out.end_logits), strict=True):
            torch.testing.assert_close(ours[0, kept], peer[0, kept].log_softmax(-1), rtol=0, atol=1e-4)


# ---- files


def without_head(folder: Path) -> None:
    change_weights(folder, lambda name, x: None if name.startswith("qa_outputs") else x)


def use_slow_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", tokenizer_class="CanineTokenizer")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "encoder": (
        without_head,
        r" has no trained span head \(qa_outputs\.bias\): it is an encoder, not a reader; set reader\.init",
    ),
    "code": (
        lambda folder: edit_json(folder / "config.json", model_type="custom", auto_map={"AutoModel": "code.Model"}),
        r"/config\.json: model_type 'custom' needs custom code \(auto_map\), which is never executed",
    ),
    "images": (
        lambda folder: edit_json(folder / "config.json", model_type="vit"),
        r"/config\.json: model_type 'vit' reads no spans; set reader\.init to a model",
    ),
    "slow": (use_slow_tokenizer, ": its tokenizer gives no character offsets"),
    "left": (
        lambda folder: edit_json(folder / "tokenizer_config.json", padding_side="left"),
        ": its tokenizer gives no character offsets, or pads on the left; use another reader",
    ),
    "tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        r": transformers cannot open its tokenizer \(",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_folder_that_is_no_reader_is_refused(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    folder = write_reader(tmp_path / "reader", "bert")
    damage(folder)
    with pytest.raises(ValueError, match=re.escape(str(folder)) + message):
        load_extractive_reader(folder)


def test_a_new_head_depends_on_the_seed(tmp_path: Path) -> None:
    folder, warnings = write_reader(tmp_path / "encoder", "bert"), list[str]()
    without_head(folder)
    heads = [load_extractive_reader(folder, seed=seed, warn=warnings.append).head.weight for seed in (1, 1, 2)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert warnings == [f"{folder} has no span head: a new one is trained"] * 3
