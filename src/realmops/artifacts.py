"""What stages hand over: folders with a manifest, written whole or not at all."""

import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

SCHEMA = 3
WORK = ".realmops"  # under a root: unfinished work, locks, the local MLflow database
MANIFEST = "manifest.json"
SEAL = "manifest_digest"
JSON_LIMIT = 1 << 28
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def special_kind(mode: int) -> str:
    """Name the kind of what has this ``st_mode`` and is no regular file, "" for a regular file."""
    kinds = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder", stat.S_IFREG: ""}
    return kinds.get(stat.S_IFMT(mode), "device")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read its bytes: opening a named pipe waits for a writer, opening a device may change it.

    Raises:
        ValueError: the path names a folder, a pipe or a device.
        OSError: the path cannot be opened.
    """
    if kind := special_kind(os.stat(path).st_mode):
        raise ValueError(
            f"{path}: cannot be read: it is a {kind}, expected a regular file; copy what it gives into one"
        )
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def sha256_file(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> bytes:
    """One byte string for equal values: sorted keys, no spaces, no NaN."""
    return _CANONICAL.encode(value).encode()


def digest_of(value: Any) -> str:
    """The sha256 of a JSON value in canonical form."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with its own digest beside its fields."""
    return {**value, SEAL: digest_of(value)}


def is_sealed(value: Mapping[str, Any]) -> bool:
    """Whether an object still has the digest that :func:`sealed` gave it."""
    try:
        return bool(value.get(SEAL) == digest_of({k: v for k, v in value.items() if k != SEAL}))
    except ValueError:  # NaN, which nothing of ours has
        return False


def seed_for(seed: int, *stream: int | str) -> int:
    """A 63-bit seed for one named stream of random numbers, for example ``seed_for(0, "masks", step)``."""
    return int.from_bytes(hashlib.sha256(canonical_json([seed, *stream])).digest()[:8], "big") >> 1


def read_json(path: Path) -> Any:
    """The JSON value in a file; ValueError names the file and the place when it cannot be read."""
    try:
        if (size := path.stat().st_size) > JSON_LIMIT:  # before anything is allocated
            raise ValueError(f"it has {size} bytes, at most {JSON_LIMIT} are read")
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}); it is damaged: remove it and run its stage again"
        ) from None


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a JSON value: temporary file, fsync, rename."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes(path, (text + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file by these bytes: temporary file, fsync, rename, fsync of the folder."""
    with atomic_file(path) as stage:
        stage.write_bytes(content)


@contextmanager
def atomic_file(final: Path) -> Iterator[Path]:
    """The name of a file beside ``final`` that takes its place, synced, when the block ends without an error."""
    stage = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
    try:
        yield stage
        with open(stage, "rb") as file:
            os.fsync(file.fileno())
        os.replace(stage, final)
    except BaseException:
        stage.unlink(missing_ok=True)
        raise
    sync_folder(final.parent)


def make_folder(folder: Path) -> None:
    """Make a folder where it is missing, and those above it, each with a durable name."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def try_lock(file: IO[Any] | int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Take a lock on an open file; False while another process has it, None on a volume without locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, the one that a symbolic link leads to; copy it where the disk knows no links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A stage folder beside ``final`` that takes its place when the block ends without an error.

    Until then ``final`` stays as it was; after an error the stage folder is gone.  That of a killed process
    goes when ``final`` is made the next time.
    """
    if final.is_symlink():  # somebody keeps the folder on another disk: what it leads to is replaced, not the link
        final = final.resolve()
    make_folder(final.parent)
    _remove_abandoned(final)
    stage = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
    stage.mkdir()
    handle = os.open(stage, os.O_RDONLY)
    try:
        try_lock(handle, fcntl.LOCK_SH)  # without locks nobody takes the folder for abandoned either
        yield stage
        for path in sorted(stage.rglob("*")):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            else:
                sync_folder(path)
        sync_folder(stage)
        old = final.with_name(f".{final.name}.{uuid.uuid4().hex}.old")
        if final.exists():
            os.rename(final, old)
        try:
            os.rename(stage, final)
        except BaseException:
            if old.exists():
                os.rename(old, final)
            raise
        sync_folder(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def _remove_abandoned(final: Path) -> None:
    """Clear up after killed processes: remove their stage folders, which nobody has a lock on.

    What was moved out of the way and not replaced any more comes back.
    """
    for folder in final.parent.glob(f".{glob.escape(final.name)}.{'[0-9a-f]' * 32}*"):
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            try:
                if not try_lock(handle):
                    continue
                if folder.suffix == ".old" and not final.exists():
                    os.rename(folder, final)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def write_manifest(folder: Path, kind: str, **fields: Any) -> dict[str, Any]:
    """Write ``manifest.json`` over all files in the folder, with size and sha256 of each, and its own digest."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    manifest = sealed({"schema": SCHEMA, "kind": kind, "files": files, **fields})
    write_json(folder / MANIFEST, manifest)
    return manifest


def read_manifest(folder: Path, kind: str, *, verify: bool = True) -> dict[str, Any]:
    """The manifest of a folder, its files checked against it: all of them by size, with ``verify`` also by sha256.

    A file may be a symbolic link, as DVC makes them where its ``cache.type`` is symlink; its sha256 is always compared.
    Raises ValueError that names the file when the folder is of another kind or schema, or when a file
    is missing, cut, changed or in a folder that is a link.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} holds no {MANIFEST}: it is no finished {kind}; run the stage that makes it")
    manifest = read_json(path)
    found = (manifest.get("kind"), manifest.get("schema")) if isinstance(manifest, dict) else type(manifest).__name__
    if not isinstance(manifest, dict) or found != (kind, SCHEMA):
        raise ValueError(
            f"{path}: kind and schema are {found}, wanted {(kind, SCHEMA)}; run the stage that makes it again"
        )
    if not is_sealed(manifest):
        raise ValueError(f"{path} does not have the digest that it names; run the stage that makes it again")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(e, dict) and {"bytes", "sha256"} <= e.keys() for e in files.values()
    ):
        raise ValueError(f"{path} has no list of files with their bytes and sha256; run the stage that makes it again")
    place = folder.resolve()
    for name, expected in files.items():
        file = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path}: the file name {name!r} leaves the folder; do not use this {kind}")
        if not os.path.isfile(file):  # False also for a name that no disk takes
            raise ValueError(f"{file} is missing (named in {path}); run the stage that makes it again")
        if file.parent.resolve() != (place / name).parent:
            raise ValueError(
                f"{file} lies behind a symbolic link, wanted a folder of its own; run the stage that makes it again"
            )
        if file.stat().st_size != expected["bytes"]:
            raise ValueError(
                f"{file} has {file.stat().st_size} bytes, its manifest says {expected['bytes']}; "
                "it was cut or changed: run the stage that makes it again"
            )
        if (verify or file.is_symlink()) and (found_digest := sha256_file(file)) != expected["sha256"]:
            raise ValueError(
                f"{file} has sha256 {found_digest}, its manifest says {expected['sha256']}; "
                "it was changed: run the stage that makes it again"
            )
    return manifest


def read_bound_manifest(
    folder: Path, kind: str, corpus_hash: str | None, stage: str, *, verify: bool = True
) -> dict[str, Any]:
    """Return the manifest of a folder that a stage made for one corpus.

    Raises:
        ValueError: as of :func:`read_manifest`, and where ``corpus_hash`` is given and another than the folder's.
    """
    manifest = read_manifest(folder, kind, verify=verify)
    if corpus_hash is not None and manifest["corpus_hash"] != corpus_hash:
        raise ValueError(
            f"{folder}: made for corpus {manifest['corpus_hash']}, but the snapshot is {corpus_hash}; run the {stage} "
            "stage again"
        )
    return manifest


def check_replaceable(folder: Path, kind: str) -> None:
    """Check that all of a folder's files, which would be replaced, are those of its manifest.

    Raises ValueError that names the first one that a command with this kind of manifest did not write so.
    """
    path = folder / MANIFEST
    manifest = read_json(path) if path.is_file() else {}
    ours = isinstance(manifest, dict) and manifest.get("kind") == kind and is_sealed(manifest)
    known = {name: entry["sha256"] for name, entry in manifest["files"].items()} if ours else {}
    for file in sorted(folder.rglob("*")) if folder.is_dir() else [folder] if folder.exists() else []:
        written = known.get(file.relative_to(folder).as_posix())
        if (file.is_dir() and not file.is_symlink()) or (ours and file == path):
            continue
        if written is None or written != sha256_file(file):
            raise ValueError(
                f"{file} was not written by this command, and {folder} would be replaced; move it away, or name "
                "another folder"
            )
