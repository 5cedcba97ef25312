"""What a stage does for MLflow: it says what its run is, has a process send its journal, and waits for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from realmops.artifacts import MANIFEST, WORK, digest_of, make_folder, read_json, sha256_file, write_json
from realmops.config import Values, keyed
from realmops.evaluate.predictions import PREDICTIONS, read_predictions
from realmops.evaluate.recall import zero_shot_recall
from realmops.journal import Journal
from realmops.tracking.client import error_summary, python_process
from realmops.tracking.mlflow_views import table_json
from realmops.tracking.sender import ABOVE, OutboxEntry, warn_unsent

EXIT_TIMEOUT_SECONDS = 60.0  # the longest that a stage's end waits
ROWS_SHOWN = 1000  # of predictions as a table in MLflow; its UI loads all of them
UNTRACKED = ("sample", "snapshot", "tag")  # too short to wait for MLflow
_LONGEST_PARAM = 6000
HEADLINES = {
    "evaluate": ("em", "f1", "recall_at_5", "ece", "precision_at_30"),
    "pretrain": ("index_staleness_steps", "retrieval_utility", "p_null"),
}


@dataclass(frozen=True)
class TrackedDataset:
    """What a run has read. MLflow keeps 36 characters of the ``digest``; ``context`` is what it was read for."""

    name: str
    digest: str
    source: str
    context: str


@dataclass(frozen=True)
class TrackedRun:
    """The MLflow run of one variant. All its stages find it by ``key``.

    The key should change with everything that changes the numbers (parameters, corpus, code): MLflow cannot
    replace a point, so a stage that begins anew under the same key adds a second one at each step.
    """

    key: str
    params: Mapping[str, Any] = field(default_factory=dict)  # sections of values, logged as ``section.key``
    tags: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    experiment: str = "realmops"
    parent: TrackedRun | None = None  # the run that this one is shown under, made when it is not there
    datasets: Sequence[TrackedDataset] = ()
    began: float | None = None  # in seconds, where that is not now
    else_named: str | None = None  # a run that neither its maker nor DVC has named

    def entry_content(self) -> dict[str, Any]:
        """What the process that sends needs to know; MLflow's variables come first, DVC's names what has no name."""
        return {
            **asdict(self),
            "name": self.name or os.environ.get("DVC_EXP_NAME") or self.else_named,
            "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.experiment,
            "params": flatten_params(self.params),
            "run_id": os.environ.get("MLFLOW_RUN_ID"),
            "above": os.environ.get(ABOVE),
        }


def flatten_params(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested sections as ``section.key`` with the values as text, cut to MLflow's limit."""
    flat: dict[str, str] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat |= flatten_params(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = str(value)[:_LONGEST_PARAM]
    return flat


class Tracker:
    """Has a journal sent to MLflow by a child process for as long as a stage runs.

    A process and not a thread: importing mlflow and creating its database are many seconds of Python, in
    which a trainer of the same process would wait for the interpreter's lock at every tensor operation. The
    child sees the end of its parent as the end of its standard input, also when the parent was killed.

    ``folder`` holds the spool and, unless MLFLOW_TRACKING_URI is set, ``mlflow.db`` and its artifacts; ``interval`` is
    the seconds between two batches. MLFLOW_RUN_ID makes the stage use a run that somebody else made and ends.
    Nothing here raises because of tracking: trouble is one warning, and the points stay in the journal.
    """

    def __init__(self, journal: Path, stage: str, run: TrackedRun, folder: Path, *, interval: float = 5.0) -> None:
        self._entry = OutboxEntry.of(folder, run.key, stage)
        self._journal, self._interval = journal.absolute(), interval
        self._content = {"journal": str(self._journal), "stage": stage, **run.entry_content()}
        self._metrics: Mapping[str, Any] = {}
        self._files: Mapping[str, Path | bytes] = {}
        self._warned = False
        self._sender: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._only_warning():
            make_folder(self._entry.path.parent)
            write_json(self._entry.path, self._content)
            words = str(self._entry.path), str(self._interval)
            command, environment = python_process("realmops.tracking.sender", *words)
            self._sender = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C stops the stage; the sender still sends what the stage wrote
                env=environment,
            )
        return self

    def finish(self, metrics: Mapping[str, Any], files: Mapping[str, Path | bytes] | None = None) -> None:
        """Final figures, logged without the stage's prefix, and artifacts by name: where one is, or what is in it."""
        self._metrics, self._files = metrics, files or {}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the sender send what is left, one try when the server is away; what it could not send stays."""
        with self._only_warning():
            status = "FAILED" if kind else "FINISHED"
            self._entry.end(self._content, status, time.time(), [self._journal], self._metrics, self._files)
            if self._sender is not None:
                try:
                    self._sender.communicate(timeout=EXIT_TIMEOUT_SECONDS)
                except subprocess.TimeoutExpired:
                    self._sender.kill()
                    self._sender.wait()
                    warn_unsent(f"no answer within {EXIT_TIMEOUT_SECONDS:.0f} s", self._content["journal"])

    @contextmanager
    def _only_warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever goes wrong here, training goes on
            if not self._warned:
                warn_unsent(error_summary(error), self._content["journal"])
            self._warned = True


def keep_finished(
    run: TrackedRun,
    journals: Sequence[Path],
    metrics: Mapping[str, Any],
    files: Mapping[str, Path | bytes],
    ended: float,
    folder: Path,
) -> None:
    """Put a run that is over, since ``ended`` in seconds, into the spool, from where ``sync`` sends it."""
    content = {"stage": "whole", **run.entry_content()}
    OutboxEntry.of(folder, run.key, "whole").end(content, "FINISHED", ended, journals, metrics, files)


def tracking_folder(root: Path) -> Path:
    """Where the local MLflow database and unsent metrics of the runs under ``root`` lie."""
    return root / WORK / "mlflow"


def tracked(
    stack: ExitStack,
    journal: Journal,
    name: str,
    values: Values,
    presets: Sequence[str],
    inputs: Mapping[str, Path],
    project: Path,
    root: Path,
) -> Tracker | None:
    """The tracker of a stage's run, begun; None where nothing is tracked."""
    options = values["tracking"]
    if not options["enabled"] or name in UNTRACKED:
        return None
    if not _has_mlflow():
        return None
    corpus = inputs.get("snapshot")
    corpus_hash = read_json(corpus / "corpus" / MANIFEST)["corpus_hash"] if corpus else ""
    values = keyed(values)  # all stages of a training are one run, wherever each of them builds its indexes
    params_hash = digest_of({k: v for k, v in values.items() if k != "tracking"})
    tags = provenance_tags(project, corpus_hash=corpus_hash, params_hash=params_hash)
    tags |= {"realmops.presets": ", ".join(presets)} if presets else {}
    identity = [params_hash, corpus_hash, tags.get("realmops.git_commit"), str(root.absolute())]
    retriever, reader, seed = values["finetune"]["retriever"], values["finetune"]["reader"], values["run"]["seed"]
    variant = "realm" if retriever == reader == "pretrain" else f"{retriever}+{reader}"
    run = TrackedRun(
        digest_of(identity),
        values,
        {**tags, "realmops.kind": "run", "realmops.variant": variant, "realmops.seed": str(seed)},
        experiment=options["experiment"],
        datasets=datasets(values, corpus_hash, inputs),
        else_named=run_name(variant, seed, corpus_hash),
    )
    return stack.enter_context(Tracker(journal.path, name, run, tracking_folder(root)))


@cache
def _has_mlflow() -> bool:
    """Whether MLflow is installed; says once that it is not."""
    found = find_spec("mlflow") is not None
    if not found:
        advice = "pip install 'realmops[tracking]', or set tracking.enabled=false"
        told = f"warning: MLflow is not installed: figures are in metrics.jsonl of the stages alone; {advice}"
        print(told, file=sys.stderr, flush=True)
    return found


def run_name(variant: str, seed: int, corpus_hash: str) -> str:
    """What MLflow calls a run: variant, seed, and as much of the corpus's digest as its column of data sets shows."""
    return " ".join([f"{variant} seed {seed}", *([f"corpus {corpus_hash[:8]}"] if corpus_hash else [])])


def datasets(values: Values, corpus_hash: str, inputs: Mapping[str, Path]) -> list[TrackedDataset]:
    """What a stage with these inputs has read, under the names that MLflow shows: the corpus and question sets."""
    found = [TrackedDataset("corpus", corpus_hash, values["snapshot"]["documents"], "corpus")] if corpus_hash else []
    for split, context in (("train", "training"), ("dev", "validation"), ("test", "test")):
        if path := inputs.get(name := f"questions.{split}"):
            found.append(TrackedDataset(name, sha256_file(path), values["questions"][split], context))
    return found


def shown_files(name: str, folder: Path) -> dict[str, Path | bytes]:
    """What a stage left in its folder for people to look at in MLflow: of ``evaluate`` report and predictions."""
    if name != "evaluate":
        return {}
    rows = [prediction.shown_row() for prediction in read_predictions(folder / PREDICTIONS)[:ROWS_SHOWN]]
    found = {file: folder / file for file in (PREDICTIONS, "report.html")}
    return {**found, "predictions.table.json": table_json(rows)}


def headline(name: str, metrics: Mapping[str, Any], retriever: str = "") -> dict[str, Any]:
    """The figures of a stage that people compare runs by, under their plain names.

    With ``retriever``, the one that fine-tuning starts from, also its recall@5 before that, of the stage ``evaluate``.
    """
    found = {key: metrics[key] for key in HEADLINES.get(name, ()) if key in metrics}
    if name == "evaluate" and retriever and (recall := zero_shot_recall(metrics, retriever)) is not None:
        found["zero_shot_recall_at_5"] = recall
    return found


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
