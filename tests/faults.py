"""What the campaign against faults shares: its length, and disks that fail or are small.

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
from pathlib import Path
from typing import Any

import pytest

CAMPAIGN = "REALMOPS_FAULTS" in os.environ
ERRORS = ("ENOSPC", "EIO", "EROFS", "torn")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("fsync", "rename", "replace", "link", "mkdir")


def times(short: int, long: int) -> int:
    """How often, in ``make test`` and in ``make faults``."""
    return long if CAMPAIGN else short


class FailingDisk:
    """Within the block, operation ``at`` (from 0) of this process that changes the disk fails, whoever asks for it.

    ``torn``: half of a write is done, then the disk is full. ``short``: no error, but every write is done in part.
    With ``lasting`` all later operations fail as well. fsync does nothing else here.
    """

    def __init__(self, at: int, kind: str, *, lasting: bool = False) -> None:
        self.at, self.kind, self.lasting, self.count = at, kind, lasting, 0
        self._patch = pytest.MonkeyPatch()

    @property
    def failed(self) -> bool:
        return self.count > self.at

    def __enter__(self) -> FailingDisk:
        usual_open, usual_write, open_file = os.open, os.write, io.open

        def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & WRITING:
                self._step(str(path))
            return usual_open(path, flags, *more, **named)

        def written(handle: int, content: Any) -> int:
            return self._write(str(handle), memoryview(content), lambda part: usual_write(handle, part))

        def file(path: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
            if not set(mode) & set("wxa+"):
                return open_file(path, mode, *more, **named)
            self._step(str(path))
            raw = _Raw(path, mode.replace("b", "").replace("t", ""))
            raw.disk = self
            buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *more[1:], **named)

        for place in (builtins, io):
            self._patch.setattr(place, "open", file)
        self._patch.setattr(os, "open", opened)
        self._patch.setattr(os, "write", written)
        for name in CHANGES:
            self._patch.setattr(os, name, self._failing(getattr(os, name), name))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _failing(self, usual: Callable[..., Any], name: str) -> Callable[..., Any]:
        def changed(*arguments: Any, **named: Any) -> Any:
            self._step(str(arguments[0]))
            return None if name == "fsync" else usual(*arguments, **named)

        return changed

    def _due(self) -> bool:
        number, self.count = self.count, self.count + 1
        return self.kind != "short" and (number == self.at or (self.lasting and number > self.at))

    def _step(self, path: str) -> None:
        if self._due():
            self._fail(path)

    def _fail(self, path: str) -> None:
        code = {"torn": errno.ENOSPC}.get(self.kind) or getattr(errno, self.kind)
        raise OSError(code, os.strerror(code), path)

    def _write(self, path: str, content: memoryview, effect: Callable[[Any], int]) -> int:
        due = self._due()
        if due and self.kind == "torn":
            effect(content[: len(content) // 2])
        if due:
            self._fail(path)
        return effect(content[: len(content) // 2 + 1] if self.kind == "short" else content)


class _Raw(io.FileIO):
    disk: FailingDisk

    def write(self, content: Any, /) -> int:
        view = memoryview(content).cast("B")
        return self.disk._write(str(self.name), view, super().write)


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
