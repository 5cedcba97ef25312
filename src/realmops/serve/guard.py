"""Middleware of every route: authentication, request limits and metrics."""

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
QUESTIONS_LIMIT = 64  # per request
QUESTION_LIMIT = 2000  # characters
PROBES = ("/health", "/v2/health")
PUBLIC_PATHS = (*PROBES, "/sign-in")  # probes have no token, and a browser has no cookie before signing in
PAGE = "/"
COOKIE_PATHS = (PAGE, "/docs", "/openapi.json")  # GET with the cookie; other routes need the token
FEEDBACK = "/feedback"  # POST with the cookie
COOKIE = "realmops"
SIGNED_IN_SECONDS = 12 * 3600
FIELDS = 16  # per form


@dataclass(frozen=True)
class Limits:
    """Time limits of requests and limits of connections, whose sum stays below 1,024 open files."""

    head_seconds: float = 10.0  # to receive a request's head, from the connection or the last response
    body_seconds: float = 30.0  # to receive its body
    read_seconds: float = 30.0  # for the client to read the response
    waiting: int = 512  # connections without a complete request
    answering: int = 384  # complete requests without a response; probes do not count


def problem(path: str, status: int, message: str) -> dict[str, object]:
    """Return an error in the format of a path: a string under ``/v2`` (Open Inference), else an object."""
    return {"error": message if path.startswith("/v2") else {"message": message}}


async def form_of(request: Request) -> dict[str, str]:
    """Return the first value of each form field, stripped.

    Raises:
        ValueError: the form has more than ``FIELDS`` fields.
    """
    fields = parse_qs((await request.body()).decode(errors="replace"), max_num_fields=FIELDS)
    return {name: values[0].strip() for name, values in fields.items()}


class Token:
    """The bearer token, and the session cookie of a browser that signed in with it.

    The cookie is its expiry time (seconds since 1970) and an HMAC of that with the token as key: any server with the
    same token can verify it, no session is stored, and it does not contain the token.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def matches(self, value: str) -> bool:
        """Return whether ``value`` is the token, in constant time."""
        return hmac.compare_digest(value.encode(), self._token)

    def cookie(self, seconds: int = SIGNED_IN_SECONDS) -> str:
        """Return a cookie value that is valid for ``seconds``."""
        expires = str(int(time.time()) + seconds)
        return f"{expires}.{self._sign(expires)}"

    def is_valid(self, cookie: str) -> bool:
        """Return whether a cookie has a correct signature and is not expired."""
        expires, _, signature = cookie.partition(".")
        is_signed = hmac.compare_digest(signature.encode(), self._sign(expires).encode())
        return is_signed and int(expires) > time.time()

    def _sign(self, expires: str) -> str:
        return hmac.new(self._token, f"realmops page until {expires}".encode(), "sha256").hexdigest()


class Guard:
    """ASGI middleware: checks the token, buffers bodies of up to ``BODY_LIMIT`` bytes, and counts requests.

    The whole body is received before the route is called.

    Args:
        app: the wrapped application.
        token: the required bearer token; None disables authentication. Its cookie is accepted for ``COOKIE_PATHS`` and
            ``FEEDBACK``.
        metrics: receives route, status and seconds of each request.
        limits: limits of bodies and concurrent requests.
    """

    def __init__(self, app: ASGIApp, token: Token | None, metrics: Metrics, limits: Limits) -> None:
        self._app, self._token, self._metrics, self._limits = app, token, metrics, limits
        self._answering = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._guarded(scope, receive, record_status)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.request(route, status, time.perf_counter() - started)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = scope["path"]

        async def reject(status: int, message: str) -> None:
            headers = {"connection": "close"} if status in (408, 413) else {}
            headers |= {"www-authenticate": "Bearer"} if status == 401 else {}
            headers |= {"retry-after": "1"} if status == 503 else {}
            await JSONResponse(problem(path, status, message), status, headers)(scope, receive, send)

        if self._token is None and _is_rebound(request):
            advice = "call the server as localhost, or start it with --token-file"
            return await reject(403, f"the server has no token and accepts local requests only: {advice}")
        if not path.startswith(PUBLIC_PATHS) and not self._is_authorized(request):
            if path == PAGE:  # keep the question, so that it is answered after signing in
                query = scope["query_string"].decode("latin-1")
                location = f"sign-in?{query}" if query else "sign-in"
                return await Response(None, 303, {"location": location, "cache-control": "no-store"})(
                    scope, receive, send
                )
            return await reject(401, "missing or invalid bearer token: send 'Authorization: Bearer TOKEN'")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > BODY_LIMIT:
            return await reject(413, f"the body has {int(length[:20])} bytes; at most {BODY_LIMIT} are allowed")
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > BODY_LIMIT:
                        return await reject(413, f"the body has more than {BODY_LIMIT} bytes")
        except ClientDisconnect:
            return None
        except TimeoutError:
            return await reject(408, f"request body timed out: incomplete after {self._limits.body_seconds:g} s")
        messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        if path.startswith(PROBES):
            return await self._app(scope, replay, send)
        if self._answering >= self._limits.answering:
            return await reject(503, f"too many concurrent requests: {self._answering}; retry later")
        self._answering += 1
        try:
            await self._app(scope, replay, send)
        finally:
            self._answering -= 1

    def _is_authorized(self, request: Request) -> bool:
        if self._token is None:
            return True
        scheme, value = get_authorization_scheme_param(request.headers.get("authorization"))
        if scheme.lower() == "bearer" and self._token.matches(value):
            return True
        by_cookie = (("POST", FEEDBACK), *(("GET", path) for path in COOKIE_PATHS))
        route = request.method, request.scope["path"]
        return route in by_cookie and self._token.is_valid(request.cookies.get(COOKIE, ""))


def _is_rebound(request: Request) -> bool:
    """Return whether a foreign host name resolves to loopback (DNS rebinding), so that a page could read answers."""
    server, name = request.scope.get("server"), request.headers.get("host", "")
    host = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return bool(server and is_loopback(server[0]) and host and not is_loopback(host))


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or localhost."""
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
