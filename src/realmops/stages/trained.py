"""The options that a stage was trained with, and the number of training steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.config import parse_section
from realmops.stages import METRICS, STAGES
from realmops.train.fine_tuning import finetune_steps


def trained_options(root: Path, stages: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Return the sections ``names`` of the first of ``stages`` that was trained rather than imported.

    Raises:
        ValueError: if a stage before that one has no output, or all were imported.
    """
    for stage in stages:
        folder = root / STAGES[stage].folder
        artifacts.read_manifest(folder, stage)
        if sections := trained_sections(root, stage):
            return [parse_section(name, sections[name], str(folder)) for name in names]
    raise ValueError(f"{folder} was imported, so its training options are unknown; train it here")


def trained_sections(root: Path, stage: str) -> dict[str, dict[str, Any]]:
    """Return the sections that a stage was run with; empty if its output was imported or does not exist."""
    path = root / STAGES[stage].folder / artifacts.MANIFEST
    sections: dict[str, dict[str, Any]] = artifacts.read_json(path).get("sections", {}) if path.is_file() else {}
    return sections


def tuned_steps(root: Path) -> int | None:
    """Return the number of fine-tuning steps of the model; None if it was imported."""
    sections = trained_sections(root, "finetune")
    if not sections:
        return None
    metrics = artifacts.read_json(root / STAGES["finetune"].folder / METRICS)
    options = parse_section("finetune", sections["finetune"])
    return finetune_steps(metrics.get("questions_with_evidence", metrics["questions"]), options)
