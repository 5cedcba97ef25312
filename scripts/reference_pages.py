"""Write the generated pages.

docs/commands.md comes from the commands' help, docs/options.md and the comments of params.yaml from the options,
docs/components.md and docs/components/NAME.md from the Kubeflow components.

python scripts/reference_pages.py
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import component_pages
from pydantic.fields import FieldInfo

from realmops.cli import HEADINGS
from realmops.cli import main as realmops
from realmops.config_yaml import read_params
from realmops.options import SECTIONS
from realmops.starter.yaml_text import option_comment

ROOT = Path(__file__).parents[1]
MADE = "<!-- Written by `make docs`: change {source} and call it again. -->"
NOTATION = """\
The paper is Guu et al. (2020), "release" its code. x is the question or the masked sentence, z a passage, f(x, z) the
retriever's score, W the projection after BERT. Text lengths are in wordpieces.

Set an option in params.yaml, in a preset or with `--set`. Its default and the paper's value are in brackets. Options in
italics are rarely changed; they are not in the project's params.yaml."""
# Options explained once, at the top of docs/commands.md, with a command that has each.
SHARED = dict.fromkeys(("--params", "--preset", "--set", "--root"), "realmops run") | {"--model": "realmops ask"}
SECTION = re.compile(r"(?P<name>\w+):(?:\s+#.*)?")
OPTION = re.compile(r"(?P<assignment>  (?P<name>\w+): .+?)(?:\s+#.*)?")


def row(*cells: str) -> str:
    """Format a row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def commands_of(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and its subcommands with their full names."""
    yield name, command
    if isinstance(command, click.Group):
        for subcommand in sorted(command.commands):
            if not command.commands[subcommand].hidden:
                yield from commands_of(command.commands[subcommand], f"{name} {subcommand}")


def options_of(name: str, command: click.Command) -> dict[str, str]:
    """Return the options of a command except --help, each as a list item."""
    context = click.Context(command, info_name=name)
    options = [item for item in command.get_params(context) if isinstance(item, click.Option)]
    records = {item.opts[0]: item.get_help_record(context) for item in options if "--help" not in item.opts}
    visible = {name: record for name, record in records.items() if record}
    return {
        name: f"- `{usage.removesuffix(' RANGE')}`: {' '.join(text.split())}" for name, (usage, text) in visible.items()
    }


def describe(name: str, command: click.Command) -> Iterator[str]:
    """Yield the lines on one command: usage, help and options."""
    arguments = command.collect_usage_pieces(click.Context(command, info_name=name))[1:]
    yield f"## `{' '.join([name, *([] if isinstance(command, click.Group) else arguments)])}`"
    for text in (command.help, command.epilog):
        for paragraph in inspect.cleandoc(text or "").split("\f")[0].split("\n\n"):
            is_verbatim = paragraph.startswith("\b")  # lines that click does not wrap
            lines = [line.strip() for line in paragraph.removeprefix("\b").strip().splitlines()]
            yield ""
            yield "\n".join(["```", *lines, "```"]) if is_verbatim else " ".join(lines)
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
    """Return the text of docs/commands.md."""
    head = ["# Commands", "", MADE.format(source="the command's help"), ""]
    commands = dict(commands_of(realmops, "realmops"))
    shared = ["", "## Shared options", "", "Many commands take these. Every command takes `--help`.", ""]
    shared += [*(options_of(name, commands[name])[option] for option, name in SHARED.items()), ""]
    (first, group), *subcommands = commands.items()
    lines = [*head, *describe(first, group), *shared]
    lines += [line for name, command in subcommands for line in describe(name, command)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def options_page(common: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of docs/options.md; options not in ``common`` are in italics."""
    lines = ["# Options", "", MADE.format(source="src/realmops/options.py"), "", NOTATION]
    for section, options in SECTIONS.items():
        lines += ["", f"## `{section}`", "", str(options.__doc__), ""]
        for key, field in options.model_fields.items():
            name = f"`{key}`" if key in common.get(section, {}) else f"*`{key}`*"
            paper = f", paper: {paper_value(field)}" if paper_value(field) else ""
            default = field.default if field.default and isinstance(field.default, str) else json.dumps(field.default)
            lines.append(f"- {name} (`{default}`{paper}): {field.description}".rstrip(": "))
    return "\n".join(lines) + "\n"


def commented_params(text: str) -> str:
    """Return a params file with the sentences of its options as comments."""
    lines, section = [], ""
    for line in text.splitlines():
        if match := SECTION.fullmatch(line):
            section = match["name"]
        elif match := OPTION.fullmatch(line):
            line = f"{match['assignment']:<25}  # {option_comment(section, match['name'])}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def paper_value(field: FieldInfo) -> str:
    """Return the paper's value of an option."""
    extra = field.json_schema_extra
    return str(extra["paper"]) if isinstance(extra, dict) else ""


def pages() -> dict[Path, str]:
    """Return the text of each generated page by its path."""
    params = ROOT / "params.yaml"
    texts = {
        ROOT / "docs/commands.md": commands_page(),
        ROOT / "docs/options.md": options_page(read_params(params)[1]),
        params: commented_params(params.read_text(encoding="utf-8")),
    }
    return texts | component_pages.pages(lambda source: MADE.format(source=source), row)


def main() -> None:
    """Write the pages."""
    (ROOT / "docs/components").mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
