"""A child process with limits of memory and time, for files that may take far more of both than their size suggests.

A PDF of 2 KiB may produce text of any length, and PDFium aborts its process when memory runs out.
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
from pathlib import Path

from realmops.readers.documents import Document, Dropped, Outcome, RawRecord, Rejected

MEMORY_LIMIT = 2 << 30  # bytes of data, in addition to those of a freshly started child
TIME_LIMIT = 120.0  # seconds of processor time for one file, and again for each page that OCR reads
_OUTCOMES = {kind.__name__: kind for kind in (Document, Dropped, Rejected)}
_OUT_OF_MEMORY = 3  # exit status
_CHILDREN: dict[int, "subprocess.Popen[bytes]"] = {}  # by process: a fork starts its own
_LOCK = threading.Lock()  # the child replies in order: one request at a time
_CODE = (
    "import sys; sys.path[:] = {path!r}\n"
    "from realmops.readers.paged import convert; from realmops.readers.sandbox import run_child\n"
    "run_child(convert, {memory}, {seconds})"
)


def convert_in_child(name: str, raw: RawRecord) -> Outcome:
    """Run ``paged.convert(name, raw)`` in the child process; return the outcome, or ``Rejected`` if it ended."""
    with _LOCK:
        child = _start_child()
        assert child.stdin is not None
        assert child.stdout is not None
        request = json.dumps([name, raw.place, os.fspath(raw.data), raw.position, raw.ocr]).encode()
        try:
            with suppress(BrokenPipeError):
                child.stdin.write(request + b"\n")
                child.stdin.flush()
            reply = child.stdout.readline()
        except BaseException:  # a late reply would be taken for that of the next file
            stop_child()
            raise
        if not reply:
            child.wait()
            stop_child()
    if reply:
        kind, fields = json.loads(reply)
        if kind == Document.__name__:
            fields |= {key: tuple(fields[key]) for key in ("pages", "scans")}
            fields |= {key: tuple(map(tuple, fields[key])) for key in ("spans", "omitted")}
        return _OUTCOMES[kind](**fields)
    memory = f"{MEMORY_LIMIT >> 20:,} MiB of memory"
    if kind := {_OUT_OF_MEMORY: "too_large", -signal.SIGPROF: "too_slow"}.get(child.returncode, ""):
        limit = memory if kind == "too_large" else f"{TIME_LIMIT:g} s of processor time"
        return Rejected(raw.place, f"reading the file takes more than {limit}; split it", kind=kind)
    problem = f"the process that read the file ended with exit status {child.returncode}: the file is damaged or"
    problem += f" takes more than {memory}; save it again or split it"
    return Rejected(raw.place, problem, kind=f"broken_{name}")


def _start_child() -> "subprocess.Popen[bytes]":
    """Return this process's child, started if needed; it exits at the end of its input."""
    if child := _CHILDREN.get(os.getpid()):
        return child
    code = _CODE.format(path=sys.path, memory=MEMORY_LIMIT, seconds=TIME_LIMIT)
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    _CHILDREN[os.getpid()] = child
    return child


def stop_child() -> None:
    if child := _CHILDREN.pop(os.getpid(), None):
        child.kill()
        child.communicate()


def run_child(convert: Callable[[str, RawRecord], Outcome], memory: int, seconds: float) -> None:
    """Convert the files named on standard input until its end, using ``memory`` bytes, and ``seconds`` for each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops this process
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with replies
    with suppress(ImportError, OSError, ValueError):  # only Linux limits mapped memory
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + memory, used + memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for request in sys.stdin.buffer:
        name, place, path, position, ocr = json.loads(request)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # processor time; its signal ends this process
        try:
            outcome = convert(name, RawRecord(place, Path(path), position, tuple(ocr)))
            reply = json.dumps([type(outcome).__name__, asdict(outcome)]).encode()
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(reply + b"\n")
        replies.flush()
    os._exit(0)  # a library's threads may abort the interpreter's end
