"""``python -m realmops``: the command line, also where the script is not on PATH."""

from realmops.cli import main

main()
