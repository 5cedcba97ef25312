"""What pytest's fork server imports (``forked``): the modules of all stages.

What is forked from there forks its own stages and index builders from there, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forked import Forked, run_program

from realmops.commands import preload
from realmops.refresh import child_processes

__all__ = ["preload"]


def start(command: list[str], *, stdin: int, stdout: Any, stderr: Any, env: Mapping[str, str] | None) -> Forked:
    """An index builder, which ends with this process."""
    python, words = command[:4], command[4:]
    assert python == [sys.executable, "-P", "-m", "realmops"], command
    if "--watch-parent" in words:  # this process is not its parent
        at = words.index("--watch-parent")
        del words[at : at + 2]
    log = Path(stdout.name if stdout else f"/proc/{os.getpid()}/fd/1")
    return Forked(partial(run_program, "realmops", words), log=log, env=env)


for server in (forkserver, forkserver._forkserver, child_processes):  # type: ignore[attr-defined]
    server.ensure_running = lambda: None  # it runs
child_processes.subprocess = SimpleNamespace(  # type: ignore[assignment]
    Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
)
