"""Documentation that can fail: what the program offers and what the pages say are compared."""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import results
import yaml

import realmops
from realmops import config
from realmops.cli import main
from realmops.commands.init import ALWAYS
from realmops.questions import question_files
from realmops.readers import sources as formats
from realmops.stages import STAGES
from realmops.starter.project_files import TEMPLATES

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "k8s" / "README.md",
        ROOT / "benchmarks" / "LOG.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
}  # fmt: skip
README, WALK, DATA, EXPERIMENTS = (
    PAGES[f"{name}.md"] for name in ("README", "docs/walk", "docs/data", "docs/experiments")
)
PARAMS: dict[str, dict[str, Any]] = config.default_options()
PIPELINE = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
PATH_SUFFIXES = {"", ".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".jsonl", ".sh"}
README_LINES, README_WIDTH = 150, 120
FIGURES = 6


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for child_name, child in command.commands.items():
            yield from commands(child, f"{name} {child_name}")


COMMANDS = dict(commands(main, "realmops"))


def fenced_blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def code(text: str) -> list[str]:
    """What stands in `single backticks` and, line by line, in fenced blocks."""
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    lines = [line for block in fenced_blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    return [*(" ".join(piece.split()) for piece in inline), *lines]


def prose(text: str) -> str:
    """What is left without code."""
    return re.sub(r"`[^`]+`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def documented(words: str) -> bool:
    """Whether some code in the pages has ``words`` as whole words."""
    whole = re.compile(rf"(?<![\w-]){re.escape(words)}(?![\w-])")
    return any(whole.search(piece) for text in PAGES.values() for piece in code(text))


# Commands and options


def test_every_option_has_help() -> None:
    """And stands on the generated page docs/commands.md with it."""
    options = [(name, one) for name, command in COMMANDS.items() for one in command.params]
    assert not [(name, one.name) for name, one in options if isinstance(one, click.Option) and not one.help]


def command_lines(text: str) -> list[str]:
    """The calls of ``realmops`` in a text's code, without comments."""
    pieces = [re.sub(r"\s#\s.*| &$", "", piece) for piece in code(text)]
    found = [re.search(r"(?:^|\$\(|-m )(realmops [^)]*)", piece) for piece in pieces]
    return [match[1].strip() for match in found if match]


def wrong_with(line: str) -> str:
    """Why the command line would refuse a call; empty where it would not. Words in capitals stand for anything."""
    words = [word for word in shlex.split(line)[1:] if word != "..."]
    command: click.Command = main
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command = command.commands[words.pop(0)]
    try:
        values, rest, _ = command.make_parser(click.Context(command)).parse_args(words)
    except click.UsageError as error:
        return error.format_message()
    if rest:
        return f"nothing takes {rest}"
    stage = values.get("stage")
    if isinstance(stage, str) and stage not in {*STAGES, "all", "STAGE"}:
        return f"no stage {stage}"
    presets = [name for name in values.get("presets") or () if not name.isupper()]
    settings = [setting for setting in values.get("settings") or () if not setting.isupper()]
    try:
        config.load_params(
            ROOT / "params.yaml",
            presets=[config.preset_path(name, ROOT / "params.yaml") for name in presets],
            settings=settings,
        )
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"docs/commands.md"}))  # which shows usage, not calls
def test_every_documented_call_is_one_that_the_command_line_takes(page: str) -> None:
    lines = command_lines(PAGES[page])
    wrong = [f"{line}: {problem}" for line in lines if (problem := wrong_with(line))]
    assert not wrong, f"{page}:\n" + "\n".join(wrong)
    assert lines or page in ("benchmarks/LOG.md", "docs/options.md")


def scripts_called(text: str) -> Iterator[tuple[str, list[str]]]:
    """The project's scripts that a text calls, with their options."""
    for piece in code(text):
        if match := re.search(r"python ((?:benchmarks|scripts)/\S+\.py)(.*)", piece):
            yield match[1], re.findall(r"(?<!\S)--[a-z-]+", match[2].split(" # ")[0])


@pytest.mark.parametrize("page", sorted(PAGES))
def test_scripts_that_are_called_take_these_options(page: str) -> None:
    common = (ROOT / "benchmarks" / "against.py").read_text(encoding="utf-8")
    for script, options in scripts_called(PAGES[page]):
        source = (ROOT / script).read_text(encoding="utf-8") + common
        assert [option for option in options if f'"{option}"' not in source] == [], script


# Options of params.yaml, presets, formats


@pytest.mark.parametrize("section", sorted(PARAMS))
def test_every_section_of_params_is_explained(section: str) -> None:
    """In the walk's table of sections: a row that starts with the name and goes on with words."""
    row = re.search(rf"^\| `{section}` \| .*\w", WALK, re.MULTILINE)
    assert row, f"no row for `{section}` in docs/walk.md"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_option_named_exists(page: str) -> None:
    named = [re.match(r"([a-z_]+)\.([a-z_]+)(?![\w./(])", piece) for piece in code(PAGES[page])]
    pairs = [(match[1], match[2]) for match in named if match and match[1] in PARAMS]
    suffixes = {suffix.removeprefix(".") for suffix in PATH_SUFFIXES} | {"safetensors", "npy", "parquet"}
    wrong = [f"{s}.{key}" for s, key in pairs if key not in PARAMS[s] and key not in suffixes]
    assert not wrong, f"{page} names {wrong}"


def test_every_preset_has_a_row_and_every_row_a_preset() -> None:
    table = EXPERIMENTS[EXPERIMENTS.index("| preset |") :].split("\n\n")[0]
    named = re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted(path.stem for path in (ROOT / "src" / "realmops" / "presets").glob("*.yaml"))


def rows_of(text: str, head: str) -> list[str]:
    """The first column of a table, in order."""
    table = text[text.index(head) :].split("\n\n")[0]
    return re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)


@pytest.mark.parametrize(
    ("head", "known"),
    [
        ("| format | files | a document is |", list(formats.FORMATS)),
        ("| format | file |", list(question_files.FORMATS)),
    ],
)
def test_every_format_is_explained(head: str, known: list[str]) -> None:
    assert rows_of(DATA, head) == known


# The pages' shape


def test_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= README_LINES
    assert [line for line in README.splitlines() if len(line) > README_WIDTH] == []


def test_each_figure_of_the_readme_is_below_its_command() -> None:
    section = README[README.index("## Six measurements") :].split("\n## ")[0]
    _, *pieces = section.split("```\n")
    assert len(pieces) == 2 * FIGURES
    for command, figure in zip(pieces[::2], pieces[1::2], strict=True):
        assert len(command.splitlines()) == 1, command
        assert re.search(r"\d", figure), figure
        assert re.search("AMD|Intel|NVIDIA", figure), figure


def test_contributing_has_a_line_for_every_room_of_the_code() -> None:
    [tree] = [block for block in fenced_blocks(PAGES["CONTRIBUTING.md"]) if block.startswith("src/realmops/\n")]
    named = re.findall(r"^  ([\w.]+)/? +\S", tree, re.MULTILINE)
    source = ROOT / "src" / "realmops"
    there = [p.name for p in source.iterdir() if (p.is_dir() or p.suffix == ".py") and not p.name.startswith("_")]
    assert sorted(named) == sorted(there)


def test_the_walk_follows_the_pipeline() -> None:
    """One heading per stage, in the order of dvc.yaml and STAGES; its first paragraph names the folder."""
    names = list(STAGES)
    headings = re.findall(r"^#+ \d+\. `(\w+)`", WALK, re.MULTILINE)
    assert headings == names
    for section, stage in zip(re.split(r"^#+ \d+\. ", WALK, flags=re.MULTILINE)[1:], STAGES.values(), strict=True):
        assert f"`{stage.folder}`" in section.split("\n\n")[1], stage.name
    assert [name for name in PIPELINE["stages"] if name in names] == names


# Paths and links


def named_paths(text: str) -> list[str]:
    """Repository paths that the code of a text names."""
    pieces = [word.strip(",;:()'\"") for piece in code(text) for word in piece.split()]
    looks_like_one = re.compile(r"\.?[A-Za-z0-9_][\w.-]*(/[\w.-]+)*/?")
    return sorted(
        {
            piece
            for piece in pieces
            if looks_like_one.fullmatch(piece)
            and Path(piece).suffix in PATH_SUFFIXES
            and (Path(piece).suffix or (ROOT / piece.split("/")[0]).exists())
            and ("/" in piece or Path(piece).suffix)
        }
    )


def links(text: str) -> list[str]:
    """Where a text's links and pictures inside the project lead."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)) if "://" not in link]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def written_by_stages() -> list[str]:
    """Outputs, metrics and plots of dvc.yaml: named in the pages, absent from a fresh clone."""
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


def exists(path: str, page: str) -> bool:
    """In the repository, beside the page, or (as the texts abbreviate) below src/realmops or in a stage's folder."""
    starts = (ROOT, (ROOT / page).parent, ROOT / "src" / "realmops", ROOT / "src" / "realmops" / "corpus")
    return path in WRITTEN or any((start / path).exists() for start in starts)


# Names of files that runs write or people bring, which the pages say without their folder.
WRITTEN = {
    *(
        "answers.jsonl",
        "manifest.json",
        "metrics.json",
        "metrics.jsonl",
        "my.jsonl",
        "questions/own.jsonl",
        "realmops-run.json",
    ),
    *("config.json", "config_sentence_transformers.json", "tokenizer.json"),  # of an encoder
    *("corpus.jsonl", "queries.jsonl", "run.txt", "bm25_run.txt", "qrels.txt"),  # of BEIR and TREC
    *ALWAYS,
    *TEMPLATES,
}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_path_named_exists(page: str) -> None:
    missing = [path for path in named_paths(PAGES[page]) if not (exists(path, page) or is_written_by_a_run(path))]
    assert not missing, f"{page} names {missing}"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_link_leads_somewhere(page: str) -> None:
    wrong = []
    for link in links(PAGES[page]):
        name, _, anchor = link.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        path.resolve().relative_to(ROOT)  # a link out of the project is an error
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            wrong.append(link)
    assert not wrong, f"{page} links to {wrong}"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_page_of_docs_is_reached_from_the_readme(page: str) -> None:
    others = "benchmarks/LOG.md", "k8s/README.md", "docs/real-text.md"
    assert page == "README.md" or page in {*links(README), *others}


# The tables of docs/results.md and the lines of benchmarks/LOG.md

RECORDED = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in results.RECORDS.glob("*.json")}
LOG_LINES = [line for line in PAGES["benchmarks/LOG.md"].splitlines() if re.match(r"\d{4}-\d\d-\d\d \| ", line)]


def linked_records(line: str) -> list[str]:
    return re.findall(r"\(records/([\w-]+)\.json\)", line)


def decimals(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])\d*\.\d+(?![\w.])", text)


def test_the_tables_of_results_are_those_of_the_records() -> None:
    """`make docs` writes them; each record is a table of docs/results.md or linked from the LOG, and not both."""
    text = PAGES["docs/results.md"]
    assert results.page(text) == text
    linked = {name for line in LOG_LINES for name in linked_records(line)}
    assert sorted([*results.MARKERS.findall(text), *linked]) == sorted(RECORDED)


def test_every_line_of_the_log_has_date_question_result_and_verdict() -> None:
    cells = [re.split(r"(?<!\\) \| ", line) for line in LOG_LINES]
    assert cells
    assert [line for line in cells if len(line) != 4 or not all(line)] == []


def test_every_figure_on_a_line_of_the_log_is_one_of_the_record_that_it_links() -> None:
    wrong = []
    for line in LOG_LINES:
        rows = [str(cell) for name in linked_records(line) for row in RECORDED[name]["rows"] for cell in row]
        known = " ".join(rows)
        result = re.split(r"(?<!\\) \| ", line)[2]
        if rows:
            wrong += [f for f in decimals(result) if not re.search(rf"(?<![\d.]){re.escape(f)}(?!\d)", known)]
    assert wrong == []


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_a_record_has_the_origin_of_its_figures(name: str) -> None:
    """What nobody kept is null; without a commit the record names the one that brought the figures here."""
    record = RECORDED[name]
    assert {"command", "commit", "date", "processor", "seeds"} <= set(record)
    assert ("recorded" in record) == (record["commit"] is None)
    assert all(len(row) == len(record["columns"]) for row in record["rows"])


def test_every_figure_in_the_prose_of_results_is_one_of_a_record() -> None:
    by_hand = decimals(results.MARKERS.sub("", PAGES["docs/results.md"]))
    known = " ".join(str(cell) for record in RECORDED.values() for row in record["rows"] for cell in row)
    assert by_hand
    assert [figure for figure in by_hand if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", known)] == []


# The Makefile, the version, the pins


def makefile_targets() -> list[str]:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    [phony] = [line.split()[1:] for line in lines if line.startswith(".PHONY:")]
    targets = [match[1] for line in lines if (match := re.match(r"([a-z][a-z-]*):", line))]
    assert sorted(phony) == sorted(targets)
    return targets


def test_every_make_target_is_in_help_and_in_the_pages() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    listed = re.findall(r"^  make (\S+) +\S", shown, re.MULTILINE)
    assert listed == makefile_targets()
    for target in listed:
        assert documented(f"make {target}"), f"`make {target}` stands in none of {sorted(PAGES)}"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_make_target_named_exists(page: str) -> None:
    named = [match[1] for piece in code(PAGES[page]) if (match := re.match(r"make ([a-z][a-z-]*)", piece))]
    assert set(named) <= set(makefile_targets())


def test_the_version_is_the_same_everywhere() -> None:
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
