"""Exact maximum inner product search (paper, section 3.3), and what every index can do.

Shape suffixes: Q queries, P passages, E embedding width, K results, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

GROUP = 256
_LARGE = 50_000
_CHUNK = {"cpu": 1 << 14, "cuda": 1 << 18}  # passages; on a CPU their scores stay in a core's cache
_GROUPS = 4  # for each result; with fewer the maxima of groups choose little


class PassageIndex(Protocol):
    """Embeddings of passages that can be searched."""

    @property
    def embedding_PE(self) -> Tensor:
        """Exact, whatever finds the candidates; on any device."""

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Inner products, and ids of the k passages found, Q x min(k, P), best first."""


@dataclass(frozen=True)
class Exact:
    """Every passage is compared with the query."""

    embedding_PE: Tensor

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :func:`search`, where the embeddings lie."""
        return search(query_QE.to(self.embedding_PE.device), self.embedding_PE, k)


def search(query_QE: Tensor, embedding_PE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k passages with the largest inner product: scores and ids, Q x K, best first.

    ``k`` is cut to the number of passages.  Above 50,000 passages a maximum over groups of 256 selects
    the k groups that can hold the answer, so that the costly sort sees those only; the result is the same.
    """
    k = min(k, embedding_PE.shape[0])
    if embedding_PE.shape[0] <= _LARGE:
        return (query_QE @ embedding_PE.T).topk(k, dim=1)
    chunk = max(_CHUNK[embedding_PE.device.type], _GROUPS * k * GROUP)
    best = [_search_groups(query_QE, part_PE, min(k, len(part_PE))) for part_PE in torch.split(embedding_PE, chunk)]
    score = torch.cat([s for s, _ in best], dim=1)
    ids = torch.cat([i + n * chunk for n, (_, i) in enumerate(best)], dim=1)
    top_QK, place_QK = score.topk(k, dim=1)
    return top_QK, ids.gather(1, place_QK)


def _search_groups(query_QE: Tensor, embedding_PE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    score_QP = query_QE @ embedding_PE.T
    whole = score_QP.shape[1] // GROUP * GROUP
    groups = whole // GROUP
    if groups <= k:
        return score_QP.topk(k, dim=1)
    best_QG = score_QP[:, :whole].view(-1, groups, GROUP).amax(-1)
    group_QK = best_QG.topk(k, dim=1).indices.sort(dim=1).values  # the k best lie in the k groups with the best maxima
    ids = (group_QK[:, :, None] * GROUP + torch.arange(GROUP, device=score_QP.device)).flatten(1)
    rest = torch.arange(whole, score_QP.shape[1], device=score_QP.device).expand(len(score_QP), -1)
    ids = torch.cat([ids, rest], dim=1)
    top_QK, place_QK = score_QP.gather(1, ids).topk(k, dim=1)
    return top_QK, ids.gather(1, place_QK)
