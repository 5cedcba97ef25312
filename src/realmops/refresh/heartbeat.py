"""Heartbeats on a shared volume: how a process writes them, and how others judge by them whether it is alive.

The clocks of two machines are never compared: a reader counts by its own clock how long a heartbeat has not changed.
"""

import logging
import os
import socket
from pathlib import Path
from typing import Any

from realmops.artifacts import canonical_json
from realmops.files import Clock, Files

log = logging.getLogger(__name__)


class Heartbeat:
    """The heartbeat file of one process: small, and replaced at most every ``seconds`` seconds."""

    def __init__(self, path: Path, seconds: float, files: Files | None = None, clock: Clock | None = None) -> None:
        self.path, self.seconds = path, seconds
        self._files, self._clock = files or Files(), clock or Clock()
        self._beats, self._last, self._doing = 0, float("-inf"), ""

    def beat(self, doing: str = "", **fields: Any) -> None:
        """Write a heartbeat if ``seconds`` have passed, or at once if ``doing`` has changed."""
        now = self._clock.monotonic()
        if now - self._last < self.seconds and doing == self._doing:
            return
        self._last, self._doing, self._beats = now, doing, self._beats + 1
        content = {"doing": doing, **fields, "pid": os.getpid(), "host": socket.gethostname(), "beat": self._beats}
        try:
            self._files.replace(self.path, canonical_json({**content, "unix": self._clock.unix()}))
        except OSError as error:  # work continues without heartbeats
            log.warning("the heartbeat cannot be written: %s", error)


class LivenessTracker:
    """The time since each observed content changed, by the monotonic clock of the observer.

    File times and other machines' clocks are not trusted; content that is observed for the first time counts as new.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[object, float]] = {}

    def seconds_unchanged(self, key: str, content: object) -> float:
        """Record the present ``content`` of ``key`` and return the seconds since it was first observed."""
        now = self._clock.monotonic()
        if key not in self._seen or self._seen[key][0] != content:
            self._seen[key] = (content, now)
        return now - self._seen[key][1]
