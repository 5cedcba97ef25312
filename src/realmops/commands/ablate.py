"""Ablations: variants of one run over seeds, side by side, with everything that they share made once.

Each stage of each variant runs in a folder named by the stage's fingerprint (``store/STAGE-KEY``), through the same
command as people use; a variant's own folder (``NAME/seed-N``) holds links to what it is made of. So two variants
that differ in fine-tuning share their pre-training, and a call after a kill goes on from the checkpoints. Calls beside
each other, as pods on one volume, share as well: of two that want the same stage, one waits for the other.
"""

import math
import os
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from realmops import artifacts, config
from realmops.artifacts import WORK
from realmops.commands.report import browser_command
from realmops.config import CLOSED_BOOK, Values, preset_path
from realmops.config_yaml import read_yaml
from realmops.evaluate import ablation as tables
from realmops.evaluate.ablation import REFERENCE, STALENESS, TITLES, Row, VariantOutcome
from realmops.evaluate.predictions import FIRST_HITS, PREDICTIONS, read_hits, read_predictions
from realmops.evaluate.recall import ZERO_SHOT
from realmops.journal import read_journal, series_of
from realmops.refresh.child_processes import Apart, fate, run_command
from realmops.refresh.lease import claimed
from realmops.refresh.shared_files import Files
from realmops.stages import JOURNAL, METRICS, STAGES, Report, Stage, external_files, fingerprint
from realmops.stages.runner import inputs_of
from realmops.text.languages import ENGLISH
from realmops.tracking import runs
from realmops.tracking.mlflow_views import view_address
from realmops.tracking.sender import sync

VARIANTS = "variants.yaml"
FIGURES = (*STALENESS, "hit_at_5_after", "retrieval_utility", "p_null", "marginal_gain", "collapsed", "refreshes")
MASKED = ("masked_accuracy", "masked_log_p", "masked_accuracy_without", "masked_log_p_without")  # of the reader
OUTCOMES = "outcomes"
WRITTEN = ("table.md", "table.csv", "report.html")
LAST_LINES = 5
LOOK_SECONDS = 0.1  # between two looks at a stage's process and its claim


@dataclass(frozen=True, eq=False)
class Task:
    """One variant with one seed: its options, and its folder, which looks like the root of any other run."""

    variant: str
    seed: int
    params: Path
    presets: Sequence[Path]
    settings: Sequence[str]
    values: Values
    view: Path

    def folder(self, stage: str) -> Path:
        return self.view / STAGES[stage].folder


@dataclass(frozen=True)
class Ablation:
    """What is compared: ``presets`` and ``settings`` hold for every variant."""

    params: Path
    presets: Sequence[str]
    settings: Sequence[str]
    variants: Sequence[str]
    seeds: Sequence[int]
    out: Path

    def task(self, variant: str, seed: int) -> Task:
        """A variant by its preset, the reference has none, with a seed, which makes its world and its training."""
        names = [*self.presets, *([] if variant == REFERENCE else [f"ablations/{variant}"])]
        presets = [preset_path(name, self.params) for name in names]
        settings = [*self.settings, f"run.seed={seed}", f"sample.seed={seed}"]
        values = config.load(self.params, presets=presets, settings=settings)
        return Task(variant, seed, self.params, presets, settings, values, folder_of(self.out, variant, seed))

    @cached_property
    def tasks(self) -> list[Task]:
        """Every variant with every seed; ValueError for what is no variant, and for what is wrong with a preset."""
        known = variants_of(self.params)
        for name in self.variants:
            if name not in known:
                raise ValueError(f"variant {name!r}: {variants_file(self.params)} has {', '.join(known)}")
        return [self.task(*both) for both in product(self.variants, self.seeds)]


def variants_file(params: Path) -> Path:
    """A project's own variants, beside its params file, else those of the package."""
    own = params.parent / VARIANTS
    return own if own.is_file() else config.PACKAGE / VARIANTS


def variants_of(params: Path) -> dict[str, dict[str, str]]:
    """``TITLES`` of the variants by name, in the order of the table; ValueError for a file without the reference."""
    path = variants_file(params)
    found = read_yaml(path).get("variants", {})
    if REFERENCE not in found:
        raise ValueError(f"{path}: variants lacks {REFERENCE}, to which all others are compared")
    for name, entry in found.items():
        if not isinstance(entry, dict) or set(entry) != set(TITLES):
            raise ValueError(f"{path}: variants.{name} is {entry!r}; wanted are the keys {', '.join(TITLES)}")
    return {str(name): {key: str(entry[key]) for key in TITLES} for name, entry in found.items()}


def ablate(ablation: Ablation, *, jobs: int, report: Report, only_look: bool = False) -> tuple[list[Row], list[str]]:
    """Train and evaluate every variant with every seed, and write outcomes, table, page and MLflow runs.

    Returns the table's rows, and what went wrong: a stage that fails ends its variant, all others go on. With
    ``only_look`` nothing is trained, and what is missing went wrong. Raises ValueError for a variant that is not known.
    """
    failures = train(ablation, jobs=jobs, report=report, only_look=only_look)
    done = {task: outcome_of(task) for task in ablation.tasks if task not in failures}
    outcomes = list(done.values())
    for name in {outcome.variant for outcome in outcomes}:
        found = [
            {"seed": one.seed, "em": float(one.correct.mean()), "recall_at_5": one.recall_at_5, **one.figures}
            for one in outcomes
            if one.variant == name
        ]
        artifacts.write_json(ablation.out / OUTCOMES / f"{name}.json", found)
    rows: list[Row] = []
    if any(outcome.variant == REFERENCE for outcome in outcomes):
        rows = tables.table_rows(outcomes, variants_of(ablation.params))
        page = tables.page(rows, outcomes, len(ablation.seeds))
        texts = (tables.table_of_rows(rows).as_markdown(), tables.as_csv(rows), page)
        for name, text in zip(WRITTEN, texts, strict=True):
            artifacts.write_bytes(ablation.out / name, text.encode())
    if done and ablation.tasks[0].values["tracking"]["enabled"]:
        _track(ablation, done, rows, report)
    return rows, list(failures.values())


def train(ablation: Ablation, *, jobs: int, report: Report, only_look: bool = False) -> dict[Task, str]:
    """As :func:`ablate`, but writes nothing about all of them: others may train other variants there meanwhile."""
    locks: dict[Path, threading.Lock] = {}
    counting, stopped = threading.Lock(), threading.Event()
    advance = report.progress("stages", len(ablation.tasks) * len(STAGES))
    artifacts.make_folder(ablation.out / OUTCOMES)

    def run(task: Task) -> str:
        """Have all stages of a task in its folder, each fingerprint made once; what went wrong, if anything did."""
        for stage in STAGES.values():
            key = fingerprint(stage, task.values, inputs_of(stage, task.values, task.params.parent, task.view))
            home = ablation.out / "store" / f"{stage.name}-{key[:16]}"
            failure = ""
            with locks.setdefault(home, threading.Lock()):
                if not is_made(home, stage):
                    missing = f"has not been done in {home}"
                    failure = missing if only_look else _make(stage, task, home, report, stopped)
            if failure:
                return f"{task.variant}, seed {task.seed}: the stage {stage.name} {failure}"
            put_link(home / stage.folder, task.view / stage.folder)
            with counting:
                advance(1)
        return ""

    with ThreadPoolExecutor(jobs) as pool:
        try:
            failures = list(pool.map(run, ablation.tasks))
        finally:
            stopped.set()
    return {task: failure for task, failure in zip(ablation.tasks, failures, strict=True) if failure}


def _make(stage: Stage, task: Task, home: Path, report: Report, stopped: threading.Event) -> str:
    """Run a stage in a process of its own, or wait for another one that does; what went wrong, if anything did."""
    with claimed(home / WORK / "claim", report.say, stopped) as claim:
        if is_made(home, stage):
            return ""
        for need in stage.needs:
            if task.folder(need).exists():
                put_link(task.folder(need), home / STAGES[need].folder)
        words = ["run", stage.name, f"--params={task.params}", f"--root={home}"]
        words += [f"--preset={preset}" for preset in task.presets]
        words += [f"--set={setting}" for setting in (*task.settings, "tracking.enabled=false")]
        log = home / "log.txt"
        process = Apart("realmops.commands.run", partial(run_command, words, log))
        while not (process.wait(LOOK_SECONDS) or claim.lost or stopped.is_set()):
            pass
        if not (status := process.end()):
            return ""
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return "\n  ".join([f"{fate(status)}; {log} ends", *last])


def summary(rows: Sequence[Row], out: Path) -> Iterator[str]:
    """The table, or that there is none, and where to look next."""
    if not rows:
        yield f"No table: {REFERENCE} is not among what ended well; figures are in {out / OUTCOMES}"
        return
    yield tables.table_of_rows(rows).as_markdown().rstrip("\n")
    yield f"The page, which opens without a network: {out / 'report.html'}"
    if (runs.tracking_folder(out) / "mlflow.db").is_file():
        yield f"Compare runs in the browser: {browser_command(out)}"
        yield f"and there, with their figures: {view_address('realmops-variants')}"


def means_of(ablation: Ablation) -> dict[str, float]:
    """What ``evaluate`` measured of all that was trained, under its names, as means of what all have."""
    return _means([artifacts.read_json(task.folder("evaluate") / METRICS) for task in ablation.tasks])


def _means(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the numbers that all have."""
    common = set.intersection(*map(set, found)) if found else set()
    columns = {name: [one[name] for one in found] for name in sorted(common)}
    numbers = {name: of_all for name, of_all in columns.items() if all(isinstance(v, int | float) for v in of_all)}
    return {name: float(np.mean(of_all)) for name, of_all in numbers.items()}


def is_made(home: Path, stage: Stage) -> bool:
    """Whether a stage is done, seen by listing folders: NFS hides for a while a name that was looked for too early."""
    names = (*Path(stage.folder).parts, artifacts.MANIFEST)
    return all(name in Files().listdir(home.joinpath(*names[:depth])) for depth, name in enumerate(names))


def folder_of(out: Path, variant: str, seed: int) -> Path:
    """Return the folder of a variant's run in the folder of an ablation."""
    return out / variant / f"seed-{seed}"


def put_link(target: Path, link: Path) -> None:
    """Put a link in its place whole: others may look at it or make the same one."""
    link.parent.mkdir(parents=True, exist_ok=True)
    new = link.with_name(f".{link.name}.{uuid.uuid4().hex}")
    new.symlink_to(target.resolve())
    os.replace(new, link)


def outcome_of(task: Task) -> VariantOutcome:
    results, pretrained = task.folder("evaluate"), task.folder("pretrain")
    retriever, reader = task.values["finetune"]["retriever"], task.values["finetune"]["reader"]
    reads = reader not in CLOSED_BOOK
    hits = read_hits(results / FIRST_HITS, ZERO_SHOT.get(retriever, ""), 5) if reads else {}
    predictions = sorted(read_predictions(results / PREDICTIONS), key=lambda p: p.asked)
    trained = artifacts.read_json(pretrained / METRICS)
    names = [*(FIGURES if retriever == "pretrain" and reads else ()), *(MASKED if reader == "pretrain" else ())]
    return VariantOutcome(
        task.variant,
        task.seed,
        [(*prediction.asked, prediction.answer_rule or ENGLISH) for prediction in predictions],
        np.array([prediction.em for prediction in predictions], float),
        np.array([hits[prediction.question_id] if reads else math.nan for prediction in predictions], float),
        {name: trained[name] for name in names if name in trained},
        series_of(read_journal(pretrained / JOURNAL), "pretrain", "retrieval_utility"),
    )


def _track(ablation: Ablation, done: Mapping[Task, VariantOutcome], rows: Sequence[Row], report: Report) -> None:
    """One MLflow run for the ablation, and under it one for each variant and seed.

    The figures of the ablation's own run are those of the reference, as means over seeds.
    """
    folder = runs.tracking_folder(ablation.out)
    base = ablation.task(REFERENCE, ablation.seeds[0]).values
    journals = {task: _journals(task, outcome) for task, outcome in done.items()}
    times = {task: [line["time"] for path in paths for line in read_journal(path)] for task, paths in journals.items()}
    tags = {"realmops.kind": "ablation", "realmops.variants": ", ".join(ablation.variants)}
    parent = runs.TrackedRun(
        artifacts.digest_of(["ablation", str(ablation.out.absolute()), base]),
        tags=tags | ({"mlflow.note.content": tables.table_of_rows(rows).as_markdown()} if rows else {}),
        name="ablation",
        experiment=base["tracking"]["experiment"],
        began=min(map(min, times.values())),
    )
    of_reference = []
    for task, outcome in done.items():
        results = task.folder("evaluate")
        figures = runs.headline("evaluate", artifacts.read_json(results / METRICS))
        if outcome.recall_at_5 is None:
            del figures["recall_at_5"]
        else:
            figures["zero_shot_recall_at_5"] = outcome.recall_at_5
        figures |= outcome.figures
        if task.variant == REFERENCE:
            of_reference.append(figures)
        run, files = _child(parent, task, min(times[task])), runs.shown_files("evaluate", results)
        runs.keep_finished(run, journals[task], figures, files, max(times[task]), folder)
    written = {name: ablation.out / name for name in WRITTEN} if rows else {}
    runs.keep_finished(parent, [], _means(of_reference), written, max(map(max, times.values())), folder)
    for problem in sync(folder).problems:
        report.warn(f"MLflow: {problem}; realmops sync --root {ablation.out} sends what is left")


def _journals(task: Task, outcome: VariantOutcome) -> list[Path]:
    """The journals of a variant, without that of a pre-training that it does not use."""
    paths = [task.folder(name) / JOURNAL for name in STAGES if name != "pretrain" or outcome.figures]
    return [path for path in paths if path.is_file()]


def _child(parent: runs.TrackedRun, task: Task, began: float) -> runs.TrackedRun:
    project = task.params.parent
    corpus = artifacts.read_json(task.folder("snapshot") / "corpus" / artifacts.MANIFEST)["corpus_hash"]
    params_hash = artifacts.digest_of({k: v for k, v in task.values.items() if k != "tracking"})
    tags = runs.provenance_tags(project, corpus_hash=corpus, params_hash=params_hash)
    answers = artifacts.read_json(task.folder("evaluate") / artifacts.MANIFEST)["files"][PREDICTIONS]
    read = external_files(STAGES["evaluate"], task.values, project, task.view)
    return runs.TrackedRun(
        # not of the commit: a later call after another commit shows the same training, and must not show it twice
        artifacts.digest_of([parent.key, task.variant, task.seed, params_hash, corpus, answers]),
        {"ablation": {"variant": task.variant}, **task.values},
        tags | {"realmops.kind": "variant", "realmops.variant": task.variant, "realmops.seed": str(task.seed)},
        name=runs.run_name(task.variant, task.seed, corpus),
        experiment=parent.experiment,
        parent=parent,
        datasets=runs.datasets(task.values, corpus, read),
        began=began,
    )
