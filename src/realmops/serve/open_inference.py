"""The Open Inference Protocol (KServe v2) over REST, for clients of KServe and Triton.

The input is one string tensor ``question``, as JSON or by the binary tensor extension. The outputs ``answer``,
``score``, ``probability``, ``abstained`` and ``record`` (the whole record as JSON) have one element per question.
Tensors have no null, so a model that is not calibrated has no output ``probability``.
"""

import json
import math
import struct
from typing import Any, Literal

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from realmops import __version__
from realmops.answering.opened_model import Query
from realmops.serve import QUESTIONS_LIMIT

_HEADER = "inference-header-content-length"
_PROBABILITY = "probability"
_OUTPUTS = {"answer": "BYTES", "score": "FP64", _PROBABILITY: "FP64", "abstained": "BOOL", "record": "BYTES"}
router = APIRouter(prefix="/v2")


@router.get("", summary="Server metadata (Open Inference)")
async def server() -> dict[str, Any]:
    return {"name": "realmops", "version": __version__, "extensions": ["binary_tensor_data"]}


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


@router.post("/models/{name}/infer", summary="Answer questions (Open Inference)", response_model=None)
@router.post("/models/{name}/versions/{version}/infer", include_in_schema=False, response_model=None)
async def infer(request: Request, name: str, version: str = "") -> Response:
    """Answer questions by the newest model, whose version is in the response; a requested version is ignored."""
    request.app.state.service.check_name(name)
    try:
        call, questions = read_call(await request.body(), request.headers.get(_HEADER))
    except ValidationError as error:
        first = error.errors()[0]
        raise HTTPException(422, f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}") from None
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    records = await request.app.state.service.answer([Query(question) for question in questions])
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


class Tensor(BaseModel):
    """The input of an inference request."""

    model_config = ConfigDict(strict=True)
    name: Literal["question"]
    datatype: Literal["BYTES"]
    shape: list[NonNegativeInt] = Field(min_length=1, max_length=2)
    data: list[str] | None = None  # None: binary
    parameters: dict[str, Any] = {}


class Output(BaseModel):
    """A requested output."""

    name: Literal["answer", "score", "probability", "abstained", "record"]


class Call(BaseModel):
    """Body of an inference request."""

    id: str | None = None
    inputs: list[Tensor] = Field(min_length=1, max_length=1)
    outputs: list[Output] = []


def read_call(body: bytes, header: str | None) -> tuple[Call, list[str]]:
    """Parse an inference request: JSON (``header`` bytes of the body, None for all), then binary tensors.

    Returns the request and its questions; ValueError, or ValidationError of the JSON, if it is not valid.
    """
    if header is not None and not (header.isdecimal() and int(header[:20]) <= len(body)):
        raise ValueError(f"{_HEADER}: {header[:20]!r}; expected a number of bytes up to the body's {len(body)}")
    size = len(body) if header is None else int(header)
    call = Call.model_validate_json(body[:size])
    [tensor] = call.inputs
    questions = tensor.data
    if questions is None:
        questions = _texts(body[size:], tensor.parameters.get("binary_data_size"))
    if math.prod(tensor.shape) != len(questions):
        raise ValueError(f"inputs: the tensor 'question' has {len(questions)} elements but the shape {tensor.shape}")
    if not 1 <= len(questions) <= QUESTIONS_LIMIT:
        raise ValueError(f"inputs: {len(questions)} questions; 1 to {QUESTIONS_LIMIT} are allowed")
    return call, questions


def _texts(data: bytes, size: object) -> list[str]:
    """Decode strings of the binary extension, each preceded by its length as four little-endian bytes."""
    if size != len(data):
        raise ValueError(f"inputs: binary_data_size is {size}, but {len(data)} bytes follow the JSON")
    texts, offset = [], 0
    while offset < len(data):
        if len(data) - offset < 4:
            raise ValueError("inputs: truncated binary data: it ends within a string's length")
        (length,) = struct.unpack_from("<I", data, offset)
        if length > len(data) - offset - 4:
            raise ValueError(f"inputs: truncated binary data: a string has {length} bytes, more than remain")
        try:
            texts.append(data[offset + 4 : offset + 4 + length].decode())
        except UnicodeDecodeError:
            raise ValueError("inputs: a string is not valid UTF-8") from None
        offset += 4 + length
    return texts


def _outputs_of(*, is_calibrated: bool) -> dict[str, str]:
    return {name: kind for name, kind in _OUTPUTS.items() if is_calibrated or name != _PROBABILITY}
