"""A stand-in for the API server of Kubeflow Pipelines on a loopback port.

It keeps experiments, pipelines, versions and runs, with the unique names, filters and pages of the real one, and leaves
a run in the state that a test sets. Paths in comments are those of Kubeflow Pipelines 2.17.0, below backend/src.
"""

import base64
import email
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote_plus, urlsplit

import pytest
from compiled import documents

from realmops.cluster import kfp_client, submit

API = "/apis/v2beta1"
KINDS = ("experiments", "pipelines", "versions", "runs")
OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "EQUALS": lambda value, expected: value == expected,
    "GREATER_THAN_EQUALS": lambda value, expected: value >= expected,
    "IN": lambda value, expected: value in expected,
}
TYPES = {
    "STRING": (str,), "NUMBER_INTEGER": (int,), "NUMBER_DOUBLE": (int, float), "LIST": (list,), "STRUCT": (dict,),
}  # fmt: skip
Object = dict[str, Any]


class RefusedError(Exception):
    """An answer with an error: its HTTP status, and what is wrong."""


class KfpLab:
    """The server's content and behaviour.

    ``state`` is that of a new run, ``status`` that of all answers unless it is 200, ``token`` the required one.
    """

    def __init__(self, state: str) -> None:
        self.state = state
        self.url = ""
        self.transaction = threading.Lock()
        self.status = 200
        self.tag_name = "2.17.0"
        self.namespace = "kubeflow"  # of the server itself
        self.multi_user = False
        self.token: str | None = None
        self.largest_page = 200
        self.page_for_all = ""  # a web page instead of every answer
        self.requests: list[tuple[str, str]] = []
        self.kept: dict[str, list[Object]] = {kind: [] for kind in KINDS}
        self.specs: dict[str, str] = {}  # of versions

    @property
    def runs(self) -> list[Object]:
        return self.kept["runs"]

    def replaced(self, namespace: str) -> str:
        """Return the namespace of a request: apiserver/resource/resource_manager.go, ReplaceNamespace."""
        if self.multi_user and not namespace:
            raise RefusedError(400, "a namespace is required in multi-user mode")
        return namespace if self.multi_user else ""

    def page_of(self, kind: str, query: Mapping[str, str], **fixed: Any) -> tuple[list[Object], str]:
        """Return a page of what a request's filter selects, and the token of the next one."""
        if kind != "versions":
            fixed["namespace"] = self.replaced(query.get("namespace", ""))
        filters, start = self._options(query)
        found = [
            one
            for one in self.kept[kind]
            if all(one.get(name) == value for name, value in fixed.items())
            and all(_fits(one, each) for each in filters)
        ]
        if kind == "versions":  # apiserver/storage/pipeline_store.go, ListPipelineVersions
            found = [one for one in found if one["status"] == "READY"]
        end = start + min(self.largest_page, int(query.get("page_size") or 20))
        token = {"filters": filters, "start": end}
        return found[start:end], base64.b64encode(json.dumps(token).encode()).decode() if end < len(found) else ""

    def _options(self, query: Mapping[str, str]) -> tuple[list[Object], int]:
        """Return predicates and start: apiserver/server/list_request_util.go, validatedListOptions.

        A token contains its filter. Another one is compared with that deeply (apiserver/list/list.go, Matches), and
        times and lists differ after a round trip through JSON: any is refused here.
        """
        filters: list[Object] = json.loads(unquote_plus(query.get("filter") or "{}")).get("predicates", [])
        if not query.get("page_token"):
            return filters, 0
        if filters:
            raise RefusedError(400, "page token does not match the supplied sort by and/or filtering criteria")
        token = json.loads(base64.b64decode(query["page_token"]))
        return token["filters"], token["start"]

    def add(self, kind: str, unique: tuple[str, ...], one: Object) -> Object:
        for other in self.kept[kind]:
            if unique and all(other.get(name) == one.get(name) for name in unique):
                raise RefusedError(409, f"{kind}: {one['display_name']} exists already")
        # whole seconds, as in the server's database
        self.kept[kind].append(one | {"created_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")})
        return self.kept[kind][-1]

    def get(self, kind: str, name: str, value: str) -> Object:
        for one in self.kept[kind]:
            if one[name] == value:
                return one
        raise RefusedError(404, f"{kind}: there is no {value}")

    def add_run(self, body: Object) -> Object:
        """Add a run of a version.

        apiserver/server/run_server.go, createRun: its namespace is that of its experiment, which is none outside
        multi-user mode; apiserver/resource/resource_manager.go, CreateRun: then its pods are in the server's namespace.
        """
        experiment = self.get("experiments", "experiment_id", body.get("experiment_id", ""))
        body |= {"namespace": experiment["namespace"], "pods_in": experiment["namespace"] or self.namespace}
        spec = documents(self.specs[body["pipeline_version_reference"]["pipeline_version_id"]])[0]
        declared = spec["root"]["inputDefinitions"]["parameters"]
        for name, value in body["runtime_config"]["parameters"].items():
            if type(value) not in TYPES[declared[name]["parameterType"]]:
                raise RefusedError(400, f"input parameter {name} has the value {value!r:.60}")
        run_id = str(uuid.uuid4())
        task = {"run_id": run_id, "task_id": "1", "display_name": "pretrain", "state": "SUCCEEDED"}
        return self.add(
            "runs", (), body | {"run_id": run_id, "state": self.state, "run_details": {"task_details": [task]}}
        )

    def upload(self, query: Mapping[str, str], headers: email.message.Message, body: bytes) -> Object:
        """Add a version of a pipeline from a form with its file."""
        head = f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode()
        [part] = email.message_from_bytes(head + body).get_payload()  # type: ignore[misc]
        text = part.get_payload(decode=True).decode()  # type: ignore[union-attr]
        version = {
            "status": "READY", "pipeline_id": query["pipelineid"], "pipeline_version_id": str(uuid.uuid4()),
            "name": query["name"], "display_name": query["name"],
        }  # fmt: skip
        self.specs[version["pipeline_version_id"]] = text
        return self.add("versions", ("pipeline_id", "name"), version)

    def answer(self, method: str, path: str, query: Mapping[str, str], headers: Any, body: bytes) -> Object:
        """Return the answer to a request; RefusedError for what the server refuses."""
        if self.status != 200:
            raise RefusedError(self.status, "set by the test")
        if self.token is not None and headers["Authorization"] != f"Bearer {self.token}":
            raise RefusedError(401, "no valid token")
        match method, path.split("/")[1:]:
            case "GET", ["healthz"]:  # apiserver/main.go, newHealthzResponse
                return {"commit_sha": "unknown", "tag_name": self.tag_name, "multi_user": self.multi_user}
            case "GET", [("experiments" | "pipelines" | "runs") as kind]:
                found, token = self.page_of(kind, query)
                return {kind: found, "next_page_token": token}
            case "GET", ["pipelines", pipeline, "versions"]:
                found, token = self.page_of("versions", query, pipeline_id=pipeline)
                return {"pipeline_versions": found, "next_page_token": token}
            case "GET", ["runs", which]:
                return self.get("runs", "run_id", which)
            case "POST", [("experiments" | "pipelines") as kind]:
                made = json.loads(body)
                made |= {"namespace": self.replaced(made.get("namespace", "")), f"{kind[:-1]}_id": str(uuid.uuid4())}
                return self.add(kind, ("display_name", "namespace"), made)
            case "POST", ["pipelines", "upload_version"]:
                return self.upload(query, headers, body)
            case "POST", ["runs"]:
                return self.add_run(json.loads(body))
        raise RefusedError(404, f"there is no {method} {path}")


def _fits(one: Object, predicate: Object) -> bool:
    [(form, value)] = [(name, value) for name, value in predicate.items() if name not in ("key", "operation")]
    if form == "timestampValue":
        value = datetime.fromisoformat(value).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    elif form == "stringValues":
        value = value["values"]
    return OPERATIONS[predicate["operation"]](one.get(predicate["key"]), value)


@contextmanager
def serve(lab: KfpLab) -> Iterator[KfpLab]:
    """The API on a loopback port."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            url, status = urlsplit(self.path), 200
            path = url.path.removeprefix(API)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            lab.requests.append((self.command, path))
            try:
                with lab.transaction:
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
    """A server whose runs are RUNNING, with clients that poll often; no Kubernetes cluster is configured."""
    monkeypatch.setattr(submit, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.05)
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    monkeypatch.delenv(kfp_client.TOKEN_FILE, raising=False)
    monkeypatch.delenv("KF_PIPELINES_UI_ENDPOINT", raising=False)
    with serve(KfpLab("RUNNING")) as found:
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", found.url)
        yield found


def arguments_of(run: Object) -> Object:
    found: Object = run["runtime_config"]["parameters"]
    return found


def make_older(run: Object, seconds: float) -> None:
    """Make a run older than it is."""
    made = datetime.fromisoformat(run["created_at"]) - timedelta(seconds=seconds)
    run["created_at"] = made.strftime("%Y-%m-%dT%H:%M:%SZ")
