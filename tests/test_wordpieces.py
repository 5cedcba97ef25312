from __future__ import annotations

import numpy as np
import pytest

from realmops.corpus.wordpieces import contains


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize(
    ("body", "run", "expected"),
    [
        ((1, 2, 3, 4), (2, 3), True),
        ((1, 2, 3, 4), (1, 2, 3, 4), True),
        ((1, 2, 3, 4), (4,), True),
        ((1, 2, 3, 4), (2, 4), False),
        ((1, 2, 3, 4), (4, 5), False),
        ((1, 2), (1, 2, 3), False),
        ((1, 1, 2), (1, 2), True),
        ((), (1,), False),
        ((1, 2), (), True),
        # 256 and 1 lie in memory as 0 1 0 0 ... and 1 0 0 0 ...: equal bytes at a shifted place are no match
        ((256,), (1,), False),
        ((0, 256, 0), (1, 0), False),
        ((1, 256, 1), (256, 1), True),
        ((256, 1), (1,), True),
    ],
)
def test_contains(body: tuple[int, ...], run: tuple[int, ...], expected: bool) -> None:
    assert contains(ids(*body), ids(*run)) is expected


def test_contains_equals_the_obvious_search() -> None:
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(2000):
        body = rng.choice([0, 1, 256, 65536], size=rng.integers(0, 9)).astype(np.int64)
        run = rng.choice([0, 1, 256, 65536], size=rng.integers(1, 4)).astype(np.int64)
        obvious = any(body[i : i + len(run)].tolist() == run.tolist() for i in range(len(body)))
        assert contains(body, run) is obvious
        outcomes.add(obvious)
    assert outcomes == {True, False}
