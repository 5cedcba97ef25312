"""What finds passages where the retriever is none of ours (``finetune.retriever``): words, links, paths."""

from functools import partial

from realmops.answering.retrieval import Ranker
from realmops.baselines.links import Graph, Links
from realmops.baselines.path import PathRetriever
from realmops.baselines.tfidf import TfIdf
from realmops.corpus.snapshot_reader import Snapshot
from realmops.search.bm25 import Bm25, Lexical, rank, titled_texts

DENSE = ("pretrain", "ict")


def ranker_of(
    retriever: str, snapshot: Snapshot, path: PathRetriever | None = None, remembered: int | None = None
) -> Ranker | None:
    """What finds passages by words or links; None for a dense retriever.

    ``path`` is the trained one, for ``finetune.retriever: path``.
    """
    if retriever in DENSE:
        return None
    if path is not None:
        return Ranker(path.rank, remembered, path.save)
    words: Lexical
    if retriever == "tfidf":
        words = TfIdf(titled_texts(snapshot))
    else:
        bm25 = Bm25.of(snapshot)
        words = Graph(bm25, Links(snapshot)) if retriever == "graph" else bm25
    return Ranker(partial(rank, words), remembered)
