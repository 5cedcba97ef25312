"""The Kubeflow pipelines: components and compiled files say what the stages say, and the compiled file runs."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cluster_lab
import pytest
import small_project
import yaml
from cluster_lab import DEPLOYMENT, Lab, Output

from realmops import artifacts
from realmops.cluster import builders, kube, tasks
from realmops.evaluate.predictions import read_predictions, write_predictions
from realmops.index.builder_process import assign
from realmops.index.exchange import Fenced
from realmops.index.lease import claimed
from realmops.stages import METRICS, STAGES

ROOT = Path(__file__).parents[1]
PIPELINES = ("train", "ablations", "refresh")
# What a component calls that is no stage, or more than one.
OTHERS = {
    "pretrain": "pretrain",
    "evaluate": "evaluate",
    "scale_builder": "lower_builders",
    **{name: name for name in ("guard", "promote", "variant", "table", "refresh")},
}
RUN_COMPILED = """
import json, sys
from kfp import components, local
from kfp.local import SubprocessRunner
from kfp.local.orchestrator import task_executor
task_executor.time.sleep = lambda seconds: None  # before another try
local.init(runner=SubprocessRunner(use_venv=False), pipeline_root=sys.argv[2])
components.load_component_from_file(sys.argv[1])(**json.loads(sys.argv[3]))
"""


# The seam


def called(path: Path) -> tuple[str, str]:
    """The function of ``tasks`` that a component calls, and its first argument when that is a text."""
    (function,) = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    call = function.body[-1].value  # type: ignore[attr-defined]
    first = call.args[0]
    return call.func.attr, first.value if isinstance(first, ast.Constant) else ""


def component_drift(folder: Path) -> list[str]:
    """What the components have other than the stages, and what they call."""
    names = {path.stem for path in folder.glob("*.py")}
    found = [f"components: {sorted(names ^ {*STAGES, *OTHERS})}"] if names != {*STAGES, *OTHERS} else []
    for name in sorted(names):
        function, first = called(folder / f"{name}.py")
        wanted = (OTHERS[name], first) if name in OTHERS else ("run_stage", name)
        if (function, first) != wanted:
            found.append(f"{name}: {(function, first)}")
    return found


def test_there_is_a_component_for_each_stage_and_it_runs_that_stage() -> None:
    assert component_drift(ROOT / "components") == []


def test_a_component_that_drifts_is_seen(tmp_path: Path) -> None:
    for path in (ROOT / "components").glob("*.py"):
        text = path.read_text()
        if path.stem == "tag":
            text = text.replace('run_stage("tag"', 'run_stage("ict"')
        if path.stem == "table":
            text = text.replace("tasks.table", "tasks.variant")
        if path.stem != "ict":
            (tmp_path / path.name).write_text(text)
    assert component_drift(tmp_path) == [
        "components: ['ict']",
        "table: ('variant', '')",
        "tag: ('run_stage', 'ict')",
    ]


def file_of(pipeline: str) -> Path:
    return ROOT / "pipelines" / f"{pipeline}.yaml"


def compiled(pipeline: str) -> dict[str, Any]:
    loaded: dict[str, Any] = next(yaml.safe_load_all(file_of(pipeline).read_text()))
    return loaded


def test_the_compiled_pipelines_are_their_sources(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "pipelines", tmp_path], check=True, cwd=ROOT, timeout=250)
    assert {path.stem for path in tmp_path.iterdir()} == {*PIPELINES}
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (ROOT / "pipelines").glob("*.yaml")}
    for fresh in tmp_path.iterdir():
        found, wanted = (list(yaml.safe_load_all(path.read_text())) for path in (file_of(fresh.stem), fresh))
        assert found == wanted, "python -m pipelines compiles it again"


def test_train_runs_the_stages_in_their_order_with_the_options_of_params_yaml() -> None:
    pipeline = compiled("train")
    inner = pipeline["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    after: dict[str, list[str]] = {name: task.get("dependentTasks", []) for name, task in inner.items()}
    order = [*STAGES, "promote"]
    assert after == {name: order[:n][-1:] for n, name in enumerate(order)}
    options = pipeline["root"]["inputDefinitions"]["parameters"]["options"]["defaultValue"]
    assert json.loads(options) == yaml.safe_load((ROOT / "params.yaml").read_text())
    assert pipeline["root"]["dag"]["tasks"]["exit-handler-1"]["dependentTasks"] == ["guard"]
    last = pipeline["root"]["dag"]["tasks"]["scale-builder"]
    assert last["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def test_ablations_train_the_reference_first_then_all_others_of_the_params_then_the_table() -> None:
    pipeline = compiled("ablations")
    names = yaml.safe_load((ROOT / "pipelines/ablations/params.yaml").read_text())["variants"]
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


def missing_inputs(pipeline: dict[str, Any]) -> list[str]:
    """What tasks of a group take from the group, and the group does not have: on a cluster such a task cannot start."""
    found = []
    for name, component in pipeline["components"].items():
        known = component.get("inputDefinitions", {}).get("parameters", {})
        for task, entry in component.get("dag", {}).get("tasks", {}).items():
            taken = [value.get("componentInputParameter") for value in entry["inputs"].get("parameters", {}).values()]
            found += [f"{name}.{task}: {one}" for one in taken if one and one not in known]
    return found


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_task_of_a_group_gets_what_it_takes(pipeline: str) -> None:
    assert missing_inputs(compiled(pipeline)) == []


def test_an_input_that_a_group_does_not_get_is_seen() -> None:
    broken = compiled("train")
    del broken["components"]["comp-exit-handler-1"]["inputDefinitions"]["parameters"]["pipelinechannel--cpu"]
    assert "comp-exit-handler-1.pretrain: pipelinechannel--cpu" in missing_inputs(broken)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_pod_mounts_the_volume_and_takes_nothing_from_a_cache(pipeline: str) -> None:
    """And is one user of a read-only image, with a folder for what is temporary."""
    found, platform = yaml.safe_load_all(file_of(pipeline).read_text())
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert executors.keys() == found["deploymentSpec"]["executors"].keys()
    for pod in executors.values():
        assert [mount["mountPath"] for mount in pod["pvcMount"]] == ["/realmops"]
        assert [mount["mountPath"] for mount in pod["emptyDirMounts"]] == ["/tmp"]
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == ("10001", True)
    for component in (found["root"], *found["components"].values()):
        for task in component.get("dag", {}).get("tasks", {}).values():
            if "executorLabel" in found["components"][task["componentRef"]["name"]]:
                assert not task["cachingOptions"].get("enableCache")


def test_what_a_pod_may_take_and_how_often_it_is_tried() -> None:
    """Time for all, other tries for all but the task that may end its run; nothing that 2.16 does not know."""
    for pipeline in PIPELINES:
        found, platform = yaml.safe_load_all(file_of(pipeline).read_text())
        kubernetes = platform["platforms"]["kubernetes"]
        assert kubernetes.keys() == {"deploymentSpec"}, "a pipelineConfig of 2.17 has 2.16 drop the whole document"
        executors = kubernetes["deploymentSpec"]["executors"]
        seconds = {name: int(pod["activeDeadlineSeconds"]) for name, pod in executors.items()}
        assert min(seconds.values()) >= 1800
        if pipeline == "train":
            assert seconds["exec-scale-builder"] > builders.LOWER_SECONDS
        for component in (found["root"], *found["components"].values()):
            for name, task in component.get("dag", {}).get("tasks", {}).items():
                label = found["components"][task["componentRef"]["name"]].get("executorLabel")
                if label and name == "guard":
                    assert "retryPolicy" not in task
                    assert executors[label]["podMetadata"]["labels"] == {"access-ml-pipeline": "true"}
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
    tasks.take_settings(environment)
    assert environment == ours | taken


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
        cluster = builders._cluster()
        from kubernetes import client

        yield client.AppsV1Api(cluster.client), cluster.namespace


def replicas_of(api: tuple[Any, str]) -> int | None:
    """By a patch that changes nothing, as the ServiceAccount may not read."""
    apps, namespace = api
    found: int | None = apps.patch_namespaced_deployment_scale(DEPLOYMENT, namespace, {}).spec.replicas
    return found


def test_scaling_sets_the_replicas(api: tuple[Any, str]) -> None:
    assert replicas_of(api) is None, "0, as the API says it"
    builders.scale(DEPLOYMENT, 3)
    assert replicas_of(api) == 3
    builders.scale(DEPLOYMENT, 0)
    assert replicas_of(api) is None


def test_a_number_below_0_is_refused(api: tuple[Any, str]) -> None:
    with pytest.raises(ValueError, match=f"Deployment {DEPLOYMENT} in namespace {api[1]}, -1 replicas: .*says 422"):
        builders.scale(DEPLOYMENT, -1)


@pytest.mark.parametrize("spec", [{"replicas": 2, "replica": 1}, {"replicas": "two"}])
def test_a_patch_of_another_shape_is_refused(api: tuple[Any, str], spec: dict[str, Any]) -> None:
    from kubernetes.client.exceptions import ApiException

    apps, namespace = api
    with pytest.raises(ApiException) as refused:
        apps.patch_namespaced_deployment_scale(DEPLOYMENT, namespace, {"spec": spec}, field_validation="Strict")
    assert refused.value.status in (400, 422)
    assert replicas_of(api) is None


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

    assert allowed("patch", "deployments", DEPLOYMENT, "scale")
    assert not allowed("patch", "deployments", "mlflow", "scale")
    assert not allowed("get", "deployments", DEPLOYMENT, "scale")
    assert not allowed("update", "deployments", DEPLOYMENT, "scale")
    assert not allowed("patch", "deployments", DEPLOYMENT)
    assert not allowed("get", "secrets", group="")
    assert not allowed("list", "pods", group="")
    with pytest.raises(ValueError, match=r"Deployment mlflow .* may not scale it"):
        builders.scale("mlflow", 1)


def test_scaling_touches_the_scale_of_one_deployment_and_nothing_else(lab: Lab) -> None:
    builders.scale(DEPLOYMENT, 3)
    builders.scale(DEPLOYMENT, 0)
    assert lab.replicas == [3, 0]
    assert lab.requests == [("PATCH", cluster_lab.SCALE)] * 2


@pytest.mark.parametrize(
    ("status", "message"),
    [(403, "may not scale it.*get rolebindings"), (404, "none of that name.*get deployments"), (409, "says 409")],
)
def test_a_cluster_that_refuses_is_explained(lab: Lab, status: int, message: str) -> None:
    lab.status = status
    with pytest.raises(ValueError, match=f"Deployment {DEPLOYMENT} in namespace lab, 2 replicas: .*{message}"):
        builders.scale(DEPLOYMENT, 2)


def test_a_cluster_that_does_not_answer_ends_the_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "TIME_OUT", (5, 0.1))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        cluster_lab.write_kubeconfig(tmp_path / "kubeconfig", {"server": address}, {}, cluster_lab.NAMESPACE)
        with pytest.raises(TimeoutError, match=r"API server does not answer: .*Read timed out"):
            builders.scale(DEPLOYMENT, 1)


def test_without_a_cluster_one_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"no cluster to speak to .*leave the name of the builders"):
        builders.scale(DEPLOYMENT, 1)


def waits_for_builders(lab: Lab, seen: bool) -> str:
    """What is said of a builder's pod that has no node, where its events may be seen, and where not."""
    if not seen:
        lab.forbidden.add("events")
    for pod in (f"{DEPLOYMENT}-7d-x", "mlflow-0"):
        about = {"kind": "Pod", "name": pod}
        told = {"reason": "FailedScheduling", "message": "0/3 nodes are available", "type": "Warning"}
        lab.put("events", cluster_lab.NAMESPACE, pod, involvedObject=about, **told)
    kubectl = f"kubectl -n {cluster_lab.NAMESPACE}"
    commands = f"'{kubectl} get events --field-selector involvedObject.kind=Pod,type=Warning', .*'{kubectl} logs "
    if seen:
        return f"s; {DEPLOYMENT}-7d-x: FailedScheduling: 0/3 nodes are available more is shown by {commands}"
    return f"s; the reason is shown by {commands}"


def test_scaling_outlives_an_api_server_that_is_away(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a run, whose builders would stay up otherwise; and at the start of its pre-training."""
    monkeypatch.setattr(builders, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(builders, "LOOK_SECONDS", 0.01)
    root, said = tmp_path / "runs/one", list[str]()
    lab.away = 10
    builders.raise_builders(root, tmp_path / "exchange", DEPLOYMENT, 0, "us", 60, said.append)
    lab.away, lab.status = 10, 503
    timer = threading.Timer(0.2, setattr, (lab, "status", 200))
    timer.start()
    builders.give_back(DEPLOYMENT, root, "us", said.append)
    assert lab.replicas == [0, 0]
    assert re.fullmatch("the cluster's API server .*; trying again for 60 s", said[0])
    assert said[-1].endswith("; trying again for 1500 s")
    lab.away = 1000
    monkeypatch.setattr(builders, "LOWER_SECONDS", 0.05)
    with pytest.raises(TimeoutError, match="API server does not answer"):
        builders.give_back(DEPLOYMENT, root, "us", said.append)


@pytest.mark.parametrize("seen", [True, False])
def test_builders_that_never_live_end_the_wait(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """A sign that was there before and does not change is of a builder that is gone."""
    monkeypatch.setattr(builders, "LOOK_SECONDS", 0.01)
    root, assignment = tmp_path / "runs/one", tmp_path / "builder" / "assignment.json"
    (assignment.parent / "alive").mkdir(parents=True)
    (assignment.parent / "alive" / "gone.json").write_text("{}")
    said: list[str] = []
    with pytest.raises(TimeoutError, match=f"0 of 2 index builders .*{waits_for_builders(lab, seen)}"):
        builders.raise_builders(root, tmp_path / "exchange", DEPLOYMENT, 2, "run", 0.2, said.append)
    assert lab.replicas == [2]
    assert said == ["waiting for index builders: 0 of 2 live after 0 s"]
    named = json.loads(assignment.read_text())
    assert named["exchange"] == str(tmp_path / "exchange")
    assert named["snapshot"] == str(root / "data/snapshot/corpus")


def pretrained(tmp_path: Path, run: str, wait_seconds: int = 100) -> None:
    """The component, in a pod of a run that has the name and the id ``run``."""
    values = small_project.toy_values()
    root, shown = tmp_path / "runs" / run, Output(tmp_path / f"{run}.json")
    tasks.pretrain(
        json.dumps(values), str(root), shown, shown, owner=run, deployment=DEPLOYMENT,
        builders=0, wait_seconds=wait_seconds, processes=1, limits="",
    )  # fmt: skip


def test_builders_of_a_run_that_is_still_starting_are_waited_for_and_taken_at_its_end(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second run comes when the first has raised the builders and not yet made its exchange."""
    assignment, served = tmp_path / builders.ASSIGNMENT, list[str]()

    def train(*_: Any) -> None:
        if not served:
            with pytest.raises(SystemExit):
                pretrained(tmp_path, "second", wait_seconds=0)
        served.append(json.loads(assignment.read_text())["owner"])

    monkeypatch.setattr("realmops.stages.runner.inputs_of", lambda *_: {})
    monkeypatch.setattr(tasks, "_run", train)
    pretrained(tmp_path, "first")
    told = capfd.readouterr().err
    assert f"index builders of {assignment.parent} are another run's, whose end did not come in 0 s" in told
    assert f"process {os.getpid()} holds" in told
    assert served == ["first"]
    assert lab.replicas == [0]
    pretrained(tmp_path, "second")
    assert served == ["first", "second"]


def test_builders_that_a_newcomer_is_raising_are_left_to_it(lab: Lab, tmp_path: Path) -> None:
    assignment, waits, said = tmp_path / builders.ASSIGNMENT, threading.Event(), list[str]()

    def say(message: str) -> None:
        said.append(message)
        waits.set()

    assign(assignment, tmp_path / "first", tmp_path / "corpus", "first")
    last = threading.Thread(target=builders.give_back, args=(DEPLOYMENT, tmp_path / "runs/one", "first", say))
    with claimed(assignment.parent / builders.SCALING, say):
        last.start()
        assert waits.wait(60)
        assign(assignment, tmp_path / "second", tmp_path / "corpus", "second")
    last.join(60)
    assert lab.replicas == []
    assert said[-1] == f"{assignment}: the index builders work for another run, which gives them back"


@pytest.mark.parametrize(
    ("made", "owner", "left"),
    [("exchange/ours", "us", []), ("exchange/others", "us", ["ours"]), (None, "us", ["ours"]),
     ("exchange/ours", "them", ["ours"])],
)  # fmt: skip
def test_an_exchange_goes_with_its_builders_once_its_pre_training_is_done(
    lab: Lab, tmp_path: Path, made: str | None, owner: str, left: list[str]
) -> None:
    """``made`` is the exchange that the finished pre-training used, ``owner`` the run that has raised the builders."""
    root, assignment = tmp_path / "runs/one", tmp_path / builders.ASSIGNMENT
    (root / "exchange/ours/run/v-000000").mkdir(parents=True)
    folder = root / STAGES["pretrain"].folder
    folder.mkdir(parents=True)
    if made:
        artifacts.write_manifest(folder, "pretrain", sections={"pretrain": {"exchange": str(root / made)}})
    assign(assignment, root / "exchange/ours", tmp_path / "corpus", owner)
    tasks.lower_builders(DEPLOYMENT, str(root), "us")
    assert [path.name for path in (root / "exchange").iterdir()] == left
    assert lab.replicas == ([0] if owner == "us" else [])


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ValueError("seed is -1"), 2, "seed is -1"),
        (TimeoutError("no index came"), 1, "no index came"),
        (ConnectionError("the server is gone"), 2, "the server is gone."),
        (PermissionError(errno.EACCES, "Permission denied", "runs/one"), 2, "runs/one: Permission denied."),
        (OSError(errno.ENOSPC, "No space left"), 2, "No space left. Make room and run the same command again: "),
        (ChildProcessError("the index builder ended with exit code 2"), 2, "the index builder ended with exit code 2."),
        (Fenced("a newer trainer has taken over"), 2, "a newer trainer has taken over"),
    ],
)
def test_what_a_person_can_mend_ends_a_task_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception, code: int,
    told: str,
) -> None:  # fmt: skip
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(tasks, "_run", fail)
    with pytest.raises(SystemExit) as caught:
        tasks.run_stage(
            "ict", json.dumps(small_project.toy_values()), str(tmp_path), Output(tmp_path), Output(tmp_path)
        )
    assert caught.value.code == code
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"realmops: {told}")


def test_a_fault_of_ours_ends_a_task_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_run", lambda *_: [].pop())
    with pytest.raises(IndexError):
        tasks.run_stage(
            "ict", json.dumps(small_project.toy_values()), str(tmp_path), Output(tmp_path), Output(tmp_path)
        )


# The compiled pipelines, run here: tasks as processes, the Deployment's replica as a process that follows


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    small_project.write_project(folder)
    shutil.copytree(ROOT / "pipelines", folder / "pipelines")
    return folder


def options(project: Path, **changes: dict[str, Any]) -> str:
    """The toy project's options; names of files as a pod sees them."""
    values = small_project.toy_values(**changes)
    values["snapshot"]["documents"] = str(project / "documents.jsonl")
    for split in small_project.QUESTIONS:
        values["questions"][split] = str(project / f"questions.{split}.jsonl")
    values["tag"] |= {"train": str(project / "tagged.conll"), "dev": str(project / "tagged.conll")}
    return json.dumps(values)


def run_pipeline(pipeline: str, folder: Path, **arguments: Any) -> subprocess.CompletedProcess[str]:
    arguments |= {"runs": str(folder / "runs")}
    code = [sys.executable, "-c", RUN_COMPILED, file_of(pipeline), folder / "outputs", json.dumps(arguments)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    environment |= {
        "KUBECONFIG": str(folder / "kubeconfig"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MLFLOW_TRACKING_URI": mlflow_of(folder),
    }
    return subprocess.run(
        [str(word) for word in code], capture_output=True, text=True, env=environment, cwd=folder, timeout=280
    )


def mlflow_of(project: Path) -> str:
    return f"sqlite:///{project / 'mlflow.db'}"


def outputs(project: Path, task: str, artifact: str) -> list[str]:
    """What tasks of that name wrote for an artifact, oldest first."""
    found = [path for path in (project / "outputs").rglob(artifact) if path.parent.name == task]
    return [path.read_text() for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


@pytest.fixture(scope="module")
def deployment(project: Path) -> Iterator[Lab]:
    """The builders' Deployment; a replica is a process."""
    assignment = project / "builder" / "assignment.json"

    def replica(number: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "HOSTNAME": f"replica-{number}"}
        return subprocess.Popen(small_project.command("index-builder", "--follow", assignment), env=environment)

    with cluster_lab.serve(Lab(replica), project / "kubeconfig") as lab:
        yield lab


def train(project: Path, **arguments: Any) -> subprocess.CompletedProcess[str]:
    return run_pipeline("train", project, run="one", deployment=DEPLOYMENT, wait_seconds=120, **arguments)


@pytest.fixture(scope="module")
def failed(project: Path, deployment: Lab) -> Path:
    """A run without a file that its last stage wants."""
    missing = (project / "questions.test.jsonl").rename(project / "elsewhere")
    told = train(project, options=options(project))
    missing.rename(project / "questions.test.jsonl")
    assert told.returncode != 0
    assert "questions.test.jsonl" in told.stdout + told.stderr
    tries = re.findall(r"realmops: .*questions\.test\.jsonl", told.stdout + told.stderr)
    assert len(tries) == 3, "what fails is tried again, twice"
    return project / "runs" / "one"


@pytest.fixture(scope="module")
def run(project: Path, failed: Path) -> Path:
    """The same run, started again with all files and with a model to promote."""
    made = {path: path.stat().st_mtime_ns for path in (failed / "models").glob("*/manifest.json")}
    done = train(project, options=options(project, tracking={"enabled": True}), model="toy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in made} == made, "nothing is trained again"
    return failed


def test_train_that_fails_gives_the_builders_back(deployment: Lab, failed: Path) -> None:
    assert deployment.replicas == [1, 0], "raised for pretrain, and given back although evaluate failed"
    assert not (failed / "results").exists()
    assert [*(failed / "exchange").iterdir()] == [], "pre-training is done"


def test_train_goes_on_where_it_failed(project: Path, deployment: Lab, run: Path) -> None:
    assert deployment.replicas == [1, 0], "pretrain had nothing left to do"
    measured = json.loads((run / "results/metrics.json").read_text())
    (figures,) = outputs(project, "evaluate", "metrics")
    assert json.loads(figures)["em"] == measured["em"]
    pretrained = json.loads((run / "models/pretrain/manifest.json").read_text())
    assert pretrained["sections"]["pretrain"]["builder"] == "external"
    assert json.loads((run / "models/pretrain/metrics.json").read_text())["refreshes"] > 0


def artifact_of(project: Path, task: str, name: str) -> dict[str, Any]:
    """What Kubeflow is told of the last artifact of a task: its type, its metadata."""
    found = [*(project / "outputs").rglob(f"{task}/executor_output.json")]
    last = max(found, key=lambda path: path.stat().st_mtime_ns)
    (entry,) = json.loads(last.read_text())["artifacts"][name]["artifacts"]
    made = compiled("train")["components"][f"comp-{task}"]["outputDefinitions"]["artifacts"][name]
    return {"type": made["artifactType"]["schemaTitle"], **entry.get("metadata", {})}


def test_people_see_corpus_models_and_report_of_a_run_in_kubeflow(project: Path, run: Path) -> None:
    folders = {name: run / STAGES[name].folder for name in ("snapshot", "ict", "pretrain", "finetune", "evaluate")}
    for task, kind in (("snapshot", "Dataset"), ("ict", "Model"), ("pretrain", "Model"), ("finetune", "Model")):
        artifact = artifact_of(project, task, "corpus" if kind == "Dataset" else "model")
        manifest, measured = (json.loads((folders[task] / file).read_text()) for file in ("manifest.json", METRICS))
        assert artifact.pop("type") == f"system.{kind}"
        assert artifact.pop("folder") == folders[task].as_uri()
        assert artifact.pop("digest") == manifest["manifest_digest"]
        assert artifact.pop("fingerprint") == manifest["fingerprint"]
        assert artifact == {name: value for name, value in measured.items() if isinstance(value, int | float)}
    results = json.loads((folders["evaluate"] / METRICS).read_text())
    champion = artifact_of(project, "promote", "champion")
    assert champion["type"] == "system.Model"
    assert champion["promoted"] == 1.0
    assert champion["name"] == "toy"
    assert champion["em"] == results["em"]
    assert champion["recall_at_5"] == results["recall_at_5"]
    assert artifact_of(project, "evaluate", "report")["type"] == "system.HTML"
    assert artifact_of(project, "evaluate", "summary")["type"] == "system.Markdown"
    assert outputs(project, "evaluate", "report")[-1] == (folders["evaluate"] / "report.html").read_text()
    rows = {row[0]: row[1] for row in rows_of(outputs(project, "evaluate", "summary")[-1])}
    assert rows["EM (test questions)"] == f"{results['em']:.3f}"
    metrics = artifact_of(project, "evaluate", "metrics")
    assert metrics["em"] == results["em"]


# Promotion


def promoted(root: Path, project: Path, margin: float = 0.0) -> dict[str, float]:
    """What the component shows of a promotion."""
    metrics, champion = Output(root / "shown.json"), Output(root / "champion.json")
    tasks.promote(options(project, tracking={"enabled": True}), str(root), "toy", margin, champion, metrics)
    assert metrics.shown == json.loads((root / "shown.json").read_text())
    return metrics.shown


def copied(run: Path, name: str, *, right: bool) -> Path:
    """The run under another name, with results as if it had answered every question right or wrong."""
    root = run.with_name(name)
    shutil.copytree(run, root, ignore=shutil.ignore_patterns(".realmops", "promoted"))
    results = root / "results"
    manifest, metrics = (artifacts.read_json(results / file) for file in ("manifest.json", "metrics.json"))
    rows = [replace(row, em=right) for row in read_predictions(results / "predictions.parquet")]
    write_predictions(results / "predictions.parquet", rows)
    artifacts.write_json(results / "metrics.json", {**metrics, "em": float(right)})
    artifacts.write_manifest(results, "evaluate", **{key: manifest[key] for key in ("fingerprint", "sections")})
    return root


def test_the_last_task_of_train_promotes_and_not_being_better_is_no_failure(
    project: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert [json.loads(text) for text in outputs(project, "promote", "metrics")] == [{"promoted": 1.0}]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_of(project))
    em = json.loads((run / "results/metrics.json").read_text())["em"]
    better, worse = copied(run, "better", right=True), copied(run, "worse", right=False)
    assert promoted(better, project) == {"promoted": 1.0, "em_difference": 1.0 - em}
    assert promoted(worse, project) == {"promoted": 0.0, "em_difference": -1.0}
    assert "not promoted, models:/toy/2 stays the champion" in capfd.readouterr().err
    assert len(list((run.parent / ".realmops/promote").iterdir())) == 3, "one after another, whatever their roots"


def test_a_promotion_that_cannot_be_is_one_line(
    project: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def told(margin: float = 0.0) -> str:
        with pytest.raises(SystemExit) as caught:
            promoted(run, project, margin)
        assert caught.value.code == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert told().startswith("realmops: MLFLOW_TRACKING_URI is not set")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert told().startswith("realmops: the model registry at MLFLOW_TRACKING_URI failed")
    assert told(3.0) == "realmops: margin is 3.0, a share from 0 to 1 is wanted"


# Refresh


def test_refresh_embeds_what_changed_and_shows_the_answers(project: Path, run: Path) -> None:
    _, *kept = (project / "documents.jsonl").read_text().splitlines()
    (project / "new.jsonl").write_text("\n".join([*kept, '{"title": "New", "text": "Fresh."}']))
    values = json.loads(options(project))
    values["snapshot"]["documents"] = str(project / "new.jsonl")
    trained = {path: path.read_bytes() for path in sorted((run / "models").rglob("*")) if path.is_file()}
    done = run_pipeline("refresh", project, run="one", options=json.dumps(values))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.read_bytes() for path in trained} == trained
    [folder] = (run / "updates").iterdir()
    measured = json.loads((folder / "metrics.json").read_text())
    assert (measured["passages_new"], measured["passages_removed"]) == (1, 1)
    (figures,) = outputs(project, "refresh", "metrics")
    assert json.loads(figures) == measured
    changed = [json.loads(line) for line in (folder / "changed_answers.jsonl").read_text().splitlines()]
    (shown,) = outputs(project, "refresh", "changes")
    assert [row[0] for row in rows_of(shown)] == [change["question"] for change in changed]
    again = project / "again.md"
    tasks.refresh(json.dumps(values), str(run), Output(again), Output(project / "none.json"))
    assert again.read_text() == "The passages are those of before.\n"


# Ablations


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]


def test_ablations_compare_what_ended_well_and_train_nothing_twice(project: Path) -> None:
    """First with a variant whose pre-training waits in vain for a builder: the pipeline fails, the table is there."""
    preset = project / "pipelines/presets/ablations/per_token.yaml"
    preset.write_text("pretrain: {marginal: per_token, builder: external, builder_timeout: 1}\n")
    named: dict[str, Any] = {"run": "compared", "project": str(project), "presets": "[]"}
    failed = run_pipeline("ablations", project, variants=["baseline", "per_token"], **named)
    assert failed.returncode != 0
    out = project / "runs" / "compared"
    (shown,) = outputs(project, "table", "rows")
    assert [row[0] for row in rows_of(shown)] == ["REALM", "Baseline (ORQA)"]
    assert "\nper_token, seed 0: the stage pretrain has not been done in " in shown
    measured = [out / name / "seed-0/results/metrics.json" for name in ("realm", "baseline")]
    em = [json.loads(path.read_text())["em"] for path in measured]
    assert [row[2].split(" ")[0] for row in rows_of(shown)] == [f"{value:.3f}" for value in em]
    (figures,) = outputs(project, "table", "metrics")
    assert json.loads(figures) == {"realm_em": em[0], "baseline_em": em[1]}
    made = {path: path.stat().st_mtime_ns for path in (out / "store").glob("*/log.txt")}
    again = run_pipeline("ablations", project, variants=["baseline"], **named)
    assert again.returncode == 0, again.stdout + again.stderr
    assert {path: path.stat().st_mtime_ns for path in (out / "store").glob("*/log.txt")} == made
    _, shown = outputs(project, "table", "rows")
    assert shown == (out / "table.md").read_text()
    assert outputs(project, "table", "page")[1] == (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seeds": 0}, "seeds is 0, at least 1 is wanted"),
        ({"presets": "ablation"}, "presets is 'ablation'; a JSON list of texts is wanted"),
        ({"settings": "[1]"}, "overrides is '[1]'; a JSON list of texts is wanted"),
        ({"settings": '["pretrain.stepz=1"]'}, "stepz"),
        ({"name": "orqa"}, "variant 'orqa': pipelines/ablations/params.yaml has realm, "),
    ],
)
def test_a_variant_that_cannot_be_is_one_line(
    project: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: dict[str, Any], told: str
) -> None:
    given = {"name": "realm", "project": str(project), "presets": "[]", "settings": "[]", "seeds": 1}
    given |= {"out": str(tmp_path / "out"), "limits": "", "metrics": Output(tmp_path), **change}
    with pytest.raises(SystemExit) as caught:
        tasks.variant(**given)
    assert caught.value.code == 2
    limits, line = capfd.readouterr().err.splitlines()
    assert limits == "limits of this pod: "
    assert line.startswith("realmops: ")
    assert told in line
    assert not (tmp_path / "out").exists()
