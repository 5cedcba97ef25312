"""Texts of YAML files: params in YAML 1.2, and scalars for Kubernetes."""

import json
import re
from io import StringIO

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from realmops.config import Values
from realmops.options import SECTIONS

PLAIN = re.compile(r"[A-Za-z./][\w./:@+~-]*")  # strings that need no quotation marks in YAML's flow style
COLUMN = 27  # of comments


def option_comment(section: str, key: str) -> str:
    field = SECTIONS[section].model_fields[key]
    assert isinstance(field.json_schema_extra, dict)
    paper = f"paper: {field.json_schema_extra['paper']}".removesuffix("paper: ")
    return "; ".join(filter(None, (field.description, paper)))


def yaml_editor() -> YAML:
    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 1 << 16
    return editor


def as_yaml(values: Values) -> str:
    sections = {name: CommentedMap(options) for name, options in values.items()}
    for name, options in sections.items():
        for key in options:
            options.yaml_add_eol_comment(option_comment(name, key), key, column=COLUMN)
    text = StringIO()
    yaml_editor().dump(sections, text)
    return text.getvalue()


def yaml_scalar(text: str) -> str:
    """Return a string as a YAML scalar of any style, in quotation marks where YAML needs them."""
    is_plain = PLAIN.fullmatch(text) and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text, ensure_ascii=False)
