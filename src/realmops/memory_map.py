"""Memory-mapped files for large matrices, so that they need not fit into memory.

Computed data are in unnamed files in TMPDIR, which disappear with their process even if that is killed.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MIN_BYTES = 32 << 20  # smaller data stay in memory
SPARE_ROOM = 1.2  # free disk space required for a file, as a multiple of its size
_BLOCK = 16 << 20  # bytes

Content = bytes | mmap.mmap
"""The bytes of a file, in memory or mapped."""

_MAPS: list[tuple[int, weakref.ref[mmap.mmap]]] = []  # (start address, map) of every map of this process
_LOCK = Lock()  # protects _MAPS and the process's warning filters


def open_scratch(size: int) -> IO[bytes] | None:
    """Open an unnamed temporary file of ``size`` bytes; None if it is small, or if there is too little disk space."""
    folder = tempfile.gettempdir()
    if size < MIN_BYTES or shutil.disk_usage(folder).free < SPARE_ROOM * size:
        return None
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
    try:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk during a write to a mapped file kills the process
    except OSError:
        file.close()
        return None
    return file


def map_file(file: IO[bytes]) -> mmap.mmap:
    """Map a file for reading; the map stays valid when the file is closed or deleted."""
    file.flush()
    return _register(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def allocate_matrix(rows: int, width: int) -> Tensor:
    """Allocate rows x width fp32 numbers for writing: in memory, or in a mapped file if they are large."""
    import torch

    file = open_scratch(4 * rows * width)
    if file is None:
        return torch.empty(rows, width)
    with file:
        buffer = _register(mmap.mmap(file.fileno(), 4 * rows * width))
    return torch.frombuffer(buffer, dtype=torch.float32).view(rows, width)


def view_fp32(content: Content, offset: int) -> Tensor:
    """Return a view of the fp32 numbers from ``offset`` on; callers must not write to it."""
    import torch

    with _LOCK, warnings.catch_warnings(action="ignore"):  # torch warns that the buffer is read-only
        return torch.frombuffer(content, dtype=torch.float32, offset=offset)


def release_pages(data: Tensor | Content) -> None:
    """Drop the resident pages of mapped data, which are read again on access; do nothing for other data."""
    if not isinstance(data, bytes | mmap.mmap):
        address = data.untyped_storage().data_ptr()
        maps = [(start, buffer) for start, reference in tuple(_MAPS) if (buffer := reference()) is not None]
        data = next((buffer for start, buffer in maps if 0 <= address - start < len(buffer)), b"")
    if isinstance(data, mmap.mmap):
        data.madvise(mmap.MADV_DONTNEED)  # keeps written data: the maps are shared with their files


def iter_blocks(content: Content) -> Iterator[memoryview]:
    """Yield all bytes in order, in blocks of 16 MiB; at most one block of a mapped file is resident."""
    for first in range(0, len(content), _BLOCK):
        yield memoryview(content)[first : first + _BLOCK]
        release_pages(content)


def _register(buffer: mmap.mmap) -> mmap.mmap:
    import numpy as np

    start = np.frombuffer(buffer, np.uint8).ctypes.data
    with _LOCK:
        _MAPS[:] = [
            *((at, reference) for at, reference in _MAPS if reference() is not None),
            (start, weakref.ref(buffer)),
        ]
    return buffer


def memory_bytes() -> int:
    """Return this machine's memory in bytes, at most the limit of this process's control group."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no control groups, or the limit is "max"
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
