"""Pre-training on several nodes by Kubeflow Trainer, on a cluster that has it; a pod is deleted on the way.

Wants KUBECONFIG, a default storage class, and the project's image on the nodes; IMAGE names it, realmops:local without.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster_lab import k
from manifests import K8S, Object, find, render_all
from small_world import PAPERS_READER
from test_kfp_pods import IMAGE, values

NAMESPACE = "realmops-test-trainer"
JOB = "trainjob/realmops-pretrain"
NODES = "batch.kubernetes.io/job-completion-index"
# The same params for one process and for two; what the manifest asks for, the stages before have made.
BEFORE = """
import json, pathlib, shutil, subprocess, sys
def run(root, *stages):
    for stage in stages:
        subprocess.run(["realmops", "run", stage, "--params", f"{root}/params.json", "--root", root], check=True)
runs = pathlib.Path("/realmops/runs")
shutil.rmtree(runs, ignore_errors=True)
(runs / "one").mkdir(parents=True)
(runs / "one/params.json").write_text(sys.argv[1])
run("/realmops/runs/one", "sample", "snapshot", "tag", "ict")
shutil.copytree(runs / "one", runs / "first")
run("/realmops/runs/one", "pretrain")
"""
SAME = """
import torch
from safetensors.torch import load_file
for name in ("reader", "retriever"):
    one, two = (load_file(f"/realmops/runs/{run}/models/pretrain/{name}.safetensors") for run in ("one", "first"))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
"""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


@pytest.fixture
def applied(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Object]]:
    """A namespace with claim and ServiceAccount; gives the manifest's objects as a small machine takes them."""
    if not os.environ.get("KUBECONFIG") or "cluster" not in request.config.option.markexpr:
        pytest.skip("not run: wants a cluster of yours, KUBECONFIG=FILE pytest -m cluster")
    if "NotFound" in k("get", "crd", "trainjobs.trainer.kubeflow.org", check=False):
        pytest.skip("not run: the cluster has no Kubeflow Trainer")
    rendered = render_all(
        tmp_path / "k8s", {NAMESPACE: {"resources": ["../namespace", "../base"], "components": ["../components/small"]}}
    )[NAMESPACE]
    make([find(rendered, f"Namespace/{NAMESPACE}")])
    wanted = ("ServiceAccount/realmops-builder", "PersistentVolumeClaim/realmops-data")
    make([find(rendered, name) for name in wanted])
    text = (K8S / "trainjob.yaml").read_text(encoding="utf-8").replace("realmops:set-by-you", IMAGE)
    runtime, job = yaml.safe_load_all(text)
    job["spec"]["trainer"]["resourcesPerNode"] = {"requests": {"cpu": "200m", "memory": "512Mi"}}
    yield [runtime, job]
    k("delete", "namespace", NAMESPACE)


def make(objects: list[Object]) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": objects}
    k("apply", "--namespace", NAMESPACE, "--server-side", "--validate=strict", "-f", "-", content=listed)


def run_pod(name: str, pod: Object, *words: str) -> None:
    """Python in the pod of a node, to its end."""
    spec = {**pod, "restartPolicy": "Never"}
    [container] = spec["containers"]
    spec["containers"] = [{**container, "command": ["python", "-c"], "args": list(words)}]
    make([{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}])
    for _ in range(600):
        phase = k("get", f"pod/{name}", "--namespace", NAMESPACE, "--output", "jsonpath={.status.phase}")
        if phase in ("Succeeded", "Failed"):
            break
        time.sleep(1)
    assert phase == "Succeeded", k("logs", name, "--namespace", NAMESPACE)


def node_says(index: int, words: str) -> None:
    for _ in range(300):
        if words in k("logs", "--namespace", NAMESPACE, "--selector", f"{NODES}={index}", "--tail=-1", check=False):
            return
        time.sleep(1)
    pytest.fail(f"the node {index} never said '{words}'")


def test_two_pods_learn_what_one_process_learns_though_one_is_deleted(applied: list[Object]) -> None:
    [node] = applied[0]["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    small = values()
    changed = {"steps": 300, "refresh_every": 20, "lag": 10}
    small |= {"bert": {**small["bert"], "dropout": 0.0}, "pretrain": {**small["pretrain"], **changed}}
    small |= {"reader": {**small["reader"], **PAPERS_READER}}
    run_pod("before", pod, BEFORE, json.dumps(small))
    make(applied)
    node_says(0, "pre-training:")
    k("delete", "pod", "--namespace", NAMESPACE, "--selector", f"{NODES}=1")
    k("wait", JOB, "--namespace", NAMESPACE, "--for=condition=Complete", "--timeout=600s")
    status = k("get", "jobset/realmops-pretrain", "--namespace", NAMESPACE, "--output", "jsonpath={.status.restarts}")
    assert status == "1", "the pod was deleted before the training had ended"
    run_pod("same", pod, SAME)
