"""The index builder's loop: embed the newest weights part by part, then merge the parts into an index.

It needs neither a leader nor a lock. Any number of builders may run: each takes the parts in another order and skips
those that others have committed; the first that finds all parts committed publishes the index, and the store drops a
second copy. A builder that is killed loses only the part that it was embedding.
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

from realmops.files import Clock, Files
from realmops.memory_map import Content
from realmops.refresh.exchange import Exchange, RunMismatchError, part_name, row_ranges
from realmops.refresh.versions import CorruptVersionError, Version

DONE, FAULT, MISCONFIGURED = 0, 1, 2  # exit codes; only after a fault a restart helps
COLLECT_SECONDS = 30.0  # between two garbage collections while nothing is built
RETRY_SECONDS = 5.0  # after an error of the volume

log = logging.getLogger(__name__)

EmbedRows = Callable[[int, int], dict[str, bytes]]
"""(first, end) -> the files of the part with rows [first, end); deterministic, byte for byte."""

Parts = Iterator[dict[str, bytes]]
"""The files of every part in row order; each part is read and verified when the iterator reaches it."""

Merge = Callable[[Version, Parts], tuple[dict[str, Content], dict[str, Any]]]
"""(weights, parts) -> files and manifest fields of the index."""


@dataclass(frozen=True)
class BuilderWork:
    """The work of a builder: ``embedder(weights)`` returns the function that embeds rows, ``merge`` makes the index."""

    rows: int
    part_rows: int
    embedder: Callable[[Version], EmbedRows]
    merge: Merge


class _Stop(BaseException):
    """SIGTERM or the end of the run; uncommitted work is dropped."""


class Builder:
    """One index builder on an open exchange."""

    def __init__(
        self, exchange: Exchange, work: BuilderWork, *, poll: float = 0.5,
        on_status: Callable[[str], None] = log.info,
    ) -> None:  # fmt: skip
        self.exchange, self.work, self.poll = exchange, work, poll
        self._on_status, self._last_status = on_status, ""
        self._last_collection = float("-inf")

    def run(self) -> None:
        """Build indexes until the trainer has finished; after an error of the volume, try again."""
        while True:
            try:
                self._stop_if_finished()
                built = self.build_next()
                self._collect_garbage(now=built)
                if not built:
                    self._report("waiting for weights")
                    self.exchange.clock.sleep(self.poll)
            except (OSError, CorruptVersionError) as error:
                self._report(f"starting over: {error}")
                is_removed = isinstance(error, (FileNotFoundError, CorruptVersionError))
                self.exchange.clock.sleep(self.poll if is_removed else RETRY_SECONDS)

    def build_next(self) -> bool:
        """Build one index; return False if no weights are due."""
        name = self._next_weights()
        if name is None:
            return False
        weights = self.exchange.load(self.exchange.weights, name)
        start = self.exchange.clock.monotonic()
        parts = row_ranges(self.work.rows, self.work.part_rows)
        try:
            self._embed(weights, parts)
            self._commit_index(weights, parts, start)
        finally:
            self.exchange.weights.unpin(weights)
        return True

    def _next_weights(self) -> str | None:
        """Return the oldest weights whose index the trainer awaits (``fixed_lag``), else the newest weights."""
        indexes = set(self.exchange.indexes.names())
        names = self.exchange.weights.names()
        unbuilt = [name for name in names if name not in indexes]
        for name in unbuilt:
            try:
                if self.exchange.weights.manifest(name).meta["awaited"]:
                    return name
            except CorruptVersionError:
                return name  # loading will quarantine it
        return names[-1] if unbuilt and unbuilt[-1] == names[-1] else None

    def _commit_index(self, weights: Version, parts: list[tuple[int, int]], start: float) -> None:
        """Merge the parts and publish them as the index generation of these weights."""
        self._report(f"merging the {len(parts)} parts of step {weights.step}")
        contents = (self.exchange.load_part(part_name(weights.name, *part), weights) for part in parts)
        files, meta = self.work.merge(weights, contents)
        seconds = self.exchange.clock.monotonic() - start
        fields = {"step": weights.step, "weights": weights.digest, "rows": self.work.rows, "seconds": seconds}
        is_first = self.exchange.indexes.publish(weights.name, files, {**meta, **fields})
        self._report(f"{'published' if is_first else 'another builder published'} the index of step {weights.step}")

    def _embed(self, weights: Version, parts: list[tuple[int, int]]) -> None:
        """Embed and commit the missing parts in an order seeded by the builder's name: two seldom embed the same."""
        embed_rows: EmbedRows | None = None
        shuffled = random.Random(self.exchange.holder).sample(parts, len(parts))
        for number, (first, end) in enumerate(shuffled, start=1):
            name = part_name(weights.name, first, end)
            if name in self.exchange.parts.names():
                continue
            self._stop_if_finished()
            self._report(f"embedding part {number} of {len(parts)} with the weights of step {weights.step}")
            embed_rows = embed_rows or self.work.embedder(weights)
            self.exchange.parts.publish(name, embed_rows(first, end), {"weights": weights.digest})

    def _stop_if_finished(self) -> None:
        if finished := self.exchange.finished():
            self._report(f"stopping: the trainer has finished ({finished})")
            raise _Stop

    def _collect_garbage(self, now: bool) -> None:
        moment = self.exchange.clock.monotonic()
        if now or moment - self._last_collection >= COLLECT_SECONDS:
            self._last_collection = moment
            self.exchange.check_identity()  # the exchange may have been removed, or replaced by another run's
            self.exchange.collect_garbage()

    def _report(self, doing: str) -> None:
        self.exchange.beat(doing)
        if doing != self._last_status:
            self._last_status = doing
            self._on_status(doing)


def run_builder(
    root: Path, identity: Mapping[str, Any], work: BuilderWork, *, name: str = "0",
    poll: float = 0.5, grace: float = 120.0, on_status: Callable[[str], None] = log.info,
    files: Files | None = None, clock: Clock | None = None,
) -> int:  # fmt: skip
    """Build indexes until the trainer finishes or SIGTERM is received; return the exit code of the process.

    ``name`` is unique on the exchange and the same after a restart; ``poll`` is the time between two checks for new
    weights, ``grace`` the time for which removed versions stay in the trash, both in seconds.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        exchange = Exchange.open(root, identity, f"builder-{name}", files=files, clock=clock, grace=grace)
        Builder(exchange, work, poll=poll, on_status=on_status).run()
    except _Stop:
        pass
    except RunMismatchError as error:
        log.error("%s", error)
        return MISCONFIGURED
    except Exception:
        log.exception("the index builder failed")
        return FAULT
    return DONE


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # further ones would interrupt the clean-up
    raise _Stop
