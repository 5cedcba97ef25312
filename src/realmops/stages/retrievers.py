"""The fine-tuned model over a corpus, whatever finds its passages (``finetune.retriever``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from realmops.config import Finetune
from realmops.corpus.questions import Question
from realmops.corpus.snapshot import Snapshot
from realmops.evaluate.openqa import em_rules, is_right
from realmops.index.hybrid import fit_mixture
from realmops.index.lexical import Bm25, Graph, Lexical, TfIdf, rank, titled_texts
from realmops.index.links import Links
from realmops.model.files import load_models
from realmops.model.retriever import Mixture
from realmops.stages.common import load_passages
from realmops.train.finetune import Answer, OpenQa, Ranker
from realmops.train.path import PathRetriever

DENSE = ("pretrain", "ict")
READING_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
FITTED = 50  # passages of either kind for each query, by which the weights of a hybrid are fitted
BY_WORDS = ("bm25", "graph", "path")  # with the BM25 index beside the snapshot


def ranker_of(options: Finetune, snapshot: Snapshot, path: PathRetriever | None = None) -> Ranker | None:
    """What finds passages by words or links; None for a dense retriever. Remembers what it was asked.

    ``path`` is the trained one, for ``finetune.retriever: path``.
    """
    if options.retriever in DENSE:
        return None
    if path is not None:
        return cache(lambda question, k: path.rank([question], k)[0])
    retriever: Lexical
    if options.retriever == "tfidf":
        retriever = TfIdf(titled_texts(snapshot))
    else:
        retriever = Bm25.of(snapshot)
        if options.retriever == "graph":
            retriever = Graph(retriever, Links(snapshot))

    @cache
    def ranker(question: str, k: int) -> np.ndarray:
        found: np.ndarray = rank(retriever, [question], k)[0]
        return found

    return ranker


def open_tuned(
    folder: Path,
    options: Finetune,
    snapshot: Snapshot,
    device: torch.device,
    dtype: torch.dtype,
    kind: type[OpenQa] = OpenQa,
) -> OpenQa:
    """The model that the stage ``finetune`` left, with its index or its ranker."""
    retriever, reader = load_models(folder, snapshot.vocabulary_hash)
    path = PathRetriever.load(folder, snapshot, options, device, dtype) if options.retriever == "path" else None
    ranker = ranker_of(options, snapshot, path)
    passages = load_passages(folder, snapshot, device) if ranker is None else None
    words = Bm25.of(snapshot) if ranker is None and retriever.mixture.lexical else None
    return kind(retriever.to(device), reader.to(device), snapshot, passages, options, dtype, ranker, words)


def fit_to_questions(model: OpenQa, questions: Sequence[Question]) -> Mixture:
    """The weights of words and embeddings under which questions best find the passages that hold an answer.

    Where no question can tell, the weights stay as they are.
    """
    start = model.retriever.mixture
    found = model.find([question.question for question in questions], FITTED, FITTED)
    correct = [model.is_correct(q, row) for q, row in zip(questions, found.id_QK.tolist(), strict=True)]
    there_QK = (found.id_QK >= 0).numpy() & ~model.sources.among(questions, found.id_QK.numpy())
    fitted = fit_mixture(
        found.dense_QK, found.words_QK, torch.from_numpy(there_QK), torch.from_numpy(np.stack(correct) & there_QK)
    )
    return start if fitted is None else replace(fitted, reading=start.reading)


def fit_reading(model: OpenQa, questions: Sequence[Question], answers: Sequence[Answer]) -> tuple[float, list[Answer]]:
    """The weight of f(x, z) beside a span's score that has the highest exact match, and the answers that it gives.

    Of equal ones the nearest to the present weight is taken. The best span of a passage is the same under any weight,
    so nothing has to be read again.
    """
    before = model.retriever.mixture.reading
    with torch.no_grad():
        relevance = [model.evidence([q], model.options.reader_candidates)[0][0].tolist() for q in questions]

    def chosen(weight: float) -> list[Answer]:
        return [_reweighted(a, f, weight - before) for a, f in zip(answers, relevance, strict=True)]

    def right(weight: float) -> float:
        pairs = zip(chosen(weight), questions, strict=True)
        return sum(is_right(answer.text, question, em_rules([question])[0]) for answer, question in pairs)

    best = max(sorted(READING_WEIGHTS, key=lambda w: abs(w - before)), key=right)
    return best, chosen(best)


def _reweighted(answer: Answer, relevance: Sequence[float], change: float) -> Answer:
    spans = [
        None if span is None else replace(span, score=span.score + change * f)
        for span, f in zip(answer.best_of_passage, relevance, strict=False)
    ]
    there = [span for span in spans if span is not None]
    best = max(there, key=lambda span: span.score, default=None)
    gold = answer.best_gold
    if gold is not None:
        gold = replace(gold, score=gold.score + change * relevance[answer.passages.index(gold.passage)])
    return replace(answer, best=best, best_of_passage=spans, best_gold=gold)
