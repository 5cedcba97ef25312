"""Ingestion against the tokenizer alone: MB/s, scaling with workers, memory and time at several sizes.

    python benchmarks/ingest.py
    python benchmarks/ingest.py --documents FILE.jsonl.gz [FILE ...] --copies 1 4 --workers 1 2

Without --documents the text is generated; it repeats its words, which our tokenizer remembers, so that prose is the
harder test. The documents are repeated under other ids and with a number before each text, so that copies are no
duplicates. "The tokenizer alone" is `tokenizers` on one core: encode_batch over the sentences of the same texts, ids
and offsets taken out. The two take turns; the ratio is that of MB per processor second, of ingestion with all its
workers but without the start of Python. MB are of text in UTF-8. Memory is that of the whole process tree (proportional
set size, sampled twice a second).
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import against
from against import Goal, Row

GOAL = Goal(0.8)
GENERATED, SENTENCES = 3_000, 40  # documents, and sentences of each: 7 MB
WIKIPEDIA = 13_353_718  # passages of the paper's snapshot
_INGEST = """
import json, os, sys, time
from pathlib import Path
from realmops.artifacts import atomic_folder
from realmops.readers.sources import list_sources
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.vocabulary import read_vocabulary
corpus, folder, vocabulary, workers = sys.argv[1:]
start, before = time.perf_counter(), os.times()
with atomic_folder(Path(folder)) as stage:
    manifest = write_snapshot(
        list_sources(Path(corpus), "auto"), stage, vocabulary=read_vocabulary(Path(vocabulary)),
        block_wordpieces=288, workers=int(workers),
    )
wall, after = time.perf_counter() - start, os.times()
cpu = sum(after[:4]) - sum(before[:4])
counts = {key: manifest[key] for key in ("records", "documents", "passages", "tokens")}
print(json.dumps({**counts, "wall": wall, "cpu": cpu}))
"""


def lines(files: list[Path]) -> Iterator[dict[str, Any]]:
    """The documents of JSON-lines files, plain or gzipped."""
    for path in files:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            yield from map(json.loads, file)


def write_copies(files: list[Path], copies: int, path: Path) -> float:
    """Write the documents so many times; returns MB of text."""
    size = 0
    with open(path, "w", encoding="utf-8") as file:
        for copy in range(copies):
            for document in lines(files):
                text = f"{copy}: {document['text']}" if copy else document["text"]
                record = {"id": f"{document['id']}/{copy}", "title": document["title"], "text": text}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                size += len(text.encode())
    return size / 1e6


def tokenizer_rate(files: list[Path], vocabulary: Path, megabytes: float) -> float:
    """MB/s of one core: ``tokenizers`` over the sentences of the first documents, processor time."""
    from realmops.corpus.passages import split_sentences
    from realmops.corpus.vocabulary import build_tokenizer, read_vocabulary

    tokenizer = build_tokenizer(read_vocabulary(vocabulary))
    size = seconds = 0.0
    sentences: list[str] = []
    for document in lines(files):
        text = document["text"]
        sentences += [text[start:end] for start, end in split_sentences(text)]
        if len(sentences) >= 8192:
            seconds += against.processor_seconds(partial(encode, tokenizer, sentences))
            size += sum(len(sentence.encode()) for sentence in sentences) / 1e6
            sentences = []
        if size > megabytes:
            break
    return size / seconds


def encode(tokenizer: Any, sentences: list[str]) -> None:
    """Ids and offsets of sentences, taken out."""
    for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False):
        assert len(encoding.ids) == len(encoding.offsets)


def tree_memory(pid: int) -> float:
    """MiB of a process and its children, shared pages divided among those that share them."""
    total = 0
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total = int(line.split()[1])
    except OSError:
        return 0.0
    return total / 1024 + sum(tree_memory(int(child)) for child in children)


def ingest(corpus: Path, out: Path, vocabulary: Path, workers: int) -> dict[str, Any]:
    """One snapshot in a process of its own: counts, wall and CPU seconds, MiB of all processes at most."""
    folder = out / "snapshot"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-c", _INGEST, corpus, folder, vocabulary, str(workers)]
    child = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    peak = 0.0

    def watch() -> None:
        nonlocal peak
        while child.poll() is None:
            peak = max(peak, tree_memory(child.pid))
            time.sleep(0.5)

    watcher = threading.Thread(target=watch)
    watcher.start()
    told, _ = child.communicate()
    watcher.join()
    if child.returncode:
        raise SystemExit(f"the ingestion ended with exit code {child.returncode}")
    shutil.rmtree(folder, ignore_errors=True)
    return {**json.loads(told), "mib": peak}


def compare(
    name: str, corpus: Path, megabytes: float, vocabulary: Path, workers: int, arguments: argparse.Namespace
) -> Row:
    """The row of one size and number of workers."""
    out, runs = corpus.parent, list[dict[str, Any]]()

    def ours() -> float:
        runs.append(ingest(corpus, out, vocabulary, workers))
        return megabytes / float(runs[-1]["cpu"])

    def theirs() -> float:
        return tokenizer_rate([corpus], vocabulary, min(megabytes, arguments.tokenizer_mb))

    rates, peers = against.interleave([ours, theirs], arguments.repeats)
    last = runs[-1]
    wall = min(run["wall"] for run in runs)
    hours = wall * WIKIPEDIA / last["passages"] / 3600
    note = (
        f"{last['documents']} documents, {last['passages']} passages, {megabytes / wall:.2f} MB/s by the clock, "
        f"{max(run['mib'] for run in runs):.0f} MiB; {WIKIPEDIA:,} passages in {hours:.1f} h"
    )
    what = f"{name}, {megabytes:.1f} MB, {workers} worker{'s' if workers > 1 else ''}"
    return Row(what, "tokenizers alone", "MB/s", rates, peers, GOAL, note)


def measure(arguments: argparse.Namespace) -> list[Row]:
    """A row for every number of copies and of workers."""
    against.one_thread()
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.out) as folder:
        out = Path(folder)
        files = arguments.documents or [write_generated(out)]
        vocabulary = arguments.vocabulary or train(files, out)
        for copies in arguments.copies:
            corpus = out / f"corpus-{copies}.jsonl"
            size = write_copies(files, copies, corpus)
            name = "ingest" if arguments.documents else "ingest of generated text"
            rows += [compare(name, corpus, size, vocabulary, workers, arguments) for workers in arguments.workers]
            corpus.unlink()
    return rows


def write_generated(out: Path) -> Path:
    """Documents of generated text, as long as articles."""
    import generated

    path = out / "documents.jsonl"
    generated.write_documents(path, GENERATED, SENTENCES)
    return path


def train(documents: list[Path], out: Path) -> Path:
    """A vocabulary of BERT's size of the documents."""
    from realmops.corpus.vocabulary import vocabulary_bytes
    from realmops.corpus.word_counts import train_vocabulary
    from realmops.readers.sources import list_sources

    path = out / "vocab.txt"
    found = [source for file in documents for source in list_sources(file, "auto")]
    path.write_bytes(vocabulary_bytes(train_vocabulary(found, size=30522)))
    return path


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument(
        "--documents", type=Path, nargs="+", help="JSON lines with id, title and text, plain or gzipped"
    )
    parser.add_argument("--copies", type=int, nargs="+", default=[1])
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--vocabulary", type=Path, help="a vocab.txt; without one 30,522 pieces of the documents")
    parser.add_argument("--tokenizer-mb", type=float, default=15.0, help="text for the tokenizer alone, at most")


if __name__ == "__main__":
    against.command(__doc__, "ingest", measure, options)
