"""Connections that send no whole request: how long they may, and how many may at once.

uvicorn waits for a request's head without an end, and counts those who send none with those who ask. Here each request
must come by a time that no single byte moves, and where too many connections have no whole request, those that have
waited longest end. So there is always room for a request that comes whole, a probe's before all.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from realmops.serve.guard import Limits, problem


class Connection(H11Protocol):
    """One connection. ``limits`` and ``waiting`` are those of its server, see ``connection_class``."""

    limits: Limits
    waiting: dict[Connection, None]  # without a whole request, those that have waited longest first

    _deadline: asyncio.TimerHandle | None = None  # of the next request's head
    _unread: asyncio.TimerHandle | None = None  # of an answer that the client does not take

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arm(None)
        self.resume_writing()
        self.waiting.pop(self, None)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """A part of a request has come, or all of it; the body's time is the guard's to keep."""
        before = self.cycle
        super().handle_events()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not before:
            self._arm(None)
        if cycle is not None and not (cycle.more_body or cycle.response_complete):
            self.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of one that was answered before it had come."""
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client reads nothing of its answer."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.limits.read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _wait(self) -> None:
        self.waiting.pop(self, None)  # to the end of the row
        self.waiting[self] = None
        self._arm(self.limits.head_seconds)
        while len(self.waiting) > self.limits.waiting:
            oldest = next(iter(self.waiting))
            del self.waiting[oldest]
            oldest.transport.abort()

    def _arm(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._expired)

    def _expired(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        is_between = cycle is None or cycle.response_complete
        has_begun = is_between and bool(self.conn.trailing_data[0])  # else nothing was asked, and nothing is said
        if has_begun and not self.transport.is_closing():
            self.transport.write(_too_late(self.limits.head_seconds))
            self.transport.close()
            self._arm(self.limits.read_seconds)  # what is not read by then is dropped
        else:
            self.transport.abort()


def _too_late(seconds: float) -> bytes:
    body = json.dumps(problem("", 408, f"the head of the request did not come within {seconds:g} s")).encode()
    head = "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


def connection_class(limits: Limits) -> type[Any]:
    """The class of one server's connections."""
    return type("LimitedConnection", (Connection,), {"limits": limits, "waiting": {}})
