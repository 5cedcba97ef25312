"""A whole small run in the pods of Kubeflow Pipelines, on a cluster that enforces the pod security ``restricted``.

Wants a cluster (KUBECONFIG) whose nodes have the project's image; IMAGE names it, realmops:local without.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import custom_resources
import pytest
import small_project
from cluster_lab import k
from compiled import file_of
from kfp_pods import PodRunner
from manifests import Object, render_all

BUILDER = "realmops-index-builder"
IMAGE = os.environ.get("IMAGE", "realmops:local")
FILES = ("train", "dev", "test")
STAGES = ("sample", "snapshot", "tag", "ict", "pretrain", "finetune", "evaluate")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", params=["standalone", "local"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A namespace that enforces ``restricted``, with an overlay in it; and the ServiceAccount of its pipelines."""
    if not os.environ.get("KUBECONFIG") or "cluster" not in request.config.option.markexpr:
        pytest.skip("not run: wants a cluster of yours, KUBECONFIG=FILE pytest -m cluster")
    from kubernetes import config

    config.load_kube_config()
    account = {"standalone": "pipeline-runner", "local": "default-editor"}[request.param]
    namespace = f"realmops-test-{request.param}"
    about = {"name": namespace, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    k("create", "-f", "-", content={"apiVersion": "v1", "kind": "Namespace", "metadata": about})
    k("create", "serviceaccount", account, "--namespace", namespace)
    folder = tmp_path_factory.mktemp("overlay") / "k8s"
    case = {"resources": [f"../overlays/{request.param}"], "images": [{"name": "realmops", **split(IMAGE)}]}
    objects = [
        one
        for one in render_all(folder, {namespace: case})[namespace]
        if one["kind"] not in ("Namespace", "ResourceQuota", "LimitRange", "PodDefault")
    ]
    for one in objects:  # the pipelines' ServiceAccount lies in a namespace that the overlay names once more
        for subject in one.get("subjects", []):
            subject["namespace"] = namespace
    for dry, some in (("server", everything(tmp_path_factory.mktemp("all") / "k8s", namespace)), ("none", objects)):
        listed = {"apiVersion": "v1", "kind": "List", "items": some}
        told = k("apply", "--server-side", "--validate=strict", f"--dry-run={dry}", "-f", "-", content=listed)
        assert "Warning" not in told, "nothing that the server warns of"
    for replicas in (1, 0):  # a pod with an fsGroup gives the claim its group, as k8s/README.md says
        k("scale", f"deployment/{BUILDER}", "--namespace", namespace, f"--replicas={replicas}")
        k("rollout", "status", f"deployment/{BUILDER}", "--namespace", namespace, "--timeout=300s")
    yield namespace, account
    k("delete", "namespace", namespace)


def everything(folder: Path, namespace: str) -> list[Object]:
    """All objects that production has with the components to add, of the kinds that each cluster knows."""
    added = [f"../components/{name}" for name in ("serve", "retrain-on-sync")]
    case = {"resources": ["../overlays/production"], "components": added}
    objects = render_all(folder, {namespace: case})[namespace]
    return [one for one in objects if one["kind"] not in ("Namespace", *custom_resources.KINDS)]


def split(image: str) -> dict[str, str]:
    named, _, tag = image.rpartition(":")
    return {"newName": named, "newTag": tag}


def values() -> dict[str, dict[str, Any]]:
    """Of the sample corpus, which the first task makes; no tracking, as a cluster of one node may have no DNS."""
    sample = {"documents": "data/sample/corpus.jsonl.gz"}
    questions = {split: f"data/sample/questions.{split}.jsonl.gz" for split in FILES}
    tagged = {"method": "tagger", "train": "data/sample/ner.train.conll", "dev": "data/sample/ner.dev.conll"}
    return small_project.toy_values(snapshot=sample, questions=questions, tag=tagged)


def run_of(namespace: str, account: str, folder: Path) -> PodRunner:
    """Of a name of its own, as a volume may keep what a claim before has left; the same within this call of pytest."""
    arguments = {"options": json.dumps(values()), "image": IMAGE, "run": f"run-{os.getpid()}"}
    limits = {"builders": 1, "shard_pods": 2, "cpu": "1", "memory": "4Gi"}
    return PodRunner(file_of("train"), arguments | limits, namespace, account, folder)


def replicas(namespace: str) -> str:
    return k("get", "deployment", BUILDER, "--namespace", namespace, "--output", "jsonpath={.spec.replicas}")


def test_a_whole_run_goes_through_admission_and_to_its_end(
    place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the builders in their Deployment, and a trainer that is deleted once on its way."""
    namespace, account = place
    runner = run_of(namespace, account, tmp_path)
    seen: list[str] = []

    def at_start(component: str, pod: str) -> None:
        if component == "pretrain":
            limit = "--timeout=300s"
            k("wait", f"pod/{pod}", "--namespace", namespace, "--for=condition=Ready", limit)
            raised = "--for=jsonpath={.spec.replicas}=1"
            told = k("wait", f"deployment/{BUILDER}", "--namespace", namespace, raised, limit, check=False)
            assert "condition met" in told, told + k("logs", pod, "--namespace", namespace)
            if not seen:
                k("delete", f"pod/{pod}", "--namespace", namespace, "--grace-period=0", "--force")
            seen.append(pod)

    runner.at_start = at_start
    runner.run(monkeypatch)
    ended = [("guard", "Succeeded"), *((stage, "Succeeded") for stage in STAGES)]
    ended.insert(ended.index(("pretrain", "Succeeded")), ("pretrain", "Deleted"))
    assert runner.made == [*ended, ("promote", "Succeeded"), ("scale_builder", "Succeeded")]
    assert replicas(namespace) == "0", "given back"
    [report] = tmp_path.glob("*/evaluate/report")
    assert "<html" in report.read_text(encoding="utf-8")[:500].lower()
    [metrics] = tmp_path.glob("*/evaluate/executor_output.json")
    assert "em" in json.dumps(json.loads(metrics.read_text())).lower()


def test_a_second_run_finds_all_done(place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same name on the same claim: no stage is trained again, and no builder is raised."""
    namespace, account = place
    runner = run_of(namespace, account, tmp_path)
    runner.run(monkeypatch)
    assert {phase for _, phase in runner.made} == {"Succeeded"}
    log = next(log for pod, log in runner.logs.items() if "-pretrain-" in pod)
    assert "pre-training:" not in log


def test_the_deployments_of_the_overlay_run_and_answer(place: tuple[str, str]) -> None:
    """MLflow gets ready by its own probes; an index builder that is raised lives, and ends when it is not wanted."""
    namespace, _ = place
    k("rollout", "status", "deployment/mlflow", "--namespace", namespace, "--timeout=600s")
    k("scale", f"deployment/{BUILDER}", "--namespace", namespace, "--replicas=1")
    k("rollout", "status", f"deployment/{BUILDER}", "--namespace", namespace, "--timeout=120s")
    k("scale", f"deployment/{BUILDER}", "--namespace", namespace, "--replicas=0")
    pods = ["--selector", f"app.kubernetes.io/name={BUILDER}"]
    k("wait", "pod", "--namespace", namespace, *pods, "--for=delete", "--timeout=120s")
