"""The files of a folder of documents: one walk for all code that reads, counts or hashes them."""

import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder, those of a folder in the order of their names, then those of its subfolders.

    Names that begin with a dot are left out. Links are followed. A folder that several paths lead to is read once: at
    its own place where that is below ``folder`` and not hidden, else at the first link to it, so that loops end. A
    file that several links lead to is read at each.

    Yields:
        Paths that begin with ``folder``. Not all can be opened: links may be broken, and pipes, sockets and devices
        are among them, as are folders that cannot be listed.
    """
    top = folder.resolve()
    seen = {top}
    unlisted: list[Path] = []

    def is_new(path: Path) -> bool:
        place = path.resolve()
        if path.name.startswith(".") or place in seen:
            return False
        if path.is_symlink() and place.is_relative_to(top) and not _is_hidden(place.relative_to(top)):
            return False
        seen.add(place)
        return True

    walked = os.walk(folder, followlinks=True, onerror=lambda error: unlisted.append(Path(error.filename)))
    for above, folders, files in walked:
        folders[:] = [name for name in sorted(folders) if is_new(Path(above, name))]
        yield from (Path(above, name) for name in sorted(files) if not name.startswith("."))
    yield from unlisted


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
