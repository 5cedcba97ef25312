"""The Kubeflow pipelines: components and compiled files say what the stages say, and the compiled file runs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster_lab
import pytest
import toy
import yaml
from cluster_lab import DEPLOYMENT, Lab

from realmops import cluster
from realmops.stages import STAGES

ROOT = Path(__file__).parents[1]
COMPILED = ROOT / "pipelines" / "train.yaml"
NOT_STAGES = {"scale_builder"}
RUN_COMPILED = """
import json, sys
from kfp import components, local
from kfp.local import SubprocessRunner
local.init(runner=SubprocessRunner(use_venv=False), pipeline_root=sys.argv[2])
components.load_component_from_file(sys.argv[1])(**json.loads(sys.argv[3]))
"""


# The seam


def called(path: Path) -> tuple[str, str]:
    """The function of kfp_entry that a component calls, and its first argument when that is a text."""
    (function,) = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    call = function.body[-1].value  # type: ignore[attr-defined]
    first = call.args[0]
    return call.func.attr, first.value if isinstance(first, ast.Constant) else ""


def component_drift(folder: Path) -> list[str]:
    """What the components have other than the stages."""
    names = {path.stem for path in folder.glob("*.py")}
    found = [f"components: {sorted(names ^ {*STAGES, *NOT_STAGES})}"] if names != {*STAGES, *NOT_STAGES} else []
    for name in names & set(STAGES) - {"pretrain"}:
        if (what := called(folder / f"{name}.py")) != ("run_stage", name):
            found.append(f"{name}: {what}")
    return found


def test_there_is_a_component_for_each_stage_and_it_runs_that_stage() -> None:
    assert component_drift(ROOT / "components") == []
    assert called(ROOT / "components" / "pretrain.py")[0] == "pretrain"


def test_a_component_that_drifts_is_seen(tmp_path: Path) -> None:
    for path in (ROOT / "components").glob("*.py"):
        text = path.read_text()
        if path.stem == "tag":
            text = text.replace('run_stage("tag"', 'run_stage("ict"')
        if path.stem != "ict":
            (tmp_path / path.name).write_text(text)
    assert component_drift(tmp_path) == ["components: ['ict']", "tag: ('run_stage', 'ict')"]


def compiled() -> dict[str, Any]:
    loaded: dict[str, Any] = next(yaml.safe_load_all(COMPILED.read_text()))
    return loaded


def test_the_compiled_pipeline_is_its_source(tmp_path: Path) -> None:
    code = (
        "import sys; from kfp import compiler; from pipelines.realm import train; "
        "compiler.Compiler().compile(train, sys.argv[1])"
    )
    fresh = tmp_path / "train.yaml"
    subprocess.run([sys.executable, "-c", code, fresh], check=True, cwd=ROOT, timeout=250)
    found, wanted = (list(yaml.safe_load_all(path.read_text())) for path in (COMPILED, fresh))
    assert found == wanted, "python -m pipelines.realm compiles it again"


def test_the_compiled_pipeline_runs_the_stages_in_their_order_with_the_options_of_params_yaml() -> None:
    pipeline = compiled()
    inner = pipeline["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    after: dict[str, list[str]] = {name: task.get("dependentTasks", []) for name, task in inner.items()}
    order = list(STAGES)
    assert after == {name: order[:n][-1:] for n, name in enumerate(order)}
    options = pipeline["root"]["inputDefinitions"]["parameters"]["options"]["defaultValue"]
    assert json.loads(options) == yaml.safe_load((ROOT / "params.yaml").read_text())
    last = pipeline["root"]["dag"]["tasks"]["scale-builder"]
    assert last["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def missing_inputs(pipeline: dict[str, Any]) -> list[str]:
    """What tasks of a group take from the group, and the group does not have: on a cluster such a task cannot start."""
    found = []
    for name, component in pipeline["components"].items():
        known = component.get("inputDefinitions", {}).get("parameters", {})
        for task, entry in component.get("dag", {}).get("tasks", {}).items():
            taken = [value.get("componentInputParameter") for value in entry["inputs"].get("parameters", {}).values()]
            found += [f"{name}.{task}: {one}" for one in taken if one and one not in known]
    return found


def test_every_task_of_a_group_gets_what_it_takes() -> None:
    assert missing_inputs(compiled()) == []
    broken = compiled()
    del broken["components"]["comp-exit-handler-1"]["inputDefinitions"]["parameters"]["pipelinechannel--cpu"]
    assert "comp-exit-handler-1.pretrain: pipelinechannel--cpu" in missing_inputs(broken)


# Scaling


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with cluster_lab.serve(Lab(), tmp_path / "kubeconfig") as found:
        yield found


@pytest.fixture(params=["lab", pytest.param("cluster", marks=pytest.mark.cluster)])
def api(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, str]]:
    """The client and the namespace of a Deployment without replicas; of the ServiceAccount that may scale it."""
    given = os.environ.get("KUBECONFIG")
    if request.param == "lab":
        serving: Any = cluster_lab.serve(Lab(), tmp_path / "kubeconfig")
    elif given and "cluster" in request.config.option.markexpr:
        serving = cluster_lab.real(tmp_path / "kubeconfig", given)
    else:
        pytest.skip("not run: wants a cluster of yours, KUBECONFIG=FILE pytest -m cluster")
    with serving:
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield cluster._api()


def test_scaling_sets_the_replicas(api: tuple[Any, str]) -> None:
    apps, namespace = api

    def replicas() -> int | None:
        found: int | None = apps.read_namespaced_deployment_scale(DEPLOYMENT, namespace).spec.replicas
        return found

    assert replicas() is None, "0, as the API says it"
    cluster.scale(DEPLOYMENT, 3)
    assert replicas() == 3
    cluster.scale(DEPLOYMENT, 0)
    assert replicas() is None


def test_a_number_below_0_is_refused(api: tuple[Any, str]) -> None:
    with pytest.raises(ValueError, match=f"Deployment {DEPLOYMENT} in namespace {api[1]}, -1 replicas: .*says 422"):
        cluster.scale(DEPLOYMENT, -1)


@pytest.mark.parametrize("spec", [{"replicas": 2, "replica": 1}, {"replicas": "two"}])
def test_a_patch_of_another_shape_is_refused(api: tuple[Any, str], spec: dict[str, Any]) -> None:
    from kubernetes.client.exceptions import ApiException

    apps, namespace = api
    with pytest.raises(ApiException) as refused:
        apps.patch_namespaced_deployment_scale(DEPLOYMENT, namespace, {"spec": spec}, field_validation="Strict")
    assert refused.value.status in (400, 422)
    assert apps.read_namespaced_deployment_scale(DEPLOYMENT, namespace).spec.replicas is None


@pytest.mark.cluster
@pytest.mark.parametrize("api", ["cluster"], indirect=True)
def test_who_may_scale_the_builders_may_do_nothing_else(api: tuple[Any, str]) -> None:
    from kubernetes import client

    apps, namespace = api
    reviews = client.AuthorizationV1Api(apps.api_client)

    def allowed(verb: str, resource: str, name: str = "", subresource: str = "", group: str = "apps") -> bool:
        asked = {"verb": verb, "group": group, "resource": resource, "subresource": subresource, "name": name}
        review = {"spec": {"resourceAttributes": {"namespace": namespace, **asked}}}
        answer: bool = reviews.create_self_subject_access_review(review).status.allowed
        return answer

    assert allowed("get", "deployments", DEPLOYMENT, "scale")
    assert allowed("patch", "deployments", DEPLOYMENT, "scale")
    assert not allowed("patch", "deployments", "mlflow", "scale")
    assert not allowed("update", "deployments", DEPLOYMENT, "scale")
    assert not allowed("patch", "deployments", DEPLOYMENT)
    assert not allowed("get", "secrets", group="")
    assert not allowed("list", "pods", group="")
    with pytest.raises(ValueError, match=r"Deployment mlflow .* may not scale it"):
        cluster.scale("mlflow", 1)


def test_scaling_touches_the_scale_of_one_deployment_and_nothing_else(lab: Lab) -> None:
    cluster.scale(DEPLOYMENT, 3)
    cluster.scale(DEPLOYMENT, 0)
    assert lab.replicas == [3, 0]
    assert lab.requests == [("PATCH", cluster_lab.SCALE)] * 2


@pytest.mark.parametrize(
    ("status", "message"),
    [(403, "may not scale it.*get rolebindings"), (404, "none of that name.*get deployments"), (500, "says 500")],
)
def test_a_cluster_that_refuses_is_explained(lab: Lab, status: int, message: str) -> None:
    lab.status = status
    with pytest.raises(ValueError, match=f"Deployment {DEPLOYMENT} in namespace lab, 2 replicas: .*{message}"):
        cluster.scale(DEPLOYMENT, 2)


def test_without_a_cluster_one_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"no cluster to speak to .*leave the name of the builders"):
        cluster.scale(DEPLOYMENT, 1)


def test_builders_that_never_live_end_the_wait(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign that was there before and does not change is of a builder that is gone."""
    monkeypatch.setattr(cluster, "LOOK_SECONDS", 0.01)
    assignment = tmp_path / "builder" / "assignment.json"
    (assignment.parent / "alive").mkdir(parents=True)
    (assignment.parent / "alive" / "gone.json").write_text("{}")
    said: list[str] = []
    with pytest.raises(TimeoutError, match=f"0 of 2 index builders .*kubectl describe deployment {DEPLOYMENT}"):
        cluster.raise_builders(DEPLOYMENT, 2, assignment, tmp_path / "exchange", tmp_path, 0.2, said.append)
    assert lab.replicas == [2]
    assert said == ["waiting for index builders: 0 of 2 live after 0 s"]
    named = json.loads(assignment.read_text())
    assert named["exchange"] == str(tmp_path / "exchange")
    assert named["snapshot"] == str(tmp_path / "data/snapshot/corpus")


# The compiled pipeline, run here: stages as processes, the Deployment's replica as a process that follows


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    toy.write_project(folder)
    return folder


def options(project: Path) -> str:
    """The toy project's options; names of files as a pod sees them."""
    values = toy.toy_values()
    values["snapshot"]["documents"] = str(project / "documents.jsonl")
    for split in toy.QUESTIONS:
        values["questions"][split] = str(project / f"questions.{split}.jsonl")
    values["tag"] |= {"train": str(project / "tagged.conll"), "dev": str(project / "tagged.conll")}
    return json.dumps(values)


def run_pipeline(project: Path, lab_file: Path, **arguments: Any) -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-c", RUN_COMPILED, COMPILED, project / "outputs", json.dumps(arguments)]
    environment = {**os.environ, "KUBECONFIG": str(lab_file), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [str(word) for word in code], capture_output=True, text=True, env=environment, cwd=project, timeout=280
    )


def test_the_compiled_pipeline_fails_gives_the_builders_back_and_goes_on(project: Path) -> None:
    """First with a file that is not there; then the same run with all, which finds the first stages done."""
    assignment = project / "builder" / "assignment.json"

    def replica(number: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "HOSTNAME": f"replica-{number}"}
        return subprocess.Popen(toy.command("index-builder", "--follow", assignment), env=environment)

    runs = {"run": "one", "runs": str(project / "runs"), "deployment": DEPLOYMENT, "wait_seconds": 120}
    root = project / "runs" / "one"
    with cluster_lab.serve(Lab(replica), project / "kubeconfig") as lab:
        missing = (project / "questions.test.jsonl").rename(project / "elsewhere")
        failed = run_pipeline(project, project / "kubeconfig", options=options(project), **runs)
        assert failed.returncode != 0
        assert "questions.test.jsonl" in failed.stdout + failed.stderr
        assert lab.replicas == [1, 0], "raised for pretrain, and given back although evaluate failed"
        made = (root / "models/finetune/manifest.json").stat().st_mtime_ns
        assert not (root / "results").exists()
        missing.rename(project / "questions.test.jsonl")
        done = run_pipeline(project, project / "kubeconfig", options=options(project), **runs)
        assert done.returncode == 0, done.stdout + done.stderr
        assert lab.replicas == [1, 0, 1, 0]
    assert (root / "models/finetune/manifest.json").stat().st_mtime_ns == made, "nothing is trained again"
    measured = json.loads((root / "results/metrics.json").read_text())
    (metrics,) = (path for path in (project / "outputs").rglob("metrics") if path.parent.name == "evaluate")
    assert json.loads(metrics.read_text())["em"] == measured["em"]
    pretrained = json.loads((root / "models/pretrain/manifest.json").read_text())
    assert pretrained["sections"]["pretrain"]["builder"] == "external"
    assert json.loads((root / "models/pretrain/metrics.json").read_text())["refreshes"] > 0
