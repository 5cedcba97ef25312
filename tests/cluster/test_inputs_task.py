"""Inputs with an address: fetched once by a run's first task, and by a run on this machine."""

import shutil
from pathlib import Path

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
from realmops.options import Options
from realmops.stages import runner


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    write_project(project)
    (project / "store").mkdir()
    (project / "documents.jsonl").rename(project / "store" / "documents.jsonl")
    return project


def options_of(project: Path, documents: str) -> Options:
    questions = {split: str(project / f"questions.{split}.jsonl") for split in ("train", "dev", "test")}
    return toy_values(snapshot={"documents": documents}, questions=questions, tag={"method": "dates"})


def corpus_hash(root: Path) -> str:
    return Snapshot.open(root / "data/snapshot/corpus").manifest["corpus_hash"]


def run_here(name: str, options: Options, project: Path, root: Path) -> Quiet:
    report = Quiet()
    for _ in run_stages((name,), options, project=project, root=root, report=report, force=False):
        pass
    return report


def test_all_tasks_of_a_run_read_what_the_first_fetched(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    remote = project / "store" / "documents.jsonl"
    options, root = options_of(project, f"file://{remote}").model_dump_json(), tmp_path / "runs" / "first"
    fetched, metrics, shown = (Output(tmp_path / name) for name in ("fetched", "metrics", "shown"))
    with pytest.raises(SystemExit):
        tasks.run_stage("snapshot", options, str(root), shown, shown)
    assert f"snapshot.documents is file://{remote}, which" in capfd.readouterr().err
    tasks.inputs(options, str(root), fetched, metrics)
    identity = address_identity(f"file://{remote}")
    assert f"| snapshot.documents | file://{remote} | {identity} |" in Path(fetched.path).read_text()
    assert metrics.shown == {"inputs": 1.0}
    plain = shutil.copy(remote, project / "plain.jsonl")
    copy = Path(load_options(options, str(root)).snapshot.documents)
    content = copy.read_bytes()
    for damage in (lambda: copy.write_bytes(content.replace(b"a", b"b")), copy.unlink):
        damage()
        with pytest.raises(ValueError, match=f"snapshot.documents: {copy}, the copy of file:.*, is damaged; run the"):
            load_options(options, str(root))
        tasks.inputs(options, str(root), fetched, metrics)
    remote.write_bytes(b"".join(remote.read_bytes().splitlines(keepends=True)[:-1]))
    tasks.run_stage("snapshot", options, str(root), shown, shown)
    run_here("snapshot", options_of(project, str(plain)), project, tmp_path / "local")
    assert corpus_hash(root) == corpus_hash(tmp_path / "local")


def test_a_run_fetches_the_content_of_its_key(
    project: Path, tmp_path: Path, memory: MemoryFileSystem, capfd: pytest.CaptureFixture[str]
) -> None:
    """Documents at an address that changes before they are fetched, and questions that DVC tracks."""
    init_dvc(project)
    documents = (project / "store" / "documents.jsonl").read_bytes()
    memory.pipe_file("/documents.jsonl", documents)
    values = options_of(project, "memory://documents.jsonl")
    values = values.replace({f"questions.{split}": f"questions.{split}.jsonl" for split in small_project.QUESTIONS})
    params = load_params(write_params(project / "params.yaml", values))
    submission, _ = submit.prepare(params, project, Pipeline.read("train"), ["image=realmops:1"], "e", None)
    send_inputs(submission.inputs, project, print)
    questions = (project / "questions.test.jsonl").read_bytes()
    (project / "questions.test.jsonl").unlink()
    options, shown = submission.arguments["options"], Output(tmp_path / "shown")
    first, second = tmp_path / "runs/first", tmp_path / "runs/second"
    tasks.inputs(options, str(first), shown, shown)
    memory.pipe_file("/documents.jsonl", b"changed")
    tasks.inputs(options, str(second), shown, shown)
    read = load_options(options, str(second))
    assert Path(read.snapshot.documents).read_bytes() == documents
    assert Path(read.questions.test).read_bytes() == questions
    shutil.rmtree(tmp_path / "inputs")
    with pytest.raises(SystemExit):
        tasks.inputs(options, str(first), shown, shown)
    assert "snapshot.documents: memory://documents.jsonl was changed since" in capfd.readouterr().err


def test_a_run_here_caches_an_address_and_is_up_to_date_with_equal_content(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REALMOPS_CACHE", str(tmp_path / "cache"))
    tracked: list[Options] = []
    monkeypatch.setattr(runner, "start_tracking", lambda *arguments: tracked.append(arguments[3]))
    remote, root = project / "store" / "documents.jsonl", tmp_path / "root"
    options = options_of(project, f"file://{remote}")
    run_here("snapshot", options, project, root)
    assert tracked[0].snapshot == options.snapshot, "the training's MLflow run has the values of the params file"
    record = artifacts.read_json(root / ".realmops/inputs.json")
    assert {key for key, entry in record.items() if "path" in entry} == {"snapshot.documents"}
    assert Path(record["snapshot.documents"]["path"]).is_relative_to(tmp_path / "cache")
    shutil.copy(remote, project / "documents.jsonl")
    report = run_here("snapshot", options_of(project, "documents.jsonl"), project, root)
    assert any("snapshot: nothing to do" in line for line in report.said)
