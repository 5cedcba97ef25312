"""``realmops run``: stages one after another, and how they end with the process that started them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from realmops.config import notes
from realmops.index.process import end_with
from realmops.stages import Report, check_files
from realmops.stages.runner import run_stage


def run_stages(
    names: Collection[str],
    values: Mapping[str, Mapping[str, Any]],
    *,
    project: Path,
    root: Path,
    report: Report,
    force: bool,
    watch_parent: int | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run stages as ``run_stage`` does; the name and the metrics of each, which a process that only helps has not.

    The files that they want from outside are looked for before the first one begins.
    """
    if watch_parent is None and "TORCHELASTIC_RUN_ID" in os.environ:
        watch_parent = os.getppid()  # torchrun, whose processes outlive it when it is killed
    if watch_parent is not None:
        end_with(watch_parent)
    check_files(names, values, project, root)
    for note in notes(names, values):
        report.warn(note)
    for name in names:
        metrics = run_stage(name, values, project=project, root=root, report=report, force=force)
        if metrics:
            yield name, metrics
