"""Questions with answers: reading and validation (formats are in ``question_files``)."""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from realmops.artifacts import digest_of
from realmops.corpus.languages import ENGLISH, detect_language, load_languages
from realmops.credentials import refuse_credentials
from realmops.questions.answer_matching import check_expression
from realmops.questions.beir_queries import has_queries, qrels_files, read_judged_queries, read_queries
from realmops.questions.question_files import AUTO, find_question_reader
from realmops.questions.question_forms import QuestionRecord
from realmops.readers.beir import corpus_file
from realmops.readers.documents import check_id, check_text

REGEX_RULE = "regex"  # ``answer_rule`` of answers that are regular expressions
JUDGED_RULE = "judged"  # ``match_rule`` of questions with relevance judgements and without answers


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its acceptable answers, or with relevance judgements of documents."""

    id: str  # id, unique within a file
    question: str
    # Acceptable answers; none if there are judgements instead, or if nothing answers it (SQuAD 2)
    answers: tuple[str, ...]
    passage_id: str | None = None  # id of the document that answers it, if known
    is_regex: bool = False  # whether the answers are regular expressions (CuratedTREC)
    # Ids of the passages that it was generated from, which are no evidence for its answer (``corpus.cloze``)
    not_in: tuple[str, ...] = ()
    language: str = ""  # code of the language whose rules decide whether an answer is correct; "" means English
    relevant: tuple[tuple[str, int], ...] = ()  # (id, grade) of judged documents; a grade of 1 or more is relevant
    # Whether it was generated from the corpus, as all with ``not_in`` are: it measures retrieval, nothing else
    is_generated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_generated", self.is_generated or bool(self.not_in))

    @property
    def measures_answers(self) -> bool:
        """Whether answers are measured: the question is of people, and has more than relevance judgements."""
        return not self.is_generated and self.match_rule != JUDGED_RULE

    @property
    def judgements(self) -> dict[str, int]:
        """Grades of documents by id; the document or passage that answers the question has 1; {} if none is known."""
        return dict(self.relevant) or ({self.passage_id: 1} if self.passage_id else {})

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
        """Rule by which a passage is relevant: DPR's token match, a match of the expression, or judgements alone."""
        if self.relevant and not self.answers:
            return JUDGED_RULE
        return "regex_search" if self.is_regex else "token_boundary"


def read_questions(
    paths: Sequence[Path], *, format: str = AUTO, unanswerable: list[Question] | None = None, asked: bool = False
) -> list[Question]:
    """Read the questions of files that have answers, or all if ``asked``, in order; ``unanswerable`` gets others."""
    places: dict[str, str] = {}
    copies: Counter[str] = Counter()
    questions = []
    for path in paths:
        for record in find_question_reader(path, format)(path):
            question = _question(record, copies, asked)
            if question.id in places:
                raise ValueError(
                    f"{record.place}: the id {question.id!r} was used at {places[question.id]}; ids must be unique"
                )
            places[question.id] = record.place
            if question.answers or question.relevant or asked:
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


def read_judged_questions(folder: Path) -> dict[str, list[Question]]:
    copies: Counter[str] = Counter()
    splits = {} if corpus_file(folder) is None else qrels_files(folder)
    return {
        split: [_question(record, copies) for record in read_judged_queries(folder, path)]
        for split, path in splits.items()
    }


def read_search_questions(path: Path) -> list[Question]:
    """Return the questions of a file to search for, also in the form of BEIR's queries.jsonl."""
    if not has_queries(path):
        return read_questions([path], asked=True)
    return [Question(record.id, record.question, ()) for record in read_queries(path) if record.question.strip()]


def text_key(text: str) -> str:
    """Return NFC with single spaces: the normalisation of exact match merges C, C# and C++, and empties an answer A."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def assign_languages(questions: Iterable[Question], among: Sequence[str]) -> list[Question]:
    return [replace(q, language=q.language or detect_language(q.question, among)[0]) for q in questions]


def rows_of_people(questions: Sequence[Question]) -> list[int]:
    return [row for row, question in enumerate(questions) if question.measures_answers]


def answers_are_regex(questions: Iterable[Question]) -> bool:
    """Return whether all answers are regular expressions; raise ValueError for a mixture of rules."""
    rules = {question.match_rule: question.id for question in questions}
    if len(rules) > 1:
        named = ", ".join(f"{name!r} by {rule}" for rule, name in rules.items())
        raise ValueError(f"questions have mixed match rules ({named}); evaluate them separately")
    return "regex_search" in rules


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
    fields = {name: value for name, value in asdict(question).items() if value not in (None, False, (), "")}
    if question.relevant:
        fields["relevant"] = dict(question.relevant)
    elif not question.answers:
        fields["answers"] = []
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def _question(record: QuestionRecord, copies: Counter[str], asked: bool = False) -> Question:
    place = record.place
    texts = [record.id, record.question, record.answers, record.passage_id, record.relevant, record.not_in]
    refuse_credentials(texts, f"{place}: the question")
    text = check_text(record.question, "question", place).strip()
    identifier = None if record.id is None else check_id(record.id, place)
    if not text:
        raise ValueError(f"{place}: the question {identifier or ''!r} has no text; add text or remove it")
    for name in ("is_regex", "is_generated"):
        if not isinstance(value := getattr(record, name), bool):
            raise ValueError(f"{place}: {name!r} is {value!r}, expected true or false")
    relevant = _check_judgements(record.relevant, place)
    has_no_answer = record.unanswerable or ((relevant or asked) and not record.answers)
    answers = () if has_no_answer else _check_answers(record.answers, identifier or text, place)
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
        relevant=relevant,
        is_generated=record.is_generated,
    )


def _check_judgements(value: Any, place: str) -> tuple[tuple[str, int], ...]:
    grades = dict.fromkeys(value, 1) if isinstance(value, list) and all(isinstance(x, str) for x in value) else value
    if grades is None:
        return ()
    if not isinstance(grades, dict) or not all(type(grade) is int for grade in grades.values()):
        raise ValueError(
            f"{place}: 'relevant' is {str(value)[:100]}; expected a whole number for each document id, such as "
            '{"doc-7": 2}, or a list of ids'
        )
    return tuple((check_id(document, place), grade) for document, grade in grades.items())


def _content_id(text: str, answers: tuple[str, ...], copies: Counter[str]) -> str:
    identifier = f"q-{digest_of([text, answers])[:16]}"
    copies[identifier] += 1
    return identifier if copies[identifier] == 1 else f"{identifier}-{copies[identifier]}"


def _check_answers(value: Any, name: str, place: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        found = "missing" if value is None else type(value).__name__
        raise ValueError(f"{place}: 'answers' (or 'answer') is {found}, expected a list of strings")
    answers = tuple(dict.fromkeys(check_text(answer, "answers", place) for answer in value))
    if not any(answer.strip() for answer in answers):
        raise ValueError(f"{place}: the question {name!r} has no answer; add one or remove it")
    if not all(answer.strip() for answer in answers):
        raise ValueError(f"{place}: an answer of the question {name!r} is blank; remove it")
    return answers
