"""The index builders' Deployment, seen from a trainer's pod: how many there are, and whether they live.

The trainer's ServiceAccount may read and change the Deployment's scale and nothing else. That builders live is seen on
the shared volume, where each leaves a sign beside the file that gives them work.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from realmops.artifacts import read_json, read_manifest

ASSIGNMENT = Path("builder/assignment.json")  # on the shared volume
SCALING = "scaling"  # beside it: the claim of who changes it and the replicas
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LOOK_SECONDS = 1.0
SAID_SECONDS = 30.0
TIME_OUT = (5, 60)  # seconds to connect, and for an answer


def scale(deployment: str, replicas: int) -> None:
    """Set the replicas of a Deployment in this pod's own namespace.

    Raises ValueError when the Deployment is not there or the ServiceAccount may not scale it, TimeoutError when the
    cluster does not answer.
    """
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    api, namespace = _api()
    try:
        body = {"spec": {"replicas": replicas}}
        api.patch_namespaced_deployment_scale(deployment, namespace, body, _request_timeout=TIME_OUT)
    except ApiException as error:
        about = {
            403: f"this ServiceAccount may not scale it; 'kubectl -n {namespace} get rolebindings' shows who may",
            404: f"there is none of that name; 'kubectl -n {namespace} get deployments' shows those that are there",
        }
        reason = about.get(error.status, f"the API server says {error.status} {error.reason}")
        raise ValueError(f"Deployment {deployment} in namespace {namespace}, {replicas} replicas: {reason}") from None
    except HTTPError as error:
        raise TimeoutError(f"the cluster's API server does not answer: {error}") from None


def _api() -> tuple[Any, str]:
    """The API as this pod sees it, outside a pod as KUBECONFIG says, and the namespace."""
    from kubernetes import client, config
    from kubernetes.config import ConfigException

    try:
        if NAMESPACE.is_file():
            config.load_incluster_config()
            return client.AppsV1Api(), NAMESPACE.read_text().strip()
        file = os.environ.get("KUBECONFIG")
        config.load_kube_config(file)
        _, context = config.list_kube_config_contexts(file)
        return client.AppsV1Api(), context["context"].get("namespace", "default")
    except (ConfigException, OSError) as error:
        raise ValueError(
            f"there is no cluster to speak to ({error}): leave the name of the builders' Deployment empty to have the "
            "trainer start its own"
        ) from None


@contextmanager
def held(assignment: Path, wait_seconds: float, say: Callable[[str], None]) -> Iterator[None]:
    """Have the builders for one run; while they are another run's, wait for its end, or for signs of life to cease.

    Raises TimeoutError that says what can be done, after ``wait_seconds``.
    """
    from realmops.stages.claims import claimed

    stop = threading.Event()
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
        yield


def raise_builders(
    deployment: str,
    builders: int,
    assignment: Path,
    exchange: Path,
    root: Path,
    owner: str,
    wait_seconds: float,
    say: Callable[[str], None],
) -> None:
    """Give the builders, which are :func:`held`, their work, raise their Deployment and wait until so many live.

    Raises TimeoutError that says what was awaited, for how long, and what shows more.
    """
    from realmops.stages import STAGES
    from realmops.stages.builder import SIGNS, assign
    from realmops.stages.claims import claimed

    with claimed(assignment.parent / SCALING, say):
        assign(assignment, exchange, root / STAGES["snapshot"].folder / "corpus", owner)
        scale(deployment, builders)
    signs = assignment.parent / SIGNS
    first, living = read_signs(signs), set[str]()
    began = said = time.monotonic()
    while len(living) < builders:
        now = time.monotonic()
        if now - began > wait_seconds:
            raise TimeoutError(
                f"{len(living)} of {builders} index builders of the Deployment {deployment} live after "
                f"{now - began:.0f} s; 'kubectl describe deployment {deployment}' and 'kubectl logs "
                f"deployment/{deployment}' show more"
            )
        if now - said > SAID_SECONDS or said == began:
            say(f"waiting for index builders: {len(living)} of {builders} live after {now - began:.0f} s")
            said = now
        time.sleep(LOOK_SECONDS)
        living |= {name for name, sign in read_signs(signs).items() if sign != first.get(name)}


def lower_builders(deployment: str, assignment: Path, root: Path, owner: str, say: Callable[[str], None]) -> None:
    """Give back the builders that ``owner`` has raised, with their exchange where the pre-training in ``root`` is done.

    Those that another run has raised are left to it.
    """
    from realmops.stages import STAGES
    from realmops.stages.claims import claimed

    with claimed(assignment.parent / SCALING, say):  # nobody raises them between the look and the scaling
        named = read_json(assignment)
        if named.get("owner") != owner:
            say(f"{assignment}: the index builders work for another run, which gives them back")
            return
        scale(deployment, 0)
        with suppress(ValueError):  # it is not done and goes on from there
            made = read_manifest(root / STAGES["pretrain"].folder, "pretrain")
            if made["sections"]["pretrain"]["exchange"] == named["exchange"]:
                shutil.rmtree(named["exchange"], ignore_errors=True)


def read_signs(folder: Path) -> dict[str, bytes]:
    """What each builder last wrote, by its name; two looks that differ show that it lives, whatever its clock says."""
    found = {}
    for path in folder.glob("*.json") if folder.is_dir() else ():
        try:
            found[path.stem] = path.read_bytes()
        except OSError:
            continue  # replaced at this moment
    return found
