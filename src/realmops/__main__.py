"""The command line: the script ``realmops``, and ``python -m realmops`` for when that is not on PATH."""

import signal


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # until a command starts: nothing to clean up
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from realmops.cli import main

    main()


if __name__ == "__main__":  # child processes of stages import this module too
    main()
