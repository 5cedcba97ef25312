"""Documents as they come in: JSON lines, plain or gzipped, read one line at a time.

Every complaint is a ValueError that begins with ``file:line``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

LINE_LIMIT = 16 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Document:
    """One document; ``id`` is None when the corpus gives none, ``place`` is file:line.

    ``spans`` are (character start, character end, label) in ``text``.
    """

    title: str
    text: str
    id: str | None
    spans: tuple[tuple[int, int, str], ...]
    place: str


def read_documents(paths: Iterable[Path]) -> Iterator[Document]:
    """The documents of JSON-lines files ({"title", "text", "id"?, "spans"?}), in order.

    Raises ValueError that names file and line for a damaged line or file, and when there is no document.
    Ids are not compared here: that needs memory of all of them (see ``snapshot``).
    """
    paths = list(paths)
    found = False
    for path in paths:
        for place, record in read_json_lines(path):
            found = True
            yield _document(record, place)
    if not found:
        names = ", ".join(map(str, paths)) or "no file was given"
        raise ValueError(
            f"the corpus holds no documents ({names}): "
            'give at least one line of the form {"title": "...", "text": "..."}'
        )


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(``file:line``, JSON object) for each line of a .jsonl or .jsonl.gz file but blank ones."""
    number = 0
    try:
        with _open(path) as file:
            while line := file.readline(LINE_LIMIT + 1):
                number += 1
                place = f"{path}:{number}"
                if len(line) > LINE_LIMIT:
                    raise ValueError(
                        f"{place}: the line is longer than {LINE_LIMIT >> 20} MiB; "
                        "put one document on each line and split the longest ones"
                    )
                if number == 1:
                    line = line.removeprefix(_BOM)
                if line.strip():
                    yield place, _object(line, place)
    except EOFError:
        raise ValueError(
            f"{path}:{number + 1}: the gzip file ends in the middle; it was cut: copy or download it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path}:{number + 1}: no valid gzip data ({error}); copy the file again, "
            "or take .gz off its name if it is plain text"
        ) from None


def check_text(value: object, key: str, place: str) -> str:
    """The value if it is a string that can be written as UTF-8, else ValueError naming key and place."""
    if not isinstance(value, str):
        raise ValueError(f"{place}: {key!r} is {type(value).__name__}, wanted a string; correct this line")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: {key!r} holds half a surrogate pair at character {error.start}; write it whole"
        ) from None
    return value


def require(record: dict[str, Any], key: str, place: str) -> Any:
    """``record[key]``, or ValueError naming key and place when it is missing."""
    if key not in record:
        keys = ", ".join(sorted(record)) or "none"
        raise ValueError(f"{place}: the key {key!r} is missing (keys found: {keys}); add it to this line")
    return record[key]


def check_id(value: object, place: str) -> str:
    """An id as a string; whole numbers are taken too."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    text = check_text(value, "id", place)
    if not text:
        raise ValueError(f"{place}: 'id' is empty; give every line its own id")
    return text


def _open(path: Path) -> BinaryIO:
    try:
        return cast(BinaryIO, gzip.open(path, "rb")) if path.name.endswith(".gz") else open(path, "rb")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check the path") from None


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: invalid UTF-8 at byte {error.start} of the line; save the file as UTF-8"
        ) from None
    except RecursionError:
        raise ValueError(f"{place}: JSON nested too deeply; a line is one flat object") from None
    except ValueError as error:
        raise ValueError(f"{place}: not valid JSON ({error}); each line must be one JSON object") from None
    if not isinstance(value, dict):
        raise ValueError(f"{place}: found a JSON {type(value).__name__}; each line must be one JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice")
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _document(record: dict[str, Any], place: str) -> Document:
    title = check_text(require(record, "title", place), "title", place)
    text = check_text(require(record, "text", place), "text", place)
    given = record.get("id")
    identifier = None if given is None else check_id(given, place)
    spans = tuple(_span(span, len(text), place) for span in _span_list(record, place))
    return Document(title, text, identifier, spans, place)


def _span_list(record: dict[str, Any], place: str) -> list[Any]:
    spans = record.get("spans", [])
    if not isinstance(spans, list):
        raise ValueError(f"{place}: 'spans' is {type(spans).__name__}, wanted a list of [start, end, label]")
    return spans


def _span(span: Any, length: int, place: str) -> tuple[int, int, str]:
    match span:
        case [int(start), int(end), str(label)] if 0 <= start < end <= length and label:
            return start, end, check_text(label, "spans", place)
    raise ValueError(
        f"{place}: the span {span!r} is not [start, end, label] with 0 <= start < end <= {length} "
        "(characters of 'text') and a label; correct it"
    )
