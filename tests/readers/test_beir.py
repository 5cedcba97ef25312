"""BEIR folders: documents, queries with graded judgements, and the place of what is wrong in them."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from realmops.questions.question_sets import (
    JUDGED_RULE,
    Question,
    answers_are_regex,
    read_judged_questions,
    read_questions,
    rows_of_people,
    to_json_line,
)
from realmops.readers.documents import Document, RawRecord
from realmops.readers.sources import list_sources

CORPUS = (
    {"_id": "MED-10", "title": "Ferry", "text": "The ferry leaves at nine.", "metadata": {}},
    {"_id": "MED-14", "title": "", "text": "The tram is red.", "metadata": {"url": "https://x", "id": 3, "year": 1999}},
    {"_id": "MED-15", "title": "Only a title", "text": ""},
    {"_id": 16, "text": "No title."},
    {"_id": "MED-17", "title": "", "text": ""},
)
QUERIES = ({"_id": "1", "text": "When does the ferry leave?"}, {"_id": "2", "text": "Which?"}, {"_id": 3, "text": "x"})
HEAD = "query-id\tcorpus-id\tscore"


def beir_folder(folder: Path, qrels: Sequence[str], corpus: Sequence[dict[str, Any]] = CORPUS) -> Path:
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress("".join(f"{json.dumps(x)}\n" for x in corpus).encode()))
    (folder / "queries.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in QUERIES))
    (folder / "qrels" / "test.tsv").write_text("\n".join(qrels) + "\n")
    return folder


def test_documents_are_those_of_the_corpus(tmp_path: Path) -> None:
    [source] = list_sources(beir_folder(tmp_path / "beir", [HEAD]), "auto")
    raws = [raw for raw in source.format.records(source.path) if isinstance(raw, RawRecord)]
    documents = [document for document in map(source.format.convert, raws) if isinstance(document, Document)]
    assert [(d.id, d.title, d.text, d.extra) for d in documents] == [
        ("MED-10", "Ferry", "The ferry leaves at nine.", ""),
        ("MED-14", "", "The tram is red.", '{"url":"https://x","year":1999}'),
        ("MED-15", "", "Only a title", ""),
        ("16", "", "No title.", ""),
    ]


def test_a_folder_without_queries_or_with_other_records_is_no_beir_folder(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "a", "title": "A", "text": "Text."}\n')
    (tmp_path / "queries.jsonl").write_text('{"_id": "a", "text": "Text?"}\n')
    assert [source.format.name for source in list_sources(tmp_path, "auto")] == ["jsonl", "jsonl"]


def test_judgements_are_graded_and_survive_conversion(tmp_path: Path) -> None:
    folder = beir_folder(tmp_path / "beir", [HEAD, "2\tMED-14\t2", "1\tMED-10\t1", "2\tMED-10\t0", "2\tMED-14\t2"])
    (folder / "qrels" / "train.tsv.gz").write_bytes(gzip.compress(f"{HEAD}\r\n3\tMED-15\t1\r\n".encode()))
    splits = read_judged_questions(folder)
    assert splits == {
        "test": [
            Question("2", "Which?", (), relevant=(("MED-14", 2), ("MED-10", 0))),
            Question("1", "When does the ferry leave?", (), relevant=(("MED-10", 1),)),
        ],
        "train": [Question("3", "x", (), relevant=(("MED-15", 1),))],
    }
    (tmp_path / "test.jsonl").write_bytes(b"".join(map(to_json_line, splits["test"])))
    assert read_questions([tmp_path / "test.jsonl"], format="auto") == splits["test"]
    assert rows_of_people(splits["test"]) == []
    assert {question.match_rule for question in splits["test"]} == {JUDGED_RULE}


def test_a_question_with_answers_may_have_judgements(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"id": "a", "question": "When?", "answers": ["nine"], "relevant": ["MED-10"]}\n')
    [question] = read_questions([path], format="auto")
    assert (question.judgements, question.match_rule) == ({"MED-10": 1}, "token_boundary")
    assert Question("b", "Who?", ("Ann",), "doc-3").judgements == {"doc-3": 1}
    with pytest.raises(ValueError, match="'a' by token_boundary, 'c' by judged"):
        answers_are_regex([question, Question("c", "Which?", (), relevant=(("x", 1),))])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("1\tMED-10", "test.tsv:2: 2 columns, expected 3 with tabs between them"),
        ("1\tMED-10\tyes", "test.tsv:2: the score is 'yes', expected a whole number"),
        ("9\tMED-10\t1", "test.tsv:2: the query '9' is not in .*queries.jsonl"),
        ("1\tMED-10\t1\n1\tMED-10\t2", "test.tsv:3: query '1' and document 'MED-10' have two grades"),
    ],
)
def test_damaged_judgements_are_named(tmp_path: Path, line: str, problem: str) -> None:
    folder = beir_folder(tmp_path / "beir", [HEAD, line])
    with pytest.raises(ValueError, match=problem.replace("|", r"\|")):
        read_judged_questions(folder)


@pytest.mark.parametrize("relevant", ['{"a": "1"}', '{"a": true}', '"a"', "[1]"])
def test_judgements_of_another_type_are_an_error(tmp_path: Path, relevant: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f'{{"question": "When?", "relevant": {relevant}}}\n')
    with pytest.raises(ValueError, match=r"questions.jsonl:1: 'relevant' is .*; expected a whole number"):
        read_questions([path], format="auto")
