"""Waiting for what others do, and saying so."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

SAID_SECONDS = 30.0
T = TypeVar("T")
Say = Callable[[str], None]


def awaited(
    look: Callable[[], T | None],
    every: float,
    most: float = math.inf,
    tell: Callable[[float], None] = lambda waited: None,
) -> T | None:
    """What ``look`` finds, asked every so many seconds; None when ``most`` of them have passed.

    ``tell`` is called after the first look, and then every ``SAID_SECONDS``, with the seconds that have passed.
    """
    began = time.monotonic()
    told = -math.inf
    while (found := look()) is None:
        waited = time.monotonic() - began
        if waited > most:
            break
        if waited - told > SAID_SECONDS:
            tell(waited)
            told = waited
        time.sleep(every)
    return found
