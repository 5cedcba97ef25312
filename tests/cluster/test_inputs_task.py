"""Inputs with an address: fetched once by a run's first task, and by a run on this machine."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_project
from cluster_lab import Output
from compiled import init_dvc
from fsspec.implementations.memory import MemoryFileSystem
from small_project import Quiet, toy_values, write_params, write_project

from realmops import artifacts
from realmops.cluster import submit, tasks
from realmops.cluster.input_plan import send_inputs
from realmops.cluster.submit import Pipeline
from realmops.cluster.task_context import load_options
from realmops.commands.run import run_stages
from realmops.config import load_params
from realmops.corpus.snapshot_reader import Snapshot
from realmops.inputs.resolve import address_identity
from realmops.stages import runner


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


def test_all_tasks_of_a_run_read_what_the_first_fetched(
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
    identity = address_identity(f"file://{remote}")
    assert f"| snapshot.documents | file://{remote} | {identity} |" in (tmp_path / "one").read_text()
    assert outputs[1].shown == {"inputs": 1.0}
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


def test_a_run_takes_the_content_of_its_key(
    project: Path, tmp_path: Path, memory: MemoryFileSystem, capfd: pytest.CaptureFixture[str]
) -> None:
    """Documents at an address that changes before they are fetched, and questions that DVC tracks."""
    init_dvc(project)
    documents = (project / "store" / "documents.jsonl").read_bytes()
    memory.pipe_file("/documents.jsonl", documents)
    values = options_of(project, "memory://documents.jsonl")
    values["questions"] |= {split: f"questions.{split}.jsonl" for split in small_project.QUESTIONS}
    params = write_params(project / "params.yaml", values)
    arguments = ["image=realmops:1"]
    submission, _ = submit.prepare(load_params(params), project, Pipeline.named("train"), arguments, "e", None)
    send_inputs(submission.inputs, project, print)
    questions = (project / "questions.test.jsonl").read_bytes()
    (project / "questions.test.jsonl").unlink()
    options = submission.arguments["options"]
    first, second, fetched, metrics = (tmp_path / name for name in ("runs/first", "runs/second", "fetched", "metrics"))
    tasks.inputs(options, str(first), Output(fetched), Output(metrics))
    memory.pipe_file("/documents.jsonl", b"changed")
    tasks.inputs(options, str(second), Output(fetched), Output(metrics))
    records = [artifacts.read_json(root / ".realmops/inputs.json") for root in (first, second)]
    assert records[0] == records[1]
    read = load_options(options, str(second))
    assert Path(read["snapshot"]["documents"]).read_bytes() == documents
    assert Path(read["questions"]["test"]).read_bytes() == questions
    shutil.rmtree(tmp_path / "inputs")
    with pytest.raises(SystemExit):
        tasks.inputs(options, str(first), Output(fetched), Output(metrics))
    assert "snapshot.documents: memory://documents.jsonl was changed since" in capfd.readouterr().err


def test_stages_that_run_alone_share_the_run_of_their_training(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their options name the inputs as the params file does."""
    monkeypatch.setenv("REALMOPS_CACHE", str(tmp_path / "cache"))
    seen = []
    monkeypatch.setattr(runner, "start_tracking", lambda *arguments: seen.append(arguments[3]))
    options = options_of(project, f"file://{project}/store/documents.jsonl")
    options["questions"]["test"] = f"file://{project}/questions.test.jsonl"
    for name in ("snapshot", "tag"):
        for _ in run_stages((name,), options, project=project, root=tmp_path, report=Quiet(), force=False):
            pass
    assert [values["snapshot"] | values["questions"] for values in seen] == [
        options["snapshot"] | options["questions"]
    ] * 2


def test_a_run_here_fetches_an_address_into_its_cache_and_equal_content_is_up_to_date(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REALMOPS_CACHE", str(tmp_path / "cache"))
    remote, root, report = project / "store" / "documents.jsonl", tmp_path / "root", Quiet()
    options = options_of(project, f"file://{remote}")
    for _ in run_stages(("snapshot",), options, project=project, root=root, report=report, force=False):
        pass
    record = artifacts.read_json(root / ".realmops/inputs.json")
    assert {key for key, entry in record.items() if "path" in entry} == {"snapshot.documents"}
    assert Path(record["snapshot.documents"]["path"]).is_relative_to(tmp_path / "cache")
    shutil.copy(remote, project / "documents.jsonl")
    options = options_of(project, "documents.jsonl")
    for _ in run_stages(("snapshot",), options, project=project, root=root, report=report, force=False):
        pass
    assert any("snapshot: nothing to do" in line for line in report.said)
