"""What the API server, the first start, Argo CD or Flux would find wrong with manifests that are applied together.

Each rule takes all objects and yields what is wrong in words; ``RULES`` has them all, ``faults`` asks them.
"""

from __future__ import annotations

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
    Object,
    each_container,
    name,
    namespace_of,
    quantity,
    read_all,
    selects,
    templates,
)
from pod_security import containers, violations

from realmops.serve.server import DRAIN_SECONDS

OF_OTHERS = {"Application", "GitRepository", "Kustomization"}  # objects of Argo CD and Flux, in their namespaces
EXTERNAL = "external.realmops"  # annotation external.realmops/secret-NAME: what people have to make, with its keys
HANDLERS = {"exec", "httpGet", "tcpSocket", "grpc"}
ACCESS_MODES = {"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"}
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # DNS-1123
SERVICE = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")  # DNS-1035
SUBDOMAIN = re.compile(rf"(?=.{{1,253}}$){LABEL.pattern}(\.{LABEL.pattern})*")
WORD = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # of a label: its value, its key behind the domain
PORT_NAME = re.compile(r"(?=.{1,15}$)(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
DURATION = re.compile(r"(\d+(\.\d+)?(ms|s|m|h))+")
ADDRESS = re.compile(r"https?://([a-z0-9-]+)(?:\.([a-z0-9-]+))?[a-z.]*:(\d+)")
FIELDS = {
    "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName",
    "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs",
}  # fmt: skip
RESOURCES = re.compile(r"(requests\.|limits\.)?(cpu|memory|storage|ephemeral-storage|([a-z0-9-]+\.)+[a-z]+/[\w.-]+)")
COUNTED = {
    "pods", "services", "secrets", "configmaps", "persistentvolumeclaims", "services.nodeports",
    "services.loadbalancers",
}  # fmt: skip
VERBS = {"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}
UNHEARD_SECONDS = 10  # until every proxy knows that a pod ends; a guess, as Kubernetes sets no bound
LEAST = {
    "activeDeadlineSeconds": 1, "backoffLimit": 0, "completions": 0, "expirationSeconds": 600, "failureThreshold": 1,
    "initialDelaySeconds": 0, "parallelism": 0, "periodSeconds": 1, "progressDeadlineSeconds": 1, "replicas": 0,
    "successThreshold": 1, "terminationGracePeriodSeconds": 0, "timeoutSeconds": 1, "ttlSecondsAfterFinished": 0,
}  # fmt: skip
# by program: where it answers; tests/test_mlflow_server.py and tests/test_serve.py ask each of them
ANSWERS = {"mlflow": {"/health", "/version", "/metrics"}, "serve": {"/health/live", "/health/ready", "/metrics"}}
AUDIENCES = {"pipelines.kubeflow.org"}  # of tokens: who is to take them
ANNOTATIONS = {
    "argocd.argoproj.io/hook": {"PreSync", "Sync", "PostSync", "SyncFail", "Skip"},
    "argocd.argoproj.io/hook-delete-policy": {"BeforeHookCreation", "HookSucceeded", "HookFailed"},
    "argocd.argoproj.io/sync-options": {"Prune=false", "Delete=false", "Prune=false,Delete=false"},
    "kustomize.toolkit.fluxcd.io/prune": {"disabled"},
    "kustomize.toolkit.fluxcd.io/force": {"enabled"},
}
SYNC_OPTIONS = {"RespectIgnoreDifferences", "CreateNamespace", "ServerSideApply", "ApplyOutOfSyncOnly", "PruneLast"}


def faults(objects: Iterable[Object], version: str = NEWEST) -> list[str]:
    """Everything wrong with what is applied together; an empty list is what is wanted."""
    together = list(objects)
    found = [f"{name(one)}: {problem}" for one in together for problem in schema_faults(one, version)]
    if found:
        return found  # rules rely on the shape that schemas give
    together = list(as_made(together))
    return [fault for rule in RULES for fault in rule(together)]


def schema_faults(one: Object, version: str) -> tuple[str, ...]:
    """Unknown fields, wrong types and missing fields: by the schemas of this version of Kubernetes, and of others."""
    if one["kind"] in custom_resources.SOURCES:
        return tuple(custom_resources.faults_of(one, version))
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


def as_made(objects: list[Object]) -> Iterator[Object]:
    """The objects, with what others make of theirs.

    Kubeflow Trainer makes a Job of a TrainJob and its runtime, which stands in their place; KServe, in mode Standard,
    a Deployment and an autoscaler of an InferenceService, which stand beside it.
    """
    runtimes = {one["metadata"]["name"]: one for one in objects if one["kind"] == "TrainingRuntime"}
    for one in objects:
        if one["kind"] == "TrainJob" and one["spec"]["runtimeRef"]["name"] in runtimes:
            spec = runtimes[one["spec"]["runtimeRef"]["name"]]["spec"]
            [node] = spec["template"]["spec"]["replicatedJobs"]
            template = json.loads(json.dumps(node["template"]["spec"]["template"]))
            template["spec"].setdefault("restartPolicy", "OnFailure")
            trainer = one["spec"].get("trainer", {})
            for container in template["spec"]["containers"]:
                container["resources"] = trainer.get("resourcesPerNode", container.get("resources", {}))
            nodes = trainer.get("numNodes", spec["mlPolicy"].get("numNodes", 1))
            yield {"kind": "Job", "metadata": one["metadata"], "spec": {"parallelism": nodes, "template": template}}
        elif one["kind"] != "TrainingRuntime":
            yield one
        if one["kind"] == "InferenceService":
            yield from made_by_kserve(one)


def made_by_kserve(one: Object) -> Iterator[Object]:
    """As reconcilers/deployment/deployment_reconciler.go and reconcilers/hpa/hpa_reconciler.go of KServe 0.20 do it."""
    predictor = one["spec"]["predictor"]
    beside = custom_resources.BESIDE_POD
    made = {**one["metadata"], "name": f"{one['metadata']['name']}-predictor"}
    made.pop("annotations", None)
    labels = {**predictor.get("labels", {}), "app": f"isvc.{made['name']}"}
    template = {
        "metadata": {"labels": labels},
        "spec": {key: value for key, value in predictor.items() if key not in beside},
    }
    spec = {"selector": {"matchLabels": {"app": labels["app"]}}, "template": template}
    if "deploymentStrategy" in predictor:
        spec["strategy"] = predictor["deploymentStrategy"]
    yield {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": made, "spec": spec}
    least = predictor.get("minReplicas", 1)
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": made["name"]}
    bounds = {
        "scaleTargetRef": target,
        "minReplicas": least,
        "maxReplicas": max(predictor.get("maxReplicas", 0), least),
    }
    yield {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": made, "spec": bounds}


def walk(value: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path, key and value of every field below a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, found in inner:
        yield f"{path}.{key}".lstrip("."), str(key), found
        yield from walk(found, f"{path}.{key}")


def unique_objects(objects: list[Object]) -> Iterator[str]:
    count = Counter((one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects)
    yield from (f"{kind}/{which} stands there {n} times" for (kind, _, which), n in count.items() if n > 1)


def one_namespace_that_is_restricted(objects: list[Object]) -> Iterator[str]:
    """Everything lies in one; where its object is here as well, it is ours, and names the user of the profile."""
    namespaces = [one for one in objects if one["kind"] == "Namespace"]
    for namespace in namespaces:
        labels = namespace["metadata"].get("labels", {})
        enforced = labels.get("pod-security.kubernetes.io/enforce")
        if enforced != "restricted":
            yield f"{name(namespace)} enforces the pod security {enforced}, wanted restricted"
        if "owner" not in namespace["metadata"].get("annotations", {}):
            yield f"{name(namespace)} has no annotation owner, without which Kubeflow makes no profile of it"
    inside = [one for one in objects if one["kind"] not in ("Namespace", "Profile", *OF_OTHERS)]
    if namespaces:
        wanted = namespaces[0]["metadata"]["name"]
    else:
        [(wanted, _)] = Counter(map(namespace_of, inside)).most_common(1) if inside else [(None, 0)]
    for one in (*namespaces, *inside):
        if namespace_of(one) != wanted:
            yield f"{name(one)} lies in the namespace {namespace_of(one)}, others in {wanted}"


def pods_are_restricted(objects: list[Object]) -> Iterator[str]:
    for one, template in templates(objects):
        found = sorted(violations(template["spec"], "restricted"))
        yield from (f"{name(one)}: not restricted: {what}" for what in found)


def names_are_dns(objects: list[Object]) -> Iterator[str]:
    for one in objects:
        pattern = {"Namespace": LABEL, "Service": SERVICE}.get(one["kind"], SUBDOMAIN)
        if not pattern.fullmatch(one["metadata"]["name"]):
            yield f"{name(one)}: the name is none of DNS-1123"
    for one, template in templates(objects):
        for inner in [*containers(template["spec"]), *template["spec"].get("volumes", [])]:
            if not LABEL.fullmatch(inner["name"]):
                yield f"{name(one)}: {inner['name']} is no label of DNS-1123"
        for kind, all_of in (
            ("containers", containers(template["spec"])),
            ("volumes", template["spec"].get("volumes", [])),
        ):
            count = Counter(inner["name"] for inner in all_of)
            yield from (f"{name(one)}: {n} {kind} have the name {which}" for which, n in count.items() if n > 1)


def labels_are_words(objects: list[Object]) -> Iterator[str]:
    for one in objects:
        for path, key, labels in walk(one):
            if key not in ("labels", "matchLabels"):
                continue
            for label, value in labels.items():
                domain, _, word = label.rpartition("/")
                if not WORD.fullmatch(word) or (domain and not SUBDOMAIN.fullmatch(domain)):
                    yield f"{name(one)}: {path}: {label} is no key of a label"
                if value and not WORD.fullmatch(value):
                    yield f"{name(one)}: {path}: {value} is no value of a label"


def annotations_are_known(objects: list[Object]) -> Iterator[str]:
    """Those that Argo CD and Flux read: another key or value does nothing, and nobody says so."""
    domains = {key.partition("/")[0] for key in ANNOTATIONS}
    for one in objects:
        for key, value in one["metadata"].get("annotations", {}).items():
            if key.partition("/")[0] in domains and value not in ANNOTATIONS.get(key, ()):
                yield f"{name(one)}: nobody knows the annotation {key}: {value}"


def selectors_match(objects: list[Object]) -> Iterator[str]:
    pods = [template for _, template in templates(objects)]
    for one in objects:
        spec = one.get("spec", {})
        if one["kind"] == "PodDisruptionBudget" and not spec.get("selector", {}).get("matchLabels"):
            yield f"{name(one)}: selects every pod of the namespace"
        if one["kind"] in ("Deployment", "StatefulSet", "DaemonSet"):
            if not selects(spec["selector"]["matchLabels"], spec["template"]):
                yield f"{name(one)}: the selector does not match the template's labels"
            continue
        selector = {
            "Service": spec.get("selector"),
            "PodDisruptionBudget": spec.get("selector", {}).get("matchLabels"),
            "PodMonitor": spec.get("selector", {}).get("matchLabels"),
            "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
        }.get(one["kind"])
        if one["kind"] in ("PodMonitor", "NetworkPolicy"):  # which may be there before the pods are
            pods_of = [*pods, *(template for _, template in templates(all_that_can_be()))]
        else:
            pods_of = pods
        if selector and not any(selects(selector, template) for template in pods_of):
            yield f"{name(one)}: no pod has the labels that it selects"


def restart_policies(objects: list[Object]) -> Iterator[str]:
    for one, template in templates(objects):
        allowed = ("Never", "OnFailure") if one["kind"] == "Job" else ("Always",)
        policy = template["spec"].get("restartPolicy", "Always")
        if policy not in allowed:
            yield f"{name(one)}: restartPolicy {policy}, allowed {' or '.join(allowed)}"


def failure_policies(objects: list[Object]) -> Iterator[str]:
    for one, template in templates(objects):
        rules = one["spec"].get("podFailurePolicy", {}).get("rules", []) if one["kind"] == "Job" else []
        if rules and template["spec"].get("restartPolicy") != "Never":
            yield f"{name(one)}: a podFailurePolicy wants restartPolicy Never"
        there = {container["name"] for container in containers(template["spec"])}
        for n, rule in enumerate(rules):
            if len({"onExitCodes", "onPodConditions"} & rule.keys()) != 1:
                yield f"{name(one)}: podFailurePolicy {n}: wanted one of onExitCodes and onPodConditions"
            if rule["action"] not in ("FailJob", "Ignore", "Count"):
                yield f"{name(one)}: podFailurePolicy {n}: the action {rule['action']}"
            codes = rule.get("onExitCodes", {"operator": "In", "values": [1]})
            if codes.get("containerName", *{*list(there)[:1]}) not in there:
                yield f"{name(one)}: podFailurePolicy {n}: there is no container {codes['containerName']}"
            if codes["operator"] not in ("In", "NotIn") or not codes["values"]:
                yield f"{name(one)}: podFailurePolicy {n}: wanted In or NotIn, and codes"
            if codes["operator"] == "In" and 0 in codes["values"]:
                yield f"{name(one)}: podFailurePolicy {n}: 0 is no failure"
            for condition in rule.get("onPodConditions", []):
                if condition["type"] != "DisruptionTarget":
                    yield f"{name(one)}: podFailurePolicy {n}: the condition {condition['type']}"


def numbers_are_large_enough(objects: list[Object]) -> Iterator[str]:
    for one in objects:
        for path, key, value in walk(one.get("spec", {})):
            if type(value) is not int:
                continue
            if key in LEAST and value < LEAST[key]:
                yield f"{name(one)}: {path} is {value}, allowed from {LEAST[key]} on"
            if key in ("containerPort", "port", "targetPort") and not 0 < value < 65536:
                yield f"{name(one)}: {path} is {value}, which is no port"


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
    for where, resources in [*claims, *asked, *hard]:
        for key in {*resources.get("requests", {}), *resources.get("limits", {})}:
            if not RESOURCES.fullmatch(key) and key not in COUNTED:
                yield f"{where}: there is no resource {key}"
    for where, resources in asked:
        limits = resources.get("limits", {})
        for key in resources.get("requests", {}):
            if "/" in key and key not in limits:
                yield f"{where}: {key} wants a limit, which is the request as well"
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
    """One handler for each probe; ports that the container has, and paths where its program answers."""
    for where, _, container in each_container(objects):
        ports = container.get("ports", [])
        names = [port["name"] for port in ports if "name" in port]
        yield from (f"{where}: {n} ports have the name {one}" for one, n in Counter(names).items() if n > 1)
        yield from (f"{where}: {one} is no name of a port" for one in names if not PORT_NAME.fullmatch(one))
        for kind in PROBES:
            probe = container.get(kind)
            if probe is None:
                continue
            handlers = HANDLERS & probe.keys()
            if len(handlers) != 1:
                yield f"{where}: {kind} has {len(handlers)} handlers, wanted 1 of {sorted(HANDLERS)}"
            if kind != "readinessProbe" and probe.get("successThreshold", 1) != 1:
                yield f"{where}: {kind} has a successThreshold other than 1"
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
    for those in (objects, all_that_can_be()):
        pods = [template for _, template in templates(those) if selects(labels, template)]
        if pods:
            return [container for template in pods for container in containers(template["spec"])]
    return []


def network_policies(objects: list[Object]) -> Iterator[str]:
    """Rules of the kinds that a policy is for; and who is told to call somebody outside may do it."""
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    for one in policies:
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
        ours = [
            one["spec"]
            for one in policies
            if template
            and "Egress" in one["spec"]["policyTypes"]
            and selects(one["spec"]["podSelector"].get("matchLabels", {}), template)
        ]
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


def proxies_are_off(objects: list[Object]) -> Iterator[str]:
    """A namespace of a profile has Istio's proxies put into pods; network policies leave them without their server."""
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    for one, template in templates(objects):
        under = any(selects(policy["spec"]["podSelector"].get("matchLabels", {}), template) for policy in policies)
        if under and template["metadata"]["labels"].get("sidecar.istio.io/inject") != "false":
            yield f"{name(one)}: has a network policy, and not the label sidecar.istio.io/inject: false"


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
            yield from (f"{name(one)}: there is no verb {verb}" for verb in rule["verbs"] if verb not in VERBS)
            if (rule["apiGroups"], rule["resources"]) != (["apps"], ["deployments/scale"]):
                yield f"{name(one)}: allows {rule['resources']} of {rule['apiGroups']}, wanted deployments/scale alone"
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
        known: set[str] = set()
        for variable in variables:
            if not VARIABLE.fullmatch(variable["name"]):
                yield f"{where}: {variable['name']} is no name of a variable"
            yield from (f"{where}: $({which}) is not set" for which in used(variable.get("value", "")) - known)
            known.add(variable["name"])
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            if field and field not in FIELDS and not re.fullmatch(r"metadata\.(labels|annotations)\['[^']+'\]", field):
                yield f"{where}: {variable['name']}: a pod has no field {field}"
            if variable.get("valueFrom") == {}:
                yield f"{where}: {variable['name']}: valueFrom is empty"
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
        for volume in volumes.values():
            for source in volume.get("projected", {}).get("sources", []):
                audience = source.get("serviceAccountToken", {}).get("audience", *AUDIENCES)
                if audience not in AUDIENCES:
                    yield f"{where}: a token for {audience}, wanted {', '.join(AUDIENCES)}"
        unused = volumes.keys() - {mount["name"] for one in containers(spec) for mount in one.get("volumeMounts", [])}
        yield from (f"{where}: nothing mounts the volume {one}" for one in unused)


def strategies(objects: list[Object]) -> Iterator[str]:
    """Two pods never write to one claim in an update; who only reads is replaced without a gap."""
    for one, template in templates(objects):
        if one["kind"] != "Deployment":
            continue
        strategy = one["spec"].get("strategy", {})
        claims = {volume["name"] for volume in template["spec"].get("volumes", []) if "persistentVolumeClaim" in volume}
        writes = any(
            mount["name"] in claims and not mount.get("readOnly")
            for container in containers(template["spec"])
            for mount in container.get("volumeMounts", [])
        )
        if writes and (strategy.get("type") != "Recreate" or "rollingUpdate" in strategy):
            yield f"{name(one)}: the strategy is {strategy.get('type')}, wanted Recreate and nothing else"
        recreated = strategy.get("type") == "Recreate" and (writes or not claims)
        if answered_by_service(one, template, objects) and not recreated:
            rolling = strategy.get("rollingUpdate", {})
            if strategy.get("type") != "RollingUpdate" or rolling.get("maxUnavailable") != 0:
                yield f"{name(one)}: wanted RollingUpdate with maxUnavailable 0, so that pods answer all the time"
            if rolling.get("maxSurge", "25%") in (0, "0%"):
                yield f"{name(one)}: maxSurge and maxUnavailable are both 0, which Kubernetes refuses"
            yield from (f"{name(one)}: {problem}" for problem in ends_early(template["spec"]))


def answered_by_service(one: Object, template: Object, objects: list[Object]) -> bool:
    """Whether a Service or KServe sends requests to the pods."""
    services = [found["spec"]["selector"] for found in objects if found["kind"] == "Service"]
    kserve = str(template["metadata"]["labels"].get("app", "")).startswith("isvc.")
    return kserve or any(selects(selector, template) for selector in services)


def ends_early(spec: Object) -> Iterator[str]:
    """Why a rolling update would lose requests: sent before a pod answers, or after it was told to end."""
    for container in containers(spec):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe not in container:
                yield f"container {container['name']} has no {probe}"
        slept = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if slept < UNHEARD_SECONDS:
            yield f"preStop sleeps {slept} s, wanted {UNHEARD_SECONDS}: until then requests come to a pod that ends"
        wanted, given = slept + DRAIN_SECONDS, spec.get("terminationGracePeriodSeconds", 30)
        if given <= wanted:
            yield f"terminationGracePeriodSeconds is {given}: preStop and the server's own end take {wanted}"


def scaled(objects: list[Object]) -> Iterator[str]:
    """What an autoscaler scales is there, says what it asks for, and leaves the number to it; budgets can be kept."""
    there = {name(one): one for one in objects}
    for one in objects:
        if one["kind"] == "HorizontalPodAutoscaler":
            target, spec = one["spec"]["scaleTargetRef"], one["spec"]
            found = there.get(f"{target['kind']}/{target['name']}")
            if found is None or found["apiVersion"] != target["apiVersion"]:
                yield f"{name(one)}: there is no {target['kind']} {target['name']} in {target['apiVersion']}"
                continue
            if "replicas" in found["spec"]:
                yield f"{name(found)}: has replicas, which each apply would take from {name(one)}"
            if spec.get("minReplicas", 1) > spec["maxReplicas"]:
                yield f"{name(one)}: minReplicas is above maxReplicas"
        if one["kind"] == "PodDisruptionBudget":
            labels, least = one["spec"].get("selector", {}).get("matchLabels", {}), one["spec"].get("minAvailable")
            for owner, template in templates(objects):
                scaler = scaler_of(owner, objects)
                pods = scaler["spec"].get("minReplicas", 1) if scaler else owner["spec"].get("replicas", 1)
                if selects(labels, template) and (type(least) is not int or not 0 < least < pods):
                    yield f"{name(one)}: minAvailable is {least} of {pods} pods, wanted from 1 to one less than these"


def scaler_of(one: Object, objects: list[Object]) -> Object | None:
    """The autoscaler of a Deployment."""
    scalers = [found for found in objects if found["kind"] == "HorizontalPodAutoscaler"]
    return next((two for two in scalers if two["spec"]["scaleTargetRef"]["name"] == one["metadata"]["name"]), None)


def one_node_for_one_claim(objects: list[Object]) -> Iterator[str]:
    """Pods that mount the same claim for one node want to be on the same one."""
    for claim in (one for one in objects if one["kind"] == "PersistentVolumeClaim"):
        which = {"claimName": claim["metadata"]["name"]}
        mounting = [
            (one, template)
            for one, template in templates(objects)
            if which in [volume.get("persistentVolumeClaim") for volume in template["spec"].get("volumes", [])]
        ]
        if claim["spec"].get("accessModes") != ["ReadWriteOnce"] or len(mounting) < 2:
            continue
        for one, template in mounting:
            near = template["spec"].get("affinity", {}).get("podAffinity", {})
            if not near.get("requiredDuringSchedulingIgnoredDuringExecution"):
                yield f"{name(one)}: mounts {name(claim)}, which is for one node, and may be put on another one"


def affinities(objects: list[Object]) -> Iterator[str]:
    """Pods that others shall be near are there, and have the labels themselves, so that a first one finds a place."""
    for one, template in templates(objects):
        near = template["spec"].get("affinity", {}).get("podAffinity", {})
        for term in near.get("requiredDuringSchedulingIgnoredDuringExecution", []):
            if not selects(term["labelSelector"]["matchLabels"], template):
                yield f"{name(one)}: wants to be near pods with labels that it has not: the first one finds no place"
            if not any(
                term["labelSelector"]["matchLabels"].items() <= labels.items() for labels in labels_of_pipelines()
            ):
                yield f"{name(one)}: wants to be near pods with labels that no pod of the pipelines has"
            if term["topologyKey"] not in ("kubernetes.io/hostname", "topology.kubernetes.io/zone"):
                yield f"{name(one)}: no node has the label {term['topologyKey']}"


def claims_are_mounted(objects: list[Object]) -> Iterator[str]:
    """By a pod that runs, where a sync waits for them: some are bound when the first pod mounts them, not before."""
    if not any("argocd.argoproj.io/hook" in one["metadata"].get("annotations", {}) for one in objects):
        return
    mounted = {
        volume.get("persistentVolumeClaim", {}).get("claimName")
        for one, template in templates(objects)
        if one["metadata"].get("annotations", {}).get("argocd.argoproj.io/hook") != "PostSync"
        and one["spec"].get("replicas", 0 if one["kind"] == "Deployment" else 1) > 0
        for volume in template["spec"].get("volumes", [])
    }
    for one in objects:
        if one["kind"] == "PersistentVolumeClaim" and one["metadata"]["name"] not in mounted:
            yield f"{name(one)}: no pod of the sync mounts it, which waits for it for ever"


def quota_has_room(objects: list[Object]) -> Iterator[str]:
    """One pod of each kind fits into the namespace's quota, and all pods of what has several at once."""
    if next(quantities(objects), None):
        return
    asked = [
        (times(one, objects), container.get("resources", {}))
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


def times(one: Object, objects: list[Object]) -> int:
    """How many of its pods there are at once: a Job's nodes, or as many as an autoscaler may want and one more."""
    scaler = scaler_of(one, objects)
    return scaler["spec"]["maxReplicas"] + 1 if scaler else max(one["spec"].get("parallelism", 1), 1)


def pod_defaults(objects: list[Object]) -> Iterator[str]:
    """What Kubeflow's webhook would put into pods is whole in itself, and for pods that the pipelines have."""
    for one in objects:
        if one["kind"] != "PodDefault":
            continue
        spec = one["spec"]
        container = {"name": "any", "image": "any:1", **{key: spec.get(key, []) for key in ("env", "volumeMounts")}}
        pod = {"containers": [container], "volumes": spec.get("volumes", [])}
        pods = {"apiVersion": "v1", "kind": "Pod", "metadata": one["metadata"], "spec": pod}
        if wrong := schema_faults(pods, NEWEST):
            yield from (f"{name(one)}: {problem}" for problem in wrong)
            continue
        made = [{**pods, "kind": "Job", "spec": {"template": {"metadata": {}, "spec": pod}}}]
        yield from (
            f"PodDefault: {fault}" for rule in (mounts_have_volumes, files_lie_in_volumes) for fault in rule(made)
        )
        if not any(spec["selector"]["matchLabels"].items() <= labels.items() for labels in labels_of_pipelines()):
            yield f"{name(one)}: no pod of the pipelines has the labels that it selects"


@cache
def labels_of_pipelines() -> list[dict[str, str]]:
    """The labels that the compiled pipelines give to their pods."""
    platforms = [read_all(file)[1]["platforms"] for file in sorted((K8S.parent / "pipelines").glob("*.yaml"))]
    executors = [one["kubernetes"]["deploymentSpec"]["executors"] for one in platforms]
    return [pod.get("podMetadata", {}).get("labels", {}) for one in executors for pod in one.values()]


def syncs(objects: list[Object]) -> Iterator[str]:
    """What Argo CD and Flux are told to apply is in this project, and what they are told of it."""
    there = {(one["kind"], one["metadata"]["name"]) for one in objects}
    for one in objects:
        spec = one.get("spec", {})
        if one["kind"] == "Application":
            folder, added = spec["source"]["path"], spec["source"]["kustomize"]["components"]
            options = spec.get("syncPolicy", {}).get("syncOptions", [])
            yield from (f"{name(one)}: no sync option {o}" for o in options if o.partition("=")[0] not in SYNC_OPTIONS)
            backoff = spec.get("syncPolicy", {}).get("retry", {}).get("backoff", {})
            times = [backoff[key] for key in ("duration", "maxDuration") if key in backoff]
            yield from (f"{name(one)}: {time} is no duration" for time in times if not DURATION.fullmatch(time))
            aimed = [(ignored["kind"], ignored["name"]) for ignored in spec.get("ignoreDifferences", [])]
            namespace = spec["destination"]["namespace"]
        elif one["kind"] == "Kustomization":
            folder, added = spec["path"], spec.get("components", [])
            source = (spec["sourceRef"]["kind"], spec["sourceRef"]["name"])
            if source not in there:
                yield f"{name(one)}: there is no {'/'.join(source)}"
            aimed = [(patch["target"]["kind"], patch["target"]["name"]) for patch in spec.get("patches", [])]
            namespace = None
        else:
            continue
        overlay = K8S.parent / folder
        if not (overlay / "kustomization.yaml").is_file():
            yield f"{name(one)}: there is no kustomization {folder}"
            continue
        kustomization = read_all(overlay / "kustomization.yaml")[0]
        if namespace not in (None, kustomization["namespace"]):
            yield f"{name(one)}: goes to the namespace {namespace}, {folder} to {kustomization['namespace']}"
        missing = [path for path in added if not (overlay / path / "kustomization.yaml").is_file()]
        yield from (f"{name(one)}: there is no component {path}" for path in missing)
        files = {(one["kind"], one["metadata"]["name"]) for one in all_of_ours()}
        yield from (f"{name(one)}: there is no {kind} {which}" for kind, which in aimed if (kind, which) not in files)


@cache
def all_that_can_be() -> list[Object]:
    """What stands in files of base and components, and what others make of it."""
    return [*as_made(all_of_ours())]


@cache
def all_of_ours() -> list[Object]:
    """Every object that stands in a file of base and components."""
    files = [*K8S.glob("base/*.yaml"), *K8S.glob("components/*/*.yaml"), *K8S.glob("namespace/*.yaml")]
    return [one for file in files for one in read_all(file) if isinstance(one, dict) and "metadata" in one]


RULES = (
    unique_objects,
    one_namespace_that_is_restricted,
    pods_are_restricted,
    names_are_dns,
    labels_are_words,
    annotations_are_known,
    selectors_match,
    restart_policies,
    failure_policies,
    numbers_are_large_enough,
    quantities,
    mounts_have_volumes,
    access_modes,
    probes_and_ports,
    network_policies,
    proxies_are_off,
    references,
    images_are_fixed,
    root_is_read_only,
    environments,
    files_lie_in_volumes,
    strategies,
    scaled,
    one_node_for_one_claim,
    affinities,
    claims_are_mounted,
    quota_has_room,
    pod_defaults,
    syncs,
)
