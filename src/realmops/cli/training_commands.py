"""Commands that set up a run, and train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from realmops.cli import shared_options as option
from realmops.cli.group import main
from realmops.console import Console, end_on_sigterm
from realmops.stages import METRICS, STAGES, STEPS


@main.command()
@click.argument("folder", type=option.PATH, default=Path())
@option.file(
    "--documents",
    metavar="PATH",
    help="Your documents, a file or a folder (of BEIR: with questions); default: a synthetic encyclopedia.",
)
@option.repeated(
    "--questions",
    "questions",
    "FILE",
    "Questions with answers: files with train, dev and test as a word in their names, or files to split.",
    type=option.PATH,
)
@click.option("--encoder", metavar="NAME", help="The encoder: a folder, a name on the hub, or small: from scratch.")
@click.option(
    "--reader",
    metavar="NAME",
    help="The reader of answers: a folder or a name on the hub, of transformers' AutoModelForQuestionAnswering.",
)
@option.flag("--no-reader", help="Search alone: passages, and no answers.")
@click.option(
    "--cluster",
    type=click.Choice(["standalone", "local", "production"]),
    default="standalone",
    help="Kubeflow Pipelines only, or Kubeflow profiles on one machine or on many.",
)
@click.option("--image", metavar="NAME", help="The image of the pods, NAME:TAG or NAME@DIGEST; default: one to set.")
def init(reader: str | None, no_reader: bool, **options: Any) -> Iterator[str]:
    """Create a project in FOLDER, or in the current folder.

    You get params.yaml, dvc.yaml, a README with your commands, and files for Kubernetes, Argo CD, Flux and GitHub. No
    file is overwritten.
    """
    from realmops.commands.init import init
    from realmops.options import NO_READER

    if reader and no_reader:
        raise ValueError("--reader and --no-reader exclude each other; give one of them")
    yield from init(**options, reader=NO_READER if no_reader else reader)


@main.command(epilog="\b\n" + "\n".join(f"{stage.name:<10}{stage.what}" for stage in STAGES.values()))
@click.argument("stage", type=click.Choice([*STEPS, "all"]), metavar="STAGE")
@option.params
@option.new_root
@option.flag("--force", help="Run again even if inputs and options are unchanged.")
def run(stage: str, params: Path, presets: Sequence[str], settings: Sequence[str], **others: Any) -> None:
    """Run one stage of the training, or all in order.

    STAGE is "all", a name below, or "cloze": questions generated from the corpus. A stage with unchanged inputs and
    options is skipped, and a killed stage resumes from its checkpoints.
    """
    from realmops.config_yaml import read_params
    from realmops.stages import planned_steps

    options, names = option.load_options(params, presets, settings), [*read_params(params)[0], *presets]
    others |= {"options": options, "presets": names, "project": params.parent}
    _run(planned_steps(options) if stage == "all" else (stage,), **others)


def _run(names: Iterable[str], root: Path, **options: Any) -> None:
    from realmops.commands.run import run_stages

    end_on_sigterm()
    report = Console()
    for name, metrics in run_stages(tuple(names), report=report, root=root, **options):
        report.metrics(name, metrics, root / STAGES[name].folder / METRICS)


@main.command()
@option.params
@option.existing_root
@option.flag("--undo", help="Go back to the models as published.")
def adapt(params: Path, presets: Sequence[str], settings: Sequence[str], root: Path, undo: bool) -> Iterator[str]:
    """Train the models on your documents and questions, and keep them only if they are better.

    They are compared on questions.test, else questions.dev, else questions generated from the documents.
    """
    from realmops.commands import adapt

    end_on_sigterm()
    if undo:
        return adapt.undo(params, root=root, report=Console())
    return adapt.adapt(params, presets, settings, root=root, report=Console())


@main.command("params")
@option.flag("--write", help="Write the result to the params file instead of printing it.")
@option.flag("--json", "as_json", help="Print one line of JSON, for the Kubeflow pipelines.")
@option.flag("--kfp", "for_kfp", help='Print the differences from the defaults, for options=... of "kfp run create".')
@option.params
def show_params(
    write: bool, as_json: bool, for_kfp: bool, params: Path, presets: Sequence[str], settings: Sequence[str]
) -> Iterable[str]:
    """Print params.yaml with presets and settings applied.

    Presets replace those in its line "presets"; your own changes and comments stay. "dvc repro" reads only
    params.yaml: use --write to save presets there.
    """
    from realmops.artifacts import canonical_json, write_bytes
    from realmops.commands.params import rewritten

    if for_kfp:
        from realmops.cluster.packed_options import pack_options

        # "kfp run create" parses JSON, but the server expects a string
        return [canonical_json(pack_options(option.load_options(params, presets, settings))).decode()]
    if as_json:
        return [canonical_json(option.load_options(params, presets, settings).model_dump()).decode()]
    text, changes, _ = rewritten(params, presets, settings)
    if not write:
        return [text.removesuffix("\n")]
    write_bytes(params, text.encode())
    return changes or [f"{params}: no changes"]


@main.command("public-data")
@click.argument("names", nargs=-1, required=True, type=click.Choice(["squad", "ner", "nq"]), metavar="NAME...")
@option.file("--from", "folder", metavar="FOLDER", help="Read the published files from this folder.")
@option.file(
    "--to", default=Path("data/public"), metavar="FOLDER", help="The folder to write, with one subfolder per set."
)
@option.count("--passages", default=2000, help="The approximate number of passages of squad.")
def public_data(**options: Any) -> Iterator[str]:
    """Download public data sets to the paths that presets expect.

    "ner" has sentences with tagged names (wikigold, Universal NER, WNUT-17), for the tagger. "squad" has paragraphs of
    Wikipedia with questions, for the preset squad. "nq" has the questions of NQ-Open, for the presets nq and paper.
    """
    from realmops.starter.public_data import fetch_data_sets

    yield from fetch_data_sets(**options)


@main.command()
@click.argument("folder", type=option.PATH)
@click.option(
    "--encoder", metavar="NAME", help="The encoder to train: a folder, or a name on the hub; default: all-MiniLM-L6-v2."
)
@option.count("--questions", default=3000, help="The number of training questions, of at most 77,000.")
@option.file("--from", "source", metavar="FOLDER", help="Read the published file train-v1.1.json from this folder.")
def reader(**options: Any) -> Iterator[str]:
    """Make a reader from public questions, for documents without any.

    It is trained on SQuAD 1.1 and written into FOLDER in the format of transformers, with a model card: use it with
    "realmops init --reader FOLDER", or publish it. A killed command resumes when it is called again.
    """
    from realmops.commands.public_reader import PRESET, TRAINED, reader_training

    with reader_training(**options, report=Console()) as training:
        folders = {"project": training.work, "root": training.work}
        _run(TRAINED, options=training.options, presets=[PRESET], force=False, **folders)
        yield from training.write()


@main.command("import")
@option.folders(
    "--pretrained", help="A pre-trained checkpoint (embedder, scorer, encoder, openqa) for models/pretrain. Repeatable."
)
@option.folders("--finetuned", help="A fine-tuned openqa or reader checkpoint for models/finetune. Repeatable.")
@option.file("--blocks", metavar="FILE", help="The passages of the checkpoint, as TensorFlow records (blocks.tfr).")
@option.file("--titles", metavar="FILE", help="The titles of the passages (titles.tfr).")
@option.new_root
def import_(**options: Any) -> None:
    """Import published REALM checkpoints.

    FOLDER is a complete copy of google/realm-cc-news-pretrained-* or google/realm-orqa-* on the Hugging Face hub. You
    can then run the stages finetune and evaluate.
    """
    from realmops.commands.published import import_published

    import_published(report=Console(), **options)


@main.command()
@click.argument("files", nargs=-1, type=option.PATH)
@option.format
@option.file(
    "--out", help="The folder to write; with --label and --from-feedback the file, by default questions/own.jsonl."
)
@option.flag("--label", "labels", help="Answer your own questions at the terminal; without FILES.")
@option.flag("--from-feedback", help="Add the questions of users' feedback on answers; without FILES.")
@option.existing_root
@option.flag("--orqa-split", help="Split into train and dev by FarmHash, as ORQA.")
@option.repeated("--drop-id-prefix", "drop", "TEXT", "Exclude questions whose id starts with TEXT.")
def questions(
    files: Sequence[Path], out: Path | None, labels: bool, from_feedback: bool, root: Path, **options: Any
) -> Iterable[str]:
    """Convert question FILES to JSON lines, or label your own.

    A folder of the benchmark BEIR gives questions with relevance judgements, one file for each split of its qrels.

    With --label you type a question, see the best five passages, and type the answer or copy it from one of them. You
    need a snapshot. If there is a model, its answer is proposed. --from-feedback adds the answers that users of
    "realmops serve" confirmed or corrected to the same file; the newest answer to a question counts. Use the file as
    questions.dev.
    """
    from realmops.answering.feedback import save_confirmed_labels
    from realmops.answering.own_questions import OWN_QUESTIONS
    from realmops.commands.questions import convert_questions, label

    if [bool(files), labels, from_feedback].count(True) != 1:
        raise click.UsageError("give either FILES, --label or --from-feedback")
    if labels:
        return label(root, out or OWN_QUESTIONS, Console())
    if from_feedback:
        return save_confirmed_labels(root, out or OWN_QUESTIONS)
    if out is None:
        raise click.UsageError("give --out with the folder to write")
    return convert_questions(files, out, **options)
