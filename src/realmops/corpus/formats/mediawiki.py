"""MediaWiki XML dumps and exports, plain, .bz2 or .gz: the last revision of each page as text."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree.ElementTree import Element, ParseError, iterparse

from realmops.corpus.compressed import DAMAGE, damage, open_compressed
from realmops.corpus.documents import Dropped, Format, Outcome, Raw, Rejected, document_or_dropped
from realmops.corpus.formats.wikitext import plain_text

PAGE_LIMIT = 2 << 20  # characters; MediaWiki itself allows as many bytes
_HIDDEN = ("-2", "6", "14")  # media, files and categories: links to them show no text
_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)


def _records(path: Path) -> Iterator[Raw | Rejected]:
    number = 0
    with open_compressed(path) as (file, position):
        try:
            for page in _pages(file):
                number += 1
                yield Raw(f"{path}:page {page['id']} ({page['title']})", page, position())
        except DAMAGE as error:
            yield Rejected(f"{path}:after page {number}", damage(error, path), ends_file=True)
        except (ParseError, ValueError) as error:
            yield Rejected(
                f"{path}:after page {number}",
                f"no valid MediaWiki XML ({error}), so that the rest of the file cannot be read; copy or download it "
                "again",
                ends_file=True,
            )


def _pages(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Each page with the wikitext of its last revision; what else stands in a dump is passed over."""
    events = iterparse(file, ("start", "end"))
    _, root = next(events)
    if _name(root) != "mediawiki":
        raise ValueError(f"found <{_name(root)}>, wanted <mediawiki>")
    namespaces: dict[str, str] = {}  # number by name
    page = root
    for event, element in events:
        name = _name(element)
        if event == "start":
            page = element if name == "page" else page
        elif name == "namespace":
            namespaces[element.text or ""] = element.get("key", "0")
        elif name == "revision":
            for older in page.findall(element.tag)[:-1]:  # a dump of all revisions would not fit into memory
                page.remove(older)
        elif name == "page":
            yield _page(element, namespaces)
            root.clear()  # else the tree keeps an empty element of every page


def _name(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _page(page: Element, namespaces: dict[str, str]) -> dict[str, Any]:
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


def _understand(raw: Raw) -> Outcome:
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
    text = plain_text(text, page["hidden"])
    return document_or_dropped({"id": page["id"], "title": page["title"], "text": text}, raw.place)


MEDIAWIKI = Format("mediawiki", _records, _understand)
