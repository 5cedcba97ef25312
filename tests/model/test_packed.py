"""Packed batches: their padded groups, attention within each sequence, few row counts in bf16, few kept activations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_world import section
from torch import Tensor, nn

from realmops.devices import autocast
from realmops.model.attention import packed_attention
from realmops.model.encoder_files import build_small_encoder
from realmops.model.packed import PackedBatch, pad_rows
from realmops.model.reader import SpanHead

LENGTHS = (7, 1, 16, 4)
CPU = torch.device("cpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 16])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_equals_softmax_over_the_allowed_wordpieces(
    causal: bool, window: int | None, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With key heads that queries share, and rows after the last wordpiece."""
    if grouped:
        monkeypatch.setattr("realmops.model.packed._UNGROUPED_SCORES", 1)
        monkeypatch.setattr("realmops.model.packed._GROUP_SCORES", 40)
    batch = PackedBatch([np.arange(length) for length in LENGTHS])
    generator, total = torch.Generator().manual_seed(0), sum(LENGTHS)
    query = torch.randn(1, 4, total + 3, 8, generator=generator).requires_grad_()
    key, value = (torch.randn(1, 2, total + 3, 8, generator=generator) for _ in range(2))
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    distance = batch.positions_T[:, None] - batch.positions_T
    is_allowed = (sequence[:, None] == sequence) & ((distance >= 0) | (not causal))
    is_allowed &= torch.tensor(True) if window is None else distance.abs() < window
    expected = torch.zeros(total + 3, 4, 8)
    for head in range(4):
        scores = 0.3 * query[0, head, :total] @ key[0, head // 2, :total].T
        expected[:total, head] = scores.masked_fill(~is_allowed, -torch.inf).softmax(-1) @ value[0, head // 2, :total]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out, _ = packed_attention(
                nn.Module(), query, key, value, None, packed=batch, scaling=0.3, sliding_window=window, is_causal=causal
            )
        torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-5)


def test_bf16_has_few_row_counts() -> None:
    """A 16th more, or up to 16 rows, is enough for 16 row counts between powers of two."""
    assert len(pad_rows(torch.ones(17, 2))) == 17
    with autocast(CPU, torch.bfloat16):
        padded = {rows: len(pad_rows(torch.ones(rows, 2))) for rows in range(4097)}
        ids = pad_rows(torch.arange(1, 18))
    assert ids.tolist() == [*range(1, 18), *[0] * 15]
    assert all(rows <= even <= rows + max(15, rows // 16) for rows, even in padded.items())
    assert len({even for rows, even in padded.items() if rows > 2048}) == 16


def test_rows_added_in_bf16_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    options = section("bert", width=24, layers=2, heads=4, positions=16, dropout=0.0)
    bert, spans = build_small_encoder(options, 60, torch.Generator().manual_seed(0))[0], SpanHead(24, 8)
    batch = PackedBatch([np.arange(length) for length in (5, 2, 9, 3)])

    def results() -> list[Tensor]:
        with torch.no_grad(), autocast(CPU, torch.bfloat16):
            hidden_TD = bert(batch)
            return [hidden_TD.float(), spans(hidden_TD, torch.tensor([0, 7, 18]), torch.tensor([1, 9, 18]))]

    padded = results()
    assert [len(x) for x in padded] == [19, 3]
    monkeypatch.setattr("realmops.model.encoder.pad_rows", lambda x: x)
    monkeypatch.setattr("realmops.model.reader.pad_rows", lambda x: x)
    for ours, other in zip(padded, results(), strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=0.02 * float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_checkpointing_keeps_few_activations_and_gives_the_same_bits(dtype: torch.dtype) -> None:
    options = section("bert", width=24, layers=3, heads=4, positions=16, dropout=0.2)
    bert = build_small_encoder(options, 60, torch.Generator().manual_seed(0))[0].train()

    def kept_bytes_and_gradients() -> tuple[int, list[Tensor]]:
        bert.zero_grad()
        torch.manual_seed(1)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with autocast(CPU, dtype):
                hidden_TD = bert(PackedBatch([np.arange(16) for _ in range(20)]))
            size = sum(kept.values())
        (hidden_TD.float().pow(3).sum() + torch.rand(()) * hidden_TD.sum()).backward()
        return size, [hidden_TD.detach(), *(p.grad for p in bert.parameters() if p.requires_grad)]

    size, expected = kept_bytes_and_gradients()
    bert.set_gradient_checkpointing(True)
    smaller, gradients = kept_bytes_and_gradients()
    assert smaller < size / 4
    assert all(map(torch.equal, gradients, expected)), "the same dropout, and no random number more"
