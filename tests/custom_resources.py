"""The shapes of resources that others define, as scripts/custom_schemas.py has taken them from their definitions.

Where a definition holds a pod's spec the fixture says so, and Kubernetes' own schema is asked.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

FIXTURES = Path(__file__).parent / "fixtures" / "custom_resources"
KINDS = {path.stem for path in FIXTURES.glob("*.json")}
POD = "kubernetes-pod-spec"


@cache
def fixture(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"{kind}.json").read_text(encoding="utf-8"))
    return found


def faults_of(one: Mapping[str, Any], version: str) -> Iterator[str]:
    """Return the server's objections: an unknown version, unknown fields, wrong types and values, missing fields.

    ``version`` is that of Kubernetes, for what its own schemas describe.
    """
    known = fixture(one["kind"])
    if one["apiVersion"] != known["apiVersion"]:
        yield f"{known['source']} has no {one['kind']} in {one['apiVersion']}"
        return
    for error in jsonschema.Draft202012Validator(known["schema"]).iter_errors(one):
        yield f"{known['source']}: {'.'.join(map(str, error.absolute_path))}: {error.message}"
    for path, inner in kubernetes_objects(one, known["schema"]):
        try:
            kubernetes_validate.validate(inner, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{path}.{'.'.join(map(str, error.path))}: {error.message}"


def kubernetes_objects(one: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts that Kubernetes' own schemas know, as whole objects: metadata, and specs of pods."""
    yield "metadata", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": one.get("metadata")}
    for path, spec in pod_specs(one, schema, ""):
        yield path, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}


def pod_specs(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    if schema.get(POD):
        yield path, {key: inner for key, inner in value.items() if key not in schema.get("properties", {})}
    elif isinstance(value, dict):
        for key, inner in value.items():
            found = schema.get("properties", {}).get(key, {})
            yield from pod_specs(inner, found, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for n, inner in enumerate(value):
            yield from pod_specs(inner, schema.get("items", {}), f"{path}.{n}")
