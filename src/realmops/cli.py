"""The command line: takes options, calls what does the work, prints what that returns. No logic of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from realmops import __version__
from realmops.console import Console, end_on_sigterm, explained_errors, show

STAGES = {
    "sample": "Make the embedded corpus of invented facts, with its questions.",
    "snapshot": "Cut documents into passages, tokenise and hash them.",
    "tag": "Find the salient spans: entities by a tagger trained here, dates by expression.",
    "ict": "Warm up the retriever by the inverse cloze task and the reader by masked words.",
    "pretrain": "Pre-train retriever and reader together while the index is refreshed in the background.",
    "finetune": "Fine-tune query tower and reader for open-domain question answering.",
    "evaluate": "Measure exact match, recall, ceilings and intervals; write predictions, plots and the report.",
}
Command = Callable[..., None]
_path = click.Path(path_type=Path)


@dataclass(frozen=True)
class Chosen:
    """What --params, --preset, --set and --root name."""

    params: Path
    presets: tuple[str, ...]
    settings: tuple[str, ...]
    root: Path

    @property
    def project(self) -> Path:
        """Where relative file names of the params start."""
        return self.params.parent

    def values(self) -> dict[str, dict[str, Any]]:
        """All sections of the params file, presets and settings laid over it."""
        from realmops import config

        files = [config.preset_path(name, self.params) for name in self.presets]
        return config.load(self.params, presets=files, settings=self.settings)


def _repeated(option: str, name: str, metavar: str, help: str) -> Callable[[Command], Command]:
    """An option that can be given many times."""
    return click.option(option, name, multiple=True, metavar=metavar, help=f"{help} Can be repeated.")


_params = click.option(
    "--params",
    type=_path,
    default=Path("params.yaml"),
    help="The params file; relative file names in it start at its folder.",
)
_preset = _repeated(
    "--preset", "presets", "NAME", "Lay pipelines/presets/NAME.yaml, or a file of that form, over the params."
)
_set = _repeated("--set", "settings", "SECTION.KEY=VALUE", "Change one option, for example pretrain.steps=100.")
_root, _old_root = (
    click.option(
        "--root",
        type=click.Path(path_type=Path, exists=must_exist, file_okay=False),
        default=Path(),
        help="Folder under which data/, models/ and results/ lie.",
    )
    for must_exist in (False, True)
)
_watch_parent = click.option(
    "--watch-parent", type=int, metavar="PID", help="End when this process, the parent, has ended."
)
_question_files = click.argument("files", nargs=-1, required=True, type=_path)
_format = click.option(
    "--format",
    "form",
    default="auto",
    metavar="NAME",
    help="The format of the files: jsonl, webquestions, curatedtrec, squad, dpr, or auto, by their content.",
)


def _chosen(*root: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Give a command --params, --preset, --set and, where one is named, --root: all as one first argument."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_chosen(
            params: Path, presets: tuple[str, ...], settings: tuple[str, ...], root: Path = Path(), **others: Any
        ) -> None:
            command(Chosen(params, presets, settings, root), **others)

        decorated: Command = with_chosen
        options: tuple[Callable[[Command], Command], ...] = (*root, _set, _preset, _params)
        for option in options:
            decorated = option(decorated)
        return decorated

    return decorate


class ExplainedCommand(click.Command):
    """A command that ends with one message where a person can mend what is wrong."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        with explained_errors():
            return super().invoke(ctx)


class ExplainedCommands(click.Group):
    """A group of such commands."""

    command_class = ExplainedCommand


@click.group(cls=ExplainedCommands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__)
def main() -> None:
    """REALM: pre-train a language model that learns which documents to read.

    The stages, in order: sample, snapshot, tag, ict, pretrain, finetune, evaluate. "dvc repro" runs what has
    changed; "realmops run all" does the same without DVC.
    """
    # Trainer and builder share the cores: a thread that waits must not spin while the other process wants to work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@main.command(epilog="\b\n" + "\n".join(f"{name:<10}{what}" for name, what in STAGES.items()))
@click.argument("stage", type=click.Choice([*STAGES, "all"]), metavar="STAGE")
@_chosen(_root)
@click.option("--force", is_flag=True, help="Run even when the output was made from the same inputs and options.")
@_watch_parent
def run(chosen: Chosen, stage: str, force: bool, watch_parent: int | None) -> None:
    """Run STAGE, or "all" of them: sample, snapshot, tag, ict, pretrain, finetune, evaluate.

    A stage that was killed goes on from its checkpoints. Its output appears whole or not at all.
    """
    from realmops.commands.run import end_with_parent

    end_with_parent(watch_parent)
    _run(chosen, tuple(STAGES) if stage == "all" else (stage,), force)


def _run(chosen: Chosen, names: tuple[str, ...], force: bool) -> None:
    from realmops.commands.run import run_stages

    end_on_sigterm()
    report = Console()
    stages = run_stages(names, chosen.values(), project=chosen.project, root=chosen.root, report=report, force=force)
    for name, metrics in stages:
        report.metrics(name, metrics)


@main.command("params")
@click.option("--write", is_flag=True, help="Put the result back into the params file instead of printing it.")
@click.option("--json", "as_json", is_flag=True, help="As one line of JSON, which the Kubeflow pipelines take.")
@click.option("--kfp", "for_kfp", is_flag=True, help='The same quoted once more, for options=... of "kfp run create".')
@_chosen()
def show_params(chosen: Chosen, write: bool, as_json: bool, for_kfp: bool) -> None:
    """Print the params file with presets and settings laid over it, its comments kept.

    "dvc repro" reads params.yaml and nothing else: with --write a preset goes in there for good.
    """
    from realmops.artifacts import canonical_json, write_bytes
    from realmops.config import rewritten

    values = chosen.values()
    if as_json or for_kfp:
        text = canonical_json(values).decode()
        click.echo(canonical_json(text).decode() if for_kfp else text)  # kfp takes JSON apart, its server wants text
        return
    text, changes = rewritten(chosen.params, values)
    if write:
        write_bytes(chosen.params, text.encode())
        click.echo("\n".join(changes) or f"{chosen.params}: nothing to change")
    else:
        click.echo(text, nl=False)


@main.command("ablate")
@_repeated("--variant", "variants", "NAME", "Only this variant.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, help="Train each so many times.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Stages that run side by side.")
@click.option(
    "--out",
    type=_path,
    default=Path("runs/ablations"),
    help="The folder for trainings, table.md, table.csv and report.html.",
)
@_chosen()
def run_ablations(chosen: Chosen, variants: tuple[str, ...], seeds: int, jobs: int, out: Path) -> None:
    """Train and compare variants of REALM (the paper's Table 2), at the size of the preset "ablation".

    Without --preset that preset is used. What variants share is trained once, also by calls beside each other; a
    second call goes on where the first was stopped. The variants are the keys of pipelines/ablations/params.yaml, what
    they change is in pipelines/presets/ablations.
    """
    from realmops.commands.ablate import Ablation, ablate, summary, variants_of

    names = variants or tuple(variants_of(chosen.params))
    presets = chosen.presets or ("ablation",)
    ablation = Ablation(chosen.params, presets, chosen.settings, names, range(seeds), out)
    rows, failures = ablate(ablation, jobs=jobs, report=Console())
    for line in summary(rows, out):
        click.echo(line)
    _end_with(failures)


def _end_with(problems: Sequence[str]) -> None:
    """Name the problems and end with exit code 1, where there are any."""
    for problem in problems:
        click.echo(f"realmops: {problem}", err=True)
    if problems:
        sys.exit(1)


@main.command("import")
@click.option(
    "--pretrained",
    type=_path,
    multiple=True,
    metavar="FOLDER",
    help="A pre-trained embedder, scorer, encoder or openqa checkpoint. Can be repeated; makes models/pretrain.",
)
@click.option(
    "--finetuned",
    type=_path,
    multiple=True,
    metavar="FOLDER",
    help="A fine-tuned openqa or reader checkpoint. Can be repeated; makes models/finetune.",
)
@click.option("--blocks", type=_path, metavar="FILE", help="Its passages, as blocks.tfr.")
@click.option("--titles", type=_path, metavar="FILE", help="Their titles, as titles.tfr.")
@_root
def import_(root: Path, **given: Any) -> None:
    """Read REALM checkpoints in Hugging Face's format, so that finetune and evaluate go on from them.

    The folders are those of google/realm-cc-news-pretrained-* and google/realm-orqa-* on the hub, downloaded whole.
    """
    from realmops.commands.published import import_published

    import_published(root, **given, report=Console())


@main.command()
@click.argument("sentence", required=False)
@click.option("--answer", metavar="TEXT", help="The words behind [MASK] (one [MASK] stands for all), or an answer.")
@click.option("--json", is_flag=True, help="Everything about a sentence or a question as JSON.")
@click.option("--html", type=_path, help="The same also as a page of its own.")
@click.option("--before-after", is_flag=True, help='Over the corpus of before and of after "realmops update".')
@_old_root
@_repeated(
    "--question",
    "questions",
    "ID|TEXT",
    "The answer under results/ with this id; any other text is a question to ask now.",
)
@_repeated(
    "--failed-at",
    "failures",
    "NAME",
    "Only questions that failed there: not_in_corpus, not_retrieved, too_long, reader.",
)
@click.option("--limit", type=click.IntRange(min=0), default=20, help="Explain at most so many questions.")
def explain(**given: Any) -> None:
    """Say what answers rest on: passages with p(z|x), spans with scores, where each failed.

    Without SENTENCE it is about the answers under results/, all or those of the ids named by --question. A --question
    in words of your own is answered now by the fine-tuned model; so is that of an id with one of the options
    --answer, --json, --html and --before-after. With a SENTENCE that has [MASK] in it, it is about what the
    pre-trained model makes of that: its guess with and without retrieval, and what each passage is worth.
    """
    from realmops.commands.explain.command import explain

    for shown in explain(**given):
        show(shown, columns=160)


@main.command()
@_old_root
@click.option("--limit", type=click.IntRange(min=1), help="Align so many masked spans, drawn by seed; else all.")
@click.option("--out", type=_path, help="The file to write; else alignments.parquet in the root.")
def alignments(root: Path, limit: int | None, out: Path | None) -> None:
    """Align the masked salient spans of the pre-training corpus with the passages that explain them, as Parquet.

    One row for each span and candidate passage: p(z|x), p(z|x,y), retrieval utility, and whether the passage contains
    the span. Nobody labelled these alignments: the pre-trained model made them from masked words.
    """
    from realmops.commands.alignments import FILE, align

    report, file = Console(), out or root / FILE
    report.metrics(str(file), align(root, file, limit=limit, report=report))


@main.command()
@click.argument("first", type=_path)
@click.argument("second", type=_path)
def compare(first: Path, second: Path) -> None:
    """Is run FIRST better than run SECOND on the same questions, and how sure: EM and recall@5, paired bootstrap.

    Both are folders of runs (--root) or their results folders.
    """
    from realmops.evaluate.compare import compare, sentence

    for row in compare(first, second, seed=0):
        click.echo(sentence(row))


@main.command()
@_question_files
@_format
@click.option("--out", type=_path, required=True, help="The folder to write.")
@click.option("--orqa-split", is_flag=True, help="Split into train and dev as ORQA did, by FarmHash.")
@click.option("--drop-id-prefix", "drop", multiple=True, metavar="TEXT", help="Leave out ids that start so.")
def questions(files: tuple[Path, ...], form: str, out: Path, orqa_split: bool, drop: tuple[str, ...]) -> None:
    """Bring question FILES of any format into one folder of JSON lines, for the section questions of params.yaml.

    jsonl is also NQ-Open's and EfficientQA's form; webquestions is brmson's or the original; auto knows all by content.
    """
    from realmops.commands.questions import convert_questions

    for line in convert_questions(files, out, format=form, orqa_split=orqa_split, drop=drop):
        click.echo(line)


@main.command()
@_chosen(_root)
@click.option("--out", type=_path, help="The folder to write; else data/cloze in the root.")
@click.option("--limit", type=click.IntRange(min=3), default=20_000, help="Make at most so many.")
def cloze(chosen: Chosen, out: Path | None, limit: int) -> None:
    """Make questions from the corpus itself, where there are none: train, dev and test for the section questions.

    A name or date is taken out of its sentence and asked for; only those that stand in another passage too are taken.
    The stages sample, snapshot and tag are run before, as "run" does; run.seed decides what is drawn.
    """
    from realmops.commands.questions import make_cloze

    _run(chosen, ("sample", "snapshot", "tag"), force=False)
    for line in make_cloze(chosen.root, out, seed=chosen.values()["run"]["seed"], limit=limit):
        click.echo(line)


@main.command()
@_question_files
@_format
@_old_root
def ceilings(files: tuple[Path, ...], form: str, root: Path) -> None:
    """Say what no model can exceed with question FILES on the corpus under data/snapshot, with BM25 beside it."""
    from realmops.commands.questions import measure_ceilings

    for line in measure_ceilings(files, root, format=form, progress=Console().progress):
        click.echo(line)


@main.command()
@_chosen(_old_root)
def update(chosen: Chosen) -> None:
    """Read changed documents under the trained model: embed what is new, answer the test questions, compare.

    Nothing is trained, and nothing that is there is changed: all goes to updates/ under the root.
    """
    from realmops.commands.update import changes_table, update

    report = Console()
    done = update(chosen.values(), project=chosen.project, root=chosen.root, report=report)
    if done is not None:
        folder, metrics = done
        show(changes_table(folder), columns=120)
        report.metrics("update", metrics)


@main.command("index-builder")
@click.option("--exchange", type=_path, help="The folder shared with the trainer.")
@click.option("--snapshot", type=_path, help="The snapshot folder of the corpus.")
@_watch_parent
@click.option("--follow", type=_path, metavar="FILE", help="Serve what FILE names, then the next.")
@click.option("--alive", type=_path, metavar="FILE", help="With --follow: touch it at each look.")
def index_builder(
    exchange: Path | None, snapshot: Path | None, watch_parent: int | None, follow: Path | None, alive: Path | None
) -> None:
    """Embed the corpus again whenever the trainer has published weights, until it says that it has finished.

    With --follow it waits for the next trainer then: that is how it runs on a cluster, where a file on the shared
    volume names the exchange and the snapshot of the run that needs it.
    """
    from realmops.index.builder_process import Follower, run_index_builder

    if follow is not None:
        if exchange or snapshot:
            raise ValueError("--follow names exchange and snapshot in its file: leave --exchange and --snapshot out")
        Follower(follow, alive).run()
    if exchange is None or snapshot is None:
        raise ValueError("name --exchange and --snapshot, or with --follow the file that holds both")
    sys.exit(run_index_builder(exchange, snapshot, watch_parent=watch_parent))


@main.command()
@click.option(
    "--passages",
    "sizes",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Plan for so many passages instead of 1, 13, 100 and 1,000 million. Can be repeated.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=60.0,
    help="How long to measure, about: two steps of one example are timed in any case.",
)
@click.option("--json", "as_json", is_flag=True, help="What was measured and what follows, as JSON.")
@_chosen(_root)
def plan(chosen: Chosen, sizes: tuple[int, ...], seconds: float, as_json: bool) -> None:
    """Say what a corpus takes: seconds per step and refresh, staleness, builders, memory and disk.

    Measures this machine for a minute at the shapes of the params, on the device, threads and precision of the section
    run; the rest is proportion. The lengths of passages are those of the snapshot under the root, or else of invented
    text.
    """
    from realmops.artifacts import canonical_json
    from realmops.commands.plan.calibration import calibrate
    from realmops.commands.plan.scales import PASSAGES, as_values, notes, scales_of, table
    from realmops.config import parse_section

    values = chosen.values()
    measured = calibrate(values, chosen.root, seconds, Console())
    index, refresh = parse_section("index", values["index"]), values["pretrain"]["refresh_every"]
    scales = scales_of(measured, sizes or PASSAGES, index, refresh)
    if as_json:
        click.echo(canonical_json(as_values(measured, scales)).decode())
        return
    show(table(measured, scales), columns=120)
    for note in notes(measured, scales):
        click.echo(note)


@main.command()
@_old_root
def report(root: Path) -> None:
    """Print the table of results and say where the report and the runs are."""
    from realmops.commands.report import summary

    for shown in summary(root):
        show(shown, columns=100)


@main.command()
@_chosen()
@click.option(
    "--pipeline",
    type=_path,
    metavar="FILE",
    help="The compiled pipeline; pipelines/train.yaml beside the params file without it.",
)
@_repeated("--argument", "arguments", "NAME=VALUE", "A parameter of the pipeline, for example image=realmops:1.")
@click.option("--experiment", default="realmops", help="The experiment in Kubeflow Pipelines.")
@click.option("--name", help="The name of the run; of the pipeline and the key without it.")
@click.option(
    "--endpoint",
    envvar="KF_PIPELINES_ENDPOINT",
    show_envvar=True,
    metavar="URL",
    help="The API of Kubeflow Pipelines.",
)
@click.option("--namespace", help="The namespace of a Kubeflow profile; in a pod its own without it.")
@click.option("--once", is_flag=True, help="Only when no run of the same training lives or has succeeded.")
@click.option("--wait", "waits", is_flag=True, help="Until the run has ended; exit code 1 unless it has succeeded.")
def submit(
    chosen: Chosen,
    pipeline: Path | None,
    arguments: tuple[str, ...],
    experiment: str,
    name: str | None,
    endpoint: str | None,
    namespace: str | None,
    once: bool,
    waits: bool,
) -> None:
    """Submit the training to Kubeflow Pipelines, with --once one run for each key.

    The key is the same when params (without tracking), the files that they name, the compiled pipeline and the
    arguments that decide what comes out (the image, not the memory) are the same. A run that failed may be tried
    again, in the same folder. Exit code 2 for a mistake, 1 when the server is away.
    """
    from realmops.cluster.submit import SUCCEEDED, Pipeline, Server, prepare, submit, wait

    compiled = Pipeline.read(pipeline or chosen.project / "pipelines" / "train.yaml")
    submission, notes = prepare(chosen.values(), chosen.project, compiled, arguments, experiment, name)
    for note in notes:
        click.echo(note, err=True)
    server = Server(endpoint, namespace)
    run = submit(submission, server, once=once, say=click.echo)
    if waits:
        sys.exit(0 if wait(run.run_id, compiled.tasks, server, say=click.echo) == SUCCEEDED else 1)


@main.command()
@_chosen(_old_root)
@click.option("--name", default="realmops", help="The registered model in MLflow.")
@click.option(
    "--margin",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="By how much its EM must be higher than the champion's.",
)
@click.option("--copy", is_flag=True, help="Put corpus, model and index into MLflow's artifacts, not their paths.")
def promote(chosen: Chosen, name: str, margin: float, copy: bool) -> None:
    """Register the finished run as the champion in MLflow if it is better than the present one, else say why not.

    Better: measured on the same questions by the same rules, EM higher by the margin, and the interval of the
    difference above 0. Exit code 1 when it is not. The registered model answers questions with their evidence.
    """
    from realmops.commands.promote import promote

    values, project, root = chosen.values(), chosen.project, chosen.root
    promotion = promote(values, project=project, root=root, name=name, margin=margin, copy=copy)
    if promotion.champion:
        click.echo(promotion.message)
    else:
        _end_with([promotion.message])


@main.command()
@_old_root
def sync(root: Path) -> None:
    """Send metrics and files to MLflow that could not be sent while the stages ran."""
    from realmops.stages.runner import tracking_folder
    from realmops.tracking.sender import sync

    result = sync(tracking_folder(root))
    click.echo(f"{result.sent} points and files sent")
    _end_with(result.problems)


@main.command()
@_old_root
@click.option("--exchange", type=_path, help="An exchange folder outside the stage's work folder.")
def doctor(root: Path, exchange: Path | None) -> None:
    """Say what is installed, which device is used, what a stage is doing, and whether the exchange is healthy."""
    from realmops.commands.doctor import diagnose

    for line in diagnose(root, exchange):
        click.echo(line)
