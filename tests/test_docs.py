"""Documentation that can fail: what the program offers and what the texts say are compared."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import realmops
from realmops.cli import main
from realmops.stages import STAGES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")}
PARAMS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
PIPELINE = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
PATH_SUFFIXES = {"", ".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".jsonl", ".sh"}


def stage_names() -> list[str]:
    return [stage.name for stage in (STAGES.values() if isinstance(STAGES, dict) else STAGES)]


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for child_name, child in command.commands.items():
            yield from commands(child, f"{name} {child_name}")


COMMANDS = dict(commands(main, "realmops"))
OPTIONS = [
    (name, option)
    for name, command in COMMANDS.items()
    for parameter in command.params
    if isinstance(parameter, click.Option) and not parameter.hidden
    for option in [*parameter.opts, *parameter.secondary_opts]
    if option.startswith("--")
]


def code(text: str) -> list[str]:
    """What stands in `single backticks` and, line by line, in fenced blocks."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [*inline, *(line for block in fenced for line in block.splitlines())]


def documented(words: str) -> bool:
    """Whether some code in the texts has ``words`` as whole words."""
    whole = re.compile(rf"(?<![\w-]){re.escape(words)}(?![\w-])")
    return any(whole.search(piece) for text in TEXTS.values() for piece in code(text))


def named_paths(text: str) -> list[str]:
    """Repository paths that the code and the links of a text name."""
    pieces = [word.strip(",;:()'\"") for piece in code(text) for word in piece.split()]
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    looks_like_one = re.compile(r"\.?[A-Za-z0-9_][\w.-]*(/[\w.-]+)*/?")
    found = {
        piece
        for piece in pieces
        if looks_like_one.fullmatch(piece)
        and Path(piece).suffix in PATH_SUFFIXES
        and (Path(piece).suffix or (ROOT / piece.split("/")[0]).exists())
        and ("/" in piece or Path(piece).suffix)
    }
    return sorted({*found, *links})


def written_by_stages() -> list[str]:
    """Outputs, metrics and plots of dvc.yaml: named in the README, absent from a fresh clone."""
    entries = [
        entry
        for stage in PIPELINE["stages"].values()
        for kind in ("outs", "metrics", "plots")
        for entry in stage.get(kind, [])
    ]
    return [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]


def is_written_by_a_run(path: str) -> bool:
    outputs = written_by_stages()
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    return any(path.rstrip("/") == output or path.startswith(f"{output}/") for output in outputs) or any(
        path == entry or path.startswith(f"{entry}/") for entry in ignored if entry
    )


def exists(path: str) -> bool:
    """In the repository, or (as the texts abbreviate) below src/realmops."""
    return (ROOT / path).exists() or (ROOT / "src" / "realmops" / path).exists()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_is_documented(name: str) -> None:
    assert documented(name), f"`{name}` stands in none of {sorted(TEXTS)}"


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_every_option_is_documented(name: str, option: str) -> None:
    assert documented(option), f"{option} of `{name}` stands in none of {sorted(TEXTS)}"


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_every_option_has_help(name: str, option: str) -> None:
    [parameter] = [p for p in COMMANDS[name].params if option in [*p.opts, *p.secondary_opts]]
    assert isinstance(parameter, click.Option)
    assert parameter.help, f"{option} of `{name}` has no help"


@pytest.mark.parametrize("section", sorted(PARAMS))
def test_every_section_of_params_is_explained(section: str) -> None:
    """In the README's table of sections: a row that starts with the name and goes on with words."""
    row = re.search(rf"^\| `{section}` \| .*\w", README, re.MULTILINE)
    assert row, f"no row for `{section}` in README.md"


def test_the_walk_follows_the_pipeline() -> None:
    """One heading per stage, in the order of dvc.yaml and STAGES."""
    names = stage_names()
    headings = re.findall(r"^#+ \d+\. `(\w+)`", README, re.MULTILINE)
    assert headings == names
    assert [name for name in PIPELINE["stages"] if name in names] == names


@pytest.mark.parametrize("text", sorted(TEXTS))
def test_every_path_named_exists(text: str) -> None:
    missing = [path for path in named_paths(TEXTS[text]) if not (exists(path) or is_written_by_a_run(path))]
    assert not missing, f"{text} names {missing}"


def makefile_targets() -> list[str]:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    [phony] = [line.split()[1:] for line in lines if line.startswith(".PHONY:")]
    targets = [match[1] for line in lines if (match := re.match(r"([a-z][a-z-]*):", line))]
    assert sorted(phony) == sorted(targets)
    return targets


def test_every_make_target_is_in_help_and_in_the_texts() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    listed = re.findall(r"^  make (\S+) +\S", shown, re.MULTILINE)
    assert listed == makefile_targets()
    for target in listed:
        assert documented(f"make {target}"), f"`make {target}` stands in none of {sorted(TEXTS)}"


def test_the_version_stands_once() -> None:
    """pyproject.toml, the package and the changelog's newest release agree."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert realmops.__version__ == version
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(\d[^\]]*)\]", changes, re.MULTILINE)
    assert releases[:1] in ([], [version])


def test_constraints_pin_one_version_each_and_name_no_address() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wrong = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._]+", line)]
    assert not wrong
    names = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see `src/realmops/config.py` and [x](LICENSE)", ["LICENSE", "src/realmops/config.py"]),
        ("```\nrealmops run tag --set tag.steps=3\n```", []),
        ("`README.md`, `gone.py`", ["README.md", "gone.py"]),
        ("[web](https://example.org/a.py) and `a/b`", []),
    ],
)
def test_paths_are_found(text: str, expected: list[str]) -> None:
    assert named_paths(text) == expected
