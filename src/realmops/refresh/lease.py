"""Leases: mutual exclusion of processes, or of pods on one volume, by the lock of a file, which ends with its holder.

A lease saves work and never guards data: a server may give the lock of a holder that it cannot reach to another
process, and a volume without locks excludes no process.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from realmops.artifacts import try_lock

POLL_SECONDS = 0.5
LOG_SECONDS = 60.0  # between two messages of a wait


@contextmanager
def acquire_lease(path: Path, log: Callable[[str], None], stop: threading.Event | None = None) -> Iterator[None]:
    """Hold the lease in the file ``path`` for the block; wait, and log the wait, while another process holds it.

    InterruptedError if ``stop`` is set before the lease is free.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    stop, start, last_log = stop or threading.Event(), time.monotonic(), float("-inf")
    with open(path, "a+", encoding="utf-8") as file:
        while try_lock(file) is False:
            if (now := time.monotonic()) - last_log >= LOG_SECONDS:
                file.seek(0)
                log(f"waiting for {path}, which {file.read() or 'another process'} holds, since {now - start:.0f} s")
                last_log = now
            if stop.wait(POLL_SECONDS):
                raise InterruptedError(f"stopped while waiting for {path}")
        file.truncate(0)
        file.write(f"{socket.gethostname()}, process {os.getpid()}")
        file.flush()
        yield
