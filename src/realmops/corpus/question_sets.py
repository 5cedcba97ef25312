"""Questions with their answers, in the forms in which question sets are published.

``FORMATS`` names the forms; every complaint is a ValueError that begins with the file and, where there is one,
the line.  Names that end in .gz or .bz2 are unpacked.
"""

import ast
import csv
import json
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

from realmops.artifacts import digest_of
from realmops.corpus.documents import check_id, check_text, read_json_lines, require
from realmops.text.answer_matching import check_expression
from realmops.text.compressed import DAMAGE, damage, open_compressed
from realmops.text.languages import ENGLISH, detect, languages

AUTO = "auto"
EXPRESSIONS = "regex"  # an answer rule: answers are regular expressions
LARGEST_CONTENT = 256 << 20  # bytes of a file that is read whole; SQuAD has 40 MB
LARGEST_LITERAL = 1 << 16  # characters of a list in DPR's files
_HEAD = 1 << 16
_BOM = b"\xef\xbb\xbf"
_SQUAD_HEAD = re.compile(rb'\{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:')
_DESCRIPTION = re.compile(r'\(\s*description(?:\s*"((?:[^"\\]|\\.)*)"|\s+([^\s()"]+))\s*\)\s*', re.DOTALL)
_TARGET = re.compile(rf"\s*\(\s*list\s*((?:{_DESCRIPTION.pattern})*)\)\s*", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


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


@dataclass(frozen=True, slots=True)
class _Record:
    """What every form has in common, before it is checked; no id where the form has none."""

    place: str
    id: Any
    question: Any
    answers: Any
    passage_id: Any = None
    is_regex: Any = False
    unanswerable: bool = False
    not_in: Any = ()
    language: Any = None


def read_questions(paths: Sequence[Path], *, format: str, unanswerable: list[str] | None = None) -> list[Question]:
    """The questions of files, in order.

    A question without an id gets one from its content: the same question has the same id in every file.
    Questions that SQuAD 2 marks as impossible are left out; their ids go to ``unanswerable``.

    Args:
        format: a name of ``FORMATS``, or "auto": by the content of each file.

    Raises ValueError that names file and line for damaged data, a question without text or answers, an expression
    that does not compile, an id that came before, and when there is no question at all.
    """
    places: dict[str, str] = {}
    copies: Counter[str] = Counter()
    questions = []
    for path in paths:
        for record in _reader(path, format)(path):
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


def _question(record: _Record, copies: Counter[str]) -> Question:
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


# ---- the forms


def _json_lines(path: Path) -> Iterator[_Record]:
    """{"id"?, "question", "answers", ...} a line, with other fields of ``Question``; "answer" is a list or a text."""
    for place, record in read_json_lines(path):
        key = "answer" if "answer" in record and "answers" not in record else "answers"
        answers = require(record, key, place)
        yield _Record(
            place,
            record.get("id"),
            require(record, "question", place),
            [answers] if key == "answer" and isinstance(answers, str) else answers,
            record.get("passage_id"),
            record.get("is_regex", False),
            not_in=record.get("not_in", ()),
            language=record.get("language"),
        )


def _webquestions(path: Path) -> Iterator[_Record]:
    """One JSON list, of {"qId", "qText", "answers"} (brmson) or {"utterance", "targetValue"} (Berant et al. 2013)."""
    for place, record in _each(_json(path), path, "the file", ": question"):
        if "utterance" in record:
            target = check_text(require(record, "targetValue", place), "targetValue", place)
            yield _Record(place, None, record["utterance"], _descriptions(target, place))
        else:
            yield _Record(place, record.get("qId"), require(record, "qText", place), require(record, "answers", place))


def _squad(path: Path) -> Iterator[_Record]:
    """{"data": [{"paragraphs": [{"qas": [{"id", "question", "answers": [{"text"}]}]}]}]}."""
    data = require(_mapping(_json(path), f"{path}: the file"), "data", str(path))
    for at, article in _each(data, path, "'data'", ": article"):
        for within, paragraph in _each(require(article, "paragraphs", at), at, "'paragraphs'", ", paragraph"):
            for place, record in _each(require(paragraph, "qas", within), within, "'qas'", ", question"):
                answers = _list(record.get("answers", []), place, "'answers'")
                yield _Record(
                    place,
                    record.get("id"),
                    require(record, "question", place),
                    [require(_mapping(answer, place), "text", place) for answer in answers],
                    unanswerable=record.get("is_impossible") is True,
                )


def _curatedtrec(path: Path) -> Iterator[_Record]:
    """id TAB kind TAB question TAB regular expression."""
    for place, columns in _columns(path, 4, "id, kind, question, regular expression"):
        yield _Record(place, columns[0], columns[2], [columns[3]], is_regex=True)


def _dpr(path: Path) -> Iterator[_Record]:
    """Question TAB Python list of answers, either in quotes as csv has them."""
    for place, columns in _columns(path, 2, "question, list of answers"):
        question, literal = map(_unquoted, columns)
        yield _Record(place, None, question, _literal(literal, place))


def _csv(path: Path) -> Iterator[_Record]:
    """A table whose first line names the columns: question, and answer or answers, optionally id and passage_id.

    A cell of ``answers`` has one answer, several with semicolons between them, or a list in brackets.
    """
    text = _text(path)
    first, _, _ = text.partition("\n")
    delimiter = _delimiter(first)
    columns = (
        f"{path}:1: the first line of a table names its columns, 'question' and 'answer' (or 'answers') among them"
    )
    if delimiter is None:
        raise ValueError(columns)
    rows = csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    line = 1
    try:
        for row in rows:
            place, line = f"{path}:{line}", rows.line_num + 1
            if not names:
                names = [name.strip().lower() for name in row]
                if "question" not in names or not {"answer", "answers"} & {*names}:  # as csv reads them, quotes and all
                    raise ValueError(columns)
            elif any(cell.strip() for cell in row):
                if len(row) != len(names):
                    raise ValueError(f"{place}: {len(row)} columns, expected {len(names)} ({', '.join(names)})")
                cells = dict(zip(names, row, strict=True))
                answers = [cells["answer"]] if "answer" in cells else _in_cell(cells["answers"], place)
                own_id, passage = cells.get("id") or None, cells.get("passage_id") or None
                yield _Record(place, own_id, cells["question"], answers, passage)
    except csv.Error as error:
        raise ValueError(f"{path}:{line}: no line of a table ({error}); correct it") from None


def _delimiter(first: str) -> str | None:
    """What parts the columns of a table's first line, where it names them; else None."""
    for delimiter in (",", ";", "\t"):
        names = [name.strip().strip('"').strip().lower() for name in first.split(delimiter)]
        if "question" in names and ("answer" in names or "answers" in names):
            return delimiter
    return None


def _in_cell(cell: str, place: str) -> list[Any]:
    if cell.lstrip().startswith("["):
        return _literal(cell, place)
    return [answer.strip() for answer in cell.split(";")]


FORMATS: dict[str, Callable[[Path], Iterator[_Record]]] = {
    "jsonl": _json_lines,
    "webquestions": _webquestions,
    "curatedtrec": _curatedtrec,
    "squad": _squad,
    "dpr": _dpr,
    "csv": _csv,
}
_COLUMNS = {4: "curatedtrec", 2: "dpr"}


def _reader(path: Path, format: str) -> Callable[[Path], Iterator[_Record]]:
    name = _detected(path) if format == AUTO else format
    if name not in FORMATS:
        raise ValueError(f"question format {name!r} is unknown; choose one of {AUTO}, {', '.join(FORMATS)}")
    return FORMATS[name]


def _detected(path: Path) -> str:
    head = _content(path, _HEAD).removeprefix(_BOM).lstrip()
    if not head or head.startswith(b"{"):
        return "squad" if _SQUAD_HEAD.match(head) else "jsonl"
    if head.startswith(b"["):
        return "webquestions"
    first = head.split(b"\n", 1)[0]
    if _delimiter(first.decode(errors="replace")):
        return "csv"
    columns = first.count(b"\t") + 1
    if columns not in _COLUMNS:
        raise ValueError(
            f"{path}:1: neither JSON nor a table that names the columns question and answer in its first line, or has "
            f"2 (DPR) or 4 (CuratedTREC) columns with tabs between them ({columns} found); name the format "
            f"({', '.join(FORMATS)}) or convert the file"
        )
    return _COLUMNS[columns]


# ---- what they are made of


def _content(path: Path, limit: int | None = None) -> bytes:
    """A whole file, unpacked; its first bytes with ``limit``."""
    try:
        with open_compressed(path) as (file, _):
            content = file.read(LARGEST_CONTENT + 1 if limit is None else limit)
    except DAMAGE as error:
        raise ValueError(f"{path}: {damage(error, path)}") from None
    if len(content) > LARGEST_CONTENT:
        raise ValueError(f"{path}: more than {LARGEST_CONTENT >> 20} MiB; split it, or give JSON lines")
    return content


def _text(path: Path) -> str:
    try:
        return _content(path).removeprefix(_BOM).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: invalid UTF-8 at byte {error.start}; save the file as UTF-8") from None


def _json(path: Path) -> Any:
    text = _text(path)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: JSON nested too deeply; this is no question file") from None
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(
            f"{path}:{line}: not valid JSON ({error}); download the file again or name its format"
        ) from None


def _mapping(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {type(value).__name__}, wanted a JSON object; correct it or name the format")
    return value


def _list(value: Any, place: str | Path, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{place}: {name} is {type(value).__name__}, wanted a list; correct it or name the format")
    return value


def _each(value: Any, place: str | Path, name: str, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, JSON object) of each item of a list; ``what`` comes between the list's place and the item's number."""
    for number, item in enumerate(_list(value, place, name), 1):
        inner = f"{place}{what} {number}"
        yield inner, _mapping(item, inner)


def _columns(path: Path, count: int, names: str) -> Iterator[tuple[str, list[str]]]:
    """(``file:line``, columns) of every line but blank ones."""
    for number, line in enumerate(_content(path).removeprefix(_BOM).split(b"\n"), 1):
        place = f"{path}:{number}"
        try:
            text = line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{place}: invalid UTF-8 at byte {error.start} of the line; save the file as UTF-8"
            ) from None
        if text.strip():
            columns = text.split("\t")
            if len(columns) != count:
                raise ValueError(f"{place}: {len(columns)} columns, expected {count} with tabs between them ({names})")
            yield place, columns


def _unquoted(column: str) -> str:
    """A column as csv reads it: in quotes, with each quote inside doubled; any other stays as it is."""
    quoted = re.fullmatch(r'"((?:[^"]|"")*)"', column)
    return quoted[1].replace('""', '"') if quoted else column


def _literal(text: str, place: str) -> list[Any]:
    """A Python list of strings; nothing is executed."""
    if len(text) > LARGEST_LITERAL:
        raise ValueError(f"{place}: the answers have {len(text)} characters; at most {LARGEST_LITERAL} are read")
    try:
        with warnings.catch_warnings(action="ignore"):  # of "\d" and the like
            value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, list):
        raise ValueError(
            f"{place}: the answers are no Python list of strings such as ['Paris', 'Lyon']; correct this line"
        )
    return value


def _descriptions(target: str, place: str) -> list[str]:
    """The names in ``(list (description "A B") (description C))``."""
    whole = _TARGET.fullmatch(target)
    if whole is None:
        raise ValueError(f'{place}: targetValue is {target[:100]!r}, wanted (list (description "...") ...); correct it')
    return [word or _ESCAPED.sub(r"\1", quoted) for quoted, word in _DESCRIPTION.findall(whole[1])]
