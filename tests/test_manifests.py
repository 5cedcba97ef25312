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

import manifests
import pytest
import yaml
from manifests import (
    K8S,
    NEWEST,
    OLDEST,
    Object,
    faults,
    find,
    instructions,
    quantity,
    render,
    render_all,
    templates,
)
from pod_security import violations

from realmops.cli import main

ROOT = K8S.parent
COMPONENTS = sorted(folder.name for folder in (K8S / "components").iterdir())
STARTS = ("base", "overlays/local", "overlays/production")
FULL = "on-production-ros"  # has every kind of object
BUILDER = "Deployment/realmops-index-builder"
GONE = object()


def read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((K8S / path).read_text(encoding="utf-8"))
    return found


def subsets(names: list[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(names) + 1):
        yield from combinations(names, size)


def cases() -> dict[str, dict[str, Any]]:
    """Base and each overlay with every set of the components that it does not have; by namespaces made of initials."""
    found = {}
    for start in STARTS:
        has = {Path(component).name for component in read(f"{start}/kustomization.yaml").get("components", [])}
        for chosen in subsets([component for component in COMPONENTS if component not in has]):
            namespace = "-".join(["on", Path(start).name, *("".join(re.findall(r"\b\w", one)) for one in chosen)])
            found[namespace] = {
                "resources": [f"../{start}"],
                "components": [f"../components/{component}" for component in chosen],
            }
    return found


CASES = cases()


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    return render_all(tmp_path_factory.mktemp("manifests") / "k8s", CASES)


def test_no_set_of_components_is_missing() -> None:
    assert len(CASES) == 2**6 + 2**5 + 2**2


@pytest.mark.parametrize("case", CASES)
def test_every_overlay_and_component_renders_without_a_fault(case: str, rendered: dict[str, list[Object]]) -> None:
    assert faults(rendered[case]) == []


def test_the_oldest_kubernetes_takes_everything_as_well(rendered: dict[str, list[Object]]) -> None:
    assert faults(rendered[FULL], OLDEST) == []


@pytest.mark.parametrize("overlay", STARTS[1:])
def test_an_overlay_sets_namespace_and_image(overlay: str) -> None:
    objects = render(K8S / overlay)
    assert find(objects, "Namespace/realmops")
    assert faults(objects) == []
    assert "set-by-overlay" not in str(objects)


@pytest.mark.parametrize("case", [FULL, "on-base", "on-local-ros"])
def test_the_only_right_is_to_get_and_patch_the_builders_scale(case: str, rendered: dict[str, list[Object]]) -> None:
    roles = [one for one in rendered[case] if one["kind"] in ("Role", "ClusterRole")]
    assert [one["rules"] for one in roles] == [
        [
            {
                "apiGroups": ["apps"],
                "resources": ["deployments/scale"],
                "resourceNames": ["realmops-index-builder"],
                "verbs": ["get", "patch"],
            }
        ]
    ]
    bindings = [one for one in rendered[case] if one["kind"] in ("RoleBinding", "ClusterRoleBinding")]
    assert [one["roleRef"]["name"] for one in bindings] == ["realmops-scaler"]


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
    for one in rendered[FULL]:
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
    assert {arguments[0] for arguments in given} == {"index-builder", "submit"}
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


def test_containers_have_the_variables_of_their_arguments(rendered: dict[str, list[Object]]) -> None:
    found = {}
    for where, _, container in manifests.each_container(rendered[FULL]):
        given = re.findall(r"\$\((\w+)\)", " ".join(container.get("args", [])))
        assert {*given} <= {one["name"] for one in container["env"]}, where
        found[where] = given
    assert found["Job/realmops-retrain: container submit"] == ["POD_NAMESPACE", "IMAGE"]


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
    job = find(objects, "Job/realmops-retrain")
    assert job["metadata"]["annotations"]["kustomize.toolkit.fluxcd.io/force"] == "enabled"
    assert "ttlSecondsAfterFinished" not in job["spec"]
    assert "replicas" not in find(objects, BUILDER)["spec"]


# What was planted

POD = "spec template spec"
FIRST = f"{POD} containers 0"
PLANTED = [
    ("unique_objects", "Service/mlflow", "metadata name", "mlflow", None),
    ("one_namespace_that_is_restricted", "Namespace", "metadata labels pod-security.kubernetes.io/enforce", "baseline",
     "enforces the pod security baseline"),
    ("one_namespace_that_is_restricted", "Service/mlflow", "metadata namespace", "default", "namespace default"),
    ("pods_are_restricted", "Deployment/mlflow", f"{POD} volumes 1", {"name": "tmp", "hostPath": {"path": "/tmp"}},
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
    ("quantities", "PersistentVolumeClaim/mlflow-data", "spec resources requests storage", "lots", "no quantity"),
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
    ("references", "RoleBinding/realmops-scaler", "roleRef name", "scaler", "no Role scaler"),
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
    ("strategies", "Deployment/mlflow", "spec strategy", GONE, "strategy is None"),
    ("quota_has_room", "ResourceQuota/realmops", "spec hard requests.memory", "8Gi", "requests.memory is 8Gi"),
    ("quota_has_room", "ResourceQuota/realmops", "spec hard requests.nvidia.com/gpu", "0", "gpu is 0"),
]  # fmt: skip


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
    objects = copy.deepcopy(rendered[FULL])
    if message is None:
        objects.append(copy.deepcopy(find(objects, which)))
        message = "2 times"
    else:
        plant(find(objects, f"{which}/{FULL}" if which == "Namespace" else which), path, value)
    found = list(getattr(manifests, rule)(objects))
    assert any(message in fault for fault in found), found
    assert {*found} <= {*faults(objects)}


def test_every_rule_has_something_planted() -> None:
    assert {rule for rule, *_ in PLANTED} == {rule.__name__ for rule in manifests.RULES}


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
    [fault] = manifests.schema_faults(one, NEWEST)
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
