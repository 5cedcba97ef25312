"""Plain and compressed files, opened so that progress is known in bytes on disk."""

import bz2
import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from realmops.artifacts import open_regular

_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".bz2": bz2.open}
# Errors of the standard library for damaged data; bz2 raises OSError.
DECOMPRESSION_ERRORS = (EOFError, zlib.error, OSError)


@contextmanager
def open_compressed(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Open a plain, .gz or .bz2 file for reading.

    Yields:
        The decompressed file, and a function that returns how many bytes on disk were read.

    Raises:
        ValueError: the file cannot be opened. Reading damaged data raises one of ``DECOMPRESSION_ERRORS``.
    """
    with open_raw(path) as raw:
        decompressed = _OPENERS[path.suffix.lower()](raw) if path.suffix.lower() in _OPENERS else raw
        yield cast(BinaryIO, decompressed), raw.tell


def open_raw(path: Path) -> BinaryIO:
    """Open a file without decompressing it.

    Raises:
        ValueError: the file is not regular, cannot be opened, or is an empty .gz or .bz2 file, which the libraries
            would read as a file without records although it is a failed download.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if path.suffix.lower() in _OPENERS and os.fstat(file.fileno()).st_size == 0:
        file.close()
        raise ValueError(f"{path}: the file is empty, not a compressed file; copy or download it again")
    return file


def describe_damage(error: BaseException, path: Path) -> str:
    """Return the message for one of ``DECOMPRESSION_ERRORS``; raise ValueError for an I/O error of the disk."""
    if isinstance(error, OSError) and error.errno is not None:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the disk") from None
    kind = path.suffix[1:]
    name = {"gz": "gzip", "bz2": "bzip2"}.get(kind.lower(), kind)
    if isinstance(error, EOFError):
        return f"the {name} file ends in the middle; it was truncated: copy or download it again"
    return (
        f"no valid {name} data ({error}), so that the rest of the file cannot be read; copy the file again, "
        f"or take .{kind} off its name if it is plain text"
    )
