"""The signature of the registered model: a question in, the record of its answer out."""

from typing import Any

# The record of ``answering.record`` in MLflow's types; "?" marks an optional value, a list is an array of objects.
_PLACE = dict.fromkeys(("uri", "document_id", "passage_id", "title"), "string")
_PLACE |= {"start": "long?", "end": "long?", "page": "long?"}
_WEIGHT = {"p_z": "double", "p_z_given_y": "double?"}
_RECORD = {
    "question": "string",
    "answer": "string",
    "score": "double",
    "probability": "double?",
    "calibration": "string?",
    "threshold": "double?",
    "abstained": "boolean",
    "citations": [_PLACE | _WEIGHT | {"quote": "string"}],
    "quote": _PLACE | {"quote": "string"},
    "passages": [_PLACE | _WEIGHT | {"text": "string", "span": "string?", "score": "double?"}],
    "model": {
        **dict.fromkeys(("version", "reader", "snapshot"), "string"),
        "weights_step": "long?",
        "index_generation": "long",
    },
}


def _signature_type(kind: Any) -> dict[str, Any]:
    """Convert a type of ``_RECORD`` to the JSON form of MLflow's signatures."""
    if isinstance(kind, str):
        return {"type": kind.removesuffix("?"), "required": not kind.endswith("?")}
    if isinstance(kind, list):
        items = {name: value for name, value in _signature_type(kind[0]).items() if name != "required"}
        return {"type": "array", "required": True, "items": items}
    return {"type": "object", "required": True, "properties": {name: _signature_type(of) for name, of in kind.items()}}


SIGNATURE = {
    "inputs": [_signature_type("string")],
    "outputs": [{"name": name, **_signature_type(kind)} for name, kind in _RECORD.items()],
}
