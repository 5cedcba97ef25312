"""A stand-in for the API server of Kubeflow Pipelines: HTTP on a loopback port, requests held against KFP's own models.

It keeps experiments, pipelines, versions and runs, with the unique names, filters and pages of the real one, and leaves
a run in the state that a test wants. Each rule names what it follows in the sources of Kubeflow Pipelines 2.17.0, under
backend/src; v2 means backend/src/v2.
"""

import base64
import email
import json
import re
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote_plus, urlsplit

import kfp_server_api
import pytest
import yaml
from compiled import documents

from realmops.cluster import kfp_client, submit

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
TYPES = {
    "STRING": (str,), "NUMBER_INTEGER": (int,), "NUMBER_DOUBLE": (int, float), "BOOLEAN": (bool,), "LIST": (list,),
    "STRUCT": (dict,),
}  # fmt: skip
PHASES = {"Omitted": "SKIPPED", "Error": "FAILED"}  # of Argo's nodes, where the state is not the same word
Object = dict[str, Any]


class RefusedError(Exception):
    """An answer with an error: its HTTP status, and what is wrong."""


class KfpLab:
    """The server's content, and how it behaves.

    ``state`` is that of a run when it is made, ``status`` that of all answers where it is not 200. ``token`` is the one
    that it takes, if it wants one; with ``multi_user`` it wants a namespace.
    """

    def __init__(self, state: str) -> None:
        self.state = state
        self.url = ""
        self.status = 200
        self.tag_name = "2.17.0"
        self.namespace = "kubeflow"  # of the server itself
        self.multi_user = False
        self.token: str | None = None
        self.largest_page = 200
        self.page_for_all = ""  # a web page in the place of every answer
        self.requests: list[tuple[str, str]] = []
        self.kept: dict[str, list[Object]] = {kind: [] for kind in FIELDS}
        self.specs: dict[str, str] = {}  # of versions
        self._lock = threading.Lock()

    @property
    def runs(self) -> list[Object]:
        return self.kept["runs"]

    def replaced(self, namespace: str) -> str:
        """apiserver/resource/resource_manager.go, ReplaceNamespace; validation.ValidateNamespaceRequired after it."""
        if not self.multi_user:
            return ""
        if not namespace:
            raise RefusedError(400, "a namespace is wanted in multi-user mode")
        return namespace

    def page_of(self, kind: str, query: Mapping[str, str], **fixed: Any) -> tuple[list[Object], str]:
        """One page of what a request's filter lets through."""
        unknown = query.keys() - LISTED
        if unknown:
            raise RefusedError(400, f"unknown parameters {sorted(unknown)}")
        if query.get("experiment_id"):
            fixed["experiment_id"] = query["experiment_id"]
        elif kind != "versions":
            fixed["namespace"] = self.replaced(query.get("namespace", ""))
        filters, start = self._options(query)
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
        token = {"filters": filters, "start": end}
        return found[start:end], base64.b64encode(json.dumps(token).encode()).decode() if end < len(found) else ""

    def _options(self, query: Mapping[str, str]) -> tuple[list[Object], int]:
        """Predicates and where to start: apiserver/server/list_request_util.go, validatedListOptions.

        A token brings its filter along. One beside it is compared deeply with that (apiserver/list/list.go, Matches),
        and no times or lists are equal after that one has been JSON: any is refused here.
        """
        filters = json.loads(unquote_plus(query.get("filter") or "{}"))  # the real one unescapes once more, too
        asked: list[Object] = filters.get("predicates", [])
        if not query.get("page_token"):
            return asked, 0
        if asked:
            raise RefusedError(400, "page token does not match the supplied sort by and/or filtering criteria")
        token = json.loads(base64.b64decode(query["page_token"]))
        return token["filters"], token["start"]

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

    def add_run(self, body: Object) -> Object:
        """A run of a version, or of the pipeline that the request brings along.

        apiserver/server/run_server.go, createRun: its namespace is that of its experiment, which is none outside
        multi-user mode; apiserver/resource/resource_manager.go, CreateRun: then its pods are in the server's own.
        """
        experiment = self.get("experiments", "experiment_id", body.get("experiment_id", ""))
        body |= {"namespace": experiment["namespace"], "pods_in": experiment["namespace"] or self.namespace}
        reference = body.get("pipeline_version_reference")
        if reference:
            version = self.get("versions", "pipeline_version_id", reference["pipeline_version_id"])
            spec = self.specs[version["pipeline_version_id"]]
        else:
            whole = body["pipeline_spec"]
            parts = [whole["pipeline_spec"], whole["platform_spec"]] if "platform_spec" in whole else [whole]
            spec = yaml.safe_dump_all(parts)
        declared = documents(spec)[0]["root"]["inputDefinitions"]["parameters"]
        given = body.get("runtime_config", {}).get("parameters", {})
        if not given.keys() <= declared.keys():
            raise RefusedError(400, f"unknown pipeline parameters {sorted(given.keys() - declared.keys())}")
        for name, value in given.items():
            kind = declared[name]["parameterType"]
            if type(value) not in TYPES[kind]:
                raise RefusedError(400, f"input parameter {name} requires type {kind}, and the value is {value!r:.60}")
        run = self.add("runs", (), {**body, "run_id": str(uuid.uuid4()), "state": self.state})
        tasks = argo_nodes(run["run_id"], {"pretrain": "Succeeded"}, retried=True)
        run["run_details"] = {"task_details": tasks}
        return run

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
        assert all(isinstance(one, dict) for one in documents(text))
        version = {
            "status": "CREATING", "pipeline_id": query["pipelineid"], "pipeline_version_id": str(uuid.uuid4()),
            "name": query["name"], "display_name": query["name"],
        }  # fmt: skip
        made = self.add("versions", ("pipeline_id", "name"), version)
        self.specs[version["pipeline_version_id"]] = text
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
                found, token = self.page_of(kind, query)
                return {kind: found, "next_page_token": token}
            case "GET", ["pipelines", pipeline, "versions"]:
                found, token = self.page_of("versions", query, pipeline_id=pipeline)
                return {"pipeline_versions": found, "next_page_token": token}
            case "GET", ["pipelines", _, "versions", which]:
                return self.get("versions", "pipeline_version_id", which)
            case "GET", ["pipelines", which]:
                return self.get("pipelines", "pipeline_id", which)
            case "GET", ["experiments", which]:
                return self.get("experiments", "experiment_id", which)
            case "GET", ["runs", which]:
                return self.get("runs", "run_id", which)
            case "POST", ["experiments"]:
                made = checked(json.loads(body), "V2beta1Experiment")
                made["namespace"] = self.replaced(made.get("namespace", ""))
                made |= {"experiment_id": str(uuid.uuid4()), "storage_state": "AVAILABLE"}
                return self.add("experiments", ("display_name", "namespace"), made)
            case "POST", ["pipelines"]:
                made = checked(json.loads(body), "V2beta1Pipeline")
                made["namespace"] = self.replaced(made.get("namespace", ""))
                return self.add("pipelines", ("display_name", "namespace"), made | {"pipeline_id": str(uuid.uuid4())})
            case "POST", ["pipelines", "upload_version"]:
                return self.upload(query, headers, body)
            case "POST", ["runs"]:
                made = checked(json.loads(body), "V2beta1Run")
                return self.add_run(made)
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
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield lab
    finally:
        server.shutdown()
        server.server_close()


def named_by_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KfpLab]:
    """A server whose runs are RUNNING, whose clients wait for moments; no cluster is at hand."""
    monkeypatch.setattr(submit, "WATCH_SECONDS", 0.05)
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    monkeypatch.delenv(kfp_client.TOKEN_FILE, raising=False)
    monkeypatch.delenv("KF_PIPELINES_UI_ENDPOINT", raising=False)
    with serve(KfpLab("RUNNING")) as found:
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", found.url)
        yield found


def arguments_of(run: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = run["runtime_config"]["parameters"]
    return found


def recorded() -> dict[str, Any]:
    """What a real server answered."""
    found: dict[str, Any] = json.loads(
        Path(__file__).with_name("recorded").joinpath("kubeflow-2.17.0.json").read_text()
    )
    return found


def earlier(run: Object, seconds: float) -> None:
    """Make a run older than it is."""
    made = datetime.fromisoformat(run["created_at"]) - timedelta(seconds=seconds)
    run["created_at"] = made.strftime("%Y-%m-%dT%H:%M:%SZ")
