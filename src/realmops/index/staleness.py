"""How stale an index is, in numbers.

Shape suffixes: Q queries, K results.
"""

from __future__ import annotations

import numpy as np


def generation_in_use(step: int, *, refresh_every: int, lag: int) -> int:
    """The step whose weights the index of training step ``step`` was built from, under ``adopt: fixed_lag``."""
    assert step >= 0
    return max(0, (step - lag) // refresh_every * refresh_every)


def top_k_change(old_QK: np.ndarray, new_QK: np.ndarray) -> float:
    """Share of the top k, over all queries, that another index would change (order does not count)."""
    assert old_QK.shape == new_QK.shape
    kept = sum(len(set(old) & set(new)) for old, new in zip(old_QK.tolist(), new_QK.tolist(), strict=True))
    return 1 - kept / old_QK.size
