"""The trainer's life on the exchange: checkpoints out, weights out, indexes in."""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from realmops.refresh.exchange import KEPT, Exchange, ExchangeError, Fenced
from realmops.refresh.heartbeat import Ages
from realmops.refresh.versions import Damaged, Version, Versions, fence_of, step_of, version_name

MESSAGE_SECONDS = 1.0

log = logging.getLogger(__name__)
T = TypeVar("T")


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
    """A trainer's life on an exchange: takes a fence, restores, checkpoints, publishes weights, adopts indexes.

    The weights of a step are published after the checkpoint of that step (if there is one) and before the next one.
    ``on_wait(message, seconds)`` is called at once and then every second of a wait. Of an index the files ``mapped``
    are mapped copies where they are large.
    """

    def __init__(
        self, exchange: Exchange, policy: Policy = Policy(), mapped: Collection[str] = (),
        on_wait: Callable[[str, float], None] = lambda message, seconds: log.info("%s", message),
    ) -> None:  # fmt: skip
        self.exchange, self.policy, self.mapped, self._on_wait = exchange, policy, mapped, on_wait
        self.fence = exchange.take_fence()
        self._index_name: str | None = None  # in use now, or when the checkpoint was made
        self._awaited: dict[int, str] = {}  # step -> weights of this trainer's past without an adopted index
        self._pinned: list[Version] = []  # adopted in this life, the last one in use; until a checkpoint names the next
        self._step = 0
        self._ages = Ages(exchange.clock)

    def restore(self) -> Version | None:
        """The newest checkpoint that can be used, or None in a new run.

        Falls back over damaged ones with a warning; ExchangeError when there were checkpoints and none is
        left: starting again from step 0 is for people to decide.
        """
        store = self.exchange.checkpoints
        seen = False
        while names := store.names():
            seen, name = True, names[-1]
            try:
                checkpoint = store.load(name)
            except FileNotFoundError:  # moved away; what a collector brings back is listed again
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
        if seen or store.bad():
            self.check_fence()
            raise ExchangeError(
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
        return [name for name in self._past.values() if not self._can_be_had(name)]

    @property
    def _past(self) -> dict[int, str]:
        """The index in use and the weights whose index is awaited, by step."""
        return ({self.index_step: self._index_name} if self._index_name else {}) | self._awaited

    def _can_be_had(self, name: str) -> bool:
        return self.exchange.indexes.present(name) or self.exchange.weights.present(name)

    def save_checkpoint(self, step: int, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
        """Commit a checkpoint; ``meta`` comes back under ``meta["trainer"]``.

        The checkpoint of a step comes before the weights of that step.
        """
        awaited = sorted(self._awaited.values())
        words = {"step": step, "index": self._index_name, "awaited": awaited, "trainer": dict(meta)}
        self._publish(self.exchange.checkpoints, step, files, words)
        for version in self._pinned[:-1]:
            self.exchange.indexes.unpin(version)
        self._pinned = self._pinned[-1:]
        self._collect()

    def publish_weights(self, step: int, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
        """Commit the weights of a step for the builders, once in this trainer's past."""
        if step in self._past:
            return
        awaited = self.policy.adopt == "fixed_lag"
        self._publish(self.exchange.weights, step, files, {"step": step, "awaited": awaited, "trainer": dict(meta)})
        kept = sorted(self._awaited) if awaited else sorted(self._awaited)[-(KEPT - 1) :]
        self._awaited = {**{old: self._awaited[old] for old in kept}, step: version_name(self.fence, step)}
        if not awaited:
            self._collect()

    def _publish(self, store: Versions, step: int, files: Mapping[str, bytes], meta: dict[str, Any]) -> None:
        if not store.publish(version_name(self.fence, step), files, meta, self.check_fence):
            raise Fenced(f"{store.kind} of step {step} are there already under fence {self.fence}, by another trainer")

    def check_fence(self) -> None:
        """Raise Fenced when another trainer has taken over, or the exchange with this one's fence is gone."""
        if (newest := self.exchange.newest_fence()) > self.fence:
            raise Fenced(f"trainer {newest} has taken over {self.exchange.root} from this one, {self.fence}")
        if newest < self.fence:
            raise Fenced(
                f"{self.exchange.root} was removed or emptied while this trainer used it; bring it back, or run the "
                "stage again, which begins a new one"
            )

    def index_for(self, step: int) -> Version:
        """The index of the weights of exactly this step, waited for (``fixed_lag``).

        ValueError when no such weights were published, TimeoutError after ``builder_timeout`` seconds.
        """
        name = self._past.get(step)
        if name is None:
            raise ValueError(
                f"no index of step {step} can come: its weights were not published; awaited are the steps "
                f"{sorted(self._awaited)}"
            )
        return self._adopt(self._wait(lambda: self._load_awaited(name), f"the index of step {step}"))

    def newest_index(self, step: int) -> Version | None:
        """At ``step``: an index newer than the one in use, or None while there is none (``as_soon_as_ready``).

        Waits when there is no index at all yet, and when the one in use is too stale and the policy says so.
        """
        found = self._newest()
        if found is None and self.lacks_index:
            raise ValueError("no index can come: no weights were published; publish the weights of this step first")
        if found is None and (not self._pinned or (self._too_stale(step) and self.policy.on_stale == "wait")):
            found = self._wait(self._newest, f"a newer index at step {step}" if self._pinned else "a first index")
        adopted = self._adopt(found) if found else None
        if self._too_stale(step) and self.policy.on_stale == "warn":
            log.warning("the index is %d steps old; %s", step - self.index_step, self.exchange.builders_in_words())
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
        for name in reversed(self.exchange.indexes.names()):
            of_my_past = name in self._past.values() or fence_of(name) == self.fence
            newer = not self._pinned or step_of(name) > self.index_step
            if of_my_past and newer and (found := self._load(name)):
                return found
        return None

    def _load(self, name: str) -> Version | None:
        if name in self.exchange.indexes.names():
            with suppress(FileNotFoundError, Damaged):  # while the weights are there, a builder makes it again
                return self.exchange.load(self.exchange.indexes, name, self.mapped)
        return None

    def _load_awaited(self, name: str) -> Version | None:
        found = self._load(name)
        if found is None and not self._can_be_had(name) and self._ages.age(name, None) >= self.exchange.grace:
            self.check_fence()
            raise ExchangeError(
                f"neither the index nor the weights {name} are left in {self.exchange.root} (damaged ones "
                "are set aside as .bad); start again: training goes on from the checkpoint before"
            )
        return found

    def _adopt(self, index: Version) -> Version:
        assert not self._pinned or index.step >= self.index_step, "generations never go back within a life"
        self._pinned.append(replace(index, files={}))
        self._index_name = index.name
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
        self.beat(self._step, state)

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
