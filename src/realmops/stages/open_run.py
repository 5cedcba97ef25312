"""Open the folder of a run for search or question answering, at its newest corpus state."""

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from realmops import artifacts
from realmops.answering.confidence import Confidence
from realmops.answering.opened_model import OpenedModel
from realmops.answering.passage_search import PassageSearch
from realmops.artifacts import MANIFEST, WORK_FOLDER
from realmops.config import default_options, parse_section
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import configure_process, device_and_dtype, freeze_linear_weights
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import RETRIEVER_FOLDER, load_retriever, passage_tower_digest
from realmops.options import RunOptions
from realmops.search.bm25 import Bm25
from realmops.search.embeddings import INDEX, embed_corpus, load_passages, save_passages
from realmops.search.exact import exact_index
from realmops.stages import JOURNAL, METRICS, STAGES, Report
from realmops.stages.corpus_states import UPDATES, CorpusState, newest_state, pipeline_state
from realmops.stages.trained import trained_options, trained_sections, tuned_steps
from realmops.stages.tuned_model import ClosedBookModel, open_reader_model, read_kind

TRIES = 3  # attempts to open a run whose folders are being replaced
EMBEDDINGS = "search"  # below the work folder: embeddings by a retriever that is not fine-tuned yet
QUERY_WORDPIECES: int = default_options()["finetune"]["query_wordpieces"]  # query length before fine-tuning


def open_run(root: Path, state: CorpusState | None = None, *, reads: bool = True) -> OpenedModel:
    """Open a run's fine-tuned model over a corpus, in eval mode, with the digest of every file verified.

    Args:
        root: folder of the run.
        state: the corpus, by default the newest one.
        reads: False to open the model without its reader, for search alone.

    Raises:
        ValueError: if a stage has not run, a file does not match its digest, or folders keep being replaced.
        ClosedBookModel: if the model reads no passages.
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
    stages = [root / STAGES[stage].folder / MANIFEST for stage in ("snapshot", "finetune", "evaluate")]
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
    options, run = trained_options(root, ("finetune", "evaluate"), ("finetune", "run"))
    snapshot = Snapshot.open(state.snapshot / "corpus")
    model = open_reader_model(tuned, options, run, snapshot, state.finetune, reads=reads)
    read = {name: entry["sha256"] for name, entry in files.items() if name not in (INDEX, JOURNAL, METRICS)}
    version = artifacts.digest_of([read, model.options.model_dump(), str(model.dtype)])[:12]
    indexed = artifacts.read_json(state.snapshot.parent / MANIFEST)["files"] if state.number else files
    index = [entry["sha256"] for name, entry in sorted(indexed.items()) if Path(name).name == INDEX]
    content = artifacts.digest_of([version, model.snapshot.manifest["files"], index])
    return OpenedModel(model, version, tuned_steps(root), state.number, Confidence.load(tuned), content, tuned)


def open_if_tuned(root: Path, *, reads: bool = True) -> OpenedModel | None:
    """Open a run's fine-tuned model as ``open_run`` does; None if there is none, or if it reads no passages."""
    if _is_done(root, "finetune"):
        with suppress(ClosedBookModel):  # retrievers of earlier stages remain
            return open_run(root, reads=reads)
    return None


def open_search(root: Path, report: Report) -> PassageSearch:
    """Open the search of a run's corpus, by the newest trained retriever, or by BM25 only if there is none.

    For a retriever that is not fine-tuned, the embeddings of the passages are computed once and cached under the root.

    Raises:
        ValueError: if the run has no snapshot.
    """
    if opened := open_if_tuned(root, reads=False):
        search = opened.passage_search()
        return replace(search, about=search.about | {"reader": read_kind(opened.folder)})
    snapshot = Snapshot.open(root / STAGES["snapshot"].folder / "corpus")
    about = {"snapshot": snapshot.corpus_hash, "stage": "snapshot"}
    bm25 = Bm25.of(snapshot)
    for stage in ("pretrain", "ict"):
        sections = trained_sections(root, stage) if _is_done(root, stage) else {}
        if not sections:
            continue
        run = parse_section("run", sections["run"])
        retriever, passages, dtype = _load_with_embeddings(root, stage, run, snapshot, report)
        return PassageSearch(snapshot, bm25, retriever, passages, QUERY_WORDPIECES, dtype, about | {"stage": stage})
    report.log("search: no retriever is trained yet, searching by words (BM25) only")
    return PassageSearch(snapshot, bm25, None, None, QUERY_WORDPIECES, torch.float32, about)


def _is_done(root: Path, stage: str) -> bool:
    return (root / STAGES[stage].folder / MANIFEST).is_file()


def _load_with_embeddings(
    root: Path, stage: str, run: RunOptions, snapshot: Snapshot, report: Report
) -> tuple[Retriever, Any, torch.dtype]:
    """Return the retriever of a stage, the embeddings of all passages (computed unless cached) and their dtype."""
    folder = root / STAGES[stage].folder
    artifacts.read_manifest(folder, stage)
    configure_process(run.threads)
    retriever = load_retriever(folder, snapshot.vocabulary_hash)
    device, dtype = device_and_dtype(run, retriever)
    freeze_linear_weights(retriever.eval(), dtype)
    retriever = retriever.to(device)
    tower = passage_tower_digest(folder / RETRIEVER_FOLDER)
    key = artifacts.digest_of([tower, snapshot.corpus_hash, str(dtype)])[:16]
    cached = root / WORK_FOLDER / EMBEDDINGS / key
    if not cached.is_dir():
        bar = report.progress("passages embedded", len(snapshot))
        embedding = embed_corpus(retriever, snapshot, dtype, bar)
        artifacts.make_folder(cached.parent)
        with artifacts.atomic_folder(cached) as folder:
            save_passages(folder, exact_index(embedding, retriever.vectors), snapshot.corpus_hash, tower)
        for other in cached.parent.glob("[!.]*"):  # of another retriever or corpus; dot names are being written
            if other != cached:
                shutil.rmtree(other, ignore_errors=True)
    return retriever, load_passages(cached, snapshot, device, retriever.vectors), dtype
