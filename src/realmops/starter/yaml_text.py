"""Params files as text that YAML 1.1 and YAML 1.2 parsers read alike."""

import json
import re
from io import StringIO
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.representer import RoundTripRepresenter

from realmops.config import Values
from realmops.config_yaml import parse_yaml

PLAIN = re.compile(r"[A-Za-z./][\w./:@+~-]*")  # texts that YAML's flow style reads as such


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


def yaml_editor() -> YAML:
    """Return a reader and writer of YAML that keeps comments and does not fold lines."""
    editor = YAML()
    editor.Representer = _Representer
    editor.preserve_quotes = True
    editor.width = 1 << 16
    return editor


def as_yaml(values: Values) -> str:
    """Return sections as YAML text of a params file."""
    text = StringIO()
    yaml_editor().dump(values, text)
    return text.getvalue()


def yaml_scalar(text: str) -> str:
    """Return a string as a YAML scalar of any style, in quotation marks where YAML needs them."""
    is_plain = PLAIN.fullmatch(text) and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text, ensure_ascii=False)
