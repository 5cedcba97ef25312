"""A snapshot of a few texts in one language, with its BM25 index."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realmops.artifacts import atomic_folder
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.word_counts import train_vocabulary
from realmops.readers.sources import list_sources
from realmops.search import bm25
from realmops.search.bm25_writer import write_bm25


def corpus(folder: Path, texts: Sequence[str], language: str, workers: int = 1) -> Snapshot:
    """The snapshot of documents without a title, with its BM25 index beside it."""
    folder.mkdir(parents=True)
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps({"title": "", "text": text}) + "\n" for text in texts))
    found = list_sources(documents, "auto")
    vocabulary = train_vocabulary(found, size=300, min_count=1)
    options: Any = {"block_wordpieces": 512, "workers": workers, "language": language}
    with atomic_folder(folder / "snapshot", "snapshot") as stage:
        write_snapshot(found, stage, vocabulary=vocabulary, **options)
    snapshot = Snapshot.open(folder / "snapshot")
    write_bm25(folder / bm25.FOLDER, snapshot)
    return snapshot
