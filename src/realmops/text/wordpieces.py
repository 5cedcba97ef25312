"""Runs of wordpieces inside passages."""

from collections.abc import Iterator

import numpy as np


def places(body: np.ndarray, run: np.ndarray) -> Iterator[int]:
    """Where ``run`` occurs in ``body`` without a gap; both int64.  The empty run occurs everywhere."""
    hay, needle, place = body.tobytes(), run.tobytes(), -1
    while (place := hay.find(needle, place + 1)) >= 0:
        if place % body.itemsize == 0:
            yield place // body.itemsize


def contains(body: np.ndarray, run: np.ndarray) -> bool:
    """Whether ``run`` occurs in ``body`` without a gap."""
    return next(places(body, run), None) is not None
