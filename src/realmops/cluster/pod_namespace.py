"""The namespace of a run's pods."""

from dataclasses import dataclass
from urllib.parse import urlsplit

KINDS = {  # of the objects that pipeline parameters name
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
    def description(self) -> str:
        owner, cluster = ("profile's", "production (or local)") if self.profiles else ("server's", "standalone")
        own = "" if self.namespace == INSTALLED_IN else f", with 'namespace: {self.namespace}' in it"
        return (
            f"pods run in namespace {self.namespace} (the {owner}); 'kubectl apply -k .' with the files of 'realmops "
            f"init --cluster {cluster}'{own} creates what they need"
        )

    def commands(self, run_id: str, phase: str) -> str:
        kubectl = f"kubectl -n {self.namespace}"
        more = "logs POD -c main" if phase == "Failed" else "get events --field-selector type=Warning"
        return (
            f"'{kubectl} get pods -l {RUN_LABEL}={run_id} --field-selector status.phase={phase}' and "
            f"'{kubectl} {more}' show the reason"
        )


def place_of(endpoint: str, namespace: str | None, profiles: bool) -> Place:
    """Return the namespace of a run's pods; without profiles that of the server's address, else ``namespace``."""
    if profiles:
        return Place(namespace or "", profiles)
    service, *domain = (urlsplit(endpoint).hostname or "").split(".")
    in_cluster = (len(domain) == 1 and service == "ml-pipeline") or domain[1:2] == ["svc"]
    return Place(domain[0] if in_cluster else namespace or INSTALLED_IN, profiles)
