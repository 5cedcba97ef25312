"""JSON: one {"title"?, "text", "id"?, "spans"?, ...} or CC-News row per line, or a list of them; also compressed."""

import re
from collections.abc import Iterator
from json import JSONDecodeError, JSONDecoder
from pathlib import Path

from realmops.compressed import DECOMPRESSION_ERRORS, describe_damage, open_text
from realmops.readers.documents import (
    LINE_LIMIT,
    Format,
    RawRecord,
    Rejected,
    iter_lines,
    parse_document,
    parse_json_object,
    reject_remainder,
)

_READ = 1 << 20  # characters
_BETWEEN = re.compile(r"[ \t\r\n,\[]*")  # before an object of a list
_SCANNER = JSONDecoder(parse_int=len, parse_float=len)  # finds the end of an object


def iter_objects(path: Path) -> Iterator[RawRecord | Rejected]:
    """Yield the JSON objects of a file as bytes: its lines, or the items of one list, or objects over several lines."""
    try:
        with open_text(path, "replace") as (file, _):
            head = file.read(64 << 10).lstrip()
    except DECOMPRESSION_ERRORS:  # reported when the file is read
        head = ""
    first, end, _ = head.partition("\n")
    is_list = first.startswith("[")
    is_cut = first.startswith("{") and end and first.rstrip().endswith(("{", "[", ","))  # no line of JSON ends so
    return _items(path, is_list) if is_list or is_cut else iter_lines(path)


def _items(path: Path, is_list: bool) -> Iterator[RawRecord | Rejected]:
    """Yield the items of a list, or objects one after another, in constant memory."""
    number, text, at, size, is_end = 0, "", 0, _READ, False
    with open_text(path, "surrogateescape") as (file, position):
        try:
            while True:
                at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
                place = f"{path}:item {number + 1}"
                if is_end and at == len(text):
                    if is_list:
                        yield reject_remainder(place, "the list does not end", "copy or write the file again")
                    return
                if text[at : at + 1] == "]" and is_list:
                    if f"{text[at + 1 :]}{file.read(_READ)}".strip():
                        yield reject_remainder(place, "text follows the list", "put all objects into one list")
                    return
                try:
                    end = _SCANNER.raw_decode(text, at)[1] if text[at : at + 1] == "{" else 0
                except (JSONDecodeError, RecursionError) as error:
                    problem, end = f"no valid JSON ({error})", -1
                if end > 0:
                    number += 1
                    yield RawRecord(place, text[at:end].encode("utf-8", "surrogateescape"), position())
                    at, size = end, _READ
                elif end == 0 and at < len(text):
                    found = text[at : at + 20]
                    yield reject_remainder(place, f"found {found!r}, expected a JSON object", "write a list of objects")
                    return
                elif is_end or len(text) - at > LINE_LIMIT:
                    yield reject_remainder(place, problem, "correct it, or write one object per line")
                    return
                else:
                    part = file.read(size)
                    text, at, size, is_end = text[at:] + part, 0, 2 * size, not part
        except DECOMPRESSION_ERRORS as error:
            yield Rejected(f"{path}:item {number + 1}", describe_damage(error, path), ends_file=True)


JSONL = Format(
    "jsonl",
    iter_objects,
    lambda raw: parse_document(parse_json_object(raw.data, raw.place), raw.place),
    suffixes=(".jsonl", ".json", ".ndjson"),
)
