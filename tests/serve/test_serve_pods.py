"""`realmops serve` in pods, on a cluster that enforces the pod security ``restricted``: started, asked, replaced.

Needs a cluster (KUBECONFIG) with one node, which is this machine: pods are asked at their addresses, and a folder of
this machine is their volume. It has the project's image, by default realmops:local; IMAGE names another one.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cluster_lab
import pytest
from manifests import render_all
from serving import QUESTION, tuned
from small_project import cli, trained_project, wait_for, write_json_lines

NAMESPACE = "realmops-test-serve"
IMAGE = os.environ.get("IMAGE", "realmops:local")
ASKED = json.dumps({"question": QUESTION})
SMALL = {"cpu": "10m", "memory": "256Mi"}
SECONDS = 300

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


def k(*words: str, **more: Any) -> str:
    return cluster_lab.k("--namespace", NAMESPACE, *words, **more)


def get(*words: str) -> Any:
    return json.loads(k("get", *words, "--output", "json"))


def until(what: Callable[[], Any]) -> Any:
    return wait_for(what, SECONDS / 10)


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small project, on a volume that the component serves, laid over standalone in a namespace of its own."""
    if not os.environ.get("KUBECONFIG") or "cluster" not in request.config.option.markexpr:
        pytest.skip("not run: needs a cluster, KUBECONFIG=FILE pytest -m cluster")
    volume = tmp_path_factory.mktemp("volume")
    volume.chmod(0o755)
    project = tuned(trained_project(volume))
    level = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
    k("create", "-f", "-", content=made("v1", "Namespace", NAMESPACE, labels=level))
    claim = {"name": "realmops-data", "namespace": NAMESPACE}
    spec = {
        "capacity": {"storage": "10Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": str(volume)},
        "claimRef": claim, "persistentVolumeReclaimPolicy": "Retain",
    }  # fmt: skip
    k("create", "-f", "-", content={**made("v1", "PersistentVolume", NAMESPACE), "spec": spec})
    named, _, tag = IMAGE.rpartition(":")
    case = {
        "resources": ["../overlays/standalone"],
        "components": ["../components/serve", "../components/single-node"],
        "images": [{"name": "realmops", "newName": named, "newTag": tag}],
    }
    objects = render_all(tmp_path_factory.mktemp("overlay") / "k8s", {NAMESPACE: case})[NAMESPACE]
    kept = [one for one in objects if "mlflow" not in one["metadata"]["name"]]
    for one in kept:
        for subject in one.get("subjects", []):
            subject["namespace"] = NAMESPACE
        if one["kind"] == "PersistentVolumeClaim":
            one["spec"].update(volumeName=NAMESPACE, storageClassName="")
        if one["kind"] == "Deployment" and one["metadata"]["name"] == "realmops-serve":
            [container] = one["spec"]["template"]["spec"]["containers"]
            container["resources"]["requests"] = SMALL  # for one node that has other work
            # the way that the manifest names, without a registry: a cluster of one node may have no DNS
            folder = f"/realmops/{project.relative_to(volume)}/root"
            container["args"] = ["serve", "--root", folder, "--host", "0.0.0.0"]
    told = k("apply", "--server-side", "--validate=strict", "-f", "-", content=listed(kept))
    assert "Warning" not in told, "nothing that the server warns of"
    k("rollout", "status", "deployment/realmops-serve", f"--timeout={SECONDS}s")
    yield project
    k("delete", "namespace", NAMESPACE, "--wait=false")
    k("delete", "persistentvolume", NAMESPACE, "--wait=false")


def made(version: str, kind: str, name: str, **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **metadata}}


def listed(objects: list[Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": objects}


def addresses() -> list[str]:
    """The endpoints that take requests, as kube-proxy reads them."""
    slices = get("endpointslices", "--selector=kubernetes.io/service-name=realmops-serve")["items"]
    every = [one for found in slices for one in found.get("endpoints") or []]
    return [address for one in every if one["conditions"].get("ready") for address in one["addresses"]]


def asked(address: str, method: str = "POST", path: str = "/v1/answer", **headers: str) -> tuple[int, Any]:
    headers["Content-Type"] = "application/json"
    with closing(http.client.HTTPConnection(address, 8080)) as connection:
        connection.request(method, path, ASKED if method == "POST" else None, headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


class Callers:
    """Ask all the time, each request on its connection, at endpoints that are ``late`` seconds old."""

    def __init__(self, late: float) -> None:
        self.answers: list[tuple[str, Any]] = []
        self.lost: list[str] = []
        self._known, self._late, self._ending = addresses(), late, threading.Event()

    def _poll(self) -> None:
        while not self._ending.is_set():
            found = addresses()
            self._ending.wait(self._late)
            self._known = found

    def _ask(self, number: int) -> None:
        while not self._ending.is_set():
            number, known = number + 1, self._known
            address = known[number % len(known)]
            try:
                status, answer = asked(address)
                assert status == 200, (status, answer)
                self.answers.append((address, answer))
            except (OSError, http.client.HTTPException, ValueError, AssertionError) as error:
                self.lost.append(f"{address}: {error!r}")

    @contextmanager
    def asking(self) -> Iterator[Callers]:
        with ThreadPoolExecutor(5) as pool:
            for call in (self._poll, *(partial(self._ask, number) for number in range(4))):
                pool.submit(call)
            try:
                yield self
            finally:
                self._ending.set()


def test_two_pods_answer_from_a_volume_that_they_cannot_write_to(place: Path) -> None:
    found = until(lambda: len(known := addresses()) == 2 and known)
    for address in found:
        status, answer = asked(address)
        assert (status, bool(answer["citations"])) == (200, True)
        assert asked(address, "GET", "/v2/health/ready") == (200, {"ready": True})
    write = "import pathlib; pathlib.Path('/realmops/x').touch()"
    told = k("exec", "deployment/realmops-serve", "--", "python", "-IS", "-c", write, check=False)
    assert "Read-only file system" in told


def test_a_rolling_restart_and_an_update_lose_no_request(place: Path) -> None:
    documents = place / "documents.jsonl"
    changed = [json.loads(line) for line in documents.read_text(encoding="utf-8").splitlines()]
    changed[-1]["text"] += " DeferredMetrics that was forgotten."
    before = {*until(lambda: len(known := addresses()) == 2 and known)}
    with Callers(late=5).asking() as callers:
        k("rollout", "restart", "deployment/realmops-serve")
        k("rollout", "status", "deployment/realmops-serve", f"--timeout={SECONDS}s")
        until(lambda: not before & {address for address, _ in callers.answers[-20:]})
        write_json_lines(documents, changed)
        done = cli("update", "--params", place / "params.yaml", "--root", place / "root")
        assert done.exit_code == 0, done.output
        until(lambda: {answer["model"]["index_generation"] for _, answer in callers.answers[-20:]} == {1})
    assert callers.lost == []
    assert before < {address for address, _ in callers.answers}
    assert len({(answer["answer"], json.dumps(answer["model"])) for _, answer in callers.answers}) == 2
