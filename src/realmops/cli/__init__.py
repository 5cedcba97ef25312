"""The command line: takes options, calls what does the work, prints what that returns. No logic of its own."""

from realmops.cli import answering_commands, operating_commands, result_commands, training_commands
from realmops.cli.group import HEADINGS, main

__all__ = ["HEADINGS", "answering_commands", "main", "operating_commands", "result_commands", "training_commands"]
