"""What the API server or the first start would find wrong with manifests that are applied together.

Each rule takes all objects and yields what is wrong in words; ``RULES`` has them all, ``faults`` asks them.
"""

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

EXTERNAL = "external.realmops"  # annotation external.realmops/secret-NAME: what people have to make, with its keys
HANDLERS = {"exec", "httpGet", "tcpSocket", "grpc"}
ADDRESS = re.compile(r"https?://([a-z0-9-]+)(?:\.([a-z0-9-]+))?[a-z.]*:(\d+)")
# by program: where it answers; tests/tracking/test_mlflow_server.py and tests/serve/test_serve.py ask each of them
ANSWERS = {"mlflow": {"/health", "/version", "/metrics"}, "serve": {"/health/live", "/health/ready", "/metrics"}}
OF_PODS = ("runAsNonRoot", "runAsUser", "runAsGroup", "seccompProfile")  # which a container has from its pod
SECURE = {
    "runAsNonRoot": True, "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"  # DNS-1123
OF_GITOPS = r"metadata\.annotations\.(argocd\.argoproj|kustomize\.toolkit\.fluxcd)\.io/"
# What schemas leave open, by a value's path: the first row whose path it has says what it may be.
VALUES = {
    r"metadata\.name": rf"{LABEL}(\.{LABEL})*",
    r".*\.(containers|volumes)\.\d+\.name": LABEL,
    r".*\.ports\.\d+\.name": r"(?=.{1,15}$)(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*",
    r".*\.env\.\d+\.name": r"[A-Za-z_][A-Za-z0-9_]*",
    # a tag that stays what it is; a kubelet refuses capital letters but in the host
    r".*\.image": r"([^/]*[.:][^/]*/)?([^/:A-Z]+/)*[^/:A-Z]+:(?!latest$)[^/:]+",
    r".*\.storageClassName": rf"{LABEL}(\.{LABEL})*",
    r".*\.fieldPath": r"(metadata\.(name|namespace|uid|(labels|annotations)\['.+'\])|status\.(host|pod)IPs?)",
    r".*\.(labels|matchLabels)\..+": r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?",
    r".*\.(requests|limits|hard)\.(?!\d).+|.*\.sizeLimit": QUANTITY.pattern,
    r".*\.accessModes\.\d+": r"Read(WriteOnce|OnlyMany|WriteMany|WriteOncePod)",
    r".*\.(failureThreshold|periodSeconds|timeoutSeconds|\w*[dD]eadlineSeconds)": r"[1-9]\d*",
    r".*\.(hostPort|(httpGet|tcpSocket)\.host)": "nothing that a restricted pod may have",
    r".*\.expirationSeconds": r"[6-9]\d\d|\d{4,}",
    r".*\.topologyKey": r"kubernetes\.io/hostname|topology\.kubernetes\.io/zone",
    r".*\.audience": r"pipelines\.kubeflow\.org",
    r".*\.syncOptions\.\d+": r"(RespectIgnoreDifferences|CreateNamespace|ServerSideApply|PruneLast)=true",
    r".*\.(duration|maxDuration)": r"(\d+(\.\d+)?(ms|s|m|h))+",
    f"{OF_GITOPS}hook": "Sync|PostSync",
    f"{OF_GITOPS}hook-delete-policy": "BeforeHookCreation|HookSucceeded|HookFailed",
    f"{OF_GITOPS}sync-options": r"(Prune|Delete)=false(,Delete=false)?|Force=true,Replace=true",
    f"{OF_GITOPS}prune": "disabled",
    f"{OF_GITOPS}force": "enabled",
    f"{OF_GITOPS}.*": "nothing that Argo CD or Flux knows",
}


def faults(objects: Iterable[Object], version: str = NEWEST) -> list[str]:
    """Everything wrong with what is applied together; an empty list is what is wanted."""
    together = list(objects)
    found = [f"{name(one)}: {problem}" for one in together for problem in shape_faults(one, version)]
    if found:
        return found  # rules rely on the shapes
    together = [*as_made(together)]
    return [fault for rule in RULES for fault in rule(together)]


def shape_faults(one: Object, version: str) -> tuple[str, ...]:
    """By the schemas of this version of Kubernetes and of others, and by ``VALUES``."""
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
    """Values that ``VALUES`` does not allow, and names that stand twice in a list."""
    for path, value in walk(one):
        if isinstance(value, list):
            for field in ("mountPath",) if path.endswith(".volumeMounts") else ("name",):
                count = Counter(inner[field] for inner in value if isinstance(inner, dict) and field in inner)
                yield from (f"{path}: {which} stands there {n} times" for which, n in count.items() if n > 1)
        elif not isinstance(value, dict):
            allowed = next((allowed for which, allowed in VALUES.items() if re.fullmatch(which, path)), ".*")
            if not re.fullmatch(allowed, str(value), re.DOTALL):
                yield f"{path} is {value}, wanted {allowed}"


def as_made(objects: Iterable[Object]) -> Iterator[Object]:
    """The objects, with what others make of theirs.

    Kubeflow Trainer and JobSet make a Job of a TrainJob and its runtime, which stands in their place (without the
    variables for torchrun and its port); KServe, in mode Standard, a Deployment of an InferenceService, which stands
    beside it (reconcilers/deployment/deployment_reconciler.go).
    """
    objects = [*objects]
    runtimes = {one["metadata"]["name"]: one for one in objects if one["kind"] == "TrainingRuntime"}
    for one in objects:
        if one["kind"] == "TrainJob" and one["spec"]["runtimeRef"]["name"] in runtimes:
            spec = runtimes[one["spec"]["runtimeRef"]["name"]]["spec"]
            [node] = spec["template"]["spec"]["replicatedJobs"]
            made = json.loads(json.dumps(node["template"]["spec"]))
            template = made["template"]
            template["spec"].setdefault("restartPolicy", "OnFailure")
            trainer = one["spec"].get("trainer", {})
            for container in template["spec"]["containers"]:
                container["resources"] = trainer.get("resourcesPerNode", container.get("resources", {}))
            nodes = trainer.get("numNodes", spec["mlPolicy"].get("numNodes", 1))
            made |= {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
            yield {"kind": "Job", "metadata": one["metadata"], "spec": made}
        elif one["kind"] != "TrainingRuntime":
            yield one
        if one["kind"] == "InferenceService":
            predictor = one["spec"]["predictor"]
            [(_, pod)] = custom_resources.pod_specs(one, custom_resources.fixture(one["kind"])["schema"], "")
            labels = {**predictor.get("labels", {}), "app": f"isvc.{one['metadata']['name']}-predictor"}
            template = {"metadata": {"labels": labels}, "spec": pod}
            spec = {"selector": {"matchLabels": {"app": labels["app"]}}, "template": template}
            yield {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": one["metadata"], "spec": spec}


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every field below a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, found in inner:
        yield f"{path}.{key}".lstrip("."), found
        yield from walk(found, f"{path}.{key}")


def pods_are_restricted(objects: list[Object]) -> Iterator[str]:
    """As the pod security standard of that name wants it, and a bit more: a root that nobody writes to."""
    for one, template in templates(objects):
        spec = template["spec"]
        for field in ("hostNetwork", "hostPID", "hostIPC"):
            if spec.get(field):
                yield f"{name(one)}: {field}"
        for volume in spec.get("volumes", []):
            yield from (f"{name(one)}: a volume of the kind {kind}" for kind in volume.keys() - {"name"} - VOLUMES)
        pod = spec.get("securityContext", {})
        if not pod.get("fsGroup"):
            yield f"{name(one)}: no fsGroup above 0, so that claims belong to root"
        for container in containers(spec):
            own = {**{field: pod[field] for field in OF_PODS if field in pod}, **container.get("securityContext", {})}
            if {field: own.get(field) for field in SECURE} != SECURE or own.keys() - SECURE.keys() - {*OF_PODS}:
                yield f"{name(one)}: {container['name']}: the security context is {own}, wanted {SECURE}"
            if not own.get("runAsUser"):
                yield f"{name(one)}: {container['name']}: no runAsUser above 0"


def temporary_files_have_a_place(objects: list[Object]) -> Iterator[str]:
    """/tmp, HOME and TMPDIR can be written."""
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


def resources_are_asked_for(objects: list[Object]) -> Iterator[str]:
    """As the quota wants it of every pod; no limit is below its request, and another resource's is that."""
    for where, _, container in each_container(objects):
        resources = container.setdefault("resources", {})
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        if not {"cpu", "memory"} <= requests.keys() or "memory" not in limits:
            yield f"{where}: wanted requests of cpu and memory, and a limit of memory"
        for key, asked in requests.items():
            if "/" in key and key not in limits:
                yield f"{where}: {key} wants a limit, which is the request as well"
            if quantity(limits.get(key, asked)) < quantity(asked):
                yield f"{where}: the limit of {key} is below the request"


def mounts_have_volumes(objects: list[Object]) -> Iterator[str]:
    for where, spec, container in each_container(objects):
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        mounts = container.get("volumeMounts", [])
        yield from (f"{where}: no volume {one['name']} to mount" for one in mounts if one["name"] not in volumes)


def probes_and_ports(objects: list[Object]) -> Iterator[str]:
    """One handler for each probe; ports that the container has, and paths where its program answers."""
    for where, _, container in each_container(objects):
        for kind in PROBES:
            probe = container.get(kind)
            if probe is None:
                continue
            handlers = HANDLERS & probe.keys()
            if len(handlers) != 1:
                yield f"{where}: {kind} has {len(handlers)} handlers, wanted 1 of {sorted(HANDLERS)}"
            for way in ("httpGet", "tcpSocket", "grpc"):
                if way in probe and not serves(container, probe[way]["port"]):
                    yield f"{where}: {kind} asks at the port {probe[way]['port']}, which the container has not"
            path = probe.get("httpGet", {}).get("path")
            if path and not answers(container, path):
                yield f"{where}: {kind} asks for {path}, where nothing is known to answer"
    for one in objects:
        for port in one["spec"]["ports"] if one["kind"] == "Service" else ():
            target = port.get("targetPort", port["port"])
            if not any(serves(container, target) for container in selected(objects, one["spec"]["selector"])):
                yield f"{name(one)}: no port {target} of the pods that it selects"
        for endpoint in one["spec"]["podMetricsEndpoints"] if one["kind"] == "PodMonitor" else ():
            asked = [
                container
                for container in selected(objects, one["spec"]["selector"].get("matchLabels", {}))
                if serves(container, endpoint.get("port", endpoint.get("portNumber")))
            ]
            if not asked:
                yield f"{name(one)}: no port {endpoint.get('port')} of the pods that it selects"
            path = endpoint.get("path", "/metrics")
            yield from (
                f"{name(one)}: nothing answers at {path}" for container in asked if not answers(container, path)
            )
        for rule in one["spec"].get("ingress", []) if one["kind"] == "NetworkPolicy" else ():
            for port in rule.get("ports", []):
                pods = selected(objects, one["spec"]["podSelector"].get("matchLabels", {}))
                if "port" in port and not any(serves(container, port["port"]) for container in pods):
                    yield f"{name(one)}: no port {port['port']} of the pods that it selects"


def serves(container: Object, port: int | str | None) -> bool:
    return any(port in (one.get("name"), one["containerPort"]) for one in container.get("ports", []))


def answers(container: Object, path: str) -> bool:
    """Whether a container's program has something at a path; MLflow at /metrics only when it is told to."""
    program = [*container.get("command", []), *container.get("args", []), ""][0]
    variables = {one["name"] for one in container.get("env", [])}
    told = program != "mlflow" or path != "/metrics" or "MLFLOW_EXPOSE_PROMETHEUS" in variables
    return told and path in ANSWERS.get(program, ())


def selected(objects: list[Object], labels: Mapping[str, str]) -> list[Object]:
    """The containers of the pods that have these labels; where there are none yet, of those of other components."""
    for those in (objects, as_made(all_of_ours())):
        pods = [template for _, template in templates(those) if selects(labels, template)]
        if pods:
            return [container for template in pods for container in containers(template["spec"])]
    return []


def policies_of(template: Object, objects: list[Object], kind: str = "") -> list[Object]:
    """The specs of the network policies for a pod; those of a kind, if it is named."""
    specs = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    ours = [spec for spec in specs if selects(spec["podSelector"].get("matchLabels", {}), template)]
    return [spec for spec in ours if not kind or kind in spec["policyTypes"]]


def network_policies(objects: list[Object]) -> Iterator[str]:
    """Rules of the kinds that a policy is for; and who is told to call somebody outside may do it."""
    for one in (one for one in objects if one["kind"] == "NetworkPolicy"):
        for kind in ("Ingress", "Egress"):
            if kind.lower() in one["spec"] and kind not in one["spec"].get("policyTypes", [kind]):
                yield f"{name(one)}: has {kind.lower()}, which its policyTypes do not name"
    services = {one["metadata"]["name"]: one for one in objects if one["kind"] == "Service"}
    configured = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    called: list[tuple[str, Object | None, str]] = [
        (name(one), None, value) for one in objects if one["kind"] == "ConfigMap" for value in one["data"].values()
    ]
    for one, template in templates(objects):
        for container in containers(template["spec"]):
            for variable in container.get("env", []):
                found = variable.get("valueFrom", {}).get("configMapKeyRef", {})
                of_map = configured.get(found.get("name"), {}).get(found.get("key"), "")
                called.append((name(one), template, variable.get("value", of_map)))
    for where, template, value in called:
        address = ADDRESS.match(value)
        if not address:
            continue
        host, namespace, port = address[1], address[2], int(address[3])
        ours = policies_of(template, objects, "Egress") if template else []
        allowed = [rule for spec in ours for rule in spec.get("egress", [])]
        if namespace is not None:
            wanted: Object = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
            ports: set[int | str] = {port}
        else:
            spec = services.get(host, {"spec": {"ports": []}})["spec"]
            target = [one.get("targetPort", one["port"]) for one in spec["ports"] if one["port"] == port]
            if not target:
                yield f"{where}: no service answers at {value}"
                continue
            wanted, ports = {"podSelector": {"matchLabels": spec["selector"]}}, {*target}
        if ours and not any(lets_out(rule, wanted, ports) for rule in allowed):
            yield f"{where}: no network policy lets it call {value}"


def lets_out(rule: Object, wanted: Object, ports: set[int | str]) -> bool:
    """Whether an egress rule has this peer, and one of these ports of it."""
    to_there = "to" not in rule or wanted in rule["to"]
    return to_there and ("ports" not in rule or any(one.get("port") in ports for one in rule["ports"]))


def references(objects: list[Object]) -> Iterator[str]:
    """That what is named is there, or is said to be made by others."""
    there = {(one["kind"].lower(), one["metadata"]["name"]): one for one in objects}
    for one in objects:
        template = next((template for _, template in templates([one])), None)
        wanted = {*named(template["spec"])} if template else {*named_by_binding(one)}
        declared = {
            key.partition("/")[2]: value
            for key, value in one["metadata"].get("annotations", {}).items()
            if key.startswith(f"{EXTERNAL}/")
        }
        for kind, which, key in sorted(wanted, key=str):
            if f"{kind}-{which}" in declared:
                keys = declared[f"{kind}-{which}"]
                if key and key not in keys.split(", "):
                    yield f"{name(one)}: the {kind} {which} has the keys {keys}, not {key}"
            elif (kind, which) not in there:
                yield f"{name(one)}: there is no {kind} {which}, and no annotation {EXTERNAL}/{kind}-{which}"
            elif key and key not in there[kind, which].get("data", {}):
                yield f"{name(one)}: the {kind} {which} has no key {key}"
        for unused in declared.keys() - {f"{kind}-{which}" for kind, which, _ in wanted}:
            yield f"{name(one)}: says that {unused} is made by others, and does not name it"
        for subject in one["subjects"] if one["kind"] == "RoleBinding" else ():
            if subject["kind"] == "ServiceAccount" and not subject.get("namespace"):
                yield f"{name(one)}: the subject {subject['name']} has no namespace"
        for rule in one["rules"] if one["kind"] == "Role" else ():
            missing = [which for which in rule.get("resourceNames", [""]) if ("deployment", which) not in there]
            yield from (f"{name(one)}: there is no deployment {which}" for which in missing)


def named_by_binding(one: Object) -> Iterator[tuple[str, str, None]]:
    if one["kind"] == "RoleBinding":
        yield one["roleRef"]["kind"].lower(), one["roleRef"]["name"], None
        for subject in one["subjects"]:
            yield subject["kind"].lower(), subject["name"], None
    if one["kind"] == "TrainJob":  # one whose runtime was found is a Job by now
        yield (
            one["spec"]["runtimeRef"].get("kind", "ClusterTrainingRuntime").lower(),
            one["spec"]["runtimeRef"]["name"],
            None,
        )


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
                if field in ("configMapKeyRef", "secretKeyRef") and not found.get("optional"):
                    yield field.removesuffix("KeyRef").lower(), found["name"], found["key"]


def environments(objects: list[Object]) -> Iterator[str]:
    for where, _, container in each_container(objects):
        variables = container.get("env", [])
        both = [variable["name"] for variable in variables if "value" in variable and "valueFrom" in variable]
        yield from (f"{where}: {which} has both value and valueFrom" for which in both)
        known: set[str] = set()
        for variable in variables:
            yield from (f"{where}: $({which}) is not set" for which in used(variable.get("value", "")) - known)
            known.add(variable["name"])
        words = " ".join([*container.get("command", []), *container.get("args", [])])
        yield from (f"{where}: $({which}) is not set" for which in used(words) - known)


def used(text: str) -> set[str]:
    return {*re.findall(r"(?<!\$)\$\((\w+)\)", text)}


def files_lie_in_volumes(objects: list[Object]) -> Iterator[str]:
    """Each path that a container is given: nothing is written elsewhere, and a volume of tokens has no other files."""
    for where, spec, container in each_container(objects):
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        mounts = {mount["mountPath"]: volumes.get(mount["name"], {}) for mount in container.get("volumeMounts", [])}
        words = [one.get("value", "") for one in container.get("env", [])]
        words += [*container.get("command", []), *container.get("args", [])]
        for word in words:
            path = PurePosixPath(word.removeprefix("sqlite:///"))
            if not path.is_absolute():
                continue
            mount = next((one for one in sorted(mounts, reverse=True) if path.is_relative_to(one)), None)
            if mount is None:
                yield f"{where}: {word} lies in no volume"
            elif sources := mounts[mount].get("projected", {}).get("sources"):
                files = [found["path"] for source in sources for found in source.values() if "path" in found]
                if str(path.relative_to(mount)) not in files:
                    yield f"{where}: {word} is none of {files} in the volume {mounts[mount]['name']}"
        unused = volumes.keys() - {mount["name"] for one in containers(spec) for mount in one.get("volumeMounts", [])}
        yield from (f"{where}: nothing mounts the volume {one}" for one in unused)


def quota_has_room(objects: list[Object]) -> Iterator[str]:
    """One pod of each kind fits into the namespace's quota, all nodes of a Job, and what an autoscaler may want."""
    scaled = [one["spec"] for one in objects if one["kind"] == "HorizontalPodAutoscaler"]
    most_of = {spec["scaleTargetRef"]["name"]: spec["maxReplicas"] + 1 for spec in scaled}
    asked = [
        (most_of.get(one["metadata"]["name"], max(one["spec"].get("parallelism", 1), 1)), container["resources"])
        for one, template in templates(objects)
        for container in containers(template["spec"])
    ]
    for quota in (one for one in objects if one["kind"] == "ResourceQuota"):
        for key, most in quota["spec"]["hard"].items():
            resource = key.removeprefix("requests.")
            wanted = sum(
                pods * quantity({**one.get("limits", {}), **one.get("requests", {})}.get(resource, 0))
                for pods, one in asked
            )
            if resource != key and wanted > quantity(most):
                yield f"{name(quota)}: {key} is {most}, and the pods want {wanted}"


@cache
def all_of_ours() -> list[Object]:
    """Every object that stands in a file of base and components."""
    files = [*K8S.glob("base/*.yaml"), *K8S.glob("components/*/*.yaml"), *K8S.glob("namespace/*.yaml")]
    return [one for file in files for one in read_all(file) if isinstance(one, dict) and "metadata" in one]


RULES = (
    pods_are_restricted, temporary_files_have_a_place, selectors_match, resources_are_asked_for,
    mounts_have_volumes, probes_and_ports, network_policies, references, environments, files_lie_in_volumes,
    quota_has_room,
)  # fmt: skip
