"""The rendered index builder in a pod: its rights, its probes, and its end."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pods
import pytest
from manifests import K8S, Object, find, render
from pods import Podman
from small_project import wait_for

pytestmark = [pytest.mark.pods, pytest.mark.timeout(900)]

DEPLOYMENT = "realmops-index-builder"
BUILDER = f"{DEPLOYMENT}-pod-0-index-builder"  # podman's name of the container of a Deployment's first pod
LIMIT = 180.0  # seconds for what takes a few on an idle machine
PROGRAM = """
import json, os
from pathlib import Path
from realmops.tracking.runs import provenance_tags
status = dict(line.split(":", 1) for line in open("/proc/1/status"))
def writes(folder):
    try:
        open(f"{folder}/probe", "w").close()
        os.remove(f"{folder}/probe")
    except OSError as error:
        return error.strerror
    return "yes"
print(json.dumps({
    **{name: status[name].split() for name in ("Uid", "Gid", "CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp")},
    "writes": {folder: writes(folder) for folder in ("/", "/app", "/opt/realmops", "/tmp", "/realmops")},
    "commit": provenance_tags(Path("/app"), corpus_hash="", params_hash="")["realmops.git_commit"],
}))
"""


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    try:
        # a short name: below a folder with a long one podman 4.3 starts no container again
        with tempfile.TemporaryDirectory(prefix="pods-") as short, Podman(Path(short)) as found:
            pods.build_image(found, tmp_path_factory.mktemp("image"))
            yield found
    except pods.CannotRun as error:
        pytest.skip(f"not run: {error}")


@pytest.fixture(scope="module")
def builder(podman: Podman) -> Object:
    """The rendered Deployment with one replica, in its pod with the rendered claim; its container."""
    rendered = render(K8S / "overlays" / "local")
    podman.play(find(rendered, "PersistentVolumeClaim/realmops-data"))
    volume = Path(podman("volume", "inspect", "realmops-data", "--format", "{{.Mountpoint}}").strip())
    pods.give_to_group(volume, 10001)
    deployment = find(rendered, f"Deployment/{DEPLOYMENT}")
    deployment["spec"]["replicas"] = 1  # as pre-training sets it
    template = deployment["spec"]["template"]
    template["spec"] = pods.with_packages(template["spec"])
    podman.play(deployment)
    wait_for(lambda: list((volume / "builder" / "alive").glob("*.json")), LIMIT)
    container: Object = template["spec"]["containers"][0]
    return container


@pytest.mark.usefixtures("builder")
def test_a_pod_has_the_rights_of_its_manifest_and_the_commit_of_its_image(podman: Podman) -> None:
    assert json.loads(podman("exec", BUILDER, "python", "-c", PROGRAM)) == {
        "Uid": ["10001"] * 4,
        "Gid": ["10001"] * 4,
        **{name: ["0" * 16] for name in ("CapEff", "CapPrm", "CapBnd")},
        "NoNewPrivs": ["1"],
        "Seccomp": ["2"],
        "writes": {
            **dict.fromkeys(["/", "/app", "/opt/realmops"], "Read-only file system"),
            **dict.fromkeys(["/tmp", "/realmops"], "yes"),
        },
        "commit": pods.COMMIT,
    }
    assert podman.state(BUILDER, "HostConfig.Memory") == str(4 * 2**30)


def test_the_probes_of_the_manifest_succeed_and_sigterm_ends_the_pod(podman: Podman, builder: Object) -> None:
    wait_for(lambda: not podman.fails("exec", BUILDER, *builder["startupProbe"]["exec"]["command"]), LIMIT)
    podman("exec", BUILDER, *builder["readinessProbe"]["exec"]["command"])
    podman("exec", BUILDER, *builder["livenessProbe"]["exec"]["command"])
    podman("stop", "--time", "90", BUILDER)  # then SIGKILL, which is 137
    assert podman.state(BUILDER, "State.ExitCode") == "0"
