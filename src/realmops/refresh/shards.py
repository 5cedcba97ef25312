"""Something made of every passage of a corpus, in shards: by a stage, and by whoever helps it.

The stage opens an exchange (exchange.py) with one version of weights, the model, and makes shards itself. While some
are missing, a small file offers them; index builders that follow it help. Any number may help, on one machine or on
many that share the volume. Beside what an exchange has lies

    <exchange>/claims/<first>/   who makes the shard that begins with that passage (lease.py)

A shard is claimed, made, and committed under ``parts/``. Its bytes depend on the model and on its own passages, not
on who makes it, and whose life ends loses the shard in hand only: what is committed is used again. A claim is there
to save work. Two who make the same shard, as after a claim that was given up for dead, make the same bytes.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from realmops.artifacts import digest_of, write_json
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import DTYPES, PRECISIONS, resolve_device
from realmops.refresh.exchange import Exchange, part_name, ranges
from realmops.refresh.heartbeat import Ages
from realmops.refresh.lease import claimed_if_free
from realmops.refresh.versions import Damaged, Version, version_name
from realmops.search.embed import SHARD_ROWS, MakeShard, Progress, no_progress

MODEL = version_name(0, 0)
LAST_WORD = "v-000000"
LOOK_SECONDS = 0.1
SAID_SECONDS = 60.0

Work = Callable[[Snapshot, Mapping[str, bytes], torch.device, torch.dtype], MakeShard]
"""(snapshot, the model's files, device, dtype) -> the function that makes shards."""


@dataclass(frozen=True)
class ShardSettings:
    """Where a stage has its shards made, and in which numbers."""

    folder: Path  # for exchanges; it outlives a kill
    offer: Path  # the file that tells builders which exchange they can help with
    device: torch.device
    dtype: torch.dtype
    threads: int
    say: Callable[[str], None]


def in_shards(
    place: ShardSettings, name: str, work: Work, snapshot: Snapshot, model: Mapping[str, bytes],
    progress: Progress = no_progress,
) -> Iterator[dict[str, bytes]]:  # fmt: skip
    """The files of every shard of a corpus, in order, when all have been made.

    ``name`` says to builders which work it is. ``progress`` is told of passages, whoever has done them.
    """
    card = identity(name, snapshot, model, place)
    root = place.folder / digest_of(card)[:16]
    exchange = Exchange.open(root, card, grace=0.0)
    (root / "claims").mkdir(exist_ok=True)
    shards = Shards(exchange, snapshot, work, _published(exchange, model), place.device, place.dtype, progress)
    if len(shards.missing()) > 1:
        write_json(place.offer, {"exchange": str(exchange.root), "snapshot": str(snapshot.folder.absolute())})
    try:
        shards.make_all(place.say)
        exchange.last_words.publish(LAST_WORD, {}, {"state": "done", "message": ""})
    finally:
        place.offer.unlink(missing_ok=True)
    yield from shards.read(place.say)


def identity(name: str, snapshot: Snapshot, model: Mapping[str, bytes], place: ShardSettings) -> dict[str, Any]:
    """What all who make shards must agree on."""
    return {
        "work": name,
        "model": {file: hashlib.sha256(content).hexdigest() for file, content in sorted(model.items())},
        "device": place.device.type,
        "precision": PRECISIONS[place.dtype],
        "threads": place.threads,
        "shard_rows": SHARD_ROWS,
        **facts_of(snapshot),
    }


def facts_of(snapshot: Snapshot) -> dict[str, Any]:
    """What identities say of a corpus."""
    return {
        "corpus_hash": snapshot.corpus_hash,
        "vocabulary_hash": snapshot.vocabulary_hash,
        "passages": len(snapshot),
        "block_wordpieces": snapshot.block_wordpieces,
    }


def _published(exchange: Exchange, model: Mapping[str, bytes]) -> Version:
    """The model as it is on the exchange; one that is damaged there is put there again."""
    while True:
        exchange.weights.publish(MODEL, model, {"awaited": True, "step": 0})
        with suppress(Damaged):
            version = exchange.load(exchange.weights, MODEL)
            exchange.weights.unpin(version)
            return version


class Shards:
    """The shards of one piece of work, as seen by one of those who make them."""

    def __init__(
        self, exchange: Exchange, snapshot: Snapshot, work: Work, model: Version, device: torch.device,
        dtype: torch.dtype, progress: Progress = no_progress,
    ) -> None:  # fmt: skip
        assert exchange.run is not None
        self.exchange, self.snapshot, self.work, self.model = exchange, snapshot, work, model
        self.device, self.dtype, self.progress = device, dtype, progress
        self.ranges = ranges(exchange.run["passages"], exchange.run["shard_rows"])
        self._make: MakeShard | None = None
        self._ages = Ages(exchange.clock)
        self._told: set[int] = set()  # first passages of those that ``progress`` knows of

    def missing(self) -> list[tuple[int, int]]:
        """The shards that nobody has committed yet."""
        names = set(self.exchange.parts.names())
        missing = [(first, end) for first, end in self.ranges if part_name(MODEL, first, end) not in names]
        for first, end in self.ranges:
            if (first, end) not in missing and first not in self._told:
                self._told.add(first)
                self.progress(end - first)
        return missing

    def make_one(self) -> bool:
        """Make a shard that is missing and that nobody else makes; False where there is none."""
        for first, end in self.missing():
            name = part_name(MODEL, first, end)
            with claimed_if_free(self.exchange.root / "claims" / f"{first:010d}", self._ages) as claim:
                if claim is None or name in self.exchange.parts.names():
                    continue
                self.exchange.beat(f"makes the passages {first} to {end - 1} of {len(self.snapshot)}")
                self._make = self._make or self.work(self.snapshot, self.model.files, self.device, self.dtype)
                self._told.add(first)
                files = self._make(first, end, self.progress)
                self.exchange.parts.publish(name, files, {"weights": self.model.digest})
                return True
        return False

    def make_all(self, say: Callable[[str], None]) -> None:
        """Make shards until none is missing, waiting for those that others make."""
        clock = self.exchange.clock
        since = clock.monotonic()
        while missing := self.missing():
            if self.make_one():
                since = clock.monotonic()
                continue
            if clock.monotonic() - since >= SAID_SECONDS:
                since = clock.monotonic()
                say(f"waiting for {len(missing)} shards in {self.exchange.root}: {self.exchange.builders_in_words()}")
            clock.sleep(LOOK_SECONDS)

    def read(self, say: Callable[[str], None]) -> Iterator[dict[str, bytes]]:
        """The files of every shard in order, each read when it is asked for; one that is damaged is made again."""
        for first, end in self.ranges:
            files = None
            while files is None:
                try:
                    files = self.exchange.load_part(part_name(MODEL, first, end), self.model)
                except (FileNotFoundError, Damaged):
                    self.exchange.check_card()
                    self.make_all(say)
            yield files


def help_with(exchange: Exchange, snapshot: Snapshot, works: Mapping[str, Work], say: Callable[[str], None]) -> None:
    """Make shards of the work that an exchange offers until its stage has all; ValueError where that cannot be."""
    card = exchange.run
    assert card is not None
    if card["work"] not in works:
        raise ValueError(f"{exchange.root} wants {card['work']!r}, which this version of realmops does not know")
    device = resolve_device(card["device"])
    say(f"helps with {card['work']}: {exchange.root}")
    while MODEL not in exchange.weights.names():
        exchange.check_card()  # it may be gone by now
        exchange.clock.sleep(LOOK_SECONDS)
    model = exchange.weights.load(MODEL)
    exchange.weights.unpin(model)
    shards = Shards(exchange, snapshot, works[card["work"]], model, device, DTYPES[card["precision"]])
    while exchange.finished() is None:
        if not shards.make_one():
            exchange.beat("waiting for shards")
            exchange.clock.sleep(LOOK_SECONDS)
