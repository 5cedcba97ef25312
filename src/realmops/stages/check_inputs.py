"""External inputs of a training: found and read before its first step, so that invalid input fails early."""

from collections.abc import Collection
from pathlib import Path

from realmops.options import Options
from realmops.questions.question_sets import read_questions
from realmops.readers.sources import list_sources
from realmops.stages import STAGES, check_files, files_in_use, option_files
from realmops.train.conll import read_conll


def check_inputs(steps: Collection[str], options: Options, project: Path, root: Path) -> None:
    """Read the external files and folders of these steps; ValueError for the first that is missing or invalid."""
    check_files(steps, options, project, root)
    files = {
        key: path
        for name in steps
        if name in STAGES
        for key, path in option_files(STAGES[name], options, project, root).items()
        if key in files_in_use(STAGES[name], options) and path.exists()
    }
    for key, path in files.items():
        _read_external_input(key, path, options)


def _read_external_input(key: str, path: Path, options: Options) -> None:
    """Read the file or folder of an option as its stage will."""
    if key == "snapshot.documents":
        list_sources(path, options.snapshot.format)
    elif key == "snapshot.warmup":
        list_sources(path, "auto")
    elif key.startswith("questions."):
        read_questions([path])
    elif key.startswith("tag."):
        read_conll(path)
