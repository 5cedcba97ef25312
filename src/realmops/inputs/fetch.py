"""Fetch inputs with an address into a local cache, by version: ``CACHE/VERSION/NAME``.

A file is complete when it has its name: it is written next to it, verified, synced and renamed. A process that was
killed leaves ``CACHE/.partial-ADDRESS-VERSION``, from which the next one continues; after a fetch, those of other
versions of the address are deleted.
"""

import fcntl
import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ENOSPC
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from realmops import artifacts
from realmops.config import Values
from realmops.inputs.addresses import (
    THREADS,
    Address,
    InputError,
    RemoteFile,
    filesystem,
    is_address,
    list_files,
    listed_inputs,
    listing_version,
    parse,
    shared_progress,
    version_of,
)
from realmops.inputs.redaction import redact

CACHE_VARIABLE = "REALMOPS_CACHE"
PARTIAL = ".partial-"  # prefix of a folder with a partial copy, which is locked while it is written
_DRAFT = ".draft-"


class Report(Protocol):
    """Log lines and progress of a fetch; a ``stages.Report`` is one."""

    def log(self, message: str) -> None:
        """Log an informational line."""

    def progress(self, label: str, total: int, unit: str = "") -> Callable[[int], None]:
        """Start a progress bar; the returned callback takes the units completed since its last call."""


@dataclass(frozen=True)
class FetchedInput:
    """The local copy of an input: its address without credentials, version, path, number of files, and bytes."""

    address: str
    version: str
    path: Path
    files: int
    bytes: int


def local_cache() -> Path:
    """Return the folder of fetched inputs on this machine: ``$REALMOPS_CACHE``, or a folder of the user."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "realmops" / "inputs").absolute()


def fetch_addresses(
    values: Values,
    cache: Path,
    report: Report,
    reads: Callable[[str], bool] = lambda key: True,
    versions: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, FetchedInput]:
    """Fetch the inputs with an address that the cache does not have, and return the copies of all by section.key.

    Args:
        values: all sections of the params.
        cache: folder of fetched inputs.
        report: where to log.
        reads: whether an input, by section.key, is needed.
        versions: the only version to take, by section.key; any of the others.

    Raises:
        ValueError: an address cannot be read, was changed meanwhile, or does not fit on the disk.
    """
    fetched: dict[str, FetchedInput] = {}
    copies: dict[tuple[str, str], FetchedInput] = {}
    for key, value in listed_inputs(values).items():
        if is_address(value) and reads(key):
            version = versions.get(key, "")
            if (value, version) not in copies:
                try:
                    copies[value, version] = fetch(value, cache, report, version)
                except ValueError as error:
                    raise ValueError(f"{key}: {error}") from None
            fetched[key] = copy = copies[value, version]
            report.log(f"{key}: {copy.path} is version {copy.version[:12]} of {copy.address}")
    return fetched


def fetch(text: str, cache: Path, report: Report, expected: str = "") -> FetchedInput:
    """Fetch one address, only in the ``expected`` version if there is one; as :func:`fetch_addresses`."""
    address = parse(text)
    known = address.digest or expected
    final = cache / known / address.name
    partial_prefix = f"{PARTIAL}{artifacts.digest_of(redact(address.location))[:16]}-"
    if not (known and final.exists()):
        files = list_files(address)
        version = listing_version(address, files)
        if known not in ("", version):
            raise InputError(
                f"{address} was changed since this run was submitted: its version was {known[:12]} and is "
                f"{version[:12]}; submit again"
            )
        final = cache / version / address.name
        if not final.exists():
            artifacts.make_folder(cache)
            with _lock(cache / f"{partial_prefix}{version}", f"{address}", report) as partial_folder:
                try:
                    if not final.exists():
                        _fetch_files(address, files, partial_folder, report)
                        _check_unchanged(address, files, version)
                        _commit(partial_folder, final)
                except InputError:
                    if not address.digest:  # another version is read next
                        shutil.rmtree(partial_folder, ignore_errors=True)
                    raise
                shutil.rmtree(partial_folder, ignore_errors=True)
    for folder in cache.glob(f"{partial_prefix}*"):
        _remove_unlocked(folder)
    copies = [path for path in final.rglob("*") if path.is_file()] if final.is_dir() else [final]
    size = sum(path.stat().st_size for path in copies)
    return FetchedInput(str(address), final.parent.name, final, len(copies), size)


@contextmanager
def _lock(folder: Path, what: str, report: Report) -> Iterator[Path]:
    """Context manager: create and lock the folder of a partial copy; wait for another process that has it."""
    while True:
        artifacts.make_folder(folder)
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another process has removed it
            continue
        try:
            if artifacts.try_lock(handle) is False:
                report.log(f"inputs: another process is fetching {what}; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_folder_of(handle, folder):  # else the other process has removed it
                yield folder
                return
        finally:
            os.close(handle)


def _remove_unlocked(folder: Path) -> None:
    """Remove the folder of a partial copy, unless a process is writing it."""
    with suppress(FileNotFoundError):  # another process has removed it
        handle = os.open(folder, os.O_RDONLY)
        try:
            if artifacts.try_lock(handle):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


def _is_folder_of(handle: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(folder))
    except FileNotFoundError:
        return False


def _fetch_files(address: Address, files: Sequence[RemoteFile], folder: Path, report: Report) -> None:
    """Fetch the files that a partial copy does not have yet."""
    for draft in folder.glob(f"{_DRAFT}*"):  # of a process that was killed; it would count as used space
        draft.unlink()
    targets = {file: folder / address.name / file.name for file in files}
    missing = [f for f, target in targets.items() if not target.is_file() or _find_difference(f, target)]
    total = sum(file.size or 0 for file in missing)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise ValueError(f"{address} has {total / 1e9:.2f} GB left to fetch, but {_no_space(folder, free)}")
    for target in targets.values():
        target.parent.mkdir(parents=True, exist_ok=True)
    stopped = threading.Event()
    advance = shared_progress(report.progress("inputs", total, "B"), stopped)
    try:
        with filesystem(address) as fs, ThreadPoolExecutor(THREADS) as pool:
            work = partial(_fetch_file, fs, address, folder, advance)
            try:
                for _ in pool.map(work, missing, [targets[file] for file in missing]):
                    pass
            except BaseException:
                stopped.set()  # the pool would wait for whole files
                raise
    except OSError as error:
        if error.errno != ENOSPC:
            raise
        raise ValueError(f"{address} does not fit: {_no_space(folder, 0)}") from None


def _no_space(folder: Path, free: int) -> str:
    return (
        f"{folder.parent} has {free / 1e9:.2f} GB free; free disk space, or put the cache on a larger disk "
        f"({CACHE_VARIABLE}, in a cluster the claim), and run again: it continues"
    )


def _fetch_file(
    fs: Any, address: Address, folder: Path, advance: Callable[[int], None], file: RemoteFile, target: Path
) -> None:
    """Fetch one file; it gets its name once it is verified and durable."""
    from fsspec.callbacks import Callback

    done = 0

    def on_bytes(size: int | None, value: int, **other: Any) -> None:
        nonlocal done
        advance(value - done)
        done = value

    draft = folder / f"{_DRAFT}{uuid.uuid4().hex}"
    try:
        fs.get_file(file.path, str(draft), callback=Callback(hooks={"bytes": on_bytes}))
        on_bytes(None, draft.stat().st_size)  # of a filesystem without progress
        if problem := _find_difference(file, draft):
            raise InputError(f"{address}{'/' if file.name else ''}{file.name} {problem}")
        draft.chmod(0o444)  # its folder is named by its content
        with open(draft, "rb") as written:
            os.fsync(written.fileno())
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _find_difference(file: RemoteFile, copy: Path) -> str:
    """Return how a copy differs from what was listed, or an empty string."""
    size = copy.stat().st_size
    if file.size not in (None, size):
        return f"was changed while it was read: {size} bytes came, {file.size} were listed; run again"
    algorithm, _, expected = file.mark.partition(":")
    if algorithm not in ("md5", "sha256"):
        return ""
    with open(copy, "rb") as content:
        digest = hashlib.file_digest(content, algorithm).hexdigest()
    if digest == expected:
        return ""
    if algorithm == "sha256":
        return "was changed while it was read: its content has another digest; run again"
    return (
        f"is damaged: its md5 is {digest}, its address has {expected}; delete the object {file.path}, and upload it "
        "again"
    )


def _check_unchanged(address: Address, files: Sequence[RemoteFile], version: str) -> None:
    """Raise InputError if an address has another version now than when it was listed."""
    if address.digest or all(file.mark.startswith("sha256:") for file in files):
        return  # each file was compared with its digest
    if (now := version_of(address.text)) != version:
        raise InputError(
            f"{address} was changed while it was read: its version was {version[:12]} and is {now[:12]}; run again"
        )


def _commit(partial_folder: Path, final: Path) -> None:
    draft = partial_folder / final.name
    for folder in (partial_folder, *filter(Path.is_dir, [draft, *draft.rglob("*")])):
        artifacts.sync_folder(folder)
    artifacts.make_folder(final.parent)
    os.rename(draft, final)
    artifacts.sync_folder(final.parent)
