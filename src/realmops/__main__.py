"""``python -m realmops``: the command line, also where the script is not on PATH."""

from realmops.cli import main

if __name__ == "__main__":  # the processes of stages import it too
    main()
