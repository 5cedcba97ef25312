"""Scale the index builders' Deployment and watch their heartbeats, from the pod of a stage.

Its ServiceAccount may only read and patch the scale, so heartbeats are files on the shared volume.
"""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from realmops.artifacts import read_json, read_manifest
from realmops.cluster.kube import Cluster, RefusedError, connect, describe_pods
from realmops.cluster.polling import Log, poll_until
from realmops.options import Options
from realmops.progress import Report
from realmops.refresh.lease import acquire_lease
from realmops.stages import STAGES, fingerprint

ASSIGNMENT = Path("builder/assignment.json")  # on the shared volume
# Leases next to it; earlier versions left folders without the suffix on volumes.
CLAIM = "claim.lock"  # held while builders serve a run
SCALING = "scaling.lock"  # held while assignment and replicas change
POLL_SECONDS = 1.0  # polling interval
RETRY_SECONDS = 5.0  # retry interval while the API server is unreachable
SCALE_DOWN_SECONDS = 1500.0  # retries of the last task, which may take half an hour
SHARD_SECONDS = 60.0  # retries for shards; the last task of the run scales down in any case


def patch_replicas(deployment: str, replicas: int, seconds: float, log: Log) -> None:
    """Patch the replicas of a Deployment; retry for ``seconds`` while the Kubernetes API is unreachable."""
    deadline, is_logged = time.monotonic() + seconds, False
    while True:
        try:
            return _patch_scale(deployment, replicas)
        except TimeoutError as error:
            if time.monotonic() > deadline:
                raise
            if not is_logged:
                log(f"{error}; retrying for {seconds:.0f} s")
            is_logged = True
        time.sleep(RETRY_SECONDS)


def _patch_scale(deployment: str, replicas: int) -> None:
    cluster = _cluster()
    kubectl = f"kubectl -n {cluster.namespace} get"
    try:
        body = {"spec": {"replicas": replicas}}
        cluster.call("AppsV1Api", "patch_namespaced_deployment_scale", deployment, cluster.namespace, body)
    except RefusedError as error:
        reasons = {
            403: f"this ServiceAccount may not scale it; '{kubectl} rolebindings' lists those that may",
            404: f"it does not exist; '{kubectl} deployments' lists the existing ones",
        }
        raise ValueError(
            f"Deployment {deployment} in namespace {cluster.namespace}, {replicas} replicas: "
            f"{reasons.get(error.status, error)}"
        ) from None


def _cluster() -> Cluster:
    try:
        return connect()
    except ValueError as error:
        raise ValueError(
            f"{error}: leave the name of the builders' Deployment empty, and the trainer starts its own builder"
        ) from None


@contextmanager
def scaled_builders(
    options: Options, root: Path, deployment: str, builders: int, owner: str, wait_seconds: float, log: Log
) -> Iterator[Options]:
    """Yield the options to pre-train with, while the builders are scaled up unless it is up to date.

    While another run holds the builders, wait until it ends or its heartbeat stops, at most ``wait_seconds``.
    """
    from realmops.stages.runner import stage_inputs, up_to_date_metrics

    if not deployment:
        yield options
        return
    stage = STAGES["pretrain"]
    inputs = stage_inputs(stage, options, root, root)
    # another corpus or other options need a separate exchange
    key = fingerprint(stage, options, inputs)
    exchange = root / "exchange" / key[:16]
    options = options.replace({"pretrain.builder": "external", "pretrain.exchange": str(exchange)})
    if up_to_date_metrics(root / stage.folder, stage, key) is not None:
        yield options
        return
    assignment, stop = assignment_path(root), threading.Event()
    timer = threading.Timer(wait_seconds, stop.set)
    timer.start()
    with ExitStack() as stack:
        try:
            stack.enter_context(acquire_lease(assignment.parent / CLAIM, log, stop))
        except InterruptedError:
            raise TimeoutError(
                f"the index builders of {assignment.parent} are held by another run that did not end within "
                f"{wait_seconds:.0f} s: train one after the other, or leave the parameter deployment empty for a "
                "builder in the trainer's pod"
            ) from None
        finally:
            timer.cancel()
        scale_up_builders(root, exchange, deployment, builders, owner, wait_seconds, log)
        yield options


def assignment_path(root: Path) -> Path:
    return root.parent.parent / ASSIGNMENT


def scale_up_builders(
    root: Path, exchange: Path, deployment: str, builders: int, owner: str, wait_seconds: float, log: Log
) -> None:
    """Assign work to the builders, scale up, and wait until ``builders`` of them are alive."""
    from realmops.refresh.follower import HEARTBEATS_FOLDER, assign_exchange

    assignment = assignment_path(root)
    with acquire_lease(assignment.parent / SCALING, log):
        assign_exchange(assignment, exchange, root / STAGES["snapshot"].folder / "corpus", owner)
        patch_replicas(deployment, builders, wait_seconds, log)
    signs = assignment.parent / HEARTBEATS_FOLDER
    first, alive = read_heartbeats(signs), set[str]()

    def check_alive() -> bool | None:
        alive.update(name for name, heartbeat in read_heartbeats(signs).items() if heartbeat != first.get(name))
        return len(alive) >= builders or None

    def log_waiting(elapsed: float) -> None:
        log(f"waiting for index builders: {len(alive)} of {builders} alive after {elapsed:.0f} s")

    if not poll_until(check_alive, POLL_SECONDS, wait_seconds, log_waiting):
        raise TimeoutError(
            f"{len(alive)} of {builders} index builders of the Deployment {deployment} alive after "
            f"{wait_seconds:.0f} s; {_reasons(deployment)}"
        )


def _reasons(deployment: str) -> str:
    cluster = _cluster()
    pods = describe_pods(cluster.namespace, "", "Pending")
    kubectl, events = f"kubectl -n {cluster.namespace}", "events --field-selector involvedObject.kind=Pod,type=Warning"
    reasons = "".join(f"{pod}; " for pod in pods if pod.startswith(f"{deployment}-"))
    return f"{reasons}see '{kubectl} get {events}' and '{kubectl} logs deployment/{deployment}'"


@contextmanager
def shard_helpers(
    root: Path, stage: str, deployment: str, pods: int, owner: str, report: Report, *, held: bool = False
) -> Iterator[None]:
    """Let builders help with the shards that a stage offers; the stage never waits for them.

    ``pods`` counts this one; ``held`` is True if this task holds the lease of the builders.
    """
    if pods < 2 or not deployment:
        yield
        return
    from realmops.refresh.follower import assign_exchange
    from realmops.stages.runner import shard_offer_path

    offer, assignment, ended = shard_offer_path(root, stage), assignment_path(root), threading.Event()

    def serve_offer() -> None:
        assigned = b""
        try:
            while (content := _read_offer(offer)) and not ended.is_set():
                if content != assigned:
                    work = json.loads(content)
                    with acquire_lease(assignment.parent / SCALING, report.log):
                        assign_exchange(assignment, Path(work["exchange"]), Path(work["snapshot"]), owner)
                        patch_replicas(deployment, pods - 1, SHARD_SECONDS, report.log)
                    report.log(f"{stage}: scaled up {pods - 1} index builders to help with {work['exchange']}")
                    assigned = content
                ended.wait(POLL_SECONDS)
        finally:
            if assigned:
                _scale_down(deployment, assignment, owner, SHARD_SECONDS, report.log)

    def watch_offers() -> None:
        try:
            while not ended.wait(POLL_SECONDS):
                if offer.is_file():
                    with nullcontext() if held else acquire_lease(assignment.parent / CLAIM, report.log, ended):
                        serve_offer()
        except InterruptedError:  # the stage ended first
            return
        except (OSError, ValueError) as error:
            report.warn(f"{stage} works without index builders: {error}")

    watcher = threading.Thread(target=watch_offers)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _read_offer(offer: Path) -> bytes:
    try:
        return offer.read_bytes()
    except FileNotFoundError:
        return b""


def _scale_down(deployment: str, assignment: Path, owner: str, seconds: float, log: Log) -> bool:
    """Scale down the builders of ``owner``; return False if they belong to another run by now."""
    with acquire_lease(assignment.parent / SCALING, log):  # no other run scales up between the check and the patch
        if read_json(assignment).get("owner") != owner:
            log(f"{assignment}: the index builders work for another run, which scales them down")
            return False
        patch_replicas(deployment, 0, seconds, log)
        return True


def release_builders(deployment: str, root: Path, owner: str, log: Log) -> None:
    """Scale down the builders of ``owner``, not those of another run; remove a finished pre-training's exchange."""
    assignment = assignment_path(root)
    if not deployment or not assignment.is_file():  # never scaled up
        return
    if not _scale_down(deployment, assignment, owner, SCALE_DOWN_SECONDS, log):
        return
    with suppress(ValueError):  # an unfinished pre-training resumes from its exchange
        key = read_manifest(root / STAGES["pretrain"].folder, "pretrain")["fingerprint"]
        shutil.rmtree(root / "exchange" / key[:16], ignore_errors=True)


def read_heartbeats(folder: Path) -> dict[str, bytes]:
    """Return the last heartbeat of each builder; one is alive if it changes. Clocks are not compared."""
    heartbeats = {}
    for path in folder.glob("*.json"):
        with suppress(OSError):  # the builder ends
            heartbeats[path.stem] = path.read_bytes()
    return heartbeats
