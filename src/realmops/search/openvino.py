"""Embed passages in int8 on a CPU with OpenVINO, which runs an encoder as a graph.

Weights and activations are quantised to int8, activations dynamically, with one scale per group of 128 numbers in a
row: a passage's embedding does not depend on its batch. A few columns of an encoder's hidden states are far larger than
the rest, whatever the input. They are scaled down before quantisation, and their weights up (Xiao et al. 2023,
"SmoothQuant", alpha 1/2); random wordpieces show which columns these are, so that no calibration text is required.

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

from realmops.devices import disable_autocast, eval_mode, replace_linears, replace_modules, supports_bf16
from realmops.model.encoder import Encoder
from realmops.model.packed import PackedBatch, PaddedBatch
from realmops.model.retriever import Embedder, Tower

_LOG = logging.getLogger(__name__)
MIN_PASSAGES = 512  # with fewer, compiling the graph takes longer than it saves
_GROUP = 128  # numbers of a row that share a scale
_CALIBRATION = 16, 128  # sequences, and wordpieces of each, for the column maxima
_MIN_SCALE = 1e-5  # lower bound of column maxima and scales: smaller columns need no resolution
_LENGTH_MULTIPLE = 8  # of padded lengths: OpenVINO caches one plan per length
_EXAMPLE = 160  # wordpieces of the longer example for tracing; the graph is valid for all lengths
_TRACING = Lock()  # torch has one registry of traced classes per process


class OpenVinoGraph:
    """Encoder and pooling of a tower with its current weights, compiled by OpenVINO."""

    def __init__(self, tower: Embedder, vectors: int) -> None:
        self.tower, self.vectors = tower, vectors
        threads = torch.get_num_threads()
        settings = {
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": _GROUP,
            # Encoders without packing may compute token distances, which bf16 would round.
            "INFERENCE_PRECISION_HINT": "bf16" if supports_bf16() and tower.encoder.packs else "f32",
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": threads,  # one thread each, so that results do not depend on their number
            "ENABLE_CPU_PINNING": False,  # trainer and index builder would be pinned to the same cores
        }
        openvino = _openvino()
        lengths = [min(_EXAMPLE, tower.bert.positions), 2]
        example = self._inputs([(np.zeros(length, np.int64),) * 2 for length in lengths])
        with (
            eval_mode(tower),
            torch.no_grad(),
            disable_autocast(tower.device),  # tracing would fix a batch-dependent size that autocast adds
            _TRACING,
            warnings.catch_warnings(action="ignore"),  # the tracer warns of constant sizes; none matters here
        ):
            try:
                inputs = tuple(map(torch.from_numpy, example))
                model = openvino.convert_model(_Pooled(_in_int8(tower.bert)), example_input=inputs)
                self._compiled = openvino.Core().compile_model(model, "CPU", settings)
            finally:
                torch._C._jit_clear_class_registry()  # otherwise each trace leaks a copy of all weights

    def __call__(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> Tensor:
        """Return embeddings B x M E of wordpieces and segments of each sequence; thread-safe."""
        pooled_BMD = torch.from_numpy(self._compiled.infer_new_request(self._inputs(sequences))[0])
        embedding_BX: Tensor = self.tower.project(pooled_BMD.flatten(0, 1)).view(len(sequences), -1)
        return embedding_BX

    def _inputs(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
        lengths_B = np.array([len(tokens) for tokens, _ in sequences])
        longest = int(lengths_B.max())
        longest = min(longest + -longest % _LENGTH_MULTIPLE, self.tower.bert.positions)
        input_BL = np.zeros((2, len(sequences), longest), dtype=np.int64)
        weight_BML = np.zeros((len(sequences), self.vectors, longest), dtype=np.float32)
        for row, (tokens, segments) in enumerate(sequences):
            input_BL[0, row, : len(tokens)] = tokens
            if self.tower.segments != "one":
                input_BL[1, row, : len(tokens)] = segments
            weight_BML[row, :, : len(tokens)] = self.tower.pooling_weights(len(tokens), self.vectors)
        return *input_BL, lengths_B, weight_BML


def compile_graph(tower: Tower, vectors: int) -> OpenVinoGraph | None:
    """Compile a tower's graph; None where OpenVINO does not support the encoder, or a parameter is not finite."""
    if not isinstance(tower, Embedder) or tower.device.type != "cpu":
        return None
    if not all(bool(part.isfinite().all()) for part in tower.parameters()):
        return None
    try:
        return OpenVinoGraph(tower, vectors)
    except Exception:  # OpenVINO raises many types for encoders with their own attention
        if tower.encoder.packs:
            raise
        _log_unsupported(tower.encoder.description)
        return None


@cache
def _log_unsupported(encoder: str) -> None:
    """Log once per encoder that it has no graph: an index builder compiles one for each index."""
    _LOG.warning("run.precision 'int8' is not supported by %s; embedding passages with 'auto' instead", encoder)


class _Pooled(nn.Module):
    """An encoder with pooling, over padded sequences."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens_BL: Tensor, segments_BL: Tensor, lengths_B: Tensor, weight_BML: Tensor) -> Tensor:
        """Return pooled vectors B x M x D."""
        if self.encoder.packs:
            hidden_TD: Tensor = self.encoder(PaddedBatch(tokens_BL, segments_BL, lengths_B))
            return weight_BML @ hidden_TD.view(*tokens_BL.shape, -1)
        inputs = {"attention_mask": (torch.arange(tokens_BL.shape[1]) < lengths_B[:, None]).long()}
        inputs |= {"token_type_ids": segments_BL} if self.encoder.segments > 1 else {}
        hidden_BLD: Tensor = self.encoder.model(tokens_BL, **inputs).last_hidden_state
        return weight_BML @ hidden_BLD


def _in_int8(encoder: Encoder) -> Encoder:
    """Return a copy with int8 weights in linear layers, in the form that OpenVINO recognises in a graph."""
    column_maxima: dict[nn.Linear, Tensor] = {}
    sequences, longest = _CALIBRATION
    rng = np.random.default_rng(0)
    calibration = rng.integers(0, encoder.vocabulary, (sequences, min(longest, encoder.positions)))
    encoder_with_tables = _with_rotary_tables(encoder)
    replace_linears(encoder_with_tables, lambda layer: _ObservedLinear(layer, column_maxima))(
        PackedBatch(list(calibration))
    )
    return replace_linears(
        encoder_with_tables, lambda layer: _Int8Linear(layer, column_maxima[layer]) if layer in column_maxima else layer
    )


def _with_rotary_tables(encoder: Encoder) -> Encoder:
    """Return a copy with tables instead of modules that compute the angles of rotary positions."""

    def table(part: nn.Module) -> nn.Module | None:
        return _RotaryTable(part, encoder.positions) if type(part).__name__.endswith("RotaryEmbedding") else None

    return replace_modules(encoder, table)


class _RotaryTable(nn.Module):
    """Cosines and sines of rotary positions, computed in fp32 on the first call: bf16 would round the angles.

    Args:
        rotary: module of transformers, called with hidden states, positions 1 x T and arguments that select its angles.
        positions: number of rows of each table.
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
    """A linear layer in fp32 that records the largest absolute input of each column."""

    def __init__(self, layer: nn.Linear, column_maxima: dict[nn.Linear, Tensor]) -> None:
        super().__init__()
        self.layer, self.column_maxima = layer, column_maxima

    def forward(self, x_TD: Tensor) -> Tensor:
        max_D = x_TD.flatten(0, -2).abs().amax(0)
        self.column_maxima[self.layer] = torch.maximum(self.column_maxima.get(self.layer, max_D), max_D)
        return F.linear(x_TD, *_in_fp32(self.layer))


class _Int8Linear(nn.Module):
    """A linear layer with quantised weights; ``max_D`` is the largest absolute input of each column."""

    def __init__(self, layer: nn.Linear, max_D: Tensor) -> None:
        super().__init__()
        weight_ND, self.bias = _in_fp32(layer)
        smooth_D = (weight_ND.abs().amax(0).clamp(min=_MIN_SCALE) / max_D.clamp(min=_MIN_SCALE)).sqrt()
        self.smooth_D = smooth_D / smooth_D.mean()
        size = _GROUP if weight_ND.shape[1] % _GROUP == 0 else weight_ND.shape[1]
        weight_NGD = (weight_ND / self.smooth_D).view(len(weight_ND), -1, size)
        self.scale_NG1 = weight_NGD.abs().amax(2, keepdim=True).clamp(min=_MIN_SCALE) / 127
        self.int8_NGD = (weight_NGD / self.scale_NG1).round().to(torch.int8)
        self.shape = weight_ND.shape

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_ND = (self.int8_NGD.float() * self.scale_NG1).view(self.shape)
        return F.linear(x_TD * self.smooth_D, weight_ND, self.bias)


def _in_fp32(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias in fp32; a frozen layer holds them in bf16."""
    bias: Tensor | None = layer.bias
    return layer.weight.detach().float(), None if bias is None else bias.detach().float()


def _openvino() -> Any:
    """Import OpenVINO without its telemetry, which would report every import and every graph."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino
