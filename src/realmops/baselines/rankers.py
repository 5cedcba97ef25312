"""Passage rankers that replace the dense retriever (``finetune.retriever``): lexical, by links, by paths."""

from functools import partial

from realmops.answering.retrieval import Ranker
from realmops.baselines.links import Graph, Links
from realmops.baselines.path import PathRetriever
from realmops.baselines.tfidf import TfIdf
from realmops.corpus.snapshot_reader import Snapshot
from realmops.search.bm25 import Bm25, Lexical, rank, titled_texts

DENSE = ("pretrain", "ict")  # values of finetune.retriever without a ranker


def ranker_of(
    retriever: str, snapshot: Snapshot, path: PathRetriever | None = None, remembered: int | None = None
) -> Ranker | None:
    """Build the ranker of a baseline retriever; return None for a dense retriever.

    Args:
        retriever: value of ``finetune.retriever``.
        snapshot: the corpus.
        path: trained retriever, for ``finetune.retriever: path``.
        remembered: cache size of the ranker.
    """
    if retriever in DENSE:
        return None
    if path is not None:
        return Ranker(path.rank, remembered, path.save)
    lexical: Lexical
    if retriever == "tfidf":
        lexical = TfIdf(titled_texts(snapshot))
    else:
        bm25 = Bm25.of(snapshot)
        lexical = Graph(bm25, Links(snapshot)) if retriever == "graph" else bm25
    return Ranker(partial(rank, lexical), remembered)
