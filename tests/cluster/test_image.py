"""The Dockerfile: what is copied, installed and cached, and which user runs."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from manifests import instructions

ROOT = Path(__file__).parents[2]


def test_the_image_starts_from_the_base_that_is_given() -> None:
    found = instructions()
    assert found[0] == ("ARG", "BASE=python:3.11-slim")
    assert [rest for word, rest in found if word == "FROM"] == ["${BASE} AS packages", "packages AS build", "packages"]


def test_another_commit_leaves_the_layer_of_the_dependencies_as_it_was() -> None:
    found = instructions()
    before = found[1 : [word for word, _ in found].index("RUN")]
    assert [rest for word, rest in before if word == "COPY"] == ["pyproject.toml constraints.txt ./"]
    assert [rest for word, rest in before if word == "ARG"] == ["VARIANT=cpu", "TORCH_INDEX="]
    [package] = [rest for word, rest in found if word == "RUN" and "/opt/package" in rest]
    assert "--no-deps" in package
    assert ("COPY", "--from=build /opt/package /opt/realmops") in found


def test_the_image_copies_what_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert ignored[0] == "*"
    copies = [rest.split() for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    sources = {source for *several, _ in copies for source in several}
    assert sources == {entry[1:] for entry in ignored if entry.startswith("!")}
    for source in sources:
        assert (ROOT / source).exists(), source


def test_the_image_installs_extras_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    run = next(rest for word, rest in instructions() if word == "RUN")
    [extras] = re.findall(r"\"\.\[([^]]+)\]\"", run)
    chosen = re.findall(r"(\w+)\) search=(\w+)", run)
    assert chosen == [("cpu", "faiss"), ("gpu", "gpu")]
    assert {*extras.replace("$search", "faiss").split(",")} <= {*project["optional-dependencies"]}


# pip of the image's build, with the packages that it would install
PIP = """#!/bin/sh
echo "$@" >> calls
while [ $# -gt 1 ]; do
    if [ "$1" = --report ]; then
        printf '{"install": [{"metadata": {"name": "torch"}}, %s]}' "$FOUND" > "$2"
        exit "${CODE:-0}"
    fi
    shift
done
"""
CUDA = '{"metadata": {"name": "nvidia-cublas"}}'


@pytest.mark.parametrize(
    ("given", "code", "said", "installed"),
    [
        ({"VARIANT": "cpu", "FOUND": CUDA}, 2, "name an index of torch's CPU builds", None),
        (
            {"VARIANT": "cpu", "FOUND": "{}"},
            0,
            "",
            "--constraint constraints.txt .[cluster,documents,faiss,openvino]",
        ),
        (
            {"VARIANT": "cpu", "FOUND": "{}", "TORCH_INDEX": "cpus"},
            0,
            "",
            "--constraint constraints.txt --extra-index-url cpus .[cluster,documents,faiss,openvino]",
        ),
        ({"VARIANT": "gpu", "FOUND": CUDA}, 0, "", "--constraint constraints.txt .[cluster,documents,gpu]"),
        ({"VARIANT": "tpu"}, 2, "allowed are cpu and gpu", None),
        ({"VARIANT": "cpu", "FOUND": "{}", "CODE": "7"}, 1, "", None),
    ],
)
def test_the_cpu_image_is_never_built_with_cuda(
    given: dict[str, str], code: int, said: str, installed: str | None, tmp_path: Path
) -> None:
    """The shell of the layer with the packages; it refuses before a package is downloaded."""
    script = next(rest for word, rest in instructions() if word == "RUN")
    script = re.sub(r"^(--mount=\S+ +)+", "", script)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(PIP, encoding="utf-8")
    (tmp_path / "bin/python").chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **given}
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, said in done.stderr) == (code, True)
    calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    pip = "-m pip --python /opt/realmops/bin/python install --no-cache-dir "
    assert [call.removeprefix(pip) for call in calls if call.startswith(pip)] == ([installed] if installed else [])


def test_the_image_carries_its_commit() -> None:
    last = instructions()[[word for word, _ in instructions()].index("USER") :]
    assert ("ENTRYPOINT", '["realmops"]') in last
    [labels] = [rest for word, rest in instructions() if word == "LABEL"]
    assert 'org.opencontainers.image.revision="${COMMIT}"' in labels
    [variables] = [rest for word, rest in instructions() if word == "ENV"]
    assert "REALMOPS_COMMIT=${COMMIT}" in variables.split()
