"""Artifacts that stages pass on: folders with a manifest, written atomically; and durable, canonical JSON files.

Files of others are never deleted: ``check_replaceable`` is the rule for folders that are replaced. What else is deleted
has a name of ours: drafts, folders below ``WORK_FOLDER``, entries of a cache or an exchange, marked runs (``clean``).
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from realmops.files import DISK, Files

SCHEMA = 5
PROMOTED = "promoted"  # kind of a promoted model's manifest, and the subfolder of a run with promoted models
UPDATE = "update"  # kind of an update's manifest
WORK_FOLDER = ".realmops"  # folder below a root for unfinished work, locks and the local MLflow database
MANIFEST = "manifest.json"
STAGE_FOLDERS = {  # outputs, relative to the root of the run
    "sample": "data/sample",
    "snapshot": "data/snapshot",
    "tag": "data/spans",
    "ict": "models/ict",
    "pretrain": "models/pretrain",
    "finetune": "models/finetune",
    "evaluate": "results",
}
DIGEST_KEY = "manifest_digest"
JSON_LIMIT = 1 << 28  # bytes
REMEMBERED_SIZE = 1 << 20  # bytes of a file whose digest is remembered
_SETTLED_NS = 2_000_000_000  # age of a file's last change after which a further change has another time, on any disk
make_folder, sync_folder = DISK.make_folder, DISK.sync_folder
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def special_file_kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder", stat.S_IFREG: ""}
    return kinds.get(stat.S_IFMT(mode), "device")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; ValueError for a folder, a pipe, which would block, or a device."""
    if kind := special_file_kind(os.stat(path).st_mode):
        raise ValueError(f"{path}: cannot be read: it is a {kind}, expected a regular file; copy its content into one")
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def sha256_file(path: Path, *, reread: bool = False) -> str:
    """Return the sha256 in hex; that of a large file is cached until its stat changes, unless ``reread``."""
    with open_regular(path) as file:
        identity = _identity(file)
        if identity[0] < REMEMBERED_SIZE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        memory, version = digest_cache() / digest_of(os.path.realpath(path)), digest_of(identity)
        if not reread:
            with suppress(OSError):
                remembered, _, digest = memory.read_text("ascii", "replace").partition(" ")
                if remembered == version and len(digest) == 64:
                    return digest
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _identity(file) == identity and time.time_ns() - max(identity[1:3]) > _SETTLED_NS:
            with suppress(OSError):  # a read-only or full disk: the file is read again next time
                make_folder(memory.parent)
                write_bytes(memory, f"{version} {digest}".encode())
        return digest


def _identity(file: IO[Any]) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev


def digest_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "realmops" / "digests"


def canonical_json(value: Any) -> bytes:
    """Encode a value as the same bytes for equal values: sorted keys, no spaces, no NaN."""
    return _CANONICAL.encode(value).encode()


def digest_of(value: Any) -> str:
    """Return the sha256 of canonical JSON, which has file names that are not UTF-8 in JSON's escapes."""
    return hashlib.sha256(_CANONICAL.encode(value).encode(errors="backslashreplace")).hexdigest()


def has_valid_digest(value: Mapping[str, Any]) -> bool:
    try:
        return bool(value.get(DIGEST_KEY) == digest_of({k: v for k, v in value.items() if k != DIGEST_KEY}))
    except ValueError:  # NaN, which canonical JSON never contains
        return False


def seed_for(seed: int, *stream: int | str) -> int:
    """Derive a 63-bit seed for one named stream of random numbers, for example ``seed_for(0, "masks", step)``."""
    return int.from_bytes(hashlib.sha256(canonical_json([seed, *stream])).digest()[:8], "big") >> 1


def read_json(path: Path) -> Any:
    """Read a JSON file; ValueError with file and position if it is not valid or too large."""
    try:
        if (size := path.stat().st_size) > JSON_LIMIT:  # before anything is allocated
            raise ValueError(f"it has {size} bytes, the limit is {JSON_LIMIT}")
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}); it is damaged: move its folder away, and run its stage again"
        ) from None


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes(path, (text + "\n").encode(errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically and durably: temporary file, fsync, rename, fsync of the folder."""
    with atomic_file(path) as draft:
        draft.write_bytes(content)


def write_new(path: Path, content: bytes) -> None:
    """Write a file; ValueError if one with other content exists."""
    if not os.path.lexists(path):
        write_bytes(path, content)
    elif not path.is_file() or path.read_bytes() != content:
        raise ValueError(f"{path} exists with other content and would be overwritten; choose another place, or move it")


@contextmanager
def atomic_file(final: Path) -> Iterator[Path]:
    """Yield the path of a draft in the same folder, which is synced and replaces ``final`` unless an error occurs."""
    draft = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
    try:
        yield draft
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, final)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(final.parent)


def try_lock(file: IO[Any] | int, kind: int = fcntl.LOCK_EX) -> bool | None:
    """Try to lock an open file; return False if another process holds the lock, None if the volume has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def wait_for_lock(file: IO[Any] | int) -> None:
    """Wait for the exclusive lock of an open file; return at once if the volume has no locks."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def atomic_folder(
    final: Path, kind: str | None, *, files: Files = DISK, draft: str = "", commit: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """Yield a draft folder, which is synced and replaces ``final`` at the end of the block; it is deleted on error.

    ValueError before the block, and before the commit, if ``final`` has a file that its manifest of ``kind`` does not
    list; None is for a folder below ``WORK_FOLDER`` or in a cache. Another ``commit`` than by replacing ``final``
    returns whether it committed the synced draft. Its caller writes the files with ``files.write``, which syncs them,
    names the ``draft``, and sweeps those of killed processes.
    """
    if commit is None:
        if final.is_symlink():  # the folder is kept on another disk: replace the target, not the link
            final = final.resolve()
        make_folder(final.parent)
        _remove_abandoned(final)
        check_replaceable(final, kind, by_name=True)
    path = final.with_name(draft or f".{final.name}.{uuid.uuid4().hex}")
    is_committed = False
    with ExitStack() as locks:
        try:
            with suppress(FileExistsError):  # its name is unique: mkdir was done and its reply lost
                files.mkdir(path)
            if commit is None:
                handle = os.open(path, os.O_RDONLY)
                locks.callback(os.close, handle)
                try_lock(handle, fcntl.LOCK_SH)  # on a volume without locks, drafts are never taken for abandoned
            yield path
            if commit is None:
                _sync_files(path)
            files.sync_folders(path)
            is_committed = _replace(path, final, kind) if commit is None else commit(path)
        finally:
            if not is_committed:
                shutil.rmtree(path, ignore_errors=True) if commit is None else files.discard(path)


def _sync_files(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def _replace(draft: Path, final: Path, kind: str | None) -> bool:
    check_replaceable(final, kind, by_name=True)  # again: the block may have taken hours
    old = final.with_name(f".{final.name}.{uuid.uuid4().hex}.old")
    if final.exists():
        os.rename(final, old)
    try:
        os.rename(draft, final)
    except BaseException:
        if old.exists():
            os.rename(old, final)
        raise
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return True


def _remove_abandoned(final: Path) -> None:
    """Delete the drafts of killed processes, which no process locks; restore an old folder that was not replaced."""
    draft = re.compile(rf"\.{re.escape(final.name)}\.[0-9a-f]{{32}}(\.old)?")
    for folder in filter(lambda path: draft.fullmatch(path.name), [*final.parent.iterdir()]):
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            try:
                if not try_lock(handle):
                    continue
                if folder.suffix == ".old" and not final.exists():
                    os.rename(folder, final)
                claimed = final.with_name(f".{final.name}.{uuid.uuid4().hex}")
                os.rename(folder, claimed)  # the lock of a writer on another machine may not be visible here
                shutil.rmtree(claimed, ignore_errors=True)
            finally:
                os.close(handle)


def build_manifest(kind: str, files: Mapping[str, Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return the manifest of files, given as ``{"bytes", "sha256"}`` by name, with its own digest."""
    manifest = {"schema": SCHEMA, "kind": kind, "files": files, **fields}
    return {**manifest, DIGEST_KEY: digest_of(manifest)}


def check_manifest(manifest: Any, kind: str) -> dict[str, Any]:
    actual = (manifest.get("kind"), manifest.get("schema")) if isinstance(manifest, dict) else type(manifest).__name__
    if not isinstance(manifest, dict) or actual != (kind, SCHEMA):
        writer = ": written by another version of realmops" if actual[0] == kind else ""
        raise ValueError(f"kind and schema are {actual}, expected {(kind, SCHEMA)}{writer}")
    if not has_valid_digest(manifest):
        raise ValueError("it does not match its own digest")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise ValueError("it has no list of files with their bytes and sha256")
    for name, entry in files.items():
        size = entry.get("bytes") if isinstance(entry, dict) and "sha256" in entry else None
        if type(size) is not int or size < 0:
            raise ValueError("it has no list of files with their bytes and sha256")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"the file name {name!r} leaves the folder")
    return manifest


def write_manifest(folder: Path, kind: str, **fields: Any) -> dict[str, Any]:
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / MANIFEST
    }
    manifest = build_manifest(kind, files, **fields)
    write_json(folder / MANIFEST, manifest)
    return manifest


def read_manifest(folder: Path, kind: str, *, verify: bool = True, reread: bool = False) -> dict[str, Any]:
    """Read a manifest and check its files by size, with ``verify`` or for symlinks (as from DVC) also by sha256."""
    path = folder / MANIFEST
    if not path.is_file():
        advice = "'realmops run all' makes it" if kind in STAGE_FOLDERS else "run the stage that makes it"
        raise ValueError(f"{folder} holds no {MANIFEST}: it is no finished {kind}; {advice}")
    content = read_json(path)
    try:
        manifest = check_manifest(content, kind)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; run the stage that makes it again") from None
    resolved = folder.resolve()
    for name, expected in manifest["files"].items():
        file = folder / name
        problem = ""
        if not os.path.isfile(file):  # False also for a name that is invalid on the disk
            problem = f"is missing (named in {path})"
        elif file.parent.resolve() != (resolved / name).parent:
            problem = "is in a folder that is a symbolic link, expected a folder"
        elif (size := file.stat().st_size) != expected["bytes"]:
            problem = f"has {size} bytes, its manifest lists {expected['bytes']}; it was truncated or changed"
        elif (verify or file.is_symlink()) and (digest := sha256_file(file, reread=reread)) != expected["sha256"]:
            problem = f"has sha256 {digest}, its manifest lists {expected['sha256']}; it was changed"
        if problem:
            raise ValueError(f"{file} {problem}: run the stage that makes it again")
    return manifest


def verify_manifests(root: Path) -> int:
    """Compare the files of a run with their manifests and return their number; those of other programs are skipped."""
    paths = [path for path in sorted(root.rglob(MANIFEST)) if WORK_FOLDER not in path.relative_to(root).parts]
    contents = [(path.parent, read_json(path)) for path in paths]
    own = [(folder, found) for folder, found in contents if isinstance(found, dict) and "kind" in found]
    if not own:
        raise ValueError(f"{root} has no {MANIFEST} of a stage; name the folder of a run with --root")
    return sum(len(read_manifest(folder, str(found["kind"]), reread=True)["files"]) for folder, found in own)


def read_bound_manifest(
    folder: Path, kind: str, corpus_hash: str | None, stage: str, *, verify: bool = True
) -> dict[str, Any]:
    """Read the manifest of a folder that ``stage`` made; ValueError also if it was for another corpus."""
    manifest = read_manifest(folder, kind, verify=verify)
    if corpus_hash is not None and manifest["corpus_hash"] != corpus_hash:
        raise ValueError(
            f"{folder}: made for corpus {manifest['corpus_hash']}, but the snapshot is {corpus_hash}; run the {stage} "
            "stage again"
        )
    return manifest


def check_replaceable(folder: Path, kind: str | None, *, by_name: bool = False) -> None:
    """Check that a folder has no files but those of its manifest, unchanged unless ``by_name``; else ValueError."""
    if kind is None:
        return
    manifest: Any = None
    with suppress(OSError, ValueError):  # missing or damaged
        manifest = read_json(folder / MANIFEST)
    files = {}
    if isinstance(manifest, dict) and manifest.get("kind") == kind and has_valid_digest(manifest):
        files = {name: entry["sha256"] for name, entry in manifest["files"].items()} | {MANIFEST: None}
    for file in sorted(folder.rglob("*")) if folder.is_dir() else [folder] if folder.exists() else []:
        name = file.relative_to(folder).as_posix()
        is_ours = name in files and (by_name or name == MANIFEST or files[name] == sha256_file(file))
        if not is_ours and (file.is_symlink() or not file.is_dir()):
            raise ValueError(
                f"{file} was not written by this command, and {folder} would be replaced; move one of them away"
            )
