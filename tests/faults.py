"""Helpers of the campaign against faults: its length, and small disks.

``make faults`` sets REALMOPS_FAULTS and runs the tests with the marker ``faults`` at full length; ``make test`` runs
the same tests cut short.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

CAMPAIGN = "REALMOPS_FAULTS" in os.environ


def times(short: int, long: int) -> int:
    """Return the repetitions of ``make test`` or ``make faults``."""
    return long if CAMPAIGN else short


@contextlib.contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """A file system of ``size`` bytes."""
    folder = Path(tempfile.mkdtemp())
    options = f"size={size},mode=700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode
    try:
        yield folder
    finally:
        if mounted == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def may_mount() -> bool:
    with contextlib.suppress(OSError), small_disk(1 << 20) as folder:
        return os.path.ismount(folder)
    return False
