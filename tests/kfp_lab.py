"""A stand-in for the API server of Kubeflow Pipelines: HTTP on a loopback port, requests held against KFP's own models.

It keeps experiments, pipelines, versions and runs, with the unique names, filters and pages of the real one, and
executes what is submitted with KFP's local runner, or leaves a run in the state that a test wants. Each rule names what
it follows in the sources of Kubeflow Pipelines 2.17.0, under backend/src; v2 means backend/src/v2.
"""

from __future__ import annotations

import base64
import email
import json
import os
import re
import subprocess
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote_plus, urlsplit

import kfp_server_api
import yaml

API = "/apis/v2beta1"
# the API's filters know these fields, and a request these parameters; what is not here is refused
FIELDS = {
    "experiments": {"experiment_id", "display_name", "created_at", "namespace"},
    "pipelines": {"pipeline_id", "display_name", "created_at", "namespace"},
    "versions": {"pipeline_version_id", "display_name", "created_at"},
    "runs": {"run_id", "display_name", "created_at", "state", "experiment_id", "namespace"},
}
LISTED = {"page_token", "page_size", "sort_by", "filter", "namespace", "experiment_id"}
OPERATIONS: dict[Any, Callable[[Any, Any], bool]] = {
    "EQUALS": lambda value, wanted: value == wanted,
    "NOT_EQUALS": lambda value, wanted: value != wanted,
    "GREATER_THAN_EQUALS": lambda value, wanted: value >= wanted,
    "IN": lambda value, wanted: value in wanted,
}
NUMBERS = {1: "EQUALS", 2: "NOT_EQUALS", 5: "GREATER_THAN_EQUALS", 8: "IN"}
RUN = """
import json, sys
from kfp import components, local
from kfp.local import placeholder_utils
from kfp.local.orchestrator import task_executor
task_executor.time.sleep = lambda seconds: None
placeholder_utils.make_random_id = lambda: sys.argv[4]
local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[2])
components.load_component_from_file(sys.argv[1])(**json.loads(sys.argv[3]))
"""
TYPES = {
    "STRING": (str,),
    "NUMBER_INTEGER": (int,),
    "NUMBER_DOUBLE": (int, float),
    "BOOLEAN": (bool,),
    "LIST": (list,),
    "STRUCT": (dict,),
}
# what kubernetes_platform/proto/kubernetes_executor_config.proto has got since 2.15, by version
YOUNGER_FIELDS = {"securityContext": (2, 16)}
# message PipelineConfig of api/v2alpha1/pipeline_spec.proto, before 2.17 and since
PIPELINE_CONFIG = {
    (2, 15): {"resourceTtl", "workspace"},
    (2, 17): {
        "resourceTtlOnCompletion", "resourceTtlOnSuccess", "resourceTtlOnFailure", "activeDeadlineSeconds", "workspace",
    },
}  # fmt: skip
NAMES = ("pvcNameParameter", "configMapNameParameter", "secretNameParameter")
# v2/common/plugins/mlflow/handler.go, RetrieveUserContainerEnvVars, with a bearer token
INJECTED = {"MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_TOKEN"}
AUDIENCE = "pipelines.kubeflow.org"
PHASES = {"Omitted": "SKIPPED", "Error": "FAILED"}  # of Argo's nodes, where the state is not the same word
TASK = re.compile(r"Executing task '([\w-]+)'|Task '([\w-]+)' finished with status (SUCCESS|FAILURE)")
Object = dict[str, Any]


class RefusedError(Exception):
    """An answer with an error: its HTTP status, and what is wrong."""


class HeldError(Exception):
    """No answer at all."""


@dataclass
class Review:
    """What a cluster's TokenReview says of a token: whose it is, and for which audiences."""

    user: str
    audiences: tuple[str, ...] = (AUDIENCE,)


class KfpLab:
    """The server's content, and how it behaves.

    ``state`` is that of a run when it is made; without one the run is executed in ``folder``. ``status`` is that of all
    answers where it is not 200. ``hold`` is told of the next run that is asked for, which is then never made.
    ``together`` holds the uploads of versions until so many want it. A version is being made for ``creating_seconds``.
    With ``multi_user``, ``tokens`` are those that the cluster knows, and ``editors`` the users that may edit pipelines,
    with their namespaces; while there are no tokens, a gateway in front has signed in somebody who may all.
    ``injects`` is MLflow's plugin with injectUserEnvVars.
    """

    def __init__(self, folder: Path, state: str | None = None) -> None:
        self.folder, self.state = folder, state
        self.url = ""
        self.status = 200
        self.tag_name = "2.17.0"
        self.namespace = "kubeflow"  # of the server itself
        self.multi_user = False
        self.token: str | None = None
        self.tokens: dict[str, Review] = {}
        self.editors: set[tuple[str, str]] = set()
        self.creating_seconds = 0.0
        self.injects = False
        self.largest_page = 200
        self.hold: threading.Event | None = None
        self.together: threading.Barrier | None = None
        self.page_for_all = ""  # a web page in the place of every answer
        self.requests: list[tuple[str, str]] = []
        self.logs: dict[str, str] = {}
        self.kept: dict[str, list[Object]] = {kind: [] for kind in FIELDS}
        self.specs: dict[str, str] = {}  # of versions
        self._lock = threading.Lock()
        self._executed: list[threading.Thread] = []

    @property
    def runs(self) -> list[Object]:
        return self.kept["runs"]

    @property
    def version(self) -> tuple[int, ...]:
        found = re.match(r"(\d+)\.(\d+)", self.tag_name)
        return tuple(map(int, found.groups())) if found else (9, 9)

    def authorize(self, namespace: str, headers: email.message.Message) -> None:
        """One SubjectAccessReview: apiserver/resource/resource_manager.go, IsAuthorized.

        A token counts when the review names the audience: apiserver/auth/authenticator_token_review.go.
        """
        if not self.multi_user or not self.tokens:
            return
        review = self.tokens.get((headers["Authorization"] or "").removeprefix("Bearer "))
        if review is None:
            raise RefusedError(401, "Review.Status.Authenticated is false")
        if AUDIENCE not in review.audiences:
            raise RefusedError(401, f"Failed to find all of '[{AUDIENCE}]' in audience: {[*review.audiences]}")
        if (review.user, namespace) not in self.editors:
            raise RefusedError(403, f"User '{review.user}' is not authorized in {namespace}")

    def replaced(self, namespace: str) -> str:
        """apiserver/resource/resource_manager.go, ReplaceNamespace; validation.ValidateNamespaceRequired after it."""
        if not self.multi_user:
            return ""
        if not namespace:
            raise RefusedError(400, "a namespace is wanted in multi-user mode")
        return namespace

    def page_of(
        self, kind: str, query: Mapping[str, str], headers: email.message.Message, **fixed: Any
    ) -> tuple[list[Object], str]:
        """One page of what a request's filter lets through."""
        unknown = query.keys() - LISTED
        if unknown:
            raise RefusedError(400, f"unknown parameters {sorted(unknown)}")
        if kind == "versions":
            self.authorize(self.get("pipelines", "pipeline_id", fixed["pipeline_id"])["namespace"], headers)
        elif query.get("experiment_id"):
            fixed["experiment_id"] = query["experiment_id"]
            self.authorize(self.get("experiments", "experiment_id", query["experiment_id"])["namespace"], headers)
        else:
            fixed["namespace"] = self.replaced(query.get("namespace", ""))
            self.authorize(fixed["namespace"], headers)
        filters, start = self._options(kind, query)
        wanted = [_predicate(one, kind) for one in filters]
        found = [
            one
            for one in self.kept[kind]
            if all(one.get(name) == value for name, value in fixed.items()) and all(fits(one) for fits in wanted)
        ]
        if kind == "versions":  # apiserver/storage/pipeline_store.go, ListPipelineVersions: READY, no other
            found = [one for one in found if one["status"] == "READY"]
        if query.get("sort_by", "").endswith(" desc"):
            found.reverse()
        end = start + min(self.largest_page, int(query.get("page_size") or 20))
        token = {"filter": json.loads(json.dumps([_as_go(one) for one in filters])), "api": filters, "start": end}
        return found[start:end], base64.b64encode(json.dumps(token).encode()).decode() if end < len(found) else ""

    def _options(self, kind: str, query: Mapping[str, str]) -> tuple[list[Object], int]:
        """Predicates and where to start: apiserver/server/list_request_util.go, validatedListOptions.

        A token brings its filter along. One sent beside it must be deeply equal to that, which has been JSON since
        (apiserver/list/list.go, Matches): int64 has become float64, and []string has become []interface{}.
        """
        filters = json.loads(unquote_plus(query.get("filter") or "{}"))  # the real one unescapes once more, too
        asked = filters.get("predicates", [])
        if not query.get("page_token"):
            return asked, 0
        token = json.loads(base64.b64decode(query["page_token"]))
        if asked:
            fresh = [_as_go(one) for one in asked]
            if any(one["type"] != "string" for one in fresh) or json.loads(json.dumps(fresh)) != token["filter"]:
                raise RefusedError(400, "page token does not match the supplied sort by and/or filtering criteria")
        return token["api"], token["start"]

    def add(self, kind: str, unique: tuple[str, ...], one: Object) -> Object:
        with self._lock:
            for other in self.kept[kind]:
                if unique and all(other.get(name) == one.get(name) for name in unique):
                    raise RefusedError(409, f"{kind}: {one['display_name']} is there already")
            # whole seconds, as in the server's database
            self.kept[kind].append(one | {"created_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")})
            return self.kept[kind][-1]

    def get(self, kind: str, name: str, value: str) -> Object:
        for one in self.kept[kind]:
            if one[name] == value:
                return one
        raise RefusedError(404, f"{kind}: there is no {value}")

    def add_run(self, body: Object, headers: email.message.Message) -> Object:
        """A run of a version, or of the pipeline that the request brings along.

        apiserver/server/run_server.go, createRun: its namespace is that of its experiment, which is none outside
        multi-user mode; apiserver/resource/resource_manager.go, CreateRun: then its pods are in the server's own.
        """
        experiment = self.get("experiments", "experiment_id", body.get("experiment_id", ""))
        self.authorize(experiment["namespace"], headers)
        body |= {"namespace": experiment["namespace"], "pods_in": experiment["namespace"] or self.namespace}
        reference = body.get("pipeline_version_reference")
        if reference:
            version = self.get("versions", "pipeline_version_id", reference["pipeline_version_id"])
            spec = self.specs[version["pipeline_version_id"]]
        else:
            whole = body["pipeline_spec"]
            parts = [whole["pipeline_spec"], whole["platform_spec"]] if "platform_spec" in whole else [whole]
            spec = yaml.safe_dump_all(parts)
        declared = next(yaml.safe_load_all(spec))["root"]["inputDefinitions"]["parameters"]
        given = body.get("runtime_config", {}).get("parameters", {})
        if not given.keys() <= declared.keys():
            raise RefusedError(400, f"unknown pipeline parameters {sorted(given.keys() - declared.keys())}")
        for name, value in given.items():
            kind = declared[name]["parameterType"]
            if type(value) not in TYPES[kind]:
                raise RefusedError(400, f"input parameter {name} requires type {kind}, and the value is {value!r:.60}")
        platform = self._platform(spec)
        run = self.add("runs", (), {**body, "run_id": str(uuid.uuid4()), "state": self.state or "PENDING"})
        run["run_details"] = {"task_details": []}
        run["platform"] = platform
        values = {name: one.get("defaultValue") for name, one in declared.items()} | given
        if trouble := self._trouble(platform, values):
            run |= {"state": "FAILED", "error": {"message": trouble}}
        elif self.state is None:
            thread = threading.Thread(target=self._execute, args=(run, spec, given))
            self._executed.append(thread)
            thread.start()
        return run

    def _platform(self, spec: str) -> Object:
        """The executors' entries of the platform document, as this version of the server takes them.

        The document itself is parsed strictly, and left out without a word where that fails
        (apiserver/template/v2_template.go, IsPlatformSpecWithKubernetesConfig); its executors are not typed there, and
        parsed strictly when a run is made (v2/compiler/argocompiler/container.go, containerExecutorTask).
        """
        documents = [*yaml.safe_load_all(spec)]
        if len(documents) < 2:
            return {}
        kubernetes = documents[1]["platforms"]["kubernetes"]
        known = PIPELINE_CONFIG[(2, 17) if self.version >= (2, 17) else (2, 15)]
        if not kubernetes.get("pipelineConfig", {}).keys() <= known:
            return {}
        executors: Object = kubernetes["deploymentSpec"]["executors"]
        for name, entry in executors.items():
            for field in entry:
                if self.version < YOUNGER_FIELDS.get(field, (0,)):
                    raise RefusedError(500, f"{name}: failed to unmarshal kubernetes config: unknown field {field!r}")
        return executors

    def _trouble(self, executors: Object, values: Object) -> str:
        """What ends a run at its first task."""
        for name, entry in executors.items():
            given = [*entry.get("configMapAsEnv", []), *entry.get("secretAsEnv", [])]
            for one in [*entry.get("pvcMount", []), *given]:
                for kind in NAMES:  # v2/driver/resolve.go, resolveInputParameterStr
                    parameter = one.get(kind, {}).get("componentInputParameter", "").removeprefix("pipelinechannel--")
                    if parameter and values.get(parameter) == "":
                        return f"{name}: resolving input parameter {parameter}. Expected a non-empty string"
            names = {pair["envVar"] for one in given for pair in one["keyToEnv"]}
            if self.injects and names & INJECTED:  # a value and a valueFrom of one name become one entry of both
                return f"{name}: env[{min(names & INJECTED)}].valueFrom: may not be specified when `value` is not empty"
        return ""

    def _execute(self, run: Object, spec: str, arguments: Object) -> None:
        folder = self.folder / run["run_id"]
        folder.mkdir(parents=True)
        (folder / "pipeline.yaml").write_text(spec)
        words = [folder / "pipeline.yaml", folder / "outputs", json.dumps(arguments), run["run_id"]]
        run["state"] = "RUNNING"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        tasks: dict[str, str] = {}
        self.logs[run["run_id"]] = ""
        with subprocess.Popen(
            [sys.executable, "-c", RUN, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=self.folder,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
                self.logs[run["run_id"]] += plain
                for begun, ended, end in TASK.findall(plain):
                    tasks[begun or ended] = {"": "Running", "SUCCESS": "Succeeded", "FAILURE": "Failed"}[end]
                run["run_details"]["task_details"] = argo_nodes(run["run_id"], tasks, retried=self.version >= (2, 17))
        run["state"] = "FAILED" if process.returncode else "SUCCEEDED"

    def join(self) -> None:
        """Wait for the runs that are executed."""
        for thread in self._executed:
            thread.join()

    def upload(self, query: Mapping[str, str], headers: email.message.Message, body: bytes) -> Object:
        """A new version of a pipeline, from a form with its file.

        apiserver/resource/resource_manager.go, CreatePipelineVersion: inserted as CREATING, which takes the name
        (apiserver/storage/pipeline_store.go, CreatePipelineVersion), and made READY afterwards.
        """
        if query.keys() - {"name", "pipelineid"}:
            raise RefusedError(400, f"unknown parameters {sorted(query)}")
        head = f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode()
        [part] = email.message_from_bytes(head + body).get_payload()  # type: ignore[misc]
        if not str(part.get_filename()).endswith((".yaml", ".yml")):  # type: ignore[union-attr]
            raise RefusedError(400, "unexpected file format")
        text = part.get_payload(decode=True).decode()  # type: ignore[union-attr]
        assert all(isinstance(one, dict) for one in yaml.safe_load_all(text))
        self.authorize(self.get("pipelines", "pipeline_id", query["pipelineid"])["namespace"], headers)
        version = {
            "status": "CREATING",
            "pipeline_id": query["pipelineid"],
            "pipeline_version_id": str(uuid.uuid4()),
            "name": query["name"],
            "display_name": query["name"],
        }
        made = self.add("versions", ("pipeline_id", "name"), version)
        self.specs[version["pipeline_version_id"]] = text
        time.sleep(self.creating_seconds)
        made["status"] = "READY"
        return made

    def answer(self, method: str, path: str, query: Mapping[str, str], headers: Any, body: bytes) -> Object:
        """What a request gets; RefusedError for what the server refuses."""
        if self.status != 200:
            raise RefusedError(self.status, "as the test wants it")
        if self.token is not None and headers["Authorization"] != f"Bearer {self.token}":
            raise RefusedError(401, "no valid token")
        match method, path.split("/")[1:]:
            case "GET", ["healthz"]:
                # apiserver/main.go, newHealthzResponse
                return {"commit_sha": "unknown", "tag_name": self.tag_name, "multi_user": self.multi_user}
            case "GET", [("experiments" | "pipelines" | "runs") as kind]:
                found, token = self.page_of(kind, query, headers)
                return {kind: found, "next_page_token": token}
            case "GET", ["pipelines", pipeline, "versions"]:
                found, token = self.page_of("versions", query, headers, pipeline_id=pipeline)
                return {"pipeline_versions": found, "next_page_token": token}
            case "GET", ["experiments", which]:
                return self.get("experiments", "experiment_id", which)
            case "GET", ["runs", which]:
                run = self.get("runs", "run_id", which)
                self.authorize(run["namespace"], headers)
                return run
            case "POST", ["experiments"]:
                made = checked(json.loads(body), "V2beta1Experiment")
                made["namespace"] = self.replaced(made.get("namespace", ""))
                self.authorize(made["namespace"], headers)
                made |= {"experiment_id": str(uuid.uuid4()), "storage_state": "AVAILABLE"}
                return self.add("experiments", ("display_name", "namespace"), made)
            case "POST", ["pipelines"]:
                made = checked(json.loads(body), "V2beta1Pipeline")
                made["namespace"] = self.replaced(made.get("namespace", ""))
                self.authorize(made["namespace"], headers)
                return self.add("pipelines", ("display_name", "namespace"), made | {"pipeline_id": str(uuid.uuid4())})
            case "POST", ["pipelines", "upload_version"]:
                if self.together is not None:
                    self.together.wait(100)
                return self.upload(query, headers, body)
            case "POST", ["runs"]:
                made = checked(json.loads(body), "V2beta1Run")
                if self.hold is not None:
                    hold, self.hold = self.hold, None
                    hold.set()
                    raise HeldError
                return self.add_run(made, headers)
        raise RefusedError(404, f"there is no {method} {path}")


def checked(value: Any, kind: str) -> Any:
    """A request's body when it fits one of the API's models, with all that is in it."""
    if kind.startswith(("dict(", "list[")):
        inner = re.sub(r"^(dict\(str, |list\[)(.*)[)\]]$", r"\2", kind)
        for one in value.values() if isinstance(value, dict) else value:
            checked(one, inner)
    elif (model := getattr(kfp_server_api.models, kind, None)) is not None and model.attribute_map:
        names = {name: attribute for attribute, name in model.attribute_map.items()}
        if not isinstance(value, dict) or not value.keys() <= names.keys():
            raise RefusedError(400, f"{kind} has no such fields: {value!r:.200}")
        for name, inner in value.items():
            checked(inner, model.openapi_types[names[name]])
    elif model is not None and value not in model.allowable_values:
        raise RefusedError(400, f"{kind} is none of {model.allowable_values}: {value!r}")
    elif kind == "str" and not isinstance(value, str):
        raise RefusedError(400, f"text is wanted: {value!r:.200}")
    return value


def argo_nodes(run_id: str, tasks: Mapping[str, str], *, retried: bool) -> list[Object]:
    """The task_details of a run, of Argo's nodes: apiserver/server/api_converter.go, toModelTasks.

    ``tasks`` has the phase of each task's pod. A task is a DAG, Running as soon as it is there; in it is the pod,
    ``executor``, or with retries a node of that name that is Running, and ``executor(0)`` in it
    (v2/compiler/argocompiler/container.go, containerExecutorTask). Beside it is the pod of its driver.
    """
    nodes: list[Object] = []

    def node(path: str, name: str, phase: str, *children: str) -> str:
        nodes.append({
            "run_id": run_id,
            "task_id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{run_id} {path}")),  # apiserver/storage/task_store.go
            "display_name": name,
            "state": PHASES.get(phase, phase.upper()),
            "child_tasks": [{"pod_name": f"workflow-{zlib.crc32(child.encode())}"} for child in children],
        })  # fmt: skip
        return path

    def over(phase: str) -> str:
        return phase if phase in ("Succeeded", "Failed") else "Running"

    children = []
    for path, phase in tasks.items():  # iterations of a loop: a name for each, with what follows a slash left out
        name = path.partition("/")[0]
        children.append(node(f"{path}-driver", f"{name}-driver", "Succeeded"))
        inner = node(f"{path}.executor(0)", "executor(0)", phase) if retried else ""
        pod = node(f"{path}.executor", "executor", over(phase) if retried else phase, *([inner] if inner else []))
        children.append(node(path, name, over(phase), pod))
    node("root", "root", "Running", *children)
    return nodes


def _as_go(one: Object) -> Object:
    """A predicate with the type that its value has in Go: apiserver/filter/filter.go, toPredicates."""
    [(form, value)] = [(name, value) for name, value in one.items() if name not in ("key", "operation")]
    kind = {"stringValue": "string", "stringValues": "[]string", "timestampValue": "int64"}.get(form, form)
    return {"key": one["key"], "operation": one["operation"], "type": kind, "value": value}


def _predicate(one: Object, kind: str) -> Callable[[Object], bool]:
    key, operation = one["key"], NUMBERS.get(one["operation"], one["operation"])
    [(form, wanted)] = [(name, value) for name, value in one.items() if name not in ("key", "operation")]
    if key not in FIELDS[kind] or operation not in OPERATIONS:
        raise RefusedError(400, f"no support for filtering {kind} by {key} with {operation}")
    if form == "timestampValue":
        wanted = datetime.fromisoformat(wanted).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    elif form == "stringValues":
        wanted = wanted["values"]
    elif form != "stringValue":
        raise RefusedError(400, f"unknown field {form} of a predicate")
    return lambda found: OPERATIONS[operation](found.get(key), wanted)


@contextmanager
def serve(lab: KfpLab) -> Iterator[KfpLab]:
    """The API on a loopback port."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            lab.requests.append((self.command, url.path.removeprefix(API)))
            status = 200
            try:
                path = url.path.removeprefix(API)
                answer = lab.answer(self.command, path, dict(parse_qsl(url.query)), self.headers, body)
            except RefusedError as error:
                status, reason = error.args
                answer = {"code": status, "message": reason}
            except HeldError:
                self.connection.recv(1)  # until who asked is gone
                self.close_connection = True
                return
            content = (lab.page_for_all or json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if lab.page_for_all else "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(content)

        do_GET = do_POST = _handle

        def log_message(self, format: str, *values: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    lab.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield lab
    finally:
        lab.join()
        server.shutdown()
        server.server_close()


def earlier(run: Object, seconds: float) -> None:
    """Make a run older than it is."""
    made = datetime.fromisoformat(run["created_at"]) - timedelta(seconds=seconds)
    run["created_at"] = made.strftime("%Y-%m-%dT%H:%M:%SZ")
