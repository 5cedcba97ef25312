"""Leases: mutual exclusion of processes, or of pods on one volume; one does the work while the others wait.

A lease is a folder of numbered terms ``<lease>/000001``, each committed by a rename that only one process can do, and
never removed, so that no number is given twice. From the moment a term is visible it has the holder's file lock and
heartbeat, which changes while the holder lives and records when it has ended. A
term is over when its heartbeat records the end, when it has not changed for ``EXPIRY_SECONDS`` by the clock of the
process that checks (no clock of another machine counts), or at once when its holder ran on this machine and its file
lock is free. A holder that was suspended finds a higher number when it is resumed.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from realmops import artifacts
from realmops.files import Clock, Files
from realmops.refresh.heartbeat import Heartbeat, LivenessTracker

POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 5.0
EXPIRY_SECONDS = 120.0  # longer than NFS may show an old listing
LOG_SECONDS = 60.0  # between two messages of a wait
HEARTBEAT_FILE, LOCK = "sign.json", "lock"


@dataclass
class Lease:
    """A lease that this process holds; ``lost`` is set when another process has taken it over."""

    lost: bool = False


@contextmanager
def acquire_lease(folder: Path, log: Callable[[str], None], stop: threading.Event | None = None) -> Iterator[Lease]:
    """Hold the lease in ``folder`` for the block; wait, and log the wait, while another process holds it.

    Raises:
        InterruptedError: ``stop`` was set before the lease was free.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stop, clock = stop or threading.Event(), Clock()
    liveness, start, last_log = LivenessTracker(clock), clock.monotonic(), float("-inf")
    while (term := _start_term(folder, liveness)) is None:
        if (now := clock.monotonic()) - last_log >= LOG_SECONDS:
            heartbeat = _read_heartbeat(_term_folder(folder, _newest_term(folder)))
            holder = f"{heartbeat['host']}, process {heartbeat['pid']}" if heartbeat else "a process without heartbeat"
            log(f"waiting for {folder}, which {holder} holds, since {now - start:.0f} s")
            last_log = now
        if stop.wait(POLL_SECONDS):
            raise InterruptedError(f"stopped while waiting for {folder}")
    with _hold(*term) as lease:
        yield lease


@contextmanager
def try_acquire_lease(folder: Path, liveness: LivenessTracker) -> Iterator[Lease | None]:
    """Hold the lease in ``folder`` for the block, or yield None if another process holds it.

    Args:
        folder: the lease's folder; its parent must exist.
        liveness: the tracker of the holders' heartbeats, which the caller keeps from call to call.
    """
    folder.mkdir(exist_ok=True)
    term = _start_term(folder, liveness)
    with _hold(*term) if term else nullcontext() as lease:
        yield lease


@contextmanager
def _hold(term: Path, lock: IO[bytes]) -> Iterator[Lease]:
    lease, ended, heartbeat = Lease(), threading.Event(), Heartbeat(term / HEARTBEAT_FILE, 0.0)

    def beat(*, done: bool) -> None:
        with suppress(OSError):  # work continues without heartbeats
            heartbeat.beat(done=done)

    def beat_until_end() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            beat(done=False)
            with suppress(OSError):
                lease.lost = _newest_term(term.parent) > int(term.name)

    with lock:
        thread = threading.Thread(target=beat_until_end, daemon=True)
        thread.start()
        try:
            yield lease
        finally:
            ended.set()
            thread.join()
            beat(done=True)


def _start_term(folder: Path, liveness: LivenessTracker) -> tuple[Path, IO[bytes]] | None:
    """Commit the folder of a new term; return it with its lock, None while the last term runs or if it is lost."""
    number, files = _newest_term(folder), Files()
    last, following = _term_folder(folder, number), _term_folder(folder, number + 1)
    if number and not _is_over(last, _read_heartbeat(last), liveness):
        return None
    is_first = False

    def commit(draft: Path) -> bool:
        nonlocal is_first
        own = _read_heartbeat(draft)
        try:
            files.rename(draft, following)
            is_first = True
        except OSError:  # another process was faster, or the rename was done and its reply lost
            if (heartbeat := _read_heartbeat(following)) is None:
                raise
            is_first = heartbeat == own
        return is_first

    name = f".{secrets.token_hex(8)}"
    with artifacts.atomic_folder(following, files=files, draft=name, commit=commit) as draft:
        lock = open(draft / LOCK, "ab")  # noqa: SIM115 (closed by ``_hold``)
        artifacts.try_lock(lock)
        Heartbeat(draft / HEARTBEAT_FILE, 0.0).beat(nonce=name, done=False)
    if is_first:
        return following, lock
    lock.close()
    return None


def _newest_term(folder: Path) -> int:
    return max((int(name) for name in Files().listdir(folder) if name.isdigit()), default=0)


def _term_folder(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}"


def _read_heartbeat(term: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        heartbeat: dict[str, Any] = artifacts.read_json(term / HEARTBEAT_FILE)
        return heartbeat
    return None


def _is_over(term: Path, heartbeat: dict[str, Any] | None, liveness: LivenessTracker) -> bool:
    if heartbeat and heartbeat["done"]:
        return True
    if heartbeat and heartbeat["host"] == socket.gethostname():
        with suppress(OSError), open(term / LOCK, "ab") as file:
            if artifacts.try_lock(file) is True:
                return True
    return liveness.seconds_unchanged(str(term), heartbeat) >= EXPIRY_SECONDS
