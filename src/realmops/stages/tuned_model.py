"""Fine-tuned models in their folders: saved with the name of their class, and opened by it."""

from pathlib import Path

import torch

from realmops.answering.openqa import OpenQa
from realmops.answering.retrieval import Answering, RetrieveAndRead
from realmops.artifacts import read_json, write_json
from realmops.baselines import t5
from realmops.baselines.path import PathRetriever
from realmops.baselines.rankers import ranker_of
from realmops.config import Finetune, RunOptions
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype, freeze_products, tune_process
from realmops.model.checkpoint_files import load_models
from realmops.search.bm25 import Bm25
from realmops.search.embeddings import load_passages

KIND = "reader.json"  # in a stage folder; says which class can open it
READERS: dict[str, type[Answering]] = {"pretrain": OpenQa, "ict": OpenQa, "t5": t5.ClosedBook}  # by finetune.reader
QUESTIONS_IN_MEMORY = 1024  # whose passages by words or links are remembered


class ClosedBookModel(ValueError):
    """The model of a run answers without reading passages, so it can be neither queried nor explained."""


def save_tuned(folder: Path, model: Answering) -> None:
    """Write a fine-tuned model into a stage folder, and what it is."""
    model.save(folder)
    write_json(folder / KIND, {"class": model.kind})


def open_tuned(
    folder: Path,
    options: Finetune,
    snapshot: Snapshot,
    device: torch.device,
    dtype: torch.dtype,
    index: Path | None = None,
) -> Answering:
    """The model that the stage ``finetune`` left, in evaluation mode.

    ``index`` is the folder of the index where that is another one: of an update. ValueError for another class than that
    of ``finetune.reader``.
    """
    kind, found = READERS[options.reader], _kind(folder)
    if found != kind.kind:
        raise ValueError(
            f"{folder} holds a model of the class {found!r}, and finetune.reader={options.reader} is one of the class "
            f"{kind.kind!r}: run finetune with that option first, or leave it out"
        )
    if not issubclass(kind, RetrieveAndRead):
        assert kind is t5.ClosedBook
        return t5.ClosedBook.open(folder, snapshot, device)
    retriever, reader = load_models(folder, snapshot.vocabulary_hash)
    for network in (retriever, reader):
        freeze_products(network.eval(), dtype)
    path = PathRetriever.load(folder, snapshot, options, device, dtype) if options.retriever == "path" else None
    ranker = ranker_of(options.retriever, snapshot, path, QUESTIONS_IN_MEMORY)
    passages = load_passages(index or folder, snapshot, device, retriever.vectors) if ranker is None else None
    words = Bm25.of(snapshot) if ranker is None and retriever.mixture.lexical else None
    both = retriever.to(device), reader.to(device)
    model = kind(*both, snapshot, passages, options, dtype, ranker, words)
    model.restore(folder)
    return model


def open_reading(
    folder: Path, options: Finetune, run: RunOptions, snapshot: Snapshot, index: Path | None = None
) -> RetrieveAndRead:
    """Open a fine-tuned model as ``open_tuned`` does, on the device of its run.

    Raises ClosedBookModel for one that reads nothing.
    """
    tune_process(run.threads)
    model = open_tuned(folder, options, snapshot, *device_and_dtype(run), index=index)
    if not isinstance(model, RetrieveAndRead):
        raise ClosedBookModel(
            f"{folder} answers without reading (finetune.reader is {options.reader}), so its answers cite no passage: "
            "search the run ('realmops search'), see its test answers ('realmops explain'), or fine-tune with "
            "finetune.reader=pretrain or ict"
        )
    return model


def _kind(folder: Path) -> str:
    """Models of 0.1.0, and those that were imported, do not say it."""
    if (folder / KIND).is_file():
        return str(read_json(folder / KIND)["class"])
    return t5.ClosedBook.kind if (folder / t5.FILE).is_file() else OpenQa.kind
