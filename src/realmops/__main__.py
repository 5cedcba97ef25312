"""The command line: the script ``realmops``, and ``python -m realmops`` for when that is not on PATH."""

import signal


def main() -> None:
    """Import the commands and run one; until it starts, Ctrl-C ends the process, which has nothing to clean up."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from realmops.cli import main

    main()


if __name__ == "__main__":  # child processes of stages import this module too
    main()
