"""CSV and TSV files: the first line names the columns, which include title and text, and id if there are ids."""

import csv
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from realmops.corpus.documents import (
    LINE_LIMIT,
    Format,
    Outcome,
    RawRecord,
    Rejected,
    parse_document_or_drop,
    reject_remainder,
)
from realmops.text.compressed import DECOMPRESSION_ERRORS, describe_damage, open_compressed

_REQUIRED = ("title", "text")
_DELIMITERS = (",", "\t", ";")  # Excel writes semicolons where the locale has a decimal comma


def _records(path: Path) -> Iterator[RawRecord | Rejected]:
    csv.field_size_limit(LINE_LIMIT)  # process-wide; the default is 128 KiB
    line = size = 0
    with open_compressed(path) as (file, position):
        text = TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        try:
            head = text.readline(LINE_LIMIT)
            headers = [next(csv.reader([head], delimiter=delimiter), []) for delimiter in _DELIMITERS]
            columns = next((names for names in headers if set(_REQUIRED) <= set(names)), None)
            if columns is None or len(set(columns)) < len(columns):
                excerpt = head.strip()[:200].encode(errors="backslashreplace").decode()
                problem = "the first line must name the columns, including title and text, each once"
                yield Rejected(str(path), f"{problem} (found: {excerpt}); correct it", ends_file=True)
                return

            def lines() -> Iterator[str]:
                nonlocal size
                while part := text.readline(LINE_LIMIT):
                    size += len(part)
                    if size > LINE_LIMIT:
                        raise csv.Error(f"the row is longer than {LINE_LIMIT >> 20} Mi characters")
                    yield part

            rows = csv.reader(lines(), delimiter=_DELIMITERS[headers.index(columns)], strict=True)
            for row in rows:
                place, line, size = f"{path}:{line + 2}", rows.line_num, 0
                if len(row) == len(columns):
                    yield RawRecord(place, dict(zip(columns, row, strict=True)), position())
                elif row:
                    yield Rejected(place, f"the row has {len(row)} columns, expected {len(columns)} as in line 1")
        except csv.Error as error:
            remedy = "quote values that contain quotes, delimiters or line breaks"
            yield reject_remainder(f"{path}:{line + 2}", f"no valid CSV ({error})", remedy)
        except DECOMPRESSION_ERRORS as error:
            yield Rejected(f"{path}:{line + 2}", describe_damage(error, path), ends_file=True)


def _parse_record(raw: RawRecord) -> Outcome:
    for name, value in raw.data.items():
        if not value.isascii() and any("\udc80" <= character <= "\udcff" for character in value):
            name = name.encode(errors="backslashreplace").decode()
            return Rejected(raw.place, f"{name!r} is invalid UTF-8; save the file as UTF-8")
    record = {name: value for name, value in raw.data.items() if name != "spans" and (value or name != "id")}
    return parse_document_or_drop(record, raw.place)


CSV = Format("csv", _records, _parse_record)
