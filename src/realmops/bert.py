"""A lean BERT encoder over packed sequences: load, save, or build a small one from scratch.

Sequences of a batch lie one after another without padding, so that every linear layer sees useful
wordpieces only; attention alone pads, to the longest sequence of the batch, and where that would be much,
to the longest of each of several groups of like lengths.  On a GPU with half precision nothing pads: its flash
attention takes sequences as they lie.  Weights and their names on disk are those of Hugging Face's BERT, so that
folders can be exchanged with other software.

Shape suffixes: B sequences, T wordpieces of all sequences, G sequences of a group, L its longest, P padded rows,
D width, H heads, V vocabulary, N chosen positions.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from realmops.config import RunOptions
from realmops.encoders import CONFIG, read_config, read_weights

# Padded; on a CPU what stays in a core's cache, on a GPU what keeps it at work while the next kernels are sent.
BATCH_WORDPIECES = {"cpu": 1024, "cuda": 32_768}
FORM_STEP = 1 << 32  # a wordpiece may come with its word's form: its id plus the form times this
_SCORES_TOGETHER = 1 << 20  # B x L x L; a batch with more is attended to in groups of
_SCORES_OF_GROUP = 1 << 18
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # by the names that run.precision has
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
_ROWS = 16  # of a matrix in bf16 on a CPU: a multiple of it
_LENGTHS = 8  # sequences are padded to a multiple of it
_GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}  # hidden_act: torch's approximation


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

    @property
    def gelu(self) -> str:
        """The approximation of GELU: ``none``, or ``tanh`` in Google's own checkpoints."""
        return _GELU[self.activation]

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
_ONLY = {
    "model_type": ("bert", "realm"),
    "hidden_act": tuple(_GELU),
    "position_embedding_type": ("absolute",),
}


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences that attention pads together: ``size`` times ``longest`` padded rows from ``first`` on."""

    first: int
    size: int
    longest: int
    is_padding_GL: Tensor | None  # None: all are of one length


class Packed:
    """A batch of sequences without padding.

    ``tokens_T``, ``forms_T``, ``segments_T`` and ``positions_T`` are int64; ``starts`` gives each sequence's first row.
    ``groups`` cover the padded rows, of which ``padded_row_T`` names each wordpiece's. All are parts of one tensor,
    which goes to a GPU by one copy.
    """

    tokens_T: Tensor
    forms_T: Tensor
    segments_T: Tensor
    positions_T: Tensor
    padded_row_T: Tensor
    lengths_B: Tensor
    first_B: Tensor
    starts_B: Tensor  # int32, the end of the last one too

    def __init__(self, sequences: Sequence[np.ndarray], segments: Sequence[np.ndarray] | None = None) -> None:
        self.lengths = np.array([len(s) for s in sequences], dtype=np.int64)
        assert self.lengths.min(initial=1) > 0, "each sequence needs a wordpiece"
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.longest, self.wordpieces = int(self.lengths.max()), int(self.starts[-1])
        position_T = np.arange(self.starts[-1]) - np.repeat(self.starts[:-1], self.lengths)
        token_T = np.concatenate(sequences).astype(np.int64)
        segment_T = np.zeros_like(token_T) if segments is None else np.concatenate(segments).astype(np.int64)
        first_row_B = np.empty(len(self.lengths), dtype=np.int64)
        self.groups: list[PaddedGroup] = []
        self.padded_rows = 0
        together = _attended_together(self.lengths)
        for rows in together:
            lengths_G = self.lengths[rows]
            size, longest = len(rows), int(lengths_G.max())
            if lengths_G.min() < longest:
                longest += -longest % _LENGTHS
            first_row_B[rows] = self.padded_rows + np.arange(size) * longest
            padding = _is_padding(torch.from_numpy(lengths_G), longest) if lengths_G.min() < longest else None
            self.groups.append(PaddedGroup(self.padded_rows, size, longest, padding))
            self.padded_rows += size * longest
        padded_row_T = np.repeat(first_row_B, self.lengths) + position_T
        self.in_place = len(self.groups) == 1 and self.groups[0].is_padding_GL is None
        self._one_segment = False
        of_wordpieces = [token_T & (FORM_STEP - 1), token_T // FORM_STEP, segment_T, position_T, padded_row_T]
        of_sequences = [self.lengths, self.lengths[np.concatenate(together)], self.starts]
        self._take_apart(torch.from_numpy(np.concatenate([*of_wordpieces, *of_sequences])))

    def _take_apart(self, numbers: Tensor) -> None:
        sequences = len(self.lengths)
        parts = torch.split(numbers, [self.wordpieces] * 5 + [sequences] * 2 + [sequences + 1])
        self.tokens_T, self.forms_T, self.segments_T, self.positions_T, self.padded_row_T = parts[:5]
        self.lengths_B, self._lengths_in_groups_B, starts_B = parts[5:]
        self.first_B, self.starts_B = starts_B[:-1], starts_B.to(torch.int32)
        self._numbers = numbers
        if self._one_segment:
            self.segments_T = torch.zeros_like(self.segments_T)

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, x_PD: Tensor) -> Sequence[Tensor]:
        """The padded rows of each group."""
        return (x_PD,) if len(self.groups) == 1 else torch.split(x_PD, [g.size * g.longest for g in self.groups])

    def in_one_segment(self) -> Packed:
        """The same sequences, all of segment 0."""
        other = copy(self)
        other._one_segment = True
        other.segments_T = torch.zeros_like(self.segments_T)
        return other

    def to(self, device: torch.device) -> Packed:
        """Move the tensors to a device, in place; those of padding follow where something pads."""
        if self._numbers.device != device:
            self._take_apart(_moved(self._numbers, device))
        return self

    def pad(self) -> None:
        """Say where the tensors are what is padding, in place."""
        if all(g.is_padding_GL is None or g.is_padding_GL.device == self._numbers.device for g in self.groups):
            return
        lengths = torch.split(self._lengths_in_groups_B, [group.size for group in self.groups])
        self.groups = [
            group if group.is_padding_GL is None else replace(group, is_padding_GL=_is_padding(mine_G, group.longest))
            for group, mine_G in zip(self.groups, lengths, strict=True)
        ]


def _is_padding(lengths_G: Tensor, longest: int) -> Tensor:
    return torch.arange(longest, device=lengths_G.device)[None, :] >= lengths_G[:, None]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def send(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Whole numbers (int64), truth values and fp32 from the CPU to a device, by one copy that nothing waits for."""
    if device.type == "cpu":
        return list(tensors)
    whole = [tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor for tensor in tensors]  # by its bits
    flat = _moved(torch.cat([tensor.reshape(-1).to(torch.int64) for tensor in whole]), device)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    there = [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, whole, strict=True)]
    return [part.view(tensor.dtype) for part, tensor in zip(there, tensors, strict=True)]


def bring(*tensors: Tensor) -> list[Tensor]:
    """Small tensors to the CPU without their gradients, by one copy, which waits for the device.

    Their values must be exact as doubles: floats, truth values, and whole numbers below 2 ** 53.
    """
    away = [tensor.detach() for tensor in tensors if tensor.device.type != "cpu"]
    if not away:
        return [tensor.detach() for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1).double() for tensor in away]).cpu()
    parts = iter(torch.split(flat, [tensor.numel() for tensor in away]))
    return [
        tensor.detach() if tensor.device.type == "cpu" else next(parts).view(tensor.shape).to(tensor.dtype)
        for tensor in tensors
    ]


def _attended_together(lengths: np.ndarray) -> list[np.ndarray]:
    """Rows of the sequences of each group: all in one, or when their padded scores are many, by length."""
    if len(lengths) * int(lengths.max()) ** 2 <= _SCORES_TOGETHER:
        return [np.arange(len(lengths))]
    return [np.array(rows) for rows in _like_lengths(lengths.tolist(), 2, _SCORES_OF_GROUP)]


def length_batches(lengths: Sequence[int], device: torch.device) -> Iterator[list[int]]:
    """Rows of sequences in batches of like lengths: shortest first, at most ``BATCH_WORDPIECES`` when padded.

    The batches depend on lengths and device alone, so that equal calls give equal bytes on one machine.
    """
    return _like_lengths(lengths, 1, BATCH_WORDPIECES[device.type])


def _like_lengths(lengths: Sequence[int], power: int, limit: int) -> Iterator[list[int]]:
    """Rows, shortest first, in groups: their number times the longest's length ** ``power`` is at most ``limit``."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - start) * lengths[order[end]] ** power > limit:
            yield order[start:end]
            start = end


def _pad(x_TD: Tensor, rows_T: Tensor, count: int) -> Tensor:
    """Rows of a packed tensor to their places in a padded one."""
    return x_TD.new_zeros(count, x_TD.shape[1]).index_copy_(0, rows_T, x_TD)


class _Unpad(torch.autograd.Function):
    """The inverse of :func:`_pad`; no two rows share a place, so that gradients are copied and not added up."""

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, rows_T: Tensor) -> Tensor:
        ctx.save_for_backward(rows_T)
        ctx.count = x_PD.shape[0]
        return x_PD.index_select(0, rows_T)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (rows_T,) = ctx.saved_tensors
        grad_TD = grads[0]
        return _pad(grad_TD, rows_T, ctx.count), None


def even_rows(x_N: Tensor) -> Tensor:
    """The same with zeros behind it, where a CPU computes in bf16: at most a 16th more, or up to 16 rows.

    oneDNN prepares a product for each number of rows that it has not seen: that takes it a millisecond, and what it
    keeps takes memory. So there are few such numbers.
    """
    if not torch.is_autocast_enabled("cpu"):
        return x_N
    step = max(_ROWS, (1 << len(x_N).bit_length()) // 32)
    return F.pad(x_N, [0, 0] * (x_N.dim() - 1) + [0, -len(x_N) % step])


def _flash_takes(x_TD: Tensor) -> bool:
    """Whether flash attention can be had for these numbers: on a GPU, in half precision."""
    halves = (torch.bfloat16, torch.float16)
    return x_TD.is_cuda and x_TD.dtype in halves and torch.backends.cuda.is_flash_attention_available()


def _unpad(x_PD: Tensor, rows_T: Tensor) -> Tensor:
    packed: Tensor = _Unpad.apply(x_PD, rows_T)  # type: ignore[no-untyped-call]
    return packed


class _Layer(nn.Module):
    """One transformer block with LayerNorm behind each sub-layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, eps = config.width, config.layer_norm_eps
        self.heads, self.dropout, self.gelu = config.heads, config.dropout, config.gelu
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
        qkv_TD = F.linear(x_TD, self.qkv.weight, bias)
        attended_TD = self.attention_output(even_rows(self._attend(qkv_TD[: batch.wordpieces], batch)))
        x_TD = self.attention_norm(x_TD + F.dropout(attended_TD, self.dropout, self.training))
        inner_TD = self.output(F.gelu(self.intermediate(x_TD), approximate=self.gelu))
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
        qkv_PD = qkv_TD if batch.in_place else _pad(qkv_TD, batch.padded_row_T, batch.padded_rows)
        parts = [self._attend_group(part, group) for part, group in zip(batch.split(qkv_PD), batch.groups, strict=True)]
        y_PD = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y_PD if batch.in_place else _unpad(y_PD, batch.padded_row_T)

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


class Bert(nn.Module):
    """A BERT encoder: packed wordpieces in, one vector for each of them out."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.positions, config.width)
        self.segment = nn.Embedding(config.segments, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.gradient_checkpointing = False  # activations within a layer are made again on the way back

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

    def set_dropout(self, dropout: float) -> None:
        """Learn with another dropout from here on."""
        self.config = replace(self.config, dropout=dropout)
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            layer.dropout = dropout

    def cls(self, batch: Packed) -> Tensor:
        """The hidden state of each sequence's first wordpiece, B x D."""
        hidden_TD: Tensor = self(batch)
        return hidden_TD.index_select(0, batch.first_B)


class MaskedWordHead(nn.Module):
    """BERT's masked language model head, over chosen positions only; its output matrix is the word embedding."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.gelu = config.gelu

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


def resolve_device(name: str) -> torch.device:
    """``auto`` takes the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("run.device is 'cuda', but torch finds no GPU here; set run.device=auto or cpu")
    return torch.device(name)


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bf16 where the processor multiplies it in hardware, fp32 elsewhere."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if multiplies_bf16() else torch.float32


def multiplies_bf16() -> bool:
    """Whether this processor multiplies bf16 in hardware."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def device_and_dtype(run: RunOptions) -> tuple[torch.device, torch.dtype]:
    """Where ``run.device`` and ``run.precision`` let models work, and in which numbers."""
    device = resolve_device(run.device)
    return device, resolve_precision(run.precision, device)


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Matrix products in ``dtype``; nothing at all for fp32."""
    with torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext():
        yield


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products of fp32 in fp32 within :func:`autocast`."""
    known = torch.amp.is_autocast_available(device.type)
    with torch.autocast(device.type, enabled=False) if known else nullcontext():
        yield


def freeze_products(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep weights of matrix products in the numbers that :func:`autocast` multiplies, in a module that learns no more.

    The results are the same; without this each batch copies all of these weights, which for one question takes longer
    than the products.  In place.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.requires_grad_(False).to(dtype)


# ---- files in Hugging Face's format ---------------------------------------------------------------


def _names(config: BertConfig) -> Iterator[tuple[str, str]]:
    """Pairs of our parameter's name and Hugging Face's, without the fused weights of query, key and value."""
    for ours, theirs in (
        ("word", "word_embeddings"),
        ("position", "position_embeddings"),
        ("segment", "token_type_embeddings"),
    ):
        yield f"{ours}.weight", f"embeddings.{theirs}.weight"
    modules = [("norm", "embeddings.LayerNorm")]
    for i in range(config.layers):
        ours, theirs = f"layers.{i}", f"encoder.layer.{i}"
        modules += [
            (f"{ours}.attention_output", f"{theirs}.attention.output.dense"),
            (f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm"),
            (f"{ours}.intermediate", f"{theirs}.intermediate.dense"),
            (f"{ours}.output", f"{theirs}.output.dense"),
            (f"{ours}.output_norm", f"{theirs}.output.LayerNorm"),
        ]
        for part in ("query", "value"):
            yield f"{ours}.{part}_bias", f"{theirs}.attention.self.{part}.bias"
    for ours, theirs in modules:
        yield f"{ours}.weight", f"{theirs}.weight"
        yield f"{ours}.bias", f"{theirs}.bias"


_HEAD = {
    "transform.weight": "cls.predictions.transform.dense.weight",
    "transform.bias": "cls.predictions.transform.dense.bias",
    "norm.weight": "cls.predictions.transform.LayerNorm.weight",
    "norm.bias": "cls.predictions.transform.LayerNorm.bias",
    "bias": "cls.predictions.bias",
}


def export_state(bert: Bert, head: MaskedWordHead | None = None) -> dict[str, Tensor]:
    """The parameters under Hugging Face's names (``bert.`` in front, ``cls.predictions.`` for the head).

    Hugging Face's keys have a bias, which changes nothing: it is written as zeros.
    """
    state = bert.state_dict()
    out = {f"bert.{theirs}": state[ours] for ours, theirs in _names(bert.config)}
    for i in range(bert.config.layers):
        attention = f"bert.encoder.layer.{i}.attention.self"
        parts = state[f"layers.{i}.qkv.weight"].chunk(3)
        out |= {f"{attention}.{n}.weight": part for n, part in zip(("query", "key", "value"), parts, strict=True)}
        out[f"{attention}.key.bias"] = torch.zeros_like(state[f"layers.{i}.query_bias"])
    if head is not None:
        out |= {theirs: head.state_dict()[ours] for ours, theirs in _HEAD.items()}
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

    new = {ours: take(prefix + theirs) for ours, theirs in _names(bert.config)}
    for i in range(bert.config.layers):
        attention = f"{prefix}encoder.layer.{i}.attention.self"
        new[f"layers.{i}.qkv.weight"] = torch.cat([take(f"{attention}.{n}.weight") for n in ("query", "key", "value")])
    _fill(bert, new, source)
    has_head = head is not None and all(any(n in state for n in _spellings(name)) for name in _HEAD.values())
    if head is not None and has_head:
        _fill(head, {ours: take(theirs) for ours, theirs in _HEAD.items()}, source)
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


def load_bert(folder: Path, dropout: float | None = None) -> tuple[Bert, MaskedWordHead, bool]:
    """An encoder and a masked word head from a folder; the flag says whether the folder had a head.

    ``dropout`` takes the place of the folder's own.
    """
    config = BertConfig.from_json(read_config(folder), str(folder / CONFIG))
    if dropout is not None:
        config = replace(config, dropout=dropout)
    bert, head = Bert(config), MaskedWordHead(config)
    found = import_state(bert, read_weights(folder), str(folder), head)
    return bert, head, found


def save_bert(folder: Path, bert: Bert, head: MaskedWordHead | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors`` that Hugging Face's BERT can load."""
    from safetensors.torch import save

    (folder / "config.json").write_text(json.dumps(bert.config.to_json(), indent=1) + "\n")
    (folder / "model.safetensors").write_bytes(save(export_state(bert, head)))


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def tune_process(threads: int) -> None:
    """What every process that works with models wants, once."""
    keep_freed_memory()
    torch.set_num_threads(threads)
    # cuDNN's attention plans anew for every shape, and no two batches here have one: a plan takes longer than a step.
    torch.backends.cuda.enable_cudnn_sdp(False)


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next: fresh pages for every tensor cost more than its use.

    What the process kept until now, as an earlier stage, goes back.
    """
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallopt(_MMAP_THRESHOLD, 32 << 20)  # larger tensors go back at once, or memory would grow without end
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
