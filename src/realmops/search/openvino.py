"""Embed passages on a CPU with OpenVINO, which runs an encoder of transformers as a graph.

In bf16 the graph is the encoder's own. In int8, weights and activations are quantised with fixed scales, which nncf
calibrates on a sample of the passages (Xiao et al. 2023, "SmoothQuant").

Shape suffixes: B passages, L wordpieces of the longest, T all of a batch, M vectors of a passage, D width, P positions,
E head width.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realmops.devices import disable_autocast, eval_mode, supports_bf16
from realmops.model.encoder import Encoder
from realmops.model.packed import PaddedBatch
from realmops.model.retriever import Embedder, Tower

_LOG = logging.getLogger(__name__)
# Least work, in passages times outputs of the encoder's linear layers per wordpiece and ``OF_ANY_WIDTH``: with less,
# making a graph may take longer than it saves (benchmarks/LOG.md). A MiniLM has 20,736 outputs.
MIN_WORK = {torch.bfloat16: 1.2e7, torch.int8: 2e8}
OF_ANY_WIDTH = 500  # outputs that take torch as long as the calls of a batch, shared by its wordpieces
CALIBRATION = 100  # passages of the sample
_SMOOTHING = 0.95  # how far large numbers move from inputs into weights
_LENGTH_MULTIPLE = 8  # of padded lengths: OpenVINO caches one plan per length
_EXAMPLE = 160  # wordpieces of the longer example for tracing; the graph is valid for all lengths
_TRACING = Lock()  # torch has one registry of traced classes per process

Sequences = Sequence[tuple[np.ndarray, np.ndarray]]
"""Wordpieces and segments of each sequence."""


class OpenVinoGraph:
    """A tower's encoder with its current weights, compiled by OpenVINO.

    Args:
        tower: encoder with pooling and projection; these two stay in torch.
        vectors: vectors of a passage, M.
        calibration: sequences that calibrate int8; without any, the graph is not quantised.
    """

    def __init__(self, tower: Embedder, vectors: int, calibration: Sequences = ()) -> None:
        self.tower, self.vectors = tower, vectors
        threads = torch.get_num_threads()
        settings = {
            # Encoders without packing may compute token distances, which bf16 would round.
            "INFERENCE_PRECISION_HINT": "bf16" if supports_bf16() and tower.encoder.packs else "f32",
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": threads,  # one thread each, so that results do not depend on their number
            "ENABLE_CPU_PINNING": False,  # trainer and index builder would be pinned to the same cores
        }
        openvino = import_openvino()
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
                encoder = _Hidden(_in_fp32(tower.bert))
                encoder(*inputs)  # fills the tables of positions, so that tracing finds constants
                model = openvino.convert_model(encoder, example_input=inputs)
                if calibration:
                    model = _quantise(model, [self._inputs([sequence]) for sequence in calibration])
                self._compiled = openvino.Core().compile_model(model, "CPU", settings)
            finally:
                torch._C._jit_clear_class_registry()  # otherwise each trace leaks a copy of all weights

    def __call__(self, sequences: Sequences) -> Tensor:
        """Return embeddings B x M E of wordpieces and segments of each sequence; thread-safe."""
        inputs = self._inputs(sequences)
        hidden_BLD = torch.from_numpy(self._compiled.infer_new_request(inputs)[0])
        weight_BML = torch.zeros(len(sequences), self.vectors, hidden_BLD.shape[1])
        for row, length in enumerate(inputs[2]):
            weight_BML[row, :, :length] = self.tower.pooling_weights(int(length), self.vectors)
        with disable_autocast(self.tower.device):
            pooled_BMD = weight_BML @ hidden_BLD
        embedding_BX: Tensor = self.tower.project(pooled_BMD.flatten(0, 1)).view(len(sequences), -1)
        return embedding_BX

    def _inputs(self, sequences: Sequences) -> tuple[np.ndarray, ...]:
        """Return wordpieces and segments, B x L, and lengths."""
        lengths_B = np.array([len(tokens) for tokens, _ in sequences])
        longest = int(lengths_B.max())
        longest = min(longest + -longest % _LENGTH_MULTIPLE, self.tower.bert.positions)
        input_BL = np.zeros((2, len(sequences), longest), dtype=np.int64)
        for row, (tokens, segments) in enumerate(sequences):
            input_BL[0, row, : len(tokens)] = tokens
            if self.tower.segments != "one":
                input_BL[1, row, : len(tokens)] = segments
        return *input_BL, lengths_B


def compile_graph(
    tower: Tower, vectors: int, dtype: torch.dtype, passages: int, sample: Callable[[int], Sequences]
) -> OpenVinoGraph | None:
    """Compile a tower's graph in bf16, or in int8 if that is ``dtype`` and the passages are many.

    Args:
        tower: the tower.
        vectors: vectors of a passage.
        dtype: of ``run.precision``.
        passages: number of passages to embed.
        sample: returns the given number of sequences, for int8.

    Returns:
        The graph; None where torch is to embed: in fp32, for few passages, without OpenVINO, for encoders that it does
        not support, and if a parameter is not finite.
    """
    if not isinstance(tower, Embedder) or tower.device.type != "cpu" or dtype == torch.float32:
        return None
    outputs = sum(layer.out_features for layer in tower.encoder.modules() if isinstance(layer, nn.Linear))
    work = passages * (OF_ANY_WIDTH + outputs)
    is_int8 = dtype == torch.int8 and work >= MIN_WORK[dtype]
    if not is_int8 and (work < MIN_WORK[torch.bfloat16] or not tower.encoder.packs or not supports_bf16()):
        return None
    if not has_openvino() or not all(bool(part.isfinite().all()) for part in tower.parameters()):
        return None
    try:
        return OpenVinoGraph(tower, vectors, sample(CALIBRATION) if is_int8 else ())
    except Exception:  # OpenVINO raises many types for encoders with their own attention
        if tower.encoder.packs:
            raise
        _log_unsupported(tower.encoder.description)
        return None


@cache
def _log_unsupported(encoder: str) -> None:
    """Log once per encoder that it has no graph: an index builder compiles one for each index."""
    _LOG.warning("run.precision 'int8' is not supported by %s; embedding passages with 'auto' instead", encoder)


def _quantise(model: Any, inputs: Sequence[tuple[np.ndarray, ...]]) -> Any:
    """Return a graph in int8 whose scales suit the given inputs."""
    # nncf shows progress bars.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        import nncf

        logging.getLogger("nncf").setLevel(logging.ERROR)
        smooth = nncf.AdvancedSmoothQuantParameters(matmul=_SMOOTHING)
        return nncf.quantize(
            model,
            nncf.Dataset(inputs),
            subset_size=len(inputs),
            model_type=nncf.ModelType.TRANSFORMER,
            advanced_parameters=nncf.AdvancedQuantizationParameters(smooth_quant_alphas=smooth),
        )


class _Hidden(nn.Module):
    """An encoder over padded sequences."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens_BL: Tensor, segments_BL: Tensor, lengths_B: Tensor) -> Tensor:
        """Return hidden states B x L x D."""
        if self.encoder.packs:
            hidden_TD: Tensor = self.encoder(PaddedBatch(tokens_BL, segments_BL, lengths_B))
            return hidden_TD.view(*tokens_BL.shape, -1)
        inputs = {"attention_mask": (torch.arange(tokens_BL.shape[1]) < lengths_B[:, None]).long()}
        inputs |= {"token_type_ids": segments_BL} if self.encoder.segments > 1 else {}
        hidden_BLD: Tensor = self.encoder.model(tokens_BL, **inputs).last_hidden_state
        return hidden_BLD


def _in_fp32(encoder: Encoder) -> Encoder:
    """Return a copy in fp32, frozen layers too, with tables instead of modules that compute the angles of positions."""
    encoder = copy.deepcopy(encoder).float()
    for parent in list(encoder.modules()):
        for name, part in parent.named_children():
            if type(part).__name__.endswith("RotaryEmbedding"):
                setattr(parent, name, _RotaryTable(part, encoder.positions))
    return encoder


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


def has_openvino() -> bool:
    """Return whether OpenVINO is installed."""
    return find_spec("openvino") is not None


def import_openvino() -> Any:
    """Import OpenVINO without its telemetry, which would report every import and every graph."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino
