"""File formats of question sets (``FORMATS``), UTF-8 or UTF-16, also compressed: detection, and reading of records."""

import csv
import json
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from realmops.compressed import DECOMPRESSION_ERRORS, describe_damage, open_compressed
from realmops.questions.question_forms import QuestionRecord, expect_object, iter_items, parse_literal, read_form
from realmops.readers.documents import Rejected, iter_lines, read_json_lines

AUTO = "auto"
LARGEST_CONTENT = 256 << 20  # bytes of a file that is read into memory; SQuAD has 40 MB
_HEAD = 1 << 16  # bytes read to detect a format
_QUOTED = re.compile(r'\A"((?:[^"]|"")*)"\Z')  # a column as in CSV
_SEPARATOR = re.compile(r'"?sep=([,;|\t])"?\s*\n', re.IGNORECASE)  # Excel's first line


def _json_lines(path: Path) -> Iterator[QuestionRecord]:
    for place, record in read_json_lines(path):
        yield from read_form(record, place)


def _json(path: Path) -> Iterator[QuestionRecord]:
    value = _parse_json(path)
    if not isinstance(value, list):
        yield from read_form(expect_object(value, f"{path}: the file"), str(path))
        return
    for place, record in iter_items(value, path):
        yield from read_form(record, place)


def _curatedtrec(path: Path) -> Iterator[QuestionRecord]:
    for place, columns in read_columns(path, 4, "id, kind, question, regular expression"):
        yield QuestionRecord(place, columns[0], columns[2], [columns[3]], is_regex=True)


def _dpr(path: Path) -> Iterator[QuestionRecord]:
    """Read lines of question and Python list of answers between tabs; either may be quoted as in CSV."""
    for place, columns in read_columns(path, 2, "question, list of answers"):
        question, literal = (_QUOTED.sub(lambda match: match[1].replace('""', '"'), column) for column in columns)
        yield QuestionRecord(place, None, question, parse_literal(literal, place))


def _csv(path: Path) -> Iterator[QuestionRecord]:
    """Read a table with columns question and answer, or answers: one, several separated by semicolons, or a list."""
    text = _text(path)
    mark = _SEPARATOR.match(text)
    delimiter = _detect_delimiter(text)
    problem = f"{path}:1: the first line of a table names its columns, including 'question' and 'answer' (or 'answers')"
    if delimiter is None:
        raise ValueError(problem)
    skipped = 1 if mark else 0
    table = StringIO(text[mark.end() :] if mark else text, newline="")
    rows = csv.reader(table, delimiter=delimiter, skipinitialspace=True, strict=True)
    names: list[str] = []
    line = 1 + skipped
    try:
        for row in rows:
            place, line = f"{path}:{line}", rows.line_num + 1 + skipped
            if not names:
                names = [name.strip().lower() for name in row]
                if "question" not in names or not {"answer", "answers"} & {*names}:  # only csv unquotes the names
                    raise ValueError(problem)
            elif any(cell.strip() for cell in row):
                if len(row) != len(names):
                    raise ValueError(f"{place}: {len(row)} columns, expected {len(names)} ({', '.join(names)})")
                cells = dict(zip(names, row, strict=True))
                if (answer := cells.get("answer")) is not None:
                    answers = [answer]
                elif cells["answers"].lstrip().startswith("["):
                    answers = parse_literal(cells["answers"], place)
                else:
                    answers = [text.strip() for text in cells["answers"].split(";")]
                question_id, passage = cells.get("id") or None, cells.get("passage_id") or None
                yield QuestionRecord(place, question_id, cells["question"], answers, passage)
    except csv.Error as error:
        raise ValueError(f"{path}:{line}: invalid CSV line ({error}); correct it") from None


def _detect_delimiter(text: str) -> str | None:
    mark = _SEPARATOR.match(text)
    first = text[mark.end() if mark else 0 :].partition("\n")[0]
    for delimiter in mark[1] if mark else ",;\t|":
        names = [name.strip().strip('"').strip().lower() for name in first.split(delimiter)]
        if "question" in names and ("answer" in names or "answers" in names):
            return delimiter
    return None


FORMATS: dict[str, Callable[[Path], Iterator[QuestionRecord]]] = {
    "jsonl": _json_lines,
    "json": _json,
    "curatedtrec": _curatedtrec,
    "dpr": _dpr,
    "csv": _csv,
}
_COLUMNS = {4: "curatedtrec", 2: "dpr"}


def find_question_reader(path: Path, format: str) -> Callable[[Path], Iterator[QuestionRecord]]:
    name = _detect_format(path) if format == AUTO else format
    if name not in FORMATS:
        raise ValueError(f"question format {name!r} is unknown; choose one of {AUTO}, {', '.join(FORMATS)}")
    return FORMATS[name]


def _detect_format(path: Path) -> str:
    head = _text(path, _HEAD).lstrip(" \t\r\n")
    if not head or head.startswith("{"):
        return "jsonl" if not head or _has_json_lines(path) else "json"
    if head.startswith("["):
        return "json"
    if _detect_delimiter(head):
        return "csv"
    first = head.partition("\n")[0]
    columns = first.count("\t") + 1
    if columns not in _COLUMNS:
        raise ValueError(
            f"{path}:1: unknown format, {columns} columns found in {first.strip()[:60]!r}; allowed are JSON, a table "
            "that names the columns question and answer (or answers) in its first line, and 2 (DPR) or 4 (CuratedTREC) "
            "columns between tabs; convert the file"
        )
    return _COLUMNS[columns]


def _has_json_lines(path: Path) -> bool:
    raw = next(iter_lines(path))
    if isinstance(raw, Rejected):
        return raw.ends_file
    try:
        json.loads(raw.data)
    except (ValueError, RecursionError):
        return bytes(raw.data).rstrip().endswith(b"}")  # damaged; the line of an indented file ends otherwise
    return True


def _text(path: Path, limit: int | None = None) -> str:
    """Return the decompressed text of a file, or of its first ``limit`` bytes."""
    try:
        with open_compressed(path) as (file, _):
            content = file.read(LARGEST_CONTENT + 1 if limit is None else limit)
    except DECOMPRESSION_ERRORS as error:
        raise ValueError(f"{path}: {describe_damage(error, path)}") from None
    if len(content) > LARGEST_CONTENT:
        raise ValueError(f"{path}: more than {LARGEST_CONTENT >> 20} MiB; split it or convert it to JSON lines")
    encoding = "UTF-16" if content[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "UTF-8"
    try:
        return content.decode(encoding, "strict" if limit is None else "replace").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: invalid {encoding} at byte {error.start}; save the file as UTF-8") from None


def _parse_json(path: Path) -> Any:
    text = _text(path)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: JSON nested too deeply; not a question file") from None
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(f"{path}:{line}: not valid JSON ({error}); download the file again") from None


def read_columns(path: Path, count: int, names: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (``file:line``, columns) for each line that is not blank."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            place, columns = f"{path}:{number}", line.removesuffix("\r").split("\t")
            if len(columns) != count:
                raise ValueError(f"{place}: {len(columns)} columns, expected {count} with tabs between them ({names})")
            yield place, columns
