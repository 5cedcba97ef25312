"""The campaign against faults: kills, failing disks, damaged files, crowds, old listings, long runs.

``make test`` runs it cut short, ``make faults`` at full length and ends with a table (tests/faults.py).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Told
from exchange_lab import (
    IDENTITY,
    ROOT,
    WORK,
    Fault,
    Killed,
    MemoryFiles,
    Plan,
    StaleFiles,
    StillClock,
    builder_on,
    life,
    sound,
    undisturbed,
)
from faults import ERRORS, FailingDisk, times

from realmops.artifacts import atomic_folder, read_manifest, write_manifest
from realmops.index.builder import Builder
from realmops.index.exchange import Exchange, inspect
from realmops.index.files import Files
from realmops.index.trainer import Policy, Trainer
from realmops.index.versions import Damaged, Versions, version_name

pytestmark = pytest.mark.faults
PLAN = Plan(steps=4)
PARAMS = {"params.bin": b"p" * 32}


# Kills


@pytest.mark.parametrize("seed", range(times(1, 2)))
def test_killed_stopped_doubled_and_with_wrong_clocks_the_run_ends_with_the_same_weights(
    tmp_path: Path, seed: int, told: Told
) -> None:
    script = Path(__file__).with_name("kills.py")
    command = [sys.executable, script, tmp_path, str(times(30, 1000)), str(seed)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    found = json.loads(process.stdout)
    assert found["wrong"] == [], process.stderr[-3000:]
    done: dict[str, int] = found["done"]
    kills = {word: done[f"{word} killed, at all"] for word in ("trainer", "builder")}
    assert min(kills.values()) > 5
    for word, number in kills.items():
        told(f"SIGKILL of a {word}, at every operation and at random instants", number, "the same weights")
    told("all processes killed at once", done.get("trainer killed all at an instant", 0) or 1, "the same weights")
    told("a second trainer beside the first", done.get("a second trainer", 0) or 1, "the same weights, one Fenced")
    told("a builder stopped and woken", done.get("a builder stopped and woken", 0) or 1, "the same weights")
    told("runs with one to three builders, clocks off by up to a day", done["runs"], "the same weights")


# A disk that fails


def run_on(root: Path) -> bytes:
    """The toy trainer and a builder that works while it waits, in this process, until the run is done."""
    builders: list[Builder] = []

    def build() -> None:
        try:
            if not builders:
                builders.append(builder_on(Files(), StillClock(), root=root))
            builders[0].build_next()
            builders[0].exchange.collect_indexes()
        except (OSError, Damaged):
            pass

    for _ in range(3):
        clock = StillClock(build)
        try:
            return life(Exchange.open(root, IDENTITY, files=Files(), clock=clock, grace=0.0), PLAN)
        except OSError:
            continue
    raise AssertionError("one error of the disk ended three lives")


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_the_disk_at_any_write_of_the_exchange(tmp_path: Path, kind: str, told: Told) -> None:
    expected, at, injected = undisturbed(PLAN), 0, 0
    while True:
        root = tmp_path / str(at)
        with FailingDisk(at, kind) as disk:
            assert run_on(root) == expected, at
        sound(Files(), root)
        shutil.rmtree(root)
        if not disk.failed:
            break
        at, injected = at + times(23, 1), injected + 1
    assert at > 200
    told(f"{kind} at every write of the exchange", injected, "the same weights")


def test_writes_that_are_done_in_part_change_nothing(tmp_path: Path, told: Told) -> None:
    with FailingDisk(0, "short") as disk:
        assert run_on(tmp_path / "e") == undisturbed(PLAN)
    told("short writes in the exchange", disk.count, "the same weights")


def states(folder: Path) -> Iterator[tuple[int, dict[str, bytes]]]:
    for step in range(4):
        yield step, {"tensors": bytes([step]) * 5000, "state.json": b"%d" % step}


@pytest.mark.parametrize("kind", [*ERRORS, "short"])
def test_an_error_of_the_disk_at_any_write_of_a_checkpoint(tmp_path: Path, kind: str, told: Told) -> None:
    from realmops.stages.common import FolderCheckpoints

    at = 0
    while True:
        checkpoints, saved = FolderCheckpoints(tmp_path / str(at)), None
        with FailingDisk(at, kind, lasting=kind != "EIO") as disk:
            for step, files in states(tmp_path):
                try:
                    checkpoints.save(step, files)
                    saved = files
                except OSError:
                    assert disk.failed
                    found = checkpoints.restore()
                    assert found in (saved, files), at
                    saved = found
        assert checkpoints.restore() == saved
        checkpoints.save(9, {"tensors": b"new"})
        assert checkpoints.restore() == {"tensors": b"new"}
        if not disk.failed or kind == "short":
            break
        at += 1
    told(f"{kind} at every write of a checkpoint", max(at, 1), "the one before, or the new one whole")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that the failed writer left open
@pytest.mark.parametrize("kind", [*ERRORS, "short"])
def test_an_error_of_the_disk_at_any_write_of_a_snapshot(tmp_path: Path, kind: str, told: Told) -> None:
    from tiny import write_documents

    from realmops.corpus.formats import sources
    from realmops.corpus.snapshot_writer import write_snapshot
    from realmops.corpus.vocabulary import train_vocabulary

    corpus = sources(write_documents(tmp_path / "documents.jsonl"), "auto")
    pieces = train_vocabulary(corpus, size=150, min_count=1)

    def write(folder: Path) -> dict[str, bytes]:
        with atomic_folder(folder / "s") as stage:
            write_snapshot(corpus, stage, work=folder / "work", vocabulary=pieces, block_wordpieces=48)
        read_manifest(folder / "s", "snapshot")
        return {str(p.relative_to(folder / "s")): p.read_bytes() for p in (folder / "s").rglob("*") if p.is_file()}

    (tmp_path / "calm").mkdir()
    expected, at, injected = write(tmp_path / "calm"), 0, 0
    while True:
        folder = tmp_path / str(at)
        folder.mkdir()
        with FailingDisk(at, kind, lasting=kind != "EIO") as disk:
            try:
                found = write(folder)
            except OSError:
                assert disk.failed
                assert {path.name for path in folder.iterdir()} <= {"work"}, "half a snapshot was left"
                found = None
        assert (found or write(folder)) == expected, at
        shutil.rmtree(folder)
        if not disk.failed or kind == "short":
            break
        at, injected = at + times(7, 1), injected + 1
    told(f"{kind} at every write of a snapshot", max(injected, 1), "none, then the same bytes")


# Crowds, clocks, listings


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed_lag", "as_soon_as_ready"])
def test_a_listing_that_is_old_for_everybody_delays_and_changes_nothing(fixed: bool, told: Told) -> None:
    """Both sides see a listing for a minute, on clocks that are a day apart; either is killed at any operation."""
    policy = Policy("fixed_lag" if fixed else "as_soon_as_ready", max_staleness_steps=3, builder_timeout=1e6, poll=5.0)
    plan, at, old, injected = Plan(steps=4, policy=policy), -1, 0, 0
    while True:
        volume, fault = MemoryFiles(), Fault(at)
        seen: list[StaleFiles] = []
        there = StillClock()
        there.unix = lambda there=there: there.now - 86400.0  # type: ignore[method-assign]
        builders: list[Builder] = []

        def build() -> None:
            there.now = here.now  # noqa: B023
            try:
                if not builders:  # noqa: B023
                    seen.append(StaleFiles(None, volume.top, there, 60.0))  # noqa: B023
                    exchange = Exchange.open(ROOT, IDENTITY, "builder-0", files=seen[-1], clock=there, grace=120.0)  # noqa: B023
                    builders.append(Builder(exchange, WORK, on_status=lambda message: None))  # noqa: B023
                builders[0].build_next()  # noqa: B023
                builders[0].exchange.collect_indexes()  # noqa: B023
            except (OSError, Damaged):
                pass

        here = StillClock(build)
        for around in (fault, None):
            seen.append(StaleFiles(around, volume.top, here, 60.0))
            try:
                exchange = Exchange.open(ROOT, IDENTITY, files=seen[-1], clock=here, grace=120.0)
                params = life(exchange, plan, each_step=lambda step: here.sleep(7.0))
                break
            except Killed:
                here.now += 1.0
        assert not fixed or params == undisturbed(plan), at
        sound(volume)
        old, injected = old + sum(files.old for files in seen), injected + (at >= 0)
        if 0 <= fault.count <= at:
            break
        at += times(29, 1)
    assert old > 20
    told(f"an old listing, {policy.adopt}, with a kill at every operation", injected, "the same weights" if fixed else "ends, sound")


def test_a_builder_stopped_for_minutes_at_any_operation_wakes_up_and_harms_nothing(told: Told) -> None:
    """In the meantime another builder has built everything, time has passed and its draft was swept."""
    at = 0
    while True:
        files, fault = MemoryFiles(), Fault(-1)
        clock = StillClock()
        trainer = Trainer(Exchange.open(ROOT, IDENTITY, files=files, clock=clock, grace=0.0))
        trainer.publish_weights(0, PARAMS, {})
        other = Exchange.open(ROOT, IDENTITY, "builder-1", files=files, clock=clock, grace=0.0)

        def others_first(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
            if fault.count == at:  # noqa: B023
                for _ in range(3):
                    Builder(other, WORK, on_status=lambda message: None).build_next()  # noqa: B023
                    other.collect_indexes()  # noqa: B023
                    clock.now += 700.0  # noqa: B023
            fault.count += 1  # noqa: B023
            return effect()

        stopped = builder_on(files.seen_by(others_first), clock)
        try:
            stopped.build_next()
            stopped.exchange.collect_indexes()
        except (OSError, Damaged):
            pass  # its loop begins again
        index = trainer.index_for(0)
        assert index.files["params.bin"] == PARAMS["params.bin"]
        sound(files)
        if fault.count <= at:
            break
        at += times(3, 1)
    assert at > 40
    told("a builder stopped for half an hour at every operation", at, "one whole index")


# Damaged files


def damaged(content: bytes, flips: int, rng: random.Random) -> Iterator[bytes]:
    """Every prefix (in short runs some), and as many flips of a random bit."""
    for length in range(0, len(content), times(max(1, len(content) // 40), 1)):
        yield content[:length]
    for _ in range(flips):
        place = rng.randrange(len(content))
        yield content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
