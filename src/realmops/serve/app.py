"""The routes: ours (``/v1/answer``), health, metrics and their description; other protocols are put beside them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from fastapi.sse import format_sse_event
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException as StarletteHTTPException

from realmops import __version__
from realmops.answering.answer import InvalidRequest
from realmops.answering.opened_model import Query
from realmops.answering.record import Record
from realmops.serve import feedback_routes, inference, page, reference, search_routes
from realmops.serve.batching import Busy, Closed, PendingAnswer, RequestBatcher
from realmops.serve.guard import QUESTION_LIMIT, QUESTIONS_LIMIT, Guard, Limits, Token, problem
from realmops.serve.metrics import Metrics
from realmops.serve.model_watcher import ModelWatcher
from realmops.serve.served_model import ServedModel

Text = Annotated[str, Field(max_length=QUESTION_LIMIT)]
_FOLDERS = re.compile(r"[^\s'\"(]*/")
FAILED = "the question could not be answered; the server's log says why"
PassageId = Annotated[str, Field(max_length=80)]


class AnswerRequest(BaseModel):
    """What ``POST /v1/answer`` takes: one question, or several."""

    model_config = ConfigDict(extra="forbid", strict=True)
    question: Text | None = Field(None, description="One question; the reply is its record.")
    questions: list[Text] | None = Field(
        None, min_length=1, max_length=QUESTIONS_LIMIT, description='Several; the reply is {"answers": [...]}.'
    )
    without: list[PassageId] = Field(
        default_factory=list, max_length=QUESTIONS_LIMIT, description="Ids of passages that must not be read."
    )
    stream: bool = Field(False, description="Server-sent events: the sources first, then the answer.")

    @model_validator(mode="after")
    def _one_of_both(self) -> AnswerRequest:
        if (self.question is None) == (self.questions is None):
            raise ValueError("give either 'question' or 'questions'")
        return self

    def queries(self) -> list[Query]:
        texts = [self.question] if self.question is not None else self.questions or []
        return [Query(text, frozenset(self.without)) for text in texts]


class AnswerService:
    """Submits the questions of a request to the batcher, and turns its errors into those of HTTP."""

    def __init__(self, batcher: RequestBatcher, watcher: ModelWatcher) -> None:
        self.batcher, self.watcher = batcher, watcher
        self.ending = False

    @property
    def name(self) -> str:
        return self.watcher.source.name

    def known(self, name: str) -> None:
        """404 for another model than the one that serves."""
        if name != self.name:
            raise HTTPException(404, f"the model here is {self.name!r}: name that one")

    def state(self) -> Record:
        """Return the model that serves, and why a newer one was refused; files are named without their folders."""
        refused = self.watcher.refused
        return {
            "model": self.batcher.served.about,
            "refused": refused and {**refused, "reason": without_folders(refused["reason"])},
            "registry_away": without_folders(self.watcher.away) or None,
        }

    def take(self, queries: Sequence[Query], served: ServedModel | None = None) -> list[PendingAnswer]:
        """Accept all of a request's questions for one model: ``served``, or the one that serves."""
        longest = max((len(one.question) for one in queries), default=0)
        if longest > QUESTION_LIMIT:
            raise HTTPException(422, f"the question has {longest} characters, at most {QUESTION_LIMIT} are read")
        try:
            return self.batcher.submit(queries, served)
        except InvalidRequest as error:
            raise HTTPException(422, str(error)) from None
        except Busy as error:
            raise HTTPException(429, str(error), {"Retry-After": "1"}) from None
        except Closed as error:
            raise HTTPException(503, str(error), {"Retry-After": "1"}) from None

    async def answer(self, queries: Sequence[Query]) -> list[Record]:
        """The records, in the order of the questions."""
        return [await asyncio.wrap_future(ticket.record) for ticket in self.take(queries)]


def without_folders(text: str) -> str:
    """A message without the folders of its paths: whoever reads it learns nothing of this machine's disk."""
    return _FOLDERS.sub("", text)


def make_app(
    batcher: RequestBatcher, watcher: ModelWatcher, metrics: Metrics, token: str | None, limits: Limits
) -> FastAPI:
    """The application; ``app.state.service`` is what routes ask, ``app.state.token`` what a browser signs in with."""
    app = FastAPI(
        title="realmops",
        version=__version__,
        summary="Answers from your documents, every word with its source.",
        docs_url=None,
        redoc_url=None,
    )
    service = app.state.service = AnswerService(batcher, watcher)
    app.state.token = None if token is None else Token(token)
    app.state.feedback = feedback_routes.FeedbackKeeper(watcher.source.root)

    @app.post("/v1/answer", summary="Answer questions", response_model=None)
    async def answer(question: AnswerRequest) -> Response:
        """Each answer with its quotations: `start` and `end` are characters of the document's text as it was read.

        With `stream` the events are `sources` (what will be read, with p(z|x)), then `answer` (the record), or `error`
        where reading fails, each with the `index` of its question.
        """
        if question.stream:
            events = _events(service.take(question.queries()))
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        records = await service.answer(question.queries())
        return JSONResponse(records[0] if question.question is not None else {"answers": records})

    @app.get("/health/live", summary="The process runs")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.get("/health/ready", summary="Questions are taken", response_model=None)
    async def ready() -> Response:
        """What serves; `refused` says why a newer model does not."""
        return JSONResponse({"ready": not service.ending, **service.state()}, 503 if service.ending else 200)

    @app.get("/metrics", summary="Figures for Prometheus", response_class=Response)
    async def figures() -> Response:
        metrics.waiting.set(batcher.depth)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(reference.page(app.openapi()))

    app.include_router(page.router)
    app.include_router(search_routes.router)
    app.include_router(feedback_routes.router)
    app.include_router(inference.router)
    _explain_errors(app)
    app.add_middleware(Guard, token=app.state.token, metrics=metrics, limits=limits)
    return app


async def _events(tickets: Sequence[PendingAnswer]) -> AsyncIterator[bytes]:
    """Yield server-sent events while the caller listens; when it has hung up, what is still pending is left out."""

    def event(index: int, name: str, value: dict[str, Any]) -> bytes:
        return format_sse_event(event=name, data_str=json.dumps({"index": index} | value, ensure_ascii=False))

    try:
        for index, ticket in enumerate(tickets):
            try:
                yield event(index, "sources", await ticket.sources())
                yield event(index, "answer", await asyncio.wrap_future(ticket.record))
            except Exception:  # it is in the log; others may have their answers
                yield event(index, "error", problem("", 500, FAILED))
    finally:
        for ticket in tickets:
            ticket.gone = True


def _explain_errors(app: FastAPI) -> None:
    """Errors as each protocol has them; what a caller wrote is not repeated."""

    def told(request: Request, status: int, message: str, headers: Any = None) -> JSONResponse:
        return JSONResponse(problem(request.url.path, status, message), status, headers)

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return told(request, error.status_code, _writable(str(error.detail)), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        if not place and first["type"] == "string_unicode":
            place = "a field's name"
        message = first["msg"].removeprefix("Value error, ")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not place and not kind.endswith("json"):
            message = "the body was not sent as JSON: send -H 'Content-Type: application/json'"
        return told(request, 422, _writable(f"{place}: {message}" if place else message))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return told(request, 500, FAILED)


def _writable(text: str) -> str:
    """Half a surrogate pair, which cannot be written, becomes a question mark."""
    return text.encode(errors="replace").decode()
