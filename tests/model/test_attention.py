"""Attention over packed sequences: each attends to itself alone, within its window, to what came before or to all."""

from pathlib import Path

import numpy as np
import pytest
import torch
from small_encoders import write_encoder
from small_world import at_once, section
from torch import Tensor, nn

from realmops.devices import autocast
from realmops.model.attention import packed_attention
from realmops.model.encoder import Encoder
from realmops.model.encoder_files import build_small_encoder, load_encoder
from realmops.model.packed import PackedBatch

LENGTHS = (7, 1, 16, 4)


def loaded(family: str, folder: Path) -> Encoder:
    return load_encoder(write_encoder(folder, family), 0.0)[0].eval()


def sequences(encoder: Encoder) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, encoder.vocabulary, length) for length in LENGTHS]
    return tokens, [np.sort(rng.integers(0, 2, length)) for length in LENGTHS]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 16])
@pytest.mark.parametrize("grouped", [False, True])
def test_each_wordpiece_attends_to_those_of_its_sequence_that_it_may(
    causal: bool, window: int | None, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against softmax by hand, with heads of keys that queries share, and rows after the last wordpiece."""
    if grouped:
        monkeypatch.setattr("realmops.model.packed._UNGROUPED_SCORES", 1)
        monkeypatch.setattr("realmops.model.packed._GROUP_SCORES", 40)
    batch = PackedBatch([np.arange(length) for length in LENGTHS])
    generator, total = torch.Generator().manual_seed(0), sum(LENGTHS)
    query = torch.randn(1, 4, total + 3, 8, generator=generator).requires_grad_()
    key, value = (torch.randn(1, 2, total + 3, 8, generator=generator) for _ in range(2))
    place = batch.positions_T
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    distance = place[:, None] - place
    may = sequence[:, None] == sequence
    may &= (distance >= 0) | (not causal)
    may &= torch.tensor(True) if window is None else distance.abs() < window
    expected = torch.zeros(total + 3, 4, 8)
    for head in range(4):
        scores = 0.3 * query[0, head, :total] @ key[0, head // 2, :total].T
        expected[:total, head] = scores.masked_fill(~may, -torch.inf).softmax(-1) @ value[0, head // 2, :total]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out, _ = packed_attention(
                nn.Module(), query, key, value, None, packed=batch, scaling=0.3, sliding_window=window, is_causal=causal
            )
        torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_a_packed_batch_is_its_sequences_one_by_one(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards and backwards, with padding in attention, without, and in groups of like lengths."""
    bert = loaded(family, tmp_path)
    tokens, segments = sequences(bert)

    def gradients(batches: list[PackedBatch]) -> tuple[Tensor, list[Tensor]]:
        bert.zero_grad()
        hidden_TD = torch.cat([bert(batch) for batch in batches])
        hidden_TD.pow(3).sum().backward()
        return hidden_TD.detach(), [p.grad.clone() for p in bert.parameters() if p.grad is not None]

    whole_TD, whole = gradients([PackedBatch(tokens, segments)])
    singles = [PackedBatch([t], [s]) for t, s in zip(tokens, segments, strict=True)]
    assert all(batch.in_place for batch in singles)
    apart_TD, apart = gradients(singles)
    torch.testing.assert_close(whole_TD, apart_TD, rtol=0, atol=1e-5)
    monkeypatch.setattr("realmops.model.packed._UNGROUPED_SCORES", 60)
    monkeypatch.setattr("realmops.model.packed._GROUP_SCORES", 150)
    groups = PackedBatch(tokens, segments)
    assert 1 < len(groups.groups) < len(tokens)
    grouped_TD, grouped = gradients([groups])
    torch.testing.assert_close(grouped_TD, apart_TD, rtol=0, atol=1e-5)
    with torch.no_grad():
        for batch in (PackedBatch(tokens, segments), groups, singles[0]):
            torch.testing.assert_close(bert(batch), apart_TD[: len(batch.tokens_T)], rtol=0, atol=1e-5)
    for found in (whole, grouped):
        for one, other in zip(found, apart, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    cls_BD = whole_TD.index_select(0, PackedBatch(tokens).first_B)
    torch.testing.assert_close(cls_BD, apart_TD[np.cumsum([0, *LENGTHS[:-1]])], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_checkpointing_keeps_little_and_gives_the_same_bits(dtype: torch.dtype) -> None:
    options = section("bert", width=24, layers=3, heads=4, positions=16, dropout=0.2)
    bert = build_small_encoder(options, 60, torch.Generator().manual_seed(0))[0].train()

    def kept_and_gradients() -> tuple[int, list[Tensor]]:
        bert.zero_grad()
        torch.manual_seed(1)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with autocast(torch.device("cpu"), dtype):
                hidden_TD = bert(PackedBatch([np.arange(16) for _ in range(20)]))
            held = sum(kept.values())
        (hidden_TD.float().pow(3).sum() + torch.rand(()) * hidden_TD.sum()).backward()
        gradients = [parameter.grad for parameter in bert.parameters() if parameter.requires_grad]
        assert all(gradient is not None for gradient in gradients)
        return held, [hidden_TD.detach(), *gradients]  # type: ignore[list-item]

    held, expected = kept_and_gradients()
    bert.gradient_checkpointing = True
    held_again, found = kept_and_gradients()
    assert held_again < held / 4
    assert all(map(torch.equal, found, expected)), "dropout is drawn again as it was, and no random number more"


def test_dropout_is_drawn_while_training_alone(tmp_path: Path) -> None:
    bert = load_encoder(write_encoder(tmp_path, "bert"), 0.5)[0]
    batch = PackedBatch(*sequences(bert))
    with torch.no_grad():
        bert.eval()
        assert torch.equal(bert(batch), bert(batch))
        bert.train()
        assert not torch.equal(bert(batch), bert(batch))


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_threads_that_encode_at_once_get_what_one_gets(family: str, tmp_path: Path) -> None:
    encoder = loaded(family, tmp_path)
    rng = np.random.default_rng(1)
    texts = [[rng.integers(5, encoder.vocabulary, length) for length in rng.integers(1, 60, 9)] for _ in range(8)]

    def hidden(tokens: list[np.ndarray]) -> Tensor:
        with torch.no_grad():
            return torch.cat([encoder(PackedBatch(tokens)) for _ in range(5)])

    expected = [hidden(tokens) for tokens in texts]
    found = at_once(*(lambda tokens=tokens: hidden(tokens) for tokens in texts))
    assert all(map(torch.equal, found, expected))
