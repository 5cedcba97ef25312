"""Submission of a pipeline to Kubeflow Pipelines, at most once per training key, and monitoring of its run.

Of active runs of one key, all but the oldest are ended by the pipeline's first task, ``guard``.
"""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml

from realmops.cluster.input_plan import PlannedInput, notes_of, plan_inputs
from realmops.cluster.key import find_image, image_note, training_key
from realmops.cluster.kfp_client import BEING_CREATED, KfpClient, TakenError
from realmops.cluster.kube import describe_pods
from realmops.cluster.packed_options import pack_options
from realmops.cluster.pod_namespace import KINDS, OPTIONAL, RUN_LABEL
from realmops.cluster.polling import Log
from realmops.credentials import refuse_credentials
from realmops.options import Options
from realmops.resources import resource_folder

SUCCEEDED = "SUCCEEDED"
FAILURES = {"FAILED", "CANCELED", "SKIPPED"}  # in every other state but SUCCEEDED a run is active
CANCELING = "CANCELING"  # active but will not succeed, so another run need not wait for it
LIVE = ("PENDING", "RUNNING", "PAUSED", "RUNTIME_STATE_UNSPECIFIED")
START_SECONDS = 60.0  # how long the run of a new pipeline version is awaited
POLL_SECONDS = 1.0  # polling interval for that run
WATCH_SECONDS = 5.0  # polling interval for the state of a run
UNREACHABLE_SECONDS = 600.0  # how long the server may be unreachable while a run is watched
PENDING_SECONDS = 120.0  # after which a pending pod is reported
# names of pod nodes among the details of a run; task nodes are RUNNING from their creation
PODS = re.compile(r"executor(\(\d+\))?|.+-driver(\(\d+\))?")

TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "NUMBER_INTEGER": ("a whole number", lambda value: type(value) is int),
    "NUMBER_DOUBLE": ("a number", lambda value: type(value) in (int, float) and math.isfinite(value)),
    "BOOLEAN": ("true or false", lambda value: type(value) is bool),
    "LIST": ('JSON such as ["a", "b"]', lambda value: isinstance(value, list)),
    "STRUCT": ('JSON such as {"a": "b"}', lambda value: isinstance(value, dict)),
}


@dataclass(frozen=True)
class Pipeline:
    """A compiled pipeline: its file, the YAML documents in it, and the definitions of its parameters."""

    path: Path
    documents: Sequence[Any]
    name: str
    parameters: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, name: str) -> Self:
        """Read a compiled file, or the pipeline of the package with that name; ValueError if there is neither."""
        path = Path(name) if Path(name).is_file() else resource_folder("pipelines") / f"{name}.yaml"
        if not path.is_file():
            raise ValueError(f"{name} does not exist; --pipeline must be train, ablations, refresh or a compiled file")
        try:
            documents = list(yaml.load_all(path.read_bytes(), yaml.CSafeLoader))
            spec = documents[0]
            parameters = spec["root"].get("inputDefinitions", {}).get("parameters", {})
            return cls(path, documents, spec["pipelineInfo"]["name"], parameters)
        except (yaml.YAMLError, AttributeError, IndexError, KeyError, TypeError):
            raise ValueError(f"{path} is not a compiled pipeline; compile with python -m pipelines") from None

    @cached_property
    def tasks(self) -> set[str]:
        components = self.documents[0].get("components", {})
        groups = (self.documents[0]["root"], *components.values())
        tasks = [task for group in groups for task in group.get("dag", {}).get("tasks", {}).items()]
        return {name for name, task in tasks if "executorLabel" in components[task["componentRef"]["name"]]}

    def parse_arguments(self, arguments: Sequence[str]) -> dict[str, Any]:
        allowed = sorted({*self.parameters} - {"options", "key"})
        values: dict[str, Any] = {}
        for argument in arguments:
            name, equals, text = argument.partition("=")
            if not equals:
                raise ValueError(f"--argument {argument!r}: expected NAME=VALUE, for example image=realmops:1")
            if name not in allowed:
                raise ValueError(f"--argument {name}: not a parameter of {self.path}; allowed are {', '.join(allowed)}")
            values[name] = _parse_value(name, text, self.parameters[name]["parameterType"])
        return values


def _parse_value(name: str, text: str, kind: str) -> Any:
    if name in KINDS and not text and name != "deployment":
        hint = "; the object need not exist" if name in OPTIONAL else ""
        raise ValueError(f"--argument {name}=: Kubeflow Pipelines needs a name for the {KINDS[name]}{hint}")
    if kind not in TYPES:
        return text
    expected, is_valid = TYPES[kind]
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not is_valid(value):
        raise ValueError(f"--argument {name}={text}: expected {expected}")
    return value


@dataclass(frozen=True)
class Submission:
    """A pipeline with its key, run name, experiment, arguments by parameter, and the inputs in its options."""

    pipeline: Pipeline
    key: str
    name: str
    experiment: str
    arguments: Mapping[str, Any]
    inputs: Sequence[PlannedInput]


def prepare(
    options: Options, project: Path, pipeline: Pipeline, arguments: Sequence[str], experiment: str, name: str | None
) -> tuple[Submission, list[str]]:
    """Build a submission and notes about its key and inputs; nothing is sent.

    The run's folder is named by the key, so that a second submission of a failed run resumes there.
    """
    chosen = pipeline.parse_arguments(arguments)
    if "image" in pipeline.parameters and "image" not in chosen and (image := find_image(project)):
        chosen["image"] = image
    refuse_credentials([pipeline.parameters, chosen], f"a parameter of {pipeline.path}")
    inputs = plan_inputs(options, project)
    notes = notes_of(inputs)
    key = training_key(options, {item.key: item.identity for item in inputs}, pipeline.documents, chosen)
    if "image" in pipeline.parameters:
        notes += image_note(str(chosen.get("image", pipeline.parameters["image"].get("defaultValue", ""))))
    pins = {item.key: item.pinned for item in inputs if item.identity != item.value}
    generated = {"options": pack_options(options, pins), "run": key[:16], "key": key}
    chosen = {parameter: value for parameter, value in generated.items() if parameter in pipeline.parameters} | chosen
    required = [one for one, entry in pipeline.parameters.items() if not {"defaultValue", "isOptional"} & entry.keys()]
    if missing := [parameter for parameter in required if parameter not in chosen]:
        raise ValueError(f"{pipeline.path} also needs {', '.join(missing)}: set --argument {missing[0]}=VALUE")
    return Submission(pipeline, key, name or f"{pipeline.name}-{key[:16]}", experiment, chosen, inputs), notes


def submit(submission: Submission, server: KfpClient, *, once: bool, log: Log) -> Any:
    """Start a run and return it; with ``once`` return an existing run of the key that is active or has succeeded."""
    experiment = server.id_of("experiment", submission.experiment)
    pipeline = server.id_of("pipeline", submission.pipeline.name)
    version, run = _claim_version(submission, pipeline, server, once=once)
    if run is not None:
        log(f"nothing to submit: {describe_run(run)} has the same key {submission.key[:16]}")
    else:
        log(server.place.description)
        run = server.start(experiment, version, submission.name, submission.arguments)
        log(f"submitted: {describe_run(run)} with the key {submission.key[:16]}")
    log(f"run page: {server.link(run)}")
    return run


def _claim_version(submission: Submission, pipeline: str, server: KfpClient, *, once: bool) -> tuple[Any, Any]:
    """Return a new version of the pipeline, or with ``once`` None and a run that is active or has succeeded.

    The server refuses a second version of one name. Each attempt at a key has a version, and of processes that submit
    at the same moment only the one that creates it starts its run; the others wait for that run.
    """
    versions: list[Any] = []
    key, deadline = submission.key, time.monotonic() + START_SECONDS
    while True:
        while existing := server.find_version(pipeline, name := f"{key}-{len(versions) + 1}" if versions else key):
            versions.append(existing)
            deadline = time.monotonic() + START_SECONDS
        runs = server.runs_of(versions) if once and versions else []
        if active := next((run for run in runs if run.state not in FAILURES | {CANCELING}), None):
            return None, active
        started = {run.pipeline_version_reference.pipeline_version_id for run in runs}
        is_started = not (once and versions) or versions[-1].pipeline_version_id in started
        if is_started or time.monotonic() > deadline:  # else the process that created it may be about to start it
            try:
                return server.create_version(pipeline, name, submission.pipeline.path), None
            except TakenError as error:  # by another process, and it is not listed yet
                if time.monotonic() > deadline + START_SECONDS:
                    raise TimeoutError(f"{error}; {BEING_CREATED}") from None
        time.sleep(POLL_SECONDS)


def wait(run_id: str, tasks: set[str], server: KfpClient, log: Log) -> str:
    """Wait until a run ends and return its final state; log states of its tasks and pods that are pending for long."""
    states: dict[str, str] = {}
    since: dict[str, float] = {}  # first time each pod was pending; infinite once logged
    last_response = time.monotonic()

    def log_progress(run: Any) -> None:
        """Log changes. A task is RUNNING from its creation; its pod is a separate node in the details of a run."""
        details = (run.run_details.task_details if run.run_details else None) or ()
        named = [task for task in details if task.display_name in tasks and task.state]
        for task in named:  # iterations of a loop share the name of their task
            if states.get(task.task_id) != task.state:
                log(f"{task.display_name}: {task.state}")
            states[task.task_id] = task.state
        pending = [node.task_id for node in details if node.state == "PENDING" and PODS.fullmatch(node.display_name)]
        for pod in pending:
            since.setdefault(pod, last_response)
        if late := [pod for pod in pending if last_response - since[pod] > PENDING_SECONDS]:
            since.update(dict.fromkeys(late, math.inf))
            running = dict.fromkeys(task.display_name for task in named if task.state == "RUNNING")
            log(
                f"{', '.join(running) or 'before the first task'}: pending pods after {PENDING_SECONDS:.0f} s: "
                f"{len(late)}; possible causes are a missing claim, an image that cannot be pulled or no free node"
            )
            _log_pods(run_id, "Pending", server, log)

    while True:
        try:
            run = server.run(run_id)
        except TimeoutError:
            if time.monotonic() - last_response > UNREACHABLE_SECONDS:
                raise
        else:
            last_response = time.monotonic()
            log_progress(run)
            if run.state == SUCCEEDED or run.state in FAILURES:
                break
        time.sleep(WATCH_SECONDS)
    log(f"{describe_run(run)}{f', {run.error.message}' if run.error and run.error.message else ''}")
    if run.state in FAILURES:
        _log_pods(run_id, "Failed", server, log)
    return str(run.state)


def _log_pods(run_id: str, phase: str, server: KfpClient, log: Log) -> None:
    place = server.place
    log(f"{phase.lower()} pods: {place.commands(run_id, phase)}")
    for line in describe_pods(place.namespace, f"{RUN_LABEL}={run_id}", phase):
        log(f"pod {line}")


def find_older_run(server: KfpClient, key: str, run_id: str) -> str | None:
    """Return a description of an older active run with the same key, or None; in the same second by the lower id."""
    this = server.run(run_id)
    for run in server.runs(operation="IN", key="state", stringValues={"values": LIVE}):
        arguments = (run.runtime_config.parameters if run.runtime_config else None) or {}
        if arguments.get("key") == key and (run.created_at, run.run_id) < (this.created_at, this.run_id):
            return describe_run(run)
    return None


def describe_run(run: Any) -> str:
    return f"the run {run.display_name} ({run.run_id}, {run.state or 'PENDING'})"
