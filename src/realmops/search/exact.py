"""The interface of every index, and indexes that are searched exhaustively (paper, section 3.3).

Shape suffixes: Q queries, P passages, E embedding width, K results, M vectors per passage, X = M E, N vectors
retrieved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from realmops.search.inner_products import FEW, Bf16Prefilter, Int8Prefilter, search


class PassageIndex(ABC):
    """An index over the embeddings of passages, P x X in one tensor; each index type is a subclass."""

    embedding_PE: Tensor

    @property
    def device(self) -> torch.device:
        return self.embedding_PE.device

    def __len__(self) -> int:
        return len(self.embedding_PE)

    def vectors(self, ids: Tensor | slice) -> Tensor:
        """Return the embeddings of passages, ids.shape x X; a slice returns a view."""
        return self.embedding_PE[ids.to(self.device) if isinstance(ids, Tensor) else ids]

    @abstractmethod
    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return inner products and passage ids, Q x min(k, P), best first."""


@dataclass(frozen=True)
class ExactIndex(PassageIndex):
    """Exhaustive index: every passage is compared with the query.

    The first search of more than 50,000 fp32 passages makes a bf16 copy if the processor multiplies bf16 in hardware:
    50 % more memory, a third of the search time. With ``use_int8``, the first search with fewer than 16 queries makes
    an int8 copy: 25 % more memory, a third of the time of a single query.
    """

    embedding_PE: Tensor
    use_int8: bool = False

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Search through a prefilter where one applies."""
        query_QE = query_QE.to(self.embedding_PE.device)
        if query_QE.dtype == torch.float32:
            is_small = len(query_QE) < FEW
            prefilter = (self.int8_copy if self.use_int8 else None) if is_small else self.bf16_copy
            if prefilter is not None:
                return prefilter.search(query_QE, min(k, len(self.embedding_PE)))
        return search(query_QE, self.embedding_PE, k)

    def search_passages(self, query_QE: Tensor, k: int, count: int) -> tuple[Tensor, Tensor] | None:
        """Return the k best passages of ``count`` vectors each by their best vector; None where this is not faster."""
        is_small = self.use_int8 and len(query_QE) < FEW and query_QE.dtype == torch.float32
        if not is_small or self.int8_copy is None or k > len(self.embedding_PE) // count:
            return None
        return self.int8_copy.search_passages(query_QE, k, count)

    @cached_property
    def bf16_copy(self) -> Bf16Prefilter | None:
        return Bf16Prefilter.build(self.embedding_PE)

    @cached_property
    def int8_copy(self) -> Int8Prefilter | None:
        return Int8Prefilter.build(self.embedding_PE)


@dataclass(frozen=True)
class MaxSimIndex(PassageIndex):
    """Index of passages with M vectors each, of which the best one is the score (``model.retriever``)."""

    vector_index: PassageIndex  # its rows are single vectors
    count: int  # vectors per passage, M

    @property
    def embedding_PE(self) -> Tensor:  # type: ignore[override]
        """All embeddings, the vectors of a passage concatenated, P x M E."""
        rows = self.vector_index.vectors(slice(None))
        return rows.view(-1, self.count * rows.shape[1])

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k passages with the best vectors: the best k M vectors belong to at least k passages."""
        if isinstance(self.vector_index, ExactIndex):
            results = self.vector_index.search_passages(query_QE, k, self.count)
            if results is not None:
                return results
        score_QN, row_QN = self.vector_index.search(query_QE, k * self.count)
        passage_QN, order_QN = (row_QN // self.count).sort(dim=1, stable=True)
        repeated_QN = F.pad(passage_QN[:, 1:] == passage_QN[:, :-1], (1, 0))
        repeated_QN = torch.empty_like(repeated_QN).scatter(1, order_QN, repeated_QN)  # in the order of scores
        place_QK = torch.argsort(repeated_QN.byte(), dim=1, stable=True)[:, : min(k, len(self.embedding_PE))]
        return score_QN.gather(1, place_QK), (row_QN // self.count).gather(1, place_QK)


def prepare_for_serving(passages: PassageIndex) -> PassageIndex:
    """Return the index configured for serving, with the copies that speed up searches, so that no search makes them."""
    if isinstance(passages, MaxSimIndex):
        return replace(passages, vector_index=prepare_for_serving(passages.vector_index))
    if not isinstance(passages, ExactIndex):
        return passages
    index = replace(passages, use_int8=True)
    _ = index.int8_copy, index.bf16_copy
    return index


def exact_index(embedding_PX: Tensor, vectors: int) -> PassageIndex:
    return multi_vector_index(embedding_PX, vectors, ExactIndex)


def multi_vector_index(embedding_PX: Tensor, vectors: int, make: Callable[[Tensor], PassageIndex]) -> PassageIndex:
    """Build an index of passages with ``vectors`` vectors each, concatenated, by an index over single vectors."""
    if vectors == 1:
        return make(embedding_PX)
    return MaxSimIndex(make(embedding_PX.view(-1, embedding_PX.shape[1] // vectors)), vectors)
