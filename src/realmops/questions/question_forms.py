"""Forms of JSON records with a question and its answers (``FORMS``), detected by their keys in any case.

SQuAD's {"data": [{"paragraphs": [{"qas": [...]}]}]} is unpacked from any of its levels on; MRQA's header is skipped.
"""

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realmops.readers.documents import check_text, require_key

LARGEST_LITERAL = 1 << 16  # characters of a list in DPR's files
_DESCRIPTION = re.compile(r'\(\s*description(?:\s*"((?:[^"\\]|\\.)*)"|\s+([^\s()"]+))\s*\)\s*', re.DOTALL)
_TARGET = re.compile(rf"\s*\(\s*list\s*((?:{_DESCRIPTION.pattern})*)\)\s*", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_LEVELS = ("data", "paragraphs", "qas")  # of SQuAD's files, the outermost first
_CHOICES = ("choices", "options")  # keys of multiple-choice questions, whose answer may be a number or letter
_OTHER_FIELDS = ("passage_id", "is_regex", "not_in", "language", "relevant", "is_generated")
_NO_ANSWER = "<unk>"  # TriviaQA's value in test files without answers


@dataclass(frozen=True, slots=True)
class QuestionRecord:
    """Unchecked fields of all formats; ``relevant`` has grades of documents by id, or a list of relevant ones."""

    place: str
    id: Any
    question: Any
    answers: Any  # None if their key is missing
    passage_id: Any = None
    is_regex: Any = False
    unanswerable: bool = False
    not_in: Any = ()
    language: Any = None
    relevant: Any = None
    is_generated: Any = False


def read_form(record: Any, place: str, levels: tuple[str, ...] = _LEVELS) -> Iterator[QuestionRecord]:
    """Yield the questions of a JSON value by its keys; ``levels`` are the containers that it may be."""
    found = expect_object(record, place)
    fields = {key.lower(): found[key] for key in sorted(found, key=str.islower)}  # "question" precedes "Question"
    container = next((key for key in levels if key in fields), None)
    if container and "question" not in fields and not (container == "data" and isinstance(fields["data"], dict)):
        for inner, item in iter_items(fields[container], place, container):
            yield from read_form(item, inner, levels[levels.index(container) + 1 :])
        return
    if fields.keys() == {"header"}:
        return
    if fields.get("is_impossible") is True or "relevant" in fields:
        fields.setdefault("answers", [])
    read = next((read for keys, read in FORMS if keys <= fields.keys()), None)
    if read is None:
        raise ValueError(
            f"{place}: unknown form of a question: the keys {', '.join(sorted(found)) or 'none'} were found; expected "
            "'question' and 'answers' (or 'answer'), or a form of docs/data.md; rename the keys or convert the file"
        )
    yield read(place, fields)


def iter_items(value: Any, place: str | Path, container: str = "") -> Iterator[tuple[str, Any]]:
    items = expect_list(value, place, repr(container)) if container else value
    for number, item in enumerate(items, 1):
        yield f"{place}, {container} {number}" if container else f"{place}: record {number}", item


def _read_question(place: str, fields: dict[str, Any]) -> QuestionRecord:
    """Read ``question`` with ``answers`` or ``answer``: texts, SQuAD's {"text"}, or TriviaQA's {"value", "aliases"}."""
    if named := [name for name in _CHOICES if name in fields]:
        raise ValueError(
            f"{place}: a multiple-choice question: the key {named[0]!r} was found; write the text of the right choice "
            f"as 'answers' and remove {named[0]!r}"
        )
    key = "answers" if "answers" in fields else "answer"
    value = fields.get(key)
    answers = _answers(value, key, place) if key in fields else None
    is_empty = answers == [] and not (isinstance(value, dict) and "text" not in value)
    ids = ("id", "_id", "qid", "question_id", "questionid") if isinstance(value, dict) else ("id", "_id", "qid")
    if aliases := fields.get("answer_aliases"):
        answers = [*(answers or []), *expect_list(aliases, place, "'answer_aliases'")]
    return QuestionRecord(
        place,
        next((fields[name] for name in ids if fields.get(name) not in (None, "")), fields.get("id")),
        fields["question"],
        answers,
        unanswerable=(is_empty and "relevant" not in fields)
        or fields.get("is_impossible") is True
        or fields.get("answerable") is False,
        **{name: fields[name] for name in _OTHER_FIELDS if name in fields},
    )


def _answers(value: Any, key: str, place: str) -> Any:
    if isinstance(value, list):
        return [_answer(item, place) for item in value]
    if not isinstance(value, dict):
        is_literal = key == "answers" and isinstance(value, str) and value.lstrip().startswith("[")
        return parse_literal(value, place) if is_literal else [_answer(value, place)]
    if "text" in value:
        return _answers(value["text"], key, place)
    fields = {name.lower(): item for name, item in value.items()}
    if "value" not in fields:
        raise ValueError(
            f"{place}: {key!r} is an object with the keys {', '.join(sorted(value)) or 'none'}; expected a text, a "
            "list, or an object with 'text' (SQuAD's rows) or 'value' (TriviaQA); rename the keys or convert the file"
        )
    aliases = expect_list(fields.get("aliases", []), place, "'aliases'")
    return [answer for answer in (fields["value"], *aliases) if answer != _NO_ANSWER]


def _answer(item: Any, place: str) -> Any:
    if isinstance(item, dict):
        return require_key(item, "text", place)
    return str(item) if isinstance(item, int) and not isinstance(item, bool) else item


def _read_kilt(place: str, fields: dict[str, Any]) -> QuestionRecord:
    outputs = [expect_object(item, place) for item in expect_list(fields["output"], place, "'output'")]
    answers = [output["answer"] for output in outputs if output.get("answer")]
    return QuestionRecord(place, fields.get("id"), fields["input"], answers)


def _read_label_studio(place: str, fields: dict[str, Any]) -> QuestionRecord:
    """Read a task with ``question`` in its data; its answers are the texts that were selected or typed."""
    question = require_key(expect_object(fields["data"], f"{place}: 'data'"), "question", f"{place}: 'data'")
    answers: list[Any] = []
    labels: set[str] = set()
    for annotation in expect_list(fields["annotations"], place, "'annotations'"):
        if expect_object(annotation, place).get("was_cancelled") is True:
            continue
        for region in expect_list(annotation.get("result"), place, "'result'"):
            value = expect_object(expect_object(region, place).get("value"), f"{place}: 'value'")
            labels.update(map(str, expect_list(value.get("labels", []), place, "'labels'")))
            text = value.get("text", [])
            answers += text if isinstance(text, list) else [text]
    if len(labels) > 1:
        raise ValueError(
            f"{place}: the labels {', '.join(sorted(labels))} were found; expected one, that of answers; export the "
            "annotations of one label"
        )
    return QuestionRecord(place, fields.get("id"), question, answers)


def _read_webquestions(place: str, fields: dict[str, Any]) -> QuestionRecord:
    """Read ``(list (description "A B") (description C))`` of ``targetValue`` as answers."""
    target = check_text(fields["targetvalue"], "targetValue", place)
    if (whole := _TARGET.fullmatch(target)) is None:
        raise ValueError(f'{place}: targetValue is {target[:100]!r}, expected (list (description "...") ...)')
    answers = [word or _ESCAPED.sub(r"\1", quoted) for quoted, word in _DESCRIPTION.findall(whole[1])]
    return QuestionRecord(place, None, fields["utterance"], answers)


FORMS: tuple[tuple[set[str], Callable[[str, dict[str, Any]], QuestionRecord]], ...] = (  # required keys, reader
    ({"data", "annotations"}, _read_label_studio),
    ({"input", "output"}, _read_kilt),
    ({"utterance", "targetvalue"}, _read_webquestions),
    (
        {"qtext", "answers"},
        lambda place, row: QuestionRecord(place, row.get("qid"), row["qtext"], row["answers"]),
    ),
    ({"question", "answers"}, _read_question),
    ({"question"}, _read_question),  # with "answer", or without answers
)


def expect_object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {type(value).__name__}, expected a JSON object; correct it")
    return value


def expect_list(value: Any, place: str | Path, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{place}: {name} is {type(value).__name__}, expected a list; correct it")
    return value


def parse_literal(text: str, place: str) -> list[Any]:
    """Parse a Python list without executing anything."""
    if len(text) > LARGEST_LITERAL:
        raise ValueError(f"{place}: the answers have {len(text)} characters; at most {LARGEST_LITERAL} are read")
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes such as "\d"
            value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, list):
        raise ValueError(
            f"{place}: the answers are no Python list of strings: found {text[:60]!r}; expected a list such as "
            "['Paris', 'Lyon'], as in DPR's files; correct it, or add the answers"
        )
    return value
