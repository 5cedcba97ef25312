"""The inputs of a submission: their content, and the addresses from which pods fetch them.

A local input gets the address of its content in the store of ``inputs.store``, in the remote of DVC, or in
``inputs.yaml``. The latter two also serve a checkout without the files.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from realmops import hub
from realmops.cluster import VOLUME
from realmops.cluster.dvc_files import DvcRecord, DvcRemote, dvc_walk, find_record, open_remote
from realmops.cluster.polling import Log
from realmops.config import Values
from realmops.inputs.addresses import MODELS, InputError, is_address, listed_inputs, parse, version_of
from realmops.inputs.lock_file import NAME, StoredInput, read_lock, write_lock
from realmops.inputs.redaction import redact
from realmops.inputs.store import (
    STORE_EXAMPLE,
    LocalInput,
    Progress,
    check_store,
    read_input,
    stored_address,
    upload,
)
from realmops.stages import HUB

_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_ON_THIS_MACHINE = ("file://", "local://")


@dataclass(frozen=True)
class PlannedInput:
    """An input of a submission.

    Attributes:
        key: its option, ``section.key``.
        value: the option's value.
        address: the value for the pods: an address, a path on the volume, or a name on the hub.
        name: name of the file or folder, without its place; the value itself if it is known by name alone.
        digest: digest or version of its content; None if it is known by name alone.
        origin: where the address comes from, for people.
        local: the local files, if there are any.
        is_uploaded: whether the files are to be uploaded to the store of the address.
    """

    key: str
    value: str
    address: str
    name: str
    digest: str | None
    origin: str = ""
    local: LocalInput | None = None
    is_uploaded: bool = False

    @property
    def note(self) -> str:
        """What the user should know, or nothing."""
        if self.digest is None:
            where = "is on the hub" if not self.value.startswith(f"{VOLUME}/") else "is on the volume"
            return f"{self.key} is {self.value!r}, which {where}: the key contains its name, not its content"
        if self.address.startswith(_ON_THIS_MACHINE):
            return f"{self.key} is at {self.address}: only pods with this folder of this machine can read it"
        return ""

    def __str__(self) -> str:
        return f"{self.key}: {self.local or self.value} -> {self.origin or redact(self.address)}"


def plan_inputs(values: Values, project: Path, progress: Progress) -> list[PlannedInput]:
    """Return the inputs in use with their addresses, after reading the local ones; nothing is sent.

    Raises:
        ValueError: an input has no address that a pod can read, or cannot be read.
    """
    planner = _Planner(values["inputs"]["store"], Path(os.path.abspath(project)), progress)
    return [planner.plan(key, value) for key, value in listed_inputs(values).items()]


class _Planner:
    """Plans the inputs of a project; content and remotes are read once."""

    def __init__(self, store: str, project: Path, progress: Progress) -> None:
        self._store = check_store(store) if store else ""
        self._project = project
        self._progress = progress
        self._lock = read_lock(project)
        self._read: dict[Path, LocalInput] = {}
        self._remotes: dict[str, DvcRemote | None] = {}

    def plan(self, key: str, value: str) -> PlannedInput:
        if is_address(value):
            return PlannedInput(key, value, value, parse(value).name, version_of(value))
        if value.startswith(HUB):
            return PlannedInput(key, value, value, value, None)
        path = Path(os.path.abspath(self._project / value))
        if path.is_relative_to(VOLUME):
            record = find_record(path, self._project)
            return PlannedInput(key, value, value, value, record.digest if record else None)
        if path.exists():
            return self._plan_local(key, value, path)
        stored, origin = self._find_stored(key, value, path)
        if stored is not None:
            return PlannedInput(key, value, stored.address, path.name, stored.md5, origin)
        if key in MODELS and self._is_on_hub(value):
            return PlannedInput(key, value, value, value, None)
        raise ValueError(
            f"{key} is {value!r}: {path} does not exist, and {self._project / NAME} has no address for it; check the "
            f"path, or run 'realmops upload --store {STORE_EXAMPLE}' where the file is, and commit {NAME}"
        )

    def _plan_local(self, key: str, value: str, path: Path) -> PlannedInput:
        local = self._read.get(path)
        if local is None:
            local = self._read[path] = read_input(value, self._project, self._progress, dvc_walk)
        if self._store:
            address = stored_address(self._store, local.digest, path.name)
            return PlannedInput(key, value, address, path.name, local.digest, self._store, local, is_uploaded=True)
        known = self._lock.get(value)
        if known is not None and known.md5 == local.digest:
            return PlannedInput(key, value, known.address, path.name, local.digest, NAME, local)
        record = find_record(path, self._project)
        remote = self._remote_of(record)
        if record is None or remote is None:
            raise ValueError(
                f"{key} is {local} of this machine, for which the cluster has no address; upload it with --store "
                f"{STORE_EXAMPLE}, or track it with DVC: 'dvc remote add --default NAME URL', 'dvc add {value}' and "
                "'dvc push'"
            )
        if not remote.has(local.digest):
            _refuse_missing(key, value, record, remote, is_changed=record.path != path or record.digest != local.digest)
        address = stored_address(remote.store, local.digest, path.name)
        return PlannedInput(key, value, address, path.name, local.digest, f"the DVC remote {remote.name}", local)

    def _find_stored(self, key: str, value: str, path: Path) -> tuple[StoredInput | None, str]:
        """Return the stored content of an input whose files are not on this machine, and where it is recorded.

        DVC's record is that of the commit; inputs.yaml counts where it agrees, or where DVC has no remote.
        """
        known, record = self._lock.get(value), find_record(path, self._project)
        digest = record.digest if record and record.path == path else ""
        if record is None or (known is not None and known.md5 == digest):
            return known, NAME
        remote = self._remote_of(record)
        if remote is None:
            if known is not None and digest:
                raise ValueError(
                    f"{key} is {value!r}: {record.file} records the md5 {digest}, and {self._project / NAME} "
                    f"{known.md5}; run 'realmops upload' where the files are, and commit {NAME}"
                )
            return known, NAME
        digest = digest or remote.digest_below(record, path)
        if known is not None and known.md5 == digest:
            return known, NAME
        if not remote.has(digest):
            _refuse_missing(key, value, record, remote, is_changed=False)
        return StoredInput(digest, stored_address(remote.store, digest, path.name)), f"the DVC remote {remote.name}"

    def _remote_of(self, record: DvcRecord | None) -> DvcRemote | None:
        if record is None:
            return None
        if record.remote not in self._remotes:
            self._remotes[record.remote] = open_remote(self._project, record.remote)
        remote = self._remotes[record.remote]
        if remote is not None and not record.is_current:
            raise ValueError(
                f"{record.file} was written by DVC 2, whose remotes have no md5 of the content; run 'dvc cache migrate "
                "--dvc-files' and 'dvc push', or give --store URL"
            )
        return remote

    def _is_on_hub(self, value: str) -> bool:
        """Return whether a value names a model on the hub, and not a folder that is missing here."""
        if not _HUB_NAME.fullmatch(value):
            return False
        if "/" not in value or not (self._project / value).parent.is_dir():
            return True
        return hub.is_cached(value) or hub.describe_model(value) is not None


def _refuse_missing(key: str, value: str, record: DvcRecord, remote: DvcRemote, *, is_changed: bool) -> None:
    problem = f"{key} is {value!r}, and the DVC remote {remote.name} ({remote.store}) lacks its content"
    if is_changed:
        tracked = os.path.relpath(record.path, record.file.parent)
        raise ValueError(
            f"{problem}: it differs from {record.file}; run 'dvc add {tracked}' and 'dvc push', or give --store URL"
        )
    raise ValueError(f"{problem}; run 'dvc push' where the files are, or give --store URL")


def versions_of(inputs: Iterable[PlannedInput]) -> dict[str, str]:
    """Return the version of each input whose address does not contain it, by its option."""
    return {
        item.key: item.digest
        for item in inputs
        if item.digest and is_address(item.address) and not parse(item.address).digest
    }


def notes_of(inputs: Iterable[PlannedInput]) -> list[str]:
    """Return what the user should know of the inputs."""
    return [item.note for item in inputs if item.note]


def send_inputs(inputs: Sequence[PlannedInput], project: Path, progress: Progress, log: Log) -> None:
    """Upload the inputs that the store lacks, and record all local ones in ``inputs.yaml``.

    An input that ``inputs.yaml`` has at this address was uploaded before: it needs no credentials of the store.
    """
    known = read_lock(project)
    stored = {
        item.value: StoredInput(item.digest, item.address) for item in inputs if item.origin and item.digest is not None
    }
    for value, item in {item.value: item for item in inputs if item.is_uploaded}.items():
        assert item.local is not None
        try:
            count, size = upload(item.local, parse(item.address).store, progress)
        except InputError:
            raise
        except ValueError as error:
            if known.get(value) != stored[value]:
                raise
            log(f"{value}: uploaded before according to {NAME}, not checked: {error}")
            continue
        log(f"{value}: {count:,} objects, {size / 1e6:,.1f} MB uploaded" if count else f"{value}: was there already")
    if write_lock(project, stored):
        log(f"{project / NAME}: written; commit it")
