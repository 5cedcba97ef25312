"""Trainer and builders over one exchange: the invariants I1 to I8 under kills, errors, schedules and damage.

The toy run of exchange_lab.py checks I1 and I2 at every adoption and its last parameters show any wrong
byte (I3).
"""

import errno
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exchange_lab import (
    FAULTS,
    IDENTITY,
    PARAMS,
    ROOT,
    WORK,
    Fault,
    Killed,
    MemoryFiles,
    Plan,
    StillClock,
    builder_on,
    check_index,
    life,
    open_trainer,
    sound,
    undisturbed,
)  # fmt: skip
from faults import times

from realmops import artifacts
from realmops.refresh import versions
from realmops.refresh.builder import DONE, MISCONFIGURED, Builder, run_builder
from realmops.refresh.exchange import Exchange, FencedError
from realmops.refresh.trainer import RefreshPolicy, TrainerSide
from realmops.refresh.versions import CorruptVersionError, version_name

PLAN = Plan()
LONGEST = 500.0  # seconds of a town's time; it takes 10
AS_SOON = RefreshPolicy("as_soon_as_ready", max_staleness_steps=3, builder_timeout=1e6)


class Pair:
    """A trainer whose waits let a builder work; either starts again when it dies."""

    def __init__(self, plan: Plan = PLAN, trainer: Any = None, builder: Any = None, holders: int = 1) -> None:
        self.plan, self.files = plan, MemoryFiles()
        self.trainer_fault, self.builder_fault = trainer, builder
        self.clock = StillClock(self.build)
        self.builders: list[Builder | None] = [None] * holders
        self.messages: list[str] = []
        self.lives = 0

    def exchange(self, around: Any = None) -> Exchange:
        return Exchange.open(ROOT, IDENTITY, files=self.files.seen_by(around), clock=self.clock, grace=0.0)

    def build(self) -> None:
        for number, builder in enumerate(self.builders):
            around = None if self.builder_fault is None or self.builder_fault.dead else self.builder_fault
            try:
                if builder is None:
                    files = self.files.seen_by(around)
                    builder = self.builders[number] = builder_on(files, StillClock(), str(number))
                builder.build_next()
                builder.exchange.collect_garbage()
            except Killed:
                self.builders[number] = None
            except (OSError, CorruptVersionError):
                pass

    def run(self) -> bytes:
        while True:
            self.lives += 1
            try:
                around = self.trainer_fault if self.lives == 1 else None
                return life(self.exchange(around), self.plan, lambda message, seconds: self.messages.append(message))
            except (Killed, OSError):
                if self.lives > 5:
                    raise


def test_i3_the_undisturbed_run_ends_as_its_definition_says_and_leaves_only_what_is_kept() -> None:
    pair = Pair()
    assert pair.run() == undisturbed(PLAN)
    sound(pair.files)
    kept = {
        kind: pair.files.listdir(ROOT / kind) for kind in ("checkpoints", "weights", "parts", "indexes", "finished")
    }
    step = {number: version_name(1, number) for number in range(7)}
    assert kept == {
        "checkpoints": [step[4], step[6]],
        "weights": [step[4]],  # of the step of a kept checkpoint
        "parts": [],
        "indexes": [step[0], step[2], step[4]],  # not collected since the last checkpoint
        "finished": ["v-000001"],
    }
    assert pair.exchange().finished() == "done"
    TrainerSide(pair.exchange())
    assert pair.exchange().finished() is None  # the next trainer has not spoken


@pytest.mark.faults
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("role", ["trainer", "builder"])
def test_i1_i3_one_fault_at_any_operation_of_either_side(role: str, kind: str) -> None:
    plan = Plan(steps=4)
    expected, at, step = undisturbed(plan), 0, 1 if kind == "kill" else times(5, 1)
    while True:
        fault = Fault(at, kind)
        pair = Pair(plan, fault if role == "trainer" else None, fault if role == "builder" else None)
        assert pair.run() == expected, (role, kind, at)
        sound(pair.files)
        if fault.count <= at:
            break
        at += step
    assert at > 200


# Random schedules


class Town:
    """Trainers and builders in threads of which one runs at a time; a seed decides who, and who dies.

    At every operation on the volume somebody else may go on. While it storms an operation may kill its
    process, fail, or work and report an error, and a process may be put to sleep while a successor is
    started (a zombie).
    """

    def __init__(self, seed: int, plan: Plan, operations: int, volume: MemoryFiles) -> None:
        self.rng, self.plan, self.storm, self.volume = random.Random(seed), plan, operations, volume
        self.expected = undisturbed(plan) if plan.policy.adopt == "fixed_lag" else None
        self.now, self.operations, self.finished = 0.0, 0, False
        self.turns: dict[str, threading.Semaphore] = {}
        self.asleep: dict[str, int] = {}  # actor -> the operation at which it wakes
        self.over = threading.Semaphore(0)
        self.wrong: list[str] = []
        self.most_indexes = self.kills = self.zombies = 0

    def run(self) -> list[str]:
        for actor in ("trainer", "builder-0", "builder-1"):
            self.spawn(actor)
        self.pass_on()
        assert self.over.acquire(timeout=60), "the town stands still"
        return self.wrong

    def spawn(self, actor: str, number: int = 0) -> None:
        key = f"{actor}#{number}#{self.operations}"
        self.turns[key] = threading.Semaphore(0)
        threading.Thread(target=self.live, args=(actor, key), daemon=True).start()

    def live(self, actor: str, key: str) -> None:
        self.turns[key].acquire()
        try:
            while not self.finished:
                if self.one_life(actor, key):
                    break
        except BaseException as error:
            self.wrong.append(f"{key} ends with {error!r}")
            self.finished, self.storm = True, 0
        del self.turns[key]
        self.asleep.pop(key, None)
        self.pass_on() if self.turns else self.over.release()

    def one_life(self, actor: str, key: str) -> bool:
        dead = False

        def around(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
            nonlocal dead
            if dead:
                raise Killed
            self.operations += 1
            if self.operations % 20 == 0:
                self.most_indexes = max(self.most_indexes, len(self.volume._folder(ROOT / "indexes")) if built() else 0)
            if self.rng.random() < 0.15:
                self.yield_turn(key)
            chance = self.rng.random() if self.operations < self.storm else 1.0
            if chance < 0.008:
                dead = True
                self.kills += 1
                if chance < 0.003:
                    effect()
                raise Killed
            if chance < 0.013:
                raise OSError(errno.EIO, "input/output error", str(path))
            if chance < 0.018:
                effect()
                raise OSError(errno.EIO, "a reply was lost", str(path))
            if chance < 0.020 and len(self.turns) < 6:
                self.zombies += 1
                self.asleep[key] = self.operations + self.rng.randint(20, 600)
                self.spawn(actor, 1)
                self.yield_turn(key)
            return effect()

        def built() -> bool:
            return "exchange" in self.volume.top.names.get("volume", self.volume.top).names  # type: ignore[union-attr]

        clock = StillClock(lambda: self.yield_turn(key))
        clock.monotonic = lambda: self.now  # type: ignore[method-assign]
        files = self.volume.seen_by(around)
        try:
            if actor == "trainer":
                exchange = Exchange.open(ROOT, IDENTITY, files=files, clock=clock, grace=0.0)
                result = life(exchange, self.plan)
                if self.expected is not None and result != self.expected:
                    self.wrong.append(f"{key}: I3: other parameters")
                self.finished = True
                return True
            exchange = Exchange.open(ROOT, IDENTITY, actor, files=files, clock=clock, grace=0.0)
            Builder(exchange, WORK, on_status=lambda message: None).run()
        except FencedError:
            return True
        except FileNotFoundError:
            self.yield_turn(key)
        except (Killed, OSError):
            pass
        except BaseException as error:
            if type(error).__name__ != "_Stop":
                raise
            return True
        return False

    def yield_turn(self, key: str) -> None:
        self.now += 0.05
        if self.now > LONGEST:
            raise RuntimeError("the town stands still")
        self.pass_on()
        self.turns[key].acquire()

    def pass_on(self) -> None:
        awake = [key for key in sorted(self.turns) if self.asleep.get(key, 0) <= self.operations]
        if not awake:
            awake = sorted(self.turns)
            self.asleep.clear()
        self.turns[self.rng.choice(awake)].release()


def town_of(seed: int, policy: RefreshPolicy, monkeypatch: pytest.MonkeyPatch) -> Town:
    """A town whose seed decides everything, the nonces too: a failing seed can be run again."""
    nonces = random.Random(-seed - 1)
    monkeypatch.setattr(versions, "secrets", SimpleNamespace(token_hex=lambda size: nonces.randbytes(size).hex()))
    return Town(seed, Plan(steps=6, policy=policy), 1500, MemoryFiles())


@pytest.mark.faults
@pytest.mark.parametrize("policy", [PLAN.policy, AS_SOON], ids=["fixed_lag", "as_soon_as_ready"])
def test_i1_to_i4_i7_random_schedules(policy: RefreshPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = {"operations": 0, "kills": 0, "zombies": 0}
    for seed in range(times(100, 1000)):
        town = town_of(seed, policy, monkeypatch)
        assert town.run() == [], f"seed {seed}"
        sound(town.volume)
        # I4: 2 kept, 2 that checkpoints name, 1 awaited, and what at most four builders have in hand.
        assert town.most_indexes <= 9, f"seed {seed}: I4"
        for word in totals:
            totals[word] += getattr(town, word)
    assert totals["operations"] > 150_000
    assert totals["kills"] > 800
    assert totals["zombies"] > 150


def test_the_schedules_notice_a_trainer_that_does_not_look_at_its_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainerSide, "check_fence", lambda trainer: None)
    assert any(town_of(seed, PLAN.policy, monkeypatch).run() for seed in range(40))


# The trainer's side in single steps


def build(files: MemoryFiles, name: str = "0") -> bool:
    builder = builder_on(files, StillClock(), name)
    built = builder.build_next()
    builder.exchange.collect_garbage()
    return built


def test_i8_an_exchange_of_another_run_is_refused_with_the_field_and_both_values() -> None:
    files = MemoryFiles()
    open_trainer(files)
    for holder in ("trainer", "builder-0"):
        with pytest.raises(ValueError, match=r"vocabulary is 'beef', expected 'dead'"):
            Exchange.open(ROOT, {**IDENTITY, "vocabulary": "dead"}, holder, files=files)
        with pytest.raises(ValueError, match="dtype is None, expected 'bf16'"):
            Exchange.open(ROOT, {**IDENTITY, "dtype": "bf16"}, holder, files=files)
    with pytest.raises(FileNotFoundError, match="no exchange yet: its trainer has not started"):
        Exchange.open(Path("/elsewhere"), IDENTITY, "builder-0", files=files)


def test_i8_an_index_of_another_run_that_was_copied_in_is_never_adopted() -> None:
    files, foreign = MemoryFiles(), MemoryFiles()
    for volume, corpus in ((files, "c0ffee"), (foreign, "dead")):
        exchange = Exchange.open(ROOT, {**IDENTITY, "corpus": corpus}, files=volume, clock=StillClock(), grace=0.0)
        trainer = TrainerSide(exchange, RefreshPolicy(builder_timeout=1.0))
        trainer.publish_weights(0, PARAMS, {})
        if corpus == "c0ffee":
            ours = trainer
        else:
            exchange = Exchange.open(ROOT, exchange.run or {}, "builder-0", files=volume, clock=StillClock())
            Builder(exchange, WORK, on_status=lambda message: None).build_next()
    name = version_name(1, 0)
    files._folder(ROOT / "indexes")[name] = foreign._folder(ROOT / "indexes")[name]
    with pytest.raises(TimeoutError):
        ours.index_for(0)
    assert ours.exchange.indexes.quarantined() != []


def test_i5_a_wait_says_what_for_how_long_and_when_the_builder_was_last_alive() -> None:
    files, told = MemoryFiles(), []
    trainer = open_trainer(
        files,
        RefreshPolicy(builder_timeout=4.0, poll=0.25),
        on_wait=lambda message, seconds: told.append((seconds, message)),
    )
    trainer.publish_weights(0, PARAMS, {})
    with pytest.raises(TimeoutError, match="waiting for the index of step 0 for 4 s; no builder has ever been seen"):
        trainer.index_for(0)
    assert [seconds for seconds, _ in told] == [0.0, 1.0, 2.0, 3.0]
    builder_on(files, StillClock()).exchange.beat("embedding part 1 of 2")
    with pytest.raises(TimeoutError, match=r"builder-0 \(embedding part 1 of 2\), last heartbeat 4 s ago"):
        trainer.index_for(0)


def test_an_index_whose_weights_were_never_published_is_an_error_at_once() -> None:
    trainer = open_trainer(MemoryFiles())
    with pytest.raises(ValueError, match=r"no index of step 5 is possible: its weights were not published"):
        trainer.index_for(5)
    with pytest.raises(ValueError, match="publish the weights of this step first"):
        trainer.newest_index(5)


def test_restore_falls_back_over_damaged_checkpoints_loudly_and_never_to_step_0(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair()
    pair.run()
    checkpoints = ROOT / "checkpoints"
    pair.files._at(checkpoints / version_name(1, 6) / "params.bin").data = b"rotten" * 5
    trainer = TrainerSide(pair.exchange(), PLAN.policy)
    checkpoint = trainer.restore()
    assert (checkpoint.step, checkpoint.meta["trainer"]) == (4, {"loss": 0.5})
    assert "v-000001-00000006 is quarantined" in caplog.text
    assert life(pair.exchange(), PLAN) == undisturbed(PLAN)
    for name in [name for name in pair.files.listdir(checkpoints) if name.startswith("v-")]:
        del pair.files._folder(checkpoints / name)["params.bin"]
    for _ in range(2):  # the second time they have been set aside already
        with pytest.raises(RuntimeError, match="holds checkpoints and none can be used"):
            TrainerSide(pair.exchange(), PLAN.policy).restore()


def test_a_checkpoint_that_a_collector_takes_and_brings_back_is_used() -> None:
    pair, name = Pair(), version_name(1, 6)
    pair.run()
    checkpoints, reads = ROOT / "checkpoints", []

    def meddled(operation: str, path: Path, effect: Callable[[], Any]) -> Any:
        if operation == "read" and path.parent == checkpoints / name:
            reads.append(path.name)
            if len(reads) == 2:
                pair.files.rename(checkpoints / name, checkpoints / f".trash.{name}")
        elif operation == "unlink" and len(reads) == 2:
            pair.files.rename(checkpoints / f".trash.{name}", checkpoints / name)
        return effect()

    checkpoint = open_trainer(pair.files.seen_by(meddled)).restore()
    assert (checkpoint.name, reads[:2]) == (name, ["manifest.json", "params.bin"])


def test_i6_a_damaged_index_is_set_aside_and_built_again() -> None:
    files = MemoryFiles()
    trainer = open_trainer(files, clock=StillClock(lambda: build(files) and None))
    trainer.publish_weights(0, PARAMS, {})
    build(files)
    node = files._at(ROOT / "indexes" / version_name(1, 0) / "rows.bin")
    node.data = bytes([node.data[0] ^ 1]) + node.data[1:]
    check_index(trainer.index_for(0))
    assert len(trainer.exchange.indexes.quarantined()) == 1


def test_weights_that_were_damaged_before_they_were_built_end_the_wait() -> None:
    pair = Pair()
    trainer = TrainerSide(pair.exchange(), PLAN.policy)
    trainer.publish_weights(0, PARAMS, {})
    pair.files._at(ROOT / "weights" / version_name(1, 0) / "params.bin").data = b""
    with pytest.raises(RuntimeError, match="run the stage again: training resumes from the previous checkpoint"):
        trainer.index_for(0)


def fenced(old: TrainerSide, files: MemoryFiles, match: str) -> None:
    """Whatever ``old`` would write or take is refused, and nothing is written."""
    before = {kind: files.listdir(ROOT / kind) for kind in ("checkpoints", "weights", "finished")}
    for act in (
        lambda: old.save_checkpoint(2, PARAMS, {}),
        lambda: old.publish_weights(2, PARAMS, {}),
        lambda: old.finish("done"),
        lambda: old.index_for(0),
    ):
        with pytest.raises(FencedError, match=match):
            act()
    assert {kind: files.listdir(ROOT / kind) for kind in before} == before


def test_a_trainer_that_wakes_up_beside_its_successor_writes_nothing_more() -> None:
    files = MemoryFiles()
    old = open_trainer(files)
    old.publish_weights(0, PARAMS, {})
    new = open_trainer(files)
    fenced(old, files, "trainer 2 has taken over")
    new.save_checkpoint(2, PARAMS, {})


def test_the_index_that_a_checkpoint_names_outlives_newer_ones_and_its_pin() -> None:
    files = MemoryFiles()
    trainer = open_trainer(files, AS_SOON)
    trainer.publish_weights(0, PARAMS, {})
    build(files)
    trainer.newest_index(0)
    trainer.save_checkpoint(1, PARAMS, {})
    for step in (2, 4, 6):
        trainer.publish_weights(step, PARAMS, {})
        build(files)
    again = open_trainer(files)  # fixed_lag: needs that very index
    assert files.listdir(ROOT / "pins" / "trainer") == []
    build(files)
    checkpoint = again.restore()
    assert checkpoint.step == 1
    check_index(again.index_for(0))


def test_weights_published_after_the_checkpoint_of_their_step_belong_to_it() -> None:
    files = MemoryFiles()
    first = open_trainer(files)
    first.save_checkpoint(2, PARAMS, {})
    first.publish_weights(2, PARAMS, {})
    for _ in range(2):  # before and after the index is there, adopted and its weights are collected
        second = open_trainer(files)
        assert second.restore() is not None
        second.publish_weights(2, PARAMS, {})
        assert files.listdir(ROOT / "weights") == [version_name(1, 2)]
        build(files)
        assert second.index_for(2).name == version_name(1, 2)


def test_what_a_lost_life_published_is_retired_and_its_indexes_are_not_adopted() -> None:
    files = MemoryFiles()
    first = open_trainer(files, AS_SOON)
    first.save_checkpoint(0, PARAMS, {})
    first.publish_weights(0, PARAMS, {})
    build(files)
    assert first.newest_index(0) is not None
    first.publish_weights(2, {"params.bin": b"lost" * 8}, {})
    build(files)
    second = open_trainer(files, AS_SOON)
    checkpoint = second.restore()
    assert checkpoint.step == 0
    assert version_name(1, 2) in files.listdir(ROOT / "indexes")
    assert files.listdir(ROOT / "weights") == [version_name(1, 0)]
    found = second.newest_index(0)
    assert found.name == version_name(1, 0)
    assert second.newest_index(3) is None


def test_i2_as_soon_as_ready_takes_the_newest_once_and_waits_when_it_is_too_stale() -> None:
    files, told = MemoryFiles(), []
    clock = StillClock(lambda: build(files) and None)
    policy = RefreshPolicy("as_soon_as_ready", max_staleness_steps=3)
    trainer = open_trainer(files, policy, clock, on_wait=lambda message, seconds: told.append(message))
    trainer.publish_weights(0, PARAMS, {})
    index = trainer.newest_index(0)
    assert index.step == 0
    assert "waiting for a first index" in told.pop()
    trainer.publish_weights(2, PARAMS, {})
    assert trainer.newest_index(3) is None
    index = trainer.newest_index(4)
    assert index.step == 2
    assert "waiting for a newer index at step 4" in told.pop()
    assert trainer.newest_index(4) is None
    assert told == []


@pytest.mark.parametrize(("on_stale", "warned"), [("warn", True), ("continue", False)])
def test_a_stale_index_can_be_warned_of_or_used_in_silence(
    on_stale: Any, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files = MemoryFiles()
    trainer = open_trainer(files, RefreshPolicy("as_soon_as_ready", max_staleness_steps=3, on_stale=on_stale))
    trainer.publish_weights(0, PARAMS, {})
    build(files)
    trainer.newest_index(0)
    trainer.publish_weights(2, PARAMS, {})
    assert trainer.newest_index(4) is None
    assert ("the index is 4 steps old" in caplog.text) == warned


def test_i4_storage_stays_bounded_when_the_builder_is_away_and_when_it_is_fast() -> None:
    files = MemoryFiles()
    trainer = open_trainer(files, RefreshPolicy("as_soon_as_ready"))
    for step in range(0, 40, 2):
        trainer.publish_weights(step, PARAMS, {})
    assert files.listdir(ROOT / "weights") == [version_name(1, 36), version_name(1, 38)]
    for step in range(40, 80, 2):
        trainer.publish_weights(step, PARAMS, {})
        build(files)
        trainer.newest_index(step)
        trainer.save_checkpoint(step, PARAMS, {})
        counts = {
            kind: len(files.listdir(ROOT / kind))
            for kind in ("checkpoints", "weights", "indexes", "parts", "pins/trainer")
        }
        assert counts["checkpoints"] <= 2
        assert counts["weights"] <= 3
        assert counts["indexes"] <= 4
        assert counts["parts"] == 0
        assert counts["pins/trainer"] == 1


def test_the_index_in_use_stays_pinned_until_a_checkpoint_names_the_next_one() -> None:
    files = MemoryFiles()
    trainer = open_trainer(files, RefreshPolicy("as_soon_as_ready"))
    pins = lambda: sorted(pin.split(".")[1] for pin in files.listdir(ROOT / "pins" / "trainer"))  # noqa: E731
    for step in (0, 2):
        trainer.publish_weights(step, PARAMS, {})
        build(files)
        trainer.newest_index(step)
    assert pins() == [version_name(1, 0), version_name(1, 2)]
    trainer.save_checkpoint(3, PARAMS, {})
    assert pins() == [version_name(1, 2)]


# The exchange is taken away or belongs to somebody else


def test_a_trainer_whose_exchange_was_removed_ends_and_writes_nothing_into_the_next() -> None:
    files = MemoryFiles()
    for _ in range(2):
        old = open_trainer(files)
    old.publish_weights(0, PARAMS, {})
    removed = files._folder(ROOT.parent).pop(ROOT.name)
    fenced(old, files, "was removed or emptied while this trainer used it")
    new = open_trainer(files)
    new.publish_weights(0, PARAMS, {})
    fenced(old, files, "was removed or emptied")
    files._folder(ROOT.parent)[ROOT.name] = removed
    old.save_checkpoint(2, PARAMS, {})


def test_a_builder_whose_exchange_became_another_runs_ends_and_sets_nothing_aside() -> None:
    files, said = MemoryFiles(), list[str]()
    open_trainer(files)
    other = {**IDENTITY, "corpus": "dead"}

    def replaced(message: str) -> None:
        said.append(message)
        if message == "waiting for weights":
            del files._folder(ROOT.parent)[ROOT.name]
            trainer = TrainerSide(Exchange.open(ROOT, other, files=files, clock=StillClock(), grace=0.0))
            trainer.publish_weights(0, PARAMS, {})

    code = run_builder(ROOT, IDENTITY, WORK, files=files, clock=StillClock(), grace=0.0, on_status=replaced)
    assert (code, said) == (MISCONFIGURED, ["waiting for weights"])
    assert files.listdir(ROOT / "weights") == [version_name(1, 0)]


def test_a_builder_whose_exchange_was_removed_waits_and_says_so() -> None:
    files, said = MemoryFiles(), list[str]()
    trainer = open_trainer(files)
    removed: list[Any] = []

    def taken(message: str) -> None:
        said.append(message)
        if message == "waiting for weights" and not removed:
            removed.append(files._folder(ROOT.parent).pop(ROOT.name))
        elif "is no exchange yet" in message:
            files._folder(ROOT.parent)[ROOT.name] = removed[0]
            trainer.finish("done")

    assert run_builder(ROOT, IDENTITY, WORK, files=files, clock=StillClock(), on_status=taken) == DONE
    assert said[1] == f"starting over: {ROOT} is no exchange yet: its trainer has not started"
    assert said[-1] == "stopping: the trainer has finished (done)"


@pytest.mark.parametrize("holder", ["trainer", "builder-0"])
def test_another_version_of_realmops_is_refused_by_the_identity_card(
    holder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = MemoryFiles()
    open_trainer(files)
    monkeypatch.setattr(artifacts, "SCHEMA", 0)
    with pytest.raises(ValueError, match="written by another version of realmops"):
        Exchange.open(ROOT, IDENTITY, holder, files=files, clock=StillClock())
    if holder != "trainer":
        assert run_builder(ROOT, IDENTITY, WORK, files=files, clock=StillClock()) == MISCONFIGURED
    assert files.listdir(ROOT / "run") == ["v-000000"]
