"""The fine-tuned model over a corpus, whatever finds its passages."""

from __future__ import annotations

from pathlib import Path

import torch

from realmops.baselines.path import PathRetriever
from realmops.baselines.rankers import ranker_of
from realmops.bert import freeze_products
from realmops.config import Finetune
from realmops.corpus.snapshot import Snapshot
from realmops.index.embeddings import load_passages
from realmops.index.lexical import Bm25
from realmops.model.files import load_models
from realmops.train.finetune import OpenQa


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
    for model in (retriever, reader):
        freeze_products(model, dtype)
    path = PathRetriever.load(folder, snapshot, options, device, dtype) if options.retriever == "path" else None
    ranker = ranker_of(options.retriever, snapshot, path)
    passages = load_passages(folder, snapshot, device, retriever.vectors) if ranker is None else None
    words = Bm25.of(snapshot) if ranker is None and retriever.mixture.lexical else None
    return kind(retriever.to(device), reader.to(device), snapshot, passages, options, dtype, ranker, words)
