"""MLflow tracking of a stage: describe its run, and start a child process that sends its journal."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Self

from realmops.artifacts import MANIFEST, WORK_FOLDER, digest_of, make_folder, read_json, sha256_file, try_lock
from realmops.credentials import error_line
from realmops.evaluate.predictions import PREDICTIONS
from realmops.evaluate.recall import zero_shot_recall
from realmops.git import git
from realmops.journal import Journal
from realmops.options import Options
from realmops.tracking.client import is_local, python_process
from realmops.tracking.sender import PARENT_RUN_VARIABLE, SpoolEntry, warn_unsent

# The sender tries a server once, and a stage waits for it at its end; creating a local database takes 10 to 20 s.
ONE_TRY = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
SERVER_EXIT_SECONDS, DATABASE_EXIT_SECONDS = 15.0, 60.0
WITHOUT_MLFLOW = (
    "MLflow is not installed: metrics are only in metrics.jsonl of the stages; pip install 'realmops[tracking]', or "
    "set tracking.enabled=false"
)
UNTRACKED = ("sample", "snapshot", "tag")  # stages too short to wait for MLflow
_PARAM_LIMIT = 6000  # characters, MLflow's own limit
HEADLINES = {
    "evaluate": ("em", "f1", "recall_at_5", "ndcg_at_10", "ece", "precision_at_30"),
    "pretrain": ("index_staleness_steps", "retrieval_utility", "p_null"),
}


@dataclass(frozen=True)
class TrackedDataset:
    """A dataset that a run has read, for the purpose ``context``. MLflow stores 36 characters of the ``digest``."""

    name: str
    digest: str
    source: str
    context: str


@dataclass(frozen=True)
class TrackedRun:
    """The MLflow run of one variant, which all its stages find by ``key``.

    The key must change with all that changes the metrics (parameters, corpus, code): MLflow cannot replace a point.
    """

    key: str
    params: Mapping[str, Any] = field(default_factory=dict)  # sections of values, logged as ``section.key``
    tags: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    experiment: str = "realmops"
    parent: TrackedRun | None = None  # the run that this one is nested under, created if missing
    datasets: Sequence[TrackedDataset] = ()
    began: float | None = None  # Unix time in seconds, if not now

    def description(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.experiment,
            "params": flatten_params(self.params),
            "run_id": os.environ.get("MLFLOW_RUN_ID"),
            "above": os.environ.get(PARENT_RUN_VARIABLE),
        }


def flatten_params(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat |= flatten_params(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = str(value)[:_PARAM_LIMIT]
    return flat


class Tracker:
    """Context manager: a child process sends a stage's journal to MLflow at checkpoints and at the end.

    A thread would hold the GIL for seconds to import mlflow. Errors of tracking are never raised. With MLFLOW_RUN_ID,
    the stage logs to an existing run and leaves its status alone.
    """

    def __init__(self, journal: Journal, run: TrackedRun, folder: Path) -> None:
        self._entry, self._journal = SpoolEntry.of(folder, run.key, journal.stage), journal
        self._content = {"attempt": time.time(), **run.description()}
        self._metrics: Mapping[str, Any] = {}
        self._files: Mapping[str, Path] = {}
        self._lock: IO[bytes] | None = None
        self._sender: subprocess.Popen[bytes] | None = None
        self._exit_seconds = DATABASE_EXIT_SECONDS

    def __enter__(self) -> Self:
        with self._warn_on_errors():
            make_folder(self._entry.folder.parent)
            self._lock = open(self._entry.lock, "ab")
            try_lock(self._lock)
            self._entry.begin(self._content, self._journal.path)
            if not is_local(self._entry.folder.parent.parent):
                self._exit_seconds = SERVER_EXIT_SECONDS
            command, environment = python_process("realmops.tracking.sender", str(self._entry.folder))
            self._sender = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C stops the stage; the sender still sends its last points
                env=ONE_TRY | environment,
            )
            self._journal.on_checkpoint = self._send
        return self

    def _send(self) -> None:
        if self._sender is not None and self._sender.stdin is not None:
            with suppress(OSError):  # it has ended
                self._sender.stdin.write(b"\n")
                self._sender.stdin.flush()

    def finish(self, metrics: Mapping[str, Any], files: Mapping[str, Path] = {}) -> None:
        """Set the final metrics, logged without the stage's prefix, and the artifacts by name."""
        self._metrics, self._files = metrics, files

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the child to send the rest, unless it had an error; unsent points stay in the spool."""
        if self._lock is None:  # the folder cannot be written
            return
        with self._warn_on_errors(), self._lock:
            status, journal = "FAILED" if kind else "FINISHED", [self._journal.path]
            self._entry.end(self._content, status, time.time(), journal, self._metrics, self._files)
        if self._sender is not None:
            try:
                self._sender.communicate(timeout=self._exit_seconds)
            except subprocess.TimeoutExpired:
                self._sender.kill()
                self._sender.wait()
                warn_unsent(f"no answer within {self._exit_seconds:.0f} s", self._entry.journal)

    @contextmanager
    def _warn_on_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # tracking must never end the training
            warn_unsent(error_line(error), self._journal.path)


def tracking_folder(root: Path) -> Path:
    return root / WORK_FOLDER / "mlflow"


def start_tracking(
    stack: ExitStack,
    journal: Journal,
    name: str,
    options: Options,
    presets: Sequence[str],
    inputs: Mapping[str, Path],
    project: Path,
    root: Path,
) -> Tracker | None:
    if not options.tracking.enabled or name in UNTRACKED or not has_mlflow():
        return None
    corpus = inputs.get("snapshot")
    corpus_hash = read_json(corpus / "corpus" / MANIFEST)["corpus_hash"] if corpus else ""
    values = options.cache_key()  # all stages of a training share one run, wherever they build indexes
    params_hash = digest_of({k: v for k, v in values.items() if k != "tracking"})
    tags = provenance_tags(project, corpus_hash=corpus_hash, params_hash=params_hash)
    tags |= {"realmops.presets": ", ".join(presets)} if presets else {}
    identity = [params_hash, corpus_hash, tags.get("realmops.git_commit"), str(root.resolve())]
    retriever, reader, seed = options.finetune.retriever, options.finetune.reader, options.run.seed
    variant = "realm" if retriever == reader == "pretrain" else f"{retriever}+{reader}"
    run = TrackedRun(
        digest_of(identity),
        values,
        {**tags, "realmops.kind": "run", "realmops.variant": variant, "realmops.seed": str(seed)},
        experiment=options.tracking.experiment,
        datasets=tracked_datasets(options, corpus_hash, inputs),
        name=os.environ.get("DVC_EXP_NAME") or run_name(variant, seed, corpus_hash),
    )
    return stack.enter_context(Tracker(journal, run, tracking_folder(root)))


def has_mlflow() -> bool:
    return find_spec("mlflow") is not None


def run_name(variant: str, seed: int, corpus_hash: str) -> str:
    return " ".join([f"{variant} seed {seed}", *([f"corpus {corpus_hash[:8]}"] if corpus_hash else [])])


def tracked_datasets(options: Options, corpus_hash: str, inputs: Mapping[str, Path]) -> list[TrackedDataset]:
    corpus = [TrackedDataset("corpus", corpus_hash, options.snapshot.documents, "corpus")] if corpus_hash else []
    questions = []
    for split, context in (("train", "training"), ("dev", "validation"), ("test", "test")):
        if path := inputs.get(name := f"questions.{split}"):
            questions.append(TrackedDataset(name, sha256_file(path), options.get(name), context))
    return corpus + questions


def mlflow_artifacts(name: str, folder: Path) -> dict[str, Path]:
    return {file: folder / file for file in (PREDICTIONS, "report.html")} if name == "evaluate" else {}


def headline_metrics(name: str, metrics: Mapping[str, Any], retriever: str = "") -> dict[str, Any]:
    """Return the metrics of a stage that runs are compared by; ``retriever`` adds its recall@5 before fine-tuning."""
    headlines = {key: metrics[key] for key in HEADLINES.get(name, ()) if key in metrics}
    if name == "evaluate" and retriever and (recall := zero_shot_recall(metrics, retriever)) is not None:
        headlines["zero_shot_recall_at_5"] = recall
    return headlines


def provenance_tags(project: Path, *, corpus_hash: str, params_hash: str) -> dict[str, str]:
    tags = {"realmops.params_hash": params_hash}
    if corpus_hash:
        tags["realmops.corpus_hash"] = corpus_hash
    if commit := git_commit(project) or os.environ.get("REALMOPS_COMMIT"):
        tags |= {"realmops.git_commit": commit, "mlflow.source.git.commit": commit.split("-")[0]}
    if (project / "dvc.lock").is_file():
        tags["realmops.dvc_lock_hash"] = sha256_file(project / "dvc.lock")
    return tags


def git_commit(project: Path) -> str | None:
    """Return the checked-out commit, with ``-dirty`` if tracked files other than dvc.lock differ from it."""
    commit = git(project, "rev-parse", "HEAD")
    changes = git(project, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)dvc.lock")
    return f"{commit}-dirty" if commit and changes else commit
