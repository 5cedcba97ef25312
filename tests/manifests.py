"""Rendered Kubernetes manifests, and what to find in them."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

K8S = Path(__file__).parents[1] / "k8s"
OLDEST, NEWEST = "1.30", "1.37"  # versions of Kubernetes that the manifests are held against
AT_ONCE = 12  # kustomizations; their time grows with the square of this, and starting kubectl costs as well
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:([numkMGTPE]i?)|[eE]([+-]?\d+))?")
POWERS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def kubectl() -> str:
    """The kubectl of this environment, else that on the PATH."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    found = shutil.which("kubectl", path=os.pathsep.join(places))
    assert found, "no kubectl here: call make setup"
    return found


def render(folder: Path) -> list[Object]:
    """Return the objects that ``kubectl apply -k`` would send."""
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one]


def render_all(folder: Path, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Object]]:
    """Many kustomizations of a copy of k8s/ in few calls, each in the namespace that is its key.

    ``cases`` gives each kustomization's own fields, with paths as from a folder beside base, overlays and components.
    """
    shutil.copytree(K8S, folder)
    params = {"configMapGenerator": [{"name": "realmops-params", "literals": ["params.yaml="]}]}
    for namespace, fields in cases.items():
        own = params if any("retrain-on-sync" in one for one in fields.get("components", ())) else {}
        write(folder / namespace, {"namespace": namespace, **fields, **own})
    rendered: dict[str, list[Object]] = {namespace: [] for namespace in cases}
    for first in range(0, len(cases), AT_ONCE):
        together = [f"../{namespace}" for namespace in list(cases)[first : first + AT_ONCE]]
        write(folder / f"from-{first}", {"resources": together})
        for one in render(folder / f"from-{first}"):
            rendered[namespace_of(one)].append(one)
    return rendered


def read_all(path: Path) -> list[Object]:
    """The objects of a file."""
    return [one for one in yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader) if one]


def namespace_of(one: Object) -> str | None:
    found: str | None = one["metadata"].get("name" if one["kind"] == "Namespace" else "namespace")
    return found


def write(folder: Path, kustomization: Mapping[str, Any]) -> None:
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization), encoding="utf-8")


def name(one: Object) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"


def find(objects: list[Object], which: str) -> Object:
    """The one object of a name, as ``Deployment/mlflow``."""
    [found] = [one for one in objects if name(one) == which]
    return found


def templates(objects: Iterable[Object]) -> Iterator[tuple[Object, Object]]:
    """Objects that make pods, with the pods' template."""
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
            yield one, one["spec"]["template"]
        elif one["kind"] == "CronJob":
            yield one, one["spec"]["jobTemplate"]["spec"]["template"]


def containers(spec: Object) -> list[Object]:
    """All of a pod's: those that start it as well."""
    return [one for kind in ("initContainers", "containers") for one in spec.get(kind) or []]


def each_container(objects: Iterable[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Where it stands, the pod's spec, the container."""
    for one, template in templates(objects):
        for container in containers(template["spec"]):
            yield f"{name(one)}: container {container['name']}", template["spec"], container


def quantity(text: object) -> Decimal:
    """The number that ``500m`` or ``2Gi`` stands for; ValueError for what the API server refuses."""
    match = QUANTITY.fullmatch(str(text))
    if not match or match[2] in ("ni", "ui", "mi", "ki"):
        raise ValueError(f"'{text}' is no quantity: 500m, 2, 1.5 and 2Gi are")
    number, suffix, exponent = match.groups()
    if suffix and suffix.endswith("i"):
        return Decimal(number) * 1024 ** (POWERS[suffix[0]] // 3)
    return Decimal(number).scaleb(POWERS[suffix] if suffix else int(exponent or 0))


def as_started(
    container: Object, pod: Mapping[str, str], secrets: Mapping[str, Mapping[str, str]] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Command with arguments, and environment, as the kubelet gives them to a container of its own command.

    ``pod`` has the fields of the pod that variables refer to, as ``status.podIP``; ``secrets`` their keys, by name.
    """
    environment: dict[str, str] = {}

    def expanded(text: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), text)

    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            value = (secrets or {})[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        elif "fieldRef" in source:
            value = pod[source["fieldRef"]["fieldPath"]]
        else:
            value = expanded(variable.get("value", ""))
        environment[variable["name"]] = value
    return [expanded(word) for word in (*container["command"], *container.get("args", []))], environment


def selects(selector: Mapping[str, str], template: Object) -> bool:
    return selector.items() <= template["metadata"]["labels"].items()


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, with lines joined: (FROM, arguments) and so on."""
    text = (Path(__file__).parents[1] / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(word, rest) for line in lines if line for word, _, rest in [line.partition(" ")]]
