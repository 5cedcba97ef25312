"""Run every stage twice: undisturbed under CALM, and under KILLED in processes that are killed again and again.

    python tests/lives.py PROJECT CALM KILLED
    python tests/lives.py PROJECT KILLS         kills of trainer and builder in pre-training only

A life dies by SIGKILL just before its n-th durable operation (fsync, rename, replace), each life of a stage some
operations later than the one before; at last one comes to its end.  Prints, as JSON, the exit status of every
life of every stage.  Processes are forked from this one, which has loaded everything and done nothing, so that a
life costs no start-up.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from exchange_lab import end_of, forked
from small_project import Quiet, Values, model_files

from realmops.config import load
from realmops.refresh.builder_process import run_index_builder
from realmops.stages import STAGES, evaluate, finetune, ict, pretrain, sample, snapshot, tag
from realmops.stages.runner import run_stage

LOADED = (  # once, for all lives
    sample, snapshot, tag, ict, pretrain, finetune, evaluate, transformers.AutoModel, transformers.BertForMaskedLM
)  # fmt: skip
LATER = {"sample": 7, "snapshot": 13, "tag": 7, "ict": 1, "pretrain": 5, "finetune": 3, "evaluate": 20}


def die_at(number: int, *more: tuple[Any, str]) -> None:
    """Let this process be killed just before its ``number``-th durable operation, or call of what is named besides."""
    done = 0

    def dying(effect: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal done
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return effect(*arguments, **named)

        return counted

    for place, name in ((os, "fsync"), (os, "rename"), (os, "replace"), *more):
        setattr(place, name, dying(getattr(place, name)))


def live(name: str, values: Values, project: Path, root: Path, *, killed: bool) -> list[int]:
    """Lives of one stage until one ends by itself; their exit statuses."""
    statuses: list[int] = []

    def work() -> int:
        if killed:
            die_at(1 + len(statuses) * LATER[name])
        run_stage(name, values, project=project, root=root, report=Quiet())
        return 0

    while not statuses or statuses[-1] < 0:
        statuses.append(end_of(forked(work)))
    return statuses


def run_all(project: Path, root: Path, *, killed: bool) -> dict[str, list[int]]:
    """All stages in order, with one index builder that lives on through the trainer's lives."""
    values = load(project / "params.yaml")
    exchange = root / "exchange"
    values["pretrain"] |= {"builder": "external", "exchange": str(exchange)}
    corpus = root / STAGES["snapshot"].folder / "corpus"
    found = {}
    for name in STAGES:
        builder = 0
        if name == "pretrain":
            builder = forked(lambda: run_index_builder(exchange, corpus, watch_parent=None, works={}))
        found[name] = live(name, values, project, root, killed=killed)
        if builder:
            found["index-builder"] = [end_of(builder)]
    return found


def kill_both(project: Path, kills: int) -> dict[str, Any]:
    """Pre-training again and again, trainer and builder killed at random, until so many kills are done."""
    values, rng = load(project / "params.yaml"), random.Random(kills)
    stage = STAGES["pretrain"].folder
    done: dict[str, Any] = {"trainer": 0, "builder": 0, "wrong": []}

    def run(root: Path, killed: int) -> None:
        shutil.copytree(project / "root", root)
        exchange, corpus = root / "exchange", root / STAGES["snapshot"].folder / "corpus"
        own = {**values, "pretrain": {**values["pretrain"], "builder": "external", "exchange": str(exchange)}}

        def train() -> int:
            if killed and rng.random() < 0.5:
                die_at(rng.randrange(20, 400))
            run_stage("pretrain", own, project=project, root=root, report=Quiet())
            return 0

        works = {"trainer": train, "builder": lambda: run_index_builder(exchange, corpus, watch_parent=None, works={})}
        alive = {role: forked(work) for role, work in works.items()}
        while "trainer" in alive:
            time.sleep(0.01)
            if killed and rng.random() < 0.01:
                os.kill(alive[rng.choice(list(alive))], signal.SIGKILL)
            for role, pid in list(alive.items()):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    del alive[role]
                    code = os.waitstatus_to_exitcode(status)
                    if code == -signal.SIGKILL:
                        done[role] += 1
                        killed = max(0, killed - 1)
                        rng.random()  # another fate than in the life before
                        alive[role] = forked(works[role])
                    elif code:
                        done["wrong"].append(f"{root}: {role} ended with {code}")
        for pid in alive.values():
            end_of(pid)

    run(project / "calm", 0)
    number = 0
    while done["trainer"] + done["builder"] < kills and not done["wrong"]:
        root = project / f"killed-{number}"
        number += 1
        run(root, 8)
        if model_files(root / stage) != model_files(project / "calm" / stage):
            done["wrong"].append(f"{root}: other bytes")
        shutil.rmtree(root)
    return done


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        print(json.dumps(kill_both(Path(sys.argv[1]), int(sys.argv[2]))))
        sys.exit()
    place, calm, disturbed = map(Path, sys.argv[1:])
    print(json.dumps([run_all(place, calm, killed=False), run_all(place, disturbed, killed=True)]))
