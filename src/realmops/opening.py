"""Open a fine-tuned model to answer, or a retriever to search: of a run's folder, or of a promoted copy."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from realmops import artifacts
from realmops.answering.confidence import Confidence
from realmops.answering.corpus_states import UPDATES, CorpusState, newest_state, pipeline_state
from realmops.answering.extractive import ExtractiveQa
from realmops.answering.opened_model import OpenedModel
from realmops.answering.openqa import OpenQa
from realmops.answering.passage_search import PassageSearch
from realmops.answering.retrieval import AnswerModel, RetrieveAndRead, SearchOnly
from realmops.artifacts import MANIFEST, PROMOTED, STAGE_FOLDERS, read_json, write_json
from realmops.baselines.rankers import open_ranker
from realmops.baselines.t5 import ClosedBook
from realmops.config import parse_sections, recorded_options
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype, freeze_linear_weights, resolve_device
from realmops.journal import JOURNAL, METRICS
from realmops.model.retriever_files import load_retriever
from realmops.options import Finetune, Options, RunOptions, epoch_steps
from realmops.process import configure_process
from realmops.progress import Report
from realmops.search.bm25 import Bm25
from realmops.search.embeddings import INDEX, load_passages

KIND = "reader.json"  # in the folder of a stage; names the class of the model
KINDS: dict[str, type[RetrieveAndRead]] = {kind.kind: kind for kind in (OpenQa, ExtractiveQa, SearchOnly)}
CORPUS, FINETUNE = "corpus", "finetune"  # subfolders of a promoted model
TRIES = 3  # attempts to open a run whose folders are being replaced


class ClosedBookModel(ValueError):
    """The model answers without reading passages, so it can be neither searched nor explained."""


def save_tuned(folder: Path, model: AnswerModel) -> None:
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

    ``index`` is the folder of another index, that of an update. With ``reads=False`` the model retrieves without its
    reader. ValueError if ``finetune.reader`` asks for another kind of model than the folder has.
    """
    name = read_kind(folder)
    is_closed_book = name == ClosedBook.kind
    if is_closed_book == options.reads_passages or not (is_closed_book or name in KINDS):
        raise ValueError(
            f"{folder} has a model of the class {name!r}, which finetune.reader={options.reader} does not have: run "
            "finetune with that option first, or remove it"
        )
    if is_closed_book:
        return ClosedBook.open(folder, resolve_device(run.device))
    kind = KINDS[name] if reads else SearchOnly
    retriever = load_retriever(folder, snapshot.vocabulary_hash)
    reader = kind.load_reader(folder, snapshot)
    device, dtype = device_and_dtype(run, retriever, reader)
    for network in (retriever, *([reader] if reader is not None else [])):
        freeze_linear_weights(network.eval(), dtype)
    ranker = open_ranker(folder, snapshot, options, device, dtype)
    passages = load_passages(index or folder, snapshot, device, retriever.vectors) if ranker is None else None
    bm25 = Bm25.of(snapshot) if ranker is None and retriever.mixture.lexical else None
    networks = retriever.to(device), reader if reader is None else reader.to(device)
    model = kind(*networks, snapshot, passages, options, dtype, ranker, bm25)
    model.restore(folder)
    return model


def _require_passages(model: AnswerModel, folder: Path) -> RetrieveAndRead:
    if not isinstance(model, RetrieveAndRead):
        raise ClosedBookModel(
            f"{folder} answers without reading passages (finetune.reader is t5), so its answers have no citations: "
            "search the run ('realmops search'), see its test answers ('realmops explain'), or fine-tune with "
            "finetune.reader=pretrain or ict"
        )
    return model


def read_kind(folder: Path) -> str:
    """Return the class of a model, which imported models do not store."""
    return str(read_json(folder / KIND)["class"]) if (folder / KIND).is_file() else OpenQa.kind


def trained_options(root: Path, *stages: str) -> Options:
    """Return the options of the first of ``stages`` that was trained rather than imported."""
    for stage in stages:
        folder = root / STAGE_FOLDERS[stage]
        artifacts.read_manifest(folder, stage)
        if options := recorded_options(folder):
            return options
    raise ValueError(f"{folder} was imported, so its training options are unknown; train it here")


def tuned_steps(root: Path) -> int | None:
    """Return the number of fine-tuning steps of the model; None if it was imported."""
    folder = root / STAGE_FOLDERS["finetune"]
    options = recorded_options(folder)
    if options is None:
        return None
    metrics = artifacts.read_json(folder / METRICS)
    examples = metrics.get("questions_with_evidence", metrics["questions"])
    return epoch_steps(examples, options.finetune.batch_size, options.finetune.epochs)


def open_run(root: Path, state: CorpusState | None = None, *, reads: bool = True) -> OpenedModel:
    """Open a run's fine-tuned model over a corpus (default: the newest), with the digest of every file verified.

    ValueError if a stage has not run, a file does not match its digest, or folders keep being replaced; ClosedBookModel
    if the model reads no passages.
    """
    for _ in range(TRIES):
        before = manifest_stats(root)
        try:
            opened = _open_once(root, state, reads)
        except (OSError, ValueError, KeyError):
            if manifest_stats(root) == before:  # otherwise files of two versions were mixed
                raise
            continue
        if manifest_stats(root) == before:
            return opened
    raise ValueError(f"{root}: the folders were replaced {TRIES} times while they were read; wait until no stage runs")


def manifest_stats(root: Path) -> tuple[tuple[str | int, ...], ...]:
    """Return path, inode, time and size of each manifest of the model; they change when a folder is replaced."""
    stages = [root / STAGE_FOLDERS[stage] / MANIFEST for stage in ("snapshot", "finetune", "evaluate")]
    updates = sorted((root / UPDATES).glob(f"[!.]*/{MANIFEST}"))
    stats: list[tuple[str | int, ...]] = []
    for path in (*stages, *updates):
        with suppress(OSError):
            status = path.stat()
            stats.append((str(path), status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(stats)


def _open_once(root: Path, state: CorpusState | None, reads: bool) -> OpenedModel:
    tuned = pipeline_state(root).finetune  # the copy in an update may have an old calibration
    files = artifacts.read_manifest(tuned, "finetune")["files"]
    state = state or newest_state(root)
    options = trained_options(root, "finetune", "evaluate")
    snapshot = Snapshot.open(state.snapshot / "corpus")
    configure_process(options.run.threads)
    tuned_model = open_tuned(tuned, options.finetune, options.run, snapshot, state.finetune, reads=reads)
    model = _require_passages(tuned_model, tuned)
    read = {name: entry["sha256"] for name, entry in files.items() if name not in (INDEX, JOURNAL, METRICS)}
    version = artifacts.digest_of([read, model.options.model_dump(), str(model.dtype)])[:12]
    indexed = artifacts.read_json(state.snapshot.parent / MANIFEST)["files"] if state.number else files
    index = [entry["sha256"] for name, entry in sorted(indexed.items()) if Path(name).name == INDEX]
    content = artifacts.digest_of([version, model.snapshot.manifest["files"], index])
    return OpenedModel(model, version, tuned_steps(root), state.number, Confidence.load(tuned), content, tuned)


def open_if_tuned(root: Path, *, reads: bool = True) -> OpenedModel | None:
    """Open a run's fine-tuned model; None if there is none, or if it reads no passages."""
    if (root / STAGE_FOLDERS["finetune"] / MANIFEST).is_file():
        with suppress(ClosedBookModel):  # retrievers of earlier stages remain
            return open_run(root, reads=reads)
    return None


def open_search(root: Path, report: Report) -> PassageSearch:
    """Open the search of a run's corpus, by BM25 only until there are embeddings."""
    if opened := open_if_tuned(root, reads=False):
        search = opened.passage_search
        return replace(search, about=search.about | {"reader": read_kind(opened.folder)})
    snapshot = Snapshot.open(root / STAGE_FOLDERS["snapshot"] / "corpus")
    about = {"snapshot": snapshot.corpus_hash, "stage": "snapshot"}
    report.log("search: there are no embeddings of the passages yet, searching by words (BM25) only")
    return PassageSearch(snapshot, Bm25.of(snapshot), None, None, Finetune().query_wordpieces, torch.float32, about)


def open_promoted(folder: Path, registered: Path) -> OpenedModel:
    """Open a promoted model, whose manifest is the ``registered`` one from the registry, on the device of its run."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} does not exist: the model's files were removed or are on another machine; pass their folder as "
            "model_config={'folder': ...}, or register a copy with 'realmops promote --copy'"
        )
    manifest = artifacts.read_manifest(folder, PROMOTED)
    if artifacts.sha256_file(folder / artifacts.MANIFEST) != artifacts.sha256_file(registered):
        raise ValueError(
            f"{folder / artifacts.MANIFEST} is not the registered manifest {registered}: the folder has another model"
        )
    options = parse_sections((str(folder), manifest["sections"]))
    snapshot = Snapshot.open(folder / CORPUS, verify=False)
    configure_process(options.run.threads)
    tuned_model = open_tuned(folder / FINETUNE, options.finetune, options.run, snapshot)
    model = _require_passages(tuned_model, folder / FINETUNE)
    version, step = manifest["digest"][:12], manifest.get("weights_step")
    return OpenedModel(model, version, step, 0, Confidence.load(folder / FINETUNE), folder=folder / FINETUNE)
