"""The key of a training: equal when everything that decides what comes out of it is equal, comments aside."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from realmops import artifacts
from realmops.stages import HUB, content_of, outside_files

NOT_TRAINED_WITH = {"tracking"}  # sections of params that change nothing of what is trained
GIVEN = {"options", "run", "key"}  # parameters of a pipeline whose defaults a submission replaces
PLACEMENT = {  # parameters that say where and with what a training runs
    "accelerator", "accelerators", "affinity", "builders", "cpu", "deployment", "endpoint", "memory",
    "node_selector", "nproc_per_node", "runs", "secret", "settings", "shard_pods", "tolerations", "volume",
    "wait_seconds",
}  # fmt: skip


def key_of(
    values: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, Any],
    pipeline: Sequence[Any],
    arguments: Mapping[str, Any],
) -> str:
    """The sha256 over params, digests of files from outside, and the parsed documents of a pipeline.

    ``arguments``, by parameter, count as if the pipeline had them as defaults; but those of ``PLACEMENT`` do not, so
    that another try with more memory goes on in the folder of the first.
    """
    compiled, *others = pipeline
    inputs = compiled["root"].get("inputDefinitions", {})
    declared = {
        name: {what: value for what, value in entry.items() if what != "defaultValue" or name not in GIVEN}
        | ({"defaultValue": arguments[name]} if name in arguments.keys() - PLACEMENT else {})
        for name, entry in inputs.get("parameters", {}).items()
    }
    root = compiled["root"] | {"inputDefinitions": inputs | {"parameters": declared}}
    return artifacts.digest_of(
        {
            "params": {name: keys for name, keys in values.items() if name not in NOT_TRAINED_WITH},
            "files": files,
            "pipeline": [compiled | {"root": root}, *others],
        }
    )


def digests_of_files(values: Mapping[str, Mapping[str, Any]], project: Path) -> tuple[dict[str, Any], list[str]]:
    """A digest of each file that params name and no stage makes, by section.key, and a line for each that has none.

    Of the content where the file can be read here; else what DVC has recorded, in dvc.lock or in a .dvc file.
    """
    found: dict[str, Any] = {}
    notes = []
    recorded = dict(_recorded(project))
    for key, path in outside_files(values, project).items():
        section, option = key.split(".")
        name = values[section][option]
        if path.exists():
            found[key] = artifacts.digest_of(content_of(path))
            continue
        found[key] = recorded.get(_plain(path)) or _pointed_at(path, project)
        if found[key] is None:
            found[key] = name
            where = "lies on the hub" if name.startswith(HUB) else "is not here, and DVC has no digest of it"
            notes.append(f"{key} is {name!r}, which {where}: the key holds its name, not its content")
    return found, notes


def _recorded(project: Path) -> Iterator[tuple[Path, str]]:
    """Files of dvc.lock with their digests."""
    lock = project / "dvc.lock"
    for stage in ((_read(lock) or {}).get("stages") or {}).values() if lock.is_file() else ():
        for entry in [*stage.get("deps", []), *stage.get("outs", [])]:
            if "md5" in entry:
                yield _plain(project / entry["path"]), entry["md5"]


def _pointed_at(path: Path, project: Path) -> str | None:
    """What a .dvc file says of a file or of a folder around it; that of a file elsewhere may lie beside params."""
    for place in (path, *path.parents, project / path.name):
        pointer = place.parent / f"{place.name}.dvc"
        if pointer.is_file():
            outs = (_read(pointer) or {}).get("outs") or [{}]
            digest: str | None = outs[0].get("md5")
            return digest
    return None


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_bytes(), yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}; 'dvc status' says more") from None


def _plain(path: Path) -> Path:
    return Path(os.path.abspath(path))
