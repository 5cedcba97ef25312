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
    "sample": "Make an invented encyclopedia, with questions about it.",
    "snapshot": "Cut documents into passages, make the vocabulary, index the words for BM25.",
    "tag": "Find the names and dates that may be masked; a tagger for names is trained here.",
    "ict": "Give the retriever (inverse cloze task) and the reader (masked words) a warm start.",
    "pretrain": "REALM: train retriever and reader together while the index is rebuilt in the background.",
    "finetune": "Fine-tune retriever and reader to answer questions.",
    "evaluate": "Measure exact match, recall and what bounds them; write predictions and the report.",
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
    help="The file with all options; relative file names in it start at its folder.",
)
_preset = _repeated(
    "--preset",
    "presets",
    "NAME",
    "Change what a preset lists: pipelines/presets/NAME.yaml, or the file NAME.",
)
_set = _repeated("--set", "settings", "SECTION.KEY=VALUE", "Change one option, for example pretrain.steps=100.")
_root, _old_root = (
    click.option(
        "--root",
        type=click.Path(path_type=Path, exists=must_exist, file_okay=False),
        default=Path(),
        help="The folder of the run: data/, models/ and results/ lie in it.",
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


_model = click.option(
    "--model",
    metavar="models:/NAME@champion",
    help="Take the champion of MLflow's registry; else the run's folder, with its newest update.",
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
    """Train REALM: a retriever and a reader learn together from masked words, then answer questions.

    Begin with "realmops run all". It runs the stages sample, snapshot, tag, ict, pretrain, finetune, evaluate, and
    skips what is done; "dvc repro" does the same with DVC. Then "realmops report" prints the results, "realmops
    explain" shows which passage each answer rests on, and "realmops ask" and "realmops serve" answer questions of your
    own. All options of the training are in params.yaml.
    """
    # Trainer and builder share the cores: a thread that waits must not spin while the other process wants to work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # They share a GPU too: without this, batches of ever new lengths leave gaps that fill its memory within minutes.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where JAX is, bm25s starts it: it would take 3/4 of a GPU's memory


@main.command(epilog="\b\n" + "\n".join(f"{name:<10}{what}" for name, what in STAGES.items()))
@click.argument("stage", type=click.Choice([*STAGES, "all"]), metavar="STAGE")
@_chosen(_root)
@click.option("--force", is_flag=True, help="Run again even if inputs and options did not change.")
@_watch_parent
def run(chosen: Chosen, stage: str, force: bool, watch_parent: int | None) -> None:
    """Run one stage of the training, or all of them in order.

    STAGE is "all" or one of the names below. A stage whose inputs and options did not change is skipped. A stage
    that was killed goes on from its checkpoints. Its output appears whole or not at all.
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
@click.option("--write", is_flag=True, help="Write the result into the params file instead of printing it.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON, which the Kubeflow pipelines take.")
@click.option(
    "--kfp", "for_kfp", is_flag=True, help='As --json, quoted once more: for options=... of "kfp run create".'
)
@_chosen()
def show_params(chosen: Chosen, write: bool, as_json: bool, for_kfp: bool) -> None:
    """Print params.yaml with presets and settings applied.

    Its comments are kept. "dvc repro" reads params.yaml and nothing else: --write puts a preset in there for good.
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
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    help="How often each variant is trained, with another seed each time.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="How many stages run side by side.")
@click.option(
    "--out",
    type=_path,
    default=Path("runs/ablations"),
    help="The folder for trainings, table.md, table.csv and report.html.",
)
@_chosen()
def run_ablations(chosen: Chosen, variants: tuple[str, ...], seeds: int, jobs: int, out: Path) -> None:
    """Train and compare variants of REALM.

    Among them are the systems of the paper's Tables 1 and 2. Names are the keys of pipelines/ablations/params.yaml;
    what each changes is in pipelines/presets/ablations. All are laid over the preset "ablation", which makes trainings
    small, unless --preset names another. What variants share is trained once, also by calls that run at the same time.
    A call that was stopped goes on when it is repeated.
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
    help="A pre-trained embedder, scorer, encoder or openqa checkpoint: makes models/pretrain. Can be repeated.",
)
@click.option(
    "--finetuned",
    type=_path,
    multiple=True,
    metavar="FOLDER",
    help="A fine-tuned openqa or reader checkpoint: makes models/finetune. Can be repeated.",
)
@click.option(
    "--blocks", type=_path, metavar="FILE", help="The passages of the checkpoint, as TensorFlow records (blocks.tfr)."
)
@click.option("--titles", type=_path, metavar="FILE", help="The titles of those passages (titles.tfr).")
@_root
def import_(root: Path, **given: Any) -> None:
    """Read published REALM checkpoints, to go on from them.

    FOLDER is a whole copy of one of google/realm-cc-news-pretrained-* or google/realm-orqa-* on the Hugging Face hub.
    The stages finetune and evaluate go on from what is made.
    """
    from realmops.commands.published import import_published

    import_published(root, **given, report=Console())


@main.command()
@click.argument("sentence", required=False)
@click.option(
    "--answer",
    metavar="TEXT",
    help="What to judge: the words behind [MASK] (one [MASK] stands for all), or an answer to --question.",
)
@click.option("--json", is_flag=True, help="Print everything about a sentence or a question as JSON.")
@click.option("--html", type=_path, help="Write the same as a page, too.")
@click.option("--before-after", is_flag=True, help='Show both: over the corpus before and after "realmops update".')
@_old_root
@_repeated(
    "--question",
    "questions",
    "ID|TEXT",
    "A question: the id of one in results/, or any text, which is asked now.",
)
@_repeated(
    "--failed-at",
    "failures",
    "NAME",
    "Only questions that failed at NAME: not_in_corpus, not_retrieved, too_long or reader.",
)
@click.option("--limit", type=click.IntRange(min=0), default=20, help="Explain at most so many questions.")
def explain(**given: Any) -> None:
    """Show which passage and span each answer rests on.

    Without SENTENCE and --question it shows the answers of the last evaluation, from results/: the passages with
    p(z|x), the probability that the retriever gives passage z for question x; the spans with their scores; and where
    each question failed.

    --question ID shows one of them. --question TEXT asks the fine-tuned model now. With --answer, --json, --html or
    --before-after the question of an ID is asked again, too.

    A SENTENCE with [MASK] in it asks the pre-trained model: what it guesses with and without retrieval, and what each
    passage is worth.
    """
    from realmops.commands.explain.command import explain

    for shown in explain(**given):
        show(shown, columns=160)


@main.command()
@_old_root
@click.option("--limit", type=click.IntRange(min=1), help="Take so many masked spans, drawn at random; else all.")
@click.option("--out", type=_path, help="The file to write; else alignments.parquet under the root.")
def alignments(root: Path, limit: int | None, out: Path | None) -> None:
    """Write which passages explain each masked span, as Parquet.

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
    """Say whether one run is better than another, and how sure.

    FIRST and SECOND are folders of runs (--root), or their results folders. Exact match and recall@5 are compared on
    the same questions, with intervals by a paired bootstrap.
    """
    from realmops.evaluate.compare import compare, sentence

    for row in compare(first, second, seed=0):
        click.echo(sentence(row))


@main.command()
@_question_files
@_format
@click.option("--out", type=_path, required=True, help="The folder to write.")
@click.option("--orqa-split", is_flag=True, help="Split into train and dev as ORQA did, by FarmHash.")
@_repeated("--drop-id-prefix", "drop", "TEXT", "Leave out questions whose id starts with TEXT.")
def questions(files: tuple[Path, ...], form: str, out: Path, orqa_split: bool, drop: tuple[str, ...]) -> None:
    """Convert question files to JSON lines.

    The files of the folder that it writes can be named in the section "questions" of params.yaml. The format jsonl is
    also that of NQ-Open and EfficientQA; webquestions is the original or brmson's.
    """
    from realmops.commands.questions import convert_questions

    for line in convert_questions(files, out, format=form, orqa_split=orqa_split, drop=drop):
        click.echo(line)


@main.command()
@_chosen(_root)
@click.option("--out", type=_path, help="The folder to write; else data/cloze under the root.")
@click.option("--limit", type=click.IntRange(min=3), default=20_000, help="Make at most so many questions.")
def cloze(chosen: Chosen, out: Path | None, limit: int) -> None:
    """Make questions from the corpus itself, if you have none.

    A name or date is taken out of its sentence and asked for, if it stands in another passage too. The files for
    train, dev and test are what the preset "documents" names. The stages sample, snapshot and tag run first, as
    "realmops run" runs them. The option run.seed decides which spans are drawn.
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
    """Say how many questions the corpus can answer at all.

    A question whose answer stands nowhere in the snapshot of the run, or in no span that is short enough, is out of
    reach for any model. FILES hold the questions. Beside these ceilings stands how many answers are in the first
    passages of BM25. No training is needed.
    """
    from realmops.commands.questions import measure_ceilings

    for line in measure_ceilings(files, root, format=form, progress=Console().progress):
        click.echo(line)


@main.command()
@_chosen(_old_root)
def update(chosen: Chosen) -> None:
    """Answer over changed documents; nothing is trained.

    The documents that snapshot.documents names are read again. Passages that are new are embedded; from then on a
    server answers from them. Then the test questions are answered, and the answers that changed are listed.
    Everything is written to updates/ under the root.
    """
    from realmops.commands.update import changes_table, update

    report = Console()
    done = update(chosen.values(), project=chosen.project, root=chosen.root, report=report)
    if done is not None:
        folder, metrics = done
        show(changes_table(folder), columns=120)
        report.metrics("update", metrics)


@main.command()
@_old_root
@_model
@click.option("--host", default="127.0.0.1", help="The address to listen at; 0.0.0.0 is every one of this machine.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, help="The port; 0 takes a free one.")
@click.option(
    "--token-file",
    type=_path,
    metavar="FILE",
    help="Only callers with the bearer token in FILE, or else in REALMOPS_TOKEN, may ask.",
)
@click.option(
    "--every", type=click.FloatRange(min=0.1), default=1.0, help="Seconds between two looks for a newer generation."
)
def serve(root: Path, model: str | None, host: str, port: int, token_file: Path | None, every: float) -> None:
    """Answer questions over HTTP, every word with its source.

    In a browser its address is a page to ask on. For programs, POST /v1/answer takes {"question": "..."}; the reply has
    the answer, its probability, and citations: the characters of the document at which each quotation stands. OpenAI's
    clients can ask at /v1/responses, those of the Open Inference Protocol at /v2. /docs lists the routes, /metrics is
    for Prometheus.

    After "realmops update" or "realmops promote" the newest generation is loaded beside the old one and takes its
    place; one that is damaged is refused. SIGTERM ends the server when all that was accepted is answered.
    """
    from realmops.serve.server import origin_of, serve, token_of

    token = token_of(token_file)
    serve(origin_of(root, model), host=host, port=port, token=token, every=every, say=Console().say)


@main.command()
@click.argument("question", nargs=-1)
@_old_root
@_model
@click.option("--questions", "file", type=_path, metavar="FILE", help="Ask the questions of a question file, too.")
@click.option("--json", "as_json", is_flag=True, help="Print each answer as a line of JSON, as POST /v1/answer has it.")
def ask(question: tuple[str, ...], root: Path, model: str | None, file: Path | None, as_json: bool) -> None:
    """Answer questions at the terminal, with their sources.

    QUESTION is a question in quotation marks; several can be given. "realmops verify" checks what --json prints.
    """
    from realmops.artifacts import canonical_json
    from realmops.serve.server import ask, origin_of, short

    for record in ask(origin_of(root, model), question, file):
        click.echo(canonical_json(record).decode() if as_json else "\n".join([record["question"], *short(record)]))


@main.command()
@click.argument("answers", type=_path)
@click.argument("documents", type=_path)
@click.option(
    "--format", "form", default="auto", metavar="NAME", help="The format of the documents, as snapshot.format names it."
)
def verify(answers: Path, documents: Path, form: str) -> None:
    """Check that every quotation stands in its source.

    ANSWERS holds lines of "realmops ask --json" or of POST /v1/answer, DOCUMENTS is what snapshot.documents names. Each
    citation and each passage is compared with the document's text, as its format's reader gives it. The exit code is 1
    when one does not stand where the answer says.
    """
    from realmops.commands.verify import verify

    verdict = verify(answers, documents, form, Console().progress)
    click.echo(
        f"{verdict.answers} answers, {verdict.quotations} quotations in {verdict.documents} documents checked, "
        f"{len(verdict.problems)} wrong"
    )
    _end_with(verdict.problems[:20])


@main.command("index-builder")
@click.option("--exchange", type=_path, help="The exchange: the folder shared with the trainer.")
@click.option("--snapshot", type=_path, help="The snapshot folder of the corpus.")
@_watch_parent
@click.option(
    "--follow",
    type=_path,
    metavar="FILE",
    help="Serve the training or the stage that FILE names, then the next one that it names.",
)
@click.option("--alive", type=_path, metavar="FILE", help="With --follow: touch FILE at each look, as a sign of life.")
def index_builder(
    exchange: Path | None, snapshot: Path | None, watch_parent: int | None, follow: Path | None, alive: Path | None
) -> None:
    """Rebuild the index with the newest weights of a training.

    The stage pretrain starts a builder itself; this command is for builders that run elsewhere. It embeds the corpus
    again whenever the trainer has published weights, and ends when the trainer has finished.

    On a cluster it runs with --follow: a file on the shared volume names the exchange and the snapshot of the run that
    needs a builder, and after one run the builder waits for the next.

    With --follow .realmops/STAGE.shards.json it helps the stage tag, finetune or evaluate to tag or embed the corpus.
    Any number may help; the result is the same bytes.
    """
    from realmops.index.builder_process import Follower, run_index_builder

    if follow is not None:
        if exchange or snapshot:
            raise ValueError("--follow names exchange and snapshot in its file: leave --exchange and --snapshot out")
        Follower(follow, alive).run()
    if exchange is None or snapshot is None:
        raise ValueError("name --exchange and --snapshot, or with --follow the file that holds both")
    from realmops.stages.shards import WORKS

    sys.exit(run_index_builder(exchange, snapshot, watch_parent=watch_parent, works=WORKS))


@main.command()
@click.option(
    "--passages",
    "sizes",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Plan for N passages instead of 1, 13, 100 and 1,000 million. Can be repeated.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=60.0,
    help="About how long to measure; two steps of one example are timed in any case.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was measured and what follows from it as JSON.")
@_chosen(_root)
def plan(chosen: Chosen, sizes: tuple[int, ...], seconds: float, as_json: bool) -> None:
    """Estimate time, memory and disk for larger corpora.

    Measures this machine for a minute, with the models, device, threads and precision of the params, and scales that
    up: seconds per step, time to rebuild the index, how stale the index is then, index builders, memory and disk.
    Passages are as long as those of the snapshot under the root; without one, as those of invented text.
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
    """Print the tables of results, and where the report is."""
    from realmops.commands.report import summary

    for shown in summary(root):
        show(shown, columns=100)


@main.command()
@_chosen()
@click.option(
    "--pipeline",
    type=_path,
    metavar="FILE",
    help="The compiled pipeline; else pipelines/train.yaml beside the params file.",
)
@_repeated("--argument", "arguments", "NAME=VALUE", "A parameter of the pipeline, for example image=realmops:1.")
@click.option("--experiment", default="realmops", help="The experiment in Kubeflow Pipelines.")
@click.option("--name", help="The name of the run; else it is made of the pipeline's name and the key.")
@click.option(
    "--endpoint",
    envvar="KF_PIPELINES_ENDPOINT",
    show_envvar=True,
    metavar="URL",
    help="The API of Kubeflow Pipelines.",
)
@click.option(
    "--namespace",
    help="The namespace of a Kubeflow profile, else, in a pod, its own; without profiles, of Kubeflow Pipelines.",
)
@click.option(
    "--keep-hours",
    type=click.FloatRange(0, 500_000),
    default=168.0,
    show_default=True,
    help="How long Kubeflow Pipelines 2.17 or newer keeps pods and logs after the run; 0: as it is set up.",
)
@click.option("--once", is_flag=True, help="Start nothing if a run with the same key is under way or has succeeded.")
@click.option(
    "--wait", "waits", is_flag=True, help="Wait until the run has ended; exit code 1 unless it has succeeded."
)
def submit(
    chosen: Chosen,
    pipeline: Path | None,
    arguments: tuple[str, ...],
    experiment: str,
    name: str | None,
    endpoint: str | None,
    namespace: str | None,
    keep_hours: float,
    once: bool,
    waits: bool,
) -> None:
    """Start the training on Kubeflow Pipelines.

    Each training has a key. Two trainings have the same key when they have the same params (tracking left out), the
    same files that these name, the same compiled pipeline, and the same of those arguments that decide what comes out:
    the image does, memory does not. With --once no second run of a key is started; one that failed may be tried again,
    in the same folder. The exit code is 2 for a mistake, and 1 when the server is away.
    """
    from realmops.cluster.server import Server
    from realmops.cluster.submit import SUCCEEDED, Pipeline, prepare, submit, wait

    compiled = Pipeline.read(pipeline or chosen.project / "pipelines" / "train.yaml")
    submission, notes = prepare(chosen.values(), chosen.project, compiled, arguments, experiment, name)
    for note in notes:
        click.echo(note, err=True)
    server = Server(endpoint, namespace)
    run = submit(submission, server, once=once, keep_hours=keep_hours, say=click.echo)
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
@click.option(
    "--copy", is_flag=True, help="Copy corpus, model and index into MLflow's artifacts, which else hold paths."
)
def promote(chosen: Chosen, name: str, margin: float, copy: bool) -> None:
    """Register the run in MLflow as champion, if it is better.

    Better than the present champion means: on the same questions by the same rules, exact match (EM) is higher by the
    margin at least, and the interval of the difference lies above 0. If it is not, the command says why and ends with
    exit code 1. The registered model answers questions and shows the passages that they rest on.
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
    """Send to MLflow what could not be sent while stages ran."""
    from realmops.tracking.sender import sync
    from realmops.tracking.stage_runs import tracking_folder

    result = sync(tracking_folder(root))
    click.echo(f"{result.sent} points and files sent")
    _end_with(result.problems)


@main.command()
@_old_root
@click.option(
    "--exchange",
    type=_path,
    help="Look at this exchange, the folder that trainer and index builders share, and not below the root.",
)
def doctor(root: Path, exchange: Path | None) -> None:
    """Say what is installed, what runs, and what is wrong.

    Shows versions and device, the state of each stage, what was not sent to MLflow yet, and whether trainer and index
    builders get on with each other.
    """
    from realmops.commands.doctor import diagnose

    for line in diagnose(root, exchange):
        click.echo(line)
