"""Immutable versions in one folder: put if absent, verified reads, pins, removal in two phases.

A store holds versions of one kind. A version is a folder ``v-...`` with files and a ``manifest.json``; it is
whole from the moment its name can be seen and never changes. Beside the versions lie only

    .stage.<holder>.<nonce>   a writer's draft         .trash.<version>         waits for its last look
    .dead.<nonce>             being deleted            .bad.<version>.<nonce>   failed its check, for people

Publish: write the draft, fsync every file, manifest last, fsync the folder, rename, fsync the parent. The
rename is the commit: a folder cannot be renamed onto one that is not empty, so one of two writers wins.
Read: pin, read the manifest, then the bytes; a digest is compared before anybody parses them.
Remove: rename to trash, sync, wait out the grace, look at pins again, then delete or rename back. Whatever is
deleted is renamed to ``.dead`` first, so a draft is either committed by its writer or claimed by the sweep.
"""

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from errno import EEXIST, ENOENT, ENOMEM, ENOTEMPTY, ESTALE
from pathlib import Path
from typing import Any

from realmops.artifacts import canonical_json, digest_of
from realmops.refresh.heartbeat import Ages
from realmops.refresh.shared_files import Clock, Files
from realmops.search.mapped import Content, blocks, memory_bytes

SCHEMA = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 1 << 20
NAME = re.compile(r"v-\d{6}(-\d{8}(-\d{10}-\d{10})?)?")
FILE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
HOLDER = re.compile(r"(trainer|builder)(-[a-z0-9-]{1,40})?")
ROLES = ("trainer", "builder")
SECOND_LOOK = 0.2  # seconds before what looks damaged or gone is looked at again
COMMIT_RETRIES = (0.05, 0.2, 0.8)  # seconds
SWEPT_TRIES = 4  # more, of a draft that somebody swept
STALE_SECONDS = 600.0  # without a sign of life: a draft or a pin counts as left behind
MOST_BAD = 4  # versions set aside for people; more are deleted

log = logging.getLogger(__name__)


class Damaged(Exception):
    """A version whose bytes are not the ones that were published, or that belongs to another run."""


@dataclass(frozen=True)
class Version:
    """One version: its manifest and, when it was loaded, its verified bytes by file name."""

    name: str
    nonce: str
    writer: str
    digest: str
    run: dict[str, Any]
    listing: dict[str, dict[str, Any]]  # file name -> {"bytes", "sha256"}
    meta: dict[str, Any]
    created_unix: float
    files: dict[str, Any] = field(default_factory=dict, repr=False)  # bytes, or mapped where that was asked for
    pin: Path | None = None

    @property
    def step(self) -> int:
        return step_of(self.name)


def version_name(fence: int, step: int) -> str:
    """``v-<fence>-<step>``: names sort by the trainer's life, then by step, and are never used twice."""
    return f"v-{fence:06d}-{step:08d}"


def fence_of(name: str) -> int:
    return int(name.split("-")[1])


def step_of(name: str) -> int:
    return int(name.split("-")[2])


def check_run(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """ValueError with the first differing field and both values when two identities are not the same."""
    for key in sorted({*theirs, *ours}):
        if key not in theirs or key not in ours or theirs[key] != ours[key]:
            raise ValueError(f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here")


def _sha256(content: Content) -> str:
    digest = hashlib.sha256()
    for block in blocks(content):
        digest.update(block)
    return digest.hexdigest()


class Versions:
    """The versions of one kind in the folder ``root/kind``, as seen by one holder.

    ``run`` is the identity that every manifest must carry (None: look only). ``grace`` is how long, in seconds, trash
    waits for its last look (twice the age of a listing on NFS; 0 is enough on one machine).
    """

    def __init__(
        self, root: Path, kind: str, run: dict[str, Any] | None, holder: str, files: Files, clock: Clock,
        *, grace: float = 120.0,
    ) -> None:  # fmt: skip
        assert HOLDER.fullmatch(holder), holder
        self.root, self.kind, self.run, self.holder = root, kind, run, holder
        self.files, self.clock, self.grace = files, clock, grace
        self.folder = root / kind
        self._ages = Ages(clock)
        self._refused: set[str] = set()

    # Looking

    def names(self) -> list[str]:
        """The committed versions, oldest first. A listing says what is there, never a look at one name."""
        names = self.files.listdir(self.folder)
        return [name for name in names if NAME.fullmatch(name) and name not in self._refused]

    def present(self, name: str) -> bool:
        """Whether a version is there, or in the trash, from where it returns when somebody needs it."""
        return bool({name, f".trash.{name}"} & set(self.files.listdir(self.folder)) - self._refused)

    def bad(self) -> list[str]:
        """What was set aside."""
        return [entry for entry in self.files.listdir(self.folder) if entry.startswith(".bad.")]

    def manifest(self, name: str) -> Version:
        """A version without its files. FileNotFoundError: it is gone; Damaged: it is not to be used."""
        path = self.folder / name / MANIFEST
        try:
            return self._parse(name, self.files.read(path, MANIFEST_LIMIT))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Damaged(f"{path}: {error}") from error

    def _parse(self, name: str, content: bytes) -> Version:
        fields = json.loads(content)
        if canonical_json(fields) != content:
            raise ValueError("is not in the form in which it was written")
        if fields.pop("schema") != SCHEMA:
            raise ValueError(f"is of a schema other than {SCHEMA}; it was written by another version of realmops")
        digest = fields.pop("digest")
        if digest != digest_of(fields):
            raise ValueError("does not have the digest that it names")
        kind, version = fields.pop("kind"), Version(**fields, digest=digest)
        if (kind, version.name) != (self.kind, name):
            raise ValueError(f"describes {kind} {version.name}")
        if self.run is not None:
            check_run(version.run, self.run)
        for file, entry in version.listing.items():
            is_size = type(entry["bytes"]) is int and entry["bytes"] >= 0
            if not FILE.fullmatch(file) or file == MANIFEST or not is_size:
                raise ValueError(f"lists the file {file!r}, which is no valid entry")
        return version

    # Reading

    def load(self, name: str, mapped: Collection[str] = ()) -> Version:
        """A version with its bytes, pinned until :meth:`unpin`; those of ``mapped`` files as mapped copies if large.

        What looks damaged is read twice. Damaged: it is, for everybody. FileNotFoundError: it was removed
        in the meantime. OSError: the volume failed, which says nothing about the version.
        """
        pin = self._pin(name)
        try:
            return self._read_twice(name, pin, mapped)
        except BaseException:
            self._unpin(pin)
            raise

    def unpin(self, version: Version) -> None:
        """Give up a loaded version; it may be removed from now on."""
        if version.pin is not None:
            self._unpin(version.pin)

    def _pin(self, name: str) -> Path:
        folder = self.root / "pins" / self.holder.split("-")[0]
        pin = folder / f"{self.kind}.{name}.{self.holder}.{secrets.token_hex(4)}"
        self.files.write(pin, b"")
        self.files.sync_folder(folder)
        return pin

    def _unpin(self, pin: Path) -> None:
        with suppress(OSError):  # a pin that stays ends with its holder
            self.files.unlink(pin)

    def _read_twice(self, name: str, pin: Path, mapped: Collection[str]) -> Version:
        try:
            return self._read(name, pin, mapped)
        except (Damaged, FileNotFoundError):
            self.clock.sleep(SECOND_LOOK)
        if name not in self.names():
            raise FileNotFoundError(f"{self.folder / name} was removed while it was read")
        try:
            return self._read(name, pin, mapped)
        except FileNotFoundError as error:
            raise Damaged(f"{error.filename} is missing") from error

    def _read(self, name: str, pin: Path, mapped: Collection[str]) -> Version:
        version, files = self.manifest(name), {}
        size = sum(entry["bytes"] for file, entry in version.listing.items() if file not in mapped)
        if size > memory_bytes():
            path = self.folder / name / MANIFEST
            raise OSError(ENOMEM, f"it lists {size} bytes, more than the memory here", str(path))
        for file, entry in version.listing.items():
            path = self.folder / name / file
            try:
                files[file] = content = self.files.read(path, entry["bytes"], copied=file in mapped)
            except ValueError as error:
                raise Damaged(str(error)) from error
            if len(content) != entry["bytes"]:
                raise Damaged(f"{path} has {len(content)} bytes, its manifest says {entry['bytes']}")
            if (found := _sha256(content)) != entry["sha256"]:
                raise Damaged(f"{path} has sha256 {found}, its manifest says {entry['sha256']}")
        return replace(version, files=files, pin=pin)

    def set_aside(self, name: str, reason: str) -> None:
        """Take a version out of use, loudly; where this side may not write, it is only stepped over."""
        log.warning("%s is set aside: %s", self.folder / name, reason)
        try:
            keep = len(self.bad()) < MOST_BAD
            aside = f".{f'bad.{name}' if keep else 'dead'}.{secrets.token_hex(4)}"
            self.files.rename(self.folder / name, self.folder / aside)
            self.files.sync_folder(self.folder)
            if not keep:
                self._delete(aside)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s stays where it is (%s) and is not read again", self.folder / name, error)
            self._refused.add(name)

    # Publishing

    def publish(
        self, name: str, contents: Mapping[str, Content], meta: Mapping[str, Any],
        guard: Callable[[], None] = lambda: None,
    ) -> bool:  # fmt: skip
        """Commit a version; False when somebody else's version has that name already (mine is dropped).

        When this returns, the version survives a power cut. ``guard`` runs before the commit and after it and
        raises to refuse. Any error leaves nothing that a reader could see, or the whole version.

        A draft that is swept while it is written, by somebody of the same name who takes over, is written again:
        who has taken over is known to ``guard`` only a moment later, and may have died before.
        """
        assert NAME.fullmatch(name), name
        assert all(FILE.fullmatch(file) and file != MANIFEST for file in contents), list(contents)
        for _ in range(SWEPT_TRIES):
            try:
                return self._publish(name, contents, meta, guard)
            except OSError as error:
                if error.errno not in (ENOENT, ESTALE):
                    raise
            guard()
        return self._publish(name, contents, meta, guard)

    def _publish(
        self, name: str, contents: Mapping[str, Content], meta: Mapping[str, Any], guard: Callable[[], None]
    ) -> bool:
        nonce = secrets.token_hex(8)
        stage = self.folder / f".stage.{self.holder}.{nonce}"
        mine = False
        try:
            with suppress(FileExistsError):  # the nonce is mine: mkdir was done and its reply lost
                self.files.mkdir(stage)
            self._fill(stage, contents, self._describe(name, nonce, contents, meta))
            guard()
            mine = self._commit(stage, name, nonce)
        finally:
            if not mine:
                self._bury(stage.name)
        guard()
        return mine

    def _describe(self, name: str, nonce: str, contents: Mapping[str, Content], meta: Mapping[str, Any]) -> bytes:
        listing = {
            file: {"bytes": len(content), "sha256": _sha256(content)} for file, content in sorted(contents.items())
        }
        fields = {
            "kind": self.kind, "name": name, "nonce": nonce, "writer": self.holder, "run": self.run,
            "listing": listing, "meta": dict(meta), "created_unix": self.clock.unix(),
        }  # fmt: skip
        return canonical_json({**fields, "digest": digest_of(fields), "schema": SCHEMA})

    def _fill(self, stage: Path, contents: Mapping[str, Content], manifest: bytes) -> None:
        for file, content in contents.items():
            self.files.write(stage / file, content)
        self.files.write(stage / MANIFEST, manifest)
        self.files.sync_folder(stage)

    def _commit(self, stage: Path, name: str, nonce: str) -> bool:
        """Rename the draft to its name. After an error, what lies there is true, not what was reported."""
        committed = False
        failure: OSError | None = None
        for delay in (0.0, *COMMIT_RETRIES):
            if delay:
                self.clock.sleep(delay)
            try:
                if not committed:
                    self.files.rename(stage, self.folder / name)
                self.files.sync_folder(self.folder)
                return True
            except OSError as error:
                failure = error
            names = self.files.listdir(self.folder)
            if name in names:
                owner = self._owner(name)
                if owner is not None and owner != nonce:
                    return False
                committed = owner == nonce
            elif stage.name not in names:
                raise OSError(ESTALE, "the draft was swept away; publish again", str(stage)) from failure
        assert failure is not None
        raise failure

    def _owner(self, name: str) -> str | None:
        """The nonce of whoever published a version; None when there is none, or none that can be used."""
        try:
            return self.manifest(name).nonce
        except FileNotFoundError:
            return None
        except Damaged as error:
            self.set_aside(name, str(error))
            return None

    # Removing

    def sweep_own(self) -> None:
        """At the start of a life: what an earlier life of the same holder left behind."""
        for entry in self.files.listdir(self.folder):
            if entry.startswith(f".stage.{self.holder}."):
                self._bury(entry)
        for folder, pin, kind, _, holder in self._pins():
            if (kind, holder) == (self.kind, self.holder):
                self._unpin(folder / pin)

    def collect(self, keep: Callable[[], set[str]]) -> None:
        """Remove every version that nobody has pinned and ``keep()`` does not name, and what dead writers left.

        ``keep`` is asked again before anything is deleted. An error in it ends the collection.
        """
        for entry in self.files.listdir(self.folder):
            if entry.startswith(".dead."):
                self._delete(entry)
            elif entry.startswith(".stage."):
                content = tuple(self.files.listdir(self.folder / entry))
                if self._ages.age(entry, content) >= STALE_SECONDS:
                    self._bury(entry)
        names = self.names()  # before needs and pins are asked for: what is published from here on is not looked at
        held = self._held(keep)
        unneeded = [name for name in names if name not in held]
        for name in unneeded:
            self._move(name, f".trash.{name}")
        if unneeded:
            self.files.sync_folder(self.folder)
        trash = [entry for entry in self.files.listdir(self.folder) if entry.startswith(".trash.")]
        self._settle([entry for entry in trash if self._ages.age(entry, None) >= self.grace], keep)

    def _settle(self, trash: Iterable[str], keep: Callable[[], set[str]]) -> None:
        """The second phase: pins and needs are looked at again, now that no new reader finds the version."""
        held = self._held(keep) if trash else set()
        for entry in trash:
            name = entry.removeprefix(".trash.")
            if name in held:
                self._move(entry, name)
                self.files.sync_folder(self.folder)
            else:
                self._bury(entry)

    def _held(self, keep: Callable[[], set[str]]) -> set[str]:
        # Pins first: a reader gives up its pin only after a checkpoint names the version.
        pinned = {
            version
            for folder, pin, kind, version, holder in self._pins()
            if kind == self.kind and self._pin_age(folder.name, holder, pin) < STALE_SECONDS
        }
        return pinned | keep()

    def _pins(self) -> Iterator[tuple[Path, str, str, str, str]]:
        for role in ROLES:
            folder = self.root / "pins" / role
            for pin in self.files.listdir(folder):
                parts = pin.split(".")
                if len(parts) == 4:
                    yield folder, pin, parts[0], parts[1], parts[2]

    def _pin_age(self, role: str, holder: str, pin: str) -> float:
        try:
            sign = self.files.read(self.root / "alive" / role / f"{holder}.json", MANIFEST_LIMIT)
        except (FileNotFoundError, ValueError):
            sign = b""
        return self._ages.age(f"pin {pin}", sign)

    def _bury(self, entry: str) -> None:
        """Claim by rename, then delete: if the owner's commit was faster there is nothing to claim."""
        dead = f".dead.{secrets.token_hex(8)}"
        with suppress(OSError):
            self.files.rename(self.folder / entry, self.folder / dead)
        self._delete(dead)

    def _delete(self, entry: str) -> None:
        with suppress(OSError):  # what stays is deleted by the next collection
            self.files.delete(self.folder / entry)

    def _move(self, old: str, new: str) -> None:
        try:
            self.files.rename(self.folder / old, self.folder / new)
        except OSError as error:
            if error.errno not in (ENOENT, ENOTEMPTY, EEXIST):  # another collector, or a writer, was faster
                raise
