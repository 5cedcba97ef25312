import gzip
import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_encoders import byte_bpe
from small_world import labels_of

from realmops.artifacts import atomic_folder
from realmops.corpus import document_cutter
from realmops.corpus.passages import passage_digest
from realmops.corpus.snapshot_reader import Snapshot, read_rejects
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.vocabulary import SPECIAL_TOKENS, list_pieces, open_tokenizer, vocabulary_hash
from realmops.corpus.word_counts import train_vocabulary
from realmops.readers.sources import list_sources

VOCABULARY = [*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz.0123456789", *(f"##{c}" for c in "abcdefgh0123456789")]


def write_corpus(path: Path, *documents: dict[str, Any]) -> Path:
    content = "".join(json.dumps(document) + "\n" for document in documents).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def snapshot(paths: list[Path], folder: Path, **options: Any) -> Snapshot:
    found = [source for path in paths for source in list_sources(path, "auto")]
    with atomic_folder(folder, "snapshot") as stage:
        write_snapshot(found, stage, **{"vocabulary": VOCABULARY, "block_wordpieces": 13, **options})
    return Snapshot.open(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_snapshot_reads_back_as_written(tmp_path: Path) -> None:
    corpus = write_corpus(
        tmp_path / "corpus.jsonl.gz",
        {"title": "a b", "text": " Ab cd. Ef ab. Gh! ", "id": "one"},
        {"title": "", "text": "Z.", "id": 2},
        {"title": "a b", "text": "Ab cd."},
    )
    told: list[int] = []
    found = snapshot([corpus], tmp_path / "snapshot", progress=told.append)
    # Wordpieces: a ##b c ##d . | e ##f a ##b . | g ##h [UNK].
    # With 3 special tokens and the title's 2 they make 10, 10 and 8, the last two together 13.
    assert [found.text(i) for i in range(len(found))] == ["Ab cd.", "Ef ab. Gh!", "Z.", "Ab cd."]
    assert [found.title(i) for i in range(4)] == ["a b", "a b", "", "a b"]
    assert [found.document_id(i) for i in range(3)] == ["one", "one", "2"]
    assert found.document_id(3).startswith("document-")
    assert found.column("text") == [found.text(i) for i in range(4)]
    first = passage_digest("a b", "Ab cd.")
    assert [found.passage_id(0), found.passage_id(3)] == [first, f"{first}-2"]
    assert (
        found.corpus_hash == hashlib.sha256("".join(f"{i}\n" for i in found.column("passage_id")).encode()).hexdigest()
    )
    assert found.vocabulary_hash == vocabulary_hash(VOCABULARY)
    words = found.vocabulary
    assert [words[i] for i in found.body(1)] == ["e", "##f", "a", "##b", ".", "g", "##h", "[UNK]"]
    assert found.body(1).dtype == np.int64
    assert [words[i] for i in found.title_tokens(1)] == ["a", "b"]
    assert found.title_tokens(2).tolist() == []
    assert [found.text(1)[a:b] for a, b in found.chars(1)] == ["E", "f", "a", "b", ".", "G", "h", "!"]
    assert found.sentences(1).tolist() == [[0, 5], [5, 8]]
    assert found.sentence_rows.tolist() == [[0, 0, 5], [1, 0, 5], [1, 5, 8], [2, 0, 2], [3, 0, 5]]
    assert found.tokens.dtype == np.uint16
    assert found.given_spans() is None
    counts = {key: found.manifest[key] for key in ("passages", "records", "documents", "sentences", "tokens")}
    assert counts == {"passages": 4, "records": 3, "documents": 3, "sentences": 5, "tokens": 20}
    assert found.manifest["settings"] == {
        "block_wordpieces": 13, "casing": {"lowercase": True, "strip_accents": True}, "whole_documents": False,
        "drop_titles": False, "language": "en",
    }  # fmt: skip
    assert sum(told) == corpus.stat().st_size
    with pytest.raises(IndexError):
        found.text(4)
    assert sorted(contents(tmp_path / "snapshot")) == sorted(["manifest.json", *found.manifest["files"]])


def many_documents(path: Path, count: int) -> Path:
    generator = np.random.default_rng(1)
    return write_corpus(
        path,
        *(
            {
                "title": f"d{number % 50}",
                "text": " ".join(f"Word{n} ab cd." for n in generator.integers(0, 99, 3)),
                "spans": [[0, 4, "W"]] if number % 3 else [],
            }
            for number in range(count)
        ),
    )


def test_bytes_are_the_same_whatever_the_number_of_workers(tmp_path: Path) -> None:
    corpus = many_documents(tmp_path / "corpus.jsonl", 2500)  # three batches, three row groups
    vocabulary = train_vocabulary(list_sources(corpus, "auto"), size=200)
    options = {"vocabulary": vocabulary, "block_wordpieces": 16}
    alone = snapshot([corpus], tmp_path / "one", **options)
    snapshot([corpus], tmp_path / "again", **options)
    snapshot([corpus], tmp_path / "two", workers=2, **options)
    assert len(alone) > 2048
    assert contents(tmp_path / "one") == contents(tmp_path / "again") == contents(tmp_path / "two")
    assert alone.text(1500) == alone.column("text")[1500]
    assert len(set(alone.column("passage_id"))) == len(alone)


def test_a_passage_keeps_its_id_when_others_change(tmp_path: Path) -> None:
    a, b, c = ({"title": letter, "text": f"{letter} text."} for letter in "abc")
    before = snapshot([write_corpus(tmp_path / "1.jsonl", a, b)], tmp_path / "1")
    after = snapshot([write_corpus(tmp_path / "2.jsonl", c, b)], tmp_path / "2")
    assert before.passage_id(1) == after.passage_id(1)
    assert before.corpus_hash != after.corpus_hash


def test_documents_are_dropped_and_counted_by_reason(tmp_path: Path) -> None:
    corpus = write_corpus(
        tmp_path / "corpus.jsonl", {"title": "List of cats", "text": "A."},
        {"title": "Cat (disambiguation)", "text": "A."}, {"title": "Listing", "text": "A."},
        {"title": "Index of law", "text": "A."}, {"title": "Outline of law", "text": "A."},
        {"title": "Empty", "text": " \n"}, {"title": "Zero", "text": "\u200b"},
    )  # fmt: skip
    kept = snapshot([corpus], tmp_path / "kept")
    assert [kept.title(i) for i in range(len(kept))][:3] == ["List of cats", "Cat (disambiguation)", "Listing"]
    dropped = snapshot([corpus], tmp_path / "dropped", drop_titles=True)
    assert [dropped.title(i) for i in range(len(dropped))] == ["Listing"]
    assert dropped.manifest["dropped"] == {"navigation_title": 4, "empty_text": 1, "no_wordpieces": 1}
    assert (dropped.manifest["records"], dropped.manifest["documents"]) == (7, 1)


def test_given_spans_pass_through(tmp_path: Path) -> None:
    corpus = write_corpus(
        tmp_path / "corpus.jsonl",
        {"title": "t", "text": "Nothing here."},
        # passages: "Ab cd ef." and "Gh ab. Cd." (13 wordpieces at most, 4 are not the body)
        {
            "title": "t",
            "text": " Ab cd ef. Gh ab. Cd.",
            "spans": [[11, 13, "X"], [1, 3, "X"], [4, 9, "Y"], [7, 13, "Y"], [14, 20, "Y"]],
        },
        {"title": "t", "text": "Ef."},
    )
    found = snapshot([corpus], tmp_path / "snapshot")
    texts = found.column("text")
    assert texts[-3:] == ["Ab cd ef.", "Gh ab. Cd.", "Ef."]
    spans = found.given_spans()
    assert len(spans) == len(found)
    first = texts.index("Ab cd ef.")
    for passage, expected in ((first, [("Ab", "X"), ("cd ef", "Y")]), (first + 1, [("Gh", "X")]), (first + 2, [])):
        rows = spans.of(passage)
        assert [found.text(passage)[row[4] : row[5]] for row in rows] == [word for word, _ in expected]
        assert labels_of(spans, passage) == [label for _, label in expected]
        for row in rows:
            chars = found.chars(passage)
            assert (chars[row[2], 0], chars[row[3] - 1, 1]) == (row[4], row[5])
            assert found.sentence_rows[row[1], 0] == row[0] == passage
    assert spans.manifest["dropped"] == {"not_in_one_sentence": 2}


TWICE = b'{"title": "A", "text": "a", "id": 1}\n{"title": "B", "text": "b", "id": "1"}\n'


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (b"", {}, "no passage is left of 0 documents"),
        (TWICE, {}, ":2: the id '1' was used at "),
        (TWICE, {"workers": 2}, ":2: the id '1' was used at "),
        (b'{"title": "A", "text": " "}\n', {}, "no passage is left of 1 documents"),
        (TWICE, {"language": "german"}, r"snapshot.language is 'german'; expected auto \(of each document\) or"),
    ],
)
def test_failed_snapshot_leaves_no_files(tmp_path: Path, lines: bytes, options: dict[str, Any], message: str) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(lines)
    with pytest.raises(ValueError, match=message) as caught:
        snapshot([corpus], tmp_path / "snapshot", **options)
    assert options or str(corpus) in str(caught.value)
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


def test_memory_stays_flat_as_the_corpus_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.corpus.ingest._BATCH_RECORDS", 50)
    monkeypatch.setattr("realmops.corpus.snapshot_writer.ROWS_PER_BATCH", 50)

    def peak(count: int) -> int:
        documents = ({"title": "t", "text": f"Ab cd ef gh. {' '.join(str(i))}.", "id": i} for i in range(count))
        corpus = write_corpus(tmp_path / f"{count}.jsonl", *documents)
        tracemalloc.start()
        try:
            snapshot([corpus], tmp_path / f"{count}", block_wordpieces=288)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(100)  # with what is loaded once
    small = peak(200)
    assert peak(2000) < 1.3 * small


# Broken records


def test_up_to_one_percent_of_broken_records_are_skipped_and_named(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", *({"title": "t", "text": f"Ab {i}.", "id": i} for i in range(299)))
    lines = corpus.read_bytes().splitlines(keepends=True)
    lines[5] = b"no JSON\n"
    lines[7] = lines[6]  # the id of the line before
    lines[290] = b'{"title": 1}\n'
    corpus.write_bytes(b"".join(lines) + b'{"title": "t", "text": " "}\n')
    found = snapshot([corpus], tmp_path / "s")
    rejects = list(read_rejects(found.folder))
    assert [reject["place"] for reject in rejects] == [f"{corpus}:{n}" for n in (6, 8, 291)]
    assert f"the id '6' was used at {corpus}:7" in rejects[1]["problem"]
    counts = {key: found.manifest[key] for key in ("records", "documents", "rejected", "dropped", "passages")}
    assert counts == {"records": 300, "documents": 296, "rejected": 3, "dropped": {"empty_text": 1}, "passages": 296}
    assert [found.document_id(i) for i in (5, 6, 7)] == ["6", "8", "9"]
    assert contents(found.folder) == contents(snapshot([corpus], tmp_path / "two", workers=2).folder)


def test_more_than_one_percent_of_broken_records_stop_the_run_with_the_first_ten(tmp_path: Path) -> None:
    good, bad = b'{"title": "t", "text": "Ab."}\n', b"{}\n"
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(good * 980 + bad * 12 + good * 8 + b"never read\n" * 50)
    with pytest.raises(ValueError, match="12 of the first 1000 records are broken") as caught:
        snapshot([corpus], tmp_path / "s")
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0].strip() for line in lines[:-1]] == [f"{corpus}:{n}" for n in range(981, 991)]
    assert os.listdir(tmp_path) == ["c.jsonl"]
    assert snapshot([corpus], tmp_path / "s", broken_share=0.1).manifest["rejected"] == 62


def _of_many_kinds(change: bool) -> list[dict[str, Any]]:
    """Documents of several passages, of none, twice the same, with spans, columns and pages; some of them changed."""
    found: list[dict[str, Any]] = [
        {"id": str(n), "title": f"t {n % 4}", "text": f" Ab {n}. Cd é ef. \n\n Gh {n} ab cd ef. Ab. ", "url": f"u{n}"}
        for n in range(30)
    ]
    found += [{"title": "a", "text": "Same. Same again."}] * 2 + [{"title": "none", "text": "\u0301"}]
    found += [{"title": "b", "text": "Ab cd ef gh.", "spans": [[3, 5, "X"]]}]
    if change:
        found[3]["text"] += " New."
        found[4]["title"] = "another"
        found[5]["url"] = "elsewhere"
        found[-1]["spans"] = [[0, 2, "Y"]]
        found.insert(7, {"title": "new", "text": "Ab new. Gh."})
        del found[20:24]
        found[10], found[25] = found[25], found[10]
    return found


@pytest.mark.parametrize(
    ("options", "workers"),
    [({}, 1), ({}, 2), ({"language": "auto"}, 1), ({"whole_documents": True}, 1), ({"tokenizer": "bytes"}, 1)],
)
def test_documents_of_an_earlier_snapshot_are_not_cut_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], workers: int
) -> None:
    before, after = (write_corpus(tmp_path / f"{n}.jsonl", *_of_many_kinds(n == 1)) for n in range(2))
    if "tokenizer" in options:
        own = byte_bpe().to_str()
        options = {"tokenizer": own, "vocabulary": list_pieces(open_tokenizer(own))}
    settings = {"block_wordpieces": 17, **options, "workers": workers}
    old = snapshot([before], tmp_path / "old", **settings)
    whole = snapshot([after], tmp_path / "whole", **settings)
    cut: list[str] = []
    really = document_cutter.cut_passages
    monkeypatch.setattr(
        document_cutter,
        "cut_passages",
        lambda some, **more: [cut.extend(d.title for d in some), really(some, **more)][1],
    )
    again = snapshot([after], tmp_path / "again", earlier=old.folder, **settings)
    assert contents(again.folder) == contents(whole.folder)
    assert workers == 2 or {*cut} - {"none"} == {"t 3", "another", "new"}
