"""Predictions of a run with their evidence, as Parquet files, and the stage at which each question failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from realmops.answering.confidence import Confidence
from realmops.artifacts import atomic_file
from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.exact_match import Score
from realmops.questions.question_sets import Question

if TYPE_CHECKING:
    from realmops.answering.answer import Answer

PREDICTIONS = "predictions.parquet"
FIRST_HITS = "first_hits.parquet"
RESULTS = "results"

# The first step that failed; the first entry that applies.
FAILED_AT = {
    "correct": "the answer is correct",
    "not_in_corpus": "no passage of the corpus contains an answer",
    "not_retrieved": "an answer is in the corpus, but not in the passages that were read",
    "too_long": "an answer was read, but not as a span that the reader can select (too long or truncated)",
    "reader": "the reader could select an answer and selected another span",
}


@dataclass(frozen=True)
class Prediction:
    """One answer with its evidence.

    ``prediction`` is ``evidence[char_start:char_end]``, of passage ``passage_ids[evidence_rank]``, -1 without a span.
    ``p_z`` is p(z|x) of the passages read, best first; the gold span is the best that matches an answer. ``first_hit``
    is the rank from 0 of the first retrieved passage with an answer, -1 without one. ``em``, ``f1`` and ``failed_at``
    are None for a generated question, ``confidence`` and ``abstained`` without a calibration.
    """

    question_id: str
    question: str
    prediction: str
    answers: tuple[str, ...]
    em: bool | None
    f1: float | None
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
    failed_at: str | None
    confidence: float | None
    abstained: bool | None
    page: int | None
    answer_rule: str
    is_generated: bool
    ndcg_at_10: float | None  # of documents; None without judgements

    @property
    def asked(self) -> tuple[str, str, tuple[str, ...]]:
        return self.question_id, self.question, tuple(sorted(self.answers))


def build_predictions(
    snapshot: Snapshot,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    score: Score | None,
    first_hit_Q: npt.NDArray[np.int64],
    in_corpus_Q: npt.NDArray[np.bool_],
    passages_read: int,
    confidence: Confidence | None,
    ndcg_of: Mapping[str, float] = MappingProxyType({}),
) -> list[Prediction]:
    """Build the predictions of a model; ``score`` is that of the questions of people alone, None if there are none."""
    predictions = []
    scored = iter([] if score is None else zip(score.correct.tolist(), score.f1_Q.tolist(), strict=True))
    for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        best, gold = answer.best, answer.best_gold
        correct, f1 = next(scored) if score is not None and question.measures_answers else (None, None)
        first_hit = int(first_hit_Q[i])
        fails = (correct, not in_corpus_Q[i], first_hit >= passages_read, gold is None, True)
        steps = zip(FAILED_AT, fails, strict=True)
        prediction = Prediction(
            question_id=question.id,
            question=question.question,
            prediction=answer.text,
            answers=question.answers,
            em=correct,
            f1=f1,
            passage_ids=tuple(snapshot.passage_id(p) for p in answer.passages),
            titles=tuple(snapshot.title(p) for p in answer.passages),
            p_z=tuple(float(np.exp(value)) for value in answer.log_prior),
            evidence=snapshot.text(best.passage) if best else "",
            evidence_rank=answer.passages.index(best.passage) if best else -1,
            char_start=best.characters[0] if best else 0,
            char_end=best.characters[1] if best else 0,
            span_score=best.score if best else answer.log_p,
            passage_spans=tuple(span.text if span else None for span in answer.best_of_passage),
            passage_scores=tuple(span.score if span else None for span in answer.best_of_passage),
            gold_span=gold.text if gold else None,
            gold_score=gold.score if gold else None,
            first_hit=first_hit if first_hit < len(answer.ranked) else -1,
            failed_at=None if correct is None else next(name for name, holds in steps if holds),
            confidence=confidence.probability(answer) if confidence else None,
            abstained=confidence.abstains(answer) if confidence else None,
            page=snapshot.page(best.passage, best.characters[0]) if best else None,
            answer_rule=question.answer_rule,
            is_generated=question.is_generated,
            ndcg_at_10=ndcg_of.get(question.id),
        )
        predictions.append(prediction)
    return predictions


def failure_shares(failures: Sequence[str]) -> dict[str, float]:
    counts = Counter(failures)
    return {f"failed_at_{name}": counts[name] / len(failures) for name in FAILED_AT if name != "correct"}


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    import pyarrow as pa

    for prediction in predictions:
        span = prediction.evidence[prediction.char_start : prediction.char_end]
        is_span = span == prediction.prediction or prediction.evidence_rank < 0
        assert is_span, (prediction.question_id, span, prediction.prediction)
    column = {"str": pa.string(), "bool": pa.bool_(), "int": pa.int32(), "float": pa.float32()}
    column |= {f"{name} | None": kind for name, kind in column.items()}
    column |= {f"tuple[{name}, ...]": pa.list_(kind) for name, kind in column.items()}
    schema = pa.schema([(field.name, column[str(field.type)]) for field in fields(Prediction)])
    for name in ("f1", "confidence", "ndcg_at_10"):
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.float64()))
    _write_table(path, pa.Table.from_pylist([asdict(prediction) for prediction in predictions], schema))


def write_first_hits(
    path: Path, questions: Sequence[Question], ranks_Q: Mapping[str, npt.NDArray[np.int64]], depth: int
) -> None:
    """Write the rank from 0 of the first passage with an answer (-1: none of ``depth``), by question and retriever."""
    import pyarrow as pa

    columns: dict[str, Any] = {"question_id": pa.array([question.id for question in questions], pa.string())}
    for prefix, ranks in ranks_Q.items():
        columns[f"{prefix}first_hit"] = pa.array(np.where(ranks < depth, ranks, -1), pa.int32())
    _write_table(path, pa.table(columns))


def read_hits(path: Path, prefix: str, k: int) -> dict[str, bool]:
    """Read, by question id, whether one of the first ``k`` passages of a retriever contains an answer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = f"{prefix}first_hit"
    try:
        table = pq.read_table(path, columns=["question_id", column])
        ranks = table.column(column).to_pylist()
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ValueError(
            f"{path} has no column {column} ({error}); run 'realmops run evaluate --force' there"
        ) from None
    return {name: 0 <= rank < k for name, rank in zip(table.column("question_id").to_pylist(), ranks, strict=True)}


def _write_table(path: Path, table: Any) -> None:
    import pyarrow.parquet as pq

    with atomic_file(path) as stage:
        pq.write_table(table, stage)


def read_predictions(path: Path) -> list[Prediction]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise ValueError(f"{path} does not exist; run 'realmops run evaluate' there first")
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        for row in rows:
            row.update((name, tuple(value)) for name, value in row.items() if isinstance(value, list))
        return [Prediction(**row) for row in rows]
    except (pa.ArrowException, TypeError) as error:
        raise ValueError(
            f"{path} has no predictions in the format of this version ({error}); run 'realmops run evaluate --force' "
            "there"
        ) from None


def results_file(folder: Path) -> Path:
    path = folder / PREDICTIONS
    return path if path.is_file() else folder / RESULTS / PREDICTIONS


def read_results(folder: Path) -> list[Prediction]:
    return read_predictions(results_file(folder))
