"""Access to the Kubernetes API: connection, and reasons for pending and failed pods."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
TIME_OUT = (5, 60)  # seconds to connect, and to read the response


class RefusedError(ValueError):
    """The API server rejected a request with a status for which a retry does not help."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the Kubernetes API server returned {status} {reason}")
        self.status = status


@dataclass(frozen=True)
class Cluster:
    """A connection with this pod's namespace, or that of the kubeconfig's context."""

    client: Any
    namespace: str

    def call(self, kind: str, function: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of an API class; RefusedError for a rejected request, TimeoutError where a retry may help."""
        from kubernetes import client
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        api = getattr(client, kind)(self.client)
        try:
            return getattr(api, function)(*arguments, **options, _request_timeout=TIME_OUT)
        except ApiException as error:
            if error.status >= 500 or error.status == 429:
                raise TimeoutError(f"the Kubernetes API server returned {error.status} {error.reason}") from None
            raise RefusedError(error.status, error.reason) from None
        except HTTPError as error:
            raise TimeoutError(f"the Kubernetes API server does not respond: {error}") from None


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
        terminated = container.state and container.state.terminated
        if terminated and terminated.exit_code:
            yield f"{container.name} ended with {terminated.exit_code}, {terminated.reason}"


def connect() -> Cluster:
    """Connect to the cluster of this pod, else to that of KUBECONFIG; ValueError if there is neither."""
    from kubernetes import client, config
    from kubernetes.config import ConfigException
    from yaml import YAMLError

    try:
        if NAMESPACE.is_file():
            config.load_incluster_config()
            return Cluster(client.ApiClient(), NAMESPACE.read_text().strip())
        file = os.environ.get("KUBECONFIG")
        config.load_kube_config(file)
        _, context = config.list_kube_config_contexts(file)
        return Cluster(client.ApiClient(), context["context"].get("namespace", "default"))
    except (ConfigException, OSError, YAMLError) as error:
        raise ValueError(f"no Kubernetes cluster is configured ({error})") from None


def connect_if_configured() -> Cluster | None:
    files = (os.environ.get("KUBECONFIG") or "~/.kube/config").split(os.pathsep)
    if not NAMESPACE.is_file() and not any(Path(file).expanduser().is_file() for file in files):
        return None
    try:
        return connect()
    except (ImportError, ValueError):
        return None


def describe_pods(namespace: str, labels: str, phase: str) -> list[str]:
    """Return a line with name and reason for each pod in a phase such as Failed; empty without access to a cluster."""
    cluster = connect_if_configured()
    selectors = {"label_selector": labels, "field_selector": f"status.phase={phase}"}
    try:
        pods = cluster.call("CoreV1Api", "list_namespaced_pod", namespace, **selectors).items if cluster else ()
    except (RefusedError, TimeoutError):
        return []
    return [f"{pod.metadata.name}: {', '.join(_reasons(pod.status)) or 'no reason yet'}" for pod in pods]
