"""Kubernetes manifests: what overlays and components render to, and rules that find what was planted."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import manifests
import pytest
import yaml
from manifest_rules import as_made, faults
from manifests import (
    K8S,
    NEWEST,
    OLDEST,
    PROBES,
    Object,
    find,
    instructions,
    read_all,
    render,
    render_all,
    selects,
    templates,
)

from realmops.cli import main
from realmops.cluster import IMAGE, kfp_client
from realmops.serve.server import DRAIN_SECONDS
from realmops.starter.git_origin import GitOrigin
from realmops.starter.project_files import project_text

ROOT = K8S.parent
COMPONENTS = sorted(folder.name for folder in (K8S / "components").iterdir())
STARTS = ("base", "overlays/local", "overlays/standalone", "overlays/production")
ANSWERING = ("serve", "kserve")  # components that only single-node changes: with few sets of the others
FULL = "on-production-s-k-c-ma-ros"  # has every kind of object
BUILDER = "Deployment/realmops-index-builder"
GONE = object()


def read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((K8S / path).read_text(encoding="utf-8"))
    return found


def subsets(names: list[str]) -> Iterator[tuple[str, ...]]:
    """None, each one, each two and all."""
    for size in sorted({0, 1, min(2, len(names)), len(names)}):
        yield from combinations(names, size)


def cases() -> dict[str, dict[str, Any]]:
    """Base and each overlay with sets of the components that it does not have; by namespaces made of initials.

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
        few = (alone[0], ("clean", "mlflow-auth", "retrain-on-sync"), alone[-1])
        for chosen in [*alone, *((*more, *some) for some in few for more in [*subsets(ANSWERING)][1:])]:
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


@pytest.mark.parametrize("case", CASES)
def test_every_overlay_and_component_renders_without_a_fault(case: str, rendered: dict[str, list[Object]]) -> None:
    assert faults(rendered[case]) == []


def test_an_overlay_and_a_component_are_a_remote_base_at_a_tag(tmp_path: Path) -> None:
    """The kustomization of the README, with a repository of this machine."""
    repository = tmp_path / "repository"
    shutil.copytree(K8S, repository / "k8s")
    who = ["-c", "user.name=test", "-c", "user.email=test@test.invalid"]
    for words in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "--message", "k8s"], ["tag", "v9"]):
        subprocess.run(["git", *words], cwd=repository, check=True)
    (repository / "k8s/base/kustomization.yaml").write_text("resources: [lost-after-the-tag.yaml]\n")
    [text] = re.findall(r"^```yaml\n(resources:.*?)^```", (K8S / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    texts = {
        "remote": text.replace("https://github.com/OWNER/REPO", f"file://{repository}").replace("TAG", "v9"),
        "local": text.replace("https://github.com/OWNER/REPO//k8s", "../k8s").replace("?ref=TAG", ""),
    }
    shutil.copytree(K8S, tmp_path / "k8s")
    for folder, own in texts.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kustomization.yaml").write_text(own)
    remote, local = (render(tmp_path / folder) for folder in texts)
    assert find(remote, "Deployment/realmops-index-builder")
    assert find(remote, "Deployment/realmops-serve")
    assert remote == local


def mlflow_image() -> str:
    """MLflow's own, of the version that the clients have, with drivers and sign-in."""
    [version] = re.findall(r"^mlflow==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return f"ghcr.io/mlflow/mlflow:v{version}-full"


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
    images = {container["image"] for _, _, container in manifests.each_container(objects)}
    claims = {one["metadata"]["name"] for one in objects if one["kind"] == "PersistentVolumeClaim"}
    if overlay == "overlays/production":  # whose MLflow keeps nothing in a claim
        assert (images, claims) == ({f"{IMAGE}-gpu", mlflow_image()}, {"realmops-data"})
    assert [(one["name"], one["namespace"]) for one in find(objects, "RoleBinding/realmops-scaler")["subjects"]] == [
        ("realmops-scaler", namespace),
        (account, namespace),
    ]


def test_profiles_have_the_token_for_the_first_task_of_a_run() -> None:
    """As the retraining Job has it; the standalone server asks for none, and has no such resource."""
    for overlay, wanted in (("local", 1), ("production", 1), ("standalone", 0)):
        found = [one for one in render(K8S / "overlays" / overlay) if one["kind"] == "PodDefault"]
        assert len(found) == wanted
        job = read_all(K8S / "components/retrain-on-sync/retrain.yaml")[2]["spec"]["template"]["spec"]
        for one in found:
            wanted_labels = one["spec"]["selector"]["matchLabels"].items()
            assert any(wanted_labels <= labels.items() for labels in labels_of_pipelines())
            [volume] = one["spec"]["volumes"]
            assert volume["projected"] == job["volumes"][0]["projected"]
            assert one["spec"]["env"][0] in job["containers"][0]["env"]
            assert one["spec"]["volumeMounts"] == [{**job["containers"][0]["volumeMounts"][0], "name": volume["name"]}]


def test_where_kubeflow_pipelines_runs_alone_its_namespace_is_left_as_it_is() -> None:
    """Neither made nor limited: KFP's own pods run there. All that a run needs is there."""
    found = {manifests.name(one) for one in render(K8S / "overlays" / "standalone")}
    assert not {"Namespace", "ResourceQuota", "LimitRange"} & {one.partition("/")[0] for one in found}
    assert found >= {
        "PersistentVolumeClaim/realmops-data", "ConfigMap/realmops-tracking", BUILDER, "Deployment/mlflow",
        "Service/mlflow", "Role/realmops-scaler",
    }  # fmt: skip


@pytest.mark.parametrize("overlay", ["local", "production"])
def test_a_namespace_for_a_profile_names_the_user_as_the_profile_does(overlay: str) -> None:
    """The profile controller takes no namespace that is there already without that annotation."""
    [profile] = read_all(K8S / "profile.yaml")
    assert faults([profile]) == []
    namespace = find(render(K8S / "overlays" / overlay), f"Namespace/{profile['metadata']['name']}")
    assert namespace["metadata"]["annotations"]["owner"] == profile["spec"]["owner"]["name"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_who_submits_may_use_kubeflow_pipelines_with_profiles(rendered: dict[str, list[Object]]) -> None:
    """By its role, and by a token; where its file is, the rules look after."""
    binding = find(rendered[FULL], "RoleBinding/realmops-submit")
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("ClusterRole", "kubeflow-pipelines-edit")
    spec = find(rendered[FULL], "Job/realmops-retrain")["spec"]["template"]["spec"]
    assert [subject["name"] for subject in binding["subjects"]] == [spec["serviceAccountName"]]
    assert kfp_client.TOKEN_FILE in [one["name"] for one in spec["containers"][0]["env"]]


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
        ("startupProbe", 0, True), ("startupProbe", None, False), ("readinessProbe", 60, True),
        ("readinessProbe", 3600, False), ("livenessProbe", 60, True), ("livenessProbe", 3600, False),
        ("livenessProbe", None, False),
    ],
)  # fmt: skip
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
    given = [found["args"] for found in containers if "realmops" in found.get("command", ["realmops"])]
    assert {arguments[0] for arguments in given} == {
        "clean",
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


def test_the_rules_see_the_job_that_kubeflow_trainer_makes() -> None:
    recorded = json.loads((Path(__file__).parents[1] / "recorded/trainer-2.3.0.json").read_text(encoding="utf-8"))
    [node] = recorded["job set"]["replicatedJobs"]
    for container in node["template"]["spec"]["template"]["spec"]["containers"]:
        assert container.pop("ports") == [{"containerPort": 29500, "protocol": "TCP"}]
        container["env"] = [one for one in container["env"] if not one["name"].startswith("PET_")]
    [job] = as_made(recorded["applied"])
    assert job["spec"] == node["template"]["spec"]


def test_a_killed_pod_of_a_train_job_counts_once_and_a_disruption_never() -> None:
    """The end of one pod ends the training of all, and a Job adds up the restarts of its pods' containers.

    With Kubernetes' limit of six restarts, the third kill ended a TrainJob of two nodes (recorded/trainer-2.3.0.json);
    the first one would end one of six. So no pod starts again within its Job: JobSet makes all anew, and counts once.
    """
    runtime, job = read_all(K8S / "trainjob.yaml")
    [made] = as_made([runtime, job])
    assert made["spec"]["backoffLimit"] == 0
    assert made["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    [disrupted] = made["spec"]["podFailurePolicy"]["rules"]
    assert disrupted == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    policy = runtime["spec"]["template"]["spec"]["failurePolicy"]
    [rule] = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    assert policy["maxRestarts"] >= 10


def test_an_inference_service_runs_the_same_pod_as_the_deployment(rendered: dict[str, list[Object]]) -> None:
    for case in (FULL, "on-local-s-k"):
        pod = find(rendered[case], "Deployment/realmops-serve")["spec"]["template"]["spec"]
        predictor = find(rendered[case], "InferenceService/realmops")["spec"]["predictor"]
        text = yaml.safe_dump({key: predictor[key] for key in pod})
        same = text.replace("kserve-container", "serve").replace("realmops-kserve", "realmops-serve")
        assert yaml.safe_load(same.replace("name: kserve", "name: serve")) == pod


def test_pods_that_answer_are_replaced_without_a_gap(rendered: dict[str, list[Object]]) -> None:
    """One answers before another goes, which stays until all callers have heard of it; two at least do."""
    serve, predictor = find(rendered[FULL], SERVE)["spec"], find(rendered[FULL], PREDICTOR)["spec"]["predictor"]
    scaler = find(rendered[FULL], SCALER)["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "realmops-serve"}
    assert "replicas" not in serve, "which each apply would take from the autoscaler"
    for strategy, pod, bounds, budget in (
        (serve["strategy"], serve["template"]["spec"], scaler, BUDGET),
        (predictor["deploymentStrategy"], predictor, predictor, "PodDisruptionBudget/realmops-kserve"),
    ):
        assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        assert 0 < find(rendered[FULL], budget)["spec"]["minAvailable"] < bounds["minReplicas"] <= bounds["maxReplicas"]
        [container] = pod["containers"]
        assert {*PROBES} <= container.keys()
        sleeps = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert sleeps >= 10, "until every proxy knows of it; a guess, as Kubernetes sets no bound"
        assert pod["terminationGracePeriodSeconds"] > sleeps + DRAIN_SECONDS
        assert all(mount.get("readOnly") for mount in container["volumeMounts"] if mount["name"] == "data")


def test_two_pods_never_write_to_one_claim_in_an_update(rendered: dict[str, list[Object]]) -> None:
    for which in (BUILDER, "Deployment/mlflow"):
        assert find(rendered["on-base"], which)["spec"]["strategy"] == {"type": "Recreate"}


def test_pods_under_a_network_policy_find_names_and_get_no_proxy_of_istios(rendered: dict[str, list[Object]]) -> None:
    """A policy counts after the name service's Service was resolved: CoreDNS is on 53, OpenShift's DNS on 5353."""
    [rule] = find(rendered[FULL], "NetworkPolicy/realmops")["spec"]["egress"]
    assert {(one["protocol"], one["port"]) for one in rule["ports"]} == {*product(("UDP", "TCP"), (53, 5353))}
    assert "to" not in rule, "NodeLocal DNSCache is an address of the node's network, which no selector lets through"
    for one, template in templates(as_made(rendered[FULL])):
        labels = template["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "realmops", manifests.name(one)
        assert labels["sidecar.istio.io/inject"] == "false", manifests.name(one)


def labels_of_pipelines() -> list[dict[str, str]]:
    """The labels that the compiled pipelines give to their pods."""
    platforms = [read_all(file)[1]["platforms"] for file in sorted((ROOT / "pipelines").glob("*.yaml"))]
    executors = [one["kubernetes"]["deploymentSpec"]["executors"] for one in platforms]
    return [pod.get("podMetadata", {}).get("labels", {}) for one in executors for pod in one.values()]


def test_pods_that_answer_go_where_the_builders_go(rendered: dict[str, list[Object]]) -> None:
    """To the node of a claim for one node, where those of the pipelines are; else anywhere."""
    for case, near in (("on-local-s-k", True), (FULL, False)):
        pods = [find(rendered[case], which)["spec"]["template"]["spec"] for which in (BUILDER, SERVE)]
        pods.append(find(rendered[case], PREDICTOR)["spec"]["predictor"])
        assert {"podAffinity" in pod.get("affinity", {}) for pod in pods} == {near}
    template = find(rendered["on-local-s-k"], BUILDER)["spec"]["template"]
    [term] = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = term["labelSelector"]["matchLabels"]
    assert selects(labels, template), "or the first one finds no place"
    assert any(labels.items() <= one.items() for one in labels_of_pipelines())


def test_a_server_needs_a_champion_so_no_overlay_has_one() -> None:
    """A sync waits for Deployments before it submits the training that makes the first champion."""
    for overlay in STARTS[1:]:
        names = {manifests.name(one) for one in render(K8S / overlay)}
        assert not {SERVE, PREDICTOR} & names


def test_a_run_may_be_served_in_the_place_of_a_champion(rendered: dict[str, list[Object]]) -> None:
    objects = copy.deepcopy(rendered[FULL])
    text = (K8S / "components" / "serve" / "serve.yaml").read_text(encoding="utf-8")
    [words] = re.findall(r"# to serve a run on the claim instead of a champion: (.+)", text)
    [container] = find(objects, SERVE)["spec"]["template"]["spec"]["containers"]
    container["args"] = yaml.safe_load(words)
    assert faults(objects) == []


def test_volumes_are_cleaned_by_one_job_at_a_time_as_the_builders_user(rendered: dict[str, list[Object]]) -> None:
    for case in (FULL, "on-base-c", "on-local-c"):
        spec = find(rendered[case], CLEAN)["spec"]
        assert (spec["concurrencyPolicy"], spec["suspend"]) == ("Forbid", False)
        pod = spec["jobTemplate"]["spec"]["template"]["spec"]
        builder = find(rendered[case], BUILDER)["spec"]["template"]["spec"]
        assert pod["securityContext"] == builder["securityContext"], "or it may not delete what they have written"
        assert pod["affinity"] == find(rendered["on-local"], BUILDER)["spec"]["template"]["spec"]["affinity"]
        assert {*pod["containers"][0]["args"]} >= {"--runs", "/realmops/runs"}
        assert pod["containers"][0]["volumeMounts"] == builder["containers"][0]["volumeMounts"]


def test_with_sign_in_every_client_of_ours_has_a_name_and_a_password(rendered: dict[str, list[Object]]) -> None:
    """Those of pipelines as well; and Prometheus, which knows the administrator."""
    wanted = {f"MLFLOW_TRACKING_{name}" for name in ("USERNAME", "PASSWORD", "TOKEN")}
    clients = 0
    for _, _, container in manifests.each_container(as_made(rendered[FULL])):
        names = {one["name"] for one in container.get("env", [])}
        clients += "MLFLOW_TRACKING_URI" in names
        assert not ("MLFLOW_TRACKING_URI" in names and wanted - names), container["name"]
    assert clients == 2, "serve and kserve"
    for pipeline in (ROOT / "pipelines").glob("*.yaml"):
        assert all(f"secretKey: {name}" in pipeline.read_text(encoding="utf-8") for name in wanted), pipeline
    [endpoint] = find(rendered[FULL], "PodMonitor/mlflow")["spec"]["podMetricsEndpoints"]
    assert {one["name"] for one in endpoint["basicAuth"].values()} == {"mlflow-auth"}
    assert "basicAuth" not in str(rendered["on-production"])


@pytest.mark.parametrize("case", ["on-base-ros", "on-local-ros", "on-standalone-ros", FULL])
def test_a_sync_mounts_the_claim_before_it_waits_for_it(case: str, rendered: dict[str, list[Object]]) -> None:
    """The builders' Deployment has no pod then. A pod of the same phase does, on the node where the claim is in use."""
    job = find(rendered[case], "Job/realmops-mount")
    annotations = job["metadata"]["annotations"]
    # Argo CD 3.5.1 takes a second try for failed at once where a hook of its first phase must be deleted before
    assert "argocd.argoproj.io/hook" not in annotations
    assert annotations["argocd.argoproj.io/sync-options"] == "Force=true,Replace=true", "a Job cannot be changed"
    spec, builder = job["spec"]["template"]["spec"], find(rendered["on-local-ros"], BUILDER)["spec"]["template"]["spec"]
    assert [one["persistentVolumeClaim"] for one in spec["volumes"] if "persistentVolumeClaim" in one] == [
        {"claimName": "realmops-data"}
    ]
    assert spec["affinity"] == builder["affinity"]
    assert spec["restartPolicy"] in ("Never", "OnFailure")


@pytest.mark.parametrize("writable", [True, False])
def test_the_mount_ends_at_once_and_says_if_nobody_can_write(
    writable: bool, rendered: dict[str, list[Object]], tmp_path: Path
) -> None:
    [container] = find(rendered[FULL], "Job/realmops-mount")["spec"]["template"]["spec"]["containers"]
    python, *words = [*container["command"], *container["args"]]
    assert python == "python"
    words = [word.replace("/realmops", str(tmp_path if writable else tmp_path / "none")) for word in words]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, "not writable" in done.stderr) == ((0, False) if writable else (1, True))


# Mistakes of people who change a file: each is in something that is applied, and nothing else is wrong.
SERVE, SCALER = "Deployment/realmops-serve", "HorizontalPodAutoscaler/realmops-serve"
BUDGET, PREDICTOR = "PodDisruptionBudget/realmops-serve", "InferenceService/realmops"
RETRAIN, MOUNT, MLFLOW = "Job/realmops-retrain", "Job/realmops-mount", "Deployment/mlflow"
CLEAN = "CronJob/realmops-clean"
GIVES = "PodDefault/access-ml-pipeline"
DATA, QUOTA = "PersistentVolumeClaim/realmops-data", "ResourceQuota/realmops"
APPLICATION, GIT, SYNC = "Application/realmops", "GitRepository/realmops", "Kustomization/realmops"
RUNTIME, TRAINING = "TrainingRuntime/realmops", "TrainJob/realmops-pretrain"
POD = "spec template spec"
FIRST = f"{POD} containers 0"
TOKEN = f"{POD} volumes 0 projected sources 0 serviceAccountToken"
NEAR = f"{POD} affinity podAffinity requiredDuringSchedulingIgnoredDuringExecution 0"
MISTAKES = [
    # shapes, by the schemas of Kubernetes and of others
    (BUILDER, f"{FIRST} imagePulPolicy", "Always", "imagePulPolicy"),
    (BUILDER, "apiVersion", "apps/v1beta1", "has no Deployment in apps/v1beta1"),
    ("PodMonitor/mlflow", "spec podMetricsEndpoints 0 interval", "30 seconds", "30 seconds"),
    (APPLICATION, "spec syncPolicy automated selfheal", True, "selfheal"),
    (GIT, "spec branch", "main", "branch"),
    (GIT, "apiVersion", "source.toolkit.fluxcd.io/v1beta1", "has no GitRepository"),
    (RUNTIME, "spec mlPolicy torch", {"numProcPerNode": "auto"}, "numProcPerNode"),
    (GIVES, "spec selector matchlabels", {"access-ml-pipeline": "true"}, "matchlabels"),
    (PREDICTOR, "spec predictor minReplica", 2, "minReplica"),
    # values and names that schemas leave open
    ("ConfigMap/realmops-tracking", "metadata name", "Tracking", "metadata.name is Tracking"),
    (MLFLOW, f"{FIRST} name", "ml.flow", "is ml.flow"),
    (MLFLOW, f"{FIRST} env 12 valueFrom fieldRef fieldPath", "status.podIp", "is status.podIp"),
    (BUILDER, f"{FIRST} env 1 name", "HOME", "HOME stands there 2 times"),
    (BUILDER, f"{FIRST} image", "realmops:latest", "image is realmops:latest"),
    (BUILDER, f"{FIRST} resources requests memory", "2GB", "is 2GB"),
    (BUILDER, f"{FIRST} startupProbe periodSeconds", 0, "periodSeconds is 0"),
    (DATA, "spec accessModes", ["ReadWriteAll"], "is ReadWriteAll"),
    (RETRAIN, f"{TOKEN} expirationSeconds", 60, "expirationSeconds is 60"),
    (RETRAIN, f"{TOKEN} audience", "ml-pipeline", "audience is ml-pipeline"),
    (RETRAIN, "metadata annotations argocd.argoproj.io/hook", "AfterSync", "is AfterSync"),
    (RETRAIN, "metadata annotations argocd.argoproj.io/hooks", "Sync", "nothing that Argo CD or Flux knows"),
    (MOUNT, f"{NEAR} topologyKey", "kubernetes.io/host", "is kubernetes.io/host"),
    # what belongs together
    (MLFLOW, f"{POD} volumes 1", {"name": "tmp", "hostPath": {"path": "/tmp"}}, "a volume of the kind hostPath"),
    (MLFLOW, "spec template metadata labels", {"app": "mlflow"}, "does not match"),
    ("Service/mlflow", "spec selector", {"app.kubernetes.io/name": "mlflwo"}, "no pod has"),
    ("NetworkPolicy/retrain", "spec podSelector matchLabels", {"app": "retrain"}, "no pod has"),
    ("PodMonitor/mlflow", "spec selector matchLabels", {"app": "mlflow"}, "no pod has"),
    (BUDGET, "spec selector matchLabels", {"app": "serve"}, "no pod has"),
    (BUILDER, f"{FIRST} resources limits memory", "1Gi", "limit of memory is below"),
    (BUILDER, f"{FIRST} resources", GONE, "wanted requests"),
    (BUILDER, f"{POD} volumes 0 name", "dat", "no volume data"),
    (BUILDER, f"{FIRST} livenessProbe exec", GONE, "livenessProbe has 0 handlers"),
    (MLFLOW, f"{FIRST} readinessProbe httpGet port", "web", "at the port web"),
    (MLFLOW, f"{FIRST} livenessProbe httpGet path", "/healthz", "asks for /healthz"),
    ("Service/mlflow", "spec ports 0 targetPort", "web", "no port web"),
    ("PodMonitor/mlflow", "spec podMetricsEndpoints 0 port", "metrics", "no port metrics"),
    ("PodMonitor/mlflow", "spec podMetricsEndpoints 0 path", "/metric", "nothing answers at /metric"),
    ("NetworkPolicy/mlflow", "spec ingress 0 ports 0 port", "web", "no port web"),
    ("NetworkPolicy/retrain", "spec policyTypes", ["Ingress"], "has egress"),
    ("NetworkPolicy/realmops-serve", "spec egress 0 ports 0 port", 80, "lets it call http://mlflow"),
    (RETRAIN, f"{FIRST} env 4 value", "http://ml-pipeline.kubeflow:8889", "no network policy"),
    ("ConfigMap/realmops-tracking", "data MLFLOW_TRACKING_URI", "http://mlflow:80", "no service"),
    (BUILDER, f"{POD} serviceAccountName", "builder", "no serviceaccount builder"),
    (BUILDER, f"{FIRST} envFrom", [{"configMapRef": {"name": "settings"}}], "no configmap settings"),
    (BUILDER, f"{FIRST} env 0", {"name": "URI", "valueFrom": {"configMapKeyRef": {
        "name": "realmops-tracking", "key": "uri"}}}, "the configmap realmops-tracking has no key uri"),
    (BUILDER, f"{POD} volumes 1", {"name": "tmp", "secret": {"secretName": "s"}}, "no secret s"),
    (MLFLOW, "metadata annotations external.realmops/secret-mlflow-postgres", GONE, "no secret mlflow-postgres"),
    (MLFLOW, "metadata annotations external.realmops/secret-mlflow-postgres", "url", "has the keys url, not uri"),
    (MLFLOW, "metadata annotations external.realmops/secret-mlflow-auth", "username", "has the keys username, not"),
    (SERVE, f"{FIRST} env 3 valueFrom secretKeyRef optional", GONE, "no secret"),
    (TRAINING, "spec runtimeRef name", "realm", "realm"),
    ("RoleBinding/realmops-scaler", "roleRef name", "scaler", "no role scaler"),
    ("RoleBinding/realmops-submit", "roleRef name", "kubeflow-pipeline-edit", "no clusterrole kubeflow-pipeline-edit"),
    ("RoleBinding/realmops-scaler", "subjects 0 namespace", GONE, "has no namespace"),
    ("Role/realmops-scaler", "rules 0 resourceNames", ["index-builder"], "no deployment index-builder"),
    (BUILDER, f"{FIRST} securityContext readOnlyRootFilesystem", GONE, "the security context is"),
    (BUILDER, f"{FIRST} volumeMounts 1 mountPath", "/var/tmp", "/tmp is /tmp, where no emptyDir is"),
    (BUILDER, f"{FIRST} env 0 value", "/home/me", "HOME is /home/me"),
    (BUILDER, f"{POD} securityContext runAsUser", GONE, "no runAsUser"),
    (BUILDER, f"{POD} securityContext fsGroup", GONE, "no fsGroup"),
    (BUILDER, f"{FIRST} env 0 valueFrom", {"fieldRef": {"fieldPath": "metadata.name"}}, "has both"),
    (RETRAIN, f"{FIRST} args 3", "$(NAMESPACE)", "$(NAMESPACE) is not set"),
    (BUILDER, f"{FIRST} args 2", "/data/builder/assignment.json", "lies in no volume"),
    (CLEAN, "spec jobTemplate spec template spec containers 0 args 2", "/runs", "lies in no volume"),
    (RETRAIN, f"{FIRST} env 5 value", "/var/run/secrets/kubeflow/pipelines/tokens", "none of"),
    (QUOTA, "spec hard requests.memory", "8Gi", "requests.memory is 8Gi"),
    (SCALER, "spec maxReplicas", 200, "requests.memory is 128Gi"),
    (TRAINING, "spec trainer numNodes", 4, "requests.nvidia.com/gpu"),
]  # fmt: skip
ORIGIN = GitOrigin("https://git.test/docs.git", "main", ".")
TEXTS = [project_text(f"k8s/{name}.yaml", ROOT, ORIGIN, "standalone") for name in ("argo-cd", "flux")]
OF_OTHERS = [one for text in TEXTS for one in yaml.safe_load_all(text)]


def plant(one: Object, path: str, value: Any) -> None:
    *way, last = (int(step) if step.isdigit() else step for step in path.split())
    for step in way:
        one = one[step]
    if value is GONE:
        del one[last]
    else:
        one[last] = value


def everything(rendered: dict[str, list[Object]]) -> list[Object]:
    """All that can be applied: with the TrainJob in the namespace of the rest, and what GitOps is told."""
    objects = copy.deepcopy([*rendered[FULL], *read_all(K8S / "trainjob.yaml"), *OF_OTHERS])
    for one in objects:
        if one["kind"].startswith("Train"):
            one["metadata"]["namespace"] = FULL
    return objects


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_all_that_can_be_applied_is_without_a_fault(version: str, rendered: dict[str, list[Object]]) -> None:
    assert faults(everything(rendered), version) == []


@pytest.mark.parametrize(("which", "path", "value", "told"), MISTAKES)
def test_a_mistake_is_found(which: str, path: str, value: Any, told: str, rendered: dict[str, list[Object]]) -> None:
    objects = everything(rendered)
    plant(find(objects, f"{which}/{FULL}" if which == "Namespace" else which), path, value)
    found = faults(objects)
    assert any(told in fault for fault in found), found


def test_the_image_runs_as_the_user_of_the_manifests(rendered: dict[str, list[Object]]) -> None:
    contexts = [template["spec"]["securityContext"] for _, template in templates(rendered[FULL])]
    [user] = [rest for word, rest in instructions() if word == "USER"]
    assert {f"{context['runAsUser']}:{context['runAsGroup']}" for context in contexts} == {user}
