"""Published readers answer as transformers' question answering pipeline does: on random weights, and trained.

benchmarks/reader_fixture.py made the fixture with transformers 4.57.3; transformers 5 has no such pipeline.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
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
)

from realmops.model.extractive_reader import ExtractiveReader, PassageSpans, load_extractive_reader
from realmops.train.reader_training import passages_loss

FIXTURE = Path(__file__).parents[1] / "fixtures" / "peer_readers.safetensors"
FP32 = torch.float32
CLOSE = {"rtol": 1e-3, "atol": 1e-9}
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
