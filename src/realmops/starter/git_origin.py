"""The git repository of a new project, as Argo CD and Flux address it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from realmops.git import git

BRANCH = "main"  # without a repository, or with a detached HEAD
SCP = re.compile(r"(?:(?P<user>[^@/:]+)@)?(?P<host>[^@/:]+):/?(?P<path>[^/].*)")  # git's short form of an ssh address


@dataclass(frozen=True)
class GitOrigin:
    """Address of the remote ``origin`` ("" if a cluster cannot reach it), branch, and the project's path inside."""

    address: str
    branch: str
    path: str

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read the repository that contains ``folder``, which need not exist, if there is one."""
        place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        top = git(place, "rev-parse", "--show-toplevel")
        if not top:
            return cls("", BRANCH, ".")
        branch = git(place, "symbolic-ref", "--quiet", "--short", "HEAD")
        home, root = folder.resolve(), Path(top).resolve()
        path = home.relative_to(root).as_posix() if home.is_relative_to(root) else "."
        return cls(cluster_address(git(place, "remote", "get-url", "origin") or ""), branch or BRANCH, path)


def cluster_address(remote: str) -> str:
    """Return a git remote as https:// or ssh:// address without password and token; "" for a local path."""
    if "://" not in remote:
        scp = SCP.fullmatch(remote)
        return f"ssh://{scp['user'] or 'git'}@{scp['host']}/{scp['path']}" if scp else ""
    parts = urlsplit(remote)
    if parts.scheme not in ("http", "https", "ssh") or not parts.hostname:
        return ""
    host = parts.netloc.rpartition("@")[2]
    user = f"{parts.username or 'git'}@" if parts.scheme == "ssh" else ""
    return f"{parts.scheme}://{user}{host}{parts.path}"
