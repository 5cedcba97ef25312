"""Commands that search, answer questions, and update the corpus that answers come from."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from realmops.cli import shared_options as option
from realmops.cli.group import exit_with, main
from realmops.console import Console, show


@main.command()
@click.argument("query", required=False)
@option.existing_root
@option.model
@option.file("--from", "file", metavar="FILE", help="Rank documents for the questions in FILE instead of QUERY.")
@option.file("--run", "run", metavar="FOLDER", help="The output folder of --from.")
@click.option("-k", type=click.IntRange(1, 1000), default=10, help="The number of passages.")
@option.repeated(
    "--where",
    "where",
    "FIELD=VALUE",
    "Filter by a field of the document; also >=, >, <= and <. Two values of one field match either. A number also "
    "matches text that is a number, as in CSV files.",
)
@click.option(
    "--by", type=click.Choice(["run", "embeddings", "words"]), default="run", help="Rank by; run: the run's retriever."
)
@option.flag("--json", "as_json", help="Print one line of JSON, with BM25 and embedding scores.")
def search(
    query: str | None, root: Path, model: str | None, file: Path | None, run: Path | None, k: int,
    where: Sequence[str], by: Any, as_json: bool,
) -> Iterator[str]:  # fmt: skip
    """Find passages.

    You can search as soon as there is a snapshot: by BM25 at first, then by embeddings, too. Each passage is
    printed with its position in the document, and the words of QUERY in brackets.

    With --from and --run, the best 100 documents of each question are written to FOLDER/run.txt in TREC's format, and
    the questions to queries.tsv. FILE has any format of "realmops questions", or is the queries.jsonl of a BEIR folder.
    Judged documents or passages are written to qrels.txt, and nDCG@10, recall, MRR and MAP printed.
    """
    from realmops.answering.passage_search import format_passages
    from realmops.commands.open_model import open_model
    from realmops.commands.search import parse_filter
    from realmops.evaluate.search_run import rank_file
    from realmops.opening import open_search

    if (query is None) == (file is None) or (file is None) != (run is None):
        raise ValueError("give QUERY, or --from FILE with --run FOLDER")
    passages = open_model(root, model).passage_search if model else open_search(root, Console())
    if file is not None and run is not None:
        yield from rank_file(passages, file, run, [parse_filter(where)], by, Console().progress)
        return
    assert query is not None
    record = passages.search(query, k, [parse_filter(where)], by)
    if as_json:
        yield json.dumps(record, ensure_ascii=False)
    else:
        yield from format_passages(record)


@main.command()
@click.argument("question", nargs=-1)
@option.existing_root
@option.model
@option.file(
    "--from", "file", metavar="FILE", help='Also answer the questions in FILE, in any format of "realmops questions".'
)
@option.flag("--json", "as_json", help="Print each answer as a line of JSON, as POST /v1/answer does.")
def ask(question: Sequence[str], root: Path, model: str | None, file: Path | None, as_json: bool) -> Iterator[str]:
    """Answer questions at the terminal, with their sources.

    Put each QUESTION in quotation marks. "realmops verify" checks the output of --json.

    With FILE, exact match over its questions of people is printed at the end. A question that is too long gets an error
    instead of an answer, and the exit code is 1.
    """
    from realmops.answering.record import format_record
    from realmops.artifacts import canonical_json
    from realmops.commands.ask import ask

    failed = 0
    for record in ask(root, model, question, file, Console().log):
        failed += "error" in record
        yield canonical_json(record).decode() if as_json else "\n".join([record["question"], *format_record(record)])
    exit_with([f"{failed} of the questions in {file} have no answer; see their errors"] if failed else [])


@main.command()
@option.existing_root
@option.model
@click.option("--host", default="127.0.0.1", help="The address to listen on; 0.0.0.0: all interfaces.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, help="The port; 0: any free port.")
@option.file("--token-file", metavar="FILE", help="A file with the bearer token; default: the variable REALMOPS_TOKEN.")
@click.option(
    "--every", type=click.FloatRange(min=0.1), default=1.0, help="Seconds between checks for a newer model or index."
)
def serve(root: Path, model: str | None, token_file: Path | None, **options: Any) -> None:
    """Answer questions over HTTP, each answer with its source.

    Open the server's address in a browser for a page. Programs send {"question": "..."} to POST /v1/answer; /docs lists
    all routes. After "realmops update" or "realmops promote" the server reloads the newest model, unless its files are
    damaged. On SIGTERM it completes all accepted requests.
    """
    from realmops.commands.open_model import Champion
    from realmops.serve.model_sources import RunFolder
    from realmops.serve.server import read_token, serve

    source = RunFolder(root) if model is None else Champion(model, root)
    serve(source, token=read_token(token_file), log=Console().log, **options)


@main.command()
@option.existing_root
@option.model
@option.flag("--http", help="Listen on http://127.0.0.1:PORT/mcp, for local programs only.")
@click.option("--port", type=click.IntRange(1, 65535), default=8081, help="The port, with --http.")
def mcp(root: Path, model: str | None, http: bool, port: int) -> None:
    """Offer search and answers to assistants over MCP.

    The tools of the Model Context Protocol are "search" and, with a fine-tuned reader, "answer". An assistant starts
    "realmops mcp --root FOLDER" as a child process and uses its standard input and output, unless you give --http.
    """
    from realmops.serve.mcp import serve_mcp

    serve_mcp(root, model, port if http else None, Console())


@main.command()
@click.argument("answers", type=option.PATH, required=False)
@click.argument("documents", type=option.PATH, required=False)
@option.existing_root
@click.option("--format", default="auto", metavar="NAME", help="The format of the documents, as in snapshot.format.")
def verify(answers: Path | None, documents: Path | None, root: Path, **options: Any) -> Iterator[str]:
    """Check quotations against their sources, or the files of a run.

    Without arguments, all files of the run are compared with the digests in their manifests.

    ANSWERS is a file of lines from "realmops ask --json" or POST /v1/answer, DOCUMENTS the path in snapshot.documents.
    Each citation and each passage is compared with the document's text. The exit code is 1 if one differs.
    """
    from realmops.artifacts import verify_manifests
    from realmops.commands.verify import verify

    if answers is None:
        yield f"{verify_manifests(root)} files in {root} checked"
        return
    if documents is None:
        raise ValueError("give ANSWERS and DOCUMENTS, or neither to check the files of the run")
    verdict = verify(answers, documents, root=root, progress=Console().progress, **options)
    yield (
        f"{verdict.answers} answers, {verdict.quotations} quotations in {verdict.documents} documents checked, "
        f"{len(verdict.problems)} wrong"
    )
    exit_with(verdict.problems[:20])


@main.command()
@option.options
@option.existing_root
@option.flag("--may-shrink", help="Accept a corpus with less than half of the previous passages.")
def update(**options: Any) -> None:
    """Update the index to changed documents, without training.

    New passages of snapshot.documents are embedded, and a running server switches to them. Then the test questions are
    answered again, and changed answers are listed. The output is in updates/ under the root.
    """
    from realmops.commands.update import changes_table, update

    report = Console()
    if result := update(report=report, **options):
        folder, metrics = result
        if metrics.get("answers_changed"):
            show(changes_table(folder).to_rich_table())
        report.metrics("update", metrics)


@main.command()
@click.argument("folder", type=option.PATH)
@click.option(
    "--format",
    type=click.Choice(["sentence-transformers", "onnx", "parquet", "reader", "trec"]),
    default="sentence-transformers",
    help="The format to write.",
)
@click.option(
    "--push",
    metavar="OWNER/NAME",
    help="Upload FOLDER to this model repository of the Hugging Face hub too; needs HF_TOKEN in the environment.",
)
@option.existing_root
@option.model
def export(folder: Path, format: str, push: str | None, root: Path, model: str | None) -> Iterable[str]:
    """Export models, embeddings or rankings for other programs.

    sentence-transformers: a folder for SentenceTransformer(FOLDER). onnx: the same for ONNX Runtime; needs the extra
    "export". parquet: passages with embeddings, positions and fields, for any vector store. reader: for "realmops init
    --reader FOLDER". trec: the rankings, judgements and queries of the last evaluation.

    README.md in FOLDER is a model card with the figures of the run. A repository that --push creates is private; one
    that has files of others is refused.
    """
    from realmops.commands.export import export
    from realmops.commands.open_model import open_model

    return export(folder, format, lambda: open_model(root, model), root if model is None else None, push)
