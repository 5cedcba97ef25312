"""Resolve the value of an option to a path on this machine and the identity of its content.

Fetched content is cached in ``CACHE/ENTRY/NAME`` with a manifest, and verified before each use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.git import git
from realmops.hub import HUB
from realmops.inputs.addresses import InputError, copy_address, is_address, name_of, version_of
from realmops.inputs.dvc_project import is_tracked, pull, pull_content
from realmops.progress import Report
from realmops.readers.walk import walk_files

CACHE_VARIABLE = "REALMOPS_CACHE"
KIND = "input"  # manifest kind of a cache entry
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")  # OWNER/NAME
PARTIAL = ".partial-"  # prefix of a folder with what a killed process has fetched


@dataclass(frozen=True)
class ResolvedInput:
    """The path of an input on this machine; ``fetched`` is DVC's digest, or the address with its version."""

    value: str
    path: Path
    fetched: str = ""

    @property
    def identity(self) -> str:
        return self.fetched or f"sha256:{artifacts.digest_of(content_digests(self.path))}"


@dataclass(frozen=True)
class PinnedInput:
    """The content that a submission has found for an input, which its pods fetch and compare.

    ``name`` is what DVC tracks, empty for an address; ``below`` the input's path in it; ``remote`` has no credentials.
    """

    identity: str
    name: str = ""
    below: str = ""
    remote: Mapping[str, str] = field(default_factory=dict)


def local_cache() -> Path:
    """Return the folder of fetched inputs on this machine: ``$REALMOPS_CACHE``, or a folder of the user."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "realmops" / "inputs").absolute()


def address_identity(address: str) -> str:
    name_of(address)
    return f"{address} {version_of(address)}"


def can_resolve(value: str, project: Path) -> bool:
    path = Path(os.path.abspath(project / value))
    return is_address(value) or path.exists() or (not value.startswith(HUB) and is_tracked(path))


def check_hub_name(value: str, project: Path) -> None:
    """Raise ValueError if the value of a model, which is not here, may be a folder instead of a name on the hub.

    Anybody can publish a model under the name of a folder that a checkout lacks. ``hf:NAME`` is of the hub; OWNER/NAME
    is too, unless the project has OWNER, or git ignores that path.
    """
    is_name = _HUB_NAME.fullmatch(value) and not (project / value).parent.exists()
    if not value.startswith(HUB) and (not is_name or _is_ignored(value, project)):
        raise ValueError(
            f"{value} is a folder that {project.absolute()} does not have; restore it ('dvc pull'), or write "
            f"{HUB}OWNER/NAME for a model of the hub"
        )


def _is_ignored(value: str, project: Path) -> bool:
    """Return whether git ignores a folder, which need not exist, and not the whole project."""
    return bool(git(project, "check-ignore", "--", f"{value}/")) and not git(project, "check-ignore", "--", "./")


def resolve(value: str, project: Path, cache: Path, report: Report, pinned: PinnedInput | None = None) -> ResolvedInput:
    """Return an input's path and identity, fetching it if it is not here; ValueError if it is not the pinned one."""
    if pinned is not None and pinned.name:
        name = Path(pinned.below).name or pinned.name
        digest = pinned.identity.removesuffix(f"/{pinned.below}")

        def fetch(target: Path, work: Path) -> None:
            pull_content(pinned.name, pinned.below, digest, pinned.remote, target, work)

        return ResolvedInput(value, _cached(name, pinned.identity, cache, report, fetch), pinned.identity)
    if is_address(value):
        return _resolve_address(value, cache, report, pinned.identity if pinned else "")
    path = Path(os.path.abspath(project / value))
    if not path.exists():
        report.log(f"inputs: dvc pull {value}")
        pull(path)
    return ResolvedInput(value, path)


def _resolve_address(address: str, cache: Path, report: Report, expected: str) -> ResolvedInput:
    identity = expected or address_identity(address)

    def fetch(target: Path, work: Path) -> None:
        if expected and address_identity(address) != expected:
            raise InputError(f"{address} was changed since this run was submitted; submit again")
        copy_address(address, target, report.progress)
        if address_identity(address) != identity:
            raise InputError(f"{address} was changed while it was read; run again")

    return ResolvedInput(address, _cached(name_of(address), identity, cache, report, fetch), identity)


def _cached(name: str, identity: str, cache: Path, report: Report, fetch: Callable[[Path, Path], None]) -> Path:
    """Return a cache entry; ``fetch`` writes a missing one to its first argument, with a resumable work folder."""
    entry = cache / artifacts.digest_of([identity, name])[:32]
    with _lock(cache / f"{PARTIAL}{entry.name}.lock", report):
        if not is_complete(entry):
            report.log(f"inputs: fetching {name}")
            with artifacts.atomic_folder(entry, None) as draft:
                fetch(draft / name, cache / f"{PARTIAL}{entry.name}")
                artifacts.write_manifest(draft, KIND, identity=identity)
    return entry / name


def is_complete(entry: Path) -> bool:
    """Return whether an entry of the cache has all its files, and no others, with the digests of its manifest."""
    try:
        files = artifacts.read_manifest(entry, KIND)["files"]
    except ValueError:
        return False
    names = {path.relative_to(entry).as_posix() for path in entry.rglob("*") if path.is_file()}
    return names == {*files, artifacts.MANIFEST}


@contextmanager
def _lock(file: Path, report: Report) -> Iterator[None]:
    artifacts.make_folder(file.parent)
    with open(file, "ab") as handle:
        if artifacts.try_lock(handle) is False:
            report.log("inputs: another process is fetching this input; waiting for it")
            artifacts.wait_for_lock(handle)
        yield


def content_digests(path: Path) -> Any:
    """Return the digest of a file, or those of the files in a folder by name; None for what cannot be read."""
    if path.is_dir():
        files = ((os.fsencode(file.relative_to(path)), file) for file in walk_files(path))
        return {name.decode(errors="surrogateescape"): _digest_of_file(file) for name, file in files}
    return _digest_of_file(path)


def _digest_of_file(path: Path) -> str | None:
    return artifacts.sha256_file(path) if os.path.isfile(path) else None  # None for pipes and devices
