"""Inputs with an address: fetched once by a run's first task, and by a run on this machine."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from cluster_lab import Output
from small_project import Quiet, toy_values, write_params, write_project

from realmops import artifacts
from realmops.cluster import submit, tasks
from realmops.cluster.input_plan import send_inputs
from realmops.cluster.submit import Pipeline
from realmops.commands.run import run_stages
from realmops.config import load_params
from realmops.corpus.snapshot_reader import Snapshot


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    write_project(project)
    (project / "store").mkdir()
    (project / "documents.jsonl").rename(project / "store" / "documents.jsonl")
    return project


def options_of(project: Path, documents: str) -> dict[str, Any]:
    questions = {split: str(project / f"questions.{split}.jsonl") for split in ("train", "dev", "test")}
    return toy_values(snapshot={"documents": documents}, questions=questions, tag={"method": "dates"})


def corpus_hash(root: Path) -> str:
    return Snapshot.open(root / "data/snapshot/corpus").manifest["corpus_hash"]


def test_all_tasks_of_a_run_read_the_version_that_the_first_fetched(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    remote = project / "store" / "documents.jsonl"
    options, root = json.dumps(options_of(project, f"file://{remote}")), tmp_path / "runs" / "first"
    outputs = [Output(tmp_path / name) for name in ("one", "two", "three", "four")]
    with pytest.raises(SystemExit) as caught:
        tasks.run_stage("snapshot", options, str(root), outputs[2], outputs[3])
    assert caught.value.code == 2
    assert f"snapshot.documents is file://{remote}, which" in capfd.readouterr().err
    tasks.inputs(options, str(root), outputs[0], outputs[1])
    [version] = [path.name for path in (tmp_path / "inputs").iterdir() if not path.name.startswith(".")]
    assert (
        f"| snapshot.documents | file://{remote} | {version} | 1 | {remote.stat().st_size:,} |"
        in (tmp_path / "one").read_text()
    )
    assert outputs[1].shown == {"inputs": 1.0, "files": 1.0, "bytes": float(remote.stat().st_size)}
    plain = project / "plain.jsonl"
    shutil.copy(remote, plain)
    remote.write_bytes(b"".join(remote.read_bytes().splitlines(keepends=True)[:-1]))
    tasks.run_stage("snapshot", options, str(root), outputs[2], outputs[3])
    local = tmp_path / "local"
    for _ in run_stages(
        ("snapshot",), options_of(project, str(plain)), project=project, root=local, report=Quiet(), force=False
    ):
        pass
    assert corpus_hash(root) == corpus_hash(local)


def test_a_run_takes_the_version_of_its_key_or_fails(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An object that is changed before it is fetched, and after another run has fetched it."""
    remote = project / "store" / "documents.jsonl"
    params = write_params(project / "params.yaml", options_of(project, f"file://{remote}"))
    values = load_params(params)
    values["inputs"]["store"] = f"file://{tmp_path}/uploaded"
    submission, _ = submit.prepare(values, project, Pipeline.named("train"), ["image=realmops:1"], "e", None)
    send_inputs(submission.inputs, project, Quiet().progress, print)
    options = submission.arguments["options"]
    first, second, fetched, metrics = (tmp_path / name for name in ("runs/first", "runs/second", "fetched", "metrics"))
    before, stat = remote.read_bytes(), remote.stat()
    remote.write_bytes(b"changed")
    with pytest.raises(SystemExit):
        tasks.inputs(options, str(first), Output(fetched), Output(metrics))
    assert f"snapshot.documents: file://{remote} was changed since this run was submitted" in capfd.readouterr().err
    assert not fetched.exists()
    remote.write_bytes(before)
    os.utime(remote, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    tasks.inputs(options, str(first), Output(fetched), Output(metrics))
    remote.write_bytes(b"changed again")
    tasks.inputs(options, str(second), Output(fetched), Output(metrics))
    records = [artifacts.read_json(root / ".realmops/inputs.json")["snapshot.documents"] for root in (first, second)]
    assert records[0] == records[1]
    assert Path(records[1]["path"]).read_bytes() == before


def test_a_run_here_fetches_an_address_into_its_cache_and_equal_content_is_up_to_date(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REALMOPS_CACHE", str(tmp_path / "cache"))
    remote, root, report = project / "store" / "documents.jsonl", tmp_path / "root", Quiet()
    options = options_of(project, f"file://{remote}")
    for _ in run_stages(("snapshot",), options, project=project, root=root, report=report, force=False):
        pass
    record = artifacts.read_json(root / ".realmops/inputs.json")
    assert [*record] == ["snapshot.documents"]
    assert Path(record["snapshot.documents"]["path"]).is_relative_to(tmp_path / "cache")
    shutil.copy(remote, project / "documents.jsonl")
    options = options_of(project, "documents.jsonl")
    for _ in run_stages(("snapshot",), options, project=project, root=root, report=report, force=False):
        pass
    assert any("snapshot: nothing to do" in line for line in report.said)
