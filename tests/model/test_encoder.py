"""An encoder that transformers knows by registration: a retriever and a reader over it learn, and are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_world import PAPERS_READER, World, same_parameters, section
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

from realmops.corpus.vocabulary import vocabulary_bytes
from realmops.model.build import add_span_head, build_models
from realmops.model.reader_files import load_models, save_models
from realmops.train.masked_sentences import Examples
from realmops.train.realm import Realm


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
    """A linear layer over the mean of each word vector and its neighbours: no attention, and nothing of BERT."""

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


@pytest.mark.parametrize("copying", [{"matches": True}, {"copies": True, "apart": True}], ids=["matches", "apart"])
def test_retriever_and_reader_learn_over_another_encoder(
    copying: dict[str, bool], world: World, tmp_path: Path
) -> None:
    vocabulary = world.snapshot.vocabulary
    torch.manual_seed(0)
    NeighboursModel(NeighboursConfig(vocab_size=len(vocabulary))).save_pretrained(tmp_path / "encoder")
    (tmp_path / "encoder/vocab.txt").write_bytes(vocabulary_bytes(vocabulary))
    retriever, reader = build_models(
        section("bert", positions=64, dropout=0.1),
        section("retriever", init=str(tmp_path / "encoder"), embedding_width=8),
        section("reader", **{**PAPERS_READER, **copying}),
        len(vocabulary),
        0,
    )
    assert not reader.masked_words.is_trained
    assert retriever.query.description.startswith("a neighbours (padded batches), pooling cls, 16 -> 8")
    options = section(
        "pretrain", reader_wordpieces=60, candidates=4, batch_size=4, steps=4, retriever_delay=0,
        masking="salient", null_document=True, gradient_checkpointing=True,
    )  # fmt: skip
    realm = Realm(retriever, reader, world.snapshot, options, torch.float32)
    drawn, rng = Examples(world.snapshot, world.spans, options), np.random.default_rng(0)
    examples = [drawn.example(row, rng) for row in range(4)]
    candidates = [[passage for passage in (1, 5, 7) if passage != each.passage] for each in examples]
    optimiser = torch.optim.Adam([*retriever.parameters(), *reader.parameters()], lr=0.02)
    start, losses = retriever.query.encoder.word_vectors.detach().clone(), []
    for _ in range(30):
        loss, _ = realm.loss(examples, candidates, retriever_learns=True)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(retriever.query.encoder.word_vectors, start)

    add_span_head(reader, 4, 0)
    save_models(tmp_path / "models", retriever, reader, world.text)
    for ours, loaded in zip(
        (retriever, reader), load_models(tmp_path / "models", world.text.vocabulary_hash), strict=True
    ):
        same_parameters(ours, loaded)
    peer = AutoModelForMaskedLM.from_pretrained(tmp_path / "models/reader")
    assert isinstance(peer, NeighboursForMaskedLM)
    assert torch.equal(peer.decoder.weight, reader.encoder.word_vectors)
