"""Power cuts of a real folder, for tests of durability."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Within the block, record what was synced below ``top``: the bytes of each file, the names of each folder.

    A rename from a name with a dot to one without commits. All below it must be synced before, and its own name before
    anything is deleted, at the latest at the end of the block.
    """

    def __init__(self, top: Path) -> None:
        self.top, self.commits = top, list[Path]()
        self._bytes: dict[int, bytes] = {}  # by inode
        self._names: dict[int, dict[str, int]] = {}
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Disk:
        for path in (self.top, *self.top.rglob("*")):
            self._keep(path)
        fsync = os.fsync

        def synced(file: Any) -> None:
            fsync(file)
            self._keep(Path(os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")))

        self._patch.setattr(os, "fsync", synced)
        for name, check in dict.fromkeys(("rename", "replace"), self._commit).items():
            self._patch.setattr(os, name, self._checked(getattr(os, name), check))
        for name in ("unlink", "remove", "rmdir"):
            self._patch.setattr(os, name, self._checked(getattr(os, name), self._check_commits))
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._patch.undo()
        if kind is None:
            self._check_commits()

    def lost(self, path: Path) -> list[str]:
        """Return what a power cut would take: names of ``path`` and of folders above it, and all below it."""
        above = [path, *path.parents][: len(path.relative_to(self.top).parts)]
        return [f"the name of {one}" for one in above if not self._has_name(one)] + self._lost_below(path)

    def _checked(self, effect: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
        def call(*paths: Any, **options: Any) -> Any:
            check(*paths)
            return effect(*paths, **options)

        return call

    def _commit(self, old: Any, new: Any) -> None:
        if Path(old).name.startswith(".") and not Path(new).name.startswith("."):
            assert not self._lost_below(Path(old)), f"{new} is committed before it is safe"
            self.commits.append(Path(new))

    def _check_commits(self, *_: object) -> None:
        assert [lost for path in self.commits if os.path.lexists(path) for lost in self.lost(path)] == []

    def _keep(self, path: Path) -> None:
        if path.is_dir():
            self._names[path.stat().st_ino] = {name: os.lstat(path / name).st_ino for name in os.listdir(path)}
        elif path.is_file():
            self._bytes[path.stat().st_ino] = path.read_bytes()

    def _has_name(self, path: Path) -> bool:
        return self._names.get(path.parent.stat().st_ino, {}).get(path.name) == os.lstat(path).st_ino

    def _lost_below(self, path: Path) -> list[str]:
        if not path.is_dir():
            return [] if self._bytes.get(path.stat().st_ino) == path.read_bytes() else [f"the bytes of {path}"]
        names = [below for below in sorted(path.iterdir()) if not below.name.startswith(".")]
        lost = [f"the name of {below}" for below in names if not self._has_name(below)]
        return lost + [one for below in names for one in self._lost_below(below)]
