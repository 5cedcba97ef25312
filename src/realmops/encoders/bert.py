"""A lean BERT encoder over packed sequences: load one or a relative, or build a small one from scratch.

Attention alone pads (:mod:`realmops.encoders.attention`); on a GPU with half precision nothing does: its flash
attention takes sequences as they lie.  Folders with the weights of Hugging Face's BERT can be read, and those of its
relatives, which differ in their embeddings alone (:mod:`realmops.encoders.families`): RoBERTa, XLM-R, MPNet,
DistilBERT, ELECTRA.

Shape suffixes: B sequences, T wordpieces of all sequences, G sequences of a group, L its longest,
D width, E width of embeddings, H heads, V vocabulary, N chosen positions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from realmops.encoders.attention import attend
from realmops.encoders.devices import product
from realmops.encoders.encoder import Encoder
from realmops.encoders.families import FAMILIES, Family, spellings
from realmops.encoders.folders import CONFIG, is_tied, read_config, read_weights
from realmops.encoders.packed import Packed, even_rows

_FARTHEST = 128  # distance with a bucket that is not that of all farther ones
_GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}  # hidden_act: torch's approximation of GELU


@dataclass(frozen=True)
class BertConfig:
    """The shape of an encoder; names follow the paper of BERT, values those of its config.json.

    ``embedding`` is the width of embeddings, 0 where it is the encoder's. ``padding`` is the number behind which
    positions begin in files, where they do so, else -1. ``buckets`` are those of distances that have a bias. ``tied``:
    the masked word head's decoder is the word embedding.
    """

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
    kind: str = "bert"
    embedding: int = 0
    padding: int = -1
    buckets: int = 0
    tied: bool = True

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    def to_json(self) -> dict[str, Any]:
        """The fields under the names of a Hugging Face ``config.json``."""
        family, own = self.family, asdict(self)
        own |= {"positions": self.positions + 1 + self.padding, "embedding": self.embedding or self.width}
        out: dict[str, Any] = {"model_type": self.kind, **dict.fromkeys(family.dropouts, self.dropout)}
        out |= {name: own[key] for key, name in family.config.items()}
        out |= {} if self.tied else {"tie_word_embeddings": False}
        return out | ({"pad_token_id": self.padding} if family.behind_padding else {})

    @staticmethod
    def from_json(values: Mapping[str, Any], source: str) -> BertConfig:
        """Read a ``config.json``; ValueError names what is missing or not of BERT's relatives."""
        kind = "bert" if values.get("model_type") == "realm" else str(values.get("model_type", "bert"))
        allowed = {"model_type": (*FAMILIES, "realm"), "position_embedding_type": ("absolute",)}
        family = FAMILIES.get(kind, FAMILIES["bert"])
        allowed[family.config["activation"]] = tuple(_GELU)
        for key, ones in allowed.items():
            if values.get(key, ones[0]) not in ones:
                raise ValueError(
                    f"{source}: {key} is {values[key]!r}; only BERT encoders can be used, and relatives ({key} "
                    f"{', '.join(ones)}): choose such a model, for example google-bert/bert-base-uncased"
                )
        missing = [name for key, name in family.config.items() if name not in values and key not in _OPTIONAL]
        if missing:
            raise ValueError(f"{source}: the keys {', '.join(missing)} are missing; it is no BERT configuration")
        found = {key: values[name] for key, name in family.config.items() if name in values} | dict(family.fixed)
        if family.behind_padding:
            found["padding"] = int(values.get("pad_token_id", 1))
            found["positions"] -= 1 + found["padding"]
        if found.get("embedding") == found["width"]:
            found["embedding"] = 0
        return BertConfig(**found, kind=kind, tied=values.get("tie_word_embeddings", True))


_OPTIONAL = {"segments", "layer_norm_eps", "activation"}


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
        self.folded = False

    def forward(self, x_TD: Tensor, batch: Packed, added: Sequence[Tensor] | None = None) -> Tensor:
        """``added`` goes to the scores, as :func:`attend` takes it."""
        bias = torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])
        qkv_TD = product(self.qkv, x_TD, bias)
        drop = self.dropout if self.training else 0.0
        y_TD = attend(qkv_TD[: batch.wordpieces], batch, self.heads, drop, added=added)
        x_TD = self.attention_norm(self._sum(x_TD, even_rows(y_TD), self.attention_output))
        inner_TD = product(self.intermediate, x_TD, self.intermediate.bias, self.gelu)
        normed: Tensor = self.output_norm(self._sum(x_TD, inner_TD, self.output))
        return normed

    def _sum(self, x_TD: Tensor, y_TD: Tensor, layer: nn.Linear) -> Tensor:
        """x and what the layer makes of y."""
        if self.folded:
            return x_TD.addmm_(y_TD, layer.weight.T)
        return x_TD + F.dropout(product(layer, y_TD, layer.bias), self.dropout, self.training)

    def fold(self, before: nn.Parameter) -> None:
        """Let x have the biases of both sums in it, the first from the bias ``before`` this layer; by new data.

        W (x + b) is W x + W b: what multiplies x next has so much less bias. Keys need not have it.
        """
        attended_D, inner_D = self.attention_output.bias.float(), self.output.bias.float()
        query_D, _, value_D = (self.qkv.weight.float() @ attended_D).chunk(3)
        for parameter, more in (
            (before, attended_D),
            (self.query_bias, -query_D),
            (self.value_bias, -value_D),
            (self.attention_norm.bias, inner_D),
            (self.intermediate.bias, -self.intermediate.weight.float() @ inner_D),
        ):
            parameter.data = parameter.float() + more
        self.folded = True


class Bert(Encoder):
    """A BERT encoder or a relative: packed wordpieces in, one vector for each of them out."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config.vocabulary, config.width, config.positions, config.dropout, config.layer_norm_eps)
        self.config, self.words, self.segments = config, config.family.words, config.segments
        self.added_width = inner = config.embedding or config.width
        self.word = nn.Embedding(config.vocabulary, inner)
        self.position = nn.Embedding(config.positions, inner)
        self.segment = nn.Embedding(config.segments, inner) if config.segments else None
        self.norm = nn.LayerNorm(inner, eps=config.layer_norm_eps)
        self.project = nn.Linear(inner, config.width) if config.embedding else None
        self.relative = nn.Embedding(config.buckets, config.heads) if config.buckets else None
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))

    def forward(self, batch: Packed, added_TD: Tensor | None = None) -> Tensor:
        """Hidden states T x D of a packed batch; sequences must fit ``config.positions``.

        ``added_TD`` is added to the embeddings of the wordpieces.
        """
        assert batch.longest <= self.config.positions, (batch.longest, self.config.positions)
        batch.to(self.word.weight.device)
        x_TD: Tensor = self.word(batch.tokens_T) + self.position(batch.positions_T)
        if self.segment is not None:
            x_TD = x_TD + (self.segment(batch.segments_T) if self.segments > 1 else self.segment.weight)
        if added_TD is not None:
            x_TD = x_TD + added_TD
        x_TD = F.dropout(even_rows(self.norm(x_TD)), self.config.dropout, self.training)
        if self.project is not None:
            x_TD = product(self.project, x_TD, self.project.bias)
        added = None if self.relative is None else self._relative_scores(batch, self.relative)
        for layer in self.layers:
            again = self.gradient_checkpointing and torch.is_grad_enabled()
            x_TD = checkpoint(layer, x_TD, batch, added, use_reentrant=False) if again else layer(x_TD, batch, added)
        return x_TD[: batch.wordpieces]

    @staticmethod
    def _relative_scores(batch: Packed, relative: nn.Embedding) -> list[Tensor]:
        """What distances add to the scores of each group, with minus infinity where padding is; G or 1 x H x L x L."""
        batch.pad()
        device, found = relative.weight.device, []
        for group in batch.groups:
            place_L = torch.arange(group.longest, device=device)
            distance_LL = (place_L[None, :] - place_L[:, None]).clamp(-_FARTHEST, _FARTHEST)
            bucket_LL = _buckets(relative.num_embeddings, device)[distance_LL + _FARTHEST]
            scores_HLL = relative(bucket_LL).permute(2, 0, 1)
            if torch.is_autocast_enabled(device.type):
                scores_HLL = scores_HLL.to(torch.get_autocast_dtype(device.type))
            padding_GL = group.is_padding_GL
            whole = scores_HLL[None].contiguous()
            found.append(whole if padding_GL is None else whole.masked_fill(padding_GL[:, None, None, :], -torch.inf))
        return found

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

    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        family = self.config.family
        state = {name.removeprefix(family.prefixes[0]): tensor for name, tensor in export_state(self).items()}
        return {"architectures": [family.model], **self.describe()}, state

    @classmethod
    def described(cls, description: Mapping[str, Any], source: str) -> Bert:
        return Bert(BertConfig.from_json(description, source))

    @classmethod
    def load(cls, folder: Path, dropout: float | None = None) -> tuple[Bert, MaskedWordHead, bool]:
        """From a folder in Hugging Face's format; a head that it lacks starts from a near identity."""
        config = BertConfig.from_json(read_config(folder), str(folder / CONFIG))
        if dropout is not None:
            config = replace(config, dropout=dropout)
        state, family = read_weights(folder), config.family
        words = state.get(f"{_prefix(state, family)}{family.names['word']}.weight")
        config = replace(config, tied=is_tied(state.get(family.head["decoder"]), words))
        bert, head = cls(config), MaskedWordHead(config)
        found = import_state(bert, state, str(folder), head)
        if not found:
            head.start_afresh(bert.word_vectors)
        return bert, head, found

    @torch.no_grad()
    def in_fp16(self) -> Bert:
        """Return a copy with both sums of a layer in the pass of the product before them: their biases move."""
        other = copy.deepcopy(self)
        before = other.norm.bias if other.project is None else other.project.bias
        for layer in other.layers:
            assert isinstance(layer, _Layer)
            layer.fold(before)
            before = layer.output_norm.bias
        return other.half()

    def set_dropout(self, dropout: float) -> None:
        super().set_dropout(dropout)
        self.config = replace(self.config, dropout=dropout)
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            layer.dropout = dropout


class MaskedWordHead(nn.Module):
    """BERT's masked language model head, over chosen positions only.

    Its output matrix is the word embedding, or where the configuration is not tied a decoder of its own.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        inner = config.embedding or config.width
        self.transform = nn.Linear(config.width, inner)
        self.norm = nn.LayerNorm(inner, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.decoder = None if config.tied else nn.Parameter(torch.zeros(config.vocabulary, inner))
        self.gelu = "none" if config.family.own_gelu else _GELU[config.activation]

    def forward(self, hidden_ND: Tensor, word_VD: Tensor) -> Tensor:
        """Logits N x V."""
        matrix_VD = word_VD if self.decoder is None else self.decoder
        return F.linear(self.norm(F.gelu(self.transform(hidden_ND), approximate=self.gelu)), matrix_VD, self.bias)

    def start_afresh(self, word_VD: Tensor) -> None:
        """From a near identity, over the word vectors."""
        with torch.no_grad():
            if self.decoder is not None:
                self.decoder.copy_(word_VD)
            self.transform.weight.copy_(torch.eye(*self.transform.weight.shape))
            self.transform.bias.zero_()


@lru_cache(8)
@torch.inference_mode(False)
def _buckets(buckets: int, device: torch.device) -> Tensor:
    """Return the bucket of each distance from -128 to 128, beyond which all have one.

    Half of the buckets are for either side: exact for near ones, wider and wider for far ones, as in T5 (Raffel et al.
    2020), which MPNet follows. A graph that is traced gets them as numbers: in bf16 it would round the logarithm.
    """
    half = buckets // 2
    exact = half // 2
    distance = torch.arange(-_FARTHEST, _FARTHEST + 1, device=device)
    far = distance.abs()
    growth = torch.log(far.clamp(min=1).float() / exact) / math.log(_FARTHEST / exact) * (half - exact)
    wide = (exact + growth.long()).clamp(max=half - 1)
    return torch.where(far < exact, far, wide) + half * (distance > 0)


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


def their_names(ours: str, family: Family = FAMILIES["bert"]) -> list[str]:
    """Hugging Face's names of one of an encoder's parameters; more than one are joined, row after row, in ours."""
    name = ".".join(family.names.get(part, part) for part in ours.split("."))
    before, brace, rest = name.partition("{")
    parts, _, behind = rest.partition("}")
    return [before + part + behind for part in parts.split(",")] if brace else [name]


def export_state(bert: Bert, head: MaskedWordHead | None = None) -> dict[str, Tensor]:
    """The parameters under Hugging Face's names (``bert.`` in front, ``cls.predictions.`` for the head).

    Hugging Face's keys have a bias, which changes nothing: it is written as zeros.
    """
    out: dict[str, Tensor] = {}
    family, prefix = bert.config.family, bert.config.family.prefixes[0]
    for ours, tensor in bert.state_dict().items():
        theirs = their_names(ours, family)
        out |= {prefix + name: part for name, part in zip(theirs, tensor.chunk(len(theirs)), strict=True)}
        if ours.endswith("query_bias"):
            out[prefix + their_names(ours.replace("query_bias", "qkv.bias"), family)[1]] = torch.zeros_like(tensor)
    place = prefix + family.names["position"] + ".weight"
    out[place] = F.pad(out[place], (0, 0, 1 + bert.config.padding, 0))
    if head is not None:
        out |= {family.head[ours]: tensor for ours, tensor in head.state_dict().items()}
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in out.items()}


def import_state(bert: Bert, state: Mapping[str, Tensor], source: str, head: MaskedWordHead | None = None) -> bool:
    """Fill an encoder (and the head, where the file has one) from Hugging Face's names.

    Returns whether the head was found.  The bias of keys is left out: no output depends on it.
    ValueError names the first parameter that is missing or has another shape.
    """
    family = bert.config.family
    prefix = _prefix(state, family)

    def take(name: str) -> Tensor:
        for candidate in spellings(name):
            if candidate in state:
                return state[candidate].float()
        raise ValueError(f"{source}: the parameter {name} is missing; it is no BERT encoder of this shape")

    parts_of = {ours: [take(prefix + theirs) for theirs in their_names(ours, family)] for ours in bert.state_dict()}
    parts_of["position.weight"] = [parts_of["position.weight"][0][1 + bert.config.padding :]]
    _fill(bert, {ours: torch.cat(parts) if parts[1:] else parts[0] for ours, parts in parts_of.items()}, source)
    if head is None:
        return False
    names = {ours: family.head[ours] for ours in head.state_dict()}
    has_head = all(any(n in state for n in spellings(name)) for name in names.values())
    if has_head:
        _fill(head, {ours: take(theirs) for ours, theirs in names.items()}, source)
    return has_head


def import_pooler(pooler: nn.Linear, state: Mapping[str, Tensor], source: str) -> bool:
    """Fill the layer over [CLS] that BERT's second task trained; returns whether the file has one."""
    prefixes = ("", *(prefix for family in FAMILIES.values() for prefix in family.prefixes))
    found = (p for p in prefixes if all(f"{p}pooler.dense.{kind}" in state for kind in ("weight", "bias")))
    if (prefix := next(found, None)) is None:
        return False
    names = {kind: f"{prefix}pooler.dense.{kind}" for kind in ("weight", "bias")}
    _fill(pooler, {kind: state[name].float() for kind, name in names.items()}, source)
    return True


def _prefix(state: Mapping[str, Tensor], family: Family) -> str:
    """What stands before the encoder's names: published models wrap it or do not."""
    return next((prefix for prefix in family.prefixes if any(name.startswith(prefix) for name in state)), "")


def _fill(module: nn.Module, new: Mapping[str, Tensor], source: str) -> None:
    for name, old in module.state_dict().items():
        if new[name].shape != old.shape:
            raise ValueError(
                f"{source}: {name} has shape {list(new[name].shape)}, the configuration says {list(old.shape)}"
            )
    module.load_state_dict(dict(new))
