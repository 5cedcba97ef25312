"""Large matrices in files that are mapped: the system reads and drops their pages as it likes, so they need no memory.

What is computed or copied here lies in a file of its own in the folder for temporary files (TMPDIR). It has no name:
it goes with the process that uses it, also when that is killed.
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

LEAST = 32 << 20  # bytes; what is smaller stays in memory
SPARE_ROOM = 1.2  # a file is written only where this many times its size is free
_BLOCK = 16 << 20

Content = bytes | mmap.mmap
"""The bytes of a file, in memory or mapped."""

_MAPS: list[tuple[int, weakref.ref[mmap.mmap]]] = []  # with the addresses where they begin
_MAPPING = Lock()  # of that list, and of the process's warning filters


def scratch(size: int) -> IO[bytes] | None:
    """A file of so many bytes without a name; None where it is small, or the folder for such files has no room."""
    folder = tempfile.gettempdir()
    if size < LEAST or shutil.disk_usage(folder).free < SPARE_ROOM * size:
        return None
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
    try:
        os.posix_fallocate(file.fileno(), 0, size)  # a mapped file that finds no room later is the end of the process
    except OSError:
        file.close()
        return None
    return file


def mapped(file: IO[bytes]) -> mmap.mmap:
    """A file's bytes, mapped; they stay when the file is closed or its name is gone."""
    file.flush()
    return _known(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def matrix(rows: int, width: int) -> Tensor:
    """Room for rows x width fp32 numbers, to be written: in memory, or mapped where it is large."""
    import torch

    file = scratch(4 * rows * width)
    if file is None:
        return torch.empty(rows, width)
    with file:
        found = _known(mmap.mmap(file.fileno(), 4 * rows * width))
    return torch.frombuffer(found, dtype=torch.float32).view(rows, width)


def read_only(content: Content, offset: int) -> Tensor:
    """The fp32 numbers behind ``offset``, in the same memory; nobody may write to them."""
    import torch

    with _MAPPING, warnings.catch_warnings(action="ignore"):  # that they cannot be written
        return torch.frombuffer(content, dtype=torch.float32, offset=offset)


def release(held: Tensor | Content) -> None:
    """Drop the pages of a mapped file from this process; it finds them in the file again. Else nothing."""
    if not isinstance(held, bytes | mmap.mmap):
        address = held.untyped_storage().data_ptr()
        maps = [(start, found) for start, known in tuple(_MAPS) if (found := known()) is not None]
        held = next((found for start, found in maps if 0 <= address - start < len(found)), b"")
    if isinstance(held, mmap.mmap):
        held.madvise(mmap.MADV_DONTNEED)  # of a file nothing is lost, not even what was written


def blocks(content: Content) -> Iterator[memoryview]:
    """All bytes in order, some MiB at a time; of a mapped file no more than that is in memory."""
    for first in range(0, len(content), _BLOCK):
        yield memoryview(content)[first : first + _BLOCK]
        release(content)


def _known(found: mmap.mmap) -> mmap.mmap:
    import numpy as np

    start = np.frombuffer(found, np.uint8).ctypes.data
    with _MAPPING:
        _MAPS[:] = [*((at, known) for at, known in _MAPS if known() is not None), (start, weakref.ref(found))]
    return found


def memory_bytes() -> int:
    """This machine's memory, no more than the control group of this process may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no control groups, or no limit ("max")
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
