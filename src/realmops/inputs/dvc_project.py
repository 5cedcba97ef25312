"""Files and folders that DVC tracks: added, pushed to its remote, and pulled from there, all by DVC itself."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realmops import artifacts
from realmops.credentials import error_line, refuse_credentials

if TYPE_CHECKING:
    from dvc.repo import Repo

SETUP = (
    "in the folder of the params file run 'dvc init' (outside of git 'dvc init --no-scm') and 'dvc remote add "
    "--default store s3://BUCKET/PREFIX'"
)
_REMOTE_OPTIONS = ("url", "endpointurl", "region", "projectname", "account_name")  # those without credentials


@dataclass(frozen=True)
class TrackedInput:
    """Content that DVC tracks; ``digest`` is ``md5:...``, and the input is at ``below`` in the path.

    ``remote`` has the options without credentials; ``is_current`` is False if DVC's record has another digest.
    """

    path: Path
    below: str
    digest: str
    remote: Mapping[str, str]
    is_current: bool

    @property
    def identity(self) -> str:
        return f"{self.digest}/{self.below}" if self.below else self.digest


@contextmanager
def _open_repo(folder: Path, config: Mapping[str, Any] | None = None) -> Iterator[Repo]:
    """Context manager: open the DVC project around a folder; DVC's errors become a ValueError of one line."""
    root = next((place for place in (folder, *folder.parents) if (place / ".dvc").is_dir()), None)
    if root is None:
        raise ValueError(f"{folder} is in no project of DVC, whose remote is where pods fetch inputs; {SETUP}")
    try:
        from dvc.repo import Repo
    except ImportError:
        raise ValueError(f"{root} is a project of DVC, which is not installed; pip install 'realmops[dvc]'") from None
    has_git = any((place / ".git").exists() for place in (root, *root.parents))
    config = config or ({} if has_git else {"core": {"no_scm": True}})
    try:
        with Repo(str(root), config=dict(config), _wait_for_lock=True) as repo:
            yield repo
    except ValueError:
        raise
    except Exception as error:  # DVC's own, and those of the libraries of its remotes
        raise ValueError(
            f"DVC project {root}: {error_line(error.__cause__ or error)}; check 'dvc status --cloud', and the "
            "credentials in the environment"
        ) from None


def find_tracked(path: Path, project: Path) -> TrackedInput:
    """Return a path as DVC tracks it, or would; nothing is written or sent. Missing content counts as recorded."""
    from_record = not path.exists()
    with _open_repo(project) as repo:
        output = _output_of(repo, path)
        if output is None and from_record:
            raise ValueError(
                f"{path} does not exist, and DVC does not track it; check the path, or run 'realmops upload' where the "
                "file is, commit its .dvc file, and list it in kustomization.yaml for a cluster"
            )
        tracked = Path(output.fs_path) if output is not None else path
        recorded = f"{output.hash_name}:{output.hash_info.value}" if output is not None else ""
        digest = recorded if from_record else _digest_now(repo, tracked, output.hash_name if output else "md5")
        below = path.relative_to(tracked).as_posix() if path != tracked else ""
        return TrackedInput(tracked, below, digest, _remote_options(repo, output), digest == recorded)


def is_tracked(path: Path) -> bool:
    """Return whether a .dvc file next to a path, or to a folder above it, tracks it; DVC is not imported."""
    return any(place.with_name(f"{place.name}.dvc").is_file() for place in (path, *path.parents) if place.name)


def add_and_push(tracked: TrackedInput, project: Path) -> int:
    """Track changed content and push it; return the objects sent. ValueError if it changed since ``find_tracked``."""
    with _open_repo(project) as repo:
        output = _output_of(repo, tracked.path)
        if not tracked.is_current:
            if output is not None and not output.stage.is_data_source:
                raise ValueError(
                    f"{tracked.path} differs from its record in {output.stage.path}; run 'dvc repro' or 'dvc commit'"
                )
            repo.add(str(tracked.path))
            output = _output_of(repo, tracked.path)
        if output is None or f"{output.hash_name}:{output.hash_info.value}" != tracked.digest:
            raise ValueError(f"{tracked.path} was changed while it was uploaded; run the same command again")
        return int(repo.push(targets=[output.stage.addressing if output.stage.is_data_source else str(tracked.path)]))


def pull(path: Path) -> None:
    with _open_repo(path.parent) as repo:
        repo.pull([str(path)])


def pull_content(name: str, below: str, digest: str, remote: Mapping[str, str], target: Path, work: Path) -> None:
    """Pull content from a remote into ``target``, in an own, resumable project of DVC in ``work``."""
    artifacts.make_folder(work / ".dvc")
    hash_name, _, value = digest.partition(":")
    entry = {"md5": value, "path": name} | ({"hash": hash_name} if hash_name == "md5" else {})
    artifacts.write_json(work / f"{name}.dvc", {"outs": [entry]})  # JSON is YAML
    config = {
        "core": {"no_scm": True, "remote": "store", "site_cache_dir": str(work / ".dvc" / "site")},
        "remote": {"store": {**remote, "verify": True}},
        "cache": {"type": ["reflink", "hardlink", "copy"]},
    }
    with _open_repo(work, config) as repo:
        repo.pull([str(work / name / below) if below else str(work / f"{name}.dvc")])
    os.rename(work / name / below if below else work / name, target)
    shutil.rmtree(work)


def _output_of(repo: Repo, path: Path) -> Any:
    from dvc.exceptions import OutputNotFoundError

    try:
        return repo.find_outs_by_path(str(path), strict=False)[0]
    except OutputNotFoundError:
        return None


def _digest_now(repo: Repo, path: Path, hash_name: str) -> str:
    from dvc.fs import localfs
    from dvc_data.hashfile.build import build

    _check_readable(path)
    _, _, content = build(repo.cache.local, str(path), localfs, hash_name, ignore=repo.dvcignore, dry_run=True)
    return f"{hash_name}:{content.hash_info.value}"


def _check_readable(path: Path) -> None:
    """Raise ValueError for what DVC would leave out or wait for: links to folders, pipes, devices."""
    if not path.is_dir():
        artifacts.open_regular(path).close()
        return
    for parent, folders, names in os.walk(path):
        if links := [name for name in folders if Path(parent, name).is_symlink()]:
            raise ValueError(f"{Path(parent, links[0])} is a link to a folder, which DVC leaves out; copy its content")
        for name in names:
            if not stat.S_ISREG(os.stat(file := Path(parent, name)).st_mode):
                raise ValueError(f"{file} is no regular file; remove it, or move it out of {path}")


def _remote_options(repo: Repo, output: Any) -> dict[str, str]:
    """Return the options of a remote that its address needs; those of the user's own config files stay here."""
    name = (output.remote if output is not None else None) or repo.config["core"].get("remote")
    if not name:
        raise ValueError(f"{repo.root_dir} has no default remote of DVC, from which pods fetch inputs; {SETUP}")
    options = repo.config["remote"].get(name)
    if options is None:
        raise ValueError(f"{repo.root_dir} has no remote of DVC with the name {name}; see 'dvc remote list'")
    if options.get("version_aware") or options.get("worktree"):
        raise ValueError(f"the DVC remote {name} is version_aware or worktree, without digests; use another remote")
    remote = {key: str(options[key]) for key in _REMOTE_OPTIONS if options.get(key)}
    refuse_credentials(remote, f"the DVC remote {name}")
    return remote
