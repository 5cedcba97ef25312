"""Errors of other inputs than documents, with file and line: questions, entities, records and vocabularies."""

import gzip
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realmops.corpus.tfrecord import convert_blocks, read_records
from realmops.corpus.vocabulary import read_vocabulary
from realmops.questions.question_sets import read_questions
from realmops.readers.sources import list_sources
from realmops.train.conll import read_conll

READERS: dict[str, Callable[[Path], Any]] = {
    "documents": lambda path: [list(source.format.records(path)) for source in list_sources(path, "auto")],
    "questions": lambda path: read_questions([path], format="auto"),
    "questions as csv": lambda path: read_questions([path], format="csv"),
    "entities": read_conll,
    "records": lambda path: list(read_records(path)),
    "blocks": lambda path: convert_blocks(path, None, path.with_name("out.gz")),
    "vocabulary": read_vocabulary,
}
QUESTION: dict[str, Any] = {"id": "q1", "question": "Who?", "answers": ["Ann"]}
RANDOM = random.Random(0).randbytes(1000)
ENTITIES = gzip.compress("".join(f"w{n} B-X\n" for n in range(500)).encode())
CHANGES: list[tuple[dict[str, Any], str]] = [  # of the second question of a file
    ({"answers": None}, "'answers' is NoneType"),
    ({"answers": ["a", ""]}, "is blank"),
    ({"answers": {"name": "Ann"}}, "'answers' is an object with the keys name; expected .*'text'"),
    ({"question": "  "}, "has no text"),
    ({"id": "q1"}, "was used at"),
    ({"passage_id": 3}, "'passage_id' is int"),
    ({"not_in": "p1"}, "'not_in' is str, expected a list of passage ids"),
    ({"is_regex": "yes"}, "'is_regex' is 'yes'"),
    ({"is_generated": 1}, "'is_generated' is 1, expected true or false"),
    ({"is_regex": True, "answers": ["(Ann"]}, r"question 'q2': '\(Ann' is no regular expression"),
    ({"question": ...}, "the keys answers, id were found; expected 'question' and 'answers'"),
]
LITERALS = [  # second column of DPR's files
    ("['Ann', 5]", "'answers' is int"),
    ("[__import__('os').getcwd()]", "the answers are no Python list"),
    ("[" * 5000 + "]" * 5000, "the answers are no Python list"),
    ("['" + "x" * (1 << 16) + "']", "the answers have 65540 characters"),
    ("['\\ud800']", "'answers' holds an unpaired surrogate"),
]


def changed(change: dict[str, Any]) -> str:
    second = {key: value for key, value in {**QUESTION, "id": "q2", **change}.items() if value is not ...}
    return f"{json.dumps(QUESTION)}\n{json.dumps(second)}\n"


def framed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + b"crc1" + text + b"crc2"


TABLE: list[tuple[str, str, str | bytes, str]] = [  # reader, name of the file, content, message
    *(("questions", "q.jsonl", changed(change), f":2: .*{message}") for change, message in CHANGES),
    *(("questions", "q", f"who?\t{literal}\n", f":1: {message}") for literal, message in LITERALS),
    ("questions", "q.jsonl", "\n", "no questions with answers found"),
    ("questions", "q", "1\tfactoid\tWho?\t(Ann\n", r":1: question '1': '\(Ann' is no regular expression \(missing \)"),
    ("questions", "q", "1\tx\tWho?\tAnn\n2\tWho?\tBo\n", ":2: 3 columns, expected 4"),
    ("questions", "q", "a\tb\tc\n", ":1: unknown format, 3 columns found in .* convert the file"),
    ("questions", "q", "[1]", ": record 1 is int"),
    ("questions", "q", "[{}]", ": record 1: unknown form of a question: the keys none were found"),
    ("questions", "q", '[{"qText": "a", "answers": ["b"]},\n]', ":2: not valid JSON"),
    ("questions", "q", json.dumps([{"utterance": "a", "targetValue": "(list (number 5))"}]), "1: targetValue is"),
    (
        "questions",
        "q",
        '{"data": [{"paragraphs": [{"qas": [{"question": "a"}]}]}]}',
        ", data 1, paragraphs 1, qas 1: 'answers' .or 'answer'. is missing",
    ),
    ("questions", "q", '{"data": 5}', "'data' is int, expected a list"),
    ("questions", "q", "[" * 100_000, "nested too deeply"),
    ("questions", "q", "question,answer\nwho?,Ann\nwhy?\n", r":3: 1 columns, expected 2 \(question, answer\)"),
    ("questions", "q", 'question,answer\nwho?,"An\nn"\nwhy?,"B\n', ":4: invalid CSV line"),
    ("questions", "q", "question,answer\nwho?,\n", r":2: the question 'who\?' has no answer"),
    ("questions", "q.gz", gzip.compress(b"[" + RANDOM.hex().encode())[:-20], "ends in the middle"),
    ("questions as csv", "q", "who?,Ann\n", ":1: the first line of a table names its columns"),
    ("entities", "ner", "a B-X\nb\n", ":2: 'b' has one column; expected 'token tag'"),
    ("entities", "ner", "a B-X\n\nb X-Y\n", ":3: the tag 'X-Y' is not O, B-TYPE or I-TYPE"),
    ("entities", "ner", "a O\n\nb O\n", ": no entity in 2 sentences; expected lines of 'token tag'"),
    ("entities", "ner", b"a B-X\n\xff O\n", "cannot be read as UTF-8 text"),
    ("entities", "ner.gz", ENTITIES[:-100], "cannot be read as UTF-8 text"),
    ("entities", "ner.gz", ENTITIES[:-6] + b"\0" + ENTITIES[-5:], "cannot be read as UTF-8 text"),
    *(("records", "a.tfr", framed(b"a") + framed(b"two")[:end], ": record 2 is truncated") for end in (1, 11, 14, 18)),
    ("blocks", "a.tfr", framed(b"ok") + framed(b"Z\xfcrich"), ": record 2, or its title, is not valid UTF-8"),
    ("vocabulary", "vocab.txt", b"a\n\xff\n", ": invalid UTF-8 at byte 2"),
]


@pytest.mark.parametrize(("reader", "name", "content", "message"), TABLE, ids=range(len(TABLE)))
def test_error_names_file_and_place(tmp_path: Path, reader: str, name: str, content: str | bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message) as caught:
        READERS[reader](path)
    assert str(path) in str(caught.value)
    assert str(caught.value).encode()


def test_oversized_file_of_questions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.questions.question_files.LARGEST_CONTENT", 1 << 20)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b"[" + b" " * (1 << 21)))
    with pytest.raises(ValueError, match="more than 1 MiB"):
        READERS["questions"](tmp_path / "bomb.json.gz")
