"""MLflow's server as its manifest starts it: who may ask it, and a training that loses it on the way."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import small_project
from manifests import K8S, as_started, find, render
from small_project import wait_for

from realmops.config import read_yaml
from realmops.tracking.client import mlflow_client


class Server:
    """The container's process with the volumes it mounts in a folder, on a loopback port."""

    def __init__(self, folder: Path) -> None:
        deployment = find(render(K8S / "overlays" / "local"), "Deployment/mlflow")
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        pod = {"metadata.namespace": deployment["metadata"]["namespace"], "status.podIP": "10.0.0.7"}
        command, environment = as_started(container, pod)
        mounts = "|".join(re.escape(mount["mountPath"]) for mount in container["volumeMounts"])

        def moved(text: str) -> str:
            return re.sub(rf"({mounts})(?=/|$)", lambda match: f"{folder}{match[1]}", text)

        for mount in container["volumeMounts"]:
            (folder / mount["mountPath"].lstrip("/")).mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        assert command[:6] == ["mlflow", "server", "--host", "0.0.0.0", "--port", "5000"]
        self.address = f"http://127.0.0.1:{self.port}"
        self.database = Path(moved(environment["MLFLOW_BACKEND_STORE_URI"]).removeprefix("sqlite:///"))
        self._command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += [moved(word) for word in command[6:]]
        self._environment = {name: moved(value) for name, value in environment.items()}
        self._environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._log = folder / "log"

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(self._healthy, 120)

    def _healthy(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with suppress(OSError):
            return self.answer("GET", "/health", f"127.0.0.1:{self.port}") == 200
        return False

    def kill(self) -> None:
        """SIGKILL, with its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def answer(self, method: str, path: str, host: str) -> int:
        """The status of the answer to a request in which it is called ``host``."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            body = json.dumps({"max_results": 1}) if method == "POST" else None
            connection.request(method, path, body, {"Host": host, "Content-Type": "application/json"})
            return connection.getresponse().status

    def points(self) -> int:
        with closing(sqlite3.connect(self.database)) as connection:
            return int(connection.execute("SELECT count(*) FROM metrics").fetchone()[0])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, mlflow_database: Path) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("server"))
    shutil.copy(mlflow_database, found.database)
    found.start()
    yield found
    found.kill()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("mlflow", 200),
        ("mlflow:5000", 200),
        ("mlflow.realmops:5000", 200),
        ("mlflow.realmops.svc.cluster.local:5000", 200),
        ("10.0.0.7:5000", 200),
        ("localhost", 200),
        ("evil.example", 403),
        ("mlflow.evil.example:5000", 403),
        ("10.0.0.8:5000", 403),
    ],
)
def test_the_server_answers_to_the_names_of_its_service_and_to_no_other(server: Server, host: str, status: int) -> None:
    assert server.answer("POST", "/api/2.0/mlflow/experiments/search", host) == status


def test_a_training_that_loses_the_server_loses_no_point(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies as it has stored a first batch; the training stands still meanwhile, so that more is to come."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
    params = small_project.write_project(tmp_path, ict={"steps": 60}, tracking={"enabled": True})
    for name in ("snapshot", "tag"):
        small_project.stage(name, read_yaml(params), tmp_path, tmp_path)
    training = subprocess.Popen(
        small_project.command("run", "ict", "--params", params, "--root", tmp_path), stderr=subprocess.PIPE, text=True
    )
    try:
        [journal] = wait_for(lambda: list((tmp_path / ".realmops" / "work").glob("ict-*/metrics.jsonl")), 120, training)
        wait_for(lambda: journal.read_bytes().count(b"\n") >= 10, 120, training)
        training.send_signal(signal.SIGSTOP)
        wait_for(server.points, 120)
        server.kill()
    finally:
        training.send_signal(signal.SIGCONT)
    _, said = training.communicate(timeout=250)
    assert training.returncode == 0, said
    assert said.count("warning: MLflow tracking") == 1
    lines = small_project.journal(tmp_path / "models" / "ict")
    wanted = {
        (f"ict/{name}", line["step"], value, int(line["time"] * 1000))
        for line in lines
        for name, value in line.items()
        if name not in ("stage", "step", "time") and value is not None
    }
    assert 0 < server.points() < len(wanted), "some points were sent before the server died, and some were not"

    server.start()
    sent = small_project.cli("sync", "--root", tmp_path)
    assert sent.exit_code == 0, sent.output
    client = mlflow_client(server.address)
    [run] = client.search_runs([client.get_experiment_by_name("realmops").experiment_id])
    names = {name for name, *_ in wanted}
    found = [
        (name, point.step, point.value, point.timestamp)
        for name in sorted(names)
        for point in client.get_metric_history(run.info.run_id, name)
    ]
    assert sorted(found) == sorted(wanted)
    assert run.info.status == "FINISHED"
    assert {name for name in run.data.metrics if name.startswith("ict/")} == names
    assert small_project.cli("sync", "--root", tmp_path).output == "0 points and files sent\n"
