"""Runs of wordpieces inside passages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from realmops.corpus.snapshot import Snapshot


def contains(body: np.ndarray, run: np.ndarray) -> bool:
    """Whether ``run`` occurs in ``body`` without a gap; both int64.  The empty run occurs everywhere."""
    hay, needle, place = body.tobytes(), run.tobytes(), -1
    while (place := hay.find(needle, place + 1)) >= 0:
        if place % body.itemsize == 0:
            return True
    return False


def passages_with(snapshot: Snapshot, run: np.ndarray, among: Sequence[int]) -> list[int]:
    """Those of the passages ``among`` whose body contains the run of wordpieces."""
    if len(among) * 4 < len(snapshot):
        return [p for p in among if contains(snapshot.body(p), run)]
    tokens = snapshot.tokens
    count = len(tokens) - len(run) + 1
    if not len(run) or count <= 0:
        return list(among) if not len(run) else []
    start = np.flatnonzero(tokens[:count] == run[0])
    for place in range(1, len(run)):
        start = start[tokens[start + place] == run[place]]
    first = np.searchsorted(snapshot.token_offsets, start, side="right") - 1
    last = np.searchsorted(snapshot.token_offsets, start + len(run) - 1, side="right") - 1
    found = set(first[first == last].tolist())
    return [p for p in among if p in found]
