"""The workflows for GitHub: what they may do, what starts them, and that what they call is there."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from realmops import __version__
from realmops.cli import main
from realmops.cluster import IMAGE

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").iterdir())


def read(path: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def steps(workflow: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def commands(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.split()[:1] in (["realmops"], ["make"]):
            yield shlex.split(line)


def faults(text: str) -> list[str]:
    """Words of a script that the command line or the Makefile does not know."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    found = []
    for program, name, *words in commands(text):
        if program == "make":
            found += [name] if name not in targets else []
        elif name not in main.commands:
            found.append(name)
        else:
            known = {option for parameter in main.commands[name].params for option in parameter.opts}
            found += [word for word in words if word.startswith("--") and word not in known]
    return found


def test_there_is_one_for_tests_for_retraining_for_a_cluster_and_for_a_version() -> None:
    assert [path.name for path in FILES] == ["kind.yml", "release.yml", "retrain.yml", "test.yml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_nothing_else(path: Path) -> None:
    """But for that which publishes images, which may do that."""
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"].startswith(path.stem)
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())
    more = [job["permissions"] for job in workflow["jobs"].values() if "permissions" in job]
    assert more == ([{"contents": "read", "packages": "write"}] if path.stem == "release" else [])
    for step in steps(workflow):
        assert re.fullmatch(r"actions/(checkout|setup-python)@v\d+", step.get("uses", "actions/checkout@v1"))
        assert "${{" not in step.get("run", ""), "values come by the environment: a shell would run what is in them"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_workflow_calls_is_there(path: Path) -> None:
    scripts = [step["run"] for step in steps(read(path)) if "run" in step]
    assert [fault for script in scripts for fault in faults(script)] == []
    called = [command for script in scripts for command in commands(script)]
    expected = {
        "kind": [],  # pytest, which makes the calls
        "retrain": [["realmops", "submit", "--once"]],
        "release": [],
        "test": [["make", one] for one in ("test", "wheel", "audit")],
    }
    assert [command[:3] for command in called] == expected[path.stem]


def test_the_cluster_is_made_as_the_page_says() -> None:
    """Every kubectl of docs/operate.md that makes the cluster, but for what differs in names of variables."""
    script = "\n".join(step.get("run", "") for step in steps(read(ROOT / ".github" / "workflows" / "kind.yml")))
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    block = page[page.index("### Set up a cluster and submit a run") :].split("```")[1]
    wanted = [line.split("  #")[0].strip() for line in block.splitlines() if line.startswith(("kubectl apply", "kind"))]
    assert len(wanted) == 4
    assert [line for line in wanted if line.replace("$kfp", "$KFP").replace("$ref", "$REF") not in script] == []


def test_what_is_not_there_is_seen() -> None:
    script = "make tests\nrealmops submitt --once\nrealmops submit --twice --once\n"
    assert faults(script) == ["tests", "submitt", "--twice"]


@pytest.mark.parametrize(
    ("changed", "starts"),
    [
        ("params.yaml", True), ("dvc.lock", True), ("presets/ours.yaml", True), ("corpora/wiki.jsonl.dvc", True),
        ("README.md", False),
        ("src/realmops/cli/group.py", False),
    ],
)  # fmt: skip
def test_a_push_to_main_retrains_when_what_is_trained_changed(changed: str, starts: bool) -> None:
    push = read(ROOT / ".github" / "workflows" / "retrain.yml")[True]["push"]  # YAML's "on" is true
    assert push["branches"] == ["main"]
    assert any(fnmatch(changed, pattern) for pattern in push["paths"]) is starts


def run_script(workflow: str, folder: Path, programs: Mapping[str, str], **environment: str) -> tuple[int, list[str]]:
    """Run a workflow's last step with programs in the place of those that it calls: exit code, calls and errors."""
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f'#!/bin/sh\n{text}\necho {name} "$@" >> "$CALLS"\n')
        (folder / "bin" / name).chmod(0o755)
    *_, step = steps(read(ROOT / ".github" / "workflows" / f"{workflow}.yml"))
    given = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), **environment}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=ROOT, env=given, capture_output=True, text=True)
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return done.returncode, [*calls, *done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("namespace", "image", "more"),
    [
        ("", "", ""),
        ("team-a", "", " --namespace team-a"),
        ("team-a", "registry.test/ours:1", " --namespace team-a --argument image=registry.test/ours:1"),
    ],
)
def test_retraining_names_a_namespace_and_an_image_only_where_it_is_given_one(
    tmp_path: Path, namespace: str, image: str, more: str
) -> None:
    """Kubeflow Pipelines alone has no namespaces of profiles."""
    given = {"TOKEN": "", "NAMESPACE": namespace, "IMAGE": image}
    _, called = run_script("retrain", tmp_path, {"realmops": ""}, **given)
    assert called == [f"realmops submit --once --argument model=realmops{more}"]


@pytest.mark.parametrize(("variant", "tag"), [("cpu", __version__), ("gpu", f"{__version__}-gpu")])
def test_a_tag_publishes_the_image_that_pipelines_and_components_name(tmp_path: Path, variant: str, tag: str) -> None:
    given = {"VARIANT": variant, "REGISTRY_TOKEN": "t", "GITHUB_SHA": "abc", "GITHUB_ACTOR": "me"}
    names = {"GITHUB_REF_NAME": f"v{__version__}", "GITHUB_REPOSITORY": "RealmOps/realmops", "TORCH_INDEX": "cpus"}
    code, called = run_script("release", tmp_path, {"docker": ""}, **given, **names)
    image = f"{IMAGE.partition(':')[0]}:{tag}"
    arguments = f"VARIANT={variant} --build-arg COMMIT=abc --build-arg TORCH_INDEX={'cpus' if variant == 'cpu' else ''}"
    assert (code, called) == (0, [
        f"docker build --build-arg {arguments} --tag {image} .",
        "docker login ghcr.io --username me --password-stdin",
        f"docker push {image}",
    ])  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"GITHUB_REF_NAME": "v99.0.0"}, {"GITHUB_REPOSITORY": "somebody/realmops"}],
    ids=lambda change: next(iter(change)),
)
def test_a_tag_of_another_version_or_project_publishes_nothing(tmp_path: Path, change: dict[str, str]) -> None:
    names = {"GITHUB_REF_NAME": f"v{__version__}", "GITHUB_REPOSITORY": "realmops/realmops", "VARIANT": "cpu"} | change
    code, called = run_script("release", tmp_path, {"docker": ""}, **names)
    assert code == 2
    assert called[0].startswith("pipelines name another image than ghcr.io/")
