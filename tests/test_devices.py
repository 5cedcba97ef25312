"""Where models work and in which dtype: names, weights kept in the dtype of products, and packed for oneDNN."""

import numpy as np
import pytest
import torch
from small_world import section
from torch import Tensor

from realmops.devices import (
    autocast,
    freeze_linear_weights,
    resolve_device,
    resolve_precision,
)
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import build_small_encoder
from realmops.model.packed import PackedBatch
from realmops.model.reader import SpanHead

CPU = torch.device("cpu")


def encoder() -> Encoder:
    options = section("bert", width=64, layers=2, heads=4, intermediate=40, positions=16, dropout=0.0)
    return build_small_encoder(options, 60, torch.Generator().manual_seed(0))[0].eval()


def hidden(bert: Encoder, dtype: torch.dtype) -> Tensor:
    with torch.no_grad(), autocast(CPU, dtype):
        found: Tensor = bert(PackedBatch([np.arange(1, 12), np.arange(3)]))
    return found


def test_devices_and_precisions_by_name() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_precision("fp32", CPU) == torch.float32
    assert resolve_precision("bf16", CPU) == torch.bfloat16
    assert resolve_precision("auto", CPU) in (torch.float32, torch.bfloat16)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"run\.device is 'cuda', but torch finds no GPU here"):
            resolve_device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_frozen_products_give_the_same_bits(dtype: torch.dtype) -> None:
    bert, spans = encoder(), SpanHead(64, 32)
    first, last = torch.tensor([0, 8, 9]), torch.tensor([2, 8, 12])

    def scores() -> Tensor:
        with torch.no_grad(), autocast(CPU, dtype):
            found: Tensor = spans(hidden(bert, dtype), first, last)
        return found

    before = scores()
    for module in (bert, spans):
        freeze_linear_weights(module, dtype)
    assert torch.equal(scores(), before)
    layer = bert.model.encoder.layer[0]
    assert layer.output.dense.weight.dtype == dtype
    assert bert.word_vectors.dtype == layer.output.LayerNorm.weight.dtype == torch.float32, "no products of theirs"
