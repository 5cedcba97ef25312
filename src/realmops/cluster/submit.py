"""Kubeflow Pipelines seen from outside: one pipeline submitted, by name and key, and its run watched.

A version of the pipeline is named by the key of the training (key.py). Names of versions are unique, so that of
several who submit the same one makes the version and then its run; the others find both.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import yaml

from realmops.cluster.key import digests_of_files, image_note, key_of
from realmops.cluster.kfp_client import Server
from realmops.cluster.kube import describe_pods
from realmops.cluster.options import packed
from realmops.cluster.place import KINDS, OPTIONAL, RUN_LABEL, check
from realmops.cluster.waiting import Say, awaited
from realmops.config import Values
from realmops.resources import resource

SUCCEEDED = "SUCCEEDED"
FAILURES = {"FAILED", "CANCELED", "SKIPPED"}  # every other state but SUCCEEDED is of a run that lives
CANCELING = "CANCELING"  # it lives and will not succeed: another run does not wait for it
LIVE = ("PENDING", "RUNNING", "PAUSED", "RUNTIME_STATE_UNSPECIFIED")
GRACE_SECONDS = 30.0  # from a version without a run to the belief that its maker is gone
LOOK_SECONDS = 1.0
WATCH_SECONDS = 5.0
AWAY_SECONDS = 600.0  # how long a server may be away while a run is watched
PENDING_SECONDS = 120.0  # of a pod, until a person should look
# the nodes that are pods, beside the tasks, which run as soon as they are there
PODS = re.compile(r"executor(\(\d+\))?|.+-driver(\(\d+\))?")

TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "NUMBER_INTEGER": ("a whole number", lambda value: type(value) is int),
    "NUMBER_DOUBLE": ("a number", lambda value: type(value) in (int, float) and math.isfinite(value)),
    "BOOLEAN": ("true or false", lambda value: type(value) is bool),
    "LIST": ('JSON as ["a", "b"]', lambda value: isinstance(value, list)),
    "STRUCT": ('JSON as {"a": "b"}', lambda value: isinstance(value, dict)),
}


@dataclass(frozen=True)
class Pipeline:
    """A compiled pipeline: its file, the documents in it, and what the first of them says of parameters."""

    path: Path
    documents: Sequence[Any]
    name: str
    parameters: Mapping[str, Mapping[str, Any]]

    @classmethod
    def named(cls, name: str) -> Self:
        """A pipeline of the package, or a file; ValueError for what is neither."""
        own = resource("pipelines") / f"{name}.yaml"
        if Path(name).is_file() or not own.is_file():
            return cls.read(Path(name))
        return cls.read(own)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError for what is no compiled pipeline."""
        if not path.is_file():
            raise ValueError(f"{path} does not exist: --pipeline wants train, ablations, refresh or a compiled file")
        try:
            documents = list(yaml.load_all(path.read_bytes(), yaml.CSafeLoader))
            spec = documents[0]
            parameters = spec["root"].get("inputDefinitions", {}).get("parameters", {})
            return cls(path, documents, spec["pipelineInfo"]["name"], parameters)
        except (yaml.YAMLError, AttributeError, IndexError, KeyError, TypeError):
            raise ValueError(f"{path} is no compiled pipeline; python -m pipelines makes some") from None

    @contextmanager
    def kept_for(self, hours: float) -> Iterator[Path]:
        """The file to upload, which says how long the pods of a run are kept after it; 0 says nothing of that.

        It is what the compiler writes for ``PipelineConfig(ttl_seconds_after_finished)``, as a copy: servers of 2.16
        drop all that pods want for a field that they do not know. What the workflow controller's defaults say of runs
        that succeeded or failed wins over it.
        """
        platforms = self.documents[1].get("platforms", {}) if len(self.documents) > 1 else {}
        if not hours or "kubernetes" not in platforms:
            yield self.path
            return
        written = platforms["kubernetes"].get("pipelineConfig", {})
        config = {"resourceTtlOnCompletion": round(3600 * hours), **written}
        platform = {"platforms": platforms | {"kubernetes": platforms["kubernetes"] | {"pipelineConfig": config}}}
        with TemporaryDirectory() as folder:
            file = Path(folder) / self.path.name
            file.write_text(yaml.dump_all([self.documents[0], platform], Dumper=yaml.CSafeDumper), encoding="utf-8")
            yield file

    @cached_property
    def tasks(self) -> set[str]:
        """The names of the tasks that are pods, those in groups included."""
        spec = self.documents[0]
        components = spec.get("components", {})
        tasks = [group.get("dag", {}).get("tasks", {}) for group in (spec["root"], *components.values())]
        return {
            name
            for group in tasks
            for name, task in group.items()
            if "executorLabel" in components[task["componentRef"]["name"]]
        }

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
    if name in KINDS and not text and name != "deployment":
        none = "; one that is not there may be named" if name in OPTIONAL else ""
        raise ValueError(f"--argument {name}=: Kubeflow Pipelines takes no {KINDS[name]} without a name{none}")
    if kind not in TYPES:
        return text
    wanted, fits = TYPES[kind]
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

    @property
    def objects(self) -> dict[str, str]:
        """What is named of a cluster's objects, by parameter."""
        known = self.pipeline.parameters
        return {
            name: str(self.arguments.get(name, known[name].get("defaultValue", ""))) for name in KINDS if name in known
        }


def prepare(
    values: Values,
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
    if "image" in pipeline.parameters:
        notes += image_note(str(given.get("image", pipeline.parameters["image"].get("defaultValue", ""))))
    ours = {"options": packed(values), "run": key[:16], "key": key}
    given = {one: value for one, value in ours.items() if one in pipeline.parameters} | given
    missing = [
        one
        for one, entry in pipeline.parameters.items()
        if one not in given and "defaultValue" not in entry and not entry.get("isOptional")
    ]
    if missing:
        raise ValueError(f"{pipeline.path} wants {', '.join(missing)} as well: give --argument {missing[0]}=VALUE")
    return Submission(pipeline, key, name or f"{pipeline.name}-{key[:16]}", experiment, given), notes


def submit(submission: Submission, server: Server, *, once: bool, keep_hours: float, say: Say) -> Any:
    """Start a run; with ``once`` only when none of the same key lives or has succeeded, else that run is returned.

    ``keep_hours`` says how long pods are kept after a run, 0 for as long as the server's settings say. It counts for a
    version that is made here and now.
    """
    check(server.place, submission.objects, say)
    experiment = server.experiment(submission.experiment)
    pipeline = server.pipeline(submission.pipeline.name)
    if keep_hours and not server.keeps_pods:
        say("pods are kept after the run as the server's settings say: it is older than 2.17, or tells no version")
    with submission.pipeline.kept_for(keep_hours if server.keeps_pods else 0) as file:
        version, made = server.version(pipeline, submission.key, file)
    if once and not made:
        runs = _runs_of_another(version, server, say)
        for run in runs:
            if run.state not in FAILURES | {CANCELING}:
                say(f"nothing to submit: {_shown(run)} has the same key {submission.key[:16]}")
                say(f"the run: {server.link(run)}")
                return run
        for run in runs:
            say(f"{_shown(run)} has the same key {submission.key[:16]}: another try")
    say(server.place.described(submission.objects))
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
    """The state in which a run ends; each change of a task's state is said, and of a pod that it is pending for long.

    A task runs as soon as it is there, whatever becomes of its pod, which is a node of its own in a run's details.
    """
    states: dict[str, str] = {}
    since: dict[str, float] = {}  # of a pod; infinite once it was said
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
        details = (run.run_details.task_details if run.run_details else None) or ()
        for task in details:
            # iterations of a loop are tasks of one name
            if task.display_name in tasks and task.state and states.get(task.task_id) != task.state:
                states[task.task_id] = task.state
                say(f"{task.display_name}: {task.state}")
        pending = {one.task_id: one for one in details if one.state == "PENDING" and PODS.fullmatch(one.display_name)}
        for pod in pending:
            since.setdefault(pod, answered)
        if late := [pod for pod in pending if answered - since[pod] > PENDING_SECONDS]:
            since.update(dict.fromkeys(late, math.inf))
            running = [task.display_name for task in details if task.state == "RUNNING" and task.display_name in tasks]
            _tell_of_pods(running, len(late), run_id, server, say)
        return run if run.state == SUCCEEDED or run.state in FAILURES else None

    run: Any = awaited(look, WATCH_SECONDS)
    reason = f", {run.error.message}" if run.error and run.error.message else ""
    say(f"{_shown(run)}{reason}")
    if run.state in FAILURES:
        place = server.place
        say(f"pods that have failed: {place.commands(run_id, 'Failed')}")
        for line in describe_pods(lambda cluster: cluster.pods(place.namespace, f"{RUN_LABEL}={run_id}", "Failed")):
            say(f"the pod {line}")
    return str(run.state)


def _tell_of_pods(tasks: Sequence[str], late: int, run_id: str, server: Server, say: Say) -> None:
    """Say that pods wait, of which tasks, and why where a cluster is at hand: the server itself does not know."""
    place = server.place
    waits = "a pod waits" if late == 1 else f"{late} pods wait"
    say(
        f"{', '.join(dict.fromkeys(tasks)) or 'before the first task'}: {waits}, still PENDING after "
        f"{PENDING_SECONDS:.0f} s; a claim that is not there, an image that cannot be pulled or no room on a node: "
        f"{place.commands(run_id, 'Pending')}"
    )
    for line in describe_pods(lambda cluster: cluster.pods(place.namespace, f"{RUN_LABEL}={run_id}", "Pending")):
        say(f"the pod {line}")


def older_run(server: Server, key: str, run_id: str) -> str | None:
    """A run that lives, has the same key and is older than this one, in words; of one second, the lower id is older.

    One that is being cancelled leaves the work to this one.
    """
    this = server.run(run_id)
    for run in server.runs(operation="IN", key="state", stringValues={"values": LIVE}):
        arguments = (run.runtime_config.parameters if run.runtime_config else None) or {}
        if arguments.get("key") == key and (run.created_at, run.run_id) < (this.created_at, this.run_id):
            return _shown(run)
    return None


def _shown(run: Any) -> str:
    return f"the run {run.display_name} ({run.run_id}, {run.state or 'PENDING'})"
