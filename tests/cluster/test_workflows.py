"""The workflows for GitHub: their rights, what starts them, and what they call."""

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
FOLDER = ROOT / ".github" / "workflows"
CALLS = {  # of each workflow
    "kind": [], "retrain": [["realmops", "submit", "--once"]], "release": [],
    "test": [["make", one] for one in ("test", "wheel", "audit")],
}  # fmt: skip


def read(name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((FOLDER / f"{name}.yml").read_text(encoding="utf-8"))
    return found


def steps(workflow: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("name", CALLS)
def test_a_workflow_can_only_read_unless_it_publishes_images(name: str) -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*CALLS}
    workflow = read(name)
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())
    more = [job["permissions"] for job in workflow["jobs"].values() if "permissions" in job]
    assert more == ([{"contents": "read", "packages": "write"}] if name == "release" else [])
    for step in steps(workflow):
        assert re.fullmatch(r"actions/(checkout|setup-python)@v\d+", step.get("uses", "actions/checkout@v1"))
        assert "${{" not in step.get("run", ""), "values are in the environment: a shell would run their content"


@pytest.mark.parametrize("name", CALLS)
def test_the_commands_and_targets_of_a_workflow_exist(name: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    lines = [line for step in steps(read(name)) for line in step.get("run", "").splitlines()]
    calls = [shlex.split(line) for line in lines if line.split()[:1] in (["realmops"], ["make"])]
    assert [call[:3] for call in calls] == CALLS[name]
    for program, command, *words in calls:
        if program == "make":
            assert command in targets
        else:
            known = {option for parameter in main.commands[command].params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize(
    ("changed", "starts"),
    [
        ("params.yaml", True), ("dvc.lock", True), ("presets/ours.yaml", True), ("corpora/wiki.jsonl.dvc", True),
        ("README.md", False), ("src/realmops/cli/group.py", False),
    ],
)  # fmt: skip
def test_a_push_to_main_retrains_if_inputs_or_options_changed(changed: str, starts: bool) -> None:
    push = read("retrain")[True]["push"]  # YAML's "on" is true
    assert push["branches"] == ["main"]
    assert any(fnmatch(changed, pattern) for pattern in push["paths"]) is starts


def run_script(workflow: str, folder: Path, program: str, environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run a workflow's last step with a program replaced: exit code, calls and errors."""
    (folder / "bin").mkdir()
    (folder / "bin" / program).write_text(f'#!/bin/sh\necho {program} "$@" >> "$CALLS"\n')
    (folder / "bin" / program).chmod(0o755)
    *_, step = steps(read(workflow))
    given = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), **environment}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=ROOT, env=given, capture_output=True, text=True)
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return done.returncode, [*calls, *done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("namespace", "image", "more"),
    [
        ("", "", ""),
        ("team-a", "registry.test/ours:1", " --namespace team-a --argument image=registry.test/ours:1"),
    ],
)
def test_retraining_passes_a_namespace_and_an_image_if_they_are_set(
    tmp_path: Path, namespace: str, image: str, more: str
) -> None:
    _, calls = run_script("retrain", tmp_path, "realmops", {"TOKEN": "", "NAMESPACE": namespace, "IMAGE": image})
    assert calls == [f"realmops submit --once --argument model=realmops{more}"]


@pytest.mark.parametrize(
    ("variant", "change"),
    [("cpu", {}), ("gpu", {}), ("cpu", {"GITHUB_REF_NAME": "v99.0.0"}), ("cpu", {"GITHUB_REPOSITORY": "me/realmops"})],
)
def test_a_tag_of_this_version_and_project_publishes_the_image_of_the_pipelines(
    tmp_path: Path, variant: str, change: dict[str, str]
) -> None:
    given = {"VARIANT": variant, "REGISTRY_TOKEN": "t", "GITHUB_SHA": "abc", "GITHUB_ACTOR": "me"}
    given |= {"GITHUB_REF_NAME": f"v{__version__}", "GITHUB_REPOSITORY": "RealmOps/realmops", "TORCH_INDEX": "cpus"}
    code, calls = run_script("release", tmp_path, "docker", given | change)
    if change:
        assert (code, calls[0].startswith("pipelines name another image than ghcr.io/")) == (2, True)
        return
    image = IMAGE if variant == "cpu" else f"{IMAGE}-gpu"
    arguments = f"VARIANT={variant} --build-arg COMMIT=abc --build-arg TORCH_INDEX={'cpus' if variant == 'cpu' else ''}"
    assert (code, calls) == (0, [
        f"docker build --build-arg {arguments} --tag {image} .",
        "docker login ghcr.io --username me --password-stdin",
        f"docker push {image}",
    ])  # fmt: skip
