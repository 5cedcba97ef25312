"""The file layer: what is committed on a disk or a shared volume goes through :class:`Files`.

Each operation passes through the hook ``around(operation, path, effect)``, where tests inject faults: a killed
process, ENOSPC, or an error after success (a reply lost on NFS). The clocks of two machines are never compared.
"""

import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from realmops.memory_map import SPARE_ROOM, Content, iter_blocks, map_file, open_scratch

Around = Callable[[str, Path, Callable[[], Any]], Any]

DEAD = ".dead."  # prefix of folders that are being deleted
_CHUNK = 1 << 22  # bytes copied at once


class Clock:
    """The time of this machine; tests inject their own."""

    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        """Return seconds since 1970, which are recorded for people and never compared."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Files:
    """Operations on the volume; each is one step, at which the process may fail. ``folder_mode`` precedes the umask."""

    def __init__(self, around: Around | None = None, *, folder_mode: int = 0o750) -> None:
        self._around: Around = around or (lambda operation, path, effect: effect())
        self._folder_mode = folder_mode

    def listdir(self, folder: Path) -> list[str]:
        try:
            return sorted(self._around("listdir", folder, lambda: os.listdir(folder)))
        except FileNotFoundError:
            return []

    def read(self, path: Path, limit: int, *, copied: bool = False, depth: int = 1) -> Any:
        """Return the bytes of a regular file; with ``copied`` map a local copy of a large one, if it fits.

        ValueError for more than ``limit`` bytes, or if the file or one of ``depth`` folders above is a symbolic link.
        """
        return self._around("read", path, lambda: _read(path, limit, copied, depth))

    def write(self, path: Path, content: Content) -> None:
        """Create a durable file; a failed fsync is final: a second one would report success although data is lost."""
        free = self._around("free", path, lambda: free_bytes(path.parent))
        if free < SPARE_ROOM * len(content):
            raise OSError(
                errno.ENOSPC,
                f"no space left on the volume: {free / 1e6:.1f} MB are free, this file needs "
                f"{SPARE_ROOM * len(content) / 1e6:.1f} MB; free some space",
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
        """Replace ``path`` atomically without making it durable, which is enough for heartbeats."""
        draft = path.with_name(f".{path.name}.draft")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._around("draft", draft, lambda: _write_file(draft, flags, content))
        self._around("rename", path, lambda: os.rename(draft, path))

    def mkdir(self, folder: Path) -> None:
        self._around("mkdir", folder, lambda: os.mkdir(folder, self._folder_mode))

    def rename(self, old: Path, new: Path) -> None:
        """Rename a folder within its parent; OSError if the new name is a folder that is not empty."""
        self._around("rename", new, lambda: os.rename(old, new))

    def sync_folder(self, folder: Path) -> None:
        self._around("sync_folder", folder, lambda: _sync_folder(folder))

    def make_folder(self, folder: Path) -> None:
        """Create a folder and its missing parents, each with a durable name; NFS caches a failed lookup of a name."""
        try:
            self.mkdir(folder)
        except FileExistsError:
            return
        except FileNotFoundError:
            if folder == folder.parent:
                raise
            self.make_folder(folder.parent)
            with suppress(FileExistsError):
                self.mkdir(folder)
        self.sync_folder(folder.parent)

    def sync_folders(self, folder: Path) -> None:
        for path, _, _ in os.walk(folder, topdown=False):
            self.sync_folder(Path(path))

    def discard(self, folder: Path) -> None:
        """Claim a folder by renaming it, then delete it; a folder that its owner has committed stays."""
        claimed = folder.with_name(f"{DEAD}{secrets.token_hex(8)}")
        with suppress(OSError):
            self.rename(folder, claimed)
        with suppress(OSError):  # a later sweep deletes the rest
            self.sync_folder(folder.parent)  # else a power cut could bring the name back without the files
            self.delete(claimed)

    def unlink(self, path: Path) -> None:
        self._around("unlink", path, lambda: os.unlink(path))

    def delete(self, folder: Path) -> None:
        """Delete a folder file by file; of a symbolic link only the link."""
        if os.path.islink(folder):
            self.unlink(folder)
            return
        for name in self.listdir(folder):
            try:
                self.unlink(folder / name)
            except (IsADirectoryError, PermissionError):  # the second is that of macOS
                self.delete(folder / name)
        self.rmdir(folder)

    def rmdir(self, folder: Path) -> None:
        self._around("rmdir", folder, lambda: os.rmdir(folder))


def _read(path: Path, limit: int, copied: bool, depth: int) -> Content:
    for folder in path.parents[:depth]:
        if os.path.islink(folder):
            raise ValueError(f"{folder} is a symbolic link, expected a folder")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link, expected a regular file") from None
        raise
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if status.st_size > limit:  # before anything is allocated
            raise ValueError(f"{path} has {status.st_size} bytes, more than the expected {limit}")
        room = open_scratch(status.st_size) if copied else None
        if room is None:
            return file.read()
        with room:
            shutil.copyfileobj(file, room, _CHUNK)
            return map_file(room)


def _write_all(handle: int, content: Content) -> None:
    for block in iter_blocks(content):
        remaining = block
        while remaining:
            remaining = remaining[os.write(handle, remaining) :]


def _write_file(path: Path, flags: int, content: bytes) -> None:
    with open(os.open(path, flags, 0o640), "wb") as file:
        file.write(content)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


DISK = Files(folder_mode=0o777)
"""The file layer without a hook, for folders of this machine."""
