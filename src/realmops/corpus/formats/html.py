"""Web pages: their encoding, title and main text (by trafilatura)."""

import logging
import re
from encodings import normalize_encoding
from encodings.aliases import aliases
from functools import cache, partial
from typing import Any

from realmops.corpus.documents import Dropped, Outcome, Rejected, document_or_dropped, guarded

PAGE_LIMIT = 4 << 20  # characters; Common Crawl itself cuts at 1 MiB
TAG_LIMIT = 50_000  # the extractor does some 20,000 a second
ATTRIBUTE_LIMIT = 10_000  # of a tag; the parser compares each with all others
_LONG_TAG = re.compile(rf"<[A-Za-z][^<>]{{{2 * ATTRIBUTE_LIMIT},}}")
_VALUE, _ATTRIBUTE = re.compile(r"""=\s*(?:"[^"]*"|'[^']*')"""), re.compile(r"[^\s/]+")
_WIDE = {b"\xff\xfe": "utf_16", b"\xfe\xff": "utf_16", b"<\0": "utf_16_le", b"\0<": "utf_16_be"}  # by first bytes
_UNDECLARED = ("cp1252", "latin_1", "ascii")  # what servers and editors write of pages that nobody looked at
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)


def decode_page(data: bytes, declared: str | None) -> str:
    """The text of a page: UTF-8 if it is, else the declared encoding or the page's own, else Windows-1252.

    One in UTF-16, declared to be UTF-8 or nearly that has U+FFFD for each byte that is none. Raises ValueError for
    bytes that are nothing of this.
    """
    own = _META_CHARSET.search(data[:4096])
    name = declared or (own[1].decode("ascii") if own else "windows-1252")
    key = normalize_encoding(name.lower())
    # Only names of this table: Python's other codecs (punycode, idna) are no encodings of pages.
    codec = aliases.get(key, key if key in aliases.values() else "cp1252")
    if wide := _WIDE.get(data[:2]) or (codec if codec.startswith("utf_16") and b"\0" in data else None):
        return data.decode(wide, errors="replace").removeprefix("\ufeff")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("utf-8-sig", errors="replace")
    # Text of another encoding has next to no characters that are UTF-8 by chance.
    other, wrong = len(text) - len(text.encode("ascii", "ignore")), text.count("\ufffd")
    if codec.startswith("utf_16"):  # by a page that has no NUL
        codec = "utf_8"
    if (codec == "utf_8" and 10 * wrong <= len(text)) or (codec in _UNDECLARED and other > 2 * wrong):
        return text
    try:
        return data.decode(codec)  # not codecs.decode, which would unpack zlib
    except (UnicodeError, LookupError):
        raise ValueError(
            f"the bytes are neither UTF-8 nor the encoding {name!r}; save the page as UTF-8 or declare its encoding"
        ) from None


def page_outcome(page: str, place: str, *, title: str = "", url: str | None = None, date: str | None = None) -> Outcome:
    """The document of a web page; ``title`` is for a page that has none of its own.

    ``extra`` holds url and date where they are known, the page's own date before the given one.
    """
    if len(page) > PAGE_LIMIT or page.count("<") > TAG_LIMIT or any(map(_has_many_attributes, _LONG_TAG.findall(page))):
        return Dropped(place, "too_long")
    found = guarded(partial(_main_text, page, url), partial(Rejected, place))
    if isinstance(found, Rejected):
        return found
    own_title, text, own_date = found
    if not text:
        return Dropped(place, "no_main_text")
    known = {"url": url, "date": own_date or date}
    extra = {key: value for key, value in known.items() if value}
    record = {"title": own_title or title, "text": text, **extra}
    return document_or_dropped(record, place)


def _has_many_attributes(tag: str) -> bool:
    return len(_ATTRIBUTE.findall(_VALUE.sub("", tag))) > ATTRIBUTE_LIMIT


def _main_text(page: str, url: str | None) -> tuple[str, str, str | None]:
    """(title, main text, date); title and text are "" where there are none."""
    trafilatura = _trafilatura()
    if "html" not in page[:50].lower():
        page = f"<!DOCTYPE html>\n{page}"  # else the extractor takes a fragment for no page at all
    tree = trafilatura.load_html(page)
    if tree is None:
        return "", "", None
    found = trafilatura.bare_extraction(
        tree,
        url=url,
        with_metadata=True,
        include_comments=False,
        include_tables=False,
        date_extraction_params={"extensive_search": False, "original_date": True},
    )
    text, title, date = (found.text, found.title, found.date) if found else (None, None, None)
    if not text:  # a page too short for the extractor is still a page
        tree = trafilatura.load_html(page)
        title = tree.findtext(".//title")
        _, text, _ = trafilatura.baseline(tree)
    return " ".join((title or "").split()), (text or "").strip(), date


@cache
def _trafilatura() -> Any:
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # outcomes are counted, not logged
    return trafilatura
