"""The workflows for GitHub: what they may do, what starts them, and that what they call is there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from realmops.cli import main

ROOT = Path(__file__).parents[1]
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


def test_there_is_one_for_tests_for_retraining_and_for_a_cluster() -> None:
    assert [path.name for path in FILES] == ["kind.yml", "retrain.yml", "test.yml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_nothing_else(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"].startswith(path.stem)
    assert all("permissions" not in job and job["timeout-minutes"] for job in workflow["jobs"].values())
    for step in steps(workflow):
        assert re.fullmatch(r"actions/(checkout|setup-python)@v\d+", step.get("uses", "actions/checkout@v1"))
        assert "${{" not in step.get("run", ""), "values come by the environment: a shell would run what is in them"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_workflow_calls_is_there(path: Path) -> None:
    scripts = [step["run"] for step in steps(read(path)) if "run" in step]
    assert [fault for script in scripts for fault in faults(script)] == []
    called = [command for script in scripts for command in commands(script)]
    submitted = [["realmops", "submit", "--once"]]
    expected = {"kind": submitted, "retrain": submitted, "test": [["make", "test"], ["make", "audit"]]}
    assert [command[:3] for command in called] == expected[path.stem]


def test_the_cluster_is_made_as_the_page_says() -> None:
    """Every kubectl of docs/operate.md that makes the cluster, but for what differs in names of variables."""
    script = "\n".join(step.get("run", "") for step in steps(read(ROOT / ".github" / "workflows" / "kind.yml")))
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    block = page[page.index("### From an empty cluster to a run") :].split("```")[1]
    wanted = [line.split("  #")[0].strip() for line in block.splitlines() if line.startswith(("kubectl apply", "kind"))]
    assert len(wanted) == 4
    assert [line for line in wanted if line.replace("$kfp", "$KFP").replace("$ref", "$REF") not in script] == []


def test_what_is_not_there_is_seen() -> None:
    script = "make tests\nrealmops submitt --once\nrealmops submit --twice --once\n"
    assert faults(script) == ["tests", "submitt", "--twice"]


@pytest.mark.parametrize(
    ("changed", "starts"),
    [
        ("params.yaml", True),
        ("dvc.lock", True),
        ("pipelines/train.yaml", True),
        ("pipelines/presets/paper.yaml", True),
        ("corpora/wiki.jsonl.dvc", True),
        ("README.md", False),
        ("src/realmops/cli.py", False),
    ],
)
def test_a_push_to_main_retrains_when_what_is_trained_changed(changed: str, starts: bool) -> None:
    push = read(ROOT / ".github" / "workflows" / "retrain.yml")[True]["push"]  # YAML's "on" is true
    assert push["branches"] == ["main"]
    assert any(fnmatch(changed, pattern) for pattern in push["paths"]) is starts
