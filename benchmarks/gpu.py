"""One GPU: embedding and a pre-training step at BERT-base, as shares of the card's own bf16 matrix product; searches.

    python benchmarks/gpu.py --documents 4096
    python benchmarks/gpu.py --parts search --passages 21000000 --repeats 1

Weights are random. Embedding: passages of lognormal lengths, 288 wordpieces at most, to 128 numbers each. A refresh is
that as an index builder does it, part after part of a snapshot, and what it would take for the paper's passages. The
step has the paper's lengths: queries of 96 wordpieces, passages of 288 and both together of 512 at most, eight
candidates; it is forward, backward and AdamW in bf16. Operations are counted without padding.

Search: invented vectors of 128 numbers in clusters, in the machine's memory. An exact index is built as a stage builds
it, then a second one beside it, as a trainer swaps them. Seconds are by the clock. Without a GPU nothing is run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import against
from against import Goal, Row

PRODUCT = "fastest product, bf16"
SIZE, PRODUCTS = 8192, 20
EMBEDDING, STEP = Goal(0.55), Goal(0.45)
WIDTH = 128  # of an embedding
PAPER = 13_353_718  # passages of the paper's Wikipedia
PARTS = 4  # of a snapshot, for a refresh
BLOCK, CLUSTERS, BEST, ONE_BY_ONE, TOGETHER = 1 << 20, 1000, 8, 50, 64


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


def warm_turns(turn: Callable[[], float], repeats: int) -> list[tuple[float, ...]]:
    """A side and the product in turns; the first of each does not count."""
    sides = [turn, product()]
    for side in sides:
        side()
    return against.interleave(sides, repeats)


def tower(shape: str = "BERT-base") -> Any:
    """The tower of passages: BERT-base as REALM has it, MiniLM as a sentence encoder."""
    import generated

    from realmops.model.retriever import Embedder

    encoder, _ = generated.random_bert(shape)
    if shape == "BERT-base":
        return Embedder(encoder, WIDTH, "normalised").to("cuda")
    return Embedder(encoder, encoder.width, "cosine", pooling="mean", projection="identity").to("cuda")


def embedding(arguments: argparse.Namespace) -> list[Row]:
    """Passages through the document tower."""
    import generated
    import numpy as np
    import torch

    from realmops.search.embed import embed_passages

    rng, documents = np.random.default_rng(0), arguments.documents
    lengths = generated.lognormal_lengths(documents, rng)
    sequences = [(rng.integers(1000, 30_000, n), (np.arange(n) > 8).astype(np.int64)) for n in lengths.tolist()]
    document = tower()
    tflop = generated.encoder_flops(document.encoder.model.config, lengths) / 1e12

    def turn() -> float:
        return tflop / seconds_of(lambda: embed_passages(document, sequences, torch.bfloat16))

    rates, products = warm_turns(turn, arguments.repeats)
    docs = [rate * documents / tflop for rate in rates]
    note = f"{against.Spread.of(docs)} docs/s, {lengths.mean():.0f} wordpieces in the mean"
    return [Row("embedding, BERT-base", PRODUCT, "TFLOP/s", rates, products, EMBEDDING, note)]


def refresh(arguments: argparse.Namespace) -> list[Row]:
    """Parts of a snapshot as a builder makes them, beside the card's part of that."""
    import torch
    from step import snapshot_of

    from realmops.model.retriever import Retriever
    from realmops.search.embed import (
        SHARD_ROWS,
        document_sequences,
        embed_passages,
        make_document_embedder,
        no_progress,
    )

    passages, rows = PARTS * SHARD_ROWS, []
    with tempfile.TemporaryDirectory() as folder:
        snapshot = snapshot_of(Path(folder), passages, [])
        ready = document_sequences(snapshot, range(passages))
    for shape, vectors in (("BERT-base", 1), ("MiniLM-L6", 6)):
        document = tower(shape)
        make = make_document_embedder(Retriever(document, document, vectors), snapshot, torch.bfloat16, passages)

        def parts(make: Callable[..., Any] = make) -> float:
            firsts = range(0, passages, SHARD_ROWS)
            return passages / seconds_of(lambda: [make(range(n, n + SHARD_ROWS), no_progress) for n in firsts])

        def card(document: Any = document, vectors: int = vectors) -> float:
            embedded = partial(embed_passages, document, ready, torch.bfloat16, vectors=vectors)
            return passages / seconds_of(embedded)

        parts()
        rates, alone = against.interleave([parts, card], arguments.repeats)
        note = f"{PAPER:,} passages would take {PAPER / statistics.median(rates) / 60:.1f} minutes on one card"
        what = f"refresh, {shape}, vectors of a passage: {vectors}"
        rows.append(Row(what, "the same at once", "passages/s", rates, alone, None, note))
    return rows


def pretraining(arguments: argparse.Namespace) -> list[Row]:
    """A step of the retriever and the reader."""
    import torch
    from step import Step

    batch, repeats = arguments.batch, arguments.repeats

    with tempfile.TemporaryDirectory() as folder:
        step = Step(Path(folder), "bf16", "BERT-base", batch=batch, query=96, joined=512, device="cuda")
    tflop = step.flops() / 1e12

    def turn() -> float:
        return tflop / seconds_of(step)

    rates, products = warm_turns(turn, repeats)
    gib = torch.cuda.max_memory_allocated() / 2**30
    note = f"{against.Spread.of([rate / tflop for rate in rates])} steps/s of {batch} sentences, {gib:.1f} GiB"
    return [Row("pre-training step, BERT-base", PRODUCT, "TFLOP/s", rates, products, STEP, note)]


def vectors(size: int) -> tuple[Any, Any]:
    """Passages in clusters, in the machine's memory, and queries near some of them on the card."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    centre_CE = torch.randn(CLUSTERS, WIDTH, generator=generator, device="cuda")
    passage_PE = torch.empty(size, WIDTH)
    for part_PE in torch.split(passage_PE, BLOCK):
        cluster_P = torch.randint(CLUSTERS, (len(part_PE),), generator=generator, device="cuda")
        noise_PE = torch.randn(part_PE.shape, generator=generator, device="cuda")
        part_PE.copy_(centre_CE[cluster_P] + 0.5 * noise_PE)
    near_QE = passage_PE[:: max(1, size // TOGETHER)][:TOGETHER].cuda()
    return passage_PE, near_QE + 0.3 * torch.randn(near_QE.shape, generator=generator, device="cuda")


def searching(arguments: argparse.Namespace) -> list[Row]:
    """Exact search of many passages."""
    import torch

    from realmops.options import IndexOptions
    from realmops.search.approximate import passage_index

    passage_PE, query_QE = vectors(arguments.passages)
    options, device = IndexOptions(type="exact", target_recall=1.0), torch.device("cuda")
    indexes: list[Any] = []

    def build() -> None:
        indexes.append(passage_index(passage_PE, options, device, 0, lambda: query_QE, BEST))

    first, second = seconds_of(build), seconds_of(build)

    def search(queries: slice) -> float:
        return seconds_of(lambda: indexes[1].search(query_QE[queries], BEST))

    search(slice(1)), search(slice(TOGETHER))
    one = statistics.median(search(slice(q, q + 1)) for q in range(ONE_BY_ONE))
    many = TOGETHER / statistics.median(search(slice(TOGETHER)) for _ in range(ONE_BY_ONE))
    note = f"{1e3 * one:.2f} ms a query, {many:,.0f} queries/s of {TOGETHER} together; "
    note += f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB for both"
    what = f"exact index of {arguments.passages:,}: second generation"
    return [Row(what, "the first", "s", (second,), (first,), None, note)]


MEASURED = {"embedding": embedding, "refresh": refresh, "step": pretraining, "search": searching}


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The parts that are wanted, or their names."""
    import torch

    if not torch.cuda.is_available():
        goals = {"embedding": EMBEDDING, "step": STEP}
        return [against.not_run(name, "the card", goals.get(name), "no GPU") for name in arguments.parts]
    return [row for name in arguments.parts for row in MEASURED[name](arguments)]


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--parts", nargs="+", choices=[*MEASURED], default=[*MEASURED], help="(all)")
    parser.add_argument("--documents", type=int, default=4096, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sentences of a step (%(default)s)")
    parser.add_argument("--passages", type=int, default=1_000_000, help="to search (%(default)s)")


if __name__ == "__main__":
    against.command(__doc__, "gpu", measure, options)
