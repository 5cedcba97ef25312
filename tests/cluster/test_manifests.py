"""Kubernetes manifests: overlays with components, as ``kubectl apply -k`` would send them."""

import copy
import os
import re
import shutil
import subprocess
import sys
import time
from itertools import product
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
ANSWERING = {"serve", "kserve"}  # components that single-node changes
FULL = "on-production-all"  # has every kind of object
BUILDER, SERVE, MLFLOW = "Deployment/realmops-index-builder", "Deployment/realmops-serve", "Deployment/mlflow"
PREDICTOR, SCALER = "InferenceService/realmops", "HorizontalPodAutoscaler/realmops-serve"
RETRAIN, MOUNT = "Job/realmops-retrain", "Job/realmops-mount"


def cases() -> dict[str, dict[str, Any]]:
    """Base and each overlay alone, with each component that it lacks, and with all, by namespace.

    ``small`` changes the claim of MLflow, which production lacks; ``pipelines-token`` is for profiles, whose overlays
    have it.
    """
    found = {}
    for start in STARTS:
        own = yaml.safe_load((K8S / start / "kustomization.yaml").read_text()).get("components", [])
        has = {Path(component).name for component in own} | {"small", "pipelines-token"}
        others = [component for component in COMPONENTS if component not in has]
        sets = {"": [], "-all": others} | {f"-{component}": [component] for component in others}
        for suffix, chosen in sets.items():
            again = ["single-node"] if "single-node" in has and ANSWERING & {*chosen} else []  # for what was added
            found[f"on-{Path(start).name}{suffix}"] = {
                "resources": [f"../{start}"],
                "components": [f"../components/{component}" for component in (*chosen, *again)],
            }
    return found


CASES = cases()


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    return render_all(tmp_path_factory.mktemp("manifests") / "k8s", CASES)


def pod_of(objects: list[Object], which: str) -> Object:
    """The pod's spec of a Deployment or a Job."""
    spec: Object = find(objects, which)["spec"]["template"]["spec"]
    return spec


def labels_of_pipelines() -> list[dict[str, str]]:
    """The labels that the compiled pipelines give to their pods."""
    platforms = [read_all(file)[1]["platforms"] for file in sorted((ROOT / "pipelines").glob("*.yaml"))]
    executors = [one["kubernetes"]["deploymentSpec"]["executors"] for one in platforms]
    return [pod.get("podMetadata", {}).get("labels", {}) for one in executors for pod in one.values()]


@pytest.mark.parametrize("case", CASES)
def test_every_overlay_and_component_renders_without_a_fault(case: str, rendered: dict[str, list[Object]]) -> None:
    assert faults(rendered[case]) == []


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_all_objects_are_valid_in_the_oldest_and_newest_kubernetes(
    version: str, rendered: dict[str, list[Object]]
) -> None:
    assert faults(everything(rendered), version) == []


def everything(rendered: dict[str, list[Object]]) -> list[Object]:
    """All objects of production, with a TrainJob and what Argo CD and Flux get."""
    origin = GitOrigin("https://git.test/docs.git", "main", ".")
    texts = [project_text(f"k8s/{name}.yaml", ROOT, origin, "standalone") for name in ("argo-cd", "flux")]
    objects = copy.deepcopy([*rendered[FULL], *read_all(K8S / "trainjob.yaml")])
    for one in objects:
        if one["kind"].startswith("Train"):
            one["metadata"]["namespace"] = FULL
    return [*objects, *(one for text in texts for one in yaml.safe_load_all(text))]


def test_an_overlay_and_a_component_are_a_remote_base_at_a_tag(tmp_path: Path) -> None:
    """The kustomization of the README, with a repository of this machine."""
    repository = tmp_path / "repository"
    shutil.copytree(K8S, repository / "k8s")
    user = ["-c", "user.name=test", "-c", "user.email=test@test.invalid"]
    for words in (["init", "--quiet"], ["add", "."], [*user, "commit", "--quiet", "--message", "k8s"], ["tag", "v9"]):
        subprocess.run(["git", *words], cwd=repository, check=True)
    (repository / "k8s/base/kustomization.yaml").write_text("resources: [lost-after-the-tag.yaml]\n")
    [text] = re.findall(r"^```yaml\n(resources:.*?)^```", (K8S / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "kustomization.yaml").write_text(
        text.replace("https://github.com/OWNER/REPO", f"file://{repository}").replace("TAG", "v9")
    )
    objects = render(tmp_path)
    assert find(objects, BUILDER)
    assert find(objects, SERVE)


@pytest.mark.parametrize(
    ("overlay", "namespace", "account"),
    [("standalone", "kubeflow", "pipeline-runner")]
    + [(name, "realmops", "default-editor") for name in ("local", "production")],
)
def test_an_overlay_sets_namespace_image_and_the_account_of_the_pipelines(
    overlay: str, namespace: str, account: str
) -> None:
    objects = render(K8S / "overlays" / overlay)
    assert faults(objects) == []
    assert "set-by-overlay" not in str(objects)
    assert {manifests.namespace_of(one) for one in objects} == {namespace}
    subjects = find(objects, "RoleBinding/realmops-scaler")["subjects"]
    assert [(one["name"], one["namespace"]) for one in subjects] == [
        ("realmops-scaler", namespace),
        (account, namespace),
    ]
    kinds = {one["kind"] for one in objects}
    if overlay == "standalone":  # the namespace of KFP's pods is neither created nor limited
        assert not {"Namespace", "ResourceQuota", "LimitRange", "PodDefault"} & kinds
    if overlay == "production":
        images = {container["image"] for _, _, container in manifests.each_container(objects)}
        [version] = re.findall(r"^mlflow==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert images == {f"{IMAGE}-gpu", f"ghcr.io/mlflow/mlflow:v{version}-full"}
    names = {manifests.name(one) for one in objects}
    assert not {SERVE, PREDICTOR} & names, "a sync waits for Deployments before it trains the first champion"


@pytest.mark.parametrize("overlay", ["local", "production"])
def test_a_namespace_is_that_of_its_profile_with_a_token_for_the_pipelines(overlay: str) -> None:
    """The profile controller takes no existing namespace without the owner's annotation."""
    [profile] = read_all(K8S / "profile.yaml")
    objects = render(K8S / "overlays" / overlay)
    assert faults([profile]) == []
    namespace = find(objects, f"Namespace/{profile['metadata']['name']}")["metadata"]
    assert namespace["annotations"]["owner"] == profile["spec"]["owner"]["name"]
    assert namespace["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    [spec] = [one["spec"] for one in objects if one["kind"] == "PodDefault"]
    assert any(spec["selector"]["matchLabels"].items() <= labels.items() for labels in labels_of_pipelines())
    job = read_all(K8S / "components/retrain-on-sync/retrain.yaml")[2]["spec"]["template"]["spec"]
    assert spec["volumes"][0]["projected"] == job["volumes"][0]["projected"]
    assert spec["env"][0] in job["containers"][0]["env"]


def test_the_only_rights_are_to_scale_builders_and_to_submit(rendered: dict[str, list[Object]]) -> None:
    names = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": ["realmops-index-builder"]}
    for case in (FULL, "on-base", "on-local-all", "on-standalone-all"):
        roles = [one["rules"] for one in rendered[case] if one["kind"] in ("Role", "ClusterRole")]
        assert roles == [[{**names, "verbs": ["patch"]}]]
        bindings = [one for one in rendered[case] if one["kind"] in ("RoleBinding", "ClusterRoleBinding")]
        assert {one["roleRef"]["name"] for one in bindings} <= {"realmops-scaler", "kubeflow-pipelines-edit"}
    spec = pod_of(rendered[FULL], RETRAIN)
    [subject] = find(rendered[FULL], "RoleBinding/realmops-submit")["subjects"]
    assert subject["name"] == spec["serviceAccountName"]
    assert kfp_client.TOKEN_FILE in [one["name"] for one in spec["containers"][0]["env"]]


def test_mlflows_clients_have_its_address_and_with_sign_in_a_name_and_a_password(
    rendered: dict[str, list[Object]],
) -> None:
    port = find(rendered["on-base"], "Service/mlflow")["spec"]["ports"][0]["port"]
    data = find(rendered["on-base"], "ConfigMap/realmops-tracking")["data"]
    assert data == {"MLFLOW_TRACKING_URI": f"http://mlflow:{port}"}
    secrets = {f"MLFLOW_TRACKING_{name}" for name in ("USERNAME", "PASSWORD", "TOKEN")}
    environments = [
        {one["name"] for one in container.get("env", [])}
        for _, _, container in manifests.each_container(as_made(rendered[FULL]))
    ]
    clients = [names for names in environments if "MLFLOW_TRACKING_URI" in names]
    assert [secrets - names for names in clients] == [set(), set()], "serve and kserve"
    for pipeline in (ROOT / "pipelines").glob("*.yaml"):
        assert all(f"secretKey: {name}" in pipeline.read_text(encoding="utf-8") for name in secrets), pipeline


def test_claims_outlive_their_manifests(rendered: dict[str, list[Object]]) -> None:
    for one in rendered["on-local-all"]:
        kept = one["metadata"].get("annotations", {}).get("kustomize.toolkit.fluxcd.io/prune") == "disabled"
        assert kept == (one["kind"] in ("PersistentVolumeClaim", "Namespace"))


@pytest.mark.parametrize(
    ("probe", "age", "healthy"),
    [
        ("startupProbe", 0, True), ("startupProbe", None, False), ("readinessProbe", 60, True),
        ("readinessProbe", 3600, False), ("livenessProbe", 60, True), ("livenessProbe", 3600, False),
    ],
)  # fmt: skip
def test_probes_check_the_age_of_the_builders_heartbeat(
    probe: str, age: int | None, healthy: bool, rendered: dict[str, list[Object]], tmp_path: Path
) -> None:
    [container] = pod_of(rendered["on-base"], BUILDER)["containers"]
    alive = tmp_path / "alive"
    if age is not None:
        alive.touch()
        os.utime(alive, (time.time() - age,) * 2)
    assert container["args"][-2:] == ["--alive", "/tmp/alive"]
    python, *arguments = (part.replace("/tmp/alive", str(alive)) for part in container[probe]["exec"]["command"])
    assert python == "python"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
    assert (done.returncode == 0) == healthy


def test_the_command_line_has_the_options_of_containers(rendered: dict[str, list[Object]]) -> None:
    containers = [container for _, _, container in manifests.each_container(rendered[FULL])]
    called = [one["args"] for one in containers if "realmops" in one.get("command", ["realmops"])]
    assert {command for command, *_ in called} == {"clean", "index-builder", "serve", "submit"}
    for command, *arguments in called:
        options = {option for parameter in main.commands[command].params for option in parameter.opts}
        assert {one for one in arguments if one.startswith("--")} <= options


def test_a_train_job_runs_the_builders_pod_and_starts_again_as_a_whole(rendered: dict[str, list[Object]]) -> None:
    """The end of one pod ends the training of all, and a Job adds up the restarts of its pods' containers.

    With Kubernetes' limit of six restarts the third kill ended a TrainJob of two nodes (Trainer 2.3.0). So no pod
    restarts within its Job: JobSet recreates all pods, and a disruption does not count.
    """
    runtime, job = read_all(K8S / "trainjob.yaml")
    [made] = as_made([runtime, job])
    assert made["spec"]["backoffLimit"] == 0
    template, builder = made["spec"]["template"]["spec"], pod_of(rendered[FULL], BUILDER)
    assert template["restartPolicy"] == "Never"
    assert template["securityContext"] == builder["securityContext"]
    [container], [same] = template["containers"], builder["containers"]
    assert container["securityContext"] == same["securityContext"]
    assert container["volumeMounts"] == same["volumeMounts"]
    command, *arguments = container["args"]
    with pytest.raises(SystemExit):  # parsed; then there are no params
        main.commands[command].main(arguments)
    [disrupted] = made["spec"]["podFailurePolicy"]["rules"]
    assert disrupted == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    [rule] = runtime["spec"]["template"]["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])


def test_an_inference_service_runs_the_same_pod_as_the_deployment(rendered: dict[str, list[Object]]) -> None:
    for case in (FULL, "on-local-all"):
        pod, predictor = pod_of(rendered[case], SERVE), find(rendered[case], PREDICTOR)["spec"]["predictor"]
        text = yaml.safe_dump({key: predictor[key] for key in pod})
        same = text.replace("kserve-container", "serve").replace("realmops-kserve", "realmops-serve")
        assert yaml.safe_load(same.replace("name: kserve", "name: serve")) == pod


def test_pods_that_answer_are_replaced_without_a_gap(rendered: dict[str, list[Object]]) -> None:
    serve, predictor = find(rendered[FULL], SERVE)["spec"], find(rendered[FULL], PREDICTOR)["spec"]["predictor"]
    scaler = find(rendered[FULL], SCALER)["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "realmops-serve"}
    assert "replicas" not in serve, "each apply would reset those of the autoscaler"
    for strategy, pod, bounds, budget in (
        (serve["strategy"], serve["template"]["spec"], scaler, "PodDisruptionBudget/realmops-serve"),
        (predictor["deploymentStrategy"], predictor, predictor, "PodDisruptionBudget/realmops-kserve"),
    ):
        assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        assert 0 < find(rendered[FULL], budget)["spec"]["minAvailable"] < bounds["minReplicas"] <= bounds["maxReplicas"]
        [container] = pod["containers"]
        assert {*PROBES} <= container.keys()
        sleeps = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert sleeps >= 10, "until every proxy has the new addresses; a guess, as Kubernetes sets no bound"
        assert pod["terminationGracePeriodSeconds"] > sleeps + DRAIN_SECONDS
        assert all(mount.get("readOnly") for mount in container["volumeMounts"] if mount["name"] == "data")


def test_two_pods_never_write_to_one_claim_during_an_update(rendered: dict[str, list[Object]]) -> None:
    for which in (BUILDER, MLFLOW):
        assert find(rendered["on-base"], which)["spec"]["strategy"] == {"type": "Recreate"}


def test_network_policies_allow_name_services_and_pods_have_no_proxy_of_istio(
    rendered: dict[str, list[Object]],
) -> None:
    """CoreDNS listens on 53, OpenShift's DNS on 5353, NodeLocal DNSCache at an address that no selector matches."""
    [rule] = find(rendered[FULL], "NetworkPolicy/realmops")["spec"]["egress"]
    assert {(one["protocol"], one["port"]) for one in rule["ports"]} == {*product(("UDP", "TCP"), (53, 5353))}
    assert "to" not in rule
    for one, template in templates(as_made(rendered[FULL])):
        labels = template["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "realmops", manifests.name(one)
        assert labels["sidecar.istio.io/inject"] == "false", manifests.name(one)


def test_on_a_claim_for_one_node_all_pods_share_the_node_of_the_pipelines(rendered: dict[str, list[Object]]) -> None:
    for case, near in (("on-local-serve", True), ("on-production-serve", False)):
        pods = [pod_of(rendered[case], which) for which in (BUILDER, SERVE)]
        assert {"podAffinity" in pod.get("affinity", {}) for pod in pods} == {near}
    template = find(rendered["on-local-all"], BUILDER)["spec"]["template"]
    [term] = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = term["labelSelector"]["matchLabels"]
    assert selects(labels, template), "or the first one finds no node"
    assert any(labels.items() <= one.items() for one in labels_of_pipelines())


def test_volumes_are_cleaned_by_one_job_at_a_time_as_the_builders_user(rendered: dict[str, list[Object]]) -> None:
    spec = find(rendered["on-local-all"], "CronJob/realmops-clean")["spec"]
    assert (spec["concurrencyPolicy"], spec["suspend"]) == ("Forbid", False)
    pod, builder = spec["jobTemplate"]["spec"]["template"]["spec"], pod_of(rendered["on-local-all"], BUILDER)
    assert pod["securityContext"] == builder["securityContext"], "or it may not delete their files"
    assert pod["affinity"] == builder["affinity"]
    assert pod["containers"][0]["volumeMounts"] == builder["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("case", ["on-base-all", "on-local-all", "on-standalone-all", FULL])
def test_a_sync_mounts_the_claim_before_it_waits_for_it(case: str, rendered: dict[str, list[Object]]) -> None:
    """The builders' Deployment has no pod then; a pod of the same phase, on the node of the claim, mounts it."""
    annotations = find(rendered[case], MOUNT)["metadata"]["annotations"]
    # Argo CD 3.5.1 reports a second attempt as failed if a hook of its first phase must be deleted before
    assert "argocd.argoproj.io/hook" not in annotations
    assert annotations["argocd.argoproj.io/sync-options"] == "Force=true,Replace=true", "a Job cannot be changed"
    spec = pod_of(rendered[case], MOUNT)
    claims = [one["persistentVolumeClaim"] for one in spec["volumes"] if "persistentVolumeClaim" in one]
    assert claims == [{"claimName": "realmops-data"}]
    assert spec["affinity"] == pod_of(rendered["on-local-all"], BUILDER)["affinity"]


@pytest.mark.parametrize("writable", [True, False])
def test_the_job_that_mounts_fails_if_the_volume_is_not_writable(
    writable: bool, rendered: dict[str, list[Object]], tmp_path: Path
) -> None:
    [container] = pod_of(rendered[FULL], MOUNT)["containers"]
    words = [*container["command"][1:], *container["args"]]
    words = [word.replace("/realmops", str(tmp_path if writable else tmp_path / "none")) for word in words]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, "not writable" in done.stderr) == ((0, False) if writable else (1, True))


def test_the_image_runs_as_the_user_of_the_manifests(rendered: dict[str, list[Object]]) -> None:
    contexts = [template["spec"]["securityContext"] for _, template in templates(rendered[FULL])]
    [user] = [rest for word, rest in instructions() if word == "USER"]
    assert {f"{context['runAsUser']}:{context['runAsGroup']}" for context in contexts} == {user}
