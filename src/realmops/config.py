"""Params files: options that differ from the defaults, by section, with presets and settings of the command line."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from realmops.artifacts import MANIFEST, read_json
from realmops.config_yaml import locate_key, parse_yaml, read_params, read_yaml
from realmops.credentials import redact, refuse_credentials
from realmops.options import SECTIONS, Options

PACKAGE = Path(__file__).parent
Values = Mapping[str, Mapping[str, Any]]  # options by section
Layer = tuple[str | Path, Values]  # a file or the description of a source, for error messages, and its options


def parse_options(*layers: Layer) -> Options:
    """Return the options of a run: :func:`parse_sections`, and no section contradicts another."""
    options = parse_sections(*layers)
    options.check()
    return options


def parse_sections(*layers: Layer) -> Options:
    """Return validated sections; later layers take precedence, and a ValueError names the layer that has the key."""
    values: dict[str, dict[str, Any]] = {}
    sources: dict[tuple[str, ...], str | Path] = {}
    for source, sections in layers:
        for section, keys in sections.items():
            _refuse_credentials(source, section, keys)
            values.setdefault(section, {}).update({str(key): value for key, value in keys.items()})
            sources |= {(section,): source} | {(section, str(key)): source for key in keys}
    try:
        return Options.model_validate(values)
    except ValidationError as error:
        raise ValueError(_first_error(error, sources)) from None


def recorded_options(folder: Path) -> Options | None:
    """Return the options that a stage was run with; None if its output in ``folder`` was imported or does not exist."""
    path = folder / MANIFEST
    sections = read_json(path).get("sections") if path.is_file() else None
    return parse_sections((str(path), sections)) if sections else None


def _refuse_credentials(source: str | Path, section: str, keys: Mapping[str, Any]) -> None:
    refuse_credentials([section, *keys], f"{source}: a key")
    for key, value in keys.items():
        if "://" in str(value):
            refuse_credentials(value, f"{locate_key(source, section, key)}: {section}.{key}")


def _first_error(error: ValidationError, sources: Mapping[tuple[str, ...], str | Path]) -> str:
    """Return the message for the first validation error; unknown keys precede other errors."""
    first = min(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    if first["type"] == "value_error":  # options that contradict each other; the message names them
        return str(first["ctx"]["error"])
    section, *keys = location = tuple(map(str, first["loc"]))
    place = locate_key(sources[location[:2]], *location[:2])
    if not keys:
        return f"{place}: unknown section {section!r}; sections are {_allowed(section, SECTIONS)}"
    name, value = f"{section}.{keys[0]}", first["input"]
    if first["type"] == "extra_forbidden":
        return f"{place}: unknown key {name}; allowed keys are {_allowed(keys[0], SECTIONS[section].model_fields)}"
    expected = first["msg"].removeprefix("Input should be ")
    return f"{place}: {name} is {value!r} ({type(value).__name__}); it must be {expected}"


def _allowed(name: object, names: Collection[str]) -> str:
    matches = difflib.get_close_matches(str(name), names, 1)
    return ", ".join(names) + (f"; closest match: {matches[0]}" if matches else "")


def parse_setting(text: str) -> dict[str, dict[str, Any]]:
    """Parse ``section.key=value`` of the command line, with the value as YAML; none is an empty string."""
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ValueError(f"--set {text!r} is not of the form section.key=value; for example pretrain.steps=100")
    return {section: {key: parse_yaml(value, f"--set {text!r}") if value else ""}}


def load_params(path: Path, *, presets: Iterable[str | Path] = (), settings: Iterable[str] = ()) -> Options:
    """Load all sections; in ascending precedence: defaults, named presets, the file, ``presets``, ``settings``."""
    names, overrides = read_params(path)
    given = (*preset_layers(presets, path), *setting_layers(settings))
    return parse_options(*preset_layers(names, path), (path, overrides), *given)


def preset_layers(names: Iterable[str | Path], params: Path) -> list[Layer]:
    return [(preset, read_yaml(preset)) for preset in (preset_path(name, params) for name in names)]


def setting_layers(settings: Iterable[str]) -> list[Layer]:
    return [(f"--set {setting}", parse_setting(setting)) for setting in settings]


def preset_path(name: str | Path, params: Path) -> Path:
    """Return a preset's file by path, or by name in ``presets`` next to the params file, then in the package."""
    folders = params.parent / "presets", PACKAGE / "presets"
    for candidate in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if candidate.is_file():
            return candidate
    names = {p.relative_to(folder).with_suffix("").as_posix() for folder in folders for p in folder.rglob("*.yaml")}
    raise ValueError(
        f"unknown preset {redact(str(name))!r}: neither a file nor one of the presets {', '.join(sorted(names))} of "
        f"realmops and {folders[0]}"
    )
