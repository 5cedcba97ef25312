"""The namespace of a run's pods, and the objects that it must contain before a run starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from realmops.cluster.kube import RefusedError, connect_if_configured
from realmops.cluster.polling import Log

KINDS = {  # kinds of the objects that pipeline parameters name
    "volume": "PersistentVolumeClaim",
    "settings": "ConfigMap",
    "secret": "Secret",
    "deployment": "Deployment",
}
OPTIONAL = ("settings", "secret")
INSTALLED_IN = "kubeflow"  # namespace in the manifests of Kubeflow Pipelines
RUN_LABEL = "pipeline/runid"  # label of all pods of a run


@dataclass(frozen=True)
class Place:
    """The namespace of a run's pods; with ``profiles``, that of a Kubeflow profile."""

    namespace: str
    profiles: bool

    @property
    def account(self) -> str:
        """The ServiceAccount of the pods."""
        return "default-editor" if self.profiles else "pipeline-runner"

    @property
    def advice(self) -> str:
        """The command that creates the required objects."""
        kind = "production (or local)" if self.profiles else "standalone"
        own = "" if self.namespace == INSTALLED_IN else f", with 'namespace: {self.namespace}' in it"
        return f"'kubectl apply -k .' with the files of 'realmops init --cluster {kind}'{own}"

    @property
    def description(self) -> str:
        """One line about the namespace, for the log."""
        owner = "the profile's" if self.profiles else "the server's"
        return f"pods run in namespace {self.namespace} ({owner}); {self.advice} creates what they need"

    def commands(self, run_id: str, phase: str) -> str:
        kubectl = f"kubectl -n {self.namespace}"
        more = "logs POD -c main" if phase == "Failed" else "get events --field-selector type=Warning"
        return (
            f"'{kubectl} get pods -l {RUN_LABEL}={run_id} --field-selector status.phase={phase}' and "
            f"'{kubectl} {more}' show the reason"
        )


def place_of(endpoint: str, namespace: str | None, profiles: bool) -> Place:
    """Return the namespace of a run's pods.

    Without profiles the server runs all pods in its own namespace and does not report it: it is taken from the address
    of the Service, else from ``namespace``, else ``kubeflow``.
    """
    if profiles:
        return Place(namespace or "", profiles)
    service, *domain = (urlsplit(endpoint).hostname or "").split(".")
    in_cluster = (len(domain) == 1 and service == "ml-pipeline") or domain[1:2] == ["svc"]
    return Place(domain[0] if in_cluster else namespace or INSTALLED_IN, profiles)


def check(place: Place, objects: Mapping[str, str], log: Log) -> None:
    """Raise ValueError if a required object is missing in the namespace; without access to it nothing is checked."""
    cluster = connect_if_configured()
    if cluster is None:
        return
    required = [(KINDS[parameter], name) for parameter, name in objects.items() if name and parameter not in OPTIONAL]
    for kind, name in [*required, ("ServiceAccount", place.account)]:
        try:
            exists = cluster.has(kind, name, place.namespace)
        except (RefusedError, TimeoutError) as error:
            log(f"{kind} {name} in namespace {place.namespace} was not checked: {error}")
            continue
        if not exists:
            creator = "the profile" if place.profiles else "Kubeflow Pipelines"
            remedy = f"{creator} creates it" if kind == "ServiceAccount" else f"{place.advice} creates it"
            raise ValueError(
                f"{kind} {name} does not exist in namespace {place.namespace}, where the pods run (checked with "
                f"{cluster.credentials}): {remedy}; --namespace and --argument set others"
            )
