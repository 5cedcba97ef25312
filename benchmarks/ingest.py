"""Ingestion against the tokenizer alone: ratio, MB/s, scaling with workers, memory and time at two sizes.

    python benchmarks/ingest.py --documents FILE.jsonl.gz [FILE ...] --copies 1 4 --workers 1 2 --out runs/ingest

The documents are repeated under other ids and with a number before each text, so that copies are no duplicates.
"The tokenizer alone" is `tokenizers` on one core: encode_batch over the sentences of the same texts, ids and
offsets taken out, timed in this run before and after. MB are of text in UTF-8. Memory is that of the whole process
tree (proportional set size, sampled twice a second). Writes OUT/ingest.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIKIPEDIA = 13_353_718  # passages of the paper's snapshot
_INGEST = """
import json, sys
from pathlib import Path
from realmops.artifacts import atomic_folder
from realmops.corpus.formats import sources
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.vocabulary import read_vocabulary
corpus, folder, work, vocabulary, workers = sys.argv[1:]
with atomic_folder(Path(folder)) as stage:
    manifest = write_snapshot(
        sources(Path(corpus), "auto"), stage, work=Path(work), vocabulary=read_vocabulary(Path(vocabulary)),
        block_wordpieces=288, workers=int(workers),
    )
print(json.dumps({key: manifest[key] for key in ("records", "documents", "passages", "tokens")}))
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

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = build_tokenizer(read_vocabulary(vocabulary))
    size = seconds = 0.0
    sentences: list[str] = []
    for document in lines(files):
        text = document["text"]
        sentences += [text[start:end] for start, end in split_sentences(text)]
        if len(sentences) >= 8192:
            start = time.process_time()
            for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False):
                assert len(encoding.ids) == len(encoding.offsets)
            seconds += time.process_time() - start
            size += sum(len(sentence.encode()) for sentence in sentences) / 1e6
            sentences = []
        if size > megabytes:
            break
    return size / seconds


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
    folders = [out / "snapshot", out / "work"]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-c", _INGEST, corpus, *folders, vocabulary, str(workers)]
    before, start = os.times(), time.perf_counter()
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
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return {**json.loads(told), "wall": time.perf_counter() - start, "cpu": cpu, "mib": peak}


def main() -> None:
    """Run, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = Path("../shared/data")
    files = [data / "open_squad/full/passages.jsonl.gz", data / "wide/extra_passages.jsonl.gz"]
    parser.add_argument("--documents", type=Path, nargs="+", default=files)
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--vocabulary", type=Path, help="a vocab.txt; without one 30,522 pieces of the documents")
    parser.add_argument("--tokenizer-mb", type=float, default=15.0, help="text for the tokenizer alone, twice")
    parser.add_argument("--out", type=Path, default=Path("runs/ingest"))
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = arguments.vocabulary or train(arguments.documents, out)
    rates = [tokenizer_rate(arguments.documents, vocabulary, arguments.tokenizer_mb)]
    runs = []
    print("| documents | passages | workers | wall s | CPU s | MB/s | MB per CPU s | MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for copies in arguments.copies:
        corpus = out / f"corpus-{copies}.jsonl"
        size = write_copies(arguments.documents, copies, corpus)
        for workers in arguments.workers:
            run = {"mb": size, "workers": workers, **ingest(corpus, out, vocabulary, workers)}
            runs.append(run)
            shown = (run["wall"], run["cpu"], size / run["wall"], size / run["cpu"], run["mib"])
            figures = " | ".join(f"{value:.{digits}f}" for value, digits in zip(shown, (1, 1, 2, 2, 0), strict=True))
            print(f"| {run['documents']} | {run['passages']} | {workers} | {figures} |", flush=True)
        corpus.unlink()
    rates.append(tokenizer_rate(arguments.documents, vocabulary, arguments.tokenizer_mb))
    rate = sum(rates) / len(rates)
    print(f"\ntokenizer alone, one core: {rates[0]:.2f} and {rates[1]:.2f} MB/s")
    for run in runs:
        by_cpu, by_wall = (run["mb"] / run[clock] / rate for clock in ("cpu", "wall"))
        hours = run["wall"] * WIKIPEDIA / run["passages"] / 3600
        print(
            f"{run['documents']} documents, {run['workers']} workers: {by_cpu:.2f} of the tokenizer by CPU time, "
            f"{by_wall:.2f} by the clock; {WIKIPEDIA:,} passages in {hours:.1f} h"
        )
    (out / "ingest.json").write_text(json.dumps({"tokenizer_mb_per_s": rates, "runs": runs}, indent=1) + "\n")


def train(documents: list[Path], out: Path) -> Path:
    """A vocabulary of BERT's size of the documents."""
    from realmops.corpus.formats import sources
    from realmops.corpus.vocabulary import train_vocabulary, vocabulary_bytes

    path = out / "vocab.txt"
    if not path.is_file():
        found = [source for file in documents for source in sources(file, "auto")]
        path.write_bytes(vocabulary_bytes(train_vocabulary(found, size=30522)))
    return path


if __name__ == "__main__":
    main()
