"""The command line: takes options, calls what does the work, prints what that returns. No logic of its own."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from realmops import __version__
from realmops.console import Console, end_on_sigterm, explained_errors, show
from realmops.stages import METRICS, STAGES

HEADINGS = {
    "Run": ("init", "run", "params", "public-data", "import", "questions", "cloze"),
    "Look": ("report", "explain", "ceilings"),
    "Serve": ("search", "ask", "serve", "mcp", "verify", "update", "export"),
    "Compare": ("ablate", "compare", "promote"),
    "Operate": ("submit", "index-builder", "sync", "doctor"),
}
Values = dict[str, dict[str, Any]]
Command = Callable[..., Iterable[str] | None]

_path = click.Path(path_type=Path)
_file = partial(click.option, type=_path)
_flag = partial(click.option, is_flag=True)
_folders = partial(_file, metavar="FOLDER", multiple=True)
_count = partial(click.option, type=click.IntRange(min=1))


def _repeated(option: str, name: str, metavar: str, help: str, type: Any = None) -> Callable[[Command], Command]:
    """An option that can be given many times."""
    return click.option(option, name, multiple=True, metavar=metavar, help=f"{help} Repeatable.", type=type)


def _root(must_exist: bool) -> Callable[[Command], Command]:
    folder = click.Path(path_type=Path, exists=must_exist, file_okay=False)
    help = "The folder of the run, with data/, models/ and results/."
    return click.option("--root", type=folder, default=Path(), help=help)


_new_root, _old_root = _root(False), _root(True)
_watch_parent = click.option("--watch-parent", type=int, metavar="PID", help="End when this process, the parent, ends.")
_question_files = click.argument("files", nargs=-1, required=True, type=_path)
_format = click.option(
    "--format",
    default="auto",
    metavar="NAME",
    help="jsonl, webquestions, curatedtrec, squad, dpr, csv, or auto: by content.",
)
_model = click.option(
    "--model",
    metavar="models:/NAME@champion",
    help="The champion of MLflow's registry; default: the run's folder, with its newest update.",
)


_params = _file(
    "--params",
    default=Path("params.yaml"),
    help="The file of options that differ from the defaults; relative file names start at its folder.",
)
_preset = _repeated(
    "--preset",
    "presets",
    "NAME",
    "Apply a preset: presets/NAME.yaml, realmops' own NAME, or the file NAME.",
)
_set = _repeated("--set", "settings", "SECTION.KEY=VALUE", "Change one option, for example pretrain.steps=100.")


def _chosen(command: Command) -> Command:
    """Give a command --params, --preset and --set."""
    return _params(_preset(_set(command)))


def _loaded(params: Path, presets: Sequence[str], settings: Sequence[str]) -> Values:
    """All sections of the params file, presets and settings laid over it."""
    from realmops import config

    return config.load(params, presets=[config.preset_path(name, params) for name in presets], settings=settings)


def _values(command: Command) -> Command:
    """Give a command --params, --preset and --set, as ``values`` and the folder in which their file names start."""

    @_chosen
    @wraps(command)
    def with_values(params: Path, presets: Sequence[str], settings: Sequence[str], **others: Any) -> Any:
        return command(values=_loaded(params, presets, settings), project=params.parent, **others)

    return with_values


class ExplainedCommand(click.Command):
    """A command that prints what it returns, and ends with one message where a person can put right what is wrong."""

    def invoke(self, ctx: click.Context) -> None:
        with explained_errors():
            for line in super().invoke(ctx) or ():
                show(line)


class ExplainedCommands(click.Group):
    """A group of such commands, shown under headings."""

    command_class = ExplainedCommand

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for heading, names in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{n:<{width}}", self.commands[n].get_short_help_str(limit=80)) for n in names])


def _end_with(problems: Sequence[str]) -> None:
    """Name the problems and end with exit code 1, where there are any."""
    for problem in problems:
        click.echo(f"realmops: {problem}", err=True)
    if problems:
        sys.exit(1)


@click.group(cls=ExplainedCommands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__)
def main() -> None:
    """Train REALM: a retriever and a reader learn together from masked words, then answer questions.

    Begin with "realmops init" for documents of your own, then "realmops run all": it runs the stages sample, snapshot,
    tag, ict, pretrain, finetune, evaluate and skips those that are done. Then "realmops ask" and "realmops serve"
    answer your questions. docs/options.md has all options.
    """
    # Trainer and builder share the cores: a thread that waits must not spin while the other process wants to work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # They share a GPU too: without this, batches of ever new lengths leave gaps that fill its memory within minutes.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@main.command()
@click.argument("folder", type=_path, default=Path())
@_file("--documents", metavar="PATH", help="Your documents, a file or a folder; default: an invented encyclopedia.")
@_repeated(
    "--questions",
    "questions",
    "FILE",
    "Questions with answers: files with train, dev and test as a word of their names, or files to split.",
    type=_path,
)
@click.option("--encoder", metavar="NAME", help="An encoder's folder or name on the hub, or small: from scratch.")
@_file("--reader", metavar="FOLDER", help='A trained reader, of "realmops export --format reader".')
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
@_chosen
@_new_root
@_flag("--force", help="Run again even if inputs and options did not change.")
@_watch_parent
def run(stage: str, params: Path, presets: Sequence[str], settings: Sequence[str], **given: Any) -> None:
    """Run one stage of the training, or all of them in order.

    STAGE is "all" or a name below. A stage whose inputs and options did not change is skipped, and one that was killed
    resumes from its checkpoints.
    """
    from realmops.config_yaml import read_params
    from realmops.stages import chain

    values, named = _loaded(params, presets, settings), [*read_params(params)[0], *presets]
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
@_flag("--write", help="Write the result into the params file instead of printing it.")
@_flag("--json", "as_json", help="Print one line of JSON, for the Kubeflow pipelines.")
@_flag("--kfp", "for_kfp", help='Print the differences from the defaults, for options=... of "kfp run create".')
@_chosen
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
        return [canonical_json(packed(_loaded(params, presets, settings))).decode()]
    if as_json:
        return [canonical_json(_loaded(params, presets, settings)).decode()]
    text, changes = rewritten(params, presets, settings)
    if not write:
        return [text.removesuffix("\n")]
    write_bytes(params, text.encode())
    return changes or [f"{params}: nothing to change"]


@main.command("ablate")
@_repeated("--variant", "variants", "NAME", "Only this variant.")
@_count("--seeds", default=1, help="Seeds of each variant.")
@_count("--jobs", default=1, help="Stages that run at once.")
@_file("--out", default=Path("runs/ablations"), help="The folder for trainings, table.md, table.csv and report.html.")
@_chosen
def run_ablations(
    params: Path,
    presets: Sequence[str],
    settings: Sequence[str],
    variants: Sequence[str],
    seeds: int,
    jobs: int,
    out: Path,
) -> Iterator[str]:
    """Train and compare variants of REALM.

    The variants are those of variants.yaml, of the package or next to the params file; the preset ablations/NAME has
    what each changes. They start from the preset "ablation", with small trainings, unless --preset names another.
    Stages that variants share are trained once.
    """
    from realmops.commands.ablate import Ablation, ablate, summary, variants_of

    names = variants or tuple(variants_of(params))
    ablation = Ablation(params, presets or ("ablation",), settings, names, range(seeds), out)
    rows, failures = ablate(ablation, jobs=jobs, report=Console())
    yield from summary(rows, out)
    _end_with(failures)


@main.command("public-data")
@click.argument("names", nargs=-1, required=True, type=click.Choice(["squad", "ner", "nq"]), metavar="NAME...")
@_file("--from", "folder", metavar="FOLDER", help="Take the published files from there.")
@_file("--to", default=Path("data/public"), metavar="FOLDER", help="The folder to write, with a folder for each set.")
@_count("--passages", "wanted", default=2000, help="Passages of squad, about.")
def public_data(**given: Any) -> Iterator[str]:
    """Download public data sets to where the presets look for them.

    "ner" has sentences with tagged names (wikigold, Universal NER, WNUT-17), for the tagger. "squad" has paragraphs of
    Wikipedia with questions, for the preset squad. "nq" has the questions of NQ-Open, for the presets nq and paper.
    """
    from realmops.commands.public_data import bring

    yield from bring(**given)


@main.command("import")
@_folders(
    "--pretrained",
    help="A pre-trained checkpoint (embedder, scorer, encoder, openqa), for models/pretrain. Repeatable.",
)
@_folders("--finetuned", help="A fine-tuned openqa or reader checkpoint, for models/finetune. Repeatable.")
@_file("--blocks", metavar="FILE", help="The passages of the checkpoint, as TensorFlow records (blocks.tfr).")
@_file("--titles", metavar="FILE", help="Their titles (titles.tfr).")
@_new_root
def import_(**given: Any) -> None:
    """Read published REALM checkpoints, to go on from them.

    FOLDER is a whole copy of google/realm-cc-news-pretrained-* or google/realm-orqa-* on the Hugging Face hub. The
    stages finetune and evaluate go on from there.
    """
    from realmops.commands.published import import_published

    import_published(report=Console(), **given)


@main.command()
@click.argument("sentence", required=False)
@click.option(
    "--answer",
    metavar="TEXT",
    help="The words for [MASK] (one [MASK] for all), or an answer to --question.",
)
@_flag("--json", help="Print everything about a sentence or a question as JSON.")
@_file("--html", help="Write a page, too.")
@_flag("--before-after", help='Over the corpus before and after "realmops update".')
@_old_root
@_repeated("--question", "questions", "ID|TEXT", "The id of a question in results/, or any question, asked now.")
@_repeated(
    "--failed-at", "failures", "NAME", "Only failures at NAME: not_in_corpus, not_retrieved, too_long or reader."
)
@click.option("--limit", type=click.IntRange(min=0), default=20, help="Explain at most so many questions.")
def explain(**given: Any) -> None:
    """Show which passage and span each answer rests on.

    Without SENTENCE and --question it shows the last evaluation: the passages with p(z|x), the probability of passage z
    for question x; the spans with their scores; and where each question failed. --question shows one of these, or asks
    the fine-tuned model now (always with --answer, --json, --html or --before-after).

    A SENTENCE with [MASK] asks the pre-trained model: its guess with and without retrieval, and the utility of each
    passage.
    """
    from realmops.commands.explain import explain

    for shown in explain(**given):
        show(shown, columns=160)


@main.command()
@click.argument("first", type=_path)
@click.argument("second", type=_path)
def compare(first: Path, second: Path) -> Iterable[str]:
    """Say whether one run is better than another, and how sure.

    FIRST and SECOND are folders of runs (--root), or their results folders. Exact match and recall@5 are compared on
    questions with the same id, text and answers, with intervals by a paired bootstrap.
    """
    from realmops.evaluate.compare import compare, sentence

    return map(sentence, compare(first, second, seed=0))


@main.command()
@click.argument("files", nargs=-1, type=_path)
@_format
@_file("--out", required=True, help="The folder to write.")
@_flag("--from-feedback", help="Make dev questions of people's feedback on answers; without FILES.")
@_old_root
@_flag("--orqa-split", help="Split into train and dev as ORQA did, by FarmHash.")
@_repeated("--drop-id-prefix", "drop", "TEXT", "Leave out questions whose id starts with TEXT.")
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
@_values
@_new_root
@_file("--out", help="The folder to write; else data/cloze under the root.")
@click.option("--limit", type=click.IntRange(min=3), default=20_000, help="Make at most so many questions.")
def cloze(values: Values, root: Path, out: Path | None, limit: int, **given: Any) -> Iterable[str]:
    """Make questions from the corpus itself, if you have none.

    A question asks for a name or date of a sentence that is in another passage too. The preset "documents" names the
    files. The stages sample, snapshot and tag run first. run.seed decides which spans are drawn.
    """
    from realmops.commands.questions import make_cloze
    from realmops.stages import chain

    before = [name for name in chain(values) if name in ("sample", "snapshot", "tag")]
    _run(before, values=values, root=root, force=False, **given)
    return make_cloze(root, out, seed=values["run"]["seed"], limit=limit)


@main.command()
@_question_files
@_format
@_values
@_old_root
def ceilings(values: Values, project: Path, **given: Any) -> Iterable[str]:
    """Say how many questions the corpus can answer at all.

    FILES have the questions. No model can answer a question whose answer is nowhere in the run's snapshot, or in no
    span that is short enough (finetune.answer_wordpieces). The table also has how many answers are in the first
    passages of BM25 (finetune.reader_candidates). Name the presets of the run.
    """
    from realmops.commands.questions import measure_ceilings
    from realmops.config import parse_section

    limits = parse_section("finetune", values["finetune"])
    return measure_ceilings(limits=limits, progress=Console().progress, **given)


@main.command()
@_values
@_old_root
@_flag("--may-shrink", help="Accept a corpus with less than half of the earlier passages.")
def update(**given: Any) -> None:
    """Answer over changed documents; nothing is trained.

    The documents of snapshot.documents are read again, and new passages are embedded; from then on a server answers
    from them. Then the test questions are answered, and the answers that changed are listed. The output is in updates/
    under the root.
    """
    from realmops.commands.update import changes_table, update

    report = Console()
    if done := update(report=report, **given):
        folder, metrics = done
        show(changes_table(folder).for_console())
        report.metrics("update", metrics)


@main.command()
@click.argument("query")
@_old_root
@_model
@click.option("-k", type=click.IntRange(1, 1000), default=10, help="How many passages.")
@_repeated(
    "--where",
    "where",
    "FIELD=VALUE",
    "Only documents with this field; also >=, >, <= and <. A field that is named twice has either value. A number also "
    "finds texts that are numbers, as in CSV files.",
)
@click.option(
    "--by",
    type=click.Choice(["run", "embeddings", "words"]),
    default="run",
    help="run: as the run's retriever does.",
)
@_flag("--json", "as_json", help="Print one line of JSON, with the scores of words and of embeddings.")
def search(
    query: str, root: Path, model: str | None, k: int, where: Sequence[str], by: Any, as_json: bool
) -> Iterator[str]:
    """Find passages.

    This works as soon as there is a snapshot: by words at first, then by the newest retriever. Each passage is shown
    with its place in the document, the words of QUERY in brackets.
    """
    from realmops.commands.open_model import open_model
    from realmops.commands.search import filter_of, shown
    from realmops.stages.open_run import open_search

    passages = open_model(root, model).passage_search() if model else open_search(root, Console())
    record = passages.search(query, k, [filter_of(where)], by)
    if as_json:
        yield json.dumps(record, ensure_ascii=False)
    else:
        yield from shown(record)


@main.command()
@_old_root
@_model
@click.option("--host", default="127.0.0.1", help="The address to listen at; 0.0.0.0: all of this machine's.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, help="The port; 0: a free one.")
@_file(
    "--token-file",
    metavar="FILE",
    help="The bearer token that callers need; default: the variable REALMOPS_TOKEN.",
)
@click.option(
    "--every", type=click.FloatRange(min=0.1), default=1.0, help="Seconds between checks for a newer generation."
)
def serve(root: Path, model: str | None, token_file: Path | None, **given: Any) -> None:
    """Answer questions over HTTP, every word with its source.

    Open its address in a browser to ask on a page. For programs, POST /v1/answer takes {"question": "..."}; the reply
    has the answer, its probability, and citations, with their place in the document. /docs lists the other routes.

    After "realmops update" or "realmops promote" the server changes over to the newest generation, unless it is
    damaged. SIGTERM ends the server when all accepted requests are answered.
    """
    from realmops.serve.served_model import model_source
    from realmops.serve.server import serve, token_of

    serve(model_source(root, model), token=token_of(token_file), say=Console().say, **given)


@main.command()
@_old_root
@_model
@_flag("--http", help="Listen at http://127.0.0.1:PORT/mcp, for programs on this machine alone.")
@click.option("--port", type=click.IntRange(1, 65535), default=8081, help="The port, with --http.")
def mcp(root: Path, model: str | None, http: bool, port: int) -> None:
    """Offer search and answers to assistants by MCP.

    The tools of the Model Context Protocol are "search" and, once a model that reads passages is fine-tuned, "answer";
    each result names documents and characters. An assistant starts "realmops mcp --root FOLDER" itself and talks to it
    by standard input and output, unless --http is given.
    """
    from realmops.serve.mcp import serve_tools

    serve_tools(root, model, port if http else None, Console())


@main.command()
@click.argument("question", nargs=-1)
@_old_root
@_model
@_file("--from", "file", metavar="FILE", help='Ask the questions of FILE, too, in any format of "realmops questions".')
@_flag("--json", "as_json", help="Print each answer as a line of JSON, as POST /v1/answer does.")
def ask(question: Sequence[str], root: Path, model: str | None, file: Path | None, as_json: bool) -> Iterator[str]:
    """Answer questions at the terminal, with their sources.

    Put each QUESTION in quotation marks. "realmops verify" checks what --json prints.

    After the answers to FILE comes their exact match. A question of FILE that is too long gets an error instead of an
    answer, and the exit code is 1.
    """
    from realmops.answering.record import short
    from realmops.artifacts import canonical_json
    from realmops.commands.ask import ask

    failed = 0
    for record in ask(root, model, question, file, Console().say):
        failed += "error" in record
        yield canonical_json(record).decode() if as_json else "\n".join([record["question"], *short(record)])
    _end_with([f"{failed} of the questions in {file} could not be asked; their errors say why"] if failed else [])


@main.command()
@click.argument("answers", type=_path)
@click.argument("documents", type=_path)
@click.option("--format", default="auto", metavar="NAME", help="The format of the documents, as in snapshot.format.")
@_file("--boxes", metavar="FILE", help="Write the boxes of quotations on pages of a PDF, as JSON lines.")
def verify(**given: Any) -> Iterator[str]:
    """Check that every quotation is in its source.

    ANSWERS has lines of "realmops ask --json" or of POST /v1/answer, DOCUMENTS is what snapshot.documents names. Each
    citation and each passage is compared with the document's text. The exit code is 1 when one is wrong.
    """
    from realmops.commands.verify import verify

    verdict = verify(progress=Console().progress, **given)
    yield (
        f"{verdict.answers} answers, {verdict.quotations} quotations in {verdict.documents} documents checked, "
        f"{len(verdict.problems)} wrong"
    )
    _end_with(verdict.problems[:20])


@main.command()
@click.argument("folder", type=_path)
@click.option(
    "--format",
    type=click.Choice(["sentence-transformers", "onnx", "parquet", "reader"]),
    default="sentence-transformers",
    help="What to write.",
)
@_old_root
@_model
def export(folder: Path, format: str, root: Path, model: str | None) -> Iterable[str]:
    """Write retriever, reader or embeddings for use elsewhere.

    sentence-transformers: a folder that SentenceTransformer(FOLDER) opens, with the run's embeddings. onnx: the same
    for ONNX Runtime; needs the extra "export". parquet: every passage with its embedding, its place in its document and
    the document's other fields, for any vector store. reader: for "realmops init --reader FOLDER" alone.
    """
    from realmops.commands.export import export
    from realmops.commands.open_model import open_model

    return export(folder, format, lambda: open_model(root, model), root if model is None else None)


@main.command("index-builder")
@_file("--exchange", help="The folder shared with the trainer.")
@_file("--snapshot", help="The snapshot folder of the corpus.")
@_watch_parent
@_file("--follow", metavar="FILE", help="Serve the training or stage that FILE names, then the next one.")
@_file("--alive", metavar="FILE", help="With --follow: touch FILE as a heartbeat.")
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
@_old_root
def report(root: Path) -> None:
    """Print the tables of results, and where the report is."""
    from realmops.commands.report import summary

    for shown in summary(root):
        show(shown, columns=100)


@main.command()
@_values
@click.option("--pipeline", default="train", help="train, ablations, refresh, or a compiled pipeline's file.")
@_repeated("--argument", "arguments", "NAME=VALUE", "A parameter of the pipeline, for example image=realmops:1.")
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
@_flag("--once", help="Start nothing if a run with the same key is under way or has succeeded.")
@_flag("--wait", "waits", help="Wait until the run has ended; exit code 1 unless it has succeeded.")
def submit(
    values: Values,
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


@main.command()
@_values
@_old_root
@click.option("--name", default="realmops", help="The registered model in MLflow.")
@click.option(
    "--margin", type=click.FloatRange(0, 1), default=0.0, help="How much higher than the champion's its EM must be."
)
@_flag("--copy", help="Copy corpus, model and index into MLflow's artifacts, instead of their paths.")
def promote(**given: Any) -> Iterator[str]:
    """Register the run in MLflow as champion, if it is better.

    A run is better if its exact match (EM) on the same questions by the same rules is higher by the margin at least,
    and the interval of the difference is above 0. Otherwise the command prints why and ends with exit code 1.
    """
    from realmops.commands.promote import promote

    promotion = promote(**given)
    if not promotion.champion:
        _end_with([promotion.message])
    yield promotion.message


@main.command()
@_old_root
def sync(root: Path) -> Iterator[str]:
    """Send to MLflow what could not be sent while stages ran."""
    from realmops.tracking.runs import tracking_folder
    from realmops.tracking.sender import sync

    result = sync(tracking_folder(root))
    yield f"{result.sent} points and files sent"
    _end_with(result.problems)


@main.command()
@_old_root
@_file("--exchange", help="The folder shared by trainer and index builders, if not below the root.")
def doctor(root: Path, exchange: Path | None) -> Iterable[str]:
    """Show what is installed, what runs, and what is wrong.

    It prints versions and device, the state of each stage, what was not sent to MLflow yet, and the state of the
    exchange between trainer and index builders.
    """
    from realmops.commands.doctor import diagnose

    return diagnose(root, exchange)
