"""Run stages in processes that are killed again and again, each life later than the one before.

    python tests/lives.py PROJECT ROOT DEATHS STAGE ...

A life dies by SIGKILL just before its n-th durable operation (fsync, rename, replace), n = 1, 1 + STEP, ...;
after DEATHS deaths one may go on to its end. Prints, as JSON, the exit status of every life of every stage.
Processes are forked from this one, which has loaded everything and done nothing: a life costs no start-up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from toy import Quiet

from realmops.config import load
from realmops.stages import STAGES, evaluate, finetune, ict, pretrain, sample, snapshot, tag  # noqa: F401 (loaded once)
from realmops.stages.builder import run_index_builder
from realmops.stages.runner import run_stage

STEP = {"pretrain": 9}


def die_at(number: int) -> None:
    """Let this process be killed just before its ``number``-th durable operation."""
    done = 0

    def dying(effect: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return effect(*arguments, **named)

        return counted

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, dying(getattr(os, name)))


def forked(work: Callable[[], None]) -> int:
    """The id of a new process that does ``work`` and ends."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def end_of(pid: int) -> int:
    """0, an exit code, or the negative number of a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def live(name: str, project: Path, root: Path, deaths: int) -> list[int]:
    """Lives of one stage until one ends by itself; their exit statuses."""
    values = load(project / "params.yaml")
    statuses: list[int] = []
    while not statuses or statuses[-1] < 0:
        number = len(statuses)

        def work(number: int = number) -> None:
            if number < deaths:
                die_at(1 + number * STEP.get(name, 1))
            run_stage(name, values, project=project, root=root, report=Quiet())

        statuses.append(end_of(forked(work)))
    return statuses


def run() -> None:
    project, root, deaths = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    found: dict[str, list[int]] = {}
    for name in sys.argv[4:]:
        if name != "pretrain":
            found[name] = live(name, project, root, deaths)
            continue
        exchange = Path(load(project / "params.yaml")["pretrain"]["exchange"])
        corpus = root / STAGES["snapshot"].folder / "corpus"
        builder = forked(lambda: sys.exit(run_index_builder(exchange, corpus, watch_parent=os.getppid())))  # noqa: B023
        found[name] = live(name, project, root, deaths)
        found["index-builder"] = [end_of(builder)]
    print(json.dumps(found))


if __name__ == "__main__":
    run()
