"""Files that may be compressed, opened so that progress can be told in bytes of the file."""

import bz2
import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from realmops.artifacts import open_regular

_UNPACKERS: dict[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".bz2": bz2.open}
# What the standard library raises for damaged data; bz2 has no error of its own.
DAMAGE = (EOFError, zlib.error, OSError)


@contextmanager
def open_compressed(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The bytes of a plain, .gz or .bz2 file, and a function that says how many bytes of the file were read.

    Raises ValueError when there is no such file; reading damaged data raises one of ``DAMAGE``.
    """
    with open_plain(path) as raw:
        unpacked = _UNPACKERS[path.suffix.lower()](raw) if path.suffix.lower() in _UNPACKERS else raw
        yield cast(BinaryIO, unpacked), raw.tell


def open_plain(path: Path) -> BinaryIO:
    """Open a file's own bytes; ValueError for what is no regular file, and for a compressed file without a byte.

    Nothing, compressed, has some bytes: the libraries take a download that never came for a file of no records.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if path.suffix.lower() in _UNPACKERS and os.fstat(file.fileno()).st_size == 0:
        file.close()
        raise ValueError(f"{path}: the file is empty, which no compressed file is; copy or download it again")
    return file


def damage(error: BaseException, path: Path) -> str:
    """What a reader says of one of ``DAMAGE``; a failing disk is ValueError, the file being no matter."""
    if isinstance(error, OSError) and error.errno is not None:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the disk") from None
    kind = path.suffix[1:]
    name = {"gz": "gzip", "bz2": "bzip2"}.get(kind.lower(), kind)
    if isinstance(error, EOFError):
        return f"the {name} file ends in the middle; it was cut: copy or download it again"
    return (
        f"no valid {name} data ({error}), so that the rest of the file cannot be read; copy the file again, "
        f"or take .{kind} off its name if it is plain text"
    )
