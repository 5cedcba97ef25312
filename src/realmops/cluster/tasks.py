"""What the components of the Kubeflow pipelines call in their pods: one task on the shared volume.

Options come as JSON text: as a dictionary, KFP would hand 288 on as 288.0. What a stage makes stays on the volume; the
artifact is a small manifest of it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from realmops import artifacts
from realmops.cluster.builders import give_back, helped, raised_builders
from realmops.cluster.kfp_client import Server
from realmops.cluster.options import unpacked
from realmops.cluster.submit import older_run
from realmops.config import Values
from realmops.console import CHIEF, Console, end_on_sigterm, explained_errors
from realmops.refresh.lease import claimed
from realmops.stages import METRICS, STAGES
from realmops.tracking.sender import ABOVE

if TYPE_CHECKING:
    from realmops.commands.ablate import Ablation

OURS = "REALMOPS_MLFLOW_TRACKING_", "REALMOPS_MLFLOW_EXPERIMENT_"
CHANGES_SHOWN = 200  # as many answers as a page takes


class Output(Protocol):
    """What KFP gives a task for an output: the file to write, and ``metadata`` that KFP shows of it."""

    path: str
    metadata: dict[str, Any]


class Metrics(Output, Protocol):
    """The same for figures: they go to the file, which KFP's cache wants, and are shown in KFP."""

    def log_metric(self, metric: str, value: float) -> None:
        """Show a figure."""


def take_settings(environment: MutableMapping[str, str]) -> None:
    """Give MLflow our settings under the names that it reads.

    Where MLflow's plugin of Kubeflow Pipelines has named a server, that and its credentials stand. The run that it has
    made for this task is one to show ours under: ours goes through all tasks.
    """
    if "MLFLOW_TRACKING_URI" not in environment:
        ours = {name: value for name, value in environment.items() if name.startswith(OURS)}
        environment.update({name.removeprefix("REALMOPS_"): value for name, value in ours.items()})
    if run := environment.pop("MLFLOW_RUN_ID", ""):
        environment[ABOVE] = run


@contextmanager
def _task() -> Iterator[None]:
    """Around all of a task: errors are explained as on the command line, SIGTERM ends it as an exception does."""
    take_settings(os.environ)
    end_on_sigterm()
    with explained_errors():
        yield


@_task()
def run_stage(
    stage: str,
    options: str,
    root: str,
    manifest: Output,
    metrics: Metrics,
    processes: int = 1,
    *,
    owner: str = "",
    deployment: str = "",
    shard_pods: int = 1,
) -> None:
    """Run a stage under ``root`` and write its small results.

    Args:
        options: params as JSON, sections with what differs from the defaults.
        manifest: what was made where.
        processes: started by torchrun, to train together.
        shard_pods: that tag and embed together; those beside this one are replicas of ``deployment``.
    """
    with helped(Path(root), stage, deployment, shard_pods, owner, Console()):
        _run(stage, unpacked(options), Path(root), manifest, metrics, processes)


@_task()
def pretrain(
    options: str,
    root: str,
    manifest: Output,
    metrics: Metrics,
    *,
    owner: str,
    deployment: str,
    builders: int,
    wait_seconds: int,
    processes: int,
    limits: str,
) -> None:
    """As :func:`run_stage`; raises the index builders' Deployment first, where one is named and work is left."""
    values, console, place = unpacked(options), Console(), Path(root)
    console.say(f"limits of this pod: {limits}")
    _take_over("pretrain", values, place)  # before builders are raised for it
    with (
        raised_builders(values, place, deployment, builders, owner, wait_seconds, console.say) as given,
        helped(place, "pretrain", deployment, builders + 1, owner, console, held=True),
    ):
        _run("pretrain", given, place, manifest, metrics, processes)


@_task()
def evaluate(
    options: str,
    root: str,
    manifest: Output,
    report: Output,
    summary: Output,
    metrics: Metrics,
    *,
    owner: str,
    deployment: str,
    shard_pods: int,
) -> None:
    """As :func:`run_stage`, and what people look at.

    Args:
        report: the page of the run, in HTML.
        summary: the tables that a run on one machine ends with, in Markdown.
    """
    from realmops.commands.report import metrics_under, page_under
    from realmops.evaluate.run_report import figure_tables

    with helped(Path(root), "evaluate", deployment, shard_pods, owner, Console()):
        _run("evaluate", unpacked(options), Path(root), manifest, metrics, processes=1)
    tables = [f"## {table.title}\n\n{table.as_markdown()}" for table in figure_tables(metrics_under(Path(root)))]
    artifacts.write_bytes(Path(summary.path), "\n".join(tables).encode())
    artifacts.write_bytes(Path(report.path), page_under(Path(root)).read_bytes())


@_task()
def lower_builders(deployment: str, root: str, owner: str) -> None:
    """Give the index builders back, whatever became of the run (``builders.give_back``)."""
    give_back(deployment, Path(root), owner, Console().say)


@_task()
def guard(key: str, run: str, endpoint: str) -> None:
    """End with an error when an older run with the same key lives; nothing to do without a key or an endpoint.

    Where it cannot be asked, the run goes on: two trainers in one folder refuse each other in any case.
    """
    if not (key and endpoint):
        return
    try:
        older = older_run(Server(endpoint), key, run)
    except (ValueError, TimeoutError) as error:
        Console().warn(f"this run goes on without knowing whether an older one has the same key: {error}")
        return
    if older:
        raise ValueError(f"this run ends itself: {older} has the same key {key[:16]} and is older")


@_task()
def promote(options: str, root: str, model: str, margin: float, champion: Output, metrics: Metrics) -> None:
    """Make the run the champion of a registered model if it is better; that it is not is no error.

    Args:
        model: its name; nothing is done where it is empty.
        champion: what became of it.
    """
    report, place = Console(), Path(root)
    if not model:
        champion.metadata["message"] = "no registered model is named: nothing is promoted"
        report.say(champion.metadata["message"])
        return
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ValueError(
            "MLFLOW_TRACKING_URI is not set, and a registry in the run's own folder knows no other run: put it "
            "into the ConfigMap that the pipeline's parameter settings names, or leave model empty"
        )
    from realmops.commands.promote import promote
    from realmops.tracking.runs import headline

    with claimed(place.parent / artifacts.WORK / "promote", report.say):  # MLflow itself takes any of two at once
        promotion = promote(unpacked(options), project=place, root=place, name=model, margin=margin, copy=False)
    report.say(promotion.message)
    difference = {} if promotion.difference is None else {"em_difference": promotion.difference}
    shown = {"promoted": int(promotion.champion), **difference}
    results = artifacts.read_json(place / STAGES["evaluate"].folder / METRICS)
    champion.metadata.update({"name": model, "message": promotion.message, **headline("evaluate", results), **shown})
    artifacts.write_json(Path(champion.path), champion.metadata)
    _show(shown, metrics)


@_task()
def refresh(options: str, root: str, changes: Output, metrics: Metrics) -> None:
    """Read a changed corpus under the trained run ``root``, as ``realmops update`` does.

    Args:
        changes: the answers that changed, in Markdown.
    """
    from realmops.commands.update import changes_markdown, update

    done = update(unpacked(options), project=Path(root), root=Path(root), report=Console())
    if done is None:
        artifacts.write_bytes(Path(changes.path), b"The passages are those of before.\n")
        return
    artifacts.write_bytes(Path(changes.path), changes_markdown(done[0], CHANGES_SHOWN).encode())
    _show(done[1], metrics)


@_task()
def variant(
    name: str, options: str, presets: str, settings: str, seeds: int, out: str, limits: str, metrics: Metrics
) -> None:
    """Train and evaluate one variant of an ablation with every seed; table and MLflow runs are for :func:`table`."""
    from realmops.commands.ablate import means_of, train

    report = Console()
    report.say(f"limits of this pod: {limits}")
    ablation = _ablation([name], options, presets, settings, seeds, out)
    if failures := train(ablation, jobs=1, report=report):
        raise ValueError("\n".join(failures.values()))
    metrics.metadata["variant"] = name  # Kubeflow's page that compares calls the pods of all variants by one name
    _show(means_of(ablation), metrics)


@_task()
def table(
    variants: list[str],
    options: str,
    presets: str,
    settings: str,
    seeds: int,
    out: str,
    rows: Output,
    page: Output,
    metrics: Metrics,
) -> None:
    """Write the table of the reference and ``variants`` as far as they have been trained, and their MLflow runs.

    Args:
        rows: the table, in Markdown.
        page: in HTML.
    """
    from realmops.commands.ablate import ablate
    from realmops.evaluate.ablation import REFERENCE, table_of_rows

    ablation = _ablation([REFERENCE, *variants], options, presets, settings, seeds, out)
    found, missing = ablate(ablation, jobs=1, report=Console(), only_look=True)
    text = table_of_rows(found).as_markdown() if found else f"No table: {REFERENCE} is not among what ended well.\n"
    text += "".join(f"\n{line}\n" for line in missing)
    artifacts.write_bytes(Path(rows.path), text.encode())
    shown = (ablation.out / "report.html").read_bytes() if found else escape(text).encode()
    artifacts.write_bytes(Path(page.path), shown)
    columns = {"em": "em", "zero_shot_recall_at_5": "recall_at_5", "em_difference": "em_difference"}
    _show({f"{row['variant']}_{what}": row[name] for row in found for what, name in columns.items()}, metrics)


def _ablation(variants: list[str], options: str, presets: str, settings: str, seeds: int, out: str) -> Ablation:
    from realmops.commands.ablate import Ablation

    if seeds < 1:
        raise ValueError(f"seeds is {seeds}, at least 1 is wanted")
    values, chosen, given = unpacked(options), _names("presets", presets), _names("overrides", settings)
    artifacts.make_folder(Path(out))
    params = Path(out) / "params.yaml"
    is_new = not params.exists()
    artifacts.write_json(params, values)  # JSON is YAML; all pods of an ablation write the same
    ablation = Ablation(
        params,
        presets=chosen,
        settings=given,
        variants=list(dict.fromkeys(variants)),
        seeds=range(seeds),
        out=Path(out),
    )
    try:
        _ = ablation.tasks  # every variant with its presets is looked at
    except ValueError:
        if is_new:
            params.unlink()
            with suppress(OSError):  # others have written there
                Path(out).rmdir()
        raise
    return ablation


def _names(key: str, text: str) -> list[str]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{key} is {text[:60]!r}; a JSON list of texts is wanted, for example ["ablation"]')
    return names


def _run(stage: str, values: Values, root: Path, manifest: Output, metrics: Metrics, processes: int) -> None:
    from realmops.stages import runner

    _make_folder(root)
    folder = root / STAGES[stage].folder
    _take_over(stage, values, root)
    if processes > 1:
        _run_together(stage, values, root, processes)
        found = artifacts.read_json(folder / METRICS)
    else:
        found = runner.run_stage(stage, values, project=root, root=root, report=Console())
    made = artifacts.read_json(folder / artifacts.MANIFEST)
    small = {"stage": stage, "folder": str(folder), "fingerprint": made["fingerprint"], "files": made["files"]}
    artifacts.write_json(Path(manifest.path), small)
    lies = {"folder": folder.absolute().as_uri(), "digest": made["manifest_digest"], "fingerprint": made["fingerprint"]}
    manifest.metadata.update(lies | _figures(found))
    # Kubeflow's page shows ten figures at once, by the alphabet; the manifest has all
    _show({name: found[name] for name in CHIEF.get(stage, found) if name in found}, metrics)


def _take_over(stage: str, values: Values, root: Path) -> None:
    """Link what another run beside ``root`` has made of the same inputs and options, so that it is not made again.

    By the same code alone: an image of another commit trains anew, and so does one that tells no commit.
    """
    from realmops.stages import fingerprint
    from realmops.stages.runner import alone, code, finished, inputs_of

    one, folder = STAGES[stage], root / STAGES[stage].folder
    key = fingerprint(one, values, inputs_of(one, values, root, root))
    if finished(folder, one, key) is not None or not code():
        return
    for record in sorted(root.parent.glob(f"*/{one.folder}/{artifacts.MANIFEST}")):
        with suppress(OSError, ValueError):  # replaced at this moment, or damaged: it is made here
            made = artifacts.read_json(record)
            if (made.get("fingerprint"), made.get("code")) != (key, code()):
                continue
            if finished(record.parent, one, key) is None:
                continue
            with alone(root / artifacts.WORK, stage), artifacts.atomic_folder(folder) as out:
                for file in (path for path in record.parent.rglob("*") if path.is_file()):
                    place = out / file.relative_to(record.parent)
                    artifacts.make_folder(place.parent)
                    artifacts.link_or_copy(file, place)
            Console().say(f"{stage}: {record.parent} was made from the same inputs and options, and is taken over")
            return


def _make_folder(root: Path) -> None:
    """Make the run's folder; ValueError where the volume does not let this pod's user write."""
    place = next(one for one in (root, *root.parents) if one.exists())
    if not os.access(place, os.W_OK):
        found = place.stat()
        raise ValueError(
            f"{place} belongs to user {found.st_uid} and group {found.st_gid} (mode {found.st_mode & 0o7777:o}), "
            f"and user {os.getuid()} of this pod may not write there: start one index builder, which gives the volume "
            "to the pods' group ('kubectl scale deployment/realmops-index-builder --replicas=1', and 0 when it is "
            "ready), or change the folder's owner"
        )
    artifacts.make_folder(root)


def _run_together(stage: str, values: Values, root: Path, processes: int) -> None:
    """The stage by several processes of torchrun, which exits with 1 whichever of them fails, and this task too."""
    params = root / f"{stage}.params.json"
    artifacts.write_json(params, values)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "realmops"]
    command = [sys.executable, *torchrun, "run", stage, f"--params={params}", f"--root={root}"]
    code = subprocess.call(command, env={**os.environ, "PYTHONSAFEPATH": "1"})  # imports nothing from this folder
    if code:
        sys.exit(code)


def _figures(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}


def _show(found: Mapping[str, Any], metrics: Metrics) -> None:
    """Write the figures among what was found, and show them in KFP."""
    figures = _figures(found)
    artifacts.write_json(Path(metrics.path), figures)
    for name, value in figures.items():
        metrics.log_metric(name, value)
