"""Approximate search on a GPU: FAISS's ivf and pq there against the same on the CPU; what they find, and how fast.

    python benchmarks/gpu_faiss.py
    PYTHONPATH=src python3 benchmarks/gpu_faiss.py --passages 2000000       # without realmops installed

The vectors are invented, in clusters. Each type is built as stages build it, for recall@10 of .95. The structure on the
GPU is compared with its copy on the CPU: an assertion fails where fewer than .99 of the candidates are the same or
their scores differ by more than 1e-3. Seconds are by the clock, of the structure that the CPU has itself (of pq with
other codes) and of the GPU's. It needs faiss-gpu, torch, numpy and pyyaml alone. Without a GPU, or with a FAISS that
has no code for it, nothing is run, and the reason is printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

CENTRES, SPREAD, BEST, TARGET = 1000, 0.5, 10, 0.95
SAME_IDS, SAME_SCORES = 0.99, 1e-3


def clustered(rows: int, width: int, seed: int) -> Tensor:
    """Vectors around the same centres for every seed, of length 1."""
    centre_CE = torch.randn(CENTRES, width, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + seed)
    near = torch.randint(0, CENTRES, (rows,), generator=generator)
    return torch.nn.functional.normalize(
        centre_CE[near] + SPREAD * torch.randn(rows, width, generator=generator), dim=1
    )


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds by the clock; results come to the CPU, so nothing is left to wait for."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def compare(kind: str, passage_PE: Tensor, query_QE: Tensor, repeats: int) -> None:
    """Build and search a type on both, print what that took, and fail where they find other passages."""
    import faiss

    from realmops.options import IndexOptions
    from realmops.search.approximate import ApproximateIndex, passage_index

    options = IndexOptions(type=kind, target_recall=TARGET)
    built: dict[str, ApproximateIndex] = {}

    def build(device: str) -> None:
        index = passage_index(passage_PE, options, torch.device(device), 0, lambda: query_QE, BEST)
        assert isinstance(index, ApproximateIndex)
        built[device] = index

    builds = {device: seconds_of(lambda device=device: build(device)) for device in ("cpu", "cuda")}
    cpu, gpu = built["cpu"], built["cuda"]
    assert gpu.place.startswith("the GPU"), gpu.place
    twin = faiss.index_gpu_to_cpu(gpu._index._index)
    twin.nprobe = gpu.recipe.width
    (score_QK, id_QK), (twin_QK, twin_id) = (index.search(query_QE.numpy(), BEST) for index in (gpu._index, twin))
    same = statistics.mean(len({*a} & {*b}) / BEST for a, b in zip(id_QK.tolist(), twin_id.tolist(), strict=True))
    apart = float(np.quantile(np.abs(score_QK - twin_QK) / np.abs(twin_QK).clip(1e-6), SAME_IDS))
    searches = {
        device: [seconds_of(lambda index=index: index._index.search(query_QE.numpy(), BEST)) for _ in range(repeats)]
        for device, index in built.items()
    }
    cpu_s, gpu_s = (statistics.median(searches[device]) for device in ("cpu", "cuda"))
    print(
        f"{kind}: recall@{BEST} CPU {cpu.recipe.recall:.4f} (width {cpu.recipe.width} of {cpu.recipe.lists}), "
        f"GPU {gpu.recipe.recall:.4f} (width {gpu.recipe.width}); same candidates as its copy on the CPU {same:.4f}, "
        f"scores off by {apart:.1e}\n"
        f"{kind}: build with its recall CPU {builds['cpu']:.2f} s, GPU {builds['cuda']:.2f} s, "
        f"ratio {builds['cpu'] / builds['cuda']:.2f}; candidates of {len(query_QE)} queries CPU {1e3 * cpu_s:.2f} ms, "
        f"GPU {1e3 * gpu_s:.2f} ms, ratio {cpu_s / gpu_s:.2f}",
        flush=True,
    )
    assert same >= SAME_IDS, f"{kind}: the GPU finds other candidates than the CPU"
    assert apart <= SAME_SCORES, f"{kind}: scores on the GPU differ"


def main() -> None:
    """Run both types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=200_000, help="(%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--queries", type=int, default=256, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="(%(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_faiss: nothing is run: torch finds no GPU")
    import faiss

    from realmops.search import faiss_gpu

    card = torch.device("cuda")
    for kind in ("ivf", "pq"):
        if reason := faiss_gpu.cpu_fallback_reason(faiss, kind, arguments.width, card):
            sys.exit(f"gpu_faiss: nothing is run: {reason}")
    major, minor = torch.cuda.get_device_capability(card)
    print(
        f"{torch.cuda.get_device_name(card)} (compute capability {major}.{minor}), FAISS {faiss.__version__}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads; {arguments.passages:,} vectors of "
        f"{arguments.width}",
        flush=True,
    )
    passage_PE = clustered(arguments.passages, arguments.width, 0)
    query_QE = clustered(arguments.queries, arguments.width, 1)
    for kind in ("ivf", "pq"):
        compare(kind, passage_PE, query_QE, arguments.repeats)


if __name__ == "__main__":
    main()
