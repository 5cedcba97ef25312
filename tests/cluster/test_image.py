"""The Dockerfile: what is copied, installed and cached, and which user runs."""

import re
import tomllib
from pathlib import Path

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


def test_the_image_carries_its_commit() -> None:
    last = instructions()[[word for word, _ in instructions()].index("USER") :]
    assert ("ENTRYPOINT", '["realmops"]') in last
    [labels] = [rest for word, rest in instructions() if word == "LABEL"]
    assert 'org.opencontainers.image.revision="${COMMIT}"' in labels
    [variables] = [rest for word, rest in instructions() if word == "ENV"]
    assert "REALMOPS_COMMIT=${COMMIT}" in variables.split()
