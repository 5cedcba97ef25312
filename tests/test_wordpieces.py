from __future__ import annotations

import numpy as np
import pytest
from tiny import World

from realmops.corpus.wordpieces import contains, passages_with


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


def test_passages_with_a_run(world: World) -> None:
    """Few passages are looked at one by one, many in one sweep over the corpus: the same ones are found."""
    snapshot = world.snapshot
    everything, few = list(range(len(snapshot))), [3, 0]
    for text in ("Oslo", "Anna Berg", "it rains", "in Bergen.", "Bergen. It", "zzz", "."):
        run = world.wordpieces(text)
        obvious = [p for p in everything if contains(snapshot.body(p), run)]
        assert passages_with(snapshot, run, everything) == obvious
        assert passages_with(snapshot, run, everything[::-1]) == obvious[::-1], "in the order asked for"
        assert passages_with(snapshot, run, few) == [p for p in few if p in obvious]
    assert passages_with(snapshot, world.wordpieces("Oslo"), everything) == [0, 1, 4, 5]


def test_a_run_over_a_border_is_in_neither_passage(world: World) -> None:
    """The last wordpieces of passage 4 and the first of passage 5, which lie side by side in the file."""
    snapshot = world.snapshot
    run = np.concatenate([snapshot.body(4)[-2:], snapshot.body(5)[:2]])
    assert contains(snapshot.tokens[:].astype(np.int64), run)
    assert passages_with(snapshot, run, range(12)) == []


def test_the_empty_run_is_everywhere_and_a_long_one_nowhere(world: World) -> None:
    everything = list(range(12))
    assert passages_with(world.snapshot, ids(), everything) == everything
    longer = np.zeros(len(world.snapshot.tokens) + 1, dtype=np.int64)
    assert passages_with(world.snapshot, longer, everything) == []
    whole = world.snapshot.body(11)
    assert passages_with(world.snapshot, whole, everything) == [11], "the last passage, to its end"
