"""Params files in YAML 1.2, as DVC reads it; every error names file and line."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

LARGEST_FILE = 1 << 20  # bytes


class _Loader(yaml.SafeLoader):
    """YAML 1.2 loader that rejects aliases and repeated keys.

    PyYAML implements YAML 1.1, where ``no`` is false, ``010`` is 8 and ``1:30`` is 90; in 1.2 they are strings.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node, rejecting aliases."""
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ValueError(f"line {mark.line + 1}: an alias (*name) is not allowed; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping, rejecting repeated and unhashable keys."""
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=deep), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise ValueError(f"line {line}: a key must be a string, not a list or a mapping")
            if key in keys:
                raise ValueError(f"line {line}: the key {key!r} is repeated; keep one")
            keys.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _form, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_form})$"), list(_first))


def parse_yaml(text: str | bytes, source: str | Path) -> Any:
    """Parse YAML; ValueError names the source, and the problem in one line."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from None


def read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a file; ValueError names the file and the line of an error."""
    return _sections(_read(path), path)


def read_params(path: Path) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the presets that a params file names, and its sections."""
    values = _read(path)
    presets = (values.pop("presets", None) or []) if isinstance(values, dict) else []
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
        form = "expected sections with keys, for example 'run:' followed by '  seed: 0'"
        raise ValueError(f"{path}: {wrong[0]} is not a section; {form}")
    return {name: keys or {} for name, keys in values.items()}  # a section may be left empty


def locate_key(source: str | Path, *names: object) -> str:
    """Return ``source``; for a file also the line of a section, or of a key in a section."""
    if isinstance(source, str):
        return source
    node: Any = yaml.compose(source.read_bytes(), _Loader)
    line = 0
    for name in names:
        line, node = next(((k.start_mark.line + 1, v) for k, v in node.value if k.value == str(name)), (line, node))
    return f"{source}, line {line}" if line else str(source)
