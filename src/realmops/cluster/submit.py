"""Kubeflow Pipelines seen from outside: one pipeline submitted, by name and key, and its run watched.

A version of the pipeline is named by the key of the training (key.py). Names of versions are unique, so that of
several who submit the same one makes the version and then its run; the others find both.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from realmops import artifacts
from realmops.cluster.builders import NAMESPACE, TIME_OUT
from realmops.cluster.key import digests_of_files, key_of
from realmops.cluster.waiting import Say, awaited

SUCCEEDED = "SUCCEEDED"
FAILURES = {"FAILED", "CANCELED", "SKIPPED"}  # every other state but SUCCEEDED is of a run that lives
LIVE = ("PENDING", "RUNNING", "PAUSED", "CANCELING", "RUNTIME_STATE_UNSPECIFIED")
TOKEN_FILE = "KF_PIPELINES_SA_TOKEN_PATH"
SIGN_IN = f"name a file with a token that it takes in {TOKEN_FILE}"
GRACE_SECONDS = 30.0  # from a version without a run to the belief that its maker is gone
LOOK_SECONDS = 1.0
WATCH_SECONDS = 5.0
AWAY_SECONDS = 600.0  # how long a server may be away while a run is watched
PENDING_SECONDS = 120.0  # of a task, until a person should look
PAGE = 100  # runs that are asked for at a time

KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "NUMBER_INTEGER": ("a whole number", lambda value: type(value) is int),
    "NUMBER_DOUBLE": ("a number", lambda value: type(value) in (int, float)),
    "BOOLEAN": ("true or false", lambda value: type(value) is bool),
    "LIST": ('JSON as ["a", "b"]', lambda value: isinstance(value, list)),
    "STRUCT": ('JSON as {"a": "b"}', lambda value: isinstance(value, dict)),
}


class TakenError(ValueError):
    """Somebody has made something of that name (HTTP 409)."""


@dataclass(frozen=True)
class Pipeline:
    """A compiled pipeline: its file, the documents in it, and what the first of them says of parameters."""

    path: Path
    documents: Sequence[Any]
    name: str
    parameters: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Pipeline:
        """Raises ValueError for what is no compiled pipeline."""
        if not path.is_file():
            raise ValueError(f"{path} does not exist: name a compiled pipeline with --pipeline")
        try:
            documents = list(yaml.load_all(path.read_bytes(), yaml.CSafeLoader))
            spec = documents[0]
            parameters = spec["root"].get("inputDefinitions", {}).get("parameters", {})
            return cls(path, documents, spec["pipelineInfo"]["name"], parameters)
        except (yaml.YAMLError, AttributeError, IndexError, KeyError, TypeError):
            raise ValueError(f"{path} is no compiled pipeline; pipelines/train.yaml is one") from None

    @cached_property
    def tasks(self) -> set[str]:
        """The names of all its tasks, those in groups included."""
        spec = self.documents[0]
        groups = [spec["root"], *spec.get("components", {}).values()]
        return {name for group in groups for name in group.get("dag", {}).get("tasks", {})}

    def parsed(self, arguments: Sequence[str]) -> dict[str, Any]:
        """``NAME=VALUE`` by name, with values of the type that each parameter has."""
        allowed = sorted({*self.parameters} - {"options", "key"})
        found: dict[str, Any] = {}
        for argument in arguments:
            name, equals, text = argument.partition("=")
            if not equals:
                raise ValueError(f"--argument {argument!r}: NAME=VALUE is wanted, as image=realmops:1")
            if name not in allowed:
                raise ValueError(f"--argument {name}: {self.path} takes {', '.join(allowed)}")
            found[name] = _value(name, text, self.parameters[name]["parameterType"])
        return found


def _value(name: str, text: str, kind: str) -> Any:
    if kind not in KINDS:
        return text
    wanted, fits = KINDS[kind]
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not fits(value):
        raise ValueError(f"--argument {name}={text}: {wanted} is wanted")
    return value


@dataclass(frozen=True)
class Submission:
    """What is submitted: arguments are values by parameter."""

    pipeline: Pipeline
    key: str
    name: str
    experiment: str
    arguments: Mapping[str, Any]


def prepare(
    values: Mapping[str, Mapping[str, Any]],
    project: Path,
    pipeline: Pipeline,
    arguments: Sequence[str],
    experiment: str,
    name: str | None,
) -> tuple[Submission, list[str]]:
    """The submission of a pipeline with these params, and what a person should know of its key.

    ``project`` is the folder of params. The run's folder is named by the key, so that another try of a run that failed
    goes on in it. Raises ValueError for arguments that the pipeline does not take.
    """
    given = pipeline.parsed(arguments)
    files, notes = digests_of_files(values, project)
    key = key_of(values, files, pipeline.documents, given)
    ours = {"options": artifacts.canonical_json(values).decode(), "run": key[:16], "key": key}
    given = {one: value for one, value in ours.items() if one in pipeline.parameters} | given
    missing = [
        one
        for one, entry in pipeline.parameters.items()
        if one not in given and "defaultValue" not in entry and not entry.get("isOptional")
    ]
    if missing:
        raise ValueError(f"{pipeline.path} wants {', '.join(missing)} as well: give --argument {missing[0]}=VALUE")
    return Submission(pipeline, key, name or f"{pipeline.name}-{key[:16]}", experiment, given), notes


class Server:
    """The API of Kubeflow Pipelines; what fails ends in one line.

    It calls the generated API under ``kfp.Client``, which takes no time limit for a call, asks a server that is away
    for half a minute before it says so, and does not tell a name that is taken from other errors. Raises ValueError
    for what a person must mend, TimeoutError when the server is away.
    """

    def __init__(self, endpoint: str | None, namespace: str | None = None) -> None:
        """``namespace`` is that of a Kubeflow profile, else the pod's own; where there are no profiles none is used."""
        self.endpoint = (endpoint or "").rstrip("/")
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"the endpoint of Kubeflow Pipelines is {self.endpoint!r}: name one that starts with http:// or "
                "https:// with --endpoint or KF_PIPELINES_ENDPOINT"
            )
        try:
            import kfp_server_api as api
        except ImportError:
            raise ValueError("submitting needs the package kfp; pip install 'realmops[cluster]'") from None

        client = api.ApiClient(_configuration(self.endpoint))
        self._experiments = api.ExperimentServiceApi(client)
        self._pipelines = api.PipelineServiceApi(client)
        self._uploads = api.PipelineUploadServiceApi(client)
        self._runs = api.RunServiceApi(client)
        health = self.ask(api.HealthzServiceApi(client).healthz_service_get_healthz)
        if "json" not in client.last_response.getheader("Content-Type", ""):
            raise ValueError(f"{self.endpoint} answers with a page, perhaps a login, not as an API: {SIGN_IN}")
        own = namespace or (NAMESPACE.read_text().strip() if NAMESPACE.is_file() else "")
        if health.multi_user and not own:
            raise ValueError(f"{self.endpoint} serves many users: name the namespace of a profile with --namespace")
        self._namespace = {"namespace": own} if health.multi_user else {}

    def ask(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call one of the API's functions."""
        from kfp_server_api import ApiException
        from urllib3.exceptions import HTTPError, LocationValueError

        try:
            return function(**arguments, _request_timeout=TIME_OUT)
        except ApiException as error:
            raise self._explained(error.status, error.reason, error.body) from None
        except LocationValueError as error:
            raise ValueError(f"{self.endpoint} is no address: {error}") from None
        except HTTPError as error:
            raise TimeoutError(f"{self.endpoint} does not answer: {getattr(error, 'reason', error)}") from None

    def _explained(self, status: int, reason: str, body: str | None) -> Exception:
        said = f"{self.endpoint} says {status} {reason}"
        if status in (401, 403):
            return ValueError(f"{said}: {SIGN_IN}, and use a --namespace that is yours")
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
        base = os.environ.get("KF_PIPELINES_UI_ENDPOINT") or self.endpoint
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
        """What is there of that name, else what is made, and whether it was; who is too late with that finds it."""

        def find() -> Any:
            named = _filter(operation="EQUALS", key="display_name", stringValue=name)
            there = getattr(self.ask(lists, filter=named, **where), kind)
            return there[0] if there else None

        found = find()
        if found is not None:
            return found, False
        try:
            return self.ask(makes, **body), True
        except TakenError:
            found = find()
            if found is None:
                raise
            return found, False

    def runs(self, **predicate: Any) -> Iterator[Any]:
        """The runs for which one predicate holds, page by page."""
        token = ""
        while True:
            page = self.ask(
                self._runs.run_service_list_runs,
                page_token=token,
                page_size=PAGE,
                filter=_filter(**predicate),
                **self._namespace,
            )
            yield from page.runs or ()
            token = page.next_page_token
            if not token:
                return

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
        """One run with its tasks."""
        return self.ask(self._runs.run_service_get_run, run_id=run_id)

    def start(self, experiment: str, version: Any, name: str, arguments: Mapping[str, Any]) -> Any:
        """Make a run of a version."""
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


def submit(submission: Submission, server: Server, *, once: bool, say: Say) -> Any:
    """Start a run; with ``once`` only when none of the same key lives or has succeeded, else that run is returned."""
    experiment = server.experiment(submission.experiment)
    pipeline = server.pipeline(submission.pipeline.name)
    version, made = server.version(pipeline, submission.key, submission.pipeline.path)
    if once and not made:
        runs = _runs_of_another(version, server, say)
        for run in runs:
            if run.state not in FAILURES:
                say(f"nothing to submit: {_shown(run)} has the same key {submission.key[:16]}")
                say(f"the run: {server.link(run)}")
                return run
        for run in runs:
            say(f"{_shown(run)} has the same key {submission.key[:16]}: another try")
    run = server.start(experiment, version, submission.name, submission.arguments)
    say(f"submitted: {_shown(run)} with the key {submission.key[:16]}")
    say(f"the run: {server.link(run)}")
    return run


def _runs_of_another(version: Any, server: Server, say: Say) -> list[Any]:
    """The runs of a version that somebody has made a moment ago, or was killed before its run was made."""

    def tell(waited: float) -> None:
        say(f"there is a version of this key without a run: waiting {GRACE_SECONDS:.0f} s for who made it")

    return awaited(lambda: server.runs_of(version) or None, LOOK_SECONDS, GRACE_SECONDS, tell) or []


def wait(run_id: str, tasks: set[str], server: Server, say: Say) -> str:
    """The state in which a run ends; each change of a task's state is said, and a task that is pending for long."""
    states: dict[str, str] = {}
    since: dict[str, float] = {}
    answered = time.monotonic()

    def look() -> Any:
        nonlocal answered
        try:
            run = server.run(run_id)
        except TimeoutError:
            if time.monotonic() - answered > AWAY_SECONDS:
                raise
            return None
        answered = time.monotonic()
        for task in (run.run_details.task_details if run.run_details else None) or ():
            if task.display_name in tasks and task.state and states.get(task.display_name) != task.state:
                states[task.display_name] = task.state
                say(f"{task.display_name}: {task.state}")
                since[task.display_name] = answered
        for name, began in list(since.items()):
            if states[name] == "PENDING" and answered - began > PENDING_SECONDS:
                del since[name]
                say(
                    f"{name}: still PENDING after {PENDING_SECONDS:.0f} s; a claim that is not there, an image that "
                    "cannot be pulled or no room on a node: 'kubectl get events --field-selector type=Warning' and "
                    "'kubectl describe pod' in the run's namespace show which"
                )
        return run if run.state == SUCCEEDED or run.state in FAILURES else None

    run: Any = awaited(look, WATCH_SECONDS)
    reason = f", {run.error.message}" if run.error and run.error.message else ""
    say(f"{_shown(run)}{reason}")
    return str(run.state)


def older_run(server: Server, key: str, run_id: str) -> str | None:
    """A run that lives, has the same key and is older than this one, in words; of one second, the lower id is older."""
    this = server.run(run_id)
    for run in server.runs(operation="IN", key="state", stringValues={"values": LIVE}):
        arguments = (run.runtime_config.parameters if run.runtime_config else None) or {}
        if arguments.get("key") == key and (run.created_at, run.run_id) < (this.created_at, this.run_id):
            return _shown(run)
    return None


def _shown(run: Any) -> str:
    return f"the run {run.display_name} ({run.run_id}, {run.state or 'PENDING'})"


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
