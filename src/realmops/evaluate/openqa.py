"""Exact match and F1 over questions, their intervals, and the predictions with their evidence as a file.

Exact match is the Open-QA measure of the paper's section 4: the share of questions whose prediction equals
one of the reference answers after normalisation, or matches one of them where they are regular expressions
(``EM_RULES``; ``corpus/answers.py`` has the rules). F1 is that of SQuAD: the words that prediction and reference
share, the best over the references. Regular expressions have no words: there it is exact match, 0 or 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from realmops.artifacts import seed_for, write_bytes
from realmops.corpus.answers import REGEX_RULES, contains_answer, exact_match, normal_form, token_f1
from realmops.corpus.questions import Question, answers_are_expressions

EM_RULES = ("exact_match", *REGEX_RULES)
RESAMPLES = 10_000
CONFIDENCE = 0.95
_DRAWS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Interval:
    """A mean over questions with its percentile bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference(Interval):
    """A mean difference of two runs; ``p_better`` is the share of resamples with the first above the second.

    A resample in which both are equal counts as half.
    """

    p_better: float


@dataclass(frozen=True)
class Score:
    """Exact match and F1 of one run by one rule, both also of each question, in the order of the questions.

    ``correct`` is bool [questions], ``f1_Q`` float64 [questions].
    """

    em: Interval
    correct: npt.NDArray[np.bool_]
    f1: Interval
    f1_Q: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """One answer with what it rests on.

    ``prediction`` is ``evidence[char_start:char_end]``; ``evidence`` is the text of passage
    ``passage_ids[evidence_rank]``, empty and -1 where the reader found no span or nothing was read. ``p_z`` is
    p(z|x) of the passages that the reader saw, best first; ``passage_spans`` and ``passage_scores`` are the best
    span of each and its score, as ``gold_span`` and ``gold_score`` of those that match an answer (None without
    one). ``first_hit`` is the rank from 0 of the first retrieved passage with an answer, -1 without one, and
    ``failed_at`` a key of ``explain.FAILED_AT``.
    """

    question_id: str
    question: str
    prediction: str
    answers: tuple[str, ...]
    em: bool
    f1: float
    passage_ids: tuple[str, ...]
    titles: tuple[str, ...]
    p_z: tuple[float, ...]
    evidence: str
    evidence_rank: int
    char_start: int
    char_end: int
    span_score: float
    passage_spans: tuple[str | None, ...]
    passage_scores: tuple[float | None, ...]
    gold_span: str | None
    gold_score: float | None
    first_hit: int
    failed_at: str


def em_rules(questions: Sequence[Question]) -> tuple[str, ...]:
    """The rules for these answers, that of the release first."""
    return REGEX_RULES if answers_are_expressions(questions) else EM_RULES[:1]


def score_predictions(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    *,
    seed: int,
    rule: str | None = None,
    resamples: int = RESAMPLES,
) -> Score:
    """Exact match and F1 of predictions by question id and a rule of ``EM_RULES``, without one by the release's.

    ValueError names a question without a prediction.
    """
    missing = [question.id for question in questions if question.id not in predictions]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(questions)} questions have no prediction, the first is {missing[0]!r}; "
            "predict an empty string where the reader finds nothing"
        )
    rule = rule or em_rules(questions)[0]
    correct = np.array([is_right(predictions[q.id], q, rule) for q in questions], bool)
    f1_Q = np.array([f1_of(predictions[q.id], q, rule) for q in questions], np.float64)
    em, f1 = (bootstrap_interval(values, seed=seed, resamples=resamples) for values in (correct, f1_Q))
    return Score(em, correct, f1, f1_Q)


def f1_of(prediction: str, question: Question, rule: str) -> float:
    """F1 of one prediction; where answers are expressions 1 for a match by the rule, else 0."""
    return float(is_right(prediction, question, rule)) if question.is_regex else token_f1(prediction, question.answers)


def is_right(prediction: str, question: Question, rule: str) -> bool:
    """Whether one prediction is right by a rule of ``EM_RULES``."""
    if rule == "exact_match":
        return exact_match(prediction, question.answers)
    return contains_answer(prediction, question.answers, rule)


def bootstrap_interval(values: npt.ArrayLike, *, seed: int, resamples: int = RESAMPLES) -> Interval:
    """The mean of one value per question, with the 95 % percentile interval over resampled questions."""
    sample = np.asarray(values, np.float64)
    return _interval(sample, _resampled_means(sample, seed, resamples))


def paired_bootstrap(
    ours: npt.ArrayLike, theirs: npt.ArrayLike, *, seed: int, resamples: int = RESAMPLES
) -> Difference:
    """The mean difference of two runs on the same questions; an interval without 0 shows a difference."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        raise ValueError(f"the runs have {ours.size} and {theirs.size} questions; compare runs on the same ones")
    sample = ours - theirs
    means = _resampled_means(sample, seed, resamples)
    interval = _interval(sample, means)
    p_better = float((means > 0).mean() + (means == 0).mean() / 2)
    return Difference(interval.mean, interval.low, interval.high, p_better)


def _interval(sample: npt.NDArray[np.float64], means: npt.NDArray[np.float64]) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(sample.mean()), float(low), float(high))


def _resampled_means(sample: npt.NDArray[np.float64], seed: int, resamples: int) -> npt.NDArray[np.float64]:
    if sample.ndim != 1 or not sample.size:
        raise ValueError(f"a bootstrap needs one value for each question, at least one; got shape {sample.shape}")
    generator = np.random.default_rng(seed_for(seed, "bootstrap"))
    means = []
    rows = max(1, _DRAWS_AT_ONCE // sample.size)
    for start in range(0, resamples, rows):
        draws = generator.integers(sample.size, size=(min(rows, resamples - start), sample.size))
        means.append(sample[draws].mean(axis=1))
    return np.concatenate(means)


def closed_book_floor(training: Sequence[Question], test: Sequence[Question]) -> tuple[str, float]:
    """The most frequent training answer (by normal form, ties in alphabetical order) and its exact match.

    Training answers that are regular expressions are no answers to give; ValueError when there is no other.
    """
    counts = Counter(
        answer
        for question in training
        if not question.is_regex
        for answer in sorted({normal_form(reference) for reference in question.answers})
    )
    if not counts:
        raise ValueError("the closed-book floor needs at least one training question")
    answer = min(counts, key=lambda text: (-counts[text], text))
    rule = em_rules(test)[0]
    return answer, sum(is_right(answer, question, rule) for question in test) / len(test)


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Replace a Parquet file by these predictions, one a row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for prediction in predictions:
        cut = prediction.evidence[prediction.char_start : prediction.char_end]
        is_cut = cut == prediction.prediction or prediction.evidence_rank < 0
        assert is_cut, (prediction.question_id, cut, prediction.prediction)
    strings, floats = pa.list_(pa.string()), pa.list_(pa.float32())
    schema = pa.schema(
        [
            ("question_id", pa.string()),
            ("question", pa.string()),
            ("prediction", pa.string()),
            ("answers", strings),
            ("em", pa.bool_()),
            ("f1", pa.float64()),
            ("passage_ids", strings),
            ("titles", strings),
            ("p_z", floats),
            ("evidence", pa.string()),
            ("evidence_rank", pa.int32()),
            ("char_start", pa.int32()),
            ("char_end", pa.int32()),
            ("span_score", pa.float32()),
            ("passage_spans", strings),
            ("passage_scores", floats),
            ("gold_span", pa.string()),
            ("gold_score", pa.float32()),
            ("first_hit", pa.int32()),
            ("failed_at", pa.string()),
        ]
    )
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([asdict(prediction) for prediction in predictions], schema), buffer)
    write_bytes(path, buffer.getvalue().to_pybytes())


def write_first_hits(
    path: Path, questions: Sequence[Question], ranks_Q: Mapping[str, npt.NDArray[np.int64]], depth: int
) -> None:
    """Replace a Parquet file: of each question the rank from 0 of the first passage with an answer, by each retriever.

    A column is named ``{prefix}first_hit``, with the retriever's prefix in the metrics; -1: none of ``depth`` has one.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {"question_id": pa.array([question.id for question in questions], pa.string())}
    for prefix, ranks in ranks_Q.items():
        columns[f"{prefix}first_hit"] = pa.array(np.where(ranks < depth, ranks, -1), pa.int32())
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), buffer)
    write_bytes(path, buffer.getvalue().to_pybytes())


def read_predictions(path: Path) -> list[Prediction]:
    """The rows that ``write_predictions`` wrote; ValueError names a file that is missing, damaged or older."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise ValueError(f"{path} does not exist; run 'realmops evaluate' there first")
    try:
        rows = pq.read_table(path).to_pylist()
        return [_prediction(row) for row in rows]
    except (pa.ArrowException, TypeError) as error:
        raise ValueError(
            f"{path} holds no predictions of this version ({error}); run 'realmops evaluate --force' there"
        ) from None


def _prediction(row: dict[str, Any]) -> Prediction:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    return Prediction(**values)


def shown_row(prediction: Prediction) -> dict[str, Any]:
    """What people compare answers by, as one row of a table."""
    return {
        "question": prediction.question,
        "prediction": prediction.prediction,
        "answers": "; ".join(prediction.answers),
        "em": prediction.em,
        "f1": round(prediction.f1, 3),
        "failed_at": prediction.failed_at,
        "evidence": prediction.titles[prediction.evidence_rank] if prediction.evidence_rank >= 0 else "",
        "question_id": prediction.question_id,
    }
