"""Make the schemas of resources that others define, for tests/custom_resources.py, from their definitions.

    python scripts/custom_schemas.py FOLDER

FOLDER holds clones of the repositories below, with their tags. What is kept are names, types, allowed values, patterns
and what is required; no text, no defaults, no status. Where a definition holds a pod's spec the fixture says so.
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
    "affinity", "explainer", "initContainers", "operation", "podSpecOverrides", "podTemplateOverrides", "resources",
    "runtimePatches", "sidecars", "transformer", "valueFrom", "volumes",
}  # fmt: skip


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
