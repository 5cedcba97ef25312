"""Exact search for the best eight passages: realmops.search.exact against faiss Flat and against torch's topk.

    python benchmarks/search.py --sizes 20000 200000 --queries 256

Vectors of 128 numbers in clusters, which are hard for approximate search; queries lie near passages. One thread,
processor time. The torch side multiplies and sorts 65,536 passages at a time and merges. Ids must be the same. What is
made once, faiss's index and our copy in bf16 where the processor multiplies that, is made before the clock starts.
"""

from __future__ import annotations

import argparse
from typing import Any

import against
from against import Goal, Row

WIDTH, BEST, CLUSTERS, CHUNK = 128, 8, 1000, 1 << 16
GOALED = 200_000


def vectors(size: int, queries: int) -> tuple[Any, Any]:
    """Passages and queries."""
    import torch

    generator = torch.Generator().manual_seed(0)
    centre_CE = torch.randn(CLUSTERS, WIDTH, generator=generator)
    cluster_P = torch.randint(CLUSTERS, (size,), generator=generator)
    passage_PE = centre_CE[cluster_P] + 0.5 * torch.randn(size, WIDTH, generator=generator)
    near_Q = torch.randint(size, (queries,), generator=generator)
    return passage_PE, passage_PE[near_Q] + 0.3 * torch.randn(queries, WIDTH, generator=generator)


def chunked_topk(query_QE: Any, passage_PE: Any) -> Any:
    """Ids Q x 8 by matrix products and topk, some passages at a time."""
    import torch

    score, ids = [], []
    for number, part_PE in enumerate(torch.split(passage_PE, CHUNK)):
        best, place = (query_QE @ part_PE.T).topk(BEST, dim=1)
        score.append(best)
        ids.append(place + number * CHUNK)
    return torch.cat(ids, 1).gather(1, torch.cat(score, 1).topk(BEST, dim=1).indices)


def compare(size: int, queries: int, repeats: int) -> list[Row]:
    """The rows of one size."""
    import faiss
    import torch

    from realmops.search.exact import ExactIndex

    passage_PE, query_QE = vectors(size, queries)
    ours = ExactIndex(passage_PE)
    index = faiss.IndexFlatIP(WIDTH)
    index.add(passage_PE.numpy())
    ways = {
        "ours": lambda: ours.search(query_QE, BEST)[1],
        "faiss Flat": lambda: torch.from_numpy(index.search(query_QE.numpy(), BEST)[1]),
        "torch matmul and topk": lambda: chunked_topk(query_QE, passage_PE),
    }
    ids = [way() for way in ways.values()]
    same = [float((found == ids[0]).float().mean()) for found in ids]
    times = max(1, 200_000 // size)  # a turn long enough for the clock

    def rate(way: Any) -> Any:
        return lambda: times * queries / against.processor_seconds(lambda: [way() for _ in range(times)])

    rates = against.interleave([rate(way) for way in ways.values()], repeats)
    goals = (Goal(8), Goal(2.5)) if size == GOALED else (None, None)
    return [
        Row(
            f"best 8 of {size:,}", name, "queries/s", rates[0], rates[n], goal if same[n] == 1 else None,
            f"{queries} queries at a time, {same[n]:.2%} of the ids are the same",
        )
        for n, (name, goal) in enumerate(zip(list(ways)[1:], goals, strict=True), start=1)
    ]  # fmt: skip


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The rows of every size."""
    against.one_thread()
    import faiss

    faiss.omp_set_num_threads(1)
    return [row for size in arguments.sizes for row in compare(size, arguments.queries, arguments.repeats)]


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--sizes", type=int, nargs="+", default=[20_000, 200_000], help="passages (%(default)s)")
    parser.add_argument("--queries", type=int, default=256, help="of one search (%(default)s)")


if __name__ == "__main__":
    against.command(__doc__, "search", measure, options)
