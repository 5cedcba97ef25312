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

A trainer of a lower fence acknowledges nothing once a higher one exists, and cannot write over its successor: the fence
is in every name. Which indexes belong to a trainer's own past is read off its checkpoint, not guessed.
"""

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from realmops import __version__
from realmops.refresh.heartbeat import Ages, Sign
from realmops.refresh.shared_files import Clock, Files, free_bytes, modified, writable
from realmops.refresh.versions import MANIFEST_LIMIT, ROLES, Damaged, Version, Versions, check_run
from realmops.search.mapped import SPARE_ROOM

CARD = "v-000000"
KINDS = ("run", "checkpoints", "weights", "parts", "indexes", "finished")
KEPT = 2  # checkpoints, and index generations beyond those that somebody needs
BEAT_SECONDS = 2.0
FEW_BYTES = 1 << 20
SILENT_SECONDS = 60.0  # without a sign of life: people are told; also as old as a listing on NFS may be

log = logging.getLogger(__name__)


class ExchangeError(RuntimeError):
    """The exchange is in a state that a person has to mend; the message says how."""


class OtherRun(ValueError):
    """The exchange belongs to a run of another identity, or to another version of realmops."""


class Fenced(ExchangeError):
    """A newer trainer has taken over this exchange; this one must end without writing anything more."""


class Exchange:
    """The stores in one exchange folder, seen by one holder: ``trainer`` or ``builder-<id>``."""

    def __init__(
        self, root: Path, run: dict[str, Any] | None, holder: str, *, files: Files | None = None,
        clock: Clock | None = None, grace: float = 120.0,
    ) -> None:  # fmt: skip
        self.root, self.run, self.holder = root, run, holder
        self.files, self.clock = files or Files(), clock or Clock()
        self.grace = grace
        self._ages = Ages(self.clock)
        self._since = self.clock.unix()
        path = self.root / "alive" / holder.split("-")[0] / f"{holder}.json"
        self._sign = Sign(path, BEAT_SECONDS, self.files, self.clock)

        self.stores = {kind: Versions(root, kind, run, holder, self.files, self.clock, grace=grace) for kind in KINDS}
        _, self.checkpoints, self.weights, self.parts, self.indexes, self.last_words = self.stores.values()
        self.card = Versions(root, "run", None, holder, self.files, self.clock)  # reads the card of any run

    @classmethod
    def open(
        cls, root: Path, identity: Mapping[str, Any], holder: str = "trainer", *, files: Files | None = None,
        clock: Clock | None = None, grace: float = 120.0,
    ) -> Self:  # fmt: skip
        """The exchange of the run with this identity (JSON scalars by name), created by its trainer.

        Raises ValueError with the field and both values when the folder belongs to another run, and
        FileNotFoundError when a builder comes before the trainer.
        """
        exchange = cls(Path(root).absolute(), dict(identity), holder, files=files, clock=clock, grace=grace)
        if holder == "trainer":
            exchange._create()
        exchange.check_card()
        for store in exchange.stores.values():
            store.sweep_own()
        return exchange

    def _create(self) -> None:
        tops = [self.root / top for top in ("fences", *KINDS, "pins", "alive")]
        for folder in (*tops, *(self.root / top / role for top in ("pins", "alive") for role in ROLES)):
            self._make(folder)
        if CARD not in self.card.names():
            self.stores["run"].publish(CARD, {}, {})

    def _make(self, folder: Path) -> None:
        if folder == folder.parent or folder.name in self.files.listdir(folder.parent):
            return
        self._make(folder.parent)
        with suppress(FileExistsError):
            self.files.mkdir(folder)
        self.files.sync_folder(folder.parent)

    def check_card(self) -> None:
        """OtherRun when the exchange is another run's, FileNotFoundError when there is none, or none any more."""
        if CARD not in self.card.names():
            raise FileNotFoundError(f"{self.root} is no exchange yet: its trainer has not started")
        assert self.run is not None
        try:
            check_run(self.card.manifest(CARD).run, self.run)
        except ValueError as error:
            raise OtherRun(
                f"the exchange {self.root} belongs to another run: {error}; give this run another exchange "
                "folder, or start trainer and builder with the same corpus, vocabulary and parameters"
            ) from None
        except Damaged as error:
            raise OtherRun(f"the identity card of the exchange {self.root} cannot be used: {error}") from None

    # Fences and last words

    def newest_fence(self) -> int:
        names = self.files.listdir(self.root / "fences")
        return max((int(name) for name in names if name.isdigit()), default=0)

    def take_fence(self) -> int:
        """The number of a new trainer's life, higher than all before."""
        fence = self.newest_fence() + 1
        while True:
            with suppress(FileExistsError):
                self.files.mkdir(self.root / "fences" / f"{fence:06d}")
                self.files.sync_folder(self.root / "fences")
                return fence
            fence += 1

    def finished(self) -> str | None:
        """``done`` or ``failed`` with its message once the newest trainer has said its last word."""
        name = f"v-{self.newest_fence():06d}"
        if name not in self.last_words.names():
            return None
        try:
            meta = self.last_words.manifest(name).meta
            return f"{meta['state']}: {meta['message']}" if meta["message"] else str(meta["state"])
        except (Damaged, FileNotFoundError, KeyError):
            return "finished, with a last word that cannot be read"

    # Signs of life

    def beat(self, doing: str, **fields: Any) -> None:
        """Say what this process does; at most every 2 seconds unless it does something else."""
        try:
            self._sign.give(doing, holder=self.holder, since_unix=self._since, realmops=__version__, **fields)
        except OSError as error:  # work goes on without signs of life
            log.warning("no sign of life could be written: %s", error)

    def signs(self, role: str) -> list[tuple[str, float, dict[str, Any]]]:
        """Per holder of a role: its name, the seconds since its sign of life changed, and that sign."""
        folder = self.root / "alive" / role
        found = []
        for entry in self.files.listdir(folder):
            if entry.startswith(".") or not entry.endswith(".json"):
                continue
            try:
                content = self.files.read(folder / entry, MANIFEST_LIMIT)
                sign = json.loads(content)
                sign["doing"] = str(sign["doing"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                content, sign = b"", {"doing": "its sign of life cannot be read"}
            found.append((entry.removesuffix(".json"), self._ages.age(f"alive {role} {entry}", content), sign))
        return found

    def builders_in_words(self) -> str:
        signs = [
            f"{holder} ({sign['doing']}) last gave a sign of life {seconds:.0f} s ago"
            for holder, seconds, sign in self.signs("builder")
        ]
        nobody = "no builder has ever been seen here: one is starting, or start one with `realmops index-builder`"
        return "; ".join(signs) or nobody

    # Reading

    def load(self, store: Versions, name: str, mapped: Collection[str] = ()) -> Version:
        """As ``store.load``; a version that is damaged is set aside before, unless this is another run's exchange."""
        try:
            return store.load(name, mapped=mapped)
        except Damaged as error:
            self.check_card()
            store.set_aside(name, str(error))
            raise

    def load_part(self, name: str, weights: Version) -> dict[str, bytes]:
        """The files of a part; one that is damaged, or was made with other weights, is set aside and raises Damaged."""
        part = self.load(self.parts, name)
        self.parts.unpin(part)
        if part.meta != {"weights": weights.digest}:
            self.parts.set_aside(name, "it was made with other weights of the same name")
            raise Damaged(f"{name} was made with other weights of the same name")
        return part.files

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


def ranges(rows: int, size: int) -> list[tuple[int, int]]:
    """The first row and the end of each part of ``size`` rows."""
    return [(first, min(first + size, rows)) for first in range(0, rows, size)]


def inspect(root: Path, clock: Clock | None = None) -> list[str]:
    """The state of an exchange in sentences, what is wrong last; nothing is written (``realmops doctor``).

    Times are by the clock of this machine and that of the volume, so only as right as the two agree.
    """
    clock = clock or Clock()
    exchange = Exchange(Path(root).absolute(), None, "builder-doctor", clock=clock)
    if CARD not in exchange.card.names():
        return [f"{root} is no exchange: no trainer has started here, or it was removed"]
    problems: list[str] = []
    newest = {
        kind: _newest_sound(exchange.stores[kind], problems) for kind in ("run", "checkpoints", "weights", "indexes")
    }
    for kind, store in exchange.stores.items():
        problems += [f"{kind}: {entry} was set aside as damaged or superseded" for entry in store.bad()]
    card = newest["run"].run if newest["run"] else {}
    indexes, finished = exchange.indexes.names(), exchange.finished()
    awaited = [name for name in exchange.weights.names() if name not in indexes and "work" not in card]
    lines = [
        f"{kind}: newest is {found.name if found else 'not there yet'}"
        for kind, found in newest.items()
        if kind != "run"
    ]
    for role in ROLES:
        signs = exchange.signs(role)
        lines += [] if signs else [f"no {role} has ever been seen"]
        for holder, _, sign in signs:
            try:
                sign |= {"holder": holder, "written": modified(exchange.root / "alive" / role / f"{holder}.json")}
                running, silent = sign["unix"] - sign["since_unix"], clock.unix() - sign["written"]
            except (OSError, KeyError, TypeError):
                lines.append(f"{holder}: {sign['doing']}")
                continue
            lines.append(
                f"{holder}: {sign['doing']}, running for {running:.0f} s, last sign of life {silent:.0f} s ago"
            )
            problems += _problems_of(sign, silent, exchange, None if finished else awaited)
    if "work" in card:  # shards.py
        wanted = -(-card["passages"] // card["shard_rows"])
        lines.append(f"{card['work']}: {len(exchange.parts.names())} of {wanted} shards are committed")
    lines += [f"awaited: the index of {name}" for name in awaited]
    lines += [f"finished: {finished}"] if finished else []
    return lines + problems + list(_problems_of_volume(exchange, newest.values()))


def _newest_sound(store: Versions, problems: list[str]) -> Version | None:
    for name in reversed(store.names()):
        try:
            return store.manifest(name)
        except Damaged as error:
            problems.append(f"{store.kind}: {error}")
        except OSError:
            continue  # removed while we looked
    return None


def _problems_of(
    sign: Mapping[str, Any], silent: float, exchange: Exchange, awaited: list[str] | None
) -> Iterator[str]:
    """What is wrong with whoever gave a sign of life, ``silent`` seconds ago.

    ``awaited`` are the weights without index, None after the end.
    """
    who, ahead = sign["holder"], sign["unix"] - sign["written"]
    if silent > SILENT_SECONDS and awaited is not None:
        advice = (
            "run its stage again: it goes on from the newest checkpoint"
            if who == "trainer"
            else "start one with `realmops index-builder` unless another works"
        )
        yield f"{who} has been silent for {silent:.0f} s: it was killed, stopped or cut off; {advice}"
    elif awaited and sign["doing"] == "waiting for weights":
        with suppress(OSError):  # removed while we looked
            written, first = min((modified(exchange.weights.folder / name), name) for name in awaited)
            if exchange.clock.unix() - written > SILENT_SECONDS:
                yield f"{who} waits for weights and does not see {first}: its listing of the volume is old, or hangs"
    if abs(ahead) > SILENT_SECONDS:
        way = "ahead of" if ahead > 0 else "behind"
        yield (
            f"the clock of {who} is {abs(ahead):.0f} s {way} the volume's: times in logs are wrong; nothing else goes "
            "by clocks"
        )
    if silent < -SILENT_SECONDS:
        yield f"the clock of this machine is {-silent:.0f} s behind the volume's"
    if sign.get("fence") and sign["fence"] != exchange.newest_fence():
        yield (
            f"{who} {sign['fence']} is seen here, but {exchange.newest_fence()} has taken over: two trainers share "
            "this exchange; the older one ends at its next checkpoint"
        )
    if sign.get("realmops") not in (None, __version__):
        yield f"{who} is realmops {sign['realmops']}, this is {__version__}: use one version"


def _problems_of_volume(exchange: Exchange, newest: Iterable[Version | None]) -> Iterator[str]:
    free = free_bytes(exchange.root)
    sizes = [sum(file["bytes"] for file in version.listing.values()) for version in newest if version]
    wanted = SPARE_ROOM * max(sizes, default=0)
    if free < max(wanted, FEW_BYTES):
        yield (
            f"the volume is full: {free / 1e6:.1f} MB are free and the largest version here wants "
            f"{wanted / 1e6:.1f} MB; make room"
        )
    if not writable(exchange.root):
        yield f"{exchange.root} cannot be written: the volume is read-only, or belongs to another user"
