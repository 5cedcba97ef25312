"""A lean BERT encoder over packed sequences: load one, or build a small one from scratch.

Attention alone pads (:mod:`realmops.encoders.packed`); on a GPU with half precision nothing does: its flash attention
takes sequences as they lie.  Folders with the weights of Hugging Face's BERT can be read.

Shape suffixes: B sequences, T wordpieces of all sequences, G sequences of a group, L its longest, P padded rows,
D width, H heads, V vocabulary, N chosen positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from realmops.encoders.devices import product
from realmops.encoders.encoder import Encoder
from realmops.encoders.folders import CONFIG, read_config, read_weights
from realmops.encoders.packed import Packed, PaddedGroup, even_rows, pad_rows, unpad_rows

_GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}  # hidden_act: torch's approximation of GELU


@dataclass(frozen=True)
class BertConfig:
    """The shape of an encoder; names follow the paper of BERT, values those of its config.json."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    intermediate: int
    positions: int
    dropout: float
    segments: int = 2
    layer_norm_eps: float = 1e-12
    activation: str = "gelu"

    def to_json(self) -> dict[str, Any]:
        """The fields under the names of a Hugging Face ``config.json``."""
        fixed = {"model_type": "bert", "attention_probs_dropout_prob": self.dropout}
        return fixed | {_JSON[k]: v for k, v in asdict(self).items()}

    @staticmethod
    def from_json(values: Mapping[str, Any], source: str) -> BertConfig:
        """Read a ``config.json``; ValueError names what is missing or not BERT."""
        for key, allowed in _ONLY.items():
            if values.get(key, allowed[0]) not in allowed:
                raise ValueError(
                    f"{source}: {key} is {values[key]!r}; only BERT encoders can be used ({key} {', '.join(allowed)}): "
                    "choose such a model, for example google-bert/bert-base-uncased"
                )
        missing = [name for key, name in _JSON.items() if name not in values and key not in _OPTIONAL]
        if missing:
            raise ValueError(f"{source}: the keys {', '.join(missing)} are missing; it is no BERT configuration")
        return BertConfig(**{key: values[name] for key, name in _JSON.items() if name in values})


_JSON = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "positions": "max_position_embeddings",
    "dropout": "hidden_dropout_prob",
    "segments": "type_vocab_size",
    "layer_norm_eps": "layer_norm_eps",
    "activation": "hidden_act",
}
_OPTIONAL = {"segments", "layer_norm_eps", "activation"}
_ONLY = {"model_type": ("bert", "realm"), "hidden_act": tuple(_GELU), "position_embedding_type": ("absolute",)}


def _flash_takes(x_TD: Tensor) -> bool:
    """Whether flash attention can be had for these numbers: on a GPU, in half precision."""
    halves = (torch.bfloat16, torch.float16)
    return x_TD.is_cuda and x_TD.dtype in halves and torch.backends.cuda.is_flash_attention_available()


class _Layer(nn.Module):
    """One transformer block with LayerNorm behind each sub-layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, eps = config.width, config.layer_norm_eps
        self.heads, self.dropout, self.gelu = config.heads, config.dropout, _GELU[config.activation]
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        # Keys have no bias: it would add one number to a query's scores of all keys, which the softmax does not see.
        self.query_bias = nn.Parameter(torch.zeros(width))
        self.value_bias = nn.Parameter(torch.zeros(width))
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.intermediate = nn.Linear(width, config.intermediate)
        self.output = nn.Linear(config.intermediate, width)
        self.output_norm = nn.LayerNorm(width, eps=eps)

    def forward(self, x_TD: Tensor, batch: Packed) -> Tensor:
        bias = torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])
        qkv_TD = product(self.qkv, x_TD, bias)
        attended_TD = self._attend(qkv_TD[: batch.wordpieces], batch)
        attended_TD = product(self.attention_output, even_rows(attended_TD), self.attention_output.bias)
        x_TD = self.attention_norm(x_TD + F.dropout(attended_TD, self.dropout, self.training))
        inner_TD = F.gelu(product(self.intermediate, x_TD, self.intermediate.bias), approximate=self.gelu)
        inner_TD = product(self.output, inner_TD, self.output.bias)
        normed: Tensor = self.output_norm(x_TD + F.dropout(inner_TD, self.dropout, self.training))
        return normed

    def _attend(self, qkv_TD: Tensor, batch: Packed) -> Tensor:
        if _flash_takes(qkv_TD) and not (self.training and self.dropout):
            from torch.nn.attention.varlen import varlen_attn  # takes seconds to import

            q_THD, k_THD, v_THD = qkv_TD.view(len(qkv_TD), 3, self.heads, -1).unbind(1)
            y_THD: Tensor = varlen_attn(  # type: ignore[assignment]  # one tensor, as nothing more is asked for
                q_THD, k_THD, v_THD, batch.starts_B, batch.starts_B, batch.longest, batch.longest
            )
            return y_THD.flatten(1)
        batch.pad()
        qkv_PD = qkv_TD if batch.in_place else pad_rows(qkv_TD, batch.padded_row_T, batch.padded_rows)
        parts = [self._attend_group(part, group) for part, group in zip(batch.split(qkv_PD), batch.groups, strict=True)]
        y_PD = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y_PD if batch.in_place else unpad_rows(y_PD, batch.padded_row_T)

    def _attend_group(self, qkv_PD: Tensor, group: PaddedGroup) -> Tensor:
        qkv_GLD = qkv_PD.view(group.size, group.longest, 3, self.heads, -1)
        q_GHLD, k_GHLD, v_GHLD = qkv_GLD.permute(2, 0, 3, 1, 4).unbind(0)
        padding = None if group.is_padding_GL is None else group.is_padding_GL[:, None, None, :]
        drop = self.dropout if self.training else 0.0
        if qkv_PD.is_cuda or not torch.is_grad_enabled():
            mask = None if padding is None else ~padding
            y_GHLD = F.scaled_dot_product_attention(q_GHLD, k_GHLD, v_GHLD, mask, drop)
        else:  # on a CPU the fused form is the faster one, but not with its way back
            scores_GHLL = (q_GHLD / math.sqrt(q_GHLD.shape[-1])) @ k_GHLD.transpose(-1, -2)
            if padding is not None:
                scores_GHLL = scores_GHLL.masked_fill(padding, -torch.inf)
            y_GHLD = F.dropout(scores_GHLL.softmax(-1), drop, self.training) @ v_GHLD
        return y_GHLD.transpose(1, 2).reshape(group.size * group.longest, -1)


class Bert(Encoder):
    """A BERT encoder: packed wordpieces in, one vector for each of them out."""

    words = "a BERT"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config.vocabulary, config.width, config.positions, config.dropout, config.layer_norm_eps)
        self.config = config
        self.word = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.positions, config.width)
        self.segment = nn.Embedding(config.segments, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))

    def forward(self, batch: Packed, added_TD: Tensor | None = None) -> Tensor:
        """Hidden states T x D of a packed batch; sequences must fit ``config.positions``.

        ``added_TD`` is added to the embeddings of the wordpieces.
        """
        assert batch.longest <= self.config.positions, (batch.longest, self.config.positions)
        batch.to(self.word.weight.device)
        x_TD: Tensor = self.word(batch.tokens_T) + self.position(batch.positions_T) + self.segment(batch.segments_T)
        if added_TD is not None:
            x_TD = x_TD + added_TD
        x_TD = F.dropout(even_rows(self.norm(x_TD)), self.config.dropout, self.training)
        for layer in self.layers:
            again = self.gradient_checkpointing and torch.is_grad_enabled()
            x_TD = checkpoint(layer, x_TD, batch, use_reentrant=False) if again else layer(x_TD, batch)
        return x_TD[: batch.wordpieces]

    @property
    def word_vectors(self) -> nn.Parameter:
        return cast(nn.Parameter, self.word.weight)

    @property
    def shifts(self) -> list[nn.Parameter]:
        """The bias of the last LayerNorm."""
        last = self.layers[-1]
        assert isinstance(last, _Layer)
        return [last.output_norm.bias]

    def masked_word_head(self) -> MaskedWordHead:
        return MaskedWordHead(self.config)

    def describe(self) -> dict[str, Any]:
        return self.config.to_json()

    @classmethod
    def described(cls, description: Mapping[str, Any], source: str) -> Bert:
        return Bert(BertConfig.from_json(description, source))

    @classmethod
    def load(cls, folder: Path, dropout: float | None = None) -> tuple[Bert, MaskedWordHead, bool]:
        """From a folder in Hugging Face's format; a head that it lacks starts from a near identity."""
        config = BertConfig.from_json(read_config(folder), str(folder / CONFIG))
        if dropout is not None:
            config = replace(config, dropout=dropout)
        bert, head = cls(config), MaskedWordHead(config)
        found = import_state(bert, read_weights(folder), str(folder), head)
        if not found:
            with torch.no_grad():
                head.transform.weight.copy_(torch.eye(bert.width))
                head.transform.bias.zero_()
        return bert, head, found

    def set_dropout(self, dropout: float) -> None:
        super().set_dropout(dropout)
        self.config = replace(self.config, dropout=dropout)
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            layer.dropout = dropout


class MaskedWordHead(nn.Module):
    """BERT's masked language model head, over chosen positions only; its output matrix is the word embedding."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.gelu = _GELU[config.activation]

    def forward(self, hidden_ND: Tensor, word_VD: Tensor) -> Tensor:
        """Logits N x V."""
        return F.linear(self.norm(F.gelu(self.transform(hidden_ND), approximate=self.gelu)), word_VD, self.bias)


def initialise_small(bert: Bert, head: MaskedWordHead | None, generator: torch.Generator) -> None:
    """Start values from which a small BERT learns to use its second segment within a few hundred steps.

    Attention starts as half an identity (an orthogonal value matrix, its transpose in the output),
    positions as small sinusoids, the masked word head's transform as 1.5 times the identity.  With BERT's
    usual start a two-layer encoder ignores the retrieved document for the whole of a short training.
    """
    config, width = bert.config, bert.config.width
    with torch.no_grad():
        for module in bert.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, 0.02, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0.0, 0.05, generator=generator)
        angle = torch.arange(config.positions)[:, None] / 10_000 ** (torch.arange(0, width, 2)[None, :] / width)
        bert.position.weight.copy_(0.05 * torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width])
        for layer in bert.layers:
            assert isinstance(layer, _Layer)
            value_DD = nn.init.orthogonal_(torch.empty(width, width), generator=generator)
            layer.qkv.weight[2 * width :].copy_(value_DD)
            layer.attention_output.weight.copy_(0.5 * value_DD.T)
        if head is not None:
            head.transform.weight.copy_(1.5 * torch.eye(width))
            head.transform.bias.zero_()


# ---- files in Hugging Face's format ---------------------------------------------------------------


_NAMES = {  # Hugging Face's, of each part of ours
    "word": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "segment": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "layers": "encoder.layer",
    "qkv": "attention.self.qkv",  # which they keep as query, key and value
    "query_bias": "attention.self.query.bias",
    "value_bias": "attention.self.value.bias",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}
HEAD_NAMES = {  # of a masked word head
    "transform.weight": "cls.predictions.transform.dense.weight",
    "transform.bias": "cls.predictions.transform.dense.bias",
    "norm.weight": "cls.predictions.transform.LayerNorm.weight",
    "norm.bias": "cls.predictions.transform.LayerNorm.bias",
    "bias": "cls.predictions.bias",
}


def their_names(ours: str) -> list[str]:
    """Hugging Face's names of one of an encoder's parameters; more than one are joined, row after row, in ours."""
    name = ".".join(_NAMES.get(part, part) for part in ours.split("."))
    return [name.replace("qkv", part) for part in ("query", "key", "value")] if "qkv" in name else [name]


def export_state(bert: Bert, head: MaskedWordHead | None = None) -> dict[str, Tensor]:
    """The parameters under Hugging Face's names (``bert.`` in front, ``cls.predictions.`` for the head).

    Hugging Face's keys have a bias, which changes nothing: it is written as zeros.
    """
    out: dict[str, Tensor] = {}
    for ours, tensor in bert.state_dict().items():
        theirs = their_names(ours)
        out |= {f"bert.{name}": part for name, part in zip(theirs, tensor.chunk(len(theirs)), strict=True)}
    for name in [name for name in out if name.endswith("query.bias")]:
        out[name.replace("query", "key")] = torch.zeros_like(out[name])
    if head is not None:
        out |= {theirs: head.state_dict()[ours] for ours, theirs in HEAD_NAMES.items()}
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in out.items()}


def import_state(bert: Bert, state: Mapping[str, Tensor], source: str, head: MaskedWordHead | None = None) -> bool:
    """Fill an encoder (and the head, where the file has one) from Hugging Face's names.

    Returns whether the head was found.  The bias of keys is left out: no output depends on it.
    ValueError names the first parameter that is missing or has another shape.
    """
    prefix = _prefix(state)

    def take(name: str) -> Tensor:
        for candidate in _spellings(name):
            if candidate in state:
                return state[candidate].float()
        raise ValueError(f"{source}: the parameter {name} is missing; it is no BERT encoder of this shape")

    parts_of = {ours: [take(prefix + theirs) for theirs in their_names(ours)] for ours in bert.state_dict()}
    _fill(bert, {ours: torch.cat(parts) if parts[1:] else parts[0] for ours, parts in parts_of.items()}, source)
    has_head = head is not None and all(any(n in state for n in _spellings(name)) for name in HEAD_NAMES.values())
    if head is not None and has_head:
        _fill(head, {ours: take(theirs) for ours, theirs in HEAD_NAMES.items()}, source)
    return has_head


def import_pooler(pooler: nn.Linear, state: Mapping[str, Tensor], source: str) -> bool:
    """Fill the layer over [CLS] that BERT's second task trained; returns whether the file has one."""
    names = {kind: f"{_prefix(state)}pooler.dense.{kind}" for kind in ("weight", "bias")}
    if not all(name in state for name in names.values()):
        return False
    _fill(pooler, {kind: state[name].float() for kind, name in names.items()}, source)
    return True


def _prefix(state: Mapping[str, Tensor]) -> str:
    """What stands before the encoder's names: published models wrap it or do not."""
    return next((prefix for prefix in ("bert.", "realm.") if any(name.startswith(prefix) for name in state)), "")


def _spellings(name: str) -> tuple[str, ...]:
    """The name, that of the first converted checkpoints, and that of a bias which two modules share."""
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    return name, old, name.replace("cls.predictions.bias", "cls.predictions.decoder.bias")


def _fill(module: nn.Module, new: Mapping[str, Tensor], source: str) -> None:
    for name, old in module.state_dict().items():
        if new[name].shape != old.shape:
            raise ValueError(
                f"{source}: {name} has shape {list(new[name].shape)}, the configuration says {list(old.shape)}"
            )
    module.load_state_dict(dict(new))
