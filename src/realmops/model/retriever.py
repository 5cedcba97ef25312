"""The neural knowledge retriever: f(x, z) = Embed_input(x) . Embed_doc(z) (paper, section 3.2).

Shape suffixes: B sequences, D encoder width, E embedding width, T wordpieces.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realmops.bert import Bert, Packed

HEADS = ("paper", "release", "normalised")


class Embedder(nn.Module):
    """One tower: a BERT and the projection of its [CLS] vector to E dimensions.

    ``head`` is ``paper`` (W times CLS), ``release`` (BERT pooler, dense with bias, LayerNorm, dropout) or
    ``normalised`` (W times CLS, LayerNorm, and a relevance divided by the square root of E).
    """

    def __init__(self, bert: Bert, embedding_width: int, head: str) -> None:
        super().__init__()
        assert head in HEADS, head
        width = bert.config.width
        self.bert, self.head = bert, head
        self.pooler = nn.Linear(width, width) if head == "release" else None
        self.projection = nn.Linear(width, embedding_width, bias=head == "release")
        eps = bert.config.layer_norm_eps
        self.norm = None if head == "paper" else nn.LayerNorm(embedding_width, eps=eps)

    def forward(self, batch: Packed) -> Tensor:
        """Embeddings B x E."""
        cls_BD: Tensor = self.bert.cls(batch)
        if self.pooler is not None:
            cls_BD = torch.tanh(self.pooler(cls_BD))
        embedding_BE: Tensor = self.projection(cls_BD)
        if self.norm is not None:
            embedding_BE = self.norm(embedding_BE)
        if self.head == "release":
            embedding_BE = F.dropout(embedding_BE, self.bert.config.dropout, self.training)
        return embedding_BE.float()

    @property
    def shift(self) -> nn.Parameter:
        """The last bias: with another one in its place, all embeddings are shifted by the same vector."""
        last = self.bert.layers[-1].output_norm if self.norm is None else self.norm
        assert isinstance(last, nn.LayerNorm)
        return last.bias


class Retriever(nn.Module):
    """Query tower and document tower; one and the same where ``share`` is set."""

    def __init__(self, query: Embedder, document: Embedder) -> None:
        super().__init__()
        self.query, self.document = query, document
        if not self.shared:
            # It adds one number to the relevance of all z for x, which p(z|x) does not see: its gradient would be
            # rounding, and Adam would make full steps of it.  It stays, since it is part of published embeddings.
            document.shift.requires_grad_(False)

    @property
    def shared(self) -> bool:
        """Whether queries and documents go through one tower."""
        return self.query is self.document

    @property
    def scale(self) -> float:
        """The factor of every inner product in f(x, z)."""
        embedding_width = self.query.projection.out_features
        return 1 / math.sqrt(embedding_width) if self.query.head == "normalised" else 1.0

    def relevance(self, query_BE: Tensor, document_BKE: Tensor) -> Tensor:
        """f(x, z) of each query with its own K documents, B x K."""
        return self.scale * torch.einsum("be,bke->bk", query_BE, document_BKE)


def initialise_projection(embedder: Embedder, generator: torch.Generator) -> None:
    """An orthogonal projection: inner products of embeddings start as those of the [CLS] vectors."""
    with torch.no_grad():
        nn.init.orthogonal_(embedder.projection.weight, generator=generator)
        if embedder.pooler is not None:
            nn.init.orthogonal_(embedder.pooler.weight, generator=generator)
