"""Local inputs, and their upload to a store in the layout of a DVC remote.

A store has each content once, under its md5; a folder is an object, too: DVC's list of its files. Uploads can be
killed, repeated and run at the same time: an object is complete when it has its size, and that of a folder comes last.
"""

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.corpus.walk import walk_files
from realmops.inputs.addresses import THREADS, InputError, filesystem, is_address, object_address, parse
from realmops.text.redaction import redact

Progress = Callable[[str, int, str], Callable[[int], None]]  # as ``progress`` of a report
Walk = Callable[[Path], Iterable[tuple[str, list[str], list[str]]]]  # as ``os.walk``
DIRECTORY = ".dir"  # end of a folder's digest
NOT_CONTENT = {".git", ".hg", ".dvc"}  # folders that DVC leaves out, too
LARGE = 50_000_000  # bytes, from which reading takes long enough for progress lines
STORE_EXAMPLE = "s3://BUCKET/PREFIX"


@dataclass(frozen=True)
class LocalFile:
    """A file of a local input; ``relpath`` is empty if it is the input."""

    relpath: str
    path: Path
    size: int  # bytes
    modified: int  # nanoseconds
    md5: str

    def is_unchanged(self) -> bool:
        """Return whether size and time of the file are those of its digest."""
        status = self.path.stat()
        return (status.st_size, status.st_mtime_ns) == (self.size, self.modified)


@dataclass(frozen=True)
class LocalInput:
    """A file or folder of this machine that options name.

    Attributes:
        value: its path as in the options.
        path: its absolute path.
        files: its files, sorted by name.
        digest: its md5 as DVC computes it, with ``.dir`` for a folder.
    """

    value: str
    path: Path
    files: Sequence[LocalFile]
    digest: str

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
        advance = _locked(progress(f"reading {value}", total, "B") if total >= LARGE else lambda units: None)
        files = list(pool.map(lambda entry: _read_file(entry[0], entry[1], advance), names))
    digest = hashlib.md5(_directory(files)).hexdigest() + DIRECTORY if path.is_dir() else files[0].md5
    return LocalInput(value, path, files, digest)


def _read_file(relpath: str, path: Path, advance: Callable[[int], None]) -> LocalFile:
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        digest = hashlib.file_digest(file, "md5").hexdigest()
    advance(status.st_size)
    return LocalFile(relpath, path, status.st_size, status.st_mtime_ns, digest)


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
    """Upload an input to a store, except the objects that are there.

    Returns:
        The number of uploaded objects, and their bytes.

    Raises:
        ValueError: the store cannot be written, or a file was changed since its digest was computed; objects of
            other files stay, and the same call continues.
    """
    with filesystem(parse(store)) as fs:
        directory = _directory(item.files) if item.digest.endswith(DIRECTORY) else b""
        if directory and _exists(fs, store, item.digest, len(directory)):
            return 0, 0
        by_digest = {file.md5: file for file in item.files}
        with ThreadPoolExecutor(THREADS) as pool:
            present = pool.map(lambda file: _exists(fs, store, file.md5, file.size), by_digest.values())
            missing = [file for file, exists in zip(by_digest.values(), present, strict=True) if not exists]
            size = sum(file.size for file in missing)
            advance = _locked(progress(f"uploading {item.value}", size, "B")) if size else lambda units: None
            list(pool.map(lambda file: _upload_file(fs, store, file, advance), missing))
        if directory:
            _write(fs, store, item.digest, lambda path: fs.pipe_file(path, directory))
    return len(missing) + bool(directory), size


def _exists(fs: Any, store: str, digest: str, size: int) -> bool:
    try:
        return bool(fs.info(fs._strip_protocol(object_address(store, digest)))["size"] == size)
    except FileNotFoundError:
        return False


def _upload_file(fs: Any, store: str, file: LocalFile, advance: Callable[[int], None]) -> None:
    from fsspec.callbacks import Callback

    left = file.size

    class Advance(Callback):  # type: ignore[misc]
        def relative_update(self, inc: int = 1) -> None:
            nonlocal left
            left -= inc
            advance(inc)

    path = _write(fs, store, file.md5, lambda target: fs.put_file(str(file.path), target, callback=Advance()))
    advance(left)  # of a filesystem that reports none
    if not file.is_unchanged():
        fs.rm_file(path)
        raise InputError(f"{file.path} was changed while it was uploaded; run the same command again")


def _write(fs: Any, store: str, digest: str, write: Callable[[str], None]) -> str:
    """Write an object and return its path; on a disk under another name first, as stores do it themselves."""
    path = str(fs._strip_protocol(object_address(store, digest)))
    if "file" not in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol):
        write(path)
        return path
    fs.makedirs(fs._parent(path), exist_ok=True)
    draft = f"{path}.{uuid.uuid4().hex}"
    try:
        write(draft)
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)
    return path


def _locked(advance: Callable[[int], None]) -> Callable[[int], None]:
    """Return a callback for several threads."""
    lock = threading.Lock()

    def update(units: int) -> None:
        with lock:
            advance(units)

    return update
