"""What readers report of inputs that they cannot read: one table of reader, file, content and report."""

import gzip
import io
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realmops.corpus.tfrecord import convert_blocks, read_records
from realmops.corpus.vocabulary import read_vocabulary
from realmops.questions.question_sets import read_questions
from realmops.readers.documents import RawRecord, Rejected
from realmops.readers.sources import list_sources
from realmops.train.conll import read_conll


def read_documents(path: Path, format: str = "auto") -> None:
    """Read a file whole; ValueError with what was rejected."""
    [source] = list_sources(path, format)
    converted = (
        source.format.convert(record) if isinstance(record, RawRecord) else record
        for record in source.format.records(path)
    )
    problems = [f"{one.place}: {one.problem}" for one in converted if isinstance(one, Rejected)]
    if problems:
        raise ValueError("\n".join(problems))


READERS: dict[str, Callable[[Path], Any]] = {
    "documents": read_documents,
    "questions": lambda path: read_questions([path], format="auto"),
    "questions as csv": lambda path: read_questions([path], format="csv"),
    "questions as lines": lambda path: read_questions([path], format="jsonl"),
    "entities": read_conll,
    "records": lambda path: list(read_records(path)),
    "blocks": lambda path: convert_blocks(path, None, path.with_name("out.gz")),
    "vocabulary": read_vocabulary,
}
DOCUMENT = '{"title": "Oslo", "text": "Oslo is a city."}\n'
QUESTION: dict[str, Any] = {"id": "q1", "question": "Who?", "answers": ["Ann"]}
XML = "<mediawiki><page><title>A</title><ns>0</ns><id>1</id><revision><text>A.</text></revision></page>"
ENTITIES = "".join(f"w{n} B-X\n" for n in range(500)).encode()
LINES = [  # the second of a corpus
    ('{"title": "A", "text": ', "not valid JSON"),
    ("Oslo is a city.", "not valid JSON .* each line must be one JSON object"),
    ('["A", "text"]', "JSON list; each line must be one JSON object"),
    ('{"body": "a"}', r"'text' is missing \(keys found: body\); add it to this line"),
    ('{"title": "A"}', "'text' is missing"),
    ('{"title": 7, "text": "a"}', "'title' is int, expected a string; correct this line"),
    ('{"title": "A", "text": ["a"]}', "'text' is list"),
    ('{"title": "A", "text": "a", "title": "B"}', "'title' is duplicated"),
    ('{"title": "A", "text": NaN}', "'text' is NoneType"),
    ('{"title": "A", "text": "a \\ud800 b"}', "an unpaired surrogate at character 2"),
    ('{"title": "A", "text": "a", "more": "\\ud800"}', "a column holds an unpaired surrogate"),
    ('{"title": "A", "text": "a", "id": ""}', "'id' is empty"),
    ('{"title": "A", "text": "a", "id": true}', "'id' is bool"),
    ('{"title": "A", "text": "ab", "spans": [[1, 3, "X"]]}', r"is not \[start, .* with 0 <= start < end <= 2"),
    ('{"title": "A", "text": "ab", "spans": [[0, 1]]}', r"\[0, 1\]"),
    ('{"title": "A", "text": "ab", "spans": {}}', "'spans' is dict"),
    ("[" * 100_000, "nested too deeply"),
    ('{"title": "A", "text": "a", "id": ' + "1" * 5000 + "x}", "not valid JSON"),
]
CHANGES: list[tuple[dict[str, Any], str]] = [  # of a question, the second of its set
    ({"answers": None}, "'answers' is NoneType"),
    ({"answers": [" "]}, "'q2' has no answer"),
    ({"answers": ["a", ""]}, "is blank"),
    ({"answers": {"name": "Ann"}}, "'answers' is an object with the keys name; expected .*'text'"),
    ({"answers": [1.5]}, "'answers' is float"),
    ({"question": "  "}, "has no text"),
    ({"id": "q1"}, "was used at"),
    ({"passage_id": 3}, "'passage_id' is int"),
    ({"not_in": "p1"}, "'not_in' is str, expected a list of passage ids"),
    ({"is_regex": "yes"}, "'is_regex' is 'yes'"),
    ({"is_regex": True, "answers": ["(Ann"]}, r"question 'q2': '\(Ann' is no regular expression"),
    ({"question": ...}, "the keys answers, id were found; expected 'question' and 'answers'"),
    ({"answers": ...}, "the keys id, question were found; expected 'question' and 'answers'"),
]


def changed(change: dict[str, Any]) -> str:
    second = {key: value for key, value in {**QUESTION, "id": "q2", **change}.items() if value is not ...}
    return f"{json.dumps(QUESTION)}\n{json.dumps(second)}\n"


def parquet(**columns: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place:][1:]


def framed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + b"crc1" + text + b"crc2"


LITERALS = [  # the second column of a file of DPR's
    ("['Ann', 5]", "'answers' is int"),
    ("('Ann',)", "the answers are no Python list"),
    ("[__import__('os').getcwd()]", "the answers are no Python list"),
    ("[" * 5000 + "]" * 5000, "the answers are no Python list"),
    ("['" + "x" * (1 << 16) + "']", "the answers have 65540 characters"),
    ("['\\ud800']", "'answers' holds an unpaired surrogate"),
]
TARGETS = [  # of a web question
    ("(list (description))", "targetValue is"),
    ("(list (number 5))", "targetValue is"),
    ('(list (description "a)', "targetValue is"),
    ("(list)", "the question 'a' has no answer"),
]
TABLE: list[
    tuple[str, str, str | bytes, str]
] = [  # reader, name of the file, content, what is reported behind its name
    *(("documents", "a.jsonl", f"{DOCUMENT}{line}\n", f":2: .*{report}") for line, report in LINES),
    (
        "documents",
        "a.jsonl",
        DOCUMENT.encode() + b'{"title": "A", "text": "\xff"}\n',
        ":2: invalid UTF-8 at byte 24 .*",
    ),
    ("documents", "a.jsonl.gz", gzip.compress(5 * DOCUMENT.encode())[:-4], ":6: the gzip file ends in the middle; it"),
    ("documents", "a.jsonl.gz", flipped(gzip.compress(5 * DOCUMENT.encode()), -6), "no valid gzip data"),
    ("documents", "a.jsonl.gz", DOCUMENT, ":1: no valid gzip data .* take .gz off its name"),
    *(("documents", f"a.{name}", b"", "the file is empty") for name in ("jsonl.gz", "jsonl.bz2", "xml.gz")),
    ("documents", "a.warc.gz", gzip.compress(b"WARC/1.0"), "it is a web archive.* extract its pages as HTML files"),
    ("documents", "a.csv", "", "must name the columns"),
    ("documents", "a.csv", "name,age\nA,1\n", "found: name,age"),
    ("documents", "a.csv", "title,text,text\nA,b,c\n", "each once"),
    ("documents", "a.csv", 'title,text\nA,"b"c\nB,c\n', ":2: no valid CSV"),
    ("documents", "a.csv", 'title,text\nA,b\nB,"c\n', ":3: no valid CSV"),
    ("documents", "a.parquet", parquet(body=["a"], title=["A"]), r"'text' is missing \(columns found: body, title\)"),
    ("documents", "a.parquet", parquet(text=["a"], title=["A"])[:-9], "no valid Parquet data"),
    ("documents", "a.rst", b"caf\xe9", "invalid UTF-8 at byte 3"),
    ("documents", "a.txt", b"caf\xe9", "invalid UTF-8 at byte 3; save the file as UTF-8"),
    *(("documents", "a.xml", XML + tail, ":after page 1: .*rest of the file") for tail in ("<page><ti", "</b>", "")),
    *(("questions", "q.jsonl", changed(change), f":2: .*{report}") for change, report in CHANGES),
    ("questions", "q.jsonl", "\n", "no questions with answers found"),
    ("questions", "q", "1\tfactoid\tWho?\t(Ann\n", r":1: question '1': '\(Ann' is no regular expression \(missing \)"),
    ("questions", "q", "1\tx\tWho?\tAnn\n2\tWho?\tBo\n", ":2: 3 columns, expected 4"),
    ("questions", "q", "1\tx\tWho?\tAnn\n1\tx\tWho?\tAnn\n", ":2: the id '1' was used at .*:1"),
    *(("questions", "q", f"who?\t{literal}\n", f":1: {report}") for literal, report in LITERALS),
    ("questions", "q", "who? Ann\n", ":1: unknown format, 1 columns found"),
    ("questions", "q", "a\tb\tc\n", ":1: unknown format, 3 columns found in .* convert the file"),
    ("questions", "q", "[1]", ": record 1 is int"),
    (
        "questions",
        "q",
        "[{}]",
        ": record 1: unknown form of a question: the keys none were found",
    ),
    ("questions", "q", '[{"qText": "a", "answers": ["b"]},\n]', ":2: not valid JSON"),
    *(
        ("questions", "q", json.dumps([{"utterance": "a", "targetValue": target}]), f"record 1: {report}")
        for target, report in TARGETS
    ),
    ("questions", "q", '{"data": [{"title": "t"}]}', ", data 1: unknown form .* the keys title were found"),
    (
        "questions",
        "q",
        '{"data": [{"paragraphs": [{"qas": [{"question": "a"}]}]}]}',
        ", data 1, paragraphs 1, qas 1: .* the keys question were found",
    ),
    ("questions", "q", '{"data": 5}', "'data' is int, expected a list"),
    ("questions", "q", "[" + "1" * 5000 + "]", ":1: not valid JSON"),
    ("questions", "q", "[" * 100_000, "nested too deeply"),
    ("questions", "q", "question,answer\nwho?,Ann\nwhy?\n", r":3: 1 columns, expected 2 \(question, answer\)"),
    ("questions", "q", 'question,answer\nwho?,"An\nn"\nwhy?,"B\n', ":4: invalid CSV line"),
    ("questions", "q", "question,answer\nwho?,\n", r":2: the question 'who\?' has no answer"),
    ("questions", "q", "question,answers\nwho?,Ann;\n", r":2: an answer of the question 'who\?' is blank"),
    ("questions", "q", 'question,answers\nwho?,"[1"\n', ":2: the answers are no Python list"),
    ("questions", "q.gz", gzip.compress(b"[" + os.urandom(1000).hex().encode())[:-20], "ends in the middle"),
    ("questions", "q.gz", "[]", "no valid gzip data"),
    ("questions as csv", "q", "who?,Ann\n", ":1: the first line of a table names its columns"),
    ("questions as lines", "q", "[]", "JSON list; each line must be one JSON object"),
    ("entities", "ner", "a B-X\nb\n", ":2: 'b' has one column; expected 'token tag'"),
    ("entities", "ner", "a B-X\n\nb X-Y\n", ":3: the tag 'X-Y' is not O, B-TYPE or I-TYPE"),
    ("entities", "ner", "a B-X\nb B-\n", ":2: the tag 'B-' is not O, B-TYPE or I-TYPE"),
    ("entities", "ner", "a B-X\nb - -\n", ":2: the tag '-' is not O"),
    ("entities", "ner", "a O\n\nb O\n", ": no entity in 2 sentences; expected lines of 'token tag'"),
    ("entities", "ner", "", ": no entity in 0 sentences"),
    ("entities", "ner", b"a B-X\n\xff O\n", "cannot be read as UTF-8 text"),
    ("entities", "ner.gz", ENTITIES, "cannot be read as UTF-8 text"),
    ("entities", "ner.gz", gzip.compress(ENTITIES)[:-100], "cannot be read as UTF-8 text"),
    ("entities", "ner.gz", flipped(gzip.compress(ENTITIES), -6), "cannot be read as UTF-8 text"),
    *(("records", "a.tfr", framed(b"one")[:end], ": record 1 is truncated") for end in range(1, len(framed(b"one")))),
    *(("records", "a.tfr", framed(b"a") + framed(b"two")[:end], ": record 2 is truncated") for end in (1, 11, 14, 18)),
    ("records", "block_records.npy", b"", "is a pickled array, .* use the records .* blocks.tfr"),
    ("blocks", "a.tfr", framed(b"ok") + framed(b"Z\xfcrich"), r": record 2 is not valid UTF-8 \(byte 1\)"),
    ("vocabulary", "vocab.txt", b"a\n\xff\n", ": invalid UTF-8 at byte 2"),
]


@pytest.mark.parametrize(("reader", "name", "content", "report"), TABLE, ids=range(len(TABLE)))
def test_what_cannot_be_read_is_reported_with_its_place(
    tmp_path: Path, reader: str, name: str, content: str | bytes, report: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=report) as caught:
        READERS[reader](path)
    assert str(path) in str(caught.value)
    assert str(caught.value).encode()


@pytest.mark.parametrize("reader", ["documents", "questions", "entities", "records"])
def test_what_is_no_file_is_refused_by_its_name(tmp_path: Path, reader: str) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    reports = {
        tmp_path / "pipe.jsonl": "cannot be read: it is a pipe, expected a regular file",
        tmp_path / "absent.jsonl": r"no such file or directory|no such file or folder|does not exist; set tag\.train",
        Path("/dev/zero"): "it is a device, expected a regular file",
    }
    if reader != "documents":
        reports[tmp_path] = "cannot be read"
    for path, report in reports.items():
        with pytest.raises(ValueError, match=re.compile(report, re.IGNORECASE)) as caught:
            READERS[reader](path)
        assert str(caught.value).startswith(str(path))


def test_an_unknown_format_of_questions_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format 'nq' is unknown; choose one of auto, jsonl, json, curatedtrec"):
        read_questions([tmp_path / "x"], format="nq")


def test_a_file_of_questions_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.questions.question_files.LARGEST_CONTENT", 1 << 20)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b"[" + b" " * (1 << 21)))
    with pytest.raises(ValueError, match="more than 1 MiB"):
        READERS["questions"](tmp_path / "bomb.json.gz")


def test_a_line_over_the_limit_is_rejected_unread_and_one_at_the_limit_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realmops.readers.documents.LINE_LIMIT", 1 << 20)
    frame = '{"title": "A", "text": "%s"}\n'
    room = (1 << 20) - len(frame % "")
    path = tmp_path / "a.jsonl"
    path.write_text(frame % ("a" * room) + frame % ("b" * 9 * room) + frame % "c" + frame % ("d" * (room + 1)))
    with pytest.raises(ValueError, match="the line is longer than 1 MiB; put one document on each line") as caught:
        read_documents(path)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [f"{path}:2", f"{path}:4"]
