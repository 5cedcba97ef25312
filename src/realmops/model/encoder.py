"""Encoders: any that transformers has, over packed sequences.

An encoder is transformers' own module. Where its family passes attention to transformers' interface, a batch goes
through it as one long row, and :mod:`realmops.model.attention` keeps the sequences apart; every layer then sees useful
wordpieces alone. Other families get padded batches.

Shape suffixes: B sequences, L the longest, T wordpieces of all sequences, D width.
"""

from __future__ import annotations

import copy
import inspect
import json
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from realmops.devices import evaluating, send
from realmops.model.attention import NAME, register
from realmops.model.packed import Packed, even_rows, similar_lengths

_HALF = 1e-2  # of hidden states in fp16: largest relative error
_SAME = 1e-3  # share of the largest hidden state by which two ways to compute them may differ
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
_KEY_BIASES = (".key.bias", ".k_lin.bias", ".k.bias")  # without rotary positions the softmax does not see them
_NOT_SHAPE = ("_name_or_path", "architectures", "dtype", "transformers_version")  # change when a model is saved


class Encoder(nn.Module):
    """Hidden states of packed sequences by an encoder of transformers.

    Args:
        model: the encoder (what AutoModel opens).
        packs: whether it computes packed sequences as it would each alone; None finds out by trying.
    """

    def __init__(self, model: Any, packs: bool | None = None) -> None:
        super().__init__()
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
        self._recomputes = False
        rotates = any("rotary" in name for name, _ in model.named_modules())
        for name, parameter in model.named_parameters():
            if name.endswith(_KEY_BIASES) and not rotates:
                parameter.requires_grad_(False)
        able = model._supports_attention_backend and "position_ids" in parameters
        self.packs = False
        if able and packs is not False:
            model.set_attn_implementation(register())
            self.packs = True
            self.packs = packs or self._computes_alike()
            if not self.packs:
                model.set_attn_implementation("sdpa")

    @property
    def words(self) -> str:
        """A description of the encoder, for logs and reports."""
        return f"a {self.model.config.model_type}" + ("" if self.packs else " (padded batches)")

    def forward(self, batch: Packed, added_TD: Tensor | None = None) -> Tensor:
        """Return the hidden states T x D of a batch, which moves to the encoder's device.

        Args:
            batch: sequences of at most ``positions`` wordpieces each.
            added_TD: is added to the word vectors, whose width it has (``added_width``).
        """
        assert batch.longest <= self.positions, (batch.longest, self.positions)
        batch.to(self.device)
        if not self.packs:
            return self._padded(batch, added_TD)
        tokens_T = even_rows(batch.tokens_T)
        inputs: dict[str, Any] = {"position_ids": even_rows(batch.positions_T)[None] + self._first_position}
        if self.segments > 1:
            inputs["token_type_ids"] = even_rows(batch.segments_T)[None]
        if added_TD is None:
            inputs["input_ids"] = tokens_T[None]
        else:
            word_TD = self.model.get_input_embeddings()(tokens_T)
            inputs["inputs_embeds"] = torch.cat([word_TD[: len(added_TD)] + added_TD, word_TD[len(added_TD) :]])[None]
        hidden_1TD: Tensor = self.model(**inputs, **self._common, packed=batch).last_hidden_state
        return hidden_1TD[0, : batch.wordpieces]

    def _padded(self, batch: Packed, added_TD: Tensor | None) -> Tensor:
        """Return the hidden states T x D of a family that does not pack, by padded batches of similar lengths."""
        groups = similar_lengths(batch.lengths) if self.device.type == "cpu" else [np.arange(len(batch))]
        rows = [np.concatenate([np.arange(batch.starts[n], batch.starts[n + 1]) for n in group]) for group in groups]
        place_T = torch.from_numpy(np.argsort(np.concatenate(rows), kind="stable"))
        of_groups = send(self.device, place_T, *map(torch.from_numpy, rows))
        parts = []
        for group, row_T in zip(groups, of_groups[1:], strict=True):
            lengths = batch.lengths[group]
            parts.append(self._padded_group(batch, lengths, row_T, None if added_TD is None else added_TD[row_T]))
        return torch.cat(parts).index_select(0, of_groups[0])

    def _padded_group(self, batch: Packed, lengths: np.ndarray, row_T: Tensor, added_TD: Tensor | None) -> Tensor:
        """Hidden states of the sequences of these lengths, whose wordpieces are the rows ``row_T`` of a batch."""
        shape = len(lengths), int(lengths.max())
        place_T = torch.from_numpy(np.flatnonzero(np.arange(shape[1]) < lengths[:, None]))
        (place_T,) = send(self.device, place_T)

        def padded(x_T: Tensor, value: int) -> Tensor:
            return x_T.new_full((shape[0] * shape[1],), value).index_copy_(0, place_T, x_T).view(shape)

        inputs = {"attention_mask": padded(torch.ones_like(place_T), 0)}
        if self.segments > 1:
            inputs["token_type_ids"] = padded(batch.segments_T[row_T], 0)
        id_BL = padded(batch.tokens_T[row_T], self.model.config.pad_token_id or 0)
        if added_TD is None:
            inputs["input_ids"] = id_BL
        else:
            word_BLD = self.model.get_input_embeddings()(id_BL)
            more_PD = added_TD.new_zeros(id_BL.numel(), added_TD.shape[1]).index_copy(0, place_T, added_TD)
            inputs["inputs_embeds"] = word_BLD + more_PD.view(*shape, -1)
        hidden_BLD: Tensor = self.model(**inputs, **self._common).last_hidden_state
        return hidden_BLD.flatten(0, 1).index_select(0, place_T)

    def cls(self, batch: Packed) -> Tensor:
        """Return the hidden state of each sequence's first wordpiece, B x D."""
        hidden_TD: Tensor = self(batch)
        return hidden_TD.index_select(0, batch.first_B)

    @torch.no_grad()
    def _computes_alike(self) -> bool:
        """Return whether sequences in one batch have the hidden states that each has alone, padded by transformers."""
        rng = np.random.default_rng(0)
        sequences = [rng.integers(0, self.vocabulary, min(length, self.positions)) for length in (9, 4, 150)]
        with evaluating(self):
            try:
                together_TD = self(Packed(sequences))
            except TypeError:  # a family that keeps the batch from its attention
                return False
            alone = []
            self.model.set_attn_implementation("sdpa" if self.model._supports_sdpa else "eager")
            for tokens in sequences:
                id_1L = torch.from_numpy(tokens).to(self.device)[None]
                position_1L = torch.arange(len(tokens), device=self.device)[None] + self._first_position
                alone.append(self.model(input_ids=id_1L, position_ids=position_1L, **self._common).last_hidden_state[0])
            self.model.set_attn_implementation(NAME)
        return is_near(together_TD, torch.cat(alone))

    @property
    def device(self) -> torch.device:
        return self.word_vectors.device

    @property
    def word_vectors(self) -> nn.Parameter:
        """The vector of each wordpiece, V x D for most families."""
        return cast(nn.Parameter, self.model.get_input_embeddings().weight)

    @property
    def shifts(self) -> list[nn.Parameter]:
        """Biases that add one vector to all hidden states: that of the last LayerNorm, where it comes last."""
        norms = [part for part in self.model.modules() if isinstance(part, nn.LayerNorm) and part.bias is not None]
        last = next((norm for norm in reversed(norms) if norm.normalized_shape == (self.width,)), None)
        if last is None:
            return []
        batch, step_D = Packed([np.arange(min(5, self.vocabulary))]), torch.linspace(1, 2, self.width)
        step_D, bias_D = step_D.to(last.bias), last.bias.detach().clone()
        with evaluating(self), torch.no_grad():
            before_TD = self(batch)
            last.bias.add_(step_D)
            moves = is_near(self(batch), before_TD + step_D)
            last.bias.copy_(bias_D)
        return [last.bias] if moves else []

    @property
    def gradient_checkpointing(self) -> bool:
        """True where training recomputes activations in the backward pass; stays False in families without support."""
        return self._recomputes

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        if self.model.supports_gradient_checkpointing and on != self._recomputes:
            self._recomputes = on
            if on:
                self.model.activation_checkpointing_enable({"use_reentrant": False})
            else:
                self.model.activation_checkpointing_disable()

    def set_dropout(self, dropout: float) -> None:
        """Train with another dropout from now on."""
        self.dropout = dropout
        set_dropout(self.model, dropout)

    @torch.no_grad()
    def in_fp16(self) -> Self | None:
        """Return a copy in fp16, without gradients, for a GPU: faster than bf16 autocast and nearer to fp32.

        None where a number of the family leaves fp16's range, as far as wordpieces in any order show.
        """
        other = copy.deepcopy(self).eval()
        other.model.half()
        rng = np.random.default_rng(0)
        sequences = [rng.integers(0, self.vocabulary, min(length, self.positions)) for length in (64, 7)]
        with evaluating(self):
            exact_TD, half_TD = self(Packed(sequences)).float(), other(Packed(sequences)).float()
        error = (half_TD - exact_TD).norm() / exact_TD.norm()
        return other if bool(error < _HALF) else None

    def describe(self) -> dict[str, Any]:
        """Return the shape as JSON, the inverse of :func:`described_encoder`."""
        values = json.loads(self.model.config.to_json_string(use_diff=False))
        return {"packs": self.packs, "config": {k: value for k, value in values.items() if k not in _NOT_SHAPE}}


def set_dropout(model: nn.Module, dropout: float) -> None:
    """Set every dropout probability of a model of transformers, and those of its configuration."""
    for part in (*model.modules(), model.config):
        if isinstance(part, nn.Dropout):
            part.p = dropout
        for name in _DROPOUTS:
            if isinstance(part.__dict__.get(name), float | int):
                setattr(part, name, dropout)


def is_near(hidden_TD: Tensor, other_TD: Tensor) -> bool:
    """Return whether two computations of hidden states agree, up to rounding, which grows with their size."""
    largest = other_TD.abs().max().clamp(min=1.0)
    return bool((hidden_TD - other_TD).abs().max() <= _SAME * largest)


def _first(config: Any, default: float, *names: str) -> float:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)


def _first_position(model: Any) -> int:
    """The number of a sequence's first position: some families count from after their padding's number."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0
