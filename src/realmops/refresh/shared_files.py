"""The file layer of the exchange: every effect on the shared volume goes through :class:`Files`.

Each operation passes through one function, ``around(operation, path, effect)``, which by default just
runs the effect. Tests put theirs there: it can kill before or after the effect, raise ENOSPC or EIO
instead of it, run it and report an error all the same (a reply lost on NFS), or let another process go
first. Time comes from :class:`Clock`; nothing here compares the clocks of two machines.
"""

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.search.mapped import SPARE_ROOM, Content, blocks, mapped, scratch

Around = Callable[[str, Path, Callable[[], Any]], Any]

_CHUNK = 1 << 22


class Clock:
    """The time of this machine; tests inject their own."""

    def monotonic(self) -> float:
        """Seconds, for intervals."""
        return time.monotonic()

    def unix(self) -> float:
        """Seconds since 1970, written down for people and never compared."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Files:
    """Operations on the volume, each of them one step that can fail or be the last one."""

    def __init__(self, around: Around | None = None) -> None:
        self._around: Around = around or (lambda operation, path, effect: effect())

    def listdir(self, folder: Path) -> list[str]:
        """The sorted names in a folder; none where the folder is missing."""
        try:
            return sorted(self._around("listdir", folder, lambda: os.listdir(folder)))
        except FileNotFoundError:
            return []

    def read(self, path: Path, limit: int, *, copied: bool = False) -> Any:
        """Return the bytes of a plain file of at most ``limit`` bytes; ValueError for anything else.

        With ``copied``, those of a large file are a mapped copy where there is room for one (mapped.py).
        """
        return self._around("read", path, lambda: _read(path, limit, copied))

    def write(self, path: Path, content: Content) -> None:
        """Create a file that is not there yet and make its bytes durable.

        An error of write, fsync or close is final: a second fsync reports success and has lost the data.
        """
        free = self._around("free", path, lambda: free_bytes(path.parent))
        if free < SPARE_ROOM * len(content):
            raise OSError(
                errno.ENOSPC,
                f"no room: {SPARE_ROOM * len(content) / 1e6:.1f} MB are wanted for this file and "
                f"{free / 1e6:.1f} MB are free; make room on the volume",
                str(path),
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = self._around("create", path, lambda: os.open(path, flags, 0o640))
        try:
            self._around("write", path, lambda: _write_all(handle, content))
            self._around("fsync", path, lambda: os.fsync(handle))
        finally:
            os.close(handle)

    def replace(self, path: Path, content: bytes) -> None:
        """Put a whole new file in the place of ``path``, not made durable: for signs of life only."""
        draft = path.with_name(f".{path.name}.draft")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._around("draft", draft, lambda: _write_and_close(os.open(draft, flags, 0o640), content))
        self._around("rename", path, lambda: os.rename(draft, path))

    def mkdir(self, folder: Path) -> None:
        """Create one folder; FileExistsError when the name is taken."""
        self._around("mkdir", folder, lambda: os.mkdir(folder, 0o750))

    def rename(self, old: Path, new: Path) -> None:
        """Move a folder to a free name in the same parent; OSError when that is a folder in use."""
        self._around("rename", new, lambda: os.rename(old, new))

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        self._around("sync_folder", folder, lambda: artifacts.sync_folder(folder))

    def unlink(self, path: Path) -> None:
        self._around("unlink", path, lambda: os.unlink(path))

    def delete(self, folder: Path) -> None:
        """Delete a folder of plain files, each step on its own; of a link only the link."""
        if os.path.islink(folder):
            self.unlink(folder)
            return
        for name in self.listdir(folder):
            self.unlink(folder / name)
        self.rmdir(folder)

    def rmdir(self, folder: Path) -> None:
        self._around("rmdir", folder, lambda: os.rmdir(folder))


def _read(path: Path, limit: int, copied: bool) -> Content:
    if os.path.islink(path.parent):
        raise ValueError(f"{path.parent} is a symbolic link, wanted a folder")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link, wanted a plain file") from None
        raise
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a plain file")
        if status.st_size > limit:  # looked at first: nothing is allocated for a file that is too long
            raise ValueError(f"{path} has {status.st_size} bytes, more than the expected {limit}")
        room = scratch(status.st_size) if copied else None
        if room is None:
            return file.read()
        with room:
            shutil.copyfileobj(file, room, _CHUNK)
            return mapped(room)


def _write_all(handle: int, content: Content) -> None:
    for block in blocks(content):
        rest = block
        while rest:
            rest = rest[os.write(handle, rest) :]


def _write_and_close(handle: int, content: bytes) -> None:
    try:
        _write_all(handle, content)
    finally:
        os.close(handle)


def writable(folder: Path) -> bool:
    """Whether this process may write in a folder; never on a volume mounted read-only."""
    return os.access(folder, os.W_OK)


def modified(path: Path) -> float:
    """Seconds since 1970 by the clock of the volume, or of the machine that wrote; for people only."""
    return os.stat(path).st_mtime


def free_bytes(folder: Path) -> int:
    """What is free on the volume."""
    return shutil.disk_usage(folder).free
