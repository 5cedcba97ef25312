"""Generate reduced schemas of custom resources from their definitions, for tests/custom_resources.py.

    python scripts/custom_schemas.py FOLDER

FOLDER contains clones of the repositories below, with their tags. The schemas keep names, types, allowed values,
patterns and required fields, without descriptions, defaults and status. Pod specs are marked as such.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "custom_resources"
# kind: (repository on GitHub, version, file)
SOURCES = {
    "Application": ("argoproj/argo-cd", "v3.5.1", "manifests/crds/application-crd.yaml"),
    "GitRepository": (
        "fluxcd/source-controller", "v1.9.1", "config/crd/bases/source.toolkit.fluxcd.io_gitrepositories.yaml",
    ),
    "InferenceService": ("kserve/kserve", "v0.20.0", "config/crd/full/serving.kserve.io_inferenceservices.yaml"),
    "Kustomization": (
        "fluxcd/kustomize-controller", "v1.9.4", "config/crd/bases/kustomize.toolkit.fluxcd.io_kustomizations.yaml",
    ),
    "Pipeline": (
        "kubeflow/pipelines", "2.17.0", "manifests/kustomize/base/crds/pipelines.kubeflow.org_pipelines.yaml",
    ),
    "PipelineVersion": (
        "kubeflow/pipelines", "2.17.0", "manifests/kustomize/base/crds/pipelines.kubeflow.org_pipelineversions.yaml",
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
POD_FIELDS = {"containers", "restartPolicy", "nodeSelector"}  # an object with these fields is a pod spec
# fields of KServe's predictor in addition to those of a pod spec
PREDICTOR_FIELDS = {
    "annotations", "batcher", "canaryTrafficPercent", "containerConcurrency", "deploymentStrategy", "labels",
    "maxReplicas", "minReplicas", "scaleMetric", "scaleMetricType", "scaleTarget", "timeout",
}  # fmt: skip
# long parts of a pod spec, and fields that manifests do not use: reduced to their type
SKIPPED = {
    "affinity", "explainer", "initContainers", "operation", "podSpecOverrides", "podTemplateOverrides", "resources",
    "runtimePatches", "sidecars", "transformer", "valueFrom", "volumes",
}  # fmt: skip


def reduce_schema(node: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a schema to what validation needs; unknown fields are rejected, as by strict server-side validation."""
    fields: Mapping[str, Any] = node.get("properties", {})
    if fields.keys() >= POD_FIELDS:
        extra = {name: reduce_schema(fields[name]) for name in sorted(fields.keys() & PREDICTOR_FIELDS)}
        return {"type": "object", POD: True, **({"properties": extra} if extra else {})}
    schema = {key: node[key] for key in KEPT if key in node}
    if node.get("nullable"):
        schema["type"] = [schema["type"], "null"]
    if fields:
        schema["properties"] = {
            name: {"type": field["type"]} if name in SKIPPED and "type" in field else reduce_schema(field)
            for name, field in fields.items()
        }
    if isinstance(more := node.get("additionalProperties"), dict):
        schema["additionalProperties"] = reduce_schema(more)
    elif node.get("type") == "object" and not node.get(OPEN):
        schema["additionalProperties"] = False
    if "items" in node:
        schema["items"] = reduce_schema(node["items"])
    return schema


def definition(text: str, kind: str) -> dict[str, Any]:
    """Return group, version and reduced schema of the storage version of a custom resource."""
    documents = yaml.load_all(text, yaml.CSafeLoader)
    [crd] = [document for document in documents if document and document["spec"]["names"]["kind"] == kind]
    newest = next(version for version in crd["spec"]["versions"] if version["storage"])
    schema = reduce_schema(newest["schema"]["openAPIV3Schema"])
    schema["properties"].pop("status", None)
    schema["properties"]["metadata"] = {"type": "object"}
    schema["required"] = sorted({"apiVersion", "kind", "metadata", *schema.get("required", ())})
    return {"apiVersion": f"{crd['spec']['group']}/{newest['name']}", "schema": schema}


def main(folder: Path) -> None:
    """Write the fixtures."""
    for kind, (repository, version, path) in SOURCES.items():
        clone = folder / repository.split("/")[1]
        text = subprocess.run(
            ["git", "-C", clone, "show", f"{version}:{path}"], check=True, capture_output=True, text=True
        ).stdout
        fixture = {"source": f"{repository} {version}", **definition(text, kind)}
        (FIXTURES / f"{kind}.json").write_text(json.dumps(fixture, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
