"""A run's folder opened to be searched or asked: what its stages made, or the newest update of that."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from realmops import artifacts
from realmops.answering.confidence import Confidence
from realmops.answering.opened_model import OpenedModel
from realmops.answering.passage_search import Search
from realmops.artifacts import MANIFEST, WORK
from realmops.config import RunOptions, defaults, parse_section
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype, freeze_products, tune_process
from realmops.model.checkpoint_files import identifying_files, load_models
from realmops.model.retriever import Retriever
from realmops.search.bm25 import Bm25
from realmops.search.embeddings import INDEX, embed_corpus, load_passages, save_passages
from realmops.search.exact import exact
from realmops.stages import JOURNAL, METRICS, STAGES, Report
from realmops.stages.corpus_states import UPDATES, CorpusState, newest_state, pipeline_state
from realmops.stages.trained import options_of, sections_of, tuned_steps
from realmops.stages.tuned_model import ClosedBookModel, open_reading

TRIES = 3  # to open a run whose folders change meanwhile
EMBEDDINGS = "search"  # below the work folder: embeddings of a retriever that is not fine-tuned yet
LIMIT: int = defaults()["finetune"]["query_wordpieces"]  # of queries, before fine-tuning says it


def open_run(root: Path, state: CorpusState | None = None) -> OpenedModel:
    """Open a run's fine-tuned model over a corpus, in evaluation mode, every file compared with its digest.

    Args:
        state: the corpus; without it that of the newest update, or of the stages before there is one.

    Raises ValueError when a stage has not run, for files that were changed, and when folders are replaced again and
    again while they are read, and ClosedBookModel for a model that answers without reading.
    """
    for _ in range(TRIES):
        before = manifest_stats(root)
        try:
            opened = _open_once(root, state)
        except (OSError, ValueError, KeyError):
            if manifest_stats(root) == before:  # else a part of it was read of another one
                raise
            continue
        if manifest_stats(root) == before:
            return opened
    raise ValueError(f"{root}: its folders were replaced {TRIES} times while they were read; wait until nothing runs")


def manifest_stats(root: Path) -> tuple[tuple[str | int, ...], ...]:
    """Return path, inode, time and size of each manifest that a model may be opened from; a new folder has new ones."""
    stages = [root / STAGES[stage].folder / MANIFEST for stage in ("snapshot", "finetune", "evaluate")]
    updates = sorted((root / UPDATES).glob(f"[!.]*/{MANIFEST}"))
    found: list[tuple[str | int, ...]] = []
    for path in (*stages, *updates):
        with suppress(OSError):
            disk = path.stat()
            found.append((str(path), disk.st_ino, disk.st_mtime_ns, disk.st_size))
    return tuple(found)


def _open_once(root: Path, state: CorpusState | None) -> OpenedModel:
    tuned = pipeline_state(root).finetune  # an update has a copy of the model, which may have an old calibration
    files = artifacts.read_manifest(tuned, "finetune")["files"]
    state = state or newest_state(root)
    options, run = options_of(root, ("finetune", "evaluate"), ("finetune", "run"))
    model = open_reading(tuned, options, run, Snapshot.open(state.snapshot / "corpus"), state.finetune)
    read = {name: entry["sha256"] for name, entry in files.items() if name not in (INDEX, JOURNAL, METRICS)}
    version = artifacts.digest_of([read, model.options.model_dump(), str(model.dtype)])[:12]
    indexed = artifacts.read_json(state.snapshot.parent / MANIFEST)["files"] if state.number else files
    index = [entry["sha256"] for name, entry in sorted(indexed.items()) if Path(name).name == INDEX]
    content = artifacts.digest_of([version, model.snapshot.manifest["files"], index])
    return OpenedModel(model, version, tuned_steps(root), state.number, Confidence.load(tuned), content, tuned)


def open_search(root: Path, report: Report) -> Search:
    """Open a search of a run's corpus: by the last of its retrievers, and by words alone before there is one.

    The passages are embedded once for a retriever that is not fine-tuned, and kept under the root.

    Raises ValueError where there is no snapshot.
    """
    if _is_done(root, "finetune"):
        with suppress(ClosedBookModel):  # the retrievers of earlier stages are left
            return open_run(root).passage_search()
    snapshot = Snapshot.open(root / STAGES["snapshot"].folder / "corpus")
    about = {"snapshot": snapshot.corpus_hash, "stage": "snapshot"}
    words = Bm25.of(snapshot)
    for stage in ("pretrain", "ict"):
        sections = sections_of(root, stage) if _is_done(root, stage) else {}
        if not sections:
            continue
        run = parse_section("run", sections["run"])
        retriever, passages, dtype = _embedded(root, stage, run, snapshot, report)
        return Search(snapshot, words, retriever, passages, LIMIT, dtype, about | {"stage": stage})
    report.say("no retriever is trained yet: words alone are searched")
    return Search(snapshot, words, None, None, LIMIT, torch.float32, about)


def _is_done(root: Path, stage: str) -> bool:
    return (root / STAGES[stage].folder / MANIFEST).is_file()


def _embedded(
    root: Path, stage: str, run: RunOptions, snapshot: Snapshot, report: Report
) -> tuple[Retriever, Any, torch.dtype]:
    """Return the retriever of a stage with the embeddings of all passages, computed unless they were kept."""
    folder = root / STAGES[stage].folder
    manifest = artifacts.read_manifest(folder, stage)
    tune_process(run.threads)
    device, dtype = device_and_dtype(run)
    retriever, _ = load_models(folder, snapshot.vocabulary_hash)
    freeze_products(retriever.eval(), dtype)
    retriever = retriever.to(device)
    names = [path.relative_to(folder).as_posix() for path in identifying_files(folder, "retriever")]
    digests = [manifest["files"][name]["sha256"] for name in names]
    key = artifacts.digest_of([*digests, snapshot.corpus_hash, str(dtype)])[:16]
    kept = root / WORK / EMBEDDINGS / key
    if not kept.is_dir():
        bar = report.progress("passages embedded", len(snapshot))
        embedding = embed_corpus(retriever, snapshot, dtype, bar)
        artifacts.make_folder(kept.parent)
        with artifacts.atomic_folder(kept) as made:
            save_passages(made, exact(embedding, retriever.vectors), snapshot.corpus_hash)
        for other in kept.parent.glob("[!.]*"):  # of another retriever or corpus; with a dot others are at work
            if other != kept:
                shutil.rmtree(other, ignore_errors=True)
    return retriever, load_passages(kept, snapshot, device, retriever.vectors), dtype
