"""Memory-mapped matrices in unnamed files: they keep their content, and take no memory."""

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_world import at_once

from realmops import memory_map
from realmops.memory_map import allocate_matrix, iter_blocks, open_scratch, release_pages, view_fp32
from realmops.search.approximate import ApproximateIndex, Recipe

CPU = torch.device("cpu")
THREADS, MAPS = 8, 150


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_map, "MIN_BYTES", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def mapped(content: bytes) -> mmap.mmap:
    with open_scratch(len(content)) as file:
        file.write(content)
        return memory_map.map_file(file)


def has_scratch(size: int) -> bool:
    file = open_scratch(size)
    if file is not None:
        file.close()
    return file is not None


def test_a_scratch_file_has_no_name_and_the_requested_size(tmp_path: Path) -> None:
    with open_scratch(100_000) as file:
        assert os.fstat(file.fileno()).st_size == 100_000
        assert os.listdir(tmp_path) == []


def test_small_data_and_data_without_disk_space_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_map, "MIN_BYTES", 101)
    assert [has_scratch(size) for size in (100, 101)] == [False, True]
    for free in (1199, 1200):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        assert has_scratch(1000) == (free == 1200)
        assert allocate_matrix(125, 2).shape == (125, 2)


def test_released_pages_keep_their_content() -> None:
    for matrix in (allocate_matrix(3000, 7), torch.empty(3000, 7)):  # the second is in no file
        matrix[:] = expected = torch.randn(3000, 7)
        for view in (matrix, matrix[100:], matrix.T, torch.empty(0)):
            release_pages(view)
            assert torch.equal(matrix, expected)


def test_blocks_are_all_bytes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_map, "_BLOCK", 1000)
    for size in (1, 999, 1000, 1001, 5500):
        content = os.urandom(size)
        for form in (content, mapped(content)):
            blocks = [bytes(block) for block in iter_blocks(form)]
            assert b"".join(blocks) == content
            assert max(map(len, blocks)) <= 1000
    assert list(iter_blocks(b"")) == []


def test_numbers_are_views_of_the_bytes() -> None:
    content = b"head" + torch.arange(6.0).numpy().tobytes()
    for form in (content, mapped(content)):
        assert view_fp32(form, 4).tolist() == [0, 1, 2, 3, 4, 5]


ANONYMOUS = """
import torch
from realmops import memory_map
from realmops.search.approximate import ApproximateIndex, Recipe
def held():
    lines = [line.split() for line in open("/proc/self/status")]
    return [int(line[1]) / 1024 for line in lines if line[0] in ("RssAnon:", "RssFile:")]
torch.set_num_threads(1)
rows = torch.randn(1000, 128)
found = memory_map.allocate_matrix(300_000, 128)  # 146 MiB
for first in range(0, 300_000, 1000):
    found[first : first + 1000] = rows + first / 300_000
memory_map.release_pages(found)
ApproximateIndex(found[:5000].clone(), Recipe("pq", 0, 64, 1, 0.0, 8, 0.0)).tune_search_width(rows[:8], 8)
before = held()
index = ApproximateIndex(found, Recipe("pq", 0, 64, 1, 0.0, 8, 0.0))
index.tune_search_width(rows[:8], 8)
print(*(now - then for now, then in zip(held(), before)))
"""


def test_an_index_over_mapped_embeddings_holds_no_second_copy() -> None:
    """146 MiB of embeddings; the codes are 9 MiB."""
    process = subprocess.run([sys.executable, "-c", ANONYMOUS], capture_output=True, text=True, check=True)
    assert max(map(float, process.stdout.split())) < 73


@pytest.mark.parametrize("kind", ["ivf", "hnsw", "pq"])
def test_an_index_over_mapped_embeddings_equals_that_in_memory(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding_PE = torch.randn(4000, 16, generator=generator)
    query_QE = torch.randn(20, 16, generator=generator)
    mapped_PE = allocate_matrix(4000, 16)
    mapped_PE[:] = embedding_PE
    results = []
    for rows in (embedding_PE, mapped_PE):
        index = ApproximateIndex(rows, Recipe(kind, 3, 20, 1, 0.0, 10, 0.5))
        index.tune_search_width(query_QE, 10)
        results.append((index.recipe, *index.search(query_QE, 10)))
    (recipe, *expected), (other_recipe, *found) = results
    assert recipe == other_recipe
    assert all(map(torch.equal, found, expected))


def test_threads_map_and_release_files_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each map is found, and warning filters are unchanged."""
    released: list[int] = []

    class Watched(mmap.mmap):
        def madvise(self, option: int, *place: int) -> None:
            released.append(id(self))
            super().madvise(option, *place)

    monkeypatch.setattr(memory_map.mmap, "mmap", Watched)
    filters, interval = list(warnings.filters), sys.getswitchinterval()

    def work() -> list[torch.Tensor]:
        matrices = [allocate_matrix(10, 2) for _ in range(MAPS)]
        for matrix in matrices:
            release_pages(matrix[2:])
        return matrices

    sys.setswitchinterval(1e-6)
    try:
        built = at_once(*[work] * THREADS)
    finally:
        sys.setswitchinterval(interval)
    assert len(set(released)) == len(released) == THREADS * MAPS == sum(map(len, built))
    assert warnings.filters == filters
