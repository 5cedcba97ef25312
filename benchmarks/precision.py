"""bf16 against fp32 by width of the encoder: what ``run.precision: auto`` decides on a CPU.

    python benchmarks/precision.py

Encoders of two layers, with heads of 32 numbers and a batch of 4,096 wordpieces in passages of 40 or 160 wordpieces, by
the same number format's products as in training (autocast). A step is forward and backward; ``forward`` is without
gradients, as in embedding. Seconds are processor seconds on one thread, both formats taking turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import against
from against import Row

WIDTHS = (128, 192, 256, 384, 512, 768, 1024)
WORDPIECES, VOCABULARY = 4096, 2400
LENGTHS = (40, 160)


def encoder_of(width: int) -> Any:
    """An untrained encoder."""
    import torch

    from realmops.config import BertOptions, default_options
    from realmops.model.encoder_files import build_small_encoder

    shape = {"width": width, "heads": width // 32, "intermediate": 4 * width, "layers": 2}
    options = BertOptions(**default_options()["bert"] | shape)
    return build_small_encoder(options, VOCABULARY, torch.Generator().manual_seed(0))[0]


def work(encoder: Any, batch: Any, dtype: Any, backward: bool) -> float:
    """Processor seconds of a step, or of a forward pass."""
    import torch

    from realmops.devices import autocast

    def step() -> None:
        with torch.set_grad_enabled(backward), autocast(torch.device("cpu"), dtype):
            hidden_TD = encoder(batch)
        if backward:
            encoder.zero_grad()
            hidden_TD.float().square().mean().backward()

    return against.processor_seconds(step)


def measure(arguments: argparse.Namespace) -> list[Row]:
    """A row for each width, length and kind of work."""
    import numpy as np
    import torch

    from realmops.model.packed import PackedBatch

    against.one_thread()
    rows = []
    for width in WIDTHS:
        encoder = encoder_of(width)
        for length in LENGTHS:
            tokens = np.random.default_rng(0).integers(5, VOCABULARY, (WORDPIECES // length, length))
            batch = PackedBatch([*tokens])
            for kind, backward in (("step", True), ("forward", False)):
                sides: list[Callable[[], float]] = [
                    partial(work, encoder, batch, dtype, backward) for dtype in (torch.bfloat16, torch.float32)
                ]
                for side in sides:
                    side()
                bf16, fp32 = ([1 / s for s in turns] for turns in against.interleave(sides, arguments.repeats))
                rows.append(
                    Row(f"width {width}, {length} wordpieces, {kind}, bf16", "fp32", "/s", tuple(bf16), tuple(fp32))
                )
    return rows


if __name__ == "__main__":
    against.command(__doc__, "precision", measure)
