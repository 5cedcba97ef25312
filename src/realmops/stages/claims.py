"""One of many: several processes, or pods on one volume, want the same thing made, and one makes it while they wait.

A claim is a folder of numbered lives ``<claim>/000001``, each taken by mkdir and never removed, so that a number is
given once. In a life lies the holder's sign, which changes while the holder lives and says when it has ended. A life
is over when its sign says so, when it stays the same for ``DEAD_SECONDS`` by the clock of whoever looks (no clock of
another machine counts), or at once when its holder ran on this machine and its lock is free. A holder that was only
stopped finds a higher number when it wakes up.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.index.files import Ages, Clock, Files

LOOK_SECONDS = 0.5
BEAT_SECONDS = 5.0
DEAD_SECONDS = 120.0  # longer than a listing stays old on NFS
SAID_SECONDS = 60.0
SIGN, LOCK = "sign.json", "lock"


@dataclass
class Claim:
    """A claim that is held; ``lost`` when somebody else has taken it over."""

    lost: bool = False


@contextmanager
def claimed(folder: Path, say: Callable[[str], None], stop: threading.Event | None = None) -> Iterator[Claim]:
    """Hold the claim in ``folder`` alone; while another has it, wait and say so.

    Raises InterruptedError when ``stop`` is set before it is this one's turn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    life = _take(folder, say, stop or threading.Event())
    claim, ended = Claim(), threading.Event()
    with open(life / LOCK, "ab") as lock:
        with suppress(OSError):  # a volume without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _sign(life, beat=0, done=False)
        heart = threading.Thread(target=_beat, args=(folder, life, claim, ended), daemon=True)
        heart.start()
        try:
            yield claim
        finally:
            ended.set()
            heart.join()
            _sign(life, beat=-1, done=True)


def _take(folder: Path, say: Callable[[str], None], stop: threading.Event) -> Path:
    """The folder of a new life, made when the one before is over."""
    files, clock = Files(), Clock()
    ages = Ages(clock)
    began, said = clock.monotonic(), float("-inf")
    while True:
        number = _newest(folder)
        sign = _read(_life(folder, number))
        if number == 0 or _is_over(_life(folder, number), sign, ages):
            with suppress(FileExistsError):
                files.mkdir(_life(folder, number + 1))
                return _life(folder, number + 1)
        if (now := clock.monotonic()) - said >= SAID_SECONDS:
            holder = f"{sign['host']}, process {sign['pid']}" if sign else "a process that has not signed yet"
            say(f"waiting for {folder}, which {holder} holds, since {now - began:.0f} s")
            said = now
        if stop.wait(LOOK_SECONDS):
            raise InterruptedError(f"stopped while waiting for {folder}")


def _newest(folder: Path) -> int:
    return max((int(name) for name in Files().listdir(folder) if name.isdigit()), default=0)


def _life(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}"


def _read(life: Path) -> dict[str, Any] | None:
    try:
        sign: dict[str, Any] = artifacts.read_json(life / SIGN)
    except (OSError, ValueError):
        return None
    return sign


def _is_over(life: Path, sign: dict[str, Any] | None, ages: Ages) -> bool:
    if sign and (sign["done"] or (sign["host"] == socket.gethostname() and _is_unlocked(life / LOCK))):
        return True
    return ages.age(life.name, sign) >= DEAD_SECONDS


def _is_unlocked(path: Path) -> bool:
    try:
        with open(path, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def _sign(life: Path, *, beat: int, done: bool) -> None:
    sign = {"host": socket.gethostname(), "pid": os.getpid(), "beat": beat, "done": done}
    with suppress(OSError):  # work goes on without signs of life
        Files().replace(life / SIGN, artifacts.canonical_json(sign))


def _beat(folder: Path, life: Path, claim: Claim, ended: threading.Event) -> None:
    beat = 0
    while not ended.wait(BEAT_SECONDS):
        beat += 1
        _sign(life, beat=beat, done=False)
        with suppress(OSError):
            claim.lost = _newest(folder) > int(life.name)
