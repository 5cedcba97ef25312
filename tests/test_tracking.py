"""The way of a journal to MLflow: a real local database, and a stand-in server that goes away."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import Told
from small_project import wait_for

from realmops.journal import Journal
from realmops.tracking.client import default_uri, mlflow_client
from realmops.tracking.mlflow_views import as_table
from realmops.tracking.run import TrackedDataset, TrackedRun, flat_params, git_commit, provenance_tags
from realmops.tracking.sender import SyncReport, sync
from realmops.tracking.spool import unsent
from realmops.tracking.tracker import Tracker, keep_finished

RUN = TrackedRun("5eed", {"seed": 7, "ict": {"batch": 32, "lr": 5e-4}}, {"realmops.corpus_hash": "c0"}, name="first")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")] + ["DVC_EXP_NAME"]:
        monkeypatch.delenv(name, raising=False)


# What a run says about itself


def test_params_are_flat() -> None:
    assert flat_params(RUN.params) == {"seed": "7", "ict.batch": "32", "ict.lr": "0.0005"}


def test_git_commit_says_when_files_were_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REALMOPS_COMMIT", "1" * 40)

    def tagged() -> str:
        return provenance_tags(tmp_path, corpus_hash="", params_hash="f00")["realmops.git_commit"]

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", *identity, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_commit(tmp_path) is None
    assert tagged() == "1" * 40, "in an image, which is no checkout"
    git("init", "--quiet")
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "dvc.lock").write_text("1\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "dvc.lock").write_text("2\n")
    assert git_commit(tmp_path) == commit
    (tmp_path / "code.py").write_text("2\n")
    assert git_commit(tmp_path) == tagged() == f"{commit}-dirty"


def test_a_run_of_no_known_commit_has_no_tag_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REALMOPS_COMMIT", "")  # an image built without --build-arg COMMIT
    assert provenance_tags(tmp_path, corpus_hash="c0", params_hash="f00") == {
        "realmops.params_hash": "f00",
        "realmops.corpus_hash": "c0",
    }


@pytest.fixture
def dead_sender() -> Iterator[pytest.MonkeyPatch]:
    """A child process that ends at once, as one killed for its memory; ``undo`` gives the real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/true")
        yield patch


# A real local MLflow


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


def test_one_run_holds_every_stage(
    tmp_path: Path, folder: Path, dead_sender: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "wild-card")
    for stage, params in (("ict", RUN.params), ("pretrain", {"pretrain": {"k": 8}})):
        path = tmp_path / stage / "metrics.jsonl"
        run = TrackedRun(RUN.key, params, RUN.tags, else_named="realm seed 0")
        with Journal(path, stage) as journal, Tracker(path, stage, run, folder) as tracker:
            journal.log(1, loss=2.0)
            journal.log(2, loss=1.0)
            tracker.finish({"em": 0.25, "note": "not a number"})
        sync(folder)
        dead_sender.undo()

    assert query(folder, "SELECT name, status FROM runs") == [("wild-card", "FINISHED")]
    points = query(folder, "SELECT key, step, value FROM metrics WHERE key LIKE '%/loss' ORDER BY key, step")
    assert points == [
        ("ict/loss", 1, 2.0),
        ("ict/loss", 2, 1.0),
        ("pretrain/loss", 1, 2.0),
        ("pretrain/loss", 2, 1.0),
    ]
    assert query(folder, "SELECT key, value FROM latest_metrics WHERE key NOT LIKE '%/%'") == [("em", 0.25)]
    params_found = query(folder, "SELECT key, value FROM params ORDER BY key")
    assert params_found == [("ict.batch", "32"), ("ict.lr", "0.0005"), ("pretrain.k", "8"), ("seed", "7")]
    tags = dict(query(folder, "SELECT key, value FROM tags"))
    assert tags["realmops.run_key"] == "5eed"
    assert tags["realmops.corpus_hash"] == "c0"
    assert not list((folder / "spool").glob("*.ticket.json"))
    assert not (tmp_path / "mlruns").exists()


def test_a_resumed_stage_sends_each_step_once(tmp_path: Path, folder: Path, dead_sender: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    with Journal(path, "ict") as journal:
        with pytest.raises(KeyboardInterrupt):
            _interrupted_stage(journal, folder)
        sync(folder)
        assert query(folder, "SELECT status FROM runs") == [("FAILED",)]
        dead_sender.undo()
        position = path.read_bytes().index(b"\n") + 1
        with Tracker(path, "ict", RUN, folder, interval=0.1):
            wait_for(lambda: query(folder, "SELECT status FROM runs") == [("RUNNING",)], 60)
            journal.truncate(position)
            journal.log(2, loss=2.0)
            journal.log(3, loss=1.0)
    points = query(folder, "SELECT step, value FROM metrics ORDER BY step")
    assert points == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert query(folder, "SELECT status FROM runs") == [("FINISHED",)]


def _interrupted_stage(journal: Journal, folder: Path) -> None:
    with Tracker(journal.path, "ict", RUN, folder):
        journal.log(1, loss=3.0)
        journal.log(2, loss=2.0)
        raise KeyboardInterrupt


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Datasets, files and views

CORPUS = TrackedDataset("corpus", "c0" * 32, "corpus.jsonl", "corpus")
ROWS = [{"question": "Who?", "em": True}, {"question": "Where?", "em": False}]


def files_of(folder: Path, run_id: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "mlartifacts" / run_id / "artifacts").iterdir()}


def keep_one(tmp_path: Path, folder: Path, **files: bytes) -> None:
    """A run that is over, with two points and one figure, in the spool."""
    path = tmp_path / "whole.jsonl"
    records = [{"stage": "ict", "step": step, "time": time, "loss": 3.0} for step, time in ((1, 7.5), (2, 8))]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    run = TrackedRun("0ver", {"seed": 7}, RUN.tags, name="over", datasets=[CORPUS], began=7.5)
    keep_finished(run, [path], {"em": 0.25}, {f"{name}.md": text for name, text in files.items()}, 8.0, folder)


@pytest.mark.usefixtures("dead_sender")
def test_datasets_and_files_reach_the_run_once(tmp_path: Path, folder: Path) -> None:
    report = tmp_path / "report.html"
    for stage in ("finetune", "evaluate"):
        report.write_text(f"<p>{stage}</p>")
        run = TrackedRun(
            "5eed", RUN.params, RUN.tags, datasets=[CORPUS, TrackedDataset("questions.test", "7e57", "q.jsonl", "test")]
        )
        with (
            Journal(tmp_path / f"{stage}.jsonl", stage) as journal,
            Tracker(journal.path, stage, run, folder) as tracker,
        ):
            journal.log(1, loss=1.0)
            if stage == "evaluate":
                tracker.finish({"em": 0.5}, {"report.html": report, "predictions.table.json": as_table(ROWS)})
    report.unlink()  # the stage's folder was moved away
    assert sync(folder) == SyncReport(5, ()), "two losses, em, two files"
    assert sync(folder) == SyncReport(0, ())
    client = mlflow_client(default_uri(folder))
    [run_found] = client.search_runs(["1"])
    inputs = [(i.dataset.name, i.dataset.digest, i.tags[0].value) for i in run_found.inputs.dataset_inputs]
    assert sorted(inputs) == [("corpus", "c0" * 18, "corpus"), ("questions.test", "7e57", "test")]
    assert json.loads(run_found.inputs.dataset_inputs[0].dataset.source)["uri"] in ("corpus.jsonl", "q.jsonl")
    kept = files_of(folder, run_found.info.run_id)
    assert kept.pop("report.html") == b"<p>evaluate</p>"
    table = {"columns": ["question", "em"], "data": [["Who?", True], ["Where?", False]]}
    assert json.loads(kept.pop("predictions.table.json")) == table
    assert not kept
    tables = json.loads(run_found.data.tags["mlflow.loggedArtifacts"])
    assert tables == [{"path": "predictions.table.json", "type": "table"}]
    assert not list((folder / "spool").glob("*.files"))


def test_a_run_that_is_over_is_sent_with_its_own_times_and_figures_first(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "one name for all variants")
    keep_one(tmp_path, folder, table=b"| em |")
    assert sync(folder) == SyncReport(4, ())
    [(run_id, *found)] = query(folder, "SELECT run_uuid, name, status, start_time, end_time FROM runs")
    assert found == ["over", "FINISHED", 7500, 8000]
    assert query(folder, "SELECT key FROM latest_metrics ORDER BY rowid") == [("em",), ("ict/loss",)]
    assert files_of(folder, run_id) == {"table.md": b"| em |"}


def test_a_run_kept_again_is_sent_again_only_when_it_changed(tmp_path: Path, folder: Path) -> None:
    for text, sent in ((b"| 1 |", 4), (b"| 1 |", 0), (b"| 2 |", 2)):
        keep_one(tmp_path, folder, table=text)
        assert sync(folder) == SyncReport(sent, ())
        [(status, run_id)] = query(folder, "SELECT status, run_uuid FROM runs")
        assert status == "FINISHED"
        assert files_of(folder, run_id) == {"table.md": text}
    assert query(folder, "SELECT count(*) FROM metrics") == [(3,)]
    assert query(folder, "SELECT count(*) FROM inputs") == [(1,)]


def test_an_experiment_that_is_there_gets_our_views_and_keeps_its_own(tmp_path: Path, folder: Path) -> None:
    client = mlflow_client(default_uri(folder))
    client.create_experiment("realmops", tags={"mlflow.sharedViewState.realmops-runs": "mine", "team": "a"})
    keep_one(tmp_path, folder)
    assert sync(folder).problems == ()
    tags = client.get_experiment_by_name("realmops").tags
    assert (tags["team"], tags["mlflow.sharedViewState.realmops-runs"]) == ("a", "mine")
    view = json.loads(tags["mlflow.sharedViewState.realmops-variants"])
    state = json.loads(view["state"])
    assert view["name"] == "Ablation: means over seeds"
    assert {"metrics.`em`", "metrics.`recall_at_5`", "tags.`realmops.variant`"} <= set(state["selectedColumns"])
    assert state["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "realmops.variant"}]


# A server that is away: every request is a real one


class StandIn:
    """As much of MLflow's REST interface as is used; ``fault`` may refuse points or lose the answer.

    ``refused`` is a part of the addresses that it does not serve.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.datasets: list[tuple[str, str]] = []
        self.tags: dict[str, str] = {}
        self.refused = ""
        self.points: set[tuple[str, int, float, int]] = set()
        self.params: dict[str, str] = {}
        self.statuses: list[str] = []
        self.runs = 0
        self.created: list[dict[str, str]] = []  # the tags of each new run
        self.batches = 0
        self.fault: Callable[[int], str] = lambda number: "none"
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stand_in.answer(self)

            do_POST = do_PUT = do_PATCH = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        content = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        if self.refused and self.refused in handler.path:
            return handler.send_error(500)
        if handler.command == "PUT":
            self.files[handler.path.rpartition("/")[2]] = content
            content = b""
        body = json.loads(content or b"{}")
        self.batches += bool(body.get("metrics"))
        fault = self.fault(self.batches) if body.get("metrics") else "none"
        if fault == "refuse":
            return handler.send_error(500)
        reply = json.dumps(self.serve(handler.path, body)).encode()
        if fault == "lose the answer":
            handler.close_connection = True
            return handler.connection.close()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(reply)))
        handler.end_headers()
        handler.wfile.write(reply)
        return None

    def serve(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        run_id = f"r{self.server.server_port}"  # MLflow remembers where a run's files go
        info = {"run_id": run_id, "run_uuid": run_id, "experiment_id": "1", "status": "RUNNING", "start_time": 1}
        info["artifact_uri"] = f"mlflow-artifacts:/1/{run_id}/artifacts"
        data = {
            kind: [{"key": key, "value": value} for key, value in found.items()]
            for kind, found in (("params", self.params), ("tags", self.tags))
        }
        run = {"info": info, "data": data}
        if "experiments/get-by-name" in path:
            return {"experiment": {"experiment_id": "1", "name": "realmops", "lifecycle_stage": "active"}}
        if path.endswith("runs/search"):
            return {"runs": [run] * self.runs}
        if path.endswith("runs/create"):
            self.runs += 1
            self.created.append({tag["key"]: tag["value"] for tag in body["tags"]})
        if path.endswith("runs/log-batch"):
            self.params |= {param["key"]: param["value"] for param in body.get("params", [])}
            points = body.get("metrics", [])
            self.points |= {(p["key"], int(p["step"]), p["value"], int(p["timestamp"])) for p in points}
        if path.endswith("runs/log-inputs"):
            found = [(entry["dataset"]["name"], entry["dataset"]["digest"]) for entry in body["datasets"]]
            self.datasets = sorted({*self.datasets, *found})
        if path.endswith("runs/set-tag"):
            self.tags[body["key"]] = body["value"]
        if path.endswith("runs/update") and "status" in body:
            self.statuses.append(body["status"])
        return {"run": run, "run_info": info}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", stand_in.address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    yield stand_in
    stand_in.server.shutdown()
    stand_in.server.server_close()


@pytest.mark.faults
def test_600_of_600_points_survive_an_outage_and_lost_answers(
    tmp_path: Path, server: StandIn, capfd: pytest.CaptureFixture[str], told: Told
) -> None:
    path = tmp_path / "metrics.jsonl"
    server.fault = lambda number: {1: "lose the answer", 2: "refuse"}.get(number, "none")
    with Journal(path, "pretrain") as journal, Tracker(path, "pretrain", RUN, tmp_path / "t", interval=0.05):
        for step in range(300):
            journal.log(step, loss=1 / (step + 1))
        wait_for(lambda: server.batches >= 3, 60)
        server.fault = lambda number: "refuse"
        for step in range(300, 600):
            journal.log(step, loss=1 / (step + 1))
    assert len(server.points) == 300
    assert capfd.readouterr().err.count("warning: MLflow tracking") == 1

    path.unlink()  # the stage's folder was moved away
    server.fault = lambda number: "none"
    [waiting] = unsent(tmp_path / "t")
    assert waiting.endswith(".jsonl")
    assert sync(tmp_path / "t") == SyncReport(300, ())
    assert unsent(tmp_path / "t") == []
    assert sorted(step for _, step, _, _ in server.points) == list(range(600))
    assert server.runs == 1
    assert server.statuses[-1] == "FINISHED"
    assert sync(tmp_path / "t") == SyncReport(0, ())
    told("MLflow away, or its answers lost: points", 600, "each there once")


@pytest.mark.usefixtures("dead_sender")
@pytest.mark.parametrize("away", ["api", "mlflow-artifacts", "log-inputs"])
def test_datasets_and_files_survive_an_outage(tmp_path: Path, server: StandIn, away: str) -> None:
    server.refused = away
    run = TrackedRun("5eed", RUN.params, datasets=[CORPUS])
    report = tmp_path / "report.html"
    report.write_text("<p>1</p>")
    path = tmp_path / "m.jsonl"
    with Journal(path, "evaluate") as journal, Tracker(path, "evaluate", run, tmp_path / "t") as tracker:
        journal.log(1, loss=1.0)
        tracker.finish({"em": 0.5}, {"report.html": report, "predictions.table.json": as_table(ROWS)})
    report.unlink()
    assert len(sync(tmp_path / "t").problems) == 1
    assert server.files == {}
    assert len(server.points) == (2 if away == "mlflow-artifacts" else 0), "figures do not wait for files"

    server.refused = ""
    assert sync(tmp_path / "t").problems == ()
    assert server.files == {"report.html": b"<p>1</p>", "predictions.table.json": as_table(ROWS)}
    assert server.datasets == [("corpus", "c0" * 18)]
    assert json.loads(server.tags["mlflow.loggedArtifacts"]) == [{"path": "predictions.table.json", "type": "table"}]
    assert len(server.points) == 2
    assert server.statuses[-1] == "FINISHED"
    server.refused = "log-"
    server.files.clear()
    assert sync(tmp_path / "t") == SyncReport(0, ())
    assert server.files == {}


@pytest.mark.usefixtures("dead_sender")
def test_a_given_run_is_used_and_its_parameters_stay(
    tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "r1")
    server.params = {"seed": "of the launcher"}
    with Journal(tmp_path / "m.jsonl", "ict") as journal, Tracker(journal.path, "ict", RUN, tmp_path / "t"):
        journal.log(1, loss=1.0)
    assert sync(tmp_path / "t") == SyncReport(1, ())
    assert [(name, step, value) for name, step, value, _ in server.points] == [("ict/loss", 1, 1.0)]
    assert server.params == {"seed": "of the launcher", "ict.batch": "32", "ict.lr": "0.0005"}
    assert server.runs == 0
    assert server.statuses == []


@pytest.mark.usefixtures("dead_sender")
@pytest.mark.parametrize("run", [RUN, TrackedRun("child", parent=TrackedRun("parent"))], ids=["run", "variant"])
@pytest.mark.parametrize(("tags", "above"), [({}, "task"), ({"mlflow.parentRunId": "pipeline"}, "pipeline")])
def test_a_run_is_shown_under_that_of_the_pipeline_whose_task_it_is(
    tmp_path: Path, server: StandIn, monkeypatch: pytest.MonkeyPatch, tags: dict[str, str], above: str, run: TrackedRun
) -> None:
    """``tags`` are those of the task's run, which the parent of all tasks stands in where there is one."""
    monkeypatch.setenv("REALMOPS_MLFLOW_PARENT_RUN_ID", "task")
    server.tags = dict(tags)
    path = tmp_path / "m.jsonl"
    with Journal(path, "ict") as journal, Tracker(path, "ict", run, tmp_path / "t"):
        journal.log(1, loss=1.0)
    assert sync(tmp_path / "t").problems == ()
    assert server.created[0]["mlflow.parentRunId"] == above


@pytest.mark.usefixtures("dead_sender")
def test_sync_reports_a_server_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with Journal(tmp_path / "m.jsonl", "ict") as journal, Tracker(journal.path, "ict", RUN, tmp_path / "t"):
        journal.log(1, loss=1.0)
    report = sync(tmp_path / "t")
    assert report.sent == 0
    assert len(report.problems) == 1
    assert report.problems[0].startswith("5eed.ict.ticket.json: MlflowException")


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_text("a file where the folder should be")
    with Journal(tmp_path / "m.jsonl", "ict") as journal, Tracker(journal.path, "ict", RUN, tmp_path / "t"):
        journal.log(1, loss=1.0)
    assert capfd.readouterr().err.count("warning: MLflow tracking") == 1
