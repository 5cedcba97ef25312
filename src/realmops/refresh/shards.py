"""Sharded computation over all passages of a corpus, by a stage and by the index builders that help it.

The stage opens an exchange (exchange.py) with one version of weights, the model, and computes shards itself. While
several are missing, a small file offers them to index builders that follow it. Any number of them may help, on one
machine or on many that share the volume. The exchange has one more folder:

    <exchange>/claims/<first>   the lock of the shard that begins with that passage

A shard is leased, computed, and committed under ``parts/``. Its bytes depend on the model and on its passages, not on
the process that computes it. A process that is killed loses only its current shard; committed ones are reused. Leases
only save work: two processes that compute the same shard write the same bytes.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from realmops.artifacts import digest_of, try_lock, write_json
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import DTYPES, PRECISIONS, resolve_device
from realmops.refresh.exchange import Exchange, part_name, row_ranges
from realmops.refresh.versions import CorruptVersionError, Version, version_name
from realmops.search.embed import SHARD_ROWS, MakeShard, Progress, no_progress

MODEL = version_name(0, 0)
OUTCOME = "v-000000"
POLL_SECONDS = 0.1
LOG_SECONDS = 60.0  # between two messages of a wait

Work = Callable[[Snapshot, Mapping[str, bytes], torch.device, torch.dtype], MakeShard]
"""(snapshot, the model's files, device, dtype) -> the function that computes shards."""


@dataclass(frozen=True)
class ShardSettings:
    """The settings with which a stage computes its shards."""

    folder: Path  # of the exchanges; it survives a kill of the stage
    offer: Path  # the file that offers an exchange to index builders
    device: torch.device
    dtype: torch.dtype
    threads: int
    log: Callable[[str], None]


def compute_in_shards(
    settings: ShardSettings, name: str, work: Work, snapshot: Snapshot, model: Mapping[str, bytes],
    progress: Progress = no_progress,
) -> Iterator[dict[str, bytes]]:  # fmt: skip
    """Compute all shards of a corpus, with the help of index builders, and yield their files in order.

    Builders find ``work`` under ``name``; ``progress`` is called with numbers of passages that any process has done.
    """
    run = {  # on which all processes that compute shards must agree
        "work": name,
        "model": {file: hashlib.sha256(content).hexdigest() for file, content in sorted(model.items())},
        "device": settings.device.type,
        "precision": PRECISIONS[settings.dtype],
        "threads": settings.threads,
        "shard_rows": SHARD_ROWS,
        **corpus_identity(snapshot),
    }
    root = settings.folder / digest_of(run)[:16]
    exchange = Exchange.open(root, run, grace=0.0)
    (root / "claims").mkdir(exist_ok=True)
    version = None
    while version is None:
        exchange.weights.publish(MODEL, model, {"awaited": True, "step": 0})
        with suppress(CorruptVersionError):  # a damaged one is quarantined
            version = exchange.load(exchange.weights, MODEL)
    exchange.weights.unpin(version)
    shards = ShardWorker(exchange, snapshot, work, version, settings.device, settings.dtype, progress)
    if len(shards.missing()) > 1:
        write_json(settings.offer, {"exchange": str(exchange.root), "snapshot": str(snapshot.folder.absolute())})
    try:
        shards.make_all(settings.log)
        exchange.outcomes.publish(OUTCOME, {}, {"state": "done", "message": ""})
    finally:
        settings.offer.unlink(missing_ok=True)
    yield from shards.read(settings.log)


def corpus_identity(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "corpus_hash": snapshot.corpus_hash,
        "vocabulary_hash": snapshot.vocabulary_hash,
        "passages": len(snapshot),
        "block_wordpieces": snapshot.block_wordpieces,
    }


class ShardWorker:
    """All shards of one computation, as seen by one of the processes that compute them."""

    def __init__(
        self, exchange: Exchange, snapshot: Snapshot, work: Work, model: Version, device: torch.device,
        dtype: torch.dtype, progress: Progress = no_progress,
    ) -> None:  # fmt: skip
        assert exchange.run is not None
        self.exchange, self.snapshot, self.work, self.model = exchange, snapshot, work, model
        self.device, self.dtype, self.progress = device, dtype, progress
        self.ranges = row_ranges(exchange.run["passages"], exchange.run["shard_rows"])
        self._make: MakeShard | None = None
        self._reported: set[int] = set()  # first passages of the shards that ``progress`` was called for

    def missing(self) -> list[tuple[int, int]]:
        """Return the ranges of the shards that are not yet committed; report newly committed ones to ``progress``."""
        names = set(self.exchange.parts.names())
        missing = [(first, end) for first, end in self.ranges if part_name(MODEL, first, end) not in names]
        for first, end in self.ranges:
            if (first, end) not in missing and first not in self._reported:
                self._reported.add(first)
                self.progress(end - first)
        return missing

    def make_one(self) -> bool:
        """Compute one missing shard that no other process has leased; return False if there is none."""
        for first, end in self.missing():
            name = part_name(MODEL, first, end)
            with open(self.exchange.root / "claims" / f"{first:010d}", "ab") as claim:
                if try_lock(claim) is False or name in self.exchange.parts.names():
                    continue
                self.exchange.beat(f"computing passages {first} to {end - 1} of {len(self.snapshot)}")
                self._make = self._make or self.work(self.snapshot, self.model.files, self.device, self.dtype)
                self._reported.add(first)
                files = self._make(first, end, self.progress)
                self.exchange.parts.publish(name, files, {"weights": self.model.digest})
                return True
        return False

    def make_all(self, log: Callable[[str], None]) -> None:
        """Compute shards until none is missing, and wait for those that other processes compute."""
        clock = self.exchange.clock
        since = clock.monotonic()
        while missing := self.missing():
            if self.make_one():
                since = clock.monotonic()
                continue
            if clock.monotonic() - since >= LOG_SECONDS:
                since = clock.monotonic()
                log(f"waiting for {len(missing)} shards in {self.exchange.root}: {self.exchange.describe_builders()}")
            clock.sleep(POLL_SECONDS)

    def read(self, log: Callable[[str], None]) -> Iterator[dict[str, bytes]]:
        """Yield the files of every shard in order; a damaged shard is computed again."""
        for first, end in self.ranges:
            files = None
            while files is None:
                try:
                    files = self.exchange.load_part(part_name(MODEL, first, end), self.model)
                except (FileNotFoundError, CorruptVersionError):
                    self.exchange.check_identity()
                    self.make_all(log)
            yield files


def help_make_shards(
    exchange: Exchange, snapshot: Snapshot, works: Mapping[str, Work], log: Callable[[str], None]
) -> None:
    """Compute shards for a stage until none is missing; ValueError if its work or device is not supported here."""
    run = exchange.run
    assert run is not None
    if run["work"] not in works:
        raise ValueError(f"{exchange.root} offers {run['work']!r}, which this version of realmops does not support")
    device = resolve_device(run["device"])
    log(f"helping with {run['work']}: {exchange.root}")
    while MODEL not in exchange.weights.names():
        exchange.check_identity()  # the stage may have removed it
        exchange.clock.sleep(POLL_SECONDS)
    model = exchange.weights.load(MODEL)
    exchange.weights.unpin(model)
    shards = ShardWorker(exchange, snapshot, works[run["work"]], model, device, DTYPES[run["precision"]])
    while exchange.finished() is None:
        if not shards.make_one():
            exchange.beat("waiting for shards")
            exchange.clock.sleep(POLL_SECONDS)
