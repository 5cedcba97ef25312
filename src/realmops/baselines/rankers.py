"""Passage rankers that replace the dense retriever (``finetune.retriever``): lexical, by links, by paths."""

from functools import partial
from pathlib import Path

import torch

from realmops.answering.retrieval import Ranker
from realmops.baselines.links import LinkedBm25, PassageLinks
from realmops.baselines.path import PathRetriever
from realmops.baselines.tfidf import TfIdf
from realmops.corpus.snapshot_reader import Snapshot
from realmops.options import Finetune
from realmops.search.bm25 import Bm25, LexicalRetriever, rank, titled_texts

DENSE_RETRIEVERS = ("pretrain", "ict")  # values of finetune.retriever without a ranker
QUESTIONS_IN_MEMORY = 1024  # size of the cache of passages by words or links


def build_ranker(
    retriever: str, snapshot: Snapshot, path: PathRetriever | None = None, remembered: int | None = None
) -> Ranker | None:
    """Build the ranker of a baseline retriever, of which ``path`` is trained; return None for a dense retriever."""
    if retriever in DENSE_RETRIEVERS:
        return None
    if path is not None:
        return Ranker(path.rank, remembered, path.save)
    lexical: LexicalRetriever
    if retriever == "tfidf":
        lexical = TfIdf(titled_texts(snapshot))
    else:
        bm25 = Bm25.of(snapshot)
        lexical = LinkedBm25(bm25, PassageLinks(snapshot)) if retriever == "graph" else bm25
    return Ranker(partial(rank, lexical), remembered)


def open_ranker(
    folder: Path, snapshot: Snapshot, options: Finetune, device: torch.device, dtype: torch.dtype
) -> Ranker | None:
    path = PathRetriever.load(folder, snapshot, options, device, dtype) if options.retriever == "path" else None
    return build_ranker(options.retriever, snapshot, path, QUESTIONS_IN_MEMORY)
