"""Saving and opening of fine-tuned models, whose folders name their class."""

from pathlib import Path

from realmops.answering.extractive import ExtractiveQa
from realmops.answering.openqa import OpenQa
from realmops.answering.retrieval import AnswerModel, RetrieveAndRead
from realmops.answering.search_only import SearchOnly
from realmops.artifacts import read_json, write_json
from realmops.baselines import t5
from realmops.baselines.path import PathRetriever
from realmops.baselines.rankers import build_ranker
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import configure_process, device_and_dtype, freeze_linear_weights, resolve_device
from realmops.model.retriever_files import load_retriever
from realmops.options import Finetune, RunOptions
from realmops.search.bm25 import Bm25
from realmops.search.embeddings import load_passages

KIND = "reader.json"  # in the folder of a stage; names the class of the model
KINDS: dict[str, type[AnswerModel]] = {kind.kind: kind for kind in (OpenQa, ExtractiveQa, SearchOnly, t5.ClosedBook)}
QUESTIONS_IN_MEMORY = 1024  # size of the cache of passages by words or links


class ClosedBookModel(ValueError):
    """The model answers without reading passages, so it can be neither searched nor explained."""


def save_tuned(folder: Path, model: AnswerModel) -> None:
    """Write a fine-tuned model and its class into the folder of a stage."""
    model.save(folder)
    write_json(folder / KIND, {"class": model.kind})


def open_tuned(
    folder: Path,
    options: Finetune,
    run: RunOptions,
    snapshot: Snapshot,
    index: Path | None = None,
    *,
    reads: bool = True,
) -> AnswerModel:
    """Open the model of stage ``finetune`` in eval mode, on the device and in the dtype of its run.

    Args:
        folder: output of the stage.
        options: options of the stage.
        run: device and precision.
        snapshot: corpus of the index.
        index: folder of the index if it is a different one, that of an update.
        reads: False to open a model that retrieves passages without its reader.

    Raises:
        ValueError: if ``finetune.reader`` asks for a closed-book model and the folder has none, or the reverse.
    """
    name = read_kind(folder)
    if (name == t5.ClosedBook.kind) == options.reads_passages or name not in KINDS:
        raise ValueError(
            f"{folder} has a model of the class {name!r}, which finetune.reader={options.reader} does not have: run "
            "finetune with that option first, or remove it"
        )
    kind = KINDS[name] if reads or name == t5.ClosedBook.kind else SearchOnly
    if not issubclass(kind, RetrieveAndRead):
        assert kind is t5.ClosedBook
        return t5.ClosedBook.open(folder, snapshot, resolve_device(run.device))
    retriever = load_retriever(folder, snapshot.vocabulary_hash)
    reader = kind.load_reader(folder, snapshot)
    device, dtype = device_and_dtype(run, retriever, reader)
    for network in (retriever, *([reader] if reader is not None else [])):
        freeze_linear_weights(network.eval(), dtype)
    path = PathRetriever.load(folder, snapshot, options, device, dtype) if options.retriever == "path" else None
    ranker = build_ranker(options.retriever, snapshot, path, QUESTIONS_IN_MEMORY)
    passages = load_passages(index or folder, snapshot, device, retriever.vectors) if ranker is None else None
    bm25 = Bm25.of(snapshot) if ranker is None and retriever.mixture.lexical else None
    networks = retriever.to(device), reader if reader is None else reader.to(device)
    model = kind(*networks, snapshot, passages, options, dtype, ranker, bm25)
    model.restore(folder)
    return model


def open_reader_model(
    folder: Path,
    options: Finetune,
    run: RunOptions,
    snapshot: Snapshot,
    index: Path | None = None,
    *,
    reads: bool = True,
) -> RetrieveAndRead:
    """Open a fine-tuned model as ``open_tuned`` does, after :func:`configure_process`.

    Raises:
        ClosedBookModel: if the model reads no passages.
    """
    configure_process(run.threads)
    model = open_tuned(folder, options, run, snapshot, index, reads=reads)
    if not isinstance(model, RetrieveAndRead):
        raise ClosedBookModel(
            f"{folder} answers without reading passages (finetune.reader is {options.reader}), so its answers have no "
            "citations: search the run ('realmops search'), see its test answers ('realmops explain'), or fine-tune "
            "with finetune.reader=pretrain or ict"
        )
    return model


def read_kind(folder: Path) -> str:
    """Return the class of a model, which imported models do not store."""
    if (folder / KIND).is_file():
        return str(read_json(folder / KIND)["class"])
    return t5.ClosedBook.kind if (folder / t5.FILE).is_file() else OpenQa.kind
