"""Middleware of every route: authentication, request limits, clients that disconnect, and metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from anyio import CancelScope
from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from realmops.serve import BODY_LIMIT
from realmops.serve.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PUBLIC_PATHS = ("/health", "/v2/health", "/sign-in")  # of probes, and of browsers before they have a cookie
PAGE = "/"
COOKIE_PATHS = (PAGE, "/docs", "/openapi.json")  # GET with the cookie; other routes need the token
FEEDBACK = "/feedback"  # POST with the cookie
COOKIE = "realmops"
SIGNED_IN_SECONDS = 12 * 3600
FIELDS = 16  # per form
DISCONNECTED = 499  # in metrics: the client left before the reply
FAILED = "the question could not be answered: internal error; see the server's log"


def refusal(path: str, status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error in the format of a path: a string under ``/v2`` (Open Inference), else an object."""
    return JSONResponse({"error": message if path.startswith("/v2") else {"message": message}}, status, headers)


async def form_of(request: Request) -> dict[str, str]:
    """Return the first value of each form field, stripped; ValueError for more than ``FIELDS`` fields."""
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
    """ASGI middleware: checks the token (None: not required), limits bodies to ``BODY_LIMIT`` bytes, counts calls.

    A call whose client disconnects is cancelled.
    """

    def __init__(self, app: ASGIApp, token: Token | None, metrics: Metrics) -> None:
        self._app, self._token, self._metrics = app, token, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            request = Request(scope, receive)
            refused = self._refuse(request)
            body = b"" if refused else await _read_body(request)
            if len(body) > BODY_LIMIT:
                message = f"the body has more than {BODY_LIMIT} bytes"
                refused = refusal(scope["path"], 413, message, {"connection": "close"})  # the rest is not read
            if refused:
                await refused(scope, receive, record_status)
            else:
                await _call_while_connected(self._app, scope, body, receive, record_status)
        except ClientDisconnect:
            status = DISCONNECTED
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.request(route, status, time.perf_counter() - started)

    def _refuse(self, request: Request) -> Response | None:
        """Return the response to a request without access; None for one that has it."""
        path = request.scope["path"]
        if self._token is None and _is_rebound(request):
            advice = "call the server as localhost, or start it with --token-file"
            message = f"the server has no token and accepts local requests only: {advice}"
            return refusal(path, 403, message)
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            message = "the body is compressed: send it without gzip or another Content-Encoding"
            return refusal(path, 415, message, {"accept-encoding": "identity"})
        if path.startswith(PUBLIC_PATHS) or self._is_authorized(request):
            return None
        if path == PAGE:  # keep the question, so that it is answered after signing in
            query = request.scope["query_string"].decode("latin-1")
            location = f"sign-in?{query}" if query else "sign-in"
            return Response(None, 303, {"location": location, "cache-control": "no-store"})
        message = "missing or invalid bearer token: send 'Authorization: Bearer TOKEN'"
        return refusal(path, 401, message, {"www-authenticate": "Bearer"})

    def _is_authorized(self, request: Request) -> bool:
        if self._token is None:
            return True
        scheme, value = get_authorization_scheme_param(request.headers.get("authorization"))
        if scheme.lower() == "bearer" and self._token.matches(value):
            return True
        by_cookie = (("POST", FEEDBACK), *(("GET", path) for path in COOKIE_PATHS))
        route = request.method, request.scope["path"]
        return route in by_cookie and self._token.is_valid(request.cookies.get(COOKIE, ""))


async def _read_body(request: Request) -> bytes:
    """Return the body, or more than ``BODY_LIMIT`` bytes of a longer one; raise ClientDisconnect."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_LIMIT:
            break
    return bytes(body)


async def _call_while_connected(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Call the application with a body; if the client leaves before the reply, cancel it and raise ClientDisconnect."""
    unread = [body]

    async def receive_body() -> Message:
        if not unread:
            await asyncio.Event().wait()  # until the call ends
        return {"type": "http.request", "body": unread.pop()}

    async def cancel_when_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        connected.cancel()

    with CancelScope() as connected:
        watcher = asyncio.create_task(cancel_when_gone())
        try:
            await app(scope, receive_body, send)
        finally:
            watcher.cancel()
    if connected.cancelled_caught:
        raise ClientDisconnect


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
