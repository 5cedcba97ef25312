"""Immutable versions in one folder: put if absent, verified reads, pins, removal in two phases.

A store holds the versions of one kind. A version is a folder ``v-...`` with files and a ``manifest.json``; it is
complete from the moment its name is visible, and immutable. The only other entries are

    .stage.<holder>.<nonce>   a writer's draft         .trash.<version>         removed, until its grace period ends
    .dead.<nonce>             being deleted            .bad.<version>.<nonce>   quarantined: it failed its check

Publish: write the draft, fsync every file, manifest last, fsync the folder, rename, fsync the parent. The rename is
the commit: a folder cannot be renamed onto one that is not empty, so exactly one of two writers wins.
Read: pin, read the manifest, then the files; digests are compared before anything is parsed.
Remove: rename to trash, sync, wait for the grace period, check the pins again, then delete or rename back. Every entry
is renamed to ``.dead`` before it is deleted, so a draft is either committed by its writer or claimed by the sweep.
"""

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from errno import EEXIST, ENOENT, ENOTEMPTY
from pathlib import Path
from typing import Any

from realmops.artifacts import DIGEST_KEY, MANIFEST, atomic_folder, build_manifest, canonical_json, check_manifest
from realmops.files import DEAD, Clock, Files
from realmops.memory_map import Content, iter_blocks
from realmops.refresh.heartbeat import LivenessTracker

MANIFEST_LIMIT = 1 << 20
NAME = re.compile(r"v-\d{6}(-\d{8}(-\d{10}-\d{10})?)?")
FILE = re.compile(r"(\w[\w.-]{0,63}/){0,3}\w[\w.-]{0,63}", re.ASCII)  # in folders too; no "..", nothing absolute
HOLDER = re.compile(r"(trainer|builder)(-[a-z0-9-]{1,40})?")
ROLES = ("trainer", "builder")
SECOND_READ_SECONDS = 0.2  # before a version that seems damaged or removed is read again
COMMIT_DELAYS = (0.05, 0.2, 0.8)  # seconds before each retry of a commit
STALE_SECONDS = 600.0  # without a change, after which a draft or a pin counts as abandoned
MAX_QUARANTINED = 4  # versions; earlier ones are deleted

log = logging.getLogger(__name__)


class CorruptVersionError(Exception):
    """A version whose bytes differ from those published, or which belongs to another run."""


@dataclass(frozen=True)
class Version:
    """The manifest of one version and, once loaded, its verified files as bytes by file name."""

    name: str
    nonce: str
    writer: str
    digest: str
    run: dict[str, Any]
    listing: dict[str, dict[str, Any]]  # file name -> {"bytes", "sha256"}
    meta: dict[str, Any]
    created_unix: float
    files: dict[str, Any] = field(default_factory=dict, repr=False)  # bytes, or memory-mapped on request
    pin: Path | None = None

    @property
    def step(self) -> int:
        return step_of(self.name)


def version_name(fence: int, step: int) -> str:
    """Return ``v-<fence>-<step>``: names sort by trainer, then by step, and are never reused."""
    return f"v-{fence:06d}-{step:08d}"


def fence_of(name: str) -> int:
    return int(name.split("-")[1])


def step_of(name: str) -> int:
    return int(name.split("-")[2])


def _sha256(content: Content) -> str:
    digest = hashlib.sha256()
    for block in iter_blocks(content):
        digest.update(block)
    return digest.hexdigest()


class VersionStore:
    """The store of the versions of one kind in the folder ``root/kind``, as seen by one holder.

    ``run`` is the identity that every manifest must carry (None: any). Removed versions stay in the trash for ``grace``
    seconds (twice the age of a listing on NFS; 0 suffices locally).
    """

    def __init__(
        self, root: Path, kind: str, run: dict[str, Any] | None, holder: str, files: Files, clock: Clock,
        *, grace: float = 120.0,
    ) -> None:  # fmt: skip
        assert HOLDER.fullmatch(holder), holder
        self.root, self.kind, self.run, self.holder = root, kind, run, holder
        self.files, self.clock, self.grace = files, clock, grace
        self.folder = root / kind
        self._liveness = LivenessTracker(clock)

    # Listing

    def names(self) -> list[str]:
        """List the committed versions, oldest first; NFS caches a failed lookup of a name for longer than a listing."""
        return [name for name in self.files.listdir(self.folder) if NAME.fullmatch(name)]

    def exists(self, name: str) -> bool:
        """Return whether a version is committed, or in the trash, from where it is restored if needed."""
        return bool({name, f".trash.{name}"} & set(self.files.listdir(self.folder)))

    def quarantined(self) -> list[str]:
        return [entry for entry in self.files.listdir(self.folder) if entry.startswith(".bad.")]

    def manifest(self, name: str) -> Version:
        """Read a version's manifest without its files; CorruptVersionError if it is damaged or of another run."""
        path = self.folder / name / MANIFEST
        try:
            return self._parse(name, self.files.read(path, MANIFEST_LIMIT))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CorruptVersionError(f"{path}: {error}") from error

    def _parse(self, name: str, content: bytes) -> Version:
        fields = check_manifest(json.loads(content), self.kind)
        if canonical_json(fields) != content:
            raise ValueError("the JSON is not in canonical form")
        for constant in ("kind", "schema"):
            del fields[constant]
        version = Version(listing=fields.pop("files"), digest=fields.pop(DIGEST_KEY), **fields)
        if version.name != name:
            raise ValueError(f"describes {version.name}, expected {name}")
        run = version.run if self.run is None else self.run
        for key in sorted({*version.run, *run}):
            if (actual := version.run.get(key)) != (expected := run.get(key)):
                raise ValueError(f"{key} is {actual!r}, expected {expected!r}")
        for file in version.listing:
            if not FILE.fullmatch(file) or file == MANIFEST:
                raise ValueError(f"lists the file {file!r}, which is not a valid name")
        return version

    # Reading

    def load(self, name: str, mapped: Collection[str] = ()) -> Version:
        """Load a version with its files, pinned until :meth:`unpin`; a version that seems damaged is read twice.

        The files in ``mapped`` are memory-mapped from a local copy if they are large. CorruptVersionError if it is
        damaged for every reader, FileNotFoundError if it was removed meanwhile; after another OSError it may be intact.
        """
        folder = self.root / "pins" / self.holder.split("-")[0]
        pin = folder / f"{self.kind}.{name}.{self.holder}.{secrets.token_hex(4)}"
        self.files.write(pin, b"")
        self.files.sync_folder(folder)
        try:
            try:
                return self._read(name, pin, mapped)
            except (CorruptVersionError, FileNotFoundError):
                self.clock.sleep(SECOND_READ_SECONDS)
            if name not in self.names():
                raise FileNotFoundError(f"{self.folder / name} was removed while it was read")
            try:
                return self._read(name, pin, mapped)
            except FileNotFoundError as error:
                raise CorruptVersionError(f"{error.filename} is missing") from error
        except BaseException:
            self._unpin(pin)
            raise

    def unpin(self, version: Version) -> None:
        if version.pin is not None:
            self._unpin(version.pin)

    def _unpin(self, pin: Path) -> None:
        with suppress(OSError):  # a pin that stays expires with its holder
            self.files.unlink(pin)

    def _read(self, name: str, pin: Path, mapped: Collection[str]) -> Version:
        version, files = self.manifest(name), {}
        for file, entry in version.listing.items():
            path, depth = self.folder / name / file, 1 + file.count("/")
            try:
                content = self.files.read(path, entry["bytes"], copied=file in mapped, depth=depth)
            except ValueError as error:
                raise CorruptVersionError(str(error)) from error
            if len(content) != entry["bytes"]:
                raise CorruptVersionError(f"{path} has {len(content)} bytes, its manifest lists {entry['bytes']}")
            if (digest := _sha256(content)) != entry["sha256"]:
                raise CorruptVersionError(f"{path} has sha256 {digest}, its manifest lists {entry['sha256']}")
            files[file] = content
        return replace(version, files=files, pin=pin)

    def quarantine(self, name: str, reason: str) -> None:
        """Take a version out of use with a warning."""
        log.warning("%s is quarantined: %s", self.folder / name, reason)
        self._move(name, f".bad.{name}.{secrets.token_hex(4)}")
        self.files.sync_folder(self.folder)
        for entry in self.quarantined()[:-MAX_QUARANTINED]:
            self.files.discard(self.folder / entry)

    # Publishing

    def publish(
        self, name: str, contents: Mapping[str, Content], meta: Mapping[str, Any],
        guard: Callable[[], None] = lambda: None,
    ) -> bool:  # fmt: skip
        """Commit a version of these files; once this returns, it survives a power cut.

        False if another writer's version has that name already; this one is dropped. After an error a reader sees
        either no version or the complete one. ``meta`` are fields of the manifest that the kind defines; ``guard`` is
        called before and after the commit, and raises to refuse it.
        """
        assert NAME.fullmatch(name), name
        assert all(FILE.fullmatch(file) and file != MANIFEST for file in contents), list(contents)
        nonce = secrets.token_hex(8)
        is_committed = False

        def commit(draft: Path) -> bool:
            nonlocal is_committed
            guard()
            is_committed = self._commit(draft, name, nonce)
            return is_committed

        draft_name = f".stage.{self.holder}.{nonce}"
        with atomic_folder(self.folder / name, self.kind, files=self.files, draft=draft_name, commit=commit) as draft:
            for folder in sorted({draft / folder for file in contents for folder in Path(file).parents} - {draft}):
                with suppress(FileExistsError):  # done, and its reply lost
                    self.files.mkdir(folder)
            for file, content in contents.items():
                self.files.write(draft / file, content)
            listing = {
                file: {"bytes": len(content), "sha256": _sha256(content)} for file, content in sorted(contents.items())
            }
            fields = {
                "name": name, "nonce": nonce, "writer": self.holder, "run": self.run, "meta": dict(meta),
                "created_unix": self.clock.unix(),
            }  # fmt: skip
            manifest = build_manifest(self.kind, listing, **fields)
            self.files.write(draft / MANIFEST, canonical_json(manifest))
        guard()
        return is_committed

    def _commit(self, draft: Path, name: str, nonce: str) -> bool:
        """Rename the draft to its final name; after an error, list the folder: the rename may have been applied."""
        is_renamed = False
        for delay in (*COMMIT_DELAYS, None):
            try:
                if not is_renamed:
                    self.files.rename(draft, self.folder / name)
                self.files.sync_folder(self.folder)
                return True
            except OSError:
                owner = self._published_nonce(name)
                if owner is not None and owner != nonce:
                    return False
                is_renamed = owner == nonce
                if delay is None:
                    raise
                self.clock.sleep(delay)
        raise AssertionError

    def _published_nonce(self, name: str) -> str | None:
        """Return the nonce of the published version, or None if there is no usable one."""
        try:
            return self.manifest(name).nonce if name in self.files.listdir(self.folder) else None
        except FileNotFoundError:
            return None
        except CorruptVersionError as error:
            self.quarantine(name, str(error))
            return None

    # Removing

    def sweep_own(self) -> None:
        """Remove the drafts and pins that an earlier process with this holder name left; called once, at the start."""
        for entry in self.files.listdir(self.folder):
            if entry.startswith(f".stage.{self.holder}."):
                self.files.discard(self.folder / entry)
        for pin, _, holder in self._pins():
            if holder == self.holder:
                self._unpin(pin)

    def collect(self, keep: Callable[[], set[str]]) -> None:
        """Remove all versions that are neither pinned nor named by ``keep()``, and the drafts of dead writers.

        ``keep`` is called again before anything is deleted; an error in it ends the collection.
        """
        for entry in self.files.listdir(self.folder):
            if entry.startswith(DEAD):
                with suppress(OSError):  # the next collection deletes the rest
                    self.files.delete(self.folder / entry)
            elif entry.startswith(".stage."):
                content = tuple(self.files.listdir(self.folder / entry))
                if self._liveness.seconds_unchanged(entry, content) >= STALE_SECONDS:
                    self.files.discard(self.folder / entry)
        names = self.names()  # before ``keep`` and the pins are read: later versions are not considered
        in_use = self._names_in_use(keep)
        unneeded = [name for name in names if name not in in_use]
        for name in unneeded:
            self._move(name, f".trash.{name}")
        if unneeded:
            self.files.sync_folder(self.folder)
        trash = [entry for entry in self.files.listdir(self.folder) if entry.startswith(".trash.")]
        due = [entry for entry in trash if self._liveness.seconds_unchanged(entry, None) >= self.grace]
        in_use = self._names_in_use(keep) if due else set()  # again: by now no new reader can find the version
        for entry in due:
            name = entry.removeprefix(".trash.")
            if name in in_use:
                self._move(entry, name)
                self.files.sync_folder(self.folder)
            else:
                self.files.discard(self.folder / entry)

    def _names_in_use(self, keep: Callable[[], set[str]]) -> set[str]:
        # Pins first: a reader releases its pin only after a checkpoint names the version.
        pinned = {name for pin, name, holder in self._pins() if self._pin_age(pin, holder) < STALE_SECONDS}
        return pinned | keep()

    def _pins(self) -> list[tuple[Path, str, str]]:
        """Return path, version and holder of each pin of this kind."""
        folders = [self.root / "pins" / role for role in ROLES]
        pins = [(folder / pin, pin.split(".")) for folder in folders for pin in self.files.listdir(folder)]
        return [(path, parts[1], parts[2]) for path, parts in pins if len(parts) == 4 and parts[0] == self.kind]

    def _pin_age(self, pin: Path, holder: str) -> float:
        try:
            heartbeat = self.files.read(self.root / "alive" / pin.parent.name / f"{holder}.json", MANIFEST_LIMIT)
        except (FileNotFoundError, ValueError):
            heartbeat = b""
        return self._liveness.seconds_unchanged(pin.name, heartbeat)

    def _move(self, old: str, new: str) -> None:
        try:
            self.files.rename(self.folder / old, self.folder / new)
        except OSError as error:
            if error.errno not in (ENOENT, ENOTEMPTY, EEXIST):  # another collector, or a writer, was faster
                raise
