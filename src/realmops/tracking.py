"""Metrics: first to a file that is the truth, then to MLflow by a process that training never waits for.

Each stage appends to its journal (``Journal``). A ``Tracker`` has the points sent in batches to an MLflow run
and keeps, in a spool folder, what was sent. A server that is away costs one warning; ``sync`` sends the rest.
Files for people to look at go the same way, when the stage is over.
``Registry`` is MLflow's other half: registered models, of which one version is the champion.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from realmops import __version__
from realmops.artifacts import canonical_json, link_or_copy, read_json, sha256_file, write_bytes, write_json
from realmops.views import experiment_tags

RUN_KEY_TAG = "realmops.run_key"
FIRST_BACK_OFF_SECONDS = 1.0
LONGEST_BACK_OFF_SECONDS = 60.0
_RESERVED = ("stage", "step", "time")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
# MLflow's own limits for one request.
_POINTS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_LONGEST_PARAM = 6000
_LONGEST_DIGEST = 36
_TABLES_TAG = "mlflow.loggedArtifacts"
_TABLE = ".table.json"
CHAMPION = "champion"
_MODEL_CODE = Path(__file__).with_name("serving.py")


class Journal:
    """One stage's metrics as JSON lines: ``{"stage": ..., "step": ..., "time": seconds, name: value, ...}``.

    A line is written by one system call; an unfinished last line of a killed process is cut off when the
    file is opened again. NaN and infinities become null, which plots and MLflow leave out.
    """

    def __init__(self, path: Path, stage: str) -> None:
        if not _NAME.fullmatch(stage):
            raise ValueError(f"stage name {stage!r}: only letters, digits, - and _ are allowed")
        self.path = path
        self.stage = stage
        self._last_step = -1
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._file.truncate(_end_of_last_line(path))

    def log(self, step: int, **metrics: float) -> None:
        """Append one line. Steps never go back, except after ``truncate``."""
        assert step >= self._last_step, (step, self._last_step)
        assert not set(metrics) & set(_RESERVED), sorted(metrics)
        self._last_step = step
        values = {name: _finite(value) for name, value in metrics.items()}
        record = {"stage": self.stage, "step": int(step), "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def position(self) -> int:
        """The journal's length in bytes, made durable first: store it in a checkpoint."""
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def truncate(self, position: int) -> None:
        """Go back to a checkpoint's position: the steps after it come again."""
        size = self.path.stat().st_size
        if position > size:
            raise ValueError(
                f"{self.path} has {size} bytes, the checkpoint was made at {position}: the file was cut or "
                "replaced; restore it, or remove the checkpoint to start the stage again"
            )
        self._file.truncate(position)
        self._last_step = -1

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_of_last_line(path: Path) -> int:
    content = path.read_bytes()
    return content.rfind(b"\n") + 1


def _finite(value: float) -> float | int | None:
    if isinstance(value, int):
        return int(value)
    return float(value) if math.isfinite(value) else None


@dataclass(frozen=True)
class Dataset:
    """What a run has read. MLflow keeps 36 characters of the ``digest``; ``context`` is what it was read for."""

    name: str
    digest: str
    source: str
    context: str


@dataclass(frozen=True)
class Run:
    """The MLflow run of one variant. All its stages find it by ``key``.

    The key should change with everything that changes the numbers (parameters, corpus, code): MLflow cannot
    replace a point, so a stage that begins anew under the same key adds a second one at each step. ``params``
    are sections of values; they are logged as ``section.key``. ``parent`` is the run that this one is shown
    under; it is created when it is not there. ``began`` is when the run began, in seconds, where that is not now.
    """

    key: str
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    experiment: str = "realmops"
    parent: Run | None = None
    datasets: Sequence[Dataset] = ()
    began: float | None = None

    def description(self) -> dict[str, Any]:
        """What the process that sends needs to know; MLflow's variables come first, DVC's names what has no name."""
        return {
            "key": self.key,
            "name": self.name or os.environ.get("DVC_EXP_NAME"),
            "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.experiment,
            "params": flat_params(self.params),
            "tags": {RUN_KEY_TAG: self.key, **self.tags},
            "run_id": os.environ.get("MLFLOW_RUN_ID"),
            "parent": {name: getattr(self.parent, name) for name in ("key", "name", "began")} if self.parent else None,
            "datasets": [asdict(dataset) for dataset in self.datasets],
            "began": self.began,
        }


def flat_params(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested sections as ``section.key`` with the values as text, cut to MLflow's limit."""
    flat: dict[str, str] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat |= flat_params(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = str(value)[:_LONGEST_PARAM]
    return flat


def provenance_tags(project: Path, *, corpus_hash: str, params_hash: str) -> dict[str, str]:
    """Tags that say what a run was made from; what there is none of yet is left out.

    Images know their commit by REALMOPS_COMMIT, which counts where the project is no checkout.
    """
    tags = {"realmops.params_hash": params_hash}
    if corpus_hash:
        tags["realmops.corpus_hash"] = corpus_hash
    if commit := git_commit(project) or os.environ.get("REALMOPS_COMMIT"):
        tags |= {"realmops.git_commit": commit, "mlflow.source.git.commit": commit.split("-")[0]}
    if (project / "dvc.lock").is_file():
        tags["realmops.dvc_lock_hash"] = sha256_file(project / "dvc.lock")
    return tags


def git_commit(project: Path) -> str | None:
    """The commit checked out, with ``-dirty`` when tracked files there differ from it (dvc.lock aside)."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(project), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)dvc.lock")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


class Tracker:
    """Has a journal sent to MLflow by a child process for as long as a stage runs.

    A process and not a thread: importing mlflow and creating its database are many seconds of Python, in
    which a trainer of the same process would wait for the interpreter's lock at every tensor operation. The
    child sees the end of its parent as the end of its standard input, also when the parent was killed.

    ``folder`` holds the spool and, unless MLFLOW_TRACKING_URI is set, ``mlflow.db`` and its artifacts.
    MLFLOW_RUN_ID makes the stage use a run that somebody else made and ends. DVC_EXP_NAME names a run without a name.
    Nothing here raises because of tracking: trouble is one warning, and the points stay in the journal.
    ``interval`` is the seconds between two batches, ``patience`` the longest that a stage's end waits.

    Usage::

        with Journal(path, "pretrain") as journal, Tracker(journal.path, "pretrain", run, folder) as tracker:
            metrics = train(journal)
            tracker.finish({"em": metrics["em"]}, {"report.html": Path("report.html")})
    """

    def __init__(
        self,
        journal: Path,
        stage: str,
        run: Run,
        folder: Path,
        *,
        interval: float = 5.0,
        patience: float = 60.0,
    ) -> None:
        self._ticket = folder / "spool" / f"{_file_name(run.key)}.{stage}.ticket.json"
        self._interval = interval
        self._patience = patience
        self._final: dict[str, float] = {}
        self._files: dict[str, Path | bytes] = {}
        self._warned = False
        self._sender: subprocess.Popen[bytes] | None = None
        self._description: dict[str, Any] = {
            "journal": str(journal.absolute()),
            "stage": stage,
            **run.description(),
        }

    def __enter__(self) -> Self:
        self._guarded(self._start)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._guarded(lambda: self._close("FAILED" if kind else "FINISHED"))

    def finish(self, metrics: Mapping[str, Any], files: Mapping[str, Path | bytes] | None = None) -> None:
        """Final figures (em, recall_at_5, index_staleness_steps), logged without the stage's prefix.

        What is no finite number is left out. ``files`` are artifacts by name: where one is, or what is in it.
        """
        self._final |= _numbers(metrics)
        self._files |= files or {}

    def _start(self) -> None:
        self._ticket.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._ticket, self._description)
        package_root = str(Path(__file__).parents[1])
        search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        program = [sys.executable, "-W", "ignore", "-m", "realmops.tracking"]
        self._sender = subprocess.Popen(
            [*program, str(self._ticket), str(self._interval)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C stops the stage; the sender still sends what the stage wrote
            env={**os.environ, "PYTHONPATH": search_path},
        )

    def _close(self, status: str) -> None:
        """Let the sender send what is left, one try when the server is away; keep what it could not send."""
        files = _keep_files(self._ticket, self._files)
        self._description["final"] = {
            "time": time.time(),
            "metrics": self._final,
            "status": status,
            "files": files,
        }
        write_json(self._ticket, self._description)
        if self._sender is not None and self._sender.stdin is not None:
            self._sender.stdin.close()
            try:
                self._sender.wait(self._patience)
            except subprocess.TimeoutExpired:
                self._sender.kill()
                self._sender.wait()
                _warn(f"no answer within {self._patience:.0f} s", self._description["journal"])
        if _sent_all(self._ticket):
            _forget(self._ticket)
        else:
            self._keep_journal()

    def _keep_journal(self) -> None:
        """Copy the journal into the spool: its own folder may be moved or removed after the stage."""
        kept = _sibling(self._ticket, ".jsonl")
        write_bytes(kept, Path(self._description["journal"]).read_bytes())
        write_json(self._ticket, {**self._description, "journal": str(kept.absolute())})

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever goes wrong here, training goes on
            if not self._warned:
                _warn(_first_line(error), self._description["journal"])
            self._warned = True


def as_table(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows, at least one, as an artifact that MLflow shows as a table when its name ends in ``.table.json``."""
    return canonical_json({"columns": list(rows[0]), "data": [list(row.values()) for row in rows]})


def keep_finished(
    run: Run,
    journals: Sequence[Path],
    metrics: Mapping[str, Any],
    files: Mapping[str, Path | bytes],
    ended: float,
    folder: Path,
) -> None:
    """Put a run that is over into the spool, from where ``sync`` sends it: journals, final figures, artifacts.

    ``ended`` is when the run ended, in seconds; ``files`` are as in ``Tracker.finish``.
    """
    ticket = folder / "spool" / f"{_file_name(run.key)}.whole.ticket.json"
    journal = _sibling(ticket, ".jsonl")
    ticket.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(journal, b"".join(path.read_bytes() for path in journals))
    final = {
        "time": ended,
        "metrics": _numbers(metrics),
        "status": "FINISHED",
        "files": _keep_files(ticket, files),
    }
    write_json(ticket, {"journal": str(journal.absolute()), "stage": "whole", **run.description(), "final": final})


def _keep_files(ticket: Path, files: Mapping[str, Path | bytes]) -> dict[str, str]:
    """Put artifacts beside a ticket, whatever becomes of the files themselves; the sha256 of each by name."""
    kept = _sibling(ticket, ".files")
    shutil.rmtree(kept, ignore_errors=True)
    if files:
        kept.mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            write_bytes(kept / name, content)
        else:
            link_or_copy(content, kept / name)
    return {name: sha256_file(kept / name) for name in sorted(files)}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)
    }


@dataclass(frozen=True)
class SyncReport:
    """What ``sync`` did: points and files sent now, and one line of trouble for each journal that could not be sent."""

    sent: int
    problems: tuple[str, ...]


def sync(folder: Path) -> SyncReport:
    """Send what stages under this tracking folder could not send. Sending twice does no harm."""
    sent = 0
    problems = []
    for ticket in sorted((folder / "spool").glob("*.ticket.json")):
        try:
            with _locked(_sibling(ticket, ".lock"), wait=False):
                sent += _Shipper(ticket).ship()
                if _sent_all(ticket):
                    _forget(ticket)
        except BlockingIOError:
            problems.append(f"{ticket.name}: a running stage sends it")
        except Exception as error:  # each journal is tried; the caller prints the trouble
            problems.append(f"{ticket.name}: {_first_line(error)}")
    return SyncReport(sent, tuple(problems))


def unsent(folder: Path) -> list[str]:
    """The journals of finished stages under this tracking folder that MLflow has not got whole."""
    found = []
    for path in sorted((folder / "spool").glob("*.ticket.json")):
        ticket = read_json(path)
        if ticket.get("final") is not None and not _sent_all(path):
            found.append(str(ticket["journal"]))
    return found


def send_until_parent_ends(ticket: Path, interval: float) -> None:
    """The child process: send every ``interval`` seconds, once more at the end of standard input, and return.

    After a failure it waits 1 s, then 2, 4 and so on, at most 60 s.
    """
    os.nice(10)
    shipper = _Shipper(ticket)
    back_off = FIRST_BACK_OFF_SECONDS
    warned = last = False
    # A killed stage's child may still send when the resumed stage starts its own.
    with _locked(_sibling(ticket, ".lock"), wait=True):
        while True:
            try:
                shipper.ship()
                wait, back_off = interval, FIRST_BACK_OFF_SECONDS
            except Exception as error:  # whatever MLflow, its database or its server does
                shipper.disconnect()
                if not warned:
                    _warn(_first_line(error), read_json(ticket)["journal"])
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


class _Shipper:
    """Sends one ticket's journal. What was sent is kept beside the ticket: the last step of each metric."""

    def __init__(self, ticket: Path) -> None:
        self._ticket = ticket
        self._shipped_path = _sibling(ticket, ".shipped.json")
        self._folder = ticket.parent.parent
        self.disconnect()

    def disconnect(self) -> None:
        """Forget the connection, and read the journal from its start at the next try."""
        self._client: Any = None
        self._run_id = ""
        self._offset = 0
        self._last_line = b""
        self._shipped: dict[str, Any] = {}

    def ship(self) -> int:
        """Send all whole lines that were not sent yet; the number of points and files. May raise anything."""
        ticket = read_json(self._ticket)
        if self._client is None:
            # Two stages would make the database, or the run, twice.
            with _locked(self._folder / "spool" / "connect.lock", wait=True):
                self._connect(ticket)
        journal = Path(ticket["journal"])
        self._rewind_if_rewritten(journal)
        ended = "final" in ticket and self._shipped["final"] != ticket["final"]
        # Final figures come first: MLflow compares runs by the metric that it was sent first.
        sent = self._send_figures(ticket["final"]) if ended else 0
        while True:
            steps = dict(self._shipped["steps"])
            points, lines = _next_points(journal, self._offset, steps)
            if not lines:
                break
            if points:
                self._log_points(points)
                self._shipped["steps"] = steps
                write_json(self._shipped_path, self._shipped)
            self._offset += sum(map(len, lines))
            self._last_line = lines[-1]
            sent += len(points)
        if ended:
            sent += self._end_run(ticket)
        return sent

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
        self._client = _mlflow_client(uri)
        self._run_id = ticket["run_id"] or self._find_or_create_run(ticket, uri)
        destination = [_digest_of_address(uri), self._run_id]
        if self._shipped_path.is_file():
            self._shipped = read_json(self._shipped_path)
        if self._shipped.get("destination") != destination:
            self._shipped = {"destination": destination, "began": None, "steps": {}, "final": None}
        if self._shipped["final"] is None or self._shipped["final"] != ticket.get("final"):
            self._describe_run(ticket)

    def _find_or_create_run(self, ticket: Mapping[str, Any], uri: str) -> str:
        experiment_id = _experiment_id(self._client, ticket["experiment"], uri, self._folder)
        tags = {}
        if parent := ticket.get("parent"):
            tags["mlflow.parentRunId"] = self._run_of(experiment_id, parent, {})
        return self._run_of(experiment_id, ticket, tags)

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

    def _log_points(self, points: list[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(*point) for point in points]
        self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)

    def _send_figures(self, final: Mapping[str, Any]) -> int:
        points = [(name, value, int(final["time"] * 1000), 0) for name, value in final["metrics"].items()]
        if points:
            self._log_points(points)
        return len(points)

    def _end_run(self, ticket: Mapping[str, Any]) -> int:
        """Say how the run ended, and send its files: last, so that figures get through where files do not."""
        final = ticket["final"]
        if not ticket["run_id"]:
            self._client.set_terminated(self._run_id, final["status"], int(final["time"] * 1000))
        files = final.get("files", {})
        for name in files:
            self._client.log_artifact(self._run_id, _sibling(self._ticket, ".files") / name)
        self._name_tables([name for name in files if name.endswith(_TABLE)])
        self._shipped["final"] = final
        write_json(self._shipped_path, self._shipped)
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


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model; ``tags`` are those that it was registered with."""

    uri: str
    number: int
    tags: Mapping[str, str]


class Registry:
    """The versions of one registered model, and which of them has the alias ``champion``.

    MLflow moves an alias without any condition: two promotions at the same time are for the caller to keep apart.
    Trouble with MLflow is a ConnectionError of one line; errors of the model's own code stay what they are.
    """

    def __init__(self, name: str, folder: Path, experiment: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"model name {name!r}: only letters, digits, - and _ are allowed")
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self._folder = name, folder
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
        self._uri = chosen_uri(folder)
        with _trouble_in_one_line():
            self._client = _mlflow_client(self._uri)

    def champion(self) -> ModelVersion | None:
        """The version that has the alias."""
        with _trouble_in_one_line():
            model = self._registered()
            number = model.aliases.get(CHAMPION) if model else None
            return None if number is None else self._version(self._client.get_model_version(self.name, number))

    def find(self, tags: Mapping[str, str]) -> ModelVersion | None:
        """The newest version that was registered with these tags."""
        conditions = [f"name = '{self.name}'", *(f"tags.`{tag}` = '{value}'" for tag, value in tags.items())]
        with _trouble_in_one_line():
            found = [self._version(one) for one in self._client.search_model_versions(" AND ".join(conditions))]
        return max(found, key=lambda version: version.number, default=None)

    def fetch(self, version: ModelVersion, artifact: str, folder: Path) -> Path:
        """Download one of a version's artifacts into a folder."""
        with _trouble_in_one_line():
            from mlflow.artifacts import download_artifacts

            uri = f"{self._client.get_model_version_download_uri(self.name, str(version.number))}/artifacts/{artifact}"
            return Path(download_artifacts(artifact_uri=uri, dst_path=str(folder), tracking_uri=self._uri))

    def register(
        self,
        artifacts: Mapping[str, Path],
        *,
        config: Mapping[str, Any],
        signature: Mapping[str, Any],
        question: str,
        tags: Mapping[str, str],
        run_id: str | None,
    ) -> ModelVersion:
        """Log ``serving.py`` as a model and make a version of it.

        Args:
            artifacts: what is copied into the model, by the names that its code knows it by.
            config: what its code finds in ``context.model_config``.
            signature: lists of columns by "inputs" and "outputs", in MLflow's form.
            question: an example of an input.
            run_id: the run that the version came from, if it is known.
        """
        with _trouble_in_one_line(), _current_server(self._uri):
            import mlflow
            from mlflow.models import ModelSignature

            experiment_id = _experiment_id(self._client, self._experiment, self._uri, self._folder)
            logged = self._client.create_logged_model(experiment_id, self.name, run_id, dict(tags))
            mlflow.pyfunc.log_model(
                name=self.name,
                model_id=logged.model_id,
                python_model=str(_MODEL_CODE),
                artifacts={name: str(path) for name, path in artifacts.items()},
                model_config=dict(config),
                signature=ModelSignature.from_dict({side: json.dumps(columns) for side, columns in signature.items()}),
                input_example=[question],
                pip_requirements=[f"realmops=={__version__}"],
            )
            if self._registered() is None:
                self._client.create_registered_model(self.name)
            return self._version(
                self._client.create_model_version(
                    self.name, logged.model_uri, run_id, dict(tags), model_id=logged.model_id
                )
            )

    def crown(self, version: ModelVersion, question: str) -> None:
        """Load a version from where it is stored, have it answer, and give it the alias."""
        with _trouble_in_one_line(), _current_server(self._uri):
            import mlflow

            mlflow.tracing.disable()  # never around log_model: with tracing off, that of 3.17 waits for its own lock
            try:
                mlflow.pyfunc.load_model(version.uri).predict([question])
            finally:
                mlflow.tracing.enable()
            self._client.set_registered_model_alias(self.name, CHAMPION, str(version.number))

    def _registered(self) -> Any:
        """MLflow's entry of the model, None before its first version."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_registered_model(self.name)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _version(self, found: Any) -> ModelVersion:
        return ModelVersion(f"models:/{self.name}/{found.version}", int(found.version), dict(found.tags))


@contextmanager
def _trouble_in_one_line() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        if not isinstance(error, MlflowException | SQLAlchemyError | OSError | ImportError):
            raise
        place = "at MLFLOW_TRACKING_URI" if os.environ.get("MLFLOW_TRACKING_URI") else "of the local database"
        raise ConnectionError(f"the model registry {place} failed: {_first_line(error)}") from error


@contextmanager
def _current_server(uri: str) -> Iterator[None]:
    """For what MLflow offers for its current server only."""
    import mlflow

    if mlflow.get_tracking_uri() == uri:  # setting it would outlive the environment variable that named it
        yield
        return
    is_set = mlflow.is_tracking_uri_set()  # type: ignore[no-untyped-call]
    earlier = mlflow.get_tracking_uri() if is_set else None
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(earlier)  # type: ignore[arg-type]  # None takes it back


def sent_run(folder: Path, stage: str, metrics: Mapping[str, Any]) -> str | None:
    """The id of the run that holds these final figures of a stage; None when they were sent nowhere or elsewhere."""
    place = _digest_of_address(chosen_uri(folder))
    wanted = _numbers({f"final/{stage}.{name}": value for name, value in metrics.items()}).items()
    for path in sorted((folder / "spool").glob(f"*.{stage}.shipped.json")):
        shipped = read_json(path)
        if shipped["destination"][0] == place and shipped["final"] and wanted <= shipped["final"]["metrics"].items():
            return str(shipped["destination"][1])
    return None


def chosen_uri(folder: Path) -> str:
    """Where MLflow's data goes: MLFLOW_TRACKING_URI, or else the database in the tracking folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or default_uri(folder)


def _digest_of_address(uri: str) -> str:
    """What is kept of an address, which may hold a password."""
    return hashlib.sha256(uri.encode()).hexdigest()


def default_uri(folder: Path) -> str:
    """The local database that is used when MLFLOW_TRACKING_URI is not set."""
    return f"sqlite:///{(folder / 'mlflow.db').absolute()}"


def _experiment_id(client: Any, name: str, uri: str, folder: Path) -> str:
    """The experiment of that name, made when there is none; of the local database with its artifacts beside it."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        artifacts = (folder / "mlartifacts").absolute().as_uri() if uri == default_uri(folder) else None
        return str(client.create_experiment(name, artifact_location=artifacts, tags=experiment_tags()))
    for tag, value in experiment_tags().items():
        if tag not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, tag, value)
    return str(experiment.experiment_id)


def _mlflow_client(uri: str) -> Any:
    """An MLflow client whose requests give up soon; the first use of an empty database takes 10 to 20 s."""
    for name, value in {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "urllib3.connectionpool"):  # a line for each table, a line for each retry
        logging.getLogger(name).setLevel(logging.ERROR)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _next_points(
    journal: Path, offset: int, steps: dict[str, int]
) -> tuple[list[tuple[str, float, int, int]], list[bytes]]:
    """The next points (name, value, milliseconds, step) from ``offset``, and the whole lines that hold them.

    Leaves out what ``steps``, the last step by metric, says was sent before a resumed stage wrote it again,
    and moves ``steps`` on.
    """
    points: list[tuple[str, float, int, int]] = []
    lines = []
    with open(journal, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            record = json.loads(line)
            fresh = [
                (f"{record['stage']}/{name}", float(value), int(record["time"] * 1000), record["step"])
                for name, value in record.items()
                if name not in _RESERVED
                and value is not None
                and record["step"] > steps.get(f"{record['stage']}/{name}", -1)
            ]
            if len(points) + len(fresh) > _POINTS_PER_BATCH:
                break
            steps |= {name: step for name, _, _, step in fresh}
            points += fresh
            lines.append(line)
    return points, lines


def _sibling(ticket: Path, ending: str) -> Path:
    return ticket.with_name(ticket.name.removesuffix(".ticket.json") + ending)


def _sent_all(ticket: Path) -> bool:
    """Final figures are sent last, so they tell. A running or killed stage's ticket has none yet."""
    shipped = _sibling(ticket, ".shipped.json")
    final = read_json(ticket).get("final")
    return final is not None and shipped.is_file() and bool(read_json(shipped)["final"] == final)


def _forget(ticket: Path) -> None:
    ticket.unlink()
    _sibling(ticket, ".jsonl").unlink(missing_ok=True)
    shutil.rmtree(_sibling(ticket, ".files"), ignore_errors=True)


def _file_name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", key)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _warn(trouble: str, journal: str) -> None:
    print(
        f"warning: MLflow tracking: {trouble}. Nothing is lost: metrics are in {journal}; "
        "`realmops sync` sends what is left.",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    send_until_parent_ends(Path(sys.argv[1]), float(sys.argv[2]))
