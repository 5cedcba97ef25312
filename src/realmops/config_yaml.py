"""Params files in YAML 1.2, read by ruamel.yaml as DVC reads them; every error names its file."""

from pathlib import Path
from typing import Any

from realmops.credentials import redact, refuse_credentials

LARGEST_FILE = 1 << 20  # bytes


def _parser() -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True)


def parse_yaml(text: str | bytes, source: str | Path) -> Any:
    """Parse YAML without aliases, whose values can grow exponentially; ValueError names the source, in one line."""
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.events import AliasEvent

    try:
        if any(isinstance(event, AliasEvent) for event in _parser().parse(text)):
            raise ValueError("an alias (*name) is not allowed; write the value out")
        return _parser().load(text)
    except (ValueError, YAMLError, RecursionError) as error:
        parts = [str(error)]
        if isinstance(error, MarkedYAMLError):  # without its quotation of the file
            marks = [
                mark and f"line {mark.line + 1}, column {mark.column + 1}"
                for mark in (error.context_mark, error.problem_mark)
            ]
            parts = [part for part in (error.context, marks[0], error.problem, marks[1]) if part]
        raise ValueError(f"{source}: {redact(' '.join(', '.join(parts).split()))}") from None


def read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    return _sections(_read(path), path)


def read_params(path: Path) -> tuple[list[str], dict[str, dict[str, Any]]]:
    values = _read(path)
    presets = (values.pop("presets", None) or []) if isinstance(values, dict) else []
    refuse_credentials(presets, f"{path}: presets")
    if not isinstance(presets, list) or not all(isinstance(name, str) for name in presets):
        raise ValueError(
            f"{locate_key(path, 'presets')}: presets is {presets!r}; it must be a list of names, for example [squad]"
        )
    return presets, _sections(values, path)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; run in the project's folder or set --params")
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; a params file may have at most {LARGEST_FILE}")
    values = parse_yaml(path.read_bytes(), path)
    return {} if values is None else values


def _sections(values: Any, path: Path) -> dict[str, dict[str, Any]]:
    wrong = [n for n, v in values.items() if not isinstance(v, dict | None)] if isinstance(values, dict) else ["this"]
    if wrong:
        refuse_credentials(wrong, str(path))
        form = "expected sections with keys, for example 'run:' followed by '  seed: 0'"
        raise ValueError(f"{path}: {wrong[0]} is not a section; {form}")
    return {name: keys or {} for name, keys in values.items()}  # a section may be left empty


def locate_key(source: str | Path, *names: object) -> str:
    """Return ``source``; for a file also the line of a section, or of a key in a section."""
    if isinstance(source, str):
        return source
    node, line = _parser().compose(source.read_bytes()), 0
    for name in names:
        line, node = next(((k.start_mark.line + 1, v) for k, v in node.value if k.value == str(name)), (line, node))
    return f"{source}, line {line}" if line else str(source)
