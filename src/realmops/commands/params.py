"""``realmops params``: change presets and options of a params file."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from realmops.config import parse_options, preset_layers, setting_layers
from realmops.config_yaml import read_params
from realmops.options import Options
from realmops.starter.yaml_text import yaml_editor


def rewritten(path: Path, presets: Sequence[str], settings: Sequence[str]) -> tuple[str, list[str], Options]:
    """Return a params file's text with new presets and settings, its changes and options; user's values stay."""
    named, own = read_params(path)
    names = list(presets) or named
    was, now = (parse_options(*preset_layers(selection, path)).model_dump() for selection in (named, names))
    before = parse_options(("", was), (path, own)).model_dump()
    customised = {
        section: {key: before[section][key] for key in keys if before[section][key] != was[section][key]}
        for section, keys in own.items()
    }
    options = parse_options(("", now), (path, customised), *setting_layers(settings))

    editor, text, changes = yaml_editor(), StringIO(), []
    document: Any = editor.load(path.read_text(encoding="utf-8")) or CommentedMap()
    if names != named:
        changes.append(f"presets: {', '.join(named) or 'none'} -> {', '.join(names)}")
        listed = CommentedSeq(names)
        listed.fa.set_flow_style()
        if "presets" not in document:
            document.insert(0, "presets", listed)
        document["presets"] = listed
    for section, new in options.model_dump().items():
        for key, value in new.items():
            if value != before[section][key]:
                changes.append(f"{section}.{key}: {before[section][key]} -> {value}")
            if value != (before if key in own.get(section, ()) else now)[section][key]:
                document[section] = document.get(section) or {}
                document[section][key] = value
    editor.dump(document, text)
    return text.getvalue(), changes, options
