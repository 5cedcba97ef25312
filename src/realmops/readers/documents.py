"""Documents independent of their file format, the interface of file formats, and JSON lines."""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeVar

from realmops.artifacts import canonical_json
from realmops.compressed import DECOMPRESSION_ERRORS, describe_damage, open_compressed, utf_16_encoding

LINE_LIMIT = 16 << 20  # bytes of a line, characters of a text
_BOM = b"\xef\xbb\xbf"
_RECORD_SEPARATOR = b"\x1e"
_MAX_DIGITS = 4000  # of an integer; Python refuses a few more
PAGE_WITHOUT_TEXT = "page without text"  # kind of ``Document.omitted``: a scan that waits for OCR
PAGES = "realmops_pages"  # column of a passage: [page, its first character in the passage]
TEXT_KEYS = ("text", "contents", "page_content", "content", "raw_content", "abstract")  # the first one counts
RESERVED_KEYS = {"title", "text", "id", "spans", PAGES}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Document:
    """A document of the corpus."""

    title: str  # title, may be empty
    text: str  # text without the title
    id: str | None  # id in the corpus, or None
    spans: tuple[tuple[int, int, str], ...]  # (character start, character end, label) of entity spans in ``text``
    place: str  # file and line or record, for messages
    extra: str = ""  # the record's other columns as a canonical JSON object, "" if there are none
    pages: tuple[int, ...] = ()  # character offsets in ``text`` at which pages begin
    scans: tuple[int, ...] = ()  # numbers, from 1, of the pages that were read by OCR
    # What the reader left out of the record, as (kind, count), for example ("image", 2)
    omitted: tuple[tuple[str, int], ...] = ()

    def pages_without_text(self) -> list[int]:
        ends = (*self.pages[1:], len(self.text))
        return [n for n, (start, end) in enumerate(zip(self.pages, ends, strict=True), start=1) if start >= end]


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record cut from its file and not yet parsed."""

    place: str  # file and line or record, for messages
    data: Any  # bytes, str, a dict of plain values, or the path of a file to be read whole
    position: int  # bytes of the file consumed so far (compressed bytes of a compressed file)
    ocr: tuple[str, ...] = ()  # files of tesseract's data, which reads pages without text


@dataclass(frozen=True, slots=True)
class Dropped:
    """A well-formed record that is not a document of the corpus; ``reason`` is one word."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A broken record."""

    place: str  # file and line or record, for messages
    problem: str  # what was found, what is allowed and what to do, without the place
    # Whether the remainder of the file is unreadable, so that an unknown number of records is lost
    ends_file: bool = False
    kind: str = ""  # one word for an unreadable file; such files are counted by kind and not as broken records


Outcome = Document | Dropped | Rejected


@dataclass(frozen=True)
class Format:
    """A file format: cuts a file into raw records, serially and cheaply, and parses each in any process."""

    name: str  # name in options and messages
    # Streams the records of a file in constant memory. Yields ``Rejected`` for broken data, with ``ends_file`` if the
    # file ends early; raises ValueError if the file cannot be read at all
    records: Callable[[Path], Iterator[RawRecord | Rejected]]
    # Parses one record; raises ValueError or returns ``Rejected`` for broken data
    parse: Callable[[RawRecord], Outcome]
    is_document: bool = False  # whether a file is one document
    needs: str = ""  # module of the extra ``documents`` that the format requires
    suffixes: tuple[str, ...] = ()  # of its files

    def convert(self, raw: RawRecord) -> Outcome:
        return call_guarded(partial(self.parse, raw), raw.place)


def call_guarded(work: Callable[[], T], place: str) -> T | Rejected:
    """Return ``work()``, or Rejected if the record is broken; disk, memory, imports and interrupts propagate."""
    try:
        return work()
    except (OSError, MemoryError, ImportError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except ValueError as error:
        return Rejected(place, str(error).removeprefix(f"{place}: "))
    except BaseException as error:  # a panic in a library written in Rust is no Exception
        problem = str(error).encode(errors="backslashreplace").decode()[:300]  # it may quote the whole text
        return Rejected(place, f"the record cannot be read ({type(error).__name__}: {problem}); leave it out")


def reject_remainder(place: str, problem: str, remedy: str) -> Rejected:
    return Rejected(place, f"{problem}, so that the rest of the file cannot be read; {remedy}", ends_file=True)


def printable_path(name: str | Path) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (``file:line``, JSON object) for each line that is not blank; raise ValueError at the first broken line."""
    for raw in iter_lines(path):
        if isinstance(raw, Rejected):
            raise ValueError(f"{raw.place}: {raw.problem}")
        yield raw.place, parse_json_object(raw.data, raw.place)


def iter_lines(path: Path) -> Iterator[RawRecord | Rejected]:
    """Yield the non-blank lines of a file as UTF-8; lines over ``LINE_LIMIT`` bytes are rejected without parsing."""
    number = 0
    with open_compressed(path) as (file, position), ExitStack() as stack:
        readline: Callable[[int], bytes] = file.readline
        try:
            if encoding := utf_16_encoding(file.peek(1)):
                text = stack.enter_context(TextIOWrapper(file, encoding, errors="replace", newline="\n"))
                readline = lambda limit: text.readline(limit).encode()  # noqa: E731
            while line := readline(LINE_LIMIT + 1):
                number += 1
                place = f"{path}:{number}"
                if len(line) > LINE_LIMIT:
                    problem = f"the line is longer than {LINE_LIMIT >> 20} MiB"
                    yield Rejected(place, f"{problem}; put one document on each line and split the longest ones")
                    while line and not line.endswith(b"\n"):
                        line = readline(LINE_LIMIT)
                    continue
                line = line.removeprefix(_BOM).removeprefix(_RECORD_SEPARATOR)
                if line.strip():
                    yield RawRecord(place, line, position())
        except DECOMPRESSION_ERRORS as error:
            yield Rejected(f"{path}:{number + 1}", describe_damage(error, path), ends_file=True)


def parse_document(record: dict[str, Any], place: str, omitted: Mapping[str, int] | None = None) -> Outcome:
    """Parse a JSON object to a document with ``omitted``, counts by kind; return Dropped if its text is empty."""
    title = check_text("" if record.get("title") is None else record["title"], "title", place)
    key = text_key(record)
    text = check_text(require_key(record, key, place), key, place)
    if len(text) > LINE_LIMIT:
        raise ValueError(f"{place}: {key!r} is longer than {LINE_LIMIT >> 20} Mi characters; split it")
    identifier, spans = record.get("id"), record.get("spans", [])
    checked_id = None if identifier is None else check_id(identifier, place)
    if not isinstance(spans, list):
        raise ValueError(f"{place}: 'spans' is {type(spans).__name__}, expected a list of [start, end, label]")
    checked_spans = tuple(_check_span(span, len(text), place) for span in spans)
    if not checked_spans:  # their places would change
        title, text = title.replace("\0", ""), text.replace("\0", "")
    columns = {name: value for name, value in record.items() if name not in {*RESERVED_KEYS, key}}
    try:
        extra = canonical_json(_plain(columns)).decode() if columns else ""
    except (UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"{place}: a column cannot be written as JSON ({error}); correct or remove it") from None
    counts = tuple((kind, count) for kind, count in (omitted or {}).items() if count)
    document = Document(title, text, checked_id, checked_spans, place, extra, omitted=counts)
    return document if text.strip() else Dropped(place, "empty_text")


def text_key(keys: Collection[str]) -> str:
    """Return the first of ``TEXT_KEYS`` among the keys of a record, or "text"."""
    return min(TEXT_KEYS, key=lambda name: name not in keys)


def check_text(value: object, key: str, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: {key!r} is {type(value).__name__}, expected a string; correct this line")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"an unpaired surrogate or invalid UTF-8 at character {error.start}"
        raise ValueError(f"{place}: {key!r} holds {problem}; write UTF-8") from None
    return value


def require_key(record: dict[str, Any], key: str, place: str) -> Any:
    if key not in record:
        keys = ", ".join(sorted(record)) or "none"
        raise ValueError(f"{place}: the key {key!r} is missing (keys found: {keys}); add it to this line")
    return record[key]


def check_id(value: object, place: str) -> str:
    """Return an id as a string; integers are accepted, also as pandas writes them (7.0)."""
    if (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    text = check_text(value, "id", place)
    if not text:
        raise ValueError(f"{place}: 'id' is empty; give every line a unique id")
    return text


def parse_json_object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = JSON.decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not valid JSON ({error}); each line must be one JSON object in UTF-8") from None
    if not isinstance(value, dict):
        raise ValueError(f"{place}: found a JSON {type(value).__name__}; each line must be one JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        [(duplicate, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {duplicate!r} is duplicated")
    return record


JSON = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_constant=lambda _: None,  # NaN and infinity, which Python's writers put where a number is missing
    parse_int=lambda digits: int(digits) if len(digits) <= _MAX_DIGITS else digits,
)


def _check_span(span: Any, length: int, place: str) -> tuple[int, int, str]:
    match span:
        case [int(start), int(end), str(label)] if 0 <= start < end <= length and label:
            return start, end, check_text(label, "spans", place)
    raise ValueError(
        f"{place}: the span {span!r} is not [start, end, label] with 0 <= start < end <= {length} "
        "(characters of 'text') and a label; correct it"
    )


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: bytes and NaN become null, other unsupported types text."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case None | bool() | int() | float() | str():
            return value
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case bytes():
            return None
    return str(value)
