"""Pipelines as Kubernetes objects, for servers of Kubeflow Pipelines that store pipelines in Kubernetes."""

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

API = "pipelines.kubeflow.org/v2beta1"
DIGITS = 12  # of the digest in the name of a version


def objects_of(compiled: Path) -> list[dict[str, Any]]:
    """Return the Pipeline and the PipelineVersion of a compiled file.

    The server refuses changes to a version's spec, so the name of a version contains a digest of its spec. The display
    names are set because the server's filter compares them, and does not replace an empty one by the object's name.
    """
    spec, *platform = yaml.load_all(compiled.read_bytes(), yaml.CSafeLoader)
    info = spec["pipelineInfo"]
    content = {"pipelineSpec": spec, **({"platformSpec": platform[0]} if platform else {})}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:DIGITS]
    name, version = info["name"], f"{info['name']}-{digest}"
    return [
        {
            "apiVersion": API,
            "kind": "Pipeline",
            "metadata": {"name": name},
            "spec": {"displayName": name, "description": info["description"]},
        },
        {
            "apiVersion": API,
            "kind": "PipelineVersion",
            "metadata": {"name": version},
            "spec": {"pipelineName": name, "displayName": version, **content},
        },
    ]


def write_objects(compiled: Path, folder: Path) -> None:
    """Write the objects of a compiled file into a folder, as a file of the same name."""
    text = yaml.dump_all(objects_of(compiled), Dumper=yaml.CSafeDumper, sort_keys=False)
    (folder / compiled.name).write_text(text, encoding="utf-8")


def write_kustomization(folder: Path, names: list[str]) -> None:
    """Write the kustomize component that lists the files."""
    component = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "resources": [f"{name}.yaml" for name in names],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(component, sort_keys=False), encoding="utf-8")
