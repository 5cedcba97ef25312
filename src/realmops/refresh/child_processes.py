"""Child processes: supervised and restarted ones, and processes that end with their parent."""

import math
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Self

MAX_PAUSE_SECONDS = 30.0  # before a process that failed is restarted
END_SECONDS = 30.0  # after SIGTERM, before SIGKILL
LAST_LINES = 5  # of a log, shown in an error
PARENT_SECONDS = 0.5  # between two checks of the parent process


def process_name() -> str:
    """Return a name that no other process has; the host in it is for people, because hosts can share their names."""
    host = re.sub("[^a-z0-9]+", "-", socket.gethostname().lower())[:24]
    return f"{host}-{secrets.token_hex(4)}"


class SupervisedProcess:
    """A child process that is restarted after each exit, and whose output is appended to ``log``.

    The back-off begins at ``pause`` seconds, doubles up to ``MAX_PAUSE_SECONDS``, and is reset after a process that ran
    for longer than that.
    """

    def __init__(self, command: Sequence[str], *, pause: float, log: Path | None = None) -> None:
        self.command, self.log = command, log
        self.starts = 0
        self.pause = self._first_pause = pause
        self._started = self._next = -math.inf
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.poll()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def is_running(self) -> bool:
        """Whether the process was running at the last call of :meth:`poll`."""
        return self._process is not None

    def poll(self) -> int | None:
        """Start the process if none runs and the back-off is over; return the exit code of one that has ended, once."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._next:
                self.starts, self._started = self.starts + 1, now
                with open(self.log, "ab") if self.log else nullcontext() as log:
                    self._process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            return None
        code = self._process.poll()
        if code is not None:
            self._process = None
            was_stable = now - self._started > MAX_PAUSE_SECONDS
            self.pause = self._first_pause if was_stable else min(2 * self.pause, MAX_PAUSE_SECONDS)
            self._next = now + self.pause
        return code

    def end(self) -> None:
        """Send SIGTERM and wait; send SIGKILL after ``END_SECONDS``."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def last_lines(self) -> str:
        assert self.log is not None
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])


def end_with(parent: int) -> None:
    """Send this process SIGTERM once it is no longer a child of ``parent``."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
