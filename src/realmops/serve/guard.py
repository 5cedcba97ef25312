"""What stands before every route: who may ask, and how much may come in."""

from __future__ import annotations

import asyncio
import hmac
import time
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from realmops.serve.metrics import Metrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_LIMIT = 1 << 20  # bytes
QUESTIONS_LIMIT = 64  # of one request
QUESTION_LIMIT = 2000  # characters
PROBES = ("/health", "/v2/health")
OPEN_TO_ALL = (*PROBES, "/sign-in")  # a probe has no token, and who signs in has no cookie
PAGE = "/"
FOR_BROWSERS = (PAGE, "/docs", "/openapi.json")  # what the cookie opens; the rest wants the token itself
FEEDBACK = "/feedback"  # what the page sends with its cookie
COOKIE = "realmops"
SIGNED_IN_SECONDS = 12 * 3600
FIELDS = 16  # of a form


@dataclass(frozen=True)
class Limits:
    """How long requests may take to come, and how many at once; both sums of connections fit into 1,024 open files."""

    head_seconds: float = 10.0  # to send a request's head in, since the connection or the last answer
    body_seconds: float = 30.0  # and its body
    read_seconds: float = 30.0  # a client may leave its answer unread
    waiting: int = 512  # connections without a whole request
    answering: int = 384  # requests that came whole and are not yet answered; probes do not count


def problem(path: str, status: int, message: str) -> dict[str, object]:
    """Return an error as the clients of that path expect it: for Open Inference a text, else an object."""
    return {"error": message if path.startswith("/v2") else {"message": message}}


async def form_of(request: Request) -> dict[str, str]:
    """Return the first value of each field of a form, without blanks around it. Raises ValueError for too many."""
    fields = parse_qs((await request.body()).decode(errors="replace"), max_num_fields=FIELDS)
    return {name: values[0].strip() for name, values in fields.items()}


class Token:
    """The bearer token, and the cookie that a browser gets for it.

    The cookie is the second (since 1970) at which it ends, and an HMAC of that under the token: every server with the
    same token knows it, nothing is stored, and the token is not in it.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def is_(self, given: str) -> bool:
        """Whether this is the token; takes the same time wherever it differs."""
        return hmac.compare_digest(given.encode(), self._token)

    def cookie(self, seconds: int = SIGNED_IN_SECONDS) -> str:
        """A value that is good for so long."""
        ends = str(int(time.time()) + seconds)
        return f"{ends}.{self._sign(ends)}"

    def signed(self, cookie: str) -> bool:
        """Whether a cookie of ours still holds."""
        ends, _, signature = cookie.partition(".")
        known = hmac.compare_digest(signature.encode(), self._sign(ends).encode())
        return known and int(ends) > time.time()

    def _sign(self, ends: str) -> str:
        return hmac.new(self._token, f"realmops page until {ends}".encode(), "sha256").hexdigest()


class Guard:
    """ASGI middleware: compares the token, holds a body of ``BODY_LIMIT`` bytes at most, and counts requests.

    A body is read before the route is called: none sees half of one.

    Args:
        token: what "Authorization: Bearer" must say; None lets everybody in. ``FOR_BROWSERS`` may be read, and
            ``FEEDBACK`` sent, with its cookie, too.
    """

    def __init__(self, app: ASGIApp, token: Token | None, metrics: Metrics, limits: Limits) -> None:
        self._app, self._token, self._metrics, self._limits = app, token, metrics, limits
        self._answering = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._guarded(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.request(route, status, time.perf_counter() - started)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = scope["path"]

        async def refuse(status: int, message: str) -> None:
            headers = {"connection": "close"} if status in (408, 413) else {}
            headers |= {"www-authenticate": "Bearer"} if status == 401 else {}
            await JSONResponse(problem(path, status, message), status, headers)(scope, receive, send)

        if self._token is None and _is_rebound(request):
            advice = "call the server localhost, or start it with --token-file"
            return await refuse(403, f"without a token this machine alone may ask: {advice}")
        if not path.startswith(OPEN_TO_ALL) and not self._may(request):
            if path == PAGE:  # with the question, so that it is answered then
                query = scope["query_string"].decode("latin-1")
                place = f"sign-in?{query}" if query else "sign-in"
                return await Response(None, 303, {"location": place, "cache-control": "no-store"})(scope, receive, send)
            return await refuse(401, "a bearer token is wanted: send 'Authorization: Bearer TOKEN'")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > BODY_LIMIT:
            return await refuse(413, f"the body has {int(length[:20])} bytes, at most {BODY_LIMIT} are read")
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > BODY_LIMIT:
                        return await refuse(413, f"the body is longer than {BODY_LIMIT} bytes")
        except ClientDisconnect:
            return None
        except TimeoutError:
            return await refuse(408, f"the body did not come within {self._limits.body_seconds:g} s")
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        if path.startswith(PROBES):
            return await self._app(scope, replay, send)
        if self._answering >= self._limits.answering:
            return await refuse(503, f"{self._answering} requests are being answered: ask again a little later")
        self._answering += 1
        try:
            await self._app(scope, replay, send)
        finally:
            self._answering -= 1

    def _may(self, request: Request) -> bool:
        if self._token is None:
            return True
        kind, given = get_authorization_scheme_param(request.headers.get("authorization"))
        if kind.lower() == "bearer" and self._token.is_(given):
            return True
        by_cookie = (("POST", FEEDBACK), *(("GET", path) for path in FOR_BROWSERS))
        called = request.method, request.scope["path"]
        return called in by_cookie and self._token.signed(request.cookies.get(COOKIE, ""))


def _is_rebound(request: Request) -> bool:
    """Whether a name of elsewhere was led to this machine itself, by which a web page could read answers."""
    server, name = request.scope.get("server"), request.headers.get("host", "")
    host = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return bool(server and is_loopback(server[0]) and host and not is_loopback(host))


def is_loopback(host: str) -> bool:
    """Whether this is an address, or the name, of the machine itself."""
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
