"""MediaWiki XML dumps and exports, plain, .bz2 or .gz: mwxml reads the pages, ``wikitext`` makes them text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree.ElementTree import ParseError

from realmops.corpus.compressed import DAMAGE, damage, open_compressed
from realmops.corpus.documents import Dropped, Format, Outcome, Raw, Rejected, outcome_of
from realmops.corpus.formats.wikitext import plain_text

PAGE_LIMIT = 2 << 20  # characters; MediaWiki itself allows as many bytes
_HIDDEN = (-2, 6, 14)  # media, files and categories: links to them show no text
_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)


def _records(path: Path) -> Iterator[Raw | Rejected]:
    from mwxml.errors import MalformedXML

    number = 0
    with open_compressed(path) as (file, position):
        try:
            for page in _pages(file):
                number += 1
                yield Raw(f"{path}:page {page['id']} ({page['title']})", page, position())
        except DAMAGE as error:
            yield Rejected(f"{path}:after page {number}", damage(error, path))
        # mwxml has its own error, asserts, and stumbles over elements that are missing
        except (ParseError, MalformedXML, AssertionError, AttributeError, TypeError, ValueError) as error:
            yield Rejected(
                f"{path}:after page {number}",
                f"no valid MediaWiki XML ({type(error).__name__}: {error}), so that the rest of the file cannot be "
                "read; copy or download it again",
            )


def _pages(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Each page with the wikitext of its last revision; none for redirects and other namespaces."""
    from mwxml import Dump
    from mwxml.element_iterator import ElementIterator

    root = ElementIterator.from_file(file)
    if root.tag != "mediawiki":
        raise ValueError(f"found <{root.tag}>, wanted <mediawiki>")
    dump = Dump.from_element(root)
    hidden = [one.name for one in dump.site_info.namespaces or () if one.id in _HIDDEN]
    for page in dump.pages:
        article = page.namespace == 0 and page.redirect is None
        last = next(iter(deque(page, maxlen=1)), None)
        yield {
            "id": page.id,
            "title": page.title,
            "namespace": page.namespace,
            "redirect": page.redirect is not None,
            "model": last.model if last else None,
            "text": last.text if last and article else None,
            "hidden": hidden,
        }
        root.element.clear()  # else the tree keeps an empty element of every page


def _convert(raw: Raw) -> Outcome:
    page = raw.data
    text = page["text"] or ""
    if page["redirect"] or _REDIRECT.match(text):
        return Dropped(raw.place, "redirect")
    if page["namespace"] != 0:
        return Dropped(raw.place, "other_namespace")
    if page["model"] not in (None, "wikitext"):
        return Dropped(raw.place, "other_model")
    if len(text) > PAGE_LIMIT:
        return Rejected(raw.place, f"the page is longer than {PAGE_LIMIT >> 20} Mi characters; leave it out")
    try:
        text = plain_text(text, page["hidden"])
    except ValueError as error:
        return Rejected(raw.place, str(error))
    return outcome_of({"id": page["id"], "title": page["title"], "text": text}, raw.place)


MEDIAWIKI = Format("mediawiki", _records, _convert)
