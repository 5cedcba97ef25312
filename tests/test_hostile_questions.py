"""Question files as people have them at their worst, in every format: read right or refused by file and place."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from four_passages import QUESTIONS, TEXTS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from realmops.corpus.question_sets import Question, json_line, read_questions
from realmops.evaluate.ceilings import answered_in_corpus
from realmops.evaluate.exact_match import closed_book_floor, score_predictions
from realmops.evaluate.recall import hit_ranks_by_rule, padded

Record = tuple[Any, Any, Any]  # id, question, answers


def json_lines(records: list[Record]) -> str:
    return "".join(f"{json.dumps({'id': i, 'question': q, 'answers': a})}\n" for i, q, a in records)


def squad(records: list[Record]) -> str:
    found = [
        {"id": i, "question": q, "answers": [{"text": x} for x in a] if isinstance(a, list) else a}
        for i, q, a in records
    ]
    return json.dumps({"data": [{"paragraphs": [{"qas": found}]}]})


def webquestions(records: list[Record]) -> str:
    return json.dumps([{"qId": i, "qText": q, "answers": a} for i, q, a in records])


def curatedtrec(records: list[Record]) -> str:
    return "".join(f"{i}\tkind\t{q}\t{'|'.join(map(str, a)) if isinstance(a, list) else a}\n" for i, q, a in records)


def dpr(records: list[Record]) -> str:
    return "".join(f"{q}\t{a!r}\n" for _, q, a in records)


def table(records: list[Record]) -> str:
    text = StringIO()
    csv.writer(text).writerows([("id", "question", "answers"), *((i, q, repr(a)) for i, q, a in records)])
    return text.getvalue()


FORMATS: dict[str, Callable[[list[Record]], str]] = {
    "jsonl": json_lines,
    "squad": squad,
    "webquestions": webquestions,
    "curatedtrec": curatedtrec,
    "dpr": dpr,
    "csv": table,
}
AS_JSON = ("jsonl", "squad", "webquestions")


def written(folder: Path, form: str, records: list[Record], name: str = "questions") -> Path:
    path = folder / name
    path.write_bytes(FORMATS[form](records).encode("utf-8", "surrogatepass"))
    return path


def read(*paths: Path, form: str) -> list[Question]:
    return read_questions(paths, format=form)


ODD_TEXTS = [
    "", " ", "\u00a0\u3000", "\0", "\x1b[2J", "\ud800", "\u200b", "\u202eabc", "x" * 100_000, "a\tb\nc", "'\"\\",
    "(a",
]  # fmt: skip
odd = st.sampled_from([*ODD_TEXTS, "1", 1, 1.5, True, None, [], {}, 10**30]) | st.text(max_size=8)
records = st.lists(st.tuples(odd, odd, st.lists(odd, max_size=3) | odd), max_size=4)


@pytest.mark.parametrize("form", FORMATS)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given=records)
@example(given=[("1", "Who?", ["Ann"]), (1, "When?", ["1999"])])
@example(given=[("1", "Who?", ["\ud800"])])
@example(given=[("1", "Who?", ["\0", "\x85"])])
@example(given=[("1", "\ud800", ["Ann"])])
@example(given=[("\ud800", "Who?", ["Ann"])])
def test_it_is_read_whole_or_refused_with_its_place(tmp_path: Path, form: str, given: list[Record]) -> None:
    """What is read can be written, and comes back as it was; ids differ, and no text or answer is blank."""
    path = written(tmp_path, form, given)
    try:
        found = read(path, form=form)
    except ValueError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert str(path) in said
        assert said.encode()
        return
    assert len({question.id for question in found}) == len(found)
    assert all(q.id and q.question.strip() and q.answers and all(a.strip() for a in q.answers) for q in found)
    again = tmp_path / "again.jsonl"
    again.write_bytes(b"".join(map(json_line, found)))
    assert read(again, form="jsonl") == found
    rules = closed_book_floor(found, found) if not found[0].is_regex else ()
    assert rules == () or 0 <= rules[1] <= 1


@pytest.mark.parametrize("form", [*AS_JSON, "curatedtrec"])
def test_an_id_comes_once_in_the_files_of_one_set(tmp_path: Path, form: str) -> None:
    """1 and "1" are one id; other sets may have it too."""
    ann, year = ("1", "Who?", ["Ann"]), (1, "When?", ["1999"])
    train, dev = written(tmp_path, form, [ann], "train"), written(tmp_path, form, [year], "dev")
    assert read(train, form=form)[0].id == read(dev, form=form)[0].id == "1"
    for paths in ((train, dev), (written(tmp_path, form, [ann, year], "both"),)):
        with pytest.raises(ValueError, match="the id '1' was used at"):
            read(*paths, form=form)
    if form != "curatedtrec":
        with pytest.raises(ValueError, match="'id' is empty"):
            read(written(tmp_path, form, [("", "Who?", ["Ann"])], "empty"), form=form)


@pytest.mark.parametrize("form", AS_JSON)
def test_ten_thousand_answers_are_ten_thousand(tmp_path: Path, form: str) -> None:
    answers = [f"name {n}" for n in range(10_000)]
    [found] = read(written(tmp_path, form, [("1", "Who?", answers * 2)]), form=form)
    assert list(found.answers) == answers
    assert answered_in_corpus([found], ["Not here.", "It was name 9999."], rule="token_boundary").all()
    assert score_predictions([found], ["Name 9999!"], seed=0).em.mean == 1.0


@pytest.mark.parametrize("answer", ["The", "!!!", "a"])
def test_nothing_said_is_never_right(answer: str) -> None:
    """Such answers have no words in their normal form, as what was not said has none."""
    question = Question("1", "Who?", (answer,))
    for said, right in (("", 0.0), (answer, 1.0)):
        score = score_predictions([question], [said], seed=0)
        assert (score.em.mean, score.f1.mean) == (right, right)


@settings(deadline=None, max_examples=50)
@given(ids=st.lists(st.text(min_size=1, max_size=3), min_size=3, max_size=3, unique=True))
@example(ids=["1", "01", "1 "])
def test_ids_decide_nothing(ids: list[str]) -> None:
    named = [replace(question, id=name) for question, name in zip(QUESTIONS, ids, strict=True)]
    ranked = padded([[2, 1, 0, 3], [0, 3], [1]], 100)
    said = ["Tor Hollow", "2", ""]
    results = []
    for questions in (QUESTIONS, named):
        ranks = hit_ranks_by_rule(questions, ranked, TEXTS.__getitem__)
        score = score_predictions(questions, said, seed=0)
        answered = answered_in_corpus(questions, TEXTS, rule="token_boundary")
        floor = closed_book_floor(questions, questions)
        results.append(({k: v.tolist() for k, v in ranks.items()}, score.em, score.f1, answered.tolist(), floor))
    assert results[0] == results[1]
    assert np.isfinite(results[0][1].mean)
