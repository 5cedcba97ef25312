"""Masked language model heads of transformers, applied to hidden states of an :class:`Encoder`.

Shape suffixes: D width, V vocabulary, N selected positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from realmops.model.encoder import Encoder


class MaskedWordHead(nn.Module):
    """Head that predicts masked words from selected hidden states.

    It takes the encoder out of ``model``; ``is_trained`` is whether all weights of the head come from its folder.
    """

    def __init__(self, model: Any, *, is_trained: bool = True) -> None:
        super().__init__()
        self.is_trained = is_trained
        base = model.base_model
        decoder = model.get_output_embeddings()
        self.tied = decoder is not None and decoder.weight is base.get_input_embeddings().weight
        if self.tied:
            del decoder._parameters["weight"]  # shared word embeddings, passed to forward
        setattr(model, model.base_model_prefix, _IdentityEncoder(base))
        self.model = model

    def forward(self, hidden_ND: Tensor, word_VD: Tensor) -> Tensor:
        """Compute logits N x V; ``word_VD`` are the encoder's word embeddings, the output matrix of most families."""
        if self.tied:
            object.__setattr__(self.model.get_output_embeddings(), "weight", word_VD)
        logits_1NV: Tensor = self.model(inputs_embeds=hidden_ND[None]).logits
        return logits_1NV[0]

    @contextmanager
    def joined_with(self, encoder: Encoder) -> Iterator[Any]:
        """Context manager: yield the whole masked language model, with ``encoder`` in its place, for saving."""
        prefix = self.model.base_model_prefix
        identity, decoder = getattr(self.model, prefix), self.model.get_output_embeddings()
        setattr(self.model, prefix, encoder.model)
        if self.tied:
            decoder.__dict__.pop("weight", None)
            decoder.weight = encoder.word_vectors
        try:
            yield self.model
        finally:
            setattr(self.model, prefix, identity)
            if self.tied:
                del decoder._parameters["weight"]


class _IdentityEncoder(nn.Module):
    """Placeholder of an encoder: returns ``inputs_embeds`` as hidden states; attributes are the encoder's."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._base = (base,)  # the tuple keeps it from becoming a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"][0], name)

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=inputs_embeds)
