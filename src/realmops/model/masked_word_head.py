"""The heads of transformers' families that predict masked words, over hidden states that were computed elsewhere.

Shape suffixes: D width, V vocabulary, N chosen positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from realmops.model.encoder import Encoder


class MaskedWordHead(nn.Module):
    """A family's own head over chosen hidden states, which predicts masked words.

    Args:
        model: the family's masked language model (what AutoModelForMaskedLM opens). Its encoder is taken out.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        base = model.base_model
        decoder = model.get_output_embeddings()
        self.tied = decoder is not None and decoder.weight is base.get_input_embeddings().weight
        if self.tied:
            del decoder._parameters["weight"]  # the word vectors: forward brings them
        setattr(model, model.base_model_prefix, _Given(base))
        self.model = model

    def forward(self, hidden_ND: Tensor, word_VD: Tensor) -> Tensor:
        """Return logits N x V; ``word_VD`` are the encoder's word vectors, by which most families multiply."""
        if self.tied:
            object.__setattr__(self.model.get_output_embeddings(), "weight", word_VD)
        logits_1NV: Tensor = self.model(inputs_embeds=hidden_ND[None]).logits
        return logits_1NV[0]

    @contextmanager
    def whole(self, encoder: Encoder) -> Iterator[Any]:
        """Put the encoder back, within the context: transformers' masked language model as it saves it."""
        prefix = self.model.base_model_prefix
        given, decoder = getattr(self.model, prefix), self.model.get_output_embeddings()
        setattr(self.model, prefix, encoder.model)
        if self.tied:
            decoder.__dict__.pop("weight", None)
            decoder.weight = encoder.word_vectors
        try:
            yield self.model
        finally:
            setattr(self.model, prefix, given)
            if self.tied:
                del decoder._parameters["weight"]


class _Given(nn.Module):
    """In the place of a masked language model's encoder: hidden states pass through, all else is the encoder's."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._base = (base,)  # in a tuple it is no submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"][0], name)

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=inputs_embeds)
