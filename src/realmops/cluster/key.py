"""The key of a training: equal when everything that decides what comes out of it is equal, comments aside."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import yaml

from realmops import artifacts
from realmops.config import CLOSED_BOOK, Values, keyed
from realmops.corpus.documents import shown
from realmops.corpus.walk import files_below
from realmops.stages import HUB, content_of, option_of, outside_files

NOT_TRAINED_WITH = {"tracking"}  # sections of params that change nothing of what is trained
GIVEN = {"options", "run", "key"}  # parameters of a pipeline whose defaults a submission replaces
PLACEMENT = {  # parameters that say where a training runs; how many processes and accelerators it has is none of them
    "accelerator", "affinity", "builders", "cpu", "cpu_request", "deployment", "endpoint", "memory", "memory_request",
    "node_selector", "runs", "secret", "settings", "shard_pods", "tolerations", "volume", "wait_seconds",
}  # fmt: skip
DIGEST = "@sha256:"  # in the name of an image; what stands before it is where the image is pulled from


def key_of(
    values: Values,
    files: Mapping[str, Any],
    pipeline: Sequence[Any],
    arguments: Mapping[str, Any],
) -> str:
    """The sha256 over params, digests of files from outside, and the parsed documents of a pipeline.

    ``arguments``, by parameter, count as if the pipeline had them as defaults; but those of ``PLACEMENT`` do not, so
    that another try with more memory goes on in the folder of the first. How many processes and accelerators train
    decides how a batch is shared and rounded, and so what the weights are.
    """
    compiled, *others = pipeline
    inputs = compiled["root"].get("inputDefinitions", {})
    declared = {name: _declared(name, entry, arguments) for name, entry in inputs.get("parameters", {}).items()}
    root = compiled["root"] | {"inputDefinitions": inputs | {"parameters": declared}}
    return artifacts.digest_of(
        {
            "params": keyed({name: keys for name, keys in values.items() if name not in NOT_TRAINED_WITH}),
            "files": files,
            "pipeline": [compiled | {"root": root}, *others],
        }
    )


def _declared(name: str, entry: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a pipeline says of a parameter, with the value that counts, written in one way."""
    declared = {what: value for what, value in entry.items() if what != "defaultValue"}
    value = arguments.get(name, None if name in GIVEN else entry.get("defaultValue"))
    if name in PLACEMENT or value is None:
        return declared
    if entry["parameterType"].startswith("NUMBER"):  # 1 on the command line is 1.0 in a compiled file
        value = float(value)
    if name == "image" and DIGEST in value:
        value = value.partition(DIGEST)[2]
    return declared | {"defaultValue": value}


def digests_of_files(values: Values, project: Path) -> tuple[dict[str, Any], list[str]]:
    """A digest of each file that params name and no stage makes, by section.key, and a line for each that has none.

    It is DVC's, whether the content is here or only what DVC has recorded of it: a laptop and CI give the same. Content
    that differs from its record counts, not the record.
    """
    found: dict[str, Any] = {}
    notes = []
    project = _plain(project)
    recorded = {record.path: record for record in _locked(project)}
    outside = outside_files(values, project)
    for section in ("bert", *(["closed_book"] if values["finetune"]["reader"] in CLOSED_BOOK else [])):  # encoders
        if (init := values[section]["init"]) != "small":
            outside[f"{section}.init"] = project / init
    for key, path in outside.items():
        name, path = option_of(values, key), _plain(path)
        found[key] = _digest(path, _pointed_at(path, project) or recorded.get(path))
        if found[key] is None:
            found[key] = name
            where = "lies on the hub" if name.startswith(HUB) else "is not here, and DVC has no digest of it"
            notes.append(f"{key} is {name!r}, which {where}: the key holds its name, not its content")
    return found, notes


def image_note(image: str) -> list[str]:
    """A line about an image whose name comes to mean other code: without a digest, its tag is a word as ``latest``."""
    tag = image.rpartition("/")[2].partition(":")[2]
    if DIGEST in image or any(character.isdigit() for character in tag):
        return []
    return [
        f"image is {image!r}, and {f'the tag {tag}' if tag else 'no tag'} says which code that is: with other code in "
        "it the key stays the same, and --once finds the older run; name IMAGE@sha256:..., or a tag for each build"
    ]


@dataclass(frozen=True)
class _KeyRecord:
    """What DVC has recorded of a file or a folder."""

    path: Path
    digest: str
    algorithm: str

    @classmethod
    def of(cls, path: Path, entry: Mapping[str, str]) -> Self:
        """DVC before 3 names no algorithm: it was one that takes the line ends of Windows for those of Unix."""
        return cls(_plain(path), entry["md5"], entry.get("hash", "md5-dos2unix"))


def _digest(path: Path, record: _KeyRecord | None) -> str | None:
    if not path.exists():
        return record.digest if record else None
    if record and record.path.exists() and _digest_here(record.path, record.algorithm) == record.digest:
        return record.digest
    return _digest_here(path)


def _digest_here(path: Path, algorithm: str = "md5") -> str:
    """Return what ``dvc add`` would record of a file or a folder; of a folder without what .dvcignore names.

    DVC follows no links to folders. Where a reader does, the digest is over what it finds there too.
    """
    if find_spec("dvc") is None:
        raise ValueError("the key of a training wants DVC's digests; pip install 'realmops[cluster]'")
    from dvc.ignore import DvcIgnoreFilter
    from dvc_data.hashfile.build import IgnoreInCollectedDirError, build
    from dvc_data.hashfile.db import HashFileDB
    from dvc_objects.fs.local import localfs

    if not path.is_dir():
        artifacts.open_regular(path).close()
    root = next((str(place) for place in path.parents if (place / ".dvc").is_dir()), None)
    walked: Any = _RegularFiles(DvcIgnoreFilter(localfs, root) if root else None)
    database = HashFileDB(localfs, os.devnull, read_only=True)  # nothing is kept
    try:
        _, _, made = build(database, str(path), localfs, algorithm, dry_run=True, ignore=walked)
    except IgnoreInCollectedDirError as error:
        raise ValueError(f"{path}: {error}; move it to a folder above") from None
    recorded, linked = str(made.hash_info.value), _linked(path) if path.is_dir() else {}
    return artifacts.digest_of([recorded, linked]) if linked else recorded


@dataclass(frozen=True)
class _RegularFiles:
    """A filter of DVC's walk: what DVC ignores goes, and what it cannot read, such as pipes and broken links."""

    ignored: Any  # DvcIgnoreFilter or None

    def walk(self, fs: Any, path: str) -> Iterator[tuple[str, list[str], list[str]]]:
        """Walk as ``os.walk`` does."""
        for root, folders, files in self.ignored.walk(fs, path) if self.ignored else fs.walk(path):
            yield root, folders, [name for name in files if os.path.isfile(os.path.join(root, name))]


def _linked(folder: Path) -> dict[str, Any]:
    """Return the digests of the files that are read below links to folders, by name."""
    top = folder.resolve()
    return {
        shown(file.relative_to(folder)): content_of(file)
        for file in files_below(folder)
        if file.parent.resolve() != top / file.parent.relative_to(folder)
    }


def _locked(project: Path) -> Iterator[_KeyRecord]:
    """Files of dvc.lock with their digests."""
    lock = project / "dvc.lock"
    for stage in ((_read(lock) or {}).get("stages") or {}).values() if lock.is_file() else ():
        for entry in [*stage.get("deps", []), *stage.get("outs", [])]:
            if "md5" in entry:
                yield _KeyRecord.of(project / entry["path"], entry)


def _pointed_at(path: Path, project: Path) -> _KeyRecord | None:
    """What a .dvc file says of a file or of a folder around it; that of a file elsewhere may lie beside params."""
    for place in (path, *path.parents, project / path.name):
        pointer = place.parent / f"{place.name}.dvc"
        if pointer.is_file():
            [entry, *_] = (_read(pointer) or {}).get("outs") or [{}]
            what = place if place in path.parents else path
            return _KeyRecord.of(what, entry) if "md5" in entry else None
    return None


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_bytes(), yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}; 'dvc status' says more") from None


def _plain(path: Path) -> Path:
    return Path(os.path.abspath(path))
