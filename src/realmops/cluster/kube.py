"""The cluster's own API: how it is reached, what is there, and why pods wait or have failed.

A command that is advised names the namespace: who types it has another one as default.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
TIME_OUT = (5, 60)  # seconds to connect, and for an answer
READERS = {  # of the client, by kind
    "PersistentVolumeClaim": ("CoreV1Api", "read_namespaced_persistent_volume_claim"),
    "ServiceAccount": ("CoreV1Api", "read_namespaced_service_account"),
    "Deployment": ("AppsV1Api", "read_namespaced_deployment"),
}


class RefusedError(ValueError):
    """The API server refuses; the same request later is refused as well."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the API server says {status} {reason}")
        self.status = status


@dataclass(frozen=True)
class Cluster:
    """A cluster that can be asked.

    ``namespace`` is this pod's own, else the context's; ``seen_by`` says how it was found.
    """

    client: Any
    namespace: str
    seen_by: str

    def ask(self, kind: str, function: str, *words: Any, **options: Any) -> Any:
        """Call a function of one of the client's APIs; RefusedError, or TimeoutError where trying again may help."""
        from kubernetes import client
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        api = getattr(client, kind)(self.client)
        try:
            return getattr(api, function)(*words, **options, _request_timeout=TIME_OUT)
        except ApiException as error:
            if error.status >= 500 or error.status == 429:
                raise TimeoutError(f"the cluster's API server says {error.status} {error.reason}") from None
            raise RefusedError(error.status, error.reason) from None
        except HTTPError as error:
            raise TimeoutError(f"the cluster's API server does not answer: {error}") from None

    def has(self, kind: str, name: str, namespace: str) -> bool:
        """Whether an object is there; RefusedError where that is not for us to know."""
        try:
            self.ask(*READERS[kind], name, namespace)
        except RefusedError as error:
            if error.status == 404:
                return False
            raise
        return True

    def pods(self, namespace: str, labels: str, phase: str) -> list[str]:
        """A line for each pod with these labels in that phase, as Pending or Failed: its name, and why."""
        chosen = {"label_selector": labels, "field_selector": f"status.phase={phase}"}
        found = self.ask("CoreV1Api", "list_namespaced_pod", namespace, **chosen)
        return [f"{pod.metadata.name}: {', '.join(_reasons(pod.status)) or 'no reason yet'}" for pod in found.items]

    def warnings(self, namespace: str, prefix: str) -> list[str]:
        """The last warning of each pod whose name begins so; a list comes by name, not by time."""
        of_pods = "involvedObject.kind=Pod,type=Warning"
        found = self.ask("CoreV1Api", "list_namespaced_event", namespace, field_selector=of_pods).items
        found.sort(key=_seen)
        last = {event.involved_object.name: f"{event.reason}: {event.message}" for event in found}
        return [f"{name}: {warning}" for name, warning in last.items() if name.startswith(prefix)]


def _seen(event: Any) -> float:
    """When an event was last seen: one that repeats keeps its name, and which field says so depends on its maker."""
    times = (event.series and event.series.last_observed_time, event.last_timestamp, event.event_time)
    return max((one.timestamp() for one in times if one), default=0.0)


def _reasons(status: Any) -> Iterator[str]:
    if status.reason:
        yield f"{status.reason}, {status.message}"
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            yield f"{condition.reason}, {condition.message}"
    containers: Iterable[Any] = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
    for container in containers:
        if waiting := container.state and container.state.waiting:
            yield f"{waiting.reason}, {waiting.message}" if waiting.message else str(waiting.reason)
        ended = container.state and container.state.terminated
        if ended and ended.exit_code:
            yield f"{container.name} ended with {ended.exit_code}, {ended.reason}"


def connect() -> Cluster:
    """The cluster that this pod is in, outside of pods that of KUBECONFIG; ValueError where there is none."""
    from kubernetes import client, config
    from kubernetes.config import ConfigException
    from yaml import YAMLError

    try:
        if NAMESPACE.is_file():
            config.load_incluster_config()
            return Cluster(client.ApiClient(), NAMESPACE.read_text().strip(), "this pod's ServiceAccount")
        file = os.environ.get("KUBECONFIG")
        config.load_kube_config(file)
        _, context = config.list_kube_config_contexts(file)
        namespace = context["context"].get("namespace", "default")
        return Cluster(client.ApiClient(), namespace, f"the kubeconfig's context {context['name']}")
    except (ConfigException, OSError, YAMLError) as error:
        raise ValueError(f"there is no cluster to speak to ({error})") from None


def at_hand() -> Cluster | None:
    """The same, None where there is none."""
    files = (os.environ.get("KUBECONFIG") or "~/.kube/config").split(os.pathsep)
    if not NAMESPACE.is_file() and not any(Path(file).expanduser().is_file() for file in files):
        return None
    try:
        return connect()
    except (ImportError, ValueError):
        return None


def describe_pods(describe: Callable[[Cluster], list[str]]) -> list[str]:
    """Return lines about pods of the cluster at hand; empty where there is none, or listing is forbidden."""
    cluster = at_hand()
    try:
        return describe(cluster) if cluster else []
    except (RefusedError, TimeoutError):
        return []
