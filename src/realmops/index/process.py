"""Processes that belong together: a child that is watched, and a process that ends with its parent."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from multiprocessing import get_context, parent_process
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Self

LONGEST_PAUSE = 30.0  # seconds before a process that failed is started again
END_SECONDS = 30.0  # for a process that was asked to end
LAST_LINES = 5  # of a log
PARENT_SECONDS = 0.5  # between two looks


class Child:
    """A child process: started, watched, started again after a pause, and ended.

    Each pause is twice as long as the one before, up to ``LONGEST_PAUSE``; behind a process that lived for longer than
    that it is ``pause`` seconds again.
    """

    def __init__(
        self, command: Sequence[str], *, pause: float, log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.command, self.log, self.environment = command, log, environment
        self.starts = 0
        self.pause = self._first_pause = pause
        self._started = self._next = -math.inf
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.look()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def runs(self) -> bool:
        """Whether the process runs, as far as was seen at the last look."""
        return self._process is not None

    def look(self) -> int | None:
        """Start the process when it does not run and its pause is over; the exit code, once, of one that has ended."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._next:
                self.starts, self._started = self.starts + 1, now
                with open(self.log, "ab") if self.log else nullcontext() as log:
                    self._process = subprocess.Popen(
                        self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment
                    )
            return None
        code = self._process.poll()
        if code is not None:
            self._process = None
            lived_long = now - self._started > LONGEST_PAUSE
            self.pause = self._first_pause if lived_long else min(2 * self.pause, LONGEST_PAUSE)
            self._next = now + self.pause
        return code

    def end(self) -> None:
        """Ask the process to end, wait for it, and kill it when that takes too long."""
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
        """What the processes wrote last."""
        assert self.log is not None
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])


def end_with(parent: int) -> None:
    """End this process, as SIGTERM does, when it is no longer the child of ``parent``."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def apart(what: str, module: str, work: Callable[[], None]) -> int:
    """Do work in a process of its own, whose memory goes back as a whole; its exit code.

    Args:
        what: is named where the process is killed.
        module: is imported once for all such processes, each of which begins as a copy of one that knows nothing else.
        work: a function of a module, or a partial of one.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([module])
    own = dict(os.environ)
    os.environ["PYTHONSAFEPATH"] = "1"  # or the server would import what lies in the folder that it is started in
    try:
        ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(own)
    process = context.Process(target=_end_with_work, args=(work, own))
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        process.join(END_SECONDS)  # a terminal has told it too
    finally:
        process.terminate()
        process.join(2 * END_SECONDS)  # its own children have half of that
        process.kill()
        process.join()
    assert process.exitcode is not None
    if process.exitcode == -signal.SIGKILL:
        print(f"realmops: {what} was killed, as the system does where memory is short", file=sys.stderr, flush=True)
    return process.exitcode if process.exitcode >= 0 else 128 - process.exitcode


def _end_with_work(work: Callable[[], None], environment: Mapping[str, str]) -> None:
    """Do it, and end as SIGTERM does when the process that asked is gone, whose child is this one's parent."""
    os.environ.clear()
    os.environ.update(environment)
    asked = parent_process()
    assert asked is not None

    def watch() -> None:
        asked.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    work()
