"""The inputs of one run: each address is read once, and all its stages get that version.

The record is ``.realmops/inputs.json`` in the folder of the run.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from realmops import artifacts
from realmops.artifacts import WORK_FOLDER
from realmops.config import Values
from realmops.inputs.addresses import is_address, listed_inputs, parse, replace_inputs
from realmops.inputs.fetch import FetchedInput, Report, fetch_addresses

RECORD = f"{WORK_FOLDER}/inputs.json"


def take_inputs(
    values: Values,
    root: Path,
    cache: Path,
    report: Report,
    reads: Callable[[str], bool] = lambda key: True,
    versions: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, dict[str, Any]], dict[str, FetchedInput]]:
    """Fetch the inputs of a run that have an address, and record their versions.

    Args:
        values: all sections of the params.
        root: folder of the run.
        cache: folder of fetched inputs.
        report: where to log.
        reads: whether an input, by section.key, is needed; the others keep their address.
        versions: the only version to take, by section.key; any of the others.

    Returns:
        The options with local paths instead of addresses, and the copies by section.key.

    Raises:
        ValueError: an address cannot be read, was changed meanwhile, or does not fit on the disk.
    """
    fetched = fetch_addresses(values, cache, report, reads, versions)
    if fetched:
        known = artifacts.read_json(root / RECORD) if (root / RECORD).is_file() else {}
        entries = {
            key: {"address": copy.address, "version": copy.version, "path": str(copy.path)}
            for key, copy in fetched.items()
        }
        artifacts.make_folder((root / RECORD).parent)
        artifacts.write_json(root / RECORD, known | entries)
    return replace_inputs(values, {key: str(copy.path) for key, copy in fetched.items()}), fetched


def recorded_inputs(
    values: Values, root: Path, reads: Callable[[str], bool] = lambda key: True
) -> dict[str, dict[str, Any]]:
    """Return the options with the recorded copies of a run instead of addresses; ``reads`` as for :func:`take_inputs`.

    Raises:
        ValueError: an address is not recorded, or its copy was deleted.
    """
    addresses = {key: value for key, value in listed_inputs(values).items() if is_address(value) and reads(key)}
    known = artifacts.read_json(root / RECORD) if addresses and (root / RECORD).is_file() else {}
    copies = {}
    for key, value in addresses.items():
        entry = known.get(key, {})
        if entry.get("address") != str(parse(value)) or not Path(entry["path"]).exists():
            raise ValueError(f"{key} is {parse(value)}, which {root / RECORD} does not have; run the task inputs first")
        copies[key] = entry["path"]
    return replace_inputs(values, copies)
