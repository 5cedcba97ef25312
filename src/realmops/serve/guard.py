"""Middleware of every route: authentication, request limits and metrics."""

from __future__ import annotations

import hmac
import time
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from fastapi import HTTPException
from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from realmops.serve.metrics import Metrics

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_LIMIT = 1 << 20  # bytes
QUESTIONS_LIMIT = 64  # per request
PUBLIC_PATHS = ("/health", "/v2/health", "/sign-in")  # of probes, and of browsers before they have a cookie
PAGE = "/"
COOKIE_PATHS = (PAGE, "/docs", "/openapi.json")  # GET with the cookie; other routes need the token
FEEDBACK = "/feedback"  # POST with the cookie
COOKIE = "realmops"
SIGNED_IN_SECONDS = 12 * 3600
FIELDS = 16  # per form
FAILED = "the question could not be answered: internal error; see the server's log"


def problem(path: str, status: int, message: str) -> dict[str, object]:
    """Return an error in the format of a path: a string under ``/v2`` (Open Inference), else an object."""
    return {"error": message if path.startswith("/v2") else {"message": message}}


async def form_of(request: Request) -> dict[str, str]:
    """Return the first value of each form field, stripped; ValueError for more than ``FIELDS`` fields."""
    try:
        fields = parse_qs((await request.body()).decode(errors="replace"), max_num_fields=FIELDS)
    except ValueError:
        raise ValueError(f"Too many form fields: at most {FIELDS} are allowed") from None
    return {name: values[0].strip() for name, values in fields.items()}


class Token:
    """The bearer token, and the session cookie of a browser that signed in with it.

    The cookie is its expiry time (seconds since 1970) and an HMAC of that with the token as key: any server with the
    same token can verify it, no session is stored, and it does not contain the token.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def matches(self, value: str) -> bool:
        return hmac.compare_digest(value.encode(), self._token)

    def cookie(self, seconds: int = SIGNED_IN_SECONDS) -> str:
        expires = str(int(time.time()) + seconds)
        return f"{expires}.{self._sign(expires)}"

    def is_valid(self, cookie: str) -> bool:
        expires, _, signature = cookie.partition(".")
        is_signed = hmac.compare_digest(signature.encode(), self._sign(expires).encode())
        return is_signed and int(expires) > time.time()

    def _sign(self, expires: str) -> str:
        return hmac.new(self._token, f"realmops page until {expires}".encode(), "sha256").hexdigest()


class Guard:
    """ASGI middleware: checks the token (None: not required), limits bodies to ``BODY_LIMIT`` bytes, counts calls."""

    def __init__(self, app: ASGIApp, token: Token | None, metrics: Metrics) -> None:
        self._app, self._token, self._metrics = app, token, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, size = time.perf_counter(), 500, 0

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        async def limit_body() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > BODY_LIMIT:
                detail = f"the body has more than {BODY_LIMIT} bytes"
                raise HTTPException(413, detail, {"connection": "close"})  # the rest is not read
            return message

        try:
            with suppress(ClientDisconnect):
                refused = self._refuse(Request(scope))
                await (refused or self._app)(scope, limit_body, record_status)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.request(route, status, time.perf_counter() - started)

    def _refuse(self, request: Request) -> Response | None:
        """Return the response to a request without access; None for one that has it."""
        path = request.scope["path"]
        if self._token is None and _is_rebound(request):
            advice = "call the server as localhost, or start it with --token-file"
            message = f"the server has no token and accepts local requests only: {advice}"
            return JSONResponse(problem(path, 403, message), 403)
        if path.startswith(PUBLIC_PATHS) or self._is_authorized(request):
            return None
        if path == PAGE:  # keep the question, so that it is answered after signing in
            query = request.scope["query_string"].decode("latin-1")
            location = f"sign-in?{query}" if query else "sign-in"
            return Response(None, 303, {"location": location, "cache-control": "no-store"})
        message = "missing or invalid bearer token: send 'Authorization: Bearer TOKEN'"
        return JSONResponse(problem(path, 401, message), 401, {"www-authenticate": "Bearer"})

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
    try:
        return host.lower() == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
