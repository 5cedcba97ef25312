"""realmops from other programs: Python, and assistants by the Model Context Protocol, with its SDK's client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

import forked
import pytest
import small_project
from mcp import Client, StdioServerParameters
from serving import near, served
from small_project import cli, wait_for

import realmops
from realmops import Answerer, Searcher
from realmops.config import load_params
from realmops.opening import open_search
from realmops.serve.mcp import build_mcp_server

QUESTION = "Where was the poet Anna Berg born?"
SERVE = (Path(__file__).parents[1] / "docs" / "serve.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", SERVE, re.MULTILINE | re.DOTALL)
SERVER = "127.0.0.1:8080"


@pytest.fixture
def root(finished: Path) -> Path:
    return finished


def test_a_program_searches_and_asks(root: Path) -> None:
    answerer = Answerer.open(root)
    found = answerer.answer(QUESTION)
    [record] = [json.loads(line) for line in cli("ask", QUESTION, "--root", root, "--json").stdout.splitlines()]
    assert (found.text, found.abstained) == (record["answer"], record["abstained"])
    assert (found.score, found.probability) == pytest.approx((record["score"], record["probability"]), rel=1e-4)
    assert [asdict(citation) for citation in found.citations] == near(record["citations"])
    assert found.quote is not None
    assert found.quote.quote == record["quote"]["quote"]
    assert [passage.passage_id for passage in found.passages] == [p["passage_id"] for p in record["passages"]]
    first = found.passages[0].passage_id
    assert first not in {passage.passage_id for passage in answerer.answer(QUESTION, without=[first]).passages}
    searcher = Searcher.open(root)
    passages = searcher.search(QUESTION, 3)
    assert passages == answerer.searcher().search(QUESTION, 3)
    printed = json.loads(cli("search", QUESTION, "--root", root, "-k", "3", "--json").stdout)["passages"]
    assert [{"passage_id": p.passage_id, "score": p.score} for p in passages] == near(
        [{"passage_id": p["passage_id"], "score": p["score"]} for p in printed]
    )
    [best] = searcher.search(QUESTION, 1, by="embeddings")
    embedding_PE, scale = searcher._search.passages, searcher._search.retriever.scale  # type: ignore[union-attr]
    scores_P = embedding_PE.vectors(slice(None)).numpy() @ searcher.embed([QUESTION])[0] * scale  # type: ignore[union-attr]
    assert best.score == pytest.approx(scores_P.max(), abs=1e-5), "the embeddings are those of the index"


def test_importing_realmops_loads_nothing_heavy() -> None:
    code = "import sys, realmops; print([name for name in ('torch', 'mlflow', 'pyarrow') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    assert sorted(realmops.__all__) == sorted(name for name in realmops.__all__ if hasattr(realmops, name))
    with pytest.raises(AttributeError, match="no attribute 'Sercher'"):
        realmops.Sercher  # noqa: B018


# Examples that people copy


def printed(example: str, capsys: pytest.CaptureFixture[str], **words: str | Path) -> str:
    """Return the output of an example after replacing words of it."""
    for old, new in words.items():
        assert old in example, f"{example}\nhas no {old}"
        example = example.replace(old, str(new))
    capsys.readouterr()
    exec(compile(example, "an example", "exec", dont_inherit=True), {"__name__": "__main__"})
    return capsys.readouterr().out


@pytest.mark.parametrize("example", [example for example in EXAMPLES if SERVER not in example])
def test_an_example_of_the_page_runs(root: Path, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "Answerer" in example:
        found = Answerer.open(root).answer(QUESTION)
        words = {"FOLDER": root, "QUERY": QUESTION, "QUESTION": QUESTION}
        expected = f"{found.text} {found.probability} {[citation.quote for citation in found.citations]}\n"
    else:
        options: dict[str, Any] = {"filters": {"team": "a"}} if "filters" in example else {}
        words = {"FOLDER": root, "QUERY": QUESTION}
        passages = Searcher.open(root).search(QUESTION, 5, **options)
        expected = "".join(f"{passage.title} {passage.score} {passage.text}\n" for passage in passages)
    assert printed(example, capsys, **words) == expected


def test_the_example_that_queries_a_server_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answerer.open(root).answer(QUESTION)
    with served(root) as server:
        words = {SERVER: server.url.removeprefix("http://"), "QUESTION": QUESTION}
        [out] = [printed(one, capsys, **words) for one in EXAMPLES if SERVER in one]
    assert answer.text
    assert answer.text in out


# The Model Context Protocol

REFUSED = [
    ("search", {"query": " "}, "the query is empty"),
    ("search", {"query": "x" * 2001}, "at most 2000 characters"),
    ("answer", {"question": "Who?"}, "Error executing tool answer"),
]


async def call_tools(client: Client) -> tuple[list[str], dict[str, Any]]:
    async with client:
        listed = await client.list_tools()
        [schema] = [tool.input_schema for tool in listed.tools if tool.name == "search"]
        assert {"minimum": 1, "maximum": 20}.items() <= schema["properties"]["k"].items()
        found = await client.call_tool("search", {"query": QUESTION, "k": 2})
        refused = await client.call_tool("search", {"query": QUESTION, "filters": {"absent": 1}})
        assert refused.is_error
        assert "no document has the field 'absent'" in refused.content[0].text
        results = {"search": json.loads(found.content[0].text)}
        if len(listed.tools) > 1:
            answered = await client.call_tool("answer", {"question": QUESTION})
            results["answer"] = json.loads(answered.content[0].text)
    return [one.name for one in listed.tools], results


def check_results(results: dict[str, Any], root: Path) -> None:
    assert results["search"] == near(json.loads(cli("search", QUESTION, "--root", root, "-k", "2", "--json").stdout))
    assert {"document_id", "start", "end", "uri"} < results["search"]["passages"][0].keys()
    if "answer" in results:
        assert results["answer"] == near(json.loads(cli("ask", QUESTION, "--root", root, "--json").stdout))


def test_an_assistant_starts_the_server_and_calls_its_tools(root: Path) -> None:
    program = StdioServerParameters(command=sys.executable, args=["-m", "realmops", "mcp", "--root", str(root)])
    names, results = asyncio.run(call_tools(Client(program)))
    assert names == ["search", "answer"]
    check_results(results, root)


def test_programs_call_the_tools_over_http(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = forked.realmops("mcp", "--root", root, "--http", "--port", str(port), log=Path(os.devnull))

    def answers() -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        return False

    wait_for(answers, 60)
    names, results = asyncio.run(call_tools(Client(f"http://127.0.0.1:{port}/mcp")))
    assert names == ["search", "answer"]
    check_results(results, root)
    process.terminate()
    process.wait()


def test_the_tools_are_listed_once_the_model_is_open_and_answer_only_with_a_reader(root: Path) -> None:
    tools, opened = {"search": open_search(root, small_project.Quiet()).search}, Event()

    async def use() -> tuple[list[str], list[Any]]:
        async with Client(build_mcp_server(lambda: opened.wait(60) and tools)) as client:  # initialised
            listing = asyncio.create_task(client.list_tools())
            assert not (await asyncio.wait([listing], timeout=0.1))[0]
            opened.set()
            names = [tool.name for tool in (await listing).tools]
            return names, [await client.call_tool(name, arguments) for name, arguments, _ in REFUSED]

    names, replies = asyncio.run(use())
    assert names == ["search"]
    for reply, (_, _, message) in zip(replies, REFUSED, strict=True):
        assert (reply.is_error, message in reply.content[0].text) == (True, True), reply


def test_a_call_that_is_cancelled_while_it_waits_is_not_made() -> None:
    searched, opened = list[str](), Event()

    def search(query: str, k: int, filters: Any) -> dict[str, Any]:
        searched.append(query)
        return {}

    async def use() -> None:
        async with Client(build_mcp_server(lambda: opened.wait(60) and {"search": search})) as client:
            gone = [asyncio.create_task(client.call_tool("search", {"query": "gone"})) for _ in range(20)]
            await asyncio.sleep(0.1)
            for each in gone:
                each.cancel()
            await asyncio.wait(gone)
            last = asyncio.create_task(client.call_tool("search", {"query": "last"}))
            await asyncio.sleep(0.1)
            opened.set()
            await last

    asyncio.run(use())
    assert searched == ["last"]


# Runs of every kind


@pytest.mark.parametrize("retriever", ["ict", "bm25", "path"])
def test_a_run_of_every_retriever_is_searched_and_answers(retriever: str, trained: Path, tmp_path: Path) -> None:
    project = Path(shutil.copytree(trained, tmp_path / "project"))
    values = load_params(project / "params.yaml").replace({"finetune.retriever": retriever})
    small_project.stage("finetune", values, project, project / "root")
    answerer = Answerer.open(project / "root")
    assert len(answerer.answer(QUESTION).passages) == 5
    for searcher in (Searcher.open(project / "root"), answerer.searcher()):
        assert searcher.search("Who wrote The Cold Sea?", 1, by="words")[0].title == "Anna Berg"
        assert len(searcher.search(QUESTION, 2)) == 2
        if retriever == "ict":
            assert len(searcher.search(QUESTION, 2, by="embeddings")) == 2
            continue
        for call in (lambda: searcher.search(QUESTION, by="embeddings"), lambda: searcher.embed([QUESTION])):  # noqa: B023
            with pytest.raises(ValueError, match=r"there are no embeddings: .* finetune\.retriever is bm25"):
                call()


def test_a_closed_book_run_is_searched_by_words(closed_book: Path) -> None:
    root = closed_book / "root"
    searcher = Searcher.open(root)
    assert searcher.search("Who wrote The Cold Sea?", 1, by="words")[0].title == "Anna Berg"
    record = json.loads(cli("search", QUESTION, "--root", root, "--json").stdout)
    assert (record["model"]["stage"], record["passages"] != []) == ("snapshot", True)


@pytest.mark.parametrize("words", [("ask", QUESTION), ("serve", "--port", "0"), ("explain", "--question", QUESTION)])
def test_a_command_that_needs_passages_refuses_a_closed_book_run(words: tuple[str, ...], closed_book: Path) -> None:
    result = cli(*words, "--root", closed_book / "root")
    assert result.exit_code == 2
    assert "answers without reading passages (finetune.reader is t5), so its answers have no citations" in result.stderr
    assert "realmops search" in result.stderr
