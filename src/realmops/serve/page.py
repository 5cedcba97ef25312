"""``/``: the web page, rendered on the server; it works without JavaScript and loads no external resources.

Jinja2 escapes all texts, and the Content-Security-Policy allows only the page's own script and style, by their digests.
"""

import asyncio
import logging
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from realmops.answering.answer import QUESTION_LIMIT
from realmops.answering.opened_model import Query
from realmops.answering.passage_search import StemsByLanguage, highlights, stem_query
from realmops.answering.record import TOP_PASSAGES, Record, always_abstains, format_page, preview, searches
from realmops.corpus.languages import detect_language
from realmops.evaluate.report_page import STYLE
from realmops.serve import QUESTIONS_LIMIT
from realmops.serve.guard import COOKIE, FAILED, SIGNED_IN_SECONDS, Token, form_of

_LOG = logging.getLogger(__name__)
PREVIEW = 60  # characters of a passage in a list
ICON = "data:image/svg+xml," + quote(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#1d5fa8"/>'
    '<path d="M4 5h8M4 8h8M4 11h5" stroke="#fff" stroke-width="1.5"/></svg>'
)
router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class PassageView:
    """A passage for the template: ``quoted`` is its text between ``before`` and ``after``."""

    record: Record
    before: str
    quoted: str
    after: str
    without_url: str  # the page without this passage
    stems: StemsByLanguage  # of the question

    def parts(self) -> Iterator[tuple[str, bool]]:
        """Yield the text in parts, each with whether it is a word of the question."""
        text, last = self.record["text"], 0
        for start, end in highlights(text, self.stems):
            yield text[last:start], False
            yield text[start:end], True
            last = end
        yield text[last:], False


@dataclass(frozen=True)
class AnswerView:
    """An answer for the template."""

    record: Record
    passages: tuple[PassageView, ...]
    best: PassageView | None  # with the chosen quotation

    @property
    def is_held_back(self) -> bool:
        return bool(self.record["answer"]) and self.record["abstained"]


@router.get("/")
async def ask(request: Request) -> HTMLResponse:
    """Answer question ``q``; ``without`` excludes passages, ``before`` adds the answer before the updates."""
    service, params, headers = request.app.state.service, request.query_params, request.headers
    if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-dest") != "document":
        raise HTTPException(403, "cross-site requests are not allowed; other sites may only link to this page")
    question, without = params.get("q", "").strip(), tuple(params.getlist("without")[:QUESTIONS_LIMIT])
    about, served = service.state()["model"], service.batcher.served
    view: dict[str, Any] = {
        "question": question,
        "answer": None,
        "complete": None,
        "excluded": [],
        "before": None,
        "before_failed": False,
        "noted": "noted" in params,
        "compares": "before" in params,
        "about": about,
        "searches": searches({"model": about}),
        "examples": [(text, address(text)) for text in service.watcher.examples],
        "titles": [(text, address(text)) for text in served.document_titles],
        "documents": served.model.snapshot.document_count,
        "limit": QUESTION_LIMIT,
        "signed_in": request.app.state.token is not None,
    }
    status, message = 200, ""
    if question:
        try:
            view |= await _answered(request, question, without)
        except HTTPException as error:
            status, message = error.status_code, str(error.detail)
        except Exception:
            _LOG.exception("serve: the page could not answer a question")
            status, message = 500, FAILED
    view["error"] = f"{message[:1].upper()}{message[1:]}." if message else ""
    return _html("page.html", view, status)


@router.get("/sign-in", response_model=None)
async def form(request: Request) -> Response:
    if request.app.state.token is None:
        return _redirect_to_page(request)
    return _sign_in_page(request, "", 200)


@router.post("/sign-in", response_model=None)
async def sign_in(request: Request) -> Response:
    """Exchange the token for a cookie, unreadable by scripts and not sent by other sites."""
    token: Token | None = request.app.state.token
    if token is None:
        return _redirect_to_page(request)
    try:
        value = (await form_of(request)).get("token", "")
    except ValueError as error:
        return _sign_in_page(request, f"{error}; send 'token'.", 422)
    if not token.matches(value):
        return _sign_in_page(request, "Wrong token.", 401)
    reply = _redirect_to_page(request)
    reply.set_cookie(
        COOKIE,
        token.cookie(),
        max_age=SIGNED_IN_SECONDS,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return reply


@router.post("/sign-in/end")
async def sign_out() -> Response:
    reply = RedirectResponse("../sign-in", 303)
    reply.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return reply


def _redirect_to_page(request: Request) -> Response:
    return RedirectResponse(f".?{request.url.query}" if request.url.query else ".", 303)


def _sign_in_page(request: Request, error: str, status: int) -> Response:
    return _html("page.sign_in.html", {"error": error, "query": request.url.query}, status)


async def _answered(request: Request, question: str, without: Sequence[str]) -> dict[str, Any]:
    service = request.app.state.service
    served, earlier, has_failed = service.batcher.served, None, False
    if "before" in request.query_params:
        try:
            earlier = await asyncio.to_thread(service.watcher.before_updates)
        except Exception:  # any error leaves the current answer
            _LOG.exception("serve: the corpus before the updates cannot be opened")
            has_failed = True
    queries = [Query(question, frozenset(without))] + ([Query(question)] if without else [])
    records = await service.answer(queries, served) + (await service.answer(queries[-1:], earlier) if earlier else [])
    language = detect_language(question, served.model.snapshot.common_languages)
    views = [_answer_view(record, without, stem_query(question, language)) for record in records]
    answer, complete = views[0], views[1] if without else views[0]
    previews = {passage["passage_id"]: _preview(passage) for passage in complete.record["passages"]}
    excluded = [
        (previews.get(id_) or id_, address(question, [other for other in without if other != id_])) for id_ in without
    ]
    return {
        "answer": answer,
        "complete": complete,
        "excluded": excluded,
        "before": views[-1] if earlier is not None else None,
        "before_failed": has_failed,
        "complete_url": address(question),
        "about": answer.record["model"],
    }


def _preview(passage: Record) -> str:
    text = preview(passage["text"], PREVIEW)
    return f"{passage['title']}: {text}" if passage["title"] else text


def _answer_view(record: Record, without: Sequence[str], stems: StemsByLanguage) -> AnswerView:
    citations = {citation["passage_id"]: citation for citation in record["citations"]}
    passages = tuple(_passages(record, citations, without, stems))
    first = record["citations"][0]["passage_id"] if citations else None
    best = next((view for view in passages if view.record["passage_id"] == first), None)
    return AnswerView(record, passages, best)


def _passages(
    record: Record, citations: dict[str, Record], without: Sequence[str], stems: StemsByLanguage
) -> Iterator[PassageView]:
    for passage in record["passages"]:
        text, citation = passage["text"], citations.get(passage["passage_id"])
        start = end = len(text)
        if citation is not None:
            start, end = citation["start"] - passage["start"], citation["end"] - passage["start"]
            passage = {**passage, "page": citation["page"], "last_page": citation["last_page"]}
        same_text = [place["passage_id"] for place in (passage, *passage.get("copies", ()))]
        without_url = address(record["question"], [*without, *same_text])
        yield PassageView(passage, text[:start], text[start:end], text[end:], without_url, stems)


def address(question: str, without: Sequence[str] = ()) -> str:
    return "?" + urlencode([("q", question), *(("without", id_) for id_ in without)])


def describe_certainty(record: Record) -> str:
    """Format the probability of an answer, or its score if there is none."""
    if record["probability"] is None:
        return f"{'' if record['calibration'] else 'not calibrated: '}score {record['score']:.2f}"
    return f"right with probability {percent(record['probability'])}"


def percent(share: float) -> str:
    """Format a probability; only 0 and 1 become 0% and 100%."""
    if 0 < share < 0.005:
        return "below 1%"
    return "above 99%" if 0.995 < share < 1 else f"{share:.0%}"


def source_link(passage: Record, quoted: str) -> str:
    """Return the document's web address with a text fragment of the quotation; "" for other documents."""
    uri: str = passage["uri"]
    if not uri.lower().startswith(("http://", "https://")):
        return ""  # a file name, or a URL that could run a script
    part = quote(quoted, safe="").replace("-", "%2D")
    return uri if "#" in uri or not quoted else f"{uri}#:~:text={part}"


@cache
def _templates() -> tuple[Environment, dict[str, str]]:
    """Return the template environment and the HTTP headers of each page."""
    folder = files(__package__)
    style = f"{STYLE}{(folder / 'page.css').read_text('utf-8')}"
    script = (folder / "page.js").read_text("utf-8")
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"page": format_page, "percent": percent, "preview": _preview}
    environment.globals |= {
        "icon": ICON,
        "style": Markup(style),
        "script": Markup(script),
        "source_link": source_link,
        "holds_all": always_abstains,
        "shown": TOP_PASSAGES,
        "certainty": describe_certainty,
    }
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; connect-src 'self'; "
        "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
    return environment, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",  # the URL contains the question
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _html(name: str, view: dict[str, Any], status: int) -> HTMLResponse:
    templates, headers = _templates()
    return HTMLResponse(templates.get_template(name).render(view), status, headers)
