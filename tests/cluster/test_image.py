"""The Dockerfile: what is copied, installed and cached."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from manifests import instructions

ROOT = Path(__file__).parents[2]


def test_another_commit_leaves_the_layer_of_the_dependencies_unchanged() -> None:
    found = instructions()
    assert found[0] == ("ARG", "BASE=python:3.11-slim")
    before = found[1 : [word for word, _ in found].index("RUN")]
    assert [rest for word, rest in before if word == "COPY"] == ["pyproject.toml constraints.txt ./"]
    assert [rest for word, rest in before if word == "ARG"] == ["VARIANT=cpu", "TORCH_INDEX="]
    last = found[[word for word, _ in found].index("USER") :]
    assert ("ENTRYPOINT", '["realmops"]') in last
    [variables] = [rest for word, rest in found if word == "ENV"]
    assert "REALMOPS_COMMIT=${COMMIT}" in variables.split()


def test_the_image_copies_files_that_are_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert ignored[0] == "*"
    copies = [rest.split() for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    sources = {source for *several, _ in copies for source in several}
    assert sources == {entry[1:] for entry in ignored if entry.startswith("!")}
    assert [source for source in sources if not (ROOT / source).exists()] == []


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
    ("given", "code", "error", "installed"),
    [
        ({"VARIANT": "cpu", "FOUND": CUDA}, 2, "name an index of torch's CPU builds", None),
        (
            {"VARIANT": "cpu", "FOUND": "{}", "TORCH_INDEX": "cpus"}, 0, "",
            "--constraint constraints.txt --extra-index-url cpus .[cluster,documents,faiss,openvino]",
        ),
        ({"VARIANT": "gpu", "FOUND": CUDA}, 0, "", "--constraint constraints.txt .[cluster,documents,gpu]"),
        ({"VARIANT": "tpu"}, 2, "allowed are cpu and gpu", None),
        ({"VARIANT": "cpu", "FOUND": "{}", "CODE": "7"}, 1, "", None),
    ],
)  # fmt: skip
def test_the_cpu_image_is_never_built_with_cuda(
    given: dict[str, str], code: int, error: str, installed: str | None, tmp_path: Path
) -> None:
    """The shell of the layer with the packages; it refuses before a package is downloaded."""
    script = next(rest for word, rest in instructions() if word == "RUN")
    script = re.sub(r"^(--mount=\S+ +)+", "", script)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(PIP, encoding="utf-8")
    (tmp_path / "bin/python").chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **given}
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, error in done.stderr) == (code, True)
    calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    pip = "-m pip --python /opt/realmops/bin/python install --no-cache-dir "
    assert [call.removeprefix(pip) for call in calls if call.startswith(pip)] == ([installed] if installed else [])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"\.\[(.+)\]", installed or ".[gpu]")[0].split(",")
    assert {*extras} <= project["optional-dependencies"].keys()
