"""Traversal of a folder of documents, shared by all code that reads, counts or hashes its files."""

import os
from collections.abc import Iterator
from pathlib import Path


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder: the files of a folder sorted by name, then those of its subfolders.

    Hidden names are skipped. Links are followed; a folder with several paths is visited once. Paths may be unreadable.
    """
    top = folder.resolve()
    visited = {top}
    unlisted: list[Path] = []

    def is_new(path: Path) -> bool:
        target = path.resolve()
        if path.name.startswith(".") or target in visited:
            return False
        if path.is_symlink() and target.is_relative_to(top) and "/." not in f"/{target.relative_to(top)}":
            return False
        visited.add(target)
        return True

    walked = os.walk(folder, followlinks=True, onerror=lambda error: unlisted.append(Path(error.filename)))
    for parent, folders, files in walked:
        folders[:] = [name for name in sorted(folders) if is_new(Path(parent, name))]
        yield from (Path(parent, name) for name in sorted(files) if not name.startswith("."))
    yield from unlisted
