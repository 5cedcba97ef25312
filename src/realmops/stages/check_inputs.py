"""External inputs of a training: found and read before its first step, so that invalid input fails early."""

from collections.abc import Collection
from pathlib import Path

from realmops.hub import HUB
from realmops.options import Options
from realmops.questions.question_sets import read_questions
from realmops.readers.sources import list_sources
from realmops.stages import STAGES, STEP_FOLDERS, option_files
from realmops.stages.option_inputs import unused_inputs
from realmops.train.conll import read_conll


def check_inputs(steps: Collection[str], options: Options, project: Path, root: Path) -> None:
    """Read the external files and folders of these steps; ValueError for the first that is missing or invalid."""
    stages, unused = [STAGES[name] for name in steps if name in STAGES], unused_inputs(options)
    named = [item for stage in stages for item in option_files(stage, options, project, root).items()]
    files = {key: path for key, path in named if key not in unused and not options.get(key).startswith(HUB)}
    for key, path in files.items():
        if not path.exists():
            _check_producer(key, options.get(key), path, steps)
    for key, path in files.items():
        if path.exists() and key.startswith("questions."):
            read_questions([path])
        elif path.exists() and key.startswith("tag."):
            read_conll(path)
        elif path.exists():
            list_sources(path, options.snapshot.format if key == "snapshot.documents" else "auto")


def _check_producer(key: str, value: str, path: Path, steps: Collection[str]) -> None:
    """Raise ValueError unless one of the steps makes the missing file of an option."""
    producer = next((step for step, folder in STEP_FOLDERS.items() if Path(folder) in Path(value).parents), "")
    advice = f"run the stage {producer} first, or set another file" if producer else "check the path"
    advice += {
        "snapshot.warmup": ", or set snapshot.warmup='': the documents are then used for the warm start",
        "tag.train": ", or set tag.method to dates, or to given if the documents contain spans",
    }.get(key, "")
    if producer not in steps:
        raise ValueError(f"{key} is {value!r}, and {path} does not exist; {advice}")
