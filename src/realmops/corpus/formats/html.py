"""HTML pages: decode them and extract title and main text with trafilatura."""

import logging
import re
from encodings import normalize_encoding
from encodings.aliases import aliases
from functools import cache, partial
from typing import Any

from realmops.corpus.documents import Dropped, Outcome, Rejected, call_guarded, parse_document_or_drop

PAGE_LIMIT = 4 << 20  # characters; Common Crawl truncates pages at 1 MiB
TAG_LIMIT = 50_000  # trafilatura handles about 20,000 tags per second
ATTRIBUTE_LIMIT = 10_000  # per tag; the parser takes quadratic time
_LONG_TAG = re.compile(rf"<[A-Za-z][^<>]{{{2 * ATTRIBUTE_LIMIT},}}")
_VALUE, _ATTRIBUTE = re.compile(r"""=\s*(?:"[^"]*"|'[^']*')"""), re.compile(r"[^\s/]+")
# UTF-16 by the first two bytes of a page.
_WIDE = {b"\xff\xfe": "utf_16", b"\xfe\xff": "utf_16", b"<\0": "utf_16_le", b"\0<": "utf_16_be"}
_UNRELIABLE = ("cp1252", "latin_1", "ascii")  # defaults of servers and editors, often wrong
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)


def decode_page(data: bytes, declared: str | None) -> str:
    """Decode a page: as UTF-8 if valid, else by the declared encoding, else by its meta tag, else as Windows-1252.

    Invalid bytes become U+FFFD in a page that is UTF-16, is declared as UTF-8 or is almost valid UTF-8.

    Args:
        data: the bytes of the page.
        declared: charset of the Content-Type header, None if there is none.

    Raises:
        ValueError: no encoding fits the bytes.
    """
    meta = _META_CHARSET.search(data[:4096])
    name = declared or (meta[1].decode("ascii") if meta else "windows-1252")
    key = normalize_encoding(name.lower())
    # Only names in this table: Python's other codecs (punycode, idna) are not page encodings.
    codec = aliases.get(key, key if key in aliases.values() else "cp1252")
    if wide := _WIDE.get(data[:2]) or (codec if codec.startswith("utf_16") and b"\0" in data else None):
        return data.decode(wide, errors="replace").removeprefix("\ufeff")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("utf-8-sig", errors="replace")
    # Text in another encoding contains almost no byte sequences that are valid UTF-8 by chance.
    non_ascii, invalid = len(text) - len(text.encode("ascii", "ignore")), text.count("\ufffd")
    if codec.startswith("utf_16"):  # declared, but the page has no NUL byte
        codec = "utf_8"
    if (codec == "utf_8" and 10 * invalid <= len(text)) or (codec in _UNRELIABLE and non_ascii > 2 * invalid):
        return text
    try:
        return data.decode(codec)  # codecs.decode would also decompress zlib
    except (UnicodeError, LookupError):
        raise ValueError(
            f"the bytes are neither UTF-8 nor the encoding {name!r}; save the page as UTF-8 or declare its encoding"
        ) from None


def page_to_document(
    page: str, place: str, *, title: str = "", url: str | None = None, date: str | None = None
) -> Outcome:
    """Convert an HTML page to a document.

    Args:
        page: the HTML.
        place: where the page was found, for messages.
        title: fallback for a page without a title.
        url: stored in the document's ``extra``.
        date: stored in the document's ``extra`` if the page states no date.
    """
    if len(page) > PAGE_LIMIT or page.count("<") > TAG_LIMIT or any(map(_has_many_attributes, _LONG_TAG.findall(page))):
        return Dropped(place, "too_long")
    extracted = call_guarded(partial(_extract_main_text, page, url), partial(Rejected, place))
    if isinstance(extracted, Rejected):
        return extracted
    page_title, text, page_date = extracted
    if not text:
        return Dropped(place, "no_main_text")
    metadata = {"url": url, "date": page_date or date}
    extra = {key: value for key, value in metadata.items() if value}
    record = {"title": page_title or title, "text": text, **extra}
    return parse_document_or_drop(record, place)


def _has_many_attributes(tag: str) -> bool:
    return len(_ATTRIBUTE.findall(_VALUE.sub("", tag))) > ATTRIBUTE_LIMIT


def _extract_main_text(page: str, url: str | None) -> tuple[str, str, str | None]:
    """Return (title, main text, date); title and text are "" if missing."""
    trafilatura = _trafilatura()
    if "html" not in page[:50].lower():
        page = f"<!DOCTYPE html>\n{page}"  # trafilatura ignores fragments
    tree = trafilatura.load_html(page)
    if tree is None:
        return "", "", None
    extraction = trafilatura.bare_extraction(
        tree,
        url=url,
        with_metadata=True,
        include_comments=False,
        include_tables=False,
        date_extraction_params={"extensive_search": False, "original_date": True},
    )
    text, title, date = (extraction.text, extraction.title, extraction.date) if extraction else (None, None, None)
    if not text:  # the page is too short for the extractor
        tree = trafilatura.load_html(page)
        title = tree.findtext(".//title")
        _, text, _ = trafilatura.baseline(tree)
    return " ".join((title or "").split()), (text or "").strip(), date


@cache
def _trafilatura() -> Any:
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # outcomes are counted instead
    return trafilatura
