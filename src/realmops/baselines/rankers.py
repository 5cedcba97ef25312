"""What finds passages where the retriever is none of ours (``finetune.retriever``): words, links, paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from realmops.answering.retrieval import Ranker
from realmops.baselines.links import Graph, Links
from realmops.baselines.path import PathRetriever
from realmops.baselines.tfidf import TfIdf
from realmops.config import Finetune
from realmops.corpus.snapshot import Snapshot
from realmops.index.lexical import Bm25, Lexical, Rows, rank, titled_texts

DENSE = ("pretrain", "ict")
BY_WORDS = ("bm25", "graph", "path")  # with the BM25 index beside the snapshot


class Ranking(Ranker):
    """Ranks passages, and remembers what it was asked; ``remembered`` questions at most, without it all.

    A training asks the same ones again and again, and anything may be asked of a server.
    """

    def __init__(
        self,
        rows: Callable[[Sequence[str], int], Rows],
        remembered: int | None,
        learned: PathRetriever | None = None,
    ) -> None:
        self._rank = lru_cache(remembered)(lambda question, k: rows([question], k)[0])
        self._learned = learned

    def __call__(self, question: str, k: int) -> np.ndarray:
        """Of one question."""
        found: np.ndarray = self._rank(question, k)
        return found

    def save(self, folder: Path) -> None:
        """The scorer of paths; words and links are made of the snapshot."""
        if self._learned is not None:
            self._learned.save(folder)


def ranker_of(
    retriever: str, snapshot: Snapshot, path: PathRetriever | None = None, remembered: int | None = None
) -> Ranking | None:
    """What finds passages by words or links; None for a dense retriever.

    ``path`` is the trained one, for ``finetune.retriever: path``.
    """
    if retriever in DENSE:
        return None
    if path is not None:
        return Ranking(path.rank, remembered, path)
    words: Lexical
    if retriever == "tfidf":
        words = TfIdf(titled_texts(snapshot))
    else:
        bm25 = Bm25.of(snapshot)
        words = Graph(bm25, Links(snapshot)) if retriever == "graph" else bm25
    return Ranking(partial(rank, words), remembered)


def open_ranker(
    folder: Path, options: Finetune, snapshot: Snapshot, device: torch.device, dtype: torch.dtype, remembered: int
) -> Ranking | None:
    """The ranker of a fine-tuned model; None where its retriever has embeddings."""
    path = PathRetriever.load(folder, snapshot, options, device, dtype) if options.retriever == "path" else None
    return ranker_of(options.retriever, snapshot, path, remembered)
