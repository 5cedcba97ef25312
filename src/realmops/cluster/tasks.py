"""Tasks of the Kubeflow components, which run in pods with the shared volume; a KFP artifact is a small manifest.

Options are passed as JSON text, because KFP converts 288 in a dictionary to 288.0.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from realmops import artifacts
from realmops.cluster import INPUTS
from realmops.cluster.builders import release_builders, scaled_builders, shard_helpers
from realmops.cluster.kfp_client import KfpClient
from realmops.cluster.packed_options import packed_pins, unpack_options
from realmops.cluster.polling import poll_until
from realmops.cluster.submit import find_older_run
from realmops.cluster.task_context import (
    Metrics,
    Output,
    load_options,
    make_run_folder,
    task,
    write_metrics,
)
from realmops.console import Console
from realmops.options import Options
from realmops.refresh.lease import acquire_lease
from realmops.stages import CLOZE_STEP, HEADLINE_METRICS, METRICS, STAGES, STEPS, planned_steps
from realmops.stages.option_inputs import CLOZE
from realmops.stages.run_inputs import take_inputs
from realmops.tracking.sender import finite_metrics

CHANGES_SHOWN = 200  # changed answers in the Markdown artifact
POLL_SECONDS = 1.0  # polling interval
KILLED_SECONDS = 120.0  # until the pods of a terminated run have ended: they have 30 s


@task()
def inputs(options: str, root: str, fetched: Output, metrics: Metrics) -> None:
    """Fetch the inputs in the options next to the folder of the runs, for all later tasks of the run."""
    given, console = unpack_options(options), Console()
    make_run_folder(Path(root))
    place, cache, pins = Path(root), Path(root).parent.parent / INPUTS, packed_pins(options)
    _, copies = take_inputs(given, place, place, cache, console, pinned=pins)
    if not copies:
        console.log("inputs: no option names one to fetch, so nothing is done")
    rows = [f"| {key} | {copy.value} | {copy.identity} |" for key, copy in copies.items()]
    table = ["| option | value | identity |", "|---|---|---|", *rows]
    artifacts.write_bytes(Path(fetched.path), ("\n".join(table) + "\n").encode())
    write_metrics({"inputs": len(copies)}, metrics)


@task()
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
    """Run a stage and write its manifest and metrics; the first one also checks the external files of all steps."""
    given = load_options(options, root)
    if stage == STEPS[0]:
        from realmops.stages.check_inputs import check_inputs

        check_inputs(planned_steps(given), given, Path(root), Path(root))
    if _skip(stage, given, manifest, metrics):
        return
    with shard_helpers(Path(root), stage, deployment, shard_pods, owner, Console()):
        _run(stage, given, Path(root), manifest, metrics, processes)


@task()
def cloze(options: str, root: str, questions: Output, metrics: Metrics) -> None:
    """Generate questions from the corpus, as ``realmops run all`` does, if the options name generated questions."""
    from realmops.commands.questions import write_cloze_questions

    given, folder = load_options(options, root), Path(root) / CLOZE
    if _skip(CLOZE_STEP, given, questions, metrics):
        return
    for line in write_cloze_questions(Path(root), seed=given.run.seed):
        Console().log(f"cloze: {line}")
    manifest = artifacts.read_json(folder / artifacts.MANIFEST)
    place = {"folder": folder.absolute().as_uri(), "digest": manifest[artifacts.DIGEST_KEY]}
    artifacts.write_json(Path(questions.path), {"stage": CLOZE_STEP, **place, "files": manifest["files"]})
    questions.metadata.update(place)
    write_metrics({name.removesuffix(".jsonl"): count for name, count in manifest["written"].items()}, metrics)


@task()
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
    """Run pre-training as :func:`run_stage` does, with the index builders scaled up unless it is up to date."""
    given, console, place = load_options(options, root), Console(), Path(root)
    console.log(f"limits of this pod: {limits}")
    _reuse_output("pretrain", given, place)  # before builders are scaled up
    deployment = deployment if given.pretrain.steps else ""  # without a step there is nothing to build
    with (
        scaled_builders(given, place, deployment, builders, owner, wait_seconds, console.log) as run_options,
        shard_helpers(place, "pretrain", deployment, builders + 1, owner, console, held=True),
    ):
        _run("pretrain", run_options, place, manifest, metrics, processes)


@task()
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
    """Run the evaluation as :func:`run_stage` does; write its report, and the tables of metrics as Markdown."""
    from realmops.commands.report import read_metrics, report_path
    from realmops.evaluate.run_report import figure_tables

    given, page = load_options(options, root), report_path(Path(root))
    if not _skip("evaluate", given, manifest, metrics):
        with shard_helpers(Path(root), "evaluate", deployment, shard_pods, owner, Console()):
            _run("evaluate", given, Path(root), manifest, metrics, processes=1)
    tables = [f"## {table.title}\n\n{table.to_markdown()}" for table in figure_tables(read_metrics(Path(root)))]
    artifacts.write_bytes(Path(summary.path), "\n".join(tables).encode())
    artifacts.write_bytes(Path(report.path), page.read_bytes() if page.is_file() else b"")


@task()
def lower_builders(deployment: str, root: str, owner: str) -> None:
    """Scale down the index builders, and end the MLflow run of killed stages, however the run ended."""
    from realmops.tracking.runs import tracking_folder
    from realmops.tracking.sender import has_running_stage, sync

    release_builders(deployment, Path(root), owner, Console().log)
    folder = tracking_folder(Path(root))
    poll_until(lambda: not has_running_stage(folder) or None, POLL_SECONDS, KILLED_SECONDS)
    for problem in sync(folder)[1]:
        Console().warn(f"MLflow tracking: {problem}")


@task()
def guard(key: str, run: str, endpoint: str) -> None:
    """Fail if an older run with the same key is active; with an unreachable server, the stage's lock suffices."""
    if not (key and endpoint):
        return
    try:
        older = find_older_run(KfpClient(endpoint), key, run)
    except (ValueError, TimeoutError) as error:
        Console().warn(f"guard: could not check for an older run with the same key, continuing: {error}")
        return
    if older:
        raise ValueError(f"guard: {older} has the same key {key[:16]} and is older, so this run stops")


@task()
def promote(options: str, root: str, model: str, margin: float, champion: Output, metrics: Metrics) -> None:
    """Make the run the champion of a registered model if it is better; otherwise succeed without a change."""
    report, place = Console(), Path(root)
    if not model:
        champion.metadata["message"] = "promote: no registered model is set, so nothing is promoted"
        report.log(champion.metadata["message"])
        return
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ValueError(
            "MLFLOW_TRACKING_URI is not set, and a registry in the run's folder has no other run to compare with: set "
            "it in the ConfigMap of the pipeline's parameter settings, or leave model empty"
        )
    from realmops.commands.promote import promote
    from realmops.evaluate.compare import deciding_metric
    from realmops.tracking.runs import headline_metrics

    given, lease = load_options(options, root), place.parent / artifacts.WORK_FOLDER / "promotion.lock"
    with acquire_lease(lease, report.log):  # MLflow does not serialise promotions
        promotion = promote(given, project=place, root=place, name=model, margin=margin, copy=False)
    report.log(promotion.message)
    results = artifacts.read_json(place / STAGES["evaluate"].folder / METRICS)
    figures: dict[str, float] = {"promoted": int(promotion.champion)}
    if promotion.difference is not None:
        figures[f"{deciding_metric(results)}_difference"] = promotion.difference
    champion.metadata.update(
        {"name": model, "message": promotion.message, **headline_metrics("evaluate", results), **figures}
    )
    artifacts.write_json(Path(champion.path), champion.metadata)
    write_metrics(figures, metrics)


@task()
def refresh(options: str, root: str, changes: Output, metrics: Metrics) -> None:
    """Update the corpus of the trained run in ``root``, as ``realmops update`` does."""
    from realmops.commands.update import changes_table, update

    result = update(load_options(options, root), project=Path(root), root=Path(root), report=Console())
    if result is None:
        artifacts.write_bytes(Path(changes.path), b"The passages are unchanged.\n")
        return
    folder, figures = result
    table = changes_table(folder, CHANGES_SHOWN).to_markdown() if "answers_changed" in figures else ""
    artifacts.write_bytes(Path(changes.path), table.encode())
    write_metrics(figures, metrics)


def _skip(step: str, options: Options, output: Output, metrics: Metrics) -> bool:
    if step in planned_steps(options):
        return False
    message = f"{step}: not needed with these options, so nothing is done"
    Console().log(message)
    output.metadata["message"] = message
    artifacts.write_json(Path(output.path), {"stage": step, "message": message})
    write_metrics({}, metrics)
    return True


def _run(stage: str, options: Options, root: Path, manifest: Output, metrics: Metrics, processes: int) -> None:
    from realmops.stages import runner

    make_run_folder(root)
    folder = root / STAGES[stage].folder
    _reuse_output(stage, options, root)
    if processes > 1:
        _run_together(stage, options, root, processes)
        results = artifacts.read_json(folder / METRICS)
    else:
        results = runner.run_stage(stage, options, project=root, root=root, report=Console())
    full = artifacts.read_json(folder / artifacts.MANIFEST)
    common = {"fingerprint": full["fingerprint"]}
    small = {"stage": stage, "folder": str(folder), "files": full["files"], **common}
    artifacts.write_json(Path(manifest.path), small)
    place = {"folder": folder.absolute().as_uri(), "digest": full[artifacts.DIGEST_KEY], **common}
    manifest.metadata.update(place | finite_metrics(results))
    # the UI shows ten metrics at once, in alphabetical order; the manifest has all
    write_metrics({name: results[name] for name in HEADLINE_METRICS.get(stage, results) if name in results}, metrics)


def _reuse_output(stage: str, options: Options, root: Path) -> None:
    """Link the output of another run with the same inputs, options and code; none without the image's commit."""
    from realmops.stages import fingerprint
    from realmops.stages.runner import image_commit, stage_inputs, stage_lock, up_to_date_metrics

    definition, folder = STAGES[stage], root / STAGES[stage].folder
    key = fingerprint(definition, options, stage_inputs(definition, options, root, root))
    if up_to_date_metrics(folder, definition, key) is not None or not image_commit():
        return
    for record in sorted(root.parent.glob(f"*/{definition.folder}/{artifacts.MANIFEST}")):
        with suppress(OSError, ValueError):  # being replaced, or damaged
            manifest = artifacts.read_json(record)
            is_same = (manifest.get("fingerprint"), manifest.get("code")) == (key, image_commit())
            if not is_same or up_to_date_metrics(record.parent, definition, key) is None:
                continue
            with stage_lock(root / artifacts.WORK_FOLDER, stage), artifacts.atomic_folder(folder, stage) as out:
                shutil.copytree(record.parent, out, copy_function=artifacts.link_or_copy, dirs_exist_ok=True)
            Console().log(f"{stage}: reusing {record.parent}, which has the same inputs and options")
            return


def _run_together(stage: str, options: Options, root: Path, processes: int) -> None:
    params = root / f"{stage}.params.json"
    artifacts.write_json(params, options.model_dump())
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "realmops"]
    command = [sys.executable, *torchrun, "run", stage, f"--params={params}", f"--root={root}"]
    code = subprocess.call(command, env={**os.environ, "PYTHONSAFEPATH": "1"})  # no imports from the current folder
    if code:
        sys.exit(code)
