"""Plain and compressed files, opened so that progress is known in bytes on disk, and the members of archives.

The path of a member is below its archive, ``papers.zip/2019/a.pdf``, and is looked up there, never on a disk.
"""

import bz2
import gzip
import os
import re
import tarfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from io import BufferedReader, BytesIO, TextIOWrapper
from itertools import pairwise
from lzma import LZMAError
from mmap import ACCESS_READ, mmap
from pathlib import Path, PurePosixPath
from stat import S_ISLNK
from typing import Any, BinaryIO, cast
from weakref import finalize
from zipfile import BadZipFile, ZipFile

from realmops.artifacts import open_regular

_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".bz2": bz2.open}
_HEAD = 64  # bytes by which UTF-16 is recognised
_FIRST_BYTES = {".gz": re.compile(rb"\x1f\x8b\x08"), ".bz2": re.compile(rb"BZh[1-9]1AY&SY")}  # under any name
# Errors of the standard library for damaged data and unknown methods; bz2 raises OSError.
DECOMPRESSION_ERRORS = (EOFError, zlib.error, OSError, LZMAError, BadZipFile, tarfile.TarError, NotImplementedError)
_ARCHIVES = (".zip", ".mbox", ".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")
MAX_MEMBERS = 100_000  # of an archive
_MAX_UNPACKED = 16 << 30  # bytes
Member = tuple[int, str, Callable[[], Any]]  # bytes, why it is not read or "", and what opens it
# The beginning of a message in a mailbox; after another sentence that begins with "From" there is no header.
_MESSAGE = re.compile(rb"\AFrom |(?:(?<=\n\n)|(?<=\n\r\n))From [^\n]{0,999}\n[!-9;-~]{1,99}:")


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
    except NotADirectoryError:
        for archive in filter(is_archive, path.parents):  # a folder of an archive may have the name of one
            with suppress(KeyError):
                return BufferedReader(list_members(archive)[path][2]())
        raise ValueError(f"{path}: there is no such file; check the path") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if path.suffix.lower() in _OPENERS and os.fstat(file.fileno()).st_size == 0:
        file.close()
        raise ValueError(f"{path}: the file is empty, not a compressed file; copy or download it again")
    return file


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(_ARCHIVES)


def list_members(archive: Path) -> Mapping[Path, Member]:
    """Return the members of an archive; one with the archive's path is the rest of a damaged or too large archive."""
    on_disk = next(path for path in (archive, *archive.parents) if path.exists())
    return _list_members(archive, on_disk.stat().st_mtime_ns)


@lru_cache(maxsize=4)  # with the open file: a compressed one is decompressed once if it is read in order
def _list_members(archive: Path, version: int) -> Mapping[Path, Member]:
    members: OrderedDict[Path, Member] = OrderedDict()
    unpacked, copies = 0, Counter[Path]()
    try:
        file = open_raw(archive)
        finalize(members, file.close)
        for name, size, kind, opener in _iter_members(file, archive.suffix.lower()):
            unpacked += size
            if len(members) == MAX_MEMBERS or unpacked > _MAX_UNPACKED:
                members[archive] = (0, "too_large", BytesIO)
                break
            parts = [part for part in PurePosixPath(name.replace("\\", "/")).parts if part not in ("/", "//", "..")]
            if not any(part.startswith((".", "__MACOSX")) for part in parts):  # hidden
                path = archive.joinpath(*parts)
                copies[path] += 1
                path = path if copies[path] == 1 else path.with_stem(f"{path.stem} ({copies[path]})")
                members[path] = (size, kind, opener)
    except (*DECOMPRESSION_ERRORS, ValueError):
        members[archive] = (0, "broken_archive", BytesIO)
    return members


def _iter_members(file: BufferedReader, suffix: str) -> Iterator[tuple[str, int, str, Callable[[], Any]]]:
    if suffix == ".zip":
        package = ZipFile(file)
        for info in package.infolist():
            kind = "link" if S_ISLNK(info.external_attr >> 16) else "encrypted" * (info.flag_bits & 1)
            if not info.is_dir():
                yield info.filename, info.file_size, kind, partial(package.open, info)
    elif suffix == ".mbox":
        data = mmap(file.fileno(), 0, access=ACCESS_READ)
        starts = [match.start() for match in _MESSAGE.finditer(data)]
        for number, (start, end) in enumerate(pairwise([*starts, len(data)]), start=1):
            read = partial(lambda start, end: BytesIO(data[start:end]), start, end)
            yield f"{number}.eml", end - start, "", read
    else:
        tar = tarfile.open(fileobj=file)  # noqa: SIM115
        for entry in tar:
            if not entry.isdir():
                kind = "" if entry.isreg() else "link"  # or a device
                yield entry.name, entry.size, kind, partial(tar.extractfile, entry)


def describe_damage(error: BaseException, path: Path) -> str:
    """Return the message for one of ``DECOMPRESSION_ERRORS``; raise ValueError for an I/O error of the disk."""
    if isinstance(error, OSError) and error.errno is not None:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the disk") from None
    name = {".gz": "gzip", ".bz2": "bzip2"}.get(path.suffix.lower(), "compressed")
    if isinstance(error, EOFError):
        return f"the {name} file ends in the middle; it was truncated: copy or download it again"
    return f"no valid {name} data ({error}), so that the rest of the file cannot be read; copy or download it again"
