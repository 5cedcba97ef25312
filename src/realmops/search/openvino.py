"""Embed passages on a CPU in bf16 with OpenVINO, which runs an encoder of transformers as a graph.

Shape suffixes: B passages, L wordpieces of the longest, T all of a batch, M vectors of a passage, D width, P positions,
E head width.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Sequence
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

# Least work, in passages times outputs of the encoder's linear layers per wordpiece and ``OF_ANY_WIDTH``: with less,
# making a graph may take longer than it saves (benchmarks/LOG.md). A MiniLM has 20,736 outputs.
MIN_WORK = 1.2e7
OF_ANY_WIDTH = 500  # outputs that take torch as long as the calls of a batch, shared by its wordpieces
_LENGTH_MULTIPLE = 8  # of padded lengths: OpenVINO caches one plan per length
_EXAMPLE = 160  # wordpieces of the longer example for tracing; the graph is valid for all lengths
_TRACING = Lock()  # torch has one registry of traced classes per process

Sequences = Sequence[tuple[np.ndarray, np.ndarray]]
"""Wordpieces and segments of each sequence."""


class OpenVinoGraph:
    """A tower's encoder with its current weights, compiled by OpenVINO; pooling and projection stay in torch."""

    def __init__(self, tower: Embedder, vectors: int) -> None:
        self.tower, self.vectors = tower, vectors
        threads = torch.get_num_threads()
        settings = {
            "INFERENCE_PRECISION_HINT": "bf16" if supports_bf16() else "f32",
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


def compile_graph(tower: Tower, vectors: int, dtype: torch.dtype, passages: int) -> OpenVinoGraph | None:
    """Compile a tower's graph to embed this number of passages.

    None where torch is to embed: in fp32, for few passages, without OpenVINO, for encoders that do not pack sequences,
    and if a parameter is not finite.
    """
    if not isinstance(tower, Embedder) or tower.device.type != "cpu" or dtype == torch.float32:
        return None
    outputs = sum(layer.out_features for layer in tower.encoder.modules() if isinstance(layer, nn.Linear))
    if passages * (OF_ANY_WIDTH + outputs) < MIN_WORK or not tower.encoder.packs or not supports_bf16():
        return None
    if find_spec("openvino") is None or not all(bool(part.isfinite().all()) for part in tower.parameters()):
        return None
    return OpenVinoGraph(tower, vectors)


class _Hidden(nn.Module):
    """An encoder that packs, over padded sequences."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens_BL: Tensor, segments_BL: Tensor, lengths_B: Tensor) -> Tensor:
        """Return hidden states B x L x D."""
        hidden_TD: Tensor = self.encoder(PaddedBatch(tokens_BL, segments_BL, lengths_B))
        return hidden_TD.view(*tokens_BL.shape, -1)


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

    ``rotary`` of transformers is called with hidden states, positions 1 x T and arguments that select its angles.
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


def import_openvino() -> Any:
    """Import OpenVINO without its telemetry, which would report every import and every graph."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino
