"""Queries of git."""

import subprocess
from pathlib import Path


def git(place: Path, *words: str) -> str | None:
    """Return what git prints in a folder, stripped; None if it fails, takes 10 seconds or is not installed."""
    command = ["git", "-C", str(place), *words]
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
