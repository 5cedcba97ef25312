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
from multiprocessing import connection, get_context, parent_process
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from runpy import run_module
from tempfile import gettempdir
from typing import Self

LONGEST_PAUSE = 30.0  # seconds before a process that failed is started again
END_SECONDS = 30.0  # for a process that was asked to end
LAST_LINES = 5  # of a log
PARENT_SECONDS = 0.5  # between two looks
_SAFE_PATH = "PYTHONSAFEPATH"
_TOLD = {  # of processes that could not say so themselves
    -signal.SIGKILL: "was killed, as the system does where memory is short",
    255: "was lost, as the process that it was forked from was killed: run the same command again",
}
_ASKING = threading.Lock()  # an exit code can be read once, and each start asks for those of all processes


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


class Apart:
    """Work in a process of its own, whose memory goes back as a whole; it ends with this process.

    Args:
        module: is imported once for all such processes, each of which begins as a copy of one that knows nothing else.
        work: a function of a module, or a partial of one.

    Raises:
        ValueError: where the folder for temporary files takes no socket.
    """

    def __init__(self, module: str, work: Callable[[], None]) -> None:
        context = get_context("forkserver")
        with _ASKING:
            context.set_forkserver_preload([module])
            own = dict(os.environ)
            os.environ[_SAFE_PATH] = "1"  # or the server would import what lies in the folder that it is started in
            try:
                ensure_running()
            except OSError as error:
                raise ValueError(
                    f"{gettempdir()}: no socket can be made in a folder there ({error}), through which stages get "
                    "processes of their own; set TMPDIR to a folder of this machine with a short name, as TMPDIR=/tmp"
                ) from error
            finally:
                del os.environ[_SAFE_PATH]
                os.environ.update(own)
            self._process = context.Process(target=_end_with_work, args=(work, own))
            self._process.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it has ended, after so many seconds at most."""
        connection.wait([self._process.sentinel], seconds)
        with _ASKING:
            return self._process.exitcode is not None

    def end(self) -> int:
        """Ask it to end, kill it when that takes too long; its exit code, that of a signal below 0.

        255 where nobody knows: the process that it was forked from has ended before it.
        """
        self._process.terminate()  # nothing, where it has ended
        if not self.wait(2 * END_SECONDS):  # its own children have half of that
            self._process.kill()
            self.wait()
        assert self._process.exitcode is not None
        return self._process.exitcode


def apart(what: str, module: str, work: Callable[[], None]) -> int:
    """Do work in a process of its own (:class:`Apart`), and name it where it is killed; its exit code."""
    process = Apart(module, work)
    try:
        process.wait()
    except KeyboardInterrupt:
        process.wait(END_SECONDS)  # a terminal has told it too
    finally:
        code = process.end()
    if code in _TOLD:
        print(f"realmops: {what} {fate(code)}", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


def fate(code: int) -> str:
    """How work in a process of its own ended, by what :meth:`Apart.end` gives."""
    return _TOLD.get(code, f"ended with {code}")


def run_command(arguments: Sequence[str], log: Path) -> None:
    """``realmops`` with these arguments in this process; what it writes goes behind a file's end."""
    with open(log, "ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.argv = ["realmops", *arguments]
    run_module("realmops", run_name="__main__")


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
