"""Approximate indexes by FAISS: recall measured and reached, exact scores, the rule of auto, fallback from a GPU."""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import faiss
import numpy as np
import pytest
import torch
from small_world import section
from torch import Tensor

from realmops.search import approximate, faiss_gpu
from realmops.search.approximate import (
    MAX_EXACT_PASSAGES,
    ApproximateIndex,
    Recipe,
    device_memory,
    index_type,
    passage_index,
    select_type,
)
from realmops.search.exact import ExactIndex
from realmops.search.inner_products import search

CPU = torch.device("cpu")
WIDTH = 32


def clustered(rows: int, seed: int) -> Tensor:
    """Vectors around 40 centres, rows x WIDTH."""
    centre_CE = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    near = torch.randint(0, 40, (rows,), generator=generator)
    return centre_CE[near] + 0.3 * torch.randn(rows, WIDTH, generator=generator)


def scattered(rows: int, seed: int, width: int = WIDTH) -> Tensor:
    """Vectors without any clusters."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def built(embedding_PE: Tensor, query_QE: Tensor, k: int = 10, *, seed: int = 0, **options: Any) -> Any:
    return passage_index(embedding_PE, section("index", **options), CPU, seed, lambda: query_QE, k)


@pytest.mark.parametrize("kind", ["ivf", "hnsw", "pq"])
def test_each_type_reaches_its_recall_with_exact_scores(kind: str) -> None:
    embedding_PE, query_QE = clustered(5000, 1), clustered(100, 2)
    index = built(embedding_PE, query_QE, type=kind, target_recall=0.95)
    assert isinstance(index, ApproximateIndex)
    assert index.recipe.type == kind
    assert index.recipe.k == 10
    score_QK, id_QK = index.search(query_QE, 10)
    exact_id = search(query_QE, embedding_PE, 10)[1]
    recalls = [len(set(a) & set(b)) / 10 for a, b in zip(id_QK.tolist(), exact_id.tolist(), strict=True)]
    assert sum(recalls) / 100 == pytest.approx(index.recipe.recall, abs=1e-9), "counted by ids, without any tolerance"
    assert index.recipe.recall >= 0.95
    torch.testing.assert_close(score_QK, torch.einsum("qe,qke->qk", query_QE, embedding_PE[id_QK]))
    assert (score_QK.diff(dim=1) <= 0).all(), "best first"
    assert all(len(set(row)) == 10 for row in id_QK.tolist())


@pytest.mark.parametrize("kind", ["ivf", "hnsw", "pq"])
def test_the_same_embeddings_and_seed_give_the_same_index(kind: str) -> None:
    embedding_PE, query_QE = clustered(1500, 1), clustered(50, 2)
    first, second = (built(embedding_PE, query_QE, seed=7, type=kind, target_recall=0.8) for _ in range(2))
    assert first.recipe == second.recipe
    again = type(first)(embedding_PE, first.recipe)
    for query_E in clustered(20, 3):
        results = [index.search(query_E[None], 10) for index in (first, second, again)]
        for score_QK, id_QK in results[1:]:
            assert torch.equal(id_QK, results[0][1])
            assert torch.equal(score_QK, results[0][0])


@pytest.mark.parametrize("kind", ["ivf", "pq"])
def test_passages_added_in_parts_give_the_index_of_all_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is trained on 12 x 64 of 70,000 passages, drawn by the seed."""
    embedding_PE, query_QE = scattered(70_000, 1, 8), scattered(50, 2, 8)
    learned = Recipe(kind, 5, 12, 3, 0.0, 10, 0.5)
    results = []
    for together in (1 << 30, 1 << 16):
        monkeypatch.setattr(approximate, "_ADDED_ROWS", together)
        results.append(ApproximateIndex(embedding_PE, learned).search(query_QE, 10))
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0], results[1][0])
    other = ApproximateIndex(embedding_PE, replace(learned, seed=6)).search(query_QE, 10)
    assert not torch.equal(other[1], results[0][1])


def test_a_sample_is_drawn_from_all_passages_without_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "READ_ROWS", 7)
    embedding_PE = torch.arange(1000.0)[:, None]
    sample_R = approximate._sample(embedding_PE, 400, 1)[:, 0]
    assert len(set(sample_R.tolist())) == 400
    assert (sample_R.diff() > 0).all()
    assert 440 < sample_R.mean() < 560
    assert torch.equal(approximate._sample(embedding_PE, 400, 1)[:, 0], sample_R)
    assert not torch.equal(approximate._sample(embedding_PE, 400, 2)[:, 0], sample_R)
    assert torch.equal(approximate._sample(embedding_PE, 1000, 1), embedding_PE)


def test_the_search_width_is_the_smallest_that_reaches_the_target() -> None:
    embedding_PE, query_QE = scattered(5000, 1), scattered(100, 2)
    low, high = (built(embedding_PE, query_QE, type="ivf", target_recall=target).recipe for target in (0.2, 0.5))
    assert low.width < high.width
    assert 0.2 <= low.recall < high.recall
    assert low.lists == high.lists == 5000 // 39


@pytest.mark.parametrize(("kind", "widest"), [("ivf", 16), ("pq", 32), ("hnsw", 1024)])
def test_the_widest_search_visits_a_part_of_the_lists(kind: str, widest: int) -> None:
    """A quarter of 64 lists, of short codes a half: with more an exact search is no slower."""
    embedding_PE = torch.randn(64 * 39, 8, generator=torch.Generator().manual_seed(0))
    assert ApproximateIndex(embedding_PE, Recipe(kind, 0, 64, 1, 0.0, 8, 0.0)).max_search_width == widest


@pytest.mark.parametrize("kind", ["ivf", "pq"])
def test_a_recall_that_cannot_be_reached_is_an_error_with_both_figures(kind: str) -> None:
    """Without clusters a quarter of the lists holds far fewer than .99 of the nearest passages."""
    embedding_PE, query_QE = scattered(5000, 1, 64), scattered(100, 2, 64)
    message = rf"index.target_recall 0.99 .*type {kind} finds (0\.\d{{4}}) of the exact top 10 .*index.type"
    with pytest.raises(ValueError, match=message) as error:
        built(embedding_PE, query_QE, type=kind, target_recall=0.99)
    measured = re.search(message, str(error.value))
    assert 0.3 < float(measured[1]) < 0.99


def test_a_query_with_too_few_candidates_is_searched_exactly() -> None:
    embedding_PE, query_QE = clustered(2000, 1), clustered(30, 2)
    index = built(embedding_PE, query_QE, k=5, type="ivf", target_recall=0.1)
    assert index.recipe.width == 1
    assert len(embedding_PE) / index.recipe.lists < 500, "one list holds fewer"
    for result, expected in zip(index.search(query_QE, 1500), search(query_QE, embedding_PE, 1500), strict=True):
        assert torch.equal(result, expected)
    assert index.search(query_QE, 5000)[1].shape == (30, 2000), "k is capped at the number of passages"


def test_passages_of_equal_scores_are_interchangeable() -> None:
    """A collapsed retriever gives all passages one embedding: whichever are found, none is missed."""
    index = built(torch.ones(300, WIDTH), scattered(5, 1), type="ivf", target_recall=1.0)
    assert index.recipe.recall == 1.0


def test_exact_is_plain_search() -> None:
    embedding_PE, query_QE = scattered(300, 1), scattered(3, 2)
    index = built(embedding_PE, query_QE, type="exact")
    assert isinstance(index, ExactIndex)
    assert torch.equal(index.search(query_QE, 7)[1], search(query_QE, embedding_PE, 7)[1])
    assert isinstance(built(embedding_PE, query_QE, type="auto"), ExactIndex)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("passages", "width", "memory", "expected"),
    [
        (1_000_000, 128, 8 * GIB, "exact"),  # 0.5 GB of 8
        (13_000_000, 128, 16 * GIB, "pq"),  # 6.7 GB are more than a quarter of 17
        (13_000_000, 128, 32 * GIB, "exact"),  # but less than a quarter of 34
        (20_000_000, 128, 64 * GIB, "exact"),
        (20_000_001, 128, 64 * GIB, "ivf"),
        (100_000_000, 128, 256 * GIB, "ivf"),  # 51 GB of 275
        (100_000_000, 128, 64 * GIB, "pq"),
        (1_000_000_000, 128, 1024 * GIB, "pq"),
        (2, 1, 32, "exact"),  # exactly a quarter
        (2, 1, 31, "pq"),
    ],
)
def test_the_rule_of_auto(passages: int, width: int, memory: int, expected: str) -> None:
    assert select_type(passages, width, memory) == expected
    assert select_type(passages, width, memory, on_gpu=True) == expected.replace("ivf", "exact")


def test_auto_selects_by_the_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "device_memory", lambda device: 64 * GIB)
    assert index_type(section("index", type="auto"), MAX_EXACT_PASSAGES + 1, 128, CPU) == "ivf"
    assert index_type(section("index", type="hnsw"), MAX_EXACT_PASSAGES + 1, 128, CPU) == "hnsw"
    assert device_memory(CPU) > 100 << 20


def test_without_faiss_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    for kind in ("ivf", "hnsw", "pq"):
        with pytest.raises(
            ValueError, match=rf"type {kind} needs FAISS.*'realmops\[faiss\]'.*GPU 'realmops\[gpu\]'.*index.type=exact"
        ):
            index_type(section("index", type=kind), 5000, 128, CPU)
    assert index_type(section("index", type="exact"), 5000, 128, CPU) == "exact"


def test_pq_needs_passages_to_train_its_codes() -> None:
    with pytest.raises(ValueError, match=r" 255 passages of width 32; .*256 passages or more.*set index.type=exact"):
        built(scattered(255, 1), scattered(5, 2), type="pq")
    assert isinstance(built(scattered(256, 1), scattered(5, 2), type="pq", target_recall=0.1), ApproximateIndex)


# A GPU: the fake has the signatures and limits of faiss-gpu 1.15.1 (swigfaiss.py, GpuIndexIVFPQ.cu), on the CPU.

CUDA = torch.device("cuda", 0)
GPU = "NVIDIA Test"


class StandardGpuResources:
    made: ClassVar[list["StandardGpuResources"]] = []

    def __init__(self) -> None:
        self.temporary: int | None = None
        self.made.append(self)

    def setTempMemory(self, size: int) -> None:
        self.temporary = size


class FakeGpuIndex:
    """The result of index_cpu_to_gpu: an index without the attributes of one on the CPU."""

    def __init__(self, index: Any, half: bool) -> None:
        self._index, self.half, self.nprobe = index, half, 1

    @property
    def cp(self) -> Any:
        return self._index.cp

    def train(self, x: np.ndarray) -> None:
        self._index.train(x)

    def add(self, x: np.ndarray) -> None:
        self._index.add(x)

    def search(self, x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        if k > 2048:
            raise RuntimeError(f"GPU index only supports min/max-K selection up to 2048 (requested {k})")
        if self.nprobe > 2048:
            raise RuntimeError(f"GPU IVF index only supports nprobe selection up to 2048 (requested {self.nprobe})")
        self._index.nprobe = self.nprobe
        found: tuple[np.ndarray, np.ndarray] = self._index.search(x, k)
        return found


def index_cpu_to_gpu(provider: StandardGpuResources, device: int, index: Any, options: Any = None) -> FakeGpuIndex:
    assert isinstance(provider, StandardGpuResources)
    assert device == 0
    assert not index.is_trained
    if isinstance(index, faiss.IndexIVFPQ):
        if index.pq.nbits != 8 or not index.by_residual or index.polysemous_ht:
            raise RuntimeError("GPU: only pq.nbits == 8 is supported")
        if index.pq.M not in (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96):
            raise RuntimeError(f"Number of bytes per encoded vector / sub-quantizers ({index.pq.M}) is not supported")
        if index.pq.M * 256 * (2 if options.useFloat16 else 4) > 48 << 10:
            raise RuntimeError("Consider useFloat16LookupTables and/or reduce parameters")
    elif not isinstance(index, faiss.IndexIVFFlat):
        raise RuntimeError("This index type is not implemented on GPU.")
    return FakeGpuIndex(index, options.useFloat16)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A GPU, a FAISS for it, and a trial that succeeds."""
    for name, value in {
        "StandardGpuResources": StandardGpuResources,
        "GpuClonerOptions": lambda: SimpleNamespace(useFloat16=False),
        "index_cpu_to_gpu": index_cpu_to_gpu,
        "get_num_gpus": lambda: 1,
    }.items():
        monkeypatch.setattr(faiss, name, value, raising=False)
    monkeypatch.setattr(faiss_gpu, "find_gpu_failure", lambda number: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    StandardGpuResources.made.clear()
    approximate._log_once.cache_clear()
    yield monkeypatch
    approximate._log_once.cache_clear()


def built_on_gpu(embedding_PE: Tensor, query_QE: Tensor, k: int = 10, **options: Any) -> ApproximateIndex:
    index = passage_index(embedding_PE, section("index", **options), CUDA, 0, lambda: query_QE, k)
    assert isinstance(index, ApproximateIndex)
    return index


@pytest.mark.usefixtures("gpu")
def test_ivf_on_a_gpu_equals_that_on_the_cpu() -> None:
    embedding_PE, query_QE = clustered(5000, 1), clustered(100, 2)
    ours = built(embedding_PE, query_QE, type="ivf", target_recall=0.95)
    there = built_on_gpu(embedding_PE, query_QE, type="ivf", target_recall=0.95)
    assert (ours.place, there.place) == ("the CPU", f"the GPU {GPU}")
    assert there.recipe == ours.recipe
    for k in (1, 10):
        assert torch.equal(there.search(query_QE, k)[1], ours.search(query_QE, k)[1])
        assert torch.equal(there.search(query_QE, k)[0], ours.search(query_QE, k)[0])
    [resources] = StandardGpuResources.made
    assert resources.temporary == 512 << 20


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("width", "code", "half"), [(32, 16, False), (128, 64, True), (384, 96, True)])
def test_pq_on_a_gpu_has_codes_that_a_gpu_supports(width: int, code: int, half: bool) -> None:
    embedding_PE, query_QE = scattered(600, 1, width), scattered(20, 2, width)
    index = built_on_gpu(embedding_PE, query_QE, type="pq", target_recall=0.1)
    structure = index._index._index
    assert (structure._index.pq.M, structure._index.pq.nbits, structure.half) == (code, 8, half)
    assert faiss_gpu.code_bytes(width) == code
    score_QK, id_QK = index.search(query_QE, 10)
    torch.testing.assert_close(score_QK, torch.einsum("qe,qke->qk", query_QE, embedding_PE[id_QK]))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ["ivf", "pq"])
def test_more_results_than_a_gpu_selects_are_searched_exactly(kind: str) -> None:
    """300 results of pq need 4,800 candidates, of which a GPU returns 2,048; 2,500 results are compared exactly."""
    embedding_PE, query_QE = clustered(6000, 1), clustered(5, 2)
    index = built_on_gpu(embedding_PE, query_QE, type=kind, target_recall=0.5)
    index.set_search_width(index.max_search_width)
    assert index.candidates(query_QE, 300).shape[1] == (2048 if kind == "pq" else 300)
    assert index.search(query_QE, 300)[1].shape == (5, 300)
    assert torch.equal(index.search(query_QE, 2500)[1], search(query_QE, embedding_PE, 2500)[1])


@pytest.mark.parametrize(
    ("kind", "width", "change", "reason", "level"),
    [
        ("hnsw", 32, {}, "FAISS does not support hnsw on GPUs", "INFO"),
        ("ivf", 32, {"get_num_gpus": lambda: 0}, "FAISS finds no GPU", "WARNING"),
        ("ivf", 32, {"StandardGpuResources": None}, "the installed FAISS is CPU-only .*extra gpu", "WARNING"),
        ("pq", 34, {}, "FAISS does not support pq of width 34 on GPUs", "WARNING"),
        ("ivf", 32, {"find_gpu_failure": lambda number: "no kernel image"}, "no kernel image", "WARNING"),
        ("ivf", 32, {"index_cpu_to_gpu": "full"}, "RuntimeError: cudaMalloc of 640,000 bytes failed", "WARNING"),
    ],
)
def test_an_index_that_a_gpu_does_not_support_is_on_the_cpu_and_the_reason_is_logged_once(
    kind: str, width: int, change: dict[str, Any], reason: str, level: str,
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def full(*_: Any) -> None:
        raise RuntimeError("cudaMalloc of 640,000 bytes failed")

    for name, value in change.items():
        if value is None:
            gpu.delattr(faiss, name)
        else:
            gpu.setattr(faiss_gpu if name == "find_gpu_failure" else faiss, name, full if value == "full" else value)
    embedding_PE, query_QE = scattered(1000, 1, width), scattered(20, 2, width)
    with caplog.at_level(logging.INFO, logger=approximate.__name__):
        first, second = (built_on_gpu(embedding_PE, query_QE, type=kind, target_recall=0.1) for _ in range(2))
    assert re.fullmatch(rf"the CPU \({reason}.*\)", first.place)
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == (level, f"index: {kind} is searched on {first.place}")
    expected = built(embedding_PE, query_QE, type=kind, target_recall=0.1)
    assert torch.equal(second.search(query_QE, 5)[1], expected.search(query_QE, 5)[1])


@pytest.fixture
def trial() -> Iterator[Callable[[int], str]]:
    faiss_gpu.find_gpu_failure.cache_clear()
    yield faiss_gpu.find_gpu_failure
    faiss_gpu.find_gpu_failure.cache_clear()


def test_a_trial_that_aborts_its_process_is_reported_once_for_each_gpu(
    trial: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = "Faiss assertion 'err__ == cudaSuccess' failed; details: CUDA error 209 no kernel image is available"
    program = f"import os, sys\nprint({failure!r}, file=sys.stderr, flush=True)\nos.abort()"
    monkeypatch.setattr(faiss_gpu, "_TRIAL", program)
    assert trial(0) == f"a trial of FAISS on the GPU failed: {failure}"
    monkeypatch.setattr(faiss_gpu, "_TRIAL", "import sys\nassert sys.argv[1] == '1'")
    assert trial(1) == ""
    assert trial(0).endswith("no kernel image is available"), "once for each GPU"
    monkeypatch.setattr(faiss_gpu, "_TRIAL", "import os\nos.abort()")
    assert trial(2) == "a trial of FAISS on the GPU failed: exit code -6"


def test_the_trial_runs_the_installed_faiss(trial: Callable[[int], str]) -> None:
    """There is no GPU here: the FAISS for CPUs lacks the function, the one for GPUs finds none."""
    lacks = "AttributeError: module 'faiss' has no attribute 'StandardGpuResources'"
    assert lacks in trial(0) or "Invalid GPU device 0" in trial(0)
