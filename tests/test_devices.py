"""Devices, dtypes and threads of models; weights kept in the dtype of products; transfers."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from elsewhere import ELSEWHERE, recorded
from small_world import section
from torch import Tensor

from realmops import process
from realmops.devices import (
    NARROW,
    autocast,
    device_and_dtype,
    freeze_linear_weights,
    resolve_device,
    resolve_precision,
    to_device,
    to_host,
)
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import build_small_encoder
from realmops.model.packed import PackedBatch
from realmops.model.reader import SpanHead

CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16


def encoder() -> Encoder:
    options = section("bert", width=64, layers=2, heads=4, positions=16, dropout=0.0)
    return build_small_encoder(options, 60, torch.Generator().manual_seed(0))[0].eval()


def hidden(bert: Encoder, dtype: torch.dtype) -> Tensor:
    with torch.no_grad(), autocast(CPU, dtype):
        found: Tensor = bert(PackedBatch([np.arange(1, 12), np.arange(3)]))
    return found


def test_devices_and_precisions_are_found_by_name() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert [resolve_precision(name, CPU) for name in ("fp32", "bf16")] == [FP32, BF16]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"run\.device is 'cuda', but torch finds no GPU here"):
            resolve_device("cuda")


@pytest.mark.parametrize(
    ("avx512", "amx", "dtypes"),
    [(False, False, (FP32, FP32, FP32)), (True, False, (BF16, BF16, BF16)), (True, True, (FP32, BF16, BF16))],
)
def test_precision_auto_depends_on_processor_and_width(
    monkeypatch: pytest.MonkeyPatch, avx512: bool, amx: bool, dtypes: tuple[torch.dtype, ...]
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert tuple(resolve_precision("auto", CPU, width) for width in (NARROW, NARROW + 1, math.inf)) == dtypes
    assert resolve_precision("bf16", CPU, NARROW) == BF16
    run, narrow = section("run", device="cpu"), encoder()
    wide = build_small_encoder(section("bert", width=192, layers=1, heads=4), 300, torch.Generator().manual_seed(0))[0]
    found = [device_and_dtype(run, *models)[1] for models in ((narrow, None), (wide,), (narrow, wide))]
    assert tuple(found) == dtypes, "the widest of the models decides"


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


@pytest.mark.parametrize(
    ("quota", "environment", "threads"),
    [
        ("max 100000", {}, 6),
        ("250000 100000", {}, 2),
        ("50000 100000", {}, 1),
        (None, {}, 6),
        (None, {"LOCAL_WORLD_SIZE": "2"}, 3),
        ("200000 100000", {"OMP_NUM_THREADS": "5"}, 5),
    ],
)
def test_auto_is_the_cpus_of_the_process(
    quota: str | None, environment: dict[str, str], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quota:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(process, "_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert process.resolve_threads("auto") == threads
    assert process.resolve_threads(3) == 3
    for has_amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        assert process.resolve_threads("auto", 128) == (threads if has_amx or "OMP_NUM_THREADS" in environment else 1)
        assert process.resolve_threads("auto", 129) == threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert process.resolve_threads("auto") <= 8


def test_tensors_that_are_transferred_together_keep_their_values() -> None:
    whole, truth = torch.tensor([[1, 1 << 40], [-3, 0]]), torch.tensor([True, False])
    part = torch.tensor([0.1, -0.0, torch.inf, 1e-45])
    with recorded() as counts:
        there = to_device(ELSEWHERE, whole, truth, part)
        assert (counts.sent, counts.waits) == (1, 0)
        assert [tensor.device for tensor in there] == [ELSEWHERE] * 3
        double = torch.tensor(1 / 3, dtype=torch.float64)
        back = to_host(*there, double.to(ELSEWHERE), part)
        assert (counts.sent, counts.brought) == (2, 1)
    for found, expected in zip(back, (whole, truth, part, double, part), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert [id(tensor) for tensor in to_device(CPU, whole, part)] == [id(whole), id(part)]
