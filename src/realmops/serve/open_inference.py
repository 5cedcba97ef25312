"""The Open Inference Protocol (KServe v2) over REST, for clients of KServe and Triton.

The input is one string tensor ``question``, as JSON. The outputs ``answer``, ``score``, ``probability``, ``abstained``
and ``record`` (the whole record as JSON) have one element per question. Tensors have no null, so a model that is not
calibrated has no output ``probability``.
"""

import json
import math
from typing import Any, Literal, Self

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, StrictInt, model_validator

from realmops import __version__
from realmops.answering.feedback import Text
from realmops.answering.opened_model import Query
from realmops.serve import QUESTIONS_LIMIT

_PROBABILITY = "probability"
_OUTPUTS = {"answer": "BYTES", "score": "FP64", _PROBABILITY: "FP64", "abstained": "BOOL", "record": "BYTES"}
router = APIRouter(prefix="/v2", strict_content_type=False)  # Triton's client sends none


@router.get("", summary="Server metadata (Open Inference)")
async def server() -> dict[str, Any]:
    return {"name": "realmops", "version": __version__, "extensions": []}


@router.get("/models/{name}", summary="Model metadata (Open Inference)")
@router.get("/models/{name}/versions/{version}", include_in_schema=False)
async def metadata(request: Request, name: str, version: str = "") -> dict[str, Any]:
    request.app.state.service.check_name(name)
    served = request.app.state.service.batcher.served
    outputs = _outputs_of(is_calibrated=served.confidence is not None and not served.confidence.holds_all)
    return {
        "name": name,
        "versions": [served.version],
        "platform": "realmops",
        "inputs": [{"name": "question", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [{"name": output, "datatype": kind, "shape": [-1]} for output, kind in outputs.items()],
    }


@router.get("/models/{name}/ready", summary="Model readiness (Open Inference)", response_model=None)
@router.get("/models/{name}/versions/{version}/ready", include_in_schema=False, response_model=None)
async def model_ready(request: Request, name: str, version: str = "") -> Response:
    request.app.state.service.check_name(name)
    is_ready = not request.app.state.service.is_shutting_down
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


class Tensor(BaseModel):
    """The questions of an inference request."""

    name: Literal["question"]
    datatype: Literal["BYTES"]
    shape: list[StrictInt] = Field(min_length=1, max_length=2)
    data: list[Text] = Field(min_length=1, max_length=QUESTIONS_LIMIT)

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if math.prod(self.shape) != len(self.data):
            raise ValueError(f"the tensor has {len(self.data)} elements but the shape {self.shape}")
        return self


class Output(BaseModel):
    """A requested output."""

    name: Literal["answer", "score", "probability", "abstained", "record"]


class Call(BaseModel):
    """Body of an inference request."""

    id: Text | None = None
    inputs: list[Tensor] = Field(min_length=1, max_length=1)
    outputs: list[Output] = []


@router.post("/models/{name}/infer", summary="Answer questions (Open Inference)", response_model=None)
@router.post("/models/{name}/versions/{version}/infer", include_in_schema=False, response_model=None)
async def infer(request: Request, name: str, call: Call, version: str = "") -> Response:
    """Answer questions by the newest model, whose version is in the response; a requested version is ignored."""
    request.app.state.service.check_name(name)
    records = await request.app.state.service.answer([Query(question) for question in call.inputs[0].data])
    is_calibrated = all(record[_PROBABILITY] is not None for record in records)
    requested: list[str] = [output.name for output in call.outputs]
    outputs = requested or [*_outputs_of(is_calibrated=is_calibrated)]
    if _PROBABILITY in outputs and not is_calibrated:
        raise HTTPException(422, "outputs: the model is not calibrated and has no 'probability'; request 'score'")
    columns: dict[str, list[Any]] = {
        name: [record[name] for record in records] for name in _OUTPUTS if name != "record"
    }
    columns["record"] = [json.dumps(record, ensure_ascii=False) for record in records]
    reply = {
        "model_name": name,
        "model_version": records[0]["model"]["version"],
        "outputs": [
            {"name": output, "datatype": _OUTPUTS[output], "shape": [len(records)], "data": columns[output]}
            for output in outputs
        ],
    }
    return JSONResponse(reply | ({} if call.id is None else {"id": call.id}))


def _outputs_of(*, is_calibrated: bool) -> dict[str, str]:
    return {name: kind for name, kind in _OUTPUTS.items() if is_calibrated or name != _PROBABILITY}
