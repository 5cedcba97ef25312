"""``realmops import``: convert published REALM checkpoints to the output folders of pretrain and finetune."""

import time
from collections.abc import Sequence
from pathlib import Path

from realmops import artifacts
from realmops.corpus.tfrecord import convert_blocks
from realmops.model.reader import Reader
from realmops.model.reader_files import save_models
from realmops.model.realm_checkpoints import (
    BLOCK_EMBEDDINGS,
    PublishedCheckpoint,
    finetuned_models,
    pretrained_models,
    read_checkpoint,
)
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import RETRIEVER_FOLDER, passage_tower_digest
from realmops.progress import Report
from realmops.search.embeddings import INDEX, save_index
from realmops.stages import METRICS, STAGES
from realmops.stages.option_inputs import PUBLISHED

KIND = "published"  # of the manifest of imported passages


def import_published(
    root: Path,
    *,
    pretrained: Sequence[Path],
    finetuned: Sequence[Path],
    blocks: Path | None,
    titles: Path | None,
    report: Report,
) -> None:
    """Write published checkpoints to ``models/pretrain`` and ``models/finetune``, and passages to data/published.

    ``pretrained`` are embedder or scorer, encoder, or openqa folders; ``finetuned`` an openqa folder, with the reader's
    if separate; ``blocks`` the passages as TensorFlow records, with ``titles`` in the same order.
    """
    if not (pretrained or finetuned or blocks):
        raise ValueError("nothing to import; give folders with --pretrained or --finetuned, or passages with --blocks")
    if titles is not None and blocks is None:
        raise ValueError("--titles without --blocks; give the records of the passages too")
    before, after = [read_checkpoint(f) for f in pretrained], [read_checkpoint(f) for f in finetuned]
    for checkpoint in (*before, *after):
        first = (*before, *after)[0]
        if checkpoint.text.vocabulary_hash != first.text.vocabulary_hash:
            raise ValueError(f"{checkpoint.folder} has another vocabulary than {first.folder}; import matching folders")
    if blocks is not None:
        folder = root / PUBLISHED
        with artifacts.atomic_folder(folder, KIND) as out:
            bar = report.progress("passages", 0)
            count, corpus_hash = convert_blocks(blocks, titles, out / "passages.jsonl.gz", bar)
            artifacts.write_manifest(out, KIND, passages=count, corpus_hash=corpus_hash)
        report.log(f"{folder}: {count} passages")
    retriever: Retriever | None = None
    if before:
        retriever, reader = pretrained_models(before)
        _commit(root, "pretrain", retriever, reader, before, report)
    if after:
        if retriever is None:
            report.warn(
                "without --pretrained the passage tower is unknown: the query tower replaces it, and only passages in "
                "the checkpoint's index can be searched"
            )
        _commit(root, "finetune", *finetuned_models(after, retriever), after, report, is_indexed=retriever is not None)


def _commit(
    root: Path,
    name: str,
    retriever: Retriever,
    reader: Reader,
    folders: Sequence[PublishedCheckpoint],
    report: Report,
    *,
    is_indexed: bool = True,
) -> None:
    """Write models as the output of a stage; ``is_indexed`` is whether the passage tower computed the index."""
    started = time.monotonic()
    names = ", ".join(str(checkpoint.folder) for checkpoint in folders)
    embedding_PE = next((f.weights[BLOCK_EMBEDDINGS] for f in folders if BLOCK_EMBEDDINGS in f.weights), None)
    if name == "finetune" and embedding_PE is None:
        raise ValueError(
            f"{names}: no passage embeddings (block_emb), which a fine-tuned model needs; give its openqa folder"
        )
    width = retriever.query.width
    if embedding_PE is not None and (embedding_PE.dim() != 2 or embedding_PE.shape[1] != width):
        raise ValueError(
            f"{names}: block_emb has shape {[*embedding_PE.shape]}, the embedder width {width}; import matching folders"
        )
    final = root / STAGES[name].folder
    with artifacts.atomic_folder(final, name) as out:
        save_models(out, retriever, reader, folders[0].text)
        if embedding_PE is not None:
            tower = passage_tower_digest(out / RETRIEVER_FOLDER) if is_indexed else ""
            imported = (root / PUBLISHED / artifacts.MANIFEST).is_file()
            passages = artifacts.read_manifest(root / PUBLISHED, KIND, verify=False) if imported else {}
            corpus_hash = passages["corpus_hash"] if passages.get("passages") == len(embedding_PE) else ""
            save_index(out / INDEX, embedding_PE, corpus_hash, tower)
        artifacts.write_json(out / METRICS, {"seconds": round(time.monotonic() - started, 1)})
        artifacts.write_manifest(out, name, fingerprint="imported", imported=[f.folder.name for f in folders])
    index = "no passage embeddings" if embedding_PE is None else f"{len(embedding_PE)} passage embeddings"
    report.log(f"{final}: retriever and reader, {index}")
