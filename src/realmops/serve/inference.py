"""The Open Inference Protocol, version 2, over REST: what KServe, Triton and their clients speak.

One tensor ``question`` of strings comes in, as JSON or as the protocol's binary extension; ``answer``,
``probability``, ``abstained`` and ``record`` (the whole record as JSON) go out, one element for each question.
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
_OUTPUTS = {"answer": "BYTES", "probability": "FP64", "abstained": "BOOL", "record": "BYTES"}
router = APIRouter(prefix="/v2")


@router.get("", summary="The server (Open Inference)")
async def server() -> dict[str, Any]:
    """Its name, version and extensions."""
    return {"name": "realmops", "version": __version__, "extensions": ["binary_tensor_data"]}


@router.get("/health/live", summary="The process runs (Open Inference)")
async def live() -> dict[str, bool]:
    """Always so."""
    return {"live": True}


@router.get("/health/ready", summary="Questions are taken (Open Inference)", response_model=None)
async def ready(request: Request) -> Response:
    """Until the server is about to end."""
    ending = request.app.state.service.ending
    return JSONResponse({"ready": not ending}, 503 if ending else 200)


@router.get("/models/{name}", summary="The model's tensors (Open Inference)")
@router.get("/models/{name}/versions/{version}", include_in_schema=False)
async def metadata(request: Request, name: str, version: str = "") -> dict[str, Any]:
    """What goes in and comes out."""
    request.app.state.service.known(name)
    return {
        "name": name,
        "versions": [request.app.state.service.batcher.served.version],
        "platform": "realmops",
        "inputs": [{"name": "question", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [{"name": output, "datatype": kind, "shape": [-1]} for output, kind in _OUTPUTS.items()],
    }


@router.get("/models/{name}/ready", summary="The model takes questions (Open Inference)", response_model=None)
@router.get("/models/{name}/versions/{version}/ready", include_in_schema=False, response_model=None)
async def model_ready(request: Request, name: str, version: str = "") -> Response:
    """As of the server."""
    request.app.state.service.known(name)
    return await ready(request)


@router.post("/models/{name}/infer", summary="Answer questions (Open Inference)", response_model=None)
@router.post("/models/{name}/versions/{version}/infer", include_in_schema=False, response_model=None)
async def infer(request: Request, name: str, version: str = "") -> Response:
    """Of a version that is named nothing is taken over: the newest model answers, and says which it is."""
    request.app.state.service.known(name)
    try:
        call, questions = read_call(await request.body(), request.headers.get(_HEADER))
        wanted = _wanted(call)
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    name_of_call = call.get("id")
    if isinstance(name_of_call, str) and any("\ud800" <= one <= "\udfff" for one in name_of_call):  # it is sent back
        raise HTTPException(422, "id: it holds half a surrogate pair; write it whole")
    records = await request.app.state.service.answer([Query(question) for question in questions])
    columns: dict[str, list[Any]] = {
        **{name: [record[name] for record in records] for name in ("answer", "probability", "abstained")},
        "record": [json.dumps(record, ensure_ascii=False) for record in records],
    }
    reply = {
        "model_name": name,
        "model_version": records[0]["model"]["version"],
        "outputs": [
            {"name": output, "datatype": _OUTPUTS[output], "shape": [len(records)], "data": columns[output]}
            for output in wanted
        ],
    }
    return JSONResponse(reply | ({"id": name_of_call} if isinstance(name_of_call, str) else {}))


def read_call(body: bytes, header: str | None) -> tuple[dict[str, Any], list[str]]:
    """The call as JSON, and its questions; ``header`` says how many bytes are JSON where tensors follow as bytes.

    Raises ValueError for everything that is no such call.
    """
    if header is not None and not (header.isdecimal() and int(header[:20]) <= len(body)):
        raise ValueError(f"{_HEADER} is {header[:20]!r}, wanted a number of bytes up to the body's {len(body)}")
    size = len(body) if header is None else int(header)
    try:
        call = json.loads(body[:size])
    except (ValueError, RecursionError):
        raise ValueError(
            "the body is no JSON; tensors as bytes want the header Inference-Header-Content-Length"
        ) from None
    match call:
        case {"inputs": [{"name": "question", "datatype": "BYTES", **tensor}]}:
            pass
        case _:
            raise ValueError("inputs: wanted one tensor with the name 'question' and the datatype BYTES")
    parameters = tensor.get("parameters")
    if isinstance(parameters, dict) and "binary_data_size" in parameters:
        questions = _texts(body[size:], parameters["binary_data_size"])
    else:
        data: Any = tensor.get("data")
        if not isinstance(data, list) or not all(isinstance(one, str) for one in data):
            raise ValueError("inputs: 'data' of the tensor 'question' is no list of strings")
        questions = data
    shape: Any = tensor.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 2:
        raise ValueError("inputs: 'shape' of the tensor 'question' is no list of one or two numbers")
    if math.prod(shape) != len(questions):
        raise ValueError(f"inputs: the tensor 'question' has {len(questions)} elements, its shape {shape}")
    if not 1 <= len(questions) <= QUESTIONS_LIMIT:
        raise ValueError(f"inputs: {len(questions)} questions, 1 to {QUESTIONS_LIMIT} are taken")
    return call, questions


def _texts(data: bytes, size: object) -> list[str]:
    """Strings as the binary extension has them: four bytes of length, little endian, before each."""
    if size != len(data):
        raise ValueError(f"inputs: binary_data_size is {size}, and {len(data)} bytes follow the JSON")
    texts, at = [], 0
    while at < len(data):
        if len(data) - at < 4:
            raise ValueError("inputs: the bytes end inside of a length")
        (length,) = struct.unpack_from("<I", data, at)
        if length > len(data) - at - 4:
            raise ValueError(f"inputs: a string of {length} bytes is longer than what is there")
        try:
            texts.append(data[at + 4 : at + 4 + length].decode())
        except UnicodeDecodeError:
            raise ValueError("inputs: a string is no UTF-8") from None
        at += 4 + length
    return texts


def _wanted(call: dict[str, Any]) -> list[str]:
    """The outputs to give: those that are named, else all."""
    named = call.get("outputs")
    if named is None:
        return list(_OUTPUTS)
    names = [one.get("name") for one in named if isinstance(one, dict)] if isinstance(named, list) else []
    known = [output for output in _OUTPUTS if output in names]
    if not known or len(known) < len(names):
        raise ValueError(f"outputs: wanted some of {', '.join(_OUTPUTS)}, each once")
    return known
