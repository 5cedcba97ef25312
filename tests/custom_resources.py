"""The shapes of resources that others define: what their CustomResourceDefinitions say of fields, in fixtures.

The fixtures hold names, types, allowed values, patterns and what is required; no text, no defaults, no status. Where a
definition holds a pod's spec the fixture says so, and Kubernetes' own schema is asked. To make them again, after a
change of the versions below, clone the repositories into one folder, with their tags, and call

    python tests/custom_resources.py FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

FIXTURES = Path(__file__).parent / "fixtures" / "custom_resources"
# kind: repository on GitHub, version, file in it
SOURCES = {
    "Application": ("argoproj/argo-cd", "v3.5.1", "manifests/crds/application-crd.yaml"),
    "GitRepository": (
        "fluxcd/source-controller", "v1.9.1", "config/crd/bases/source.toolkit.fluxcd.io_gitrepositories.yaml",
    ),
    "InferenceService": ("kserve/kserve", "v0.20.0", "config/crd/full/serving.kserve.io_inferenceservices.yaml"),
    "Kustomization": (
        "fluxcd/kustomize-controller", "v1.9.4", "config/crd/bases/kustomize.toolkit.fluxcd.io_kustomizations.yaml",
    ),
    "PodDefault": ("kubeflow/manifests", "v1.11.0", "applications/admission-webhook/upstream/base/crd.yaml"),
    "PodMonitor": (
        "prometheus-operator/prometheus-operator", "v0.93.0",
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
    "Profile": ("kubeflow/manifests", "v1.11.0", "applications/profiles/upstream/crd/bases/kubeflow.org_profiles.yaml"),
    "TrainJob": ("kubeflow/trainer", "v2.3.0", "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"),
    "TrainingRuntime": (
        "kubeflow/trainer", "v2.3.0", "manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml",
    ),
}  # fmt: skip
KEPT = ("type", "pattern", "enum", "required", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
        "minProperties", "maxProperties", "anyOf", "oneOf", "allOf", "not")  # fmt: skip
OPEN = "x-kubernetes-preserve-unknown-fields"
POD = "kubernetes-pod-spec"
POD_FIELDS = {"containers", "restartPolicy", "nodeSelector"}  # who has these is a pod's spec
# what KServe's predictor has beside a pod's fields, and is looked into here
BESIDE_POD = {
    "annotations", "batcher", "canaryTrafficPercent", "containerConcurrency", "deploymentStrategy", "labels",
    "maxReplicas", "minReplicas", "scaleMetric", "scaleMetricType", "scaleTarget", "timeout",
}  # fmt: skip
# long parts of a pod that stand alone, and what people never write: not looked into
SKIPPED = {
    "affinity",
    "explainer",
    "initContainers",
    "operation",
    "podSpecOverrides",
    "podTemplateOverrides",
    "resources",
    "runtimePatches",
    "sidecars",
    "transformer",
    "valueFrom",
    "volumes",
}


def reduced(node: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of a definition without what does not decide; closed, as the server with strict validation takes it."""
    fields: Mapping[str, Any] = node.get("properties", {})
    if fields.keys() >= POD_FIELDS:
        beside = {name: reduced(fields[name]) for name in sorted(fields.keys() & BESIDE_POD)}
        return {"type": "object", POD: True, **({"properties": beside} if beside else {})}
    found = {key: node[key] for key in KEPT if key in node}
    if node.get("nullable"):
        found["type"] = [found["type"], "null"]
    if fields:
        found["properties"] = {
            name: {"type": one["type"]} if name in SKIPPED and "type" in one else reduced(one)
            for name, one in fields.items()
        }
    if isinstance(more := node.get("additionalProperties"), dict):
        found["additionalProperties"] = reduced(more)
    elif node.get("type") == "object" and not node.get(OPEN):
        found["additionalProperties"] = False
    if "items" in node:
        found["items"] = reduced(node["items"])
    return found


def definition(text: str, kind: str) -> dict[str, Any]:
    """Group, version and reduced schema of the newest version that is served."""
    [found] = [one for one in yaml.load_all(text, yaml.CSafeLoader) if one and one["spec"]["names"]["kind"] == kind]
    newest = next(one for one in found["spec"]["versions"] if one["storage"])
    schema = reduced(newest["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    schema["properties"]["metadata"] = {"type": "object"}
    schema["required"] = sorted({"apiVersion", "kind", "metadata", *schema.get("required", ())})
    return {"apiVersion": f"{found['spec']['group']}/{newest['name']}", "schema": schema}


@cache
def fixture(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"{kind}.json").read_text(encoding="utf-8"))
    return found


def faults_of(one: Mapping[str, Any], version: str) -> Iterator[str]:
    """What the server would refuse: an unknown version, unknown fields, wrong types and values, missing fields.

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


def main(folder: Path) -> None:
    for kind, (repository, version, path) in SOURCES.items():
        clone = folder / repository.split("/")[1]
        text = subprocess.run(
            ["git", "-C", clone, "show", f"{version}:{path}"], check=True, capture_output=True, text=True
        ).stdout
        found = {"source": f"{repository} {version}", **definition(text, kind)}
        (FIXTURES / f"{kind}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
