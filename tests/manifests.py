"""Rendered Kubernetes manifests, and what the API server or the first start would find wrong with them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from pod_security import containers, violations

Object = dict[str, Any]

K8S = Path(__file__).parents[1] / "k8s"
OLDEST, NEWEST = "1.30", "1.37"  # versions of Kubernetes that the manifests are held against
CUSTOM = {"PodMonitor"}  # kinds of others, which no schema of Kubernetes describes
EXTERNAL = "external.realmops"  # annotation external.realmops/secret-NAME: what people have to make themselves
AT_ONCE = 12  # kustomizations; their time grows with the square of this, and starting kubectl costs as well
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
HANDLERS = {"exec", "httpGet", "tcpSocket", "grpc"}
ACCESS_MODES = {"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"}
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # DNS-1123
SUBDOMAIN = re.compile(rf"(?=.{{1,253}}$){LABEL.pattern}(\.{LABEL.pattern})*")
QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:([numkMGTPE]i?)|[eE]([+-]?\d+))?")
POWERS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def kubectl() -> str:
    """The kubectl of this environment, else that on the PATH."""
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    found = shutil.which("kubectl", path=os.pathsep.join(places))
    assert found, "no kubectl here: call make setup"
    return found


def render(folder: Path) -> list[Object]:
    """What ``kubectl apply -k`` would send."""
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one]


def render_all(folder: Path, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Object]]:
    """Many kustomizations of a copy of k8s/ in few calls, each in the namespace that is its key.

    ``cases`` gives each kustomization's own fields, with paths as from a folder beside base, overlays and components.
    """
    shutil.copytree(K8S, folder)
    for namespace, fields in cases.items():
        write(folder / namespace, {"namespace": namespace, **fields})
    rendered: dict[str, list[Object]] = {namespace: [] for namespace in cases}
    for first in range(0, len(cases), AT_ONCE):
        together = [f"../{namespace}" for namespace in list(cases)[first : first + AT_ONCE]]
        write(folder / f"from-{first}", {"resources": together})
        for one in render(folder / f"from-{first}"):
            rendered[namespace_of(one)].append(one)
    return rendered


def namespace_of(one: Object) -> str | None:
    found: str | None = one["metadata"].get("name" if one["kind"] == "Namespace" else "namespace")
    return found


def write(folder: Path, kustomization: Mapping[str, Any]) -> None:
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization), encoding="utf-8")


def faults(objects: Iterable[Object], version: str = NEWEST) -> list[str]:
    """Everything wrong with what is applied together; an empty list is what is wanted."""
    together = list(objects)
    found = [f"{name(one)}: {problem}" for one in together for problem in schema_faults(one, version)]
    return found or [fault for rule in RULES for fault in rule(together)]  # rules rely on the shape that schemas give


def schema_faults(one: Object, version: str) -> tuple[str, ...]:
    """Unknown fields, wrong types and missing fields by the schemas of this version of Kubernetes."""
    if one["kind"] in CUSTOM:
        return ()
    return _schema_faults(json.dumps(one).replace(json.dumps(namespace_of(one)), '"n"'), version)


@cache
def _schema_faults(text: str, version: str) -> tuple[str, ...]:
    one = json.loads(text)
    try:
        kubernetes_validate.validate(one, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return (f"Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message}",)
    except kubernetes_validate.SchemaNotFoundError:
        return (f"Kubernetes {version} has no {one['kind']} in {one['apiVersion']}",)
    return ()


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


def as_started(container: Object, pod: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command with arguments, and environment, as the kubelet gives them to a container of its own command.

    ``pod`` has the fields of the pod that variables refer to, as ``status.podIP``.
    """
    environment: dict[str, str] = {}

    def expanded(text: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), text)

    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        field = pod[source["fieldRef"]["fieldPath"]] if source else variable.get("value", "")
        environment[variable["name"]] = expanded(field)
    return [expanded(word) for word in (*container["command"], *container.get("args", []))], environment


def selects(selector: Mapping[str, str], template: Object) -> bool:
    return selector.items() <= template["metadata"]["labels"].items()


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, with lines joined: (FROM, arguments) and so on."""
    text = (K8S.parent / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(word, rest) for line in lines if line for word, _, rest in [line.partition(" ")]]


def unique_objects(objects: list[Object]) -> Iterator[str]:
    count = Counter((one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects)
    yield from (f"{kind}/{which} stands there {n} times" for (kind, _, which), n in count.items() if n > 1)


def one_namespace_that_is_restricted(objects: list[Object]) -> Iterator[str]:
    namespaces = [one for one in objects if one["kind"] == "Namespace"]
    if len(namespaces) != 1:
        yield f"{len(namespaces)} namespaces, wanted 1"
        return
    [namespace] = namespaces
    enforced = namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce")
    if enforced != "restricted":
        yield f"{name(namespace)} enforces the pod security {enforced}, wanted restricted"
    for one in objects:
        if namespace_of(one) != namespace["metadata"]["name"]:
            yield f"{name(one)} lies in the namespace {namespace_of(one)}"


def pods_are_restricted(objects: list[Object]) -> Iterator[str]:
    for one, template in templates(objects):
        found = sorted(violations(template["spec"], "restricted"))
        yield from (f"{name(one)}: not restricted: {what}" for what in found)


def names_are_dns(objects: list[Object]) -> Iterator[str]:
    for one in objects:
        pattern = LABEL if one["kind"] in ("Namespace", "Service") else SUBDOMAIN
        if not pattern.fullmatch(one["metadata"]["name"]):
            yield f"{name(one)}: the name is none of DNS-1123"
    for one, template in templates(objects):
        for inner in [*containers(template["spec"]), *template["spec"].get("volumes", [])]:
            if not LABEL.fullmatch(inner["name"]):
                yield f"{name(one)}: {inner['name']} is no label of DNS-1123"


def selectors_match(objects: list[Object]) -> Iterator[str]:
    pods = [template for _, template in templates(objects)]
    for one in objects:
        spec = one.get("spec", {})
        if one["kind"] in ("Deployment", "StatefulSet", "DaemonSet"):
            if not selects(spec["selector"]["matchLabels"], spec["template"]):
                yield f"{name(one)}: the selector does not match the template's labels"
            continue
        selector = {
            "Service": spec.get("selector"),
            "PodMonitor": spec.get("selector", {}).get("matchLabels"),
            "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
        }.get(one["kind"])
        if selector and not any(selects(selector, template) for template in pods):
            yield f"{name(one)}: no pod has the labels that it selects"


def restart_policies(objects: list[Object]) -> Iterator[str]:
    for one, template in templates(objects):
        allowed = ("Never", "OnFailure") if one["kind"] == "Job" else ("Always",)
        policy = template["spec"].get("restartPolicy", "Always")
        if policy not in allowed:
            yield f"{name(one)}: restartPolicy {policy}, allowed {' or '.join(allowed)}"


def quantities(objects: list[Object]) -> Iterator[str]:
    """That all parse, that no limit is below its request, and that pods say what the quota asks for."""
    claims = [(name(one), one["spec"]["resources"]) for one in objects if one["kind"] == "PersistentVolumeClaim"]
    asked = [(where, container.get("resources", {})) for where, _, container in each_container(objects)]
    hard = [(name(one), {"requests": one["spec"]["hard"]}) for one in objects if one["kind"] == "ResourceQuota"]
    sizes = [
        (name(one), {"requests": {volume["name"]: volume["emptyDir"]["sizeLimit"]}})
        for one, template in templates(objects)
        for volume in template["spec"].get("volumes", [])
        if "sizeLimit" in volume.get("emptyDir", {})
    ]
    for where, resources in [*claims, *asked, *hard, *sizes]:
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        for text in [*requests.values(), *limits.values()]:
            try:
                quantity(text)
            except ValueError as error:
                yield f"{where}: {error}"
                break
        else:
            for key in requests.keys() & limits.keys():
                if quantity(limits[key]) < quantity(requests[key]):
                    yield f"{where}: the limit of {key} is below the request"
    for where, resources in asked:
        if not {"cpu", "memory"} <= resources.get("requests", {}).keys() or "memory" not in resources.get("limits", {}):
            yield f"{where}: wanted requests of cpu and memory, and a limit of memory"


def mounts_have_volumes(objects: list[Object]) -> Iterator[str]:
    for where, spec, container in each_container(objects):
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        mounts = container.get("volumeMounts", [])
        yield from (f"{where}: no volume {one['name']} to mount" for one in mounts if one["name"] not in volumes)
        paths = Counter(one["mountPath"] for one in mounts)
        yield from (f"{where}: {n} volumes mounted at {path}" for path, n in paths.items() if n > 1)


def access_modes(objects: list[Object]) -> Iterator[str]:
    for one in objects:
        modes = one["spec"].get("accessModes") or [None] if one["kind"] == "PersistentVolumeClaim" else []
        unknown = [mode for mode in modes if mode not in ACCESS_MODES]
        yield from (f"{name(one)}: the access mode {mode} is none of {sorted(ACCESS_MODES)}" for mode in unknown)


def probes_and_ports(objects: list[Object]) -> Iterator[str]:
    """One handler for each probe; ports by names that the container has."""
    for where, _, container in each_container(objects):
        ports = {port["name"] for port in container.get("ports", [])}
        for kind in PROBES:
            probe = container.get(kind)
            if probe is None:
                continue
            handlers = HANDLERS & probe.keys()
            if len(handlers) != 1:
                yield f"{where}: {kind} has {len(handlers)} handlers, wanted 1 of {sorted(HANDLERS)}"
            if kind != "readinessProbe" and probe.get("successThreshold", 1) != 1:
                yield f"{where}: {kind} has a successThreshold other than 1"
            port = probe.get("httpGet", {}).get("port")
            if isinstance(port, str) and port not in ports:
                yield f"{where}: {kind} asks at the port {port}, which the container has not"
    for one in objects:
        for port in one["spec"]["ports"] if one["kind"] == "Service" else ():
            served = {
                found["name"]
                for _, template in templates(objects)
                if selects(one["spec"]["selector"], template)
                for container in containers(template["spec"])
                for found in container.get("ports", [])
            }
            if isinstance(port.get("targetPort"), str) and port["targetPort"] not in served:
                yield f"{name(one)}: no port {port['targetPort']} of the pods that it selects"


def references(objects: list[Object]) -> Iterator[str]:
    """That what is named is there, or is said to be made by people."""
    there = {(one["kind"].lower(), one["metadata"]["name"]): one for one in objects}
    for one, template in templates(objects):
        spec, declared = template["spec"], one["metadata"].get("annotations", {})
        for kind, which, key in sorted(named(spec), key=str):
            if f"{EXTERNAL}/{kind}-{which}" in declared:
                continue
            if (kind, which) not in there:
                yield f"{name(one)}: there is no {kind} {which}, and no annotation {EXTERNAL}/{kind}-{which}"
            elif key and key not in there[kind, which].get("data", {}):
                yield f"{name(one)}: the {kind} {which} has no key {key}"
    for one in objects:
        if one["kind"] != "RoleBinding":
            continue
        if (one["roleRef"]["kind"].lower(), one["roleRef"]["name"]) not in there:
            yield f"{name(one)}: there is no {one['roleRef']['kind']} {one['roleRef']['name']}"
        for subject in one["subjects"]:
            if subject["kind"] == "ServiceAccount" and not subject.get("namespace"):
                yield f"{name(one)}: the subject {subject['name']} has no namespace"
    for one in objects:
        for rule in one["rules"] if one["kind"] == "Role" else ():
            if rule["resources"] == ["deployments/scale"]:
                missing = [which for which in rule["resourceNames"] if ("deployment", which) not in there]
                yield from (f"{name(one)}: there is no deployment {which}" for which in missing)


def named(spec: Object) -> Iterator[tuple[str, str, str | None]]:
    """Kind, name and key of everything in the namespace that a pod's spec refers to."""
    yield "serviceaccount", spec.get("serviceAccountName", "default"), None
    for volume in spec.get("volumes", []):
        for source in (volume, *volume.get("projected", {}).get("sources", [])):
            if "configMap" in source:
                yield "configmap", source["configMap"]["name"], None
            if "secret" in source:
                yield "secret", source["secret"].get("secretName") or source["secret"]["name"], None
        if "persistentVolumeClaim" in volume:
            yield "persistentvolumeclaim", volume["persistentVolumeClaim"]["claimName"], None
    for container in containers(spec):
        for source in container.get("envFrom", []):
            for field, found in source.items():
                yield field.removesuffix("Ref").lower(), found["name"], None
        for variable in container.get("env", []):
            for field, found in variable.get("valueFrom", {}).items():
                if field in ("configMapKeyRef", "secretKeyRef"):
                    yield field.removesuffix("KeyRef").lower(), found["name"], found["key"]


def images_are_fixed(objects: list[Object]) -> Iterator[str]:
    for where, _, container in each_container(objects):
        tag = container["image"].rpartition("/")[2].partition(":")[2]
        if tag in ("", "latest"):
            yield f"{where}: the image {container['image']} has no tag that stays what it is"


def root_is_read_only(objects: list[Object]) -> Iterator[str]:
    """A root that nobody writes to, with /tmp, HOME and TMPDIR that can be written, and a user by number."""
    for where, spec, container in each_container(objects):
        pod, own = spec.get("securityContext", {}), container.get("securityContext", {})
        if not own.get("readOnlyRootFilesystem"):
            yield f"{where}: readOnlyRootFilesystem is not true"
        empty = {volume["name"] for volume in spec.get("volumes", []) if "emptyDir" in volume}
        mounted = {mount["mountPath"] for mount in container.get("volumeMounts", []) if mount["name"] in empty}
        if "/tmp" not in mounted:
            yield f"{where}: no emptyDir at /tmp"
        values = {variable["name"]: variable.get("value") for variable in container.get("env", [])}
        for variable in ("HOME", "TMPDIR"):
            if values.get(variable) not in mounted:
                yield f"{where}: {variable} is {values.get(variable)}, where no emptyDir is"
        if not own.get("runAsUser", pod.get("runAsUser")):
            yield f"{where}: no runAsUser above 0"
        if not pod.get("fsGroup"):
            yield f"{where}: no fsGroup above 0, so that claims belong to root"


def environments(objects: list[Object]) -> Iterator[str]:
    for where, _, container in each_container(objects):
        variables = container.get("env", [])
        count = Counter(variable["name"] for variable in variables)
        yield from (f"{where}: {which} is set {n} times" for which, n in count.items() if n > 1)
        both = [variable["name"] for variable in variables if "value" in variable and "valueFrom" in variable]
        yield from (f"{where}: {which} has both value and valueFrom" for which in both)


def strategies(objects: list[Object]) -> Iterator[str]:
    """Two pods never mount one ReadWriteOnce claim in an update."""
    for one in objects:
        strategy = one["spec"].get("strategy", {}) if one["kind"] == "Deployment" else {"type": "Recreate"}
        if strategy.get("type") != "Recreate" or "rollingUpdate" in strategy:
            yield f"{name(one)}: the strategy is {strategy.get('type')}, wanted Recreate and nothing else"


def quota_has_room(objects: list[Object]) -> Iterator[str]:
    """One pod of each kind fits into the namespace's quota."""
    if next(quantities(objects), None):
        return
    for quota in (one for one in objects if one["kind"] == "ResourceQuota"):
        for key, most in quota["spec"]["hard"].items():
            resource = key.removeprefix("requests.")
            asked = [container.get("resources", {}) for _, _, container in each_container(objects)]
            wanted = sum(
                quantity({**one.get("limits", {}), **one.get("requests", {})}.get(resource, 0)) for one in asked
            )
            if resource != key and wanted > quantity(most):
                yield f"{name(quota)}: {key} is {most}, and the pods want {wanted}"


RULES = (
    unique_objects,
    one_namespace_that_is_restricted,
    pods_are_restricted,
    names_are_dns,
    selectors_match,
    restart_policies,
    quantities,
    mounts_have_volumes,
    access_modes,
    probes_and_ports,
    references,
    images_are_fixed,
    root_is_read_only,
    environments,
    strategies,
    quota_has_room,
)
