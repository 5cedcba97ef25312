"""``realmops clean``: what it deletes, and everything that it must keep."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import small_project

from realmops import artifacts
from realmops.cluster import clean
from realmops.stages import STAGES
from realmops.stages.runner import stage_lock
from realmops.tracking.client import mlflow_client
from realmops.tracking.registry import COPIED_TAG, DIGEST_TAG, PROMOTED

DAY = 86400
UNREACHABLE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "volume" / "runs"
    folder.mkdir(parents=True)
    return folder


def grow_old(folder: Path, days: float) -> None:
    at = time.time() - days * DAY
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (at, at), follow_symlinks=False)


def write_run(folder: Path, days: float, *, digest: str = "", documents: str = "") -> Path:
    """A run that has made its snapshot, and was promoted if it has a digest."""
    snapshot = folder / STAGES["snapshot"].folder
    snapshot.mkdir(parents=True)
    (snapshot / "passages").write_bytes(b"p" * 10_000)
    artifacts.write_manifest(snapshot, "snapshot", sections={"snapshot": {"documents": documents}})
    with stage_lock(folder / artifacts.WORK_FOLDER, "snapshot"):
        pass
    if digest:
        promoted = folder / PROMOTED / digest[:12]
        promoted.mkdir(parents=True)
        artifacts.write_manifest(promoted, PROMOTED, digest=digest)
    grow_old(folder, days)
    return folder


def write_input(folder: Path, version: str, days: float) -> Path:
    (folder / version).mkdir(parents=True)
    (folder / version / "corpus.jsonl").write_text("text")
    grow_old(folder / version, days)
    return folder / version


def call(runs: Path, *words: str, keep: int = 1) -> tuple[int, str]:
    done = small_project.cli("clean", "--runs", runs, "--keep", keep, *words)
    return done.exit_code, done.output


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_old_runs_go_and_the_newest_stay(runs: Path) -> None:
    for n in range(1, 5):
        write_run(runs / f"run-{n}", days=n)
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    code, planned = call(runs, "--dry-run", keep=2)
    assert code == 0
    assert f"delete {runs / 'run-3'} (0.0" in planned
    assert "MB, changed 3 days ago)" in planned
    assert "\nto delete: 2 of 4 folders, 0.0" in planned
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before

    code, printed = call(runs, keep=2)
    assert code == 0
    assert printed.splitlines()[:-1] == planned.splitlines()[:-1]
    assert names(runs) == {"run-1", "run-2"}
    assert call(runs, keep=2)[1].splitlines()[-1] == "deleted: 0 of 2 folders, 0.00 MB"


def test_a_registered_model_keeps_its_run(
    runs: Path, tmp_path: Path, mlflow_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every version, not the champion alone: the alias may move back. Versions with copies need no run."""
    database = shutil.copy(mlflow_database, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    client = mlflow_client(f"sqlite:///{database}")
    for n, name in enumerate(("before", "champion", "copied", "removed")):
        digest = f"{n}" * 64
        write_run(runs / name, days=9, digest=digest)
        client.create_registered_model(f"model-{name}")
        tags = {DIGEST_TAG: digest, **({COPIED_TAG: "true"} if name == "copied" else {})}
        client.create_model_version(f"model-{name}", "somewhere", tags=tags)
    client.delete_model_version("model-removed", "1")
    write_run(runs / "newest", days=1)
    code, printed = call(runs)
    assert code == 0
    assert names(runs) == {"before", "champion", "newest"}
    assert printed.count("a registered model") == 2


def test_nothing_goes_while_the_registry_cannot_be_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(1, 4):
        write_run(runs / f"run-{n}", days=n)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", UNREACHABLE)
    for words in ((), ("--dry-run",)):
        code, printed = call(runs, *words)
        assert code == 2
        assert "the model registry at MLFLOW_TRACKING_URI failed" in printed
    assert names(runs) == {"run-1", "run-2", "run-3"}


def test_without_a_registry_promoted_runs_stay(runs: Path) -> None:
    write_run(runs / "newest", days=1)
    write_run(runs / "promoted", days=9, digest="a" * 64)
    write_run(runs / "old", days=9)
    assert call(runs)[0] == 0
    assert names(runs) == {"newest", "promoted"}


def test_a_run_that_lives_stays(runs: Path) -> None:
    """By the lock of a stage, also one of an ablation; and by its age, where the volume has no locks."""
    write_run(runs / "newest", days=0)
    write_run(runs / "recent", days=0.02)
    write_run(runs / "two-hours", days=2 / 24)
    for name in ("running", "ablation/baseline/0"):
        write_run(runs / name, days=9)
    grow_old(runs / "ablation", days=9)
    with stage_lock(runs / "running" / artifacts.WORK_FOLDER, "pretrain"):
        grow_old(runs / "running", days=9)
        with stage_lock(runs / "ablation/baseline/0" / artifacts.WORK_FOLDER, "ict"):
            grow_old(runs / "ablation", days=9)
            code, printed = call(runs)
    assert code == 0
    assert names(runs) == {"newest", "recent", "running", "ablation"}
    assert printed.count("a stage is running") == 2
    grow_old(runs / "ablation", days=9)
    call(runs)
    assert "ablation" not in names(runs)


def test_a_stage_that_starts_meanwhile_keeps_its_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(runs / "newest", days=1)
    run = write_run(runs / "resumed", days=9)
    monkeypatch.setattr(clean, "is_running", lambda work, name: False)
    with stage_lock(run / artifacts.WORK_FOLDER, "finetune"):
        grow_old(run, days=9)
        code, printed = call(runs)
    assert code == 0
    assert f"keep {run}: a stage has started" in printed
    assert names(runs) == {"newest", "resumed"}


def test_hard_links_and_links_of_kept_runs_lose_nothing(runs: Path) -> None:
    """A pipeline links an output that another run has made already; a person may set a symbolic link."""
    first, second, third = (write_run(runs / name, days) for name, days in (("first", 9), ("second", 8), ("third", 7)))
    newest = write_run(runs / "newest", days=1)
    shared = first / "data/snapshot/shared"
    shared.write_bytes(b"s" * 1_000_000)
    os.link(shared, newest / "data/snapshot/shared")
    (newest / "models").symlink_to(second / "data")
    (second / "models").symlink_to(third / "data")
    for run in (newest, first, second, third):  # the shared file is old
        grow_old(run, days=1 if run is newest else 9)
    code, printed = call(runs)
    assert code == 0
    assert names(runs) == {"newest", "second", "third"}
    assert (newest / "data/snapshot/shared").read_bytes() == b"s" * 1_000_000
    assert f"delete {first} (1." in printed
    assert printed.splitlines()[-1].startswith("deleted: 1 of 4 folders, 0.0"), "the shared megabyte is not free"


def test_nothing_outside_the_folder_is_touched(runs: Path, tmp_path: Path) -> None:
    elsewhere = write_run(tmp_path / "elsewhere", days=9)
    write_run(runs / "newest", days=1)
    old = write_run(runs / "old", days=9)
    (old / "models").symlink_to(elsewhere)
    (old / "file").symlink_to(elsewhere / "data/snapshot/passages")
    grow_old(old, days=9)
    (runs / "linked").symlink_to(elsewhere)
    (runs / "corpora").mkdir()
    (runs / "corpora" / "wiki.jsonl").write_text("text")
    (runs / artifacts.WORK_FOLDER / "promote").mkdir(parents=True)  # the lease of promotions
    grow_old(runs, days=9)
    grow_old(runs / "newest", days=1)
    code, printed = call(runs)
    assert code == 0
    assert names(runs) == {"newest", "linked", "corpora", artifacts.WORK_FOLDER}
    assert (runs / artifacts.WORK_FOLDER / "promote").is_dir()
    assert "corpora: not a run" in printed
    assert (elsewhere / "data/snapshot/passages").stat().st_size == 10_000


def test_a_call_that_was_killed_is_completed_by_the_next(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(runs / "newest", days=1)
    write_run(runs / "old", days=9)

    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        code, printed = call(runs)
    assert code == 1
    assert "is not deleted" in printed
    [left] = names(runs) - {"newest"}
    assert left.startswith(clean.DELETED)
    assert f"delete {runs / left} (" in call(runs, "--dry-run")[1]
    assert call(runs)[0] == 0
    assert names(runs) == {"newest"}


@pytest.mark.parametrize(
    "name",
    [
        lambda inputs, version: str(inputs / version / "corpus.jsonl"),
        lambda inputs, version: f"s3://bucket/files/md5/{version[:2]}/{version[2:]}#corpus.jsonl",
    ],
    ids=["path", "address"],
)
def test_inputs_go_with_the_last_run_that_uses_them(runs: Path, name: Callable[[Path, str], str]) -> None:
    inputs = runs.parent / "inputs"
    used, unused, recent = "1a" * 16, "2b" * 16, "3c" * 16
    for version, days in ((used, 20), (unused, 20), (recent, 0.01), (f"{clean.PARTIAL}{'0' * 16}-{unused}", 20)):
        write_input(inputs, version, days)
    write_run(runs / "newest", days=1, documents=name(inputs, used))
    write_run(runs / "old", days=9, documents=name(inputs, unused))
    with stage_lock(runs / "newest" / artifacts.WORK_FOLDER, "snapshot"):
        grow_old(runs / "newest", days=1)
        call(runs, "--dry-run")
        assert call(runs, "--dry-run")[1].count("a run may be about to read it") == 3
    grow_old(runs / "newest", days=1)
    code, printed = call(runs)
    assert code == 0
    assert names(inputs) == {used, recent}
    assert f"keep {inputs / used}: used by a kept run" in printed
