"""``realmops mcp``: search and answers as tools of the Model Context Protocol, with the official SDK."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from realmops import __version__
from realmops.answering.answer import InvalidRequest
from realmops.answering.opened_model import OpenedModel, Query
from realmops.answering.passage_search import PassageSearch
from realmops.answering.record import Record
from realmops.artifacts import MANIFEST
from realmops.commands.open_model import open_model
from realmops.opening import ClosedBookModel, open_search
from realmops.progress import Report
from realmops.stages import STAGES

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

INSTRUCTIONS = (
    "Search a collection of documents, and answer questions from it. Every passage and every quotation has its "
    "document and character offsets: cite them."
)
PASSAGES = 20  # per call


def build_mcp_server(passages: PassageSearch, opened: OpenedModel | None) -> MCPServer[Any]:
    """Build the server with the tool ``search`` and, if there is a model, the tool ``answer``."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise ValueError("the MCP SDK is not installed: pip install 'realmops[mcp]'") from None

    server: MCPServer[Any] = MCPServer("realmops", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")

    def search(
        query: Annotated[str, Field(description="Words or a question.")],
        k: Annotated[int, Field(ge=1, le=PASSAGES, description="Number of passages.")] = 5,
        filters: Annotated[
            dict[str, Any] | None,
            Field(description='By document field: a value, a list of values, or a range as {"gte": 1990}.'),
        ] = None,
    ) -> Record:
        """Search the documents for passages, best first, each with its document and character offsets."""
        try:
            return passages.search(query, k, [filters or {}])
        except InvalidRequest as error:  # the SDK hides the text of other errors
            raise ToolError(str(error)) from None

    def answer(question: Annotated[str, Field(description="One question.")]) -> Record:
        """Answer a question by a quotation from the documents; do not rely on an answer with "abstained".

        "probability" is null if the model was not calibrated on enough questions; "score" only ranks answers.
        """
        assert opened is not None
        try:
            [record] = opened.answer([Query(question)])
        except InvalidRequest as error:
            raise ToolError(str(error)) from None
        return record

    server.add_tool(search)
    if opened is not None:
        server.add_tool(answer)
    return server


def serve_mcp(root: Path, model: str | None, port: int | None, report: Report) -> None:
    """Serve a run or a registered model until the client disconnects; over HTTP if there is a ``port``.

    Without a model that reads passages, ``search`` is the only tool.
    """
    opened = None
    if model or (root / STAGES["finetune"].folder / MANIFEST).is_file():
        try:
            opened = open_model(root, model)
            opened.probe()
        except ClosedBookModel as error:
            report.log(f"mcp: the tool 'answer' is not available: {error}")
    server = build_mcp_server(opened.passage_search if opened else open_search(root, report), opened)
    if port is None:
        server.run()
    else:
        report.log(f"mcp: listening on http://127.0.0.1:{port}/mcp")
        server.run("streamable-http", port=port)
