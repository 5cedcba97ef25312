"""The way of a journal to MLflow: a real local database, whose client fails on purpose."""

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
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import forked
import pytest
from small_project import wait_for

from realmops import config
from realmops.artifacts import write_json
from realmops.cluster import tasks
from realmops.journal import Journal
from realmops.tracking import runs, sender
from realmops.tracking.client import local_tracking_uri, mlflow_client
from realmops.tracking.mlflow_views import table_json
from realmops.tracking.runs import (
    TrackedDataset,
    TrackedRun,
    Tracker,
    flatten_params,
    git_commit,
    provenance_tags,
    spool_finished_run,
    tracking_folder,
)
from realmops.tracking.sender import (
    OutboxEntry,
    SyncReport,
    end_killed,
    finite_metrics,
    outbox_entries,
    sync,
    unsent_journals,
)

RUN = TrackedRun("5eed", {"seed": 7, "ict": {"batch": 32, "lr": 5e-4}}, {"realmops.corpus_hash": "c0"}, name="first")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")] + ["DVC_EXP_NAME"]:
        monkeypatch.delenv(name, raising=False)


# What a run says about itself


def test_params_are_flat() -> None:
    assert flatten_params(RUN.params) == {"seed": "7", "ict.batch": "32", "ict.lr": "0.0005"}


def test_only_finite_numbers_are_final_figures() -> None:
    assert finite_metrics({"em": 1, "loss": float("nan"), "most": float("inf"), "note": "1"}) == {"em": 1.0}


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
    assert points == [("ict/loss", 1, 2.0), ("ict/loss", 2, 1.0), ("pretrain/loss", 1, 2.0), ("pretrain/loss", 2, 1.0)]
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


def test_a_stage_that_begins_anew_doubles_no_point(
    tmp_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for steps in (2, 3):
        path = tmp_path / str(steps) / "metrics.jsonl"
        with Journal(path, "ict") as journal, Tracker(path, "ict", RUN, folder) as tracker:
            for step in range(1, steps + 1):
                journal.log(step, loss=4.0 - step)
            tracker.finish({"em": 0.25})
    points = query(folder, "SELECT key, step, value FROM metrics ORDER BY key, step")
    assert points == [("em", 0, 0.25), ("ict/loss", 1, 3.0), ("ict/loss", 2, 2.0), ("ict/loss", 3, 1.0)]
    assert capfd.readouterr().err.count("was restarted; up to step 2 MLflow keeps the earlier points") == 1
    assert outbox_entries(folder) == [], "the sender itself removes what it has sent whole"


KILLED = """
import os, signal, sys, time
from pathlib import Path
from realmops.journal import Journal
from realmops.tracking.runs import TrackedRun, Tracker, tracking_folder
root = Path(sys.argv[1])
with Journal(root / "metrics.jsonl", "ict") as journal:
    with Tracker(root / "metrics.jsonl", "ict", TrackedRun("5eed"), tracking_folder(root), interval=0.1) as tracker:
        journal.log(1, loss=3.0)
        print(tracker._sender.pid, flush=True)
        time.sleep(600)
"""


def test_the_last_task_of_a_terminated_run_ends_its_run_in_mlflow(
    tmp_path: Path, mlflow_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as its killed processes are gone; a resumed stage continues the run."""
    folder = tracking_folder(tmp_path)
    folder.mkdir(parents=True)
    shutil.copy(mlflow_database, folder / "mlflow.db")
    with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True) as pod:
        assert pod.stdout is not None
        child = int(pod.stdout.readline())
        wait_for(lambda: query(folder, "SELECT step FROM metrics") == [(1,)], 60)
        os.kill(pod.pid, signal.SIGKILL)
        os.kill(child, signal.SIGSTOP)
        assert not end_killed(folder), "a process of the pod is not gone yet"
        sync(folder)
        assert query(folder, "SELECT status FROM runs") == [("RUNNING",)]
        threading.Timer(0.5, os.kill, (child, signal.SIGKILL)).start()
        monkeypatch.setattr(tasks, "POLL_SECONDS", 0.1)
        tasks.lower_builders("", str(tmp_path), "owner")
    assert query(folder, "SELECT status FROM runs") == [("KILLED",)]
    assert outbox_entries(folder) == []
    path = tmp_path / "metrics.jsonl"
    with Journal(path, "ict") as journal, Tracker(path, "ict", TrackedRun("5eed"), folder):
        journal.log(2, loss=2.0)
    assert query(folder, "SELECT status FROM runs") == [("FINISHED",)]
    assert query(folder, "SELECT step, value FROM metrics") == [(1, 3.0), (2, 2.0)]


def test_a_late_ticket_leaves_the_run_to_the_stage_that_runs(
    tmp_path: Path, folder: Path, dead_sender: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ict" / "metrics.jsonl"
    with Journal(path, "ict") as journal, Tracker(path, "ict", RUN, folder):
        journal.log(1, loss=3.0)
    dead_sender.undo()
    later = tmp_path / "pretrain" / "metrics.jsonl"
    with Journal(later, "pretrain") as journal, Tracker(later, "pretrain", RUN, folder, interval=0.1):
        journal.log(1, loss=2.0)
        wait_for(lambda: query(folder, "SELECT status FROM runs") == [("RUNNING",)], 60)
        sync(folder)
        assert ("ict/loss",) in query(folder, "SELECT key FROM metrics")
        assert query(folder, "SELECT status FROM runs") == [("RUNNING",)]
    assert query(folder, "SELECT status FROM runs") == [("FINISHED",)]


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_ticket_without_its_journal_is_told_of_once(
    tmp_path: Path, folder: Path, dead_sender: pytest.MonkeyPatch, has_ended: bool
) -> None:
    path = tmp_path / "metrics.jsonl"
    with Journal(path, "ict") as journal, Tracker(path, "ict", RUN, folder) as tracker:
        journal.log(1, loss=3.0)
        tracker.finish({"em": 0.25})
    dead_sender.undo()
    [entry] = outbox_entries(folder)
    content = entry.read()
    Path(content["journal"]).unlink()
    if not has_ended:  # killed
        write_json(entry.path, {key: value for key, value in content.items() if key != "final"})
    [problem] = sync(folder).problems
    assert "is gone" in problem
    assert sync(folder).problems == ()
    assert query(folder, "SELECT key, value FROM metrics") == ([("em", 0.25)] if has_ended else [])


def test_a_ticket_that_a_stage_wrote_meanwhile_is_not_forgotten(tmp_path: Path) -> None:
    """The stage began again between the last look of the one that sends and its removal."""
    entry = OutboxEntry.of(tmp_path, "run", "pretrain")
    entry.path.parent.mkdir(parents=True)
    old, new = {"key": "run", "final": {"status": "FINISHED"}}, {"key": "run"}
    write_json(entry.path, new)
    entry.journal.write_text("of the new one\n")
    entry.discard(old)
    assert entry.read() == new
    assert entry.journal.read_text() == "of the new one\n"
    entry.discard(new)
    assert list(entry.path.parent.iterdir()) == []


def _interrupted_stage(journal: Journal, folder: Path) -> None:
    with Tracker(journal.path, "ict", RUN, folder):
        journal.log(1, loss=3.0)
        journal.log(2, loss=2.0)
        raise KeyboardInterrupt


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
    spool_finished_run(run, [path], {"em": 0.25}, {f"{name}.md": text for name, text in files.items()}, 8.0, folder)


@pytest.mark.usefixtures("dead_sender")
@pytest.mark.parametrize("away", ["log_batch", "log_artifact", "log_inputs"])
def test_datasets_and_files_reach_the_run_once_also_after_an_outage(tmp_path: Path, folder: Path, away: str) -> None:
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
                tracker.finish({"em": 0.5}, {"report.html": report, "predictions.table.json": table_json(ROWS)})
    report.unlink()  # the stage's folder was moved away
    with pytest.MonkeyPatch.context() as patch:
        Away(away).put(patch)
        assert sync(folder).problems
    assert query(folder, "SELECT count(*) FROM metrics") == [(3 if away == "log_artifact" else 0,)], (
        "no file is awaited"
    )
    assert sync(folder).problems == ()
    assert query(folder, "SELECT count(*) FROM metrics") == [(3,)], "two losses and em"
    assert query(folder, "SELECT status FROM runs") == [("FINISHED",)]
    assert sync(folder) == SyncReport(0, ())
    client = mlflow_client(local_tracking_uri(folder))
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
    for text, sent in ((b"| 1 |", 4), (b"| 1 |", 0), (b"| 2 |", 1)):
        keep_one(tmp_path, folder, table=text)
        assert sync(folder) == SyncReport(sent, ())
        [(status, run_id)] = query(folder, "SELECT status, run_uuid FROM runs")
        assert status == "FINISHED"
        assert files_of(folder, run_id) == {"table.md": text}
    assert query(folder, "SELECT count(*) FROM metrics") == [(3,)]
    assert query(folder, "SELECT count(*) FROM inputs") == [(1,)]


def test_a_deleted_experiment_is_named_with_its_remedy(tmp_path: Path, folder: Path) -> None:
    client = mlflow_client(local_tracking_uri(folder))
    number = client.create_experiment("realmops")
    client.delete_experiment(number)
    keep_one(tmp_path, folder)
    [problem] = sync(folder).problems
    assert "the experiment 'realmops' was deleted in MLflow; restore it: MLFLOW_TRACKING_URI=sqlite:///" in problem
    assert problem.endswith(f"mlflow experiments restore --experiment-id {number}")
    client.restore_experiment(number)
    assert sync(folder).problems == ()


def test_an_experiment_that_is_there_gets_our_views_and_keeps_its_own(tmp_path: Path, folder: Path) -> None:
    client = mlflow_client(local_tracking_uri(folder))
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


# What is there already


@pytest.mark.usefixtures("dead_sender")
def test_a_given_run_is_used_and_its_parameters_stay(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = mlflow_client(local_tracking_uri(folder))
    given = client.create_run("0").info.run_id
    client.log_param(given, "seed", "of the launcher")
    monkeypatch.setenv("MLFLOW_RUN_ID", given)
    with Journal(tmp_path / "m.jsonl", "ict") as journal, Tracker(journal.path, "ict", RUN, folder):
        journal.log(1, loss=1.0)
    assert sync(folder) == SyncReport(1, ())
    [found] = client.search_runs(["0"])
    assert (found.info.run_id, found.info.status, found.data.metrics) == (given, "RUNNING", {"ict/loss": 1.0})
    assert found.data.params == {"seed": "of the launcher", "ict.batch": "32", "ict.lr": "0.0005"}


@pytest.mark.usefixtures("dead_sender")
@pytest.mark.parametrize("run", [RUN, TrackedRun("child", parent=TrackedRun("parent"))], ids=["run", "variant"])
@pytest.mark.parametrize("tags", [{}, {"mlflow.parentRunId": "pipeline"}])
def test_a_run_is_shown_under_that_of_the_pipeline_whose_task_it_is(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, tags: dict[str, str], run: TrackedRun
) -> None:
    """``tags`` are those of the task's run, which the parent of all tasks stands in where there is one."""
    client = mlflow_client(local_tracking_uri(folder))
    task = client.create_run("0", tags=tags).info.run_id
    monkeypatch.setenv("REALMOPS_MLFLOW_PARENT_RUN_ID", task)
    with Journal(tmp_path / "m.jsonl", "ict") as journal, Tracker(journal.path, "ict", run, folder):
        journal.log(1, loss=1.0)
    assert sync(folder).problems == ()
    [found] = client.search_runs(["0"], f"tags.`realmops.run_key` = '{(run.parent or run).key}'")
    assert found.data.tags["mlflow.parentRunId"] == tags.get("mlflow.parentRunId", task)


# A server that is away


class Away:
    """Lets one function of MLflow's client fail: at each call, or as ``faults`` says of its calls that send points."""

    def __init__(self, function: str, faults: dict[int, str] | None = None) -> None:
        self.function, self.faults, self.calls = function, faults, 0

    def put(self, patch: pytest.MonkeyPatch) -> None:
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
def test_600_of_600_points_survive_an_outage_and_lost_answers(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    with Journal(path, "pretrain") as journal, Tracker(path, "pretrain", RUN, folder):
        for step in range(600):
            journal.log(step, loss=1 / (step + 1))
    path.unlink()  # the stage's folder was moved away
    monkeypatch.setattr(sender, "_LINES_AT_ONCE", 100)
    Away("log_batch", {1: "lose the answer", 2: "refuse", 5: "lose the answer", 6: "refuse"}).put(monkeypatch)
    for _ in range(4):
        [waiting] = unsent_journals(folder)
        assert waiting.endswith(".jsonl")
        [problem] = sync(folder).problems
        assert "ConnectionError: the server is away" in problem
    assert sync(folder).problems == ()
    assert unsent_journals(folder) == []
    assert query(folder, "SELECT step FROM metrics ORDER BY step") == [(step,) for step in range(600)]
    assert query(folder, "SELECT status FROM runs") == [("FINISHED",)]
    assert sync(folder) == SyncReport(0, ())


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_text("a file where the folder should be")
    with Journal(tmp_path / "m.jsonl", "ict") as journal, Tracker(journal.path, "ict", RUN, tmp_path / "t"):
        journal.log(1, loss=1.0)
    assert capfd.readouterr().err.count("warning: MLflow tracking") == 1


# Addresses hold passwords


SECRETS = ("ann", "pa55", "s3cret")


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine at which nobody listens, and nobody can meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.usefixtures("dead_sender")
@pytest.mark.parametrize("where", ["http://ann:pa55@127.0.0.1:{port}/x?token=s3cret", "ann:pa55@127.0.0.1:{port}"])
@pytest.mark.parametrize(
    "command", [["sync", "--root"], ["serve", "--model", "models:/m@champion", "--root"]], ids=["sync", "serve"]
)
def test_a_password_in_an_address_is_never_printed(
    tmp_path: Path, closed_port: int, where: str, command: list[str], dead_sender: pytest.MonkeyPatch
) -> None:
    spool = tmp_path / ".realmops" / "mlflow"
    with Journal(tmp_path / "m.jsonl", "ict") as journal, Tracker(journal.path, "ict", RUN, spool):
        journal.log(1, loss=1.0)
    dead_sender.undo()
    settings = {"MLFLOW_TRACKING_URI": where.format(port=closed_port), "MLFLOW_LOGGING_LEVEL": "DEBUG"}
    environment = {**os.environ, **settings, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    process = forked.realmops(*command, tmp_path, env=environment)
    _, told = process.communicate()
    assert process.returncode != 0
    assert str(closed_port) in told, "the trouble is told"
    assert not [secret for secret in SECRETS if secret in told.replace("channel", "")], told


def test_what_mlflow_logs_by_itself_names_no_password(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mlflow_client(local_tracking_uri(folder))
    log = logging.getLogger("mlflow.store")
    try:
        raise OSError("no http://ann:pa55@host/x?token=s3cret")
    except OSError:
        log.error("sent nothing to %s", "http://ann:pa55@host/x?token=s3cret", exc_info=True)
    told = capfd.readouterr().err
    assert "sent nothing to http://host/x" in told
    assert not [secret for secret in SECRETS if secret in told], told


def test_pre_training_on_a_cluster_is_in_the_run_of_the_other_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it is told to leave the indexes to builders elsewhere, and no other stage is."""
    seen: list[tuple[str, TrackedRun]] = []

    def tracker(journal: Path, name: str, run: TrackedRun, folder: Path) -> nullcontext[None]:
        seen.append((name, run))
        return nullcontext()

    monkeypatch.setattr(runs, "Tracker", tracker)
    values = config.merge_options({"tracking": {"enabled": True}}, "test")
    external = config.merge_options({"pretrain": {"builder": "external", "exchange": "/elsewhere"}}, "test", values)
    for name, own in (("pretrain", external), ("evaluate", values)):
        with ExitStack() as stack, Journal(tmp_path / name / "log.jsonl", name) as journal:
            runs.start_tracking(stack, journal, name, own, [], {}, tmp_path, tmp_path)
    (_, pretrain), (_, evaluate) = seen
    assert pretrain.key == evaluate.key
    assert pretrain.params == evaluate.params, "MLflow takes no other value of a parameter later on"
