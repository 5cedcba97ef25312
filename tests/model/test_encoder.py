"""A model of a few lines that transformers knows by registration goes through all that BERT goes through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_world import PAPERS_READER, World, section
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from realmops.corpus.vocabulary import vocabulary_bytes
from realmops.model.build import add_span_head, build_encoder, build_models
from realmops.model.encoder_files import encoder_from_description
from realmops.model.packed import PackedBatch
from realmops.model.reader import Reader
from realmops.model.reader_files import load_models, save_models
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import retriever_files, retriever_from_files
from realmops.options import Pretrain
from realmops.search.embed import document_sequences, embed
from realmops.train.masked_sentences import Examples
from realmops.train.realm import Realm
from realmops.train.tagger import Tagger

FP32 = torch.float32
READERS = pytest.mark.parametrize(
    "copying", [{}, {"matches": True}, {"copies": True, "apart": True}], ids=["paper", "matches", "apart"]
)


class NeighboursConfig(PreTrainedConfig):
    model_type = "neighbours"
    vocab_size: int = 100
    hidden_size: int = 16
    max_position_embeddings: int = 64
    dropout: float = 0.0
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True


class _Neighbours(PreTrainedModel):
    config_class = NeighboursConfig
    base_model_prefix = "neighbours"


class NeighboursModel(_Neighbours):
    """A linear layer over the mean of each word vector and those beside it: no attention, and nothing of BERT."""

    def __init__(self, config: NeighboursConfig) -> None:
        super().__init__(config)
        self.vectors = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.vectors

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None, **_: Any
    ) -> BaseModelOutput:
        x_BLD = self.vectors(input_ids) if inputs_embeds is None else inputs_embeds
        mask_BL1 = attention_mask[:, :, None].float()
        both_BLD = F.pad(torch.cat([x_BLD * mask_BL1, mask_BL1], -1), (0, 0, 1, 1))
        sum_BLD = both_BLD[:, :-2] + both_BLD[:, 1:-1] + both_BLD[:, 2:]
        mean_BLD = sum_BLD[..., :-1] / sum_BLD[..., -1:].clamp(min=1)
        return BaseModelOutput(last_hidden_state=x_BLD + self.dropout(self.mix(mean_BLD)))


class NeighboursForMaskedLM(_Neighbours):
    _tied_weights_keys = {"decoder.weight": "neighbours.vectors.weight"}  # noqa: RUF012

    def __init__(self, config: NeighboursConfig) -> None:
        super().__init__(config)
        self.neighbours = NeighboursModel(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def forward(self, **inputs: Any) -> MaskedLMOutput:
        return MaskedLMOutput(logits=self.decoder(self.neighbours(**inputs).last_hidden_state))


AutoConfig.register("neighbours", NeighboursConfig)
AutoModel.register(NeighboursConfig, NeighboursModel)
AutoModelForMaskedLM.register(NeighboursConfig, NeighboursForMaskedLM)


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    """A published encoder of this kind, without a masked word head."""
    torch.manual_seed(0)
    folder = tmp_path / "published"
    NeighboursModel(NeighboursConfig(vocab_size=len(world.snapshot.vocabulary))).save_pretrained(folder)
    (folder / "vocab.txt").write_bytes(vocabulary_bytes(world.snapshot.vocabulary))
    return folder


def models(world: World, folder: Path, **copying: bool) -> tuple[Retriever, Reader]:
    shape = section("bert", positions=64, dropout=0.1)
    vocabulary = len(world.snapshot.vocabulary)
    made = build_models(
        shape,
        section("retriever", init=str(folder), embedding_width=8),
        section("reader", **{**PAPERS_READER, **copying}),
        vocabulary,
        0,
    )
    assert not made[1].masked_words.is_trained
    return made


def options() -> Pretrain:
    lengths = {"reader_wordpieces": 60, "candidates": 4, "batch_size": 4, "steps": 4}
    rates = {"retriever_learning_rate": 1e-2, "reader_learning_rate": 1e-2, "retriever_delay": 0}
    rest = {"masking": "salient", "null_document": True, "gradient_checkpointing": True}
    found: Pretrain = section("pretrain", **{**lengths, **rates, **rest})
    return found


@READERS
def test_retriever_and_reader_learn_on_another_encoder(world: World, folder: Path, copying: dict[str, bool]) -> None:
    retriever, reader = models(world, folder, **copying)
    (start, _), chosen = models(world, folder, **copying), options()
    assert isinstance(reader.encoder.model, NeighboursModel)
    assert retriever.query.description.startswith("a neighbours (padded batches), pooling cls, 16 -> 8")
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


def test_both_come_back_from_their_files(world: World, folder: Path, tmp_path: Path) -> None:
    """Below the models' folder lie such that transformers opens: the reader's is the whole masked language model."""
    retriever, reader = models(world, folder)
    add_span_head(reader, 4, 0)
    save_models(tmp_path / "out", retriever, reader, world.text)
    found = load_models(tmp_path / "out", world.snapshot.vocabulary_hash)
    for ours, theirs in zip((retriever, reader), found, strict=True):
        assert {name: tensor.tolist() for name, tensor in theirs.state_dict().items()} == {
            name: tensor.tolist() for name, tensor in ours.state_dict().items()
        }
    peer = AutoModelForMaskedLM.from_pretrained(tmp_path / "out/reader")
    assert isinstance(peer, NeighboursForMaskedLM)
    assert torch.equal(peer.decoder.weight, reader.encoder.word_vectors)
    sent = retriever_from_files(retriever_files(retriever, world.text))
    sequences = document_sequences(world.snapshot, range(4))
    assert torch.equal(embed(sent.document, sequences, FP32), embed(retriever.document, sequences, FP32))


def test_a_tagger_learns_on_it(world: World, folder: Path) -> None:
    encoder, _ = build_encoder(str(folder), section("bert", positions=64), len(world.snapshot.vocabulary), 0)
    tagger = Tagger(encoder, ["O", "B-NAME"])
    batch = PackedBatch([tokens for tokens, _ in document_sequences(world.snapshot, range(3))])
    tagger(batch).square().sum().backward()
    assert encoder.word_vectors.grad is not None
    again = encoder_from_description(json.loads(json.dumps(encoder.describe())))
    assert {name: tensor.shape for name, tensor in again.state_dict().items()} == {
        name: tensor.shape for name, tensor in encoder.state_dict().items()
    }
