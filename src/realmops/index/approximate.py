"""The types of index, and the structures of FAISS.

The structures are built from the embeddings whenever they are wanted, with fixed seeds, and never read from a disk.
Embeddings that are mapped (mapped.py) stay on the disk: a structure learns from a sample of them, takes them in some at
a time, and a search reads those of its candidates.

Shape suffixes: Q queries, P passages, E embedding width, K results, D candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from realmops.config import IndexOptions
from realmops.index.files import memory_bytes
from realmops.index.mapped import release
from realmops.index.mips import BestVector, Exact, PassageIndex
from realmops.index.structure import READ, Approximate, Recipe

EXACT_PASSAGES = 20_000_000
MEMORY_SHARE = 0.25
QUERIES = 256  # that the recall of an index is measured with
_RESCORED = 16  # candidates of pq for each result; on a CPU its codes have 4 bits for each number
_LINKS = 32  # of each passage in hnsw's graph
_LISTS = {"ivf": 4, "pq": 0.5}  # times the root of the passages; pq scans a list in no time, to find lists takes longer
_POINTS_PER_LIST = (39, 64)  # for k-means: fewer are too few, more are not used
_CODE_BYTES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)  # those that FAISS has on a GPU, too
_CODE_VALUES = 256
_WIDEST = {"ivf": 2048, "pq": 2048, "hnsw": 1024}  # lists or graph nodes looked at; a GPU's FAISS has no more
_MOST_ON_GPU = 2048  # results of one query
_TOGETHER = 1 << 18  # passages that are read and added; a multiple of FAISS's own 65,536


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
    lists = 2 ** round(math.log2(_LISTS[kind] * math.sqrt(len(embedding_PE)))) if kind in _LISTS else 0
    found = TYPES[kind](embedding_PE, Recipe(kind, seed, lists, 1, 0.0, k, options.target_recall), device)
    found.widen(queries(), k)
    return found


def index_type(options: IndexOptions, passages: int, width: int, device: torch.device) -> str:
    """The type that the options name or that fits.

    Raises ValueError when FAISS is wanted and not installed, and when there are too few passages for the type.
    """
    kind = options.type if options.type != "auto" else fitting_type(passages, width, memory_of(device))
    if TYPES.get(kind) is Faiss:
        _faiss(kind, passages, width)
    return kind


def approximate(passages: PassageIndex | None) -> Approximate | None:
    """The approximate index that finds the passages, or their vectors where they have several; None where none does."""
    found = passages.each if isinstance(passages, BestVector) else passages
    return found if isinstance(found, Approximate) else None


class Faiss(Approximate):
    """FAISS's: clusters of passages (ivf), the same with short codes in the place of vectors (pq), a graph (hnsw)."""

    def build(self, device: torch.device) -> None:
        recipe, (passages, width) = self.recipe, self.embedding_PE.shape
        faiss = _faiss(recipe.type, passages, width)
        fewest, most = _POINTS_PER_LIST
        self.recipe = recipe = replace(recipe, lists=min(recipe.lists, max(1, passages // fewest)))
        self._on_gpu = device.type == "cuda" and recipe.type != "hnsw" and faiss.get_num_gpus() > 0
        code = max((n for n in _CODE_BYTES if width % (2 * n) == 0 and n <= max(1, width // 4)), default=1)
        form = {
            "ivf": f"IVF{recipe.lists},Flat",
            "pq": f"IVF{recipe.lists}," + (f"PQ{code}x8" if self._on_gpu else f"PQ{width}x4fs"),
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
            self._index.train(_sample(self.embedding_PE, most * recipe.lists, recipe.seed).numpy())
        for rows_RE in torch.split(self.embedding_PE.detach(), _TOGETHER):
            self._index.add(rows_RE.cpu().numpy())
            release(self.embedding_PE)
        faiss.omp_set_num_threads(torch.get_num_threads())

    def candidates(self, query_QE: Tensor, k: int) -> Tensor:
        count = min(k * (_RESCORED if self.recipe.type == "pq" else 1), len(self.embedding_PE))
        if self._on_gpu:
            count = min(count, _MOST_ON_GPU)
        if count < k:
            return torch.empty(len(query_QE), 0, dtype=torch.int64)
        return torch.from_numpy(self._index.search(query_QE.cpu().numpy(), count)[1])

    def look_at(self, width: int) -> None:
        if self.recipe.type == "hnsw":
            self._index.hnsw.efSearch = width
        else:
            self._index.nprobe = width

    @property
    def widest(self) -> int:
        most = _WIDEST[self.recipe.type]
        if self.recipe.type == "hnsw":
            return most
        return max(1, min(most, self.recipe.lists // (2 if self.recipe.type == "pq" else 4)))


TYPES: dict[str, type[Approximate]] = {"ivf": Faiss, "pq": Faiss, "hnsw": Faiss}
"""The approximate ones of ``index.type``, as a recipe names them."""


def _sample(embedding_PE: Tensor, most: int, seed: int) -> Tensor:
    """So many rows in their order, in memory; all of them where there are no more."""
    passages = len(embedding_PE)
    if passages <= most:
        return embedding_PE.detach().cpu()
    row_R = torch.randperm(passages, generator=torch.Generator().manual_seed(seed))[:most].sort().values
    sample_RE = torch.empty(most, embedding_PE.shape[1])
    for first in range(0, most, READ):
        chosen = row_R[first : first + READ]
        sample_RE[first : first + READ] = embedding_PE.detach()[chosen.to(embedding_PE.device)].cpu()
        release(embedding_PE)
    return sample_RE


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
