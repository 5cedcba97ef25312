"""Search one run from many threads at once, as a program: ``concurrent_searches.py ROOT ROUNDS``.

Each round opens the run under ROOT again, so that the threads' first searches meet, and compares every result with that
of a single thread.
"""

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

from realmops import Searcher

THREADS = 8
QUERIES = 24


def results(searcher: Searcher, query: str) -> Any:
    return [(p.passage_id, p.title, p.text, p.score, p.uri, p.highlights) for p in searcher.search(query, 10)]


def search_at_once(root: Path, expected: dict[str, Any], seed: int) -> None:
    searcher, barrier = Searcher.open(root), Barrier(THREADS)

    def search(number: int) -> None:
        queries = random.Random(f"{seed} {number}").sample(sorted(expected), len(expected))
        barrier.wait()
        for query in queries:
            assert results(searcher, query) == expected[query], query

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(search, range(THREADS)))


def main(root: Path, rounds: int) -> None:
    alone = Searcher.open(root)
    snapshot = alone._search.snapshot
    queries = [snapshot.text(passage)[:40] for passage in range(0, len(snapshot), max(1, len(snapshot) // QUERIES))]
    expected = {query: results(alone, query) for query in queries}
    assert len(expected) > QUERIES // 2
    for seed in range(rounds):
        search_at_once(root, expected, seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
