"""A child process with a memory limit: it reads files whose size says nothing of the memory that reading them takes.

A PDF of 2 KiB may draw a text of any length, and PDFium ends its process where memory is short. In a child process
such a file is rejected, and the next one is read by a new child.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

from realmops.corpus.documents import Document, Dropped, Outcome, Raw, Rejected

MEMORY_LIMIT = 2 << 30  # bytes of data, beyond those of a child that has read nothing
_OUTCOMES = {kind.__name__: kind for kind in (Document, Dropped, Rejected)}
_OUT_OF_MEMORY = 3  # exit status
_ONE_AT_A_TIME = threading.Lock()  # else a thread would read the reply to another one's request


def convert_in_child(module: str, name: str, raw: Raw) -> Outcome:
    """Return what ``module.convert(name, raw)`` makes of a file in the child process.

    Args:
        raw: a record whose data is the path of the file.
    """
    with _ONE_AT_A_TIME:
        return _converted(module, name, raw)


def _converted(module: str, name: str, raw: Raw) -> Outcome:
    child = _child(module, os.getpid())
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps([name, raw.place, os.fspath(raw.data), raw.position]).encode() + b"\n")
            child.stdin.flush()
        reply = child.stdout.readline()
    except BaseException:  # the reply would be taken for that of the next file
        child.kill()
        _child.cache_clear()
        raise
    if reply:
        kind, fields = json.loads(reply)
        for key in ("pages", "spans"):
            if key in fields:
                fields[key] = tuple(fields[key])
        outcome: Outcome = _OUTCOMES[kind](**fields)
        return outcome
    _child.cache_clear()
    child.communicate()
    if child.returncode == _OUT_OF_MEMORY:
        problem = f"reading the file takes more than {MEMORY_LIMIT >> 20:,} MiB of memory; split it"
        return Rejected(raw.place, problem, kind="too_large")
    problem = f"reading the file ended the process that did it (exit status {child.returncode}): the file is damaged"
    problem += f" or takes more than {MEMORY_LIMIT >> 20:,} MiB of memory; save it again or split it"
    return Rejected(raw.place, problem, kind=f"broken_{name}")


@cache
def _child(module: str, parent: int) -> "subprocess.Popen[bytes]":
    """Start the child of this process (not that of a process it was forked from), which ends when its input does."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import convert; from {__name__} import serve; serve"
    code += f"(convert, {MEMORY_LIMIT})"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def serve(convert: Callable[[str, Raw], Outcome], memory: int) -> None:
    """Convert the files named on standard input, with so many bytes of ``memory``, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no reply
    _limit_memory(memory)
    for request in sys.stdin.buffer:
        name, place, path, position = json.loads(request)
        try:
            outcome = convert(name, Raw(place, Path(path), position))
            reply = json.dumps([type(outcome).__name__, asdict(outcome)]).encode()
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        replies.write(reply + b"\n")
        replies.flush()


def _limit_memory(memory: int) -> None:
    with suppress(ImportError, OSError, ValueError):  # only Linux limits what a process maps
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + memory, used + memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
