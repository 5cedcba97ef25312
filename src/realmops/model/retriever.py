"""The neural knowledge retriever: f(x, z) = Embed_input(x) . Embed_doc(z) (paper, section 3.2).

A tower computes embeddings: an :class:`Embedder` with an encoder, as in the paper, or a :class:`BagOfWords`.

A passage has one vector, as in the paper, or M of them: f(x, z) is then the maximum of their inner products (Luan et
al. 2021, "Sparse, Dense, and Attentional Representations for Text Retrieval"). Vector m is the average of two means:
of the whole passage, and of the m-th of M equal parts.

Shape suffixes: B sequences, D encoder width, E embedding width, M vectors of a passage, X = M E, N passages, Q queries,
T wordpieces, V vocabulary.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realmops.devices import to_device
from realmops.model.encoder import Encoder
from realmops.model.packed import PackedBatch
from realmops.model.transformers_models import BUILD_LOCK

ACTIVATIONS: dict[str, type[nn.Module]] = {  # activations of dense layers, by their names in sentence-transformers
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.SiLU": nn.SiLU,
}
TEMPERATURE = 0.05  # f(x, z) = cosine / temperature, for the head cosine
_MIN_NORM = 1e-6  # shorter vectors are not normalised to length 1


@dataclass(frozen=True)
class FusionWeights:
    """Weights of a hybrid f(x, z) = dense * scaled inner product + lexical * (BM25 / highest BM25).

    ``reading`` is the weight of f(x, z) relative to the reader's span scores.
    """

    dense: float
    lexical: float
    reading: float = 1.0

    def combine(self, dense: Tensor, bm25: Tensor) -> Tensor:
        return self.dense * dense + self.lexical * bm25


DENSE_ONLY = FusionWeights(1.0, 0.0)  # the paper's f(x, z)
DEFAULT_FUSION_WEIGHTS = FusionWeights(1.0, 8.0)  # before fitting: the optimum on real questions for cosine / 0.05


class Tower(nn.Module):
    """Base class of query and document towers, which compute embeddings B x E of sequences.

    ``width`` is E. Called with ``vectors=M``, a tower computes M vectors per sequence, B x M E. With the head
    ``cosine``, embeddings have length 1 and f(x, z) is their inner product divided by ``TEMPERATURE``.
    """

    def __init__(self, head: str, width: int) -> None:
        super().__init__()
        self.head, self.width = head, width

    @property
    def description(self) -> str:
        """For logs and reports, with the options that ``auto`` resolved to."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def scale(self) -> float:
        """Factor of the inner products in f(x, z)."""
        if self.head == "cosine":
            return 1 / TEMPERATURE
        return 1 / math.sqrt(self.width) if self.head == "normalised" else 1.0

    @property
    def output_biases(self) -> list[nn.Parameter]:
        return []


class Dense(nn.Module):
    """Dense layer of a sentence encoder, after its pooling; activations are named as in sentence-transformers."""

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: str) -> None:
        super().__init__()
        self.shape = {"inputs": inputs, "outputs": outputs, "bias": bias, "activation": activation}
        self.outputs, self.activation = outputs, ACTIVATIONS[activation]()
        self.linear = nn.Linear(inputs, outputs, bias=bias)

    def forward(self, x_BD: Tensor) -> Tensor:
        out: Tensor = self.activation(self.linear(x_BD))
        return out


class Embedder(Tower):
    """Tower of an encoder, a pooling of its hidden states, and a projection W to E dimensions, by default the paper's.

    The head ``paper`` is W times the pooled vector; ``release`` BERT's pooler, dense with bias, LayerNorm, dropout;
    ``normalised`` W, LayerNorm, and f(x, z) divided by the square root of E; ``cosine`` W, then length 1. The pooling
    ``mean`` is over all wordpieces, with [CLS] and [SEP]. The projection ``identity`` has no W, ``first`` keeps the
    first E dimensions instead. ``dense`` are a sentence encoder's layers before the projection.
    """

    def __init__(
        self,
        encoder: Encoder,
        embedding_width: int,
        head: str,
        *,
        pooling: str = "cls",
        projection: str = "orthogonal",
        segments: str = "two",
        dense: Sequence[Dense] = (),
    ) -> None:
        super().__init__(head, embedding_width)
        self.dense = nn.ModuleList(dense)
        self.pooled_width = width = dense[-1].outputs if dense else encoder.width
        assert projection != "identity" or embedding_width == width, (embedding_width, width)
        self.bert, self.pooling, self.start, self.segments = encoder, pooling, projection, segments
        self.pooler = nn.Linear(width, width) if head == "release" else None
        self.projection = (
            None if projection in ("identity", "first") else nn.Linear(width, embedding_width, bias=head == "release")
        )
        eps = encoder.layer_norm_eps
        self.norm = nn.LayerNorm(embedding_width, eps=eps) if head in ("release", "normalised") else None

    @property
    def encoder(self) -> Encoder:
        return self.bert

    @property
    def output_biases(self) -> list[nn.Parameter]:
        """Last biases before the embedding; none with the head ``cosine``, which normalises after them."""
        if self.head == "cosine":
            return []
        if self.norm is not None:
            return [self.norm.bias]
        last = [] if self.projection is None or self.projection.bias is None else [self.projection.bias]
        return [*self.bert.output_biases, *last]

    @property
    def description(self) -> str:
        dense = "".join(f"{layer.outputs} -> " for layer in self.dense if isinstance(layer, Dense))
        widths = f"{self.bert.width} -> {dense}{self.width} by {self.start}"
        return f"{self.bert.description}, pooling {self.pooling}, {widths}, head {self.head}, segments {self.segments}"

    def pool(self, batch: PackedBatch, vectors: int = 1) -> Tensor:
        """Compute pooled hidden states of each sequence, (B M) x D; M > 1 requires the pooling ``mean``."""
        if self.segments == "one":
            batch = batch.with_single_segment()
        hidden_TD: Tensor = self.bert(batch)
        if self.pooling != "mean":
            assert vectors == 1, vectors
            return hidden_TD.index_select(0, batch.first_B + (self.pooling == "last") * (batch.lengths_B - 1))
        if hidden_TD.is_cuda or vectors > 1:
            return mean_pool(hidden_TD.float(), batch.lengths, vectors)
        return torch.stack([x_TD.mean(0) for x_TD in torch.split(hidden_TD.float(), batch.lengths.tolist())])

    def with_encoder(self, encoder: Encoder) -> Self:
        """Return a copy over another encoder, which shares all other parameters."""
        other = copy.copy(self)
        other._modules = {**self._modules, "bert": encoder}
        return other

    def pooling_weights(self, length: int, vectors: int) -> Tensor:
        """Return the pooling weight of each wordpiece of a sequence, M x T."""
        if self.pooling == "mean":
            return _mean_weights(length, vectors)
        share_MT = torch.zeros(vectors, length)
        share_MT[:, 0 if self.pooling == "cls" else -1] = 1.0
        return share_MT

    def forward(self, batch: PackedBatch, vectors: int = 1) -> Tensor:
        return self.project(self.pool(batch, vectors)).view(-1, vectors * self.width)

    def project(self, embedding_BE: Tensor) -> Tensor:
        if embedding_BE.dtype == torch.float16:
            embedding_BE = embedding_BE.float()
        for layer in self.dense:
            embedding_BE = layer(embedding_BE)
        if self.start == "first":
            embedding_BE = embedding_BE[:, : self.width]
        if self.pooler is not None:
            embedding_BE = torch.tanh(self.pooler(embedding_BE))
        if self.projection is not None:
            embedding_BE = self.projection(embedding_BE)
        if self.norm is not None:
            embedding_BE = self.norm(embedding_BE)
        if self.head == "release":
            embedding_BE = F.dropout(embedding_BE, self.bert.dropout, self.training)
        return _unit(embedding_BE) if self.head == "cosine" else embedding_BE.float()


class BagOfWords(Tower):
    """Tower without an encoder: the normalised sum of the sequence's word vectors, whatever their order.

    Wordpieces whose ``counts_V`` is 0, such as [CLS] and [MASK], contribute nothing. A sequence with no other
    wordpieces has the zero vector, so that f(x, z) = 0 for every x.
    """

    counts_V: Tensor

    def __init__(self, vocabulary: int, embedding_width: int) -> None:
        super().__init__("cosine", embedding_width)
        self.word = nn.Embedding(vocabulary, embedding_width)
        self.register_buffer("counts_V", torch.ones(vocabulary))

    @property
    def description(self) -> str:
        return f"a bag of {self.word.num_embeddings} word vectors of width {self.width}"

    def forward(self, batch: PackedBatch, vectors: int = 1) -> Tensor:
        assert vectors == 1, vectors
        batch.to(self.device)
        counts_T = self.counts_V[batch.tokens_T]
        sum_BE = F.embedding_bag(
            batch.tokens_T, self.word.weight, batch.first_B, mode="sum", per_sample_weights=counts_T
        )
        return _unit(sum_BE)


def _mean_weights(length: int, vectors: int) -> Tensor:
    """Return the weight of each wordpiece in each vector, M x T; an empty part counts as the whole sequence."""
    share_MT = torch.full((vectors, length), 1 / length)
    bounds = [length * part // vectors for part in range(vectors + 1)]
    for share_T, (first, end) in zip(share_MT, pairwise(bounds), strict=True):
        if first < end:
            share_T /= 2
            share_T[first:end] += 0.5 / (end - first)
    return share_MT


def mean_pool(hidden_TD: Tensor, lengths: np.ndarray, vectors: int) -> Tensor:
    """Compute the means of :func:`_mean_weights` of all sequences at once, (B M) x D; rounding differs."""
    bounds_BM = lengths[:, None] * np.arange(vectors + 1) // vectors
    part_BM = torch.from_numpy(np.diff(bounds_BM))
    part_BM, length_B = to_device(hidden_TD.device, part_BM, torch.from_numpy(lengths))
    sum_BMD = torch.segment_reduce(hidden_TD, "sum", lengths=part_BM.flatten(), unsafe=True)
    sum_BMD = sum_BMD.view(len(lengths), vectors, -1)
    mean_BMD = sum_BMD.sum(1, keepdim=True) / length_B[:, None, None]
    if vectors > 1:
        part_BMD = sum_BMD / part_BM.clamp(min=1)[:, :, None]
        mean_BMD = torch.where((part_BM > 0)[:, :, None], (mean_BMD + part_BMD) / 2, mean_BMD)
    return mean_BMD.flatten(0, 1)


def _unit(x_BE: Tensor) -> Tensor:
    """Normalise rows to length 1; a row of almost 0 stays near 0 and has a bounded gradient."""
    return F.normalize(x_BE.float(), dim=-1, eps=_MIN_NORM)


class Retriever(nn.Module):
    """Query tower and document tower, one module if they share their parameters; ``vectors`` is M of a passage."""

    def __init__(self, query: Tower, document: Tower, vectors: int = 1) -> None:
        super().__init__()
        self.query, self.document, self.vectors = query, document, vectors
        self.mixture = DENSE_ONLY
        if not self.shared:
            # They add a constant to f(x, z) of all z, which cancels in p(z|x): their gradient would be rounding error,
            # which Adam scales to full steps. They are frozen, not removed, since published embeddings include them.
            for bias in document.output_biases:
                bias.requires_grad_(False)

    @property
    def shared(self) -> bool:
        return self.query is self.document

    @property
    def scale(self) -> float:
        return self.query.scale

    @property
    def width(self) -> int:
        return self.vectors * self.document.width

    def documents(self, batch: PackedBatch) -> Tensor:
        return cast(Tensor, self.document(batch, self.vectors))

    def relevance(self, query_BE: Tensor, document_BKX: Tensor) -> Tensor:
        """Compute f(x, z) of each query with its own K documents, B x K."""
        if self.vectors == 1:
            return self.scale * torch.einsum("be,bke->bk", query_BE, document_BKX)
        document_BKME = document_BKX.view(*document_BKX.shape[:2], self.vectors, -1)
        return self.scale * torch.einsum("be,bkme->bkm", query_BE, document_BKME).amax(-1)

    def scores(self, query_QE: Tensor, document_NX: Tensor) -> Tensor:
        """Compute f(x, z) of each query with each document, Q x N."""
        product_QNM = self.scale * query_QE @ document_NX.reshape(-1, query_QE.shape[1]).T
        return product_QNM if self.vectors == 1 else product_QNM.view(len(query_QE), -1, self.vectors).amax(-1)


def initialise_projection(embedder: Embedder, generator: torch.Generator) -> None:
    """Initialise projection and pooler in place, orthogonal: they preserve inner products, approximately if E < D."""
    with BUILD_LOCK:
        for layer in (embedder.projection, embedder.pooler):
            if layer is not None:
                nn.init.orthogonal_(layer.weight, generator=generator)
