"""``/``: a page to ask on. It is rendered here, works without JavaScript and loads nothing from elsewhere.

Every text goes through Jinja2's escaping, and the page's Content-Security-Policy allows no script and no style but
its own two, by their digests.
"""

import asyncio
import logging
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from realmops.answering.opened_model import Query
from realmops.answering.passage_search import Wanted, highlights, stems_of
from realmops.answering.record import Record, holds_all
from realmops.evaluate.report_page import STYLE
from realmops.serve.batching import PendingAnswer
from realmops.serve.guard import COOKIE, FIELDS, QUESTION_LIMIT, QUESTIONS_LIMIT, SIGNED_IN_SECONDS, Token, form_of
from realmops.text.languages import detect

_LOG = logging.getLogger(__name__)
LEADS = 3  # passages that come first where no answer is given
BEGIN = 60  # characters of a passage that was taken away
FAILED = "The question could not be answered; the server's log says why."
router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class ShownPassage:
    """One that was read, as it is shown: ``quoted`` stands between ``before`` and ``after``."""

    record: Record
    before: str
    quoted: str
    after: str
    gone: str  # where the page without it is
    wanted: Wanted

    def parts(self) -> Iterator[tuple[str, bool]]:
        """Its text in parts, and which of them are words of the question."""
        text, last = self.record["text"], 0
        for start, end in highlights(text, self.wanted):
            yield text[last:start], False
            yield text[start:end], True
            last = end
        yield text[last:], False


@dataclass(frozen=True)
class Shown:
    record: Record
    calibrated: bool
    passages: tuple[ShownPassage, ...]
    best: ShownPassage | None  # with the quotation that was chosen

    @property
    def held_back(self) -> bool:
        """Whether there is an answer that is not sure enough: then passages lead."""
        return bool(self.record["answer"]) and self.record["abstained"]

    @property
    def leads(self) -> tuple[ShownPassage, ...]:
        """The first passages, without what would have been quoted of them."""
        return tuple(replace(one, before=one.record["text"], quoted="", after="") for one in self.passages[:LEADS])

    @property
    def title(self) -> str:
        """What the page is called."""
        return "No sure answer" if self.held_back else self.record["answer"] or "No answer"

    @property
    def said(self) -> str:
        """The answer in a sentence, for those who hear it."""
        if not self.record["answer"]:
            return "No answer was found."
        answer, probability = self.record["answer"], percent(self.record["probability"])
        if self.held_back:
            return f"No answer is sure enough. The passages that fit best follow. Held back: {answer}, {probability}."
        return f"Answer: {answer}. Probability {probability}."


@router.get("/")
async def ask(request: Request) -> HTMLResponse:
    """The page; ``q`` is a question, ``without`` a passage not to read for it, ``before`` asks the old corpus too."""
    service, given, sent = request.app.state.service, request.query_params, request.headers
    if sent.get("sec-fetch-site") == "cross-site" and sent.get("sec-fetch-dest") != "document":
        raise HTTPException(403, "a page of another site may lead here, and not ask by itself")
    question, without = given.get("q", "").strip(), tuple(given.getlist("without")[:QUESTIONS_LIMIT])
    view: dict[str, Any] = {
        "question": question,
        "now": None,
        "whole": None,
        "gone": [],
        "before": None,
        "before_closed": False,
        "noted": "noted" in given,
        "error": "",
        "status": 200,
        "wants_before": "before" in given,
        "about": service.state()["model"],
        "examples": [(one, address(one)) for one in service.watcher.examples],
        "limit": QUESTION_LIMIT,
        "signed_in": request.app.state.token is not None,
    }
    if question:
        try:
            view |= await _answered(request, question, without)
        except HTTPException as error:
            view |= {"error": f"{str(error.detail)[:1].upper()}{str(error.detail)[1:]}.", "status": error.status_code}
        except Exception:
            _LOG.exception("the page has no answer")
            view |= {"error": FAILED, "status": 500}
    return _html("page.html", view, view["status"])


@router.get("/sign-in", response_model=None)
async def form(request: Request) -> Response:
    """Asks for the token, where one is wanted."""
    if request.app.state.token is None:
        return _onwards(request)
    return _sign_in(request, "", 200)


@router.post("/sign-in", response_model=None)
async def sign_in(request: Request) -> Response:
    """The token becomes a cookie that no script and no other site can use."""
    token: Token | None = request.app.state.token
    if token is None:
        return _onwards(request)
    try:
        given = (await form_of(request)).get("token", "")
    except ValueError:
        return _sign_in(request, f"A form with more than {FIELDS} fields is not read: send the field 'token'.", 422)
    if not token.is_(given):
        return _sign_in(request, "This is not the server's token.", 401)
    reply = _onwards(request)
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


def _onwards(request: Request) -> Response:
    """To the page, with the question that was asked there; never to another place."""
    return RedirectResponse(f".?{request.url.query}" if request.url.query else ".", 303)


def _sign_in(request: Request, error: str, status: int) -> Response:
    return _html("page.sign_in.html", {"error": error, "query": request.url.query}, status)


async def _answered(request: Request, question: str, without: Sequence[str]) -> dict[str, Any]:
    """What there is to show of a question: all from one model, except the answer of before the updates."""
    service = request.app.state.service
    queries = [Query(question, frozenset(without))] + ([Query(question)] if without else [])
    tickets: list[PendingAnswer] = service.take(queries)
    earlier, closed = None, False
    if "before" in request.query_params:
        try:
            earlier = await asyncio.to_thread(service.watcher.before)
        except Exception:  # whatever is wrong with it, what serves has an answer
            _LOG.exception("the documents of before cannot be opened")
            closed = True
    if earlier is not None:
        tickets += service.take([Query(question)], earlier)
    shown = [_shown(ticket, await asyncio.wrap_future(ticket.record), without) for ticket in tickets]
    now, whole = shown[0], shown[1] if without else shown[0]
    begins = {one["passage_id"]: _begin(one) for one in whole.record["passages"]}
    gone = [(begins.get(name) or name, address(question, [one for one in without if one != name])) for name in without]
    return {
        "now": now,
        "whole": whole,
        "gone": gone,
        "before": shown[-1] if earlier is not None else None,
        "before_closed": closed,
        "whole_address": address(question),
        "about": now.record["model"],
    }


def _begin(passage: Record) -> str:
    text = passage["text"]
    begin = text if len(text) <= BEGIN else f"{text[:BEGIN].rsplit(' ', 1)[0]} …"
    return f"{passage['title']}: {begin}" if passage["title"] else begin


def _shown(ticket: PendingAnswer, record: Record, without: Sequence[str]) -> Shown:
    cited = {one["passage_id"]: one for one in record["citations"]}
    spoken = detect(record["question"], ticket.served.model.snapshot.common_languages)
    passages = tuple(_passages(record, cited, without, stems_of(record["question"], spoken)))
    first = record["citations"][0]["passage_id"] if cited else None
    best = next((one for one in passages if one.record["passage_id"] == first), None)
    return Shown(record, ticket.served.confidence is not None, passages, best)


def _passages(
    record: Record, cited: dict[str, Record], without: Sequence[str], wanted: Wanted
) -> Iterator[ShownPassage]:
    for one in record["passages"]:
        text, found = one["text"], cited.get(one["passage_id"])
        start = end = len(text)
        if found is not None:
            start, end = found["start"] - one["start"], found["end"] - one["start"]
            one = {**one, "page": found["page"]}
        gone = address(record["question"], [*without, one["passage_id"]])
        yield ShownPassage(one, text[:start], text[start:end], text[end:], gone, wanted)


def address(question: str, without: Sequence[str] = ()) -> str:
    """Where a question is answered on this page, without some passages."""
    return "?" + urlencode([("q", question), *(("without", one) for one in without)])


def feedback_address(record: Record) -> str:
    """Where the page sends what somebody says of an answer."""
    passage = record["citations"][0]["passage_id"] if record["citations"] else ""
    return "feedback?" + urlencode({"q": record["question"], "answer": record["answer"], "passage": passage})


def percent(share: float) -> str:
    """A probability as people say it; none is said to be certain or impossible that is not."""
    if 0 < share < 0.005:
        return "below 1%"
    return "above 99%" if 0.995 < share < 1 else f"{share:.0%}"


def source_link(passage: Record, quoted: str) -> str:
    """The document's address on the web, at the quotation where the browser can find it; "" where it has none."""
    uri: str = passage["uri"]
    if not uri.lower().startswith(("http://", "https://")):
        return ""  # a file's name; and no link to what a browser would run
    part = quote(quoted, safe="").replace("-", "%2D")
    return uri if "#" in uri or not quoted else f"{uri}#:~:text={part}"


@cache
def _templates() -> tuple[Environment, dict[str, str]]:
    """The templates' surroundings, and the headers that go with each page."""
    folder = files(__package__)
    style = f"{STYLE}{(folder / 'page.css').read_text('utf-8')}"
    script = (folder / "page.js").read_text("utf-8")
    made = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["percent"] = percent
    made.globals |= {
        "style": Markup(style),
        "script": Markup(script),
        "source_link": source_link,
        "holds_all": holds_all,
        "feedback_address": feedback_address,
    }
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; connect-src 'self'; "
        "img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
    return made, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",  # the question stands in the address
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _html(name: str, view: dict[str, Any], status: int) -> HTMLResponse:
    templates, headers = _templates()
    return HTMLResponse(templates.get_template(name).render(view), status, headers)
