"""Runs of wordpieces inside passages."""

from __future__ import annotations

import numpy as np


def contains(body: np.ndarray, run: np.ndarray) -> bool:
    """Whether ``run`` occurs in ``body`` without a gap; both int64.  The empty run occurs everywhere."""
    hay, needle, place = body.tobytes(), run.tobytes(), -1
    while (place := hay.find(needle, place + 1)) >= 0:
        if place % body.itemsize == 0:
            return True
    return False
