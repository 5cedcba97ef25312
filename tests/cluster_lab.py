"""As much of a cluster's API as our code needs, over HTTP, with the process that a replica is.

That is the scale of a Deployment, and reading of objects, pods and events, by Kubernetes' own rules (API concepts:
resource URIs, label and field selectors, 403 where a Role allows nothing, 404 for what is not there).
"""

import json
import os
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
from manifests import find, kubectl, render_all

NAMESPACE, DEPLOYMENT = "lab", "realmops-index-builder"
SCALE = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{DEPLOYMENT}/scale"


class Output:
    """What KFP gives a task for an output: a file, what is known of it and, for metrics, a place to show them."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.metadata: dict[str, Any] = {}
        self.shown: dict[str, float] = {}

    def log_metric(self, metric: str, value: float) -> None:
        self.shown[metric] = value


class Lab:
    """One Deployment: ``replicas`` as they were asked for, one after another."""

    def __init__(self, start: Callable[[int], Forked] | None = None) -> None:
        self.replicas: list[int] = []
        self.status = 200  # of every answer
        self.away = 0  # so many requests are left without an answer
        self.forbidden: set[str] = set()  # resources that the Role does not have
        self.objects: dict[tuple[str, str], list[dict[str, Any]]] = {}  # by resource and namespace
        self.requests: list[tuple[str, str]] = []
        self._start = start
        self._processes: list[Forked] = []

    def put(self, resource: str, namespace: str, name: str, labels: Any = None, **content: Any) -> None:
        one = {"metadata": {"name": name, "namespace": namespace, "labels": labels or {}}, **content}
        self.objects.setdefault((resource, namespace), []).append(one)

    def read(self, place: str, query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """An object, or those that selectors let through."""
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
    """What starts a replica: an index builder that follows this file."""

    def start(number: int) -> Forked:
        environment = {**os.environ, "HOSTNAME": f"replica-{number}"}
        log = assignment.with_name(f"replica-{number}.txt")
        return forked.realmops("index-builder", "--follow", assignment, env=environment, log=log)

    return start


def k(*words: str, content: Any = None, check: bool = True) -> str:
    """What kubectl prints; ``content`` is its input, a text or an object."""
    given = content if content is None or isinstance(content, str) else json.dumps(content)
    done = subprocess.run([kubectl(), *words], input=given, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
    return done.stdout + done.stderr


@contextmanager
def serve(lab: Lab, kubeconfig: Path) -> Iterator[Lab]:
    """The API on a loopback port, and a KUBECONFIG file that names it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.is_away():
                return
            if self.place() == SCALE:
                self.reply(403)  # of a scale, the Role allows a patch and nothing else
            else:
                query = dict(parse_qsl(urlsplit(self.path).query))
                status, answer = lab.read(self.place(), query) if lab.status == 200 else (lab.status, {})
                self.reply(status, answer)

        def is_away(self) -> bool:
            away = lab.away > 0
            lab.away -= away
            return away

        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            lab.requests.append((self.command, self.place()))
            if self.is_away():
                return
            status = lab.status if self.place() == SCALE else 404
            replicas = body["spec"]["replicas"]
            assert body == {"spec": {"replicas": int(replicas)}}
            if status == 200:
                lab.scale(replicas)
            self.reply(status)

        def place(self) -> str:
            return self.path.partition("?")[0]

        def reply(self, status: int, read: dict[str, Any] | None = None) -> None:
            answer: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
            if status == 200 and read is not None:
                answer = read
            elif status == 200:
                replicas = lab.replicas[-1] if lab.replicas else 0
                answer = {
                    "kind": "Scale",
                    "apiVersion": "autoscaling/v1",
                    "metadata": {"name": DEPLOYMENT, "namespace": NAMESPACE},
                    "spec": {"replicas": replicas} if replicas else {},
                    "status": {"replicas": replicas},
                }
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *values: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    write_kubeconfig(kubeconfig, {"server": f"http://127.0.0.1:{server.server_port}"}, {}, NAMESPACE)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield lab
    finally:
        server.shutdown()
        server.server_close()
        lab.scale(0)


def write_kubeconfig(path: Path, cluster: dict[str, Any], user: dict[str, Any], namespace: str) -> None:
    named = {"name": "lab"}
    context = {"cluster": "lab", "user": "lab", "namespace": namespace}
    content = {
        "apiVersion": "v1", "kind": "Config", "current-context": "lab", "clusters": [{**named, "cluster": cluster}],
        "users": [{**named, "user": user}], "contexts": [{**named, "context": context}],
    }  # fmt: skip
    path.write_text(yaml.safe_dump(content))


@contextmanager
def real(kubeconfig: Path, given: str) -> Iterator[str]:
    """A Deployment of no replicas and who may scale it, in a namespace of its own of the cluster that a file names.

    ``kubeconfig`` becomes that of the manifests' ServiceAccount there. Yields the namespace, and removes it.
    """
    from kubernetes import client, config, utils

    shown = subprocess.run(
        [kubectl(), "config", "view", "--raw", "--flatten", "--minify", "--output", "json"],
        env={**os.environ, "KUBECONFIG": given}, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    cluster = json.loads(shown)["clusters"][0]["cluster"]
    api = config.new_client_from_config(given)
    core = client.CoreV1Api(api)
    namespace = core.create_namespace({"metadata": {"generateName": "realmops-test-"}}).metadata.name
    try:
        objects = render_all(kubeconfig.parent / "k8s", {namespace: {"resources": ["../base"]}})[namespace]
        builder = find(objects, f"Deployment/{DEPLOYMENT}")
        # admitted, made into pods, and never run
        builder["spec"]["template"]["spec"]["nodeSelector"] = {"realmops.test/nowhere": "true"}
        wanted = ("ServiceAccount/realmops-scaler", "Role/realmops-scaler", "RoleBinding/realmops-scaler")
        for one in (*(find(objects, name) for name in wanted), builder):
            utils.create_from_dict(api, one, namespace=namespace)
        token = core.create_namespaced_service_account_token("realmops-scaler", namespace, {"spec": {}}).status.token
        write_kubeconfig(kubeconfig, cluster, {"token": token}, namespace)
        yield namespace
    finally:
        core.delete_namespace(namespace)
