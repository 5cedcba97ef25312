"""The seam for approximate search: a structure proposes candidates, whose inner products are then computed exactly.

Shape suffixes: Q queries, P passages, E embedding width, K results, D candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from realmops.index.mapped import release
from realmops.index.mips import InMemory, search

TIES = 1e-5
READ = 1 << 13  # single passages that are read together; with each the system maps 64 KiB of a file


@dataclass(frozen=True)
class Recipe:
    """How an index is built and searched, and what it found then."""

    type: str
    seed: int
    lists: int  # clusters of passages (ivf, pq); 0 where the type has none
    width: int  # clusters, or nodes of hnsw's graph, that a query looks at
    recall: float  # measured: the share of the exact top k that is found
    k: int
    target_recall: float


class Approximate(InMemory, ABC):
    """A structure over embeddings P x E that proposes candidates; their scores are exact.

    A type of index is a subclass and a row in ``TYPES``. It is built anew of the embeddings wherever it is wanted, by
    its recipe alone, so that it is the same everywhere.
    """

    def __init__(self, embedding_PE: Tensor, recipe: Recipe, device: torch.device) -> None:
        self.embedding_PE, self.recipe = embedding_PE, recipe
        self.build(device)
        self.look_at(recipe.width)

    @abstractmethod
    def build(self, device: torch.device) -> None:
        """Make the structure, with ``recipe.seed`` for all that is random; ValueError for too few passages."""

    @abstractmethod
    def candidates(self, query_QE: Tensor, k: int) -> Tensor:
        """Ids of passages that may be among the ``k`` best, none twice, Q x any number; -1 where there are fewer.

        Fewer than ``k`` columns: all passages are compared instead.
        """

    @abstractmethod
    def look_at(self, width: int) -> None:
        """From now on look at so much of the structure for a query: more finds more, and takes longer."""

    @property
    @abstractmethod
    def widest(self) -> int:
        """The most that ``look_at`` takes; beyond it an exact search is no slower."""

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Exact scores of what was found, on the query's device.

        A query for which the structure has fewer than ``k`` passages is searched exactly.
        """
        k = min(k, len(self.embedding_PE))
        query = query_QE.detach().float().to(self.embedding_PE.device)
        id_QD = self.candidates(query, k).to(query.device)
        if id_QD.shape[1] < k:
            score_QK, id_QK = search(query, self.embedding_PE, k)
            return score_QK.to(query_QE.device), id_QK.to(query_QE.device)
        known = zip(query, id_QD.clamp(min=0), strict=True)
        score_QD = torch.stack([self._scores(query_E, id_D) for query_E, id_D in known])
        score_QK, place_QK = score_QD.masked_fill(id_QD < 0, -torch.inf).topk(k, dim=1)
        id_QK = id_QD.gather(1, place_QK)
        short_Q = id_QK[:, -1] < 0
        if short_Q.any():
            score_QK[short_Q], id_QK[short_Q] = search(query[short_Q], self.embedding_PE, k)
        return score_QK.to(query_QE.device), id_QK.to(query_QE.device)

    def _scores(self, query_E: Tensor, id_D: Tensor) -> Tensor:
        scores = []
        for id_R in torch.split(id_D, READ):
            scores.append(self.embedding_PE[id_R] @ query_E)
            release(self.embedding_PE)
        return torch.cat(scores)

    def recall(self, query_QE: Tensor, k: int) -> float:
        """The share of the exact top k that is found; of equal scores any will do."""
        return self._found(query_QE, k, self._worst(query_QE, k))

    def _worst(self, query_QE: Tensor, k: int) -> Tensor:
        """The score, Q x 1, from which on a passage is of the exact top k."""
        exact_QK = search(query_QE.detach().float().to(self.embedding_PE.device), self.embedding_PE, k)[0]
        return exact_QK[:, -1:] - TIES * exact_QK.abs().amax(1, keepdim=True)

    def _found(self, query_QE: Tensor, k: int, worst_Q1: Tensor) -> float:
        return float((self.search(query_QE, k)[0].to(worst_Q1.device) >= worst_Q1).double().mean())

    def widen(self, query_QE: Tensor, k: int) -> None:
        """Look at more and more until the recall of the top k reaches its target; ValueError when it does not."""
        wanted = self.recipe.target_recall
        most = self.widest
        width, worst_Q1 = 1, self._worst(query_QE, k)
        while True:
            self.look_at(width)
            recall = self._found(query_QE, k, worst_Q1)
            self.recipe = replace(self.recipe, width=width, recall=recall, k=k)
            if recall >= wanted:
                return
            if width == most:
                break
            width = min(2 * width, most)
        raise ValueError(
            f"an index of type {self.recipe.type} finds {recall:.4f} of the exact top {k} at most, and "
            f"index.target_recall is {wanted}; lower that, or set index.type to exact or to another type"
        )
