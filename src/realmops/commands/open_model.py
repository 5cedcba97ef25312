"""Open a model for answering: from a run's folder, or the champion of a registered model."""

import re
import tempfile
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

from realmops import artifacts
from realmops.answering import opening
from realmops.answering.corpus_states import CorpusState
from realmops.answering.opened_model import OpenedModel
from realmops.answering.passage_search import PassageSearch
from realmops.baselines.rankers import BASELINES
from realmops.stages import Report
from realmops.tracking.registry import CHAMPION, COPIED_TAG, DIGEST_TAG, ModelVersion, Registry
from realmops.tracking.runs import tracking_folder

STEPS_TAG = "realmops.weights_step"
_ALIAS = re.compile(rf"models:/([\w-]+)@{CHAMPION}")


def open_model(root: Path, model: str | None = None) -> OpenedModel:
    """Open the champion in ``model`` (models:/NAME@champion) or, if None, the newest model as ``open_run`` does."""
    return open_run(root) if model is None else Champion(model, root).open()


def open_run(root: Path, state: CorpusState | None = None) -> OpenedModel:
    """Open a run's fine-tuned model with the baselines that it may use (``answering.opening.open_run``)."""
    return opening.open_run(root, BASELINES, state)


def open_search(root: Path, report: Report) -> PassageSearch:
    """Open the search of a run's corpus (``answering.opening.open_search``)."""
    return opening.open_search(root, BASELINES, report.log, report.progress)


def open_if_tuned(root: Path) -> OpenedModel | None:
    """Open a run's fine-tuned model; return None if there is none, or if it reads no passages."""
    return opening.open_if_tuned(root, BASELINES)


def open_promoted(folder: Path, registered: Path) -> OpenedModel:
    """Open a promoted model (``answering.opening.open_promoted``)."""
    return opening.open_promoted(folder, registered, BASELINES)


class Champion:
    """The version of a registered model that has the alias ``champion`` in MLflow's registry.

    ``root`` is the folder of the run, whose local registry is used if MLFLOW_TRACKING_URI is not set.
    """

    def __init__(self, uri: str, root: Path) -> None:
        match = _ALIAS.fullmatch(uri)
        if not match:
            raise ValueError(
                f"--model is {uri!r}; expected models:/NAME@{CHAMPION}, with the name from 'realmops promote'"
            )
        self.name, self.root = match[1], root
        self._registry = Registry(self.name, tracking_folder(root), "realmops")

    def mark(self) -> Hashable:
        """Return the version and the digest of its files. Raises ConnectionError if the registry is unreachable."""
        version = self._version()
        return version.number, version.tags.get(DIGEST_TAG)

    def open(self) -> OpenedModel:
        """Open the champion after its files are verified against the registered manifest."""
        version = self._version()
        temporary = tempfile.TemporaryDirectory(prefix="realmops-champion-")
        if version.tags.get(COPIED_TAG):
            folder = self._registry.fetch(version, "", Path(temporary.name))
            registered = folder / artifacts.MANIFEST
        else:
            registered = self._registry.fetch(version, artifacts.MANIFEST, Path(temporary.name))
            folder = Path(self._registry.settings(version)["folder"])
        opened = open_promoted(folder, registered)
        step = version.tags.get(STEPS_TAG)
        return replace(
            opened, version=version.uri, weights_step=None if step is None else int(step), resources=temporary
        )

    def _version(self) -> ModelVersion:
        version = self._registry.champion()
        if version is None:
            raise ValueError(
                f"{self.name} has no version with the alias {CHAMPION}; run 'realmops promote --name {self.name}'"
            )
        return version
