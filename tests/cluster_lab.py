"""A stand-in for the Kubernetes API over HTTP: the scale of a Deployment, objects, pods and events.

Resource URIs, selectors and status codes are those of Kubernetes; a replica is a process.
"""

import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import forked
import yaml
from forked import Forked
from manifests import kubectl

NAMESPACE, DEPLOYMENT = "lab", "realmops-index-builder"
SCALE = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{DEPLOYMENT}/scale"


class Output:
    """An output artifact of KFP: a file, its metadata and, for metrics, what the UI shows."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.metadata: dict[str, Any] = {}
        self.shown: dict[str, float] = {}

    def log_metric(self, metric: str, value: float) -> None:
        self.shown[metric] = value


class Lab:
    """A cluster with one Deployment; ``replicas`` are those requested, one after another."""

    def __init__(self, start: Callable[[int], Forked] | None = None) -> None:
        self.replicas: list[int] = []
        self.status = 200  # of every answer
        self.away = 0  # requests that get no answer
        self.forbidden: set[str] = set()  # resources that the Role does not have
        self.objects: dict[tuple[str, str], list[dict[str, Any]]] = {}  # by resource and namespace
        self.requests: list[tuple[str, str]] = []
        self._start = start
        self._processes: list[Forked] = []

    def put(self, resource: str, namespace: str, name: str, labels: Any = None, **content: Any) -> None:
        one = {"metadata": {"name": name, "namespace": namespace, "labels": labels or {}}, **content}
        self.objects.setdefault((resource, namespace), []).append(one)

    def read(self, place: str, query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """Status, and an object or the objects that match the selectors."""
        found = re.fullmatch(r"/api(?:s/apps)?/v1/namespaces/([^/]+)/([a-z]+)(?:/([^/]+))?", place)
        if not found:
            return 404, {}
        namespace, resource, name = found.groups()
        if resource in self.forbidden:
            return 403, {}
        kept = self.objects.get((resource, namespace), [])
        if name:
            named = [one for one in kept if one["metadata"]["name"] == name]
            return (200, named[0]) if named else (404, {})
        for pair in filter(None, query.get("labelSelector", "").split(",")):
            label, _, value = pair.partition("=")
            kept = [one for one in kept if one["metadata"]["labels"].get(label) == value]
        for pair in filter(None, query.get("fieldSelector", "").split(",")):
            path, _, value = pair.partition("=")
            kept = [one for one in kept if reduce(lambda inner, key: inner.get(key, {}), path.split("."), one) == value]
        return 200, {"items": kept}

    def scale(self, replicas: int) -> None:
        self.replicas.append(replicas)
        while len(self._processes) > replicas:
            process = self._processes.pop()
            process.terminate()
            process.wait()
        while self._start is not None and len(self._processes) < replicas:
            self._processes.append(self._start(len(self._processes)))


def follower(assignment: Path) -> Callable[[int], Forked]:
    """Return a function that starts a replica: an index builder that follows this file."""

    def start(number: int) -> Forked:
        log = assignment.with_name(f"replica-{number}.txt")
        return forked.realmops("index-builder", "--follow", assignment, log=log)

    return start


def k(*words: str, content: Any = None, check: bool = True) -> str:
    """Return the output of kubectl; ``content`` is its input, a text or an object."""
    text = content if content is None or isinstance(content, str) else json.dumps(content)
    done = subprocess.run([kubectl(), *words], input=text, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
    return done.stdout + done.stderr


@contextmanager
def serve(lab: Lab, kubeconfig: Path) -> Iterator[Lab]:
    """The API on a loopback port, and a KUBECONFIG file that names it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.is_away():
                url = urlsplit(self.path)
                self.reply(*lab.read(url.path, dict(parse_qsl(url.query))) if lab.status == 200 else (lab.status, {}))

        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            path = urlsplit(self.path).path
            lab.requests.append((self.command, path))
            if self.is_away():
                return
            status = lab.status if path == SCALE else 404
            replicas = body["spec"]["replicas"]
            assert body == {"spec": {"replicas": int(replicas)}}
            if status == 200:
                lab.scale(replicas)
            self.reply(status, {"kind": "Scale", "spec": {"replicas": replicas}})

        def is_away(self) -> bool:
            away = lab.away > 0
            lab.away -= away
            return away

        def reply(self, status: int, answer: dict[str, Any]) -> None:
            failure = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
            content = json.dumps(answer if status == 200 else failure).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *values: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    write_kubeconfig(kubeconfig, f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield lab
    finally:
        server.shutdown()
        server.server_close()
        lab.scale(0)


def write_kubeconfig(path: Path, server: str) -> None:
    context = {"cluster": "lab", "user": "lab", "namespace": NAMESPACE}
    content = {
        "apiVersion": "v1", "kind": "Config", "current-context": "lab", "users": [{"name": "lab", "user": {}}],
        "clusters": [{"name": "lab", "cluster": {"server": server}}], "contexts": [{"name": "lab", "context": context}],
    }  # fmt: skip
    path.write_text(yaml.safe_dump(content))
