"""Send the journals of stages to MLflow, each point once; after an error, ``sync`` sends the rest."""

import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

from realmops.artifacts import (
    digest_of,
    link_or_copy,
    make_folder,
    read_json,
    sha256_file,
    try_lock,
    wait_for_lock,
    write_bytes,
    write_json,
)
from realmops.credentials import error_line
from realmops.journal import RESERVED, read_journal
from realmops.tracking.client import experiment_id, mlflow_client, resolve_tracking_uri, uri_digest

RUN_KEY_TAG = "realmops.run_key"
PARENT_RUN_VARIABLE = "REALMOPS_MLFLOW_PARENT_RUN_ID"  # an existing run to nest ours under
POINTS_AT_ONCE = 1000  # MLflow's own limit
_SENT = ".sent.json"
_DIGEST_LIMIT = 36  # characters of a dataset's digest, MLflow's own limit
_PARENT_TAG = "mlflow.parentRunId"
_Point = tuple[str, float, int, int]  # name, value, milliseconds, step


class SpoolEntry:
    """Unsent part of one stage's metrics: a folder of the spool, deleted once all is sent.

    ``run`` has the run and, as ``final``, how the stage ended; ``sent``, next to the folder, the destination with the
    last step sent of each metric. The process of the stage holds ``lock``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.journal = folder, folder / "run.json", folder / "metrics.jsonl"
        self.files = folder / "files"
        self.sent, self.lock = (folder.with_name(f"{folder.name}{ending}") for ending in (_SENT, ".lock"))

    @classmethod
    def of(cls, folder: Path, run_key: str, stage: str) -> Self:
        return cls(folder / "spool" / f"{re.sub('[^A-Za-z0-9_-]', '_', run_key)}.{stage}")

    def begin(self, content: Mapping[str, Any], journal: Path) -> None:
        make_folder(self.folder)
        self.journal.unlink(missing_ok=True)
        link_or_copy(journal, self.journal)
        write_json(self.run, content)

    def end(
        self,
        content: Mapping[str, Any],
        status: str,
        ended: float,
        journals: Sequence[Path] = (),
        metrics: Mapping[str, Any] = {},
        files: Mapping[str, Path] = {},
    ) -> None:
        """Record how the stage of a run ended, at Unix time ``ended``, and copy its journals and files."""
        shutil.rmtree(self.files, ignore_errors=True)
        make_folder(self.files)
        if journals:
            write_bytes(self.journal, b"".join(path.read_bytes() for path in journals))
        for name, file in files.items():
            link_or_copy(file, self.files / name)
        digests = {name: sha256_file(self.files / name) for name in files}
        final = {"time": ended, "metrics": finite_metrics(metrics), "status": status, "files": digests}
        write_json(self.run, {**content, "final": final})

    def is_locked(self) -> bool | None:
        with open(self.lock, "ab") as file:
            locked = try_lock(file)
            return None if locked is None else not locked

    def discard(self, content: Mapping[str, Any]) -> None:
        """Delete the entry, unless a restarted stage has written other content than ``content``."""
        with open(self.lock, "ab") as file:
            if try_lock(file) is not False and read_json(self.run) == content:
                shutil.rmtree(self.folder)


def spool_entries(folder: Path) -> list[SpoolEntry]:
    return [SpoolEntry(path.parent) for path in sorted((folder / "spool").glob("*/run.json"))]


def unsent_journals(folder: Path) -> list[str]:
    return [str(entry.journal) for entry in spool_entries(folder) if not entry.is_locked()]


def has_running_stage(folder: Path) -> bool:
    return any(entry.is_locked() for entry in spool_entries(folder))


def find_sent_run(folder: Path, stage: str, metrics: Mapping[str, Any]) -> str | None:
    """Return the id of the run with these final metrics of a stage; None if they were not sent to this destination."""
    expected = finite_metrics({f"final/{stage}.{name}": value for name, value in metrics.items()}).items()
    for path in sorted((folder / "spool").glob(f"*.{stage}{_SENT}")):
        sent = read_json(path)
        destination, run_id = sent["destination"]
        if destination == uri_digest(folder) and sent["final"] and expected <= sent["final"]["metrics"].items():
            return str(run_id)
    return None


def finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def warn_unsent(problem: str, journal: Path) -> None:
    advice = f"No data is lost: metrics are in {journal}; `realmops sync` sends the rest."
    print(f"warning: MLflow tracking: {problem}. {advice}", file=sys.stderr, flush=True)


def sync(folder: Path) -> tuple[int, list[str]]:
    """Send what was not sent and end runs of killed stages; return counts, and a line per problem. Idempotent.

    Each entry is tried, unless the server does not answer.
    """
    sent, problems = 0, list[str]()
    for entry in spool_entries(folder):
        try:
            if entry.is_locked() is False and "final" not in (content := read_json(entry.run)):
                entry.end(content, "KILLED", time.time())
            sent += send(entry)
        except Exception as error:  # the caller prints the problems
            from requests import ConnectionError, Timeout  # type: ignore[import-untyped]

            problems.append(f"{entry.folder.name}: {error_line(error)}")
            if isinstance(error.__context__, ConnectionError | Timeout):  # MLflow's errors have it as their context
                break
    return sent, problems


def send(entry: SpoolEntry) -> int:
    # One process at a time: two could create the database or the run twice.
    with open(entry.folder.with_name("sender.lock"), "ab") as lock:
        wait_for_lock(lock)
        if not entry.run.is_file():  # another process has sent it
            return 0
        return _Sender(entry).send()


class _Sender:
    """Sender of one entry; its methods may raise any exception."""

    def __init__(self, entry: SpoolEntry) -> None:
        self._entry, folder = entry, entry.folder.parent.parent
        self._content = content = read_json(entry.run)
        self._client = mlflow_client(resolve_tracking_uri(folder))
        self._run_id = content["run_id"] or self._find_or_create_run(folder)
        self._sent = read_json(entry.sent) if entry.sent.is_file() else {}
        destination = [uri_digest(folder), self._run_id]
        if self._sent.get("destination") != destination:
            self._sent = {"destination": destination, "described": "", "steps": {}, "final": None}

    def _find_or_create_run(self, folder: Path) -> str:
        content, tags = self._content, dict[str, str]()
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
        condition = f"tags.`{RUN_KEY_TAG}` = '{run['key']}'"
        runs = self._client.search_runs([experiment_id], condition, order_by=["attributes.start_time ASC"])
        if runs:
            return str(runs[0].info.run_id)
        began = run["began"] and int(run["began"] * 1000)
        tags = {RUN_KEY_TAG: run["key"], **tags}
        return str(self._client.create_run(experiment_id, began, tags, run["name"]).info.run_id)

    def send(self) -> int:
        from mlflow.entities import Metric

        final = self._content.get("final")
        is_ended = final is not None and final != self._sent["final"]
        self._describe_run()
        sent = 0
        if is_ended:  # final metrics first: MLflow compares runs by the first metric that it received
            old, milliseconds = (self._sent["final"] or {}).get("metrics", {}), int(final["time"] * 1000)
            new = [Metric(name, v, milliseconds, 0) for name, v in final["metrics"].items() if old.get(name) != v]
            self._client.log_batch(self._run_id, metrics=new)
            sent += len(new)
        points = self._unsent_points()
        while batch := list(islice(points, POINTS_AT_ONCE)):
            self._client.log_batch(self._run_id, metrics=[Metric(*point) for point in batch])
            sent += len(batch)
            self._sent["steps"] |= {name: step for name, _, _, step in batch}
            write_json(self._entry.sent, self._sent)
        if is_ended:
            sent += self._end_run(final)
        if final is not None:
            self._entry.discard(self._content)
        return sent

    def _describe_run(self) -> None:
        """Log tags, datasets, and the parameters that the run lacks: MLflow rejects a changed parameter."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

        content = self._content
        described = digest_of({name: value for name, value in content.items() if name != "final"})
        if self._sent["described"] == described:
            return
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
        self._sent["described"] = described
        write_json(self._entry.sent, self._sent)

    def _unsent_points(self) -> Iterator[_Point]:
        """Yield points after the last sent step: a resumed stage repeats steps, and MLflow cannot replace a point."""
        last_step = dict(self._sent["steps"])
        for record in read_journal(self._entry.journal) if self._entry.journal.is_file() else ():
            stage, step, seconds = (record.pop(name) for name in RESERVED)
            for name, value in record.items():
                metric = f"{stage}/{name}"
                if value is not None and step > last_step.get(metric, -1):
                    yield metric, float(value), int(seconds * 1000), step
                    last_step[metric] = step

    def _end_run(self, final: Mapping[str, Any]) -> int:
        """Set the status of the run and send its files; last, so that metrics arrive even if files fail."""
        if not self._content["run_id"] and not self._has_running_sibling():
            self._client.set_terminated(self._run_id, final["status"], int(final["time"] * 1000))
        for name in final["files"]:
            self._client.log_artifact(self._run_id, self._entry.files / name)
        self._sent["final"] = final
        write_json(self._entry.sent, self._sent)
        return len(final["files"])

    def _has_running_sibling(self) -> bool:
        return any(
            entry.folder != self._entry.folder and read_json(entry.run)["key"] == self._content["key"]
            for entry in spool_entries(self._entry.folder.parent.parent)
            if entry.is_locked()
        )


if __name__ == "__main__":  # sends at once, then for each line of standard input, and at its end
    os.nice(10)
    own_entry = SpoolEntry(Path(sys.argv[1]))
    try:
        for _ in chain([""], sys.stdin, [""]):
            send(own_entry)
    except Exception as error:
        warn_unsent(error_line(error), own_entry.journal)
        sys.exit(1)
