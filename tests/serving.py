"""A server under test: a process of ``realmops serve`` on a free port, or the same in this process."""

import json
import os
import re
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import forked
import pytest
import small_project
import uvicorn
from fastapi.testclient import TestClient
from forked import Forked

from realmops.answering.confidence import OWN_QUESTIONS, Confidence
from realmops.answering.opened_model import OpenedModel
from realmops.config import load_params, parse_options
from realmops.serve.app import make_app
from realmops.serve.batching import RequestBatcher
from realmops.serve.metrics import Metrics
from realmops.serve.model_sources import RunFolder
from realmops.serve.model_watcher import ModelWatcher

QUESTION = "Where did Jon Vik build ships?"


def tuned(project: Path, **changes: dict[str, Any]) -> Path:
    """A trained project once it has a fine-tuned model, which holds no answer back, and its results."""
    trained = load_params(project / "params.yaml").model_dump()
    values = parse_options(("", trained), ("test", changes), ("", {"finetune": {"wanted_precision": 0.0}}))
    small_project.write_params(project / "params.yaml", values)
    for name in ("finetune", "evaluate"):
        small_project.stage(name, values, project, project / "root")
    return project


def calibration(threshold: float) -> Confidence:
    """One that changes no p(y|x)."""
    return Confidence(1.0, 0.0, threshold, 0.8, 20, OWN_QUESTIONS)


def update(project: Path, text: str) -> None:
    """Give Anna Berg another text and update the run."""
    small_project.write_text(project, text)
    result = small_project.cli("update", "--params", project / "params.yaml", "--root", project / "root")
    assert result.exit_code == 0, result.output


@contextmanager
def watching(
    source: Any, on_change: Callable[[OpenedModel | None], None] = lambda served: None, **changes: Any
) -> Iterator[tuple[RequestBatcher, ModelWatcher]]:
    """The batcher of a served model in this process, with its watcher; ``changes`` are fields of the model."""
    mark, batcher = source.mark(), RequestBatcher(replace(source.open(), **changes))
    try:
        yield batcher, ModelWatcher(source, batcher, mark, on_change)
    finally:
        batcher.close()


@contextmanager
def client_of(
    root: Path,
    source: Any = None,
    token: str | None = None,
    changes: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Iterator[TestClient]:
    """A client of the server's application in this process, whose ``state`` has the watcher."""
    with watching(source or RunFolder(root), **changes) as (batcher, watcher):
        app = make_app(batcher, watcher, Metrics(), token)
        app.state.watcher = watcher
        yield TestClient(app, **options)


@contextmanager
def listening(app: Any) -> Iterator[tuple[str, int]]:
    """The address of an application that a thread of this process serves."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", http="h11"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield bound.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def every_call(client: TestClient) -> Iterator[tuple[str, Any]]:
    """Call every route of the description, and the pages; what was called, with its reply."""
    name = client.app.state.service.watcher.source.name  # type: ignore[attr-defined]
    searches: list[Any] = [{"query": QUESTION, "by": by} for by in ("run", "embeddings", "words")]
    calls: dict[tuple[str, str], list[Any]] = {
        ("post", "/v1/answer"): [{"question": QUESTION}, {"question": QUESTION, "stream": True}],
        ("post", "/v1/search"): [*searches, {"query": QUESTION, "filters": {"document_id": "none"}}],
        ("post", "/v1/feedback"): [{"question": QUESTION, "answer": "Bergen", "right": True}],
        ("post", "/v2/models/{name}/infer"): [
            {"inputs": [{"name": "question", "datatype": "BYTES", "shape": [1], "data": [QUESTION]}]}
        ],
    }
    routes = {
        (method, path) for path, methods in client.get("/openapi.json").json()["paths"].items() for method in methods
    }
    gets = {("get", path): [None] for method, path in routes if method == "get"}
    assert routes == {*calls, *gets}, "a new route needs a call here"
    gets |= {("get", path): [None] for path in ("/", f"/?q={QUESTION}", "/docs")}
    for (method, path), bodies in {**calls, **gets}.items():
        for body in bodies:
            reply = client.request(method, path.replace("{name}", name), json=body)
            yield f"{method} {path} {json.dumps(body)}", reply


def near(value: Any) -> Any:
    """Return an expected record whose numbers may differ in their last digits, which depend on the batch."""
    if isinstance(value, dict):
        return {key: near(part) for key, part in value.items()}
    if isinstance(value, list):
        return [near(part) for part in value]
    return pytest.approx(value, rel=1e-3, abs=1e-6) if isinstance(value, float) else value


class Served:
    """A process of ``realmops serve``; ``log`` is its stderr so far."""

    def __init__(self, process: subprocess.Popen[str] | Forked) -> None:
        self.process = process
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = small_project.wait_for(self._address, 60, process)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(iter(self.process.stderr.readline, ""))

    def _address(self) -> str | None:
        found = re.search(r"listening on (http://\S+) ", "".join(self.log))
        return found[1] if found else None

    def call(
        self, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON (else text) of the reply; a body makes it a POST."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        named = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        request = urllib.request.Request(self.url + path, data, named)
        try:
            with urllib.request.urlopen(request) as reply:
                status, found, text = reply.status, dict(reply.headers), reply.read().decode()
        except urllib.error.HTTPError as error:
            status, found, text = error.code, dict(error.headers), error.read().decode()
        return status, found, json.loads(text) if "json" in found.get("content-type", "") else text

    def ask(self, question: str = QUESTION, **more: Any) -> dict[str, Any]:
        status, _, record = self.call("/v1/answer", {"question": question, **more})
        assert status == 200, record
        return record


@contextmanager
def served(root: Path, *options: str, starts: bool = False, **variables: str) -> Iterator[Served]:
    """A process of ``realmops serve``, which starts as a user's, or is forked."""
    words = ["serve", "--root", str(root), "--port", "0", "--every", "0.1", *options]
    environment = {**os.environ, **variables}
    process: subprocess.Popen[str] | Forked
    if starts:
        process = subprocess.Popen(small_project.command(*words), stderr=subprocess.PIPE, text=True, env=environment)
    else:
        process = forked.realmops(*words, env=environment)
    try:
        yield Served(process)
    finally:
        process.terminate()
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()
