"""A user's project as Argo CD and Flux apply it: the image, and the Job that submits with its retries."""

import subprocess
from pathlib import Path

import manifests
import pytest
import yaml
from manifest_rules import faults
from manifests import Object, find, read_all, render
from small_project import cli

from realmops.cluster import IMAGE
from realmops.starter.cluster_files import PLACEHOLDER

BUILDER, RETRAIN = "Deployment/realmops-index-builder", "Job/realmops-retrain"


def as_applied(folder: Path, cluster: str, by: str, images: list[dict[str, str]] | None = None) -> list[Object]:
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    subprocess.run(["git", "remote", "add", "origin", "https://git.test/docs.git"], cwd=folder, check=True)
    assert cli("init", folder, "--cluster", cluster, "--image", IMAGE).exit_code == 0
    file = folder / "kustomization.yaml"
    own = yaml.safe_load(file.read_text(encoding="utf-8").replace(PLACEHOLDER, "set"))
    spec = read_all(folder / f"k8s/{by}.yaml")[-1]["spec"]
    added = spec["source"]["kustomize"] if by == "argo-cd" else spec
    for key in ("components", "patches"):
        own[key] = [*own.get(key, []), *added.get(key, [])]
    own["images"] = images or own["images"]
    file.write_text(yaml.safe_dump(own), encoding="utf-8")
    objects = render(folder)
    assert faults(objects) == []
    assert faults(read_all(folder / f"k8s/{by}.yaml")) == []
    return objects


def seconds_of_retries(job: Object) -> float:
    """Seconds from a Job's first attempt to its last: Kubernetes waits 10 s, then twice as long, up to 6 minutes."""
    waits = sum(min(10 * 2**n, 360) for n in range(job["spec"]["backoffLimit"]))
    return min(waits, job["spec"]["activeDeadlineSeconds"])


@pytest.mark.parametrize(
    ("cluster", "image", "expected"),
    [
        ("local", {}, IMAGE),
        ("standalone", {"newName": "host:5000/team/realmops", "newTag": "f2c1a07"}, "host:5000/team/realmops:f2c1a07"),
    ],
)
def test_the_job_submits_the_image_that_it_runs(
    cluster: str, image: dict[str, str], expected: str, tmp_path: Path
) -> None:
    objects = as_applied(tmp_path, cluster, "flux", [{"name": "realmops", **image}] if image else None)
    [container] = find(objects, RETRAIN)["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["IMAGE"] == container["image"] == expected
    assert variables["KF_PIPELINES_ENDPOINT"] == "http://ml-pipeline.kubeflow:8888"


def test_argo_cd_retrains_after_each_sync_and_retries_unless_the_input_is_invalid(tmp_path: Path) -> None:
    """``realmops submit`` exits with 1 if the server is unreachable, and with 2 for invalid input."""
    objects = as_applied(tmp_path, "production", "argo-cd")
    [application] = read_all(tmp_path / "k8s" / "argo-cd.yaml")
    spec, job = application["spec"], find(objects, RETRAIN)
    assert job["metadata"]["annotations"]["argocd.argoproj.io/hook"] == "PostSync"
    assert {manifests.namespace_of(one) for one in objects} == {spec["destination"]["namespace"]}
    [ignored] = spec["ignoreDifferences"]
    assert (f"{ignored['kind']}/{ignored['name']}", ignored["jsonPointers"]) == (BUILDER, ["/spec/replicas"])
    assert "RespectIgnoreDifferences=true" in spec["syncPolicy"]["syncOptions"]
    retry = spec["syncPolicy"]["retry"]
    assert retry["limit"] > 0, "after the Job's own retries"
    assert retry["refresh"], "or the failed commit is synced again, not a newer one (3.5.1)"
    assert 20 * 60 < seconds_of_retries(job) < job["spec"]["activeDeadlineSeconds"]
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["args"][:2] == ["submit", "--once"]
    codes = {"containerName": container["name"], "operator": "In", "values": [2]}
    assert job["spec"]["podFailurePolicy"]["rules"] == [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": codes},
    ]
    assert pod["restartPolicy"] == "Never", "required by such a policy"


def test_flux_runs_a_changed_job_and_sees_a_new_commit_during_its_retries(tmp_path: Path) -> None:
    """Flux polls no commit while it waits for a Job (kustomize-controller 1.9.4), and then waits again."""
    objects = as_applied(tmp_path, "production", "flux")
    source, sync = read_all(tmp_path / "k8s" / "flux.yaml")
    job = find(objects, RETRAIN)
    assert sync["spec"]["sourceRef"] == {"kind": source["kind"], "name": source["metadata"]["name"]}
    assert job["metadata"]["annotations"]["kustomize.toolkit.fluxcd.io/force"] == "enabled"
    assert seconds_of_retries(job) > 4 * 3600, "Flux does not restart a failed Job"
    assert "ttlSecondsAfterFinished" not in job["spec"]
    assert "replicas" not in find(objects, BUILDER)["spec"]
    assert sync["spec"]["wait"]
    assert (sync["spec"]["timeout"], sync["spec"]["retryInterval"]) == ("5m", "1m")
