"""The rendered index builder and a trainer as pods: what they may do, and that they outlive kill -9."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pods
import pytest
import small_project
from manifests import K8S, Object, find, render
from pods import Podman
from small_project import Values, wait_for

from realmops.refresh.exchange import Exchange, weights_of
from realmops.stages import STAGES

pytestmark = [pytest.mark.pods, pytest.mark.timeout(900)]

DEPLOYMENT = "realmops-index-builder"
BUILDER = f"{DEPLOYMENT}-pod-0-index-builder"  # as podman calls the container of a Deployment's first pod
TRAINER = "trainer-trainer"
LIMIT = 180.0  # seconds for what takes a few on a machine that does nothing else
OPTIONS = {"pretrain": {"steps": 16, "refresh_every": 4, "shard_rows": 1}}
# No API server answers here: the Deployment has its replica already.
TRAIN = f"""import sys
from realmops.cluster import builders, tasks
builders.patch_replicas = lambda deployment, replicas: print("replicas", replicas)
class Output:
    log_metric = staticmethod(print)
    def __init__(self, path):
        self.path, self.metadata = path, {{}}
tasks.pretrain(
    sys.argv[1], "/realmops/runs/one", Output("/tmp/manifest.json"), Output("/tmp/figures.json"),
    owner="this run", deployment="{DEPLOYMENT}", builders=1, wait_seconds=60, processes=1, limits="those of the test",
)
"""
LOOK = """
import json, os
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
}))
"""


@pytest.fixture(scope="module")
def rendered() -> list[Object]:
    return render(K8S / "overlays" / "local")


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
def values() -> Values:
    return small_project.toy_values(**OPTIONS)


@pytest.fixture(scope="module")
def volume(podman: Podman, rendered: list[Object], values: Values) -> Path:
    """The rendered claim, with a run on it that has come as far as pretrain."""
    podman.play(find(rendered, "PersistentVolumeClaim/realmops-data"))
    place = Path(podman("volume", "inspect", "realmops-data", "--format", "{{.Mountpoint}}").strip())
    root = place / "runs" / "one"
    root.mkdir(parents=True)
    small_project.write_project(root)
    for name in ("snapshot", "tag", "ict"):
        small_project.stage(name, values, root, root)
    pods.give_to_group(place, 10001)
    return place


@pytest.fixture(scope="module")
def builder(podman: Podman, rendered: list[Object], volume: Path) -> Object:
    """The rendered Deployment with one replica, in its pod; its template's spec."""
    deployment = find(rendered, f"Deployment/{DEPLOYMENT}")
    deployment["spec"]["replicas"] = 1  # as pre-training sets it
    spec: Object = deployment["spec"]["template"]["spec"]
    deployment["spec"]["template"]["spec"] = pods.with_packages(spec)
    podman.play(deployment)
    wait_for(lambda: list((volume / "builder" / "alive").glob("*.json")), LIMIT)
    return spec


def trainer_pod(builder: Object, values: Values) -> Object:
    """A pod as the pipeline makes it, under the builder's security contexts."""
    spec = pods.with_packages(builder)
    [container] = spec["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        del container[probe]
    container |= {"name": "trainer", "command": ["python", "-c", TRAIN], "args": [json.dumps(values)]}
    # podman names the volume of an emptyDir by the emptyDir alone: another pod's would be the same one
    [volume] = [one for one in spec["volumes"] if "emptyDir" in one]
    [mount] = [one for one in container["volumeMounts"] if one["name"] == volume["name"]]
    volume["name"] = mount["name"] = "trainer-tmp"
    spec["restartPolicy"] = "OnFailure"  # in the place of the pipeline's retries
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "trainer"}, "spec": spec}


@pytest.mark.usefixtures("builder")
def test_a_pod_may_do_what_its_manifest_says_and_nothing_else(podman: Podman) -> None:
    assert json.loads(podman("exec", BUILDER, "python", "-c", LOOK)) == {
        "Uid": ["10001"] * 4,
        "Gid": ["10001"] * 4,
        "CapEff": ["0" * 16],
        "CapPrm": ["0" * 16],
        "CapBnd": ["0" * 16],
        "NoNewPrivs": ["1"],
        "Seccomp": ["2"],
        "writes": {
            **dict.fromkeys(["/", "/app", "/opt/realmops"], "Read-only file system"),
            **dict.fromkeys(["/tmp", "/realmops"], "yes"),
        },
    }
    assert podman.state(BUILDER, "HostConfig.Memory") == str(4 * 2**30)


def test_the_probes_of_the_manifest_hold_in_the_pod(podman: Podman, builder: Object) -> None:
    [container] = builder["containers"]
    wait_for(lambda: not podman.fails("exec", BUILDER, *container["startupProbe"]["exec"]["command"]), LIMIT)
    podman("exec", BUILDER, *container["readinessProbe"]["exec"]["command"])
    podman("exec", BUILDER, *container["livenessProbe"]["exec"]["command"])


@pytest.mark.usefixtures("builder")
def test_the_image_knows_its_commit_where_no_git_is(podman: Podman) -> None:
    code = (
        "from pathlib import Path; from realmops.tracking.runs import provenance_tags; "
        "print(provenance_tags(Path('/app'), corpus_hash='', params_hash='')['realmops.git_commit'])"
    )
    assert podman("exec", BUILDER, "python", "-c", code).strip() == pods.COMMIT


def wait_until(what: Callable[[], bool], podman: Podman) -> None:
    """As ``wait_for``; where nothing comes it says how both containers are."""
    try:
        wait_for(what, LIMIT)
    except AssertionError as error:
        states = [podman("inspect", one, "--format", "{{.RestartCount}} {{json .State}}") for one in (BUILDER, TRAINER)]
        pytest.fail("\n".join([str(error), *states, podman.logs(BUILDER), podman.logs(TRAINER)]))


def half_built(exchange: Exchange) -> set[str]:
    """Weights of which some parts are embedded, and that have no index."""
    parts = {weights_of(part) for part in exchange.parts.names()}
    return (parts & set(exchange.weights.names())) - set(exchange.indexes.names())


def test_a_training_in_pods_goes_on_after_kill_9_of_either_as_if_nothing_had_been(
    podman: Podman, volume: Path, builder: Object, values: Values, tmp_path: Path
) -> None:
    root = volume / "runs" / "one"
    podman.play(trainer_pod(builder, values))

    def opened() -> list[Path]:
        assert podman.state(TRAINER, "RestartCount") == "0", podman.logs(TRAINER)
        return list((root / "exchange").glob("*/run/v-*"))

    [place] = wait_for(opened, LIMIT)
    exchange = Exchange(place.parents[1], None, "builder-test")
    [work] = (root / ".realmops" / "work").glob("pretrain-*")

    first = {container: podman.state(container, "State.Pid") for container in (BUILDER, TRAINER)}
    wait_for(lambda: half_built(exchange), LIMIT)
    podman.kill(first[BUILDER])
    assert half_built(exchange), "it was killed too late"
    wait_until(lambda: podman.state(BUILDER, "RestartCount") != "0", podman)

    wait_for(lambda: len((work / "metrics.jsonl").read_bytes().splitlines()) > 8, LIMIT)
    podman.kill(first[TRAINER])
    assert not (root / STAGES["pretrain"].folder).exists(), "it was killed too late"
    wait_until((root / STAGES["pretrain"].folder).exists, podman)
    wait_until(lambda: podman.state(TRAINER, "State.Status") == "exited", podman)
    assert podman.state(TRAINER, "RestartCount") == "1"
    assert podman.state(TRAINER, "State.ExitCode") == "0", podman.logs(TRAINER)
    metrics = json.loads((root / STAGES["pretrain"].folder / "metrics.json").read_text())
    assert metrics["refreshes"] >= 2
    said = podman.logs(TRAINER).splitlines()
    assert said.count("replicas 1") == 2, "one for each life"
    wait_for(lambda: "is done" in podman.logs(BUILDER), LIMIT)
    assert podman.logs(BUILDER).count("published the index") >= 2

    project = tmp_path / "undisturbed"
    shutil.copytree(root, project, ignore=shutil.ignore_patterns(".realmops", "exchange", "pretrain"))
    options = {**values["pretrain"], "builder": "external", "exchange": str(project / "exchange")}
    with small_project.builder_beside(project / "exchange", project / "data/snapshot/corpus"):
        small_project.stage("pretrain", {**values, "pretrain": options}, project, project)
    for file in (project / STAGES["pretrain"].folder).glob("*.safetensors"):
        assert (root / STAGES["pretrain"].folder / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.usefixtures("builder")
def test_a_builder_ends_at_sigterm(podman: Podman) -> None:
    podman("stop", "--time", "90", BUILDER)  # then SIGKILL, which is 137
    assert podman.state(BUILDER, "State.ExitCode") == "0"
