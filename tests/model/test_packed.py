"""Batches of sequences one after another: groups of like lengths, and few numbers of rows in bf16."""

import numpy as np
import pytest
import torch
from small_world import section
from torch import Tensor

from realmops.devices import autocast
from realmops.model.encoder_files import build_small_encoder
from realmops.model.packed import PackedBatch, pad_rows
from realmops.model.reader import SpanHead


def test_groups_are_of_like_lengths_and_cover_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.model.packed._UNGROUPED_SCORES", 1)
    monkeypatch.setattr("realmops.model.packed._GROUP_SCORES", 8)  # two of 2 x 2; a longer one stays alone
    batch = PackedBatch([np.arange(length) for length in (5, 2, 1, 2)])
    found = [(g.size, g.longest, g.is_padding_GL is not None) for g in batch.groups]
    assert found == [(2, 8, True), (1, 2, False), (1, 5, False)]
    assert batch.padded_row_T.tolist() == [18, 19, 20, 21, 22, 8, 9, 0, 16, 17]
    assert batch.padded_rows == 23


def test_few_numbers_of_rows_in_bf16() -> None:
    """A 16th more, or up to 16 rows, is enough for 16 numbers of rows from each power of two to the next."""
    assert len(pad_rows(torch.ones(17, 2))) == 17
    with autocast(torch.device("cpu"), torch.bfloat16):
        found = {rows: len(pad_rows(torch.ones(rows, 2))) for rows in range(4097)}
        ids = pad_rows(torch.arange(1, 18))
    assert ids.tolist() == [*range(1, 18), *[0] * 15]
    assert all(rows <= even <= rows + max(15, rows // 16) for rows, even in found.items())
    assert len({even for rows, even in found.items() if rows > 2048}) == 16
    assert len(set(found.values())) < 100


def test_rows_that_are_added_in_bf16_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    options = section("bert", width=24, layers=2, heads=4, positions=16, dropout=0.0)
    bert, _ = build_small_encoder(options, 60, torch.Generator().manual_seed(0))
    spans = SpanHead(24, 8)
    parameters = [p for p in (*bert.parameters(), *spans.parameters()) if p.requires_grad]
    batch = PackedBatch([np.arange(length) for length in (5, 2, 9, 3)])
    start_S, end_S = torch.tensor([0, 7, 18]), torch.tensor([1, 9, 18])

    def values() -> list[Tensor]:
        bert.zero_grad()
        spans.zero_grad()
        with autocast(torch.device("cpu"), torch.bfloat16):
            hidden_TD = bert(batch)
            score_S = spans(hidden_TD, start_S, end_S)
        assert len(hidden_TD) == 19
        assert len(score_S) == 3
        (hidden_TD.float().pow(3).sum() + 10 * score_S.sum()).backward()
        return [hidden_TD.detach().float(), score_S.detach(), *(p.grad for p in parameters)]

    even = values()
    monkeypatch.setattr("realmops.model.encoder.pad_rows", lambda x: x)
    monkeypatch.setattr("realmops.model.reader.pad_rows", lambda x: x)
    for one, other in zip(even, values(), strict=True):
        # bf16 keeps eight bits, and the order of a sum may differ with the number of rows
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * float(other.abs().max()))
