"""``realmops import``: published REALM checkpoints as the folders that pretrain and finetune would have written."""

import time
from collections.abc import Sequence
from pathlib import Path

from realmops import artifacts
from realmops.corpus.tfrecord import convert_blocks
from realmops.model.checkpoint_files import save_models
from realmops.model.reader import Reader
from realmops.model.realm_checkpoints import Published, finetuned_models, pretrained_models, read_published
from realmops.model.retriever import Retriever
from realmops.search.embeddings import INDEX, save_index
from realmops.stages import METRICS, PUBLISHED, STAGES, Report

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
    """Write what was given under ``root``; ValueError when the folders do not make a whole model.

    Args:
        pretrained: embedder or scorer, encoder, or openqa folders; become ``models/pretrain``.
        finetuned: a fine-tuned openqa folder, and a reader's if it is apart; become ``models/finetune``.
        blocks: the passages as TensorFlow records; become ``data/published/passages.jsonl.gz``.
        titles: their titles, in the same order.
    """
    if not (pretrained or finetuned or blocks):
        raise ValueError("nothing to import; name folders with --pretrained or --finetuned, or passages with --blocks")
    if titles is not None and blocks is None:
        raise ValueError("--titles without --blocks; name the records of the passages too")
    before, after = [read_published(f) for f in pretrained], [read_published(f) for f in finetuned]
    for one in (*before, *after):
        first = (*before, *after)[0]
        if one.vocabulary_hash != first.vocabulary_hash:
            raise ValueError(f"{one.folder} has another vocabulary than {first.folder}; they do not belong together")
    if blocks is not None:
        folder = root / PUBLISHED
        with artifacts.atomic_folder(folder) as out:
            bar = report.progress("passages", 0)
            count, corpus_hash = convert_blocks(blocks, titles, out / "passages.jsonl.gz", bar)
            artifacts.write_manifest(out, KIND, passages=count, corpus_hash=corpus_hash)
        report.say(f"{folder}: {count} passages")
    retriever: Retriever | None = None
    if before:
        retriever, reader = pretrained_models(before)
        _commit(root, "pretrain", retriever, reader, before, report)
    if after:
        if retriever is None:
            report.warn(
                "without --pretrained the tower that embeds passages is unknown: the query tower stands in for it, and "
                "only the passages of the checkpoint's own index can be searched"
            )
        _commit(root, "finetune", *finetuned_models(after, retriever), after, report)


def _corpus_hash(root: Path, passages: int) -> str:
    """Return the corpus hash of the imported passages, "" where none or as many others were imported."""
    if not (root / PUBLISHED / artifacts.MANIFEST).is_file():
        return ""
    manifest = artifacts.read_manifest(root / PUBLISHED, KIND, verify=False)
    return str(manifest["corpus_hash"]) if manifest["passages"] == passages else ""


def _commit(
    root: Path, name: str, retriever: Retriever, reader: Reader, folders: Sequence[Published], report: Report
) -> None:
    started = time.monotonic()
    names = ", ".join(str(found.folder) for found in folders)
    embedding_PE = next((e for e in (f.embeddings for f in folders) if e is not None), None)
    if name == "finetune" and embedding_PE is None:
        raise ValueError(
            f"{names}: no embeddings of passages (block_emb), which a fine-tuned "
            "model answers from; name its openqa folder"
        )
    width = retriever.query.width
    if embedding_PE is not None and (embedding_PE.dim() != 2 or embedding_PE.shape[1] != width):
        raise ValueError(
            f"{names}: block_emb has shape {list(embedding_PE.shape)}, the embedder "
            f"makes vectors of {width}; they do not belong together"
        )
    final = root / STAGES[name].folder
    with artifacts.atomic_folder(final) as out:
        save_models(out, retriever, reader, folders[0].vocabulary_hash)
        if embedding_PE is not None:
            save_index(out / INDEX, embedding_PE, _corpus_hash(root, len(embedding_PE)))
        artifacts.write_json(out / METRICS, {"seconds": round(time.monotonic() - started, 1)})
        artifacts.write_manifest(out, name, fingerprint="imported", imported=[f.folder.name for f in folders])
    embedded = "without embeddings of passages" if embedding_PE is None else f"{len(embedding_PE)} embedded passages"
    report.say(f"{final}: retriever and reader, {embedded}")
