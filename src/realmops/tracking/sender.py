"""The outbox: follow the journal of a stage and send each of its points to MLflow exactly once.

While a stage runs, a child process sends, and training never waits for it; ``sync`` sends the rest. The state of an
outbox entry is stored next to it, so that sending again continues where it stopped.
"""

import fcntl
import json
import math
import os
import re
import select
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

from realmops.artifacts import link_or_copy, make_folder, read_json, sha256_file, try_lock, write_bytes, write_json
from realmops.journal import RESERVED
from realmops.tracking.client import error_summary, experiment_id, mlflow_client, resolve_tracking_uri, uri_digest
from realmops.tracking.mlflow_views import TABLE_ENDING

RUN_KEY_TAG = "realmops.run_key"
PARENT_RUN_VARIABLE = "REALMOPS_MLFLOW_PARENT_RUN_ID"  # an existing run to nest ours under
LONGEST_BACK_OFF_SECONDS = 60.0
_ENDING = ".ticket.json"
_LINES_AT_ONCE = 1000
_DIGEST_LIMIT = 36  # characters of a dataset's digest, MLflow's own limit
_TABLES_TAG = "mlflow.loggedArtifacts"
_PARENT_TAG = "mlflow.parentRunId"
_Point = tuple[str, float, int, int]  # name, value, milliseconds, step


class OutboxEntry:
    """The metrics of one stage that wait to be sent to MLflow, as files of the spool.

    ``path`` describes the run and, under the key ``final``, how the stage ended. Next to it are ``shipped``, the
    destination and what was sent there; ``journal`` and ``files``, copies of files that the stage may move; and
    ``lock``, which the sending process holds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shipped, self.journal, self.files, self.lock = (
            path.with_name(path.name.removesuffix(_ENDING) + ending)
            for ending in (".shipped.json", ".jsonl", ".files", ".lock")
        )

    @classmethod
    def of(cls, folder: Path, run_key: str, stage: str) -> Self:
        """Return the entry of one stage of a run in a tracking folder."""
        return cls(folder / "spool" / f"{re.sub('[^A-Za-z0-9_-]', '_', run_key)}.{stage}{_ENDING}")

    def read(self) -> Any:
        """Return the content of ``path``."""
        return read_json(self.path)

    def end(
        self,
        content: dict[str, Any],
        status: str,
        ended: float,
        journals: Sequence[Path],
        metrics: Mapping[str, Any],
        files: Mapping[str, Path | bytes],
    ) -> None:
        """Record how a stage ended, at Unix time ``ended``, and copy its journal and files to the spool."""
        shutil.rmtree(self.files, ignore_errors=True)
        make_folder(self.files)
        for name, file in files.items():
            if isinstance(file, bytes):
                write_bytes(self.files / name, file)
            else:
                link_or_copy(file, self.files / name)
        write_bytes(self.journal, b"".join(path.read_bytes() for path in journals))
        digests = {name: sha256_file(self.files / name) for name in files}
        content["journal"] = str(self.journal.absolute())
        content["final"] = {"time": ended, "metrics": finite_metrics(metrics), "status": status, "files": digests}
        write_json(self.path, content)

    def has_running_sibling(self) -> bool:
        """Return whether another stage of the run is active: its process holds the lock of its entry."""
        for other in outbox_entries(self.path.parent.parent):
            content = other.read()
            if other.path != self.path and content["key"] == self.read()["key"] and "final" not in content:
                with open(other.lock, "ab") as file:
                    if try_lock(file) is False:
                        return True
        return False

    def discard(self, content: Mapping[str, Any]) -> None:
        """Delete all but the ``shipped`` state, unless a restarted stage has written other content than ``content``."""
        claimed = self.path.with_suffix(".sent")
        os.replace(self.path, claimed)  # atomic: an entry written from now on stays
        if read_json(claimed) == content:
            self.journal.unlink(missing_ok=True)
            shutil.rmtree(self.files, ignore_errors=True)
        else:
            with suppress(FileExistsError):  # an even newer entry
                os.link(claimed, self.path)
        claimed.unlink()


def outbox_entries(folder: Path) -> list[OutboxEntry]:
    """List all outbox entries of a tracking folder."""
    return [OutboxEntry(path) for path in sorted((folder / "spool").glob(f"*{_ENDING}"))]


def unsent_journals(folder: Path) -> list[str]:
    """List the journals of finished stages in this tracking folder that are not completely sent."""
    return [content["journal"] for entry in outbox_entries(folder) if "final" in (content := entry.read())]


def find_sent_run(folder: Path, stage: str, metrics: Mapping[str, Any]) -> str | None:
    """Return the id of the run with these final metrics of a stage; None if they were not sent to this destination."""
    expected = finite_metrics({f"final/{stage}.{name}": value for name, value in metrics.items()}).items()
    for path in sorted((folder / "spool").glob(f"*.{stage}.shipped.json")):
        shipped = read_json(path)
        destination, run_id = shipped["destination"]
        final = shipped["final"]
        if destination == uri_digest(folder) and final and expected <= final["metrics"].items():
            return str(run_id)
    return None


def finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are finite numbers, as float."""
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def warn_unsent(problem: str, journal: str) -> None:
    """Print a warning that metrics were not sent, with the path of the journal that holds them."""
    advice = f"No data is lost: metrics are in {journal}; `realmops sync` sends the rest."
    print(f"warning: MLflow tracking: {problem}. {advice}", file=sys.stderr, flush=True)


class SyncReport(NamedTuple):
    """Result of ``sync``: the number of points and files sent, and one line for each journal with a problem."""

    sent: int
    problems: tuple[str, ...]


def sync(folder: Path) -> SyncReport:
    """Send the outbox entries that the stages of this tracking folder could not send; idempotent."""
    sent, problems = 0, list[str]()
    for entry in outbox_entries(folder):
        try:
            with _locked(entry.lock, wait=False):
                content = entry.read()
                is_missing = not Path(content["journal"]).is_file()
                sent += _Sender(entry).send()
                if is_missing and entry.path.is_file():
                    entry.discard(content)
            problem = f"{content['journal']} is gone; the rest is sent, and the entry discarded" if is_missing else ""
        except BlockingIOError:
            problem = "a running stage sends it"
        except Exception as error:  # each journal is tried; the caller prints the problems
            problem = error_summary(error)
        if problem:
            problems.append(f"{entry.path.name}: {problem}")
    return SyncReport(sent, tuple(problems))


def end_killed(folder: Path) -> bool:
    """Record the end of each stage that was killed before it could, for ``sync`` to send.

    Returns:
        Whether no process holds the lock of an entry any more: a stage may still be recording its own end.
        On a volume without locks nothing is recorded, because a stage may be running.
    """
    is_done = True
    for entry in outbox_entries(folder):
        with suppress(FileNotFoundError), open(entry.lock, "ab") as file:  # a process has just sent it
            is_locked = try_lock(file)
            is_done = is_done and is_locked is not False
            if is_locked and "final" not in (content := entry.read()):
                journal = Path(content["journal"])
                entry.end(content, "KILLED", time.time(), [journal] if journal.is_file() else [], {}, {})
    return is_done


def send_until_parent_ends(entry: OutboxEntry, interval: float) -> None:
    """Send every ``interval`` seconds, and once more at the end of standard input; the child process's main loop.

    After errors in a row it waits 1, 2, 4 and so on up to ``LONGEST_BACK_OFF_SECONDS``.
    """
    os.nice(10)
    sender, back_off = None, 1.0
    warned = last = False
    # The child of a killed stage may still be sending when the resumed stage starts another one.
    with _locked(entry.lock, wait=True):
        while entry.path.is_file():
            try:
                sender = sender or _Sender(entry)
                sender.send()
                wait, back_off = interval, 1.0
            except Exception as error:  # MLflow, its database and its server may raise anything
                sender = None  # the next attempt reconnects and reads the journal from its start
                if not warned:
                    warn_unsent(error_summary(error), entry.read()["journal"])
                    warned = True
                wait, back_off = back_off, min(2 * back_off, LONGEST_BACK_OFF_SECONDS)
            if last:
                return
            last = bool(select.select([sys.stdin], [], [], wait)[0])


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold a file lock; raises BlockingIOError if another process holds it and ``wait`` is False."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


class _Sender:
    """Sender of one outbox entry, with the last step sent of each metric as its saved state."""

    def __init__(self, entry: OutboxEntry) -> None:
        """Find or create the run and log its parameters; like all methods, this may raise any exception."""
        self._entry = entry
        self._offset, self._last_line = 0, b""  # the position in the journal, and the line before it
        folder, content = entry.path.parent.parent, entry.read()
        self._shipped = read_json(entry.shipped) if entry.shipped.is_file() else {}
        # Else two stages could create the database, or the run, twice.
        with _locked(entry.path.with_name("connect.lock"), wait=True):
            self._client = mlflow_client(resolve_tracking_uri(folder))
            self._run_id = content["run_id"] or self._find_or_create_run(content, folder)
            destination = [uri_digest(folder), self._run_id]
            if self._shipped.get("destination") != destination:
                self._shipped = {"destination": destination, "steps": {}, "final": None}
            if self._shipped["final"] is None or self._shipped["final"] != content.get("final"):
                self._describe_run(content)

    def _find_or_create_run(self, content: Mapping[str, Any], folder: Path) -> str:
        tags: dict[str, str] = {}
        if above := content.get("above"):  # the run of one pipeline task: its parent spans all tasks, as ours does
            task_run = self._client.get_run(above)
            experiment = str(task_run.info.experiment_id)  # MLflow nests runs of one experiment only
            tags = {_PARENT_TAG: task_run.data.tags.get(_PARENT_TAG, above)}
        else:
            experiment = experiment_id(self._client, content["experiment"], folder)
        if parent := content.get("parent"):
            tags = {_PARENT_TAG: self._find_or_create_by_key(experiment, parent, tags)}
        return self._find_or_create_by_key(experiment, content, tags)

    def _find_or_create_by_key(self, experiment_id: str, run: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        """Return the id of the run with this key, created if missing."""
        condition = f"tags.`{RUN_KEY_TAG}` = '{run['key']}'"
        runs = self._client.search_runs([experiment_id], condition, order_by=["attributes.start_time ASC"])
        if runs:
            return str(runs[0].info.run_id)
        began = run["began"] and int(run["began"] * 1000)
        tags = {RUN_KEY_TAG: run["key"], **tags}
        return str(self._client.create_run(experiment_id, began, tags, run["name"]).info.run_id)

    def _describe_run(self, content: Mapping[str, Any]) -> None:
        """Log tags, datasets, and the parameters that the run lacks: MLflow rejects a changed parameter."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

        existing = self._client.get_run(self._run_id).data.params
        params = [Param(name, value) for name, value in content["params"].items() if name not in existing]
        tags = [RunTag(name, value) for name, value in {**content["tags"], RUN_KEY_TAG: content["key"]}.items()]
        self._client.log_batch(self._run_id, params=params, tags=tags)
        if datasets := content.get("datasets"):
            inputs = [
                DatasetInput(
                    Dataset(data["name"], data["digest"][:_DIGEST_LIMIT], "local", json.dumps({"uri": data["source"]})),
                    [InputTag("mlflow.data.context", data["context"])],
                )
                for data in datasets
            ]
            self._client.log_inputs(self._run_id, datasets=inputs)
        if not content["run_id"] and "final" not in content:
            self._client.update_run(self._run_id, status="RUNNING")

    def send(self) -> int:
        """Send all complete unsent lines, discard the entry of an ended stage; return the count of points and files."""
        content = self._entry.read()
        final: Any = content.get("final")
        ended = final is not None and final != self._shipped["final"]
        sent = 0
        if ended:  # final metrics first: MLflow compares runs by the first metric that it received
            old = (self._shipped["final"] or {}).get("metrics", {})
            new = {name: value for name, value in final["metrics"].items() if old.get(name) != value}
            sent += self._log([(name, value, int(final["time"] * 1000), 0) for name, value in new.items()])
        for points in self._points(Path(content["journal"])):
            sent += self._log(points)
            self._shipped["steps"] |= {name: step for name, _, _, step in points}
            write_json(self._entry.shipped, self._shipped)
        if ended:
            sent += self._end_run(content)
        if final is not None:
            self._entry.discard(content)
        return sent

    def _log(self, points: Sequence[_Point]) -> int:
        from mlflow.entities import Metric

        self._client.log_batch(self._run_id, metrics=[Metric(*point) for point in points])
        return len(points)

    def _points(self, journal: Path) -> Iterator[list[_Point]]:
        """Yield the points of unread lines, up to ``_LINES_AT_ONCE`` lines at a time.

        A resumed stage truncates its journal to a checkpoint, and a restarted one begins a new journal. Both are read
        from the start, and only steps that were not sent yet are yielded: MLflow cannot replace a point.
        """
        if not journal.is_file():
            return
        with open(journal, "rb") as file:
            self._warn_of_new_journal(file.readline(), journal)
            file.seek(self._offset - len(self._last_line))
            if file.read(len(self._last_line)) != self._last_line:
                self._offset, self._last_line = 0, b""
            while True:
                file.seek(self._offset)
                lines = [line for line in islice(file, _LINES_AT_ONCE) if line.endswith(b"\n")]
                if not lines:
                    return
                yield self._unsent_points(lines)
                self._offset += sum(map(len, lines))
                self._last_line = lines[-1]

    def _warn_of_new_journal(self, first_line: bytes, journal: Path) -> None:
        """Warn that points of an earlier journal stay, as after a change of the code without a commit."""
        if first_line.endswith(b"\n") and (began := json.loads(first_line)["time"]) != self._shipped.get("began"):
            if self._shipped["steps"]:
                last = max(self._shipped["steps"].values())
                warn_unsent(f"the stage was restarted; up to step {last} MLflow keeps the earlier points", str(journal))
            self._shipped["began"] = began

    def _unsent_points(self, lines: Sequence[bytes]) -> list[_Point]:
        """Return the points of these lines, except steps that were sent before a resumed stage repeated them."""
        last_step = dict(self._shipped["steps"])
        points = []
        for record in map(json.loads, lines):
            stage, step, seconds = (record.pop(name) for name in RESERVED)
            for name, value in record.items():
                metric = f"{stage}/{name}"
                if value is not None and step > last_step.get(metric, -1):
                    points.append((metric, float(value), int(seconds * 1000), step))
                    last_step[metric] = step
        return points

    def _end_run(self, content: Mapping[str, Any]) -> int:
        """Set the status of the run and send its files; last, so that metrics arrive even if files fail."""
        final = content["final"]
        if not content["run_id"] and not self._entry.has_running_sibling():
            self._client.set_terminated(self._run_id, final["status"], int(final["time"] * 1000))
        for name in final["files"]:
            self._client.log_artifact(self._run_id, self._entry.files / name)
        # MLflow's ``log_table`` would append the rows again
        if tables := [{"path": name, "type": "table"} for name in final["files"] if name.endswith(TABLE_ENDING)]:
            logged = json.loads(self._client.get_run(self._run_id).data.tags.get(_TABLES_TAG, "[]"))
            new = [table for table in tables if table not in logged]
            self._client.set_tag(self._run_id, _TABLES_TAG, json.dumps(logged + new))
        self._shipped["final"] = final
        write_json(self._entry.shipped, self._shipped)
        return len(final["files"])


if __name__ == "__main__":
    send_until_parent_ends(OutboxEntry(Path(sys.argv[1])), float(sys.argv[2]))
