"""Encoders of other families: equal to transformers on random weights, packed, learned, saved and exported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from small_encoders import FAMILIES, write_encoder
from torch import Tensor

from realmops.encoders.architectures import described_encoder, load_encoder
from realmops.encoders.packed import Packed

LENGTHS = (7, 1, 50, 4, 33)
EXACT = {"rtol": 0, "atol": 1e-5}


def sequences(vocabulary: int, lengths: Sequence[int] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, vocabulary, length) for length in lengths]


def their_rows(model: torch.nn.Module, tokens: list[np.ndarray]) -> Tensor:
    """Hidden states or logits of the sequences, one by one, so that nothing is padded."""
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.from_numpy(one)[None])[0][0] for one in tokens])


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """To 1e-5; in one group, in several, with gradients on the way back, and again from what was described."""
    folder = write_encoder(tmp_path, family)
    encoder, head, found = load_encoder(folder, 0.0)
    assert found
    encoder.eval()
    peer = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    assert type(peer).__name__.lower().startswith(family.replace("-", ""))
    tokens = sequences(encoder.vocabulary)
    logits_TV = their_rows(peer, tokens)
    assert logits_TV.std() > 0.3, "the weights are so large that every term counts"
    hidden_TD = their_rows(peer.base_model, tokens)
    with torch.no_grad():
        torch.testing.assert_close(encoder(Packed(tokens)), hidden_TD, **EXACT)
        torch.testing.assert_close(head(hidden_TD, encoder.word_vectors), logits_TV, **EXACT)
        many = sequences(encoder.vocabulary, [1 + n % 60 for n in range(330)])
        assert len(Packed(many).groups) > 1
        torch.testing.assert_close(encoder(Packed(many)), their_rows(peer.base_model, many), **EXACT)
    ours_TD = encoder(Packed(tokens))
    torch.testing.assert_close(ours_TD, hidden_TD, **EXACT)
    weight_TD = torch.linspace(0.5, 1.5, hidden_TD.numel()).view_as(hidden_TD)
    (ours_TD * weight_TD).sum().backward()
    model = peer.base_model
    out = [model(input_ids=torch.from_numpy(one)[None])[0][0] for one in tokens]
    (torch.cat(out) * weight_TD).sum().backward()
    theirs = model.get_input_embeddings().weight.grad
    assert encoder.word_vectors.grad is not None
    scale = float(theirs.abs().max())
    torch.testing.assert_close(encoder.word_vectors.grad / scale, theirs / scale, rtol=0, atol=1e-5)
    encoder.gradient_checkpointing, before = True, encoder.word_vectors.grad.clone()
    encoder.word_vectors.grad = None
    (encoder(Packed(tokens)) * weight_TD).sum().backward()
    assert torch.equal(encoder.word_vectors.grad, before)
    again = described_encoder(json.loads(json.dumps(encoder.describe())), "here")
    again.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        assert torch.equal(again.eval()(Packed(tokens)), encoder(Packed(tokens)))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_is_published_again(family: str, tmp_path: Path) -> None:
    encoder = load_encoder(write_encoder(tmp_path, family, head=False), 0.25)[0].eval()
    published = encoder.published()
    assert published is not None
    config, state = published
    (tmp_path / "again").mkdir()
    (tmp_path / "again/config.json").write_text(json.dumps({"pad_token_id": 0} | config))
    model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(tmp_path / "again"))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert [name for name in missing if "pooler" not in name and "position_ids" not in name] == []
    tokens = sequences(encoder.vocabulary)
    with torch.no_grad():
        torch.testing.assert_close(encoder(Packed(tokens)), their_rows(model.eval(), tokens), **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_is_missing_starts_near_the_word_vectors(family: str, tmp_path: Path) -> None:
    encoder, head, found = load_encoder(write_encoder(tmp_path, family, head=False), 0.0)
    assert not found
    logits_NV = head(torch.randn(3, encoder.width), encoder.word_vectors)
    assert logits_NV.shape == (3, encoder.vocabulary)
    assert logits_NV.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_added_counts_as_part_of_the_word_vectors(family: str, tmp_path: Path) -> None:
    encoder = load_encoder(write_encoder(tmp_path, family), 0.0)[0].eval()
    batch = Packed(sequences(encoder.vocabulary))
    with torch.no_grad():
        plain_TD = encoder(batch)
        added_TD = torch.zeros_like(plain_TD)
        assert torch.equal(encoder(batch, added_TD), plain_TD)
        added_TD[batch.starts[2]] = 1.0
        changed_T = (encoder(batch, added_TD) - plain_TD).abs().amax(-1) > 0
    of_third = np.repeat(np.arange(len(LENGTHS)), LENGTHS) == 2
    assert changed_T[of_third].all()
    assert not changed_T[~of_third].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_the_folders_own_or_another(family: str, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, family)
    encoder = load_encoder(folder, 0.5)[0].train()
    batch = Packed(sequences(encoder.vocabulary))
    with torch.no_grad():
        assert not torch.equal(encoder(batch), encoder(batch))
        encoder.set_dropout(0.0)
        assert torch.equal(encoder(batch), encoder(batch))
    assert load_encoder(folder)[0].dropout == (0.0 if family == "modernbert" else 0.1)
