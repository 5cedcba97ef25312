"""The API of Kubeflow Pipelines, as far as a submission needs it."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from realmops.cluster.kube import NAMESPACE, TIME_OUT
from realmops.cluster.place import Place, place_of
from realmops.cluster.waiting import awaited
from realmops.tracking.client import redacted

TOKEN_FILE = "KF_PIPELINES_SA_TOKEN_PATH"
SIGN_IN = (
    f"name a file with a token that it takes in {TOKEN_FILE}; Kubeflow's own server takes those of the audience "
    "pipelines.kubeflow.org"
)
OLDEST = (2, 16)  # which takes a securityContext for pods; before, a run with one cannot be made
KEEPS = (2, 17)  # which reads for how long a pipeline wants its pods kept; before, that has it drop what pods want
LOOK_SECONDS = 1.0
LISTED_SECONDS = 60.0  # from a version that somebody begins to make to its being listed
PAGE = 100  # runs that are asked for at a time


class TakenError(ValueError):
    """Somebody has made something of that name (HTTP 409)."""


class Server:
    """The API of Kubeflow Pipelines; what fails ends in one line.

    It calls the generated API under ``kfp.Client``, which takes no time limit for a call, asks a server that is away
    for half a minute before it says so, and does not tell a name that is taken from other errors. Raises ValueError
    for what a person must mend, TimeoutError when the server is away.
    """

    def __init__(self, endpoint: str | None, namespace: str | None = None) -> None:
        """``namespace`` is that of a Kubeflow profile, else the pod's own.

        Where there are no profiles no request has one, and it says in which Kubeflow Pipelines itself is installed.
        """
        self.endpoint = (endpoint or "").rstrip("/")
        self._shown = redacted(self.endpoint)
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"the endpoint of Kubeflow Pipelines is {self._shown!r}: name one that starts with http:// or "
                "https:// with --endpoint or KF_PIPELINES_ENDPOINT"
            )
        try:
            import kfp_server_api as api
        except ImportError:
            raise ValueError("submitting needs the package kfp; pip install 'realmops[cluster]'") from None

        client = self._client = api.ApiClient(_configuration(self.endpoint))
        self._experiments = api.ExperimentServiceApi(client)
        self._pipelines = api.PipelineServiceApi(client)
        self._uploads = api.PipelineUploadServiceApi(client)
        self._runs = api.RunServiceApi(client)
        self._own = namespace or (NAMESPACE.read_text().strip() if NAMESPACE.is_file() else "")
        health = self.ask(api.HealthzServiceApi(client).healthz_service_get_healthz)
        tag = str(json.loads(client.last_response.data).get("tag_name") or "")
        version = re.match(r"v?(\d+)\.(\d+)", tag)
        # servers that were built from no release tell no version, and are taken as they are
        self._version = tuple(map(int, version.groups())) if version else None
        if self._version and self._version < OLDEST:
            raise ValueError(
                f"{self._shown} is Kubeflow Pipelines {tag}: the securityContext of our pods wants "
                f"{OLDEST[0]}.{OLDEST[1]}.0 or younger; update it"
            )
        if health.multi_user and not self._own:
            raise ValueError(f"{self._shown} serves many users: name the namespace of a profile with --namespace")
        self._namespace = {"namespace": self._own} if health.multi_user else {}
        self.place: Place = place_of(self.endpoint, self._own if health.multi_user else namespace, health.multi_user)

    @property
    def keeps_pods(self) -> bool:
        """Whether a pipeline may say how long its pods are kept, as far as the server tells its version."""
        return self._version is not None and self._version >= KEEPS

    def ask(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call one of the API's functions; a page in the place of its answer would read as an object without fields."""
        from kfp_server_api import ApiException
        from urllib3.exceptions import HTTPError, LocationValueError

        try:
            answer = function(**arguments, _request_timeout=TIME_OUT)
        except ApiException as error:
            raise self._explained(error.status, error.reason, error.body) from None
        except LocationValueError as error:
            raise ValueError(f"{self._shown} is no address: {redacted(str(error))}") from None
        except HTTPError as error:
            said = redacted(str(getattr(error, "reason", error)))
            raise TimeoutError(f"{self._shown} does not answer: {said}") from None
        if "json" not in self._client.last_response.getheader("Content-Type", ""):
            raise ValueError(f"{self._shown} answers with a page, perhaps a login, not as an API: {SIGN_IN}")
        return answer

    def _explained(self, status: int, reason: str, body: str | None) -> Exception:
        said = f"{self._shown} says {status} {reason}"
        if status == 401:
            return ValueError(f"{said}: {SIGN_IN}")
        if status == 403:
            return ValueError(
                f"{said}: use a --namespace that is yours{f' ({self._own} is not)' if self._own else ''}, or bind who "
                f"submits to the ClusterRole kubeflow-pipelines-edit there; {SIGN_IN}"
            )
        if status == 404:
            return ValueError(f"{said}: is this the address of the API of Kubeflow Pipelines?")
        try:
            answer = json.loads(body or "")
            said += f": {answer.get('message') or answer.get('error_message') or answer.get('error') or body}"
        except (ValueError, AttributeError):
            pass
        if status == 409:
            return TakenError(said)
        return TimeoutError(f"{said}; try again") if status >= 500 or status == 429 else ValueError(said)

    def link(self, run: Any) -> str:
        """Where a browser shows a run."""
        base = redacted(os.environ.get("KF_PIPELINES_UI_ENDPOINT") or self.endpoint)
        return f"{base.rstrip('/')}/#/runs/details/{run.run_id}"

    def experiment(self, name: str) -> str:
        """The id of an experiment, made if there is none."""
        from kfp_server_api import V2beta1Experiment

        api, body = self._experiments, V2beta1Experiment(display_name=name, **self._namespace)
        lists, makes = api.experiment_service_list_experiments, api.experiment_service_create_experiment
        found, _ = self._found_or_made(name, "experiments", lists, makes, self._namespace, {"experiment": body})
        return str(found.experiment_id)

    def pipeline(self, name: str) -> str:
        """The id of a pipeline, made if there is none."""
        from kfp_server_api import V2beta1Pipeline

        api, body = self._pipelines, V2beta1Pipeline(display_name=name, **self._namespace)
        lists, makes = api.pipeline_service_list_pipelines, api.pipeline_service_create_pipeline
        found, _ = self._found_or_made(name, "pipelines", lists, makes, self._namespace, {"pipeline": body})
        return str(found.pipeline_id)

    def version(self, pipeline: str, name: str, file: Path) -> tuple[Any, bool]:
        """The version of a pipeline, and whether it was made here and now."""
        lists, makes = self._pipelines.pipeline_service_list_pipeline_versions, self._uploads.upload_pipeline_version
        body = {"uploadfile": str(file), "name": name, "pipelineid": pipeline}
        return self._found_or_made(name, "pipeline_versions", lists, makes, {"pipeline_id": pipeline}, body)

    def _found_or_made(
        self,
        name: str,
        kind: str,
        lists: Callable[..., Any],
        makes: Callable[..., Any],
        where: Mapping[str, str],
        body: Mapping[str, Any],
    ) -> tuple[Any, bool]:
        """What is there of that name, else what is made, and whether it was; who is too late with that finds it.

        A version that somebody is making has taken its name already, and is listed when it is ready.
        """

        def find() -> Any:
            named = _filter(operation="EQUALS", key="display_name", stringValue=name)
            there = getattr(self.ask(lists, filter=named, **where), kind)
            return there[0] if there else None

        found = find()
        if found is not None:
            return found, False
        try:
            return self.ask(makes, **body), True
        except TakenError as error:
            found = awaited(find, LOOK_SECONDS, LISTED_SECONDS)
            if found is None:
                raise TimeoutError(
                    f"{error}; what has that name is not listed after {LISTED_SECONDS:.0f} s: try again, and where "
                    "that does not help, its maker was stopped on the way: delete the pipeline in Kubeflow's pages"
                ) from None
            return found, False

    def runs(self, **predicate: Any) -> Iterator[Any]:
        """The runs for which one predicate holds, page by page.

        A page's token brings its filter along; a server refuses one beside it that it cannot compare, as of times.
        """
        more = {"filter": _filter(**predicate)}
        while True:
            lists = self._runs.run_service_list_runs
            page = self.ask(lists, page_size=PAGE, **more, **self._namespace)
            yield from page.runs or ()
            if not page.next_page_token:
                return
            more = {"page_token": page.next_page_token}

    def runs_of(self, version: Any) -> list[Any]:
        """The runs of a version; none is older than it."""
        since = (version.created_at - timedelta(minutes=1)).isoformat()
        found = self.runs(operation="GREATER_THAN_EQUALS", key="created_at", timestampValue=since)
        wanted = version.pipeline_version_id
        return [
            run
            for run in found
            if run.pipeline_version_reference and run.pipeline_version_reference.pipeline_version_id == wanted
        ]

    def run(self, run_id: str) -> Any:
        return self.ask(self._runs.run_service_get_run, run_id=run_id)

    def start(self, experiment: str, version: Any, name: str, arguments: Mapping[str, Any]) -> Any:
        from kfp_server_api import V2beta1PipelineVersionReference, V2beta1Run, V2beta1RuntimeConfig

        body = V2beta1Run(
            experiment_id=experiment,
            display_name=name,
            pipeline_version_reference=V2beta1PipelineVersionReference(
                pipeline_id=version.pipeline_id, pipeline_version_id=version.pipeline_version_id
            ),
            runtime_config=V2beta1RuntimeConfig(parameters=dict(arguments)),
        )
        return self.ask(self._runs.run_service_create_run, run=body)


def _filter(**predicate: Any) -> str:
    """A filter as the server reads it, which takes the escapes of URLs out once more than HTTP does."""
    return json.dumps({"predicates": [predicate]}).replace("%", "%25").replace("+", "%2B")


def _configuration(endpoint: str) -> Any:
    """How to reach the API: with the token in a file that the environment names, where it names one."""
    from kfp_server_api import Configuration

    found = Configuration(host=endpoint)
    file = os.environ.get(TOKEN_FILE)
    if file:
        from kfp.client.set_volume_credentials import ServiceAccountTokenVolumeCredentials

        if not Path(file).is_file():
            raise ValueError(f"{TOKEN_FILE} is {file!r}, which is no file: mount the token there, or unset it")
        found.api_key = {"authorization": "read from the file at each request"}
        found.api_key_prefix = {"authorization": "Bearer"}
        found.refresh_api_key_hook = ServiceAccountTokenVolumeCredentials(file).refresh_api_key_hook
    return found
