"""The process that sends journals, final figures and files to MLflow, which training never waits for.

What was sent is kept beside the ticket, so that sending again sends the rest; ``sync`` does that for all tickets.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from realmops.artifacts import read_json, write_json
from realmops.journal import RESERVED
from realmops.tracking.client import chosen_uri, digest_of_address, experiment_id, first_line, mlflow_client
from realmops.tracking.mlflow_views import TABLE_ENDING
from realmops.tracking.run import RUN_KEY_TAG
from realmops.tracking.spool import Ticket, tickets, warn

FIRST_BACK_OFF_SECONDS = 1.0
LONGEST_BACK_OFF_SECONDS = 60.0
# MLflow's own limits for one request.
_POINTS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_LINES_AT_ONCE = 1000
_LONGEST_DIGEST = 36
_TABLES_TAG = "mlflow.loggedArtifacts"
_PARENT_TAG = "mlflow.parentRunId"
_Point = tuple[str, float, int, int]  # name, value, milliseconds, step


@dataclass(frozen=True)
class SyncReport:
    """What ``sync`` did: points and files sent now, and one line of trouble for each journal that could not be sent."""

    sent: int
    problems: tuple[str, ...]


def sync(folder: Path) -> SyncReport:
    """Send what stages under this tracking folder could not send. Sending twice does no harm."""
    sent = 0
    problems = []
    for ticket in tickets(folder):
        try:
            with _locked(ticket.lock, wait=False):
                sent += _Sender(ticket).send()
                if ticket.is_sent:
                    ticket.forget()
        except BlockingIOError:
            problems.append(f"{ticket.path.name}: a running stage sends it")
        except Exception as error:  # each journal is tried; the caller prints the trouble
            problems.append(f"{ticket.path.name}: {first_line(error)}")
    return SyncReport(sent, tuple(problems))


def send_until_parent_ends(ticket: Ticket, interval: float) -> None:
    """The child process: send every ``interval`` seconds, once more at the end of standard input, and return.

    After a failure it waits 1 s, then 2, 4 and so on, at most 60 s.
    """
    os.nice(10)
    sender = _Sender(ticket)
    back_off = FIRST_BACK_OFF_SECONDS
    warned = last = False
    # A killed stage's child may still send when the resumed stage starts its own.
    with _locked(ticket.lock, wait=True):
        while True:
            try:
                sender.send()
                wait, back_off = interval, FIRST_BACK_OFF_SECONDS
            except Exception as error:  # whatever MLflow, its database or its server does
                sender.disconnect()
                if not warned:
                    warn(first_line(error), ticket.read()["journal"])
                    warned = True
                wait, back_off = back_off, min(2 * back_off, LONGEST_BACK_OFF_SECONDS)
            if last:
                return
            last = bool(select.select([sys.stdin], [], [], wait)[0])


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold a lock that ends with this process; BlockingIOError when another has it and ``wait`` is False."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


class _Sender:
    """Sends one ticket's journal. What was sent is kept beside the ticket: the last step of each metric."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._folder = ticket.path.parent.parent
        self.disconnect()

    def disconnect(self) -> None:
        """Forget the connection, and read the journal from its start at the next try."""
        self._client: Any = None
        self._run_id = ""
        self._offset = 0
        self._last_line = b""
        self._shipped: dict[str, Any] = {}

    def send(self) -> int:
        """Send all whole lines that were not sent yet; the number of points and files. May raise anything."""
        ticket = self._ticket.read()
        if self._client is None:
            # Two stages would make the database, or the run, twice.
            with _locked(self._folder / "spool" / "connect.lock", wait=True):
                self._connect(ticket)
        journal = Path(ticket["journal"])
        self._rewind_if_rewritten(journal)
        ended = "final" in ticket and self._shipped["final"] != ticket["final"]
        # Final figures come first: MLflow compares runs by the metric that it was sent first.
        sent = self._send_figures(ticket["final"]) if ended else 0
        while lines := self._next_lines(journal):
            points = self._not_sent(lines)
            for start in range(0, len(points), _POINTS_PER_BATCH):
                batch = points[start : start + _POINTS_PER_BATCH]
                self._log_points(batch)
                self._shipped["steps"] |= {name: step for name, _, _, step in batch}
                write_json(self._ticket.shipped, self._shipped)
            self._offset += sum(map(len, lines))
            self._last_line = lines[-1]
            sent += len(points)
        if ended:
            sent += self._end_run(ticket)
        return sent

    def _send_figures(self, final: Mapping[str, Any]) -> int:
        points = [(name, value, int(final["time"] * 1000), 0) for name, value in final["metrics"].items()]
        if points:
            self._log_points(points)
        return len(points)

    def _rewind_if_rewritten(self, journal: Path) -> None:
        """Notice that a resumed stage went back to its checkpoint, or that a stage began a new journal.

        After a resume only steps that were not sent yet follow. A new journal is sent whole.
        """
        with open(journal, "rb") as file:
            first_line = file.readline()
            file.seek(self._offset - len(self._last_line))
            if file.read(len(self._last_line)) != self._last_line:
                self._offset, self._last_line = 0, b""
        if first_line.endswith(b"\n") and (began := json.loads(first_line)["time"]) != self._shipped["began"]:
            self._shipped |= {"began": began, "steps": {}}

    def _connect(self, ticket: Mapping[str, Any]) -> None:
        uri = chosen_uri(self._folder)
        self._client = mlflow_client(uri)
        self._run_id = ticket["run_id"] or self._find_or_create_run(ticket, uri)
        destination = [digest_of_address(uri), self._run_id]
        if self._ticket.shipped.is_file():
            self._shipped = read_json(self._ticket.shipped)
        if self._shipped.get("destination") != destination:
            self._shipped = {"destination": destination, "began": None, "steps": {}, "final": None}
        if self._shipped["final"] is None or self._shipped["final"] != ticket.get("final"):
            self._describe_run(ticket)

    def _find_or_create_run(self, ticket: Mapping[str, Any], uri: str) -> str:
        tags: dict[str, str] = {}
        if above := ticket.get("above"):  # it is of one task of a pipeline, ours of all: the one over it is of all, too
            found = self._client.get_run(above)
            experiment = str(found.info.experiment_id)  # MLflow shows no runs of others under it
            tags = {_PARENT_TAG: found.data.tags.get(_PARENT_TAG, above)}
        else:
            experiment = experiment_id(self._client, ticket["experiment"], uri, self._folder)
        if parent := ticket.get("parent"):
            tags = {_PARENT_TAG: self._run_of(experiment, parent, tags)}
        return self._run_of(experiment, ticket, tags)

    def _run_of(self, experiment_id: str, ticket: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        """The run of the ticket's key, made when there is none."""
        condition = f"tags.`{RUN_KEY_TAG}` = '{ticket['key']}'"
        found = self._client.search_runs([experiment_id], condition, order_by=["attributes.start_time ASC"])
        if found:
            return str(found[0].info.run_id)
        began = ticket.get("began")
        made = self._client.create_run(
            experiment_id,
            start_time=began and int(began * 1000),
            tags={RUN_KEY_TAG: ticket["key"], **tags},
            run_name=ticket["name"],
        )
        return str(made.info.run_id)

    def _describe_run(self, ticket: Mapping[str, Any]) -> None:
        """Log tags, datasets, and the parameters that the run does not have yet: MLflow refuses to change one."""
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        params = [Param(name, value) for name, value in ticket["params"].items() if name not in known]
        tags = [RunTag(name, value) for name, value in ticket["tags"].items()]
        for start in range(0, max(len(params), 1), _PARAMS_PER_BATCH):
            batch = params[start : start + _PARAMS_PER_BATCH]
            self._client.log_batch(self._run_id, params=batch, tags=tags, synchronous=True)
        if datasets := [_dataset_input(**dataset) for dataset in ticket.get("datasets", ())]:
            self._client.log_inputs(self._run_id, datasets=datasets)
        if not ticket["run_id"]:
            self._client.update_run(self._run_id, status="RUNNING")

    def _next_lines(self, journal: Path) -> list[bytes]:
        """Some whole lines behind those that were read."""
        with open(journal, "rb") as file:
            file.seek(self._offset)
            return [line for line in islice(file, _LINES_AT_ONCE) if line.endswith(b"\n")]

    def _not_sent(self, lines: Sequence[bytes]) -> list[_Point]:
        """The points of these lines without those that were sent before a resumed stage wrote them again."""
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

    def _log_points(self, points: Sequence[_Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(*point) for point in points]
        self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)

    def _end_run(self, ticket: Mapping[str, Any]) -> int:
        """Say how the run ended, and send its files: last, so that figures get through where files do not."""
        final = ticket["final"]
        if not ticket["run_id"]:
            self._client.set_terminated(self._run_id, final["status"], int(final["time"] * 1000))
        files = final.get("files", {})
        for name in files:
            self._client.log_artifact(self._run_id, self._ticket.files / name)
        self._name_tables([name for name in files if name.endswith(TABLE_ENDING)])
        self._shipped["final"] = final
        write_json(self._ticket.shipped, self._shipped)
        return len(files)

    def _name_tables(self, names: Sequence[str]) -> None:
        """Tell the UI which artifacts are tables, as MLflow's own ``log_table`` does, which would add rows again."""
        if not names:
            return
        known = json.loads(self._client.get_run(self._run_id).data.tags.get(_TABLES_TAG, "[]"))
        new = [entry for name in names if (entry := {"path": name, "type": "table"}) not in known]
        self._client.set_tag(self._run_id, _TABLES_TAG, json.dumps(known + new))


def _dataset_input(name: str, digest: str, source: str, context: str) -> Any:
    from mlflow.entities import Dataset as MlflowDataset
    from mlflow.entities import DatasetInput, InputTag

    dataset = MlflowDataset(name, digest[:_LONGEST_DIGEST], "local", json.dumps({"uri": source}))
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


if __name__ == "__main__":
    send_until_parent_ends(Ticket(Path(sys.argv[1])), float(sys.argv[2]))
