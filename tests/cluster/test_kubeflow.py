"""The walk of docs/operate.md against a real Kubeflow Pipelines: only with -m kubeflow.

KF_PIPELINES_ENDPOINT names its API, KUBECONFIG the cluster, REALMOPS_IMAGE the image there (realmops:local). What
``k8s/overlays/standalone`` makes must be there, and in its namespace nothing else may train at the same time.
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

pytestmark = [pytest.mark.kubeflow, pytest.mark.timeout(5400)]

SMALL = ("sample.subjects=60", "pretrain.steps=40", "ict.steps=40", "finetune.epochs=1")
DEPLOYMENT = "deployment/realmops-index-builder"
STAGES = ("guard", "sample", "snapshot", "tag", "ict", "pretrain", "finetune", "evaluate", "promote", "scale-builder")
CHAMPION = """
import mlflow
one = mlflow.MlflowClient().get_model_version_by_alias({model!r}, "champion")
run = mlflow.get_run(one.run_id)
print(sorted(run.data.metrics.keys() & {{"em", "recall_at_5", "index_staleness_steps"}}))
"""


class Cluster:
    """The server and the cluster that the environment names."""

    def __init__(self, folder: Path) -> None:
        missing = [name for name in ("KF_PIPELINES_ENDPOINT", "KUBECONFIG") if not os.environ.get(name)]
        if missing:
            pytest.fail(f"-m kubeflow wants {' and '.join(missing)}: docs/operate.md says how one comes up")
        self.namespace = os.environ.get("REALMOPS_NAMESPACE", "kubeflow")
        self.image = os.environ.get("REALMOPS_IMAGE", "realmops:local")
        self.project = folder / "project"
        self.realmops("init", str(self.project), folder=folder)

    def realmops(self, *words: str, folder: Path | None = None, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "realmops", *words],
            cwd=folder or self.project, capture_output=True, text=True, check=False,
        )  # fmt: skip
        print(done.stdout, done.stderr)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def words(self, name: str, *settings: str) -> list[str]:
        """Of a small training under a key of its own."""
        values = [*SMALL, f"run.seed={int(name, 16) % 10_000}", *settings]
        sets = [word for one in values for word in ("--set", one)]
        return ["submit", "--argument", f"image={self.image}", *sets]

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
        """A pod of a task of ours (not of a driver) that is in that phase, waited for."""
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


@pytest.fixture(scope="module")
def name() -> str:
    return uuid.uuid4().hex[:8]


def run_of(said: str) -> str:
    return said.rpartition("runs/details/")[2].split()[0]


@pytest.fixture(scope="module")
def trained(cluster: Cluster, name: str) -> tuple[Any, list[int]]:
    """A run that was waited for, and the replicas of the index builders as they were meanwhile."""
    seen: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1):
            if not seen or seen[-1] != (now := cluster.replicas()):
                seen.append(now if seen else cluster.replicas())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        said = cluster.realmops(*cluster.words(name), "--argument", f"model=walk-{name}", "--once", "--wait")
        time.sleep(3)
    finally:
        over.set()
        watcher.join()
    return cluster.server().get_run(run_of(said)), seen


def test_every_task_of_a_submission_succeeds(trained: tuple[Any, list[int]]) -> None:
    run, _ = trained
    assert run.state == "SUCCEEDED"
    ended = {task.display_name: task.state for task in run.run_details.task_details}
    assert {name: ended.get(name) for name in STAGES[:-1]} == dict.fromkeys(STAGES[:-1], "SUCCEEDED")


def test_index_builders_are_raised_for_pretrain_alone(trained: tuple[Any, list[int]]) -> None:
    _, seen = trained
    assert seen == [0, 1, 0]


def test_mlflow_has_the_run_and_its_model_is_the_champion(
    trained: tuple[Any, list[int]], cluster: Cluster, name: str
) -> None:
    code = f"import mlflow; mlflow.set_tracking_uri('http://127.0.0.1:5000'){CHAMPION.format(model=f'walk-{name}')}"
    said = cluster.kubectl("exec", "deployment/mlflow", "--", "python", "-c", code)
    assert "['em', 'index_staleness_steps', 'recall_at_5']" in said


def test_a_second_submission_starts_nothing(trained: tuple[Any, list[int]], cluster: Cluster, name: str) -> None:
    said = cluster.realmops(*cluster.words(name), "--argument", f"model=walk-{name}", "--once")
    assert "nothing to submit" in said
    assert run_of(said) == trained[0].run_id


def test_kfp_runs_the_compiled_file(trained: tuple[Any, list[int]], cluster: Cluster, name: str) -> None:
    """Of the same options into the same folder: every stage finds its work done."""
    key = trained[0].runtime_config.parameters["run"]
    options = cluster.realmops("params", "--kfp", *cluster.words(name)[3:]).strip()
    compiled = Path(__file__).parents[2] / "pipelines/train.yaml"
    words = ["run", "create", "-e", "realmops", "-r", f"walk-{name}", "-f", str(compiled)]
    arguments = [f"image={cluster.image}", f"run={key}", f"options={options}"]
    done = subprocess.run(
        [
            sys.executable, "-c", "from kfp.cli.__main__ import main; main()",
            "--endpoint", os.environ["KF_PIPELINES_ENDPOINT"], *words, *arguments,
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    server = cluster.server()
    [run] = [one for one in server.list_runs(page_size=100).runs if one.display_name == f"walk-{name}"]
    assert cluster.ended(run.run_id).state == "SUCCEEDED"


def test_eight_submitters_at_once_make_one_run_and_a_lost_pod_is_made_again(cluster: Cluster) -> None:
    name = uuid.uuid4().hex[:8]
    said: list[str] = []

    def submit() -> None:
        said.append(cluster.realmops(*cluster.words(name), "--once"))

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [run_id] = {run_of(one) for one in said}
    assert sum("submitted: " in one for one in said) == 1
    cluster.kubectl("delete", "pod", cluster.pod_of(run_id, "Running"), "--wait=false")
    assert cluster.ended(run_id).state == "SUCCEEDED"


def test_a_run_that_is_terminated_leaves_no_index_builder_and_is_tried_again(cluster: Cluster) -> None:
    words = cluster.words(uuid.uuid4().hex[:8])
    run_id = run_of(cluster.realmops(*words, "--once"))
    for _ in range(1200):
        if cluster.replicas():
            break
        time.sleep(1)
    cluster.server().terminate_run(run_id)
    assert cluster.ended(run_id).state in ("FAILED", "CANCELED")
    assert cluster.replicas() == 0
    said = cluster.realmops(*words, "--once", "--wait")
    assert "submitting it again" in said
    assert run_of(said) != run_id
