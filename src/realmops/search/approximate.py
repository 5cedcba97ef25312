"""Approximate search: a structure proposes candidates, whose inner products are then computed exactly.

The structures are FAISS's. They are built from the embeddings whenever they are needed, with fixed seeds, and never
read from a disk; ``ivf`` and ``pq`` are on the GPU if models are there and FAISS supports it. Embeddings that are
mapped (mapped.py) stay on the disk: a structure learns from a sample of them, takes them in some at a time, and a
search reads those of its candidates.

Shape suffixes: Q queries, P passages, E embedding width, K results, D candidates.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from realmops.config import IndexOptions
from realmops.search import faiss_gpu
from realmops.search.exact import BestVector, Exact, InMemory, PassageIndex, search
from realmops.search.mapped import memory_bytes, release

EXACT_PASSAGES = 20_000_000
MEMORY_SHARE = 0.25
TIES = 1e-5
READ = 1 << 13  # single passages that are read together; with each the system maps 64 KiB of a file
QUERIES = 256  # that the recall of an index is measured with
_RESCORED = 16  # candidates of pq for each result; its codes have 4 bits for each number
_LINKS = 32  # of each passage in hnsw's graph
_LISTS = {"ivf": 4, "pq": 0.5}  # times the root of the passages; pq scans a list in no time, to find lists takes longer
_POINTS_PER_LIST = (39, 64)  # for k-means: fewer are too few, more are not used
_CODE_VALUES = 256
_WIDEST = {"ivf": 2048, "pq": 2048, "hnsw": 1024}  # lists or graph nodes looked at
_CPU = torch.device("cpu")
_TOGETHER = 1 << 18  # passages that are read and added; a multiple of FAISS's own 65,536

log = logging.getLogger(__name__)


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

    A type of index is a subclass and a row in ``TYPES``. It is built from the embeddings wherever it is needed, by its
    recipe alone, so that it is the same everywhere (but ``pq`` has other codes on a GPU).

    Args:
        embedding_PE: The passages' embeddings; their exact scores are computed where they are.
        recipe: How to build and search it.
        device: Where models are; a type that has a form for GPUs is built there, and ``place`` names where it is.
    """

    place = "the CPU"

    def __init__(self, embedding_PE: Tensor, recipe: Recipe, device: torch.device = _CPU) -> None:
        self.embedding_PE, self.recipe, self.model_device = embedding_PE, recipe, device
        self.build()
        self.look_at(recipe.width)

    @abstractmethod
    def build(self) -> None:
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
        wanted, width, worst_Q1 = self.recipe.target_recall, 1, self._worst(query_QE, k)
        while True:
            self.look_at(width)
            recall = self._found(query_QE, k, worst_Q1)
            self.recipe = replace(self.recipe, width=width, recall=recall, k=k)
            if recall >= wanted:
                return
            if width == self.widest:
                raise ValueError(
                    f"an index of type {self.recipe.type} finds {recall:.4f} of the exact top {k} at most, and "
                    f"index.target_recall is {wanted}; lower that, or set index.type to exact or to another type"
                )
            width = min(2 * width, self.widest)


def fitting_type(passages: int, width: int, memory: int, *, on_gpu: bool = False) -> str:
    """What ``index.type: auto`` means on a device with so many bytes of memory.

    ``pq`` for embeddings (fp32) that fill more than a quarter of the memory. Else ``exact`` on a GPU, and elsewhere up
    to 20 million passages; ``ivf``, which holds them a second time, for more. Never ``hnsw``: its graph takes longest
    to build.
    """
    if 4 * passages * width > MEMORY_SHARE * memory:
        return "pq"
    return "exact" if on_gpu or passages <= EXACT_PASSAGES else "ivf"


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
        device: where embeddings go when the search is exact, and ``ivf`` and ``pq`` where FAISS supports it.
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
    kind: str = options.type
    if kind == "auto":
        kind = fitting_type(passages, width, memory_of(device), on_gpu=device.type == "cuda")
    if TYPES.get(kind) is Faiss:
        _faiss(kind, passages, width)
    return kind


@cache
def _log_once(level: int, kind: str, place: str) -> None:
    log.log(level, "index: %s is searched on %s", kind, place)


def approximate(passages: PassageIndex | None) -> Approximate | None:
    """The approximate index that finds the passages, or their vectors where they have several; None where none does."""
    found = passages.each if isinstance(passages, BestVector) else passages
    return found if isinstance(found, Approximate) else None


class Faiss(Approximate):
    """FAISS's: clusters of passages (ivf), the same with short codes in the place of vectors (pq), a graph (hnsw)."""

    def build(self) -> None:
        recipe, device, (passages, width) = self.recipe, self.model_device, self.embedding_PE.shape
        faiss = _faiss(recipe.type, passages, width)
        self.recipe = replace(recipe, lists=min(recipe.lists, max(1, passages // _POINTS_PER_LIST[0])))
        reason = faiss_gpu.why_cpu(faiss, recipe.type, width, device) if device.type == "cuda" else ""
        if device.type == "cuda" and not reason:
            try:
                self._index = self._built(faiss, on_gpu=True)
                self.place = f"the GPU {torch.cuda.get_device_name(device)}"
                return
            except RuntimeError as error:  # FAISS's, as of memory that the card lacks
                reason = " ".join(str(error).split())
        self._index = self._built(faiss, on_gpu=False)
        if reason:
            self.place = f"the CPU ({reason})"
            _log_once(logging.INFO if recipe.type == "hnsw" else logging.WARNING, recipe.type, self.place)

    def _built(self, faiss: Any, *, on_gpu: bool) -> Any:
        """Train the structure and add the passages, where it is searched."""
        recipe, width, most = self.recipe, self.embedding_PE.shape[1], _POINTS_PER_LIST[1]
        codes = f"PQ{faiss_gpu.code_bytes(width)}x8np" if on_gpu else f"PQ{width}x4fs"
        form = {
            "ivf": f"IVF{recipe.lists},Flat",
            "pq": f"IVF{recipe.lists},{codes}",
            "hnsw": f"HNSW{_LINKS},Flat",
        }[recipe.type]
        # threads join hnsw's graph in another order each time
        faiss.omp_set_num_threads(1 if recipe.type == "hnsw" else torch.get_num_threads())
        index = faiss.index_factory(width, form, faiss.METRIC_INNER_PRODUCT)
        if recipe.type == "pq":
            index.pq.cp.seed = recipe.seed % 2**31
            index.pq.cp.min_points_per_centroid = 1
        if on_gpu:
            index = faiss_gpu.GpuIndex(faiss, index, self.model_device)
        if recipe.type != "hnsw":
            index.cp.seed = recipe.seed % 2**31
            index.cp.max_points_per_centroid = most
            index.train(_sample(self.embedding_PE, most * recipe.lists, recipe.seed).numpy())
        for rows_RE in torch.split(self.embedding_PE.detach(), _TOGETHER):
            index.add(rows_RE.cpu().numpy())
            release(self.embedding_PE)
        faiss.omp_set_num_threads(torch.get_num_threads())
        return index

    def candidates(self, query_QE: Tensor, k: int) -> Tensor:
        count = min(k * (_RESCORED if self.recipe.type == "pq" else 1), len(self.embedding_PE))
        if isinstance(self._index, faiss_gpu.GpuIndex):
            count = min(count, faiss_gpu.MOST_SELECTED)
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
            f"an index of type {kind} needs FAISS, which is not installed: pip install 'realmops[faiss]', with an "
            "NVIDIA GPU 'realmops[gpu]', or set index.type=exact"
        ) from None
    if kind == "pq" and (passages < _CODE_VALUES or width % 2):
        raise ValueError(
            f"index.type is pq, which wants {_CODE_VALUES} passages or more and an even retriever.embedding_width; "
            f"there are {passages} of width {width}: set index.type=exact"
        )
    return faiss
