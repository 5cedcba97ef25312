"""Kubernetes manifests: what overlays and components render to, and rules that find what was planted."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path
from typing import Any

import manifest_rules
import manifests
import pytest
import yaml
from manifest_rules import faults
from manifests import (
    K8S,
    NEWEST,
    OLDEST,
    Object,
    find,
    instructions,
    quantity,
    read_all,
    render,
    render_all,
    templates,
)
from pod_security import violations

from realmops.cli import main
from realmops.cluster import IMAGE, server

ROOT = K8S.parent
COMPONENTS = sorted(folder.name for folder in (K8S / "components").iterdir())
STARTS = ("base", "overlays/local", "overlays/standalone", "overlays/production")
ANSWERING = ("serve", "kserve")  # components that only single-node changes: with few sets of the others
FULL = "on-production-s-k-ros"  # has every kind of object
BUILDER = "Deployment/realmops-index-builder"
GONE = object()


def read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((K8S / path).read_text(encoding="utf-8"))
    return found


def subsets(names: list[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(names) + 1):
        yield from combinations(names, size)


def cases() -> dict[str, dict[str, Any]]:
    """Base and each overlay with every set of the components that it does not have; by namespaces made of initials.

    But ``small`` changes the claim of MLflow, which production has not, and nothing that others change; and
    ``pipelines-token`` is for profiles, whose overlays have it.
    """
    found = {}
    for start in STARTS:
        has = {Path(component).name for component in read(f"{start}/kustomization.yaml").get("components", [])} | {
            "small",
            "pipelines-token",
        }
        others = [component for component in COMPONENTS if component not in has and component not in ANSWERING]
        alone = [*subsets(others)]
        few = (alone[0], ("retrain-on-sync",), alone[-1])
        for chosen in [
            *alone,
            *((*more, *some) for some in few for more in [*subsets(ANSWERING)][1:]),
        ]:
            namespace = "-".join(["on", Path(start).name, *("".join(re.findall(r"\b\w", one)) for one in chosen)])
            again = ["single-node"] if "single-node" in has and {*ANSWERING} & {*chosen} else []  # for what was added
            found[namespace] = {
                "resources": [f"../{start}"],
                "components": [f"../components/{component}" for component in (*chosen, *again)],
            }
    return found


CASES = cases()


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    return render_all(tmp_path_factory.mktemp("manifests") / "k8s", CASES)


def test_no_set_of_components_is_missing() -> None:
    assert len(CASES) == 2**6 + 2 * 2**5 + 2**2 + 4 * 3 * 3


@pytest.mark.parametrize("case", CASES)
def test_every_overlay_and_component_renders_without_a_fault(case: str, rendered: dict[str, list[Object]]) -> None:
    assert faults(rendered[case]) == []


def test_the_oldest_kubernetes_takes_everything_as_well(rendered: dict[str, list[Object]]) -> None:
    assert faults(rendered[FULL], OLDEST) == []


@pytest.mark.parametrize("overlay", STARTS[1:])
def test_an_overlay_sets_namespace_image_and_the_account_of_the_pipelines(overlay: str) -> None:
    """Everything in the namespace in which Kubeflow runs the pipelines, and those who run there may scale builders."""
    objects = render(K8S / overlay)
    assert faults(objects) == []
    assert "set-by-overlay" not in str(objects)
    namespace, account = {
        "overlays/standalone": ("kubeflow", "pipeline-runner"),
        "overlays/local": ("realmops", "default-editor"),
        "overlays/production": ("realmops", "default-editor"),
    }[overlay]
    assert {manifests.namespace_of(one) for one in objects} == {namespace}
    assert [(one["name"], one["namespace"]) for one in find(objects, "RoleBinding/realmops-scaler")["subjects"]] == [
        ("realmops-scaler", namespace),
        (account, namespace),
    ]


def test_production_has_the_released_image_for_gpus() -> None:
    containers = [one for _, _, one in manifests.each_container(render(K8S / "overlays" / "production"))]
    assert {one["image"] for one in containers} == {f"{IMAGE}-gpu"}


def test_profiles_have_the_token_for_the_first_task_of_a_run() -> None:
    """As the retraining Job has it; the standalone server asks for none, and has no such resource."""
    for overlay, wanted in (("local", 1), ("production", 1), ("standalone", 0)):
        found = [one for one in render(K8S / "overlays" / overlay) if one["kind"] == "PodDefault"]
        assert len(found) == wanted
        job = read_all(K8S / "components/retrain-on-sync/retrain.yaml")[2]["spec"]["template"]["spec"]
        for one in found:
            [volume] = one["spec"]["volumes"]
            assert volume["projected"] == job["volumes"][0]["projected"]
            assert one["spec"]["env"][0] in job["containers"][0]["env"]
            assert one["spec"]["volumeMounts"][0]["mountPath"] == job["containers"][0]["volumeMounts"][0]["mountPath"]


def test_where_kubeflow_pipelines_runs_alone_its_namespace_is_left_as_it_is() -> None:
    """Neither made nor limited: KFP's own pods run there. All that a run needs is there."""
    found = {manifests.name(one) for one in render(K8S / "overlays" / "standalone")}
    assert not {"Namespace", "ResourceQuota", "LimitRange"} & {one.partition("/")[0] for one in found}
    assert found >= {
        "PersistentVolumeClaim/realmops-data",
        "ConfigMap/realmops-tracking",
        BUILDER,
        "Deployment/mlflow",
        "Service/mlflow",
        "Role/realmops-scaler",
    }


@pytest.mark.parametrize("overlay", ["local", "production"])
def test_a_namespace_for_a_profile_names_the_user_as_the_profile_does(overlay: str) -> None:
    """The profile controller takes no namespace that is there already without that annotation."""
    [profile] = read_all(K8S / "profile.yaml")
    assert faults([profile]) == []
    namespace = find(render(K8S / "overlays" / overlay), f"Namespace/{profile['metadata']['name']}")
    assert namespace["metadata"]["annotations"]["owner"] == profile["spec"]["owner"]["name"]


def test_who_submits_may_use_kubeflow_pipelines_with_profiles(rendered: dict[str, list[Object]]) -> None:
    """By its role, and by a token that it takes, where the submission looks for it."""
    binding = find(rendered[FULL], "RoleBinding/realmops-submit")
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("ClusterRole", "kubeflow-pipelines-edit")
    spec = find(rendered[FULL], "Job/realmops-retrain")["spec"]["template"]["spec"]
    assert [subject["name"] for subject in binding["subjects"]] == [spec["serviceAccountName"]]
    [container] = spec["containers"]
    [mount] = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "token"]
    [source] = [one for volume in spec["volumes"] for one in volume.get("projected", {}).get("sources", [])]
    assert source["serviceAccountToken"]["audience"] == "pipelines.kubeflow.org"
    [file] = [one["value"] for one in container["env"] if one["name"] == server.TOKEN_FILE]
    assert file == f"{mount}/{source['serviceAccountToken']['path']}"


def test_production_keeps_no_claim_for_mlflow() -> None:
    """Its database and files lie elsewhere; a claim would be 20 GiB that nothing uses."""
    objects = render(K8S / "overlays" / "production")
    claims = [one["metadata"]["name"] for one in objects if one["kind"] == "PersistentVolumeClaim"]
    assert claims == ["realmops-data"]


@pytest.mark.parametrize("case", [FULL, "on-base", "on-local-ros", "on-standalone-ros"])
def test_the_only_right_is_to_patch_the_builders_scale(case: str, rendered: dict[str, list[Object]]) -> None:
    roles = [one for one in rendered[case] if one["kind"] in ("Role", "ClusterRole")]
    assert [one["rules"] for one in roles] == [
        [
            {
                "apiGroups": ["apps"],
                "resources": ["deployments/scale"],
                "resourceNames": ["realmops-index-builder"],
                "verbs": ["patch"],
            }
        ]
    ]
    bindings = [one for one in rendered[case] if one["kind"] in ("RoleBinding", "ClusterRoleBinding")]
    assert {one["roleRef"]["name"] for one in bindings} - {"kubeflow-pipelines-edit"} == {"realmops-scaler"}


@pytest.mark.parametrize("host", ["mlflow", "mlflow.there", "mlflow.there.svc", "mlflow.there.svc.cluster.local"])
@pytest.mark.parametrize("port", ["", ":5000"])
def test_mlflow_answers_to_all_names_of_its_service(host: str, port: str, rendered: dict[str, list[Object]]) -> None:
    [container] = find(rendered["on-base"], "Deployment/mlflow")["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    names = arguments[arguments.index("--allowed-hosts") + 1].replace("$(POD_NAMESPACE)", "there").split(",")
    assert any(fnmatch(host + port, name.strip()) for name in names)
    assert not any(fnmatch(f"mlflow.example.org{port}", name.strip()) for name in names)


def test_pipelines_are_told_where_mlflow_is(rendered: dict[str, list[Object]]) -> None:
    data = find(rendered["on-base"], "ConfigMap/realmops-tracking")["data"]
    service = find(rendered["on-base"], "Service/mlflow")
    assert data == {"MLFLOW_TRACKING_URI": f"http://mlflow:{service['spec']['ports'][0]['port']}"}


def test_claims_outlive_their_manifests(rendered: dict[str, list[Object]]) -> None:
    for one in rendered["on-local-ros"]:
        kept = one["metadata"].get("annotations", {}).get("kustomize.toolkit.fluxcd.io/prune") == "disabled"
        assert kept == (one["kind"] in ("PersistentVolumeClaim", "Namespace"))


@pytest.mark.parametrize(
    ("probe", "age", "healthy"),
    [
        ("startupProbe", 0, True),
        ("startupProbe", None, False),
        ("readinessProbe", 60, True),
        ("readinessProbe", 3600, False),
        ("livenessProbe", 60, True),
        ("livenessProbe", 3600, False),
        ("livenessProbe", None, False),
    ],
)
def test_probes_look_at_the_age_of_the_builders_sign_of_life(
    probe: str, age: int | None, healthy: bool, rendered: dict[str, list[Object]], tmp_path: Path
) -> None:
    [container] = find(rendered["on-base"], BUILDER)["spec"]["template"]["spec"]["containers"]
    alive = tmp_path / "alive"
    if age is not None:
        alive.touch()
        os.utime(alive, (time.time() - age,) * 2)
    assert container["args"][-2:] == ["--alive", "/tmp/alive"]
    python, *arguments = (part.replace("/tmp/alive", str(alive)) for part in container[probe]["exec"]["command"])
    assert python == "python"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
    assert (done.returncode == 0) == healthy


def test_the_command_line_takes_what_containers_are_given(rendered: dict[str, list[Object]]) -> None:
    containers = [found for _, template in templates(rendered[FULL]) for found in template["spec"]["containers"]]
    given = [container["args"] for container in containers if "command" not in container]
    assert {arguments[0] for arguments in given} == {
        "index-builder",
        "serve",
        "submit",
    }  # of the program that the image starts
    for command, *arguments in given:
        taken = {option for parameter in main.commands[command].params for option in parameter.opts}
        assert {one for one in arguments if one.startswith("--")} <= taken


def test_a_train_job_runs_the_same_pod_as_the_manifests(rendered: dict[str, list[Object]]) -> None:
    runtime, job = yaml.safe_load_all((K8S / "trainjob.yaml").read_text(encoding="utf-8"))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = node["template"]["spec"]["template"]
    assert violations(template["spec"], "restricted") == set()
    [container] = template["spec"]["containers"]
    [[_, builder]] = [one for one in templates(rendered[FULL]) if "index-builder" in str(one[1]["metadata"])]
    assert template["spec"]["securityContext"] == builder["spec"]["securityContext"]
    assert container["securityContext"] == builder["spec"]["containers"][0]["securityContext"]
    assert container["volumeMounts"] == builder["spec"]["containers"][0]["volumeMounts"]
    assert [one.get("persistentVolumeClaim") for one in template["spec"]["volumes"]] == [
        one.get("persistentVolumeClaim") for one in builder["spec"]["volumes"]
    ]
    command, *arguments = container["args"]
    with pytest.raises(SystemExit):  # parsed, and then it finds no params
        main.commands[command].main(arguments)


def test_an_inference_service_runs_the_same_pod_as_the_deployment(rendered: dict[str, list[Object]]) -> None:
    for case in (FULL, "on-local-s-k"):
        pod = find(rendered[case], "Deployment/realmops-serve")["spec"]["template"]["spec"]
        predictor = find(rendered[case], "InferenceService/realmops")["spec"]["predictor"]
        text = yaml.safe_dump({key: predictor[key] for key in pod})
        same = text.replace("kserve-container", "serve").replace("realmops-kserve", "realmops-serve")
        assert yaml.safe_load(same.replace("name: kserve", "name: serve")) == pod


def test_pods_that_answer_go_where_the_builders_go(rendered: dict[str, list[Object]]) -> None:
    """To the node of a claim for one node; else anywhere."""
    for case, near in (("on-local-s-k", True), (FULL, False)):
        pods = [find(rendered[case], which)["spec"]["template"]["spec"] for which in (BUILDER, SERVE)]
        pods.append(find(rendered[case], PREDICTOR)["spec"]["predictor"])
        assert {"podAffinity" in pod.get("affinity", {}) for pod in pods} == {near}


def test_a_server_needs_a_champion_so_no_overlay_has_one() -> None:
    """A sync waits for Deployments before it submits the training that makes the first champion."""
    for overlay in STARTS[1:]:
        names = {manifests.name(one) for one in render(K8S / overlay)}
        assert not {SERVE, PREDICTOR} & names


def test_a_run_may_be_served_in_the_place_of_a_champion(rendered: dict[str, list[Object]]) -> None:
    objects = copy.deepcopy(rendered[FULL])
    text = (K8S / "components" / "serve" / "serve.yaml").read_text(encoding="utf-8")
    [words] = re.findall(r"# in the place of a champion, a run of the claim: (.+)", text)
    [container] = find(objects, SERVE)["spec"]["template"]["spec"]["containers"]
    container["args"] = yaml.safe_load(words)
    assert faults(objects) == []


def in_production(folder: Path, trainer: dict[str, Any] | None = None) -> list[Object]:
    """The TrainJob beside all that Argo CD applies to the namespace, with another trainer if there is one."""
    spec = read("gitops/argo-cd.yaml")["spec"]
    objects = read_all(K8S / "trainjob.yaml")
    for one in objects:
        one["metadata"]["namespace"] = spec["destination"]["namespace"]
    if trainer:
        objects[1]["spec"]["trainer"].update(trainer)
    return [*as_applied(folder, spec["source"]["path"], spec["source"]["kustomize"]), *objects]


def test_all_nodes_of_a_train_job_fit_into_the_namespace_beside_everything_else(tmp_path: Path) -> None:
    assert faults(in_production(tmp_path)) == []


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"numNodes": 3}, "requests.nvidia.com/gpu is 12"),
        ({"resourcesPerNode": {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "64Gi"}}},
         "requests.memory is 128Gi"),
    ],
)  # fmt: skip
def test_a_train_job_that_does_not_fit_is_seen(trainer: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert any(message in fault for fault in faults(in_production(tmp_path, trainer)))


def test_trainer_takes_a_field_of_its_older_versions_no_more() -> None:
    runtime, _ = read_all(K8S / "trainjob.yaml")
    runtime["spec"]["mlPolicy"]["torch"] = {"numProcPerNode": "auto"}
    [fault] = faults([runtime])
    assert "numProcPerNode" in fault


def test_containers_have_the_variables_of_their_arguments(rendered: dict[str, list[Object]]) -> None:
    found = {}
    for where, _, container in manifests.each_container(rendered[FULL]):
        given = re.findall(r"\$\((\w+)\)", " ".join(container.get("args", [])))
        assert {*given} <= {one["name"] for one in container["env"]}, where
        found[where] = given
    assert found["Job/realmops-retrain: container submit"] == ["POD_NAMESPACE", "IMAGE"]


def test_nothing_with_a_network_policy_gets_a_proxy_of_istios(rendered: dict[str, list[Object]]) -> None:
    for one, template in templates(rendered[FULL]):
        assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false", manifests.name(one)


@pytest.mark.parametrize("overlay", STARTS[1:])
@pytest.mark.parametrize(
    ("image", "wanted"),
    [
        ({}, None),
        ({"newName": "host:5000/team/realmops", "newTag": "f2c1a07"}, "host:5000/team/realmops:f2c1a07"),
        ({"newName": "host/realmops", "digest": f"sha256:{'0' * 64}"}, f"host/realmops@sha256:{'0' * 64}"),
    ],
)
def test_the_job_submits_the_image_that_it_runs(
    overlay: str, image: dict[str, str], wanted: str | None, tmp_path: Path
) -> None:
    images = [{"name": "realmops", **image}] if image else None
    component = {"components": ["../../components/retrain-on-sync"]}
    objects = as_applied(tmp_path, f"k8s/{overlay}", component, images)
    [container] = find(objects, "Job/realmops-retrain")["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["IMAGE"] == container["image"] == (wanted or container["image"])
    assert "set-by-overlay" not in container["image"]
    assert variables["KF_PIPELINES_ENDPOINT"] == "http://ml-pipeline.kubeflow:8888"
    assert variables["HOME"] == "/tmp"


# GitOps


def as_applied(
    folder: Path, source: str, extra: dict[str, list[Any]], images: list[dict[str, str]] | None = None
) -> list[Object]:
    """An overlay with components and patches added, as Argo CD and Flux do it; with other images, if there are some."""
    shutil.copytree(K8S, folder / "k8s")
    file = folder / source / "kustomization.yaml"
    own = yaml.safe_load(file.read_text(encoding="utf-8"))
    for key, added in extra.items():
        own[key] = [*own.get(key, []), *added]
    own["images"] = images or own["images"]
    file.write_text(yaml.safe_dump(own), encoding="utf-8")
    return render(folder / source)


def test_argo_cd_retrains_after_each_sync_and_leaves_the_builders_number_alone(tmp_path: Path) -> None:
    spec = read("gitops/argo-cd.yaml")["spec"]
    objects = as_applied(tmp_path, spec["source"]["path"], spec["source"]["kustomize"])
    assert faults(objects) == []
    assert faults([read("gitops/argo-cd.yaml")]) == []
    job = find(objects, "Job/realmops-retrain")
    assert job["metadata"]["annotations"]["argocd.argoproj.io/hook"] == "PostSync"
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][:2] == ["submit", "--once"]
    [ignored] = spec["ignoreDifferences"]
    assert f"{ignored['kind']}/{ignored['name']}" == BUILDER
    assert ignored["jsonPointers"] == ["/spec/replicas"]
    assert "RespectIgnoreDifferences=true" in spec["syncPolicy"]["syncOptions"]


def test_flux_runs_a_changed_job_and_leaves_the_builders_number_alone(tmp_path: Path) -> None:
    source, sync = yaml.safe_load_all((K8S / "gitops" / "flux.yaml").read_text(encoding="utf-8"))
    spec = sync["spec"]
    assert spec["sourceRef"] == {"kind": source["kind"], "name": source["metadata"]["name"]}
    objects = as_applied(tmp_path, spec["path"], {key: spec[key] for key in ("components", "patches")})
    assert faults(objects) == []
    assert faults([source, sync]) == []
    job = find(objects, "Job/realmops-retrain")
    assert job["metadata"]["annotations"]["kustomize.toolkit.fluxcd.io/force"] == "enabled"
    assert tried_for(job) > 4 * 3600, "Flux leaves a Job that failed as it is"
    assert "ttlSecondsAfterFinished" not in job["spec"]
    assert "replicas" not in find(objects, BUILDER)["spec"]


def tried_for(job: Object) -> float:
    """Seconds from a Job's first try to its last: Kubernetes waits 10 s, twice as long each time, up to 6 minutes."""
    waits = sum(min(10 * 2**n, 360) for n in range(job["spec"]["backoffLimit"]))
    return min(waits, job["spec"]["activeDeadlineSeconds"])


def test_a_submission_is_tried_again_while_the_server_is_away_and_not_for_a_mistake(tmp_path: Path) -> None:
    """`realmops submit` ends with 1 and with 2 then; a pod that its node loses counts as neither."""
    spec = read("gitops/argo-cd.yaml")["spec"]
    job = find(as_applied(tmp_path, spec["source"]["path"], spec["source"]["kustomize"]), "Job/realmops-retrain")
    assert 20 * 60 < tried_for(job) < job["spec"]["activeDeadlineSeconds"]
    ignored, mistake = job["spec"]["podFailurePolicy"]["rules"]
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    [container] = job["spec"]["template"]["spec"]["containers"]
    codes = {"containerName": container["name"], "operator": "In", "values": [2]}
    assert mistake == {"action": "FailJob", "onExitCodes": codes}
    assert spec["syncPolicy"]["retry"]["limit"] > 0, "and then Argo CD syncs again"


@pytest.mark.parametrize("case", ["on-base-ros", "on-local-ros", "on-standalone-ros", FULL])
def test_a_sync_mounts_the_claim_before_it_waits_for_it(case: str, rendered: dict[str, list[Object]]) -> None:
    """The builders' Deployment has no pod then. A pod of the same phase does, on the node where the claim is in use."""
    job = find(rendered[case], "Job/realmops-mount")
    assert job["metadata"]["annotations"]["argocd.argoproj.io/hook"] == "Sync"
    spec, builder = job["spec"]["template"]["spec"], find(rendered["on-local-ros"], BUILDER)["spec"]["template"]["spec"]
    assert [one["persistentVolumeClaim"] for one in spec["volumes"] if "persistentVolumeClaim" in one] == [
        {"claimName": "realmops-data"}
    ]
    assert spec["affinity"] == builder["affinity"]
    without = [one for one in rendered[case] if one is not job]
    assert any("PersistentVolumeClaim/realmops-data: no pod of the sync" in fault for fault in faults(without))


@pytest.mark.parametrize("writable", [True, False])
def test_the_mount_ends_at_once_and_says_if_nobody_can_write(
    writable: bool, rendered: dict[str, list[Object]], tmp_path: Path
) -> None:
    [container] = find(rendered[FULL], "Job/realmops-mount")["spec"]["template"]["spec"]["containers"]
    python, *words = [*container["command"], *container["args"]]
    assert python == "python"
    words = [word.replace("/realmops", str(tmp_path if writable else tmp_path / "none")) for word in words]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "not writable" in done.stderr) == ((0, False) if writable else (1, True))


# What was planted

SERVE, SCALER = "Deployment/realmops-serve", "HorizontalPodAutoscaler/realmops-serve"
BUDGET, PREDICTOR = "PodDisruptionBudget/realmops-serve", "InferenceService/realmops"
RETRAIN, MOUNT = "Job/realmops-retrain", "Job/realmops-mount"
GIVES, GIVEN = "PodDefault/access-ml-pipeline", "spec volumes 0 projected sources 0 serviceAccountToken"
POD = "spec template spec"
FIRST = f"{POD} containers 0"
TOKEN = f"{POD} volumes 0 projected sources 0 serviceAccountToken"
NEAR = f"{POD} affinity podAffinity requiredDuringSchedulingIgnoredDuringExecution 0"
PLANTED = [
    ("unique_objects", "Service/mlflow", "metadata name", "mlflow", None),
    ("one_namespace_that_is_restricted", "Namespace", "metadata labels pod-security.kubernetes.io/enforce", "baseline",
     "enforces the pod security baseline"),
    ("one_namespace_that_is_restricted", "Service/mlflow", "metadata namespace", "default", "namespace default"),
    ("pods_are_restricted", "Deployment/mlflow", f"{POD} volumes 0", {"name": "tmp", "hostPath": {"path": "/tmp"}},
     "restricted volume types"),
    ("names_are_dns", "ConfigMap/realmops-tracking", "metadata name", "Tracking", "none of DNS-1123"),
    ("names_are_dns", "Deployment/mlflow", f"{FIRST} name", "ml.flow", "no label of DNS-1123"),
    ("selectors_match", "Deployment/mlflow", "spec template metadata labels", {"app": "mlflow"}, "does not match"),
    ("selectors_match", "Service/mlflow", "spec selector", {"app.kubernetes.io/name": "mlflwo"}, "no pod has"),
    ("selectors_match", "NetworkPolicy/retrain", "spec podSelector matchLabels", {"app": "retrain"}, "no pod has"),
    ("selectors_match", "PodMonitor/mlflow", "spec selector matchLabels", {"app": "mlflow"}, "no pod has"),
    ("restart_policies", "Job/realmops-retrain", f"{POD} restartPolicy", GONE, "restartPolicy Always"),
    ("quantities", BUILDER, f"{FIRST} resources requests memory", "2GB", "'2GB' is no quantity"),
    ("quantities", BUILDER, f"{FIRST} resources limits memory", "1Gi", "limit of memory is below"),
    ("quantities", BUILDER, f"{FIRST} resources", GONE, "wanted requests"),
    ("quantities", "PersistentVolumeClaim/realmops-data", "spec resources requests storage", "lots", "no quantity"),
    ("mounts_have_volumes", BUILDER, f"{POD} volumes 0 name", "dat", "no volume data"),
    ("mounts_have_volumes", BUILDER, f"{FIRST} volumeMounts 0 mountPath", "/tmp", "2 volumes mounted at /tmp"),
    ("access_modes", "PersistentVolumeClaim/realmops-data", "spec accessModes", ["ReadWriteAll"], "ReadWriteAll"),
    ("access_modes", "PersistentVolumeClaim/realmops-data", "spec accessModes", GONE, "None"),
    ("probes_and_ports", BUILDER, f"{FIRST} livenessProbe exec", GONE, "livenessProbe has 0 handlers"),
    ("probes_and_ports", BUILDER, f"{FIRST} livenessProbe tcpSocket", {"port": 1}, "livenessProbe has 2 handlers"),
    ("probes_and_ports", BUILDER, f"{FIRST} startupProbe successThreshold", 2, "successThreshold"),
    ("probes_and_ports", "Deployment/mlflow", f"{FIRST} readinessProbe httpGet port", "web", "at the port web"),
    ("probes_and_ports", "Service/mlflow", "spec ports 0 targetPort", "web", "no port web"),
    ("references", BUILDER, f"{POD} serviceAccountName", "builder", "no serviceaccount builder"),
    ("references", BUILDER, f"{POD} volumes 0 persistentVolumeClaim claimName", "data", "persistentvolumeclaim data"),
    ("references", BUILDER, f"{FIRST} envFrom", [{"configMapRef": {"name": "settings"}}], "no configmap settings"),
    ("references", BUILDER, f"{FIRST} env 0", {"name": "URI", "valueFrom": {"configMapKeyRef": {
        "name": "realmops-tracking", "key": "uri"}}}, "the configmap realmops-tracking has no key uri"),
    ("references", BUILDER, f"{POD} volumes 1", {"name": "tmp", "secret": {"secretName": "s"}}, "no secret s"),
    ("references", "Deployment/mlflow", "metadata annotations external.realmops/secret-mlflow-postgres", GONE,
     "no secret mlflow-postgres"),
    ("references", "RoleBinding/realmops-scaler", "roleRef name", "scaler", "no role scaler"),
    ("references", "RoleBinding/realmops-scaler", "subjects 0 namespace", GONE, "has no namespace"),
    ("references", "Role/realmops-scaler", "rules 0 resourceNames", ["index-builder"], "no deployment index-builder"),
    ("images_are_fixed", BUILDER, f"{FIRST} image", "registry.example.org:5000/realmops", "has no tag"),
    ("images_are_fixed", BUILDER, f"{FIRST} image", "realmops:latest", "has no tag"),
    ("root_is_read_only", BUILDER, f"{FIRST} securityContext readOnlyRootFilesystem", GONE, "readOnlyRootFilesystem"),
    ("root_is_read_only", BUILDER, f"{FIRST} volumeMounts 1 mountPath", "/var/tmp", "no emptyDir at /tmp"),
    ("root_is_read_only", BUILDER, f"{FIRST} env 0 value", "/home/me", "HOME is /home/me"),
    ("root_is_read_only", BUILDER, f"{POD} securityContext runAsUser", GONE, "no runAsUser"),
    ("root_is_read_only", BUILDER, f"{POD} securityContext fsGroup", GONE, "no fsGroup"),
    ("environments", BUILDER, f"{FIRST} env 1 name", "HOME", "HOME is set 2 times"),
    ("environments", BUILDER, f"{FIRST} env 0 valueFrom", {"fieldRef": {"fieldPath": "metadata.name"}}, "has both"),
    ("environments", "Deployment/mlflow", f"{FIRST} env 7 valueFrom fieldRef fieldPath", "metadata.namspace",
     "no field metadata.namspace"),
    ("environments", RETRAIN, f"{FIRST} args 3", "$(NAMESPACE)", "$(NAMESPACE) is not set"),
    ("files_lie_in_volumes", BUILDER, f"{FIRST} args 2", "/data/builder/assignment.json", "lies in no volume"),
    ("files_lie_in_volumes", RETRAIN, f"{FIRST} env 5 value", "/var/run/secrets/kubeflow/pipelines/tokens", "none of"),
    ("files_lie_in_volumes", RETRAIN, f"{TOKEN} audience", "ml-pipeline",
     "a token for ml-pipeline"),
    ("strategies", BUILDER, "spec strategy", GONE, "strategy is None"),
    ("strategies", SERVE, "spec strategy", {"type": "Recreate"}, "wanted RollingUpdate"),
    ("strategies", SERVE, "spec strategy rollingUpdate maxUnavailable", 1, "maxUnavailable 0"),
    ("strategies", SERVE, "spec strategy rollingUpdate maxSurge", 0, "both 0"),
    ("strategies", SERVE, f"{FIRST} lifecycle", GONE, "preStop sleeps 0 s"),
    ("strategies", SERVE, f"{FIRST} readinessProbe", GONE, "no readinessProbe"),
    ("strategies", SERVE, f"{POD} terminationGracePeriodSeconds", 40, "the server's own end take 45"),
    ("strategies", SERVE, f"{FIRST} volumeMounts 0 readOnly", GONE, "wanted Recreate"),
    ("scaled", SCALER, "spec scaleTargetRef name", "serve", "no Deployment serve"),
    ("scaled", SCALER, "spec scaleTargetRef apiVersion", "v1", "in v1"),
    ("scaled", SCALER, "spec minReplicas", 9, "above maxReplicas"),
    ("scaled", SERVE, "spec replicas", 2, "each apply"),
    ("scaled", BUDGET, "spec minAvailable", 2, "2 of 2 pods"),
    ("scaled", BUDGET, "spec minAvailable", GONE, "None of 2 pods"),
    ("scaled", SCALER, "spec minReplicas", 1, "1 of 1 pods"),
    ("selectors_match", BUDGET, "spec selector matchLabels", {"app": "serve"}, "no pod has"),
    ("selectors_match", BUDGET, "spec selector", {}, "every pod"),
    ("selectors_match", "PodMonitor/realmops-serve", "spec selector matchLabels", {"app": "serve"}, "no pod has"),
    ("one_node_for_one_claim", "PersistentVolumeClaim/realmops-data", "spec accessModes", ["ReadWriteOnce"],
     "Deployment/realmops-serve: mounts"),
    ("network_policies", "NetworkPolicy/realmops-serve", "spec egress", [], "lets it call http://mlflow"),
    ("network_policies", "NetworkPolicy/realmops-serve", "spec egress 0 ports 0 port", 80, "lets it call http://mlflow"),
    ("probes_and_ports", SERVE, f"{FIRST} readinessProbe httpGet path", "/ready", "asks for /ready"),
    ("quota_has_room", SCALER, "spec maxReplicas", 200, "requests.memory is 128Gi"),
    ("affinities", MOUNT, f"{NEAR} labelSelector matchLabels", {"realmops/claim": "data"}, "finds no place"),
    ("affinities", MOUNT, f"{NEAR} topologyKey", "kubernetes.io/host", "no node has"),
    ("claims_are_mounted", MOUNT, "metadata annotations argocd.argoproj.io/hook", "PostSync", "waits for it for ever"),
    ("labels_are_words", "Deployment/mlflow", "spec template metadata labels part", "of realmops", "no value of"),
    ("annotations_are_known", RETRAIN, "metadata annotations argocd.argoproj.io/hook", "AfterSync", "AfterSync"),
    ("failure_policies", RETRAIN, "spec podFailurePolicy rules 1 onExitCodes containerName", "main", "no container"),
    ("failure_policies", RETRAIN, f"{POD} restartPolicy", "OnFailure", "wants restartPolicy Never"),
    ("numbers_are_large_enough", RETRAIN, f"{TOKEN} expirationSeconds", 60,
     "allowed from 600 on"),
    ("network_policies", RETRAIN, f"{FIRST} env 4 value", "http://ml-pipeline.kubeflow:8889", "no network policy"),
    ("network_policies", "ConfigMap/realmops-tracking", "data MLFLOW_TRACKING_URI", "http://mlflow:80", "no service"),
    ("proxies_are_off", MOUNT, "spec template metadata labels sidecar.istio.io/inject", GONE, "not the label sidecar"),
    ("syncs", "Application/realmops", "spec source path", "k8s/overlays/prod", "no kustomization"),
    ("affinities", MOUNT, f"{NEAR} labelSelector matchLabels", {"app.kubernetes.io/name": "mount"},
     "no pod of the pipelines"),
    ("pod_defaults", GIVES, "spec selector matchLabels", {"access-ml-pipelines": "true"}, "no pod of the pipelines"),
    ("pod_defaults", GIVES, f"{GIVEN} audience", "kubeflow", "a token for"),
    ("pod_defaults", GIVES, f"{GIVEN} file", "token", "serviceAccountToken"),
    ("pod_defaults", GIVES, "spec env 0 value", "/var/run/secrets/kubeflow/pipelines/tokens", "none of"),
    ("pod_defaults", GIVES, "spec volumeMounts 0 name", "token", "no volume token"),
    ("quota_has_room", "ResourceQuota/realmops", "spec hard requests.memory", "8Gi", "requests.memory is 8Gi"),
    ("quota_has_room", "ResourceQuota/realmops", "spec hard requests.nvidia.com/gpu", "0", "gpu is 0"),
]  # fmt: skip


OF_OTHERS = [one for name in ("argo-cd", "flux") for one in read_all(K8S / "gitops" / f"{name}.yaml")]


def plant(one: Object, path: str, value: Any) -> None:
    *way, last = (int(step) if step.isdigit() else step for step in path.split())
    for step in way:
        one = one[step]
    if value is GONE:
        del one[last]
    else:
        one[last] = value


@pytest.mark.parametrize(("rule", "which", "path", "value", "message"), PLANTED)
def test_a_rule_finds_what_was_planted(
    rule: str, which: str, path: str, value: Any, message: str | None, rendered: dict[str, list[Object]]
) -> None:
    objects = copy.deepcopy([*rendered[FULL], *(OF_OTHERS if rule == "syncs" else ())])
    if message is None:
        objects.append(copy.deepcopy(find(objects, which)))
        message = "2 times"
    else:
        plant(find(objects, f"{which}/{FULL}" if which == "Namespace" else which), path, value)
    found = list(getattr(manifest_rules, rule)([*manifest_rules.as_made(objects)]))
    assert any(message in fault for fault in found), found
    assert {*found} <= {*faults(objects)}


def test_every_rule_has_something_planted() -> None:
    assert {rule for rule, *_ in PLANTED} == {rule.__name__ for rule in manifest_rules.RULES}


# Mistakes of people who change a file: each is in something that is applied, and nothing else is wrong.
APPLICATION, GIT, SYNC = "Application/realmops", "GitRepository/realmops", "Kustomization/realmops"
RUNTIME, TRAINING = "TrainingRuntime/realmops", "TrainJob/realmops-pretrain"
NODE = "spec template spec replicatedJobs 0 template spec template spec containers 0"
MISTAKES = [
    # unknown fields, values and versions in resources of others
    ("PodMonitor/mlflow", "spec podMetricsEndpoints 0 intervall", "30s"),
    ("PodMonitor/mlflow", "spec podMetricsEndpoints 0 interval", "30 seconds"),
    ("PodMonitor/mlflow", "spec selectors", {}),
    (APPLICATION, "spec source kustomise", {}),
    (APPLICATION, "spec syncPolicy automated selfheal", True),
    (APPLICATION, "spec syncPolicy retry backoff maxDuration", "ten minutes"),
    (APPLICATION, "spec syncPolicy syncOptions 0", "RespectIgnoredDifferences=true"),
    (APPLICATION, "spec destination namespace", "default"),
    (APPLICATION, "spec ignoreDifferences 0 name", "index-builder"),
    (APPLICATION, "spec source kustomize components 0", "../components/retrain-on-sync"),
    (GIT, "spec branch", "main"),
    (GIT, "apiVersion", "source.toolkit.fluxcd.io/v1beta1"),
    (SYNC, "spec waits", True),
    (SYNC, "spec interval", "10 min"),
    (SYNC, "spec prune", GONE),
    (SYNC, "spec sourceRef name", "realm"),
    (RUNTIME, "spec mlPolicy torch", {"numProcPerNode": "auto"}),
    (RUNTIME, f"{NODE} imagePulPolicy", "Always"),
    (TRAINING, "spec trainer nodes", 2),
    (TRAINING, "spec runtimeRef name", "realm"),
    (TRAINING, "spec trainer numNodes", 4),
    # references within what is applied
    (RETRAIN, "spec podFailurePolicy rules 1 onExitCodes containerName", "retrain"),
    ("Deployment/mlflow", f"{FIRST} env 8 valueFrom fieldRef fieldPath", "status.podIp"),
    ("PodMonitor/mlflow", "spec podMetricsEndpoints 0 port", "metrics"),
    ("PodMonitor/mlflow", "spec podMetricsEndpoints 0 path", "/metric"),
    ("NetworkPolicy/mlflow", "spec ingress 0 ports 0 port", "web"),
    ("NetworkPolicy/mlflow-monitoring", "spec ingress 0 ports 0 port", 8080),
    ("NetworkPolicy/retrain", "spec egress 0 ports 0 port", 8080),
    ("NetworkPolicy/retrain", "spec policyTypes", ["Ingress"]),
    ("Deployment/mlflow", "metadata annotations external.realmops/secret-mlflow-postgres", "url"),
    ("Deployment/mlflow", f"{FIRST} livenessProbe httpGet path", "/healthz"),
    ("Service/mlflow", "spec ports 0 targetPort", 8080),
    (GIVES, "spec selector matchlabels", {"access-ml-pipeline": "true"}),
    (GIVES, "apiVersion", "kubeflow.org/v1"),
    # and what else can be mistyped
    (RETRAIN, f"{FIRST} volumeMounts 0 mountPath", "/var/run/secrets/kubeflow"),
    (RETRAIN, f"{FIRST} env 4 value", "http://ml-pipeline.kubeflw:8888"),
    (RETRAIN, "metadata annotations argocd.argoproj.io/hook-delete-policy", "BeforeHookCreated"),
    (RETRAIN, "metadata annotations kustomize.toolkit.fluxcd.io/force", "true"),
    ("RoleBinding/realmops-submit", "roleRef name", "kubeflow-pipeline-edit"),
    ("RoleBinding/realmops-scaler", "subjects 1 name", "default-edit"),
    ("Role/realmops-scaler", "rules 0 verbs", ["patches"]),
    ("Role/realmops-scaler", "rules 0 resources", ["deployment/scale"]),
    ("ResourceQuota/realmops", "spec hard request.cpu", "32"),
    (BUILDER, f"{FIRST} resources limits nvidia/gpu", "1"),
    (BUILDER, f"{FIRST} startupProbe periodSeconds", 0),
    ("Deployment/mlflow", f"{FIRST} ports 0 name", "http-of-the-server"),
    ("Deployment/mlflow", f"{FIRST} env 2 name", "HO ME"),
    ("Service/mlflow", "metadata name", "5mlflow"),
    # what others make of an InferenceService has the same faults as what stands here
    (PREDICTOR, "spec predictor minReplica", 2),
    (PREDICTOR, "spec predictor scaleMetric", "cpus"),
    (PREDICTOR, "spec predictor minReplicas", 1),
    (PREDICTOR, "spec predictor deploymentStrategy rollingUpdate maxUnavailable", "25%"),
    (PREDICTOR, "spec predictor labels app.kubernetes.io/name", "serving"),
    (PREDICTOR, "spec predictor terminationGracePeriodSeconds", 30),
    (PREDICTOR, "spec predictor containers 0 lifecycle preStop sleep seconds", 1),
    (PREDICTOR, "spec predictor containers 0 readinesProbe", {}),
    (PREDICTOR, "spec predictor volumes 0 persistentVolumeClaim claimName", "data"),
    (PREDICTOR, "apiVersion", "serving.kserve.io/v1"),
    (SCALER, "spec metrics 0 resource target averageUtilisation", 80),
    ("Service/realmops-serve", "spec ports 0 targetPort", "web"),
    ("NetworkPolicy/realmops-serve-monitoring", "spec ingress 0 ports 0 port", "metrics"),
    (SERVE, f"{FIRST} env 3 valueFrom secretKeyRef optional", GONE),
]


def everything(rendered: dict[str, list[Object]]) -> list[Object]:
    """All that can be applied: with the TrainJob in the namespace of the rest, and what GitOps is told."""
    objects = copy.deepcopy([*rendered[FULL], *read_all(K8S / "trainjob.yaml"), *OF_OTHERS])
    for one in objects:
        if one["kind"].startswith("Train"):
            one["metadata"]["namespace"] = FULL
    return objects


def test_there_is_nothing_wrong_before_something_is_planted(rendered: dict[str, list[Object]]) -> None:
    assert faults(everything(rendered)) == []


@pytest.mark.parametrize(("which", "path", "value"), MISTAKES)
def test_a_mistake_is_found(which: str, path: str, value: Any, rendered: dict[str, list[Object]]) -> None:
    objects = everything(rendered)
    plant(find(objects, which), path, value)
    assert faults(objects)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"{FIRST} imagePulPolicy", "Always", "imagePulPolicy"),
        ("spec replicas", "one", "is not of type"),
        ("apiVersion", "apps/v1beta1", "has no Deployment in apps/v1beta1"),
        ("spec selector", GONE, "'selector' is a required property"),
    ],
)
def test_schemas_find_what_was_planted(path: str, value: Any, message: str, rendered: dict[str, list[Object]]) -> None:
    one = copy.deepcopy(find(rendered[FULL], BUILDER))
    plant(one, path, value)
    [fault] = manifest_rules.schema_faults(one, NEWEST)
    assert message in fault


@pytest.mark.parametrize(
    ("text", "number"),
    [("500m", "0.5"), ("2", "2"), (1.5, "1.5"), ("2Gi", "2147483648"), ("3e2", "300"), ("1k", "1000")],
)
def test_quantities_are_numbers(text: object, number: str) -> None:
    assert quantity(text) == manifests.Decimal(number)


@pytest.mark.parametrize("text", ["", "2GB", "lots", "1 Gi", "5mi", "-"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        quantity(text)


# The image


def test_both_stages_of_the_image_start_from_the_base_that_is_given() -> None:
    found = instructions()
    assert found[0] == ("ARG", "BASE=python:3.11-slim")
    assert [rest for word, rest in found if word == "FROM"] == ["${BASE} AS build", "${BASE}"]


def test_the_image_runs_as_the_user_of_the_manifests(rendered: dict[str, list[Object]]) -> None:
    contexts = [template["spec"]["securityContext"] for _, template in templates(rendered[FULL])]
    [user] = [rest for word, rest in instructions() if word == "USER"]
    assert {f"{context['runAsUser']}:{context['runAsGroup']}" for context in contexts} == {user}


def test_the_image_copies_what_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert ignored[0] == "*"
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, source


def test_the_image_installs_extras_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [run] = [rest for word, rest in instructions() if word == "RUN"]
    [extras] = re.findall(r"\"\.\[([^]]+)\]\"", run)
    chosen = re.findall(r"(\w+)\) search=(\w+)", run)
    assert chosen == [("cpu", "faiss"), ("gpu", "gpu")]
    assert {*extras.replace("$search", "faiss,gpu").split(",")} <= {*project["optional-dependencies"]}


def test_the_image_carries_its_commit() -> None:
    last = instructions()[[word for word, _ in instructions()].index("USER") :]
    assert ("ENTRYPOINT", '["realmops"]') in last
    [labels] = [rest for word, rest in instructions() if word == "LABEL"]
    assert 'org.opencontainers.image.revision="${COMMIT}"' in labels
    [variables] = [rest for word, rest in instructions() if word == "ENV"]
    assert "REALMOPS_COMMIT=${COMMIT}" in variables.split()
