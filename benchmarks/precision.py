"""bf16 against fp32 by width of the encoder: what ``run.precision: auto`` decides on a CPU.

    python benchmarks/precision.py --widths 128 384

Encoders of two layers, with heads of 32 numbers, and batches from one of the sample's few short questions to one of
passages, in the dtypes of training (autocast). A step is forward and backward; ``forward`` is without gradients, as in
embedding. Seconds are processor seconds on one thread, both dtypes taking turns. ``ONEDNN_MAX_CPU_ISA=AVX2`` and
``AVX512_CORE_BF16`` measure older processors, without bf16 products or without AMX.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import against
from against import Row

WIDTHS = (128, 256, 384, 768, 1024)
BATCHES = ((16, 24), (32, 40), (16, 160))  # sequences, wordpieces of each
VOCABULARY = 2400


def encoder_of(width: int) -> Any:
    """An untrained encoder."""
    import torch

    from realmops.model.encoder_files import build_small_encoder
    from realmops.options import BertOptions

    shape = {"width": width, "heads": width // 32, "layers": 2}
    options = BertOptions(**shape)
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
    """A row for each width, batch and kind of work."""
    import numpy as np
    import torch

    from realmops.model.packed import PackedBatch

    against.one_thread()
    rows = []
    for width, (sequences, length) in itertools.product(arguments.widths, BATCHES):
        encoder = encoder_of(width)
        batch = PackedBatch([*np.random.default_rng(0).integers(5, VOCABULARY, (sequences, length))])
        for kind, backward in (("step", True), ("forward", False)):
            sides: list[Callable[[], float]] = [
                partial(work, encoder, batch, dtype, backward) for dtype in (torch.bfloat16, torch.float32)
            ]
            for side in sides:
                side()
            bf16, fp32 = (tuple(1 / s for s in turns) for turns in against.interleave(sides, arguments.repeats))
            what = f"width {width}, {sequences} of {length} wordpieces, {kind}, bf16"
            rows.append(Row(what, "fp32", "/s", bf16, fp32))
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    """The widths of encoders."""
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="widths of the encoders, multiples of 32")


if __name__ == "__main__":
    against.command(__doc__, "precision", measure, options)
