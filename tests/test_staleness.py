from __future__ import annotations

import numpy as np
import pytest

from realmops.index.staleness import generation_in_use, top_k_change


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0), (49, 0), (50, 0), (74, 0), (75, 50), (76, 50), (124, 50), (125, 100), (399, 350)],
)
def test_an_index_is_adopted_lag_steps_after_its_weights(step: int, expected: int) -> None:
    """Weights of steps 0, 50, 100, ...; each index is in use from 25 steps later, until the next."""
    assert generation_in_use(step, refresh_every=50, lag=25) == expected


def test_no_lag_and_a_lag_over_several_refreshes() -> None:
    assert [generation_in_use(step, refresh_every=2, lag=0) for step in range(5)] == [0, 0, 2, 2, 4]
    assert [generation_in_use(step, refresh_every=2, lag=5) for step in range(10)] == [0] * 7 + [2, 2, 4]


def test_staleness_under_a_fixed_lag_is_between_lag_and_lag_plus_refresh() -> None:
    stale = [step - generation_in_use(step, refresh_every=50, lag=25) for step in range(75, 1000)]
    assert (min(stale), max(stale)) == (25, 74)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([[1, 2, 3, 4]], [[4, 3, 2, 1]], 0.0),
        ([[1, 2, 3, 4]], [[1, 2, 9, 4]], 0.25),
        ([[1, 2], [3, 4]], [[1, 2], [7, 8]], 0.5),
        ([[1, 2]], [[8, 9]], 1.0),
    ],
    ids=["order does not count", "one of four", "one query of two", "all"],
)
def test_top_k_change(old: list[list[int]], new: list[list[int]], expected: float) -> None:
    assert top_k_change(np.array(old), np.array(new)) == expected
