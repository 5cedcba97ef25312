"""The inputs of a submission: the identity of their content, and where pods fetch it."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from realmops.cluster import VOLUME
from realmops.cluster.polling import Log
from realmops.hub import HUB
from realmops.inputs.addresses import is_address
from realmops.inputs.dvc_project import TrackedInput, add_and_push, find_tracked
from realmops.inputs.resolve import PinnedInput, address_identity, can_resolve, check_hub_name
from realmops.options import Options
from realmops.stages.option_inputs import MODELS, listed_inputs


@dataclass(frozen=True)
class PlannedInput:
    """An input of a submission; on the hub and on the volume the value is its only identity."""

    key: str
    value: str
    identity: str
    tracked: TrackedInput | None = None

    @property
    def pinned(self) -> PinnedInput:
        if self.tracked is None:
            return PinnedInput(self.identity)
        return PinnedInput(self.identity, self.tracked.path.name, self.tracked.below, self.tracked.remote)

    @property
    def note(self) -> str:
        if self.identity == self.value:
            where = "is on the volume" if self.value.startswith(f"{VOLUME}/") else "is on the hub"
            return f"{self.key} is {self.value!r}, which {where}: the key contains its name, not its content"
        return ""

    def __str__(self) -> str:
        if self.tracked is None:
            return f"{self.key}: {self.identity}"
        return f"{self.key}: {self.value}, {self.identity} -> {self.tracked.remote['url']}"


def plan_inputs(options: Options, project: Path) -> list[PlannedInput]:
    """Return the inputs in use with their identities; ValueError for one that pods cannot read. Nothing is sent."""
    tracked: dict[Path, TrackedInput] = {}
    inputs = []
    for key, value in listed_inputs(options).items():
        try:
            inputs.append(_plan(key, value, Path(os.path.abspath(project)), tracked))
        except ValueError as error:
            raise ValueError(f"{key} is {value!r}: {error}") from None
    return inputs


def _plan(key: str, value: str, project: Path, tracked: dict[Path, TrackedInput]) -> PlannedInput:
    if is_address(value):
        return PlannedInput(key, value, address_identity(value))
    path = Path(os.path.abspath(project / value))
    is_model = key in MODELS and not can_resolve(value, project)
    if is_model and not path.is_relative_to(VOLUME):
        check_hub_name(value, project)
    if is_model or value.startswith(HUB) or path.is_relative_to(VOLUME):
        return PlannedInput(key, value, value)
    if path not in tracked:
        tracked[path] = find_tracked(path, project)
    return PlannedInput(key, value, tracked[path].identity, tracked[path])


def notes_of(inputs: Iterable[PlannedInput]) -> list[str]:
    return [item.note for item in inputs if item.note]


def send_inputs(inputs: Sequence[PlannedInput], project: Path, log: Log) -> None:
    for path, item in {item.tracked.path: item for item in inputs if item.tracked}.items():
        assert item.tracked is not None
        if path.exists():
            count = add_and_push(item.tracked, project)
            log(f"{item.value}: {count:,} objects pushed" if count else f"{item.value}: was there already")
