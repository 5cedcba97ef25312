"""Question files in every format: what is read, the errors with their place, and ORQA's split."""

import csv
import gzip
import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from damaged_files import SEEDS, damage, fuzz
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from realmops.evaluate.exact_match import score_predictions
from realmops.questions.question_files import AUTO
from realmops.questions.question_sets import (
    Question,
    answers_are_regex,
    is_in_orqa_dev,
    read_questions,
    read_search_questions,
    to_json_line,
)

GOOD = {"id": "q1", "question": " Who? ", "answers": ["Ann", "Anna"], "passage_id": "p7", "extra": 1}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def read(*paths: Path, format: str = AUTO) -> list[Question]:
    return read_questions(paths, format=format)


def test_ids_are_unique_over_files_and_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl.gz"
    path.write_bytes(gzip.compress(f"{json.dumps(GOOD)}\n".encode()))
    more = write(tmp_path / "more.jsonl", {"id": 2, "question": "When?", "answers": ["1999"]})
    assert read(path, more) == [Question("q1", "Who?", ("Ann", "Anna"), "p7"), Question("2", "When?", ("1999",))]
    (tmp_path / "named.csv").write_text("id,passage_id,question,answer\n7,p1,who?,Ann\n,,where?,Oslo\n")
    named, unnamed = read(tmp_path / "named.csv")
    assert (named.id, named.passage_id, unnamed.id.startswith("q-")) == ("7", "p1", True)
    same = write(tmp_path / "same.jsonl", {"id": "2", "question": "Who?", "answers": ["Ann"]})
    with pytest.raises(ValueError, match="the id '2' was used at"):
        read(more, same)


def test_a_question_without_id_gets_one_from_its_content(tmp_path: Path) -> None:
    who, when = {"question": "Who?", "answer": ["Ann"]}, {"answer": ["1999"], "question": "When?"}
    first = read(write(tmp_path / "a.jsonl", who, when))
    second = read(write(tmp_path / "b.jsonl", when, {"answers": ["Ann"], "question": " Who?"}, who))
    assert [q.id for q in second] == [first[1].id, first[0].id, f"{first[0].id}-2"]
    assert re.fullmatch("q-[0-9a-f]{16}", first[0].id)
    assert first[0].id != first[1].id


# ---- the published formats

BRMSON = [{"qId": "w1", "answers": ["Ann", "Bo"], "qText": "who?"}, {"qId": "w2", "answers": ["5"], "qText": "how?"}]
ORIGINAL = [
    {"url": "u", "utterance": "who?", "targetValue": '(list (description "Ann B.") (description Bo))'},
    {"url": "u", "utterance": "how?", "targetValue": r'(list (description "5 \"big\" ones"))'},
]
SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "T",
            "paragraphs": [
                {
                    "context": "Ann met Bo.",
                    "qas": [
                        {"id": "s1", "question": "who?", "answers": [{"text": "Ann", "answer_start": 0}] * 2},
                        {"id": "s2", "question": "why?", "answers": [], "is_impossible": True},
                    ],
                },
                {"context": "", "qas": [{"question": "whom?", "answers": [{"text": "Bo"}]}]},
            ],
        }
    ],
}
TREC = "1\tfactoid\tWho?\tAnn( B\\.)?|Bo\n\nlfb2\tx\tWhen?\t19\\d\\d\r\n"
DPR = 'who?\t[\'Ann\', \'Bo\']\nwhat?\t"[""Bo\'s"", \'x\']"\n"he said ""go"""\t["y"]\n'


def texts(questions: list[Question]) -> list[tuple[str, tuple[str, ...]]]:
    return [(q.question, q.answers) for q in questions]


PUBLISHED: dict[str, tuple[str, str, list[tuple[str, tuple[str, ...]]]]] = {
    "brmson": ("json", json.dumps(BRMSON), [("who?", ("Ann", "Bo")), ("how?", ("5",))]),
    "original": ("json", json.dumps(ORIGINAL), [("who?", ("Ann B.", "Bo")), ("how?", ('5 "big" ones',))]),
    "squad": ("json", json.dumps(SQUAD, indent=1), [("who?", ("Ann",)), ("whom?", ("Bo",))]),
    "trec": ("curatedtrec", TREC, [("Who?", ("Ann( B\\.)?|Bo",)), ("When?", ("19\\d\\d",))]),
    "dpr": ("dpr", DPR, [("who?", ("Ann", "Bo")), ("what?", ("Bo's", "x")), ('he said "go"', ("y",))]),
    "nq": ("jsonl", '{"question": "who", "answer": ["Ann"]}\n', [("who", ("Ann",))]),
    "one": ("jsonl", '{"question": "who", "answer": "Ann"}\n', [("who", ("Ann",))]),
    "csv": (
        "csv",
        'Question,note,Answer\r\n"who, then?",x,"Ann ""A"" Bo; Co"\r\n\r\nwhere?,,"in\nOslo"\r\n',
        [("who, then?", ('Ann "A" Bo; Co',)), ("where?", ("in\nOslo",))],
    ),
    "semicolons": (
        "csv",
        "\"question\";\"answers\"\nwho?;\"Ann; Bo\"\nwhat?;['a; b', 'c']\nhow?;'x'\n".replace("[", '"[').replace(
            "]", ']"'
        ),
        [("who?", ("Ann", "Bo")), ("what?", ("a; b", "c")), ("how?", ("'x'",))],
    ),
    "tabs": ("csv", "answers\tquestion\nAnn\twho?\n", [("who?", ("Ann",))]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_format_is_known_by_its_content(tmp_path: Path, name: str) -> None:
    form, content, expected = PUBLISHED[name]
    plain, packed = tmp_path / "questions.txt", tmp_path / "questions.gz"
    plain.write_bytes(b"\xef\xbb\xbf" + content.encode())
    packed.write_bytes(gzip.compress(content.encode()))
    found = read(plain)
    assert texts(found) == expected
    assert found == read(packed) == read(plain, format=form)
    assert all(q.is_regex == (name == "trec") for q in found)


def test_questions_without_answers_are_returned_separately(tmp_path: Path) -> None:
    unanswerable: list[Question] = []
    (tmp_path / "dev.json").write_text(json.dumps(SQUAD))
    found = read_questions([tmp_path / "dev.json"], format=AUTO, unanswerable=unanswerable)
    assert len(found) == 2
    assert unanswerable == [Question("s2", "why?", ())]
    (tmp_path / "lines").write_bytes(b"".join(map(to_json_line, [*found, *unanswerable])))
    again: list[Question] = []
    assert read_questions([tmp_path / "lines"], format="jsonl", unanswerable=again) == found
    assert again == unanswerable


@pytest.mark.parametrize("fields", [{}, {"answers": []}], ids=["missing", "empty"])
def test_asked_questions_need_no_answers_but_those_of_training_do(fields: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "asked.jsonl", {"question": "why?", **fields})
    asked = read_questions([file], asked=True)
    assert asked == read_search_questions(file)
    assert [(question.question, question.answers) for question in asked] == [("why?", ())]
    with pytest.raises(ValueError, match=r"'answers' .or 'answer'. is missing|no questions with answers found"):
        read_questions([file], unanswerable=[])


def test_answers_are_all_expressions_or_none() -> None:
    plain, expression = Question("a", "?", ("A",)), Question("b", "?", ("B",), is_regex=True)
    assert answers_are_regex([expression, expression])
    assert not answers_are_regex([plain])
    with pytest.raises(ValueError, match="'a' by token_boundary, 'b' by regex_search"):
        answers_are_regex([plain, expression])


# ---- ORQA's split


def test_orqas_split_is_by_farmhash_of_the_question() -> None:
    """Of the last five digits only the last counts: those that end in 0 are dev, about one of ten."""
    import farmhash

    assert farmhash.fingerprint64(b"a") == 12917804110809363939
    for question in ("a", "Où?", *(f"question {n}?" for n in range(50))):
        assert is_in_orqa_dev(question) == (farmhash.fingerprint64(question.encode()) % 10 == 0)


# ---- any bytes: questions or a ValueError


def check(path: Path, content: bytes, form: str) -> None:
    """Read questions, which come back as they are from a file of theirs, or a message that names the file."""
    path.write_bytes(content)
    try:
        found = read_questions([path], format=form)
    except ValueError as error:
        if str(path) not in str(error):
            raise
        str(error).encode()
        return
    assert len({q.id for q in found}) == len(found) > 0
    for one in found:
        assert one.id
        assert one.question.strip() == one.question != ""
        assert one.answers
        assert all(answer.strip() for answer in one.answers)
    again = path.with_name("again.jsonl")
    again.write_bytes(b"".join(map(to_json_line, found)))
    assert read(again, format="jsonl") == found


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.timeout(0)
def test_damaged_files_give_questions_or_a_message(tmp_path: Path, name: str) -> None:
    form, content, _ = PUBLISHED[name]
    whole, packed = content.encode(), gzip.compress(content.encode(), mtime=0)

    @fuzz
    @given(SEEDS, st.sampled_from([form, AUTO]), st.integers(0, 3))
    def read_one(seed: int, asked: str, way: int) -> None:
        """Damaged as it is, twice as often as before or after it is packed."""
        data = damage(packed if way == 3 else whole, seed)
        data = gzip.compress(data, 1) if way == 2 else data
        check(tmp_path / f"questions{'.gz' if way > 1 else ''}", data, asked)

    read_one()


# ---- any records: read whole and written as they are, or refused


Record = tuple[Any, Any, Any]  # id, question, answers


def write_table(records: list[Record]) -> str:
    text = StringIO()
    csv.writer(text).writerows([("id", "question", "answers"), *((i, q, repr(a)) for i, q, a in records)])
    return text.getvalue()


WRITERS: dict[str, Callable[[list[Record]], str]] = {
    "jsonl": lambda rows: "".join(f"{json.dumps({'id': i, 'question': q, 'answers': a})}\n" for i, q, a in rows),
    "curatedtrec": lambda rows: "".join(f"{i}\tkind\t{q}\t{a}\n" for i, q, a in rows),
    "dpr": lambda rows: "".join(f"{q}\t{a!r}\n" for _, q, a in rows),
    "csv": write_table,
}
ODD_TEXTS = [
    "", " ", "\u00a0\u3000", "\0", "\x1b[2J", "\ud800", "\u200b", "\u202eabc", "x" * 100_000, "a\tb\nc", "'\"\\",
    "(a",
]  # fmt: skip


odd = st.sampled_from([*ODD_TEXTS, "1", 1, 1.5, True, None, [], {}, 10**30]) | st.text(max_size=8)


records = st.lists(st.tuples(odd, odd, st.lists(odd, max_size=3) | odd), max_size=4)


@pytest.mark.parametrize("form", WRITERS)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given=records)
@example(given=[("1", "Who?", ["Ann"]), (1, "When?", ["1999"])])
@example(given=[("1", "Who?", ["\ud800"])])
@example(given=[("1", "Who?", ["\0", "\x85"])])
@example(given=[("1", "\ud800", ["Ann"])])
@example(given=[("\ud800", "Who?", ["Ann"])])
def test_records_of_any_texts_are_read_or_refused(tmp_path: Path, form: str, given: list[Record]) -> None:
    check(tmp_path / "questions", WRITERS[form](given).encode("utf-8", "surrogatepass"), AUTO)


@pytest.mark.parametrize("answer", ["The", "!!!", "a"])
def test_an_empty_prediction_is_never_right(answer: str) -> None:
    """Such answers have no words in their normal form."""
    question = Question("1", "Who?", (answer,))
    for said, right in (("", 0.0), (answer, 1.0)):
        score = score_predictions([question], [said], seed=0)
        assert (score.em.mean, score.f1.mean) == (right, right)
