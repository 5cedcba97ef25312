"""One GPU: embedding and a pre-training step at BERT-base, as shares of the card's own bf16 matrix product.

    python benchmarks/gpu.py --documents 4096

Weights are random. Embedding: passages of lognormal lengths, 288 wordpieces at most, to 128 numbers each. The step has
the paper's lengths: queries of 96 wordpieces, passages of 288 and both together of 512 at most, eight candidates; it is
forward, backward and AdamW in bf16. Operations are counted without padding. Without a GPU nothing is run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import against
from against import Goal, Row

PRODUCT = "fastest product, bf16"
SIZE, PRODUCTS = 8192, 20
EMBEDDING, STEP = Goal(0.55), Goal(0.45)


def seconds_of(call: Callable[[], object]) -> float:
    """By the clock, until the card has done it."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def product() -> Callable[[], float]:
    """TFLOP/s of a large bf16 matrix product."""
    import torch

    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: PRODUCTS * 2 * SIZE**3 / seconds_of(lambda: [a @ b for _ in range(PRODUCTS)]) / 1e12


def embedding(documents: int, repeats: int) -> list[Row]:
    """Passages through the document tower."""
    import generated
    import numpy as np
    import torch

    from realmops.encoders.bert import Bert
    from realmops.index.embed import embed
    from realmops.model.retriever import Embedder

    rng = np.random.default_rng(0)
    config = generated.SHAPES["BERT-base"]
    lengths = generated.lognormal_lengths(documents, rng)
    sequences = [(rng.integers(1000, 30_000, n), (np.arange(n) > 8).astype(np.int64)) for n in lengths.tolist()]
    tower = Embedder(Bert(config), 128, "normalised").to("cuda")
    tflop = generated.encoder_flops(config, lengths) / 1e12

    def turn() -> float:
        return tflop / seconds_of(lambda: embed(tower, sequences, torch.bfloat16))

    turn()
    rates, products = against.interleave([turn, product()], repeats)
    docs = [rate * documents / tflop for rate in rates]
    note = f"{against.Spread.of(docs)} docs/s, {lengths.mean():.0f} wordpieces in the mean"
    return [Row("embedding, BERT-base", PRODUCT, "TFLOP/s", rates, products, EMBEDDING, note)]


def pretraining(batch: int, repeats: int) -> list[Row]:
    """A step of the retriever and the reader."""
    import torch
    from step import Step

    with tempfile.TemporaryDirectory() as folder:
        step = Step(Path(folder), "bf16", "BERT-base", batch=batch, query=96, joined=512, device="cuda")
    tflop = step.flops() / 1e12

    def turn() -> float:
        return tflop / seconds_of(step)

    turn()
    rates, products = against.interleave([turn, product()], repeats)
    gib = torch.cuda.max_memory_allocated() / 2**30
    note = f"{against.Spread.of([rate / tflop for rate in rates])} steps/s of {batch} sentences, {gib:.1f} GiB"
    return [Row("pre-training step, BERT-base", PRODUCT, "TFLOP/s", rates, products, STEP, note)]


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Both, or their names."""
    import torch

    if not torch.cuda.is_available():
        names = {"embedding, BERT-base": EMBEDDING, "pre-training step, BERT-base": STEP}
        return [against.not_run(name, PRODUCT, goal, "no GPU") for name, goal in names.items()]
    return embedding(arguments.documents, arguments.repeats) + pretraining(arguments.batch, arguments.repeats)


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--documents", type=int, default=4096, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sentences of a step (%(default)s)")


if __name__ == "__main__":
    against.command(__doc__, "gpu", measure, options)
