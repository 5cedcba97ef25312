"""MediaWiki XML dumps and exports (plain, .bz2 or .gz): the last revision of each page as text."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lxml.etree import LxmlError, iterparse

from realmops.compressed import DECOMPRESSION_ERRORS, describe_damage, open_compressed
from realmops.readers.documents import (
    LINE_LIMIT,
    Dropped,
    Format,
    Outcome,
    RawRecord,
    Rejected,
    parse_document,
    reject_remainder,
)
from realmops.readers.wikitext import count_omitted, wikitext_to_text

PAGE_LIMIT = 2 << 20  # characters; MediaWiki's own limit is as many bytes
_NAMESPACE_LIMIT = 1000
_HIDDEN = ("-2", "6", "14")  # media, files and categories, whose links show no text
_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)


def _records(path: Path) -> Iterator[RawRecord | Rejected]:
    number = 0
    with open_compressed(path) as (file, position):
        try:
            for page in _pages(file):
                number += 1
                yield RawRecord(f"{path}:page {page['id']} ({page['title']})", page, position())
        except DECOMPRESSION_ERRORS as error:
            yield Rejected(f"{path}:after page {number}", describe_damage(error, path), ends_file=True)
        except (LxmlError, ValueError) as error:
            problem = f"no valid MediaWiki XML ({error})"
            yield reject_remainder(f"{path}:after page {number}", problem, "copy or download it again")


class _LimitedReader:
    """A file that raises ValueError once more than ``LINE_LIMIT`` bytes were read since ``size`` was last set to 0."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.size += len(data)
        if self.size > LINE_LIMIT:
            raise ValueError(f"a revision takes more than {LINE_LIMIT >> 20} MiB")
        return data


def _pages(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield each page with the wikitext of its last revision, without the entities that the file defines."""
    reader = _LimitedReader(file)
    events = iterparse(reader, ("start", "end"), resolve_entities=False, remove_comments=True, remove_pis=True)
    _, root = next(events)
    if _name(root) != "mediawiki":
        raise ValueError(f"root element is <{_name(root)}>, expected <mediawiki>")
    namespaces: dict[str, str] = {}  # name to number
    depth = 0  # below the root
    revision: Any = None  # the last one
    for event, element in events:
        depth += 1 if event == "start" else -1
        if event == "start":
            continue
        name = _name(element)
        if name == "namespace":
            namespaces[element.text or ""] = element.get("key", "0")
            if len(namespaces) > _NAMESPACE_LIMIT:
                raise ValueError(f"more than {_NAMESPACE_LIMIT:,} namespaces")
        elif name == "revision" and depth == 1:
            reader.size = 0
            if revision is not None and revision.getparent() is element.getparent():
                revision.getparent().remove(revision)  # all of a page would not fit into memory
            revision = element
        elif depth == 0:
            if name == "page":
                yield _page(element, namespaces)
            reader.size = 0
            element.clear()
            for earlier in element.itersiblings(preceding=True):  # empty, but they take memory
                root.remove(earlier)


def _name(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]


def _page(page: Any, namespaces: dict[str, str]) -> dict[str, Any]:
    title = page.findtext("{*}title")
    prefix, colon, _ = (title or "").partition(":")
    namespace = (page.findtext("{*}ns") or (namespaces.get(prefix, "0") if colon else "0")).strip()
    redirect = page.find("{*}redirect") is not None
    return {
        "id": page.findtext("{*}id"),
        "title": title,
        "namespace": namespace,
        "redirect": redirect,
        "model": page.findtext("{*}revision/{*}model"),
        "text": None if redirect or namespace != "0" else page.findtext("{*}revision/{*}text"),
        "hidden": [name for name, number in namespaces.items() if number in _HIDDEN],
    }


def _parse_record(raw: RawRecord) -> Outcome:
    page = raw.data
    text = page["text"] or ""
    if page["redirect"] or _REDIRECT.match(text):
        return Dropped(raw.place, "redirect")
    if page["namespace"] != "0":
        return Dropped(raw.place, "other_namespace")
    if page["model"] not in (None, "wikitext"):
        return Dropped(raw.place, "other_model")
    if len(text) > PAGE_LIMIT:
        raise ValueError(f"the page is longer than {PAGE_LIMIT >> 20} Mi characters; leave it out")
    record = {"id": page["id"], "title": page["title"], "text": wikitext_to_text(text, page["hidden"])}
    return parse_document(record, raw.place, count_omitted(text))


MEDIAWIKI = Format("mediawiki", _records, _parse_record, suffixes=(".xml",))
