"""One of many: several processes, or pods on one volume, want the same thing made, and one makes it while they wait.

A claim is a folder of numbered lives ``<claim>/000001``, each taken by mkdir and never removed, so that a number is
given once. In a life lies the holder's sign, which changes while the holder lives and says when it has ended. A life
is over when its sign says so, when it stays the same for ``DEAD_SECONDS`` by the clock of whoever looks (no clock of
another machine counts), or at once when its holder ran on this machine and its lock is free. A holder that was only
stopped finds a higher number when it wakes up.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.refresh.heartbeat import Ages, Sign
from realmops.refresh.shared_files import Clock, Files

LOOK_SECONDS = 0.5
BEAT_SECONDS = 5.0
DEAD_SECONDS = 120.0  # longer than a listing stays old on NFS
SAID_SECONDS = 60.0
SIGN_FILE, LOCK = "sign.json", "lock"


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
    stop, clock = stop or threading.Event(), Clock()
    ages, began, said = Ages(clock), clock.monotonic(), float("-inf")
    while (life := _next_life(folder, ages)) is None:
        if (now := clock.monotonic()) - said >= SAID_SECONDS:
            sign = _read(_life(folder, _newest(folder)))
            holder = f"{sign['host']}, process {sign['pid']}" if sign else "a process that has not signed yet"
            say(f"waiting for {folder}, which {holder} holds, since {now - began:.0f} s")
            said = now
        if stop.wait(LOOK_SECONDS):
            raise InterruptedError(f"stopped while waiting for {folder}")
    with _held(life) as claim:
        yield claim


@contextmanager
def claimed_if_free(folder: Path, ages: Ages) -> Iterator[Claim | None]:
    """Hold the claim in ``folder`` alone; None while another has it. The folder above must be there.

    ``ages`` remembers from call to call how long each holder's sign has looked the same.
    """
    folder.mkdir(exist_ok=True)
    life = _next_life(folder, ages)
    with _held(life) if life else nullcontext() as claim:
        yield claim


@contextmanager
def _held(life: Path) -> Iterator[Claim]:
    claim, ended, sign = Claim(), threading.Event(), Sign(life / SIGN_FILE, 0.0)

    def give(*, done: bool) -> None:
        with suppress(OSError):  # work goes on without signs of life
            sign.give(done=done)

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            give(done=False)
            with suppress(OSError):
                claim.lost = _newest(life.parent) > int(life.name)

    with open(life / LOCK, "ab") as lock:
        artifacts.try_lock(lock)
        give(done=False)
        heart = threading.Thread(target=beat, daemon=True)
        heart.start()
        try:
            yield claim
        finally:
            ended.set()
            heart.join()
            give(done=True)


def _next_life(folder: Path, ages: Ages) -> Path | None:
    """The folder of a new life; None while the one before goes on, or when somebody else was faster."""
    number = _newest(folder)
    last, following = _life(folder, number), _life(folder, number + 1)
    if number == 0 or _is_over(last, _read(last), ages):
        with suppress(FileExistsError):
            Files().mkdir(following)
            return following
    return None


def _newest(folder: Path) -> int:
    return max((int(name) for name in Files().listdir(folder) if name.isdigit()), default=0)


def _life(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}"


def _read(life: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        sign: dict[str, Any] = artifacts.read_json(life / SIGN_FILE)
        return sign
    return None


def _is_over(life: Path, sign: dict[str, Any] | None, ages: Ages) -> bool:
    if sign and sign["done"]:
        return True
    if sign and sign["host"] == socket.gethostname():
        with suppress(OSError), open(life / LOCK, "ab") as file:
            if artifacts.try_lock(file) is True:
                return True
    return ages.age(str(life), sign) >= DEAD_SECONDS
