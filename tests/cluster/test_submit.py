"""``realmops submit``, the watched run and the task ``guard``, with a stand-in for Kubeflow Pipelines' server."""

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cluster_lab
import kfp_lab
import pytest
import small_project
from click.testing import Result
from cluster_lab import Lab
from compiled import documents, file_of, project_with_pipeline
from kfp_lab import KfpLab, arguments_of
from test_key import key

from realmops.cluster import kfp_client as server
from realmops.cluster import submit, tasks
from realmops.cluster.kfp_client import KfpClient
from realmops.cluster.packed_options import unpack_options
from realmops.cluster.pod_namespace import place_of
from realmops.config import load_params

COMPILED = file_of("train")
ROOT = COMPILED.parents[1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return project_with_pipeline(tmp_path)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KfpLab]:
    """A server whose runs are RUNNING."""
    yield from kfp_lab.named_by_environment(tmp_path, monkeypatch)


@pytest.fixture
def kube_lab(tmp_path: Path, lab: KfpLab) -> Iterator[Lab]:
    """The cluster of that server."""
    with cluster_lab.serve(Lab(), tmp_path / "kubeconfig") as found:
        yield found


def submitted(project: Path, *words: str) -> Result:
    """Submit the project's copy of the compiled pipeline, unless ``words`` name another."""
    compiled = project / "pipelines" / "train.yaml"
    return small_project.cli("submit", "--params", project / "params.yaml", "--pipeline", compiled, *words)


# Submission


def test_a_submission_sends_options_run_and_key(project: Path, lab: KfpLab) -> None:
    result = submitted(
        project, "--set", "pretrain.steps=13", "--argument", "image=realmops:1", "--argument", "builders=3",
        "--argument", 'tolerations=[{"key": "gpu"}]', "--argument", "cpu=4",
    )  # fmt: skip
    digest = key(project, "realmops:1", "pretrain.steps=13")
    [run] = lab.runs
    arguments = arguments_of(run)
    sent = unpack_options(arguments.pop("options"))
    assert sent == load_params(project / "params.yaml", settings=["pretrain.steps=13"])
    assert arguments == {
        "run": digest[:16], "key": digest, "image": "realmops:1", "builders": 3, "tolerations": [{"key": "gpu"}],
        "cpu": "4",
    }  # fmt: skip
    assert run["display_name"] == f"realmops-train-{digest[:16]}"
    assert result.stdout.splitlines()[-2:] == [
        f"submitted: the run realmops-train-{digest[:16]} ({run['run_id']}, RUNNING) with the key {digest[:16]}",
        f"run page: {lab.url}/#/runs/details/{run['run_id']}",
    ]
    [version] = lab.kept["versions"]
    assert version["name"] == digest
    assert documents(lab.specs[version["pipeline_version_id"]]) == documents(COMPILED.read_text())


def test_run_name_experiment_and_folder_can_be_named(project: Path, lab: KfpLab) -> None:
    for _ in range(2):
        submitted(project, "--name", "Tuesday", "--experiment", "50 % + é", "--argument", "run=tuesday")
    (run, _), [experiment] = lab.runs, lab.kept["experiments"]
    assert (run["display_name"], experiment["display_name"]) == ("Tuesday", "50 % + é")
    assert arguments_of(run)["run"] == "tuesday"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--argument colour=red", 2, r"--argument colour: .*train.yaml; allowed are accelerator, .*builders, "),
        ("--argument key=mine", 2, "--argument key: not a parameter of "),
        ("--argument image", 2, "expected NAME=VALUE"),
        ("--argument builders=2.5", 2, "--argument builders=2.5: expected a whole number"),
        ("--argument margin=NaN", 2, "--argument margin=NaN: expected a number"),
        ("--argument tolerations={}", 2, r"expected JSON such as \["),
        ("--argument volume=", 2, "--argument volume=: Kubeflow Pipelines needs a name for the "),
        ("--pipeline nowhere.yaml", 2, "nowhere.yaml does not exist; --pipeline must be train, ablations, refresh or"),
        ("--pipeline PROJECT/params.yaml", 2, "params.yaml is not a compiled pipeline"),
        ("--endpoint ml-pipeline:8888", 2, "'ml-pipeline:8888'; it must start with http:// or https://"),
        ("--endpoint http://127.0.0.1:port", 2, "is not a valid URL"),
        ("--endpoint http://127.0.0.1:9", 1, "http://127.0.0.1:9 does not respond: .*Connection refused"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    words: str, code: int, message: str, project: Path, lab: KfpLab
) -> None:
    result = submitted(project, *words.replace("PROJECT", str(project)).split(" "))
    assert result.exit_code == code
    [_starting, line] = result.stderr.splitlines()
    assert re.match(f"realmops: .*{message}", line)
    assert lab.requests == []


# One run for each key


@pytest.mark.parametrize("words", [(), ("--once",)])
def test_a_version_that_another_process_creates_for_long_needs_a_retry(
    project: Path, lab: KfpLab, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Its name is reserved, and it is not listed yet."""
    submitted(project)
    lab.kept["versions"][0]["status"] = "CREATING"
    with monkeypatch.context() as patch:
        patch.setattr(submit, "START_SECONDS", 0.1)
        result = submitted(project, *words)
    assert result.exit_code == 1
    assert "another process is creating it: try again" in result.stderr
    threading.Timer(0.2, lab.kept["versions"][0].update, [{"status": "READY"}]).start()
    assert "nothing to submit" in submitted(project, "--once").stdout


def prepared(project: Path) -> submit.Submission:
    options, pipeline = load_params(project / "params.yaml"), submit.Pipeline.read(str(COMPILED))
    return submit.prepare(options, project, pipeline, (), "realmops", None)[0]


def test_a_run_that_starts_after_the_runs_were_listed_is_found(
    project: Path, lab: KfpLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has created the next version, and starts its run only then."""
    lab.state = "FAILED"
    submitted(project, "--once")
    lab.state, original = "RUNNING", KfpClient.runs_of
    submission, client, started = prepared(project), KfpClient(lab.url), list[Any]()

    def runs_of(server: KfpClient, versions: Any) -> list[Any]:
        runs = original(server, versions)
        if not started:
            started.append(server.start(server.id_of("experiment", "realmops"), versions[-1], "theirs", {}))
        return runs

    client.create_version(client.id_of("pipeline", "realmops-train"), f"{submission.key}-2", COMPILED)
    monkeypatch.setattr(KfpClient, "runs_of", runs_of)
    assert submit.submit(submission, client, once=True, log=print).run_id == started[0].run_id
    assert len(lab.runs) == 2


@pytest.mark.parametrize("state", ["FAILED", None])
def test_of_eight_submissions_at_once_one_starts_a_run(
    project: Path, lab: KfpLab, monkeypatch: pytest.MonkeyPatch, state: str | None
) -> None:
    """Each finds an earlier run that has failed, or a version whose process was killed before it started a run."""
    monkeypatch.setattr(submit, "START_SECONDS", 60.0 if state else 2.0)
    submitted(project, "--once")
    lab.runs[:] = [{**run, "state": state} for run in lab.runs if state]
    earlier, all_know = len(lab.runs), threading.Barrier(8)
    original, original_start = KfpClient.runs_of, KfpClient.start

    def runs_of(server: KfpClient, versions: Any) -> list[Any]:
        runs = original(server, versions)
        if len(lab.kept["versions"]) == 1:
            all_know.wait(60)
        return runs

    def start_slowly(*arguments: Any) -> Any:
        time.sleep(0.5)
        return original_start(*arguments)

    monkeypatch.setattr(KfpClient, "runs_of", runs_of)
    monkeypatch.setattr(KfpClient, "start", start_slowly)
    start = partial(submit.submit, prepared(project), once=True, log=lambda line: None)
    with ThreadPoolExecutor(8) as pool:
        started = [*pool.map(start, [KfpClient(lab.url) for _ in range(8)])]
    assert len(lab.runs) == earlier + 1
    assert {run.run_id for run in started} == {lab.runs[-1]["run_id"]}


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "PAUSED", "SUCCEEDED"])
def test_once_finds_a_run_of_the_key(state: str, project: Path, lab: KfpLab) -> None:
    lab.state = state
    first, second = (submitted(project, "--once") for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0)
    [run] = lab.runs
    line, link = second.stdout.splitlines()[-2:]
    assert line.startswith(f"nothing to submit: the run {run['display_name']} ({run['run_id']}")
    assert link == f"run page: {lab.url}/#/runs/details/{run['run_id']}"


@pytest.mark.parametrize("state", ["FAILED", "CANCELED", "CANCELING"])
def test_a_failed_run_is_submitted_again_in_its_folder(state: str, project: Path, lab: KfpLab) -> None:
    lab.state = state
    submitted(project, "--once")
    lab.state = "RUNNING"
    assert "\nsubmitted: " in submitted(project, "--once").stdout
    first, second = lab.runs
    assert arguments_of(first) == arguments_of(second)
    submitted(project, "--once")
    assert len(lab.runs) == 2, "the second one is active"


def test_another_key_gets_another_run_on_any_page_of_runs(project: Path, lab: KfpLab) -> None:
    lab.largest_page = 1
    for steps in (13, 14, 15, 15):
        assert submitted(project, "--once", "--set", f"pretrain.steps={steps}").exit_code == 0
    assert len(lab.runs) == 3


# Servers


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, 2, "returned 401 .*set KF_PIPELINES_SA_TOKEN_PATH to a file with a valid token"),
        (403, 2, r"returned 403 .*--namespace to your own \(team is not\), or bind .* kubeflow-pipelines-edit there"),
        (404, 2, "returned 404 .*check that this is the address of the Kubeflow Pipelines API"),
        (400, 2, "returned 400 Bad Request: set by the test"),
        (503, 1, "returned 503 .*try again"),
    ],
)
def test_an_error_of_the_server_is_explained(status: int, code: int, message: str, project: Path, lab: KfpLab) -> None:
    lab.status = status
    result = submitted(project, "--once", "--namespace", "team")
    assert result.exit_code == code
    assert re.fullmatch(f"submit: starting\nrealmops: {lab.url} {message}.*\n", result.stderr)


@pytest.mark.parametrize("place", ["http://ann:pa55@127.0.0.1:9?s3cret", "ann:pa55@h:8888"])
def test_a_password_in_the_endpoint_is_not_shown(place: str, project: Path, lab: KfpLab) -> None:
    error = submitted(project, "--endpoint", place).stderr
    assert "realmops: " in error
    assert not [secret for secret in ("ann:", "pa55", "s3cret") if secret in error], error


def test_a_login_page_is_no_answer(project: Path, lab: KfpLab) -> None:
    """A session that ends: the page would be a list of no runs, and a run without an end."""
    submitted(project, "--once")
    client, run_id = KfpClient(lab.url), lab.runs[0]["run_id"]
    lab.page_for_all = "<html>Log in</html>"
    for request in (lambda: client.id_of("experiment", "realmops"), lambda: submit.wait(run_id, set(), client, print)):
        with pytest.raises(ValueError, match="returned a page, perhaps a login, instead of JSON"):
            request()
    assert submitted(project).exit_code == 2


def test_the_token_in_the_file_is_sent(project: Path, lab: KfpLab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.token = "a-token"
    assert submitted(project).exit_code == 2
    (project / "token").write_text("a-token\n")
    monkeypatch.setenv(server.TOKEN_FILE, str(project / "token"))
    assert submitted(project).exit_code == 0
    (project / "token").unlink()
    assert "which is not a file; mount the token there" in submitted(project).stderr


@pytest.mark.parametrize("tag", ["2.16.0", "3.0.0-rc.1", "unknown"])
def test_servers_from_2_16_are_accepted(project: Path, lab: KfpLab, tag: str) -> None:
    lab.tag_name = tag
    for pipeline in ("train", "ablations", "refresh"):
        assert submitted(project, "--pipeline", str(file_of(pipeline)), "--argument", "run=first").exit_code == 0
    lab.tag_name = "2.15.2"
    result = submitted(project)
    assert result.exit_code == 2
    assert re.match(
        f"submit: starting\nrealmops: {lab.url} is Kubeflow Pipelines 2.15.2; .* needs 2.16.0 or later", result.stderr
    )
    assert len(lab.runs) == 3


# The namespace of the pods


def test_without_profiles_pods_are_in_the_servers_namespace(project: Path, lab: KfpLab) -> None:
    lab.namespace = "kfp"
    assert "pods run in namespace kfp (the server's); 'kubectl" in submitted(project, "--namespace", "kfp").stdout
    assert [run["pods_in"] for run in lab.runs] == ["kfp"]
    assert [one["namespace"] for one in lab.kept["pipelines"]] == [""]


def test_with_profiles_pods_are_in_the_namespace_of_the_profile(project: Path, lab: KfpLab) -> None:
    lab.multi_user = True
    assert "set --namespace to the namespace of a profile" in submitted(project).stderr
    for _ in range(2):
        assert "pods run in namespace team (the profile's)" in submitted(project, "--namespace", "team").stdout
    assert [run["pods_in"] for run in lab.runs] == ["team", "team"]
    assert [one["namespace"] for one in lab.kept["pipelines"]] == ["team"]


@pytest.mark.parametrize(
    ("endpoint", "given", "namespace"),
    [
        ("http://ml-pipeline.kfp:8888", "team", "kfp"), ("http://ml-pipeline.kfp.svc.cluster.local:8888", None, "kfp"),
        ("http://localhost:8888", None, "kubeflow"), ("http://localhost:8888", "kfp", "kfp"),
    ],
)  # fmt: skip
def test_the_address_of_the_service_contains_the_servers_namespace(
    endpoint: str, given: str | None, namespace: str
) -> None:
    assert place_of(endpoint, given, profiles=False).namespace == namespace


# The watched run


class Watched:
    """A server whose run has these nodes, one list for each poll, and then the state ``ends``."""

    place = place_of("http://localhost:8888", None, profiles=False)

    def __init__(self, polls: list[list[dict[str, Any]]], ends: str = "SUCCEEDED") -> None:
        self.polls, self.ends = polls, ends

    def run(self, run_id: str) -> Any:
        nodes = [SimpleNamespace(**one) for one in (self.polls.pop(0) if self.polls else ())]
        state = "RUNNING" if nodes else self.ends
        details = SimpleNamespace(task_details=nodes)
        return SimpleNamespace(run_details=details, state=state, display_name="r", run_id=run_id, error=None)


def watched(tasks: set[str], *polls: list[dict[str, Any]], ends: str = "SUCCEEDED") -> list[str]:
    """Return the log of a run."""
    lines: list[str] = []
    assert submit.wait("1", tasks, Watched([*polls], ends), lines.append) == ends  # type: ignore[arg-type]
    return lines


def node(name: str, state: str, task_id: str = "") -> dict[str, Any]:
    return {"task_id": task_id or name, "display_name": name, "state": state}


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELED", 1)])
def test_wait_exits_by_the_state_of_the_run(state: str, code: int, project: Path, lab: KfpLab) -> None:
    lab.state = state
    result = submitted(project, "--wait")
    assert result.exit_code == code
    [run] = lab.runs
    lines = result.stdout.splitlines()
    expected = ["pretrain: SUCCEEDED", f"the run {run['display_name']} ({run['run_id']}, {state})"]
    assert lines[-2 - code :][:2] == expected
    assert lines[-1].startswith("failed pods: 'kubectl -n kubeflow get pods") == bool(code)


def test_wait_continues_while_the_server_is_unreachable(
    project: Path, lab: KfpLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.state = "SUCCEEDED"
    original, away = KfpClient.run, iter([True, True])

    def run(server: KfpClient, run_id: str) -> Any:
        if next(away, False):
            raise TimeoutError("away")
        return original(server, run_id)

    monkeypatch.setattr(KfpClient, "run", run)
    assert submitted(project, "--wait").exit_code == 0
    away = iter([True])
    monkeypatch.setattr(submit, "UNREACHABLE_SECONDS", -1.0)
    assert submitted(project, "--wait").exit_code == 1


@pytest.mark.usefixtures("lab")
def test_wait_reports_a_pending_pod_of_a_real_server_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(submit, "PENDING_SECONDS", 0.02)
    recorded = json.loads((ROOT / "tests/recorded/kubeflow-2.17.0.json").read_text())
    nodes = recorded["a run whose pod finds no room"]["run_details"]["task_details"]
    lines = watched({"guard", "sample", "snapshot", "tag", "ict"}, *[nodes] * 20)
    assert sorted(lines[:4]) == ["guard: SUCCEEDED", "sample: SUCCEEDED", "snapshot: SUCCEEDED", "tag: RUNNING"]
    assert lines[4].startswith("tag: pending pods after 0 s: 1; possible causes are")
    assert "'kubectl -n kubeflow get pods -l pipeline/runid=1 --field-selector status.phase=Pending'" in lines[5]
    assert len(lines) == 7


def test_wait_reports_why_pods_are_pending(kube_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "PENDING_SECONDS", 0.02)
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    pull = container_status("main", {"waiting": {"reason": "ErrImagePull", "message": "no such image"}})
    put_pods(kube_lab, "Pending", a={"conditions": [full]}, b={"containerStatuses": [pull]})
    kube_lab.put("pods", "kubeflow", "of another run", {}, status={"phase": "Pending"})
    iterations = [[node("variant-2", "RUNNING", str(n)), node("executor", "PENDING", f"pod {n}")] for n in range(2)]
    lines = watched({"variant-2"}, *[[*iterations[0], *iterations[1]]] * 5)
    assert lines[:2] == ["variant-2: RUNNING"] * 2, "each iteration of a loop"
    assert lines[2].startswith("variant-2: pending pods after 0 s: 2; ")
    assert lines[4:6] == ["pod a: Unschedulable, 0/3 nodes are available", "pod b: ErrImagePull, no such image"]


def test_wait_reports_why_pods_have_failed(kube_lab: Lab) -> None:
    """The states as Kubernetes 1.36.3 and Kubeflow Pipelines 2.17.0 showed them on 25 November 2026."""
    late = {"reason": "DeadlineExceeded", "message": "Pod was active on the node longer than the specified deadline"}
    killed, memory, completed = (
        container_status(name, {"terminated": {"exitCode": code, "reason": reason}})
        for name, code, reason in (("main", 143, "Error"), ("main", 137, "OOMKilled"), ("wait", 0, "Completed"))
    )
    a, b = late | {"containerStatuses": [killed, completed]}, {"containerStatuses": [memory, completed]}
    put_pods(kube_lab, "Failed", a=a, b=b)
    kube_lab.put("pods", "kubeflow", "of another run", {}, status={"phase": "Failed"})
    lines = watched(set(), ends="FAILED")
    assert lines[0] == "the run r (1, FAILED)"
    assert lines[2:] == [
        f"pod a: DeadlineExceeded, {late['message']}, main ended with 143, Error",
        "pod b: main ended with 137, OOMKilled",
    ]


def container_status(name: str, state: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "image": "", "imageID": "", "ready": False, "restartCount": 0, "state": state}


def put_pods(lab: Lab, phase: str, **statuses: dict[str, Any]) -> None:
    for name, status in statuses.items():
        lab.put("pods", "kubeflow", name, {"pipeline/runid": "1"}, status={"phase": phase, **status})


# The task guard


def older_and_younger(lab: KfpLab, project: Path, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    for _ in range(2):
        assert submitted(project, *words).exit_code == 0
    kfp_lab.make_older(lab.runs[0], 60)
    return lab.runs[0], lab.runs[1]


def test_guard_ends_the_younger_run_of_a_key(project: Path, lab: KfpLab, capsys: pytest.CaptureFixture[str]) -> None:
    older, younger = older_and_younger(lab, project)
    submitted(project, "--argument", "image=realmops:2")
    digest, other = (arguments_of(run)["key"] for run in lab.runs[1:])
    with pytest.raises(SystemExit) as ended:
        tasks.guard(digest, younger["run_id"], lab.url)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        f"realmops: guard: the run {older['display_name']} ({older['run_id']}, RUNNING) "
        f"has the same key {digest[:16]} and is older, so this run stops"
    ]
    tasks.guard(digest, older["run_id"], lab.url)
    tasks.guard(other, lab.runs[2]["run_id"], lab.url)
    for state in ("FAILED", "CANCELING"):  # or no run would continue a cancelled one
        older["state"] = state
        tasks.guard(digest, younger["run_id"], lab.url)


def test_of_two_runs_of_one_second_the_lower_id_is_the_older(project: Path, lab: KfpLab) -> None:
    older, younger = older_and_younger(lab, project)
    older["created_at"] = younger["created_at"]
    first, second = sorted((older["run_id"], younger["run_id"]))
    digest = arguments_of(older)["key"]
    tasks.guard(digest, first, lab.url)
    with pytest.raises(SystemExit):
        tasks.guard(digest, second, lab.url)


def test_guard_continues_without_a_key_or_a_server(lab: KfpLab, capsys: pytest.CaptureFixture[str]) -> None:
    tasks.guard("", "run", lab.url)
    tasks.guard("key", "run", "")
    assert lab.requests == []
    tasks.guard("key", "run", "http://127.0.0.1:9")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: guard: could not check for an older run with the same key, continuing: ")
