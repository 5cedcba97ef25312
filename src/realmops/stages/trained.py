"""What a training was run with, and how many steps its weights have."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realmops import artifacts
from realmops.config import parse_section
from realmops.stages import METRICS, STAGES
from realmops.train.fine_tuning import finetune_steps


def options_of(root: Path, stages: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Sections of params.yaml as the first of these stages was run with them, not imported.

    ValueError when a stage up to that one is missing, or when all were imported.
    """
    for stage in stages:
        folder = root / STAGES[stage].folder
        artifacts.read_manifest(folder, stage)
        if sections := sections_of(root, stage):
            return [parse_section(name, sections[name], str(folder)) for name in names]
    raise ValueError(f"{folder} was imported, so the options that it was trained with are not known; train it here")


def sections_of(root: Path, stage: str) -> dict[str, dict[str, Any]]:
    """What a stage was run with; empty where its output was imported or is not there."""
    path = root / STAGES[stage].folder / artifacts.MANIFEST
    sections: dict[str, dict[str, Any]] = artifacts.read_json(path).get("sections", {}) if path.is_file() else {}
    return sections


def tuned_steps(root: Path) -> int | None:
    """How many steps of fine-tuning the weights have that answer questions; None where they were imported."""
    sections = sections_of(root, "finetune")
    if not sections:
        return None
    metrics = artifacts.read_json(root / STAGES["finetune"].folder / METRICS)
    options = parse_section("finetune", sections["finetune"])
    return finetune_steps(metrics.get("questions_with_evidence", metrics["questions"]), options)
