"""The command line: parse options, call the function that does the work, print its result. No logic here."""

from realmops.cli import answering_commands, operating_commands, result_commands, training_commands
from realmops.cli.group import HEADINGS, main

__all__ = ["HEADINGS", "answering_commands", "main", "operating_commands", "result_commands", "training_commands"]
