"""Question files in every format: what is read, what is complained about and where, and ORQA's split."""

import gzip
import json
import os
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_formats_fuzz import SEEDS, damage, fuzz

from realmops.config import QuestionFiles
from realmops.corpus.formats import question_files as module
from realmops.corpus.formats.question_files import AUTO, FORMATS
from realmops.corpus.question_sets import (
    Question,
    answers_are_expressions,
    in_orqa_dev,
    json_line,
    read_questions,
)

GOOD = {"id": "q1", "question": " Who? ", "answers": ["Ann", "Anna"], "passage_id": "p7", "extra": 1}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def read(*paths: Path, format: str = AUTO) -> list[Question]:
    return read_questions(paths, format=format)


def test_questions_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl.gz"
    path.write_bytes(gzip.compress(f"{json.dumps(GOOD)}\n".encode()))
    more = write(tmp_path / "more.jsonl", {"id": 2, "question": "When?", "answers": ["1999"]})
    assert read(path, more) == [Question("q1", "Who?", ("Ann", "Anna"), "p7"), Question("2", "When?", ("1999",))]


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
        ({"is_regex": "yes"}, "'is_regex' is 'yes'"),
        ({"is_regex": True, "answers": ["(Ann"]}, "question 'q2': '(Ann' is no regular expression"),
        ({"question": ...}, "the key 'question' is missing"),
        ({"answers": ...}, "the key 'answers' is missing"),
    ],
)
def test_a_bad_question_is_named_with_file_and_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    changed = {key: value for key, value in {**GOOD, "id": "q2", **change}.items() if value is not ...}
    path = write(tmp_path / "questions.jsonl", GOOD, changed)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no questions"):
        read(write(tmp_path / "questions.jsonl"))


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
    "brmson": ("webquestions", json.dumps(BRMSON), [("who?", ("Ann", "Bo")), ("how?", ("5",))]),
    "original": ("webquestions", json.dumps(ORIGINAL), [("who?", ("Ann B.", "Bo")), ("how?", ('5 "big" ones',))]),
    "squad": ("squad", json.dumps(SQUAD, indent=1), [("who?", ("Ann",)), ("whom?", ("Bo",))]),
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


def test_ids_come_from_the_file_where_it_has_them(tmp_path: Path) -> None:
    ids = {}
    for name, (_, content, _) in PUBLISHED.items():
        (tmp_path / name).write_text(content)
        ids[name] = [q.id for q in read(tmp_path / name)]
    assert ids["brmson"] == ["w1", "w2"]
    assert ids["trec"] == ["1", "lfb2"]
    assert ids["squad"][0] == "s1"
    assert [name for name in ids if all(i.startswith("q-") for i in ids[name])] == [
        *("original", "dpr", "nq", "one", "csv", "semicolons", "tabs")
    ]
    (tmp_path / "named.csv").write_text("id,passage_id,question,answer\n7,p1,who?,Ann\n,,where?,Oslo\n")
    named, unnamed = read(tmp_path / "named.csv")
    assert (named.id, named.passage_id) == ("7", "p1")
    assert (unnamed.id.startswith("q-"), unnamed.passage_id) == (True, None)


def test_impossible_questions_are_told(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "dev.json").write_text(json.dumps(SQUAD))
    found = read_questions([tmp_path / "dev.json"], format=AUTO, unanswerable=told)
    assert len(found) == 2
    assert told == ["s2"]


@pytest.mark.parametrize(
    ("content", "form", "says"),
    [
        ("1\tfactoid\tWho?\t(Ann\n", AUTO, r":1: question '1': '\(Ann' is no regular expression \(missing \)"),
        ("1\tx\tWho?\tAnn\n2\tWho?\tBo\n", AUTO, ":2: 3 columns, expected 4"),
        ("1\tx\tWho?\tAnn\n1\tx\tWho?\tAnn\n", AUTO, ":2: the id '1' was used at .*:1"),
        ("who?\t['Ann', 5]\n", AUTO, ":1: 'answers' is int"),
        ("who?\t('Ann',)\n", AUTO, ":1: the answers are no Python list"),
        ("who?\t['A']\nwho?\t[__import__('os').getcwd()]\n", AUTO, ":2: the answers are no Python list"),
        ("who?\t" + "[" * 5000 + "]" * 5000 + "\n", AUTO, ":1: the answers are no Python list"),
        ("who?\t['" + "x" * (1 << 16) + "']\n", AUTO, ":1: the answers have 65540 characters"),
        ("who?\t['\\ud800']\n", AUTO, ":1: 'answers' holds half a surrogate"),
        ("who? Ann\n", AUTO, r":1: neither JSON nor a table .* \(1 found\)"),
        ("a\tb\tc\n", AUTO, r"\(3 found\); name the format"),
        ("[1]", AUTO, ": question 1 is int"),
        ("[{}]", AUTO, ": question 1: the key 'qText' is missing"),
        ('[{"qText": "a", "answers": ["b"]},\n]', AUTO, ":2: not valid JSON"),
        ('[{"utterance": "a", "targetValue": "(list (description))"}]', AUTO, "question 1: targetValue is"),
        ('[{"utterance": "a", "targetValue": "(list (number 5))"}]', AUTO, "question 1: targetValue is"),
        ('[{"utterance": "a", "targetValue": "(list (description \\"a)"}]', AUTO, "question 1: targetValue is"),
        ('[{"utterance": "a", "targetValue": "(list)"}]', AUTO, "question 1: the question 'a' has no answer"),
        ('{"data": [{"title": "t"}]}', AUTO, ": article 1: the key 'paragraphs' is missing"),
        ('{"data": [{"paragraphs": [{"qas": [{"question": "a"}]}]}]}', AUTO, "1, question 1: the question 'a' has no"),
        ('{"data": 5}', AUTO, "'data' is int, wanted a list"),
        ("[]", "squad", "the file is list, wanted a JSON object"),
        ("[" + "1" * 5000 + "]", AUTO, ":1: not valid JSON"),
        ("[" * 100_000, AUTO, "nested too deeply"),
        ("question,answer\nwho?,Ann\nwhy?\n", AUTO, r":3: 1 columns, expected 2 \(question, answer\)"),
        ('question,answer\nwho?,"An\nn"\nwhy?,"B\n', AUTO, ":4: no line of a table"),
        ("question,answer\nwho?,\n", AUTO, ":2: the question 'who\\?' has no answer"),
        ("question,answers\nwho?,Ann;\n", AUTO, ":2: an answer of the question 'who\\?' is blank"),
        ('question,answers\nwho?,"[1"\n', AUTO, ":2: the answers are no Python list"),
        ("who?,Ann\n", "csv", ":1: the first line of a table names its columns"),
        ("x", "nq", "format 'nq' is unknown; choose one of auto, jsonl, webquestions, curatedtrec, squad, dpr, csv"),
    ],
)
def test_damage_is_named_with_its_place(tmp_path: Path, content: str, form: str, says: str) -> None:
    path = tmp_path / "questions"
    path.write_text(content)
    with pytest.raises(ValueError, match=says) as caught:
        read(path, format=form)
    assert str(path) in str(caught.value) or form == "nq"


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    packed = tmp_path / "cut.json.gz"
    packed.write_bytes(gzip.compress(b"[" + os.urandom(1000).hex().encode())[:-20])
    (tmp_path / "plain.gz").write_text("[]")
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (packed, "ends in the middle"),
        (tmp_path / "plain.gz", "no valid gzip data"),
        (tmp_path, "cannot be read"),
        (tmp_path / "nothere", "cannot be read"),
        (tmp_path / "pipe", "cannot be read: it is a pipe, expected a regular file"),
        (Path("/dev/zero"), "cannot be read: it is a device, expected a regular file"),
    ):
        with pytest.raises(ValueError, match=says) as caught:
            read(path)
        assert str(caught.value).startswith(str(path))


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_CONTENT", 1 << 20)
    packed = tmp_path / "bomb.json.gz"
    packed.write_bytes(gzip.compress(b"[" + b" " * (1 << 21)))
    with pytest.raises(ValueError, match="more than 1 MiB"):
        read(packed)


def test_the_options_name_the_formats() -> None:
    assert typing.get_args(typing.get_type_hints(QuestionFiles)["format"]) == (AUTO, *FORMATS)


def test_answers_are_all_expressions_or_none() -> None:
    plain, expression = Question("a", "?", ("A",)), Question("b", "?", ("B",), is_regex=True)
    assert answers_are_expressions([expression, expression])
    assert not answers_are_expressions([plain])
    with pytest.raises(ValueError, match="of 'b' are regular expressions, those of 'a' are not"):
        answers_are_expressions([plain, expression])


def test_a_question_comes_back_from_its_line(tmp_path: Path) -> None:
    questions = [Question("a", "Où?", ("Besançon",), "p1"), Question("b", "When?", (r"19\d\d", "never"), is_regex=True)]
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b"".join(map(json_line, questions)))
    assert read(path) == questions


# ---- ORQA's split


def test_orqas_split_goes_by_farmhash_of_the_question() -> None:
    """Of the last five digits only the last counts: those that end in 0 are dev, about one of ten."""
    import farmhash

    assert farmhash.fingerprint64(b"a") == 12917804110809363939  # so that another hash would be seen
    assert not in_orqa_dev("a")
    numbers = [n for n in range(200) if in_orqa_dev(f"question {n}?")]
    assert [farmhash.fingerprint64(f"question {n}?".encode()) % 10 for n in numbers] == [0] * len(numbers)
    assert 8 <= len(numbers) <= 35
    assert in_orqa_dev("Où?") == (farmhash.fingerprint64("Où?".encode()) % 10 == 0)


# ---- any bytes: questions or a ValueError


def check(path: Path, content: bytes, form: str) -> None:
    path.write_bytes(content)
    try:
        found = read_questions([path], format=form)
    except ValueError as error:
        if str(path) not in str(error):
            raise
        return
    assert found
    assert len({q.id for q in found}) == len(found)
    for question in found:
        assert question.question.strip() == question.question != ""
        assert all(isinstance(answer, str) and answer.strip() for answer in question.answers)
        json_line(question)


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
