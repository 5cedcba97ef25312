"""Commands that set a run up, and train."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from realmops.cli import shared_options as option
from realmops.cli.group import main
from realmops.console import Console, end_on_sigterm, explained_errors, show
from realmops.stages import METRICS, STAGES


@main.command()
@click.argument("folder", type=option.PATH, default=Path())
@option.file(
    "--documents", metavar="PATH", help="Your documents, a file or a folder; default: an invented encyclopedia."
)
@option.repeated(
    "--questions",
    "questions",
    "FILE",
    "Questions with answers: files with train, dev and test as a word of their names, or files to split.",
    type=option.PATH,
)
@click.option("--encoder", metavar="NAME", help="An encoder's folder or name on the hub, or small: from scratch.")
@option.file("--reader", metavar="FOLDER", help='A trained reader, of "realmops export --format reader".')
@click.option(
    "--cluster",
    type=click.Choice(["standalone", "local", "production"]),
    default="standalone",
    help="Kubeflow Pipelines alone, or profiles on one machine or on many.",
)
def init(**given: Any) -> Iterator[str]:
    """Write a project of your own into FOLDER, or here.

    It has params.yaml, dvc.yaml, a README with your commands, and what Kubernetes, Argo CD, Flux and GitHub need. Your
    documents and questions decide the presets. Nothing is overwritten.
    """
    from realmops.cluster import IMAGE
    from realmops.commands.init import init

    yield from init(**given, image=IMAGE)


@main.command(epilog="\b\n" + "\n".join(f"{stage.name:<10}{stage.what}" for stage in STAGES.values()))
@click.argument("stage", type=click.Choice([*STAGES, "all"]), metavar="STAGE")
@option.params
@option.new_root
@option.flag("--force", help="Run again even if inputs and options did not change.")
@option.watch_parent
def run(stage: str, params: Path, presets: Sequence[str], settings: Sequence[str], **given: Any) -> None:
    """Run one stage of the training, or all of them in order.

    STAGE is "all" or a name below. A stage whose inputs and options did not change is skipped, and one that was killed
    resumes from its checkpoints.
    """
    from realmops.config_yaml import read_params
    from realmops.stages import chain

    values, named = option.load_values(params, presets, settings), [*read_params(params)[0], *presets]
    given |= {"values": values, "presets": named, "project": params.parent}
    if stage != "all":
        _run((stage,), **given)
        return
    names = tuple(chain(values))
    _run_apart(names, **given)
    if os.environ.get("RANK", "0") == "0":  # torchrun starts several processes
        from realmops.commands.report import seconds_table

        show(seconds_table(names, given["root"]), columns=60)


def _run_apart(names: Sequence[str], **given: Any) -> None:
    """Each stage in a process of its own, but where torchrun has started several that have met."""
    from realmops.refresh.child_processes import apart, end_with

    if "TORCHELASTIC_RUN_ID" in os.environ:
        _run(names, **given)
        return
    end_on_sigterm()
    if (parent := given.pop("watch_parent")) is not None:
        end_with(parent)
    for name in names:
        work = partial(_explained_run, names, alone=name, **given)
        if code := apart(f"the stage {name}", "realmops.commands.run", work):
            sys.exit(code)


def _explained_run(names: Sequence[str], **given: Any) -> None:
    with explained_errors():
        _run(names, **given)


def _run(names: Iterable[str], root: Path, **given: Any) -> None:
    end_on_sigterm()
    report = Console()
    try:
        from realmops.commands.run import run_stages

        for name, metrics in run_stages(tuple(names), report=report, root=root, **given):
            report.metrics(name, metrics, root / STAGES[name].folder / METRICS)
    except KeyboardInterrupt:
        report.say("stopped. Run the same command again: what is done is skipped, and a training goes on from there")
        sys.exit(130)


@main.command("params")
@option.flag("--write", help="Write the result into the params file instead of printing it.")
@option.flag("--json", "as_json", help="Print one line of JSON, for the Kubeflow pipelines.")
@option.flag("--kfp", "for_kfp", help='Print the differences from the defaults, for options=... of "kfp run create".')
@option.params
def show_params(
    write: bool, as_json: bool, for_kfp: bool, params: Path, presets: Sequence[str], settings: Sequence[str]
) -> Iterable[str]:
    """Print params.yaml with presets and settings applied.

    Presets replace those that its line "presets" names; your own changes and comments stay. "dvc repro" reads
    params.yaml alone: --write puts presets in there for good.
    """
    from realmops.artifacts import canonical_json, write_bytes
    from realmops.commands.params import rewritten

    if for_kfp:
        from realmops.cluster.options import packed

        # kfp takes JSON apart, its server wants text
        return [canonical_json(packed(option.load_values(params, presets, settings))).decode()]
    if as_json:
        return [canonical_json(option.load_values(params, presets, settings)).decode()]
    text, changes = rewritten(params, presets, settings)
    if not write:
        return [text.removesuffix("\n")]
    write_bytes(params, text.encode())
    return changes or [f"{params}: nothing to change"]


@main.command("public-data")
@click.argument("names", nargs=-1, required=True, type=click.Choice(["squad", "ner", "nq"]), metavar="NAME...")
@option.file("--from", "folder", metavar="FOLDER", help="Take the published files from there.")
@option.file(
    "--to", default=Path("data/public"), metavar="FOLDER", help="The folder to write, with a folder for each set."
)
@option.count("--passages", "wanted", default=2000, help="Passages of squad, about.")
def public_data(**given: Any) -> Iterator[str]:
    """Download public data sets to where the presets look for them.

    "ner" has sentences with tagged names (wikigold, Universal NER, WNUT-17), for the tagger. "squad" has paragraphs of
    Wikipedia with questions, for the preset squad. "nq" has the questions of NQ-Open, for the presets nq and paper.
    """
    from realmops.commands.public_data import bring

    yield from bring(**given)


@main.command("import")
@option.folders(
    "--pretrained",
    help="A pre-trained checkpoint (embedder, scorer, encoder, openqa), for models/pretrain. Repeatable.",
)
@option.folders("--finetuned", help="A fine-tuned openqa or reader checkpoint, for models/finetune. Repeatable.")
@option.file("--blocks", metavar="FILE", help="The passages of the checkpoint, as TensorFlow records (blocks.tfr).")
@option.file("--titles", metavar="FILE", help="Their titles (titles.tfr).")
@option.new_root
def import_(**given: Any) -> None:
    """Read published REALM checkpoints, to go on from them.

    FOLDER is a whole copy of google/realm-cc-news-pretrained-* or google/realm-orqa-* on the Hugging Face hub. The
    stages finetune and evaluate go on from there.
    """
    from realmops.commands.published import import_published

    import_published(report=Console(), **given)


@main.command()
@click.argument("files", nargs=-1, type=option.PATH)
@option.format
@option.file("--out", required=True, help="The folder to write.")
@option.flag("--from-feedback", help="Make dev questions of people's feedback on answers; without FILES.")
@option.existing_root
@option.flag("--orqa-split", help="Split into train and dev as ORQA did, by FarmHash.")
@option.repeated("--drop-id-prefix", "drop", "TEXT", "Leave out questions whose id starts with TEXT.")
def questions(from_feedback: bool, root: Path, **given: Any) -> Iterable[str]:
    """Convert question files, to train and evaluate with them.

    FILES become JSON lines.
    """
    from realmops.commands.questions import convert_questions, questions_from_feedback

    if from_feedback == bool(given["files"]):
        raise click.UsageError("give either FILES or --from-feedback")
    if from_feedback:
        return questions_from_feedback(root, given["out"])
    return convert_questions(**given)


@main.command()
@option.values
@option.new_root
@option.file("--out", help="The folder to write; else data/cloze under the root.")
@click.option("--limit", type=click.IntRange(min=3), default=20_000, help="Make at most so many questions.")
def cloze(values: option.Values, root: Path, out: Path | None, limit: int, **given: Any) -> Iterable[str]:
    """Make questions from the corpus itself, if you have none.

    A question asks for a name or date of a sentence that is in another passage too. The preset "documents" names the
    files. The stages sample, snapshot and tag run first. run.seed decides which spans are drawn.
    """
    from realmops.commands.questions import make_cloze
    from realmops.stages import chain

    before = [name for name in chain(values) if name in ("sample", "snapshot", "tag")]
    _run(before, values=values, root=root, force=False, **given)
    return make_cloze(root, out, seed=values["run"]["seed"], limit=limit)
