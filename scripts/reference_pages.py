"""Write the generated pages: docs/commands.md (every command as the program knows it), docs/options.md (every option of
defaults.yaml), docs/components.md and docs/components/NAME.md (what other pipelines can load).

python scripts/reference_pages.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import component_pages

from realmops.cli import HEADINGS
from realmops.cli import main as realmops
from realmops.config import DEFAULTS
from realmops.config_yaml import read_params

ROOT = Path(__file__).parents[1]
MADE = "<!-- Written by `make docs`: change {source} and call it again. -->"
NOTATION = """\
The paper is Guu et al. (2020), "release" its code. x is the question or the masked sentence, z a passage, f(x, z) the
retriever's score, W the projection after BERT. Lengths of text are in wordpieces.

Set an option in params.yaml, in a preset or by `--set`. In brackets are its default and the paper's value. Options in
italics are not in the project's params.yaml: few people change them."""
# Options that are explained once, at the top of docs/commands.md, and a command that has each.
SHARED = dict.fromkeys(("--params", "--preset", "--set", "--root"), "realmops run") | {"--model": "realmops ask"}
SECTION = re.compile(r"(?P<name>\w+):(?:\s+# (?P<text>.*))?")
OPTION = re.compile(r"  (?P<name>\w+): (?P<value>.+?)(?:\s+# (?P<text>.*))?")


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def commands_of(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """A command and those below it, by the words that call them."""
    yield name, command
    if isinstance(command, click.Group):
        for word in sorted(command.commands):
            if not command.commands[word].hidden:
                yield from commands_of(command.commands[word], f"{name} {word}")


def options_of(name: str, command: click.Command) -> dict[str, str]:
    """The options of a command but --help, each as a point of a list."""
    context = click.Context(command, info_name=name)
    known = [one for one in command.get_params(context) if isinstance(one, click.Option) and "--help" not in one.opts]
    records = {option.opts[0]: option.get_help_record(context) for option in known}
    told = {first: (record[0].removesuffix(" RANGE"), record[1].split()) for first, record in records.items() if record}
    return {first: f"- `{words}`: {' '.join(what)}" for first, (words, what) in told.items()}


def describe(name: str, command: click.Command) -> Iterator[str]:
    """The lines on one command: what it takes, what it does, its options."""
    arguments = command.collect_usage_pieces(click.Context(command, info_name=name))[1:]
    yield f"## `{' '.join([name, *([] if isinstance(command, click.Group) else arguments)])}`"
    for text in (command.help, command.epilog):
        for paragraph in inspect.cleandoc(text or "").split("\f")[0].split("\n\n"):
            kept = paragraph.startswith("\b")  # lines that click does not wrap
            lines = [line.strip() for line in paragraph.removeprefix("\b").strip().splitlines()]
            yield ""
            yield "\n".join(["```", *lines, "```"]) if kept else " ".join(lines)
    if isinstance(command, click.Group):
        yield from ("", row("to", "commands"), "|---|---|")
        yield from (row(to.lower(), ", ".join(f"`{name}`" for name in names)) for to, names in HEADINGS.items())
    options = options_of(name, command)
    own = [line for option, line in options.items() if option not in SHARED]
    shared = [f"`{option}`" for option in SHARED if option in options]
    if own:
        yield from ("", *own)
    if shared:
        yield from ("", f"[Shared](#shared-options): {', '.join(shared)}.")
    yield ""


def commands_page() -> str:
    """The text of docs/commands.md."""
    head = ["# Commands", "", MADE.format(source="the command's help"), ""]
    known = dict(commands_of(realmops, "realmops"))
    shared = ["", "## Shared options", "", "Many commands take these. Every command takes `--help`.", ""]
    shared += [*(options_of(name, known[name])[option] for option, name in SHARED.items()), ""]
    (first, group), *others = known.items()
    lines = [*head, *describe(first, group), *shared]
    lines += [line for name, command in others for line in describe(name, command)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def options_page(options: str, shown: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of docs/options.md, where what is not ``shown`` is in italics; ValueError names a bad line."""
    lines = ["# Options", "", MADE.format(source="src/realmops/defaults.yaml"), ""]
    lines += [NOTATION, ""]
    for number, line in enumerate(options.splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        if section := SECTION.fullmatch(line):
            usual = shown.get(section["name"], {})
            lines += ["", f"## `{section['name']}`", ""] + [section["text"] or "", ""] * bool(section["text"])
        elif option := OPTION.fullmatch(line):
            what, _, paper = (option["text"] or "").partition("paper: ")
            facts = [f"`{option['value']}`", *([f"paper: {paper}"] if paper else [])]
            name = f"`{option['name']}`" if option["name"] in usual else f"*`{option['name']}`*"
            line = f"- {name} ({', '.join(facts)}): {what}"
            lines.append(line.rstrip("; :"))
        else:
            wanted = "neither 'section:' nor '  key: value  # what it is'"
            raise ValueError(f"defaults.yaml, line {number}: {wanted}: {line}")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def pages() -> dict[Path, str]:
    """What stands in each generated page, by its file."""
    options = options_page(DEFAULTS.read_text(encoding="utf-8"), read_params(ROOT / "params.yaml")[1])
    found = {ROOT / "docs/commands.md": commands_page(), ROOT / "docs/options.md": options}
    return found | component_pages.pages(lambda source: MADE.format(source=source), row)


def main() -> None:
    """Write the pages."""
    (ROOT / "docs/components").mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
