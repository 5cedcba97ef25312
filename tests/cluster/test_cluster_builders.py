"""The index builders' Deployment, scaled by the tasks of a pipeline; errors and shared outputs of tasks."""

import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cluster_lab
import pytest
import small_project
from cluster_lab import DEPLOYMENT, Lab, Output

from realmops import artifacts
from realmops.cluster import builders, tasks
from realmops.config import load_params
from realmops.options import Options
from realmops.refresh import shards
from realmops.refresh.follower import assign_exchange
from realmops.refresh.lease import acquire_lease
from realmops.refresh.shards import ShardWorker
from realmops.stages import STAGES
from realmops.stages.runner import shard_offer_path


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(builders, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(builders, "RETRY_SECONDS", 0.02)
    with cluster_lab.serve(Lab(), tmp_path / "kubeconfig") as found:
        yield found


def task_error(capfd: pytest.CaptureFixture[str], stage: str, root: Path) -> tuple[int, str]:
    """Exit code and last line of a task that fails."""
    shown = Output(root / "shown.json")
    with pytest.raises(SystemExit) as caught:
        tasks.run_stage(stage, small_project.toy_values().model_dump_json(), str(root), shown, shown)
    return int(caught.value.code or 0), capfd.readouterr().err.splitlines()[-1]


# Scaling


def test_scaling_patches_the_scale_of_one_deployment(lab: Lab) -> None:
    builders.patch_replicas(DEPLOYMENT, 3, 0, print)
    builders.patch_replicas(DEPLOYMENT, 0, 0, print)
    assert lab.replicas == [3, 0]
    assert lab.requests == [("PATCH", cluster_lab.SCALE)] * 2


@pytest.mark.parametrize(
    ("status", "message"),
    [(403, "may not scale it.*get rolebindings"), (404, "does not exist.*get deployments"), (422, "returned 422")],
)
def test_a_refused_request_is_explained(lab: Lab, status: int, message: str) -> None:
    lab.status = status
    with pytest.raises(ValueError, match=f"Deployment {DEPLOYMENT} in namespace lab, 2 replicas: .*{message}"):
        builders.patch_replicas(DEPLOYMENT, 2, 0, print)


def test_without_a_cluster_the_message_names_the_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"no Kubernetes cluster is configured .*leave the name of the builders"):
        builders.patch_replicas(DEPLOYMENT, 1, 0, print)


def test_scaling_is_retried_while_the_api_server_is_unreachable(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start of a pre-training, and at the end of a run, whose builders would stay up otherwise."""
    root, lines = tmp_path / "runs/one", list[str]()
    lab.away = 10
    builders.scale_up_builders(root, tmp_path / "exchange", DEPLOYMENT, 0, "us", 60, lines.append)
    lab.away, lab.status = 10, 503
    timer = threading.Timer(0.2, setattr, (lab, "status", 200))
    timer.start()
    builders.release_builders(DEPLOYMENT, root, "us", lines.append)
    assert lab.replicas == [0, 0]
    assert re.fullmatch("the Kubernetes API server .*; retrying for 60 s", lines[0])
    lab.away = 1000
    monkeypatch.setattr(builders, "SCALE_DOWN_SECONDS", 0.05)
    with pytest.raises(TimeoutError, match="API server does not respond"):
        builders.release_builders(DEPLOYMENT, root, "us", lines.append)


@pytest.mark.parametrize("forbidden", [False, True])
def test_builders_without_a_new_heartbeat_end_the_wait_with_the_reasons(
    forbidden: bool, lab: Lab, tmp_path: Path
) -> None:
    """The reasons are those of the builders' pods, as far as they can be read."""
    if forbidden:
        lab.forbidden.add("pods")
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/5 nodes are available"}
    for pod in (f"{DEPLOYMENT}-7d-x", "mlflow-0"):
        lab.put("pods", cluster_lab.NAMESPACE, pod, status={"phase": "Pending", "conditions": [full]})
    root, assignment = tmp_path / "runs/one", tmp_path / builders.ASSIGNMENT
    (assignment.parent / "alive").mkdir(parents=True)
    (assignment.parent / "alive" / "gone.json").write_text("{}")
    reason = "" if forbidden else f"{DEPLOYMENT}-7d-x: Unschedulable, 0/5 nodes are available; "
    with pytest.raises(TimeoutError, match=f"0 of 2 index builders .* s; {reason}see 'kubectl -n lab get events"):
        builders.scale_up_builders(root, tmp_path / "exchange", DEPLOYMENT, 2, "run", 0.2, lambda line: None)
    assert lab.replicas == [2]
    work = json.loads(assignment.read_text())
    assert (work["exchange"], work["snapshot"]) == (str(tmp_path / "exchange"), str(root / "data/snapshot/corpus"))


def pretrain(folder: Path, run: str, wait_seconds: int = 100) -> None:
    """Call the task in a pod of the run with this name and id."""
    shown = Output(folder / f"{run}.json")
    tasks.pretrain(
        small_project.toy_values().model_dump_json(), str(folder / "runs" / run), shown, shown, owner=run,
        deployment=DEPLOYMENT, builders=0, wait_seconds=wait_seconds, processes=1, limits="",
    )  # fmt: skip


def test_builders_of_another_run_are_waited_for_and_used_after_its_end(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second run starts while the first has scaled up the builders and has no exchange yet."""
    assignment, owners = tmp_path / builders.ASSIGNMENT, list[str]()

    def train(*_: Any) -> None:
        if not owners:
            with pytest.raises(SystemExit):
                pretrain(tmp_path, "second", wait_seconds=0)
        owners.append(json.loads(assignment.read_text())["owner"])

    monkeypatch.setattr("realmops.stages.runner.stage_inputs", lambda *_: {})
    monkeypatch.setattr(tasks, "_run", train)
    pretrain(tmp_path, "first")
    error = capfd.readouterr().err
    assert f"index builders of {assignment.parent} are held by another run that did not end within 0 s" in error
    assert (owners, lab.replicas) == (["first"], [0])
    pretrain(tmp_path, "second")
    assert owners == ["first", "second"]


@pytest.mark.parametrize(
    ("key", "owner", "left"),
    [("0123456789abcdef" * 4, "us", ["own"]), (None, "us", ["0123456789abcdef", "own"]),
     ("0123456789abcdef" * 4, "them", ["0123456789abcdef", "own"])],
)  # fmt: skip
def test_the_exchange_of_a_finished_pre_training_is_removed_and_no_folder_that_options_name(
    lab: Lab, tmp_path: Path, key: str | None, owner: str, left: list[str]
) -> None:
    """``key`` is that of the finished pre-training, ``owner`` the run that has scaled up the builders."""
    root, assignment = tmp_path / "runs/one", tmp_path / builders.ASSIGNMENT
    folder, exchange = root / STAGES["pretrain"].folder, root / "exchange"
    for path in (exchange / "0123456789abcdef/run/v-000000", exchange / "own", folder):
        path.mkdir(parents=True)
    if key:
        sections = {"pretrain": {"exchange": str(exchange / "own")}}
        artifacts.write_manifest(folder, "pretrain", fingerprint=key, sections=sections)
    tasks.lower_builders(DEPLOYMENT, str(root), "us")
    assert lab.replicas == [], "never scaled up"
    assign_exchange(assignment, exchange / "0123456789abcdef", tmp_path / "corpus", owner)
    tasks.lower_builders(DEPLOYMENT, str(root), "us")
    assert sorted(path.name for path in exchange.iterdir()) == left
    assert lab.replicas == ([0] if owner == "us" else [])


# Shards


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the stage snapshot complete, and what ``tag`` writes without builders."""
    folder = tmp_path_factory.mktemp("shards")
    small_project.write_project(folder, tag={"method": "tagger"})
    for name in ("snapshot", "tag"):
        small_project.stage(name, tagger_values(folder), folder, folder / "runs/one")
    (folder / "runs/one/data/spans").rename(folder / "alone")
    return folder


def tagger_values(folder: Path) -> Options:
    files = {"train": str(folder / "tagged.conll"), "dev": str(folder / "tagged.conll")}
    return small_project.toy_values(
        tag={"method": "tagger", **files}, snapshot={"documents": str(folder / "documents.jsonl")}
    )


def tagged(snapshot: Path, folder: Path, shard_pods: int) -> dict[str, bytes]:
    """Write the files of the task ``tag`` on a volume in ``folder``."""
    shutil.copytree(snapshot / "runs", folder / "runs", dirs_exist_ok=True)
    shown = Output(folder / "out.json")
    tasks.run_stage(
        "tag", tagger_values(snapshot).model_dump_json(), str(folder / "runs/one"), shown, shown,
        owner="us", deployment=DEPLOYMENT, shard_pods=shard_pods,
    )  # fmt: skip
    return spans_of(folder / "runs/one/data/spans")


def spans_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "corpus").glob("*.npy")}


def test_builders_help_with_shards_and_are_scaled_down_afterwards(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four shards the stage's pod computes only the last one."""
    assignment = tmp_path / builders.ASSIGNMENT
    original, left = ShardWorker.make_one, list[int]()

    def lazy(self: ShardWorker) -> bool:
        left.append(len(self.missing()))
        return left[-1] == 1 and original(self)

    monkeypatch.setattr(shards, "SHARD_ROWS", 3)
    monkeypatch.setattr(ShardWorker, "make_one", lazy)
    monkeypatch.setattr(builders, "POLL_SECONDS", 0.05)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with cluster_lab.serve(Lab(cluster_lab.follower(assignment)), tmp_path / "kubeconfig") as lab:
        spans = tagged(snapshot, tmp_path, shard_pods=3)
        assert lab.replicas == [2, 0]
    assert left[0] == 4
    assert spans == spans_of(snapshot / "alone")


@pytest.mark.parametrize(
    ("shard_pods", "status", "holder", "warning"),
    [
        (1, 200, "", ""),
        (3, 404, "", f"tag works without index builders: Deployment {DEPLOYMENT} in namespace lab, 2 replicas: "),
        (3, 200, "another run", "claim.lock, which "),
    ],
)
def test_a_stage_never_waits_for_helpers(
    snapshot: Path, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    shard_pods: int, status: int, holder: str, warning: str,
) -> None:  # fmt: skip
    lab.status = status
    original, lines = ShardWorker.make_one, list[str]()

    def is_logged() -> bool:
        lines.append(capfd.readouterr().err)
        return warning in "".join(lines)

    def late(self: ShardWorker) -> bool:
        small_project.wait_for(is_logged, 60)
        return original(self)

    monkeypatch.setattr(shards, "SHARD_ROWS", 3)
    monkeypatch.setattr(ShardWorker, "make_one", late)
    claim = tmp_path / builders.ASSIGNMENT.parent / builders.CLAIM
    with acquire_lease(claim, lambda message: None) if holder else nullcontext():
        assert tagged(snapshot, tmp_path, shard_pods) == spans_of(snapshot / "alone")
    assert lab.replicas == []


def test_a_task_that_holds_the_builders_gets_their_help_for_each_offer(lab: Lab, tmp_path: Path) -> None:
    root, assignment = tmp_path / "runs/one", tmp_path / builders.ASSIGNMENT
    offer, report = shard_offer_path(root, "pretrain"), small_project.Quiet()
    offer.parent.mkdir(parents=True)
    for lease in ("claim", "scaling"):
        (assignment.parent / lease / "000001").mkdir(parents=True)  # of version 0.2.0
    with (
        acquire_lease(assignment.parent / builders.CLAIM, report.log),
        builders.shard_helpers(root, "pretrain", DEPLOYMENT, 3, "us", report, held=True),
    ):
        for number in (1, 2):
            artifacts.write_json(offer, {"exchange": f"/of/{number}", "snapshot": "/corpus"})
            small_project.wait_for(lambda number=number: len(lab.replicas) == 2 * number - 1, 60)
            assert json.loads(assignment.read_text())["exchange"] == f"/of/{number}"
            offer.unlink()
            small_project.wait_for(lambda number=number: len(lab.replicas) == 2 * number, 60)
    assert lab.replicas == [2, 0, 2, 0]


# Tasks


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("seed is -1"), 2, "seed is -1"),
        (TimeoutError("no index came"), 1, "no index came"),
        (OSError(errno.ENOSPC, "No space left"), 2, "No space left. Free disk space and run the same command again; "),
    ],
)
def test_an_error_that_users_can_fix_ends_a_task_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception, code: int,
    message: str,
) -> None:  # fmt: skip
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(tasks, "_run", fail)
    found, line = task_error(capfd, "ict", tmp_path)
    assert found == code
    assert line.startswith(f"realmops: {message}")


def test_a_volume_of_another_user_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    _, line = task_error(capfd, "ict", tmp_path / "runs" / "one")
    assert f"{tmp_path} belongs to user {os.getuid()} and group " in line
    assert "kubectl scale deployment/realmops-index-builder --replicas=1" in line
    assert [*tmp_path.iterdir()] == []


def test_a_run_links_the_outputs_of_another_with_the_same_inputs_options_and_code(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other training questions are another key and another folder, and only ``finetune`` depends on them."""

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
        manifest = artifacts.read_json(record) | {"code": "c0de"}
        del manifest["schema"], manifest[artifacts.DIGEST_KEY]
        artifacts.write_json(record, artifacts.build_manifest(**manifest))
    shown = Output(tmp_path / "shown.json")

    def run(root: Path, name: str, values: Options) -> None:
        if name != "pretrain":
            tasks.run_stage(name, values.model_dump_json(), str(root), shown, shown)
            return
        values = values.replace({"pretrain.exchange": str(root / "exchange")})
        tasks.pretrain(
            values.model_dump_json(), str(root), shown, shown,
            owner="us", deployment="", builders=0, wait_seconds=1, processes=1, limits="",
        )  # fmt: skip

    run(one, "pretrain", load_params(trained / "params.yaml"))
    values = load_params(trained / "params.yaml", settings=["questions.train=questions.dev.jsonl"])
    monkeypatch.setattr("realmops.stages.Stage.run", refuse)
    capfd.readouterr()
    for name in ("snapshot", "tag", "ict", "pretrain"):
        run(two, name, values)
        assert artifacts.read_manifest(two / STAGES[name].folder, name)
    assert capfd.readouterr().err.count("reusing") == 4
    with pytest.raises(Runs):
        run(two, "ict", values.replace({"ict.steps": 5}))
    shutil.rmtree(two / "models/ict")
    for other in ("another", ""):
        monkeypatch.setenv("REALMOPS_COMMIT", other)
        with pytest.raises(Runs):
            run(two, "ict", values)
    monkeypatch.setenv("REALMOPS_COMMIT", "c0de")
    (one / "models/ict/reader/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(Runs):
        run(two, "ict", values)
