"""Plain and compressed files, opened so that progress is known in bytes on disk, and the members of archives.

A member has a path below its archive (``papers.zip/2019/a.pdf``). Nothing is unpacked: its name is looked up in the
archive and never on a disk.
"""

import bz2
import gzip
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BufferedReader, BytesIO, TextIOWrapper
from itertools import pairwise
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from stat import S_ISLNK
from typing import Any, BinaryIO, cast
from weakref import finalize
from zipfile import BadZipFile, ZipFile

from realmops.artifacts import open_regular

_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".bz2": bz2.open}
_HEAD = 64  # bytes by which UTF-16 is recognised
_FIRST_BYTES = {".gz": re.compile(rb"\x1f\x8b\x08"), ".bz2": re.compile(rb"BZh[1-9]1AY&SY")}  # under any name
# Errors of the standard library for damaged data; bz2 raises OSError.
DECOMPRESSION_ERRORS = (EOFError, zlib.error, OSError, LZMAError, BadZipFile, tarfile.TarError)
_QUOTED_FROM = re.compile(rb"^>(?=>*From )", re.MULTILINE)  # in a message of a mailbox
MAX_MEMBERS = 100_000  # of an archive
_MAX_UNPACKED = 16 << 30  # bytes


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
        file = _find_member(path).open()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if path.suffix.lower() in _OPENERS and not file.peek(1):
        file.close()
        raise ValueError(f"{path}: the file is empty, not a compressed file; copy or download it again")
    return file


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except NotADirectoryError:
        return _find_member(path).size


@dataclass(frozen=True)
class Member:
    """A file in an archive; its ``kind`` is "", unless it cannot be read."""

    size: int
    kind: str
    opener: Callable[[], Any]

    def open(self) -> BufferedReader:
        try:
            return BufferedReader(self.opener())
        except RuntimeError as error:  # also NotImplementedError, for an unknown compression
            raise ValueError(f"the member of the archive cannot be read ({error}); unpack the archive") from None


def is_archive(path: Path) -> bool:
    return bool(_archive_suffix(path))


def _archive_suffix(path: Path) -> str:
    name = f".{path.name.lower()}"  # Apple's mailboxes have the name "mbox"
    return next(filter(name.endswith, _ARCHIVES), "")


def list_members(archive: Path) -> dict[Path, Member]:
    """Return the members of an archive by path, without hidden ones.

    A member with the archive's path has the kind of what cannot be listed: "broken_archive", or "too_large" over the
    limits.
    """
    outermost = next((path for path in reversed(archive.parents) if path.is_file()), archive)
    return _list_members(archive, outermost.exists() and outermost.stat().st_mtime_ns)


class _Members(dict[Path, Member]):
    """Members of an archive, whose file is closed after them."""


@lru_cache(maxsize=4)  # with open files, so that a compressed archive is decompressed once if it is read in order
def _list_members(archive: Path, version: int) -> dict[Path, Member]:
    members = _Members()
    unpacked = 0
    try:
        file = open_raw(archive)
        finalize(members, file.close)
        for name, member in _ARCHIVES[_archive_suffix(archive)](file):
            unpacked += member.size
            if len(members) == MAX_MEMBERS or unpacked > _MAX_UNPACKED:
                members[archive] = Member(0, "too_large", BytesIO)
                break
            parts = [part for part in PurePosixPath(name.replace("\\", "/")).parts if part not in ("/", "//", "..")]
            if parts and not any(part.startswith((".", "__MACOSX")) for part in parts):
                members[archive.joinpath(*parts)] = member
    except (*DECOMPRESSION_ERRORS, ValueError):
        members[archive] = Member(0, "broken_archive", BytesIO)
    return members


def _find_member(path: Path) -> Member:
    for archive in filter(is_archive, path.parents):
        with suppress(KeyError, ValueError):  # a folder of an archive may have the name of one
            return list_members(archive)[path]
    raise ValueError(f"{path}: there is no such file; check the path")


def _zip_members(file: BufferedReader) -> Iterator[tuple[str, Member]]:
    package = ZipFile(file)
    for info in package.infolist():
        kind = "link" if S_ISLNK(info.external_attr >> 16) else "encrypted" if info.flag_bits & 1 else ""
        if not info.is_dir():
            yield info.filename, Member(info.file_size, kind, partial(package.open, info))


def _tar_members(file: BufferedReader) -> Iterator[tuple[str, Member]]:
    package = tarfile.open(fileobj=file)  # noqa: SIM115
    for info in package:
        kind = "" if info.isreg() else "link" if info.issym() or info.islnk() else "device"
        if not info.isdir():
            yield info.name, Member(info.size, kind, partial(package.extractfile, info))


def _messages(file: BufferedReader) -> Iterator[tuple[str, Member]]:
    """Yield the messages of a mailbox, each of which begins with a line "From ..." after an empty line."""
    starts, end, is_blank = list[int](), 0, True
    for line in file:
        if is_blank and line.startswith(b"From "):
            starts.append(end)
        is_blank = not line.strip()
        end += len(line)

    def read(start: int, end: int) -> BytesIO:
        file.seek(start)
        return BytesIO(_QUOTED_FROM.sub(b"", file.read(end - start)))

    for number, (start, stop) in enumerate(pairwise([*starts, end]), start=1):
        yield f"{number}.eml", Member(stop - start, "", partial(read, start, stop))


_ARCHIVES = dict.fromkeys((".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz"), _tar_members)
_ARCHIVES |= {".zip": _zip_members, ".mbox": _messages}


def describe_damage(error: BaseException, path: Path) -> str:
    """Return the message for one of ``DECOMPRESSION_ERRORS``; raise ValueError for an I/O error of the disk."""
    if isinstance(error, OSError) and error.errno is not None:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the disk") from None
    name = {".gz": "gzip", ".bz2": "bzip2"}.get(path.suffix.lower(), "compressed")
    if isinstance(error, EOFError):
        return f"the {name} file ends in the middle; it was truncated: copy or download it again"
    return f"no valid {name} data ({error}), so that the rest of the file cannot be read; copy or download it again"
