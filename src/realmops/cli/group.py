"""The command ``realmops``: its headings, its errors and its exit codes."""

import os
import sys
from collections.abc import Sequence

import click

from realmops import __version__
from realmops.console import explained_errors, show

HEADINGS = {
    "Run": ("init", "run", "params", "public-data", "import", "questions", "cloze"),
    "Look": ("report", "explain", "ceilings"),
    "Serve": ("search", "ask", "serve", "mcp", "verify", "update", "export"),
    "Compare": ("ablate", "compare", "promote"),
    "Operate": ("submit", "index-builder", "sync", "doctor"),
}


class ExplainedCommand(click.Command):
    """A command that prints what it returns, and ends with one message where a person can put right what is wrong."""

    def invoke(self, ctx: click.Context) -> None:
        with explained_errors():
            for line in super().invoke(ctx) or ():
                show(line)


class ExplainedCommands(click.Group):
    """A group of such commands, shown under headings."""

    command_class = ExplainedCommand

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for heading, names in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{n:<{width}}", self.commands[n].get_short_help_str(limit=80)) for n in names])


def exit_with(problems: Sequence[str]) -> None:
    """Name the problems and end with exit code 1, where there are any."""
    for problem in problems:
        click.echo(f"realmops: {problem}", err=True)
    if problems:
        sys.exit(1)


@click.group(cls=ExplainedCommands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__)
def main() -> None:
    """Train REALM: a retriever and a reader learn together from masked words, then answer questions.

    Begin with "realmops init" for documents of your own, then "realmops run all": it runs the stages sample, snapshot,
    tag, ict, pretrain, finetune, evaluate and skips those that are done. Then "realmops ask" and "realmops serve"
    answer your questions. docs/options.md has all options.
    """
    # Trainer and builder share the cores: a thread that waits must not spin while the other process wants to work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # They share a GPU too: without this, batches of ever new lengths leave gaps that fill its memory within minutes.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
