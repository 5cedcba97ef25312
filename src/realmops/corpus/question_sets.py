"""Questions with answers: reading and validation (formats are in ``formats.question_files``)."""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from realmops.artifacts import digest_of
from realmops.corpus.documents import check_id, check_text
from realmops.corpus.formats.question_files import find_question_reader
from realmops.corpus.formats.question_forms import QuestionRecord
from realmops.text.answer_matching import check_expression
from realmops.text.languages import ENGLISH, detect_language, load_languages

REGEX_RULE = "regex"  # ``answer_rule`` of answers that are regular expressions


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its acceptable answers.

    Attributes:
        id: id, unique within a file.
        question: text.
        answers: acceptable answers; none if the question has no answer (SQuAD 2).
        passage_id: id of the document that answers it, if known.
        is_regex: whether the answers are regular expressions (CuratedTREC).
        not_in: ids of the passages that it was generated from, which are no evidence for its answer (``corpus.cloze``).
        language: code of the language whose rules decide whether an answer is correct; "" means English.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    passage_id: str | None = None
    is_regex: bool = False
    not_in: tuple[str, ...] = ()
    language: str = ""

    @property
    def is_generated(self) -> bool:
        """Whether the question was generated from the corpus: it measures retrieval, nothing else."""
        return bool(self.not_in)

    @property
    def answer_rule(self) -> str:
        """Rule by which a prediction is correct: a language code, or ``REGEX_RULE``."""
        return REGEX_RULE if self.is_regex else self.language or ENGLISH

    @property
    def asked(self) -> tuple[str, str, tuple[str, ...]]:
        """Identity of the question across files: an id alone is unique only within its file."""
        return self.id, self.question, tuple(sorted(self.answers))

    @property
    def match_rule(self) -> str:
        """Rule by which a passage contains an answer: DPR's token match, or a match of the expression."""
        return "regex_search" if self.is_regex else "token_boundary"


def read_questions(paths: Sequence[Path], *, format: str, unanswerable: list[Question] | None = None) -> list[Question]:
    """Read the questions of files that have answers, in order.

    A question without an id gets one from its content: the same question has the same id in every file.

    Args:
        paths: files of questions.
        format: a name of ``question_files.FORMATS``, or "auto" to detect the format from the content of each file.
        unanswerable: receives the questions without answers: they measure abstention, and nothing else.

    Raises:
        ValueError: If data is damaged, a question has no text or answers, an expression does not compile, an id is
            duplicated (the message has file and line), or there are no questions.
    """
    places: dict[str, str] = {}
    copies: Counter[str] = Counter()
    questions = []
    for path in paths:
        for record in find_question_reader(path, format)(path):
            question = _question(record, copies)
            if question.id in places:
                raise ValueError(
                    f"{record.place}: the id {question.id!r} was used at {places[question.id]}; ids must be unique"
                )
            places[question.id] = record.place
            if question.answers:
                questions.append(question)
            elif unanswerable is not None:
                unanswerable.append(question)
    if not questions:
        names = ", ".join(map(str, paths)) or "no file was given"
        raise ValueError(
            f"no questions with answers found ({names}): "
            'give at least one line of the form {"question": "...", "answers": ["..."]}'
        )
    return questions


def text_key(text: str) -> str:
    """Return the key under which two questions or answers are the same text: NFC with single spaces.

    The normalisation of exact match is too coarse: it merges C, C# and C++, and maps the answer A to nothing.
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def assign_languages(questions: Iterable[Question], among: Sequence[str]) -> list[Question]:
    """Set the language of questions that have none, detected among the languages of a corpus."""
    return [replace(q, language=q.language or detect_language(q.question, among)[0]) for q in questions]


def rows_of_people(questions: Sequence[Question]) -> list[int]:
    """Return the positions of the questions of people: EM, F1 and the calibration are measured on them alone."""
    return [row for row, question in enumerate(questions) if not question.is_generated]


def answers_are_regex(questions: Iterable[Question]) -> bool:
    """Return whether all answers are regular expressions; raise ValueError for a mixture."""
    kinds = {question.is_regex: question.id for question in questions}
    if len(kinds) > 1:
        raise ValueError(
            f"mixed answer rules: the answers of {kinds[True]!r} are regular expressions, those of {kinds[False]!r} "
            "are not; evaluate them separately"
        )
    return kinds.popitem()[0] if kinds else False


def is_in_orqa_dev(question: str) -> bool:
    """Return whether ORQA (Lee et al. 2019) assigns a training question to its dev split: one of ten, by FarmHash."""
    import farmhash

    fingerprint: int = farmhash.fingerprint64(question.encode())
    return fingerprint % 100_000 % 10 == 0


def split_by_hash(questions: Iterable[Question]) -> dict[str, list[Question]]:
    """Split questions 7:1:2 into train, dev and test by a hash of their text, so that additions move no question."""
    parts: dict[str, list[Question]] = {"train": [], "dev": [], "test": []}
    for question in questions:
        digit = int(sha256(question.question.encode()).hexdigest(), 16) % 10
        parts["dev" if digit == 0 else "test" if digit < 3 else "train"].append(question)
    return parts


def to_json_line(question: Question) -> bytes:
    """Serialise a question in the format ``jsonl``; a question without answers has an empty list."""
    fields = {
        name: value
        for name, value in asdict(question).items()
        if name == "answers" or value not in (None, False, (), "")
    }
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def _question(record: QuestionRecord, copies: Counter[str]) -> Question:
    place = record.place
    text = check_text(record.question, "question", place).strip()
    identifier = None if record.id is None else check_id(record.id, place)
    if not text:
        raise ValueError(f"{place}: the question {identifier or ''!r} has no text; add text or remove it")
    if not isinstance(record.is_regex, bool):
        raise ValueError(f"{place}: 'is_regex' is {record.is_regex!r}, expected true or false")
    answers = () if record.unanswerable else _check_answers(record.answers, identifier or text, place)
    if record.is_regex:
        for answer in answers:
            check_expression(answer, f"{place}: question {identifier or text!r}")
    if not isinstance(record.not_in, list | tuple):
        raise ValueError(f"{place}: 'not_in' is {type(record.not_in).__name__}, expected a list of passage ids")
    language = "" if record.language is None else check_text(record.language, "language", place)
    if language and language not in load_languages():
        raise ValueError(f"{place}: 'language' is {language!r}, expected one of {', '.join(load_languages())}")
    return Question(
        id=identifier or _content_id(text, answers, copies),
        question=text,
        answers=answers,
        passage_id=None if record.passage_id is None else check_text(record.passage_id, "passage_id", place),
        is_regex=record.is_regex,
        not_in=tuple(check_text(name, "not_in", place) for name in record.not_in),
        language=language,
    )


def _content_id(text: str, answers: tuple[str, ...], copies: Counter[str]) -> str:
    identifier = f"q-{digest_of([text, answers])[:16]}"
    copies[identifier] += 1
    return identifier if copies[identifier] == 1 else f"{identifier}-{copies[identifier]}"


def _check_answers(value: Any, name: str, place: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{place}: 'answers' is {type(value).__name__}, expected a list of strings")
    answers = tuple(dict.fromkeys(check_text(answer, "answers", place) for answer in value))
    if not any(answer.strip() for answer in answers):
        raise ValueError(f"{place}: the question {name!r} has no answer; add one or remove it")
    if not all(answer.strip() for answer in answers):
        raise ValueError(f"{place}: an answer of the question {name!r} is blank; remove it")
    return answers
