"""Processes that train together as under torchrun, forked from a process that has imported PyTorch and transformers.

    python tests/ranks.py PORT STAGE PARAMS [ROOT PROCESSES]...

does the same in a process with variables of its own, which the library may read as it is imported.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from realmops.refresh import child_processes
from realmops.refresh.child_processes import run_realmops

PRELOAD = "realmops.commands.preload"
SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined]


def forked(work: Any, *arguments: Any) -> BaseProcess:
    """A process of a fork server that has imported PyTorch and transformers, unless this process has another one."""
    context = get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])  # no effect on a fork server that runs
    process = context.Process(target=work, args=arguments)
    process.start()
    return process


def start_forked(arguments: Sequence[str | Path], log: Path, **variables: str) -> BaseProcess:
    """Start a command of realmops, forked; its output is appended to ``log``."""
    get_context("forkserver").set_forkserver_preload([PRELOAD])
    SERVER.ensure_running()
    return forked(as_command, [str(word) for word in arguments], log, variables, SERVER._forkserver_address)


def run_forked(arguments: Sequence[str | Path], log: Path) -> str:
    """Run a command of realmops that succeeds, with its stages in the same process, as under torchrun; its output."""
    process = start_forked(arguments, log, TORCHELASTIC_RUN_ID="none")
    process.join()
    assert process.exitcode == 0, log.read_text()
    return log.read_text()


def as_command(arguments: list[str], log: Path, variables: dict[str, str], server: str) -> None:
    """Do so in this process, whose children are forked from the same fork server: Python would start another one."""
    os.environ.update(variables)
    if not hasattr(SERVER, "_forkserver_authkey"):  # as of Python 3.14, which starts one
        SERVER._forkserver_address, SERVER.ensure_running = server, lambda: None
        child_processes.ensure_running = SERVER.ensure_running
    with forked_builders():
        run_realmops(arguments, log)


class ForkedCommand:
    """What ``SupervisedProcess`` uses of ``subprocess.Popen``: a command of realmops, forked and not started."""

    def __init__(self, command: Sequence[str], *, stdout: IO[bytes], env: dict[str, str], **_: Any) -> None:
        arguments = command[command.index("realmops") + 1 :]
        self._process = forked(as_child, list(arguments), stdout.name, dict(env))
        self.terminate, self.kill = self._process.terminate, self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("realmops", seconds or 0.0)
        return self._process.exitcode


def as_child(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    """The process that ``--watch-parent`` names is the parent of a started process; that of this one is another."""
    os.environ.clear()
    os.environ.update(environment)
    arguments[arguments.index("--watch-parent") + 1] = str(os.getppid())
    run_realmops(arguments, Path(log))


def start_command(command: Sequence[str], **how: Any) -> Any:
    """Fork the builder of a stage; start any other process."""
    is_child = "--watch-parent" in command and how["stdout"] is not None
    return ForkedCommand(command, **how) if is_child else subprocess.Popen(command, **how)


CALLS = SimpleNamespace(Popen=start_command, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)


@contextmanager
def forked_builders() -> Iterator[None]:
    """Let the stages of this process fork their index builders, which then import nothing."""
    usual: Any = child_processes.subprocess
    child_processes.subprocess = CALLS  # type: ignore[assignment]
    try:
        yield
    finally:
        if usual is not CALLS:  # else another thread does this
            child_processes.subprocess = usual


def run_roots(port: int, stage: str, params: Path, processes: Mapping[Path, int]) -> list[int | None]:
    """Run a stage under each root by so many processes, which meet at the store of this port; return exit codes.

    The output is appended to a log named as the root. Once one has failed, all are ended, as torchrun does.
    """
    ranks = []
    for root, size in processes.items():
        variables = {  # as torchrun sets them
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        }  # fmt: skip
        words = ["run", stage, "--params", str(params), "--root", str(root)]
        for rank in range(size):
            own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(start_forked(words, root.with_suffix(".log"), **own))
    waiting = {rank.sentinel: rank for rank in ranks}
    while waiting:
        for sentinel in connection.wait([*waiting]):
            ended = waiting.pop(sentinel)  # type: ignore[index]
            ended.join()
            if ended.exitcode:
                for rank in waiting.values():
                    rank.terminate()
    return [rank.exitcode for rank in ranks]


def run_together(params: Path, processes: Mapping[Path, int], *, stage: str = "all", **variables: str) -> None:
    """Run stages by several processes under each root; with variables, forked from a process that started with them."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
    if variables:
        words = [sys.executable, __file__, str(store.port), stage, params]
        words += [word for root, size in processes.items() for word in (root, str(size))]
        codes: list[int | None] = [subprocess.run(words, env={**os.environ, **variables}).returncode]
    else:
        codes = run_roots(store.port, stage, params, processes)
    assert not any(codes), (codes, [root.with_suffix(".log").read_text() for root in processes])


if __name__ == "__main__":
    meeting, asked, options, *rest = sys.argv[1:]
    sizes = dict(zip(map(Path, rest[::2]), map(int, rest[1::2]), strict=True))
    sys.exit(any(run_roots(int(meeting), asked, Path(options), sizes)))
