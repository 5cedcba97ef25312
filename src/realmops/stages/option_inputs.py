"""Options that name inputs, and which of their values a stage makes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from realmops.artifacts import STAGE_FOLDERS

if TYPE_CHECKING:  # the command line imports this module, and pydantic takes 0.2 s
    from realmops.options import Options

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


def is_stage_output(value: str) -> bool:
    """Return whether a file is in the folder of a stage, or in that of imported or generated data."""
    return any(Path(folder) in Path(value).parents for folder in (PUBLISHED, CLOZE, *STAGE_FOLDERS.values()))


def unused_inputs(options: Options) -> set[str]:
    """Return the keys of the inputs that no stage reads with these options."""
    tuning = options.finetune
    trains = tuning.epochs or tuning.retriever_epochs or not tuning.reads_passages
    may_be_empty = {"snapshot.warmup"} | (set() if trains else {"questions.train"})
    may_be_empty |= set() if options.pretrain.steps else {"questions.dev"}
    unused = {key for key in may_be_empty if not options.get(key)}
    unused |= set() if options.tag.method == "tagger" else {"tag.train", "tag.dev"}
    return unused | ({"closed_book.init"} if tuning.reads_passages else set())


def listed_inputs(options: Options) -> dict[str, str]:
    """Return the inputs in use by section.key: paths, addresses, names on the hub and datasets (``hf:...``)."""
    listed = {key: options.get(key) for key in (*FILES, *MODELS)}
    unused = unused_inputs(options)
    return {
        key: value
        for key, value in listed.items()
        if value and key not in unused and value not in NO_MODEL.get(key, ()) and not is_stage_output(value)
    }
