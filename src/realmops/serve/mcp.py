"""``realmops mcp``: search and answers as tools of the Model Context Protocol, with the official SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from realmops import __version__
from realmops.answering.answer import InvalidRequest
from realmops.answering.feedback import Text
from realmops.artifacts import read_manifest
from realmops.progress import Report
from realmops.serve import BODY_LIMIT, WAITING
from realmops.stages import STAGES

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer
    from mcp.types import Tool

Tools = Mapping[str, Callable[..., Any]]  # what answers the calls of a tool, by its name
INSTRUCTIONS = (
    "Search a collection of documents, and answer questions from it. Every passage and every quotation has its "
    "document and character offsets: cite them."
)
PASSAGES = 20  # per call


def build_mcp_server(open_tools: Callable[[], Tools]) -> MCPServer[Any]:
    """Build the server with the tools ``search`` and, if ``open_tools`` returns it, ``answer``.

    A thread opens the tools, then makes one call after the other; one that is cancelled while it waits is not made.
    """
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise ValueError("the MCP SDK is not installed: pip install 'realmops[mcp]'") from None

    thread, waiting = ThreadPoolExecutor(1), 0
    opened = thread.submit(open_tools)

    async def call(tool: str, *arguments: Any) -> Any:
        nonlocal waiting
        if waiting >= WAITING:
            raise ToolError(f"too many pending calls: at most {WAITING} are allowed; retry later")
        waiting += 1
        try:
            return await asyncio.wrap_future(thread.submit(lambda: opened.result()[tool](*arguments)))
        except InvalidRequest as error:  # the SDK hides the text of other errors
            raise ToolError(str(error)) from None
        finally:
            waiting -= 1

    class Server(MCPServer[Any]):
        async def list_tools(self) -> list[Tool]:
            names = await asyncio.wrap_future(thread.submit(opened.result))
            return [tool for tool in await super().list_tools() if tool.name in names]

    server = Server("realmops", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")

    @server.tool()
    async def search(
        query: Annotated[Text, Field(description="Words or a question.")],
        k: Annotated[int, Field(ge=1, le=PASSAGES, description="Number of passages.")] = 5,
        filters: Annotated[
            dict[str, Any] | None,
            Field(description='By document field: a value, a list of values, or a range as {"gte": 1990}.'),
        ] = None,
    ) -> dict[str, Any]:
        """Search the documents for passages, best first, each with its document and character offsets."""
        return dict(await call("search", query, k, [filters or {}]))

    @server.tool()
    async def answer(question: Annotated[Text, Field(description="One question.")]) -> dict[str, Any]:
        """Answer a question by a quotation from the documents; do not rely on an answer with "abstained".

        "probability" is null if the model was not calibrated on enough questions; "score" only ranks answers.
        """
        return dict(await call("answer", question))

    return server


def serve_mcp(root: Path, model: str | None, port: int | None, report: Report) -> None:
    """Serve a run or a registered model until the client disconnects; over HTTP if there is a ``port``."""

    def open_tools() -> Tools:
        from realmops.answering.opened_model import Query
        from realmops.commands.open_model import open_model
        from realmops.opening import open_if_tuned, open_search

        opened = open_model(root, model) if model else open_if_tuned(root)
        if opened is None:
            return {"search": open_search(root, report).search}
        opened.probe()
        tools: dict[str, Callable[..., Any]] = {"search": opened.passage_search.search}
        if opened.model.gives_answers:
            tools["answer"] = lambda question: opened.answer([Query(question)])[0]
        return tools

    if model is None:
        read_manifest(root / STAGES["snapshot"].folder, "snapshot", verify=False)
    server = build_mcp_server(open_tools)
    if port is None:
        server.run()
    else:
        report.log(f"mcp: listening on http://127.0.0.1:{port}/mcp")
        server.run("streamable-http", port=port, max_request_body_size=BODY_LIMIT)
