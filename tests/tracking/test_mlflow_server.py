"""MLflow's server as its manifests start it: host names, sign-in, PostgreSQL and S3."""

import base64
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
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from manifest_rules import ANSWERS
from manifests import K8S, PROBES, as_started, find, render_all
from small_project import wait_for
from stored_objects import object_store

from realmops.tracking.client import mlflow_client


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Server:
    """The container's process with the volumes it mounts in a folder, on a loopback port.

    The overlay is extended by components; the keys of a mounted Secret become files.
    """

    def __init__(
        self,
        folder: Path,
        overlay: str = "local",
        secrets: Mapping[str, Mapping[str, str]] = {},
        components: Sequence[str] = (),
        workers: int = 0,
    ) -> None:
        fields = {"resources": [f"../overlays/{overlay}"], "components": [f"../components/{one}" for one in components]}
        objects = render_all(folder / "k8s", {"realmops": fields})["realmops"]
        deployment = find(objects, "Deployment/mlflow")
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        pod = {"metadata.namespace": deployment["metadata"]["namespace"], "status.podIP": "10.0.0.7"}
        command, environment = as_started(container, pod, secrets)
        self.paths = {container[probe]["httpGet"]["path"] for probe in PROBES}
        mounts = "|".join(re.escape(mount["mountPath"]) for mount in container["volumeMounts"])

        def moved(text: str) -> str:
            return re.sub(rf"({mounts})(?=/|$)", lambda match: f"{folder}{match[1]}", text)

        volumes = {volume["name"]: volume for volume in deployment["spec"]["template"]["spec"]["volumes"]}
        for mount in container["volumeMounts"]:
            (folder / mount["mountPath"].lstrip("/")).mkdir(parents=True)
            source = volumes[mount["name"]].get("secret", {"items": []})
            for item in source["items"]:
                text = moved(secrets[source["secretName"]][item["key"]])
                (folder / mount["mountPath"].lstrip("/") / item["path"]).write_text(text)
        self.port = free_port()
        assert command[:6] == ["mlflow", "server", "--host", "0.0.0.0", "--port", "5000"]
        self.address = f"http://127.0.0.1:{self.port}"
        self.database = Path(moved(environment["MLFLOW_BACKEND_STORE_URI"]).removeprefix("sqlite:///"))
        self._command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += [moved(word) for word in command[6:]] + (["--workers", str(workers)] if workers else [])
        self._environment = {name: moved(value) for name, value in environment.items()}
        self._environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._log = folder / "log"

    def start(self, seconds: float = 120) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(self._healthy, seconds)

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

    def answer(self, method: str, path: str, host: str = "mlflow:5000", user: str = "") -> int:
        """The status of the answer to a request of ``name:password`` in which it is called ``host``."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            body = json.dumps({"max_results": 1}) if method == "POST" else None
            headers = {"Host": host, "Content-Type": "application/json"}
            if user:
                headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
            connection.request(method, path, body, headers)
            return connection.getresponse().status

    def points(self) -> int:
        with closing(sqlite3.connect(self.database)) as connection:
            return int(connection.execute("SELECT count(*) FROM metrics").fetchone()[0])


SIGN_IN = {"username": "admin", "password": "a long pass% word", "secret-key": "0" * 32}
USER = f"{SIGN_IN['username']}:{SIGN_IN['password']}"
HOSTS = {  # of the Service and the pod, and others
    200: ("mlflow", "mlflow.realmops:5000", "mlflow.realmops.svc.cluster.local:5000", "10.0.0.7:5000", "localhost"),
    403: ("evil.example", "mlflow.evil.example:5000", "10.0.0.8:5000"),
}


def documented_settings() -> str:
    """The file basic_auth.ini that the component documents for the secret."""
    text = (K8S / "components/mlflow-auth/kustomization.yaml").read_text(encoding="utf-8")
    return "".join(f"{line}\n" for line in re.findall(r"^#   (\[mlflow\]|\w+ = .+)$", text, re.MULTILINE))


def test_the_server_answers_to_its_names_and_to_users_with_the_password(
    tmp_path: Path, mlflow_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet, which has no password, still learns whether the server is healthy."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    secrets = {"mlflow-auth": {**SIGN_IN, "basic_auth.ini": documented_settings()}}
    server = Server(tmp_path, "local", secrets, ["monitoring", "mlflow-auth"], workers=1)
    shutil.copy(mlflow_database, server.database)
    server.start(600)
    try:
        search = "/api/2.0/mlflow/experiments/search"
        for status, hosts in HOSTS.items():
            assert [server.answer("POST", search, host, USER) for host in hosts] == [status] * len(hosts)
        assert [server.answer("GET", path) for path in sorted(server.paths)] == [200] * len(server.paths)
        for method, path in (("POST", search), ("GET", "/metrics"), ("GET", "/"), ("GET", "/version")):
            statuses = [server.answer(method, path, user=user) for user in ("", "admin:wrong", "other:password", USER)]
            assert statuses == [401, 401, 401, 200], path

        with pytest.raises(Exception, match="401"):
            mlflow_client(server.address).create_experiment("without")
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", SIGN_IN["username"])
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SIGN_IN["password"])
        client = mlflow_client(server.address)
        run = client.create_run(client.create_experiment("with"))
        client.log_metric(run.info.run_id, "loss", 0.5, step=3)
        client.log_text(run.info.run_id, "a report", "report.txt")
        assert server.points() == 1
    finally:
        server.kill()
    assert (tmp_path / "mlflow/basic_auth.db").is_file(), "users outlive the pod"


def programs_of_postgres() -> str | None:
    """The folder of initdb and postgres: on the PATH, or where Debian has them."""
    folders = [*os.environ["PATH"].split(os.pathsep), *map(str, Path("/usr/lib/postgresql").glob("*/bin"))]
    return next((one for one in folders if all((Path(one) / name).exists() for name in ("initdb", "postgres"))), None)


@contextmanager
def postgres() -> Iterator[str]:
    """The address of a new PostgreSQL with a password; it refuses to run as root, so ``nobody`` runs it then."""
    programs = programs_of_postgres()
    if programs is None:
        pytest.skip("no PostgreSQL on this machine: 'make podman' installs it as root on Debian")
    user = 65534 if os.getuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="realmops-postgres-"))  # not in pytest's folders, which are root's alone
    secret = folder / "password"
    secret.write_text("s3cret\n")
    for path in (folder, secret) if user else ():
        os.chown(path, user or 0, -1)
    port, data, log = free_port(), folder / "data", folder / "log"
    try:
        subprocess.run(
            [f"{programs}/initdb", "--pgdata", data, "--username", "tracking", "--pwfile", secret,
             "--auth", "scram-sha-256", "--no-sync", "--encoding", "UTF8", "--locale", "C"],
            user=user, cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
        with log.open("wb") as output:
            server = subprocess.Popen(
                [f"{programs}/postgres", "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", folder, "-F"],
                user=user, cwd=folder, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            wait_for(lambda: b"ready to accept connections" in log.read_bytes(), 60, server)
            yield f"postgresql://tracking:s3cret@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
    finally:
        shutil.rmtree(folder)


@pytest.mark.timeout(900)
def test_the_server_of_production_runs_on_postgresql_and_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's points and the users are in the database, the run's files in the object store."""
    import psycopg

    keys = {"aws_access_key_id": "id", "aws_secret_access_key": "key"}
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "AWS_"))]:
        monkeypatch.delenv(name)
    with postgres() as address, object_store("bucket", keys) as (endpoint, store):
        secrets = {
            "mlflow-postgres": {"uri": address},
            "mlflow-object-store": {
                "destination": "s3://bucket/realm",
                "endpoint": endpoint,
                "access-key-id": keys["aws_access_key_id"],
                "secret-access-key": keys["aws_secret_access_key"],
            },
            "mlflow-auth": {
                **SIGN_IN,
                "basic_auth.ini": re.sub(r"sqlite:\S+", address.replace("%", "%%"), documented_settings()),
            },
        }
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", SIGN_IN["username"])
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SIGN_IN["password"])
        server = Server(tmp_path, "production", secrets, ["mlflow-auth"])
        server.start(600)
        try:
            assert server.paths <= ANSWERS["mlflow"]
            for path in sorted(ANSWERS["mlflow"]):
                assert server.answer("GET", path, "10.0.0.7:5000", USER) == 200, path
            client = mlflow_client(server.address)
            run = client.create_run(client.create_experiment("production"))
            client.log_metric(run.info.run_id, "loss", 0.5, step=3)
            client.log_text(run.info.run_id, "a report", "report.txt")
            client.set_terminated(run.info.run_id)

            assert client.get_run(run.info.run_id).info.status == "FINISHED"
            with psycopg.connect(address) as database:
                assert database.execute("SELECT key, value, step FROM metrics").fetchall() == [("loss", 0.5, 3)]
                assert database.execute("SELECT username, is_admin FROM users").fetchall() == [("admin", True)]
            [found] = store.list_objects_v2(Bucket="bucket")["Contents"]  # type: ignore[attr-defined]
            assert found["Key"].startswith("realm/")
            assert found["Key"].endswith(f"{run.info.run_id}/artifacts/report.txt")
            [listed] = client.list_artifacts(run.info.run_id)
            assert listed.path == "report.txt"
        finally:
            server.kill()
