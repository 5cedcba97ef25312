import numpy as np

from realmops.train.wordpieces import contains_run


def test_contains_equals_the_obvious_search() -> None:
    """256 and 1 lie in memory as 0 1 0 0 ... and 1 0 0 0 ...: equal bytes at a shifted place are no match."""
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(2000):
        body = rng.choice([0, 1, 256, 65536], size=rng.integers(0, 9)).astype(np.int64)
        run = rng.choice([0, 1, 256, 65536], size=rng.integers(0, 4)).astype(np.int64)
        obvious = any(body[i : i + len(run)].tolist() == run.tolist() for i in range(len(body) + 1))
        assert contains_run(body, run) is obvious, (body, run)
        outcomes.add((obvious, len(run)))
    assert outcomes == {(True, 0), *((found, length) for found in (True, False) for length in (1, 2, 3))}
