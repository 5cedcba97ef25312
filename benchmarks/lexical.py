"""BM25 from the index beside a snapshot against bm25s with an index of its own, saved and memory-mapped.

    python benchmarks/lexical.py --sizes 2000 20000 60000 1000000

Passages of some 60 random words by Zipf's law, none of them a stop word; a query is nine words of one passage. Building
is from the passages' Parquet file to an index on the disk; a search is for the best 100, one query at a time, words cut
and stemmed by each side. Each turn is a process of its own, on one thread; memory is the most that is resident, mapped
files with it. Rates are by processor time. Above 100,000 passages only ours is built, beside ours at the size before,
and a note says what the paper's 13 million take at that rate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import against
import numpy as np
from against import Goal, Row

WORDS = 3_000_000
LETTERS = "bcdfghjklmnpqrstvwxz"
QUERIES, QUERY_WORDS, BEST = 200, 9, 100
BESIDE_THEIRS = 100_000
PAPER = 13_000_000
GOALS = {"build": Goal(1.5), "search": Goal(1)}  # at the largest size of both


def words() -> list[str]:
    """All words, most frequent first; they end as no English word does, so that stems differ."""
    found = []
    for number in range(1, WORDS + 1):
        word = ""
        while number:
            number, letter = divmod(number, len(LETTERS))
            word += LETTERS[letter]
        found.append(f"{word}oo")
    return found


def texts(size: int) -> Iterator[list[str]]:
    """Passages, some of them at a time."""
    rng = np.random.default_rng(0)
    share = np.cumsum(1 / (np.arange(WORDS) + 2.7))
    known = words()
    for low in range(0, size, 1024):
        lengths = np.clip(rng.lognormal(np.log(60), 0.5, min(1024, size - low)), 8, 150).astype(int)
        numbers = np.searchsorted(share, rng.random(lengths.sum()) * share[-1]).tolist()
        ends = np.cumsum(lengths).tolist()
        yield [" ".join([known[n] for n in numbers[start:end]]) for start, end in zip([0, *ends], ends, strict=False)]


def write_corpus(folder: Path, size: int) -> None:
    """What BM25 reads of a snapshot: its texts. It has no wordpieces, which would take minutes for a million."""
    import pyarrow as pa

    from realmops.artifacts import digest_of, write_manifest
    from realmops.corpus.snapshot_reader import KIND, TEXT_COLUMNS, TEXTS

    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    rng = np.random.default_rng(1)
    queries: list[str] = []
    first = 0
    schema = pa.schema([(name, pa.large_string()) for name in TEXT_COLUMNS])
    with pa.OSFile(str(corpus / TEXTS), "wb") as file, pa.ipc.new_file(file, schema) as out:
        for some in texts(size):
            names = [f"{number:032x}" for number in range(first, first + len(some))]
            empty = [""] * len(some)
            out.write_table(pa.table([names, names, empty, some, empty], schema=schema))
            queries += [" ".join(rng.choice(text.split(), QUERY_WORDS)) for text in some[: QUERIES - len(queries)]]
            first += len(some)
    for name, dtype, shape in (
        ("tokens", np.uint16, (1,)),
        ("token_chars", np.int32, (1, 2)),
        ("title_tokens", np.uint16, (1,)),
        ("sentences", np.int32, (1, 3)),
        *((f"{of}_offsets", np.int64, (size + 1,)) for of in ("token", "title", "sentence")),
    ):
        np.save(corpus / f"{name}.npy", np.zeros(shape, dtype), allow_pickle=False)
    settings = {"block_wordpieces": 288, "casing": {"lowercase": True, "strip_accents": True}}
    names_of = {"corpus_hash": digest_of(["benchmark", size]), "vocabulary_hash": "", "settings": settings}
    write_manifest(corpus, KIND, **names_of)
    (folder / "queries.json").write_text(json.dumps(queries))


def our_build(folder: Path) -> dict[str, Any]:
    """The index beside the snapshot."""
    from realmops.corpus.snapshot_reader import Snapshot
    from realmops.search.bm25 import FOLDER
    from realmops.search.bm25_writer import write_bm25

    snapshot = Snapshot.open(folder / "corpus", verify=False)
    seconds = against.processor_seconds(lambda: write_bm25(folder / FOLDER, snapshot))
    size = sum(path.stat().st_size for path in (folder / FOLDER).iterdir())
    return {"rate": len(snapshot) / seconds, "bytes": size}


def our_search(folder: Path) -> dict[str, Any]:
    """The best of each query."""
    from realmops.search.bm25 import FOLDER, Bm25

    index = Bm25.open(folder / FOLDER, verify=False)
    return searched(folder, lambda query: index.search([query], BEST)[0][0])


def their_words(some: list[str]) -> list[list[str]]:
    """bm25s's words, with English stop words and Snowball stems."""
    import bm25s
    import Stemmer

    stemmer = Stemmer.Stemmer("english")
    found = bm25s.tokenize(some, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)
    return [list(one) for one in found]


def their_build(folder: Path) -> dict[str, Any]:
    """bm25s's index, saved."""
    import bm25s

    from realmops.corpus.snapshot_reader import map_texts

    def build() -> None:
        table = map_texts(folder / "corpus")
        pairs = zip(*(table.column(name).to_pylist() for name in ("title", "text")), strict=True)
        index = bm25s.BM25(backend="numpy")
        index.index(their_words([f"{title} {text}" for title, text in pairs]), show_progress=False)
        index.save(folder / "theirs")

    seconds = against.processor_seconds(build)
    size = sum(path.stat().st_size for path in (folder / "theirs").iterdir())
    return {"rate": len(np.load(folder / "corpus" / "token_offsets.npy")) / seconds, "bytes": size}


def their_search(folder: Path) -> dict[str, Any]:
    """The best of each query by bm25s, whose index is memory-mapped."""
    import bm25s

    index = bm25s.BM25.load(folder / "theirs", mmap=True)
    return searched(folder, lambda query: index.retrieve(their_words([query]), k=BEST, show_progress=False).scores[0])


def searched(folder: Path, search: Callable[[str], Any]) -> dict[str, Any]:
    """Queries a second, once the index has been read; and the scores."""
    queries = json.loads((folder / "queries.json").read_text())
    scores = [np.maximum(search(query), 0).tolist() for query in queries]
    seconds = against.processor_seconds(lambda: [search(query) for query in queries])
    return {"rate": len(queries) / seconds, "scores": scores}


PARTS = {"our build": our_build, "our search": our_search, "their build": their_build, "their search": their_search}


def run(part: str, folder: Path) -> dict[str, Any]:
    """One part in a process of its own."""
    words = [sys.executable, __file__, "--part", part, str(folder)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    told = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=one_thread).stdout
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def compare(size: int, folder: Path, repeats: int, goals: bool) -> tuple[list[Row], dict[str, float]]:
    """The rows of one size against bm25s, and our rates and MiB."""
    rows, ours = [], {}
    for part in ("build", "search"):
        turns = [[run(f"{side} {part}", folder) for side in ("our", "their")] for _ in range(repeats)]
        if part == "build":
            ours_mb, theirs_mb = (found["bytes"] / 1e6 for found in turns[0])
            note = f"{ours_mb:.3g} MB on the disk, theirs {theirs_mb:.3g} MB"
        else:
            our_scores, their_scores = (np.array(found["scores"]) for found in turns[0])
            note = f"{float((our_scores == their_scores).mean()):.2%} of the scores of the best {BEST} are the same"
        for key, name, unit, goal in (
            ("rate", part, "passages/s" if part == "build" else "queries/s", GOALS[part] if goals else None),
            ("mib", f"memory of the {part}", "MiB", Goal(1, at_most=True) if goals else None),
        ):
            sides = [tuple(turn[n][key] for turn in turns) for n in (0, 1)]
            told = note if key == "rate" else ""
            rows.append(Row(f"{name}, {size:,}", "bm25s, memory-mapped", unit, sides[0], sides[1], goal, told))
            ours[f"{part} {key}"] = float(np.median(sides[0]))
    return rows, ours


def alone(size: int, folder: Path, before: int, rates: dict[str, float]) -> list[Row]:
    """The rows of a size that only ours is built for, once, against ours at another size."""
    rows = []
    for part in ("build", "search"):
        found = run(f"our {part}", folder)
        times = PAPER / size
        note = f"13 million, in proportion: {1000 * times / found['rate']:.3g} ms a query"
        if part == "build":
            hours, disk = PAPER / found["rate"] / 3600, found["bytes"] * times / 1e9
            note = f"13 million, in proportion: {hours:.2g} h on one core, {disk:.2g} GB on the disk"
        for key, name, unit in (
            ("rate", part, "passages/s" if part == "build" else "queries/s"),
            ("mib", f"memory of the {part}", "MiB"),
        ):
            told = note if key == "rate" else ""
            base = rates[f"{part} {key}"]
            rows.append(Row(f"{name}, {size:,}", f"ours, {before:,}", unit, (found[key],), (base,), None, told))
    return rows


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The rows of every size."""
    sizes = sorted(arguments.sizes)
    largest = max((size for size in sizes if size <= BESIDE_THEIRS), default=0)
    rows: list[Row] = []
    ours: dict[str, float] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            write_corpus(Path(name), size)
            if size <= BESIDE_THEIRS:
                more, ours = compare(size, Path(name), arguments.repeats, goals=size == largest)
                rows += more
            elif largest:
                rows += alone(size, Path(name), largest, ours)
            else:
                raise SystemExit(f"--sizes: give one of at most {BESIDE_THEIRS} beside {size}")
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--sizes", type=int, nargs="+", default=[2_000, 20_000, 60_000], help="passages (%(default)s)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        told = PARTS[sys.argv[2]](Path(sys.argv[3]))
        [most] = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
        print(json.dumps(told | {"mib": int(most) / 1024}))
    else:
        against.command(__doc__, "lexical", measure, options)
