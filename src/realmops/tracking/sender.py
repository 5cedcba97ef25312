"""The one sender: it follows the journal of a stage, which is the truth, and gives MLflow each of its points once.

While a stage runs, a process of its own sends, which training never waits for; ``sync`` sends what is left. What was
sent is kept beside the entry, so that sending again sends the rest.
"""

import fcntl
import json
import math
import os
import re
import select
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

from realmops.artifacts import link_or_copy, make_folder, read_json, sha256_file, try_lock, write_bytes, write_json
from realmops.journal import RESERVED
from realmops.tracking.client import chosen_uri, error_summary, experiment_id, mlflow_client, uri_digest
from realmops.tracking.mlflow_views import TABLE_ENDING

RUN_KEY_TAG = "realmops.run_key"
ABOVE = "REALMOPS_MLFLOW_PARENT_RUN_ID"  # a run that somebody else has made, to show ours under
LONGEST_BACK_OFF_SECONDS = 60.0
_ENDING = ".ticket.json"
_LINES_AT_ONCE = 1000
_LONGEST_DIGEST = 36  # of a data set, in MLflow
_TABLES_TAG = "mlflow.loggedArtifacts"
_PARENT_TAG = "mlflow.parentRunId"
_Point = tuple[str, float, int, int]  # name, value, milliseconds, step


class OutboxEntry:
    """One stage's figures on their way to MLflow, as files of the spool.

    ``path`` says what is to be sent, by the key ``final`` also how the stage ended. Beside it lie ``shipped``, what
    was sent and where to; ``journal`` and ``files``, copies of what the stage may move away; and ``lock``, which the
    one that sends holds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shipped, self.journal, self.files, self.lock = (
            path.with_name(path.name.removesuffix(_ENDING) + ending)
            for ending in (".shipped.json", ".jsonl", ".files", ".lock")
        )

    @classmethod
    def of(cls, folder: Path, run_key: str, stage: str) -> Self:
        """That of a stage of a run under a tracking folder."""
        return cls(folder / "spool" / f"{re.sub('[^A-Za-z0-9_-]', '_', run_key)}.{stage}{_ENDING}")

    def read(self) -> Any:
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
        """Write down how a stage ended, at ``ended`` in seconds, and keep its journal and files in the spool."""
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
        """Whether another stage of the run is at work: its process holds the lock of its entry."""
        for other in outbox_entries(self.path.parent.parent):
            content = other.read()
            if other.path != self.path and content["key"] == self.read()["key"] and "final" not in content:
                with open(other.lock, "ab") as file:
                    if try_lock(file) is False:
                        return True
        return False

    def discard(self, content: Mapping[str, Any]) -> None:
        """Remove all but what says that it was sent; not a entry that a stage which began again has put there."""
        taken = self.path.with_suffix(".sent")
        os.replace(self.path, taken)  # at once: what is written from here on stays
        if read_json(taken) == content:
            self.journal.unlink(missing_ok=True)
            shutil.rmtree(self.files, ignore_errors=True)
        else:
            with suppress(FileExistsError):  # one newer still
                os.link(taken, self.path)
        taken.unlink()


def outbox_entries(folder: Path) -> list[OutboxEntry]:
    """All of a tracking folder."""
    return [OutboxEntry(path) for path in sorted((folder / "spool").glob(f"*{_ENDING}"))]


def unsent(folder: Path) -> list[str]:
    """The journals of finished stages under this tracking folder that MLflow has not got whole."""
    return [content["journal"] for entry in outbox_entries(folder) if "final" in (content := entry.read())]


def sent_run(folder: Path, stage: str, metrics: Mapping[str, Any]) -> str | None:
    """The id of the run that holds these final figures of a stage; None when they were sent nowhere or elsewhere."""
    wanted = finite_metrics({f"final/{stage}.{name}": value for name, value in metrics.items()}).items()
    for path in sorted((folder / "spool").glob(f"*.{stage}.shipped.json")):
        shipped = read_json(path)
        place, run_id = shipped["destination"]
        if place == uri_digest(folder) and shipped["final"] and wanted <= shipped["final"]["metrics"].items():
            return str(run_id)
    return None


def finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that are finite_metrics numbers."""
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def warn_unsent(trouble: str, journal: str) -> None:
    """Say that something was not sent, and where it is kept."""
    kept = f"Nothing is lost: metrics are in {journal}; `realmops sync` sends what is left."
    print(f"warning: MLflow tracking: {trouble}. {kept}", file=sys.stderr, flush=True)


class SyncReport(NamedTuple):
    """What ``sync`` did: points and files sent now, and one line of trouble for each journal that could not be sent."""

    sent: int
    problems: tuple[str, ...]


def sync(folder: Path) -> SyncReport:
    """Send what stages under this tracking folder could not send. Sending twice does no harm."""
    sent, problems = 0, list[str]()
    for entry in outbox_entries(folder):
        try:
            with _locked(entry.lock, wait=False):
                content = entry.read()
                gone = not Path(content["journal"]).is_file()
                sent += _Sender(entry).send()
                if gone and entry.path.is_file():
                    entry.discard(content)
            told = f"{content['journal']} is gone; what else there was is sent, and it is forgotten" if gone else ""
        except BlockingIOError:
            told = "a running stage sends it"
        except Exception as error:  # each journal is tried; the caller prints the trouble
            told = error_summary(error)
        if told:
            problems.append(f"{entry.path.name}: {told}")
    return SyncReport(sent, tuple(problems))


def send_until_parent_ends(entry: OutboxEntry, interval: float) -> None:
    """The child process: send every ``interval`` seconds, once more at the end of standard input, and return.

    After a failure it waits 1 s, then 2, 4 and so on, at most 60 s.
    """
    os.nice(10)
    sender, back_off = None, 1.0
    warned = last = False
    # A killed stage's child may still send when the resumed stage starts its own.
    with _locked(entry.lock, wait=True):
        while entry.path.is_file():
            try:
                sender = sender or _Sender(entry)
                sender.send()
                wait, back_off = interval, 1.0
            except Exception as error:  # whatever MLflow, its database or its server does
                sender = None  # the next try connects anew and reads the journal from its start
                if not warned:
                    warn_unsent(error_summary(error), entry.read()["journal"])
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
    """Sends one entry's journal. What was sent is kept beside the entry: the last step of each metric."""

    def __init__(self, entry: OutboxEntry) -> None:
        """Find or make the run, and log what it is; may raise anything, as all here."""
        self._entry = entry
        self._offset, self._last_line = 0, b""  # of the journal, as far as it was read
        folder, content = entry.path.parent.parent, entry.read()
        self._shipped = read_json(entry.shipped) if entry.shipped.is_file() else {}
        # Two stages would make the database, or the run, twice.
        with _locked(entry.path.with_name("connect.lock"), wait=True):
            self._client = mlflow_client(chosen_uri(folder))
            self._run_id = content["run_id"] or self._find_or_create_run(content, folder)
            destination = [uri_digest(folder), self._run_id]
            if self._shipped.get("destination") != destination:
                self._shipped = {"destination": destination, "steps": {}, "final": None}
            if self._shipped["final"] is None or self._shipped["final"] != content.get("final"):
                self._describe_run(content)

    def _find_or_create_run(self, content: Mapping[str, Any], folder: Path) -> str:
        tags: dict[str, str] = {}
        if above := content.get("above"):  # a run of one task of a pipeline: what is over it is of all tasks, as ours
            found = self._client.get_run(above)
            experiment = str(found.info.experiment_id)  # MLflow shows no runs of others under it
            tags = {_PARENT_TAG: found.data.tags.get(_PARENT_TAG, above)}
        else:
            experiment = experiment_id(self._client, content["experiment"], folder)
        if parent := content.get("parent"):
            tags = {_PARENT_TAG: self._run_of(experiment, parent, tags)}
        return self._run_of(experiment, content, tags)

    def _run_of(self, experiment_id: str, run: Mapping[str, Any], tags: Mapping[str, str]) -> str:
        """The run of this key, made when there is none."""
        condition = f"tags.`{RUN_KEY_TAG}` = '{run['key']}'"
        found = self._client.search_runs([experiment_id], condition, order_by=["attributes.start_time ASC"])
        if found:
            return str(found[0].info.run_id)
        began = run["began"] and int(run["began"] * 1000)
        tags = {RUN_KEY_TAG: run["key"], **tags}
        return str(self._client.create_run(experiment_id, began, tags, run["name"]).info.run_id)

    def _describe_run(self, content: Mapping[str, Any]) -> None:
        """Log tags, datasets, and the parameters that the run does not have yet: MLflow refuses to change one."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        params = [Param(name, value) for name, value in content["params"].items() if name not in known]
        tags = [RunTag(name, value) for name, value in {**content["tags"], RUN_KEY_TAG: content["key"]}.items()]
        self._client.log_batch(self._run_id, params=params, tags=tags)
        if read := content.get("datasets"):
            datasets = [
                DatasetInput(
                    Dataset(one["name"], one["digest"][:_LONGEST_DIGEST], "local", json.dumps({"uri": one["source"]})),
                    [InputTag("mlflow.data.context", one["context"])],
                )
                for one in read
            ]
            self._client.log_inputs(self._run_id, datasets=datasets)
        if not content["run_id"] and "final" not in content:
            self._client.update_run(self._run_id, status="RUNNING")

    def send(self) -> int:
        """Send all whole lines that were not sent yet; the number of points and files.

        The entry of a stage that has ended goes with that, unless it began again meanwhile.
        """
        content = self._entry.read()
        final: Any = content.get("final")
        ended = final is not None and final != self._shipped["final"]
        sent = 0
        if ended:  # figures come first: MLflow compares runs by the metric that it was sent first
            known = (self._shipped["final"] or {}).get("metrics", {})
            new = {name: value for name, value in final["metrics"].items() if known.get(name) != value}
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
        """The points of the lines that were not read yet, some lines at a time.

        A resumed stage goes back to its checkpoint, and one that begins anew begins a new journal: all is read again
        then, and only steps that were not sent yet follow. MLflow takes no point back, and would show one twice.
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
                yield self._not_sent(lines)
                self._offset += sum(map(len, lines))
                self._last_line = lines[-1]

    def _warn_of_new_journal(self, first_line: bytes, journal: Path) -> None:
        """Whoever changed the code without a commit sees the points of before, and is told."""
        if first_line.endswith(b"\n") and (began := json.loads(first_line)["time"]) != self._shipped.get("began"):
            if self._shipped["steps"]:
                known = max(self._shipped["steps"].values())
                warn_unsent(f"the stage began anew; up to step {known} MLflow keeps the points of before", str(journal))
            self._shipped["began"] = began

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

    def _end_run(self, content: Mapping[str, Any]) -> int:
        """Say how the run ended, and send its files: last, so that figures get through where files do not."""
        final = content["final"]
        if not content["run_id"] and not self._entry.has_running_sibling():
            self._client.set_terminated(self._run_id, final["status"], int(final["time"] * 1000))
        for name in final["files"]:
            self._client.log_artifact(self._run_id, self._entry.files / name)
        # MLflow's own ``log_table`` would add rows again
        if tables := [{"path": name, "type": "table"} for name in final["files"] if name.endswith(TABLE_ENDING)]:
            known = json.loads(self._client.get_run(self._run_id).data.tags.get(_TABLES_TAG, "[]"))
            new = [table for table in tables if table not in known]
            self._client.set_tag(self._run_id, _TABLES_TAG, json.dumps(known + new))
        self._shipped["final"] = final
        write_json(self._entry.shipped, self._shipped)
        return len(final["files"])


if __name__ == "__main__":
    send_until_parent_ends(OutboxEntry(Path(sys.argv[1])), float(sys.argv[2]))
