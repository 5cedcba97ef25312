"""The predictions' file, and what a question failed at."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_project import cli
from test_exact_match import QUESTIONS

from realmops.answering.answer import Answer, Span
from realmops.evaluate.exact_match import score_predictions
from realmops.evaluate.predictions import (
    Prediction,
    build_predictions,
    failure_shares,
    read_predictions,
    write_first_hits,
    write_predictions,
)

ASKED = [*QUESTIONS, replace(QUESTIONS[3], id="q5")]
PREDICTION = Prediction(
    question_id="q1", question="Where was Ada Vell born?", prediction="Tor Hollow", answers=("Tor Hollow",),
    em=True, f1=1.0, passage_ids=("p7", "p2"), titles=("Ada Vell", "Tor Hollow"), p_z=(0.75, 0.25),
    evidence="Vell came from Tor Hollow in the north.", evidence_rank=0, char_start=15, char_end=25, span_score=1.5,
    passage_spans=("Tor Hollow", None), passage_scores=(1.5, None), gold_span="Tor Hollow", gold_score=1.5,
    first_hit=0, failed_at="correct", confidence=0.75, abstained=False, page=None, answer_rule="en", is_generated=False,
    ndcg_at_10=None,
)  # fmt: skip


def test_predictions_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "predictions.parquet"
    nothing = replace(PREDICTION, prediction="", em=False, f1=0.25, char_start=0, char_end=0)
    generated = replace(PREDICTION, em=None, f1=None, failed_at=None, is_generated=True)
    write_predictions(path, [PREDICTION, nothing, generated])
    assert read_predictions(path) == [PREDICTION, nothing, generated]
    assert [row.is_generated for row in read_predictions(path)] == [False, False, True]
    assert [file.name for file in tmp_path.iterdir()] == ["predictions.parquet"]


def test_first_hits_are_a_column_for_each_retriever(tmp_path: Path) -> None:
    ranks = {"": np.array([0, 3, 100, 99]), "bm25_": np.array([100, 100, 1, 0])}
    write_first_hits(tmp_path / "hits.parquet", QUESTIONS, ranks, 100)
    assert pq.read_table(tmp_path / "hits.parquet").to_pydict() == {
        "question_id": ["q1", "q2", "q3", "q4"],
        "first_hit": [0, 3, -1, 99],
        "bm25_first_hit": [-1, -1, 1, 0],
    }


def test_a_prediction_is_a_span_of_its_evidence(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="or Hollow"):
        write_predictions(tmp_path / "p.parquet", [replace(PREDICTION, char_start=16)])
    assert not list(tmp_path.iterdir())


def test_predictions_of_another_version_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question_id": ["q0"], "em": [True]}), tmp_path / "predictions.parquet")
    result = cli("compare", tmp_path, tmp_path)
    assert result.exit_code == 2
    assert "has no predictions in the format of this version" in result.stderr
    (tmp_path / "predictions.parquet").write_bytes(b"PAR1")
    assert "has no predictions in the format of this version" in cli("explain", "--root", tmp_path).stderr


def test_failures_are_those_of_the_passages_read() -> None:
    """Of ten ranked passages five are read: the fifth is, the sixth is not; the eleventh is no hit at all."""
    gold = Span("Moors", 0, (0, 5), 1.0)
    answers = [
        Answer(q.question, None, ranked=[*range(10)], best_gold=gold if n == 1 else None) for n, q in enumerate(ASKED)
    ]
    score = score_predictions(ASKED, ["", "", "", "", "Tor Hollow"], seed=0)
    first_hit_Q, in_corpus_Q = np.array([0, 4, 5, 10, 0]), np.array([True, True, True, False, True])
    snapshot: Any = SimpleNamespace()
    rows = build_predictions(snapshot, ASKED, answers, score, first_hit_Q, in_corpus_Q, 5, None)
    assert [row.failed_at for row in rows] == ["too_long", "reader", "not_retrieved", "not_in_corpus", "correct"]
    assert [row.first_hit for row in rows] == [0, 4, 5, -1, 0]
    shares = failure_shares(["correct", "reader", "reader", "too_long"])
    expected = {"not_in_corpus": 0, "not_retrieved": 0, "too_long": 0.25, "reader": 0.5}
    assert shares == {f"failed_at_{name}": share for name, share in expected.items()}
