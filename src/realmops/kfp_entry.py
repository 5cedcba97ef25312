"""What the components of the Kubeflow pipelines call in their pods: one stage on the shared volume.

Options come as JSON text: as a dictionary, KFP would hand 288 on as 288.0. What a stage makes stays on the volume; the
artifact is a small manifest of it.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realmops import artifacts, cluster, config, submit
from realmops.console import Console
from realmops.stages import STAGES, fingerprint

LogMetric = Callable[[str, float], None]


def run_stage(stage: str, options: str, root: str, manifest: str, metrics: str, log_metric: LogMetric) -> None:
    """Run a stage under ``root`` and write its small results.

    Args:
        options: all sections of params.yaml as JSON.
        manifest: the file to say in what was made where.
        metrics: the file for its figures as JSON; KFP's cache wants one.
        log_metric: shows a figure in KFP.

    Exits with 2 and one line for what a person must mend.
    """
    with _one_line_for_errors():
        _run(stage, _parsed(options), Path(root), Path(manifest), Path(metrics), log_metric)


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
    limits: str,
) -> None:
    """As :func:`run_stage`; raises the index builders' Deployment first, where one is named."""
    with _one_line_for_errors():
        from realmops.stages.runner import inputs_of

        values = _parsed(options)
        Console().say(f"limits of this pod: {limits}")
        if deployment:
            stage, place = STAGES["pretrain"], Path(root)
            key = fingerprint(stage, values, inputs_of(stage, values, place, place))
            exchange = place / "exchange" / key[:16]  # another corpus or other options want one of their own
            values["pretrain"] |= {"builder": "external", "exchange": str(exchange)}
            cluster.raise_builders(
                deployment, builders, _assignment(root), exchange, place, owner, wait_seconds, Console().say
            )
        _run("pretrain", values, Path(root), Path(manifest), Path(metrics), log_metric)


def lower_builders(deployment: str, root: str, owner: str) -> None:
    """Give the index builders back, whatever became of the run; those that another run has raised are left to it."""
    with _one_line_for_errors():
        assignment = _assignment(root)
        if not deployment or not assignment.is_file():
            return
        if artifacts.read_json(assignment).get("owner") == owner:
            cluster.scale(deployment, 0)
        else:
            Console().say(f"{assignment}: the index builders work for another run, which gives them back")


def guard(key: str, run: str, endpoint: str) -> None:
    """End with an error when an older run with the same key lives; nothing to do without a key or an endpoint.

    Where it cannot be asked, the run goes on: two trainers in one folder refuse each other in any case.
    """
    if not (key and endpoint):
        return
    with _one_line_for_errors():
        try:
            older = submit.older_run(submit.Server(endpoint), key, run)
        except (ValueError, TimeoutError) as error:
            Console().warn(f"this run goes on without knowing whether an older one has the same key: {error}")
            return
        if older:
            raise ValueError(f"this run ends itself: {older} has the same key {key[:16]} and is older")


def _assignment(root: str) -> Path:
    return Path(root).parent.parent / cluster.ASSIGNMENT


def _parsed(options: str) -> dict[str, dict[str, Any]]:
    try:
        values = json.loads(options)
    except ValueError as error:
        raise ValueError(f"options is no JSON ({error}); 'realmops params --json' prints what is wanted") from None
    if not isinstance(values, dict) or not all(isinstance(keys, dict) for keys in values.values()):
        raise ValueError(f"options is {options[:60]!r}; sections with keys are wanted: see 'realmops params --json'")
    return config.checked(values, "options")


def _run(
    stage: str, values: dict[str, dict[str, Any]], root: Path, manifest: Path, metrics: Path, log_metric: LogMetric
) -> None:
    from realmops.stages import runner

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    root.mkdir(parents=True, exist_ok=True)
    found = runner.run_stage(stage, values, project=root, root=root, report=Console())
    folder = root / STAGES[stage].folder
    made = artifacts.read_json(folder / artifacts.MANIFEST)
    artifacts.write_json(
        manifest,
        {"stage": stage, "folder": str(folder), "fingerprint": made["fingerprint"], "files": made["files"]},
    )
    figures = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    artifacts.write_json(metrics, figures)
    for name, value in figures.items():
        log_metric(name, value)


@contextmanager
def _one_line_for_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, TimeoutError) as error:
        print(f"realmops: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
