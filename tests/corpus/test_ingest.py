"""Records in batches, their progress, and what arbitrary files do to a snapshot."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_project import Quiet, group_exists, stage, wait_for, write_project

from realmops.artifacts import atomic_folder
from realmops.config import load_params
from realmops.corpus import ingest, word_counts
from realmops.corpus.ingest import iter_batches, process_batches
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.vocabulary import SPECIAL_TOKENS
from realmops.corpus.word_counts import count_words
from realmops.readers.sources import list_sources

EXAMPLES = int(os.environ.get("REALMOPS_FUZZ", "40"))
PIECES = [*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz.,", *(f"##{c}" for c in "abcdefgh")]


POOL = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from realmops.corpus.ingest import follow_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=follow_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    os.kill(os.getpid(), 9)
"""


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    process = subprocess.Popen([sys.executable, tmp_path / "pool.py"], stdout=subprocess.PIPE, start_new_session=True)
    printed, _ = process.communicate(timeout=60)  # the pipe closes when the worker has ended
    assert (process.returncode, printed.strip().isdigit()) == (-9, True)
    wait_for(lambda: not group_exists(process.pid), 10)


def corpus(folder: Path, **files: list[str]) -> Path:
    folder.mkdir()
    for name, texts in files.items():
        lines = [json.dumps({"title": "T", "text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def texts_of(batch: ingest.Batch) -> list[tuple[int, list[str]]]:
    return [(number, [json.loads(item.data)["text"] for item in items]) for number, _, items in batch]


def test_batches_go_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.corpus.ingest._BATCH_RECORDS", 3)
    found = list_sources(corpus(tmp_path / "c", a=["1", "2"], b=[], c=["3", "4", "5"]), "auto")
    assert [*map(texts_of, iter_batches(found))] == [[(0, ["1", "2"]), (1, []), (2, ["3"])], [(2, ["4", "5"])]]
    monkeypatch.setattr("realmops.corpus.ingest._BATCH_CHARACTERS", 1)
    assert len(list(iter_batches(found))) == 5


def test_empty_values_count_for_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.corpus.ingest._BATCH_CHARACTERS", 100)
    names = [f"c{n}" for n in range(60)]
    (tmp_path / "a.csv").write_text(
        "\n".join(map(",".join, [["title", "text", *names], *[["T", "x", *[""] * 60]] * 4]))
    )
    assert [len(batch[0][2]) for batch in iter_batches(list_sources(tmp_path / "a.csv", "auto"))] == [2, 2]
    pq.write_table(pa.table({"title": ["T"] * 4, "text": ["x"] * 4, "l": [[0] * 60] * 4}), tmp_path / "a.parquet")
    assert [len(batch[0][2]) for batch in iter_batches(list_sources(tmp_path / "a.parquet", "auto"))] == [2, 2]


def test_progress_counts_the_bytes_of_the_files_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.corpus.ingest._BATCH_RECORDS", 100)
    folder = corpus(tmp_path / "c", a=["one"] * 150, b=["two"] * 150)
    (folder / "c.jsonl.gz").write_bytes(gzip.compress((folder / "b.jsonl").read_bytes()))
    found = list_sources(folder, "auto")
    told: list[int] = []
    assert sum(count for _, count in process_batches(found, len, on_progress=told.append)) > 0
    assert len(told) == 5
    assert min(told) >= 0
    assert sum(told) == sum(path.stat().st_size for path in folder.iterdir())


def test_a_large_corpus_gives_its_words_by_a_share_of_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list_sources(corpus(tmp_path / "c", a=["a"] * 2000, b=["b"] * 2000), "auto")
    whole = sum(source.size for source in found)
    assert count_words(found) == {"T": 4000, "a": 2000, "b": 2000}
    monkeypatch.setattr(word_counts, "_SAMPLE_BYTES", whole // 4)
    drawn = count_words(found)
    assert 850 < drawn["T"] < 1150  # 1000 wanted, 27 is one standard deviation
    assert abs(drawn["a"] - drawn["b"]) < 170
    assert count_words(found) == drawn == count_words(found, workers=2)


def test_pages_with_undecodable_bytes_are_counted_and_named(tmp_path: Path) -> None:
    values = load_params(write_project(tmp_path, snapshot={"documents": "corpus", "format": "auto"}))
    (tmp_path / "corpus").mkdir()
    for name, word in {"a": b"caf\xe9", "b": "café".encode(), "c": b"cafe"}.items():
        (tmp_path / "corpus" / f"{name}.html").write_bytes(b"<meta charset=utf-8><p>Anna had a " + word + b".</p>")
    report = Quiet()
    metrics = stage("snapshot", values, tmp_path, tmp_path / "root", report)
    assert (metrics["documents"], metrics["replaced"], metrics["rejected"]) == (3, 1, 0)
    assert any("1 of 3 documents of corpus contain U+FFFD" in warning for warning in report.warned)
    per_file = (tmp_path / "root" / "data" / "snapshot" / "corpus" / "sources.jsonl").read_text().splitlines()
    assert [json.loads(line)["replaced"] for line in per_file] == [1, 0, 0]


VALUE = st.one_of(st.text(max_size=60), st.none(), st.integers(), st.lists(st.text(max_size=3), max_size=3))
RECORD = st.dictionaries(st.sampled_from(["title", "text", "id", "spans", "other"]), VALUE, max_size=5)
LINE = st.one_of(
    RECORD.map(lambda record: json.dumps(record).encode()),
    st.text(max_size=80).map(lambda text: json.dumps({"title": "t", "text": text}).encode()),
    st.binary(max_size=40),
)


@given(st.lists(LINE, max_size=12), st.sampled_from([0, 1, 99, 120]))
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_file_gives_a_whole_snapshot_or_one_error(lines: list[bytes], good: int) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        content = b"\n".join([*lines, *[b'{"title": "A", "text": "A b. C d."}'] * good])
        (folder / "c.jsonl").write_bytes(content)
        error = None
        try:
            with atomic_folder(folder / "s", "snapshot") as out:
                found = list_sources(folder / "c.jsonl", "jsonl")
                write_snapshot(found, out, vocabulary=PIECES, block_wordpieces=12)
        except ValueError as caught:
            error = str(caught)
        if error is not None:
            assert str(folder) in error
            assert os.listdir(folder) == ["c.jsonl"]
            return
        snapshot = Snapshot.open(folder / "s")
        manifest = snapshot.manifest
        assert manifest["records"] == manifest["documents"] + manifest["rejected"] + sum(manifest["dropped"].values())
        assert manifest["rejected"] <= 0.01 * manifest["records"]
        assert len(snapshot.column("text")) == len(snapshot) > 0
    finally:
        shutil.rmtree(folder)
