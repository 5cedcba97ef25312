"""The index builder's loop: newest weights -> parts, committed one by one -> an index.

It needs neither a leader nor a lock. Any number of builders may run: each takes the parts in another order, skips what
others have committed, and whoever finds all parts there publishes the index; a second one is dropped by the
store. A builder that is killed loses the part in its hand.
"""

import logging
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from realmops.refresh.child_processes import LONGEST_PAUSE
from realmops.refresh.exchange import Exchange, OtherRun, part_name, ranges
from realmops.refresh.shared_files import Clock, Files
from realmops.refresh.versions import Damaged, Version
from realmops.search.mapped import Content

DONE, FAULT, MISCONFIGURED = 0, 1, 2  # exit codes: do not restart, restart, do not restart
COLLECT_SECONDS = 30.0
MOST_FAILURES = 5

log = logging.getLogger(__name__)

EmbedRows = Callable[[int, int], dict[str, bytes]]
"""(first, end) -> the files of the part that holds rows [first, end); the same bytes every time."""

Parts = Iterator[dict[str, bytes]]
"""The files of every part, in the order of the rows, read and verified when it is asked for."""

Merge = Callable[[Version, Parts], tuple[dict[str, Content], dict[str, Any]]]
"""(weights, parts) -> files and description of the index."""


@dataclass(frozen=True)
class BuilderWork:
    """What a builder does with weights: ``embedder(weights)`` gives the function that embeds rows."""

    rows: int
    part_rows: int
    embedder: Callable[[Version], EmbedRows]
    merge: Merge


class _Stop(BaseException):
    """SIGTERM or the end of the run: whatever is in hand is dropped."""


class Builder:
    """One builder on an open exchange."""

    def __init__(
        self, exchange: Exchange, work: BuilderWork, *, poll: float = 0.5,
        on_status: Callable[[str], None] = log.info,
    ) -> None:  # fmt: skip
        self.exchange, self.work, self.poll = exchange, work, poll
        self._on_status, self._said = on_status, ""
        self._last_collection = float("-inf")

    def run(self) -> None:
        """Build until the trainer has finished; OSError when the volume fails on."""
        failures = 0
        while True:
            try:
                self._stop_at_the_end()
                built = self.build_next()
                self._collect(now=built or failures > 0)
                failures = 0
                if not built:
                    self._say("waiting for weights")
                    self.exchange.clock.sleep(self.poll)
            except (FileNotFoundError, Damaged) as error:  # the weights or parts in hand are gone: look again
                self._say(f"begins again: {error}")
                self.exchange.clock.sleep(self.poll)
            except OSError as error:
                failures += 1
                if failures == MOST_FAILURES:
                    raise
                self._say(f"tries again after a failure: {error}")
                self.exchange.clock.sleep(min(self.poll * 2**failures, LONGEST_PAUSE))

    def build_next(self) -> bool:
        """Build the index of the weights that are next; False when there is nothing to build."""
        name = self._next_weights()
        if name is None:
            return False
        weights = self.exchange.load(self.exchange.weights, name)
        try:
            self._build(weights)
        finally:
            self.exchange.weights.unpin(weights)
        return True

    def _next_weights(self) -> str | None:
        """The oldest weights whose index the trainer waits for in any case, else the newest."""
        indexes = set(self.exchange.indexes.names())
        names = self.exchange.weights.names()
        open_names = [name for name in names if name not in indexes]
        for name in open_names:
            try:
                if self.exchange.weights.manifest(name).meta["awaited"]:
                    return name
            except Damaged:
                return name  # loading it sets it aside
        return names[-1] if open_names and open_names[-1] == names[-1] else None

    def _build(self, weights: Version) -> None:
        start = self.exchange.clock.monotonic()
        parts = ranges(self.work.rows, self.work.part_rows)
        self._embed(weights, parts)
        self._commit_index(weights, parts, start)

    def _commit_index(self, weights: Version, parts: list[tuple[int, int]], start: float) -> None:
        """Merge the parts and publish them as the index generation of these weights (``Versions.publish``)."""
        self._say(f"merging the {len(parts)} parts of step {weights.step}")
        read = (self.exchange.load_part(part_name(weights.name, *part), weights) for part in parts)
        files, meta = self.work.merge(weights, read)
        seconds = self.exchange.clock.monotonic() - start
        facts = {"step": weights.step, "weights": weights.digest, "rows": self.work.rows, "seconds": seconds}
        first = self.exchange.indexes.publish(weights.name, files, {**meta, **facts})
        self._say(f"{'published' if first else 'another builder published'} the index of step {weights.step}")

    def _embed(self, weights: Version, parts: list[tuple[int, int]]) -> None:
        """Commit the parts that are missing, in an order of this builder's own: two of them seldom take the same."""
        embed_rows: EmbedRows | None = None
        mine = random.Random(self.exchange.holder).sample(parts, len(parts))
        for number, (first, end) in enumerate(mine, start=1):
            name = part_name(weights.name, first, end)
            if name in self.exchange.parts.names():
                continue
            self._stop_at_the_end()
            self._say(f"embedding part {number} of {len(parts)} with the weights of step {weights.step}")
            embed_rows = embed_rows or self.work.embedder(weights)
            self.exchange.parts.publish(name, embed_rows(first, end), {"weights": weights.digest})

    def _stop_at_the_end(self) -> None:
        if finished := self.exchange.finished():
            self._say(f"ends: the trainer has finished ({finished})")
            raise _Stop

    def _collect(self, now: bool) -> None:
        moment = self.exchange.clock.monotonic()
        if now or moment - self._last_collection >= COLLECT_SECONDS:
            self._last_collection = moment
            self.exchange.check_card()  # it may be gone, or another run's by now
            self.exchange.collect_indexes()

    def _say(self, doing: str) -> None:
        self.exchange.beat(doing)
        if doing != self._said:
            self._said = doing
            self._on_status(doing)


def run_builder(
    root: Path, identity: Mapping[str, Any], work: BuilderWork, *, name: str = "0",
    poll: float = 0.5, grace: float = 120.0, on_status: Callable[[str], None] = log.info,
    files: Files | None = None, clock: Clock | None = None,
) -> int:  # fmt: skip
    """Build indexes until the trainer finishes; the exit code of the process.

    0: the trainer has finished, or SIGTERM came. 1: a fault, worth a restart. 2: the exchange belongs to a run of
    another identity, or the settings are wrong.
    ``name`` is this builder's own among several and the same after a restart.
    """
    clock = clock or Clock()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        exchange = None
        while exchange is None:
            try:
                exchange = Exchange.open(root, identity, f"builder-{name}", files=files, clock=clock, grace=grace)
            except FileNotFoundError as error:
                on_status(f"waiting: {error}")
                clock.sleep(poll)
        Builder(exchange, work, poll=poll, on_status=on_status).run()
    except _Stop:
        pass
    except OtherRun as error:
        log.error("%s", error)
        return MISCONFIGURED
    except Exception:
        log.exception("the index builder failed")
        return FAULT
    return DONE


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: what is in hand is dropped now
    raise _Stop
