"""Run every stage twice: undisturbed, and in processes that are killed again and again.

A life dies by SIGKILL just before its n-th durable operation (fsync, rename, replace), each life of a stage some
operations later than the one before; at last one comes to its end.  Prints, as JSON, the exit status of every
life of every stage.  Processes are forked from this one, which has loaded everything and done nothing, so that a
life costs no start-up.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from exchange_lab import end_of, forked
from small_project import Quiet

from realmops.config import load_params
from realmops.options import Options
from realmops.refresh.builder_process import run_index_builder
from realmops.stages import STAGES, evaluate, finetune, ict, pretrain, sample, snapshot, tag
from realmops.stages.runner import run_stage

LOADED = (  # once, for all lives
    sample, snapshot, tag, ict, pretrain, finetune, evaluate, transformers.AutoModel, transformers.BertForMaskedLM
)  # fmt: skip
LATER = {"sample": 7, "snapshot": 13, "tag": 7, "ict": 2, "pretrain": 6, "finetune": 5, "evaluate": 20}


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


def live(name: str, options: Options, project: Path, root: Path, *, killed: bool) -> list[int]:
    """Lives of one stage until one ends by itself; their exit statuses."""
    statuses: list[int] = []

    def work() -> int:
        if killed:
            die_at(1 + len(statuses) * LATER[name])
        run_stage(name, options, project=project, root=root, report=Quiet())
        return 0

    while not statuses or statuses[-1] < 0:
        statuses.append(end_of(forked(work)))
    return statuses


def run_all(project: Path, root: Path, *, killed: bool) -> dict[str, list[int]]:
    """All stages in order, with one index builder that lives on through the trainer's lives."""
    exchange = root / "exchange"
    options = load_params(project / "params.yaml").replace(
        {"pretrain.builder": "external", "pretrain.exchange": str(exchange)}
    )
    corpus = root / STAGES["snapshot"].folder / "corpus"
    found = {}
    for name in STAGES:
        builder = 0
        if name == "pretrain":
            builder = forked(lambda: run_index_builder(exchange, corpus, watch_parent=None, works={}))
        found[name] = live(name, options, project, root, killed=killed)
        if builder:
            found["index-builder"] = [end_of(builder)]
    return found


def main(project: Path, calm: Path, disturbed: Path) -> None:
    torch.set_num_threads(1)
    print(json.dumps([run_all(project, calm, killed=False), run_all(project, disturbed, killed=True)]), flush=True)
