"""Client of the Kubeflow Pipelines API, limited to what a submission needs."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from realmops.cluster.kube import NAMESPACE, TIME_OUT
from realmops.cluster.pod_namespace import Place, place_of
from realmops.credentials import redact, refuse_credentials

TOKEN_FILE = "KF_PIPELINES_SA_TOKEN_PATH"
SIGN_IN = (
    f"set {TOKEN_FILE} to a file with a valid token; Kubeflow's own server accepts tokens of the audience "
    "pipelines.kubeflow.org"
)
OLDEST = (2, 16)  # first version that accepts a securityContext for pods
PAGE = 100  # runs per request
BEING_CREATED = "another process is creating it: try again; if that fails, delete the pipeline in Kubeflow's UI"


class TakenError(ValueError):
    """An object of that name exists already (HTTP 409)."""


class KfpClient:
    """A client of the Kubeflow Pipelines API with timeouts and one-line errors.

    It uses the generated API below ``kfp.Client``, which has no timeout and does not distinguish a name conflict.
    ``namespace`` is that of a Kubeflow profile, by default this pod's; without profiles that of the server.
    """

    def __init__(self, endpoint: str | None, namespace: str | None = None) -> None:
        self.endpoint = (endpoint or "").rstrip("/")
        refuse_credentials(self.endpoint, "the endpoint of Kubeflow Pipelines", TOKEN_FILE)
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"the endpoint of Kubeflow Pipelines is {redact(self.endpoint)!r}; it must start with http:// or "
                "https://: set --endpoint or KF_PIPELINES_ENDPOINT"
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
        health = self.call(api.HealthzServiceApi(client).healthz_service_get_healthz)
        tag = str(json.loads(client.last_response.data).get("tag_name") or "")
        match = re.match(r"v?(\d+)\.(\d+)", tag)  # builds from source report no version and are accepted
        if match and tuple(map(int, match.groups())) < OLDEST:
            raise ValueError(
                f"{self.endpoint} is Kubeflow Pipelines {tag}; the securityContext of the pods needs "
                f"{OLDEST[0]}.{OLDEST[1]}.0 or later; upgrade it"
            )
        if health.multi_user and not self._own:
            raise ValueError(f"{self.endpoint} runs in multi-user mode; set --namespace to the namespace of a profile")
        self._namespace = {"namespace": self._own} if health.multi_user else {}
        self.place: Place = place_of(self.endpoint, self._own if health.multi_user else namespace, health.multi_user)

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call a function of the API; an HTML page as response, such as a login, raises ValueError."""
        from kfp_server_api import ApiException
        from urllib3.exceptions import HTTPError, LocationValueError

        try:
            response = function(**arguments, _request_timeout=TIME_OUT)
        except ApiException as error:
            raise self._error_of(error.status, error.reason, error.body) from None
        except LocationValueError as error:
            raise ValueError(f"{self.endpoint} is not a valid URL: {redact(str(error))}") from None
        except HTTPError as error:
            reason = redact(str(getattr(error, "reason", error)))
            raise TimeoutError(f"{self.endpoint} does not respond: {reason}") from None
        if "json" not in self._client.last_response.getheader("Content-Type", ""):
            raise ValueError(f"{self.endpoint} returned a page, perhaps a login, instead of JSON: {SIGN_IN}")
        return response

    def _error_of(self, status: int, reason: str, body: str | None) -> Exception:
        message = f"{self.endpoint} returned {status} {reason}"
        remedies = {
            401: SIGN_IN,
            403: f"set --namespace to your own{f' ({self._own} is not)' if self._own else ''}, or bind the submitting "
            f"user to the ClusterRole kubeflow-pipelines-edit there; {SIGN_IN}",
            404: "check that this is the address of the Kubeflow Pipelines API",
        }
        if status in remedies:
            return ValueError(f"{message}: {remedies[status]}")
        with suppress(ValueError, AttributeError):
            fields = json.loads(body or "")
            message += f": {fields.get('message') or fields.get('error_message') or fields.get('error') or body}"
        if status == 409:
            return TakenError(message)
        return TimeoutError(f"{message}; try again") if status >= 500 or status == 429 else ValueError(message)

    def link(self, run: Any) -> str:
        base = redact(os.environ.get("KF_PIPELINES_UI_ENDPOINT") or self.endpoint)
        return f"{base.rstrip('/')}/#/runs/details/{run.run_id}"

    def id_of(self, kind: Literal["experiment", "pipeline"], name: str) -> str:
        """Return the id of an experiment or a pipeline, which is created if necessary."""
        import kfp_server_api

        api = {"experiment": self._experiments, "pipeline": self._pipelines}[kind]
        body = getattr(kfp_server_api, f"V2beta1{kind.title()}")(display_name=name, **self._namespace)
        list_, create = getattr(api, f"{kind}_service_list_{kind}s"), getattr(api, f"{kind}_service_create_{kind}")

        def find() -> Any:
            return self._find(name, f"{kind}s", list_, **self._namespace)

        try:
            found = find() or self.call(create, **{kind: body})
        except TakenError as error:  # by another process
            if (found := find()) is None:
                raise TimeoutError(f"{error}; {BEING_CREATED}") from None
        return str(getattr(found, f"{kind}_id"))

    def find_version(self, pipeline: str, name: str) -> Any:
        list_ = self._pipelines.pipeline_service_list_pipeline_versions
        return self._find(name, "pipeline_versions", list_, pipeline_id=pipeline)

    def create_version(self, pipeline: str, name: str, file: Path) -> Any:
        """Create a version of a pipeline; TakenError if another process has created one of that name."""
        upload = self._uploads.upload_pipeline_version
        return self.call(upload, uploadfile=str(file), name=name, pipelineid=pipeline)

    def _find(self, name: str, kind: str, list_: Callable[..., Any], **where: str) -> Any:
        by_name = _filter(operation="EQUALS", key="display_name", stringValue=name)
        matches = getattr(self.call(list_, filter=by_name, **where), kind)
        return matches[0] if matches else None

    def runs(self, **predicate: Any) -> Iterator[Any]:
        """Yield matching runs; pages after the first have no filter, because some servers reject a second one."""
        more = {"filter": _filter(**predicate)}
        while more:
            page = self.call(self._runs.run_service_list_runs, page_size=PAGE, **more, **self._namespace)
            yield from page.runs or ()
            more = {"page_token": page.next_page_token} if page.next_page_token else {}

    def runs_of(self, versions: Sequence[Any]) -> list[Any]:
        """Return the runs of some versions of a pipeline, of which the first is the oldest."""
        since = (versions[0].created_at - timedelta(minutes=1)).isoformat()  # no run is older than its version
        recent = self.runs(operation="GREATER_THAN_EQUALS", key="created_at", timestampValue=since)
        ids = {version.pipeline_version_id for version in versions}
        return [run for run in recent if (of := run.pipeline_version_reference) and of.pipeline_version_id in ids]

    def run(self, run_id: str) -> Any:
        return self.call(self._runs.run_service_get_run, run_id=run_id)

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
        return self.call(self._runs.run_service_create_run, run=body)


def _filter(**predicate: Any) -> str:
    """Return a filter as JSON; the server decodes URL escapes once more than HTTP does, so they are doubled."""
    return json.dumps({"predicates": [predicate]}).replace("%", "%25").replace("+", "%2B")


def _configuration(endpoint: str) -> Any:
    from kfp_server_api import Configuration

    configuration = Configuration(host=endpoint)
    file = os.environ.get(TOKEN_FILE)
    if file:
        from kfp.client.set_volume_credentials import ServiceAccountTokenVolumeCredentials

        if not Path(file).is_file():
            raise ValueError(f"{TOKEN_FILE} is {file!r}, which is not a file; mount the token there, or unset it")
        configuration.api_key = {"authorization": "read from the file at each request"}
        configuration.api_key_prefix = {"authorization": "Bearer"}
        configuration.refresh_api_key_hook = ServiceAccountTokenVolumeCredentials(file).refresh_api_key_hook
    return configuration
