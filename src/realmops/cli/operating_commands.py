"""Commands for the cluster, index builders and MLflow."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from realmops.cli import shared_options as option
from realmops.cli.group import exit_with, main


@main.command()
@option.values
@click.option("--pipeline", default="train", help="train, ablations, refresh, or a compiled pipeline's file.")
@option.repeated("--argument", "arguments", "NAME=VALUE", "A parameter of the pipeline, for example image=realmops:1.")
@click.option("--experiment", default="realmops", help="The experiment in Kubeflow Pipelines.")
@click.option("--name", help="The name of the run; default: the pipeline's name and the key.")
@click.option(
    "--endpoint", envvar="KF_PIPELINES_ENDPOINT", show_envvar=True, metavar="URL", help="The API of Kubeflow Pipelines."
)
@click.option(
    "--namespace",
    help="The namespace of a Kubeflow profile; default: a pod's own, without profiles that of Kubeflow Pipelines.",
)
@click.option(
    "--keep-hours",
    type=click.FloatRange(0, 500_000),
    default=168.0,
    help="How long Kubeflow Pipelines 2.17 keeps pods after a run, if its set-up does not decide; 0: as set up.",
)
@option.flag("--once", help="Start nothing if a run with the same key is under way or has succeeded.")
@option.flag("--wait", "waits", help="Wait until the run has ended; exit code 1 unless it has succeeded.")
def submit(
    values: option.Values,
    project: Path,
    pipeline: str,
    endpoint: str | None,
    namespace: str | None,
    keep_hours: float,
    once: bool,
    waits: bool,
    **given: Any,
) -> None:
    """Start the training on Kubeflow Pipelines.

    Each training has a key, of its params (without tracking), the files that these name, the compiled pipeline, and the
    arguments that decide the result, as the image. The exit code is 2 for a mistake, and 1 when the server is away.
    """
    from realmops.cluster.kfp_client import Server
    from realmops.cluster.submit import SUCCEEDED, Pipeline, prepare, submit, wait

    compiled = Pipeline.named(pipeline)
    submission, notes = prepare(values, project, compiled, **given)
    for note in notes:
        click.echo(note, err=True)
    server = Server(endpoint, namespace)
    run = submit(submission, server, once=once, keep_hours=keep_hours, say=click.echo)
    if waits:
        sys.exit(0 if wait(run.run_id, compiled.tasks, server, say=click.echo) == SUCCEEDED else 1)


@main.command("index-builder")
@option.file("--exchange", help="The folder shared with the trainer.")
@option.file("--snapshot", help="The snapshot folder of the corpus.")
@option.watch_parent
@option.file("--follow", metavar="FILE", help="Serve the training or stage that FILE names, then the next one.")
@option.file("--alive", metavar="FILE", help="With --follow: touch FILE as a heartbeat.")
def index_builder(
    exchange: Path | None, snapshot: Path | None, follow: Path | None, alive: Path | None, **given: Any
) -> None:
    """Rebuild the index with the newest weights of a training.

    The stage pretrain starts a builder itself; this command is for builders that run elsewhere. It embeds the corpus
    again whenever the trainer has published weights, and ends with the trainer.

    With --follow a file names the run, and after one run the builder waits for the next. With --follow
    .realmops/STAGE.shards.json it helps the stage tag, finetune or evaluate.
    """
    from realmops.refresh.builder_process import Follower, run_index_builder

    if follow is not None:
        if exchange or snapshot:
            raise ValueError("--follow names exchange and snapshot in its file: leave --exchange and --snapshot out")
        Follower(follow, alive).run()
    if exchange is None or snapshot is None:
        raise ValueError("name --exchange and --snapshot, or with --follow the file that holds both")
    from realmops.stages.sharded_work import WORKS

    sys.exit(run_index_builder(exchange, snapshot, works=WORKS, **given))


@main.command()
@option.existing_root
def sync(root: Path) -> Iterator[str]:
    """Send to MLflow what could not be sent while stages ran."""
    from realmops.tracking.runs import tracking_folder
    from realmops.tracking.sender import sync

    result = sync(tracking_folder(root))
    yield f"{result.sent} points and files sent"
    exit_with(result.problems)


@main.command()
@option.existing_root
@option.file("--exchange", help="The folder shared by trainer and index builders, if not below the root.")
def doctor(root: Path, exchange: Path | None) -> Iterable[str]:
    """Show what is installed, what runs, and what is wrong.

    It prints versions and device, the state of each stage, what was not sent to MLflow yet, and the state of the
    exchange between trainer and index builders.
    """
    from realmops.commands.doctor import diagnose

    return diagnose(root, exchange)
