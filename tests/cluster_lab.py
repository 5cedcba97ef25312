"""As much of a cluster's API as the scale of a Deployment needs, over HTTP, with the process that a replica is."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

NAMESPACE, DEPLOYMENT = "lab", "realmops-index-builder"
SCALE = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{DEPLOYMENT}/scale"


class Lab:
    """One Deployment: ``replicas`` as they were asked for, one after another."""

    def __init__(self, start: Callable[[int], subprocess.Popen[bytes]] | None = None) -> None:
        self.replicas: list[int] = []
        self.status = 200  # of every answer
        self.requests: list[tuple[str, str]] = []
        self._start = start
        self._processes: list[subprocess.Popen[bytes]] = []

    def scale(self, replicas: int) -> None:
        self.replicas.append(replicas)
        while len(self._processes) > replicas:
            process = self._processes.pop()
            process.terminate()
            process.wait()
        while self._start is not None and len(self._processes) < replicas:
            self._processes.append(self._start(len(self._processes)))


@contextmanager
def serve(lab: Lab, kubeconfig: Path) -> Iterator[Lab]:
    """The API on a loopback port, and a KUBECONFIG file that names it."""

    class Handler(BaseHTTPRequestHandler):
        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            lab.requests.append((self.command, self.path))
            status = lab.status if self.path == SCALE else 404
            if status == 200:
                lab.scale(body["spec"]["replicas"])
                answer: dict[str, Any] = {
                    "kind": "Scale",
                    "apiVersion": "autoscaling/v1",
                    "metadata": {"name": DEPLOYMENT, "namespace": NAMESPACE},
                    "spec": {"replicas": body["spec"]["replicas"]},
                }
            else:
                answer = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *values: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    named = {"name": "lab"}
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "lab",
                "clusters": [{**named, "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "users": [{**named, "user": {}}],
                "contexts": [{**named, "context": {"cluster": "lab", "user": "lab", "namespace": NAMESPACE}}],
            }
        )
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield lab
    finally:
        server.shutdown()
        server.server_close()
        lab.scale(0)
