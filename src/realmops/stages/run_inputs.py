"""The inputs of one run: each is resolved once, and all stages of the run read that content.

The record is ``.realmops/inputs.json`` in the folder of the run: value, identity and path of each fetched input.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from realmops import artifacts
from realmops.artifacts import WORK_FOLDER
from realmops.inputs.addresses import is_address
from realmops.inputs.resolve import PinnedInput, ResolvedInput, can_resolve, check_hub_name, is_complete, resolve
from realmops.options import Options
from realmops.progress import Report
from realmops.stages.option_inputs import MODELS, listed_inputs

RECORD = f"{WORK_FOLDER}/inputs.json"
VALUE, IDENTITY, PATH = "value", "identity", "path"


def take_inputs(
    options: Options,
    project: Path,
    root: Path,
    cache: Path,
    report: Report,
    reads: Callable[[str], bool] = lambda key: True,
    pinned: Mapping[str, PinnedInput] = MappingProxyType({}),
) -> tuple[Options, dict[str, ResolvedInput]]:
    """Resolve the inputs of a run that ``reads`` accepts, and record those that are fetched into ``cache``.

    Return the options with the paths of fetched inputs, and those inputs by section.key. ``pinned`` is the only content
    to take; ValueError for an input that cannot be fetched, or changed meanwhile.
    """
    fetched: dict[str, ResolvedInput] = {}
    entries: dict[str, dict[str, str]] = {}
    for key, value in listed_inputs(options).items():
        if not reads(key):
            continue
        try:
            if key not in pinned and not can_resolve(value, project):
                if key in MODELS:
                    check_hub_name(value, project)
                continue
            resolved = resolve(value, project, cache, report, pinned.get(key))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
        if key in pinned or is_address(value):
            fetched[key] = resolved
            entries[key] = {VALUE: value, IDENTITY: resolved.identity, PATH: str(resolved.path)}
            report.log(f"{key}: {resolved.path} is {resolved.identity}")
    if entries:
        artifacts.make_folder((root / RECORD).parent)
        artifacts.write_json(root / RECORD, _recorded(root) | entries)
    return options.replace({key: str(resolved.path) for key, resolved in fetched.items()}), fetched


def recorded_inputs(options: Options, root: Path) -> Options:
    """Return the options with the recorded paths of a run's inputs; ValueError if one is damaged or not recorded."""
    paths, known = {}, _recorded(root)
    for key, value in listed_inputs(options).items():
        entry = known.get(key, {})
        if entry.get(VALUE) == value:
            if not is_complete(Path(entry[PATH]).parent):
                raise ValueError(f"{key}: {entry[PATH]}, the copy of {value}, is damaged; run the task inputs again")
            paths[key] = entry[PATH]
        elif is_address(value):
            raise ValueError(f"{key} is {value}, which {root / RECORD} does not have; run the task inputs first")
    return options.replace(paths)


def written_inputs(options: Options, root: Path) -> Options:
    """Return the options with the values that a run's inputs had before they were resolved."""
    known = {(key, entry[PATH]): entry[VALUE] for key, entry in _recorded(root).items()}
    listed = listed_inputs(options).items()
    return options.replace({key: known[key, value] for key, value in listed if (key, value) in known})


def _recorded(root: Path) -> dict[str, dict[str, str]]:
    return dict(artifacts.read_json(root / RECORD)) if (root / RECORD).is_file() else {}
