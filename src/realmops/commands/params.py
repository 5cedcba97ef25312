"""``realmops params``: write params files that YAML 1.1 and YAML 1.2 parsers read alike."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.representer import RoundTripRepresenter

from realmops.config import Values, apply_presets, apply_settings, default_options, merge_options, preset_path
from realmops.config_rules import check_rules, option_rules
from realmops.config_yaml import parse_yaml, read_params


class _Representer(RoundTripRepresenter):
    """Represents numbers and strings so that YAML 1.1 and YAML 1.2 parsers agree on them."""

    def represent_number(self, value: float) -> Any:
        """Add a decimal point: YAML 1.1 parses 1e-05 as a string."""
        mantissa, e, exponent = repr(value).partition("e")
        point = ".0" if e and "." not in mantissa else ""
        return self.represent_scalar("tag:yaml.org,2002:float", f"{mantissa}{point}{e}{exponent}")

    def represent_text(self, text: str) -> Any:
        """Quote a string that a parser would read as another type, for example no or 1e5."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, None if _is_text(text) else '"')


_Representer.add_representer(float, _Representer.represent_number)
_Representer.add_representer(str, _Representer.represent_text)


def _is_text(plain: str) -> bool:
    try:
        return bool(parse_yaml(plain, "") == yaml.safe_load(plain) == plain)
    except (ValueError, yaml.YAMLError):
        return False


def _editor() -> YAML:
    editor = YAML()
    editor.Representer = _Representer
    editor.preserve_quotes = True
    editor.width = 1 << 16  # do not fold lines
    return editor


def as_yaml(values: Values) -> str:
    """Return sections as YAML text of a params file."""
    text = StringIO()
    _editor().dump(values, text)
    return text.getvalue()


def rewritten(path: Path, presets: Sequence[str], settings: Sequence[str]) -> tuple[str, list[str]]:
    """Return the text of a params file with new presets and settings, and a list of its changes.

    Comments are kept. Values equal to those of the previous presets or the defaults get the new ones; values that the
    user has changed stay.
    """
    named, own = read_params(path)
    names = list(presets) or named
    was, now = (
        apply_presets(default_options(), [preset_path(name, path) for name in selection])
        for selection in (named, names)
    )
    before = merge_options(own, path, was)
    customised = {
        section: {key: before[section][key] for key in keys if before[section][key] != was[section][key]}
        for section, keys in own.items()
    }
    after = apply_settings(merge_options(customised, path, now), settings)
    check_rules(option_rules(after))

    editor, text, changes = _editor(), StringIO(), []
    document: Any = editor.load(path.read_text(encoding="utf-8")) or CommentedMap()
    if names != named:
        changes.append(f"presets: {', '.join(named) or 'none'} -> {', '.join(names)}")
        listed = CommentedSeq(names)
        listed.fa.set_flow_style()
        if "presets" not in document:
            document.insert(0, "presets", listed)
        document["presets"] = listed
    for section, new in after.items():
        for key, value in new.items():
            if value != before[section][key]:
                changes.append(f"{section}.{key}: {before[section][key]} -> {value}")
            if value != (before if key in own.get(section, ()) else now)[section][key]:
                document[section] = document.get(section) or {}
                document[section][key] = value
    editor.dump(document, text)
    return text.getvalue(), changes
