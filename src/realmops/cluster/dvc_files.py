"""Files that DVC tracks: their recorded digests, and their objects in the project's remote."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from realmops.inputs.redaction import redact
from realmops.inputs.store import walk_content

MD5 = "md5"  # of DVC 3; records of DVC 2 have no key "hash"


@dataclass(frozen=True)
class DvcRecord:
    """DVC's record of a file or folder.

    Attributes:
        file: the .dvc file, or dvc.lock.
        path: absolute path of the tracked file or folder.
        digest: its md5, with ``.dir`` for a folder.
        remote: name of its remote; empty for the project's.
        is_current: whether DVC 3 wrote it; an earlier one stores objects under another digest in another layout.
    """

    file: Path
    path: Path
    digest: str
    remote: str
    is_current: bool


def find_record(path: Path, project: Path) -> DvcRecord | None:
    """Return DVC's record of a path, or of the tracked folder that it is in; None if there is none.

    A .dvc file next to the path or to a folder above counts before the outputs in dvc.lock; for a path outside the
    project, so does a .dvc file of its name in the project.
    """
    path, project = (Path(os.path.abspath(place)) for place in (path, project))
    for candidate in (path, *path.parents, project / path.name):
        pointer = candidate.parent / f"{candidate.name}.dvc"
        if pointer.is_file():
            [entry, *_] = (_read(pointer) or {}).get("outs") or [{}]
            return _record(pointer, candidate if candidate in path.parents else path, entry)
    lock = project / "dvc.lock"
    for stage in ((_read(lock) or {}).get("stages") or {}).values() if lock.is_file() else ():
        for entry in stage.get("outs", []):
            tracked = Path(os.path.abspath(project / entry["path"]))
            if tracked in (path, *path.parents):
                return _record(lock, tracked, entry)
    return None


def _record(file: Path, path: Path, entry: Mapping[str, Any]) -> DvcRecord | None:
    if MD5 not in entry:
        return None
    return DvcRecord(file, path, entry[MD5], entry.get("remote", ""), entry.get("hash") == MD5)


def _read(file: Path) -> Any:
    try:
        return yaml.load(file.read_bytes(), yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}; see 'dvc status'") from None


def dvc_walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder as ``os.walk`` does, without what .dvcignore excludes."""
    root = _dvc_root(folder)
    if root is None:
        yield from walk_content(folder)
        return
    with _installed(root):
        from dvc.ignore import DvcIgnoreFilter
        from dvc_objects.fs.local import localfs
    yield from DvcIgnoreFilter(localfs, str(root)).walk(localfs, str(folder))


def _dvc_root(folder: Path) -> Path | None:
    """Return the folder of the DVC project around a folder; None if there is none."""
    return next((place for place in (folder, *folder.parents) if (place / ".dvc").is_dir()), None)


@contextmanager
def _installed(root: Path) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise ValueError(f"{root} is a project of DVC, which is not installed; pip install 'realmops[dvc]'") from None


@dataclass(frozen=True)
class DvcRemote:
    """A remote of a DVC project, as a store."""

    name: str
    store: str
    remote: Any  # dvc.data_cloud.Remote

    def has(self, digest: str) -> bool:
        """Return whether the remote has an object."""
        with self._explained():
            return bool(self.remote.odb.exists(digest))

    def digest_below(self, record: DvcRecord, path: Path) -> str:
        """Return the digest of a file in a tracked folder, from the folder's object; ValueError if it lists none."""
        with self._explained():
            content = self.remote.fs.cat_file(self.remote.odb.oid_to_path(record.digest))
        relpath = path.relative_to(record.path).as_posix()
        for entry in json.loads(content):
            if entry["relpath"] == relpath:
                return str(entry["md5"])
        raise ValueError(
            f"{path} is not in {record.path.name} as {record.file} records it; check the path, or 'dvc add'"
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # errors of any class; the remedy is always the same
            reason = redact(" ".join(str(error).split()))[:200]
            raise ValueError(
                f"the DVC remote {self.name} ({self.store}) cannot be read: {type(error).__name__}: {reason}; check "
                "its address and credentials with 'dvc status --cloud', or give --store URL"
            ) from None


def open_remote(project: Path, name: str = "") -> DvcRemote | None:
    """Return a remote of the DVC project around a folder, by default its default remote; None without either.

    Raises:
        ValueError: the remote cannot serve as a store, or a package is missing.
    """
    root = _dvc_root(Path(os.path.abspath(project)))
    if root is None:
        return None
    with _installed(root):
        from dvc.exceptions import DvcException
        from dvc.repo import Repo
    try:
        with Repo(str(root)) as repo:
            name = name or repo.config["core"].get("remote", "")
            if not name:
                return None
            remote = repo.cloud.get_remote(name)
            options = repo.config["remote"][name]
    except DvcException as error:
        raise ValueError(f"{root / '.dvc' / 'config'}: {' '.join(str(error).split())}; see 'dvc remote list'") from None
    if options.get("version_aware") or options.get("worktree"):
        raise ValueError(
            f"the DVC remote {name} is version_aware or worktree, so that its objects have no digest in their address; "
            "give --store URL, or another remote"
        )
    store = remote.path if "://" in remote.path else remote.fs.unstrip_protocol(remote.path)
    store = store if "://" in store else f"file://{store}"
    if redact(options["url"]) != options["url"]:
        raise ValueError(f"the DVC remote {name} has credentials in its url; remove them: 'dvc remote modify --local'")
    return DvcRemote(name, store.rstrip("/"), remote)
