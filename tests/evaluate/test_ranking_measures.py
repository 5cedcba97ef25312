"""Measures over relevance judgements, against figures computed by hand, and TREC's files."""

from math import log2
from pathlib import Path

import ir_measures
import pytest

from realmops.evaluate.ranking_measures import measure_run, rank_documents, write_qrels, write_run

QRELS = {"q2": {"a": 2, "b": 1, "c": 0}, "q1": {"d": 1}, "q3": {"a": 1}}
RUN = {"q1": ["a", "b", "d"], "q2": ["c", "b", "a"]}


def test_measures_are_those_of_the_field_in_the_order_of_the_judgements() -> None:
    measured = measure_run(QRELS, RUN)
    gain, best = 1 / log2(3) + 2 / log2(4), 2 + 1 / log2(3)
    assert measured["ndcg_at_10"] == pytest.approx([gain / best, 1 / log2(4), 0])
    assert measured["mrr_at_10"] == pytest.approx([1 / 2, 1 / 3, 0])
    assert measured["map_at_100"] == pytest.approx([(1 / 2 + 2 / 3) / 2, 1 / 3, 0])
    assert measured["recall_at_1_judged"].tolist() == [0, 0, 0]
    assert measured["recall_at_5_judged"].tolist() == [1, 1, 0]


def test_a_document_has_the_rank_of_its_best_passage() -> None:
    document_of = ["x", "x", "y", "z"] + [f"d{n}" for n in range(200)]
    assert rank_documents([2, 1, 0, -1, 3], document_of) == ["y", "x", "z"]
    assert len(rank_documents(range(204), document_of)) == 100


def test_a_ranking_keeps_its_order_in_the_file_of_a_run(tmp_path: Path) -> None:
    """trec_eval ranks by score, and compares ids where scores are equal."""
    documents = [f"d {n}" for n in (7, 3, *range(100, 196))]
    qrels = {"what is it": dict.fromkeys(documents[::7], 1)}
    write_run(tmp_path / "run", {"what is it": documents})
    write_qrels(tmp_path / "qrels", qrels)
    run, judged = ir_measures.read_trec_run(f"{tmp_path}/run"), ir_measures.read_trec_qrels(f"{tmp_path}/qrels")
    again = ir_measures.calc_aggregate([ir_measures.AP @ 100, ir_measures.nDCG @ 10], judged, run)
    here = measure_run(qrels, {"what is it": documents})
    assert again[ir_measures.AP @ 100] == here["map_at_100"][0]
    assert again[ir_measures.nDCG @ 10] == here["ndcg_at_10"][0]
    assert (tmp_path / "run").read_text().startswith("what%20is%20it Q0 d%207 1 1 realmops\n")
