"""Child processes: supervised and restarted ones, work in a fresh process, and processes that end with their parent."""

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

MAX_PAUSE_SECONDS = 30.0  # before a process that failed is restarted
END_SECONDS = 30.0  # after SIGTERM, before SIGKILL
LAST_LINES = 5  # of a log, shown in an error
PARENT_SECONDS = 0.5  # between two checks of the parent process
_SAFE_PATH = "PYTHONSAFEPATH"
_ABNORMAL_EXITS = {  # of processes that could not report them
    -signal.SIGKILL: "was killed, as the system does when it runs out of memory",
    255: "was lost, as the process that it was forked from was killed: run the same command again",
}
_EXIT_CODES = threading.Lock()  # an exit code can be read once, and each start of a process reads those of all


class SupervisedProcess:
    """A supervised child process, restarted after each exit with exponential back-off.

    The back-off begins at ``pause`` seconds and doubles up to ``MAX_PAUSE_SECONDS``; it is reset after a process that
    ran for longer than that. Output is appended to ``log``.
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
                    self._process = subprocess.Popen(
                        self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment
                    )
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
        """Return the last lines of the log."""
        assert self.log is not None
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])


def end_with(parent: int) -> None:
    """Send this process SIGTERM once it is no longer a child of ``parent``."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class WorkerProcess:
    """Work in a separate process, which frees all of its memory at exit and ends with this process.

    Args:
        module: the module that the fork server imports once; each process is forked from there.
        work: a module-level function, or a partial of one.

    Raises:
        ValueError: no socket can be created in the folder for temporary files.
    """

    def __init__(self, module: str, work: Callable[[], None]) -> None:
        context = get_context("forkserver")
        with _EXIT_CODES:
            context.set_forkserver_preload([module])
            environment = dict(os.environ)
            os.environ[_SAFE_PATH] = "1"  # else the server would import modules of the working directory
            try:
                ensure_running()
            except OSError as error:
                raise ValueError(
                    f"{gettempdir()}: no socket can be created in a folder there ({error}), which processes of stages "
                    "need; set TMPDIR to a folder of this machine with a short name, for example TMPDIR=/tmp"
                ) from error
            finally:
                del os.environ[_SAFE_PATH]
                os.environ.update(environment)
            self._process = context.Process(target=_end_with_work, args=(work, environment))
            self._process.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the process for at most ``seconds``; return whether it has ended."""
        connection.wait([self._process.sentinel], seconds)
        with _EXIT_CODES:
            return self._process.exitcode is not None

    def end(self) -> int:
        """Send SIGTERM, then SIGKILL after twice ``END_SECONDS``.

        Returns:
            The exit code; negative for a signal, 255 if unknown because the fork server ended first.
        """
        self._process.terminate()  # no effect if it has ended
        if not self.wait(2 * END_SECONDS):  # it gives its own children half of that
            self._process.kill()
            self.wait()
        assert self._process.exitcode is not None
        return self._process.exitcode


def run_in_process(name: str, module: str, work: Callable[[], None]) -> int:
    """Do work in a separate process (:class:`WorkerProcess`) and return its exit code; print ``name`` if killed."""
    process = WorkerProcess(module, work)
    try:
        process.wait()
    except KeyboardInterrupt:
        process.wait(END_SECONDS)  # the terminal has sent SIGINT to it too
    finally:
        code = process.end()
    if code in _ABNORMAL_EXITS:
        print(f"realmops: {name} {describe_exit(code)}", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


def describe_exit(code: int) -> str:
    """Describe the exit code that :meth:`WorkerProcess.end` returned."""
    return _ABNORMAL_EXITS.get(code, f"ended with exit code {code}")


def run_realmops(arguments: Sequence[str], log: Path) -> None:
    """Run ``realmops`` with these arguments in this process; append its output to ``log``."""
    with open(log, "ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.argv = ["realmops", *arguments]
    run_module("realmops", run_name="__main__")


def _end_with_work(work: Callable[[], None], environment: Mapping[str, str]) -> None:
    """Do the work; on the end of the starting process, whose child is the fork server, send this process SIGTERM."""
    os.environ.clear()
    os.environ.update(environment)
    starter = parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    work()
