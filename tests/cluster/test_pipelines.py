"""The Kubeflow pipelines as files: components and compiled files say what the stages say."""

import ast
import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_lab import Output
from compiled import PACKAGE, ROOT, compiled, documents, file_of

from realmops import cluster, config
from realmops.cluster import builders, task_context
from realmops.cluster.packed_options import unpack_options
from realmops.stages import STAGES, STEPS

PIPELINES = ("train", "ablations", "refresh")
# What a component calls that is no stage, or more than one.
OTHERS = {
    "pretrain": "pretrain",
    "evaluate": "evaluate",
    "scale_builder": "lower_builders",
    **{name: name for name in ("guard", "inputs", "cloze", "promote", "variant", "table", "refresh")},
}


# what MLflow's plugin sets: v2/common/plugins/mlflow/handler.go of Kubeflow Pipelines, RetrieveUserContainerEnvVars
OF_THE_PLUGIN = {"MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_TOKEN"}
OTHER = "registry.test:5000/ours/realmops:7-gpu"


# The seam


def called(path: Path) -> tuple[str, str]:
    """The function of ``tasks`` that a component calls, and its first argument when that is a text."""
    (function,) = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    call = function.body[-1].value  # type: ignore[attr-defined]
    first = call.args[0]
    return call.func.attr, first.value if isinstance(first, ast.Constant) else ""


def test_there_is_a_component_for_each_stage_and_it_runs_that_stage() -> None:
    wanted = {name: ("run_stage", name) for name in STAGES} | {name: (one, "") for name, one in OTHERS.items()}
    assert {path.stem: called(path) for path in (ROOT / "components").glob("*.py")} == wanted


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``build`` has all pipelines and components, compiled now."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "pipelines", folder / "build"], check=True, cwd=ROOT)
    return folder


def test_the_compiled_pipelines_are_their_sources(fresh: Path) -> None:
    for folder in (fresh / "build", ROOT / "pipelines"):
        assert {path.stem for path in folder.glob("*.yaml")} == {*PIPELINES}
    for name in PIPELINES:
        kept, now = (documents(path.read_text()) for path in (file_of(name), fresh / "build" / f"{name}.yaml"))
        assert kept == now, "python -m pipelines compiles it again"
    assert {path.stem for path in (fresh / "build/components").glob("*.yaml")} == {*STAGES, *OTHERS}


def test_by_default_pipelines_are_compiled_next_to_their_sources_and_all_else_into_build(tmp_path: Path) -> None:
    """In a copy of the project, which git does not see."""
    for name in ("components", "pipelines"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.yaml", "__pycache__"))
    shutil.copy(ROOT / "params.yaml", tmp_path)
    subprocess.run([sys.executable, "-m", "pipelines"], check=True, cwd=tmp_path)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.yaml")} - {"params.yaml"}
    own = {f"build/components/{name}.yaml" for name in (*STAGES, *OTHERS)}
    own |= {f"build/objects/{name}.yaml" for name in (*PIPELINES, "kustomization")}
    assert files == own | {f"pipelines/{name}.yaml" for name in PIPELINES}


def images_of(file: Path) -> set[str]:
    """Of the pods of a compiled file, and where a parameter names it."""
    spec = documents(file.read_text())[0]
    parameters = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    given = {executor["container"]["image"] for executor in spec["deploymentSpec"]["executors"].values()}
    return {image for image in given if "{{" not in image} | {parameters.get("image", {}).get("defaultValue", *given)}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them compiled with another image and with a queue."""
    folder = tmp_path_factory.mktemp("other")
    words = [sys.executable, "-m", "pipelines", folder, "--image", OTHER, "--queue", "team-a"]
    subprocess.run(words, check=True, cwd=ROOT)
    return folder


def test_pods_have_the_released_image_unless_another_is_compiled_in(fresh: Path, other: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for folder, wanted in ((fresh / "build", f"ghcr.io/realmops/realmops:{version}"), (other, OTHER)):
        files = [*folder.glob("*.yaml"), *folder.glob("components/*.yaml")]
        assert len(files) == len(PIPELINES) + len({*STAGES, *OTHERS})
        assert {file.stem: images_of(file) for file in files} == {file.stem: {wanted} for file in files}


@pytest.mark.parametrize("page", ["components", *sorted({*STAGES, *OTHERS})])
def test_a_component_is_loaded_as_its_page_says(
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
            entry = alone["deploymentSpec"]["executors"][label]["container"]
            assert entry["command"] == spec["deploymentSpec"]["executors"][label]["container"]["command"]
            pods = [one["platforms"]["kubernetes"]["deploymentSpec"]["executors"][label] for one in (platform, whole)]
            for field in ("emptyDirMounts", "podMetadata"):
                assert pods[0][field] == pods[1][field]
            for field in ("configMapAsEnv", "secretAsEnv"):
                assert pods[0][field][0]["keyToEnv"] == pods[1][field][0]["keyToEnv"]


def test_with_a_queue_every_pod_waits_in_it_and_nothing_else_changes(other: Path) -> None:
    for pipeline in PIPELINES:
        text = (other / f"{pipeline}.yaml").read_text()
        found, platform = documents(text.replace(OTHER, cluster.IMAGE))
        usual, without = documents(file_of(pipeline).read_text())
        assert found == usual
        for pod in platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values():
            labels = pod["podMetadata"]["labels"]
            assert labels.pop("kueue.x-k8s.io/queue-name") == "team-a"
            if not labels:
                del pod["podMetadata"]
        assert platform == without


def test_train_runs_the_stages_in_their_order_with_the_options_of_params_yaml() -> None:
    pipeline = compiled("train")
    inner = pipeline["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    after: dict[str, list[str]] = {name: task.get("dependentTasks", []) for name, task in inner.items()}
    order = ["inputs", *STEPS, "promote"]
    assert after == {name: order[:n][-1:] for n, name in enumerate(order)}
    options = pipeline["root"]["inputDefinitions"]["parameters"]["options"]["defaultValue"]
    assert unpack_options(options) == config.load_params(ROOT / "params.yaml")
    assert pipeline["root"]["dag"]["tasks"]["exit-handler-1"]["dependentTasks"] == ["guard"]
    parameters = pipeline["root"]["dag"]["tasks"]["guard"]["inputs"]["parameters"]
    assert parameters["run"] == {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}
    for name in ("key", "endpoint"):
        assert parameters[name] == {"componentInputParameter": name}
    last = pipeline["root"]["dag"]["tasks"]["scale-builder"]
    assert last["inputs"]["parameters"]["owner"] == {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}
    assert last["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def test_ablations_train_the_reference_first_then_all_others_of_the_params_then_the_table() -> None:
    pipeline = compiled("ablations")
    names = yaml.safe_load((PACKAGE / "variants.yaml").read_text())["variants"]
    assert pipeline["root"]["inputDefinitions"]["parameters"]["variants"]["defaultValue"] == [*names][1:]
    inner = pipeline["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert inner["variant"]["inputs"]["parameters"]["name"]["runtimeValue"]["constant"] == next(iter(names)) == "realm"
    assert inner["for-loop-2"]["dependentTasks"] == ["variant"]
    last = pipeline["root"]["dag"]["tasks"]["table"]
    assert last["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED", "also where a variant failed"


def test_docs_name_every_parameter_of_train() -> None:
    text = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    table = text[text.index("Parameters of `pipelines/train.yaml`:") :].split("\n\n")[1]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(compiled("train")["root"]["inputDefinitions"]["parameters"])


def parameters_in(value: Any) -> Iterator[str]:
    """The inputs that a task, or what a pod is to have, names anywhere."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key == "componentInputParameter":
            yield inner
        yield from parameters_in(inner)


def missing_inputs(pipeline: dict[str, Any], platform: dict[str, Any]) -> list[str]:
    """What tasks and their pods take from their group, and it does not have: on a cluster such a task cannot start."""
    found = []
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for name, component in {**pipeline["components"], "root": pipeline["root"]}.items():
        known = component.get("inputDefinitions", {}).get("parameters", {})
        for task, entry in component.get("dag", {}).get("tasks", {}).items():
            label = pipeline["components"][entry["componentRef"]["name"]].get("executorLabel")
            taken = {*parameters_in(entry["inputs"].get("parameters", {})), *parameters_in(pods.get(label))}
            found += [f"{name}.{task}: {one}" for one in sorted(taken) if one not in known]
    return found


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_task_of_a_group_gets_what_it_takes(pipeline: str) -> None:
    assert missing_inputs(*documents(file_of(pipeline).read_text())) == []


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_pod_mounts_the_volume_and_takes_nothing_from_a_cache(pipeline: str) -> None:
    """And is one user of a read-only image, with a folder for what is temporary."""
    found, platform = documents(file_of(pipeline).read_text())
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert executors.keys() == found["deploymentSpec"]["executors"].keys()
    for pod in executors.values():
        assert [mount["mountPath"] for mount in pod["pvcMount"]] == ["/realmops"]
        assert [mount["mountPath"] for mount in pod["emptyDirMounts"]] == ["/tmp"]
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == ("10001", True)
        given = [*pod.get("configMapAsEnv", []), *pod.get("secretAsEnv", [])]
        names = {pair["envVar"] for one in given for pair in one["keyToEnv"]}
        assert not names & OF_THE_PLUGIN, "Kubernetes refuses a variable with a value and a valueFrom"
        assert pod["podMetadata"]["labels"]["realmops/claim"] == "realmops-data", "builders go where these are"
        [affinity] = pod["nodeAffinity"]
        assert affinity["nodeAffinityJson"]["componentInputParameter"].removeprefix("pipelinechannel--") == "affinity"
        assert "podAffinity" not in pod, "which 2.16.0 and 2.17.0 have in their proto and read nowhere"
    for component in (found["root"], *found["components"].values()):
        for task in component.get("dag", {}).get("tasks", {}).values():
            if "executorLabel" in found["components"][task["componentRef"]["name"]]:
                assert not task["cachingOptions"].get("enableCache")


def test_what_a_pod_may_take_and_how_often_it_is_tried() -> None:
    """Time for all, other tries for all but the task that may end its run; nothing that 2.16 does not know."""
    for pipeline in PIPELINES:
        found, platform = documents(file_of(pipeline).read_text())
        kubernetes = platform["platforms"]["kubernetes"]
        assert kubernetes.keys() == {"deploymentSpec"}, "a pipelineConfig of 2.17 has 2.16 drop the whole document"
        executors = kubernetes["deploymentSpec"]["executors"]
        seconds = {name: int(pod["activeDeadlineSeconds"]) for name, pod in executors.items()}
        assert min(seconds.values()) >= 1800
        if pipeline == "train":
            assert seconds["exec-scale-builder"] > builders.SCALE_DOWN_SECONDS
        for component in (found["root"], *found["components"].values()):
            for name, task in component.get("dag", {}).get("tasks", {}).items():
                label = found["components"][task["componentRef"]["name"]].get("executorLabel")
                if label and name == "guard":
                    assert "retryPolicy" not in task
                    assert executors[label]["podMetadata"]["labels"]["access-ml-pipeline"] == "true"
                elif label:
                    policy = task["retryPolicy"]
                    assert policy["maxRetryCount"] == 2
                    assert int(policy["backoffMaxDuration"][:-1]) > 3 * seconds[label], "or a long task is tried once"


@pytest.mark.parametrize(
    ("plugin", "taken"),
    [
        ({}, {"MLFLOW_TRACKING_URI": "ours", "MLFLOW_TRACKING_TOKEN": "secret"}),
        (
            {"MLFLOW_TRACKING_URI": "theirs", "MLFLOW_RUN_ID": "task"},
            {"MLFLOW_TRACKING_URI": "theirs", "REALMOPS_MLFLOW_PARENT_RUN_ID": "task"},
        ),
    ],
)
def test_our_settings_of_mlflow_step_back_behind_those_of_its_plugin(
    plugin: dict[str, str], taken: dict[str, str]
) -> None:
    ours = {"REALMOPS_MLFLOW_TRACKING_URI": "ours", "REALMOPS_MLFLOW_TRACKING_TOKEN": "secret"}
    environment = ours | plugin
    task_context.take_settings(environment)
    assert environment == ours | taken


def test_figures_without_a_value_and_texts_are_not_shown(tmp_path: Path) -> None:
    """JSON has no NaN, and KFP takes numbers."""
    shown = Output(tmp_path / "metrics.json")
    task_context.write_metrics(
        {"em": 0.5, "questions": 3, "loss": math.nan, "ratio": math.inf, "reader": "pretrain"}, shown
    )
    assert shown.shown == json.loads((tmp_path / "metrics.json").read_text()) == {"em": 0.5, "questions": 3.0}
