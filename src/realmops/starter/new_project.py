"""A new project before it is written: its files, options and presets."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realmops import config
from realmops.hub import HUB
from realmops.options import Options


@dataclass
class Project:
    """The files of a new project by name, and the lines to print."""

    folder: Path
    files: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    presets: list[str] = field(default_factory=list)
    own: dict[str, dict[str, Any]] = field(default_factory=dict)

    def put(self, key: str, value: Any) -> None:
        section, _, name = key.partition(".")
        self.own.setdefault(section, {})[name] = value

    @property
    def options(self) -> Options:
        presets = config.preset_layers(self.presets, self.folder / "params.yaml")
        return config.parse_options(*presets, ("params.yaml", self.own))


def path_in_params(project: Project, path: Path) -> str:
    """Return a path for params.yaml: relative if it is inside the project's folder, otherwise absolute."""
    if str(path).startswith(HUB):
        return str(path)
    place, home = path.resolve(), project.folder.resolve()
    return place.relative_to(home).as_posix() if place.is_relative_to(home) else str(place)
