"""The neural knowledge retriever: f(x, z) = Embed_input(x) . Embed_doc(z) (paper, section 3.2).

A tower makes embeddings: an :class:`Embedder` from an encoder, as in the paper, or a :class:`Bag` from word vectors.

A passage has one vector, as in the paper, or several, of which the one nearest to the query counts: f(x, z) is the
maximum over them (Luan et al. 2021, "Sparse, Dense, and Attentional Representations for Text Retrieval"). Each is made
of half the mean of the whole passage and half that of one of as many equal parts.

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

from realmops.devices import full_precision, send
from realmops.model.encoder import Encoder
from realmops.model.packed import Packed

ACTIVATIONS: dict[str, type[nn.Module]] = {  # of a dense layer, as sentence-transformers names them
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
    "torch.nn.modules.activation.SiLU": nn.SiLU,
}
HEADS = ("paper", "release", "normalised", "cosine")
_SHORTEST = 1e-6  # a vector that is shorter has no direction


@dataclass(frozen=True)
class Mixture:
    """The weights of a hybrid f(x, z): of the embeddings' scaled inner product, and of BM25 over that of the best.

    ``reading`` is what f(x, z) weighs beside a span's score, where answers are chosen.
    """

    dense: float
    lexical: float
    reading: float = 1.0

    def of(self, dense: Tensor, words: Tensor) -> Tensor:
        """f(x, z) from both parts."""
        return self.dense * dense + self.lexical * words


EMBEDDINGS_ALONE = Mixture(1.0, 0.0)  # the paper's f(x, z)
HYBRID_START = Mixture(1.0, 8.0)  # until it is fitted: what fits a cosine over 0.05 on real questions


class Tower(nn.Module):
    """What turns sequences into embeddings B x E, and how their inner products become f(x, z).

    ``width`` is E. Called with a number M of ``vectors`` it makes so many of each sequence, B x M E. With the head
    ``cosine`` embeddings have length 1 and f(x, z) is their inner product divided by ``temperature``.
    """

    def __init__(self, head: str, temperature: float, width: int) -> None:
        super().__init__()
        assert head in HEADS, head
        self.head, self.temperature, self.width = head, temperature, width

    @property
    def words(self) -> str:
        """What it is, for people: what ``auto`` stood for is in it."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def scale(self) -> float:
        """The factor of every inner product in f(x, z)."""
        if self.head == "cosine":
            return 1 / self.temperature
        return 1 / math.sqrt(self.width) if self.head == "normalised" else 1.0

    @property
    def shifts(self) -> list[nn.Parameter]:
        """Biases that add the same vector to all embeddings."""
        return []


@dataclass(frozen=True)
class DenseShape:
    """The shape of a layer of a sentence encoder; ``activation`` is that of sentence-transformers' configuration."""

    inputs: int
    outputs: int
    bias: bool
    activation: str


class Dense(nn.Module):
    """A layer of a sentence encoder behind its pooling."""

    def __init__(self, shape: DenseShape) -> None:
        super().__init__()
        self.shape, self.activation = shape, ACTIVATIONS[shape.activation]()
        self.linear = nn.Linear(shape.inputs, shape.outputs, bias=shape.bias)

    def forward(self, x_BD: Tensor) -> Tensor:
        out: Tensor = self.activation(self.linear(x_BD))
        return out


class Embedder(Tower):
    """An encoder, the pooling of its vectors to one, and the projection of that to E dimensions.

    ``head`` is ``paper`` (W times the pooled vector), ``release`` (BERT pooler, dense with bias, LayerNorm, dropout),
    ``normalised`` (W times the pooled vector, LayerNorm, and a relevance divided by the square root of E) or
    ``cosine`` (W times the pooled vector, divided by its length). The other arguments are the paper's unless said.

    ``pooling`` is ``cls``, ``mean`` (over all wordpieces, [CLS] and [SEP] too) or ``last``. ``projection`` says where W
    starts; with ``identity`` there is none, with ``first`` the first numbers are kept instead, with ``pca`` it has a
    bias. With ``segments`` ``one`` title and body are both of segment 0. ``dense`` are layers that a sentence encoder
    has between pooling and projection.
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
        temperature: float = 1.0,
        dense: Sequence[DenseShape] = (),
    ) -> None:
        super().__init__(head, temperature, embedding_width)
        self.dense = nn.ModuleList(Dense(shape) for shape in dense)
        self.pooled_width = width = dense[-1].outputs if dense else encoder.width
        assert projection != "identity" or embedding_width == width, (embedding_width, width)
        self.bert, self.pooling, self.start, self.segments = encoder, pooling, projection, segments
        self.pooler = nn.Linear(width, width) if head == "release" else None
        has_bias = head == "release" or projection == "pca"
        self.projection = (
            None if projection in ("identity", "first") else nn.Linear(width, embedding_width, bias=has_bias)
        )
        eps = encoder.layer_norm_eps
        self.norm = nn.LayerNorm(embedding_width, eps=eps) if head in ("release", "normalised") else None

    @property
    def encoder(self) -> Encoder:
        """The network below; the names of its parameters on disk begin with ``bert.``."""
        return self.bert

    @property
    def shifts(self) -> list[nn.Parameter]:
        """The last biases; behind a division by the length there is none."""
        if self.head == "cosine":
            return []
        if self.norm is not None:
            return [self.norm.bias]
        own = [] if self.projection is None or self.projection.bias is None else [self.projection.bias]
        return [*self.bert.shifts, *own]

    @property
    def words(self) -> str:
        between = "".join(f"{layer.shape.outputs} -> " for layer in self.dense if isinstance(layer, Dense))
        made = f"{self.bert.width} -> {between}{self.width} by {self.start}"
        return f"{self.bert.words}, pooling {self.pooling}, {made}, head {self.head}, segments {self.segments}"

    def pooled(self, batch: Packed, vectors: int = 1) -> Tensor:
        """The encoder's vectors of each sequence, (B M) x D; more than one want the pooling ``mean``."""
        if self.segments == "one":
            batch = batch.in_one_segment()
        if self.pooling == "cls":
            assert vectors == 1, vectors
            return self.bert.cls(batch)
        hidden_TD: Tensor = self.bert(batch)
        if self.pooling == "last":
            assert vectors == 1, vectors
            return hidden_TD.index_select(0, batch.first_B + batch.lengths_B - 1)
        if hidden_TD.is_cuda:
            return means(hidden_TD.float(), batch.lengths, vectors)
        lengths = batch.lengths.tolist()
        hidden_of = torch.split(hidden_TD.float(), lengths)
        if vectors == 1:
            return torch.stack([x_TD.mean(0) for x_TD in hidden_of])
        (share_MT,) = send(self.device, torch.cat([_shares(length, vectors) for length in lengths], dim=1))
        both = zip(torch.split(share_MT, lengths, dim=1), hidden_of, strict=True)
        with full_precision(self.device):  # as a mean is
            return torch.cat([m_MT @ x_TD for m_MT, x_TD in both])

    def over(self, encoder: Encoder) -> Self:
        """Return the same pooling and projection, with the same parameters, over another encoder."""
        other = copy.copy(self)
        other._modules = {**self._modules, "bert": encoder}
        return other

    def shares(self, length: int, vectors: int) -> Tensor:
        """What each wordpiece of a sequence counts in its pooled vectors, M x T."""
        if self.pooling == "mean":
            return _shares(length, vectors)
        share_MT = torch.zeros(vectors, length)
        share_MT[:, 0 if self.pooling == "cls" else -1] = 1.0
        return share_MT

    def forward(self, batch: Packed, vectors: int = 1) -> Tensor:
        """Embeddings B x M E."""
        return self.embedded(self.pooled(batch, vectors)).view(-1, vectors * self.width)

    def embedded(self, embedding_BE: Tensor) -> Tensor:
        """Pooled vectors B x D to embeddings B x E."""
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


class Bag(Tower):
    """The sum of the sequence's word vectors, divided by its length: no encoder, no order of words.

    Wordpieces whose ``counts_V`` is 0, as [CLS] and [MASK], add nothing and learn nothing. A sequence without any
    other has the zero vector, so that f(x, z) = 0 for every x.
    """

    counts_V: Tensor

    def __init__(self, vocabulary: int, embedding_width: int, temperature: float) -> None:
        super().__init__("cosine", temperature, embedding_width)
        self.word = nn.Embedding(vocabulary, embedding_width)
        self.register_buffer("counts_V", torch.ones(vocabulary))

    @property
    def words(self) -> str:
        return f"a bag of {self.word.num_embeddings} word vectors of width {self.width}"

    def forward(self, batch: Packed, vectors: int = 1) -> Tensor:
        """Embeddings B x E; a bag makes no more than one vector of a sequence."""
        assert vectors == 1, vectors
        batch.to(self.device)
        counts_T = self.counts_V[batch.tokens_T]
        sum_BE = F.embedding_bag(
            batch.tokens_T, self.word.weight, batch.first_B, mode="sum", per_sample_weights=counts_T
        )
        return _unit(sum_BE)


def _shares(length: int, vectors: int) -> Tensor:
    """What a wordpiece of a sequence counts in each of its vectors, M x T; a part without wordpieces is the whole."""
    share_MT = torch.full((vectors, length), 1 / length)
    bounds = [length * part // vectors for part in range(vectors + 1)]
    for share_T, (first, end) in zip(share_MT, pairwise(bounds), strict=True):
        if first < end:
            share_T /= 2
            share_T[first:end] += 0.5 / (end - first)
    return share_MT


def means(hidden_TD: Tensor, lengths: np.ndarray, vectors: int) -> Tensor:
    """What :func:`_shares` makes of all sequences, (B M) x D, without sending a GPU work for each; by other sums."""
    bounds_BM = lengths[:, None] * np.arange(vectors + 1) // vectors
    part_BM = torch.from_numpy(np.diff(bounds_BM))
    part_BM, length_B = send(hidden_TD.device, part_BM, torch.from_numpy(lengths))
    sum_BMD = torch.segment_reduce(hidden_TD, "sum", lengths=part_BM.flatten(), unsafe=True)
    sum_BMD = sum_BMD.view(len(lengths), vectors, -1)
    mean_BMD = sum_BMD.sum(1, keepdim=True) / length_B[:, None, None]
    if vectors > 1:
        own_BMD = sum_BMD / part_BM.clamp(min=1)[:, :, None]
        mean_BMD = torch.where((part_BM > 0)[:, :, None], (mean_BMD + own_BMD) / 2, mean_BMD)
    return mean_BMD.flatten(0, 1)


def _unit(x_BE: Tensor) -> Tensor:
    """Rows divided by their length; a row without a direction becomes (nearly) 0 and has a bounded gradient."""
    return F.normalize(x_BE.float(), dim=-1, eps=_SHORTEST)


class Retriever(nn.Module):
    """Query tower and document tower; one and the same where they share their parameters.

    ``vectors`` is M, how many a passage has.
    """

    def __init__(self, query: Tower, document: Tower, vectors: int = 1) -> None:
        super().__init__()
        self.query, self.document, self.vectors = query, document, vectors
        self.mixture = EMBEDDINGS_ALONE
        if not self.shared:
            # They add one number to the relevance of all z for x, which p(z|x) does not see: their gradient would be
            # rounding, and Adam would make full steps of it.  They stay, since they are part of published embeddings.
            for shift in document.shifts:
                shift.requires_grad_(False)

    @property
    def shared(self) -> bool:
        return self.query is self.document

    @property
    def scale(self) -> float:
        """The factor of every inner product in f(x, z)."""
        return self.query.scale

    @property
    def width(self) -> int:
        """Numbers of a passage in the index, X."""
        return self.vectors * self.document.width

    def documents(self, batch: Packed) -> Tensor:
        """Embeddings of passages, B x X."""
        return cast(Tensor, self.document(batch, self.vectors))

    def relevance(self, query_BE: Tensor, document_BKX: Tensor) -> Tensor:
        """f(x, z) of each query with its own K documents, B x K."""
        if self.vectors == 1:
            return self.scale * torch.einsum("be,bke->bk", query_BE, document_BKX)
        document_BKME = document_BKX.view(*document_BKX.shape[:2], self.vectors, -1)
        return self.scale * torch.einsum("be,bkme->bkm", query_BE, document_BKME).amax(-1)

    def scores(self, query_QE: Tensor, document_NX: Tensor) -> Tensor:
        """f(x, z) of each query with each document, Q x N."""
        product_QNM = self.scale * query_QE @ document_NX.reshape(-1, query_QE.shape[1]).T  # with every vector
        return product_QNM if self.vectors == 1 else product_QNM.view(len(query_QE), -1, self.vectors).amax(-1)


def initialise_projection(embedder: Embedder, generator: torch.Generator) -> None:
    """Where the projection and the pooler start.

    An orthogonal projection: inner products of embeddings start as those of the pooled vectors, in part where E < D.
    A random one is Gaussian of variance 1/E, which keeps them in the mean. That of ``pca`` comes from the passages
    (``search.corpus_statistics``) and is orthogonal until then.
    """
    with torch.no_grad():
        if embedder.projection is not None and embedder.start == "random":
            embedder.projection.weight.normal_(0.0, 1 / math.sqrt(embedder.width), generator=generator)
        elif embedder.projection is not None:
            nn.init.orthogonal_(embedder.projection.weight, generator=generator)
        if embedder.start == "pca":
            assert embedder.projection is not None
            embedder.projection.bias.zero_()
        if embedder.pooler is not None:
            nn.init.orthogonal_(embedder.pooler.weight, generator=generator)
