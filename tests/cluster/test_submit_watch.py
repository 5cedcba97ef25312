"""What is said of a run by those who watch it, and its first task, which looks for an older run of the same key."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cluster_lab
import kfp_lab
import pytest
import small_project
from cluster_lab import Lab
from compiled import file_of, project_with_pipeline
from kfp_lab import KfpLab, argo_nodes, arguments_of, recorded

from realmops.cluster import kfp_client as server
from realmops.cluster import submit, tasks
from realmops.cluster.pod_namespace import place_of


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return project_with_pipeline(tmp_path)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KfpLab]:
    yield from kfp_lab.named_by_environment(tmp_path, monkeypatch)


@pytest.fixture
def kube_lab(tmp_path: Path, lab: KfpLab) -> Iterator[Lab]:
    with cluster_lab.serve(Lab(), tmp_path / "kubeconfig") as found:
        yield found


def submitted(project: Path, *words: str) -> None:
    where = ("--params", str(project / "params.yaml"), "--pipeline", str(file_of("train")))
    assert small_project.cli("submit", *where, *words).exit_code == 0


# The first task


def older_and_younger(lab: KfpLab, project: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    submitted(project)
    submitted(project)
    kfp_lab.earlier(lab.runs[0], 60)
    return lab.runs[0], lab.runs[1]


def test_a_younger_run_of_the_same_key_ends_itself(
    project: Path, lab: KfpLab, capsys: pytest.CaptureFixture[str]
) -> None:
    older, younger = older_and_younger(lab, project)
    submitted(project, "--argument", "image=realmops:2")
    key, other = (arguments_of(run)["key"] for run in lab.runs[1:])
    with pytest.raises(SystemExit) as ended:
        tasks.guard(key, younger["run_id"], lab.url)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        f"realmops: guard: the run {older['display_name']} ({older['run_id']}, RUNNING) "
        f"has the same key {key[:16]} and is older, so this run stops"
    ]
    tasks.guard(key, older["run_id"], lab.url)
    tasks.guard(other, lab.runs[2]["run_id"], lab.url)
    for over in ("FAILED", "CANCELING"):  # or nobody would train what a cancelled run has left
        older["state"] = over
        tasks.guard(key, younger["run_id"], lab.url)


def test_of_two_runs_of_one_second_the_lower_id_stays(project: Path, lab: KfpLab) -> None:
    older, younger = older_and_younger(lab, project)
    older["created_at"] = younger["created_at"]
    stays, ends = sorted((older["run_id"], younger["run_id"]))
    key = arguments_of(older)["key"]
    tasks.guard(key, stays, lab.url)
    with pytest.raises(SystemExit):
        tasks.guard(key, ends, lab.url)


@pytest.mark.parametrize(
    ("token", "told"),
    [
        ("of the pods", "is older, so this run stops"),
        (
            "of another audience",
            "could not check for an older .*returned 401 .*the audience pipelines.kubeflow.org",
        ),
        ("", "could not check for an older .*returned 401 .*the audience pipelines.kubeflow.org"),
    ],
)
def test_with_profiles_the_first_task_asks_with_its_token(
    project: Path,
    lab: KfpLab,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str,
    told: str,
) -> None:
    lab.multi_user = True
    for _ in range(2):
        submitted(project, "--namespace", "team")
    older, younger = lab.runs
    kfp_lab.earlier(older, 60)
    lab.token = "of the pods"
    (project / "namespace").write_text("team")
    monkeypatch.setattr(server, "NAMESPACE", project / "namespace")
    if token:
        (project / "token").write_text(token)
        monkeypatch.setenv(server.TOKEN_FILE, str(project / "token"))
    with suppress(SystemExit):
        tasks.guard(arguments_of(older)["key"], younger["run_id"], lab.url)
    assert re.search(told, capsys.readouterr().err)


def test_a_run_without_a_key_or_an_endpoint_asks_nobody(lab: KfpLab) -> None:
    tasks.guard("", "run", lab.url)
    tasks.guard("key", "run", "")
    assert lab.requests == []


def test_a_run_that_cannot_ask_goes_on(lab: KfpLab, capsys: pytest.CaptureFixture[str]) -> None:
    tasks.guard("key", "unknown", lab.url)
    tasks.guard("key", "run", "http://127.0.0.1:9")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: guard: could not check for an older run with the same key, continuing: ")
    assert "does not respond" in second


# What is said of a run


class Looked:
    """A server whose run has these nodes, one look after another, and then has ended."""

    place = place_of("http://localhost:8888", None, profiles=False)

    def __init__(self, looks: list[list[dict[str, Any]]], ends: str = "SUCCEEDED") -> None:
        self.looks, self.ends = looks, ends

    def run(self, run_id: str) -> Any:
        nodes = [SimpleNamespace(**one) for one in (self.looks.pop(0) if self.looks else ())]
        state = "RUNNING" if nodes else self.ends
        details = SimpleNamespace(task_details=nodes)
        return SimpleNamespace(run_details=details, state=state, display_name="r", run_id=run_id, error=None)


@pytest.mark.parametrize("retried", [False, True])
@pytest.mark.usefixtures("lab")
def test_wait_says_once_which_task_waits_for_its_pod_and_what_shows_why(
    monkeypatch: pytest.MonkeyPatch, retried: bool
) -> None:
    monkeypatch.setattr(submit, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(submit, "PENDING_SECONDS", 0.02)
    waits, runs, done = ({"ict": phase} for phase in ("Pending", "Running", "Succeeded"))
    looks = [argo_nodes("1", pods, retried=retried) for pods in [waits] * 30 + [runs] * 30 + [done]]
    said: list[str] = []
    assert submit.wait("1", {"ict"}, Looked(looks), said.append) == "SUCCEEDED"  # type: ignore[arg-type]
    assert [line.split(";")[0] for line in said] == [
        "ict: RUNNING", "ict: 1 pod is still PENDING after 0 s", "ict: SUCCEEDED", "the run r (1, SUCCEEDED)",
    ]  # fmt: skip
    assert "'kubectl -n kubeflow get pods -l pipeline/runid=1 --field-selector status.phase=Pending'" in said[1]
    assert "'kubectl -n kubeflow get events --field-selector type=Warning'" in said[1]


def test_wait_says_why_a_pod_waits_where_the_cluster_is_at_hand(kube_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "PENDING_SECONDS", 0.02)
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    of_run = {"pipeline/runid": "1"}
    container = {
        "name": "main", "image": "", "imageID": "", "ready": False, "restartCount": 0, "state": waiting,
    }  # fmt: skip
    kube_lab.put("pods", "kubeflow", "a", of_run, status={"phase": "Pending", "conditions": [full]})
    kube_lab.put("pods", "kubeflow", "b", of_run, status={"phase": "Pending", "containerStatuses": [container]})
    kube_lab.put("pods", "kubeflow", "runs", of_run, status={"phase": "Running"})
    kube_lab.put("pods", "kubeflow", "of another run", {}, status={"phase": "Pending"})
    nodes = argo_nodes("1", {"variant-2/0": "Pending", "variant-2/1": "Pending"}, retried=False)
    said: list[str] = []
    submit.wait("1", {"variant-2"}, Looked([nodes] * 5), said.append)  # type: ignore[arg-type]
    assert said[2].startswith("variant-2: 2 pods are still PENDING")
    assert said[3:5] == ["pod a: Unschedulable, 0/3 nodes are available", "pod b: ErrImagePull, no such image"]


def test_wait_says_why_pods_have_failed_where_the_cluster_is_at_hand(kube_lab: Lab) -> None:
    """The states as Kubernetes 1.36.3 and Kubeflow Pipelines 2.17.0 showed them on 25 November 2026."""

    def ended(name: str, code: int, reason: str) -> dict[str, Any]:
        state = {"terminated": {"exitCode": code, "reason": reason}}
        return {"name": name, "image": "", "imageID": "", "ready": False, "restartCount": 0, "state": state}

    of_run = {"pipeline/runid": "1"}
    late = {"reason": "DeadlineExceeded", "message": "Pod was active on the node longer than the specified deadline"}
    both = [ended("main", 143, "Error"), ended("wait", 0, "Completed")]
    kube_lab.put("pods", "kubeflow", "a", of_run, status={"phase": "Failed", **late, "containerStatuses": both})
    full = [ended("main", 137, "OOMKilled"), ended("wait", 0, "Completed")]
    kube_lab.put("pods", "kubeflow", "b", of_run, status={"phase": "Failed", "containerStatuses": full})
    kube_lab.put("pods", "kubeflow", "of another run", {}, status={"phase": "Failed"})
    said: list[str] = []
    assert submit.wait("1", set(), Looked([], "FAILED"), said.append) == "FAILED"  # type: ignore[arg-type]
    assert said == [
        "the run r (1, FAILED)",
        "failed pods: 'kubectl -n kubeflow get pods -l pipeline/runid=1 --field-selector status.phase=Failed'"
        " and 'kubectl -n kubeflow logs POD -c main' show the reason",
        "pod a: DeadlineExceeded, Pod was active on the node longer than the specified deadline, "
        "main ended with 143, Error",
        "pod b: main ended with 137, OOMKilled",
    ]


def test_wait_tells_of_each_iteration_of_a_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "WATCH_SECONDS", 0.01)
    nodes = argo_nodes("1", {"variant-2/0": "Succeeded", "variant-2/1": "Running"}, retried=False)
    said: list[str] = []
    submit.wait("1", {"variant-2"}, Looked([nodes] * 5), said.append)  # type: ignore[arg-type]
    assert said == ["variant-2: SUCCEEDED", "variant-2: RUNNING", "the run r (1, SUCCEEDED)"]


def test_wait_reads_what_a_real_server_says_of_a_pod_that_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(submit, "PENDING_SECONDS", 0.02)
    run = recorded()["a run whose pod finds no room"]
    said: list[str] = []
    tasks = {"guard", "sample", "snapshot", "tag", "ict"}
    submit.wait("1", tasks, Looked([run["run_details"]["task_details"]] * 20), said.append)  # type: ignore[arg-type]
    assert sorted(said[:4]) == ["guard: SUCCEEDED", "sample: SUCCEEDED", "snapshot: SUCCEEDED", "tag: RUNNING"]
    assert said[4].startswith("tag: 1 pod is still PENDING")
    assert len(said) == 6


def test_the_stand_in_makes_the_nodes_that_a_real_server_makes() -> None:
    """Also the names of 2.17's default, by which every node has another try and so a node around it."""
    real = {
        (re.sub(r"^(guard|sample|snapshot|tag)", "T", one["display_name"]), one["state"])
        for one in recorded()["a run whose pod finds no room"]["run_details"]["task_details"]
    }
    made = argo_nodes("1", {"tag": "Pending", "snapshot": "Succeeded"}, retried=True)
    ours = {(re.sub(r"^(tag|snapshot)", "T", one["display_name"]), one["state"]) for one in made}
    assert ours <= real
