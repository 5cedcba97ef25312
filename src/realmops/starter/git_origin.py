"""The git repository of a new project, as Argo CD and Flux address it."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

BRANCH = "main"  # without a repository, or with a detached HEAD
GIT_SECONDS = 10.0  # timeout of git
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
        top = _git(place, "rev-parse", "--show-toplevel")
        if not top:
            return cls("", BRANCH, ".")
        branch = _git(place, "symbolic-ref", "--quiet", "--short", "HEAD")
        home, root = folder.resolve(), Path(top).resolve()
        path = home.relative_to(root).as_posix() if home.is_relative_to(root) else "."
        return cls(cluster_address(_git(place, "remote", "get-url", "origin")), branch or BRANCH, path)


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


def _git(place: Path, *words: str) -> str:
    try:
        process = subprocess.run(["git", *words], cwd=place, capture_output=True, text=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""
