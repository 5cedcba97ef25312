"""The command line: reads params, calls the stages, prints what happens. No logic of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from realmops import __version__
from realmops.console import explained_errors

if TYPE_CHECKING:
    from realmops.stages.explanations import Explained

STAGES = {
    "sample": "Make the embedded corpus of invented facts, with its questions.",
    "snapshot": "Cut documents into passages, tokenise and hash them.",
    "tag": "Find the salient spans: entities by a tagger trained here, dates by expression.",
    "ict": "Warm up the retriever by the inverse cloze task and the reader by masked words.",
    "pretrain": "Pre-train retriever and reader together while the index is refreshed in the background.",
    "finetune": "Fine-tune query tower and reader for open-domain question answering.",
    "evaluate": "Measure exact match, recall, ceilings and intervals; write predictions, plots and the report.",
}
_explains_errors = explained_errors()
_params = click.option(
    "--params",
    type=click.Path(path_type=Path),
    default=Path("params.yaml"),
    show_default=True,
    help="The params file; relative file names in it start at its folder.",
)
_preset = click.option(
    "--preset",
    "presets",
    multiple=True,
    metavar="NAME",
    help="Lay pipelines/presets/NAME.yaml, or a file of that form, over the params. Can be repeated.",
)
_set = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Change one option, for example pretrain.steps=100. Can be repeated.",
)
_root, _old_root = (
    click.option(
        "--root",
        type=click.Path(path_type=Path, exists=must_exist, file_okay=False),
        default=Path(),
        show_default=True,
        help="Folder under which data/, models/ and results/ lie.",
    )
    for must_exist in (False, True)
)


_force = click.option(
    "--force", is_flag=True, help="Run even when the output was made from the same inputs and options."
)
_watch_parent = click.option(
    "--watch-parent", type=int, metavar="PID", help="End when this process, the parent, has ended."
)
_limit = click.option(
    "--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Explain at most so many questions."
)
_question_files = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
_format = click.option(
    "--format",
    "form",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="The format of the files: jsonl, webquestions, curatedtrec, squad, dpr, or auto, by their content.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
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
@_params
@_preset
@_set
@_root
@_force
@_watch_parent
@_explains_errors
def run(
    stage: str,
    params: Path,
    presets: tuple[str, ...],
    settings: tuple[str, ...],
    root: Path,
    force: bool,
    watch_parent: int | None,
) -> None:
    """Run STAGE, or "all" of them: sample, snapshot, tag, ict, pretrain, finetune, evaluate.

    A stage that was killed goes on from its checkpoints. Its output appears whole or not at all.
    """
    if watch_parent is None and "TORCHELASTIC_RUN_ID" in os.environ:
        watch_parent = os.getppid()  # torchrun, whose processes outlive it when it is killed
    if watch_parent is not None:
        from realmops.stages.runner import end_with

        end_with(watch_parent)
    _run(STAGES if stage == "all" else (stage,), params, presets, settings, root, force)


def _values(params: Path, presets: tuple[str, ...], settings: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    from realmops import config

    files = [config.preset_path(name, params) for name in presets]
    return config.load(params, presets=files, settings=settings)


def _run(
    names: Collection[str], params: Path, presets: tuple[str, ...], settings: tuple[str, ...], root: Path, force: bool
) -> None:
    from realmops.config import notes
    from realmops.console import Console
    from realmops.stages import check_files
    from realmops.stages.runner import run_stage

    # a stage that is told to end removes what it has half written and stops its index builder
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    values = _values(params, presets, settings)
    report = Console()
    check_files(names, values, params.parent, root)
    for note in notes(names, values):
        report.warn(note)
    for name in names:
        metrics = run_stage(name, values, project=params.parent, root=root, report=report, force=force)
        if metrics:  # none of a process that helps another to train
            report.metrics(name, metrics)


@main.command("params")
@click.option("--write", is_flag=True, help="Put the result back into the params file instead of printing it.")
@click.option("--json", "as_json", is_flag=True, help="As one line of JSON, which the Kubeflow pipelines take.")
@click.option("--kfp", "for_kfp", is_flag=True, help='The same quoted once more, for options=... of "kfp run create".')
@_params
@_preset
@_set
@_explains_errors
def show_params(
    write: bool, as_json: bool, for_kfp: bool, params: Path, presets: tuple[str, ...], settings: tuple[str, ...]
) -> None:
    """Print the params file with presets and settings laid over it, its comments kept.

    "dvc repro" reads params.yaml and nothing else: with --write a preset goes in there for good.
    """
    from realmops import config

    values = _values(params, presets, settings)
    if as_json or for_kfp:
        from realmops.artifacts import canonical_json

        text = canonical_json(values).decode()
        click.echo(canonical_json(text).decode() if for_kfp else text)  # kfp takes JSON apart, its server wants text
        return
    text, changes = config.rewritten(params, values)
    if write:
        from realmops.artifacts import write_bytes

        write_bytes(params, text.encode())
        click.echo("\n".join(changes) or f"{params}: nothing to change")
    else:
        click.echo(text, nl=False)


@main.command("ablate")
@click.option("--variant", "variants", multiple=True, metavar="NAME", help="Only this variant. Can be repeated.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Train each so many times.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Stages that run side by side.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/ablations"),
    show_default=True,
    help="The folder for trainings, table.md, table.csv and report.html.",
)
@_params
@_preset
@_set
@_explains_errors
def run_ablations(
    variants: tuple[str, ...],
    seeds: int,
    jobs: int,
    out: Path,
    params: Path,
    presets: tuple[str, ...],
    settings: tuple[str, ...],
) -> None:
    """Train and compare variants of REALM (the paper's Table 2), at the size of the preset "ablation".

    Without --preset that preset is used. What variants share is trained once, also by calls beside each other; a
    second call goes on where the first was stopped. The variants are the keys of pipelines/ablations/params.yaml, what
    they change is in pipelines/presets/ablations.
    """
    from realmops.console import Console
    from realmops.evaluate.ablation import as_markdown
    from realmops.stages import ablation
    from realmops.stages.runner import tracking_folder
    from realmops.stages.summary import browser_command

    chosen = variants or tuple(ablation.variants_of(params))
    what = ablation.Ablation(params, presets or ("ablation",), settings, chosen, range(seeds), out)
    rows, failures = ablation.ablate(what, jobs=jobs, report=Console())
    if rows:
        click.echo(as_markdown(rows), nl=False)
        click.echo(f"The page, which opens without a network: {out / 'report.html'}")
        if (tracking_folder(out) / "mlflow.db").is_file():
            click.echo(f"Compare runs in the browser: {browser_command(out)}")
    else:
        click.echo(f"No table: {ablation.REFERENCE} is not among what ended well; figures are in {out / 'outcomes'}")
    for failure in failures:
        click.echo(f"realmops: {failure}", err=True)
    if failures:
        sys.exit(1)


@main.command("import")
@click.option(
    "--pretrained",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FOLDER",
    help="A pre-trained embedder, scorer, encoder or openqa checkpoint. Can be repeated; makes models/pretrain.",
)
@click.option(
    "--finetuned",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FOLDER",
    help="A fine-tuned openqa or reader checkpoint. Can be repeated; makes models/finetune.",
)
@click.option("--blocks", type=click.Path(path_type=Path), metavar="FILE", help="Its passages, as blocks.tfr.")
@click.option("--titles", type=click.Path(path_type=Path), metavar="FILE", help="Their titles, as titles.tfr.")
@_root
@_explains_errors
def import_(
    pretrained: tuple[Path, ...], finetuned: tuple[Path, ...], blocks: Path | None, titles: Path | None, root: Path
) -> None:
    """Read REALM checkpoints in Hugging Face's format, so that finetune and evaluate go on from them.

    The folders are those of google/realm-cc-news-pretrained-* and google/realm-orqa-* on the hub, downloaded whole.
    """
    from realmops.console import Console
    from realmops.stages.published import import_published

    import_published(root, pretrained=pretrained, finetuned=finetuned, blocks=blocks, titles=titles, report=Console())


@main.command()
@_params
@_preset
@_set
@_root
@_force
@click.option("--explain", "explains", is_flag=True, help="Then say, question by question, what the answers rest on.")
@_limit
@_explains_errors
def evaluate(
    params: Path,
    presets: tuple[str, ...],
    settings: tuple[str, ...],
    root: Path,
    force: bool,
    explains: bool,
    limit: int,
) -> None:
    """Run the stage evaluate, as "run evaluate" does, and explain its answers if wanted."""
    _run(["evaluate"], params, presets, settings, root, force)
    if explains:
        _explain(root, (), (), limit)


@main.command()
@click.argument("sentence", required=False)
@click.option("--answer", metavar="TEXT", help="The words behind [MASK] (one [MASK] stands for all), or an answer.")
@click.option("--json", "as_json", is_flag=True, help="Everything about a sentence or a question as JSON.")
@click.option("--html", type=click.Path(path_type=Path), help="The same also as a page of its own.")
@click.option("--before-after", is_flag=True, help='Over the corpus of before and of after "realmops update".')
@_old_root
@click.option(
    "--question",
    "questions",
    multiple=True,
    metavar="ID|TEXT",
    help="The answer under results/ with this id; any other text is a question to ask now. Can be repeated.",
)
@click.option(
    "--failed-at",
    "failures",
    multiple=True,
    metavar="NAME",
    help="Only questions that failed there: not_in_corpus, not_retrieved, too_long, reader. Can be repeated.",
)
@_limit
@_explains_errors
def explain(
    sentence: str | None,
    answer: str | None,
    as_json: bool,
    html: Path | None,
    before_after: bool,
    root: Path,
    questions: tuple[str, ...],
    failures: tuple[str, ...],
    limit: int,
) -> None:
    """Say what answers rest on: passages with p(z|x), spans with scores, where each failed.

    Without SENTENCE it is about the answers under results/, all or those of the ids named by --question. A --question
    in words of your own is answered now by the fine-tuned model; so is that of an id with one of the options
    --answer, --json, --html and --before-after. With a SENTENCE that has [MASK] in it, it is about what the
    pre-trained model makes of that: its guess with and without retrieval, and what each passage is worth.
    """
    anew = answer is not None or as_json or html is not None or before_after
    if sentence is not None:
        if questions or failures:
            raise ValueError("--question and --failed-at are about questions: leave the sentence out")
    elif not questions:
        if anew:
            raise ValueError(
                "--answer, --json, --html and --before-after are about a sentence with [MASK] or a --question: give one"
            )
        _explain(root, (), failures, limit)
        return
    from realmops.evaluate.explain import sorted_out

    texts, ids = sorted_out(questions, root, anew=anew)
    if texts and failures:
        raise ValueError("--failed-at is about the answers under results/: leave it out, or name --question by id")
    if len(texts) > 1 and anew:
        raise ValueError("--answer, --json, --html and --before-after take one question: ask the others apart")
    if ids:
        _explain(root, ids, failures, limit)
    if sentence is None and not texts:
        return
    from realmops.stages import asked, masked
    from realmops.stages.update import before_and_after, of_pipeline

    sides = before_and_after(root) if before_after else (of_pipeline(root),)
    explained: Iterable[Sequence[Explained]]
    if sentence is not None:
        explained = [[masked.explain(sentence, root, side, answer=answer) for side in sides]]
    else:
        explained = zip(*(asked.explain(texts, root, side, answer=answer) for side in sides), strict=True)
    for number, found in enumerate(explained):
        if ids or number:
            click.echo()
        _show(found, as_json, html)


def _show(found: Sequence[Explained], as_json: bool, html: Path | None) -> None:
    from realmops.stages import explanations

    if html is not None:
        from realmops.artifacts import write_bytes

        write_bytes(html, explanations.as_page(found).encode())
    if as_json:
        click.echo(explanations.as_json(found))
    elif len(found) == 1:
        click.echo("\n".join(explanations.lines(found[0].sheet())))
    else:
        from rich.console import Console as Screen

        Screen(width=None if Screen().is_terminal else 160).print(explanations.side_by_side(*found))


def _explain(root: Path, ids: tuple[str, ...], failures: tuple[str, ...], limit: int) -> None:
    from realmops.evaluate.compare import read_results
    from realmops.evaluate.explain import chosen, explained, overview

    predictions = read_results(root)
    found = chosen(predictions, ids, failures)
    lines = [*overview(predictions), *("\n" + "\n".join(explained(p)) for p in found[:limit])]
    if len(found) > limit:
        lines.append(f"\n{len(found) - limit} more; --limit, --question and --failed-at choose others")
    click.echo("\n".join(lines))


@main.command()
@_old_root
@click.option("--limit", type=click.IntRange(min=1), help="Align so many masked spans, drawn by seed; else all.")
@click.option("--out", type=click.Path(path_type=Path), help="The file to write; else alignments.parquet in the root.")
@_explains_errors
def alignments(root: Path, limit: int | None, out: Path | None) -> None:
    """Align the masked salient spans of the pre-training corpus with the passages that explain them, as Parquet.

    One row for each span and candidate passage: p(z|x), p(z|x,y), retrieval utility, and whether the passage contains
    the span. Nobody labelled these alignments: the pre-trained model made them from masked words.
    """
    from realmops.console import Console
    from realmops.stages.alignments import FILE, align

    report, file = Console(), out or root / FILE
    metrics = align(root, file, limit=limit, report=report)
    report.metrics(str(file), metrics)


@main.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@_explains_errors
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
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write.")
@click.option("--orqa-split", is_flag=True, help="Split into train and dev as ORQA did, by FarmHash.")
@click.option("--drop-id-prefix", "drop", multiple=True, metavar="TEXT", help="Leave out ids that start so.")
@_explains_errors
def questions(files: tuple[Path, ...], form: str, out: Path, orqa_split: bool, drop: tuple[str, ...]) -> None:
    """Bring question FILES of any format into one folder of JSON lines, for the section questions of params.yaml.

    jsonl is also NQ-Open's and EfficientQA's form; webquestions is brmson's or the original; auto knows all by content.
    """
    from realmops.stages.questions import convert_questions

    for line in convert_questions(files, out, format=form, orqa_split=orqa_split, drop=drop):
        click.echo(line)


@main.command()
@_params
@_preset
@_set
@_root
@click.option("--out", type=click.Path(path_type=Path), help="The folder to write; else data/cloze in the root.")
@click.option("--limit", type=click.IntRange(min=3), default=20_000, show_default=True, help="Make at most so many.")
@_explains_errors
def cloze(
    params: Path, presets: tuple[str, ...], settings: tuple[str, ...], root: Path, out: Path | None, limit: int
) -> None:
    """Make questions from the corpus itself, where there are none: train, dev and test for the section questions.

    A name or date is taken out of its sentence and asked for; only those that stand in another passage too are taken.
    The stages sample, snapshot and tag are run before, as "run" does; run.seed decides what is drawn.
    """
    from realmops.stages.questions import make_cloze

    _run(("sample", "snapshot", "tag"), params, presets, settings, root, force=False)
    seed = _values(params, presets, settings)["run"]["seed"]
    for line in make_cloze(root, out, seed=seed, limit=limit):
        click.echo(line)


@main.command()
@_question_files
@_format
@_old_root
@_explains_errors
def ceilings(files: tuple[Path, ...], form: str, root: Path) -> None:
    """Say what no model can exceed with question FILES on the corpus under data/snapshot, with BM25 beside it."""
    from realmops.console import Console
    from realmops.stages.questions import measure_ceilings

    folder = root / "data" / "snapshot" / "corpus"
    for line in measure_ceilings(files, folder, format=form, progress=Console().progress):
        click.echo(line)


@main.command()
@_params
@_preset
@_set
@_old_root
@_explains_errors
def update(params: Path, presets: tuple[str, ...], settings: tuple[str, ...], root: Path) -> None:
    """Read changed documents under the trained model: embed what is new, answer the test questions, compare.

    Nothing is trained, and nothing that is there is changed: all goes to updates/ under the root.
    """
    from rich.console import Console as Screen

    from realmops.console import Console
    from realmops.stages import update as updating

    values = _values(params, presets, settings)
    report = Console()
    done = updating.update(values, project=params.parent, root=root, report=report)
    if done is None:
        return
    folder, metrics = done
    Screen(width=None if Screen().is_terminal else 120).print(updating.changes_table(folder))
    report.metrics("update", metrics)


@main.command("snapshot", context_settings={"ignore_unknown_options": True}, options_metavar="")
@click.option("--update", "wanted", is_flag=True, help="Do what the command update does.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF UPDATE]...")
@click.pass_context
def snapshot(context: click.Context, wanted: bool, options: tuple[str, ...]) -> None:
    """With --update: the same as the command update, with its options. The stage is 'realmops run snapshot'."""
    if not wanted:
        raise click.UsageError("--update is missing; the stage of that name is 'realmops run snapshot'")
    context.exit(update.main([*options], standalone_mode=False))


@main.command("index-builder")
@click.option("--exchange", type=click.Path(path_type=Path), help="The folder shared with the trainer.")
@click.option("--snapshot", type=click.Path(path_type=Path), help="The snapshot folder of the corpus.")
@_watch_parent
@click.option("--follow", type=click.Path(path_type=Path), metavar="FILE", help="Serve what FILE names, then the next.")
@click.option("--alive", type=click.Path(path_type=Path), metavar="FILE", help="With --follow: touch it at each look.")
@_explains_errors
def index_builder(
    exchange: Path | None, snapshot: Path | None, watch_parent: int | None, follow: Path | None, alive: Path | None
) -> None:
    """Embed the corpus again whenever the trainer has published weights, until it says that it has finished.

    With --follow it waits for the next trainer then: that is how it runs on a cluster, where a file on the shared
    volume names the exchange and the snapshot of the run that needs it.
    """
    from realmops.stages.builder import Follower, run_index_builder

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
    show_default=True,
    help="How long to measure, about: two steps of one example are timed in any case.",
)
@click.option("--json", "as_json", is_flag=True, help="What was measured and what follows, as JSON.")
@_params
@_preset
@_set
@_root
@_explains_errors
def plan(
    sizes: tuple[int, ...],
    seconds: float,
    as_json: bool,
    params: Path,
    presets: tuple[str, ...],
    settings: tuple[str, ...],
    root: Path,
) -> None:
    """Say what a corpus takes: seconds per step and refresh, staleness, builders, memory and disk.

    Measures this machine for a minute at the shapes of the params, on the device, threads and precision of the section
    run; the rest is proportion. The lengths of passages are those of the snapshot under the root, or else of invented
    text.
    """
    from rich.console import Console as Screen

    from realmops.artifacts import canonical_json
    from realmops.config import parse_section
    from realmops.console import Console
    from realmops.stages import plan as planning
    from realmops.stages.calibration import calibrate

    values = _values(params, presets, settings)
    measured = calibrate(values, root, seconds, Console())
    index, refresh = parse_section("index", values["index"]), values["pretrain"]["refresh_every"]
    scales = planning.scales_of(measured, sizes or planning.PASSAGES, index, refresh)
    if as_json:
        click.echo(canonical_json(planning.as_values(measured, scales)).decode())
        return
    Screen(width=None if Screen().is_terminal else 120).print(planning.table(measured, scales))
    for note in planning.notes(measured, scales):
        click.echo(note)


@main.command()
@_old_root
@_explains_errors
def report(root: Path) -> None:
    """Print the table of results and say where the report and the runs are."""
    from realmops.stages.summary import print_summary

    print_summary(root)


@main.command()
@_params
@_preset
@_set
@click.option(
    "--pipeline",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The compiled pipeline; pipelines/train.yaml beside the params file without it.",
)
@click.option(
    "--argument",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of the pipeline, for example image=realmops:1. Can be repeated.",
)
@click.option("--experiment", default="realmops", show_default=True, help="The experiment in Kubeflow Pipelines.")
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
@_explains_errors
def submit(
    params: Path,
    presets: tuple[str, ...],
    settings: tuple[str, ...],
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
    from realmops import submit as submitting

    file = pipeline or params.parent / "pipelines" / "train.yaml"
    submission, notes = submitting.prepare(
        _values(params, presets, settings),
        params.parent,
        submitting.Pipeline.read(file),
        arguments,
        experiment,
        name,
    )
    for note in notes:
        click.echo(note, err=True)
    server = submitting.Server(endpoint, namespace)
    run = submitting.submit(submission, server, once=once, say=click.echo)
    if waits:
        state = submitting.wait(run.run_id, submission.pipeline.tasks, server, say=click.echo)
        sys.exit(0 if state == submitting.SUCCEEDED else 1)


@main.command()
@_params
@_preset
@_set
@_old_root
@click.option("--name", default="realmops", show_default=True, help="The registered model in MLflow.")
@click.option(
    "--margin",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="By how much its EM must be higher than the champion's.",
)
@click.option("--copy", is_flag=True, help="Put corpus, model and index into MLflow's artifacts, not their paths.")
@_explains_errors
def promote(
    params: Path,
    presets: tuple[str, ...],
    settings: tuple[str, ...],
    root: Path,
    name: str,
    margin: float,
    copy: bool,
) -> None:
    """Register the finished run as the champion in MLflow if it is better than the present one, else say why not.

    Better: measured on the same questions by the same rules, EM higher by the margin, and the interval of the
    difference above 0. Exit code 1 when it is not. The registered model answers questions with their evidence.
    """
    from realmops.stages.promote import promote

    outcome = promote(
        _values(params, presets, settings), project=params.parent, root=root, name=name, margin=margin, copy=copy
    )
    click.echo(outcome.message if outcome.champion else f"realmops: {outcome.message}", err=not outcome.champion)
    sys.exit(0 if outcome.champion else 1)


@main.command()
@_old_root
@_explains_errors
def sync(root: Path) -> None:
    """Send metrics and files to MLflow that could not be sent while the stages ran."""
    from realmops import tracking
    from realmops.stages.runner import tracking_folder

    result = tracking.sync(tracking_folder(root))
    click.echo(f"{result.sent} points and files sent")
    for problem in result.problems:
        click.echo(f"realmops: {problem}", err=True)
    sys.exit(1 if result.problems else 0)


@main.command()
@_old_root
@click.option("--exchange", type=click.Path(path_type=Path), help="An exchange folder outside the stage's work folder.")
@_explains_errors
def doctor(root: Path, exchange: Path | None) -> None:
    """Say what is installed, which device is used, what a stage is doing, and whether the exchange is healthy."""
    from realmops.stages.doctor import diagnose

    for line in diagnose(root, exchange):
        click.echo(line)
