"""What finds passages where the retriever is none of ours (``finetune.retriever``): words, links, paths."""

from __future__ import annotations

from functools import cache

import numpy as np

from realmops.baselines.links import Graph, Links
from realmops.baselines.path import PathRetriever
from realmops.baselines.tfidf import TfIdf
from realmops.corpus.snapshot import Snapshot
from realmops.index.lexical import Bm25, Lexical, rank, titled_texts
from realmops.train.finetune import Ranker

DENSE = ("pretrain", "ict")
BY_WORDS = ("bm25", "graph", "path")  # with the BM25 index beside the snapshot


def ranker_of(retriever: str, snapshot: Snapshot, path: PathRetriever | None = None) -> Ranker | None:
    """What finds passages by words or links; None for a dense retriever. Remembers what it was asked.

    ``path`` is the trained one, for ``finetune.retriever: path``.
    """
    if retriever in DENSE:
        return None
    if path is not None:
        return cache(lambda question, k: path.rank([question], k)[0])
    words: Lexical
    if retriever == "tfidf":
        words = TfIdf(titled_texts(snapshot))
    else:
        bm25 = Bm25.of(snapshot)
        words = Graph(bm25, Links(snapshot)) if retriever == "graph" else bm25

    @cache
    def ranker(question: str, k: int) -> np.ndarray:
        found: np.ndarray = rank(words, [question], k)[0]
        return found

    return ranker
