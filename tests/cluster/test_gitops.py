"""A user's project as Argo CD and Flux apply it: the image, the Job that submits, and its tries."""

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

BUILDER = "Deployment/realmops-index-builder"


def as_applied(
    folder: Path, cluster: str, images: list[dict[str, str]] | None = None, by: str = "flux"
) -> list[Object]:
    """A user's project as Argo CD and Flux apply it; with other images, if there are some."""
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    subprocess.run(["git", "remote", "add", "origin", "https://git.test/docs.git"], cwd=folder, check=True)
    assert cli("init", folder, "--cluster", cluster, "--image", IMAGE).exit_code == 0
    file = folder / "kustomization.yaml"
    own = yaml.safe_load(file.read_text(encoding="utf-8").replace(PLACEHOLDER, "set"))
    told = read_all(folder / "k8s" / "flux.yaml")[1]["spec"]
    if by == "argo-cd":
        told = read_all(folder / "k8s" / "argo-cd.yaml")[0]["spec"]["source"]["kustomize"]
    for key in ("components", "patches"):
        own[key] = [*own.get(key, []), *told.get(key, [])]
    own["images"] = images or own["images"]
    file.write_text(yaml.safe_dump(own), encoding="utf-8")
    return render(folder)


def tried_for(job: Object) -> float:
    """Seconds from a Job's first try to its last: Kubernetes waits 10 s, twice as long each time, up to 6 minutes."""
    waits = sum(min(10 * 2**n, 360) for n in range(job["spec"]["backoffLimit"]))
    return min(waits, job["spec"]["activeDeadlineSeconds"])


@pytest.mark.parametrize(
    ("cluster", "image", "wanted"),
    [
        ("local", {}, IMAGE),
        ("standalone", {"newName": "host:5000/team/realmops", "newTag": "f2c1a07"}, "host:5000/team/realmops:f2c1a07"),
        (
            "production",
            {"newName": "host/realmops", "digest": f"sha256:{'0' * 64}"},
            f"host/realmops@sha256:{'0' * 64}",
        ),
    ],
)
def test_the_job_submits_the_image_that_it_runs(
    cluster: str, image: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    images = [{"name": "realmops", **image}] if image else None
    objects = as_applied(tmp_path, cluster, images)
    [container] = find(objects, "Job/realmops-retrain")["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["IMAGE"] == container["image"] == wanted
    assert variables["KF_PIPELINES_ENDPOINT"] == "http://ml-pipeline.kubeflow:8888"
    assert variables["HOME"] == "/tmp"


def test_argo_cd_retrains_after_each_sync_and_leaves_the_builders_number_alone(tmp_path: Path) -> None:
    objects = as_applied(tmp_path, "production", by="argo-cd")
    [application] = read_all(tmp_path / "k8s" / "argo-cd.yaml")
    spec = application["spec"]
    assert faults(objects) == []
    assert faults([application]) == []
    job = find(objects, "Job/realmops-retrain")
    assert job["metadata"]["annotations"]["argocd.argoproj.io/hook"] == "PostSync"
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][:2] == ["submit", "--once"]
    assert {manifests.namespace_of(one) for one in objects} == {spec["destination"]["namespace"]}
    [ignored] = spec["ignoreDifferences"]
    assert f"{ignored['kind']}/{ignored['name']}" == BUILDER
    assert ignored["jsonPointers"] == ["/spec/replicas"]
    assert "RespectIgnoreDifferences=true" in spec["syncPolicy"]["syncOptions"]


def test_flux_runs_a_changed_job_and_leaves_the_builders_number_alone(tmp_path: Path) -> None:
    objects = as_applied(tmp_path, "production")
    source, sync = read_all(tmp_path / "k8s" / "flux.yaml")
    assert sync["spec"]["sourceRef"] == {"kind": source["kind"], "name": source["metadata"]["name"]}
    assert faults(objects) == []
    assert faults([source, sync]) == []
    job = find(objects, "Job/realmops-retrain")
    assert job["metadata"]["annotations"]["kustomize.toolkit.fluxcd.io/force"] == "enabled"
    assert tried_for(job) > 4 * 3600, "Flux leaves a Job that failed as it is"
    assert "ttlSecondsAfterFinished" not in job["spec"]
    assert "replicas" not in find(objects, BUILDER)["spec"]


def test_a_submission_is_tried_again_while_the_server_is_away_and_not_for_a_mistake(tmp_path: Path) -> None:
    """`realmops submit` ends with 1 and with 2 then; a pod that its node loses counts as neither."""
    job = find(as_applied(tmp_path, "production", by="argo-cd"), "Job/realmops-retrain")
    assert 20 * 60 < tried_for(job) < job["spec"]["activeDeadlineSeconds"]
    ignored, mistake = job["spec"]["podFailurePolicy"]["rules"]
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    [container] = job["spec"]["template"]["spec"]["containers"]
    codes = {"containerName": container["name"], "operator": "In", "values": [2]}
    assert mistake == {"action": "FailJob", "onExitCodes": codes}
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never", "which such a policy wants"
    [application] = read_all(tmp_path / "k8s" / "argo-cd.yaml")
    retry = application["spec"]["syncPolicy"]["retry"]
    assert retry["limit"] > 0, "and then Argo CD syncs again"
    assert retry["refresh"], "else it tries the commit that failed, and not the one that mends it (3.5.1)"


def test_flux_looks_at_a_new_commit_while_a_submission_is_tried_again(tmp_path: Path) -> None:
    """It looks at none while it waits for the Job (kustomize-controller 1.9.4), and afterwards waits again."""
    job = find(as_applied(tmp_path, "production"), "Job/realmops-retrain")
    [sync] = [one for one in read_all(tmp_path / "k8s" / "flux.yaml") if one["kind"] == "Kustomization"]
    assert sync["spec"]["wait"]
    assert (sync["spec"]["timeout"], sync["spec"]["retryInterval"]) == ("5m", "1m")
    assert tried_for(job) > 10 * 5 * 60
