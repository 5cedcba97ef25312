"""``realmops clean``: delete old, marked runs of pipelines from a volume.

A folder is renamed before it is deleted, so that no half-deleted folder is taken for a run.
"""

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from realmops import artifacts
from realmops.artifacts import MANIFEST, PROMOTED, UPDATE, WORK_FOLDER
from realmops.cluster.task_context import MARK
from realmops.stages import STAGES
from realmops.stages.runner import stage_lock

DELETED = ".deleted-"  # prefix of a folder that is being deleted
LOCKS = (*STAGES, "promote", UPDATE)
DAY = 86400.0


def clean(runs: Path, days: float, *, delete: bool, problems: list[str]) -> Iterator[str]:
    """Yield a line for each marked run; ``delete`` those unchanged for ``days``, idle and without promoted models."""
    runs, deleted, left = runs.resolve(), 0, 0
    for path in sorted(runs.iterdir()):
        if path.is_symlink() or not path.is_dir() or not _is_marked(path):
            left += 1
            continue
        size, age = _scan(path)
        run = f"{path} ({size / 1e6:.2f} MB, changed {age / DAY:.1f} days ago)"
        if any(path.glob(f"{PROMOTED}/*/{MANIFEST}")):
            yield f"keep {run}: it has promoted models; delete {path / PROMOTED} to free it"
        elif not path.name.startswith(DELETED) and age < days * DAY:
            yield f"keep {run}"
        elif not delete:
            deleted += 1
            yield f"would delete {run}"
        else:
            try:
                _delete(path)
            except (OSError, ValueError) as error:  # ValueError: a stage is running
                problems.append(f"{path} is not deleted: {error}")
            else:
                deleted += 1
                yield f"delete {run}"
    verb = "deleted" if delete else "would be deleted, with --delete"
    yield f"{deleted} {verb}; {left} left alone, which have no {MARK} that names them"


def _is_marked(path: Path) -> bool:
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        parent, name = artifacts.read_json(path / MARK)["run"].split("/")
        return path.parent.name == parent and (path.name == name or path.name.rpartition("-")[0] == f"{DELETED}{name}")
    return False


def _scan(folder: Path) -> tuple[int, float]:
    """Return bytes on the disk and seconds since the last change below a folder, without following links."""
    sizes, changed = {}, folder.stat().st_mtime
    for place, folders, files in os.walk(folder):
        for entry in (*folders, *files):
            with suppress(FileNotFoundError):  # a running stage has removed it
                status = Path(place, entry).lstat()
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
                changed = max(changed, status.st_mtime)
    return sum(sizes.values()), time.time() - changed


def _delete(path: Path) -> None:
    """Rename a folder, then delete it; the locks keep stages from starting in it before it is renamed."""
    hidden = path
    if not path.name.startswith(DELETED):
        hidden = path.with_name(f"{DELETED}{path.name}-{uuid.uuid4().hex}")
        with ExitStack() as stack:
            for name in LOCKS:
                stack.enter_context(stage_lock(path / WORK_FOLDER, name))
            os.rename(path, hidden)
    # The mark is deleted last, so that an interrupted call is completed by the next one.
    for entry in hidden.iterdir():
        if entry.name != MARK:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    shutil.rmtree(hidden)
