"""The pages agree with the program: calls, options, paths, links, tables and figures."""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import reference_pages
import results
import yaml

import realmops
from realmops import config
from realmops.cli import main
from realmops.commands.init import ALWAYS
from realmops.options import Options
from realmops.questions import question_files
from realmops.readers import sources
from realmops.stages import STAGES, STEPS
from realmops.starter.project_files import TEMPLATES

ROOT = Path(__file__).parents[2]
PARAMS = ROOT / "params.yaml"
FILES = ("README.md", "CONTRIBUTING.md", "k8s/README.md", "benchmarks/LOG.md")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (*(ROOT / name for name in FILES), *sorted((ROOT / "docs").glob("*.md")))
}
README, WALK, RESULTS = PAGES["README.md"], PAGES["docs/walk.md"], PAGES["docs/results.md"]
GENERATED = reference_pages.pages()
OPTIONS = Options().model_dump()
PIPELINE = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
PATH_SUFFIXES = {"", ".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".jsonl", ".sh"}
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
each_page = pytest.mark.parametrize("page", sorted(PAGES))


def code(text: str) -> list[str]:
    """Return the text in `backticks`, and the lines of fenced blocks."""
    inline = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    lines = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return [*(" ".join(piece.split()) for piece in inline), *lines]


def rows_of(text: str, head: str) -> list[str]:
    """Return the names in the first column of the table with this head."""
    cells = re.findall(r"^\| (`[^|]+)\|", text[text.index(head) :].split("\n\n")[0], re.MULTILINE)
    return re.findall(r"`([^`]+)`", "".join(cells))


# Calls and options


def commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    for child in command.commands.values() if isinstance(command, click.Group) else ():
        yield from commands(child)


def test_every_option_of_a_command_has_help() -> None:
    options = [(command.name, option) for command in commands(main) for option in command.params]
    assert not [(name, o.name) for name, o in options if isinstance(o, click.Option) and not o.help]


def problem_of(line: str) -> str:
    """Return why the command line refuses a call, or "". Words in capitals are placeholders."""
    words = [word for word in shlex.split(line)[1:] if word != "..."]
    command: click.Command = main
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command = command.commands[words.pop(0)]
    try:
        values, rest, _ = command.make_parser(click.Context(command)).parse_args(words)
        if rest or values.get("stage", "all") not in {*STEPS, "all", "STAGE", None}:
            return f"{rest} or {values.get('stage')} is not accepted"
        presets = [name for name in values.get("presets") or () if not name.isupper()]
        settings = [setting for setting in values.get("settings") or () if not setting.isupper()]
        config.load_params(PARAMS, presets=presets, settings=settings)
    except (click.UsageError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"docs/commands.md"}))  # which shows usage, not calls
def test_the_command_line_accepts_every_documented_call(page: str) -> None:
    pieces = [re.sub(r"\s#\s.*| &$", "", piece) for piece in code(PAGES[page])]
    calls = [re.search(r"(?:^|\$\(|-m )(realmops [^)]*)", piece) for piece in pieces]
    lines = [match[1].strip() for match in calls if match]
    assert [f"{line}: {problem}" for line in lines if (problem := problem_of(line))] == []
    assert lines or page in ("benchmarks/LOG.md", "docs/options.md")


@each_page
def test_scripts_accept_the_documented_options(page: str) -> None:
    common = (ROOT / "benchmarks" / "against.py").read_text(encoding="utf-8")
    for piece in code(PAGES[page]):
        if match := re.search(r"python ((?:benchmarks|scripts)/\S+\.py)(.*)", piece):
            source = (ROOT / match[1]).read_text(encoding="utf-8") + common
            options = re.findall(r"(?<!\S)--[a-z-]+", match[2].split(" # ")[0])
            assert [option for option in options if f'"{option}"' not in source] == [], match[1]


@each_page
def test_every_named_option_exists(page: str) -> None:
    named = [re.match(r"([a-z_]+)\.([a-z_]+)(?![\w./(])", piece) for piece in code(PAGES[page])]
    pairs = [(match[1], match[2]) for match in named if match and match[1] in OPTIONS]
    suffixes = {suffix.removeprefix(".") for suffix in PATH_SUFFIXES} | {"safetensors", "npy", "parquet"}
    assert [f"{s}.{key}" for s, key in pairs if key not in OPTIONS[s] and key not in suffixes] == []


def test_tables_have_a_row_for_every_section_preset_and_format() -> None:
    assert [name for name in OPTIONS if not re.search(rf"^\| `{name}` \| .*\w", WALK, re.MULTILINE)] == []
    presets = rows_of(PAGES["docs/experiments.md"], "| preset |")
    assert sorted(presets) == sorted(path.stem for path in (config.PACKAGE / "presets").glob("*.yaml"))
    data = PAGES["docs/data.md"]
    assert rows_of(data, "| format | files | a document is |") == [*sources.FORMATS]
    assert rows_of(data, "| format | file |") == [*question_files.FORMATS]


@pytest.mark.parametrize(
    ("path", "text"), reference_pages.pages().items(), ids=lambda value: getattr(value, "name", "")
)
def test_a_generated_page_is_up_to_date(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, f"{path.name} differs from its source; call: make docs"


# Structure, paths and links


def test_the_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= 150
    assert [line for line in README.splitlines() if len(line) > 120] == []


def test_contributing_has_a_line_for_every_room() -> None:
    [tree] = [block for block in FENCE.findall(PAGES["CONTRIBUTING.md"]) if block.startswith("src/realmops/\n")]
    named = re.findall(r"^  ([\w.]+)/? +\S", tree, re.MULTILINE)
    rooms = [p.name for p in config.PACKAGE.iterdir() if (p.is_dir() or p.suffix == ".py") and p.name[0] != "_"]
    assert sorted(named) == sorted(rooms)


def test_the_walk_has_a_heading_for_every_stage_in_order() -> None:
    titles = re.findall(r"^#+ \d+\. `(\w+)`", WALK, re.MULTILINE)
    assert titles == [*STAGES] == [name for name in PIPELINE if name in STAGES]
    for section, stage in zip(re.split(r"^#+ \d+\. ", WALK, flags=re.MULTILINE)[1:], STAGES.values(), strict=True):
        assert f"`{stage.folder}`" in section.split("\n\n")[1], stage.name


WRITTEN = {  # names without their folder of files that runs write or users bring
    *("answers.jsonl", "manifest.json", "metrics.json", "metrics.jsonl", "my.jsonl", "questions/own.jsonl"),
    *("realmops-run.json", "config.json", "config_sentence_transformers.json", "tokenizer.json"),
    *("corpus.jsonl", "queries.jsonl", "run.txt", "bm25_run.txt", "qrels.txt"),
    *ALWAYS,
    *TEMPLATES,
}
IGNORED = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines() if line]
OUTPUTS = [*(stage.folder for stage in STAGES.values()), *IGNORED]


@each_page
def test_every_named_path_exists(page: str) -> None:
    starts = (ROOT, (ROOT / page).parent, config.PACKAGE, config.PACKAGE / "corpus")
    missing = []
    for name in {word.strip(",;:()'\"") for line in code(PAGES[page]) for word in line.split()}:
        suffix = Path(name).suffix
        if not re.fullmatch(r"\.?[A-Za-z0-9_][\w.-]*(/[\w.-]+)*/?", name) or suffix not in PATH_SUFFIXES:
            continue
        if not suffix and not ("/" in name and (ROOT / name.split("/")[0]).exists()):
            continue
        is_output = any(f"{name.rstrip('/')}/".startswith(f"{output}/") for output in OUTPUTS)
        if name not in WRITTEN and not is_output and not any((start / name).exists() for start in starts):
            missing.append(name)
    assert missing == []


def links(text: str) -> list[str]:
    return list(re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]+`", "", FENCE.sub("", text))))


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_every_link_leads_to_a_page_and_every_page_is_linked(page: str) -> None:
    wrong = []
    for link in links(PAGES[page]):
        name, _, anchor = link.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if "://" not in link and not (path.exists() and (not anchor or anchor in anchors(path.read_text("utf-8")))):
            wrong.append(link)
    assert wrong == []
    assert page in {"README.md", *links(README), "benchmarks/LOG.md", "k8s/README.md", "docs/real-text.md"}


# Records of measurements: tables of docs/results.md and lines of benchmarks/LOG.md

RECORDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in results.RECORDS.glob("*.json")}
LOG = [re.split(r"(?<!\\) \| ", x) for x in PAGES["benchmarks/LOG.md"].splitlines() if re.match(r"\d{4}-\d\d-\d\d ", x)]


def unknown_figures(text: str, names: list[str]) -> list[str]:
    """Return the decimal numbers of a text that are in none of these records."""
    known = " ".join(str(cell) for name in names for row in RECORDS[name]["rows"] for cell in row)
    figures = re.findall(r"(?<![\w.])\d*\.\d+(?![\w.])", text)
    return [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", known)]


def test_every_record_has_its_origin_and_is_a_table_of_results_or_linked_from_the_log() -> None:
    assert results.page(RESULTS) == RESULTS, "call make docs"
    linked = {name for line in LOG for name in re.findall(r"\(records/([\w-]+)\.json\)", " ".join(line))}
    assert sorted([*results.MARKERS.findall(RESULTS), *linked]) == sorted(RECORDS)
    for name, record in RECORDS.items():
        assert {"command", "commit", "date", "processor", "seeds"} <= set(record), name
        assert ("recorded" in record) == (record["commit"] is None), name
        assert all(len(row) == len(record["columns"]) for row in record["rows"]), name


def test_figures_are_those_of_their_records() -> None:
    assert [line for line in LOG if len(line) != 4 or not all(line)] == [], "date | question | result | verdict"
    wrong = unknown_figures(results.MARKERS.sub("", RESULTS), [*RECORDS])
    for line in LOG:
        names = re.findall(r"\(records/([\w-]+)\.json\)", " ".join(line))
        wrong += unknown_figures(line[2], names) if any(RECORDS[name]["rows"] for name in names) else []
    assert wrong == []


# Makefile, version, pins


def test_make_targets_are_in_help_and_in_the_pages() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    [phony] = [line.split()[1:] for line in lines if line.startswith(".PHONY:")]
    targets = [match[1] for line in lines if (match := re.match(r"([a-z][a-z-]*):", line))]
    assert sorted(phony) == sorted(targets)
    shown = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert re.findall(r"^  make (\S+) +\S", shown, re.MULTILINE) == targets
    named = [re.findall(r"(?<![\w-])make ([a-z][a-z-]*)", piece) for text in PAGES.values() for piece in code(text)]
    assert {name for names in named for name in names} == set(targets)


def test_the_version_is_that_of_the_newest_release() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert realmops.__version__ == version
    assert re.findall(r"^## \[(\d[^\]]*)\]", changes, re.MULTILINE)[:1] in ([], [version])
