"""The Kubeflow pipelines as files: components, compiled pipelines, Kubernetes objects, and the catalog's layout."""

import ast
import json
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import custom_resources
import pytest
import yaml
from cluster_lab import Output
from compiled import ROOT, compiled, documents, file_of
from manifests import OLDEST

from realmops import cluster, config
from realmops.cluster import builders, task_context
from realmops.cluster.packed_options import unpack_options
from realmops.stages import STAGES, STEPS

PIPELINES = ("train", "ablations", "refresh")
# functions of the tasks that components call, unless it is run_stage for a stage
OTHERS = {
    "scale_builder": "lower_builders",
    **{name: name for name in ("guard", "inputs", "cloze", "pretrain", "evaluate", "promote")},
    **{name: name for name in ("variant", "table", "refresh")},
}
COMPONENTS = {*STAGES, *OTHERS}
# set by MLflow's plugin: v2/common/plugins/mlflow/handler.go of Kubeflow Pipelines, RetrieveUserContainerEnvVars
OF_THE_PLUGIN = {"MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_TOKEN"}
OTHER = "registry.test:5000/ours/realmops:7-gpu"
# of client-side kubectl apply: TotalAnnotationSizeLimitB in apimachinery's pkg/api/validation/objectmeta.go
LARGEST_OBJECT = 256 * 1024


def build(folder: Path, *words: str) -> Path:
    subprocess.run([sys.executable, "-m", "pipelines", folder, *words], check=True, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``build`` has all pipelines and components, compiled now."""
    return build(tmp_path_factory.mktemp("fresh") / "build").parent


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them compiled with another image and with a queue."""
    return build(tmp_path_factory.mktemp("other"), "--image", OTHER, "--queue", "team-a")


def pods_of(platform: dict[str, Any]) -> dict[str, Any]:
    """Return the platform document's entry for the pod of each executor."""
    found: dict[str, Any] = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return found


def tasks_of(pipeline: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Yield name, definition and executor of each task, also in groups; groups have no executor."""
    for component in (pipeline["root"], *pipeline["components"].values()):
        for task, entry in component.get("dag", {}).get("tasks", {}).items():
            yield task, entry, pipeline["components"][entry["componentRef"]["name"]].get("executorLabel")


# Components and compiled files


def test_each_component_calls_its_task() -> None:
    def called(path: Path) -> tuple[str, str]:
        (function,) = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        call = function.body[-1].value  # type: ignore[attr-defined]
        first = call.args[0]
        return call.func.attr, first.value if isinstance(first, ast.Constant) else ""

    expected = {name: ("run_stage", name) for name in STAGES} | {name: (one, "") for name, one in OTHERS.items()}
    assert {path.stem: called(path) for path in (ROOT / "components").glob("*.py")} == expected


def test_the_compiled_pipelines_are_their_sources(fresh: Path) -> None:
    for folder in (fresh / "build", ROOT / "pipelines"):
        assert {path.stem for path in folder.glob("*.yaml")} == {*PIPELINES}
    for pipeline in PIPELINES:
        kept, now = (documents(path.read_text()) for path in (file_of(pipeline), fresh / f"build/{pipeline}.yaml"))
        assert kept == now, "python -m pipelines compiles it again"
    assert {path.stem for path in (fresh / "build/components").glob("*.yaml")} == COMPONENTS


def test_pods_have_the_released_image_or_the_one_that_is_compiled_in(fresh: Path, other: Path) -> None:
    def images(file: Path) -> set[str]:
        spec = documents(file.read_text())[0]
        parameters = spec["root"].get("inputDefinitions", {}).get("parameters", {})
        fixed = {executor["container"]["image"] for executor in spec["deploymentSpec"]["executors"].values()}
        return {image for image in fixed if "{{" not in image} | {
            parameters.get("image", {}).get("defaultValue", *fixed)
        }

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for folder, image in ((fresh / "build", f"ghcr.io/realmops/realmops:{version}"), (other, OTHER)):
        files = [*folder.glob("*.yaml"), *folder.glob("components/*.yaml")]
        assert {file.stem: images(file) for file in files} == {file.stem: {image} for file in files}


@pytest.mark.parametrize("page", ["components", *sorted(COMPONENTS)])
def test_the_example_of_a_components_page_compiles_to_its_task(
    page: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The examples are run where ``build`` has the compiled components."""
    file = ROOT / "docs" / ("components.md" if page == "components" else f"components/{page}.md")
    [text] = re.findall(r"^```python\n(.*?)^```", file.read_text(), re.MULTILINE | re.DOTALL)
    from kfp import compiler

    monkeypatch.chdir(fresh)
    found: dict[str, Any] = {}
    exec(compile(text, page, "exec"), found)
    if page == "components":
        assert found["evaluate"].component_spec.implementation.container.image == cluster.IMAGE
        return
    compiler.Compiler().compile(found["pipeline"], str(tmp_path / "alone.yaml"))
    alone, platform = documents((tmp_path / "alone.yaml").read_text())
    label = f"exec-{page.replace('_', '-')}"
    for spec, whole in (documents(file_of(pipeline).read_text()) for pipeline in PIPELINES):
        if label in spec["deploymentSpec"]["executors"]:
            command = alone["deploymentSpec"]["executors"][label]["container"]["command"]
            assert command == spec["deploymentSpec"]["executors"][label]["container"]["command"]
            first, second = (pods_of(one)[label] for one in (platform, whole))
            for field in ("emptyDirMounts", "podMetadata"):
                assert first[field] == second[field]
            for field in ("configMapAsEnv", "secretAsEnv"):
                assert first[field][0]["keyToEnv"] == second[field][0]["keyToEnv"]


def test_a_queue_is_a_label_of_every_pod_and_changes_nothing_else(other: Path) -> None:
    for pipeline in PIPELINES:
        text = (other / f"{pipeline}.yaml").read_text()
        spec, platform = documents(text.replace(OTHER, cluster.IMAGE))
        usual, without = documents(file_of(pipeline).read_text())
        assert spec == usual
        for pod in pods_of(platform).values():
            assert pod["podMetadata"]["labels"].pop("kueue.x-k8s.io/queue-name") == "team-a"
        assert platform == without


def test_train_runs_the_stages_in_order_with_the_options_of_params_yaml() -> None:
    pipeline = compiled("train")
    inner = pipeline["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    order = ["inputs", *STEPS, "promote"]
    dependencies = {name: task.get("dependentTasks", []) for name, task in inner.items()}
    assert dependencies == {name: order[:n][-1:] for n, name in enumerate(order)}
    options = pipeline["root"]["inputDefinitions"]["parameters"]["options"]["defaultValue"]
    assert unpack_options(options) == config.load_params(ROOT / "params.yaml")
    outer = pipeline["root"]["dag"]["tasks"]
    assert outer["exit-handler-1"]["dependentTasks"] == ["guard"]
    run_id = {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}
    assert outer["guard"]["inputs"]["parameters"]["run"] == run_id
    assert outer["scale-builder"]["inputs"]["parameters"]["owner"] == run_id
    assert outer["scale-builder"]["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def test_docs_name_every_parameter_of_train() -> None:
    text = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    table = text[text.index("Parameters of `pipelines/train.yaml`:") :].split("\n\n")[1]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(compiled("train")["root"]["inputDefinitions"]["parameters"])


# Pods


def parameters_in(value: Any) -> Iterator[str]:
    """Yield the inputs that a task, or the definition of its pod, names anywhere."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key == "componentInputParameter":
            yield inner
        yield from parameters_in(inner)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_group_has_the_inputs_of_its_tasks_and_their_pods(pipeline: str) -> None:
    """On a cluster a task with an input that its group lacks cannot start."""
    spec, platform = documents(file_of(pipeline).read_text())
    for component in (spec["root"], *spec["components"].values()):
        known = component.get("inputDefinitions", {}).get("parameters", {})
        for entry in component.get("dag", {}).get("tasks", {}).values():
            label = spec["components"][entry["componentRef"]["name"]].get("executorLabel")
            used = {*parameters_in(entry["inputs"].get("parameters", {})), *parameters_in(pods_of(platform).get(label))}
            assert used <= known.keys()


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_pod_mounts_the_volume_as_a_user_without_rights_and_uses_no_cache(pipeline: str) -> None:
    spec, platform = documents(file_of(pipeline).read_text())
    assert pods_of(platform).keys() == spec["deploymentSpec"]["executors"].keys()
    for pod in pods_of(platform).values():
        assert [mount["mountPath"] for mount in pod["pvcMount"]] == ["/realmops"]
        assert [mount["mountPath"] for mount in pod["emptyDirMounts"]] == ["/tmp"]
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == ("10001", True)
        given = [*pod.get("configMapAsEnv", []), *pod.get("secretAsEnv", [])]
        names = {pair["envVar"] for one in given for pair in one["keyToEnv"]}
        assert not names & OF_THE_PLUGIN, "Kubernetes refuses a variable with a value and a valueFrom"
        assert pod["podMetadata"]["labels"]["realmops/claim"] == "realmops-data", "selected by the builders' affinity"
        [affinity] = pod["nodeAffinity"]
        assert affinity["nodeAffinityJson"]["componentInputParameter"].removeprefix("pipelinechannel--") == "affinity"
    assert not [task for task, entry, label in tasks_of(spec) if label and entry["cachingOptions"].get("enableCache")]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_pod_has_a_timeout_and_all_but_guard_are_retried(pipeline: str) -> None:
    spec, platform = documents(file_of(pipeline).read_text())
    kubernetes = platform["platforms"]["kubernetes"]
    assert kubernetes.keys() == {"deploymentSpec"}, "with a pipelineConfig of 2.17, 2.16 drops the whole document"
    pods = pods_of(platform)
    seconds = {name: int(pod["activeDeadlineSeconds"]) for name, pod in pods.items()}
    assert min(seconds.values()) >= 1800
    assert seconds.get("exec-scale-builder", math.inf) > builders.SCALE_DOWN_SECONDS
    for task, entry, label in tasks_of(spec):
        if label and task == "guard":
            assert "retryPolicy" not in entry
            assert pods[label]["podMetadata"]["labels"]["access-ml-pipeline"] == "true"
        elif label:
            assert entry["retryPolicy"]["maxRetryCount"] == 2
            longest = int(entry["retryPolicy"]["backoffMaxDuration"][:-1])
            assert longest > 3 * seconds[label], "or a long task is not retried"


# Tasks


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        ({}, {"MLFLOW_TRACKING_URI": "ours", "MLFLOW_TRACKING_TOKEN": "secret"}),
        (
            {"MLFLOW_TRACKING_URI": "theirs", "MLFLOW_RUN_ID": "task"},
            {"MLFLOW_TRACKING_URI": "theirs", "REALMOPS_MLFLOW_PARENT_RUN_ID": "task"},
        ),
    ],
)
def test_settings_of_mlflows_plugin_take_precedence(plugin: dict[str, str], expected: dict[str, str]) -> None:
    ours = {"REALMOPS_MLFLOW_TRACKING_URI": "ours", "REALMOPS_MLFLOW_TRACKING_TOKEN": "secret"}
    environment = ours | plugin
    task_context.take_settings(environment)
    assert environment == ours | expected


def test_only_finite_numbers_are_metrics(tmp_path: Path) -> None:
    """JSON has no NaN, and KFP accepts numbers only."""
    shown = Output(tmp_path / "metrics.json")
    task_context.write_metrics(
        {"em": 0.5, "questions": 3, "loss": math.nan, "ratio": math.inf, "reader": "pretrain"}, shown
    )
    assert shown.shown == json.loads((tmp_path / "metrics.json").read_text()) == {"em": 0.5, "questions": 3.0}


# Kubernetes objects


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_objects_are_the_compiled_pipeline(pipeline: str, fresh: Path, other: Path) -> None:
    file = f"objects/{pipeline}.yaml"
    parent, version = objects = documents((fresh / "build" / file).read_text())
    assert [one["kind"] for one in objects] == ["Pipeline", "PipelineVersion"]
    for one in objects:
        assert not [*custom_resources.faults_of(one, OLDEST)]
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", one["metadata"]["name"])
        # the server's filter compares an absent display name as an empty text: pipeline_types.go, GetField
        assert one["spec"]["displayName"] == one["metadata"]["name"]
        assert len(json.dumps(one)) < LARGEST_OBJECT
    spec = version["spec"]
    assert [spec["pipelineSpec"], spec["platformSpec"]] == documents(file_of(pipeline).read_text())
    assert spec["pipelineName"] == parent["metadata"]["name"] == spec["pipelineSpec"]["pipelineInfo"]["name"]
    changed = documents((other / file).read_text())[1]["metadata"]["name"]
    assert changed != version["metadata"]["name"], "the spec of a version cannot be changed"


# The layout of kubeflow/pipelines-components


def test_a_component_of_the_catalog_has_its_files_and_imports_only_kfp(tmp_path: Path) -> None:
    """Files and metadata follow the catalog at commit fab64a9: scripts/validate_metadata/validate_metadata.py."""
    catalog = tmp_path / "catalog"
    words = ["scripts/component_catalog.py", catalog, "--approver", "someone", "--verified", "2026-11-28"]
    subprocess.run([sys.executable, *words], check=True, cwd=ROOT)
    folders = [*catalog.glob("components/*/*")]
    assert {folder.name for folder in folders} == {f"realmops_{name}" for name in COMPONENTS}
    for folder in folders:
        files = {"__init__.py", "component.py", "metadata.yaml", "OWNERS"}
        assert {path.name for path in folder.iterdir()} == files
        metadata = yaml.safe_load((folder / "metadata.yaml").read_text())
        required = [field for field in metadata if field not in {"tags", "ci", "links"}]
        assert required == ["name", "stability", "dependencies", "lastVerified"]
        assert metadata["name"] == folder.name
        imports = ast.parse((folder / "component.py").read_text()).body
        assert [ast.unparse(one) for one in imports if isinstance(one, ast.Import | ast.ImportFrom)] == [
            "from kfp import dsl"
        ]
