"""CSV and TSV files: the first line names the columns, which include text, and title and id if there are any."""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from realmops.compressed import DECOMPRESSION_ERRORS, describe_damage, open_text
from realmops.readers.documents import (
    LINE_LIMIT,
    TEXT_KEYS,
    Format,
    Outcome,
    RawRecord,
    Rejected,
    parse_document,
    reject_remainder,
    text_key,
)


def _records(path: Path) -> Iterator[RawRecord | Rejected]:
    csv.field_size_limit(LINE_LIMIT)  # process-wide; the default is 128 KiB
    line = size = 0
    delimiters: Sequence[str] = (",", "\t", ";", "|")  # Excel writes semicolons where decimals have commas
    with open_text(path, "surrogateescape") as (text, position):
        try:
            head, before = text.readline(LINE_LIMIT), 1
            if separator := re.fullmatch(r"sep=(.)\r?\n?", head):  # Excel's first line
                head, delimiters, before = text.readline(LINE_LIMIT), (separator[1],), 2
            while head.startswith("#") and before < 100 and not _names_text(_header(head, delimiters)[0]):
                head, before = text.readline(LINE_LIMIT), before + 1
            columns, delimiter = _header(head, delimiters)
            named = [name for name in columns if name]
            if not _names_text(columns) or len(set(named)) < len(named):
                excerpt = head.strip()[:200].encode(errors="backslashreplace").decode()
                problem = "the first line must name the columns, including text, each once"
                yield Rejected(str(path), f"{problem} (found: {excerpt}); correct it", ends_file=True)
                return

            def lines() -> Iterator[str]:
                nonlocal size
                while part := text.readline(LINE_LIMIT):
                    size += len(part)
                    if size > LINE_LIMIT:
                        raise csv.Error(f"the row is longer than {LINE_LIMIT >> 20} Mi characters")
                    yield part

            rows = csv.reader(lines(), delimiter=delimiter, strict=True, skipinitialspace=True)
            for row in rows:
                place, line, size = f"{path}:{line + before + 1}", rows.line_num, 0
                if len(row) == len(columns):
                    yield RawRecord(place, dict(zip(columns, row, strict=True)), position())
                elif row:
                    yield Rejected(place, f"the row has {len(row)} columns, expected {len(columns)} as in the header")
        except csv.Error as error:
            remedy = "double the quotation marks in quoted values, and quote values with delimiters or line breaks"
            yield reject_remainder(f"{path}:{line + before + 1}", f"no valid CSV ({error})", remedy)
        except DECOMPRESSION_ERRORS as error:
            yield Rejected(f"{path}:{line + before + 1}", describe_damage(error, path), ends_file=True)


def _header(line: str, delimiters: Sequence[str]) -> tuple[list[str], str]:
    """Return the columns and the delimiter that gives a column ``text`` (or "Text", " text"), or the first one."""
    found: list[tuple[list[str], str]] = []
    for delimiter in delimiters:
        row = csv.reader([line], delimiter=delimiter, skipinitialspace=True)
        names = [name.strip() for name in next(row, [])]
        known = {"title", "id", *TEXT_KEYS} - {*names}  # of which the header may write a variant
        found.append(([name.lower() if name.lower() in known else name for name in names], delimiter))
    return max(found, key=lambda one: _names_text(one[0]))


def _names_text(columns: Sequence[str]) -> bool:
    return text_key(columns) in columns


def _parse_record(raw: RawRecord) -> Outcome:
    record = {name: value for name, value in raw.data.items() if name not in ("", "spans") and (value or name != "id")}
    return parse_document(record, raw.place)


CSV = Format("csv", _records, _parse_record, suffixes=(".csv", ".tsv"))
