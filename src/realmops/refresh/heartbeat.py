"""Signs of life on a shared volume: how a holder gives them, and how others judge by them.

Nobody compares the clocks of two machines: who looks counts by its own clock how long a sign has stayed the same.
"""

import os
import socket
from pathlib import Path
from typing import Any

from realmops.artifacts import canonical_json
from realmops.refresh.shared_files import Clock, Files


class Sign:
    """A holder's sign of life: a small file that is replaced often, at most every ``seconds`` seconds."""

    def __init__(self, path: Path, seconds: float, files: Files | None = None, clock: Clock | None = None) -> None:
        self.path, self.seconds = path, seconds
        self._files, self._clock = files or Files(), clock or Clock()
        self._beats, self._last, self._doing = 0, float("-inf"), ""

    def give(self, doing: str = "", **fields: Any) -> None:
        """Say what this process does, at once where that is something else than before; OSError of the volume."""
        now = self._clock.monotonic()
        if now - self._last < self.seconds and doing == self._doing:
            return
        self._last, self._doing, self._beats = now, doing, self._beats + 1
        sign = {"doing": doing, **fields, "pid": os.getpid(), "host": socket.gethostname(), "beat": self._beats}
        self._files.replace(self.path, canonical_json({**sign, "unix": self._clock.unix()}))


class Ages:
    """How long each thing has looked the same, by the monotonic clock of whoever looks.

    This is the only way in which the exchange judges life and death: file times and the clocks of other
    machines are not trusted, and what is seen for the first time is new.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[object, float]] = {}

    def age(self, key: str, content: object) -> float:
        """Seconds since ``content`` of ``key`` was seen to change."""
        now = self._clock.monotonic()
        if key not in self._seen or self._seen[key][0] != content:
            self._seen[key] = (content, now)
        return now - self._seen[key][1]
