"""The command group ``realmops``: headings of its help, error messages and exit codes."""

import os
import signal
import sys
from collections.abc import Sequence

import click

from realmops import __version__
from realmops.console import Console, exit_on_user_error, handle_interrupt, show
from realmops.credentials import refuse_credentials

HEADINGS = {
    "Run": ("init", "run", "adapt", "params", "public-data", "reader", "import", "questions"),
    "Inspect": ("report", "explain", "ceilings"),
    "Serve": ("search", "ask", "serve", "mcp", "verify", "update", "export"),
    "Compare": ("ablate", "compare", "promote"),
    "Operate": ("submit", "upload", "index-builder", "sync", "doctor", "clean"),
}
# Commands that import PyTorch, read documents, or wait for MLflow or a cluster: they log a line at once
LONG = (
    *("init", "run", "adapt", "reader", "import", "questions", "explain", "ceilings", "search", "ask", "serve", "mcp"),
    *("verify", "update", "export", "ablate", "compare", "promote", "submit", "upload", "doctor"),
)


class ExplainedCommand(click.Command):
    """A command that prints the lines it returns, and reports an error that users can fix as one message."""

    def invoke(self, ctx: click.Context) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # by __main__.py, before the imports
            signal.signal(signal.SIGINT, handle_interrupt)
        if self.name in LONG:
            Console().log(f"{self.name}: starting")
        with exit_on_user_error():
            for line in super().invoke(ctx) or ():
                show(line)


class ExplainedCommands(click.Group):
    """A group of ``ExplainedCommand``, listed in its help under ``HEADINGS``."""

    command_class = ExplainedCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments after each is checked for credentials, which errors would print."""
        with exit_on_user_error():
            for argument in args:
                refuse_credentials(argument, f"the argument {argument}")
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for heading, names in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{n:<{width}}", self.commands[n].get_short_help_str(limit=80)) for n in names])


def exit_with(problems: Sequence[str]) -> None:
    for problem in problems:
        click.echo(f"realmops: {problem}", err=True)
    if problems:
        sys.exit(1)


@click.group(cls=ExplainedCommands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__)
def main() -> None:
    """Train REALM: a retriever and a reader learn together from masked words, then answer questions.

    Start with "realmops init" for your own documents, then "realmops run all": it runs the stages sample, snapshot,
    tag, ict, pretrain, finetune, evaluate and skips those that are done. Then "realmops ask" and "realmops serve"
    answer your questions. docs/options.md lists all options.
    """
    # Trainer and index builder share the cores: idle OpenMP threads must not spin while the other process computes.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # They share a GPU too: without this, batches of varying lengths fragment its memory until it is full, in minutes.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
