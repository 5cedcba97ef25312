"""Measures of rankings over relevance judgements (qrels), by ir-measures, and files of both in TREC's formats.

A document has the rank of its best passage. A measure is 0 for a query without a ranking or a relevant document.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from realmops.artifacts import make_folder, write_bytes
from realmops.evaluate.exact_match import bootstrap_interval
from realmops.evaluate.recall import RECALL_AT
from realmops.questions.question_sets import Question

Qrels = Mapping[str, Mapping[str, int]]  # grade by document, by query
Run = Mapping[str, Sequence[str]]  # documents of each query, best first
MEASURES = {  # names of ir-measures by metric
    "ndcg_at_10": "nDCG@10",
    "mrr_at_10": "RR@10",
    "map_at_100": "AP@100",
    **{f"recall_at_{k}_judged": f"R@{k}" for k in RECALL_AT},
}
TREC = "trec"  # folder of these files in results
DEPTH = 100  # documents in a ranking
DEEPEST = 1000  # passages that are ranked to find them


def measure_run(qrels: Qrels, run: Run) -> dict[str, NDArray[np.float64]]:
    """Return ``MEASURES`` of a run by metric: one value for each query of ``qrels``, in their order, float64 [Q]."""
    import ir_measures

    name_of = {ir_measures.parse_measure(measure): name for name, measure in MEASURES.items()}
    row_of = {query: row for row, query in enumerate(qrels)}
    values = {name: np.zeros(len(qrels)) for name in MEASURES}
    scored = {query: {name: 1 / rank for rank, name in enumerate(names, 1)} for query, names in run.items()}
    for metric in ir_measures.iter_calc(list(name_of), qrels, scored):
        values[name_of[metric.measure]][row_of[metric.query_id]] = metric.value
    return values


def ranking_metrics(
    values: Mapping[str, NDArray[np.float64]], *, prefix: str, seed: int, resamples: int
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, values_Q in values.items():
        metrics |= bootstrap_interval(values_Q, seed=seed, resamples=resamples).figures(f"{prefix}{name}")
    return metrics


def passage_depth(passages_of_documents: NDArray[np.int64]) -> int:
    """Return how many passages to rank for ``DEPTH`` documents, at most ``DEEPEST``; sizes are largest first."""
    return int(min(passages_of_documents[: DEPTH - 1].sum() + 1, DEEPEST))


def rank_documents(passages: Iterable[int], document_of: Sequence[str]) -> list[str]:
    """Return the first ``DEPTH`` documents of a passage ranking, each at its best passage; -1 is no passage."""
    return list(dict.fromkeys(document_of[passage] for passage in passages if passage >= 0))[:DEPTH]


def write_trec(folder: Path, questions: Iterable[Question], qrels: Qrels, runs: Mapping[str, Run]) -> None:
    """Write queries.tsv, qrels.txt if there are judgements, and ``{prefix}run.txt`` for each prefix of metrics."""
    make_folder(folder)
    lines = (f"{_field(question.id)}\t{' '.join(question.question.split())}\n" for question in questions)
    write_bytes(folder / "queries.tsv", "".join(lines).encode())
    if qrels:
        write_qrels(folder / "qrels.txt", qrels)
    for prefix, run in runs.items():
        write_run(folder / f"{prefix}run.txt", run)


def write_run(path: Path, run: Run) -> None:
    """Write a run in TREC's format: query, Q0, document, rank, score, tag. The score is 1 / rank."""
    lines = (
        f"{_field(query)} Q0 {_field(document)} {rank} {1 / rank:.6g} realmops\n"
        for query, documents in run.items()
        for rank, document in enumerate(documents, 1)
    )
    write_bytes(path, "".join(lines).encode())


def write_qrels(path: Path, qrels: Qrels) -> None:
    """Write judgements in TREC's format: query, 0, document, grade."""
    lines = (
        f"{_field(query)} 0 {_field(document)} {grade}\n"
        for query, grades in qrels.items()
        for document, grade in grades.items()
    )
    write_bytes(path, "".join(lines).encode())


def _field(text: str) -> str:
    return re.sub(r"\s", lambda blank: quote(blank[0]), text)
