from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from realmops.corpus.questions import Question, read_questions

GOOD = {"id": "q1", "question": " Who? ", "answers": ["Ann", "Anna"], "passage_id": "p7", "extra": 1}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_questions_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl.gz"
    path.write_bytes(gzip.compress(f"{json.dumps(GOOD)}\n".encode()))
    more = write(tmp_path / "more.jsonl", {"id": 2, "question": "When?", "answers": ["1999"]})
    assert read_questions([path, more]) == [
        Question("q1", "Who?", ("Ann", "Anna"), "p7"),
        Question("2", "When?", ("1999",)),
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answers": []}, "'q2' has no answer"),
        ({"answers": [" "]}, "'q2' has no answer"),
        ({"answers": ["a", ""]}, "is blank"),
        ({"answers": "Ann"}, "'answers' is str"),
        ({"answers": [1]}, "'answers' is int"),
        ({"question": "  "}, "has no text"),
        ({"id": "q1"}, "was used at"),
        ({"passage_id": 3}, "'passage_id' is int"),
    ],
)
def test_a_bad_question_is_named_with_file_and_line(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    path = write(tmp_path / "questions.jsonl", GOOD, {**GOOD, "id": "q2", **change})
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        read_questions([path])
    assert str(caught.value).startswith(f"{path}:2: ")


@pytest.mark.parametrize("key", ["id", "question", "answers"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    path = write(tmp_path / "questions.jsonl", {name: value for name, value in GOOD.items() if name != key})
    with pytest.raises(ValueError, match=rf"jsonl:1: the key '{key}' is missing"):
        read_questions([path])


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no questions"):
        read_questions([write(tmp_path / "questions.jsonl")])
