"""Open a model for answering: from a run's folder, or the champion of a registered model."""

import re
import tempfile
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

from realmops import artifacts
from realmops.answering.opened_model import OpenedModel
from realmops.opening import open_promoted, open_run
from realmops.tracking.registry import CHAMPION, COPIED_TAG, DIGEST_TAG, ModelVersion, Registry
from realmops.tracking.runs import tracking_folder

STEPS_TAG = "realmops.weights_step"
_ALIAS = re.compile(rf"models:/([\w-]+)@{CHAMPION}")


def open_model(root: Path, model: str | None = None) -> OpenedModel:
    """Open the champion in ``model`` (models:/NAME@champion) or, if None, the newest model as ``open_run`` does."""
    return open_run(root) if model is None else Champion(model, root).open()


class Champion:
    """The version of a registered model with the alias ``champion``; ``root`` has the local registry."""

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
        version = self._version()
        temporary = tempfile.TemporaryDirectory(prefix="realmops-champion-")
        if version.tags.get(COPIED_TAG):
            folder = self._registry.fetch(version, "artifacts/", Path(temporary.name))
            registered = folder / artifacts.MANIFEST
        else:
            registered = self._registry.fetch(version, f"artifacts/{artifacts.MANIFEST}", Path(temporary.name))
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
