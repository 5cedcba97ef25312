"""Approximate search by FAISS: it chooses candidates, whose inner products are then computed exactly.

The structures are built from the embeddings whenever they are wanted, with fixed seeds, and never read from a disk.

Shape suffixes: Q queries, P passages, E embedding width, K results, D candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from realmops.config import IndexOptions
from realmops.index.files import memory_bytes
from realmops.index.mips import Exact, PassageIndex, search

EXACT_PASSAGES = 20_000_000
MEMORY_SHARE = 0.25
QUERIES = 64  # that the recall of an index is measured with
_RESCORED = 16  # candidates of pq for each result
_LINKS = 32  # of each passage in hnsw's graph
_POINTS_PER_LIST = (39, 64)  # for k-means: fewer are too few, more are not used
_CODE_BYTES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)  # those that FAISS has on a GPU, too
_CODE_VALUES = 256
_WIDEST = {"ivf": 2048, "pq": 2048, "hnsw": 1024}  # lists or graph nodes looked at; a GPU's FAISS has no more
_MOST_ON_GPU = 2048  # results of one query
_TIES = 1e-5


@dataclass(frozen=True)
class Recipe:
    """How an index is built and searched, and what it found then."""

    type: str
    seed: int
    lists: int  # clusters of passages (ivf, pq)
    width: int  # clusters, or nodes of hnsw's graph, that a query looks at
    recall: float  # measured: the share of the exact top k that is found
    k: int
    target_recall: float


def fitting_type(passages: int, width: int, memory: int) -> str:
    """What ``index.type: auto`` means on a device with so many bytes of memory.

    ``exact`` up to 20 million passages whose embeddings (fp32) fill at most a quarter of the memory; ``ivf``, which
    holds them a second time, for more that still fit so; else ``pq``. Never ``hnsw``: its graph takes longest to build.
    """
    if 4 * passages * width > MEMORY_SHARE * memory:
        return "pq"
    return "exact" if passages <= EXACT_PASSAGES else "ivf"


def memory_of(device: torch.device) -> int:
    """Bytes of a device in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_bytes()


def passage_index(
    embedding_PE: Tensor, options: IndexOptions, device: torch.device, seed: int, queries: Callable[[], Tensor], k: int
) -> PassageIndex:
    """An index over embeddings, of the type that the options name or that fits.

    Args:
        device: where it is searched; embeddings go there when the search is exact.
        queries: embedded queries, asked for when a recall must be measured.
        k: how many results its recall is measured for.

    Raises ValueError when FAISS is not installed, when there are too few passages, and when the recall is not reached.
    """
    kind = index_type(options, len(embedding_PE), embedding_PE.shape[1], device)
    if kind == "exact":
        return Exact(embedding_PE.to(device))
    lists = 0 if kind == "hnsw" else 2 ** round(math.log2(4 * math.sqrt(len(embedding_PE))))
    found = Approximate(embedding_PE, Recipe(kind, seed, lists, 1, 0.0, k, options.target_recall), device)
    found.widen(queries(), k)
    return found


def index_type(options: IndexOptions, passages: int, width: int, device: torch.device) -> str:
    """The type that the options name or that fits.

    Raises ValueError when FAISS is wanted and not installed, and when there are too few passages for the type.
    """
    kind = options.type if options.type != "auto" else fitting_type(passages, width, memory_of(device))
    if kind != "exact":
        _faiss(kind, passages, width)
    return kind


class Approximate:
    """A FAISS index over embeddings P x E, which stay where they are for the exact scores."""

    def __init__(self, embedding_PE: Tensor, recipe: Recipe, device: torch.device) -> None:
        passages, width = embedding_PE.shape
        faiss = _faiss(recipe.type, passages, width)
        self.embedding_PE = embedding_PE
        fewest, most = _POINTS_PER_LIST
        self.recipe = replace(recipe, lists=min(recipe.lists, max(1, passages // fewest)))
        self._on_gpu = device.type == "cuda" and recipe.type != "hnsw" and faiss.get_num_gpus() > 0
        code = max((n for n in _CODE_BYTES if width % (2 * n) == 0 and n <= max(1, width // 4)), default=1)
        form = {
            "ivf": f"IVF{self.recipe.lists},Flat",
            "pq": f"IVF{self.recipe.lists}," + (f"PQ{code}x8" if self._on_gpu else f"PQ{2 * code}x4fs"),
            "hnsw": f"HNSW{_LINKS},Flat",
        }[recipe.type]
        # threads join hnsw's graph in another order each time
        faiss.omp_set_num_threads(1 if recipe.type == "hnsw" else torch.get_num_threads())
        self._index = faiss.index_factory(width, form, faiss.METRIC_INNER_PRODUCT)
        if recipe.type == "pq":
            self._index.pq.cp.seed = recipe.seed % 2**31
            self._index.pq.cp.min_points_per_centroid = 1
        if self._on_gpu:
            self._resources = faiss.StandardGpuResources()  # lives as long as the index
            self._index = faiss.index_cpu_to_gpu(self._resources, torch.cuda.current_device(), self._index)
        if recipe.type != "hnsw":
            self._index.cp.seed = recipe.seed % 2**31
            self._index.cp.max_points_per_centroid = most
        rows = embedding_PE.detach().cpu().numpy()
        self._index.train(rows)
        self._index.add(rows)
        faiss.omp_set_num_threads(torch.get_num_threads())
        self._look_at(recipe.width)

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Exact scores of what was found, on the query's device.

        A query for which the structure has fewer than ``k`` passages is searched exactly.
        """
        k = min(k, len(self.embedding_PE))
        candidates = min(k * (_RESCORED if self.recipe.type == "pq" else 1), len(self.embedding_PE))
        if self._on_gpu:
            candidates = min(candidates, _MOST_ON_GPU)
        query = query_QE.detach().float().to(self.embedding_PE.device)
        if candidates < k:
            score_QK, id_QK = search(query, self.embedding_PE, k)
            return score_QK.to(query_QE.device), id_QK.to(query_QE.device)
        _, found = self._index.search(query.cpu().numpy(), candidates)
        id_QD = torch.from_numpy(found).to(query.device)
        known = zip(query, id_QD.clamp(min=0), strict=True)
        score_QD = torch.stack([self.embedding_PE[id_D] @ query_E for query_E, id_D in known])
        score_QK, place_QK = score_QD.masked_fill(id_QD < 0, -torch.inf).topk(k, dim=1)
        id_QK = id_QD.gather(1, place_QK)
        short_Q = id_QK[:, -1] < 0
        if short_Q.any():
            score_QK[short_Q], id_QK[short_Q] = search(query[short_Q], self.embedding_PE, k)
        return score_QK.to(query_QE.device), id_QK.to(query_QE.device)

    def recall(self, query_QE: Tensor, k: int) -> float:
        """The share of the exact top k that is found; of equal scores any will do."""
        query = query_QE.detach().float().to(self.embedding_PE.device)
        exact_QK = search(query, self.embedding_PE, k)[0]
        worst_Q1 = exact_QK[:, -1:] - _TIES * exact_QK.abs().amax(1, keepdim=True)
        return float((self.search(query, k)[0] >= worst_Q1).double().mean())

    def widen(self, query_QE: Tensor, k: int) -> None:
        """Look at more and more until the recall of the top k reaches its target; ValueError when it does not."""
        wanted = self.recipe.target_recall
        most = _WIDEST[self.recipe.type]
        if self.recipe.type != "hnsw":
            most = max(1, min(most, self.recipe.lists // 4))  # beyond it exact search is no slower
        width = 1
        while True:
            self._look_at(width)
            recall = self.recall(query_QE, k)
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

    def _look_at(self, width: int) -> None:
        if self.recipe.type == "hnsw":
            self._index.hnsw.efSearch = width
        else:
            self._index.nprobe = width


def _faiss(kind: str, passages: int, width: int) -> Any:
    try:
        import faiss
    except ImportError:
        raise ValueError(
            f"an index of type {kind} needs FAISS, which is not installed: pip install 'realmops[faiss]', with a GPU "
            "'realmops[gpu]', or set index.type=exact"
        ) from None
    if kind == "pq" and (passages < _CODE_VALUES or width % 2):
        raise ValueError(
            f"index.type is pq, which wants {_CODE_VALUES} passages or more and an even retriever.embedding_width; "
            f"there are {passages} of width {width}: set index.type=exact"
        )
    return faiss
