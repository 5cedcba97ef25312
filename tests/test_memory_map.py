"""Large matrices in files without a name: what is written stays, and no memory is held."""

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
from realmops.search.approximate import FaissIndex, Recipe

CPU = torch.device("cpu")
THREADS, MAPS = 8, 150


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_map, "MIN_BYTES", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def of(content: bytes) -> mmap.mmap:
    """A mapped file with that content."""
    file = open_scratch(len(content))
    with file:
        file.write(content)
        return memory_map.map_file(file)


def made(size: int) -> bool:
    """Whether there is a file for so many bytes."""
    file = open_scratch(size)
    if file is not None:
        file.close()
    return file is not None


def test_a_file_for_a_large_matrix_has_no_name_and_is_as_large_as_asked(tmp_path: Path) -> None:
    file = open_scratch(100_000)
    with file:
        assert os.fstat(file.fileno()).st_size == 100_000
        assert os.listdir(tmp_path) == []


def test_what_is_small_or_has_no_room_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_map, "MIN_BYTES", 101)
    assert not made(100)
    assert made(101)
    for free in (1199, 1200):
        room = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, room=room: room)
        assert made(1000) == (free == 1200)
        assert allocate_matrix(125, 2).shape == (125, 2)


def test_what_was_written_is_there_after_its_pages_were_dropped() -> None:
    wanted = torch.randn(3000, 7)
    found = allocate_matrix(3000, 7)
    found[:] = wanted
    for held in (found, found[100:], found.T):
        release_pages(held)
        assert torch.equal(found, wanted)


def test_memory_that_is_no_file_is_left_as_it_is() -> None:
    keep = allocate_matrix(3000, 7)
    wanted = torch.arange(100_000.0)
    found = wanted.clone()
    release_pages(found)
    release_pages(torch.empty(0))
    assert torch.equal(found, wanted)
    content = bytes(range(256)) * 100
    release_pages(content)
    assert content == bytes(range(256)) * 100
    assert len(keep) == 3000


def test_blocks_are_all_bytes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_map, "_BLOCK", 1000)
    for size in (1, 999, 1000, 1001, 5500):
        content = os.urandom(size)
        for kind in (content, of(content)):
            found = [bytes(block) for block in iter_blocks(kind)]
            assert b"".join(found) == content
            assert max(map(len, found)) <= 1000
    assert list(iter_blocks(b"")) == []


def test_numbers_are_read_where_they_lie() -> None:
    content = b"head" + torch.arange(6.0).numpy().tobytes()
    for kind in (content, of(content)):
        assert view_fp32(kind, 4).tolist() == [0, 1, 2, 3, 4, 5]


ANONYMOUS = """
import torch
from realmops import memory_map
from realmops.search.approximate import FaissIndex, Recipe
def held():
    lines = [line.split() for line in open("/proc/self/status")]
    return [int(line[1]) / 1024 for line in lines if line[0] in ("RssAnon:", "RssFile:")]
torch.set_num_threads(1)
rows = torch.randn(1000, 128)
found = memory_map.allocate_matrix(300_000, 128)  # 146 MiB
for first in range(0, 300_000, 1000):
    found[first : first + 1000] = rows + first / 300_000
memory_map.release_pages(found)
FaissIndex(found[:5000].clone(), Recipe("pq", 0, 64, 1, 0.0, 8, 0.0)).tune_search_width(rows[:8], 8)
before = held()
index = FaissIndex(found, Recipe("pq", 0, 64, 1, 0.0, 8, 0.0))
index.tune_search_width(rows[:8], 8)
print(*(now - then for now, then in zip(held(), before)))
"""


def test_a_structure_over_mapped_embeddings_holds_no_second_copy() -> None:
    """146 MiB of embeddings; the codes are 9 MiB, what is added at a time is read where it lies."""
    process = subprocess.run([sys.executable, "-c", ANONYMOUS], capture_output=True, text=True, check=True)
    anonymous, mapped_files = map(float, process.stdout.split())
    assert max(anonymous, mapped_files) < 73


@pytest.mark.parametrize("kind", ["ivf", "hnsw", "pq"])
def test_an_index_over_mapped_embeddings_is_that_over_the_same_in_memory(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    kept = torch.randn(4000, 16, generator=generator)
    query_QE = torch.randn(20, 16, generator=generator)
    there = allocate_matrix(4000, 16)
    there[:] = kept
    indexes = [FaissIndex(e, Recipe(kind, 3, 20, 1, 0.0, 10, 0.5)) for e in (kept, there)]
    for index in indexes:
        index.tune_search_width(query_QE, 10)
    assert indexes[0].recipe == indexes[1].recipe
    (score_QK, id_QK), (mapped_QK, mapped_id_QK) = (index.search(query_QE, 10) for index in indexes)
    assert torch.equal(id_QK, mapped_id_QK)
    assert torch.equal(score_QK, mapped_QK)


def test_files_are_mapped_and_released_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is found again, and warnings stay what they are."""
    dropped: list[int] = []

    class Watched(mmap.mmap):
        def madvise(self, option: int, *place: int) -> None:
            dropped.append(id(self))
            super().madvise(option, *place)

    monkeypatch.setattr(memory_map.mmap, "mmap", Watched)
    filters, interval = list(warnings.filters), sys.getswitchinterval()

    def work() -> list[torch.Tensor]:
        held = [allocate_matrix(10, 2) for _ in range(MAPS)]
        for one in held:
            release_pages(one[2:])
        return held

    sys.setswitchinterval(1e-6)
    try:
        held = at_once(*[work] * THREADS)
    finally:
        sys.setswitchinterval(interval)
    assert len(set(dropped)) == len(dropped) == THREADS * MAPS == sum(map(len, held))
    assert warnings.filters == filters
