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
    """Call ``poll`` until it returns a value other than None.

    Args:
        poll: called repeatedly; None means not ready.
        interval: seconds between calls.
        timeout: seconds after which to give up.
        on_progress: called with the elapsed seconds after the first poll, then every ``LOG_SECONDS``.

    Returns:
        The value, or None after the timeout.
    """
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
