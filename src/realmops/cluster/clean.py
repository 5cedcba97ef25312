"""``realmops clean``: delete old runs on a volume, and fetched inputs that no kept run uses.

A folder is renamed before it is deleted, so that no half-deleted folder is taken for a run; the next call deletes what
a killed call has left. Outputs that runs share are hard links, so the files of the other runs stay. Symbolic links are
not followed.
"""

import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from realmops import artifacts
from realmops.artifacts import MANIFEST, WORK_FOLDER
from realmops.cluster import INPUTS
from realmops.inputs.fetch import PARTIAL
from realmops.stages import STAGES
from realmops.stages.runner import is_running, stage_lock
from realmops.tracking.registry import PROMOTED, registered_digests

DELETED = ".deleted-"  # prefix of a folder that is being deleted
IDLE_SECONDS = 3600.0  # a run that changed later may be between two stages, or on a volume without locks
RECORD_LIMIT = 1 << 20  # bytes of a JSON or YAML file in which the versions of inputs are searched
LOCKS = (*STAGES, "promote")


@dataclass
class Folder:
    """A folder that may be deleted: its files, age, and why it is kept.

    Attributes:
        inodes: by inode, the bytes on the disk, the number of links in this folder and that of all links.
        changed: the newest change of a file, as Unix time.
        works: work folders, with the locks of running stages.
        links: targets of symbolic links.
        records: JSON and YAML files that may name inputs.
        reason: why it is kept; empty if it is deleted.
    """

    path: Path
    inodes: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    changed: float = 0.0
    works: list[Path] = field(default_factory=list)
    links: list[Path] = field(default_factory=list)
    records: list[Path] = field(default_factory=list)
    is_run: bool = False
    reason: str = ""

    def __str__(self) -> str:
        size = sum(size for size, _, _ in self.inodes.values())
        verdict = f"keep {self.path}: {self.reason}" if self.reason else f"delete {self.path}"
        return f"{verdict} ({_bytes(size)}, changed {_age(self.changed)} ago)"


def clean(runs: Path, keep: int, *, dry_run: bool, problems: list[str]) -> Iterator[str]:
    """Delete the runs in a folder that nothing needs, and yield a line for each run and input.

    A run is kept if a version in MLflow's registry reads its files, if one of its stages is running or it changed
    within the last hour, if it is one of the newest, or if a kept run has a symbolic link to it.

    Args:
        runs: folder of the runs; fetched inputs are in the folder ``inputs`` next to it.
        keep: number of the newest runs to keep.
        dry_run: only yield the lines.
        problems: gets a line for each folder that cannot be deleted.

    Raises:
        ConnectionError: MLFLOW_TRACKING_URI is set, and MLflow's registry cannot be read; nothing is deleted.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    digests = registered_digests(uri) if uri else None
    runs = runs.resolve()
    folders = [_scan(path) for path in _subfolders(runs)]
    candidates = [folder for folder in folders if folder.is_run and not folder.path.name.startswith(DELETED)]
    _choose_runs(candidates, keep, digests)
    for folder in folders:
        if not (folder.is_run or folder.path.name.startswith(DELETED)):
            folder.reason = "not a run"
    folders += _choose_inputs(runs.parent / INPUTS, candidates)
    deleted = []
    for folder in folders:
        if not (folder.reason or dry_run):
            _delete(folder, problems)
        if folder.reason or dry_run or not folder.path.exists():
            yield str(folder)
            deleted += [] if folder.reason else [folder]
    verb = "to delete" if dry_run else "deleted"
    yield f"{verb}: {len(deleted)} of {len(folders)} folders, {_bytes(_freed(deleted))}"


def _subfolders(folder: Path) -> list[Path]:
    """Return the subfolders, without links and without hidden ones such as work folders, but with half-deleted ones."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return [folder / name for name in names if not name.startswith(".") or name.startswith((DELETED, PARTIAL))]


def _scan(folder: Path) -> Folder:
    """Read names, sizes and times below a folder, without following links."""
    found = Folder(folder, changed=folder.stat().st_mtime)
    stages = {Path(stage.folder).parts for stage in STAGES.values()}
    for name, folders, files in os.walk(folder):
        place = Path(name)
        depth = len(place.relative_to(folder).parts)
        if place.name == WORK_FOLDER:
            found.works.append(place)
        if MANIFEST in files and any(place.parts[-len(parts) :] == parts for parts in stages):
            found.is_run = True
        for entry in (*folders, *files):
            path = place / entry
            with suppress(FileNotFoundError):  # a running stage has removed it
                status = path.lstat()
                found.changed = max(found.changed, status.st_mtime)
                if stat.S_ISLNK(status.st_mode):
                    found.links.append(path.resolve())
                elif stat.S_ISREG(status.st_mode):
                    key = status.st_dev, status.st_ino
                    found.inodes[key] = status.st_blocks * 512, found.inodes.get(key, (0, 0, 0))[1] + 1, status.st_nlink
                    if depth <= 3 and path.suffix in (".json", ".yaml") and status.st_size <= RECORD_LIMIT:
                        found.records.append(path)
    found.is_run = found.is_run or bool(found.works)
    return found


def _choose_runs(runs: Sequence[Folder], keep: int, digests: set[str] | None) -> None:
    """Set the reason of each run that is kept."""
    newest = sorted(runs, key=lambda run: run.changed, reverse=True)[:keep]
    for run in runs:
        promoted = {_digest(path) for path in run.path.glob(f"**/{PROMOTED}/*/{MANIFEST}")}
        if any(is_running(work, lock.stem) for work in run.works for lock in work.glob("*.lock")):
            run.reason = "a stage is running"
        elif digests is None and promoted:
            run.reason = "promoted, and MLFLOW_TRACKING_URI is not set"
        elif digests is not None and promoted & digests:
            run.reason = "a registered model"
        elif run in newest:
            run.reason = f"one of the {keep} newest"
        elif time.time() - run.changed < IDLE_SECONDS:
            run.reason = "changed within the last hour"
    linking = [run for run in runs if run.reason]
    for run in linking:  # grows
        for other in runs:
            if not other.reason and any(target.is_relative_to(other.path) for target in run.links):
                other.reason = f"linked from {run.path.name}"
                linking.append(other)


def _digest(manifest: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(artifacts.read_json(manifest)["digest"])
    return ""


def _choose_inputs(folder: Path, runs: Sequence[Folder]) -> list[Folder]:
    """Return the fetched inputs, with the reason for each that is kept: an input is fetched before it is named."""
    if not folder.is_dir() or folder.is_symlink():
        return []
    kept = [run for run in runs if run.reason]
    texts = [_text(record) for run in kept for record in run.records]
    texts += [text.replace("/", "") for text in texts]  # files/md5/ab/cdef names the version abcdef
    inputs = [_scan(path) for path in _subfolders(folder)]
    for entry in inputs:
        if entry.path.name.startswith(DELETED):
            continue
        version = entry.path.name.rpartition("-")[2]
        if any(version in text for text in texts) or any(
            target.is_relative_to(entry.path) for run in kept for target in run.links
        ):
            entry.reason = "used by a kept run"
        elif any(run.reason == "a stage is running" for run in kept):
            entry.reason = "a run may be about to read it"
        elif time.time() - entry.changed < IDLE_SECONDS or _is_locked(entry.path):
            entry.reason = "changed within the last hour"
    return inputs


def _text(record: Path) -> str:
    with suppress(OSError):
        return record.read_text(encoding="utf-8", errors="replace")
    return ""


def _is_locked(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    try:
        return artifacts.try_lock(handle) is False
    finally:
        os.close(handle)


def _delete(folder: Folder, problems: list[str]) -> None:
    """Rename a folder, then delete it; the locks keep stages from starting in it before it is renamed."""
    hidden = folder.path
    try:
        if not folder.path.name.startswith(DELETED):
            hidden = folder.path.with_name(f"{DELETED}{folder.path.name}-{uuid.uuid4().hex}")
            with ExitStack() as stack:
                for work in {*folder.works, folder.path / WORK_FOLDER} if folder.is_run else ():
                    for name in {*LOCKS, *(lock.stem for lock in work.glob("*.lock"))}:
                        stack.enter_context(stage_lock(work, name))
                os.rename(folder.path, hidden)
        shutil.rmtree(hidden)
    except ValueError:
        folder.reason = "a stage has started"
    except OSError as error:
        problems.append(f"{hidden} is not deleted: {error}")


def _freed(folders: Sequence[Folder]) -> int:
    """Return the bytes of the files whose links are all in these folders."""
    sizes: dict[tuple[int, int], int] = {}
    missing: dict[tuple[int, int], int] = {}
    for folder in folders:
        for key, (size, here, total) in folder.inodes.items():
            sizes[key] = size
            missing[key] = missing.get(key, total) - here
    return sum(size for key, size in sizes.items() if missing[key] <= 0)


def _bytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _age(changed: float) -> str:
    hours = max(time.time() - changed, 0) / 3600
    return f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.1f} hours"
