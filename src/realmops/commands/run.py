"""``realmops run``: stages one after another, and how they end with the process that started them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from realmops.commands.questions import CLOZE_LIMIT, make_cloze
from realmops.config import notes
from realmops.index.process import end_with
from realmops.stages import CLOZE, Report, check_files, named_below
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

    The files that they want from outside are looked for before the first one begins. Behind the stage tag questions
    are made from the corpus, where a later stage reads such.
    """
    _end_with_parent(watch_parent)
    check_files(names, values, project, root)
    for note in notes(names, values):
        report.warn(note)
    for name in names:
        metrics = run_stage(name, values, project=project, root=root, report=report, force=force)
        if metrics:
            yield name, metrics
        if name == "tag" and named_below(CLOZE, names, values):
            for line in make_cloze(root, None, seed=values["run"]["seed"], limit=CLOZE_LIMIT):
                report.say(f"cloze: {line}")


def _end_with_parent(parent: int | None) -> None:
    """End when ``parent`` has ended, or torchrun, whose processes outlive it when it is killed."""
    if parent is None and "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
    if parent is not None:
        end_with(parent)
