"""The index builders' Deployment, raised and given back by the tasks of a pipeline; and how tasks end."""

import errno
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cluster_lab
import pytest
import small_project
from cluster_lab import DEPLOYMENT, Lab, Output

from realmops import artifacts
from realmops.cluster import builders, kube, tasks
from realmops.config import load_params
from realmops.refresh import shards
from realmops.refresh.exchange import FencedError
from realmops.refresh.follower import assign_exchange
from realmops.refresh.lease import acquire_lease
from realmops.refresh.shards import ShardWorker
from realmops.stages import STAGES
from realmops.stages.runner import shard_offer_path

# Scaling


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with cluster_lab.serve(Lab(), tmp_path / "kubeconfig") as found:
        yield found


@pytest.fixture
def api(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, str]]:
    """The client and the namespace of a Deployment without replicas; of the ServiceAccount that may scale it."""
    given = os.environ.get("KUBECONFIG")
    if not given or "cluster" not in request.config.option.markexpr:
        pytest.skip("not run: wants a cluster of yours, KUBECONFIG=FILE pytest -m cluster")
    with cluster_lab.real(tmp_path / "kubeconfig", given):
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        cluster = builders._cluster()
        from kubernetes import client

        yield client.AppsV1Api(cluster.client), cluster.namespace


@pytest.mark.cluster
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
        builders.patch_replicas("mlflow", 1)
    for replicas in (3, 0):
        builders.patch_replicas(DEPLOYMENT, replicas)
        found = apps.patch_namespaced_deployment_scale(DEPLOYMENT, namespace, {})  # changes nothing
        assert found.spec.replicas == (replicas or None)
    with pytest.raises(ValueError, match=f"{DEPLOYMENT} in namespace {namespace}, -1 replicas: .*returned 422"):
        builders.patch_replicas(DEPLOYMENT, -1)


def test_scaling_touches_the_scale_of_one_deployment_and_nothing_else(lab: Lab) -> None:
    builders.patch_replicas(DEPLOYMENT, 3)
    builders.patch_replicas(DEPLOYMENT, 0)
    assert lab.replicas == [3, 0]
    assert lab.requests == [("PATCH", cluster_lab.SCALE)] * 2


@pytest.mark.parametrize(
    ("status", "message"),
    [(403, "may not scale it.*get rolebindings"), (404, "does not exist.*get deployments"), (422, "returned 422")],
)
def test_a_cluster_that_refuses_is_explained(lab: Lab, status: int, message: str) -> None:
    lab.status = status
    with pytest.raises(ValueError, match=f"Deployment {DEPLOYMENT} in namespace lab, 2 replicas: .*{message}"):
        builders.patch_replicas(DEPLOYMENT, 2)


def test_a_cluster_that_does_not_answer_ends_the_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "TIME_OUT", (5, 0.1))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        cluster_lab.write_kubeconfig(tmp_path / "kubeconfig", {"server": address}, {}, cluster_lab.NAMESPACE)
        with pytest.raises(TimeoutError, match=r"API server does not respond: .*Read timed out"):
            builders.patch_replicas(DEPLOYMENT, 1)


def test_an_api_server_that_is_busy_is_asked_again(lab: Lab) -> None:
    for lab.status in (429, 500, 503):
        with pytest.raises(TimeoutError, match=f"API server returned {lab.status}"):
            builders.patch_replicas(DEPLOYMENT, 1)


def test_without_a_cluster_one_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"no Kubernetes cluster is configured .*leave the name of the builders"):
        builders.patch_replicas(DEPLOYMENT, 1)


def waits_for_builders(lab: Lab, seen: bool) -> str:
    """What is said of a builder's pod that has no node, where its events may be seen, and where not."""
    if not seen:
        lab.forbidden.add("events")
    for pod in (f"{DEPLOYMENT}-7d-x", "mlflow-0"):
        about = {"kind": "Pod", "name": pod}
        # lists come by name, and the last to be seen is named first here; one kind of event has no lastTimestamp
        for number, minute in enumerate((5, 1, 3)):
            told = {"reason": "FailedScheduling", "message": f"0/{minute} nodes are available", "type": "Warning"}
            when = {"eventTime" if minute == 1 else "lastTimestamp": f"2026-01-01T00:0{minute}:00Z"}
            lab.put("events", cluster_lab.NAMESPACE, f"{pod}.{number}", involvedObject=about, **told, **when)
    kubectl = f"kubectl -n {cluster_lab.NAMESPACE}"
    commands = f"'{kubectl} get events --field-selector involvedObject.kind=Pod,type=Warning' .*'{kubectl} logs "
    if seen:
        return f"s; {DEPLOYMENT}-7d-x: FailedScheduling: 0/5 nodes are available; see {commands}"
    return f"s; see {commands}"


def test_scaling_outlives_an_api_server_that_is_away(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a run, whose builders would stay up otherwise; and at the start of its pre-training."""
    monkeypatch.setattr(builders, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(builders, "POLL_SECONDS", 0.01)
    root, said = tmp_path / "runs/one", list[str]()
    lab.away = 10
    builders.scale_up_builders(root, tmp_path / "exchange", DEPLOYMENT, 0, "us", 60, said.append)
    lab.away, lab.status = 10, 503
    timer = threading.Timer(0.2, setattr, (lab, "status", 200))
    timer.start()
    builders.release_builders(DEPLOYMENT, root, "us", said.append)
    assert lab.replicas == [0, 0]
    assert re.fullmatch("the Kubernetes API server .*; retrying for 60 s", said[0])
    assert said[-1].endswith("; retrying for 1500 s")
    lab.away = 1000
    monkeypatch.setattr(builders, "SCALE_DOWN_SECONDS", 0.05)
    with pytest.raises(TimeoutError, match="API server does not respond"):
        builders.release_builders(DEPLOYMENT, root, "us", said.append)


@pytest.mark.parametrize("seen", [True, False])
def test_builders_that_never_live_end_the_wait(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """A sign that was there before and does not change is of a builder that is gone."""
    monkeypatch.setattr(builders, "POLL_SECONDS", 0.01)
    root, assignment = tmp_path / "runs/one", tmp_path / "builder" / "assignment.json"
    (assignment.parent / "alive").mkdir(parents=True)
    (assignment.parent / "alive" / "gone.json").write_text("{}")
    said: list[str] = []
    with pytest.raises(TimeoutError, match=f"0 of 2 index builders .*{waits_for_builders(lab, seen)}"):
        builders.scale_up_builders(root, tmp_path / "exchange", DEPLOYMENT, 2, "run", 0.2, said.append)
    assert lab.replicas == [2]
    assert said == ["waiting for index builders: 0 of 2 alive after 0 s"]
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

    monkeypatch.setattr("realmops.stages.runner.stage_inputs", lambda *_: {})
    monkeypatch.setattr(tasks, "_run", train)
    pretrained(tmp_path, "first")
    told = capfd.readouterr().err
    assert f"index builders of {assignment.parent} are held by another run that did not end within 0 s" in told
    assert f"process {os.getpid()} holds" in told
    assert served == ["first"]
    assert lab.replicas == [0]
    pretrained(tmp_path, "second")
    assert served == ["first", "second"]


def test_builders_that_a_newcomer_is_raising_are_left_to_it(lab: Lab, tmp_path: Path) -> None:
    assignment, waits, said = tmp_path / builders.ASSIGNMENT, threading.Event(), list[str]()

    def log(message: str) -> None:
        said.append(message)
        waits.set()

    assign_exchange(assignment, tmp_path / "first", tmp_path / "corpus", "first")
    last = threading.Thread(target=builders.release_builders, args=(DEPLOYMENT, tmp_path / "runs/one", "first", log))
    with acquire_lease(assignment.parent / builders.SCALING, log):
        last.start()
        assert waits.wait(60)
        assign_exchange(assignment, tmp_path / "second", tmp_path / "corpus", "second")
    last.join(60)
    assert lab.replicas == []
    assert said[-1] == f"{assignment}: the index builders work for another run, which scales them down"


@pytest.mark.parametrize(
    ("made", "owner", "left"),
    [("exchange/ours", "us", []), ("exchange/others", "us", ["ours"]), (None, "us", ["ours"]),
     ("exchange/ours", "them", ["ours"]), ("../elsewhere", "us", ["ours"])],
)  # fmt: skip
def test_an_exchange_goes_with_its_builders_once_its_pre_training_is_done(
    lab: Lab, tmp_path: Path, made: str | None, owner: str, left: list[str]
) -> None:
    """``made`` is the exchange that the finished pre-training used, ``owner`` the run that has raised the builders."""
    root, assignment = tmp_path / "runs/one", tmp_path / builders.ASSIGNMENT
    (root / "exchange/ours/run/v-000000").mkdir(parents=True)
    (root / "../elsewhere").mkdir()
    folder = root / STAGES["pretrain"].folder
    folder.mkdir(parents=True)
    if made:
        artifacts.write_manifest(folder, "pretrain", sections={"pretrain": {"exchange": str(root / made)}})
    tasks.lower_builders(DEPLOYMENT, str(root), "us")
    assign_exchange(assignment, root / "exchange/ours", tmp_path / "corpus", owner)
    tasks.lower_builders("", str(root), "us")
    assert lab.replicas == [], "nobody has raised them, and none are named"
    tasks.lower_builders(DEPLOYMENT, str(root), "us")
    assert [path.name for path in (root / "exchange").iterdir()] == left
    assert (root / "../elsewhere").is_dir(), "a folder that somebody has named is not this run's"
    assert lab.replicas == ([0] if owner == "us" else [])


# Shards


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the stage snapshot done, and what ``tag`` makes of it alone."""
    folder = tmp_path_factory.mktemp("shards")
    small_project.write_project(folder, tag={"method": "tagger"})
    for name in ("snapshot", "tag"):
        small_project.stage(name, tagger_values(folder), folder, folder / "runs/one")
    (folder / "runs/one/data/spans").rename(folder / "alone")
    return folder


def tagger_values(folder: Path) -> dict[str, dict[str, Any]]:
    files = {"train": str(folder / "tagged.conll"), "dev": str(folder / "tagged.conll")}
    return small_project.toy_values(
        tag={"method": "tagger", **files}, snapshot={"documents": str(folder / "documents.jsonl")}
    )


def tagged(snapshot: Path, folder: Path, shard_pods: int, owner: str = "us") -> dict[str, bytes]:
    """What the component ``tag`` makes in a pod of its own, on a volume in ``folder``."""
    shutil.copytree(snapshot / "runs", folder / "runs", dirs_exist_ok=True)
    shown = Output(folder / "out.json")
    tasks.run_stage(
        "tag", json.dumps(tagger_values(snapshot)), str(folder / "runs/one"), shown, shown,
        owner=owner, deployment=DEPLOYMENT, shard_pods=shard_pods,
    )  # fmt: skip
    return spans_of(folder / "runs/one/data/spans")


def spans_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "corpus").glob("*.npy")}


def test_builders_are_raised_to_help_with_shards_and_given_back_when_there_are_none(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four shards the stage's own pod makes the last one alone."""
    assignment = tmp_path / builders.ASSIGNMENT
    usual, left = ShardWorker.make_one, list[int]()

    def lazy(self: ShardWorker) -> bool:
        left.append(len(self.missing()))
        return left[-1] == 1 and usual(self)

    monkeypatch.setattr(shards, "SHARD_ROWS", 3)
    monkeypatch.setattr(ShardWorker, "make_one", lazy)
    monkeypatch.setattr(builders, "POLL_SECONDS", 0.05)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with cluster_lab.serve(Lab(cluster_lab.follower(assignment)), tmp_path / "kubeconfig") as lab:
        found = tagged(snapshot, tmp_path, shard_pods=3)
        assert lab.replicas == [2, 0]
    assert left[0] == 4
    assert found == spans_of(snapshot / "alone")
    assert json.loads(assignment.read_text())["owner"] == "us"


@pytest.mark.parametrize(
    ("shard_pods", "status", "holder", "told", "replicas"),
    [
        (1, 200, "", "", []),
        (3, 404, "", f"tag works without index builders: Deployment {DEPLOYMENT} in namespace lab, 2 replicas: ", []),
        (3, 200, "another run", "claim, which ", []),
    ],
)
def test_a_stage_never_waits_for_builders_that_would_help(
    snapshot: Path, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    shard_pods: int, status: int, holder: str, told: str, replicas: list[int],
) -> None:  # fmt: skip
    lab.status = status
    usual = ShardWorker.make_one

    def late(self: ShardWorker) -> bool:
        """When the offer has been seen."""
        small_project.wait_for(lambda: told in capfd_text(), 60)
        return usual(self)

    seen: list[str] = []

    def capfd_text() -> str:
        seen.append(capfd.readouterr().err)
        return "".join(seen)

    monkeypatch.setattr(shards, "SHARD_ROWS", 3)
    monkeypatch.setattr(ShardWorker, "make_one", late)
    monkeypatch.setattr(builders, "POLL_SECONDS", 0.05)
    leases = ExitStack()
    if holder:
        leases.enter_context(acquire_lease(tmp_path / builders.ASSIGNMENT.parent / "claim", lambda message: None))
    with leases:
        assert tagged(snapshot, tmp_path, shard_pods) == spans_of(snapshot / "alone")
    assert lab.replicas == replicas


def test_the_builders_of_a_task_help_it_with_its_shards(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pre-training's, which it holds all the time: for each of its last indexes."""
    monkeypatch.setattr(builders, "POLL_SECONDS", 0.05)
    root, assignment = tmp_path / "runs/one", tmp_path / builders.ASSIGNMENT
    offer, report = shard_offer_path(root, "pretrain"), small_project.Quiet()
    offer.parent.mkdir(parents=True)
    with (
        acquire_lease(assignment.parent / "claim", report.log),
        builders.shard_helpers(root, "pretrain", DEPLOYMENT, 3, "us", report, held=True),
    ):
        for number in (1, 2):
            artifacts.write_json(offer, {"exchange": f"/of/{number}", "snapshot": "/corpus"})
            small_project.wait_for(lambda number=number: len(lab.replicas) == 2 * number - 1, 60)
            assert json.loads(assignment.read_text())["exchange"] == f"/of/{number}"
            offer.unlink()
            small_project.wait_for(lambda number=number: len(lab.replicas) == 2 * number, 60)
    assert lab.replicas == [2, 0, 2, 0]
    assert report.warned == []


def test_an_api_server_that_is_away_is_asked_again_for_builders(
    snapshot: Path, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.away = 1
    usual = ShardWorker.make_one

    def late(self: ShardWorker) -> bool:
        small_project.wait_for(lambda: lab.replicas, 60)
        return usual(self)

    monkeypatch.setattr(shards, "SHARD_ROWS", 3)
    monkeypatch.setattr(ShardWorker, "make_one", late)
    monkeypatch.setattr(builders, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(builders, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(kube, "TIME_OUT", (5, 0.1))
    assert tagged(snapshot, tmp_path, 2) == spans_of(snapshot / "alone")
    assert lab.replicas == [1, 0]


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ValueError("seed is -1"), 2, "seed is -1"),
        (TimeoutError("no index came"), 1, "no index came"),
        (ConnectionError("the server is gone"), 2, "the server is gone."),
        (PermissionError(errno.EACCES, "Permission denied", "runs/one"), 2, "runs/one: Permission denied."),
        (OSError(errno.ENOSPC, "No space left"), 2, "No space left. Free disk space and run the same command again; "),
        (ChildProcessError("the index builder ended with exit code 2"), 2, "the index builder ended with exit code 2."),
        (FencedError("a newer trainer has taken over"), 2, "a newer trainer has taken over"),
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


def test_a_volume_that_belongs_to_others_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Seen on a cluster whose volumes are folders of root."""
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    root = str(tmp_path / "runs" / "one")
    with pytest.raises(SystemExit):
        tasks.run_stage("ict", json.dumps(small_project.toy_values()), root, Output(tmp_path), Output(tmp_path))
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{tmp_path} belongs to user {os.getuid()} and group " in line
    assert "kubectl scale deployment/realmops-index-builder --replicas=1" in line
    assert [*tmp_path.iterdir()] == []


def test_a_run_takes_over_what_another_has_made_of_the_same(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other training questions are another key and another folder, and nothing before ``finetune`` is made again."""

    class Runs(Exception):
        pass

    def refuse(*_: Any) -> Any:
        raise Runs

    one, two = tmp_path / "runs/one", tmp_path / "runs/two"
    for root in (one, two):
        shutil.copytree(trained, root, ignore=shutil.ignore_patterns("root"))
    shutil.copytree(trained / "root", one, dirs_exist_ok=True)
    monkeypatch.setenv("REALMOPS_COMMIT", "c0de")
    for record in one.glob(f"*/*/{artifacts.MANIFEST}"):
        made = {key: value for key, value in artifacts.read_json(record).items() if key != "manifest_digest"}
        artifacts.write_json(record, artifacts.add_digest(made | {"code": "c0de"}))
    shown = Output(tmp_path / "shown.json")

    def pretrain(root: Path, values: Mapping[str, Mapping[str, Any]]) -> None:
        exchange = {**values["pretrain"], "exchange": str(root / "exchange")}
        tasks.pretrain(
            json.dumps({**values, "pretrain": exchange}), str(root), shown, shown,
            owner="us", deployment="", builders=0, wait_seconds=1, processes=1, limits="",
        )  # fmt: skip

    pretrain(one, load_params(trained / "params.yaml"))
    values = load_params(trained / "params.yaml", settings=["questions.train=questions.dev.jsonl"])
    monkeypatch.setattr("realmops.stages.Stage.run", refuse)
    capfd.readouterr()
    for name in ("snapshot", "tag", "ict"):
        tasks.run_stage(name, json.dumps(values), str(two), shown, shown)
    pretrain(two, values)
    assert capfd.readouterr().err.count("reusing") == 4
    for name in ("snapshot", "tag", "ict", "pretrain"):
        assert artifacts.read_manifest(two / STAGES[name].folder, name)
    with pytest.raises(Runs):
        tasks.run_stage("ict", json.dumps({**values, "ict": {**values["ict"], "steps": 5}}), str(two), shown, shown)
    shutil.rmtree(two / "models/ict")
    for other in ("another", ""):
        monkeypatch.setenv("REALMOPS_COMMIT", other)
        with pytest.raises(Runs):
            tasks.run_stage("ict", json.dumps(values), str(two), shown, shown)
    monkeypatch.setenv("REALMOPS_COMMIT", "c0de")
    (one / "models/ict/reader/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(Runs):
        tasks.run_stage("ict", json.dumps(values), str(two), shown, shown)


def test_a_fault_of_ours_ends_a_task_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_run", lambda *_: [].pop())
    with pytest.raises(IndexError):
        tasks.run_stage(
            "ict", json.dumps(small_project.toy_values()), str(tmp_path), Output(tmp_path), Output(tmp_path)
        )
