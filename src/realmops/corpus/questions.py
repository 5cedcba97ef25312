"""Questions with their answers, from JSON lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realmops.corpus.documents import check_id, check_text, read_json_lines, require


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its acceptable answers and, where it is known, the id of the document that answers it."""

    id: str
    question: str
    answers: tuple[str, ...]
    passage_id: str | None = None


def read_questions(paths: Iterable[Path]) -> list[Question]:
    """The questions of .jsonl or .jsonl.gz files ({"id", "question", "answers", "passage_id"?}), in order.

    Raises ValueError that names file and line for a damaged line, a question without text or answers,
    an id that came before, and when there is no question at all.
    """
    paths = list(paths)
    places: dict[str, str] = {}
    questions = []
    for path in paths:
        for place, record in read_json_lines(path):
            question = _question(record, place)
            if question.id in places:
                raise ValueError(
                    f"{place}: the id {question.id!r} was used at {places[question.id]}; ids must differ"
                )
            places[question.id] = place
            questions.append(question)
    if not questions:
        names = ", ".join(map(str, paths)) or "no file was given"
        raise ValueError(
            f"there are no questions ({names}): "
            'give at least one line of the form {"id": "...", "question": "...", "answers": ["..."]}'
        )
    return questions


def _question(record: dict[str, Any], place: str) -> Question:
    identifier = check_id(require(record, "id", place), place)
    text = check_text(require(record, "question", place), "question", place).strip()
    if not text:
        raise ValueError(f"{place}: the question {identifier!r} has no text; write it or remove the line")
    gold = record.get("passage_id")
    return Question(
        id=identifier,
        question=text,
        answers=_answers(require(record, "answers", place), identifier, place),
        passage_id=None if gold is None else check_text(gold, "passage_id", place),
    )


def _answers(value: Any, identifier: str, place: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{place}: 'answers' is {type(value).__name__}, wanted a list of strings")
    answers = tuple(check_text(answer, "answers", place) for answer in value)
    if not any(answer.strip() for answer in answers):
        raise ValueError(f"{place}: the question {identifier!r} has no answer; give one or remove the line")
    if not all(answer.strip() for answer in answers):
        raise ValueError(f"{place}: an answer of the question {identifier!r} is blank; remove it")
    return answers
