"""Trainers and builders over one volume, under random schedules of kills, pauses, errors, lost replies and power cuts.

Hypothesis chooses which process runs for how many operations on the volume and what happens at the last of them. The
toy run of exchange_lab.py checks I1 and I2 at each adoption, and its last parameters show any wrong byte (I3).
"""

import errno
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exchange_lab import IDENTITY, ROOT, WORK, Killed, MemoryFiles, Plan, StillClock, life, sound, undisturbed
from faults import times
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from realmops import files
from realmops.refresh import versions
from realmops.refresh.builder import Builder, _Stop
from realmops.refresh.exchange import Exchange, FencedError
from realmops.refresh.trainer import RefreshPolicy, TrainerSide

AS_SOON = RefreshPolicy("as_soon_as_ready", max_staleness_steps=3, builder_timeout=1e6)
PLANS = {"fixed_lag": Plan(), "as_soon_as_ready": Plan(policy=AS_SOON)}
FATES = ("pause", "pause", "kill", "kill after", "error", "lost reply")
SCHEDULES = settings(
    derandomize=True, database=None, deadline=None, max_examples=times(80, 2000), stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


class Process:
    """A trainer or builder in a thread, which runs only while the machine waits for it; it restarts when it dies."""

    def __init__(self, machine: "Schedules", role: str) -> None:
        self.machine, self.role = machine, role
        self.operations, self.fate, self.is_dead, self.is_over = 0, "pause", False, False
        self.resumed, self.paused = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self.live, daemon=True).start()

    def run(self, operations: int, fate: str = "pause") -> None:
        """Let the process do so many operations, the last of which has a fate."""
        if not self.is_over:
            self.operations, self.fate = operations, fate
            self.resumed.release()
            assert self.paused.acquire(timeout=60), f"{self.role} hangs"

    def live(self) -> None:
        self.resumed.acquire()
        while not self.is_over:
            self.is_dead = False
            try:
                self.is_over = self.machine.life_of(self)
            except (Killed, OSError):
                self.is_over = self.machine.is_finished
            except BaseException as error:
                self.machine.failures.append(f"{self.role} ended with {error!r}")
                self.is_over = True
        self.paused.release()

    def pause(self) -> None:
        self.paused.release()
        self.resumed.acquire()
        if self.machine.is_finished:
            self.is_dead = True
            raise Killed

    def around(self, operation: str, path: Path, effect: Callable[[], Any]) -> Any:
        if self.is_dead:
            raise Killed
        self.operations -= 1
        if self.operations > 0:
            return effect()
        fate, self.fate = self.fate, "pause"  # before the operation after this one
        if fate in ("kill after", "lost reply"):
            effect()
        if fate.startswith("kill"):
            self.is_dead = True
            raise Killed
        if fate != "pause":
            raise OSError(errno.EIO, fate, str(path))
        self.pause()
        return self.around(operation, path, effect)


class Schedules(RuleBasedStateMachine):
    """One exchange, its processes, and the time that they share."""

    @initialize(plan=st.sampled_from(sorted(PLANS)))
    def begin(self, plan: str) -> None:
        self.plan, self.volume, self.now, self.is_finished = PLANS[plan], MemoryFiles(), 0.0, False
        self.failures: list[str] = []
        nonces = random.Random(0)
        self.patch = pytest.MonkeyPatch()
        for module in (versions, files):
            names = SimpleNamespace(token_hex=lambda size: nonces.randbytes(size).hex())
            self.patch.setattr(module, "secrets", names)
        self.acknowledged = self.acknowledged_at_cut = 0  # step of the newest checkpoint
        save, restore = TrainerSide.save_checkpoint, TrainerSide.restore

        def save_checkpoint(trainer: TrainerSide, step: int, *arguments: Any) -> None:
            save(trainer, step, *arguments)
            self.acknowledged = max(step, self.acknowledged)

        def restored(trainer: TrainerSide) -> Any:
            acknowledged, checkpoint = self.acknowledged, restore(trainer)
            assert (checkpoint.step if checkpoint else 0) >= acknowledged, "a checkpoint is lost"
            return checkpoint

        self.patch.setattr(TrainerSide, "save_checkpoint", save_checkpoint)
        self.patch.setattr(TrainerSide, "restore", restored)
        self.processes = [Process(self, role) for role in ("trainer", "builder-0", "builder-1")]

    @rule(index=st.integers(0, 5), operations=st.integers(1, 300), fate=st.sampled_from(FATES))
    def run(self, index: int, operations: int, fate: str) -> None:
        self.processes[index % len(self.processes)].run(operations, fate)

    @rule(role=st.sampled_from(("trainer", "builder-0")))
    def start_a_successor_beside_a_suspended_process(self, role: str) -> None:
        self.processes = [process for process in self.processes if not process.is_over]
        if len(self.processes) < 6:
            self.processes.append(Process(self, role))

    @precondition(lambda self: self.acknowledged > self.acknowledged_at_cut)
    @rule(seed=st.integers(0, 999))
    def cut_the_power(self, seed: int) -> None:
        self.acknowledged_at_cut = self.acknowledged
        for process in self.processes:
            process.is_dead = True  # before its next operation
        self.volume.power_cut(random.Random(seed))

    @invariant()
    def every_adoption_was_right_and_storage_is_bounded(self) -> None:
        assert self.failures == [], self.failures
        if self.volume.top.names and "indexes" in self.volume.listdir(ROOT):
            # 2 kept, 2 that checkpoints name, 1 awaited, and what at most four builders have in hand
            assert len(self.volume.listdir(ROOT / "indexes")) <= 9, "I4"

    def life_of(self, process: Process) -> bool:
        """Live once; return whether the process ends for good."""
        clock = StillClock(process.pause)
        clock.monotonic = lambda: self.now  # type: ignore[method-assign]
        volume = self.volume.seen_by(process.around)
        self.now += 0.05
        exchange = Exchange.open(ROOT, IDENTITY, process.role, files=volume, clock=clock, grace=0.0)
        try:
            if process.role != "trainer":
                Builder(exchange, WORK, on_status=lambda message: None).run()
            params = life(exchange, self.plan)
            assert self.plan.policy is AS_SOON or params == undisturbed(self.plan), "I3: other parameters"
            self.is_finished = True
        except (FencedError, _Stop):
            pass
        return True

    def teardown(self) -> None:
        """Without further faults the run ends (I13), and all that can be seen is whole (I1)."""
        if not hasattr(self, "processes"):
            return
        try:
            if not any(process.role == "trainer" and not process.is_over for process in self.processes):
                self.processes.append(Process(self, "trainer"))
            for _ in range(3000):
                if self.is_finished or self.failures:
                    break
                for process in self.processes:
                    process.run(40)
                if all(process.is_over for process in self.processes if process.role == "trainer"):
                    self.processes.append(Process(self, "trainer"))
            assert self.failures == [], self.failures
            assert self.is_finished, "the run stands still"
            sound(self.volume)
        finally:
            self.is_finished = True
            for process in self.processes:
                process.run(1)
            self.patch.undo()


@pytest.mark.faults
def test_i1_to_i4_i7_i13_random_schedules_end_with_the_right_parameters() -> None:
    run_state_machine_as_test(Schedules, settings=SCHEDULES)
