"""A sentence encoder as others run it: by ONNX Runtime, and by OpenVINO, inside sentence-transformers' encode().

sentence-transformers has both as backends by packages that do not install beside its newest version. So the graph is
exported here, with torch's exporter and OpenVINO's, and put in the place of the model; all else of encode() stays. ONNX
Runtime's graph gets its own optimiser's fused attention, LayerNorm and GELU.

Shape suffixes: B texts, L wordpieces of the longest, D width.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

INPUTS = ("input_ids", "attention_mask")

Run = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Ids and mask B x L to hidden states B x L x D."""


class _Hidden(torch.nn.Module):
    """A model of transformers with tensors in the place of its arguments and its answer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class _Runner(torch.nn.Module):
    """The other way round: what runs a graph, in the place of a model of transformers."""

    def __init__(self, run: Run, config: Any) -> None:
        super().__init__()
        self.run, self.config, self.dtype = run, config, torch.float32

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=torch.from_numpy(self.run(input_ids.numpy(), attention_mask.numpy())))


def _put(library: Any, run: Run) -> Any:
    library[0].model = _Runner(run, library[0].model.config)
    return library


def _example(library: Any) -> tuple[torch.Tensor, ...]:
    features = library.tokenizer(["One.", "Another text, which is longer."], padding=True, return_tensors="pt")
    return tuple(features[name] for name in INPUTS)


@contextlib.contextmanager
def _silence() -> Any:
    """Neither the exporters' progress nor their remarks on their own calls."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def by_onnx_runtime(make: Callable[..., Any], folder: Path) -> dict[str, tuple[str, Any]]:
    """``make`` gives a SentenceTransformer, by keywords of transformers; by precision, a name with version and one."""
    import onnxruntime
    from onnxruntime.transformers import optimizer

    library = make(attn_implementation="eager")  # whose attention the optimiser knows
    config = library[0].model.config
    files = {name: folder / f"{name}.onnx" for name in ("exported", "fp32")}
    axes = {name: {0: "texts", 1: "wordpieces"} for name in (*INPUTS, "hidden")}
    with _silence():
        torch.onnx.export(
            _Hidden(library[0].model).eval(), _example(library), str(files["exported"]), input_names=list(INPUTS),
            output_names=["hidden"], dynamic_axes=axes, dynamo=False, opset_version=17,
        )  # fmt: skip
        heads, width = config.num_attention_heads, config.hidden_size
        fused = optimizer.optimize_model(str(files["exported"]), "bert", heads, width, opt_level=0)
        fused.save_model_to_file(str(files["fp32"]))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(files["fp32"]), options, providers=["CPUExecutionProvider"])

    def run(ids_BL: np.ndarray, mask_BL: np.ndarray) -> np.ndarray:
        hidden_BLD: np.ndarray = session.run(None, dict(zip(INPUTS, (ids_BL, mask_BL), strict=True)))[0]
        return hidden_BLD

    return {"fp32": (f"ONNX Runtime {onnxruntime.__version__}, fp32", _put(make(), run))}


def by_openvino(make: Callable[..., Any]) -> dict[str, tuple[str, Any]]:
    """The same by OpenVINO; ``bf16`` is what it takes by itself where a processor has it."""
    import openvino

    library = make()

    with _silence():
        example = dict(zip(INPUTS, _example(library), strict=True))
        graph = openvino.convert_model(_Hidden(library[0].model).eval(), example_input=example)
    core, version = openvino.Core(), metadata.version("openvino")
    settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    found: dict[str, tuple[str, Any]] = {}
    for hint in ("f32", None):
        compiled = core.compile_model(graph, "CPU", settings | ({"INFERENCE_PRECISION_HINT": hint} if hint else {}))
        chosen = compiled.get_property("INFERENCE_PRECISION_HINT")
        precision = "bf16" if chosen == openvino.Type.bf16 else "fp32"
        request = compiled.create_infer_request()

        def run(ids_BL: np.ndarray, mask_BL: np.ndarray, request: Any = request) -> np.ndarray:
            hidden_BLD: np.ndarray = request.infer([ids_BL, mask_BL])[0].copy()
            return hidden_BLD

        how = {"bf16": "bf16, its default"}.get(precision, precision)
        found[precision] = f"OpenVINO {version}, {how}", run
    return {precision: (name, _put(make(), run)) for precision, (name, run) in found.items()}
