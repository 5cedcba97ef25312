"""What the components of the Kubeflow pipelines call in their pods: one task on the shared volume.

Options come as JSON text: as a dictionary, KFP would hand 288 on as 288.0. What a stage makes stays on the volume; the
artifact is a small manifest of it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realmops import artifacts, cluster, config, submit
from realmops.console import Console, explained_errors
from realmops.stages import STAGES, fingerprint

if TYPE_CHECKING:
    from realmops.stages.ablation import Ablation

LogMetric = Callable[[str, float], None]
CHANGES_SHOWN = 200  # as many answers as a page takes


def run_stage(
    stage: str, options: str, root: str, manifest: str, metrics: str, log_metric: LogMetric, processes: int = 1
) -> None:
    """Run a stage under ``root`` and write its small results.

    Args:
        options: all sections of params.yaml as JSON.
        manifest: the file to say in what was made where.
        metrics: the file for its figures as JSON; KFP's cache wants one.
        log_metric: shows a figure in KFP.
        processes: started by torchrun, to train together.

    What a person must mend ends it with one message, as on the command line.
    """
    with _task():
        _run(stage, _parsed(options), Path(root), Path(manifest), Path(metrics), log_metric, processes)


def pretrain(
    options: str,
    root: str,
    manifest: str,
    metrics: str,
    log_metric: LogMetric,
    *,
    owner: str,
    deployment: str,
    builders: int,
    wait_seconds: int,
    processes: int,
    limits: str,
) -> None:
    """As :func:`run_stage`; raises the index builders' Deployment first, where one is named and work is left."""
    with _task(), ExitStack() as stack:
        from realmops.stages.runner import finished, inputs_of

        values = _parsed(options)
        Console().say(f"limits of this pod: {limits}")
        if deployment:
            stage, place = STAGES["pretrain"], Path(root)
            inputs = inputs_of(stage, values, place, place)
            key = fingerprint(stage, values, inputs)
            exchange = place / "exchange" / key[:16]  # another corpus or other options want one of their own
            values["pretrain"] |= {"builder": "external", "exchange": str(exchange)}
            if finished(place / stage.folder, stage, fingerprint(stage, values, inputs)) is None:
                assignment, say = _assignment(root), Console().say
                stack.enter_context(cluster.held(assignment, wait_seconds, say))
                cluster.raise_builders(deployment, builders, assignment, exchange, place, owner, wait_seconds, say)
        _run("pretrain", values, Path(root), Path(manifest), Path(metrics), log_metric, processes)


def lower_builders(deployment: str, root: str, owner: str) -> None:
    """Give the index builders back, whatever became of the run (``cluster.lower_builders``)."""
    with _task():
        assignment = _assignment(root)
        if deployment and assignment.is_file():
            cluster.lower_builders(deployment, assignment, Path(root), owner, Console().say)


def guard(key: str, run: str, endpoint: str) -> None:
    """End with an error when an older run with the same key lives; nothing to do without a key or an endpoint.

    Where it cannot be asked, the run goes on: two trainers in one folder refuse each other in any case.
    """
    if not (key and endpoint):
        return
    with _task():
        try:
            older = submit.older_run(submit.Server(endpoint), key, run)
        except (ValueError, TimeoutError) as error:
            Console().warn(f"this run goes on without knowing whether an older one has the same key: {error}")
            return
        if older:
            raise ValueError(f"this run ends itself: {older} has the same key {key[:16]} and is older")


def _assignment(root: str) -> Path:
    return Path(root).parent.parent / cluster.ASSIGNMENT


def promote(options: str, root: str, model: str, margin: float, metrics: str, log_metric: LogMetric) -> None:
    """Make the run the champion of a registered model if it is better; that it is not is no error.

    Args:
        model: its name; nothing is done where it is empty.
    """
    with _task():
        report = Console()
        if not model:
            report.say("no registered model is named: nothing is promoted")
            return
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise ValueError(
                "MLFLOW_TRACKING_URI is not set, and a registry in the run's own folder knows no other run: put it "
                "into the ConfigMap that the pipeline's parameter settings names, or leave model empty"
            )
        from realmops.stages.claims import claimed
        from realmops.stages.promote import promote as promoted
        from realmops.stages.runner import WORK

        place = Path(root)
        with claimed(place.parent / WORK / "promote", report.say):  # MLflow itself takes any of two at once
            outcome = promoted(_parsed(options), project=place, root=place, name=model, margin=margin, copy=False)
        report.say(outcome.message)
        difference = {} if outcome.difference is None else {"em_difference": outcome.difference}
        _show({"promoted": int(outcome.champion), **difference}, Path(metrics), log_metric)


def refresh(options: str, root: str, changes: str, metrics: str, log_metric: LogMetric) -> None:
    """Read a changed corpus under the trained run ``root``, as ``realmops update`` does.

    Args:
        changes: the file for the answers that changed, in Markdown.
    """
    with _task():
        from realmops.stages.update import changes_markdown, update

        place = Path(root)
        done = update(_parsed(options), project=place, root=place, report=Console())
        if done is None:
            artifacts.write_bytes(Path(changes), b"The passages are those of before.\n")
            return
        artifacts.write_bytes(Path(changes), changes_markdown(done[0], CHANGES_SHOWN).encode())
        _show(done[1], Path(metrics), log_metric)


def variant(
    name: str,
    project: str,
    presets: str,
    settings: str,
    seeds: int,
    out: str,
    limits: str,
    metrics: str,
    log_metric: LogMetric,
) -> None:
    """Train and evaluate one variant of an ablation with every seed; table and MLflow runs are for :func:`table`.

    Args:
        project: where params.yaml and pipelines/ are.
        presets: their names, a JSON list.
        settings: section.key=value, a JSON list.
    """
    with _task():
        from realmops.stages import ablation

        report = Console()
        report.say(f"limits of this pod: {limits}")
        what = _ablation([name], project, presets, settings, seeds, out)
        if failures := ablation.train(what, jobs=1, report=report):
            raise ValueError("\n".join(failures))
        outcomes = [ablation.outcome_of(what, *task) for task in what.tasks]
        figures = {
            "em": sum(float(outcome.correct.mean()) for outcome in outcomes) / seeds,
            "recall_at_5": sum(outcome.recall_at_5 for outcome in outcomes) / seeds,
        }
        _show(figures, Path(metrics), log_metric)


def table(
    variants: list[str],
    project: str,
    presets: str,
    settings: str,
    seeds: int,
    out: str,
    rows: str,
    page: str,
    metrics: str,
    log_metric: LogMetric,
) -> None:
    """Write the table of the reference and ``variants`` as far as they have been trained, and their MLflow runs.

    Args:
        rows: the file for the table, in Markdown.
        page: that for the page, in HTML.
    """
    with _task():
        from realmops.evaluate.ablation import as_markdown
        from realmops.stages import ablation

        what = _ablation([ablation.REFERENCE, *variants], project, presets, settings, seeds, out)
        found, missing = ablation.tabulate(what, report=Console())
        text = as_markdown(found) if found else f"No table: {ablation.REFERENCE} is not among what ended well.\n"
        text += "".join(f"\n{line}\n" for line in missing)
        artifacts.write_bytes(Path(rows), text.encode())
        shown = (what.out / "report.html").read_bytes() if found else escape(text).encode()
        artifacts.write_bytes(Path(page), shown)
        _show({f"{row.variant}_em": row.em for row in found}, Path(metrics), log_metric)


def _ablation(variants: list[str], project: str, presets: str, settings: str, seeds: int, out: str) -> Ablation:
    from realmops.stages.ablation import Ablation

    if seeds < 1:
        raise ValueError(f"seeds is {seeds}, at least 1 is wanted")
    return Ablation(
        Path(project) / "params.yaml",
        presets=_names("presets", presets),
        settings=_names("overrides", settings),
        variants=list(dict.fromkeys(variants)),
        seeds=range(seeds),
        out=Path(out),
    )


def _names(key: str, text: str) -> list[str]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{key} is {text[:60]!r}; a JSON list of texts is wanted, for example ["ablation"]')
    return names


def _parsed(options: str) -> dict[str, dict[str, Any]]:
    try:
        values = json.loads(options)
    except ValueError as error:
        raise ValueError(f"options is no JSON ({error}); 'realmops params --json' prints what is wanted") from None
    if not isinstance(values, dict) or not all(isinstance(keys, dict) for keys in values.values()):
        raise ValueError(f"options is {options[:60]!r}; sections with keys are wanted: see 'realmops params --json'")
    return config.checked(values, "options")


def _run(
    stage: str,
    values: dict[str, dict[str, Any]],
    root: Path,
    manifest: Path,
    metrics: Path,
    log_metric: LogMetric,
    processes: int,
) -> None:
    from realmops.stages import METRICS, runner

    root.mkdir(parents=True, exist_ok=True)
    folder = root / STAGES[stage].folder
    if processes > 1:
        _run_together(stage, values, root, processes)
        found = artifacts.read_json(folder / METRICS)
    else:
        found = runner.run_stage(stage, values, project=root, root=root, report=Console())
    made = artifacts.read_json(folder / artifacts.MANIFEST)
    artifacts.write_json(
        manifest,
        {"stage": stage, "folder": str(folder), "fingerprint": made["fingerprint"], "files": made["files"]},
    )
    _show(found, metrics, log_metric)


def _run_together(stage: str, values: Mapping[str, Any], root: Path, processes: int) -> None:
    """The stage by several processes of torchrun, which exits with 1 whichever of them fails, and this task too."""
    params = root / f"{stage}.params.json"
    artifacts.write_json(params, values)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "realmops"]
    code = subprocess.call([sys.executable, *torchrun, "run", stage, "--params", params, "--root", root])
    if code:
        sys.exit(code)


def _show(found: Mapping[str, Any], metrics: Path, log_metric: LogMetric) -> None:
    """Write the figures among what was found, and show them in KFP."""
    figures = {name: float(v) for name, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}
    artifacts.write_json(metrics, figures)
    for name, value in figures.items():
        log_metric(name, value)


@contextmanager
def _task() -> Iterator[None]:
    """Around all of a task: errors are explained, SIGTERM ends it as an exception does."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with explained_errors():
        yield
