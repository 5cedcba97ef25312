"""ModernBERT over packed sequences (Warner et al. 2024): rotary positions, layers that see far or near, gated units.

Shape suffixes: T wordpieces of all sequences, D width, H heads, R width of a head, V vocabulary, N chosen positions.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from realmops.encoders.folders import CONFIG, is_tied, read_config, read_weights
from realmops.encoders.packed import Packed, even_rows

_FULL, _NEAR = "full_attention", "sliding_attention"
_GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
_JSON = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "positions": "max_position_embeddings",
    "dropout": "attention_dropout",
    "layer_norm_eps": "norm_eps",
    "activation": "hidden_activation",
    "head_activation": "classifier_activation",
    "norm_bias": "norm_bias",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "head_bias": "classifier_bias",
    "decoder_bias": "decoder_bias",
    "local": "local_attention",
    "every": "global_attn_every_n_layers",
    "far_theta": "global_rope_theta",
    "near_theta": "local_rope_theta",
    "tied": "tie_word_embeddings",
}


@dataclass(frozen=True)
class ModernConfig:
    """The shape; ``local`` wordpieces are seen around each, but in every ``every``-th layer all are."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    intermediate: int
    positions: int = 8192
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5
    activation: str = "gelu"
    head_activation: str = "gelu"
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    decoder_bias: bool = True
    local: int = 128
    every: int = 3
    far_theta: float = 160_000.0
    near_theta: float = 10_000.0
    tied: bool = True

    def sees_all(self, layer: int) -> bool:
        return layer % self.every == 0

    def to_json(self) -> dict[str, Any]:
        """The fields under the names of a Hugging Face ``config.json``."""
        own = {_JSON[name]: value for name, value in asdict(self).items() if (name, value) != ("tied", True)}
        return {"model_type": "modernbert", "embedding_dropout": self.dropout, "mlp_dropout": self.dropout, **own}

    @staticmethod
    def from_json(values: Mapping[str, Any], source: str) -> ModernConfig:
        """Read a ``config.json`` of any version of transformers; ValueError names what cannot be had here."""
        values = dict(values)
        for kind, key in ((_FULL, "global_rope_theta"), (_NEAR, "local_rope_theta")):
            rope = (values.get("rope_parameters") or {}).get(kind) or {}
            if rope.get("rope_type", "default") != "default":
                raise ValueError(f"{source}: rope_parameters has the rope_type {rope['rope_type']!r}; default is known")
            if "rope_theta" in rope:
                values[key] = rope["rope_theta"]
        if values.get("layer_types"):
            types = list(values["layer_types"])
            values["global_attn_every_n_layers"] = every = next(
                (n for n in range(1, len(types)) if types[n] == _FULL), len(types)
            )
            if types != [_FULL if n % every == 0 else _NEAR for n in range(len(types))]:
                raise ValueError(f"{source}: layer_types is {types}; layers that see all come at equal distances here")
        missing = [
            _JSON[n] for n in ("vocabulary", "width", "layers", "heads", "intermediate") if _JSON[n] not in values
        ]
        if missing:
            raise ValueError(f"{source}: the keys {', '.join(missing)} are missing; it is no ModernBERT configuration")
        for key in ("hidden_activation", "classifier_activation"):
            if values.get(key, "gelu") not in _GELU:
                raise ValueError(f"{source}: {key} is {values[key]!r}; {', '.join(_GELU)} are known")
        return ModernConfig(**{name: values[key] for name, key in _JSON.items() if key in values})


class _Layer(nn.Module):
    """One transformer block with LayerNorm before each sub-layer."""

    def __init__(self, config: ModernConfig, number: int) -> None:
        super().__init__()
        width, inner = config.width, config.intermediate
        self.heads, self.dropout, self.gelu = config.heads, config.dropout, _GELU[config.activation]
        self.window = None if config.sees_all(number) else config.local // 2
        self.attn_norm = _norm(config) if number else nn.Identity()
        self.qkv = nn.Linear(width, 3 * width, bias=config.attention_bias)
        self.attention_output = nn.Linear(width, width, bias=config.attention_bias)
        self.mlp_norm = _norm(config)
        self.intermediate = nn.Linear(width, 2 * inner, bias=config.mlp_bias)
        self.output = nn.Linear(inner, width, bias=config.mlp_bias)

    def forward(self, x_TD: Tensor, batch: Packed, turns: tuple[Tensor, Tensor]) -> Tensor:
        qkv_TD = product(self.qkv, self.attn_norm(x_TD), self.qkv.bias)[: batch.wordpieces]
        y_TD = attend(
            _turned(qkv_TD, self.heads, *turns), batch, self.heads, self.dropout if self.training else 0.0, self.window
        )
        attended_TD = product(self.attention_output, even_rows(y_TD), self.attention_output.bias)
        x_TD = x_TD + F.dropout(attended_TD, self.dropout, self.training)
        both_TD = product(self.intermediate, self.mlp_norm(x_TD), self.intermediate.bias)
        inner_TD, gate_TD = both_TD.chunk(2, dim=-1)
        gated_TD = F.gelu(inner_TD, approximate=self.gelu) * gate_TD
        gated_TD = F.dropout(gated_TD, self.dropout, self.training)
        out: Tensor = x_TD + product(self.output, gated_TD, self.output.bias)
        return out


@lru_cache(8)
@torch.inference_mode(False)  # so that they can be used in training, whoever asks first
def _rotations(positions: int, width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine of the angles of all positions, L x R (Su et al. 2021).

    A graph that is traced gets them as numbers: in bf16 it would round positions above 256, and with them the angles.
    """
    place_R = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    angle_LR = torch.arange(positions, device=device)[:, None].float() * theta ** (-place_R / width)
    cos_LR, sin_LR = angle_LR.cos(), angle_LR.sin()
    return torch.cat([cos_LR, cos_LR], -1), torch.cat([-sin_LR, sin_LR], -1)


def _norm(config: ModernConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.width, eps=config.layer_norm_eps, bias=config.norm_bias)


def _turned(qkv_TD: Tensor, heads: int, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Queries and keys turned by their positions, values as they are; the second half of ``sin_TR`` has its sign."""
    x_THR = qkv_TD.view(qkv_TD.shape[0], 3 * heads, -1)
    both_THR = x_THR[:, : 2 * heads]
    turned_THR = both_THR * cos_TR[:, None]
    turned_THR += both_THR.roll(cos_TR.shape[1] // 2, -1) * sin_TR[:, None]
    return torch.cat([turned_THR.to(x_THR.dtype), x_THR[:, 2 * heads :]], 1).flatten(1)


class ModernBert(Encoder):
    """A ModernBERT encoder: packed wordpieces in, one vector for each of them out; it knows no segments."""

    words, segments = "a ModernBERT", 0

    def __init__(self, config: ModernConfig) -> None:
        super().__init__(config.vocabulary, config.width, config.positions, config.dropout, config.layer_norm_eps)
        self.config = config
        self.word = nn.Embedding(config.vocabulary, config.width)
        self.norm = _norm(config)
        self.layers = nn.ModuleList(_Layer(config, number) for number in range(config.layers))
        self.final_norm = _norm(config)

    def forward(self, batch: Packed, added_TD: Tensor | None = None) -> Tensor:
        """Hidden states T x D of a packed batch; ``added_TD`` is added to the embeddings of the wordpieces."""
        assert batch.longest <= self.config.positions, (batch.longest, self.config.positions)
        batch.to(self.word.weight.device)
        x_TD: Tensor = self.word(batch.tokens_T)
        if added_TD is not None:
            x_TD = x_TD + added_TD
        x_TD = F.dropout(even_rows(self.norm(x_TD)), self.config.dropout, self.training)
        far, near = (self._turns(batch.positions_T, theta) for theta in (self.config.far_theta, self.config.near_theta))
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            turns = far if layer.window is None else near
            again = self.gradient_checkpointing and torch.is_grad_enabled()
            x_TD = checkpoint(layer, x_TD, batch, turns, use_reentrant=False) if again else layer(x_TD, batch, turns)
        out: Tensor = self.final_norm(x_TD)
        return out[: batch.wordpieces]

    def _turns(self, position_T: Tensor, theta: float) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of each position's angles, T x R."""
        width = self.config.width // self.config.heads
        cos_LR, sin_LR = _rotations(self.config.positions, width, theta, position_T.device)
        return cos_LR[position_T], sin_LR[position_T]

    @property
    def word_vectors(self) -> nn.Parameter:
        return cast(nn.Parameter, self.word.weight)

    @property
    def shifts(self) -> list[nn.Parameter]:
        """The bias of the last LayerNorm, if it has one."""
        return [self.final_norm.bias] if self.config.norm_bias else []

    def masked_word_head(self) -> ModernHead:
        return ModernHead(self.config)

    def describe(self) -> dict[str, Any]:
        return self.config.to_json()

    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        state = {_their_name(name): tensor for name, tensor in self.state_dict().items()}
        no_tokens = dict.fromkeys(f"{role}_token_id" for role in ("bos", "eos", "cls", "sep"))
        return {"architectures": ["ModernBertModel"], **no_tokens, **self.describe()}, state

    @classmethod
    def described(cls, description: Mapping[str, Any], source: str) -> ModernBert:
        return ModernBert(ModernConfig.from_json(description, source))

    @classmethod
    def load(cls, folder: Path, dropout: float | None = None) -> tuple[ModernBert, ModernHead, bool]:
        """From a folder in Hugging Face's format; a head that it lacks starts from a near identity."""
        config = ModernConfig.from_json(read_config(folder), str(folder / CONFIG))
        if dropout is not None:
            config = replace(config, dropout=dropout)
        state = read_weights(folder)
        prefix = "model." if any(name.startswith("model.") for name in state) else ""
        words = state.get(prefix + _their_name("word.weight"))
        config = replace(config, tied=is_tied(state.get("decoder.weight"), words))
        encoder, head = cls(config), ModernHead(config)
        _fill(encoder, {name: prefix + _their_name(name) for name in encoder.state_dict()}, state, folder)
        of_decoder = {"bias": "decoder.bias", "decoder": "decoder.weight"}
        names = {name: of_decoder.get(name, f"head.{name}") for name in head.state_dict()}
        found = all(theirs in state for theirs in names.values())
        if found:
            _fill(head, names, state, folder)
        else:
            head.start_afresh(encoder.word_vectors)
        return encoder, head, found

    def set_dropout(self, dropout: float) -> None:
        super().set_dropout(dropout)
        self.config = replace(self.config, dropout=dropout)
        for layer in self.layers:
            assert isinstance(layer, _Layer)
            layer.dropout = dropout


class ModernHead(nn.Module):
    """ModernBERT's masked word head, over chosen positions only, with BERT's kinds of output matrix."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width, bias=config.head_bias)
        self.norm = _norm(config)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary)) if config.decoder_bias else None
        self.decoder = None if config.tied else nn.Parameter(torch.zeros(config.vocabulary, config.width))
        self.gelu = _GELU[config.head_activation]

    def forward(self, hidden_ND: Tensor, word_VD: Tensor) -> Tensor:
        """Logits N x V."""
        matrix_VD = word_VD if self.decoder is None else self.decoder
        return F.linear(self.norm(F.gelu(self.dense(hidden_ND), approximate=self.gelu)), matrix_VD, self.bias)

    def start_afresh(self, word_VD: Tensor) -> None:
        """From a near identity, over the word vectors."""
        with torch.no_grad():
            if self.decoder is not None:
                self.decoder.copy_(word_VD)
            self.dense.weight.copy_(torch.eye(len(self.dense.weight)))
            if self.dense.bias is not None:
                self.dense.bias.zero_()


_NAMES = {  # Hugging Face's, of each part of ours
    "word": "embeddings.tok_embeddings",
    "norm": "embeddings.norm",
    "qkv": "attn.Wqkv",
    "attention_output": "attn.Wo",
    "intermediate": "mlp.Wi",
    "output": "mlp.Wo",
}


def _their_name(ours: str) -> str:
    return ".".join(_NAMES.get(part, part) for part in ours.split("."))


def _fill(module: nn.Module, names: Mapping[str, str], state: Mapping[str, Tensor], folder: Path) -> None:
    for ours, old in module.state_dict().items():
        found = state.get(names[ours])
        if found is None:
            raise ValueError(f"{folder}: the parameter {names[ours]} is missing; it is no ModernBERT of this shape")
        if found.shape != old.shape:
            raise ValueError(
                f"{folder}: {names[ours]} has shape {list(found.shape)}, the configuration says {list(old.shape)}"
            )
    module.load_state_dict({ours: state[theirs].float() for ours, theirs in names.items()})
