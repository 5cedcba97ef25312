"""Polling with progress messages."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

LOG_SECONDS = 30.0  # between progress messages
T = TypeVar("T")
Log = Callable[[str], None]


def poll_until(
    poll: Callable[[], T | None],
    interval: float,
    timeout: float = math.inf,
    on_progress: Callable[[float], None] = lambda elapsed: None,
) -> T | None:
    """Return the first value of ``poll`` other than None, or None after ``timeout`` seconds."""
    started = time.monotonic()
    reported = -math.inf
    while (result := poll()) is None:
        elapsed = time.monotonic() - started
        if elapsed > timeout:
            break
        if elapsed - reported > LOG_SECONDS:
            on_progress(elapsed)
            reported = elapsed
        time.sleep(interval)
    return result
