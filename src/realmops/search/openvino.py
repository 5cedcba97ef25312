"""Passages to embeddings in int8 on a CPU, by OpenVINO, which runs an encoder as a graph.

Weights are held in int8, and what they are multiplied with is rounded as it comes, both with a scale for each 128
numbers in a row: no passage depends on those beside it. A few columns of an encoder's hidden states are far larger than
the rest, whatever it reads. They are made smaller before they are rounded, and their weights larger (Xiao et al. 2023,
"SmoothQuant", alpha 1/2); which ones is seen on wordpieces in any order, so that no text has to be found for it.

Shape suffixes: B passages, L wordpieces of the longest, T all of a batch, M vectors of a passage, D width, N outputs,
G groups of a row.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realmops.devices import evaluating, full_precision, multiplies_bf16, with_linears, with_replaced
from realmops.model.encoder import Encoder
from realmops.model.packed import Packed, Padded
from realmops.model.retriever import Embedder, Tower

_LOG = logging.getLogger(__name__)
MANY = 512  # passages, from which on making a graph takes less time than it saves
_GROUP = 128  # numbers of a row with a scale of their own
_SEEN = 16, 128  # sequences, and wordpieces of each, that show which columns are large
_LEAST = 1e-5  # of a column: what is smaller is not worth a place among 127
_LENGTHS = 8  # sequences are padded to a multiple of it: OpenVINO keeps what it plans for each length
_EXAMPLE = 160  # wordpieces of the longer example for tracing; the graph is right for all lengths
_TRACING = Lock()  # torch's registry of traced classes is one for the process


class Graph:
    """The encoder and the pooling of a tower, with the weights that it has now."""

    def __init__(self, tower: Embedder, vectors: int) -> None:
        self.tower, self.vectors = tower, vectors
        threads = torch.get_num_threads()
        settings = {
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": _GROUP,
            # Bf16 would round the distances that families compute which do not pack.
            "INFERENCE_PRECISION_HINT": "bf16" if multiplies_bf16() and tower.encoder.packs else "f32",
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": threads,  # each computes on one thread, so that their number changes no digit
            "ENABLE_CPU_PINNING": False,  # trainer and index builder would be bound to the same cores
        }
        openvino = _openvino()
        lengths = [min(_EXAMPLE, tower.bert.positions), 2]
        example = self._inputs([(np.zeros(length, np.int64),) * 2 for length in lengths])
        with (
            evaluating(tower),
            torch.no_grad(),
            full_precision(tower.device),  # autocast adds rows by a number that tracing would keep
            _TRACING,
            warnings.catch_warnings(action="ignore"),  # that sizes become part of the graph: none of those matters
        ):
            try:
                inputs = tuple(map(torch.from_numpy, example))
                model = openvino.convert_model(_Pooled(_in_int8(tower.bert)), example_input=inputs)
                self._compiled = openvino.Core().compile_model(model, "CPU", settings)
            finally:
                torch._C._jit_clear_class_registry()  # else a copy of all weights stays with each tracing, for ever

    def __call__(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> Tensor:
        """Embeddings B x M E of wordpieces and segments of each; several threads may call at once."""
        pooled_BMD = torch.from_numpy(self._compiled.infer_new_request(self._inputs(sequences))[0])
        embedding_BX: Tensor = self.tower.embedded(pooled_BMD.flatten(0, 1)).view(len(sequences), -1)
        return embedding_BX

    def _inputs(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
        lengths_B = np.array([len(tokens) for tokens, _ in sequences])
        longest = int(lengths_B.max())
        longest = min(longest + -longest % _LENGTHS, self.tower.bert.positions)
        both_BL = np.zeros((2, len(sequences), longest), dtype=np.int64)
        share_BML = np.zeros((len(sequences), self.vectors, longest), dtype=np.float32)
        for row, (tokens, segments) in enumerate(sequences):
            both_BL[0, row, : len(tokens)] = tokens
            if self.tower.segments != "one":
                both_BL[1, row, : len(tokens)] = segments
            share_BML[row, :, : len(tokens)] = self.tower.shares(len(tokens), self.vectors)
        return *both_BL, lengths_B, share_BML


def graph_of(tower: Tower, vectors: int) -> Graph | None:
    """Return a graph of a tower; None where OpenVINO compiles none, and where a number is not finite."""
    if not isinstance(tower, Embedder) or tower.device.type != "cpu":
        return None
    if not all(bool(part.isfinite().all()) for part in tower.parameters()):
        return None
    try:
        return Graph(tower, vectors)
    except Exception:  # whatever the library stumbles over in a family that computes attention itself
        if tower.encoder.packs:
            raise
        _log_unsupported(tower.encoder.words)
        return None


@cache
def _log_unsupported(encoder: str) -> None:
    """Log once that an encoder has no graph: an index builder asks for one with each index."""
    _LOG.warning("run.precision is 'int8', which %s does not support; passages are embedded as with 'auto'", encoder)


class _Pooled(nn.Module):
    """An encoder and the pooling after it, of padded sequences."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens_BL: Tensor, segments_BL: Tensor, lengths_B: Tensor, share_BML: Tensor) -> Tensor:
        """Return vectors B x M x D."""
        if self.encoder.packs:
            hidden_TD: Tensor = self.encoder(Padded(tokens_BL, segments_BL, lengths_B))
            return share_BML @ hidden_TD.view(*tokens_BL.shape, -1)
        inputs = {"attention_mask": (torch.arange(tokens_BL.shape[1]) < lengths_B[:, None]).long()}
        inputs |= {"token_type_ids": segments_BL} if self.encoder.segments > 1 else {}
        hidden_BLD: Tensor = self.encoder.model(tokens_BL, **inputs).last_hidden_state
        return share_BML @ hidden_BLD


def _in_int8(encoder: Encoder) -> Encoder:
    """Return a copy whose linear layers have weights in int8, in the form that OpenVINO recognises in a graph."""
    most: dict[nn.Linear, Tensor] = {}
    sequences, longest = _SEEN
    rng = np.random.default_rng(0)
    seen = rng.integers(0, encoder.vocabulary, (sequences, min(longest, encoder.positions)))
    tabled = _with_rotary_tables(encoder)
    with_linears(tabled, lambda layer: _ObservedLinear(layer, most))(Packed(list(seen)))
    return with_linears(tabled, lambda layer: _Int8Linear(layer, most[layer]) if layer in most else layer)


def _with_rotary_tables(encoder: Encoder) -> Encoder:
    """Return a copy with a table in the place of each module that computes the angles of rotary positions."""

    def table(part: nn.Module) -> nn.Module | None:
        return _RotaryTable(part, encoder.positions) if type(part).__name__.endswith("RotaryEmbedding") else None

    return with_replaced(encoder, table)


class _RotaryTable(nn.Module):
    """Cosines and sines of rotary positions, computed in fp32 when first called: a graph in bf16 rounds the angles.

    Args:
        rotary: transformers' module, called with hidden states, positions 1 x T and what chooses among its angles.
        positions: the number of rows of each table.
    """

    def __init__(self, rotary: nn.Module, positions: int) -> None:
        super().__init__()
        self.rotary, self.positions = rotary, positions
        self.tables: dict[str, tuple[Tensor, ...]] = {}

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return cosines and sines, each 1 x T x E."""
        key = repr((args, kwargs))
        if key not in self.tables:
            all_1P = torch.arange(self.positions)[None]
            self.tables[key] = tuple(table_1PE[0] for table_1PE in self.rotary(x, all_1P, *args, **kwargs))
        return tuple(F.embedding(position_ids, table_PE) for table_PE in self.tables[key])


class _ObservedLinear(nn.Module):
    """A linear layer in fp32 that enters into ``most`` the largest input of each of its columns."""

    def __init__(self, layer: nn.Linear, most: dict[nn.Linear, Tensor]) -> None:
        super().__init__()
        self.layer, self.most = layer, most

    def forward(self, x_TD: Tensor) -> Tensor:
        most_D = x_TD.flatten(0, -2).abs().amax(0)
        self.most[self.layer] = torch.maximum(self.most.get(self.layer, most_D), most_D)
        return F.linear(x_TD, *_in_fp32(self.layer))


class _Int8Linear(nn.Module):
    """A product by whole numbers and their scales; ``most_D`` is the largest input of each column."""

    def __init__(self, layer: nn.Linear, most_D: Tensor) -> None:
        super().__init__()
        weight_ND, self.bias = _in_fp32(layer)
        smooth_D = (weight_ND.abs().amax(0).clamp(min=_LEAST) / most_D.clamp(min=_LEAST)).sqrt()
        self.smooth_D = smooth_D / smooth_D.mean()
        size = _GROUP if weight_ND.shape[1] % _GROUP == 0 else weight_ND.shape[1]
        weight_NGD = (weight_ND / self.smooth_D).view(len(weight_ND), -1, size)
        self.scale_NG1 = weight_NGD.abs().amax(2, keepdim=True).clamp(min=_LEAST) / 127
        self.whole_NGD = (weight_NGD / self.scale_NG1).round().to(torch.int8)
        self.shape = weight_ND.shape

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_ND = (self.whole_NGD.float() * self.scale_NG1).view(self.shape)
        return F.linear(x_TD * self.smooth_D, weight_ND, self.bias)


def _in_fp32(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias; a frozen layer has them in bf16."""
    bias: Tensor | None = layer.bias
    return layer.weight.detach().float(), None if bias is None else bias.detach().float()


def _openvino() -> Any:
    """The package without its telemetry, which would tell its makers of every import and of every graph."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino
