"""Runs of the toy trainer and its builders, in processes that are killed, stopped and doubled again and again.

    python tests/kills.py FOLDER KILLS SEED

Each run has one to three builders. A process dies by SIGKILL before its n-th operation on the exchange, n going
through all of them, or at a random instant, alone or with all others; builders are stopped for a while; now and
then a second trainer is started beside the first; every clock is off, by up to a day. Prints, as JSON, what was done
and what came out wrong. Processes are forked, so that a life costs no start-up.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from exchange_lab import IDENTITY, WORK, Dying, Plan, forked, life, sound, undisturbed

from realmops.refresh.builder import run_builder
from realmops.refresh.exchange import Exchange, Fenced
from realmops.refresh.shared_files import Clock, Files
from realmops.refresh.trainer import Policy

KILLS_IN_A_RUN = 12
LONGEST = 600.0  # seconds of a run; it takes one or two on a free machine
PLAN = Plan(policy=Policy(builder_timeout=LONGEST, poll=0.005))
FENCED = 3  # exit code
DAY = 86400.0


class WrongClock(Clock):
    """A clock of a machine whose time was never set."""

    def __init__(self, off: float) -> None:
        self.off = off

    def unix(self) -> float:
        return time.time() + self.off


class Run:
    """One run of the toy, from its first life to its last word."""

    def __init__(self, root: Path, rng: random.Random, next_operation: dict[str, int], done: Counter[str]) -> None:
        self.root, self.rng, self.next, self.done = root, rng, next_operation, done
        self.out = root.with_suffix(".params")
        self.alive: dict[int, str] = {}  # process id -> role
        self.stopped: dict[int, float] = {}  # process id -> when it is woken
        self.kills = 0
        self.wrong: list[str] = []

    def start(self, role: str) -> None:
        at = 0
        if self.kills < KILLS_IN_A_RUN and self.rng.random() < 0.7:
            kind = role.split("-")[0]
            self.next[kind] += 1
            at = self.next[kind]
        clock, dying = WrongClock(self.rng.uniform(-DAY, DAY)), Dying(at)
        self.alive[forked(lambda: self.work(role, Files(dying), clock))] = role

    def work(self, role: str, files: Files, clock: Clock) -> int:
        if role != "trainer":
            name = role.removeprefix("builder-")
            return run_builder(self.root, IDENTITY, WORK, name=name, poll=0.005, grace=0.0, files=files, clock=clock)
        try:
            exchange = Exchange.open(self.root, IDENTITY, files=files, clock=clock, grace=0.0)
            params = life(exchange, PLAN)
        except Fenced:
            return FENCED
        draft = self.out.with_suffix(f".{os.getpid()}")  # a trainer may be killed between making a file and filling it
        draft.write_text(params.hex())
        draft.rename(self.out)
        return 0

    def go(self) -> list[str]:
        started = time.monotonic()
        builders = [f"builder-{number}" for number in range(self.rng.randint(1, 3))]
        for role in ("trainer", *builders):
            self.start(role)
        while not self.out.exists():
            if time.monotonic() - started > LONGEST:
                self.wrong.append(f"{self.root}: no end after {LONGEST} s")
                break
            self.harm()
            time.sleep(0.002)
            for role in self.reap():
                if not self.out.exists() and role not in self.alive.values():
                    self.start(role)
        self.end()
        if self.out.exists() and bytes.fromhex(self.out.read_text()) != undisturbed(PLAN):
            self.wrong.append(f"{self.root}: other weights")
        with suppress(FileNotFoundError):
            sound(Files(), self.root)
        return self.wrong

    def harm(self) -> None:
        now, chance = time.monotonic(), self.rng.random()
        for pid in [pid for pid, until in self.stopped.items() if now > until]:
            os.kill(pid, signal.SIGCONT)
            del self.stopped[pid]
        awake = [pid for pid in self.alive if pid not in self.stopped]
        if self.kills >= KILLS_IN_A_RUN or not awake:
            return
        one = self.rng.choice(awake)
        if chance < 0.02:
            self.kill([one], "at an instant")
        elif chance < 0.03:
            self.kill(awake, "all at an instant")
        elif chance < 0.05 and self.alive[one] != "trainer":
            os.kill(one, signal.SIGSTOP)
            self.stopped[one] = now + self.rng.uniform(0.02, 0.4)
            self.done["a builder stopped and woken"] += 1
        elif chance < 0.055 and len(self.alive) < 6:
            self.start("trainer")
            self.done["a second trainer"] += 1

    def kill(self, pids: list[int], how: str) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            self.done[f"{self.alive[pid].split('-')[0]} killed {how}"] += 1

    def reap(self) -> list[str]:
        """The roles of the processes that have ended."""
        ended = []
        for pid in list(self.alive):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                role, code = self.alive.pop(pid), os.waitstatus_to_exitcode(status)
                self.stopped.pop(pid, None)
                self.judge(role, code)
                ended.append(role)
        return ended

    def judge(self, role: str, code: int) -> None:
        if code == -signal.SIGKILL:
            self.kills += 1
            self.done[f"{role.split('-')[0]} killed, at all"] += 1
        elif code not in ((0, FENCED) if role == "trainer" else (0,)):
            self.wrong.append(f"{self.root}: {role} ended with {code}")

    def end(self) -> None:
        """Let builders end by themselves, as they do when the trainer has finished."""
        for pid in self.stopped:
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + LONGEST
        while self.alive and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.005)
        for pid, role in self.alive.items():
            self.wrong.append(f"{self.root}: {role} outlives its run")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main(folder: Path, kills: int, seed: int) -> None:
    os.fsync = lambda handle: None  # a kill loses nothing that was written
    rng, done, following = random.Random(seed), Counter[str](), {"trainer": 0, "builder": 0}
    wrong: list[str] = []
    highest = {"trainer": 400, "builder": 200}
    killed = [f"{role} killed, at all" for role in highest]
    # fast builders may use up the kills of a run before its trainer has come far
    while (sum(done[one] for one in killed) < kills or min(done[one] for one in killed) <= kills // 5) and not wrong:
        root = folder / f"run-{done['runs']}"
        done["runs"] += 1
        wrong = Run(root, rng, following, done).go()
        following = {role: number % highest[role] for role, number in following.items()}
        if not wrong:
            shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({"done": done, "wrong": wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
