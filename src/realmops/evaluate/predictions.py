"""The answers of a run with what each rests on, as a file, and the ceiling that each hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from realmops.answering.confidence import Confidence
from realmops.artifacts import atomic_file
from realmops.corpus.question_sets import Question
from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.exact_match import Score

if TYPE_CHECKING:
    from realmops.answering.answer import Answer

PREDICTIONS = "predictions.parquet"
FIRST_HITS = "first_hits.parquet"
RESULTS = "results"

# What a question failed at, the first that holds.
FAILED_AT = {
    "correct": "the answer is right",
    "not_in_corpus": "no passage of the corpus holds an answer",
    "not_retrieved": "an answer is in the corpus, but not in the passages that were read",
    "too_long": "an answer was read, but not as a span that the reader can choose (too long, or behind its limit)",
    "reader": "the reader could choose an answer and chose another span",
}


@dataclass(frozen=True)
class Prediction:
    """One answer with what it rests on.

    ``prediction`` is ``evidence[char_start:char_end]``; ``evidence`` is the text of passage
    ``passage_ids[evidence_rank]``, empty and -1 where the reader found no span or nothing was read. ``p_z`` is
    p(z|x) of the passages that the reader saw, best first; ``passage_spans`` and ``passage_scores`` are the best
    span of each and its score, as ``gold_span`` and ``gold_score`` of those that match an answer (None without
    one). ``first_hit`` is the rank from 0 of the first retrieved passage with an answer, -1 without one, and
    ``failed_at`` a key of ``FAILED_AT``. ``confidence`` is the calibrated probability that the answer is right, and
    ``abstained`` says that it is better held back; None of a model without a calibration. ``page`` is where the answer
    stands in a document with pages. ``answer_rule`` is that of ``Question``; None where an earlier version wrote it.
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
    confidence: float | None
    abstained: bool | None
    page: int | None = None
    answer_rule: str | None = None

    @property
    def asked(self) -> tuple[str, str, tuple[str, ...]]:
        """Which question it answers, as ``Question.asked``."""
        return self.question_id, self.question, tuple(sorted(self.answers))

    def shown_row(self) -> dict[str, Any]:
        """What people compare answers by, as one row of a table."""
        return {
            "question": self.question,
            "prediction": self.prediction,
            "answers": "; ".join(self.answers),
            "em": self.em,
            "f1": round(self.f1, 3),
            "failed_at": self.failed_at,
            "confidence": None if self.confidence is None else round(self.confidence, 3),
            "evidence": self.titles[self.evidence_rank] if self.evidence_rank >= 0 else "",
            "question_id": self.question_id,
        }


def predictions_of(
    snapshot: Snapshot,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    score: Score,
    first_hit_Q: npt.NDArray[np.int64],
    in_corpus_Q: npt.NDArray[np.bool_],
    passages_read: int,
    confidence: Confidence | None,
) -> list[Prediction]:
    """The answers of a model to questions, how they were scored, and what each failed at."""
    predictions = []
    for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        best, gold = answer.best, answer.best_gold
        correct, first_hit = bool(score.correct[i]), int(first_hit_Q[i])
        prediction = Prediction(
            question_id=question.id,
            question=question.question,
            prediction=answer.text,
            answers=question.answers,
            em=correct,
            f1=float(score.f1_Q[i]),
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
            failed_at=failed_at(
                correct=correct,
                in_corpus=bool(in_corpus_Q[i]),
                retrieved=first_hit < passages_read,
                choosable=gold is not None,
            ),
            confidence=confidence.probability(answer) if confidence else None,
            abstained=confidence.abstains(answer) if confidence else None,
            page=snapshot.page(best.passage, best.characters[0]) if best else None,
            answer_rule=question.answer_rule,
        )
        predictions.append(prediction)
    return predictions


def failed_at(*, correct: bool, in_corpus: bool, retrieved: bool, choosable: bool) -> str:
    """The key of ``FAILED_AT`` for one question."""
    if correct:
        return "correct"
    if not in_corpus:
        return "not_in_corpus"
    if not retrieved:
        return "not_retrieved"
    return "reader" if choosable else "too_long"


def failure_shares(failures: Sequence[str]) -> dict[str, float]:
    """``failed_at_NAME`` as a share of the questions, for each name but "correct"."""
    counts = Counter(failures)
    return {f"failed_at_{name}": counts[name] / len(failures) for name in FAILED_AT if name != "correct"}


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Replace a Parquet file by these predictions, one a row."""
    import pyarrow as pa

    for prediction in predictions:
        cut = prediction.evidence[prediction.char_start : prediction.char_end]
        is_cut = cut == prediction.prediction or prediction.evidence_rank < 0
        assert is_cut, (prediction.question_id, cut, prediction.prediction)
    column = {"str": pa.string(), "bool": pa.bool_(), "int": pa.int32(), "float": pa.float32()}
    column |= {f"{name} | None": kind for name, kind in column.items()}
    column |= {f"tuple[{name}, ...]": pa.list_(kind) for name, kind in column.items()}
    schema = pa.schema([(field.name, column[str(field.type)]) for field in fields(Prediction)])
    for name in ("f1", "confidence"):
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.float64()))
    _write_table(path, pa.Table.from_pylist([asdict(prediction) for prediction in predictions], schema))


def write_first_hits(
    path: Path, questions: Sequence[Question], ranks_Q: Mapping[str, npt.NDArray[np.int64]], depth: int
) -> None:
    """Replace a Parquet file: of each question the rank from 0 of the first passage with an answer, by each retriever.

    A column is named ``{prefix}first_hit``, with the retriever's prefix in the metrics; -1: none of ``depth`` has one.
    """
    import pyarrow as pa

    columns: dict[str, Any] = {"question_id": pa.array([question.id for question in questions], pa.string())}
    for prefix, ranks in ranks_Q.items():
        columns[f"{prefix}first_hit"] = pa.array(np.where(ranks < depth, ranks, -1), pa.int32())
    _write_table(path, pa.table(columns))


def read_hits(path: Path, prefix: str, k: int) -> dict[str, bool]:
    """By the id of each question, whether one of the first ``k`` passages of a retriever has an answer.

    From what ``write_first_hits`` wrote; ``prefix`` is the retriever's. ValueError names a file that does not have it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = f"{prefix}first_hit"
    try:
        table = pq.read_table(path, columns=["question_id", column])
        ranks = table.column(column).to_pylist()
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ValueError(f"{path} holds no {column} ({error}); run 'realmops run evaluate --force' there") from None
    return {name: 0 <= rank < k for name, rank in zip(table.column("question_id").to_pylist(), ranks, strict=True)}


def _write_table(path: Path, table: Any) -> None:
    import pyarrow.parquet as pq

    with atomic_file(path) as stage:
        pq.write_table(table, stage)


def read_predictions(path: Path) -> list[Prediction]:
    """The rows that ``write_predictions`` wrote; ValueError names a file that is missing, damaged or older."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise ValueError(f"{path} does not exist; run 'realmops run evaluate' there first")
    try:
        return [Prediction(**_tupled(row)) for row in pq.read_table(path).to_pylist()]
    except (pa.ArrowException, TypeError) as error:
        raise ValueError(
            f"{path} holds no predictions of this version ({error}); run 'realmops run evaluate --force' there"
        ) from None


def _tupled(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def results_file(folder: Path) -> Path:
    """Where the predictions lie of a results folder, or of the folder of a run that holds one."""
    here = folder / PREDICTIONS
    return here if here.is_file() else folder / RESULTS / PREDICTIONS


def read_results(folder: Path) -> list[Prediction]:
    """The predictions of a results folder, or of the folder of a run that holds one."""
    return read_predictions(results_file(folder))
