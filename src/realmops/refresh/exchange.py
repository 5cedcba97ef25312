"""The exchange: the shared folder through which a trainer and index builders pass weights and indexes to each other.

The processes have no other connection. On a laptop the folder is local, in a cluster it is on a volume that all pods
mount, often NFS. This module is the only one that knows its layout. All guarantees hold when any process is killed at
any instruction, the disk is full, two builders work at once, or a suspended trainer resumes next to its successor.

    <root>/run/v-000000/         the identity of the run: one manifest, written once, compared by every process
    <root>/fences/000007/        the fence number of one trainer process, taken by mkdir, never removed
    <root>/checkpoints/v-000007-00000042/            by trainer 7 at step 42; names the index in use and the awaited
    <root>/weights/v-000007-00000042/                retriever parameters of step 42
    <root>/parts/v-000007-00000042-<first>-<end>/    the rows [first, end) embedded with these weights, by builders
    <root>/indexes/v-000007-00000042/                the index of these weights
    <root>/finished/v-000007/    the outcome of trainer 7: done or failed
    <root>/pins/<role>/<kind>.<version>.<holder>.<nonce>          a reader uses this version
    <root>/alive/<role>/<holder>.json                             a heartbeat, for messages and to expire pins

Every ``v-`` folder is an immutable version (versions.py), so every kind has one parent folder and one mount.
The trainer removes checkpoints and weights, builders remove parts and indexes. The retention is

    checkpoints  the newest 2
    weights      those whose index this trainer or a kept checkpoint awaits
    indexes      the newest 2, those whose weights are kept, those that a kept checkpoint names, pinned ones
    parts        those of kept weights that have no index yet

A trainer with a lower fence number commits nothing once a higher number exists, and cannot overwrite its successor,
since every name contains the fence number. A trainer reads from its checkpoint which indexes belong to its history.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from realmops import __version__
from realmops.files import Clock, Files
from realmops.refresh.heartbeat import Heartbeat, LivenessTracker
from realmops.refresh.versions import MANIFEST_LIMIT, ROLES, CorruptVersionError, Version, VersionStore

IDENTITY_VERSION = "v-000000"
KINDS = ("run", "checkpoints", "weights", "parts", "indexes", "finished")
KEEP = 2  # newest checkpoints, and newest index generations in addition to those in use
HEARTBEAT_SECONDS = 2.0
SILENT_SECONDS = 60.0  # without a heartbeat, until it is reported; also the greatest age of a listing on NFS


class ExchangeError(RuntimeError):
    """The exchange is in a state that needs manual repair, which the message describes."""


class RunMismatchError(ValueError):
    """The exchange belongs to a run with another identity, or to another version of realmops."""


class FencedError(ExchangeError):
    """A newer trainer has taken over this exchange; this one must end without further writes."""


class Exchange:
    """The stores of one exchange folder, as seen by one holder: ``trainer`` or ``builder-<id>``."""

    def __init__(
        self, root: Path, run: dict[str, Any] | None, holder: str, *, files: Files | None = None,
        clock: Clock | None = None, grace: float = 120.0,
    ) -> None:  # fmt: skip
        self.root, self.run, self.holder = root, run, holder
        self.files, self.clock = files or Files(), clock or Clock()
        self.grace = grace
        self._liveness = LivenessTracker(self.clock)
        self._since = self.clock.unix()
        path = self.root / "alive" / holder.split("-")[0] / f"{holder}.json"
        self._heartbeat = Heartbeat(path, HEARTBEAT_SECONDS, self.files, self.clock)

        self.stores = {
            kind: VersionStore(root, kind, run, holder, self.files, self.clock, grace=grace) for kind in KINDS
        }
        self.identity, self.checkpoints, self.weights, self.parts, self.indexes, self.outcomes = self.stores.values()

    @classmethod
    def open(
        cls, root: Path, identity: Mapping[str, Any], holder: str = "trainer", *, files: Files | None = None,
        clock: Clock | None = None, grace: float = 120.0,
    ) -> Self:  # fmt: skip
        """Open the exchange of the run with this ``identity`` (JSON scalars by name); its trainer creates it.

        RunMismatchError with both values if the folder belongs to another run, FileNotFoundError for a builder that
        comes before the trainer.
        """
        exchange = cls(Path(root).absolute(), dict(identity), holder, files=files, clock=clock, grace=grace)
        if holder == "trainer":
            exchange._create()
        exchange.check_identity()
        for store in exchange.stores.values():
            store.sweep_own()
        return exchange

    def _create(self) -> None:
        tops = [self.root / top for top in ("fences", *KINDS, "pins", "alive")]
        for folder in (*tops, *(self.root / top / role for top in ("pins", "alive") for role in ROLES)):
            self.files.make_folder(folder)
        # A trainer that was killed between mkdir and sync left names that a power cut would take.
        for folder in (self.root / "pins", self.root / "alive", self.root, *self.root.parents):
            with suppress(PermissionError):  # a folder above the volume
                self.files.sync_folder(folder)
        if IDENTITY_VERSION not in self.identity.names():
            if foreign := [store.folder / name for store in self.stores.values() for name in store.names()]:
                raise RunMismatchError(f"{foreign[0]} is of no exchange; give this run another exchange folder")
            self.identity.publish(IDENTITY_VERSION, {}, {})

    def check_identity(self) -> None:
        """Raise RunMismatchError if the exchange is another run's, FileNotFoundError if it is not there (any more)."""
        if IDENTITY_VERSION not in self.identity.names():
            raise FileNotFoundError(f"{self.root} is no exchange yet: its trainer has not started")
        try:
            self.identity.manifest(IDENTITY_VERSION)
        except CorruptVersionError as error:
            raise RunMismatchError(
                f"the exchange belongs to another run: {error}; give this run another exchange folder, or start "
                "trainer and builder with the same corpus, vocabulary and parameters"
            ) from None

    # Fences and outcomes

    def newest_fence(self) -> int:
        names = self.files.listdir(self.root / "fences")
        return max((int(name) for name in names if name.isdigit()), default=0)

    def take_fence(self) -> int:
        """Take the next fence number for a new trainer, higher than all before."""
        fence = self.newest_fence() + 1
        while True:
            with suppress(FileExistsError):
                self.files.mkdir(self.root / "fences" / f"{fence:06d}")
                self.files.sync_folder(self.root / "fences")
                return fence
            fence += 1

    def finished(self) -> str | None:
        """Return ``done`` or ``failed: message`` once the newest trainer has recorded its outcome, else None."""
        name = f"v-{self.newest_fence():06d}"
        if name not in self.outcomes.names():
            return None
        with suppress(CorruptVersionError, FileNotFoundError):
            meta = self.outcomes.manifest(name).meta
            return f"{meta['state']}: {meta['message']}" if meta["message"] else str(meta["state"])
        return "finished, with an outcome that cannot be read"

    # Heartbeats

    def beat(self, doing: str, **fields: Any) -> None:
        """Write a heartbeat, at most every ``HEARTBEAT_SECONDS`` unless ``doing`` has changed."""
        self._heartbeat.beat(doing, holder=self.holder, since_unix=self._since, realmops=__version__, **fields)

    def heartbeats(self, role: str) -> list[tuple[str, float, dict[str, Any]]]:
        """Return name, seconds since the last change, and heartbeat of each holder of a role."""
        folder = self.root / "alive" / role
        heartbeats = []
        for entry in self.files.listdir(folder):
            if entry.startswith(".") or not entry.endswith(".json"):
                continue
            try:
                content = self.files.read(folder / entry, MANIFEST_LIMIT)
                heartbeat = json.loads(content)
                heartbeat["doing"] = str(heartbeat["doing"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                content, heartbeat = b"", {"doing": "its heartbeat cannot be read"}
            seconds = self._liveness.seconds_unchanged(f"alive {role} {entry}", content)
            heartbeats.append((entry.removesuffix(".json"), seconds, heartbeat))
        return heartbeats

    def describe_builders(self) -> str:
        builders = [
            f"{holder} ({heartbeat['doing']}), last heartbeat {seconds:.0f} s ago"
            for holder, seconds, heartbeat in self.heartbeats("builder")
        ]
        return "; ".join(builders) or (
            "no builder has ever been seen: one is starting, or start one with `realmops index-builder`"
        )

    # Reading

    def load(self, store: VersionStore, name: str, mapped: Collection[str] = ()) -> Version:
        """Load a version as ``store.load``; quarantine a damaged one, unless the exchange is another run's."""
        try:
            return store.load(name, mapped=mapped)
        except CorruptVersionError as error:
            self.check_identity()
            store.quarantine(name, str(error))
            raise

    def load_part(self, name: str, weights: Version) -> dict[str, bytes]:
        """Load the files of a part; one that is damaged or was embedded with other weights is quarantined."""
        part = self.load(self.parts, name)
        self.parts.unpin(part)
        if part.meta != {"weights": weights.digest}:
            self.parts.quarantine(name, "it was embedded with other weights of the same name")
            raise CorruptVersionError(f"{name} was embedded with other weights of the same name")
        return part.files

    # Garbage collection by builders

    def needed_by_checkpoints(self) -> tuple[set[str], set[str]]:
        """Return the names of the indexes in use and of the awaited weights in the kept checkpoints."""
        in_use, awaited = set(), set()
        for name in self.checkpoints.names():
            try:
                meta = self.checkpoints.manifest(name).meta
            except CorruptVersionError:
                continue  # no trainer can resume from it
            in_use |= {meta["index"]} - {None}
            awaited |= {*meta["awaited"], name}  # the weights of the checkpoint's step have its name
        return in_use, awaited

    def collect_garbage(self) -> None:
        """Remove indexes and parts that are no longer needed; called by builders."""

        def needed_indexes() -> set[str]:
            weights = set(self.weights.names())
            in_use, awaited = self.needed_by_checkpoints()
            return weights | in_use | awaited | set(self.indexes.names()[-KEEP:])

        def needed_parts() -> set[str]:
            unbuilt = set(self.weights.names()) - set(self.indexes.names())
            return {part for part in self.parts.names() if "-".join(part.split("-")[:3]) in unbuilt}

        self.indexes.collect(needed_indexes)
        self.parts.collect(needed_parts)


def part_name(weights: str, first: int, end: int) -> str:
    return f"{weights}-{first:010d}-{end:010d}"


def row_ranges(rows: int, size: int) -> list[tuple[int, int]]:
    """Split rows into half-open ranges of at most ``size``."""
    return [(first, min(first + size, rows)) for first in range(0, rows, size)]


def inspect_exchange(root: Path, clock: Clock | None = None) -> list[str]:
    """Describe the state of an exchange line by line, problems last, without writing to it (``realmops doctor``).

    Ages compare the clocks of this machine and of the volume, and are only as accurate as these agree.
    """
    clock = clock or Clock()
    exchange = Exchange(Path(root).absolute(), None, "builder-doctor", clock=clock)
    if IDENTITY_VERSION not in exchange.identity.names():
        return [f"{root} is no exchange: no trainer has started here, or it was removed"]
    problems: list[str] = []
    newest = {kind: _newest_intact(store, problems) for kind, store in exchange.stores.items()}
    run = newest["run"].run if newest["run"] else {}
    lines = [
        f"{kind}: newest is {version.name if version else 'not there yet'}"
        for kind, version in newest.items()
        if kind in ("checkpoints", "weights", "indexes")
    ]
    for kind, store in exchange.stores.items():
        problems += [f"{kind}: {entry} was quarantined as damaged or superseded" for entry in store.quarantined()]
    indexes, finished, fence = exchange.indexes.names(), exchange.finished(), exchange.newest_fence()
    for role in ROLES:
        heartbeats = exchange.heartbeats(role)
        lines += [] if heartbeats else [f"no {role} has ever been seen"]
        for holder, _, beat in heartbeats:
            try:
                running = beat["unix"] - beat["since_unix"]
                silent = clock.unix() - (exchange.root / "alive" / role / f"{holder}.json").stat().st_mtime
            except (OSError, KeyError, TypeError):
                lines.append(f"{holder}: {beat['doing']}")
                continue
            lines.append(f"{holder}: {beat['doing']}, running for {running:.0f} s, last heartbeat {silent:.0f} s ago")
            if not finished and silent > SILENT_SECONDS:
                advice = (
                    "run its stage again: it resumes from the newest checkpoint" if role == "trainer"
                    else "start one with `realmops index-builder` unless another is running"
                )  # fmt: skip
                problems.append(
                    f"{holder} has been silent for {silent:.0f} s: it was killed, suspended or disconnected; {advice}"
                )
            if beat.get("fence", fence) != fence:
                problems.append(
                    f"{holder} {beat['fence']} is seen here, but {fence} has taken over: two trainers share this "
                    "exchange; the older one ends at its next checkpoint"
                )
            if beat.get("realmops", __version__) != __version__:
                problems.append(f"{holder} is realmops {beat['realmops']}, this is {__version__}: use one version")
    if "work" in run:  # shards.py
        total = -(-run["passages"] // run["shard_rows"])
        lines.append(f"{run['work']}: {len(exchange.parts.names())} of {total} shards are committed")
    else:
        lines += [f"awaited: the index of {name}" for name in exchange.weights.names() if name not in indexes]
    lines += [f"finished: {finished}"] if finished else []
    return lines + problems


def _newest_intact(store: VersionStore, problems: list[str]) -> Version | None:
    for name in reversed(store.names()):
        try:
            return store.manifest(name)
        except CorruptVersionError as error:
            problems.append(f"{store.kind}: {error}")
        except OSError:
            continue  # removed meanwhile
    return None
