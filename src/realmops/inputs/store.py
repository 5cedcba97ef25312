"""Local inputs, and their upload to a store in the layout of a DVC remote.

A store has each content once, under its md5; a folder is an object, too: DVC's list of its files. Uploads can be
killed, repeated and run at the same time: an object gets its name when its content has been sent and has the md5 of the
name. That of a folder comes last.
"""

import base64
import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from realmops import artifacts
from realmops.inputs.addresses import (
    CHUNK,
    CONTENT_MARKS,
    OBJECTS,
    THREADS,
    InputError,
    content_digest,
    filesystem,
    is_address,
    object_address,
    parse,
    shared_progress,
)
from realmops.inputs.redaction import redact
from realmops.readers.walk import walk_files

Progress = Callable[[str, int, str], Callable[[int], None]]  # as ``progress`` of a report
Walk = Callable[[Path], Iterable[tuple[str, list[str], list[str]]]]  # as ``os.walk``
DIRECTORY = ".dir"  # end of a folder's digest
NOT_CONTENT = {".git", ".hg", ".dvc"}  # folders that DVC leaves out, too
LARGE = 50_000_000  # bytes, from which reading takes long enough for progress lines, and objects are sent in parts
STORE_EXAMPLE = "s3://BUCKET/PREFIX"


@dataclass(frozen=True)
class LocalFile:
    """A file of a local input; ``relpath`` is empty if it is the input."""

    relpath: str
    path: Path
    size: int  # bytes
    md5: str


@dataclass(frozen=True)
class LocalInput:
    """A file or folder of this machine that options name."""

    value: str  # its path as in the options
    path: Path  # its absolute path
    files: Sequence[LocalFile]  # its files, sorted by name
    digest: str  # its md5 as DVC computes it, with ``.dir`` for a folder

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def __str__(self) -> str:
        count = len(self.files)
        return f"{self.value}, {count:,} file{'s' * (count != 1)}, {self.size / 1e6:,.1f} MB"


def read_input(value: str, project: Path, progress: Progress, walk: Walk) -> LocalInput:
    """Read a file or folder of a project and compute its digest.

    ``walk`` yields the files that DVC would record of a folder. It does not follow links to folders; the files that a
    reader finds below them are added.

    Raises:
        ValueError: it cannot be read, or is a folder without files.
    """
    path = Path(os.path.abspath(project / value))
    if path.is_dir():
        names = sorted((file.relative_to(path).as_posix(), file) for file in _files_below(path, walk))
        if not names:
            raise ValueError(f"{path} is a folder without files; set an option to a file or to a folder with files")
    else:
        artifacts.open_regular(path).close()
        names = [("", path)]
    total = sum(file.stat().st_size for _, file in names)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        bar = progress(f"reading {value}", total, "B") if total >= LARGE else lambda units: None
        advance = shared_progress(bar, threading.Event())
        files = list(pool.map(lambda entry: _read_file(entry[0], entry[1], advance), names))
    digest = hashlib.md5(_directory(files)).hexdigest() + DIRECTORY if path.is_dir() else files[0].md5
    return LocalInput(value, path, files, digest)


def _read_file(relpath: str, path: Path, advance: Callable[[int], None]) -> LocalFile:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.file_digest(file, "md5").hexdigest()
    advance(size)
    return LocalFile(relpath, path, size, digest)


def _directory(files: Iterable[LocalFile]) -> bytes:
    """Return the object of a folder, as DVC writes it."""
    return json.dumps([{"md5": file.md5, "relpath": file.relpath} for file in files]).encode()


def _files_below(folder: Path, walk: Walk) -> Iterator[Path]:
    """Yield the files of a walk, then those below links to folders; no pipes and broken links."""
    top = folder.resolve()
    for parent, _, names in walk(folder):
        yield from (file for name in names if (file := Path(parent, name)).is_file())
    for file in walk_files(folder):
        if file.parent.resolve() != top / file.parent.relative_to(folder) and file.is_file():
            yield file


def walk_content(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder as ``os.walk`` does, without the folders of version control that DVC leaves out, too."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in NOT_CONTENT]
        yield parent, folders, [name for name in names if name not in NOT_CONTENT]


def check_store(store: str) -> str:
    """Return the address of a store without a slash at its end.

    Raises:
        ValueError: it is no address, or contains credentials.
    """
    if not is_address(store):
        raise ValueError(f"inputs.store is {store!r}, which is no address; set it to one such as {STORE_EXAMPLE}")
    if redact(store) != store:
        raise ValueError(
            f"inputs.store is {redact(store)} with credentials in it; leave them out, and set them in the environment, "
            "for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return store.rstrip("/")


def stored_address(store: str, digest: str, name: str) -> str:
    """Return the address of a stored file or folder with its name."""
    return f"{object_address(store, digest)}#{name}"


def upload(item: LocalInput, store: str, progress: Progress) -> tuple[int, int]:
    """Upload an input to a store, except undamaged objects; return the number of uploaded objects, and their bytes.

    Raises:
        InputError: a file was changed since its digest was computed.
        ValueError: the store cannot be written. In both cases the objects that were sent stay, and the same call
            continues.
    """
    files = {file.md5: file for file in item.files}
    directory = _directory(item.files) if item.digest.endswith(DIRECTORY) else b""
    sizes = {digest: file.size for digest, file in files.items()} | ({item.digest: len(directory)} if directory else {})
    stopped = threading.Event()
    with filesystem(parse(store), "written") as fs, _clean_disk(fs, store), ThreadPoolExecutor(THREADS) as pool:
        missing = _missing_objects(fs, store, sizes, pool, partial(progress, f"checking {item.value}"))
        size = sum(sizes[digest] for digest in missing)
        bar = progress(f"uploading {item.value}", size, "B") if size else lambda units: None
        advance = shared_progress(bar, stopped)

        def send(file: LocalFile) -> None:
            try:
                source = artifacts.open_regular(file.path)
            except (OSError, ValueError):
                raise _changed(file.path) from None
            with source:
                _write(fs, store, file.md5, source, file.size, file.path, advance)

        try:
            list(pool.map(send, [file for digest, file in files.items() if digest in missing]))
        except BaseException:
            stopped.set()  # the pool would wait for whole files
            raise
        if item.digest in missing and directory:
            _write(fs, store, item.digest, BytesIO(directory), len(directory), item.path, advance)
    return len(missing), size


def _changed(path: Path) -> InputError:
    return InputError(f"{path} was changed while it was uploaded; run the same command again")


@contextmanager
def _clean_disk(fs: Any, store: str) -> Iterator[None]:
    """Context manager: delete the drafts of killed uploads to a store on a disk, unless another upload is running."""
    if not _is_disk(fs):
        yield
        return
    folder = Path(fs._strip_protocol(f"{store}/{OBJECTS}"))
    fs.makedirs(folder, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        if artifacts.try_lock(handle):
            for draft in folder.glob(f"*/.*.{'[0-9a-f]' * 32}"):
                draft.unlink()
        with suppress(OSError):  # of a volume without locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def _is_disk(fs: Any) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _missing_objects(
    fs: Any, store: str, sizes: Mapping[str, int], pool: ThreadPoolExecutor, progress: Callable[[int, str], Any]
) -> set[str]:
    """Return the digests of the objects that a store lacks or has damaged.

    The md5 of an object is what the store reports, or is computed where the store reports nothing, as a disk does. An
    ETag that is no md5, as of an object sent in parts, proves nothing: the object is compared by its size.
    """
    fs.invalidate_cache()
    paths = {digest: str(fs._strip_protocol(object_address(store, digest))) for digest in sizes}
    listed = {
        entry["name"]: entry
        for entries in pool.map(partial(_list_folder, fs), sorted({fs._parent(path) for path in paths.values()}))
        for entry in entries
    }
    entries = {digest: listed[path] for digest, path in paths.items() if path in listed}
    present = [digest for digest, entry in entries.items() if entry["size"] == sizes[digest]]
    reported = {digest: _reported_md5(entries[digest]) for digest in present}

    def is_damaged(digest: str) -> bool:
        return content_digest(fs, paths[digest], "md5") != _md5_of(digest)

    damaged = {digest for digest in present if reported[digest] not in (None, "", _md5_of(digest))}
    # with encryption keys of a bucket, every ETag has the form of an md5 and is none; reading one object shows it
    if damaged and not is_damaged(min(damaged, key=lambda digest: (sizes[digest], digest))):
        damaged = set()
    unread = [digest for digest in present if reported[digest] is None]
    total = sum(sizes[digest] for digest in unread)
    advance = progress(total, "B") if total >= LARGE else lambda units: None
    for digest, is_bad in zip(unread, pool.map(is_damaged, unread), strict=True):
        advance(sizes[digest])
        damaged |= {digest} if is_bad else set()
    return {*sizes} - {*present} | damaged


def _md5_of(digest: str) -> str:
    return digest.removesuffix(DIRECTORY)


def _list_folder(fs: Any, folder: str) -> list[dict[str, Any]]:
    try:
        return list(fs.ls(folder, detail=True))
    except FileNotFoundError:
        return []


def _reported_md5(entry: Mapping[str, Any]) -> str | None:
    """Return the md5 that a store reports of an object; empty if it reports something else, None if nothing."""
    if digest := entry.get("md5Hash"):
        return base64.b64decode(digest).hex()
    etag = str(entry.get("ETag") or entry.get("etag") or "").strip('"')
    if re.fullmatch("[0-9a-f]{32}", etag):
        return etag
    return "" if any(entry.get(mark) for mark in CONTENT_MARKS) else None


def _write(
    fs: Any, store: str, digest: str, source: IO[bytes], size: int, origin: Path, advance: Callable[[int], None]
) -> None:
    """Write an object; raise InputError and write nothing if the content of ``source`` has another digest."""
    path = str(fs._strip_protocol(object_address(store, digest)))

    def copy(out: IO[bytes]) -> None:
        md5 = hashlib.md5()
        while chunk := source.read(CHUNK):
            out.write(chunk)
            md5.update(chunk)
            advance(len(chunk))
        if md5.hexdigest() != _md5_of(digest):
            raise _changed(origin)

    if _is_disk(fs):
        fs.makedirs(fs._parent(path), exist_ok=True)
        with artifacts.atomic_file(Path(path)) as draft, open(draft, "wb") as target:
            copy(target)
    elif size < LARGE:
        copy(buffer := BytesIO())
        fs.pipe_file(path, buffer.getvalue())
    else:
        target = fs.open(path, "wb")
        try:
            copy(target)
            target.close()
        except BaseException:
            with suppress(Exception):  # the first error is reported
                target.discard()
            target.closed = True  # else its destructor would name the object
            raise
