"""Encoders of transformers, over packed sequences.

An encoder is a module of transformers. If its family uses transformers' attention interface, a batch is one long row
without padding, and :mod:`realmops.model.attention` keeps its sequences separate. Other families get padded batches.

Shape suffixes: B sequences, L the longest sequence, T wordpieces in the batch, D width.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Sequence
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from realmops.credentials import error_line
from realmops.devices import eval_mode
from realmops.model.attention import ATTENTION_NAME, register_attention
from realmops.model.packed import PackedBatch, group_by_length, pad_rows

_FP16_TOLERANCE = 1e-2  # relative error of hidden states
_NEAR_TOLERANCE = 1e-3  # relative to the largest hidden state; other kernels round differently
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
KEY_BIASES = (".key.bias", ".k_lin.bias", ".k.bias")  # without rotary positions they cancel in the softmax
_NOT_SHAPE = ("_name_or_path", "architectures", "dtype", "transformers_version")  # differ after a model is saved


class Encoder(nn.Module):
    """Encoder of transformers that computes hidden states of packed sequences; ``packs=None`` tries whether it can."""

    def __init__(self, model: Any, packs: bool | None = None) -> None:
        super().__init__()
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # a layer over the first hidden state that only pre-training uses
        self.model = model
        config, parameters = model.config, inspect.signature(model.forward).parameters
        words = model.get_input_embeddings().weight
        self.vocabulary, self.added_width = words.shape
        self.width = int(config.hidden_size)
        self.layer_norm_eps = _first(config, 1e-12, "layer_norm_eps", "norm_eps", "rms_norm_eps")
        self.dropout = float(_first(config, 0.0, "hidden_dropout_prob", "dropout", "attention_dropout") or 0.0)
        self.segments = int(getattr(config, "type_vocab_size", 0) or 0) if "token_type_ids" in parameters else 0
        self._first_position = _first_position(model)
        self.positions = int(_first(config, 512, "max_position_embeddings")) - self._first_position
        self._common = {"use_cache": False} if "use_cache" in parameters else {}
        rotates = any("rotary" in name for name, _ in model.named_modules())
        for name, parameter in model.named_parameters():
            if name.endswith(KEY_BIASES) and not rotates:
                parameter.requires_grad_(False)
        is_packable = model._supports_attention_backend and "position_ids" in parameters
        self.packs = False
        if is_packable and packs is not False:
            model.set_attn_implementation(register_attention())
            self.packs = True
            self.packs = packs or self._packs_correctly()
            if not self.packs:
                model.set_attn_implementation("sdpa")

    @property
    def description(self) -> str:
        return f"a {self.model.config.model_type}" + ("" if self.packs else " (padded batches)")

    def forward(self, batch: PackedBatch, added_TD: Tensor | None = None) -> Tensor:
        """Compute the hidden states T x D; ``added_TD`` is added to word embeddings, whose width is ``added_width``."""
        assert batch.longest <= self.positions, (batch.longest, self.positions)
        batch.to(self.device)
        if not self.packs:
            return self._padded(batch, added_TD)
        tokens_T = pad_rows(batch.tokens_T)
        inputs: dict[str, Any] = {"position_ids": pad_rows(batch.positions_T)[None] + self._first_position}
        if self.segments > 1:
            inputs["token_type_ids"] = pad_rows(batch.segments_T)[None]
        if added_TD is None:
            inputs["input_ids"] = tokens_T[None]
        else:
            word_TD = self.model.get_input_embeddings()(tokens_T)
            inputs["inputs_embeds"] = torch.cat([word_TD[: len(added_TD)] + added_TD, word_TD[len(added_TD) :]])[None]
        hidden_1TD: Tensor = self.model(**inputs, **self._common, packed=batch).last_hidden_state
        return hidden_1TD[0, : batch.wordpieces]

    def _padded(self, batch: PackedBatch, added_TD: Tensor | None) -> Tensor:
        """Compute the hidden states T x D in padded batches of similar lengths, for families that cannot pack."""
        lengths = batch.lengths.tolist()
        hidden = [batch.tokens_T] * len(batch)
        for group in group_by_length(batch.lengths) if self.device.type == "cpu" else [range(len(batch))]:

            def padded(x_T: Tensor, value: int = 0, group: Sequence[int] = group) -> Tensor:
                parts = torch.split(x_T, lengths)
                return pad_sequence([parts[n] for n in group], batch_first=True, padding_value=value)

            id_BL = padded(batch.tokens_T, self.model.config.pad_token_id or 0)
            inputs = {"attention_mask": padded(torch.ones_like(batch.tokens_T))}
            if self.segments > 1:
                inputs["token_type_ids"] = padded(batch.segments_T)
            if added_TD is None:
                inputs["input_ids"] = id_BL
            else:
                inputs["inputs_embeds"] = self.model.get_input_embeddings()(id_BL) + padded(added_TD)
            hidden_BLD: Tensor = self.model(**inputs, **self._common).last_hidden_state
            for n, hidden_LD in zip(group, hidden_BLD, strict=True):
                hidden[n] = hidden_LD[: lengths[n]]
        return torch.cat(hidden)

    def _random_sequences(self, *lengths: int) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.integers(0, self.vocabulary, min(length, self.positions)) for length in lengths]

    @torch.no_grad()
    def _packs_correctly(self) -> bool:
        sequences = self._random_sequences(9, 4, 150)
        with eval_mode(self):
            try:
                together_TD = self(PackedBatch(sequences))
            except TypeError:  # this family does not pass `packed` on to its attention
                return False
            alone = []
            self.model.set_attn_implementation("sdpa" if self.model._supports_sdpa else "eager")
            for tokens in sequences:
                id_1L = torch.from_numpy(tokens).to(self.device)[None]
                position_1L = torch.arange(len(tokens), device=self.device)[None] + self._first_position
                alone.append(self.model(input_ids=id_1L, position_ids=position_1L, **self._common).last_hidden_state[0])
            self.model.set_attn_implementation(ATTENTION_NAME)
        return is_near(together_TD, torch.cat(alone))

    @torch.no_grad()
    def ignores_padding(self, source: str) -> bool:
        """Return whether a sequence's hidden states are the same in a padded batch; ValueError if the model fails."""
        long = min(self.positions, 150)  # where families without the attention interface may begin to use chunks
        lengths = (7, 9) if self.model._supports_attention_backend else (7, 9, 7 * long // 8, long)
        sequences = self._random_sequences(*lengths)  # of lengths so similar that one of two is padded
        try:
            with eval_mode(self):
                together_TD = self._padded(PackedBatch(sequences), None)
                alone_TD = torch.cat([self._padded(PackedBatch([tokens]), None) for tokens in sequences])
        except Exception as error:  # any error of the library
            raise ValueError(f"{source}: its model fails on a text ({error_line(error)}); use another one") from None
        return is_near(together_TD, alone_TD)

    @property
    def device(self) -> torch.device:
        return self.word_vectors.device

    @property
    def word_vectors(self) -> nn.Parameter:
        return cast(nn.Parameter, self.model.get_input_embeddings().weight)

    @property
    def output_biases(self) -> list[nn.Parameter]:
        """Biases that add the same vector to all hidden states: that of a final LayerNorm."""
        norms = [part for part in self.model.modules() if isinstance(part, nn.LayerNorm) and part.bias is not None]
        batch, step_D = PackedBatch([np.arange(min(5, self.vocabulary))]), torch.linspace(1, 2, self.width)
        for norm in reversed(norms):  # the last one may be of something else, as of DeBERTa's relative positions
            if norm.normalized_shape != (self.width,):
                continue
            step_D, bias_D = step_D.to(norm.bias), norm.bias.detach().clone()
            with eval_mode(self), torch.no_grad():
                before_TD = self(batch)
                norm.bias.add_(step_D)
                is_final = is_near(self(batch), before_TD + step_D)
                norm.bias.copy_(bias_D)
            if is_final:
                return [norm.bias]
        return []

    def set_gradient_checkpointing(self, on: bool) -> None:
        """Recompute activations in the backward pass, in families that support it."""
        if self.model.supports_gradient_checkpointing and on:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        elif self.model.supports_gradient_checkpointing:
            self.model.activation_checkpointing_disable()

    def set_dropout(self, dropout: float) -> None:
        self.dropout = dropout
        set_dropout(self.model, dropout)

    @torch.no_grad()
    def in_fp16(self) -> Self | None:
        """Return a copy in fp16 for a GPU, faster than bf16 autocast, nearer to fp32; None if activations overflow."""
        other = copy.deepcopy(self).eval()
        other.model.half()
        sequences = self._random_sequences(64, 7)
        with eval_mode(self):
            exact_TD, half_TD = self(PackedBatch(sequences)).float(), other(PackedBatch(sequences)).float()
        error = (half_TD - exact_TD).norm() / exact_TD.norm()
        return other if bool(error < _FP16_TOLERANCE) else None

    def describe(self) -> dict[str, Any]:
        """Return the configuration as JSON, for ``encoder_from_description``."""
        values = json.loads(self.model.config.to_json_string(use_diff=False))
        return {"packs": self.packs, "config": {k: value for k, value in values.items() if k not in _NOT_SHAPE}}


def set_dropout(model: nn.Module, dropout: float) -> None:
    for part in (*model.modules(), model.config):
        if isinstance(part, nn.Dropout):
            part.p = dropout
        for name in _DROPOUTS:
            if isinstance(part.__dict__.get(name), float | int):
                setattr(part, name, dropout)


def is_near(hidden_TD: Tensor, other_TD: Tensor) -> bool:
    """Return whether hidden states are equal up to rounding, relative to the largest value."""
    largest = other_TD.abs().max().clamp(min=1.0)
    return bool((hidden_TD - other_TD).abs().max() <= _NEAR_TOLERANCE * largest)


def _first(config: Any, default: float, *names: str) -> float:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)


def _first_position(model: Any) -> int:
    """Return the id of a sequence's first position: some families start after their padding id."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0
