"""Search for sequences of wordpieces in passages."""

from collections.abc import Iterator

import numpy as np


def find_run(body: np.ndarray, run: np.ndarray) -> Iterator[int]:
    """Yield the positions of ``run`` as a contiguous part of ``body``, both int64; an empty run is everywhere."""
    haystack, needle, offset = body.tobytes(), run.tobytes(), -1
    while (offset := haystack.find(needle, offset + 1)) >= 0:
        if offset % body.itemsize == 0:
            yield offset // body.itemsize


def contains_run(body: np.ndarray, run: np.ndarray) -> bool:
    """Return whether ``run`` is a contiguous part of ``body``, both int64."""
    return next(find_run(body, run), None) is not None
