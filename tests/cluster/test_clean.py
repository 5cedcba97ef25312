"""``realmops clean`` deletes old runs that carry their mark, and nothing else."""

import os
import shutil
import time
from pathlib import Path

import pytest
import small_project

from realmops import artifacts
from realmops.artifacts import PROMOTED
from realmops.cluster import clean
from realmops.cluster.task_context import make_run_folder
from realmops.stages.runner import stage_lock


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "volume" / "runs"
    folder.mkdir(parents=True)
    return folder


def set_age(folder: Path, days: float) -> Path:
    at = time.time() - days * clean.DAY
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (at, at), follow_symlinks=False)
    return folder


def write_run(folder: Path, days: float) -> Path:
    """Write a run as a task of a pipeline does."""
    make_run_folder(folder)
    (folder / "passages").write_bytes(b"p" * 10_000)
    return set_age(folder, days)


def call(runs: Path, *words: str) -> tuple[int, str]:
    result = small_project.cli("clean", "--runs", runs, "--older-than", 30, *words)
    return result.exit_code, result.output


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_old_runs_are_deleted_only_on_request(runs: Path) -> None:
    for days in (1, 29, 31, 90):
        write_run(runs / f"run-{days}", days)
    code, output = call(runs)
    assert code == 0
    assert f"would delete {runs / 'run-31'} (0.0" in output
    assert "MB, changed 31.0 days ago)" in output
    assert output.splitlines()[-1].startswith("2 would be deleted, with --delete; 0 left alone")
    assert len(names(runs)) == 4
    code, output = call(runs, "--delete")
    assert (code, names(runs)) == (0, {"run-1", "run-29"})
    assert output.splitlines()[-1].startswith("2 deleted; 0 left alone")


def test_folders_without_a_mark_that_names_them_are_kept(runs: Path) -> None:
    """Documents, with a copied mark or as the root of a run, projects with stages, renamed or copied runs, links."""
    write_run(runs / "old", 90)
    for name in ("documents", "root"):
        (runs / name).mkdir()
        (runs / name / "only_copy.txt").write_text("words")
    shutil.copy(runs / "old" / clean.MARK, runs / "documents")
    make_run_folder(runs / "root")
    artifacts.make_folder(runs / "project" / "results")
    artifacts.write_manifest(runs / "project" / "results", "evaluate")
    os.rename(write_run(runs / "moved", 90), runs / "renamed")
    (runs / "linked").symlink_to(write_run(runs.parent / "linked", 90))
    shutil.copytree(write_run(runs.parent / "backup" / "copied", 90), runs / "copied")
    (runs / "broken").mkdir()
    (runs / "broken" / clean.MARK).write_text("[")
    for folder in runs.iterdir():
        set_age(folder, 90)
    code, output = call(runs, "--delete")
    assert (code, names(runs)) == (0, {"documents", "root", "project", "renamed", "linked", "copied", "broken"})
    assert (runs.parent / "linked" / "passages").is_file()
    assert output.splitlines()[-1].startswith("1 deleted; 7 left alone")


def test_promoted_and_running_runs_are_kept(runs: Path) -> None:
    artifacts.make_folder(write_run(runs / "champion", 90) / PROMOTED / "0123")
    artifacts.write_manifest(runs / "champion" / PROMOTED / "0123", PROMOTED)
    set_age(runs / "champion", 90)
    running = write_run(runs / "running", 90)
    for name in ("pretrain", "update"):
        with stage_lock(running / artifacts.WORK_FOLDER, name):
            set_age(running, 90)
            code, output = call(runs, "--delete")
        assert (code, names(runs)) == (1, {"champion", "running"})
        assert "running is not deleted" in output
        assert f"keep {runs / 'champion'}" in output
    set_age(running, 90)
    call(runs, "--delete")
    assert names(runs) == {"champion"}


def test_an_interrupted_deletion_is_completed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts.make_folder(write_run(runs / "old", 90) / "data")
    set_age(runs / "old", 90)
    with monkeypatch.context() as context:
        context.setattr(clean.shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError("disk")))
        assert call(runs, "--delete")[0] == 1
    [hidden] = names(runs)
    assert hidden.startswith(".deleted-old-")
    assert call(runs, "--delete")[0] == 0
    assert not names(runs)
