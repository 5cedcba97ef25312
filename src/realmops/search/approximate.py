"""Approximate search: a structure proposes candidates, whose inner products are then computed exactly.

The structures are FAISS indexes. They are built from the embeddings on each load, with fixed seeds, and never read from
disk; ``ivf`` and ``pq`` are placed on the GPU if models are on one and FAISS supports it. Memory-mapped embeddings
(``memory_map``) stay on disk: a structure is trained on a sample of them and adds them in parts, and a search reads
those of its candidates.

Shape suffixes: Q queries, P passages, E embedding width, K results, D candidates.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from realmops.credentials import error_line
from realmops.memory_map import memory_bytes, release_pages
from realmops.options import IndexOptions
from realmops.search import faiss_gpu
from realmops.search.exact import ExactIndex, MaxSimIndex, PassageIndex
from realmops.search.inner_products import search

MAX_EXACT_PASSAGES = 20_000_000
PQ_MEMORY_SHARE = 0.25  # of the device's memory; larger embeddings need pq
SCORE_TOLERANCE = 1e-5  # relative; smaller differences count as equal scores
READ_ROWS = 1 << 13  # scattered passages read at a time; each maps 64 KiB of a memory-mapped file
RECALL_QUERIES = 256  # number of queries for the measurement of an index's recall
_CANDIDATES = 16  # per result in pq; its codes have only 4 bits per dimension
_NEIGHBOURS = 32  # per node of the hnsw graph
_LISTS = {"ivf": 4, "pq": 0.5}  # times sqrt(passages); pq scans a list fast, so that finding lists dominates
_POINTS_PER_LIST = (39, 64)  # k-means warns below the first and subsamples above the second
_CODE_VALUES = 256
_MAX_WIDTH = {"ivf": 2048, "pq": 2048, "hnsw": 1024}  # lists (nprobe) or graph nodes (efSearch)
_CPU = torch.device("cpu")
_ADDED_ROWS = 1 << 18  # passages added at a time; a multiple of FAISS's block of 65,536

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """Parameters of an approximate index, and the recall measured with them."""

    type: str
    seed: int
    lists: int  # clusters of passages (ivf, pq); 0 where the type has none
    width: int  # clusters (nprobe), or nodes of the hnsw graph (efSearch), visited per query
    recall: float  # measured recall of the exact top k
    k: int
    target_recall: float


class ApproximateIndex(PassageIndex):
    """A structure over embeddings P x E that proposes candidates; their scores are exact.

    The structures are FAISS's: inverted lists (``ivf``), the same with product quantisation (``pq``), a graph
    (``hnsw``). Another type is a subclass with its own structure and a row in ``TYPES``. An index is built from the
    embeddings and its recipe alone, so that it is the same on every machine (except ``pq``, whose codes on a GPU
    differ), on ``device``, that of the models, where FAISS supports it; ``place`` names the result.
    """

    place = "the CPU"

    def __init__(self, embedding_PE: Tensor, recipe: Recipe, device: torch.device = _CPU) -> None:
        self.embedding_PE, self.recipe, self.model_device = embedding_PE, recipe, device
        self.build()
        self.set_search_width(recipe.width)

    def build(self) -> None:
        """Build the structure on the GPU if FAISS supports it there, otherwise on the CPU, and log the fallback."""
        recipe, device, (passages, width) = self.recipe, self.model_device, self.embedding_PE.shape
        faiss = _faiss(recipe.type, passages, width)
        self.recipe = replace(recipe, lists=min(recipe.lists, max(1, passages // _POINTS_PER_LIST[0])))
        reason = faiss_gpu.cpu_fallback_reason(faiss, recipe.type, width, device) if device.type == "cuda" else ""
        if device.type == "cuda" and not reason:
            try:
                self._index = self._built(faiss, on_gpu=True)
                self.place = f"the GPU {torch.cuda.get_device_name(device)}"
                return
            except RuntimeError as error:  # raised by FAISS, for example out of GPU memory
                reason = error_line(error)
        self._index = self._built(faiss, on_gpu=False)
        if reason:
            self.place = f"the CPU ({reason})"
            _log_once(logging.INFO if recipe.type == "hnsw" else logging.WARNING, recipe.type, self.place)

    def _built(self, faiss: Any, *, on_gpu: bool) -> Any:
        recipe, width, max_points = self.recipe, self.embedding_PE.shape[1], _POINTS_PER_LIST[1]
        codes = f"PQ{faiss_gpu.code_bytes(width)}x8np" if on_gpu else f"PQ{width}x4fs"
        factory = {
            "ivf": f"IVF{recipe.lists},Flat",
            "pq": f"IVF{recipe.lists},{codes}",
            "hnsw": f"HNSW{_NEIGHBOURS},Flat",
        }[recipe.type]
        # With several threads, the order of insertion into the hnsw graph is not deterministic.
        faiss.omp_set_num_threads(1 if recipe.type == "hnsw" else torch.get_num_threads())
        index = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
        if recipe.type == "pq":
            index.pq.cp.seed = recipe.seed % 2**31
            index.pq.cp.min_points_per_centroid = 1
        if on_gpu:
            index = faiss_gpu.GpuIndex(faiss, index, self.model_device)
        if recipe.type != "hnsw":
            index.cp.seed = recipe.seed % 2**31
            index.cp.max_points_per_centroid = max_points
            index.train(_sample(self.embedding_PE, max_points * recipe.lists, recipe.seed).numpy())
        for rows_RE in torch.split(self.embedding_PE.detach(), _ADDED_ROWS):
            index.add(rows_RE.cpu().numpy())
            release_pages(self.embedding_PE)
        faiss.omp_set_num_threads(torch.get_num_threads())
        return index

    def candidates(self, query_QE: Tensor, k: int) -> Tensor:
        """Return ids of passages that may be among the ``k`` best, Q x any number, padded with -1.

        For ``pq`` 16 per result, because its codes are coarse. With fewer than ``k``, ``search`` compares all passages.
        """
        count = min(k * (_CANDIDATES if self.recipe.type == "pq" else 1), len(self.embedding_PE))
        if isinstance(self._index, faiss_gpu.GpuIndex):
            count = min(count, faiss_gpu.MAX_SELECTED)
        if count < k:
            return torch.empty(len(query_QE), 0, dtype=torch.int64)
        return torch.from_numpy(self._index.search(query_QE.cpu().numpy(), count)[1])

    def set_search_width(self, width: int) -> None:
        if self.recipe.type == "hnsw":
            self._index.hnsw.efSearch = width
        else:
            self._index.nprobe = width

    @property
    def max_search_width(self) -> int:
        """At most a quarter of the lists (``pq``: half of them): with more an exact search is as fast."""
        limit = _MAX_WIDTH[self.recipe.type]
        if self.recipe.type == "hnsw":
            return limit
        return max(1, min(limit, self.recipe.lists // (2 if self.recipe.type == "pq" else 4)))

    def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and ids of the best candidates; a query with fewer than ``k`` is searched exactly."""
        k = min(k, len(self.embedding_PE))
        query = query_QE.detach().float().to(self.embedding_PE.device)
        id_QD = self.candidates(query, k).to(query.device)
        if id_QD.shape[1] < k:
            score_QK, id_QK = search(query, self.embedding_PE, k)
            return score_QK.to(query_QE.device), id_QK.to(query_QE.device)
        queries = zip(query, id_QD.clamp(min=0), strict=True)
        score_QD = torch.stack([self._scores(query_E, id_D) for query_E, id_D in queries])
        score_QK, place_QK = score_QD.masked_fill(id_QD < 0, -torch.inf).topk(k, dim=1)
        id_QK = id_QD.gather(1, place_QK)
        incomplete_Q = id_QK[:, -1] < 0
        if incomplete_Q.any():
            score_QK[incomplete_Q], id_QK[incomplete_Q] = search(query[incomplete_Q], self.embedding_PE, k)
        return score_QK.to(query_QE.device), id_QK.to(query_QE.device)

    def _scores(self, query_E: Tensor, id_D: Tensor) -> Tensor:
        scores = []
        for id_R in torch.split(id_D, READ_ROWS):
            scores.append(self.embedding_PE[id_R] @ query_E)
            release_pages(self.embedding_PE)
        return torch.cat(scores)

    def recall(self, query_QE: Tensor, k: int, min_Q1: Tensor | None = None) -> float:
        """Return the recall of the exact top k; passages of equal score are interchangeable.

        ``min_Q1`` are the scores of :meth:`_min_scores` where they are known.
        """
        min_Q1 = self._min_scores(query_QE, k) if min_Q1 is None else min_Q1
        return float((self.search(query_QE, k)[0].to(min_Q1.device) >= min_Q1).double().mean())

    def _min_scores(self, query_QE: Tensor, k: int) -> Tensor:
        """Return the score, Q x 1, at or above which a passage belongs to the exact top k."""
        exact_QK = search(query_QE.detach().float().to(self.embedding_PE.device), self.embedding_PE, k)[0]
        return exact_QK[:, -1:] - SCORE_TOLERANCE * exact_QK.abs().amax(1, keepdim=True)

    def tune_search_width(self, query_QE: Tensor, k: int) -> None:
        """Double the search width until the recall of the top k reaches its target; ValueError if it never does."""
        target, width, min_Q1 = self.recipe.target_recall, 1, self._min_scores(query_QE, k)
        while True:
            self.set_search_width(width)
            recall = self.recall(query_QE, k, min_Q1)
            self.recipe = replace(self.recipe, width=width, recall=recall, k=k)
            if recall >= target:
                return
            if width == self.max_search_width:
                raise ValueError(
                    f"index.target_recall {target} is not reached: index.type {self.recipe.type} finds {recall:.4f} of "
                    f"the exact top {k} at its largest search width; lower index.target_recall, or set index.type to "
                    "exact or to another type"
                )
            width = min(2 * width, self.max_search_width)


def select_type(passages: int, width: int, memory: int, *, on_gpu: bool = False) -> str:
    """Return the index type that ``index.type: auto`` selects on a device with ``memory`` bytes.

    ``pq`` if fp32 embeddings exceed a quarter of the memory. Otherwise ``exact`` on a GPU, and on a CPU up to 20
    million passages; ``ivf``, which stores the embeddings a second time, above. Never ``hnsw``: its graph takes longest
    to build.
    """
    if 4 * passages * width > PQ_MEMORY_SHARE * memory:
        return "pq"
    return "exact" if on_gpu or passages <= MAX_EXACT_PASSAGES else "ivf"


def device_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_bytes()


def passage_index(
    embedding_PE: Tensor, options: IndexOptions, device: torch.device, seed: int, queries: Callable[[], Tensor], k: int
) -> PassageIndex:
    """Build an index over embeddings, of the configured or the selected type.

    ``queries`` returns embedded queries, on which the recall of the top ``k`` is measured where it must be. ValueError
    if FAISS is not installed, there are too few passages, or the target recall is not reached.
    """
    kind = index_type(options, len(embedding_PE), embedding_PE.shape[1], device)
    if kind == "exact":
        return ExactIndex(embedding_PE.to(device))
    lists = 2 ** round(math.log2(_LISTS[kind] * math.sqrt(len(embedding_PE)))) if kind in _LISTS else 0
    index = TYPES[kind](embedding_PE, Recipe(kind, seed, lists, 1, 0.0, k, options.target_recall), device)
    index.tune_search_width(queries(), k)
    return index


def index_type(options: IndexOptions, passages: int, width: int, device: torch.device) -> str:
    """Return the configured index type, or the selected one for ``auto``."""
    kind: str = options.type
    if kind == "auto":
        kind = select_type(passages, width, device_memory(device), on_gpu=device.type == "cuda")
    if TYPES.get(kind) is ApproximateIndex:
        _faiss(kind, passages, width)
    return kind


@cache
def _log_once(level: int, kind: str, place: str) -> None:
    log.log(level, "index: %s is searched on %s", kind, place)


def unwrap_approximate(passages: PassageIndex | None) -> ApproximateIndex | None:
    """Return the index itself, or that of single vectors, where it is approximate; otherwise None."""
    index = passages.vector_index if isinstance(passages, MaxSimIndex) else passages
    return index if isinstance(index, ApproximateIndex) else None


TYPES: dict[str, type[ApproximateIndex]] = {"ivf": ApproximateIndex, "pq": ApproximateIndex, "hnsw": ApproximateIndex}
"""Approximate index types by their name in ``index.type`` and in a recipe."""


def _sample(embedding_PE: Tensor, size: int, seed: int) -> Tensor:
    """Return a random sample of ``size`` rows in their order, in memory; all rows if there are no more."""
    passages = len(embedding_PE)
    if passages <= size:
        return embedding_PE.detach().cpu()
    row_R = torch.randperm(passages, generator=torch.Generator().manual_seed(seed))[:size].sort().values
    sample_RE = torch.empty(size, embedding_PE.shape[1])
    for first in range(0, size, READ_ROWS):
        part = row_R[first : first + READ_ROWS]
        sample_RE[first : first + READ_ROWS] = embedding_PE.detach()[part.to(embedding_PE.device)].cpu()
        release_pages(embedding_PE)
    return sample_RE


def _faiss(kind: str, passages: int, width: int) -> Any:
    try:
        import faiss
    except ImportError:
        raise ValueError(
            f"index.type {kind} needs FAISS, which is not installed; pip install 'realmops[faiss]', with an NVIDIA GPU "
            "'realmops[gpu]', or set index.type=exact"
        ) from None
    if kind == "pq" and (passages < _CODE_VALUES or width % 2):
        raise ValueError(
            f"index.type pq does not support {passages} passages of width {width}; it needs {_CODE_VALUES} passages or "
            "more and an even retriever.embedding_width; set index.type=exact"
        )
    return faiss
