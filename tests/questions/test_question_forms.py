"""JSON records of other tools: which questions are read, which are without answers, and what the others are called."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from realmops.questions.question_sets import Question, read_questions

CONTEXT = "The lighthouse was lit in 1871 by Ada Brekke."
WHO = {"id": "h1", "title": "Lighthouse", "context": CONTEXT, "question": "Who lit it?"}
LIT = {"text": ["Ada Brekke"], "answer_start": [34]}
QA = {"id": 17, "question": "Who lit it?", "answers": [{"text": "Ada Brekke", "answer_start": 34}]}
UNASKED = {"id": 18, "question": "Who built it?", "answers": [], "is_impossible": False}
ARTICLE = {"title": "Lighthouse", "paragraphs": [{"context": CONTEXT, "qas": [QA, UNASKED]}]}
REGION = {"value": {"start": 34, "end": 44, "text": "Ada Brekke", "labels": ["Answer"]}, "type": "labels"}
TASK = {"id": 5, "data": {"text": CONTEXT, "question": "Who lit it?"}, "annotations": [{"result": [REGION]}]}
ADA = (("Who lit it?", ("Ada Brekke",)),)

# name: (record, questions with answers, ids, ids of those without)
FORMS: dict[str, tuple[Any, Any, list[str], list[str]]] = {
    "hugging face": (WHO | {"answers": LIT}, ADA, ["h1"], []),
    "hugging face 2": (WHO | {"answers": {"text": [], "answer_start": []}}, (), [], ["h1"]),
    "impossible": (WHO | {"is_impossible": True, "plausible_answers": [{"text": "x"}]}, (), [], ["h1"]),
    "squad rows": (QA, ADA, ["17"], []),
    "squad article": (ARTICLE, ADA, ["17"], ["18"]),
    "squad file": ({"data": [ARTICLE], "version": "v2.0"}, ADA, ["17"], ["18"]),
    "haystack": ({"data": [{"paragraphs": ARTICLE["paragraphs"]}]}, ADA, ["17"], ["18"]),
    "mrqa": (
        {"id": "", "context": CONTEXT, "qas": [{"qid": "m1", "question": "Who lit it?", "answers": ["Ada Brekke"]}]},
        ADA, ["m1"], [],
    ),
    "hotpot": (
        {"_id": "5a", "question": "Who lit it?", "answer": "Ada Brekke", "supporting_facts": [["A", 0]], "context": []},
        ADA, ["5a"], [],
    ),
    "musique": (
        {"id": "2hop", "question": "Who lit it?", "answer": "Ada", "answer_aliases": ["A. Brekke"], "answerable": True,
         "paragraphs": [{"idx": 0, "title": "A", "paragraph_text": CONTEXT}]},
        (("Who lit it?", ("Ada", "A. Brekke")),), ["2hop"], [],
    ),
    "musique full": ({"id": "2hop", "question": "Who?", "answer": "Ada", "answerable": False}, (), [], ["2hop"]),
    "trivia qa": (
        {"question": "Who lit it?", "question_id": "tc_1", "answer": {"value": "Ada", "aliases": ["Ada", "A. Brekke"],
         "normalized_aliases": ["a brekke"]}},
        (("Who lit it?", ("Ada", "A. Brekke")),), ["tc_1"], [],
    ),
    "trivia qa, downloaded": (
        {"Data": [{"Question": "Who lit it?", "QuestionId": "t2", "Answer": {"Value": "Ada", "Aliases": ["Brekke"]}}]},
        (("Who lit it?", ("Ada", "Brekke")),), ["t2"], [],
    ),
    "kilt": (
        {"id": "k1", "input": "Who lit it?", "output": [{"answer": "Ada Brekke"}, {"provenance": [{"title": "x"}]}]},
        ADA, ["k1"], [],
    ),
    "label studio": (TASK, ADA, ["5"], []),
    "label studio, typed": (
        TASK | {"annotations": [{"result": [{"value": {"text": ["Ada Brekke"]}, "type": "textarea"}]},
                                {"was_cancelled": True, "result": [REGION | {"value": {"text": "wrong"}}]}]},
        ADA, ["5"], [],
    ),
    "numbers": ({"id": "n", "Question": "How many?", "Answer": 4}, (("How many?", ("4",)),), ["n"], []),
    "one text": ({"id": "t", "question": "How many?", "answers": "four"}, (("How many?", ("four",)),), ["t"], []),
    "a list in a text": ({"id": "t", "question": "?", "answers": "['a', 'b']"}, (("?", ("a", "b")),), ["t"], []),
}  # fmt: skip
WRITERS = {
    "lines": lambda record: json.dumps({"header": {"split": "dev"}}) + "\n" + json.dumps(record) + "\n",
    "list": lambda record: json.dumps([record], indent=1),
    "object": lambda record: json.dumps(record, indent=1),
}
OTHER = {"id": "other", "question": "When?", "answers": ["1871"]}  # so that the set has an answer


def read(*paths: Path) -> tuple[list[Question], list[Question]]:
    unanswerable: list[Question] = []
    return read_questions(paths, format="auto", unanswerable=unanswerable), unanswerable


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_known_by_its_keys(tmp_path: Path, name: str, writer: str) -> None:
    record, expected, ids, without = FORMS[name]
    path, other = tmp_path / "questions", tmp_path / "other.jsonl"
    path.write_text(WRITERS[writer](record))
    other.write_text(json.dumps(OTHER))
    questions, unanswerable = read(path, other)
    assert tuple((q.question, q.answers) for q in questions[:-1]) == expected
    assert [q.id for q in questions[:-1]] == ids
    assert [q.id for q in unanswerable] == without
    assert not any(q.answers for q in unanswerable)


REFUSED = {
    "no answers": ({"_id": "1", "text": "Who?"}, "the keys _id, text were found; expected 'question' and 'answers'"),
    "Natural Questions": ({"id": "1", "question": {"text": "who"}, "annotations": {}}, "'question' is dict, expected"),
    "instructions": ({"instruction": "Answer.", "input": "Who?", "output": "Ada"}, "'output' is str, expected a list"),
    "multiple choice": ({"question": "Who?", "choices": ["Ada", "Bo"], "answer": 1}, "multiple-choice .* 'choices'"),
    "truth value": ({"question": "Is it lit?", "answer": True}, "'answers' is bool"),
    "other object": ({"question": "Who?", "answer": {"span": "Ada"}}, "'answer' is an object with the keys span"),
    "hidden answers": ({"question": "Who?", "answer": {"value": "<unk>", "aliases": []}}, "'Who\\?' has no answer"),
    "not annotated": (TASK | {"annotations": []}, "the question '5' has no answer"),
    "two labels": (
        TASK | {"annotations": [{"result": [REGION, REGION | {"value": {"text": "1871", "labels": ["Year"]}}]}]},
        "the labels Answer, Year were found; expected one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_records_are_refused_with_their_keys(tmp_path: Path, name: str) -> None:
    record, report = REFUSED[name]
    for writer in ("lines", "list"):
        path = tmp_path / writer
        path.write_text(WRITERS[writer](record))
        with pytest.raises(ValueError, match=report) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}{':2:' if writer == 'lines' else ': record 1:'}")


def test_lines_are_streamed_and_long_objects_are_not_lines(tmp_path: Path) -> None:
    """One line may be one question or a whole file of SQuAD; a broken line is named."""
    path = tmp_path / "q.json"
    article = {"paragraphs": [{"context": "x" * (1 << 17), "qas": [QA]}]}
    path.write_text(json.dumps({"data": [article]}))
    assert read(path)[0][0].id == "17"
    path.write_text(f"{json.dumps(OTHER)}\n{{broken\n")
    with pytest.raises(ValueError, match=f"{path}:2: not valid JSON"):
        read(path)
    path.write_text('{"question": "Who?", broken}\n')
    with pytest.raises(ValueError, match=f"{path}:1: not valid JSON .* each line must be one JSON object"):
        read(path)
    path.write_text('{\n"data": [\nbroken]}\n')
    with pytest.raises(ValueError, match=f"{path}:3: not valid JSON"):
        read(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_question_files_have_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    expected = [("Où est-ce?", ("Besançon",))]
    line = json.dumps({"question": "Où est-ce?", "answers": ["Besançon"]}, ensure_ascii=False)
    files = {
        "a.jsonl": f"{line}\n",
        "b.json": f"[\n{line}\n]",
        "c.json": f'{{"data": [\n{line}\n]}}',
        "d.csv": "sep=;\r\n question ; answer\r\nOù est-ce?; Besançon\r\n",
        "e.csv": "question|answer\nOù est-ce?|Besançon\n",
        "f.csv": 'question, answer\n"Où est-ce?", "Besançon"\n',
        "g.tsv": "question\tanswer\nOù est-ce?\tBesançon\n",
        "h.txt": "Où est-ce?\t['Besançon']\n",
        "i.txt": "1\tfactoid\tOù est-ce?\tBesançon\n",
    }
    for name, content in files.items():
        for path in (tmp_path / name, tmp_path / f"{name}.gz"):
            data = content.encode(encoding)
            path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
            assert [(q.question, tuple(a.strip() for a in q.answers)) for q in read(path)[0]] == expected, path


def test_damage_is_named_with_its_encoding_and_line(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_bytes("question,answer\nWho?,Ada\n".encode("utf-16") + b"\x00\xd8")
    with pytest.raises(ValueError, match="invalid UTF-16 at byte 52; save the file as UTF-8"):
        read(path)
    path.write_text("sep=;\nquestion;answer\nWho?\n")
    with pytest.raises(ValueError, match=":3: 1 columns, expected 2"):
        read(path)
    path.write_text("1\tWho lit it?\n2\tWho built it?\n")  # TREC's topics
    with pytest.raises(ValueError, match=r"found 'Who lit it\?'; expected a list such as .* DPR"):
        read(path)


def test_a_file_without_any_answer_is_no_set(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(UNASKED))
    with pytest.raises(ValueError, match="no questions with answers found"):
        read(path)
