"""The fine-tuned model over a corpus, whatever finds its passages (``finetune.retriever``)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

from realmops.config import Finetune
from realmops.corpus.snapshot import Snapshot
from realmops.index.lexical import Bm25, Graph, Lexical, TfIdf, rank, titled_texts
from realmops.index.links import Links
from realmops.model.files import load_models
from realmops.stages.common import load_passages
from realmops.train.finetune import OpenQa, Ranker
from realmops.train.path import PathRetriever

DENSE = ("pretrain", "ict")


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
        retriever = Bm25(titled_texts(snapshot))
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
    return kind(retriever.to(device), reader.to(device), snapshot, passages, options, dtype, ranker)
