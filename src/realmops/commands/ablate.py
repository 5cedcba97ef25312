"""Ablations: variants of one run over seeds, side by side, with everything that they share made once.

Each stage of each variant runs in a folder named by the stage's fingerprint (``store/STAGE-KEY``), through the same
command as people use; a variant's own folder (``NAME/seed-N``) holds links to what it is made of. So two variants
that differ in fine-tuning share their pre-training, and a call after a kill goes on from the checkpoints. Calls beside
each other, as pods on one volume, share as well: of two that want the same stage, one waits for the other.
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from realmops import artifacts, config
from realmops.artifacts import WORK
from realmops.commands.report import browser_command
from realmops.config import CLOSED_BOOK, preset_path
from realmops.evaluate.ablation import (
    STALENESS,
    Row,
    Variant,
    VariantOutcome,
    as_csv,
    as_markdown,
    page,
    staleness_chart,
    table_rows,
    utility_chart,
)
from realmops.evaluate.compare import correct
from realmops.evaluate.predictions import FIRST_HITS, PREDICTIONS, read_hits, read_predictions
from realmops.evaluate.retrieval import ZERO_SHOT
from realmops.index.files import Files
from realmops.index.lease import Claim, claimed
from realmops.journal import read_journal, series_of
from realmops.stages import JOURNAL, METRICS, STAGES, Report, Stage, external_files, fingerprint
from realmops.stages.runner import inputs_of
from realmops.tracking.mlflow_views import view_address
from realmops.tracking.run import TrackedRun, provenance_tags
from realmops.tracking.sender import sync
from realmops.tracking.stage_runs import datasets, headline, run_name, shown_files, tracking_folder
from realmops.tracking.tracker import keep_finished

REFERENCE = "realm"
VARIANTS = Path("pipelines/ablations/params.yaml")
MASKING = (REFERENCE, "random_token", "random_span", "matched_span")
STALE = (REFERENCE, "stale_3x", "stale_10x", "stale_30x")
FIGURES = (*STALENESS, "hit_at_5_after", "retrieval_utility", "p_null", "marginal_gain", "collapsed", "refreshes")
MASKED = ("masked_accuracy", "masked_log_p", "masked_accuracy_without", "masked_log_p_without")  # of the reader
OUTCOMES = "outcomes"
WRITTEN = ("table.md", "table.csv", "report.html")
LAST_LINES = 5
LOST_SECONDS = 1.0  # between two looks at the claim
Values = dict[str, dict[str, Any]]
Task = tuple[str, int]  # variant and seed


@dataclass(frozen=True)
class Ablation:
    """What is compared: ``presets`` and ``settings`` hold for every variant."""

    params: Path
    presets: Sequence[str]
    settings: Sequence[str]
    variants: Sequence[str]
    seeds: Sequence[int]
    out: Path

    @property
    def project(self) -> Path:
        """Where relative file names of the params start."""
        return self.params.parent

    @property
    def tasks(self) -> list[Task]:
        """Every variant with every seed."""
        return list(product(self.variants, self.seeds))

    def overlay(self, variant: str) -> list[Path]:
        """The presets of a variant; the reference has none of its own."""
        names = [*self.presets, *([] if variant == REFERENCE else [f"ablations/{variant}"])]
        return [preset_path(name, self.params) for name in names]

    def values(self, variant: str, seed: int) -> Values:
        """All sections of a variant with one seed, which makes its world and its training."""
        return config.load(self.params, presets=self.overlay(variant), settings=self.seeded(seed))

    def seeded(self, seed: int) -> list[str]:
        """The settings with one seed."""
        return [*self.settings, f"run.seed={seed}", f"sample.seed={seed}"]


def variants_of(params: Path) -> dict[str, Variant]:
    """The variants by name, in the order of the table; ValueError for a file without the reference."""
    path = params.parent / VARIANTS
    found = config.read_yaml(path).get("variants", {})
    if REFERENCE not in found:
        raise ValueError(f"{path}: variants lacks {REFERENCE}, to which all others are compared")
    fields = {field.name for field in dataclasses.fields(Variant)}
    for name, entry in found.items():
        if not isinstance(entry, dict) or set(entry) != fields:
            raise ValueError(f"{path}: variants.{name} is {entry!r}; wanted are the keys {', '.join(sorted(fields))}")
    return {str(name): Variant(**{key: str(text) for key, text in entry.items()}) for name, entry in found.items()}


def ablate(ablation: Ablation, *, jobs: int, report: Report) -> tuple[list[Row], list[str]]:
    """Train and evaluate every variant with every seed, and write table and page.

    Returns the table's rows, and what went wrong: a stage that fails ends its variant, all others go on. Raises
    ValueError for a variant that is not known.
    """
    failures = train(ablation, jobs=jobs, report=report)
    return _tabulate(ablation, failures, report), list(failures.values())


def tabulate(ablation: Ablation, *, report: Report) -> tuple[list[Row], list[str]]:
    """As :func:`ablate` over what has been trained: nothing is trained, and what is missing went wrong."""
    missing = train(ablation, jobs=1, report=report, only_look=True)
    return _tabulate(ablation, missing, report), list(missing.values())


def train(ablation: Ablation, *, jobs: int, report: Report, only_look: bool = False) -> dict[Task, str]:
    """As :func:`ablate` without table and page; others may train other variants into the same folder meanwhile."""
    known = variants_of(ablation.params)
    for name in ablation.variants:
        if name not in known:
            raise ValueError(f"variant {name!r}: {VARIANTS} has {', '.join(known)}")
    for task in ablation.tasks:
        ablation.values(*task)  # what is wrong with a preset is said before anything is trained
    artifacts.make_folder(ablation.out)
    return _Runner(ablation, report, only_look).run_all(jobs)


def summary(rows: Sequence[Row], out: Path) -> Iterator[str]:
    """The table, or that there is none, and where to look next."""
    if not rows:
        yield f"No table: {REFERENCE} is not among what ended well; figures are in {out / OUTCOMES}"
        return
    yield as_markdown(rows).rstrip("\n")
    yield f"The page, which opens without a network: {out / 'report.html'}"
    if (tracking_folder(out) / "mlflow.db").is_file():
        yield f"Compare runs in the browser: {browser_command(out)}"
        yield f"and there, with their figures: {view_address('realmops-variants')}"


def means_of(ablation: Ablation) -> dict[str, float]:
    """What ``evaluate`` measured of all that was trained, under its names, as means of what all have."""
    found = [
        artifacts.read_json(folder_of(ablation.out, *task) / STAGES["evaluate"].folder / METRICS)
        for task in ablation.tasks
    ]
    first, *others = ({name for name, value in one.items() if isinstance(value, int | float)} for one in found)
    return {name: sum(one[name] for one in found) / len(found) for name in sorted(first.intersection(*others))}


def _tabulate(ablation: Ablation, failures: Mapping[Task, str], report: Report) -> list[Row]:
    """Write the outcomes of the tasks that did not fail, and table, page and MLflow runs over them."""
    known = variants_of(ablation.params)
    done = [task for task in ablation.tasks if task not in failures]
    outcomes = [outcome_of(ablation, *task) for task in done]
    for name in {name for name, _ in done}:
        found = [_as_json(outcome) for outcome in outcomes if outcome.variant == name]
        (ablation.out / OUTCOMES).mkdir(exist_ok=True)
        artifacts.write_json(ablation.out / OUTCOMES / f"{name}.json", found)
    rows: list[Row] = []
    if any(o.variant == REFERENCE for o in outcomes):
        rows = table_rows(outcomes, {n: v for n, v in known.items() if n in ablation.variants}, reference=REFERENCE)
        _write(ablation, rows, outcomes, known)
    if outcomes and ablation.values(*ablation.tasks[0])["tracking"]["enabled"]:
        _track(ablation, outcomes, rows, report)
    return rows


class _Runner:
    """Runs the stages of tasks in processes of their own, each fingerprint once, or only looks what is done."""

    def __init__(self, ablation: Ablation, report: Report, only_look: bool) -> None:
        self._ablation = ablation
        self._only_look = only_look
        self._say = report.say
        self._advance = report.progress("stages", len(ablation.tasks) * len(STAGES))
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._guard = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()

    def run_all(self, jobs: int) -> dict[Task, str]:
        """TrackedRun all tasks, so many at a time; what went wrong, by task."""
        failures = {}
        with ThreadPoolExecutor(jobs) as pool:
            futures: dict[Task, Future[None]] = {task: pool.submit(self._run, *task) for task in self._ablation.tasks}
            try:
                for task, future in futures.items():
                    try:
                        future.result()
                    except _StageFailed as failure:
                        failures[task] = str(failure)
            except BaseException:
                self._stop()
                pool.shutdown(cancel_futures=True)
                raise
        return failures

    def _stop(self) -> None:
        with self._guard:
            self._stopped.set()
            for process in self._processes:
                process.terminate()

    def _run(self, variant: str, seed: int) -> None:
        values = self._ablation.values(variant, seed)
        view = folder_of(self._ablation.out, variant, seed)
        for stage in STAGES.values():
            key = fingerprint(stage, values, inputs_of(stage, values, self._ablation.project, view))
            home = self._ablation.out / "store" / f"{stage.name}-{key[:16]}"
            with self._guard:
                lock = self._locks[home.name]
            with lock:
                self._make(stage, variant, seed, home, view)
            put_link(home / stage.folder, view / stage.folder)
            with self._guard:
                self._advance(1)

    def _make(self, stage: Stage, variant: str, seed: int, home: Path, view: Path) -> None:
        """See to it that a stage is done: by this process, or by another one that works on it."""
        if is_made(home, stage):
            return
        if self._only_look:
            raise _StageFailed(f"{variant}, seed {seed}: the stage {stage.name} has not been done in {home}")
        with claimed(home / WORK / "claim", self._say, self._stopped) as claim:
            if not is_made(home, stage):
                self._run_stage(stage, variant, seed, home, view, claim)

    def _run_stage(self, stage: Stage, variant: str, seed: int, home: Path, view: Path, claim: Claim) -> None:
        for need in stage.needs:
            if (view / STAGES[need].folder).exists():
                put_link((view / STAGES[need].folder).resolve(), home / STAGES[need].folder)
        ablation = self._ablation
        command = [sys.executable, "-m", "realmops", "run", stage.name, "--params", ablation.params, "--root", home]
        command += ["--watch-parent", os.getpid()]
        for preset in ablation.overlay(variant):
            command += ["--preset", preset]
        for setting in [*ablation.seeded(seed), "tracking.enabled=false"]:
            command += ["--set", setting]
        log = home / "log.txt"
        with open(log, "ab") as output:
            with self._guard:
                if self._stopped.is_set():
                    raise _StageFailed("stopped")
                process = subprocess.Popen([str(word) for word in command], stdout=output, stderr=output)
                self._processes.add(process)
            status = _status(process, claim)
            with self._guard:
                self._processes.discard(process)
        if status:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            found = f"{variant}, seed {seed}: the stage {stage.name} ended with {status}; {log} ends"
            raise _StageFailed("\n  ".join([found, *last]))


def _status(process: subprocess.Popen[bytes], claim: Claim) -> int:
    """Wait for a stage's exit status; it is told to end when another process has taken its claim over."""
    while True:
        try:
            return process.wait(LOST_SECONDS)
        except subprocess.TimeoutExpired:
            if claim.lost:
                process.terminate()


def is_made(home: Path, stage: Stage) -> bool:
    """Whether a stage is done, seen by listing folders: NFS hides for a while a name that was looked for too early."""
    folder = home
    for name in (*Path(stage.folder).parts, artifacts.MANIFEST):
        if name not in Files().listdir(folder):
            return False
        folder /= name
    return True


class _StageFailed(Exception):
    """A stage's process ended with an error."""


def folder_of(out: Path, variant: str, seed: int) -> Path:
    """The folder of one variant with one seed; it looks like the root of any other run."""
    return out / variant / f"seed-{seed}"


def put_link(target: Path, link: Path) -> None:
    """Put a link in its place whole: others may look at it or make the same one."""
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f".{link.name}.{uuid.uuid4().hex}")
    new.symlink_to(target.resolve())
    os.replace(new, link)


def outcome_of(ablation: Ablation, variant: str, seed: int) -> VariantOutcome:
    """What one variant reached with one seed."""
    view = folder_of(ablation.out, variant, seed)
    results = view / STAGES["evaluate"].folder
    trained = artifacts.read_json(view / STAGES["pretrain"].folder / METRICS)
    tuned = ablation.values(variant, seed)["finetune"]
    retriever, reader = tuned["retriever"], tuned["reader"]
    read = reader not in CLOSED_BOOK
    names = [*(FIGURES if retriever == "pretrain" and read else ()), *(MASKED if reader == "pretrain" else ())]
    predictions = sorted(read_predictions(results / PREDICTIONS), key=lambda p: p.question_id)
    hit = None
    if read:
        hits = read_hits(results / FIRST_HITS, ZERO_SHOT.get(retriever, ""), 5)
        hit = np.array([hits[prediction.question_id] for prediction in predictions])
    records = read_journal(view / STAGES["pretrain"].folder / JOURNAL)
    return VariantOutcome(
        variant,
        seed,
        correct(predictions),
        hit,
        {name: trained[name] for name in names if name in trained},
        series_of(records, "pretrain", "retrieval_utility"),
    )


def _as_json(outcome: VariantOutcome) -> dict[str, Any]:
    em = float(outcome.correct.mean())
    recall = None if math.isnan(outcome.recall_at_5) else outcome.recall_at_5
    return {"seed": outcome.seed, "em": em, "recall_at_5": recall, **outcome.figures}


def _write(
    ablation: Ablation, rows: Sequence[Row], outcomes: Sequence[VariantOutcome], known: Mapping[str, Variant]
) -> None:
    note = (
        f"{len(ablation.seeds)} seeds, each its own world and its own training. Differences are to "
        f"{known[REFERENCE].title}, by a paired bootstrap over the questions of all seeds."
    )
    charts = [chart for chart in (utility_chart(outcomes, known, MASKING), staleness_chart(outcomes, STALE)) if chart]
    for name, text in zip(WRITTEN, (as_markdown(rows), as_csv(rows), page(rows, charts, note)), strict=True):
        artifacts.write_bytes(ablation.out / name, text.encode())


def _track(ablation: Ablation, outcomes: Sequence[VariantOutcome], rows: Sequence[Row], report: Report) -> None:
    """One MLflow run for the ablation, and under it one for each variant and seed.

    The figures of the ablation's own run are those of the reference, as means over seeds.
    """
    folder = tracking_folder(ablation.out)
    base = ablation.values(REFERENCE, ablation.seeds[0])
    times = [_times(folder_of(ablation.out, o.variant, o.seed), o) for o in outcomes]
    tags = {"realmops.kind": "ablation", "realmops.variants": ", ".join(ablation.variants)}
    parent = TrackedRun(
        artifacts.digest_of(["ablation", str(ablation.out.absolute()), base]),
        tags=tags | ({"mlflow.note.content": as_markdown(rows)} if rows else {}),
        name="ablation",
        experiment=base["tracking"]["experiment"],
        began=min(began for began, _ in times),
    )
    of_reference = []
    for outcome, (began, ended) in zip(outcomes, times, strict=True):
        view = folder_of(ablation.out, outcome.variant, outcome.seed)
        figures = headline("evaluate", artifacts.read_json(view / STAGES["evaluate"].folder / METRICS))
        if math.isnan(outcome.recall_at_5):
            del figures["recall_at_5"]
        figures |= {"zero_shot_recall_at_5": outcome.recall_at_5, **outcome.figures}
        if outcome.variant == REFERENCE:
            of_reference.append(figures)
        run = _child(ablation, parent, outcome.variant, outcome.seed, began)
        files = shown_files("evaluate", view / STAGES["evaluate"].folder)
        keep_finished(run, _journals(view, outcome), figures, files, ended, folder)
    common = set.intersection(*map(set, of_reference)) if of_reference else set()
    means = {name: float(np.mean([figures[name] for figures in of_reference])) for name in sorted(common)}
    written = {name: ablation.out / name for name in WRITTEN} if rows else {}
    keep_finished(parent, [], means, written, max(ended for _, ended in times), folder)
    sent = sync(folder)
    for problem in sent.problems:
        report.warn(f"MLflow: {problem}; realmops sync --root {ablation.out} sends what is left")


def _child(ablation: Ablation, parent: TrackedRun, variant: str, seed: int, began: float) -> TrackedRun:
    """The MLflow run of one variant with one seed."""
    view = folder_of(ablation.out, variant, seed)
    values = ablation.values(variant, seed)
    corpus = artifacts.read_json(view / STAGES["snapshot"].folder / "corpus" / artifacts.MANIFEST)["corpus_hash"]
    params_hash = artifacts.digest_of({k: v for k, v in values.items() if k != "tracking"})
    tags = provenance_tags(ablation.project, corpus_hash=corpus, params_hash=params_hash)
    answers = artifacts.read_json(view / STAGES["evaluate"].folder / artifacts.MANIFEST)["files"][PREDICTIONS]
    return TrackedRun(
        # not of the commit: a later call after another commit shows the same training, and must not show it twice
        artifacts.digest_of([parent.key, variant, seed, params_hash, corpus, answers]),
        {"ablation": {"variant": variant}, **values},
        tags | {"realmops.kind": "variant", "realmops.variant": variant, "realmops.seed": str(seed)},
        name=run_name(variant, seed, corpus),
        experiment=parent.experiment,
        parent=parent,
        datasets=datasets(values, corpus, external_files(STAGES["evaluate"], values, ablation.project, view)),
        began=began,
    )


def _journals(view: Path, outcome: VariantOutcome) -> list[Path]:
    """The journals of a variant, without that of a pre-training that it does not use."""
    names = [name for name in STAGES if name != "pretrain" or outcome.figures]
    return [path for name in names if (path := view / STAGES[name].folder / JOURNAL).is_file()]


def _times(view: Path, outcome: VariantOutcome) -> tuple[float, float]:
    """When the first step was taken and when the last, in seconds."""
    times = [record["time"] for path in _journals(view, outcome) for record in read_journal(path)]
    return min(times), max(times)
