"""Processes of the command line forked from one that has imported PyTorch and the stages (``fork_server``)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import Pipe, connection, forkserver, get_context, parent_process
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from runpy import run_module
from types import SimpleNamespace
from typing import Any, TextIO
from unittest import mock

from realmops.refresh import child_processes

_LOCK = threading.Lock()  # an exit code can be read once, and each start of a process reads those of all


class Forked:
    """Work in a forked process, with what tests use of ``subprocess.Popen``.

    ``work`` is a function of a module; standard output and error are appended to ``log``, or piped to ``stderr``.
    """

    def __init__(
        self, work: Callable[[], None], *, log: Path | None = None, cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        inherited = dict(os.environ if env is None else env), cwd or Path.cwd(), getrlimit(RLIMIT_NOFILE)
        with ExitStack() as stack, _LOCK:
            reader, writer = (stack.enter_context(end) for end in Pipe(duplex=False))
            _start_server()
            process = get_context("forkserver").Process(target=_run, args=(work, log or writer, *inherited))
            process.start()
            self.stderr: TextIO | None = None if log else os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        self._process: Any = process
        self._process._config["daemon"] = True  # it ends with pytest
        assert self._process.pid
        self.pid: int = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        connection.wait([self.sentinel], timeout)
        if (code := self._exit_code()) is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return code

    def poll(self) -> int | None:
        connection.wait([self.sentinel], 0)
        return self._exit_code()

    def _exit_code(self) -> int | None:
        with _LOCK:
            code: int | None = self._process.exitcode
            return code

    @property
    def sentinel(self) -> int:
        """Handle for ``multiprocessing.connection.wait``."""
        return int(self._process.sentinel)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[str, str]:
        """Wait for the end; return "" and what was piped."""
        assert self.stderr
        with self.stderr:
            output = self.stderr.read()
        self.wait()
        return "", output


def realmops(*words: str | Path, **options: Any) -> Forked:
    """Run ``realmops`` with these words."""
    return Forked(partial(run_program, "realmops", [str(word) for word in words]), **options)


def start_builder(command: list[str], *, stdin: int, stdout: Any, stderr: Any) -> Forked:
    """Start the index builder of a stage as ``subprocess.Popen`` does; it ends with this process."""
    python, words = command[:4], command[4:]
    assert python == [sys.executable, "-P", "-m", "realmops"], command
    if "--watch-parent" in words:  # this process is not its parent
        at = words.index("--watch-parent")
        del words[at : at + 2]
    log = Path(stdout.name if stdout else f"/proc/{os.getpid()}/fd/1")
    return Forked(partial(run_program, "realmops", words), log=log)


FORKS: Any = SimpleNamespace(Popen=start_builder, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)


@contextmanager
def forked_builders() -> Iterator[None]:
    """Context manager: the stages of this process fork their index builders."""
    usual: Any = child_processes.subprocess
    child_processes.subprocess = FORKS
    try:
        yield
    finally:
        if usual is not FORKS:  # else another thread does this
            child_processes.subprocess = usual


def run_program(module: str, words: list[str]) -> None:
    """Run ``python -m module`` with these words in this process."""
    sys.argv = [module, *words]
    run_module(module, run_name="__main__", alter_sys=True)


def redirect(output: Path | int) -> None:
    """Send standard output and error of this process to a file, or to its descriptor."""
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if isinstance(output, Path) else output
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (1, 2):
        os.dup2(target, number)


def _run(work: Callable[[], None], output: Any, env: Mapping[str, str], cwd: Path, files: tuple[int, int]) -> None:
    redirect(output if isinstance(output, Path) else output.fileno())
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    setrlimit(RLIMIT_NOFILE, files)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    work()


def _end_with_starter() -> None:
    """Send this process SIGTERM when the one that started it has ended; its parent is the fork server."""
    starter = parent_process()
    assert starter is not None
    starter.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _start_server() -> None:
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), PYTHONSAFEPATH="1"):
        forkserver.set_forkserver_preload(["fork_server"])
        forkserver.ensure_running()
