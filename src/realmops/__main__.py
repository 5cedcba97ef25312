"""Command line as ``python -m realmops``, for when the script is not on PATH."""

from realmops.cli import main

if __name__ == "__main__":  # child processes of stages import this module too
    main()
