"""Where the pods of a server's runs are: the namespace, and what must be there before a run begins."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from realmops.cluster.kube import RefusedError, at_hand
from realmops.cluster.waiting import Say

KINDS = {  # what parameters of a pipeline name
    "volume": "PersistentVolumeClaim",
    "settings": "ConfigMap",
    "secret": "Secret",
    "deployment": "Deployment",
}
OPTIONAL = ("settings", "secret")
INSTALLED_IN = "kubeflow"  # by Kubeflow Pipelines' own manifests
RUN_LABEL = "pipeline/runid"  # of all pods of a run


@dataclass(frozen=True)
class Place:
    """The namespace of the pods; ``profiles`` says whether it is that of a Kubeflow profile."""

    namespace: str
    profiles: bool

    @property
    def account(self) -> str:
        """The ServiceAccount that Kubeflow Pipelines gives to the pods."""
        return "default-editor" if self.profiles else "pipeline-runner"

    @property
    def advice(self) -> str:
        """What makes our objects there."""
        kind = "production (or local)" if self.profiles else "standalone"
        own = "" if self.namespace == INSTALLED_IN else f", with 'namespace: {self.namespace}' in it"
        return f"'kubectl apply -k .' with the files of 'realmops init --cluster {kind}'{own}"

    def described(self, objects: Mapping[str, str]) -> str:
        """One line about it and what runs want there: names by parameter."""
        whose = "that of the profile" if self.profiles else "the server's own"
        wanted = [f"{KINDS[parameter]} {name}" for parameter, name in objects.items() if name]
        return (
            f"runs have their pods in the namespace {self.namespace}, {whose}: "
            f"{', '.join([*wanted, f'ServiceAccount {self.account}'])} belong there; {self.advice} makes them"
        )

    def commands(self, run_id: str, phase: str) -> str:
        """What shows why pods of a run wait, or have failed."""
        kubectl = f"kubectl -n {self.namespace}"
        more = "logs POD -c main" if phase == "Failed" else "get events --field-selector type=Warning"
        return (
            f"'{kubectl} get pods -l {RUN_LABEL}={run_id} --field-selector status.phase={phase}' and "
            f"'{kubectl} {more}' show which"
        )


def place_of(endpoint: str, namespace: str | None, profiles: bool) -> Place:
    """Where pods of runs are.

    Without profiles the server runs everything in its own namespace, whatever a request says. No answer of its API
    names that: it is in the address of its Service, else ``namespace``, else where Kubeflow installs it.
    """
    if profiles:
        return Place(namespace or "", profiles)
    service, *rest = (urlsplit(endpoint).hostname or "").split(".")
    inside = (len(rest) == 1 and service == "ml-pipeline") or rest[1:2] == ["svc"]
    return Place(rest[0] if inside else namespace or INSTALLED_IN, profiles)


def check(place: Place, objects: Mapping[str, str], say: Say) -> None:
    """Look whether what a run cannot do without is there: ValueError that says what to apply.

    Where no cluster is at hand, or it may not be looked, a pod that waits will tell.
    """
    cluster = at_hand()
    if cluster is None:
        return
    wanted = [(KINDS[parameter], name) for parameter, name in objects.items() if name and parameter not in OPTIONAL]
    for kind, name in [*wanted, ("ServiceAccount", place.account)]:
        try:
            there = cluster.has(kind, name, place.namespace)
        except (RefusedError, TimeoutError) as error:
            say(f"whether {kind} {name} is in the namespace {place.namespace} is not known: {error}")
            continue
        if there:
            continue
        makes = f"{place.advice} makes it"
        if kind == "ServiceAccount":
            makes = "it comes with " + ("the Kubeflow profile of that name" if place.profiles else "Kubeflow Pipelines")
        raise ValueError(
            f"there is no {kind} {name} in the namespace {place.namespace}, where runs have their pods (by "
            f"{cluster.seen_by}): {makes}; --namespace and --argument name others"
        )
