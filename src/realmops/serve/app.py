"""The FastAPI application: ``/v1/answer``, health, metrics and API reference; routers add the other protocols."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from fastapi.sse import format_sse_event
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException as StarletteHTTPException

from realmops import __version__
from realmops.answering.answer import QUESTION_LIMIT, InvalidRequest
from realmops.answering.feedback import PassageId, Text
from realmops.answering.opened_model import OpenedModel, Query
from realmops.answering.passage_search import MAX_RESULTS, PassageQuery
from realmops.answering.record import Record
from realmops.serve import QUESTIONS_LIMIT, feedback_routes, open_inference, page
from realmops.serve.batching import Busy, Closed, Pending, RequestBatcher
from realmops.serve.guard import FAILED, Guard, Token, refusal
from realmops.serve.metrics import Metrics
from realmops.serve.model_watcher import ModelWatcher
from realmops.tracking.feedback_log import FeedbackSender

_FOLDERS = re.compile(r"[^\s'\"(]*/")


class AnswerRequest(BaseModel):
    """Body of POST /v1/answer: one question or several."""

    model_config = ConfigDict(extra="forbid", strict=True)
    question: Text | None = Field(None, description="One question; the reply is its record.")
    questions: list[Text] | None = Field(
        None, min_length=1, max_length=QUESTIONS_LIMIT, description='Several; the reply is {"answers": [...]}.'
    )
    without: list[PassageId] = Field(
        default_factory=list, max_length=QUESTIONS_LIMIT, description="Ids of passages to exclude."
    )
    stream: bool = Field(False, description="Server-sent events: the sources first, then the answer.")

    @model_validator(mode="after")
    def _check_exclusive(self) -> AnswerRequest:
        if (self.question is None) == (self.questions is None):
            raise ValueError("give either 'question' or 'questions'")
        return self

    def queries(self) -> list[Query]:
        texts = [self.question] if self.question is not None else self.questions or []
        return [Query(text, frozenset(self.without)) for text in texts]


class SearchRequest(BaseModel):
    """Body of POST /v1/search."""

    model_config = ConfigDict(extra="forbid", strict=True)
    query: Text
    k: int = Field(10, ge=1, le=MAX_RESULTS, description="Number of passages.")
    filters: dict[str, Any] = Field(
        default_factory=dict,
        description='By document field: a value, a list of allowed values, or a range as {"gte": 1990}.',
    )
    by: Literal["run", "embeddings", "words"] = Field(
        "run", description="How to rank; run: by the run's own retriever."
    )


class AnswerService:
    """Submits the questions of a request to the batcher, and maps its errors to HTTP errors."""

    def __init__(self, batcher: RequestBatcher, watcher: ModelWatcher) -> None:
        self.batcher, self.watcher = batcher, watcher
        self.is_shutting_down = False

    def check_name(self, name: str) -> None:
        if name != self.watcher.source.name:
            raise HTTPException(404, f"unknown model: this server serves {self.watcher.source.name!r}")

    def state(self) -> Record:
        refused = self.watcher.refused
        return {
            "model": self.batcher.served.about,
            "refused": refused and {**refused, "reason": without_folders(refused["reason"])},
            "registry_away": without_folders(self.watcher.poll_error) or None,
        }

    def submit(self, queries: Sequence[Query], served: OpenedModel | None = None) -> list[Pending[Query]]:
        """Submit all questions of a request; raise HTTPException: 422 invalid, 429 full queue, 503 shutdown."""
        longest = max((len(query.question) for query in queries), default=0)
        if longest > QUESTION_LIMIT:
            raise HTTPException(422, f"the question has {longest} characters; at most {QUESTION_LIMIT} are allowed")
        with _http_errors():
            return self.batcher.submit(queries, served)

    async def search(self, query: PassageQuery) -> Record:
        with _http_errors():
            return await asyncio.wrap_future(self.batcher.search(query).record)

    async def answer(self, queries: Sequence[Query], served: OpenedModel | None = None) -> list[Record]:
        """Return the records of a request's questions; if it is cancelled, they leave the queue."""
        answers = self.submit(queries, served)
        try:
            return [await asyncio.wrap_future(pending.record) for pending in answers]
        finally:
            for pending in answers:
                pending.record.cancel()


@contextmanager
def _http_errors() -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise HTTPException(422, str(error)) from None
    except Busy as error:
        raise HTTPException(429, str(error), {"Retry-After": "1"}) from None
    except Closed as error:
        raise HTTPException(503, str(error), {"Retry-After": "1"}) from None


def without_folders(text: str) -> str:
    """Reduce paths in a message to file names, so that replies do not reveal the server's folders."""
    return _FOLDERS.sub("", text)


def make_app(batcher: RequestBatcher, watcher: ModelWatcher, metrics: Metrics, token: str | None) -> FastAPI:
    """Build the application; its state has ``service``, ``feedback`` and ``token``, the token for signing in."""
    app = FastAPI(
        title="realmops",
        version=__version__,
        summary="Answers from your documents, every word with its source.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # its locations are absolute: wrong with a prefix of a proxy
    )
    service = app.state.service = AnswerService(batcher, watcher)
    app.state.token = None if token is None else Token(token)
    app.state.feedback = FeedbackSender(watcher.source.root)

    @app.post("/v1/answer", summary="Answer questions", response_model=None)
    async def answer(question: AnswerRequest) -> Response:
        """Return each answer with its quotations; "start" and "end" are character offsets in the document's text.

        With "stream", each question has the events "sources" (the passages with p(z|x)), then "answer" (the record) or
        "error", with the question's "index".
        """
        if question.stream:
            events = _events(service.submit(question.queries()))
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # nginx passes each event on at once
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        records = await service.answer(question.queries())
        return JSONResponse(records[0] if question.question is not None else {"answers": records})

    @app.post("/v1/search", summary="Find passages", response_model=None)
    async def search(request: SearchRequest) -> Response:
        """Return the best passages with their documents, dense and BM25 scores, and the positions of query words.

        Filters are applied before ranking: the result is the top k of the passages that match.
        """
        query = PassageQuery(request.query, request.k, [request.filters], request.by)
        return JSONResponse(await service.search(query))

    @app.head("/v2/health/live", include_in_schema=False)
    @app.get("/v2/health/live", summary="Liveness probe (Open Inference)")
    @app.head("/health/live", include_in_schema=False)
    @app.get("/health/live", summary="Liveness probe")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.head("/v2/health/ready", include_in_schema=False, response_model=None)
    @app.get("/v2/health/ready", summary="Readiness probe (Open Inference)", response_model=None)
    @app.head("/health/ready", include_in_schema=False, response_model=None)
    @app.get("/health/ready", summary="Readiness probe", response_model=None)
    async def ready() -> Response:
        """Return the served model; "refused" is the reason why a newer one was rejected."""
        is_ready = not service.is_shutting_down
        return JSONResponse({"ready": is_ready, **service.state()}, 200 if is_ready else 503)

    @app.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def prometheus() -> Response:
        metrics.waiting.set(batcher.depth)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(openapi_url="openapi.json", title="realmops", swagger_favicon_url=page.ICON)

    app.include_router(page.router)
    app.include_router(feedback_routes.router)
    app.include_router(open_inference.router)
    _explain_errors(app)
    app.add_middleware(Guard, token=app.state.token, metrics=metrics)
    return app


async def _events(answers: Sequence[Pending[Query]]) -> AsyncIterator[bytes]:
    """Yield server-sent events; if the client disconnects, the questions leave the queue."""

    def event(index: int, name: str, value: dict[str, Any]) -> bytes:
        return format_sse_event(event=name, data_str=json.dumps({"index": index} | value, ensure_ascii=False))

    try:
        for index, pending in enumerate(answers):
            try:
                yield event(index, "sources", await pending.sources())
                yield event(index, "answer", await asyncio.wrap_future(pending.record))
            except Exception:  # the batcher has logged it; the other questions are still answered
                yield event(index, "error", {"error": {"message": FAILED}})
    finally:
        for pending in answers:
            pending.record.cancel()


def _explain_errors(app: FastAPI) -> None:
    """Register error handlers: each protocol has its format, and no client input is repeated."""

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> JSONResponse:
        is_text = not isinstance(error.__cause__, UnicodeDecodeError)
        message = _writable(str(error.detail)) if is_text else "the body is not valid UTF-8"
        return refusal(request.url.path, error.status_code, message, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        if not field and first["type"] == "string_unicode":
            field = "a field's name"
        message = first["msg"].removeprefix("Value error, ")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not field and not kind.endswith("json"):
            message = "the body is not declared as JSON: send -H 'Content-Type: application/json'"
        return refusal(request.url.path, 422, _writable(f"{field}: {message}" if field else message))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return refusal(request.url.path, 500, FAILED)


def _writable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by question marks."""
    return text.encode(errors="replace").decode()
