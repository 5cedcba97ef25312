"""A project of ``realmops init`` on a real Kubeflow Pipelines, as in docs/operate.md: only with -m kubeflow.

KF_PIPELINES_ENDPOINT is its API, KUBECONFIG the cluster, REALMOPS_IMAGE the image there (realmops:local), and
REALMOPS_STORE the url for a remote of DVC, whose credentials both the environment and the cluster's objects have. The
objects of ``k8s/overlays/standalone`` must exist, and nothing else may train in their namespace.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from compiled import init_dvc
from small_encoders import write_encoder
from small_world import DOCUMENTS

pytestmark = [pytest.mark.kubeflow, pytest.mark.timeout(5400)]

SETTINGS = ("pretrain.steps=20", "ict.steps=20")
VARIABLES = ("KF_PIPELINES_ENDPOINT", "KUBECONFIG", "REALMOPS_STORE")
DEPLOYMENT = "deployment/realmops-index-builder"
STAGES = (
    *("guard", "inputs", "sample", "snapshot", "tag", "cloze", "ict", "pretrain", "finetune", "evaluate", "promote"),
    "scale-builder",
)
CHAMPION = """
one = mlflow.MlflowClient().get_model_version_by_alias({name!r}, "champion")
run = mlflow.get_run(one.run_id)
print(sorted(run.data.metrics.keys() & {{"recall_at_5", "index_staleness_steps"}}))
"""
STATES = """
runs = mlflow.search_runs(experiment_names=[{name!r}], output_format="list")
print(sorted(run.info.status for run in runs))
"""


class Cluster:
    """The server and the cluster that the environment names, and a project with its documents."""

    def __init__(self, folder: Path) -> None:
        missing = [variable for variable in VARIABLES if not os.environ.get(variable)]
        if missing:
            pytest.fail(f"-m kubeflow needs {' and '.join(missing)}: docs/operate.md says how one comes up")
        self.namespace = os.environ.get("REALMOPS_NAMESPACE", "kubeflow")
        self.image = os.environ.get("REALMOPS_IMAGE", "realmops:local")
        self.name = f"walk-{uuid.uuid4().hex[:8]}"
        self.project, self.documents = folder / self.name, folder / "documents"
        self.documents.mkdir()
        for title, text, _ in (*DOCUMENTS, (self.name, f"{self.name} is a town in Norway.", ())):
            (self.documents / f"{title}.txt").write_text(text)
        encoder = write_encoder(folder / "encoder", "bert", max_position_embeddings=512)
        words = ("--documents", str(self.documents), "--encoder", str(encoder), "--no-reader", "--image", self.image)
        self.realmops("init", str(self.project), *words, folder=folder)
        init_dvc(self.project, os.environ["REALMOPS_STORE"])

    def realmops(self, *words: str, folder: Path | None = None, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "realmops", *words],
            cwd=folder or self.project, capture_output=True, text=True, check=False,
        )  # fmt: skip
        print(done.stdout, done.stderr)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def submit(self, *words: str) -> str:
        sets = [word for setting in SETTINGS for word in ("--set", setting)]
        return self.realmops("submit", "--once", "--argument", f"model={self.name}", *sets, *words)

    def mlflow(self, code: str) -> str:
        """Return what a script prints next to the MLflow server."""
        script = f"import mlflow; mlflow.set_tracking_uri('http://127.0.0.1:5000'){code.format(name=self.name)}"
        return self.kubectl("exec", "deployment/mlflow", "--", "python", "-c", script)

    def kubectl(self, *words: str) -> str:
        done = subprocess.run(["kubectl", "-n", self.namespace, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def server(self) -> Any:
        from kfp.client import Client

        return Client(host=os.environ["KF_PIPELINES_ENDPOINT"], namespace=self.namespace)

    def ended(self, run_id: str) -> Any:
        return self.server().wait_for_run_completion(run_id, timeout=5000, sleep_duration=5)

    def replicas(self) -> int:
        return int(self.kubectl("get", DEPLOYMENT, "-o", "jsonpath={.spec.replicas}"))

    def pod_of(self, run_id: str, state: str) -> str:
        """Wait for a pod of a task, not of a driver, in a phase."""
        label = f"pipeline/runid={run_id},!component-driver"
        for _ in range(600):
            pods = json.loads(self.kubectl("get", "pods", "-l", label, "-o", "json"))["items"]
            for pod in pods:
                if pod["status"].get("phase") == state and "-impl-" in pod["metadata"]["name"]:
                    return str(pod["metadata"]["name"])
            time.sleep(1)
        raise AssertionError(f"no pod of {run_id} became {state}")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    if "kubeflow" not in request.config.option.markexpr:
        pytest.skip("only with -m kubeflow, on a Kubeflow Pipelines")
    return Cluster(tmp_path_factory.mktemp("kubeflow"))


def run_of(lines: str) -> str:
    return lines.rpartition("runs/details/")[2].split()[0]


@pytest.fixture(scope="module")
def trained(cluster: Cluster) -> tuple[Any, list[int]]:
    """A completed run, and the replicas of the index builders meanwhile."""
    seen: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1):
            if (now := cluster.replicas()) not in seen[-1:]:
                seen.append(now)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        lines = cluster.submit("--wait")
        time.sleep(3)
    finally:
        over.set()
        watcher.join()
    return cluster.server().get_run(run_of(lines)), seen


@pytest.fixture(scope="module")
def terminated(trained: tuple[Any, list[int]], cluster: Cluster) -> str:
    """A run after one more document, terminated while it pre-trains."""
    (cluster.documents / "Vik.txt").write_text("Vik is a village near Bergen.")
    run_id = run_of(cluster.submit())
    for _ in range(1200):
        if cluster.replicas():
            break
        time.sleep(1)
    cluster.pod_of(run_id, "Running")
    time.sleep(20)
    cluster.server().terminate_run(run_id)
    assert cluster.ended(run_id).state in ("FAILED", "CANCELED")
    return run_id


def test_every_task_of_a_submission_succeeds(trained: tuple[Any, list[int]]) -> None:
    run, _ = trained
    assert run.state == "SUCCEEDED"
    ended = {task.display_name: task.state for task in run.run_details.task_details}
    assert {name: ended.get(name) for name in STAGES} == dict.fromkeys(STAGES, "SUCCEEDED")


def test_index_builders_are_scaled_up_for_pretrain_only(trained: tuple[Any, list[int]]) -> None:
    _, seen = trained
    assert seen == [0, 1, 0]


def test_mlflow_has_the_run_and_its_model_is_the_champion(trained: tuple[Any, list[int]], cluster: Cluster) -> None:
    assert "['index_staleness_steps', 'recall_at_5']" in cluster.mlflow(CHAMPION)


def test_a_second_submission_with_the_files_of_git_starts_nothing(
    trained: tuple[Any, list[int]], cluster: Cluster
) -> None:
    away = cluster.documents.rename(cluster.documents.parent / "away")
    lines = cluster.submit()
    away.rename(cluster.documents)
    assert "nothing to submit" in lines
    assert run_of(lines) == trained[0].run_id


def test_a_terminated_run_leaves_no_index_builder_and_no_running_mlflow_run(terminated: str, cluster: Cluster) -> None:
    assert cluster.replicas() == 0
    assert "['FINISHED', 'KILLED']" in cluster.mlflow(STATES)


def test_a_terminated_run_is_submitted_again_and_survives_a_lost_pod(terminated: str, cluster: Cluster) -> None:
    lines = cluster.submit()
    assert "submitted: " in lines
    run_id = run_of(lines)
    assert run_id != terminated
    cluster.kubectl("delete", "pod", cluster.pod_of(run_id, "Running"), "--wait=false")
    assert cluster.ended(run_id).state == "SUCCEEDED"
