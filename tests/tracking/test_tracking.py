"""A journal is sent to MLflow: a real local database, whose client fails on purpose."""

import json
import logging
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import forked
import pytest
import small_project
from fsspec.implementations.memory import MemoryFileSystem
from small_project import wait_for

from realmops import config
from realmops.artifacts import MANIFEST, read_json, write_json
from realmops.cluster import tasks
from realmops.commands.run import run_stages
from realmops.journal import Journal
from realmops.stages import Job, Stage, runner, stages_to_run
from realmops.stages.run_inputs import recorded_inputs
from realmops.tracking import runs, sender
from realmops.tracking.client import local_tracking_uri, mlflow_client
from realmops.tracking.runs import (
    TrackedDataset,
    TrackedRun,
    Tracker,
    flatten_params,
    provenance_tags,
    tracking_folder,
)
from realmops.tracking.sender import SpoolEntry, finite_metrics, has_running_stage, spool_entries, sync

RUN = TrackedRun("5eed", {"seed": 7, "ict": {"batch": 32, "lr": 5e-4}}, {"realmops.corpus_hash": "c0"}, name="first")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")] + ["DVC_EXP_NAME"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def dead_sender() -> Iterator[pytest.MonkeyPatch]:
    """A child process that ends at once, as one killed for its memory; ``undo`` restores the real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/true")
        yield patch


@pytest.fixture
def folder(mlflow_database: Path, tmp_path: Path) -> Path:
    (tmp_path / "tracking").mkdir()
    shutil.copy(mlflow_database, tmp_path / "tracking" / "mlflow.db")
    return tmp_path / "tracking"


def query(folder: Path, statement: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(folder / "mlflow.db")
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def status(folder: Path) -> str:
    [(found,)] = query(folder, "SELECT status FROM runs")
    return str(found)


def losses(folder: Path) -> list[tuple[Any, ...]]:
    return query(folder, "SELECT step, value FROM metrics WHERE key LIKE '%/loss' ORDER BY step")


def run_stage(
    path: Path, stage: str, folder: Path, run: TrackedRun = RUN, steps: int = 1, **finished: Mapping[str, Any]
) -> None:
    """Run a stage that logs a loss at each step, and has the ``metrics`` and ``files`` of ``finished`` at its end."""
    with Journal(path / f"{stage}.jsonl", stage) as journal, Tracker(journal, run, folder) as tracker:
        for step in range(1, steps + 1):
            journal.log(step, loss=4.0 - step)
        tracker.finish(finished.get("metrics", {}), finished.get("files", {}))


# The description of a run


def test_params_are_flat_and_final_metrics_finite() -> None:
    assert flatten_params(RUN.params) == {"seed": "7", "ict.batch": "32", "ict.lr": "0.0005"}
    assert finite_metrics({"em": 1, "loss": float("nan"), "most": float("inf"), "note": "1"}) == {"em": 1.0}


def test_the_commit_tag_names_changed_files_or_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit() -> str | None:
        return provenance_tags(tmp_path, corpus_hash="", params_hash="f00").get("realmops.git_commit")

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", *identity, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setenv("REALMOPS_COMMIT", "")  # an image built without --build-arg COMMIT
    assert commit() is None
    monkeypatch.setenv("REALMOPS_COMMIT", "1" * 40)
    assert commit() == "1" * 40
    git("init", "--quiet")
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "dvc.lock").write_text("1\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    (tmp_path / "dvc.lock").write_text("2\n")
    assert commit() == git("rev-parse", "HEAD")
    (tmp_path / "code.py").write_text("2\n")
    assert commit() == f"{git('rev-parse', 'HEAD')}-dirty"


def write_corpus(stage: Stage, job: Job) -> dict[str, Any]:
    """Stand for a stage: write what the others need to begin."""
    if stage.name == "snapshot":
        (job.out / "corpus").mkdir()
        write_json(job.out / "corpus" / MANIFEST, {"corpus_hash": "c0"})
    return {}


def test_a_training_has_one_run_whatever_runs_its_stages(
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, one at a time as by DVC with the root spelled otherwise, or in pods with an external builder."""
    tracked: list[TrackedRun] = []

    def tracker(journal: Journal, run: TrackedRun, folder: Path) -> nullcontext[MagicMock]:
        tracked.append(run)
        return nullcontext(MagicMock())

    monkeypatch.setattr(runs, "Tracker", tracker)
    monkeypatch.setattr(Stage, "run", write_corpus)
    monkeypatch.setenv("REALMOPS_CACHE", str(tmp_path / "cache"))
    params = small_project.write_project(tmp_path, tracking={"enabled": True})
    values, root = config.load_params(params, presets=[], settings=[]), tmp_path / "root"
    for key in ("snapshot.documents", *(f"questions.{split}" for split in small_project.QUESTIONS)):
        memory.pipe_file(f"/{values.get(key)}", (tmp_path / values.get(key)).read_bytes())
        values = values.replace({key: f"memory://{values.get(key)}"})
    names = stages_to_run(values)
    places: dict[str, Any] = {"project": tmp_path, "report": small_project.Quiet(), "force": True}

    list(run_stages(names, values, root=root, **places))
    for name in names:
        list(run_stages((name,), values, root=root / ".." / "root", **places))
    for name in names:
        external = {"pretrain.builder": "external", "pretrain.exchange": "/elsewhere"} if name == "pretrain" else {}
        runner.run_stage(name, recorded_inputs(values, root).replace(external), root=root, **places)
    assert len(tracked) == 3 * len({*names} - {*runs.UNTRACKED}) == 12
    assert len({run.key for run in tracked}) == 1
    assert all(run.params == tracked[0].params for run in tracked), "MLflow rejects a changed parameter"
    assert tracked[0].params["questions"] == {
        split: f"memory://questions.{split}.jsonl" for split in small_project.QUESTIONS
    }
    sources = {data.name: data.source for run in tracked for data in run.datasets}
    assert sources["corpus"] == "memory://documents.jsonl"


# Points and the status of a run


def test_one_run_has_all_stages(tmp_path: Path, folder: Path, dead_sender: pytest.MonkeyPatch) -> None:
    for stage, params in (("ict", RUN.params), ("pretrain", {"pretrain": {"k": 8}})):
        run = TrackedRun(RUN.key, params, RUN.tags, name="realm seed 0")
        run_stage(tmp_path, stage, folder, run, 2, metrics={"em": 0.25, "note": "not a number"})
        sync(folder)
        dead_sender.undo()
    assert query(folder, "SELECT name, status FROM runs") == [("realm seed 0", "FINISHED")]
    points = query(folder, "SELECT key, step, value FROM metrics WHERE key LIKE '%/loss' ORDER BY key, step")
    assert points == [("ict/loss", 1, 3.0), ("ict/loss", 2, 2.0), ("pretrain/loss", 1, 3.0), ("pretrain/loss", 2, 2.0)]
    assert query(folder, "SELECT key, value FROM latest_metrics WHERE key NOT LIKE '%/%'") == [("em", 0.25)]
    params_found = query(folder, "SELECT key, value FROM params ORDER BY key")
    assert params_found == [("ict.batch", "32"), ("ict.lr", "0.0005"), ("pretrain.k", "8"), ("seed", "7")]
    tags = dict(query(folder, "SELECT key, value FROM tags"))
    assert (tags["realmops.run_key"], tags["realmops.corpus_hash"]) == ("5eed", "c0")
    assert spool_entries(folder) == [], "the sender itself removes what it has sent whole"


def interrupted_stage(journal: Journal, folder: Path) -> int:
    """Log a step before the checkpoint, whose position is returned, and one after it."""
    with suppress(KeyboardInterrupt), Tracker(journal, RUN, folder):
        journal.log(1, loss=3.0)
        checkpoint = journal.position()
        wait_for(lambda: losses(folder) == [(1, 3.0)], 60)
        assert status(folder) == "RUNNING"
        journal.log(2, loss=2.0)
        raise KeyboardInterrupt
    return checkpoint


def test_a_resumed_stage_sends_each_step_once_from_checkpoint_to_checkpoint(tmp_path: Path, folder: Path) -> None:
    with Journal(tmp_path / "metrics.jsonl", "ict") as journal:
        checkpoint = interrupted_stage(journal, folder)
        assert status(folder) == "FAILED"
        with Tracker(journal, RUN, folder):
            journal.truncate(checkpoint)
            journal.log(2, loss=2.0)
            journal.log(3, loss=1.0)
            wait_for(lambda: status(folder) == "RUNNING", 60)
    assert losses(folder) == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert status(folder) == "FINISHED"


KILLED = """
import sys, time
from pathlib import Path
from realmops.journal import Journal
from realmops.tracking.runs import TrackedRun, Tracker, tracking_folder
root = Path(sys.argv[1])
with Journal(root / "metrics.jsonl", "ict") as journal, Tracker(journal, TrackedRun("5eed"), tracking_folder(root)):
    journal.log(1, loss=3.0)
    print(flush=True)
    time.sleep(600)
"""


def test_the_run_of_a_killed_stage_ends_with_the_last_task_and_continues_when_it_resumes(
    tmp_path: Path, mlflow_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tracking_folder(tmp_path)
    folder.mkdir(parents=True)
    shutil.copy(mlflow_database, folder / "mlflow.db")
    monkeypatch.setattr(tasks, "POLL_SECONDS", 0.1)
    with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True) as pod:
        assert pod.stdout is not None
        pod.stdout.readline()
        assert has_running_stage(folder)
        sync(folder)
        assert status(folder) == "RUNNING", "its process still runs"
        threading.Timer(0.5, os.kill, (pod.pid, signal.SIGKILL)).start()
        tasks.lower_builders("", str(tmp_path), "owner")
    assert (status(folder), spool_entries(folder)) == ("KILLED", [])
    with Journal(tmp_path / "metrics.jsonl", "ict") as journal, Tracker(journal, TrackedRun("5eed"), folder):
        journal.log(2, loss=2.0)
    assert (status(folder), losses(folder)) == ("FINISHED", [(1, 3.0), (2, 2.0)])


def test_an_old_entry_leaves_the_status_to_the_running_stage(
    tmp_path: Path, folder: Path, dead_sender: pytest.MonkeyPatch
) -> None:
    run_stage(tmp_path, "ict", folder)
    dead_sender.undo()
    with Journal(tmp_path / "pretrain.jsonl", "pretrain") as journal, Tracker(journal, RUN, folder):
        wait_for(lambda: query(folder, "SELECT status FROM runs") == [("RUNNING",)], 60)
        sync(folder)
        assert query(folder, "SELECT key FROM metrics") == [("ict/loss",)]
        assert status(folder) == "RUNNING"
    assert status(folder) == "FINISHED"


def test_a_stage_on_a_volume_without_locks_is_not_taken_for_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = SpoolEntry.of(tmp_path, "run", "pretrain")
    (tmp_path / "journal").touch()
    entry.begin({"key": "run"}, tmp_path / "journal")
    monkeypatch.setattr(sender, "try_lock", lambda file: None)
    monkeypatch.setattr(sender, "send", lambda entry: 0)
    assert sync(tmp_path) == (0, [])
    assert read_json(entry.run) == {"key": "run"}


def test_an_entry_that_a_restarted_stage_has_written_is_not_discarded(tmp_path: Path) -> None:
    entry = SpoolEntry.of(tmp_path, "run", "pretrain")
    entry.folder.mkdir(parents=True)
    old, new = {"key": "run", "final": {"status": "FINISHED"}}, {"key": "run"}
    write_json(entry.run, new)
    entry.discard(old)
    assert read_json(entry.run) == new
    entry.discard(new)
    assert not entry.folder.exists()


# Datasets, files and views

CORPUS = TrackedDataset("corpus", "c0" * 32, "corpus.jsonl", "corpus")


def files_of(folder: Path, run_id: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "mlartifacts" / run_id / "artifacts").iterdir()}


def spool_one(tmp_path: Path, folder: Path, text: bytes = b"") -> None:
    """Spool a finished run with two points, one metric and one file."""
    (tmp_path / "table.md").write_bytes(text)
    path = tmp_path / "whole.jsonl"
    records = [{"stage": "ict", "step": step, "time": time, "loss": 3.0} for step, time in ((1, 7.5), (2, 8))]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    run = TrackedRun("0ver", {"seed": 7}, RUN.tags, name="over", datasets=[CORPUS], began=7.5)
    files = {"table.md": tmp_path / "table.md"}
    SpoolEntry.of(folder, run.key, "whole").end(run.description(), "FINISHED", 8.0, [path], {"em": 0.25}, files)


@pytest.mark.usefixtures("dead_sender")
@pytest.mark.parametrize("function", ["log_batch", "log_artifact"])
def test_datasets_and_files_reach_the_run_once_also_after_an_outage(
    tmp_path: Path, folder: Path, function: str
) -> None:
    report = tmp_path / "report.html"
    report.write_text("<p>evaluate</p>")
    run = TrackedRun("5eed", datasets=[CORPUS, TrackedDataset("questions.test", "7e57", "q.jsonl", "test")])
    run_stage(tmp_path, "finetune", folder, run)
    run_stage(tmp_path, "evaluate", folder, run, metrics={"em": 0.5}, files={"report.html": report})
    report.unlink()  # the stage's folder was moved away
    with pytest.MonkeyPatch.context() as patch:
        Outage(function).start(patch)
        assert sync(folder)[1]
    points = query(folder, "SELECT count(*) FROM metrics")
    assert points == [(3 if function == "log_artifact" else 0,)], "points do not wait for a file"
    assert sync(folder)[1] == []
    assert query(folder, "SELECT count(*) FROM metrics") == [(3,)], "two losses and em"
    assert status(folder) == "FINISHED"
    assert sync(folder) == (0, [])
    [found] = mlflow_client(local_tracking_uri(folder)).search_runs(["1"])
    inputs = [(i.dataset.name, i.dataset.digest, i.tags[0].value) for i in found.inputs.dataset_inputs]
    assert sorted(inputs) == [("corpus", "c0" * 18, "corpus"), ("questions.test", "7e57", "test")]
    assert json.loads(found.inputs.dataset_inputs[0].dataset.source)["uri"] in ("corpus.jsonl", "q.jsonl")
    assert files_of(folder, found.info.run_id) == {"report.html": b"<p>evaluate</p>"}


def test_a_finished_run_is_sent_with_its_times_and_again_where_it_changed(tmp_path: Path, folder: Path) -> None:
    for text, sent in ((b"| 1 |", 4), (b"| 1 |", 0), (b"| 2 |", 1)):
        spool_one(tmp_path, folder, text)
        assert sync(folder) == (sent, [])
        [(run_id, *found)] = query(folder, "SELECT run_uuid, name, status, start_time, end_time FROM runs")
        assert found == ["over", "FINISHED", 7500, 8000]
        assert files_of(folder, run_id) == {"table.md": text}
    assert query(folder, "SELECT key FROM latest_metrics ORDER BY rowid") == [("em",), ("ict/loss",)], "em first"
    assert query(folder, "SELECT (SELECT count(*) FROM metrics), (SELECT count(*) FROM inputs)") == [(3, 1)]


def test_a_deleted_experiment_is_named_with_its_remedy(tmp_path: Path, folder: Path) -> None:
    client = mlflow_client(local_tracking_uri(folder))
    number = client.create_experiment("realmops")
    client.delete_experiment(number)
    spool_one(tmp_path, folder)
    _, [problem] = sync(folder)
    assert "the experiment 'realmops' was deleted in MLflow; restore it: MLFLOW_TRACKING_URI=sqlite:///" in problem
    assert problem.endswith(f"mlflow experiments restore --experiment-id {number}")
    client.restore_experiment(number)
    assert sync(folder)[1] == []


def test_an_existing_experiment_gets_the_saved_views_and_keeps_its_own(tmp_path: Path, folder: Path) -> None:
    client = mlflow_client(local_tracking_uri(folder))
    client.create_experiment("realmops", tags={"mlflow.sharedViewState.realmops-runs": "mine", "team": "a"})
    spool_one(tmp_path, folder)
    assert sync(folder)[1] == []
    tags = client.get_experiment_by_name("realmops").tags
    assert (tags["team"], tags["mlflow.sharedViewState.realmops-runs"]) == ("a", "mine")
    state = json.loads(json.loads(tags["mlflow.sharedViewState.realmops-variants"])["state"])
    assert {"metrics.`em`", "metrics.`recall_at_5`", "tags.`realmops.variant`"} <= set(state["selectedColumns"])


# Existing runs


@pytest.mark.usefixtures("dead_sender")
def test_an_existing_run_is_used_and_its_parameters_stay(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = mlflow_client(local_tracking_uri(folder))
    existing = client.create_run("0").info.run_id
    client.log_param(existing, "seed", "of the launcher")
    monkeypatch.setenv("MLFLOW_RUN_ID", existing)
    run_stage(tmp_path, "ict", folder)
    assert sync(folder) == (1, [])
    [found] = client.search_runs(["0"])
    assert (found.info.run_id, found.info.status, found.data.metrics) == (existing, "RUNNING", {"ict/loss": 3.0})
    assert found.data.params == {"seed": "of the launcher", "ict.batch": "32", "ict.lr": "0.0005"}


@pytest.mark.usefixtures("dead_sender")
@pytest.mark.parametrize(
    ("run", "tags"),
    [(RUN, {}), (TrackedRun("child", parent=TrackedRun("parent")), {"mlflow.parentRunId": "pipeline"})],
    ids=["run", "variant"],
)
def test_a_run_is_nested_under_the_run_of_its_pipeline(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, run: TrackedRun, tags: dict[str, str]
) -> None:
    """``tags`` are those of the run of the task, whose parent is the run of all tasks if there is one."""
    client = mlflow_client(local_tracking_uri(folder))
    task = client.create_run("0", tags=tags).info.run_id
    monkeypatch.setenv("REALMOPS_MLFLOW_PARENT_RUN_ID", task)
    run_stage(tmp_path, "ict", folder, run)
    assert sync(folder)[1] == []
    [found] = client.search_runs(["0"], f"tags.`realmops.run_key` = '{(run.parent or run).key}'")
    assert found.data.tags["mlflow.parentRunId"] == tags.get("mlflow.parentRunId", task)


# An unreachable server


class Outage:
    """Failures of one function of MLflow's client: of each call, or of some calls with points by their number."""

    def __init__(self, function: str, faults: dict[int, str] | None = None) -> None:
        self.function, self.faults, self.calls = function, faults, 0

    def start(self, patch: pytest.MonkeyPatch) -> None:
        from mlflow import MlflowClient

        real = getattr(MlflowClient, self.function)

        def failing(client: Any, *words: Any, **named: Any) -> Any:
            self.calls += bool(named.get("metrics"))
            fault = self.faults.get(self.calls if named.get("metrics") else 0, "") if self.faults else "refuse"
            answer = None if fault == "refuse" else real(client, *words, **named)
            if fault:
                raise ConnectionError("the server is away")
            return answer

        patch.setattr(MlflowClient, self.function, failing)


@pytest.mark.faults
@pytest.mark.usefixtures("dead_sender")
def test_600_of_600_points_survive_an_outage_and_lost_replies(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_stage(tmp_path, "pretrain", folder, steps=600)
    (tmp_path / "pretrain.jsonl").unlink()  # the stage's folder was moved away
    monkeypatch.setattr(sender, "POINTS_AT_ONCE", 100)
    Outage("log_batch", {1: "lose the reply", 2: "refuse", 5: "lose the reply", 6: "refuse"}).start(monkeypatch)
    for _ in range(4):
        [unsent] = sender.unsent_journals(folder)
        assert Path(unsent).is_file()
        _, [problem] = sync(folder)
        assert "ConnectionError: the server is away" in problem
    assert sync(folder)[1] == []
    assert sender.unsent_journals(folder) == []
    assert [step for step, _ in losses(folder)] == list(range(1, 601))
    assert status(folder) == "FINISHED"
    assert sync(folder) == (0, [])


@contextmanager
def failing_server(reply: bytes) -> Iterator[tuple[str, list[Any]]]:
    """A server that accepts connections and then sends this; its address, and the connections."""
    connections: list[Any] = []

    def accept() -> None:
        with suppress(OSError):  # closed
            while True:
                connections.append(server.accept()[0])
                connections[-1].sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", connections
        server.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.close()


BUSY = b"HTTP/1.1 503 Busy\r\nRetry-After: 120\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("reply", [b"", BUSY], ids=["silent", "busy"])
def test_a_server_that_does_not_answer_is_tried_once_and_training_never_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], reply: bytes
) -> None:
    with failing_server(reply) as (address, connections):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        with Journal(tmp_path / "m.jsonl", "ict") as journal, Tracker(journal, RUN, tmp_path / "tracking") as tracker:
            for step in range(100):
                journal.log(step, loss=1.0)
                journal.position()
            assert tracker._sender is not None
            assert tracker._sender.poll() is None, "training did not wait"
            assert tracker._sender.wait(100) == 1
            journal.position()
        assert len(connections) == 1
        assert capfd.readouterr().err.count("warning: MLflow tracking") == 1
        SpoolEntry.of(tmp_path / "tracking", RUN.key, "whole").end(RUN.description(), "FINISHED", 8.0)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        assert len(sync(tmp_path / "tracking")[1]) == len(connections) - 1 == (2 if reply else 1)
    assert len(sender.unsent_journals(tmp_path / "tracking")) == 2


@pytest.mark.parametrize(("uri", "seconds"), [("http://127.0.0.1:9", 15), (None, 60)])
def test_a_stage_waits_for_its_sender_at_its_end_only_and_not_for_long(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    uri: str | None,
    seconds: float,
) -> None:
    """A server may accept requests and answer some byte by byte; a local database is created in up to 20 s."""

    ended: list[Any] = []

    class Stuck:
        stdin = None

        def communicate(self, timeout: float) -> None:
            ended.append(timeout)
            raise subprocess.TimeoutExpired("sender", timeout)

        def kill(self) -> None:
            ended.append("killed")

        def wait(self) -> None:
            ended.append("reaped")

    if uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(runs.subprocess, "Popen", lambda *arguments, **options: Stuck())
    run_stage(tmp_path, "ict", tmp_path / "tracking")
    assert ended == [seconds, "killed", "reaped"]
    assert f"no answer within {seconds} s. No data is lost" in capfd.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_text("a file instead of the folder")
    run_stage(tmp_path, "ict", tmp_path / "t")
    assert capfd.readouterr().err.count("warning: MLflow tracking") == 1


# Passwords in addresses

SECRETS = ("ann", "pa55", "s3cret")


def test_a_tracking_server_with_a_password_is_refused_without_printing_or_storing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ann:pa55@127.0.0.1:9/x?token=s3cret")
    monkeypatch.setenv("MLFLOW_LOGGING_LEVEL", "DEBUG")
    run_stage(tmp_path, "ict", tracking_folder(tmp_path))
    printed = capfd.readouterr().err
    for command in (["sync", "--root"], ["serve", "--model", "models:/m@champion", "--root"]):
        process = forked.realmops(*command, tmp_path, env={**os.environ, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"})
        _, error = process.communicate()
        assert process.returncode != 0
        assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in error
        printed += error
    printed += "".join(path.read_text() for path in tracking_folder(tmp_path).rglob("*") if path.is_file())
    assert not [secret for secret in SECRETS if secret in printed.replace("channel", "")], printed


def test_a_log_line_of_mlflow_has_no_password(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mlflow_client(local_tracking_uri(folder))
    log = logging.getLogger("mlflow.store")
    try:
        raise OSError("no http://ann:pa55@host/x?token=s3cret")
    except OSError:
        log.error("sent nothing to %s", "http://ann:pa55@host/x?token=s3cret", exc_info=True)
    printed = capfd.readouterr().err
    assert "sent nothing to http://host/x" in printed
    assert not [secret for secret in SECRETS if secret in printed], printed
