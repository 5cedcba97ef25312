"""Limits on connections without a complete request: their time and their number.

uvicorn has no timeout for a request's head, and its connection limit counts idle connections too. Here each request has
a deadline that sending single bytes does not extend, and if too many connections have no complete request, the oldest
are closed. So there is always room for a complete request, above all a health probe.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from realmops.serve.guard import Limits, problem


class Connection(H11Protocol):
    """An HTTP/1.1 connection; all connections of a server share ``limits`` and ``waiting``."""

    limits: Limits
    waiting: dict[Connection, None]  # connections without a complete request, oldest first

    _deadline: asyncio.TimerHandle | None = None  # for the next request's head
    _unread: asyncio.TimerHandle | None = None  # for the client to read the response

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all deadlines."""
        self._arm(None)
        self.resume_writing()
        self.waiting.pop(self, None)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Process received bytes, and cancel the deadline after the head; ``Guard`` limits the time of the body."""
        before = self.cycle
        super().handle_events()
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not before:
            self._arm(None)
        if cycle is not None and not (cycle.more_body or cycle.response_complete):
            self.waiting.pop(self, None)

    def on_response_complete(self) -> None:
        """Start the deadline of the next request, or of the rest of one that was answered early."""
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the deadline for the client to read the response."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.limits.read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the deadline for reading the response."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _wait(self) -> None:
        self.waiting.pop(self, None)  # move to the end
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
        has_begun = is_between and bool(self.conn.trailing_data[0])  # an idle connection gets no response
        if has_begun and not self.transport.is_closing():
            self.transport.write(_timeout_response(self.limits.head_seconds))
            self.transport.close()
            self._arm(self.limits.read_seconds)  # for the client to read the response
        else:
            self.transport.abort()


def _timeout_response(seconds: float) -> bytes:
    body = json.dumps(problem("", 408, f"request head timed out: incomplete after {seconds:g} s")).encode()
    head = "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


def connection_class(limits: Limits) -> type[Any]:
    """Return a protocol class whose connections share ``limits``."""
    return type("LimitedConnection", (Connection,), {"limits": limits, "waiting": {}})
