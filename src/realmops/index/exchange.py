"""The exchange: how a trainer and index builders that never talk hand weights and indexes to each other.

They share a folder: on a laptop any folder, in a cluster a volume that all pods mount, often NFS. This module
is the only one that knows its layout. Everything holds while any process is killed at any instruction, the
disk is full, two builders work at once, and a stopped trainer wakes up beside its successor.

    <root>/run/v-000000/         the identity card of the run: one manifest, made once, compared by everybody
    <root>/fences/000007/        a trainer's life number, taken by mkdir, never removed
    <root>/checkpoints/v-000007-00000042/
                                 by trainer 7 at step 42; names the index in use and the weights awaited
    <root>/weights/v-000007-00000042/
                                 retriever parameters of step 42
    <root>/parts/v-000007-00000042-<first>-<end>/
                                 the rows [first, end) embedded with these weights, by builders
    <root>/indexes/v-000007-00000042/
                                 the index of these weights: same name
    <root>/finished/v-000007/    trainer 7's last word: done or failed
    <root>/pins/<role>/<kind>.<version>.<holder>.<nonce>
                                 a reader holds this version
    <root>/alive/<role>/<holder>.json
                                 who I am and what I do, replaced often; a hint for people and messages

Every ``v-`` folder is an immutable version (versions.py), so every kind has one parent folder and one mount.
The trainer removes checkpoints and weights, builders remove parts and indexes. Kept are

    checkpoints  the newest 2
    weights      those whose index this life or a kept checkpoint awaits; retired are those of a lost life
    indexes      the newest 2, those whose weights are kept, those that a kept checkpoint names, pinned ones
    parts        those of weights that are kept and have no index yet

A trainer of a lower fence acknowledges nothing once a higher one exists, and cannot write over its successor:
the fence is in every name. Which indexes belong to a trainer's own past is read off its checkpoint, not
guessed.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from realmops.artifacts import canonical_json
from realmops.index.files import Ages, Clock, Files
from realmops.index.versions import (
    MANIFEST_LIMIT,
    ROLES,
    Damaged,
    Version,
    Versions,
    check_run,
    fence_of,
    step_of,
    version_name,
)

CARD = "v-000000"
KINDS = ("run", "checkpoints", "weights", "parts", "indexes", "finished")
KEPT = 2  # checkpoints, and index generations beyond those that somebody needs
MESSAGE_SECONDS = 1.0
BEAT_SECONDS = 2.0

log = logging.getLogger(__name__)
T = TypeVar("T")
OnWait = Callable[[str, float], None]


class Fenced(RuntimeError):
    """A newer trainer has taken over this exchange; this one must end without writing anything more."""


class Exchange:
    """The stores in one exchange folder, seen by one holder: ``trainer`` or ``builder-<id>``."""

    def __init__(
        self, root: Path, run: dict[str, Any] | None, holder: str, *, files: Files | None = None,
        clock: Clock | None = None, grace: float = 120.0, stale: float = 600.0,
    ) -> None:  # fmt: skip
        self.root, self.run, self.holder = root, run, holder
        self.files, self.clock = files or Files(), clock or Clock()
        self.grace = grace
        self._ages = Ages(self.clock)
        self._beats, self._since = 0, self.clock.unix()
        self._last_beat, self._doing = float("-inf"), ""

        self.stores = {
            kind: Versions(root, kind, run, holder, self.files, self.clock, grace=grace, stale=stale)
            for kind in KINDS
        }
        self.card, self.checkpoints, self.weights, self.parts, self.indexes, self.last_words = (
            self.stores.values()
        )

    @classmethod
    def open(
        cls, root: Path, identity: Mapping[str, Any], holder: str = "trainer", *, files: Files | None = None,
        clock: Clock | None = None, grace: float = 120.0, stale: float = 600.0,
    ) -> Exchange:  # fmt: skip
        """The exchange of the run with this identity (JSON scalars by name), created by its trainer.

        Raises ValueError with the field and both values when the folder belongs to another run, and
        FileNotFoundError when a builder comes before the trainer.
        """
        exchange = cls(
            Path(root).absolute(), dict(identity), holder, files=files, clock=clock, grace=grace, stale=stale
        )
        if holder == "trainer":
            exchange._create()
        exchange._compare()
        for store in exchange.stores.values():
            store.sweep_own()
        return exchange

    def _create(self) -> None:
        tops = [self.root / top for top in ("fences", *KINDS, "pins", "alive")]
        for folder in (*tops, *(self.root / top / role for top in ("pins", "alive") for role in ROLES)):
            self._make(folder)
        if CARD not in self.card.names():
            self.card.publish(CARD, {}, {})

    def _make(self, folder: Path) -> None:
        if folder == folder.parent or folder.name in self.files.listdir(folder.parent):
            return
        self._make(folder.parent)
        with suppress(FileExistsError):
            self.files.mkdir(folder)
        self.files.sync_folder(folder.parent)

    def _compare(self) -> None:
        if CARD not in self.card.names():
            raise FileNotFoundError(f"{self.root} is no exchange yet: its trainer has not started")
        assert self.run is not None
        try:
            check_run(
                Versions(self.root, "run", None, self.holder, self.files, self.clock).manifest(CARD).run,
                self.run,
            )
        except ValueError as error:
            raise ValueError(
                f"the exchange {self.root} belongs to another run: {error}; give this run another exchange "
                "folder, or start trainer and builder with the same corpus, vocabulary and parameters"
            ) from None
        except Damaged as error:
            raise ValueError(f"the exchange {self.root} has lost its identity card: {error}") from None

    # Fences and last words

    def newest_fence(self) -> int:
        names = self.files.listdir(self.root / "fences")
        return max((int(name) for name in names if name.isdigit()), default=0)

    def take_fence(self) -> int:
        """The number of a new trainer's life, higher than all before."""
        fence = self.newest_fence() + 1
        while True:
            try:
                self.files.mkdir(self.root / "fences" / f"{fence:06d}")
            except FileExistsError:
                fence += 1
                continue
            self.files.sync_folder(self.root / "fences")
            return fence

    def finished(self) -> str | None:
        """``done`` or ``failed`` with its message once the newest trainer has said its last word."""
        name = f"v-{self.newest_fence():06d}"
        if name not in self.last_words.names():
            return None
        try:
            meta = self.last_words.manifest(name).meta
        except (Damaged, FileNotFoundError):
            return "finished, with a last word that cannot be read"
        return f"{meta['state']}: {meta['message']}" if meta["message"] else str(meta["state"])

    # Signs of life

    def beat(self, doing: str, **fields: Any) -> None:
        """Say what this process does; at most every 2 seconds unless it does something else."""
        now = self.clock.monotonic()
        if now - self._last_beat < BEAT_SECONDS and doing == self._doing:
            return
        self._last_beat, self._doing, self._beats = now, doing, self._beats + 1
        sign = {
            "holder": self.holder, "doing": doing, **fields, "pid": os.getpid(), "host": socket.gethostname(),
            "beat": self._beats, "since_unix": self._since, "unix": self.clock.unix(),
        }  # fmt: skip
        role = self.holder.split("-")[0]
        try:
            self.files.replace(self.root / "alive" / role / f"{self.holder}.json", canonical_json(sign))
        except OSError as error:  # work goes on without signs of life
            log.warning("no sign of life could be written: %s", error)

    def signs(self, role: str) -> list[tuple[str, float, str]]:
        """Per holder of a role: its name, the seconds since its sign of life changed, and what it does."""
        folder = self.root / "alive" / role
        found = []
        for entry in self.files.listdir(folder):
            if entry.startswith(".") or not entry.endswith(".json"):
                continue
            try:
                content = self.files.read(folder / entry, MANIFEST_LIMIT)
                doing = str(json.loads(content)["doing"])
            except (OSError, ValueError, KeyError, TypeError):
                content, doing = b"", "its sign of life cannot be read"
            found.append(
                (entry.removesuffix(".json"), self._ages.age(f"alive {role} {entry}", content), doing)
            )
        return found

    def builders_in_words(self) -> str:
        signs = [
            f"{holder} ({doing}) last gave a sign of life {seconds:.0f} s ago"
            for holder, seconds, doing in self.signs("builder")
        ]
        return (
            "; ".join(signs) or "no builder has ever been seen here: start one with `realmops index-builder`"
        )

    # What builders keep

    def needed_by_checkpoints(self) -> tuple[set[str], set[str]]:
        """The indexes in use and the weights awaited that the kept checkpoints name."""
        in_use, awaited = set(), set()
        for name in self.checkpoints.names():
            try:
                meta = self.checkpoints.manifest(name).meta
            except Damaged:
                continue  # nobody can resume from it
            in_use |= {meta["index"]} - {None}
            awaited |= {*meta["awaited"], name}  # weights of the checkpoint's own step have its name
        return in_use, awaited

    def collect_indexes(self) -> None:
        """A builder's part of the cleaning up."""

        def needed_indexes() -> set[str]:
            weights = set(self.weights.names())
            in_use, awaited = self.needed_by_checkpoints()
            return weights | in_use | awaited | set(self.indexes.names()[-KEPT:])

        def needed_parts() -> set[str]:
            open_weights = set(self.weights.names()) - set(self.indexes.names())
            return {part for part in self.parts.names() if weights_of(part) in open_weights}

        self.indexes.collect(needed_indexes)
        self.parts.collect(needed_parts)


def weights_of(part: str) -> str:
    """The version of the weights that a part was embedded with."""
    return "-".join(part.split("-")[:3])


def part_name(weights: str, first: int, end: int) -> str:
    return f"{weights}-{first:010d}-{end:010d}"


@dataclass(frozen=True)
class Policy:
    """How a trainer waits for indexes.

    ``fixed_lag`` adopts the generation that it asks for and waits for it: asynchronous and reproducible.
    ``as_soon_as_ready`` takes the newest whenever it is there. More than ``max_staleness_steps`` behind
    (None: never) it waits, warns or continues. A wait of ``builder_timeout`` seconds ends the run.
    """

    adopt: Literal["fixed_lag", "as_soon_as_ready"] = "fixed_lag"
    max_staleness_steps: int | None = None
    on_stale: Literal["wait", "warn", "continue"] = "wait"
    builder_timeout: float = 900.0
    poll: float = 0.1


class Trainer:
    """A trainer's life on an exchange: takes a fence, restores, checkpoints, publishes weights, adopts
    indexes.

    One thread may publish weights while the main thread does the rest. The weights of a step are published
    after the checkpoint of that step (if there is one) and before the next checkpoint.
    ``on_wait(message, seconds)`` is called at once and then every second of a wait.
    """

    def __init__(self, exchange: Exchange, policy: Policy = Policy(), on_wait: OnWait | None = None) -> None:
        self.exchange, self.policy = exchange, policy
        self._on_wait: OnWait = on_wait or (lambda message, seconds: log.info("%s", message))
        self.fence = exchange.take_fence()
        self._index: Version | None = None  # in use: without its bytes
        self._index_name: str | None = None  # in use now, or when the checkpoint was made
        self._awaited: dict[int, str] = {}  # step -> weights of this trainer's past without an adopted index
        self._idle_pins: list[Version] = []  # adopted before, until a checkpoint names what came after
        self._step = 0
        self._ages = Ages(exchange.clock)
        self._lock = threading.Lock()  # one writer of large versions at a time

    def restore(self) -> Version | None:
        """The newest checkpoint that can be used, or None in a new run.

        Falls back over damaged ones with a warning; RuntimeError when there were checkpoints and none is
        left: starting again from step 0 is for people to decide.
        """
        store = self.exchange.checkpoints
        tried: set[str] = set()
        while names := [name for name in store.names() if name not in tried]:
            name = names[-1]
            tried.add(name)
            try:
                checkpoint = store.load(name)
            except FileNotFoundError:
                continue
            except Damaged as error:
                store.set_aside(name, str(error))
                continue
            store.unpin(checkpoint)
            lost = self._resume_from(checkpoint)
            if lost and self.policy.adopt == "fixed_lag":
                self.check_fence()  # a successor, who removes what this one looks for, is no damage
                store.set_aside(name, f"neither the index nor the weights of {', '.join(lost)} are left")
                continue
            self._awaited = {step: name for step, name in self._awaited.items() if name not in lost}
            self._index_name = None if self._index_name in lost else self._index_name
            self._collect()
            return checkpoint
        if tried or store.bad():
            self.check_fence()
            raise RuntimeError(
                f"{store.folder} holds checkpoints and none can be used (see the warnings above and the .bad "
                "folders in it); restore them from a copy, or move the exchange away to begin from step 0"
            )
        self._collect()
        return None

    def _resume_from(self, checkpoint: Version) -> list[str]:
        """Take over the past that a checkpoint tells of; the generations in it that can no longer be had."""
        self._index_name, self._step = checkpoint.meta["index"], checkpoint.step
        self._awaited = {step_of(name): name for name in checkpoint.meta["awaited"]}
        # The weights of the checkpoint's own step come after it and are of its past all the same.
        if checkpoint.name != self._index_name and self._can_be_had(checkpoint.name):
            self._awaited[checkpoint.step] = checkpoint.name
        needed = [*self._awaited.values(), *([self._index_name] if self._index_name else [])]
        return [name for name in needed if not self._can_be_had(name)]

    def _can_be_had(self, name: str) -> bool:
        return self.exchange.indexes.present(name) or self.exchange.weights.present(name)

    def save_checkpoint(self, step: int, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
        """Commit a checkpoint; ``meta`` comes back under ``meta["trainer"]``.

        The checkpoint of a step comes before the weights of that step.
        """
        with self._lock:
            awaited = sorted(self._awaited.values())
            words = {"step": step, "index": self._index_name, "awaited": awaited, "trainer": dict(meta)}
            self._publish(self.exchange.checkpoints, step, files, words)
        for version in self._idle_pins:
            self.exchange.indexes.unpin(version)
        self._idle_pins = []
        self._collect()

    def publish_weights(self, step: int, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
        """Commit the weights of a step for the builders, once in this trainer's past."""
        with self._lock:
            if step in self._awaited or (self._index_name and step == step_of(self._index_name)):
                return
            awaited = self.policy.adopt == "fixed_lag"
            self._publish(
                self.exchange.weights, step, files, {"step": step, "awaited": awaited, "trainer": dict(meta)}
            )
            kept = sorted(self._awaited) if awaited else sorted(self._awaited)[-(KEPT - 1) :]
            self._awaited = {
                **{old: self._awaited[old] for old in kept},
                step: version_name(self.fence, step),
            }
        if not awaited:
            self._collect()

    def _publish(self, store: Versions, step: int, files: Mapping[str, bytes], meta: dict[str, Any]) -> None:
        if not store.publish(version_name(self.fence, step), files, meta, self.check_fence):
            raise Fenced(
                f"{store.kind} of step {step} are there already under fence {self.fence}, by another trainer"
            )

    def check_fence(self) -> None:
        """Raise Fenced when another trainer has taken over."""
        if (newest := self.exchange.newest_fence()) > self.fence:
            raise Fenced(f"trainer {newest} has taken over {self.exchange.root} from this one, {self.fence}")

    def index_for(self, step: int) -> Version:
        """The index of the weights of exactly this step, waited for (``fixed_lag``).

        ValueError when no such weights were published, TimeoutError after ``builder_timeout`` seconds.
        """
        name = self._awaited.get(step)
        if name is None and self._index_name and step_of(self._index_name) == step:
            name = self._index_name
        if name is None:
            raise ValueError(
                f"no index of step {step} can come: its weights were not published; awaited are the steps "
                f"{sorted(self._awaited)}"
            )
        return self._adopt(self._wait(lambda: self._load_awaited(name), f"the index of step {step}"))

    def newest_index(self, step: int) -> Version | None:
        """At ``step``: an index newer than the one in use, or None while there is none
        (``as_soon_as_ready``).

        Waits when there is no index at all yet, and when the one in use is too stale and the policy says so.
        """
        found = self._newest()
        if found is None and self.lacks_index:
            raise ValueError(
                "no index can come: no weights were published; publish the weights of this step first"
            )
        if found is None and (
            self._index is None or (self._too_stale(step) and self.policy.on_stale == "wait")
        ):
            found = self._wait(
                self._newest, "a first index" if self._index is None else f"a newer index at step {step}"
            )
        adopted = self._adopt(found) if found else None
        if self._too_stale(step) and self.policy.on_stale == "warn":
            log.warning(
                "the index is %d steps old; %s", step - self.index_step, self.exchange.builders_in_words()
            )
        return adopted

    @property
    def lacks_index(self) -> bool:
        """No index is in use and none is awaited: weights must be published now, whatever the step."""
        return self._index_name is None and not self._awaited

    @property
    def index_step(self) -> int:
        """The step of the weights behind the index in use."""
        return step_of(self._index_name) if self._index_name else 0

    def _too_stale(self, step: int) -> bool:
        most = self.policy.max_staleness_steps
        return most is not None and bool(self._awaited) and step - self.index_step > most

    def _newest(self) -> Version | None:
        known = {*self._awaited.values(), self._index_name}
        for name in reversed(self.exchange.indexes.names()):
            of_my_past = name in known or fence_of(name) == self.fence
            newer = self._index is None or step_of(name) > self._index.step
            if of_my_past and newer and (found := self._load(name)):
                return found
        return None

    def _load(self, name: str) -> Version | None:
        indexes = self.exchange.indexes
        if name not in indexes.names():
            return None
        try:
            return indexes.load(name)
        except FileNotFoundError:
            return None
        except Damaged as error:
            indexes.set_aside(name, str(error))  # with its weights still there, a builder makes it again
            return None

    def _load_awaited(self, name: str) -> Version | None:
        found = self._load(name)
        if found is None and not self._can_be_had(name) and self._ages.age(name, None) >= self.exchange.grace:
            self.check_fence()
            raise RuntimeError(
                f"neither the index nor the weights {name} are left in {self.exchange.root} (damaged ones "
                "are set aside as .bad); start again: training goes on from the checkpoint before"
            )
        return found

    def _adopt(self, index: Version) -> Version:
        if self._index is not None:
            assert index.step >= self._index.step, "generations never go back within a life"
            self._idle_pins.append(self._index)
        with self._lock:
            self._index, self._index_name = replace(index, files={}), index.name
            self._awaited = {step: name for step, name in self._awaited.items() if step > index.step}
        self._collect()
        return index

    def _wait(self, attempt: Callable[[], T | None], what: str) -> T:
        clock = self.exchange.clock
        start, told = clock.monotonic(), float("-inf")
        while (found := attempt()) is None:
            now = clock.monotonic()
            seconds = now - start
            builders = self.exchange.builders_in_words()
            message = f"step {self._step}: waiting for {what} for {seconds:.0f} s; {builders}"
            if seconds >= self.policy.builder_timeout:
                raise TimeoutError(message)
            if now - told >= MESSAGE_SECONDS:
                self.check_fence()
                self._on_wait(message, seconds)
                told = now
            self.beat(self._step, f"waiting for {what}")
            clock.sleep(self.policy.poll)
        return found

    def beat(self, step: int, doing: str = "training") -> None:
        """Once a step: a sign of life, written at most every 2 seconds."""
        self._step = step
        self.exchange.beat(doing, step=step, fence=self.fence, index=self._index_name)

    def finish(self, state: Literal["done", "failed"], message: str = "") -> None:
        """The last word: builders end."""
        meta = {"state": state, "message": message}
        self.exchange.last_words.publish(f"v-{self.fence:06d}", {}, meta, self.check_fence)
        self.exchange.beat(state, step=self._step, fence=self.fence, index=self._index_name)

    def _collect(self) -> None:
        """The trainer's part of the cleaning up; a failure in it is told and never ends the training."""
        exchange = self.exchange

        def needed_weights() -> set[str]:
            newer_lives = {name for name in exchange.weights.names() if fence_of(name) > self.fence}
            return newer_lives | set(self._awaited.values()) | exchange.needed_by_checkpoints()[1]

        try:
            self.check_fence()
            exchange.checkpoints.collect(lambda: set(exchange.checkpoints.names()[-KEPT:]))
            exchange.weights.collect(needed_weights)
        except OSError as error:
            log.warning("cleaning up %s failed and is tried again later: %s", exchange.root, error)


def inspect(root: Path, clock: Clock | None = None) -> dict[str, Any]:
    """The state of an exchange for people, without writing anything (``realmops doctor``).

    Times are seconds since then by the clock of whoever wrote, so only as right as the clocks agree.
    ``summary`` says the same in sentences.
    """
    clock = clock or Clock()
    exchange = Exchange(Path(root).absolute(), None, "builder-doctor", clock=clock)
    if CARD not in exchange.card.names():
        return {"root": str(root), "summary": [f"{root} is no exchange: no trainer has started here"]}
    problems: list[str] = []
    newest = {
        kind: _newest_sound(exchange.stores[kind], problems) for kind in ("checkpoints", "weights", "indexes")
    }
    alive = {role: _signs_of(exchange, role, clock) for role in ROLES}
    for kind, store in exchange.stores.items():
        problems += [f"{kind}: {entry} was set aside as damaged or superseded" for entry in store.bad()]
    weights, indexes = exchange.weights.names(), exchange.indexes.names()
    awaited = [name for name in weights if name not in indexes]
    finished = exchange.finished()
    summary = [f"{kind}: newest is {name or 'not there yet'}" for kind, name in newest.items()]
    summary += [
        f"{sign['holder']}: {sign['doing']}, running for {sign['running_s']:.0f} s, last sign of life "
        f"{sign['silent_s']:.0f} s ago"
        for signs in alive.values()
        for sign in signs
    ]
    summary += [f"no {role} has ever been seen" for role, signs in alive.items() if not signs]
    summary += [f"awaited: the index of {name}" for name in awaited]
    summary += [f"finished: {finished}"] if finished else []
    return {
        "root": str(root), "fence": exchange.newest_fence(), "newest": newest, "awaited": awaited,
        "finished": finished, "parts": exchange.parts.names(), **alive, "problems": problems,
        "summary": summary + problems,
    }  # fmt: skip


def _newest_sound(store: Versions, problems: list[str]) -> str | None:
    for name in reversed(store.names()):
        try:
            return store.manifest(name).name
        except Damaged as error:
            problems.append(f"{store.kind}: {error}")
        except OSError:
            continue  # removed while we looked
    return None


def _signs_of(exchange: Exchange, role: str, clock: Clock) -> list[dict[str, Any]]:
    signs = []
    for holder, _, doing in exchange.signs(role):
        try:
            path = exchange.root / "alive" / role / f"{holder}.json"
            sign = json.loads(exchange.files.read(path, MANIFEST_LIMIT))
            ages = {"running_s": clock.unix() - sign["since_unix"], "silent_s": clock.unix() - sign["unix"]}
            signs.append({**sign, **ages})
        except (OSError, ValueError, KeyError, TypeError):
            signs.append({"holder": holder, "doing": doing, "running_s": 0.0, "silent_s": 0.0})
    return signs
