"""The Open Inference Protocol (KServe v2) over REST, for clients of KServe and Triton.

The input is one string tensor ``question``, as JSON or by the binary tensor extension. The outputs ``answer``,
``score``, ``probability``, ``abstained`` and ``record`` (the whole record as JSON) have one element per question.
Tensors have no null, so a model that is not calibrated has no output ``probability``.
"""

import json
import math
import struct
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from realmops import __version__
from realmops.answering.opened_model import Query
from realmops.serve.guard import QUESTIONS_LIMIT

_HEADER = "inference-header-content-length"
_PROBABILITY = "probability"
_OUTPUTS = {"answer": "BYTES", "score": "FP64", _PROBABILITY: "FP64", "abstained": "BOOL", "record": "BYTES"}
router = APIRouter(prefix="/v2")


@router.get("", summary="Server metadata (Open Inference)")
async def server() -> dict[str, Any]:
    return {"name": "realmops", "version": __version__, "extensions": ["binary_tensor_data"]}


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live", summary="Liveness probe (Open Inference)")
async def live() -> dict[str, bool]:
    return {"live": True}


@router.head("/health/ready", include_in_schema=False, response_model=None)
@router.get("/health/ready", summary="Readiness probe (Open Inference)", response_model=None)
async def ready(request: Request) -> Response:
    is_ready = not request.app.state.service.is_shutting_down
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


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
    return await ready(request)


@router.post("/models/{name}/infer", summary="Answer questions (Open Inference)", response_model=None)
@router.post("/models/{name}/versions/{version}/infer", include_in_schema=False, response_model=None)
async def infer(request: Request, name: str, version: str = "") -> Response:
    """Answer questions by the newest model, whose version is in the response; a requested version is ignored."""
    request.app.state.service.check_name(name)
    try:
        call, questions = read_call(await request.body(), request.headers.get(_HEADER))
        requested = _requested_outputs(call)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    request_id = call.get("id")
    if isinstance(request_id, str) and any("\ud800" <= char <= "\udfff" for char in request_id):  # part of the reply
        raise HTTPException(422, "id: lone surrogates cannot be encoded; use valid Unicode")
    records = await request.app.state.service.answer([Query(question) for question in questions])
    is_calibrated = all(record[_PROBABILITY] is not None for record in records)
    if _PROBABILITY in (requested or ()) and not is_calibrated:
        raise HTTPException(422, "outputs: the model is not calibrated and has no 'probability'; request 'score'")
    outputs = requested or list(_outputs_of(is_calibrated=is_calibrated))
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
    return JSONResponse(reply | ({"id": request_id} if isinstance(request_id, str) else {}))


def read_call(body: bytes, header: str | None) -> tuple[dict[str, Any], list[str]]:
    """Parse an inference request: JSON (``header`` bytes of the body, None for all), then binary tensors.

    Returns the request as JSON and its questions; ValueError if it is not valid.
    """
    if header is not None and not (header.isdecimal() and int(header[:20]) <= len(body)):
        raise ValueError(f"{_HEADER}: {header[:20]!r}; expected a number of bytes up to the body's {len(body)}")
    size = len(body) if header is None else int(header)
    try:
        call = json.loads(body[:size])
    except (ValueError, RecursionError):
        raise ValueError(
            "the body is not valid JSON; binary tensors require the header Inference-Header-Content-Length"
        ) from None
    match call:
        case {"inputs": [{"name": "question", "datatype": "BYTES", **tensor}]}:
            pass
        case _:
            raise ValueError("inputs: expected one tensor with the name 'question' and the datatype BYTES")
    parameters = tensor.get("parameters")
    if isinstance(parameters, dict) and "binary_data_size" in parameters:
        questions = _texts(body[size:], parameters["binary_data_size"])
    else:
        data: Any = tensor.get("data")
        if not isinstance(data, list) or not all(isinstance(text, str) for text in data):
            raise ValueError("inputs: 'data' of the tensor 'question' is not a list of strings")
        questions = data
    shape: Any = tensor.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 2:
        raise ValueError("inputs: 'shape' of the tensor 'question' is not a list of one or two numbers")
    if math.prod(shape) != len(questions):
        raise ValueError(f"inputs: the tensor 'question' has {len(questions)} elements but the shape {shape}")
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


def _requested_outputs(call: dict[str, Any]) -> list[str] | None:
    requested = call.get("outputs")
    if requested is None:
        return None
    names = (
        [output.get("name") for output in requested if isinstance(output, dict)] if isinstance(requested, list) else []
    )
    outputs = [output for output in _OUTPUTS if output in names]
    if not outputs or len(outputs) < len(names):
        raise ValueError(f"outputs: expected one or more of {', '.join(_OUTPUTS)}, each once")
    return outputs
