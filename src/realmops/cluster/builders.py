"""The index builders' Deployment, seen from the pod of a stage: how many there are, and whether they live.

The trainer's ServiceAccount may read and change the Deployment's scale and nothing else. That builders live is seen on
the shared volume, where each leaves a sign beside the file that gives them work.
"""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from realmops.artifacts import read_json, read_manifest
from realmops.cluster.kube import Cluster, RefusedError, connect, describe_pods
from realmops.cluster.waiting import Say, awaited
from realmops.config import Values
from realmops.refresh.lease import claimed
from realmops.stages import STAGES, Report, fingerprint

ASSIGNMENT = Path("builder/assignment.json")  # on the shared volume
SCALING = "scaling"  # beside it: the claim of who changes it and the replicas
LOOK_SECONDS = 1.0
AGAIN_SECONDS = 5.0  # before an API server that was away is asked again
LOWER_SECONDS = 1500.0  # for an API server that is away when builders are given back; the task has half an hour
RETURN_SECONDS = 60.0  # the same behind shards: what stays is given back at the run's end


def patch_replicas(deployment: str, replicas: int) -> None:
    """Patch the replicas of a Deployment in this pod's own namespace.

    Raises ValueError when the Deployment is not there or the ServiceAccount may not scale it, TimeoutError when the
    cluster does not answer.
    """
    cluster, body = _cluster(), {"spec": {"replicas": replicas}}
    kubectl = f"kubectl -n {cluster.namespace} get"
    try:
        cluster.ask("AppsV1Api", "patch_namespaced_deployment_scale", deployment, cluster.namespace, body)
    except RefusedError as error:
        about = {
            403: f"this ServiceAccount may not scale it; '{kubectl} rolebindings' shows who may",
            404: f"there is none of that name; '{kubectl} deployments' shows those that are there",
        }
        raise ValueError(
            f"Deployment {deployment} in namespace {cluster.namespace}, {replicas} replicas: "
            f"{about.get(error.status, error)}"
        ) from None


def _cluster() -> Cluster:
    try:
        return connect()
    except ValueError as error:
        raise ValueError(
            f"{error}: leave the name of the builders' Deployment empty to have the trainer start its own"
        ) from None


def patch_replicas_with_retries(deployment: str, replicas: int, seconds: float, say: Say) -> None:
    """Retry ``patch_replicas`` for up to ``seconds`` while the Kubernetes API server is unreachable."""
    away = TimeoutError()

    def look() -> bool | None:
        nonlocal away
        try:
            patch_replicas(deployment, replicas)
        except TimeoutError as error:
            away = error
            return None
        return True

    if not awaited(look, AGAIN_SECONDS, seconds, lambda waited: say(f"{away}; trying again for {seconds:.0f} s")):
        raise away


@contextmanager
def raised_builders(
    values: Values, root: Path, deployment: str, builders: int, owner: str, wait_seconds: float, say: Say
) -> Iterator[Values]:
    """Have the builders for the pre-training under ``root``, where work is left; gives the options that it is run with.

    While they are another run's, its end is waited for, or that its signs of life cease. Without a Deployment there is
    nothing to raise. Raises TimeoutError that says what can be done, after ``wait_seconds``.
    """
    from realmops.stages.runner import finished, inputs_of

    if not deployment:
        yield values
        return
    stage = STAGES["pretrain"]
    inputs = inputs_of(stage, values, root, root)
    # another corpus or other options want an exchange of their own
    exchange = root / "exchange" / fingerprint(stage, values, inputs)[:16]
    options = {**values, "pretrain": {**values["pretrain"], "builder": "external", "exchange": str(exchange)}}
    if finished(root / stage.folder, stage, fingerprint(stage, options, inputs)) is not None:
        yield options
        return
    assignment, stop = assignment_of(root), threading.Event()
    timer = threading.Timer(wait_seconds, stop.set)
    timer.start()
    with ExitStack() as stack:
        try:
            stack.enter_context(claimed(assignment.parent / "claim", say, stop))
        except InterruptedError:
            raise TimeoutError(
                f"the index builders of {assignment.parent} are another run's, whose end did not come in "
                f"{wait_seconds:.0f} s: train one after the other, or leave the parameter deployment empty for a "
                "builder in the trainer's pod"
            ) from None
        finally:
            timer.cancel()
        raise_builders(root, exchange, deployment, builders, owner, wait_seconds, say)
        yield options


def assignment_of(root: Path) -> Path:
    """The file that gives the builders their work, on the volume of a run's folder."""
    return root.parent.parent / ASSIGNMENT


def raise_builders(
    root: Path, exchange: Path, deployment: str, builders: int, owner: str, wait_seconds: float, say: Say
) -> None:
    """Give the builders their work, raise their Deployment and wait until so many live.

    Raises TimeoutError that says what was awaited, for how long, and what shows more.
    """
    from realmops.refresh.builder_process import SIGNS, assign

    assignment = assignment_of(root)
    with claimed(assignment.parent / SCALING, say):
        assign(assignment, exchange, root / STAGES["snapshot"].folder / "corpus", owner)
        patch_replicas_with_retries(deployment, builders, wait_seconds, say)
    signs = assignment.parent / SIGNS
    first, living = read_signs(signs), set[str]()

    def look() -> bool | None:
        living.update(name for name, sign in read_signs(signs).items() if sign != first.get(name))
        return len(living) >= builders or None

    def tell(waited: float) -> None:
        say(f"waiting for index builders: {len(living)} of {builders} live after {waited:.0f} s")

    if not awaited(look, LOOK_SECONDS, wait_seconds, tell):
        raise TimeoutError(
            f"{len(living)} of {builders} index builders of the Deployment {deployment} live after "
            f"{wait_seconds:.0f} s; {_why(deployment)}"
        )


def _why(deployment: str) -> str:
    """Why builders do not live, as far as this ServiceAccount may see it, and what shows it to a person."""
    cluster = _cluster()
    seen = describe_pods(lambda cluster: cluster.warnings(cluster.namespace, f"{deployment}-"))
    kubectl, events = f"kubectl -n {cluster.namespace}", "events --field-selector involvedObject.kind=Pod,type=Warning"
    shown = " ".join([*seen[:3], "more is shown by" if seen else "the reason is shown by"])
    return f"{shown} '{kubectl} get {events}', and what they say by '{kubectl} logs deployment/{deployment}'"


@contextmanager
def helped(
    root: Path, stage: str, deployment: str, pods: int, owner: str, report: Report, *, held: bool = False
) -> Iterator[None]:
    """Have builders help with the shards that a stage under ``root`` offers, so that ``pods`` work on them in all.

    They are raised while it offers some and no other run has them, and given back then. The stage never waits for them:
    that they cannot be had is warned of. ``held`` says that the builders are this task's already.
    """
    if pods < 2 or not deployment:
        yield
        return
    from realmops.refresh.builder_process import assign
    from realmops.stages.runner import offer_of

    offer, assignment, ended = offer_of(root, stage), assignment_of(root), threading.Event()

    def serve() -> None:
        """Keep builders while there is an offer, and let them work on it."""
        served = b""
        try:
            while (content := _content(offer)) and not ended.is_set():
                if content != served:
                    named = json.loads(content)
                    with claimed(assignment.parent / SCALING, report.say):
                        assign(assignment, Path(named["exchange"]), Path(named["snapshot"]), owner)
                        patch_replicas(deployment, pods - 1)
                    report.say(f"{pods - 1} index builders are raised to help with {named['exchange']}")
                    served = content
                ended.wait(LOOK_SECONDS)
        finally:
            if served:
                _lower(deployment, assignment, owner, RETURN_SECONDS, report.say)

    def lend() -> None:
        said = ""
        while not ended.wait(LOOK_SECONDS):
            if not offer.is_file():
                continue
            try:
                with nullcontext() if held else claimed(assignment.parent / "claim", report.say, ended):
                    serve()
            except InterruptedError:
                return
            except ValueError as error:  # for a person to mend
                report.warn(f"{stage} works without index builders: {error}")
                return
            except OSError as error:
                if str(error) != said:
                    report.warn(f"{stage} works without index builders, which are asked for again: {error}")
                said = str(error)
                ended.wait(AGAIN_SECONDS)

    lending = threading.Thread(target=lend)
    lending.start()
    try:
        yield
    finally:
        ended.set()
        lending.join()


def _content(offer: Path) -> bytes:
    try:
        return offer.read_bytes()
    except FileNotFoundError:
        return b""


def _lower(deployment: str, assignment: Path, owner: str, seconds: float, say: Say) -> bool:
    """Give back the builders that ``owner`` has raised; False where they are another run's by now."""
    with claimed(assignment.parent / SCALING, say):  # nobody raises them between the look and the scaling
        if read_json(assignment).get("owner") != owner:
            say(f"{assignment}: the index builders work for another run, which gives them back")
            return False
        patch_replicas_with_retries(deployment, 0, seconds, say)
        return True


def give_back(deployment: str, root: Path, owner: str, say: Say) -> None:
    """Give back the builders that ``owner`` has raised, and remove the exchange of a pre-training that is done.

    Those that another run has raised are left to it.
    """
    assignment = assignment_of(root)
    if not deployment or not assignment.is_file():  # nobody has raised them
        return
    if not _lower(deployment, assignment, owner, LOWER_SECONDS, say):
        return
    with suppress(ValueError):  # it is not done and goes on from there
        made = read_manifest(root / STAGES["pretrain"].folder, "pretrain")
        exchange = Path(made["sections"]["pretrain"]["exchange"])
        if exchange.parent == root / "exchange":
            shutil.rmtree(exchange, ignore_errors=True)


def read_signs(folder: Path) -> dict[str, bytes]:
    """What each builder last wrote, by its name; two looks that differ show that it lives, whatever its clock says."""
    found = {}
    for path in folder.glob("*.json") if folder.is_dir() else ():
        try:
            found[path.stem] = path.read_bytes()
        except OSError:
            continue  # replaced at this moment
    return found
