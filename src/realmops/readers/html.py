"""HTML pages: decode them as browsers do, and extract title and main text with trafilatura."""

import logging
import re
from collections import Counter
from typing import Any

import webencodings

from realmops.readers.contents import HIDDEN, is_hidden
from realmops.readers.documents import Dropped, Outcome, parse_document
from realmops.readers.flow import join_paragraphs, read_paragraphs

# UTF-16 by the first two bytes of a page.
_WIDE = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"<\0": "utf-16-le", b"\0<": "utf-16-be"}
_UNRELIABLE = "windows-1252"  # default of servers and editors, often wrong; "latin-1" and "ascii" are names of it
_META_CHARSET = re.compile(
    rb"(?:<meta[^>]{0,200}?charset|\A\s{0,9}<\?xml[^>]{0,99}?encoding)\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE
)
# Comments of style sheets, and rules for some media
_OTHER_RULES = re.compile(r"/\*.{0,5000}?\*/|@[^{};]*(?:;|\{(?:[^{}]*\{[^{}]*\})*[^{}]*\})", re.DOTALL)
_RULE, _NAME = re.compile(r"([^{}]+)\{([^{}]*)\}"), re.compile(r"[.#][\w-]+")
_VISIBILITY = re.compile(r"(?<![\w-])(?:display|visibility)\s*:\s*([\w-]+)")
_HIDDEN_TAG = "removed"  # of elements that are removed together, in linear time


def decode_page(data: bytes, declared: str | None) -> str:
    """Decode a page: as UTF-8 if almost valid, else as ``declared`` in its header or in the page, else as Windows-1252.

    Names of encodings mean what they mean to browsers (WHATWG): gb2312 is GBK, latin-1 is Windows-1252.
    """
    meta = _META_CHARSET.search(data[:4096])
    names = (declared or "", meta[1].decode("ascii") if meta else "", _UNRELIABLE)
    known = [encoding.name for encoding in map(webencodings.lookup, names) if encoding]
    name = _WIDE.get(data[:2]) or next(name for name in known if name != "replacement")  # which browsers do not show
    is_utf_16 = name.startswith("utf-16")
    if name == "iso-2022-jp" or (is_utf_16 and b"\0" in data):  # the bytes of ISO-2022-JP are ASCII
        return data.decode(name, errors="replace").removeprefix("\ufeff")
    text = data.decode("utf-8-sig", errors="replace")
    # Text in another encoding contains almost no byte sequences that are valid UTF-8 by chance.
    non_ascii, invalid = (
        len(text) - len(text.encode("ascii", "ignore")),
        text.count("\ufffd") - data.count("\ufffd".encode()),
    )
    is_utf_8 = name == "utf-8" or is_utf_16  # UTF-16 was declared, but the page has no NUL byte
    if invalid <= (len(text) // 10 if is_utf_8 else (non_ascii - 1) // 2 if name == _UNRELIABLE else 0):
        return text
    name = _UNRELIABLE if is_utf_8 else "gb18030" if name == "gbk" else name  # the superset by which browsers read GBK
    decoded: str = webencodings.lookup(name).codec_info.decode(data, "replace")[0]
    return decoded.translate(dict.fromkeys(range(0xF8F0, 0xF8F4), "\ufffd"))  # bytes that Shift_JIS does not have


def page_to_document(page: str, place: str, title: str) -> Outcome:
    """Convert an HTML page to a document; ``title`` is used for a page without one, ``place`` is for messages."""
    import trafilatura
    from lxml.etree import Element, strip_elements

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # outcomes are counted instead
    if "html" not in page[:50].lower():
        page = f"<!DOCTYPE html>\n{page}"  # trafilatura ignores fragments
    tree = trafilatura.load_html(page)
    if tree is None:
        return Dropped(place, "no_main_text")
    names = _hidden_names("".join(tree.xpath("//style[not(ancestor::noscript)]//text()")))
    hidden = [node for node in tree.iter(Element) if is_hidden(node, names)]
    for node in hidden:
        node.tag = _HIDDEN_TAG
    strip_elements(tree, _HIDDEN_TAG, with_tail=False)  # drop_tree copies the text before each of them
    for node in tree.iter():  # one text each: trafilatura takes quadratic time for neighbouring ones
        node.text, node.tail = node.text, node.tail
    body, head_title = tree.find("body"), tree.findtext(".//title")
    paragraphs = read_paragraphs(tree if body is None else body)
    is_long = sum(1 for _ in tree.iter()) > 10_000  # trafilatura's further extractors take quadratic time
    extraction: Any = trafilatura.bare_extraction(
        tree,
        output_format="txt",  # "python" adds a formatted text, in quadratic time
        with_metadata=True,
        include_comments=False,
        fast=is_long,
        favor_recall=is_long,
        date_extraction_params={"extensive_search": False, "original_date": True},
    )
    text, omitted = join_paragraphs(paragraphs, (extraction and extraction.raw_text) or "")
    if not text:
        return Dropped(place, "no_main_text")
    page_title = " ".join(((extraction.title if extraction else head_title) or "").split())
    record = {"title": page_title or title, "text": text}
    if extraction and extraction.date:
        record["date"] = extraction.date
    return parse_document(record, place, omitted + Counter({HIDDEN: len(hidden)}))


def _hidden_names(styles: str) -> set[str]:
    """Return the tags, .classes and #ids that style sheets hide, and no other rule shows."""
    hidden, shown = set(), set()
    for selectors, declarations in _RULE.findall(_OTHER_RULES.sub("", styles)):
        visibility = _VISIBILITY.search(declarations)
        if visibility and visibility[1] in ("none", "hidden"):
            hidden.update("".join(selectors.split()).split(","))
        elif visibility:
            shown.update(_NAME.findall(selectors))
    return hidden - shown
