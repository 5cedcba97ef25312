"""Commands for the cluster, index builders and MLflow."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from realmops.cli import shared_options as option
from realmops.cli.group import exit_with, main


@main.command()
@option.options
@click.option("--pipeline", default="train", help="train, ablations, refresh, or the file of a compiled pipeline.")
@option.repeated("--argument", "arguments", "NAME=VALUE", "A parameter of the pipeline, for example image=realmops:1.")
@click.option("--experiment", default="realmops", help="The experiment in Kubeflow Pipelines.")
@click.option("--name", help="The name of the run; default: pipeline name and key.")
@click.option(
    "--endpoint", envvar="KF_PIPELINES_ENDPOINT", show_envvar=True, metavar="URL", help="The URL of Kubeflow Pipelines."
)
@click.option(
    "--namespace",
    help="The namespace of a Kubeflow profile; default: that of this pod, or without profiles of Kubeflow Pipelines.",
)
@option.flag("--once", help="Submit nothing if a run with the same key is active or has succeeded.")
@option.flag("--wait", "waits", help="Wait for the end of the run; exit code 1 unless it succeeded.")
@option.flag("--dry-run", help="Print inputs, key and arguments; send and write nothing.")
def submit(
    options: option.Options, project: Path, pipeline: str, endpoint: str | None, namespace: str | None, once: bool,
    waits: bool, dry_run: bool, **others: Any,
) -> None:  # fmt: skip
    """Start the training on Kubeflow Pipelines.

    Local files and folders in the options are added to DVC and pushed to its remote, from which the pods fetch them.
    Without --argument image the image is that of kustomization.yaml.

    Each training has a key: a hash of its params (without tracking), the content of the inputs that these name, the
    compiled pipeline, and the arguments that affect the result, such as the image. The exit code is 2 for invalid
    input, and 1 if the server is unreachable.
    """
    from realmops.cluster.input_plan import send_inputs
    from realmops.cluster.kfp_client import KfpClient
    from realmops.cluster.submit import SUCCEEDED, Pipeline, prepare, submit, wait

    compiled = Pipeline.read(pipeline)
    submission, notes = prepare(options, project, compiled, **others)
    _show(submission.inputs, notes)
    if dry_run:
        click.echo(f"not submitted: {submission.name} with the key {submission.key}")
        for name, value in submission.arguments.items():
            click.echo(f"argument {name}: {value}")
        return
    server = KfpClient(endpoint, namespace)
    send_inputs(submission.inputs, project, click.echo)
    run = submit(submission, server, once=once, log=click.echo)
    if waits:
        sys.exit(0 if wait(run.run_id, compiled.tasks, server, log=click.echo) == SUCCEEDED else 1)


@main.command()
@option.options
def upload(options: option.Options, project: Path) -> None:
    """Add local inputs to DVC, and push them to its remote.

    Inputs are the files and folders that options name. Commit the .dvc files, so that a submission from git or in the
    cluster finds their content. Content that the remote has is not sent again.
    """
    from realmops.cluster.input_plan import notes_of, plan_inputs, send_inputs

    inputs = plan_inputs(options, project)
    _show(inputs, notes_of(inputs))
    send_inputs(inputs, project, click.echo)


def _show(inputs: Iterable[object], notes: Iterable[str]) -> None:
    for item in inputs:
        click.echo(item)
    for note in notes:
        click.echo(note, err=True)


@main.command("index-builder")
@option.file("--exchange", help="The exchange folder shared with the trainer.")
@option.file("--snapshot", help="The snapshot folder of the corpus.")
@click.option("--name", hidden=True, help="Unique on the exchange, and kept by restarts of the builder.")
@option.watch_parent
@option.file("--follow", metavar="FILE", help="Work for the training or stage that FILE names, then for the next.")
@option.file("--alive", metavar="FILE", help="With --follow: touch FILE as a heartbeat.")
def index_builder(
    exchange: Path | None, snapshot: Path | None, follow: Path | None, alive: Path | None, **options: Any
) -> None:
    """Rebuild the index with the newest weights of a training.

    The stage pretrain starts an index builder; use this command for builders on other machines. It embeds the corpus
    each time the trainer publishes weights, and ends with the trainer.

    With --follow a file names the run, and after one run the builder waits for the next. With --follow
    .realmops/STAGE.shards.json it computes shards for the stage tag, finetune or evaluate.
    """
    if follow is not None:
        if exchange or snapshot:
            raise ValueError("--follow names a file with exchange and snapshot; leave out --exchange and --snapshot")
        from realmops.refresh.follower import Follower

        Follower(follow, alive).run()
    if exchange is None or snapshot is None:
        raise ValueError("--exchange and --snapshot are required; give both, or --follow with a file that names them")
    from realmops.refresh.builder_process import run_index_builder
    from realmops.stages.sharded_work import WORKS

    sys.exit(run_index_builder(exchange, snapshot, works=WORKS, **options))


@main.command()
@option.existing_root
def sync(root: Path) -> Iterator[str]:
    """Send metrics and files to MLflow that are still unsent."""
    from realmops.tracking.runs import tracking_folder
    from realmops.tracking.sender import sync

    sent, problems = sync(tracking_folder(root))
    yield f"{sent} points and files sent"
    exit_with(problems)


@main.command()
@option.existing_folder("--runs", required=True, help="The folder of the runs, such as /realmops/runs.")
@option.count("--older-than", default=30, metavar="DAYS", help="Days since the last change of a run.")
@option.flag("--delete", help="Delete them; without it they are only listed, with sizes and ages.")
def clean(runs: Path, older_than: int, delete: bool) -> Iterator[str]:
    """List or delete old runs of pipelines.

    Only folders are deleted that a pipeline has marked as its run, and that have not changed for the given number of
    days. Runs with promoted models and runs with a running stage are kept.
    """
    from realmops.cluster.clean import clean

    problems: list[str] = []
    yield from clean(runs, older_than, delete=delete, problems=problems)
    exit_with(problems)


@main.command()
@option.existing_root
@option.file("--exchange", help="The exchange folder of trainer and index builders, if outside the root.")
def doctor(root: Path, exchange: Path | None) -> Iterable[str]:
    """Show versions, device, stage states and problems.

    It also lists journals not yet sent to MLflow, and the exchange between trainer and index builders.
    """
    from realmops.commands.doctor import diagnose

    return diagnose(root, exchange)
