"""Imports of pytest's fork server (``forked``): the modules of all stages.

What is forked from there forks its own stages and index builders from there, too.
"""

from multiprocessing import forkserver

from forked import FORKS

from realmops.commands import preload
from realmops.refresh import child_processes

__all__ = ["preload"]

for server in (forkserver, forkserver._forkserver, child_processes):  # type: ignore[attr-defined]
    server.ensure_running = lambda: None  # it runs
child_processes.subprocess = FORKS
