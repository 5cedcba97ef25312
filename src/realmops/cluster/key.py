"""The key of a training: equal if everything that determines its result is equal."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import yaml

from realmops import artifacts
from realmops.config import CLOSED_BOOK, Values, cache_key_options
from realmops.config_rules import ENCODER, NO_READER
from realmops.corpus.documents import printable_path
from realmops.corpus.walk import walk_files
from realmops.stages import HUB, READER_INIT, content_digests, external_inputs, get_option

NOT_TRAINED_WITH = {"tracking"}  # sections of params without effect on the result
SUBMISSION_PARAMETERS = {"options", "run", "key"}  # pipeline parameters that a submission sets
PLACEMENT = {  # parameters of where a training runs; the number of processes and accelerators affects the result
    "accelerator", "affinity", "builders", "cpu", "cpu_request", "deployment", "endpoint", "memory", "memory_request",
    "node_selector", "runs", "secret", "settings", "shard_pods", "tolerations", "volume", "wait_seconds",
}  # fmt: skip
DIGEST = "@sha256:"  # in an image name, after the registry and repository


def training_key(
    values: Values,
    files: Mapping[str, Any],
    pipeline: Sequence[Any],
    arguments: Mapping[str, Any],
) -> str:
    """Return the sha256 over params, digests of external files, and the parsed documents of a pipeline.

    ``arguments`` count like defaults of the pipeline's parameters, except those in ``PLACEMENT``, so that a second
    submission with more memory resumes in the folder of the first. The number of processes and accelerators is part of
    the key: it changes how a batch is split and rounded, and so the weights.
    """
    compiled, *platforms = pipeline
    inputs = compiled["root"].get("inputDefinitions", {})
    declared = {name: _declare(name, entry, arguments) for name, entry in inputs.get("parameters", {}).items()}
    root = compiled["root"] | {"inputDefinitions": inputs | {"parameters": declared}}
    return artifacts.digest_of(
        {
            "params": cache_key_options({name: keys for name, keys in values.items() if name not in NOT_TRAINED_WITH}),
            "files": files,
            "pipeline": [compiled | {"root": root}, *platforms],
        }
    )


def _declare(name: str, entry: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's definition with its effective value in canonical form."""
    declared = {field: value for field, value in entry.items() if field != "defaultValue"}
    value = arguments.get(name, None if name in SUBMISSION_PARAMETERS else entry.get("defaultValue"))
    if name in PLACEMENT or value is None:
        return declared
    if entry["parameterType"].startswith("NUMBER"):  # 1 of the command line is 1.0 in a compiled file
        value = float(value)
    if name == "image" and DIGEST in value:
        value = value.partition(DIGEST)[2]
    return declared | {"defaultValue": value}


def file_digests(values: Values, project: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the digests of external inputs by section.key, and a note for each input without one.

    Digests are DVC's, from the content or, where the content is absent, from DVC's records, so that a laptop and CI
    agree. Where content and record differ, the content counts.
    """
    digests: dict[str, Any] = {}
    notes = []
    project = _absolute(project)
    recorded = {record.path: record for record in _read_lock(project)}
    external = external_inputs(values, project)
    for section in ("retriever", *(["closed_book"] if values["finetune"]["reader"] in CLOSED_BOOK else [])):  # encoders
        if (init := values[section]["init"]) != "small":
            external[f"{section}.init"] = project / init
    if (init := values["reader"]["init"]) not in (ENCODER, NO_READER):
        external[READER_INIT] = project / init
    for key, path in external.items():
        name, path = get_option(values, key), _absolute(path)
        digests[key] = _digest(path, _read_pointer(path, project) or recorded.get(path))
        if digests[key] is None:
            digests[key] = name
            where = "is on the hub" if name.startswith(HUB) else "does not exist here and has no digest in DVC"
            notes.append(f"{key} is {name!r}, which {where}: the key contains its name, not its content")
    return digests, notes


def image_note(image: str) -> list[str]:
    """Return a note if the image name is mutable: without a digest, and with no tag or a word such as ``latest``."""
    tag = image.rpartition("/")[2].partition(":")[2]
    if DIGEST in image or any(character.isdigit() for character in tag):
        return []
    return [
        f"image is {image!r}, whose {f'tag {tag}' if tag else 'missing tag'} does not identify the code: after a new "
        "build the key is unchanged and --once finds the older run; set IMAGE@sha256:..., or a tag for each build"
    ]


@dataclass(frozen=True)
class _KeyRecord:
    """DVC's record of a file or folder."""

    path: Path
    digest: str
    algorithm: str

    @classmethod
    def of(cls, path: Path, entry: Mapping[str, str]) -> Self:
        """Read an entry of a DVC file; those of DVC 2 name no algorithm and normalise line ends (md5-dos2unix)."""
        return cls(_absolute(path), entry["md5"], entry.get("hash", "md5-dos2unix"))


def _digest(path: Path, record: _KeyRecord | None) -> str | None:
    if not path.exists():
        return record.digest if record else None
    if record and record.path.exists() and _compute_digest(record.path, record.algorithm) == record.digest:
        return record.digest
    return _compute_digest(path)


def _compute_digest(path: Path, algorithm: str = "md5") -> str:
    """Return the digest that ``dvc add`` would record, without files that .dvcignore excludes.

    DVC does not follow links to folders; the files that a reader finds below them are added to the digest.
    """
    if find_spec("dvc") is None:
        raise ValueError("the key of a training needs DVC's digests; pip install 'realmops[cluster]'")
    from dvc.ignore import DvcIgnoreFilter
    from dvc_data.hashfile.build import IgnoreInCollectedDirError, build
    from dvc_data.hashfile.db import HashFileDB
    from dvc_objects.fs.local import localfs

    if not path.is_dir():
        artifacts.open_regular(path).close()
    root = next((str(place) for place in path.parents if (place / ".dvc").is_dir()), None)
    walk_filter: Any = _RegularFiles(DvcIgnoreFilter(localfs, root) if root else None)
    database = HashFileDB(localfs, os.devnull, read_only=True)  # stores nothing
    try:
        _, _, tree = build(database, str(path), localfs, algorithm, dry_run=True, ignore=walk_filter)
    except IgnoreInCollectedDirError as error:
        raise ValueError(f"{path}: {error}; move it to a folder above") from None
    digest, linked = str(tree.hash_info.value), _linked(path) if path.is_dir() else {}
    return artifacts.digest_of([digest, linked]) if linked else digest


@dataclass(frozen=True)
class _RegularFiles:
    """A filter of DVC's walk that drops ignored files, and unreadable ones such as pipes and broken links."""

    ignored: Any  # DvcIgnoreFilter or None

    def walk(self, fs: Any, path: str) -> Iterator[tuple[str, list[str], list[str]]]:
        """Walk as ``os.walk`` does."""
        for root, folders, files in self.ignored.walk(fs, path) if self.ignored else fs.walk(path):
            yield root, folders, [name for name in files if os.path.isfile(os.path.join(root, name))]


def _linked(folder: Path) -> dict[str, Any]:
    """Return the digests of the files below links to folders, by name."""
    top = folder.resolve()
    return {
        printable_path(file.relative_to(folder)): content_digests(file)
        for file in walk_files(folder)
        if file.parent.resolve() != top / file.parent.relative_to(folder)
    }


def _read_lock(project: Path) -> Iterator[_KeyRecord]:
    """Yield the records of dvc.lock."""
    lock = project / "dvc.lock"
    for stage in ((_read(lock) or {}).get("stages") or {}).values() if lock.is_file() else ():
        for entry in [*stage.get("deps", []), *stage.get("outs", [])]:
            if "md5" in entry:
                yield _KeyRecord.of(project / entry["path"], entry)


def _read_pointer(path: Path, project: Path) -> _KeyRecord | None:
    """Return the record in the .dvc file of a path or of a parent folder; for an external file, also in the project."""
    for candidate in (path, *path.parents, project / path.name):
        pointer = candidate.parent / f"{candidate.name}.dvc"
        if pointer.is_file():
            [entry, *_] = (_read(pointer) or {}).get("outs") or [{}]
            target = candidate if candidate in path.parents else path
            return _KeyRecord.of(target, entry) if "md5" in entry else None
    return None


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_bytes(), yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}; see 'dvc status'") from None


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))
