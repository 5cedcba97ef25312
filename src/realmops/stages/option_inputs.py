"""Which options name inputs, and which of their values a stage makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realmops.artifacts import STAGE_FOLDERS

if TYPE_CHECKING:  # the command line imports this module, and pydantic takes 0.2 s
    from realmops.config import Values

FILES = (
    *("snapshot.documents", "snapshot.warmup", "tag.train", "tag.dev"),
    *("questions.train", "questions.dev", "questions.test"),
)
MODELS = ("retriever.init", "reader.init", "closed_book.init")
NO_MODEL = {  # values that name no model
    "retriever.init": ("small",),
    "reader.init": ("encoder", "none"),
    "closed_book.init": ("small",),
}
PUBLISHED = "data/published"  # passages imported with a checkpoint
CLOZE = "data/cloze"  # questions generated from the corpus
HUB = "hf:"  # prefix of datasets on the hub


def is_stage_output(value: str) -> bool:
    """Return whether a file is in the folder of a stage, or in that of imported or generated data."""
    return any(Path(folder) in Path(value).parents for folder in (PUBLISHED, CLOZE, *STAGE_FOLDERS.values()))


def unused_inputs(values: Values) -> set[str]:
    """Return the keys of the inputs that no stage reads with these options."""
    from realmops.options import CLOSED_BOOK

    unused = set() if values["snapshot"]["warmup"] else {"snapshot.warmup"}
    unused |= set() if values["tag"]["method"] == "tagger" else {"tag.train", "tag.dev"}
    return unused | (set() if values["finetune"]["reader"] in CLOSED_BOOK else {"closed_book.init"})


def listed_inputs(values: Values) -> dict[str, str]:
    """Return the inputs in use by section.key: paths, addresses, names on the hub and datasets (``hf:...``)."""
    listed = {key: values[section][name] for key in (*FILES, *MODELS) for section, name in [key.split(".")]}
    unused = unused_inputs(values)
    return {
        key: value
        for key, value in listed.items()
        if value and key not in unused and value not in NO_MODEL.get(key, ()) and not is_stage_output(value)
    }


def replace_inputs(values: Values, inputs: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    replaced = {section: dict(keys) for section, keys in values.items()}
    for key, value in inputs.items():
        section, _, name = key.partition(".")
        replaced[section][name] = value
    return replaced
