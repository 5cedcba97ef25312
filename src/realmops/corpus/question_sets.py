"""Questions with their answers, read from files and checked (``formats.question_files`` has the formats)."""

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
from realmops.corpus.formats.question_files import QuestionRecord, question_reader
from realmops.text.answer_matching import check_expression
from realmops.text.languages import ENGLISH, detect, languages

EXPRESSIONS = "regex"  # an answer rule: answers are regular expressions


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its acceptable answers and, where it is known, the id of the document that answers it.

    ``is_regex``: the answers are regular expressions (CuratedTREC).  ``not_in``: the ids of the passages that it was
    made from, which are no evidence for its answer (``corpus.cloze``).  ``language``: the code of the language by
    whose rules an answer is right, English's without one.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    passage_id: str | None = None
    is_regex: bool = False
    not_in: tuple[str, ...] = ()
    language: str = ""

    @property
    def answer_rule(self) -> str:
        """By whose rules a prediction is right: those of a language, by its code, or ``EXPRESSIONS``."""
        return EXPRESSIONS if self.is_regex else self.language or ENGLISH

    @property
    def asked(self) -> tuple[str, str, tuple[str, ...]]:
        """What makes two questions the same one: an id alone is unique in one file only."""
        return self.id, self.question, tuple(sorted(self.answers))

    @property
    def match_rule(self) -> str:
        """The rule by which a passage answers it: DPR's tokens, or any match of the expression."""
        return "regex_search" if self.is_regex else "token_boundary"


def read_questions(paths: Sequence[Path], *, format: str, unanswerable: list[str] | None = None) -> list[Question]:
    """The questions of files, in order.

    A question without an id gets one from its content: the same question has the same id in every file.
    Questions that SQuAD 2 marks as impossible are left out; their ids go to ``unanswerable``.

    Args:
        format: a name of ``question_files.FORMATS``, or "auto": by the content of each file.

    Raises ValueError that names file and line for damaged data, a question without text or answers, an expression
    that does not compile, an id that came before, and when there is no question at all.
    """
    places: dict[str, str] = {}
    copies: Counter[str] = Counter()
    questions = []
    for path in paths:
        for record in question_reader(path, format)(path):
            if record.unanswerable:
                if unanswerable is not None:
                    unanswerable.append(str(record.id))
                continue
            question = _question(record, copies)
            if question.id in places:
                raise ValueError(
                    f"{record.place}: the id {question.id!r} was used at {places[question.id]}; ids must differ"
                )
            places[question.id] = record.place
            questions.append(question)
    if not questions:
        names = ", ".join(map(str, paths)) or "no file was given"
        raise ValueError(
            f"there are no questions ({names}): "
            'give at least one line of the form {"question": "...", "answers": ["..."]}'
        )
    return questions


def text_key(text: str) -> str:
    """Return what makes two questions or answers the same text: NFC with single blanks.

    The normal form of exact match is none: it makes one of C, C# and C++, and nothing of the answer A.
    """
    return " ".join(unicodedata.normalize("NFC", text).split())


def in_languages(questions: Iterable[Question], among: Sequence[str]) -> list[Question]:
    """The same questions, each in its language: where it names none, that which is detected among those of a corpus."""
    return [replace(one, language=one.language or detect(one.question, among)[0]) for one in questions]


def answers_are_expressions(questions: Iterable[Question]) -> bool:
    """Whether the answers are regular expressions; ValueError when some are and some are not."""
    kinds = {question.is_regex: question.id for question in questions}
    if len(kinds) > 1:
        raise ValueError(
            f"the answers of {kinds[True]!r} are regular expressions, those of {kinds[False]!r} are not: they are "
            "right by different rules; evaluate them apart"
        )
    return kinds.popitem()[0] if kinds else False


def in_orqa_dev(question: str) -> bool:
    """Whether ORQA (Lee et al. 2019) takes a training question for its dev split: one of ten, by FarmHash."""
    import farmhash

    fingerprint: int = farmhash.fingerprint64(question.encode())
    return fingerprint % 100_000 % 10 == 0


def parts_of(questions: Iterable[Question]) -> dict[str, list[Question]]:
    """Questions for train, dev and test, seven to one to two, by a hash of each: more questions move none of them."""
    parts: dict[str, list[Question]] = {"train": [], "dev": [], "test": []}
    for one in questions:
        digit = int(sha256(one.question.encode()).hexdigest(), 16) % 10
        parts["dev" if digit == 0 else "test" if digit < 3 else "train"].append(one)
    return parts


def json_line(question: Question) -> bytes:
    """A question in the form ``jsonl``."""
    said = {name: value for name, value in asdict(question).items() if value not in (None, False, (), "")}
    return json.dumps(said, ensure_ascii=False).encode() + b"\n"


def _question(record: QuestionRecord, copies: Counter[str]) -> Question:
    place = record.place
    text = check_text(record.question, "question", place).strip()
    given = None if record.id is None else check_id(record.id, place)
    if not text:
        raise ValueError(f"{place}: the question {given or ''!r} has no text; write it or remove it")
    if not isinstance(record.is_regex, bool):
        raise ValueError(f"{place}: 'is_regex' is {record.is_regex!r}; true or false is wanted")
    answers = _answers(record.answers, given or text, place)
    if record.is_regex:
        for answer in answers:
            check_expression(answer, f"{place}: question {given or text!r}")
    if not isinstance(record.not_in, list | tuple):
        raise ValueError(f"{place}: 'not_in' is {type(record.not_in).__name__}, wanted a list of passage ids")
    language = "" if record.language is None else check_text(record.language, "language", place)
    if language and language not in languages():
        raise ValueError(f"{place}: 'language' is {language!r}; one of {', '.join(languages())} is wanted")
    return Question(
        id=given or _id_of(text, answers, copies),
        question=text,
        answers=answers,
        passage_id=None if record.passage_id is None else check_text(record.passage_id, "passage_id", place),
        is_regex=record.is_regex,
        not_in=tuple(check_text(name, "not_in", place) for name in record.not_in),
        language=language,
    )


def _id_of(text: str, answers: tuple[str, ...], copies: Counter[str]) -> str:
    identifier = f"q-{digest_of([text, answers])[:16]}"
    copies[identifier] += 1
    return identifier if copies[identifier] == 1 else f"{identifier}-{copies[identifier]}"


def _answers(value: Any, name: str, place: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{place}: 'answers' is {type(value).__name__}, wanted a list of strings")
    answers = tuple(dict.fromkeys(check_text(answer, "answers", place) for answer in value))
    if not any(answer.strip() for answer in answers):
        raise ValueError(f"{place}: the question {name!r} has no answer; give one or remove it")
    if not all(answer.strip() for answer in answers):
        raise ValueError(f"{place}: an answer of the question {name!r} is blank; remove it")
    return answers
