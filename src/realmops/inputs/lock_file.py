"""``inputs.yaml``: the addresses of a project's local inputs, for a checkout or a pod that lacks the files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from realmops import artifacts
from realmops.config_yaml import locate_key, parse_yaml
from realmops.inputs.addresses import parse
from realmops.inputs.redaction import redact

NAME = "inputs.yaml"
_HEAD = (
    "# Written by realmops submit and realmops upload: the content of files and folders that options name.\n"
    "# Commit it with params.yaml.\n"
)
_MD5 = re.compile(r"[0-9a-f]{32}(?:\.dir)?")


@dataclass(frozen=True)
class StoredInput:
    """Content of an input: its md5 as DVC computes it, and its address in a store."""

    md5: str
    address: str


def read_lock(project: Path) -> dict[str, StoredInput]:
    """Return the stored inputs of a project by their paths in the options; empty without a file.

    Raises:
        ValueError: the file is malformed; the message names file, line and key.
    """
    file = project / NAME
    if not file.is_file():
        return {}
    content = parse_yaml(file.read_bytes(), file)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a mapping; expected paths, each with md5 and address; {_REMEDY}")
    return {path: _parse_entry(file, path, entry) for path, entry in content.items()}


_REMEDY = "restore it from git, or remove it and run 'realmops upload' where the files are"


def _parse_entry(file: Path, path: object, entry: object) -> StoredInput:
    place = f"{locate_key(file, path)}: {path!r}"
    if not isinstance(path, str) or not isinstance(entry, dict):
        raise ValueError(f"{place} is {entry!r}; expected a path with md5 and address; {_REMEDY}")
    if entry.keys() != {"md5", "address"}:
        keys = ", ".join(map(str, entry)) or "none"
        raise ValueError(f"{place} has the keys {keys}; expected md5 and address; {_REMEDY}")
    md5, address = entry["md5"], entry["address"]
    if not isinstance(md5, str) or not _MD5.fullmatch(md5):
        raise ValueError(f"{place}: md5 is {md5!r}; expected 32 hexadecimal digits, with .dir for a folder; {_REMEDY}")
    if not isinstance(address, str) or redact(address) != address:
        raise ValueError(f"{place}: address is not an address without credentials; {_REMEDY}")
    if parse(address).digest != md5:
        raise ValueError(f"{place}: address is {address}; expected a stored object with the md5 {md5}; {_REMEDY}")
    return StoredInput(md5, address)


def write_lock(project: Path, stored: Mapping[str, StoredInput]) -> bool:
    """Add stored inputs to the file of a project, sorted by path; return whether it changed."""
    before = read_lock(project)
    merged = {**before, **stored}
    if merged == before:
        return False
    content = {path: {"md5": entry.md5, "address": entry.address} for path, entry in merged.items()}
    # in quotation marks every YAML version reads a digest as text
    text = yaml.safe_dump(content, default_style='"', allow_unicode=True, width=1 << 16)
    artifacts.write_bytes(project / NAME, (_HEAD + text).encode())
    return True
