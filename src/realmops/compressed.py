"""Plain and compressed files, opened so that progress is known in bytes on disk."""

import bz2
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, cast

from realmops.artifacts import open_regular

_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".bz2": bz2.open}
_HEAD = 64  # bytes by which UTF-16 is recognised
_FIRST_BYTES = {".gz": re.compile(rb"\x1f\x8b\x08"), ".bz2": re.compile(rb"BZh[1-9]1AY&SY")}  # under any name
# Errors of the standard library for damaged data; bz2 raises OSError.
DECOMPRESSION_ERRORS = (EOFError, zlib.error, OSError)


@contextmanager
def open_compressed(path: Path) -> Iterator[tuple[BufferedReader, Callable[[], int]]]:
    """Open a plain, .gz or .bz2 file, recognised by its first bytes; yield it and a function for bytes read on disk."""
    with open_raw(path) as raw:
        suffix = path.suffix.lower()
        if suffix not in _OPENERS:
            head = raw.peek(_HEAD)
            suffix = next((kind for kind, first in _FIRST_BYTES.items() if first.match(head)), "")
        decompressed = _OPENERS[suffix](raw) if suffix else raw
        yield cast(BufferedReader, decompressed), raw.tell


@contextmanager
def open_text(path: Path, errors: str) -> Iterator[tuple[TextIOWrapper, Callable[[], int]]]:
    """Open a file as :func:`open_compressed` does, for text in UTF-8 or UTF-16, without its byte order mark."""
    with open_compressed(path) as (file, position):
        wide = utf_16_encoding(file.peek(1))  # its invalid bytes become U+FFFD: other handlers know UTF-8 alone
        with TextIOWrapper(file, wide or "utf-8-sig", errors="replace" if wide else errors, newline="") as text:
            yield text, position


def utf_16_encoding(head: bytes) -> str:
    """Return the encoding of UTF-16 text by its byte order mark, or NUL in every other byte; "" for other text."""
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    even, odd = head[:_HEAD:2].count(0), head[1:_HEAD:2].count(0)
    if 4 * max(even, odd) <= len(head[:_HEAD]) or min(even, odd):
        return ""
    return "utf-16-le" if odd else "utf-16-be"


def bare_name(path: Path) -> str:
    return path.stem if path.suffix.lower() in _OPENERS else path.name


def open_raw(path: Path) -> BufferedReader:
    """Open a file without decompressing it; ValueError also for an empty .gz or .bz2 file, a failed download."""
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
    name = {".gz": "gzip", ".bz2": "bzip2"}.get(path.suffix.lower(), "compressed")
    if isinstance(error, EOFError):
        return f"the {name} file ends in the middle; it was truncated: copy or download it again"
    return f"no valid {name} data ({error}), so that the rest of the file cannot be read; copy or download it again"
