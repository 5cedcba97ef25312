"""Documents as they come in, whatever their file format: what a reader gives, and JSON lines.

A reader (``realmops.corpus.formats``) cuts a file into raw records, serially and cheaply, and understands each on
its own, in any process. Every complaint names its place, which for JSON lines is ``file:line``.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from realmops.artifacts import canonical_json
from realmops.text.compressed import DAMAGE, damage, open_compressed

LINE_LIMIT = 16 << 20
_BOM = b"\xef\xbb\xbf"
PAGES = "realmops_pages"  # column of a passage: [page, the character of the passage at which it begins]
_LONGEST_PROBLEM = 300  # characters of a library's message, which may quote the whole text
_OWN_KEYS = {"title", "text", "id", "spans", PAGES}
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Document:
    """One document; ``id`` is None when the corpus gives none, ``place`` says where it stood.

    ``spans`` are (character start, character end, label) in ``text``; ``extra`` is a canonical JSON object of
    the record's other columns, "" where there are none. ``pages`` are the characters at which its pages begin.
    """

    title: str
    text: str
    id: str | None
    spans: tuple[tuple[int, int, str], ...]
    place: str
    extra: str = ""
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Raw:
    """A record as cut from its file, not yet understood.

    ``data`` is bytes, str, a dict of plain values, or the path of a file to be read whole; ``position`` counts the
    bytes of the file consumed so far (compressed bytes where it is compressed).
    """

    place: str
    data: Any
    position: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A well-formed record that is no document of the corpus; ``reason`` is one word."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A broken record; ``problem`` says what was found, what is allowed and what to do, without the place.

    With ``ends_file`` nothing behind it can be read, however much that is: it is no matter of one record.
    ``kind`` is one word for a whole file that cannot be read: such files are counted by it, not as broken records.
    """

    place: str
    problem: str
    ends_file: bool = False
    kind: str = ""


Outcome = Document | Dropped | Rejected


@dataclass(frozen=True)
class Format:
    """A file format: ``records`` streams a file in flat memory, ``understand`` makes a document of one record.

    For broken data ``records`` gives ``Rejected``, with ``ends_file`` where it ends a file early, and ``understand``
    raises ValueError or gives it too. ValueError from ``records`` means that the file cannot be read at all.
    Of some formats a file ``is_document``, one; ``needs`` names a module of the extra ``documents``.
    """

    name: str
    records: Callable[[Path], Iterator[Raw | Rejected]]
    understand: Callable[[Raw], Outcome]
    is_document: bool = False
    needs: str = ""

    def convert(self, raw: Raw) -> Outcome:
        """Return what a record is; Rejected where it is broken or a library fails at it."""
        return guarded(partial(self._convert, raw), partial(Rejected, raw.place))

    def _convert(self, raw: Raw) -> Outcome:
        try:
            return self.understand(raw)
        except ValueError as error:
            return Rejected(raw.place, str(error).removeprefix(f"{raw.place}: "))


def guarded(work: Callable[[], T], failed: Callable[[str], R]) -> T | R:
    """What ``work`` makes of one record; where a library fails at it, what ``failed`` makes of the problem.

    What is no fault of the record goes on: a disk, memory, a package that is missing, the wish to end.
    """
    try:
        return work()
    except (OSError, MemoryError, ImportError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in a library written in Rust is no Exception
        problem = str(error).encode(errors="backslashreplace").decode()[:_LONGEST_PROBLEM]
        return failed(f"the record cannot be read ({type(error).__name__}: {problem}); leave it out")


def unreadable_rest(place: str, found: str, remedy: str) -> Rejected:
    """Return what ends a file early: what was found at ``place``, behind which nothing can be read."""
    return Rejected(place, f"{found}, so that the rest of the file cannot be read; {remedy}", ends_file=True)


def shown(name: str | Path) -> str:
    """A file's name or place as text that can be written; bytes of a name that are no UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(``file:line``, JSON object) for each line of a .jsonl or .jsonl.gz file but blank ones.

    Raises ValueError for the first line that is broken.
    """
    for raw in cut_lines(path):
        if isinstance(raw, Rejected):
            raise ValueError(f"{raw.place}: {raw.problem}")
        yield raw.place, json_object(raw.data, raw.place)


def cut_lines(path: Path) -> Iterator[Raw | Rejected]:
    """The lines of a file as bytes, blank ones left out; one over ``LINE_LIMIT`` bytes is rejected unread."""
    number = 0
    with open_compressed(path) as (file, position):
        try:
            while line := file.readline(LINE_LIMIT + 1):
                number += 1
                place = f"{path}:{number}"
                if len(line) > LINE_LIMIT:
                    yield Rejected(
                        place,
                        f"the line is longer than {LINE_LIMIT >> 20} MiB; "
                        "put one document on each line and split the longest ones",
                    )
                    while line and not line.endswith(b"\n"):
                        line = file.readline(LINE_LIMIT)
                    continue
                if number == 1:
                    line = line.removeprefix(_BOM)
                if line.strip():
                    yield Raw(place, line, position())
        except DAMAGE as error:
            yield Rejected(f"{path}:{number + 1}", damage(error, path), ends_file=True)


def document_of(record: dict[str, Any], place: str) -> Document:
    """The document of a JSON object; ValueError that begins with ``place`` when it is none."""
    title, text = (check_text(require(record, key, place), key, place) for key in ("title", "text"))
    if len(text) > LINE_LIMIT:
        raise ValueError(f"{place}: 'text' is longer than {LINE_LIMIT >> 20} Mi characters; split it")
    given, spans = record.get("id"), record.get("spans", [])
    identifier = None if given is None else check_id(given, place)
    if not isinstance(spans, list):
        raise ValueError(f"{place}: 'spans' is {type(spans).__name__}, wanted a list of [start, end, label]")
    given_spans = tuple(_span(span, len(text), place) for span in spans)
    others = {key: value for key, value in record.items() if key not in _OWN_KEYS}
    return Document(title, text, identifier, given_spans, place, _extra(others, place))


def document_or_dropped(record: dict[str, Any], place: str) -> Outcome:
    """``document_of``; Dropped where it has no text."""
    document = document_of(record, place)
    return document if document.text.strip() else Dropped(place, "empty_text")


def _extra(others: dict[str, Any], place: str) -> str:
    """Other columns as a canonical JSON object: what JSON has not becomes text, bytes and NaN null."""
    try:
        return canonical_json(_plain(others)).decode() if others else ""
    except UnicodeEncodeError:
        raise ValueError(f"{place}: a column holds half a surrogate pair; write it whole") from None
    except RecursionError:
        raise ValueError(f"{place}: a column is nested too deeply; leave it out or make it flat") from None


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


def json_object(line: bytes, place: str) -> dict[str, Any]:
    """The JSON object on a line; ValueError that begins with ``place`` when it is none."""
    try:
        value = json.loads(line.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: invalid UTF-8 at byte {error.start} of the line; save the file as UTF-8") from None
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


def _span(span: Any, length: int, place: str) -> tuple[int, int, str]:
    match span:
        case [int(start), int(end), str(label)] if 0 <= start < end <= length and label:
            return start, end, check_text(label, "spans", place)
    raise ValueError(
        f"{place}: the span {span!r} is not [start, end, label] with 0 <= start < end <= {length} "
        "(characters of 'text') and a label; correct it"
    )


def _plain(value: Any) -> Any:
    """A value as JSON knows it."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case bytes():
            return None
    return str(value)
