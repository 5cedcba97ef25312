"""Shards of tagging and embedding, made by a stage and its helpers in processes that are killed again and again.

    python tests/shard_kills.py FOLDER HELPERS KILLS SEED

The same work is done by a stage alone first. Then a stage with so many helpers does it run after run, until so many
processes were killed, stages and helpers at least an eighth each: by SIGKILL just before a durable operation or a
claim, or at any instant. Prints, as JSON, what was killed, how often a shard was made, and what came out wrong.
Processes are forked, so that a life costs no start-up.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from exchange_lab import forked
from lives import die_at
from small_world import DOCUMENTS, World, build_world, section, tiny_models

from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.checkpoint_files import build_encoder, retriever_files
from realmops.refresh import lease, shards
from realmops.refresh.builder_process import run_index_builder
from realmops.refresh.shards import MakeShard, ShardSettings, Work, in_shards
from realmops.search.embed import Progress
from realmops.stages.sharded_work import WORKS
from realmops.train.tagger import Tagger, tagger_files

ROWS = 3
LONGEST = 1200.0  # seconds of a run; it takes two
PEOPLE = tuple((f"{title} {n}", text, spans) for n in range(4) for title, text, spans in DOCUMENTS)


def some_tagger(world: World, seed: int = 0) -> Tagger:
    """A tagger that has learned nothing and tags every other word."""
    options = section("bert", width=16, layers=1, heads=2, intermediate=32)
    bert, _ = build_encoder(options, world.snapshot.tokenizer.get_vocab_size(), seed)
    tagger = Tagger(bert, ["O", "B-NAME", "I-NAME"])
    with torch.no_grad():
        tagger.output.weight.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(seed))
        tagger.output.bias.zero_()
    return tagger


def models(world: World) -> dict[str, dict[str, bytes]]:
    """By work, the files of a model."""
    retriever = retriever_files(tiny_models(world)[0], world.snapshot.vocabulary_hash)
    return {"embedding": retriever, "tagging": tagger_files(some_tagger(world), section("tag"))}


def counted(work: Work, log: Path) -> Work:
    """The same work, which writes down the first passage of every shard that is begun."""

    def begun(snapshot: Snapshot, model: Mapping[str, bytes], device: torch.device, dtype: torch.dtype) -> MakeShard:
        make = work(snapshot, model, device, dtype)

        def made(first: int, end: int, progress: Progress) -> dict[str, bytes]:
            with open(log, "a") as file:
                file.write(f"{first}\n")
            return make(first, end, progress)

        return made

    return begun


class Run:
    """One piece of work, by a stage and its helpers, from the first life to the last word."""

    def __init__(self, world: World, name: str, folder: Path) -> None:
        self.world, self.name, self.folder = world, name, folder
        self.model = models(world)[name]
        self.out, self.log = folder / "out", folder / "log"
        self.works = {name: counted(WORKS[name], self.log)}
        folder.mkdir()

    def stage(self) -> int:
        place = ShardSettings(
            self.folder / "shards", self.folder / "offer", torch.device("cpu"), torch.float32, 1, print
        )
        digest = hashlib.sha256()
        for files in in_shards(place, self.name, self.works[self.name], self.world.snapshot, self.model):
            for file, content in files.items():
                digest.update(file.encode() + content)
        draft = self.out.with_suffix(f".{os.getpid()}")
        draft.write_text(digest.hexdigest())
        draft.rename(self.out)
        return 0

    def help(self) -> int:
        while not self.out.is_file():
            if (self.folder / "offer").is_file():
                try:
                    named = json.loads((self.folder / "offer").read_bytes())
                except (FileNotFoundError, ValueError):
                    continue
                paths = Path(named["exchange"]), Path(named["snapshot"])
                if code := run_index_builder(*paths, watch_parent=None, works=self.works):
                    return code
            time.sleep(0.002)
        return 0

    def begun(self) -> list[int]:
        """The first passages of all shards that were begun, in order."""
        return sorted(map(int, self.log.read_text().split()))


def go(run: Run, helpers: int, kills: int, rng: random.Random, done: Counter[str]) -> list[str]:
    """Let a stage and its helpers end; what came out wrong."""
    roles = {"stage": run.stage, **{f"helper-{n}": run.help for n in range(helpers)}}

    def start(role: str) -> int:
        at = rng.randrange(1, 60) if kills and rng.random() < 0.8 else 0

        def life() -> int:
            if at:
                die_at(at, (os, "mkdir"))
            return roles[role]()

        return forked(life)

    alive, wrong, killed = {start(role): role for role in roles}, [], 0
    deadline = time.monotonic() + LONGEST
    while alive and time.monotonic() < deadline:
        time.sleep(0.003)
        if killed < kills and rng.random() < 0.02:
            os.kill(rng.choice(list(alive)), signal.SIGKILL)
        for pid in list(alive):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            role, code = alive.pop(pid), os.waitstatus_to_exitcode(status)
            if code == -signal.SIGKILL:
                killed += 1
                done[role.split("-")[0]] += 1
                kills = kills if killed < kills else 0
                alive[start(role)] = role
            elif code:
                wrong.append(f"{run.folder}: {role} ended with {code}")
    for pid, role in alive.items():
        wrong.append(f"{run.folder}: {role} does not end")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    begun, shard_count = run.begun(), -(-len(PEOPLE) // ROWS)
    done["shards"] += shard_count
    done["begun again"] += len(begun) - shard_count
    if len(begun) > shard_count + killed:  # whoever is killed loses the shard in hand and no other
        wrong.append(f"{run.folder}: {len(begun)} shards were begun, of {shard_count}, with {killed} kills")
    return wrong


def main(folder: Path, helpers: int, kills: int, seed: int) -> dict[str, Any]:
    shards.SHARD_ROWS, shards.LOOK_SECONDS = ROWS, 0.005
    lease.LOOK_SECONDS, lease.BEAT_SECONDS, lease.DEAD_SECONDS = 0.01, 0.2, 2.0
    torch.set_num_threads(1)
    world, rng, done = build_world(folder, PEOPLE), random.Random(seed), Counter[str]()
    expected = {}
    for name in WORKS:
        alone = Run(world, name, folder / f"{name}-alone")
        wrong = go(alone, 0, 0, rng, Counter())
        expected[name] = alone.out.read_text()
    number, roles = 0, ("stage", "helper")
    while not wrong and (number < 2 or sum(done[r] for r in roles) < kills or min(done[r] for r in roles) < kills / 8):
        name = list(WORKS)[number % len(WORKS)]
        run = Run(world, name, folder / f"{name}-{number}")
        wrong = go(run, helpers, 8 if kills else 0, rng, done)
        if not wrong and run.out.read_text() != expected[name]:
            wrong.append(f"{run.folder}: other bytes")
        if not wrong:
            shutil.rmtree(run.folder)
        number += 1
    return {"done": done, "runs": number, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
