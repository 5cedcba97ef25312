"""What the campaign against faults shares: its length, and disks that are full or small.

``make faults`` sets REALMOPS_FAULTS and runs the tests with the marker ``faults`` at full length; ``make test`` runs
the same tests cut short.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

CAMPAIGN = "REALMOPS_FAULTS" in os.environ


def times(short: int, long: int) -> int:
    """How often, in ``make test`` and in ``make faults``."""
    return long if CAMPAIGN else short


class FailingDisk:
    """Within the block, the disk is full from change number ``at`` (from 0) of this process on.

    Half of a write that meets it is done. fsync does nothing else here.
    """

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        self._patch = pytest.MonkeyPatch()

    @property
    def failed(self) -> bool:
        return self.count > self.at

    def __enter__(self) -> FailingDisk:
        usual_open, usual_write, open_file = os.open, os.write, io.open

        def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._step()
            return usual_open(path, flags, *more, **named)

        def file(path: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
            if not set(mode) & set("wxa+"):
                return open_file(path, mode, *more, **named)
            self._step()
            raw = _Raw(path, mode.replace("b", "").replace("t", ""))
            raw.disk = self
            buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *more[1:], **named)

        for place in (builtins, io):
            self._patch.setattr(place, "open", file)
        self._patch.setattr(os, "open", opened)
        self._patch.setattr(os, "write", lambda handle, content: self.write(content, partial(usual_write, handle)))
        for name in ("fsync", "rename", "replace", "link", "mkdir"):
            self._patch.setattr(os, name, self._failing(getattr(os, name), name))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _failing(self, usual: Callable[..., Any], name: str) -> Callable[..., Any]:
        def changed(*arguments: Any, **named: Any) -> Any:
            self._step()
            return None if name == "fsync" else usual(*arguments, **named)

        return changed

    def _step(self) -> None:
        self.count += 1
        if self.failed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, content: Any, effect: Callable[[Any], int]) -> int:
        if self.count == self.at:
            effect(memoryview(content)[: len(content) // 2])
        self._step()
        return effect(content)


class _Raw(io.FileIO):
    disk: FailingDisk

    def write(self, content: Any, /) -> int:
        return self.disk.write(memoryview(content).cast("B"), super().write)


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """A file system of ``size`` bytes."""
    folder = Path(tempfile.mkdtemp())
    options = f"size={size},mode=700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode
    try:
        yield folder
    finally:
        if mounted == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def may_mount() -> bool:
    with contextlib.suppress(OSError), small_disk(1 << 20) as folder:
        return os.path.ismount(folder)
    return False
