"""Commands that search and answer, and keep the corpus of answers up to date."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from realmops.cli import shared_options as option
from realmops.cli.group import exit_with, main
from realmops.console import Console, show


@main.command()
@click.argument("query")
@option.existing_root
@option.model
@click.option("-k", type=click.IntRange(1, 1000), default=10, help="How many passages.")
@option.repeated(
    "--where",
    "where",
    "FIELD=VALUE",
    "Only documents with this field; also >=, >, <= and <. A field that is named twice has either value. A number also "
    "finds texts that are numbers, as in CSV files.",
)
@click.option(
    "--by", type=click.Choice(["run", "embeddings", "words"]), default="run", help="run: as the run's retriever does."
)
@option.flag("--json", "as_json", help="Print one line of JSON, with the scores of words and of embeddings.")
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
@click.argument("question", nargs=-1)
@option.existing_root
@option.model
@option.file(
    "--from", "file", metavar="FILE", help='Ask the questions of FILE, too, in any format of "realmops questions".'
)
@option.flag("--json", "as_json", help="Print each answer as a line of JSON, as POST /v1/answer does.")
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
    exit_with([f"{failed} of the questions in {file} could not be asked; their errors say why"] if failed else [])


@main.command()
@option.existing_root
@option.model
@click.option("--host", default="127.0.0.1", help="The address to listen at; 0.0.0.0: all of this machine's.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, help="The port; 0: a free one.")
@option.file(
    "--token-file", metavar="FILE", help="The bearer token that callers need; default: the variable REALMOPS_TOKEN."
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
@option.existing_root
@option.model
@option.flag("--http", help="Listen at http://127.0.0.1:PORT/mcp, for programs on this machine alone.")
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
@click.argument("answers", type=option.PATH)
@click.argument("documents", type=option.PATH)
@click.option("--format", default="auto", metavar="NAME", help="The format of the documents, as in snapshot.format.")
@option.file("--boxes", metavar="FILE", help="Write the boxes of quotations on pages of a PDF, as JSON lines.")
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
    exit_with(verdict.problems[:20])


@main.command()
@option.values
@option.existing_root
@option.flag("--may-shrink", help="Accept a corpus with less than half of the earlier passages.")
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
@click.argument("folder", type=option.PATH)
@click.option(
    "--format",
    type=click.Choice(["sentence-transformers", "onnx", "parquet", "reader"]),
    default="sentence-transformers",
    help="What to write.",
)
@option.existing_root
@option.model
def export(folder: Path, format: str, root: Path, model: str | None) -> Iterable[str]:
    """Write retriever, reader or embeddings for use elsewhere.

    sentence-transformers: a folder that SentenceTransformer(FOLDER) opens, with the run's embeddings. onnx: the same
    for ONNX Runtime; needs the extra "export". parquet: every passage with its embedding, its place in its document and
    the document's other fields, for any vector store. reader: for "realmops init --reader FOLDER" alone.
    """
    from realmops.commands.export import export
    from realmops.commands.open_model import open_model

    return export(folder, format, lambda: open_model(root, model), root if model is None else None)
