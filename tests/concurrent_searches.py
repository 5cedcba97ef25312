"""Search one run from many threads at once; run as a program, whose exit status tells whether the process survived.

``python concurrent_searches.py ROOT ROUNDS`` opens the run under ROOT again in each round, so that the threads' first
searches meet, and compares every answer with the one that a single thread got.
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


def queries(searcher: Searcher) -> list[str]:
    """Words of passages from all over the corpus."""
    snapshot = searcher._search.snapshot
    step = max(1, len(snapshot) // QUERIES)
    return [snapshot.text(passage)[:40] for passage in range(0, len(snapshot), step)]


def results(searcher: Searcher, query: str) -> Any:
    """What a caller sees of the best ten passages."""
    return [(p.passage_id, p.title, p.text, p.score, p.uri, p.highlights) for p in searcher.search(query, 10)]


def search_at_once(root: Path, expected: dict[str, Any], seed: int) -> None:
    """Let all threads begin together on a run that nobody has read yet."""
    searcher, barrier = Searcher.open(root), Barrier(THREADS)

    def search(number: int) -> None:
        asked = random.Random(f"{seed} {number}").sample(sorted(expected), len(expected))
        barrier.wait()
        for query in asked:
            assert results(searcher, query) == expected[query], query

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(search, range(THREADS)))


def main(root: Path, rounds: int) -> None:
    """Fail with an AssertionError where a thread got another result than a single one does."""
    alone = Searcher.open(root)
    expected = {query: results(alone, query) for query in queries(alone)}
    assert len(expected) > QUERIES // 2
    for seed in range(rounds):
        search_at_once(root, expected, seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
