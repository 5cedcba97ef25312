"""File formats of question sets: detect a file's format and read its records.

``FORMATS`` lists them. Every ValueError begins with the file and, if known, the line. Files whose names end in .gz or
.bz2 are decompressed.
"""

import ast
import csv
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from realmops.corpus.documents import check_text, read_json_lines, require_key
from realmops.text.compressed import DECOMPRESSION_ERRORS, describe_damage, open_compressed

AUTO = "auto"
LARGEST_CONTENT = 256 << 20  # bytes of a file that is read into memory; SQuAD has 40 MB
LARGEST_LITERAL = 1 << 16  # characters of a list in DPR's files
_HEAD = 1 << 16  # bytes read to detect a format
_BOM = b"\xef\xbb\xbf"
_SQUAD_HEAD = re.compile(rb'\{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:')
_DESCRIPTION = re.compile(r'\(\s*description(?:\s*"((?:[^"\\]|\\.)*)"|\s+([^\s()"]+))\s*\)\s*', re.DOTALL)
_TARGET = re.compile(rf"\s*\(\s*list\s*((?:{_DESCRIPTION.pattern})*)\)\s*", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class QuestionRecord:
    """The fields that all formats share, unchecked; ``id`` is None if the format has no ids.

    ``relevant`` has the grades of documents by id, or a list of relevant ones.
    """

    place: str
    id: Any
    question: Any
    answers: Any
    passage_id: Any = None
    is_regex: Any = False
    unanswerable: bool = False
    not_in: Any = ()
    language: Any = None
    relevant: Any = None


def _json_lines(path: Path) -> Iterator[QuestionRecord]:
    """Read {"id"?, "question", "answers", ...} per line, and other fields of ``Question``; "answer" may be a string.

    A question with relevance judgements ("relevant") may have no answers.
    """
    for place, record in read_json_lines(path):
        key = "answer" if "answer" in record and "answers" not in record else "answers"
        answers = record.get(key, []) if "relevant" in record else require_key(record, key, place)
        yield QuestionRecord(
            place,
            record.get("id"),
            require_key(record, "question", place),
            [answers] if key == "answer" and isinstance(answers, str) else answers,
            record.get("passage_id"),
            record.get("is_regex", False),
            not_in=record.get("not_in", ()),
            language=record.get("language"),
            relevant=record.get("relevant"),
        )


def _webquestions(path: Path) -> Iterator[QuestionRecord]:
    """Read a JSON list of {"qId", "qText", "answers"} (brmson) or {"utterance", "targetValue"} (Berant et al. 2013)."""
    for place, record in _iter_objects(_json(path), path, "the file", ": question"):
        if "utterance" in record:
            target = check_text(require_key(record, "targetValue", place), "targetValue", place)
            yield QuestionRecord(place, None, record["utterance"], _parse_target_value(target, place))
        else:
            yield QuestionRecord(
                place, record.get("qId"), require_key(record, "qText", place), require_key(record, "answers", place)
            )


def _squad(path: Path) -> Iterator[QuestionRecord]:
    """Read {"data": [{"paragraphs": [{"qas": [{"id", "question", "answers": [{"text"}]}]}]}]}."""
    data = require_key(_expect_object(_json(path), f"{path}: the file"), "data", str(path))
    for article_place, article in _iter_objects(data, path, "'data'", ": article"):
        paragraphs = require_key(article, "paragraphs", article_place)
        for paragraph_place, paragraph in _iter_objects(paragraphs, article_place, "'paragraphs'", ", paragraph"):
            questions = require_key(paragraph, "qas", paragraph_place)
            for place, record in _iter_objects(questions, paragraph_place, "'qas'", ", question"):
                answers = _expect_list(record.get("answers", []), place, "'answers'")
                yield QuestionRecord(
                    place,
                    record.get("id"),
                    require_key(record, "question", place),
                    [require_key(_expect_object(answer, place), "text", place) for answer in answers],
                    unanswerable=record.get("is_impossible") is True,
                )


def _curatedtrec(path: Path) -> Iterator[QuestionRecord]:
    """Read lines of id, kind, question and regular expression between tabs."""
    for place, columns in _columns(path, 4, "id, kind, question, regular expression"):
        yield QuestionRecord(place, columns[0], columns[2], [columns[3]], is_regex=True)


def _dpr(path: Path) -> Iterator[QuestionRecord]:
    """Read lines of question and Python list of answers between tabs; either may be quoted as in CSV."""
    for place, columns in _columns(path, 2, "question, list of answers"):
        question, literal = map(_unquote, columns)
        yield QuestionRecord(place, None, question, _parse_literal(literal, place))


def _csv(path: Path) -> Iterator[QuestionRecord]:
    """Read a table whose first line names the columns: question, answer or answers, optionally id and passage_id.

    A cell of ``answers`` holds one answer, several separated by semicolons, or a list in brackets.
    """
    text = _text(path)
    first, _, _ = text.partition("\n")
    delimiter = _detect_delimiter(first)
    problem = f"{path}:1: the first line of a table names its columns, including 'question' and 'answer' (or 'answers')"
    if delimiter is None:
        raise ValueError(problem)
    rows = csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    line = 1
    try:
        for row in rows:
            place, line = f"{path}:{line}", rows.line_num + 1
            if not names:
                names = [name.strip().lower() for name in row]
                if "question" not in names or not {"answer", "answers"} & {*names}:  # only csv unquotes the names
                    raise ValueError(problem)
            elif any(cell.strip() for cell in row):
                if len(row) != len(names):
                    raise ValueError(f"{place}: {len(row)} columns, expected {len(names)} ({', '.join(names)})")
                cells = dict(zip(names, row, strict=True))
                answers = [cells["answer"]] if "answer" in cells else _split_answers(cells["answers"], place)
                question_id, passage = cells.get("id") or None, cells.get("passage_id") or None
                yield QuestionRecord(place, question_id, cells["question"], answers, passage)
    except csv.Error as error:
        raise ValueError(f"{path}:{line}: invalid CSV line ({error}); correct it") from None


def _detect_delimiter(first: str) -> str | None:
    """Return the delimiter of a table's first line; None if the line does not name the required columns."""
    for delimiter in (",", ";", "\t"):
        names = [name.strip().strip('"').strip().lower() for name in first.split(delimiter)]
        if "question" in names and ("answer" in names or "answers" in names):
            return delimiter
    return None


def _split_answers(cell: str, place: str) -> list[Any]:
    if cell.lstrip().startswith("["):
        return _parse_literal(cell, place)
    return [answer.strip() for answer in cell.split(";")]


FORMATS: dict[str, Callable[[Path], Iterator[QuestionRecord]]] = {
    "jsonl": _json_lines,
    "webquestions": _webquestions,
    "curatedtrec": _curatedtrec,
    "squad": _squad,
    "dpr": _dpr,
    "csv": _csv,
}
_COLUMNS = {4: "curatedtrec", 2: "dpr"}


def find_question_reader(path: Path, format: str) -> Callable[[Path], Iterator[QuestionRecord]]:
    """Return the function that reads a file's records.

    Args:
        path: the file.
        format: a name of ``FORMATS``, or ``AUTO`` to detect it from the first bytes.

    Raises:
        ValueError: the format is unknown.
    """
    name = _detect_format(path) if format == AUTO else format
    if name not in FORMATS:
        raise ValueError(f"question format {name!r} is unknown; choose one of {AUTO}, {', '.join(FORMATS)}")
    return FORMATS[name]


def _detect_format(path: Path) -> str:
    head = _content(path, _HEAD).removeprefix(_BOM).lstrip()
    if not head or head.startswith(b"{"):
        return "squad" if _SQUAD_HEAD.match(head) else "jsonl"
    if head.startswith(b"["):
        return "webquestions"
    first = head.split(b"\n", 1)[0]
    if _detect_delimiter(first.decode(errors="replace")):
        return "csv"
    columns = first.count(b"\t") + 1
    if columns not in _COLUMNS:
        raise ValueError(
            f"{path}:1: unknown format, {columns} columns found; allowed are JSON, a table that names the columns "
            "question and answer in its first line, and 2 (DPR) or 4 (CuratedTREC) columns between tabs; name the "
            f"format ({', '.join(FORMATS)}) or convert the file"
        )
    return _COLUMNS[columns]


def _content(path: Path, limit: int | None = None) -> bytes:
    """Return the decompressed file, or its first ``limit`` bytes."""
    try:
        with open_compressed(path) as (file, _):
            content = file.read(LARGEST_CONTENT + 1 if limit is None else limit)
    except DECOMPRESSION_ERRORS as error:
        raise ValueError(f"{path}: {describe_damage(error, path)}") from None
    if len(content) > LARGEST_CONTENT:
        raise ValueError(f"{path}: more than {LARGEST_CONTENT >> 20} MiB; split it or convert it to JSON lines")
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
        raise ValueError(f"{path}: JSON nested too deeply; not a question file") from None
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(
            f"{path}:{line}: not valid JSON ({error}); download the file again or name its format"
        ) from None


def _expect_object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {type(value).__name__}, expected a JSON object; correct it or name the format")
    return value


def _expect_list(value: Any, place: str | Path, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{place}: {name} is {type(value).__name__}, expected a list; correct it or name the format")
    return value


def _iter_objects(value: Any, place: str | Path, name: str, label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, JSON object) for each item of a list; an item's place is the list's, ``label`` and its number."""
    for number, item in enumerate(_expect_list(value, place, name), 1):
        item_place = f"{place}{label} {number}"
        yield item_place, _expect_object(item, item_place)


def _columns(path: Path, count: int, names: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (``file:line``, columns) for each line that is not blank."""
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


def _unquote(column: str) -> str:
    """Remove the quotes of a CSV column and undouble those inside; return any other column unchanged."""
    quoted = re.fullmatch(r'"((?:[^"]|"")*)"', column)
    return quoted[1].replace('""', '"') if quoted else column


def _parse_literal(text: str, place: str) -> list[Any]:
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
            f"{place}: the answers are no Python list of strings; expected a list such as ['Paris', 'Lyon']; correct it"
        )
    return value


def _parse_target_value(target: str, place: str) -> list[str]:
    """Return the names in ``(list (description "A B") (description C))``."""
    whole = _TARGET.fullmatch(target)
    if whole is None:
        raise ValueError(f'{place}: targetValue is {target[:100]!r}, expected (list (description "...") ...)')
    return [word or _ESCAPED.sub(r"\1", quoted) for quoted, word in _DESCRIPTION.findall(whole[1])]
