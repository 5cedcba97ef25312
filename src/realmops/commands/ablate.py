"""Ablations: train variants of one run over several seeds, and compare them; shared stages run once.

Each stage runs in a folder named by its fingerprint (``store/STAGE-KEY``); a variant's folder has symlinks to its
stages. A lease lets one of concurrent calls run a stage while the others wait.
"""

import math
import os
import signal
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from realmops import artifacts, config
from realmops.artifacts import WORK_FOLDER
from realmops.commands.questions import write_cloze_questions
from realmops.commands.report import browser_command
from realmops.commands.run import run_stages
from realmops.config import preset_path
from realmops.config_yaml import read_yaml
from realmops.console import Console, end_on_sigterm
from realmops.evaluate import ablation as tables
from realmops.evaluate.ablation import REFERENCE, STALENESS, TITLES, Row, VariantOutcome
from realmops.evaluate.predictions import FIRST_HITS, PREDICTIONS, read_hits, read_predictions
from realmops.evaluate.recall import ZERO_SHOT
from realmops.files import Files
from realmops.inputs.resolve import local_cache
from realmops.journal import metric_series, read_journal
from realmops.options import Options
from realmops.progress import Report
from realmops.refresh.child_processes import end_with
from realmops.refresh.lease import acquire_lease
from realmops.stages import CLOZE_STEP, JOURNAL, METRICS, STAGES, Stage, fingerprint, option_files, planned_steps
from realmops.stages.option_inputs import CLOZE
from realmops.stages.run_inputs import take_inputs
from realmops.stages.runner import stage_inputs
from realmops.tracking import runs
from realmops.tracking.mlflow_views import view_url
from realmops.tracking.sender import SpoolEntry, sync

VARIANTS = "variants.yaml"
FIGURES = (*STALENESS, "hit_at_5_after", "retrieval_utility", "p_null", "marginal_gain", "collapsed", "refreshes")
MASKED = ("masked_accuracy", "masked_log_p", "masked_accuracy_without", "masked_log_p_without")  # reader metrics
WRITTEN = ("table.md", "table.csv", "report.html")
STORE = "store"  # folder of the trainings, which variants share
LOG, LAST_LINES = "log.txt", 5  # of a stage; its last lines are in the message of a failure


@dataclass(frozen=True, eq=False)
class Task:
    """One variant with one seed: its options, and ``view``, a folder with the layout of a run's root."""

    variant: str
    seed: int
    params: Path
    presets: Sequence[Path]
    options: Options
    view: Path

    def folder(self, stage: str) -> Path:
        return self.view / STAGES[stage].folder


@dataclass(frozen=True)
class Ablation:
    """The grid of variants and seeds to compare; ``presets`` and ``settings`` apply to every variant."""

    params: Path
    presets: Sequence[str]
    settings: Sequence[str]
    variants: Sequence[str]
    seeds: Sequence[int]
    out: Path

    def task(self, variant: str, seed: int) -> Task:
        names = [*self.presets, *([] if variant == REFERENCE else [f"ablations/{variant}"])]
        presets = [preset_path(name, self.params) for name in names]
        settings = [*self.settings, f"run.seed={seed}", f"sample.seed={seed}"]
        options = config.load_params(self.params, presets=presets, settings=settings)
        return Task(variant, seed, self.params, presets, options, run_folder(self.out, variant, seed))

    @cached_property
    def tasks(self) -> list[Task]:
        titles = read_variants(self.params)
        for name in self.variants:
            if name not in titles:
                raise ValueError(f"unknown variant {name!r}: {variants_file(self.params)} has {', '.join(titles)}")
        return [self.task(*pair) for pair in product(self.variants, self.seeds)]


def variants_file(params: Path) -> Path:
    own = params.parent / VARIANTS
    return own if own.is_file() else config.PACKAGE / VARIANTS


def read_variants(params: Path) -> dict[str, dict[str, str]]:
    """Read the ``TITLES`` of the variants by name, in table order. Raises ValueError for an invalid file."""
    path = variants_file(params)
    entries = read_yaml(path).get("variants", {})
    if REFERENCE not in entries:
        raise ValueError(f"{path}: variants has no {REFERENCE}, the reference of all comparisons; add it")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or set(entry) != set(TITLES):
            raise ValueError(f"{path}: variants.{name} is {entry!r}; expected the keys {', '.join(TITLES)}")
    return {str(name): {key: str(entry[key]) for key in TITLES} for name, entry in entries.items()}


def ablate(
    ablation: Ablation, *, jobs: int, report: Report, existing_only: bool = False
) -> tuple[list[Row], list[str]]:
    """Train and evaluate every variant with every seed; return the table's rows, and a message per failed task.

    With ``existing_only`` nothing is trained, and a missing stage is a failure.
    """
    foreign = [name for name in WRITTEN if (ablation.out / name).exists()]
    if foreign and not (ablation.out / STORE).is_dir():
        raise ValueError(f"{ablation.out} has a file {foreign[0]} and no ablation; set another --out, or move the file")
    failures = train(ablation, jobs=jobs, report=report, existing_only=existing_only)
    completed = {task: read_outcome(task) for task in ablation.tasks if task not in failures}
    outcomes = list(completed.values())
    rows: list[Row] = []
    if any(outcome.variant == REFERENCE for outcome in outcomes):
        rows = tables.table_rows(outcomes, read_variants(ablation.params))
        page = tables.render_report(rows, outcomes, len(ablation.seeds))
        texts = (tables.figure_table(rows).to_markdown(), tables.to_csv(rows), page)
        for name, text in zip(WRITTEN, texts, strict=True):
            artifacts.write_bytes(ablation.out / name, text.encode())
    if completed and ablation.tasks[0].options.tracking.enabled:
        if runs.has_mlflow():
            _track(ablation, completed, rows, report)
        else:
            report.warn(runs.WITHOUT_MLFLOW)
    return rows, list(failures.values())


def train(ablation: Ablation, *, jobs: int, report: Report, existing_only: bool = False) -> dict[Task, str]:
    """Train like :func:`ablate` without summary files: other processes may train other variants in the same folder."""
    tasks = ablation.tasks  # an invalid one raises before anything is written
    artifacts.make_folder(ablation.out)
    if jobs > 1 and not existing_only:
        _train_in_processes(ablation, jobs)
        existing_only = True
    failures = {task: _complete(task, ablation.out, report, existing_only) for task in tasks}
    return {task: failure for task, failure in failures.items() if failure}


def _train_in_processes(ablation: Ablation, jobs: int) -> None:
    from realmops.process import resolve_threads

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, resolve_threads("auto") // jobs)))
    context = get_context("spawn")
    shares = [range(first, len(ablation.tasks), jobs) for first in range(jobs)]
    processes = [context.Process(target=_train_share, args=(ablation, share, os.getpid())) for share in shares]
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: this process ends the others
    try:
        for process in processes:
            process.start()
        signal.signal(signal.SIGINT, usual)
        for process in processes:
            process.join()
    finally:
        signal.signal(signal.SIGINT, usual)
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()


def _train_share(ablation: Ablation, share: Sequence[int], parent: int) -> None:
    end_on_sigterm()
    end_with(parent)
    for number in share:
        _complete(ablation.tasks[number], ablation.out, Console())


def _complete(task: Task, out: Path, report: Report, existing_only: bool = False) -> str:
    options, _ = take_inputs(task.options, task.params.parent, out, local_cache(), report)
    for step in planned_steps(options):
        if step == CLOZE_STEP:
            write_cloze_questions(task.view, seed=options.run.seed)
            continue
        stage = STAGES[step]
        key = fingerprint(stage, options, stage_inputs(stage, options, task.params.parent, task.view))
        home = out / STORE / f"{stage.name}-{key[:16]}"
        if not (is_complete(home, stage) or existing_only):
            with acquire_lease(home / WORK_FOLDER / "claim.lock", report.log):
                if not is_complete(home, stage):
                    report.log(f"ablate: {task.variant}, seed {task.seed}: {stage.name}, with its log in {home / LOG}")
                    _run_stage(stage, replace(task, options=options), home)
        if not is_complete(home, stage):
            log = home / LOG
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
            name = f"{task.variant}, seed {task.seed}: the stage {stage.name}"
            return "\n  ".join([f"{name} is not complete in {home}", *lines[-LAST_LINES:]])
        replace_symlink(home / stage.folder, task.view / stage.folder)
    return ""


def _run_stage(stage: Stage, task: Task, home: Path) -> None:
    for folder in (CLOZE, *(STAGES[need].folder for need in stage.needs)):
        if (task.view / folder).exists():
            replace_symlink(task.view / folder, home / folder)
    options = task.options.replace({"tracking.enabled": False})
    presets, report = [*map(str, task.presets)], Console()
    run = partial(run_stages, presets=presets, project=task.params.parent, root=home, report=report, force=False)
    with open(home / LOG, "a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            for name, metrics in run((stage.name,), options):
                report.metrics(name, metrics)
        except Exception:  # it ends its own variant only
            traceback.print_exc()


def summary(rows: Sequence[Row], out: Path) -> Iterator[str]:
    if not rows:
        yield f"no table: the reference {REFERENCE} did not complete; metrics are in the runs in {out}"
        return
    yield tables.figure_table(rows).to_markdown().rstrip("\n")
    yield f"Report (HTML, offline): {out / 'report.html'}"
    if (runs.tracking_folder(out) / "mlflow.db").is_file():
        yield f"Compare runs in the browser: {browser_command(out)}"
        yield f"and open, with metrics as columns: {view_url('realmops-variants')}"


def mean_metrics(ablation: Ablation) -> dict[str, float]:
    return _means([artifacts.read_json(task.folder("evaluate") / METRICS) for task in ablation.tasks])


def _means(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    common = set.intersection(*map(set, records)) if records else set()
    columns = {name: [record[name] for record in records] for name in sorted(common)}
    numbers = {name: column for name, column in columns.items() if all(isinstance(v, int | float) for v in column)}
    return {name: float(np.mean(column)) for name, column in numbers.items()}


def is_complete(home: Path, stage: Stage) -> bool:
    """Return whether a stage has completed, by listing folders: NFS clients cache a failed lookup for some seconds."""
    names = (*Path(stage.folder).parts, artifacts.MANIFEST)
    return all(name in Files().listdir(home.joinpath(*names[:depth])) for depth, name in enumerate(names))


def run_folder(out: Path, variant: str, seed: int) -> Path:
    return out / variant / f"seed-{seed}"


def replace_symlink(target: Path, link: Path) -> None:
    """Create or replace a symlink atomically: other processes may read it or create the same one."""
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f".{link.name}.{uuid.uuid4().hex}")
    new.symlink_to(target.resolve())
    os.replace(new, link)


def read_outcome(task: Task) -> VariantOutcome:
    results, pretrained = task.folder("evaluate"), task.folder("pretrain")
    tuning = task.options.finetune
    retriever, reader, reads = tuning.retriever, tuning.reader, tuning.reads_passages
    hits = read_hits(results / FIRST_HITS, ZERO_SHOT.get(retriever, ""), 5) if reads else {}
    predictions = sorted(read_predictions(results / PREDICTIONS), key=lambda p: p.asked)
    trained = artifacts.read_json(pretrained / METRICS)
    records = read_journal(pretrained / JOURNAL) if (pretrained / JOURNAL).is_file() else []  # absent without a step
    names = [*(FIGURES if retriever == "pretrain" and reads else ()), *(MASKED if reader == "pretrain" else ())]
    return VariantOutcome(
        task.variant,
        task.seed,
        [(*prediction.asked, prediction.answer_rule) for prediction in predictions],
        np.array([math.nan if row.em is None else row.em for row in predictions], float),
        np.array([hits[prediction.question_id] if reads else math.nan for prediction in predictions], float),
        {name: trained[name] for name in names if name in trained},
        metric_series(records, "pretrain", "retrieval_utility"),
    )


def _track(ablation: Ablation, completed: Mapping[Task, VariantOutcome], rows: Sequence[Row], report: Report) -> None:
    folder = runs.tracking_folder(ablation.out)
    base = ablation.task(REFERENCE, ablation.seeds[0]).options
    journals = {
        task: [
            task.folder(name) / JOURNAL
            for name in STAGES
            if (name != "pretrain" or outcome.figures) and (task.folder(name) / JOURNAL).is_file()
        ]
        for task, outcome in completed.items()
    }
    times = {task: [line["time"] for path in paths for line in read_journal(path)] for task, paths in journals.items()}
    tags = {"realmops.kind": "ablation", "realmops.variants": ", ".join(ablation.variants)}
    parent = runs.TrackedRun(
        artifacts.digest_of(["ablation", str(ablation.out.absolute()), base.model_dump()]),
        tags=tags | ({"mlflow.note.content": tables.figure_table(rows).to_markdown()} if rows else {}),
        name="ablation",
        experiment=base.tracking.experiment,
        began=min(map(min, times.values())),
    )
    reference_figures = []
    for task, outcome in completed.items():
        results = task.folder("evaluate")
        figures = runs.headline_metrics("evaluate", artifacts.read_json(results / METRICS))
        if outcome.recall_at_5 is None:
            del figures["recall_at_5"]
        else:
            figures["zero_shot_recall_at_5"] = outcome.recall_at_5
        figures |= outcome.figures
        if task.variant == REFERENCE:
            reference_figures.append(figures)
        run, files = _child(parent, task, min(times[task])), runs.mlflow_artifacts("evaluate", results)
        entry = SpoolEntry.of(folder, run.key, "whole")
        entry.end(run.description(), "FINISHED", max(times[task]), journals[task], figures, files)
    written = {name: ablation.out / name for name in WRITTEN} if rows else {}
    entry, ended = SpoolEntry.of(folder, parent.key, "whole"), max(map(max, times.values()))
    entry.end(parent.description(), "FINISHED", ended, (), _means(reference_figures), written)
    for problem in sync(folder)[1]:
        report.warn(f"MLflow: {problem}; run 'realmops sync --root {ablation.out}' to send the rest")


def _child(parent: runs.TrackedRun, task: Task, began: float) -> runs.TrackedRun:
    project = task.params.parent
    corpus = artifacts.read_json(task.folder("snapshot") / "corpus" / artifacts.MANIFEST)["corpus_hash"]
    params_hash = artifacts.digest_of(task.options.model_dump(exclude={"tracking"}))
    tags = runs.provenance_tags(project, corpus_hash=corpus, params_hash=params_hash)
    answers = artifacts.read_json(task.folder("evaluate") / artifacts.MANIFEST)["files"][PREDICTIONS]
    read = option_files(STAGES["evaluate"], task.options, project, task.view)
    return runs.TrackedRun(
        # The git commit is not part of the key: a call after a new commit must not log the same training twice.
        artifacts.digest_of([parent.key, task.variant, task.seed, params_hash, corpus, answers]),
        {"ablation": {"variant": task.variant}, **task.options.model_dump()},
        tags | {"realmops.kind": "variant", "realmops.variant": task.variant, "realmops.seed": str(task.seed)},
        name=runs.run_name(task.variant, task.seed, corpus),
        experiment=parent.experiment,
        parent=parent,
        datasets=runs.tracked_datasets(task.options, corpus, read),
        began=began,
    )
