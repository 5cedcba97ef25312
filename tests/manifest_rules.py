"""Faults that the Kubernetes API server or the first start would find in manifests that are applied together."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import custom_resources
import kubernetes_validate
from manifests import (
    K8S,
    NEWEST,
    PROBES,
    QUANTITY,
    Object,
    containers,
    each_container,
    name,
    namespace_of,
    quantity,
    read_all,
    selects,
    templates,
)

EXTERNAL = "external.realmops"  # annotation external.realmops/secret-NAME: an object that the user creates, its keys
# by program, where it answers; tests/tracking/test_mlflow_server.py and tests/serve/test_serve.py request these
ANSWERS = {"mlflow": {"/health", "/version", "/metrics"}, "serve": {"/health/live", "/health/ready", "/metrics"}}
OF_PODS = ("runAsNonRoot", "runAsUser", "runAsGroup", "seccompProfile")  # which a container inherits from its pod
SECURE = {
    "runAsNonRoot": True, "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"  # DNS-1123
VALUES = {  # allowed values that schemas leave open, by path
    r"metadata\.name|.*\.storageClassName": rf"{LABEL}(\.{LABEL})*",
    r".*\.image": r"([^/]*[.:][^/]*/)?([^/:A-Z]+/)*[^/:A-Z]+:(?!latest$)[^/:]+",  # kubelets refuse capital letters
    r".*\.(requests|limits|hard)\.(?!\d).+|.*\.sizeLimit": QUANTITY.pattern,
    r".*\.accessModes\.\d+": r"Read(WriteOnce|OnlyMany|WriteMany|WriteOncePod)",
    r".*\.audience": r"pipelines\.kubeflow\.org",
}


def faults(objects: Iterable[Object], version: str = NEWEST) -> list[str]:
    """Return a line for each fault of objects that are applied together."""
    together = list(objects)
    if found := [f"{name(one)}: {fault}" for one in together for fault in shape_faults(one, version)]:
        return found  # rules rely on the shapes
    together = [*as_made(together)]
    return [fault for rule in RULES for fault in rule(together)]


def shape_faults(one: Object, version: str) -> tuple[str, ...]:
    return _shape_faults(json.dumps(one).replace(json.dumps(namespace_of(one)), '"n"'), version)


@cache
def _shape_faults(text: str, version: str) -> tuple[str, ...]:
    one = json.loads(text)
    return (*schema_faults(one, version), *value_faults(one))


def schema_faults(one: Object, version: str) -> Iterator[str]:
    if one["kind"] in custom_resources.KINDS:
        yield from custom_resources.faults_of(one, version)
        return
    try:
        kubernetes_validate.validate(one, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError:
        yield f"Kubernetes {version} has no {one['kind']} in {one['apiVersion']}"


def value_faults(one: Object) -> Iterator[str]:
    """Yield values that ``VALUES`` does not allow, and duplicate names in a list."""
    for path, value in walk(one):
        if isinstance(value, list):
            field = "mountPath" if path.endswith(".volumeMounts") else "name"
            count = Counter(inner[field] for inner in value if isinstance(inner, dict) and field in inner)
            yield from (f"{path}: {key} is there {n} times" for key, n in count.items() if n > 1)
        elif not isinstance(value, dict):
            allowed = next((allowed for which, allowed in VALUES.items() if re.fullmatch(which, path)), ".*")
            if not re.fullmatch(allowed, str(value), re.DOTALL):
                yield f"{path} is {value}, expected {allowed}"


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every field below a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, found in inner:
        yield f"{path}.{key}".lstrip("."), found
        yield from walk(found, f"{path}.{key}")


def as_made(objects: Iterable[Object]) -> Iterator[Object]:
    """Yield the objects and what controllers make of them.

    Kubeflow Trainer and JobSet replace a TrainJob and its runtime by a Job, here without the variables of torchrun and
    its port; KServe, in mode Standard, adds a Deployment to an InferenceService (deployment_reconciler.go).
    """
    objects = [*objects]
    runtimes = {one["metadata"]["name"]: one for one in objects if one["kind"] == "TrainingRuntime"}
    for one in objects:
        if one["kind"] == "TrainJob" and one["spec"]["runtimeRef"]["name"] in runtimes:
            spec = runtimes[one["spec"]["runtimeRef"]["name"]]["spec"]
            [node] = spec["template"]["spec"]["replicatedJobs"]
            made = json.loads(json.dumps(node["template"]["spec"]))
            made["template"]["spec"].setdefault("restartPolicy", "OnFailure")
            trainer = one["spec"].get("trainer", {})
            for container in made["template"]["spec"]["containers"]:
                container["resources"] = trainer.get("resourcesPerNode", container.get("resources", {}))
            nodes = trainer.get("numNodes", spec["mlPolicy"].get("numNodes", 1))
            made |= {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
            yield {"kind": "Job", "metadata": one["metadata"], "spec": made}
        elif one["kind"] != "TrainingRuntime":
            yield one
        if one["kind"] == "InferenceService":
            [(_, pod)] = custom_resources.pod_specs(one, custom_resources.fixture(one["kind"])["schema"], "")
            app = {"app": f"isvc.{one['metadata']['name']}-predictor"}
            template = {"metadata": {"labels": {**one["spec"]["predictor"].get("labels", {}), **app}}, "spec": pod}
            spec = {"selector": {"matchLabels": app}, "template": template}
            yield {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": one["metadata"], "spec": spec}


def pods_are_restricted(objects: list[Object]) -> Iterator[str]:
    """Pod security standard ``restricted``, with a read-only root filesystem and explicit users."""
    for one, template in templates(objects):
        spec = template["spec"]
        yield from (f"{name(one)}: {field}" for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field))
        for volume in spec.get("volumes", []):
            yield from (f"{name(one)}: a volume of the kind {kind}" for kind in volume.keys() - {"name"} - VOLUMES)
        pod = spec.get("securityContext", {})
        if not pod.get("fsGroup"):
            yield f"{name(one)}: no fsGroup above 0, so that claims belong to root"
        for container in containers(spec):
            own = {**{field: pod[field] for field in OF_PODS if field in pod}, **container.get("securityContext", {})}
            if {field: own.get(field) for field in SECURE} != SECURE or own.keys() - SECURE.keys() - {*OF_PODS}:
                yield f"{name(one)}: {container['name']}: the security context is {own}, expected {SECURE}"
            if not own.get("runAsUser"):
                yield f"{name(one)}: {container['name']}: no runAsUser above 0"


def temporary_files_have_a_place(objects: list[Object]) -> Iterator[str]:
    for where, spec, container in each_container(objects):
        empty = {volume["name"] for volume in spec.get("volumes", []) if "emptyDir" in volume}
        mounted = {mount["mountPath"] for mount in container.get("volumeMounts", []) if mount["name"] in empty}
        values = {variable["name"]: variable.get("value") for variable in container.get("env", [])} | {"/tmp": "/tmp"}
        for variable in ("/tmp", "HOME", "TMPDIR"):
            if values.get(variable) not in mounted:
                yield f"{where}: {variable} is {values.get(variable)}, where no emptyDir is"


def selectors_match(objects: list[Object]) -> Iterator[str]:
    pods = [template for _, template in templates(objects)]
    later = [*pods, *(template for _, template in templates(as_made(all_of_ours())))]
    for one in objects:
        spec = one.get("spec", {})
        if one["kind"] == "Deployment" and not selects(spec["selector"]["matchLabels"], spec["template"]):
            yield f"{name(one)}: the selector does not match the template's labels"
        selector, among = {
            "Service": (spec.get("selector"), pods),
            "PodDisruptionBudget": (spec.get("selector", {}).get("matchLabels", {"of": "no pod"}), pods),
            "PodMonitor": (spec.get("selector", {}).get("matchLabels"), later),  # may be there before the pods are
            "NetworkPolicy": (spec.get("podSelector", {}).get("matchLabels"), later),
        }.get(one["kind"], (None, pods))
        if selector and not any(selects(selector, template) for template in among):
            yield f"{name(one)}: no pod has the labels that it selects"


def resources_are_set(objects: list[Object]) -> Iterator[str]:
    """Every pod has what the quota requires, and no limit is below its request."""
    for where, _, container in each_container(objects):
        resources = container.setdefault("resources", {})
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        if not {"cpu", "memory"} <= requests.keys() or "memory" not in limits:
            yield f"{where}: expected requests of cpu and memory, and a limit of memory"
        for key, request in requests.items():
            if quantity(limits.get(key, request)) < quantity(request):
                yield f"{where}: the limit of {key} is below the request"


def probes_and_ports(objects: list[Object]) -> Iterator[str]:
    """Probes, Services and monitors use ports and paths at which a container's program answers."""
    for where, _, container in each_container(objects):
        for kind in PROBES:
            request = container.get(kind, {}).get("httpGet")
            if request and not answers(container, request["port"], request["path"]):
                yield f"{where}: {kind} requests {request['path']} at the port {request['port']}, which does not answer"
    for one in objects:
        for port in one["spec"]["ports"] if one["kind"] == "Service" else ():
            target = port.get("targetPort", port["port"])
            if not any(serves(container, target) for container in selected(objects, one["spec"]["selector"])):
                yield f"{name(one)}: no port {target} of the pods that it selects"
        for endpoint in one["spec"]["podMetricsEndpoints"] if one["kind"] == "PodMonitor" else ():
            port, path = endpoint.get("port", endpoint.get("portNumber")), endpoint.get("path", "/metrics")
            labels = one["spec"]["selector"].get("matchLabels", {})
            if not any(answers(container, port, path) for container in selected(objects, labels)):
                yield f"{name(one)}: nothing answers at the port {port} and {path} of the pods that it selects"
        for rule in one["spec"].get("ingress", []) if one["kind"] == "NetworkPolicy" else ():
            pods = selected(objects, one["spec"]["podSelector"].get("matchLabels", {}))
            for number in (port["port"] for port in rule.get("ports", []) if "port" in port):
                if not any(serves(container, number) for container in pods):
                    yield f"{name(one)}: no port {number} of the pods that it selects"


def serves(container: Object, port: int | str | None) -> bool:
    return any(port in (one.get("name"), one["containerPort"]) for one in container.get("ports", []))


def answers(container: Object, port: int | str | None, path: str) -> bool:
    """Return whether a container answers at a path; MLflow at /metrics only if a variable enables it."""
    program = [*container.get("command", []), *container.get("args", []), ""][0]
    if not serves(container, port) or path not in ANSWERS.get(program, ()):
        return False
    variables = {one["name"] for one in container.get("env", [])}
    return (program, path) != ("mlflow", "/metrics") or "MLFLOW_EXPOSE_PROMETHEUS" in variables


def selected(objects: list[Object], labels: Mapping[str, str]) -> list[Object]:
    """Return the containers of the pods with these labels; without any, those of other components."""
    for those in (objects, as_made(all_of_ours())):
        pods = [template for _, template in templates(those) if selects(labels, template)]
        if pods:
            return [container for template in pods for container in containers(template["spec"])]
    return []


def references(objects: list[Object]) -> Iterator[str]:
    """Every object and key that another names exists, or an annotation lists it as external."""
    existing = {(one["kind"].lower(), one["metadata"]["name"]): one for one in objects}
    for one in objects:
        template = next((template for _, template in templates([one])), None)
        external = {
            key.partition("/")[2]: value.split(", ")
            for key, value in one["metadata"].get("annotations", {}).items()
            if key.startswith(f"{EXTERNAL}/")
        }
        for kind, which, key in sorted({*(named(template["spec"]) if template else named_by(one))}, key=str):
            known = external.get(f"{kind}-{which}")
            if known is None and (kind, which) in existing:
                known = [*existing[kind, which].get("data", {})]
            if known is None:
                yield f"{name(one)}: there is no {kind} {which}, and no annotation {EXTERNAL}/{kind}-{which}"
            elif key and key not in known:
                yield f"{name(one)}: the {kind} {which} has no key {key}"
        for subject in one["subjects"] if one["kind"] == "RoleBinding" else ():
            if subject["kind"] == "ServiceAccount" and not subject.get("namespace"):
                yield f"{name(one)}: the subject {subject['name']} has no namespace"
        for rule in one["rules"] if one["kind"] == "Role" else ():
            missing = [which for which in rule.get("resourceNames", [""]) if ("deployment", which) not in existing]
            yield from (f"{name(one)}: there is no deployment {which}" for which in missing)


def named_by(one: Object) -> Iterator[tuple[str, str, None]]:
    references = [one["roleRef"], *one["subjects"]] if one["kind"] == "RoleBinding" else []
    if one["kind"] == "TrainJob":  # a TrainJob with its runtime is a Job by now
        references = [{"kind": "ClusterTrainingRuntime", **one["spec"]["runtimeRef"]}]
    yield from ((found["kind"].lower(), found["name"], None) for found in references)


def named(spec: Object) -> Iterator[tuple[str, str, str | None]]:
    """Yield kind, name and key of each object that a pod's spec refers to."""
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
                if field in ("configMapKeyRef", "secretKeyRef") and not found.get("optional"):
                    yield field.removesuffix("KeyRef").lower(), found["name"], found["key"]


def paths_and_variables_exist(objects: list[Object]) -> Iterator[str]:
    """Every path that a container gets is in a volume, and every variable that it expands is set."""
    for where, spec, container in each_container(objects):
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
        yield from (f"{where}: no volume {which} to mount" for which in {*mounts.values()} - volumes)
        variables = {one["name"]: one.get("value", "") for one in container.get("env", [])}
        for word in (*variables.values(), *container.get("command", []), *container.get("args", [])):
            unset = {*re.findall(r"(?<!\$)\$\((\w+)\)", word)} - variables.keys()
            yield from (f"{where}: $({which}) is not set" for which in unset)
            path = PurePosixPath(word.removeprefix("sqlite:///"))
            if path.is_absolute() and not any(path.is_relative_to(mount) for mount in mounts):
                yield f"{where}: {word} is in no volume"


@cache
def all_of_ours() -> list[Object]:
    """Return every object in a file of base and components."""
    files = [*K8S.glob("base/*.yaml"), *K8S.glob("components/*/*.yaml"), *K8S.glob("namespace/*.yaml")]
    return [one for file in files for one in read_all(file) if isinstance(one, dict) and "metadata" in one]


RULES = (
    pods_are_restricted, temporary_files_have_a_place, selectors_match, resources_are_set, probes_and_ports,
    references, paths_and_variables_exist,
)  # fmt: skip
