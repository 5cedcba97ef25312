"""What a power cut would leave of a real folder, by the system's own calls: tests of durability share it.

A file keeps the bytes of its last fsync, a folder the names of its last fsync, and nothing else is sure to stay. That
is less than most file systems keep, and all that they promise. Calls are recorded and done as usual.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Published = Callable[[Path], None]
Node = tuple[int, int]  # an inode's number, and how often it was used before for what is deleted by now

_disks: list[Disk] = []  # those that are recorded now: an audit hook stays as long as its process, so one is for all


class Disk:
    """Within the block, ``top`` as it is and as a power cut would leave it; at its end no problem may be left.

    A name with a dot in front is a draft's, and a rename from such a name to one without commits. A problem is

    - a commit of something whose bytes or names were not synced after they were last changed,
    - a deletion of what a power cut would bring back under a name without a dot, as the new name was not synced,
    - at the end of the block, a name that was committed and not synced.

    Renames and deletions are heard of by Python's audit events, whatever name a module has for them.

    Args:
        hints: whether a path is only a hint, of which nothing is promised.
        published: called with the new path right before each commit.
    """

    def __init__(
        self, top: Path, *, hints: Callable[[Path], bool] = lambda path: False,
        published: Published = lambda path: None,
    ) -> None:  # fmt: skip
        self.top, self.problems, self.commits = top, list[str](), list[Path]()
        self._hints, self._published = hints, published
        self._bytes: dict[Node, bytes] = {}
        self._names: dict[Node, dict[str, Node]] = {}
        self._uses: Counter[int] = Counter()
        self._lock = threading.RLock()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Disk:
        self._keep(self.top)
        for path in self.top.rglob("*"):  # what was there before is safe
            self._keep(path)
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                self._patch.setattr(os, name, self._syncing(getattr(os, name)))
        _listen()
        _disks.append(self)
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        _disks.remove(self)
        self._patch.undo()
        if kind is None:
            there = [path for path in dict.fromkeys(self.commits) if os.path.lexists(path) and not self._hints(path)]
            unsafe = [f"{path} may be gone after a power cut" for path in there if not self._has_name(path)]
            assert not self.problems + unsafe, "\n".join(self.problems + unsafe)

    def lost(self, path: Path) -> list[str]:
        """What a power cut would take of ``path``: its own name, the folders above it, or what is below it."""
        assert path.is_relative_to(self.top), path
        assert os.path.lexists(path), path
        with self._lock:
            above = [path, *path.parents][: len(path.relative_to(self.top).parts)]
            return [f"the name of {one}" for one in above if not self._has_name(one)] + self._lost_below(path)

    def safe_bytes(self, path: Path) -> bytes:
        """What a power cut would leave in a file, if it leaves its name."""
        return self._bytes.get(self._node(path), b"")

    def safe_names(self, folder: Path) -> set[str]:
        """The names that a power cut would leave in a folder, if it leaves the folder's own."""
        return set(self._names.get(self._node(folder), {}))

    def _node(self, path: Path) -> Node:
        inode = os.lstat(path).st_ino
        return inode, self._uses[inode]

    def _syncing(self, usual: Callable[[Any], None]) -> Callable[[Any], None]:
        def sync(handle: Any) -> None:
            usual(handle)
            with self._lock:
                number = handle if isinstance(handle, int) else handle.fileno()
                for path in self._paths_of(os.fstat(number).st_ino):
                    self._keep(path)

        return sync

    def _keep(self, path: Path) -> None:
        if path.is_dir():
            self._names[self._node(path)] = {name: self._node(path / name) for name in os.listdir(path)}
        elif path.is_file():
            self._bytes[self._node(path)] = path.read_bytes()

    def _paths_of(self, inode: int) -> list[Path]:
        paths = [self.top, *self.top.rglob("*")]
        return [path for path in paths if os.path.lexists(path) and os.lstat(path).st_ino == inode]

    def _has_name(self, path: Path) -> bool:
        return self._names.get(self._node(path.parent), {}).get(path.name) == self._node(path)

    def _lost_below(self, path: Path) -> list[str]:
        if path.is_symlink() or self._hints(path):
            return []
        if path.is_file():
            return [] if self._bytes.get(self._node(path)) == path.read_bytes() else [f"the bytes of {path}"]
        lost = []
        for below in sorted(path.iterdir()):
            if not below.name.startswith("."):
                lost += [] if self._hints(below) or self._has_name(below) else [f"the name of {below}"]
                lost += self._lost_below(below)
        return lost

    def renames(self, old: Path, new: Path) -> None:
        """``old`` gets the name ``new`` now."""
        with self._lock:
            if self._is_mine(new) and old.name.startswith(".") and not new.name.startswith("."):
                self.problems += [f"{new} is committed before it is safe: {lost}" for lost in self._lost_below(old)]
                self.commits.append(new)
                self._published(new)
            if self._is_mine(new) and new.is_file() and not new.is_symlink():
                self._uses[os.stat(new).st_ino] += 1

    def deletes(self, path: Path) -> None:
        """``path`` goes now."""
        with self._lock:
            if not self._is_mine(path) or not os.path.lexists(path):
                return
            node = self._node(path)
            for kept, there in self._kept_names(self.top, self._node(self.top)):
                if there == node and not (os.path.lexists(kept) and self._node(kept) == node):
                    self.problems.append(f"{path} is deleted, which a power cut would bring back as {kept}")
            if len(self._paths_of(node[0])) == 1:
                self._uses[node[0]] += 1

    def _kept_names(self, folder: Path, node: Node) -> Iterator[tuple[Path, Node]]:
        """The paths without a dot that a power cut would leave."""
        for name, below in self._names.get(node, {}).items():
            if not name.startswith("."):
                yield folder / name, below
                yield from self._kept_names(folder / name, below)

    def _is_mine(self, path: Path) -> bool:
        return path.is_relative_to(self.top) and path != self.top


@functools.cache
def _listen() -> None:
    """Hear of renames and deletions, from now on."""

    def told(event: str, values: tuple[Any, ...]) -> None:
        if _disks and event in ("os.rename", "os.remove", "os.rmdir"):
            for disk in list(_disks):
                if event == "os.rename":
                    disk.renames(_path(values[0], values[2]), _path(values[1], values[3]))
                else:
                    disk.deletes(_path(values[0], values[1]))

    sys.addaudithook(told)


def _path(name: Any, folder: int) -> Path:
    """The absolute path of a name that may be relative to an open folder."""
    path = Path(os.fsdecode(name))
    if folder < 0 or path.is_absolute():
        return path.absolute()
    inode = os.fstat(folder).st_ino
    for disk in _disks:
        for found in disk._paths_of(inode):
            return found / path
    return path.absolute()
