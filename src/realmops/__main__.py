"""The command line: the script ``realmops``, and ``python -m realmops`` for when that is not on PATH."""

import atexit
import gc
import signal


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # until a command starts: nothing to clean up
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(50_000)  # collections would take a third of the time of imports, and of the interpreter's end
    atexit.register(gc.freeze)
    from realmops.cli import main

    main()


if __name__ == "__main__":  # child processes of stages import this module too
    main()
