"""Passages and queries to embeddings, for the index and for search.

Shape suffixes: P passages, Q queries, E embedding width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from realmops.bert import Packed, autocast
from realmops.corpus.snapshot import Snapshot
from realmops.model.joins import SpecialTokens, join_document
from realmops.model.retriever import Embedder

BATCH_WORDPIECES = 4096


@torch.no_grad()
def embed(
    embedder: Embedder,
    sequences: Sequence[tuple[np.ndarray, np.ndarray]],
    dtype: torch.dtype,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Embeddings N x E (fp32, on the CPU) of sequences given as wordpieces and segments.

    Batches are formed by length with at most 4,096 wordpieces, from the sequences alone, so that equal
    calls give equal bytes on one machine.
    """
    was_training = embedder.training
    embedder.eval()
    device = embedder.projection.weight.device
    out = torch.empty(len(sequences), embedder.projection.out_features)
    order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i][0]), i))
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and (end + 1 - start) * len(sequences[order[end]][0]) <= BATCH_WORDPIECES:
            end += 1
        rows = order[start:end]
        batch = Packed([sequences[i][0] for i in rows], [sequences[i][1] for i in rows])
        with autocast(device, dtype):
            out[torch.tensor(rows)] = embedder(batch).to("cpu")
        if progress is not None:
            progress(len(rows))
        start = end
    embedder.train(was_training)
    return out


def document_sequences(snapshot: Snapshot, rows: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """join(title, body) of passages, of at most the snapshot's block length."""
    special, limit = SpecialTokens.of(snapshot.tokenizer), snapshot.block_wordpieces
    return [join_document(snapshot.title_tokens(i), snapshot.body(i), special, limit) for i in rows]


def query_sequences(queries: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Joined queries with their segments, which are all 0."""
    return [(tokens, np.zeros(len(tokens), dtype=np.int64)) for tokens in queries]
