"""The index builder's process: REALM's retriever behind the exchange's builder loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from realmops.bert import resolve_device, resolve_precision
from realmops.corpus.snapshot import Snapshot
from realmops.index.builder import DONE, MISCONFIGURED, Parts, Work, run_builder
from realmops.index.embed import document_sequences, embed
from realmops.index.exchange import CARD, Exchange
from realmops.index.versions import Version
from realmops.model.files import MODEL, RETRIEVER, retriever_from_files
from realmops.stages.common import keep_freed_memory

EMBEDDINGS = "embeddings.safetensors"


def identity(
    snapshot: Snapshot, *, run_key: str, embedding_width: int, precision: str, threads: int, part_rows: int
) -> dict[str, Any]:
    """What trainer and builder must agree on: another corpus, vocabulary, width or precision is refused."""
    return {
        "run_key": run_key,
        "corpus_hash": snapshot.corpus_hash,
        "vocabulary_hash": snapshot.vocabulary_hash,
        "passages": len(snapshot),
        "block_wordpieces": snapshot.block_wordpieces,
        "embedding_width": embedding_width,
        "precision": precision,
        "threads": threads,
        "part_rows": part_rows,
    }


def run_index_builder(root: Path, folder: Path, *, watch_parent: int | None) -> int:
    """Serve one exchange until its trainer has finished; returns the exit code (builder.run_builder)."""
    snapshot = Snapshot.open(folder)
    exchange = Exchange(root, None, "builder-new")
    while CARD not in exchange.card.names():
        _say(f"waiting for a trainer to begin at {root}")
        if watch_parent is not None and os.getppid() != watch_parent:
            return DONE
        exchange.clock.sleep(1.0)
    card = exchange.card.manifest(CARD).run
    ours = identity(
        snapshot,
        run_key=card["run_key"],
        embedding_width=card["embedding_width"],
        precision=card["precision"],
        threads=card["threads"],
        part_rows=card["part_rows"],
    )
    try:
        device = resolve_device("auto")
        dtype = resolve_precision(card["precision"], device)
    except (KeyError, ValueError) as error:
        _say(f"the exchange asks for a precision that is not to be had here: {error}")
        return MISCONFIGURED
    keep_freed_memory()
    torch.set_num_threads(card["threads"])

    def embedder(weights: Version) -> Callable[[int, int], dict[str, bytes]]:
        retriever = retriever_from_files(weights.files).to(device)

        def rows(first: int, end: int) -> dict[str, bytes]:
            sequences = document_sequences(snapshot, range(first, end))
            return {EMBEDDINGS: save_tensors({"embeddings": embed(retriever.document, sequences, dtype)})}

        return rows

    work = Work(len(snapshot), card["part_rows"], embedder, merge)
    return run_builder(
        root,
        ours,
        work,
        name=os.environ.get("HOSTNAME", "0"),
        parent_pid=watch_parent,
        poll=0.1,
        grace=120.0 if watch_parent is None else 0.0,
        on_status=_say,
    )


def merge(weights: Version, parts: Parts) -> tuple[dict[str, bytes], dict[str, Any]]:
    """All parts as one matrix, beside the retriever that made it."""
    embedding = torch.cat([load_tensors(files[EMBEDDINGS])["embeddings"] for _, _, files in parts])
    files = {
        EMBEDDINGS: save_tensors({"embeddings": embedding}),
        MODEL: weights.files[MODEL],
        RETRIEVER: weights.files[RETRIEVER],
    }
    return files, {"published": weights.meta["trainer"]["published"]}


def _say(message: str) -> None:
    print(f"index builder: {message}", file=sys.stderr, flush=True)
