"""A second encoder, of a few lines, through the code that BERT goes through: what Encoder asks for is enough."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from small_world import PAPERS_READER, World, section
from torch import Tensor, nn

from realmops.config import Pretrain
from realmops.hub import read_config, read_weights
from realmops.model.checkpoint_files import (
    add_spans,
    build_encoder,
    build_models,
    load_models,
    retriever_files,
    retriever_from_files,
    save_models,
)
from realmops.model.encoder import ARCHITECTURES, Encoder, described_encoder
from realmops.model.packed import Packed
from realmops.model.reader import Reader
from realmops.model.retriever import Retriever
from realmops.search.embed import document_sequences, embed
from realmops.text.vocabulary import vocabulary_bytes
from realmops.train.examples import Examples
from realmops.train.realm import Realm
from realmops.train.tagger import Tagger

FP32 = torch.float32
READERS = pytest.mark.parametrize(
    "copying", [{}, {"matches": True}, {"copies": True, "apart": True}], ids=["paper", "matches", "apart"]
)


class TiedHead(nn.Module):
    """Logits by the word vectors alone."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, hidden_ND: Tensor, word_VD: Tensor) -> Tensor:
        return F.linear(hidden_ND, word_VD, self.bias)


class Neighbours(Encoder):
    """A linear layer over the mean of each word vector and those beside it: no attention, and nothing of BERT."""

    words = "a mean of neighbours"

    def __init__(self, vocabulary: int, width: int, positions: int, dropout: float = 0.0) -> None:
        super().__init__(vocabulary, width, positions, dropout, layer_norm_eps=1e-5)
        self.vectors = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)

    def forward(self, batch: Packed, added_TD: Tensor | None = None) -> Tensor:
        assert batch.longest <= self.positions
        batch.to(self.device)
        x_TD = self.vectors(batch.tokens_T)
        if added_TD is not None:
            x_TD = x_TD + added_TD
        before_T1 = (batch.positions_T > 0)[:, None]
        behind_T1 = before_T1.roll(-1, 0)
        sum_TD = x_TD + x_TD.roll(1, 0) * before_T1 + x_TD.roll(-1, 0) * behind_T1
        mean_TD = sum_TD / (1 + before_T1.long() + behind_T1.long())
        hidden_TD: Tensor = x_TD + F.dropout(self.mix(mean_TD), self.dropout, self.training)
        return hidden_TD

    @property
    def word_vectors(self) -> nn.Parameter:
        return self.vectors.weight

    @property
    def shifts(self) -> list[nn.Parameter]:
        return [self.mix.bias]

    def masked_word_head(self) -> TiedHead:
        return TiedHead(self.vocabulary)

    def describe(self) -> dict[str, Any]:
        shape = {"vocabulary": self.vocabulary, "width": self.width, "positions": self.positions}
        return {"model_type": "neighbours", "dropout": self.dropout, **shape}

    @classmethod
    def described(cls, description: Mapping[str, Any], source: str) -> Neighbours:
        return cls(**{name: value for name, value in description.items() if name != "model_type"})

    @classmethod
    def load(cls, folder: Path, dropout: float | None = None) -> tuple[Neighbours, TiedHead, bool]:
        encoder = cls.described(read_config(folder), str(folder))
        encoder.load_state_dict(read_weights(folder))
        if dropout is not None:
            encoder.set_dropout(dropout)
        return encoder, encoder.masked_word_head(), False


@pytest.fixture
def folder(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A published encoder of this kind, which the package knows for one test."""
    monkeypatch.setitem(ARCHITECTURES, "neighbours", Neighbours)
    torch.manual_seed(0)
    encoder = Neighbours(len(world.snapshot.vocabulary), 16, 64)
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(encoder.describe()))
    (folder / "vocab.txt").write_bytes(vocabulary_bytes(world.snapshot.vocabulary))
    save_file(encoder.state_dict(), folder / "model.safetensors")
    return folder


def models(world: World, folder: Path, **copying: bool) -> tuple[Retriever, Reader]:
    shape = section("bert", init=str(folder), positions=64, dropout=0.1)
    vocabulary, told = len(world.snapshot.vocabulary), list[str]()
    made = build_models(
        shape,
        section("retriever", embedding_width=8, share_embedders=False),
        section("reader", **{**PAPERS_READER, **copying}),
        vocabulary,
        0,
        told.append,
    )
    assert ["has no masked word head" in line for line in told] == [True]
    return made


def options() -> Pretrain:
    lengths = {"query_wordpieces": 40, "reader_wordpieces": 60, "candidates": 4, "batch_size": 4, "steps": 4}
    rates = {"retriever_learning_rate": 1e-2, "reader_learning_rate": 1e-2, "retriever_delay": 0}
    rest = {"masking": "salient", "null_document": True, "staleness_queries": 0, "gradient_checkpointing": True}
    found: Pretrain = section("pretrain", **{**lengths, **rates, **rest})
    return found


@READERS
def test_retriever_and_reader_learn_on_another_encoder(world: World, folder: Path, copying: dict[str, bool]) -> None:
    retriever, reader = models(world, folder, **copying)
    (start, _), chosen = models(world, folder, **copying), options()
    assert isinstance(reader.encoder, Neighbours)
    assert retriever.query.words.startswith("a mean of neighbours, pooling cls, 16 -> 8")
    realm = Realm(retriever, reader, world.snapshot, chosen, FP32)
    all_examples, rng = Examples(world.snapshot, world.spans, chosen), np.random.default_rng(0)
    examples = [all_examples.example(row, rng) for row in range(4)]
    candidates = [[passage for passage in (1, 5, 7) if passage != one.passage] for one in examples]
    optimiser = torch.optim.Adam([*retriever.parameters(), *reader.parameters()], lr=0.02)
    losses = []
    for _ in range(30):
        loss, _ = realm.loss(examples, candidates, retriever_learns=True)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(retriever.query.encoder.word_vectors, start.query.encoder.word_vectors)
    assert all(encoder.gradient_checkpointing for encoder in reader.modules() if isinstance(encoder, Encoder))


def test_both_come_back_from_their_files(world: World, folder: Path, tmp_path: Path) -> None:
    """The description names the class, and the parameters are those that were written."""
    retriever, reader = models(world, folder)
    add_spans(reader, 4, 0)
    (tmp_path / "out").mkdir()
    save_models(tmp_path / "out", retriever, reader, world.snapshot.vocabulary_hash)
    assert json.loads((tmp_path / "out" / "model.json").read_text())["reader"]["model_type"] == "neighbours"
    found = load_models(tmp_path / "out", world.snapshot.vocabulary_hash)
    for theirs, ours in zip((retriever, reader), found, strict=True):
        assert {name: tensor.tolist() for name, tensor in theirs.state_dict().items()} == {
            name: tensor.tolist() for name, tensor in ours.state_dict().items()
        }
    sent = retriever_from_files(retriever_files(retriever, "hash"))
    sequences = document_sequences(world.snapshot, range(4))
    assert torch.equal(embed(sent.document, sequences, FP32), embed(retriever.document, sequences, FP32))


def test_a_tagger_learns_on_it(world: World, folder: Path) -> None:
    encoder, _ = build_encoder(section("bert", init=str(folder), positions=64), len(world.snapshot.vocabulary), 0)
    tagger = Tagger(encoder, ["O", "B-NAME"])
    batch = Packed([tokens for tokens, _ in document_sequences(world.snapshot, range(3))])
    tagger(batch).square().sum().backward()
    assert encoder.word_vectors.grad is not None
    again = described_encoder(encoder.describe(), "here")
    assert {name: tensor.shape for name, tensor in again.state_dict().items()} == {
        name: tensor.shape for name, tensor in encoder.state_dict().items()
    }


def test_an_encoder_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"here: model_type is 'neighbours'; only BERT encoders can be used"):
        described_encoder({"model_type": "neighbours"}, "here")
