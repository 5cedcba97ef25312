"""The MLflow run of one variant: its key, parameters, tags and data."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from realmops.artifacts import sha256_file

RUN_KEY_TAG = "realmops.run_key"
ABOVE = "REALMOPS_MLFLOW_PARENT_RUN_ID"  # a run that somebody else has made, to show ours under
_LONGEST_PARAM = 6000


@dataclass(frozen=True)
class TrackedDataset:
    """What a run has read. MLflow keeps 36 characters of the ``digest``; ``context`` is what it was read for."""

    name: str
    digest: str
    source: str
    context: str


@dataclass(frozen=True)
class TrackedRun:
    """The MLflow run of one variant. All its stages find it by ``key``.

    The key should change with everything that changes the numbers (parameters, corpus, code): MLflow cannot
    replace a point, so a stage that begins anew under the same key adds a second one at each step. ``params``
    are sections of values; they are logged as ``section.key``. ``parent`` is the run that this one is shown
    under; it is created when it is not there. ``began`` is when the run began, in seconds, where that is not now.
    ``else_named`` is the name of a run that neither its maker nor DVC has named.
    """

    key: str
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    experiment: str = "realmops"
    parent: TrackedRun | None = None
    datasets: Sequence[TrackedDataset] = ()
    began: float | None = None
    else_named: str | None = None

    def description(self) -> dict[str, Any]:
        """What the process that sends needs to know; MLflow's variables come first, DVC's names what has no name."""
        return {
            "key": self.key,
            "name": self.name or os.environ.get("DVC_EXP_NAME") or self.else_named,
            "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.experiment,
            "params": flat_params(self.params),
            "tags": {RUN_KEY_TAG: self.key, **self.tags},
            "run_id": os.environ.get("MLFLOW_RUN_ID"),
            "above": os.environ.get(ABOVE),
            "parent": {name: getattr(self.parent, name) for name in ("key", "name", "began")} if self.parent else None,
            "datasets": [asdict(dataset) for dataset in self.datasets],
            "began": self.began,
        }


def flat_params(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested sections as ``section.key`` with the values as text, cut to MLflow's limit."""
    flat: dict[str, str] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            flat |= flat_params(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = str(value)[:_LONGEST_PARAM]
    return flat


def provenance_tags(project: Path, *, corpus_hash: str, params_hash: str) -> dict[str, str]:
    """Tags that say what a run was made from; what there is none of yet is left out.

    Images know their commit by REALMOPS_COMMIT, which counts where the project is no checkout.
    """
    tags = {"realmops.params_hash": params_hash}
    if corpus_hash:
        tags["realmops.corpus_hash"] = corpus_hash
    if commit := git_commit(project) or os.environ.get("REALMOPS_COMMIT"):
        tags |= {"realmops.git_commit": commit, "mlflow.source.git.commit": commit.split("-")[0]}
    if (project / "dvc.lock").is_file():
        tags["realmops.dvc_lock_hash"] = sha256_file(project / "dvc.lock")
    return tags


def git_commit(project: Path) -> str | None:
    """The commit checked out, with ``-dirty`` when tracked files there differ from it (dvc.lock aside)."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(project), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)dvc.lock")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit
