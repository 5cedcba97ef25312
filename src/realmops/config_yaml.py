"""Params files: YAML 1.2, as DVC reads it, where every error names file and line."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

LARGEST_FILE = 1 << 20  # bytes


class _Loader(yaml.SafeLoader):
    """YAML without aliases and without repeated keys, whose words mean what they mean in YAML 1.2, which DVC reads.

    In PyYAML's 1.1 ``no`` is false, ``010`` is 8 and ``1:30`` is 90; here they are text.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ValueError(f"line {mark.line + 1}: an alias (*name) is not allowed; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=deep), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise ValueError(f"line {line}: a key must be a word, not a list or a mapping")
            if key in seen:
                raise ValueError(f"line {line}: the key {key!r} is repeated; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in found if tag.rpartition(":")[2] in ("null", "merge")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _form, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_form})$"), list(_first))


def parse_yaml(text: str | bytes, source: str | Path) -> Any:
    """Return the value of a YAML text; ValueError names the source, and what is wrong in one line."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from None


def read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a file; ValueError names the file and line of what is wrong."""
    return _sections(_read(path), path)


def read_params(path: Path) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the names of the presets that a params file starts from, and its sections."""
    found = _read(path)
    presets = (found.pop("presets", None) or []) if isinstance(found, dict) else []
    if not isinstance(presets, list) or not all(isinstance(name, str) for name in presets):
        raise ValueError(f"{place_of(path, 'presets')}: presets is {presets!r}; it must be a list of names, as [squad]")
    return presets, _sections(found, path)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; run in the project's folder or name the file with --params")
    if path.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; a params file has at most {LARGEST_FILE}")
    values = parse_yaml(path.read_bytes(), path)
    return {} if values is None else values


def _sections(values: Any, path: Path) -> dict[str, dict[str, Any]]:
    wrong = [n for n, v in values.items() if not isinstance(v, dict | None)] if isinstance(values, dict) else ["this"]
    if wrong:
        form = "sections with keys are expected, as in 'run:' and below it '  seed: 0'"
        raise ValueError(f"{path}: {wrong[0]} is no section: {form}")
    return {name: keys or {} for name, keys in values.items()}  # a section may be left empty


def place_of(source: str | Path, *names: object) -> str:
    """Return a source in words; of a file also the line of a section, or of a section and a key in it."""
    if isinstance(source, str):
        return source
    node: Any = yaml.compose(source.read_bytes(), _Loader)
    line = 0
    for name in names:
        line, node = next(((k.start_mark.line + 1, v) for k, v in node.value if k.value == str(name)), (line, node))
    return f"{source}, line {line}" if line else str(source)
