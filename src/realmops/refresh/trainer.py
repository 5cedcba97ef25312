"""The trainer's side of the exchange: it saves checkpoints, publishes weights and adopts indexes."""

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from realmops.refresh.exchange import KEEP, Exchange, ExchangeError, FencedError
from realmops.refresh.heartbeat import LivenessTracker
from realmops.refresh.versions import CorruptVersionError, Version, VersionStore, fence_of, step_of, version_name

MESSAGE_SECONDS = 1.0  # between two messages of a wait

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class RefreshPolicy:
    """The policy by which a trainer adopts index generations.

    ``fixed_lag`` adopts exactly the requested generation and waits for it: asynchronous and reproducible.
    ``as_soon_as_ready`` adopts the newest generation that is available. If its index is more than
    ``max_staleness_steps`` old (None: no limit), the trainer waits. A wait of ``builder_timeout``
    seconds ends the run; ``poll`` is the interval of its checks in seconds.
    """

    adopt: Literal["fixed_lag", "as_soon_as_ready"] = "fixed_lag"
    max_staleness_steps: int | None = None
    builder_timeout: float = 900.0
    poll: float = 0.1


class TrainerSide:
    """One trainer process on an exchange, with a fence number that it takes at the start.

    The weights of a step are published after the checkpoint of that step (if there is one) and before the next one.
    The files in ``mapped`` of an index are memory-mapped from a local copy if they are large. ``on_wait`` is called
    with a message and the seconds waited so far, at the start of a wait and then every second.
    """

    def __init__(
        self, exchange: Exchange, policy: RefreshPolicy = RefreshPolicy(), mapped: Collection[str] = (),
        on_wait: Callable[[str, float], None] = lambda message, seconds: log.info("%s", message),
    ) -> None:  # fmt: skip
        self.exchange, self.policy, self.mapped, self._on_wait = exchange, policy, mapped, on_wait
        self.fence = exchange.take_fence()
        self._index_name: str | None = None  # the index in use, now or in the restored checkpoint
        self._awaited: dict[int, str] = {}  # step -> weights of this trainer's history without an adopted index
        self._pinned: list[Version] = []  # indexes adopted by this process and not yet released; the last is in use
        self._step = 0
        self._liveness = LivenessTracker(exchange.clock)

    def restore(self) -> Version | None:
        """Restore the newest usable checkpoint, with a warning for each damaged one; return None in a new run.

        ExchangeError if no checkpoint is usable: a restart from step 0 needs a manual decision.
        """
        store = self.exchange.checkpoints
        has_checkpoints = False
        while names := store.names():
            has_checkpoints, name = True, names[-1]
            try:
                checkpoint = store.load(name)
            except FileNotFoundError:  # moved to the trash; if it is restored, it is listed again
                continue
            except CorruptVersionError as error:
                store.quarantine(name, str(error))
                continue
            store.unpin(checkpoint)
            missing = self._resume_from(checkpoint)
            if missing and self.policy.adopt == "fixed_lag":
                self.check_fence()  # a successor may have removed them, which is no damage
                store.quarantine(name, f"neither the index nor the weights of {', '.join(missing)} are left")
                continue
            self._awaited = {step: name for step, name in self._awaited.items() if name not in missing}
            self._index_name = None if self._index_name in missing else self._index_name
            self._collect()
            return checkpoint
        if has_checkpoints or store.quarantined():
            self.check_fence()
            raise ExchangeError(
                f"{store.folder} holds checkpoints and none can be used (see the warnings above and its .bad folders); "
                "restore them from a copy, or move the exchange away to start from step 0"
            )
        self._collect()
        return None

    def _resume_from(self, checkpoint: Version) -> list[str]:
        """Take over the history in a checkpoint; return the names of its generations that are no longer available."""
        self._index_name, self._step = checkpoint.meta["index"], checkpoint.step
        self._awaited = {step_of(name): name for name in checkpoint.meta["awaited"]}
        # The weights of the checkpoint's step are published after it, and still belong to its history.
        if checkpoint.name != self._index_name and self._is_available(checkpoint.name):
            self._awaited[checkpoint.step] = checkpoint.name
        return [name for name in self._known.values() if not self._is_available(name)]

    @property
    def _known(self) -> dict[int, str]:
        """The names of the index in use and of the weights whose index is awaited, by step."""
        return ({self.index_step: self._index_name} if self._index_name else {}) | self._awaited

    def _is_available(self, name: str) -> bool:
        return self.exchange.indexes.exists(name) or self.exchange.weights.exists(name)

    def save_checkpoint(self, step: int, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
        """Commit a checkpoint, before the weights of its step; ``meta`` is restored as ``meta["trainer"]``."""
        awaited = sorted(self._awaited.values())
        fields = {"step": step, "index": self._index_name, "awaited": awaited, "trainer": dict(meta)}
        self._publish(self.exchange.checkpoints, step, files, fields)
        for version in self._pinned[:-1]:
            self.exchange.indexes.unpin(version)
        self._pinned = self._pinned[-1:]
        self._collect()

    def publish_weights(self, step: int, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> None:
        """Commit the weights of a step for the builders, unless this trainer's history has them already."""
        if step in self._known:
            return
        awaited = self.policy.adopt == "fixed_lag"
        self._publish(self.exchange.weights, step, files, {"step": step, "awaited": awaited, "trainer": dict(meta)})
        steps = sorted(self._awaited) if awaited else sorted(self._awaited)[-(KEEP - 1) :]
        self._awaited = {**{old: self._awaited[old] for old in steps}, step: version_name(self.fence, step)}
        if not awaited:
            self._collect()

    def _publish(self, store: VersionStore, step: int, files: Mapping[str, bytes], meta: dict[str, Any]) -> None:
        if not self._commit(store, version_name(self.fence, step), files, meta):
            raise FencedError(f"{store.kind} of step {step} exist already under fence {self.fence}, by another trainer")

    def _commit(self, store: VersionStore, name: str, files: Mapping[str, bytes], meta: dict[str, Any]) -> bool:
        try:
            return store.publish(name, files, meta, self.check_fence)
        except OSError:
            self.check_fence()  # a successor may have swept the draft
            raise

    def check_fence(self) -> None:
        """Raise FencedError if another trainer has taken over, or if the exchange of this fence was removed."""
        if (newest := self.exchange.newest_fence()) > self.fence:
            raise FencedError(f"trainer {newest} has taken over {self.exchange.root} from this one, {self.fence}")
        if newest < self.fence:
            raise FencedError(
                f"{self.exchange.root} was removed or emptied while this trainer used it; restore it, or run the stage "
                "again, which creates a new one"
            )

    def index_for(self, step: int) -> Version:
        """Adopt the index of the weights of exactly this step; wait up to ``builder_timeout`` seconds."""
        name = self._known[step]
        return self._adopt(self._wait(lambda: self._load_awaited(name), f"the index of step {step}"))

    def newest_index(self, step: int) -> Version | None:
        """Adopt an index newer than the one in use at ``step``, or return None if there is none (``as_soon_as_ready``).

        Wait if there is no index at all yet, or if the one in use is too stale.
        """
        index = self._newest()
        assert index is not None or not self.lacks_index, "publish the weights of this step first"
        if index is None and (not self._pinned or self._is_too_stale(step)):
            index = self._wait(self._newest, f"a newer index at step {step}" if self._pinned else "a first index")
        return self._adopt(index) if index else None

    @property
    def lacks_index(self) -> bool:
        """Whether no index is in use and none is awaited, so that weights must be published at any step."""
        return self._index_name is None and not self._awaited

    @property
    def index_step(self) -> int:
        """The step of the weights that the index in use was built from."""
        return step_of(self._index_name) if self._index_name else 0

    def _is_too_stale(self, step: int) -> bool:
        limit = self.policy.max_staleness_steps
        return limit is not None and bool(self._awaited) and step - self.index_step > limit

    def _newest(self) -> Version | None:
        for name in reversed(self.exchange.indexes.names()):
            is_own = name in self._known.values() or fence_of(name) == self.fence
            is_newer = not self._pinned or step_of(name) > self.index_step
            if is_own and is_newer and (index := self._load(name)):
                return index
        return None

    def _load(self, name: str) -> Version | None:
        if name in self.exchange.indexes.names():
            with suppress(FileNotFoundError, CorruptVersionError):  # a builder rebuilds it while its weights exist
                return self.exchange.load(self.exchange.indexes, name, self.mapped)
        return None

    def _load_awaited(self, name: str) -> Version | None:
        index = self._load(name)
        is_lost = index is None and not self._is_available(name)
        if is_lost and self._liveness.seconds_unchanged(name, None) >= self.exchange.grace:
            self.check_fence()
            raise ExchangeError(
                f"neither the index nor the weights {name} are left in {self.exchange.root} (damaged ones are "
                "quarantined as .bad); run the stage again: training resumes from the previous checkpoint"
            )
        return index

    def _adopt(self, index: Version) -> Version:
        assert not self._pinned or index.step >= self.index_step, "index steps never decrease within one process"
        self._pinned.append(replace(index, files={}))
        self._index_name = index.name
        self._awaited = {step: name for step, name in self._awaited.items() if step > index.step}
        self._collect()
        return index

    def _wait(self, attempt: Callable[[], T | None], subject: str) -> T:
        clock = self.exchange.clock
        start, last_message = clock.monotonic(), float("-inf")
        while (result := attempt()) is None:
            now = clock.monotonic()
            seconds = now - start
            builders = self.exchange.describe_builders()
            message = f"step {self._step}: waiting for {subject} for {seconds:.0f} s; {builders}"
            if seconds >= self.policy.builder_timeout:
                raise TimeoutError(message)
            if now - last_message >= MESSAGE_SECONDS:
                self.check_fence()
                self._on_wait(message, seconds)
                last_message = now
            self.beat(self._step, f"waiting for {subject}")
            clock.sleep(self.policy.poll)
        return result

    def beat(self, step: int, doing: str = "training") -> None:
        """Record the step in the heartbeat, which is written at most every 2 seconds; call this once a step."""
        self._step = step
        self.exchange.beat(doing, step=step, fence=self.fence, index=self._index_name)

    def finish(self, state: Literal["done", "failed"], message: str = "") -> None:
        """Record the outcome of the run, after which builders exit."""
        meta = {"state": state, "message": message}
        self._commit(self.exchange.outcomes, f"v-{self.fence:06d}", {}, meta)
        self.beat(self._step, state)

    def _collect(self) -> None:
        """Remove checkpoints and weights that are no longer needed; an error is logged and never ends the training."""
        exchange = self.exchange

        def needed_weights() -> set[str]:
            of_successors = {name for name in exchange.weights.names() if fence_of(name) > self.fence}
            return of_successors | set(self._awaited.values()) | exchange.needed_by_checkpoints()[1]

        try:
            self.check_fence()
            exchange.checkpoints.collect(lambda: set(exchange.checkpoints.names()[-KEEP:]))
            exchange.weights.collect(needed_weights)
        except OSError as error:
            log.warning("garbage collection in %s failed and is retried later: %s", exchange.root, error)
