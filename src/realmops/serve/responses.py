"""OpenAI's protocol: ``/v1/models`` and ``/v1/responses``, so that clients written for it can ask.

The text is the answer, each quotation is an annotation ``file_citation`` with ours beside it (document, characters,
quotation, probabilities), and the whole record is the response's field ``realmops``. Nothing is stored, and a
conversation has no memory: the last message of the user is the question. What steers the writing of text
(``temperature``, ``instructions``, ``tools`` and so on) has no effect on an answer that is a quotation.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from realmops.answering.record import Record
from realmops.commands.answers import Asked
from realmops.serve.batching import PendingAnswer

NO_ANSWER = "There is no answer to this in the documents."
router = APIRouter()


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="allow")
    role: str = ""
    content: str | list[dict[str, Any]] = ""

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        parts = (part.get("text") for part in self.content if part.get("type") == "input_text")
        return "\n".join(part for part in parts if isinstance(part, str))


class Call(BaseModel):
    """What ``POST /v1/responses`` takes of OpenAI's fields; others are read over."""

    model_config = ConfigDict(extra="allow")
    model: str = Field(description="An id of /v1/models.")
    input: str | list[Message] = Field(description="The question, or messages of which the user's last is one.")
    stream: bool | None = False
    background: bool | None = False

    def question(self) -> str:
        """The question; ValueError where the input holds none."""
        if isinstance(self.input, str):
            return self.input
        texts = [message.text() for message in self.input if message.role == "user"]
        if not texts:
            raise ValueError("input: no message with the role 'user' holds a question")
        return texts[-1]


@router.get("/v1/models", summary="The model that answers (OpenAI)")
async def models(request: Request) -> dict[str, Any]:
    """One model; `realmops` says which version of it serves, and why a newer one does not."""
    return {"object": "list", "data": [_model(request)]}


@router.get("/v1/models/{name}", summary="One model (OpenAI)")
async def model(request: Request, name: str) -> dict[str, Any]:
    """As in the list."""
    request.app.state.service.known(name)
    return _model(request)


@router.post("/v1/responses", summary="Answer a question (OpenAI's Responses)", response_model=None)
async def respond(request: Request, call: Call) -> Response:
    """The answer with its `file_citation` annotations; with `stream` as OpenAI's events."""
    request.app.state.service.known(call.model)
    if call.background:
        raise HTTPException(422, "background: nothing is stored here; leave it out")
    try:
        question = call.question()
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    [ticket] = request.app.state.service.take([Asked(question)])
    frame = _frame(call.model)
    if call.stream:
        return StreamingResponse(_events(frame, ticket), media_type="text/event-stream")
    return JSONResponse(_finished(frame, await asyncio.wrap_future(ticket.record), ticket))


def _model(request: Request) -> dict[str, Any]:
    service = request.app.state.service
    return {"id": service.name, "object": "model", "created": 0, "owned_by": "realmops", "realmops": service.state()}


def _frame(model: str) -> dict[str, Any]:
    """A response of which nothing is known yet."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": model,
        "output": [],
        "metadata": {},
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
        "store": False,
        **dict.fromkeys(("error", "incomplete_details", "instructions", "temperature", "top_p", "usage")),
    }


def _message(frame: Record, text: str, annotations: list[Record], status: str) -> Record:
    content = [{"type": "output_text", "text": text, "annotations": annotations, "logprobs": []}]
    return {
        "id": frame["id"].replace("resp_", "msg_"),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content if status == "completed" else [],
    }


def _annotations(record: Record) -> list[Record]:
    """Each citation as OpenAI's clients know it: ``index`` counts the sources."""
    if record["abstained"]:
        return []
    return [
        {
            "type": "file_citation",
            "index": index,
            "file_id": one["document_id"],
            "filename": one["title"] or one["uri"],
            **{name: value for name, value in one.items() if name != "index"},
        }
        for index, one in enumerate(record["citations"])
    ]


def _finished(frame: Record, record: Record, ticket: PendingAnswer) -> Record:
    wordpieces = ticket.generation.model.wordpieces
    asked, said = len(wordpieces(ticket.asked.question)), len(wordpieces(record["answer"]))
    usage = {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": asked + said,
    }
    output = [_message(frame, _text(record), _annotations(record), "completed")]
    return {**frame, "status": "completed", "output": output, "usage": usage, "realmops": record}


def _text(record: Record) -> str:
    return NO_ANSWER if record["abstained"] else record["answer"]


async def _events(frame: Record, ticket: PendingAnswer) -> AsyncIterator[str]:
    """OpenAI's events, numbered; the sources come in one of ours before the text."""
    number = 0

    def event(kind: str, **fields: object) -> str:
        nonlocal number
        value = {"type": kind, "sequence_number": number, **fields}
        number += 1
        return f"event: {kind}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n"

    try:
        yield event("response.created", response=frame)
        sources = await ticket.sources()
        yield event("response.in_progress", response={**frame, "realmops": {"passages": sources["passages"]}})
        record = await asyncio.wrap_future(ticket.record)
        for kind, fields in _steps(frame, record):
            yield event(kind, **fields)
        yield event("response.completed", response=_finished(frame, record, ticket))
    except Exception:
        error = {"code": "server_error", "message": "the question could not be answered; the server's log says why"}
        yield event("response.failed", response={**frame, "status": "failed", "error": error})
    finally:
        ticket.gone = True


def _steps(frame: Record, record: Record) -> Iterator[tuple[str, dict[str, Any]]]:
    """How the one message with its one part of text comes about."""
    text, annotations = _text(record), _annotations(record)
    message = _message(frame, text, annotations, "completed")
    at: dict[str, Any] = {"output_index": 0, "item_id": message["id"], "content_index": 0}
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    yield "response.output_item.added", {"output_index": 0, "item": _message(frame, "", [], "in_progress")}
    yield "response.content_part.added", {**at, "part": empty}
    yield "response.output_text.delta", {**at, "delta": text, "logprobs": []}
    for index, annotation in enumerate(annotations):
        yield "response.output_text.annotation.added", {**at, "annotation_index": index, "annotation": annotation}
    yield "response.output_text.done", {**at, "text": text, "logprobs": []}
    yield "response.content_part.done", {**at, "part": message["content"][0]}
    yield "response.output_item.done", {"output_index": 0, "item": message}
