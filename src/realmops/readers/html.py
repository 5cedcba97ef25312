"""HTML pages: decode them as browsers do, and extract title and main text with trafilatura."""

import codecs
import logging
import re
from collections import Counter
from copy import deepcopy
from functools import cache, partial
from typing import Any

import webencodings

from realmops.readers.contents import HIDDEN, format_row, is_hidden
from realmops.readers.documents import Dropped, Outcome, parse_document

# UTF-16 by the first two bytes of a page.
_WIDE = {b"\xff\xfe": "utf_16", b"\xfe\xff": "utf_16", b"<\0": "utf_16_le", b"\0<": "utf_16_be"}
_UNRELIABLE = "windows-1252"  # default of servers and editors, often wrong; "latin-1" and "ascii" are names of it
_META_CHARSET = re.compile(
    rb"(?:<meta[^>]{0,200}?charset|\A\s{0,9}<\?xml[^>]{0,99}?encoding)\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE
)
# Python decodes the bytes A0 and FD to FF of Shift_JIS; to browsers they are invalid.
_INVALID_IN_SHIFT_JIS = dict.fromkeys(range(0xF8F0, 0xF8F4), "\ufffd")
# Empty lines, or line breaks, around the text of an element; the text of others flows on.
_PARAGRAPHS = (
    "address article aside blockquote body caption center details dialog div dl fieldset figcaption figure footer form "
    "h1 h2 h3 h4 h5 h6 header hr html main nav ol p pre section table ul"
)
_GAPS = dict.fromkeys(_PARAGRAPHS.split(), 2) | dict.fromkeys(
    ["dd", "dt", "legend", "li", "summary", "tbody", "tfoot", "thead", "tr"], 1
)
_CELLS = frozenset(("td", "th"))
_SKIPPED = dict.fromkeys(["head", "noscript", "rp", "script", "style", "template", "title"], "") | {"rt": "annotation"}
_SKIPPED |= dict.fromkeys(["annotation", "annotation-xml"], "")  # of an equation: its TeX source
_SKIPPED |= dict.fromkeys(["audio", "canvas", "embed", "iframe", "object", "svg", "video"], "embedded object")
_BLANKS = re.compile(r"[ \t\r\n\f]+")
# Rows of a table in trafilatura's text, and the line below its header.
_ROW, _RULE = re.compile(r"^\| (.*?) ?\| ?$", re.MULTILINE), re.compile(r"^\|(?:---\|)+\n?", re.MULTILINE)
_OUTSIDE = "ancestor::nav or ancestor::header or ancestor::footer or ancestor::aside"
_OMITTED = {
    "image": f"count(//img[normalize-space(@alt)][not({_OUTSIDE})])",
    "embedded object": f"count((//audio | //embed | //object | //video)[not({_OUTSIDE})])",
}
# Elements that trafilatura leaves out, and what it reads instead. A form may hold the whole page (ASP.NET).
_READ_AS = {"//figure[.//figcaption]": "div", "//figcaption": "p", "//body/form": "div"}
_HIDDEN_TAG, _LISTED_TAG = "removed", "listed"  # of elements that are removed together, in linear time
_TABLES = f"count(//table[not({_OUTSIDE})])"
_LISTS_IN_CELLS = "(//td | //th)//*[self::ul or self::ol or self::dl or self::li or self::dd or self::dt]"


def decode_page(data: bytes, declared: str | None) -> str:
    """Decode a page: as UTF-8 if almost valid, else as ``declared`` in its header or in the page, else as Windows-1252.

    Names of encodings mean what they mean to browsers (WHATWG): gb2312 is GBK, latin-1 is Windows-1252.
    """
    meta = _META_CHARSET.search(data[:4096])
    names = (declared or "", meta[1].decode("ascii") if meta else "", _UNRELIABLE)
    known = filter(None, map(webencodings.lookup, names))
    encoding = next(found for found in known if found.name != "replacement")  # of which browsers show nothing
    is_utf_16 = encoding.name.startswith("utf-16")
    if wide := _WIDE.get(data[:2]) or (encoding.name if is_utf_16 and b"\0" in data else None):
        return data.decode(wide, errors="replace").removeprefix("\ufeff")
    if encoding.name == "iso-2022-jp":  # its bytes are ASCII
        return data.decode(encoding.name, errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("utf-8-sig", errors="replace")
    # Text in another encoding contains almost no byte sequences that are valid UTF-8 by chance.
    non_ascii, invalid = len(text) - len(text.encode("ascii", "ignore")), text.count("\ufffd")
    is_utf_8 = encoding.name == "utf-8" or is_utf_16  # UTF-16 was declared, but the page has no NUL byte
    if (is_utf_8 and 10 * invalid <= len(text)) or (encoding.name == _UNRELIABLE and non_ascii > 2 * invalid):
        return text
    if is_utf_8:
        encoding = webencodings.lookup(_UNRELIABLE)
    # Browsers read GBK by its superset.
    codec = codecs.lookup("gb18030") if encoding.name == "gbk" else encoding.codec_info
    decoded: str = codec.decode(data, "replace")[0]
    return decoded.translate(_INVALID_IN_SHIFT_JIS) if encoding.name == "shift_jis" else decoded


def page_to_document(page: str, place: str, title: str) -> Outcome:
    """Convert an HTML page to a document; ``title`` is used for a page without one, ``place`` is for messages."""
    page_title, text, date, omitted = _extract_main_text(page)
    if not text:
        return Dropped(place, "no_main_text")
    record = {"title": page_title or title, "text": text, **({"date": date} if date else {})}
    return parse_document(record, place, omitted)


def _extract_main_text(page: str) -> tuple[str, str, str | None, dict[str, int]]:
    """Return (title, main text, date, counts of what the text lacks); title and text are "" if missing."""
    from lxml.etree import Element, strip_elements, strip_tags

    trafilatura = _trafilatura()
    if "html" not in page[:50].lower():
        page = f"<!DOCTYPE html>\n{page}"  # trafilatura ignores fragments
    tree = trafilatura.load_html(page)
    if tree is None:
        return "", "", None, {}
    hidden = [node for node in tree.iter(Element) if is_hidden(node)]
    for node in hidden:
        node.tag = _HIDDEN_TAG
    strip_elements(tree, _HIDDEN_TAG, with_tail=False)  # drop_tree copies the text before each of them
    omitted = {kind: int(tree.xpath(path)) for kind, path in _OMITTED.items()} | {HIDDEN: len(hidden)}
    for path, tag in _READ_AS.items():
        for node in tree.xpath(path):
            node.tag = tag
    for node in tree.xpath(_LISTS_IN_CELLS):
        node.text, node.tail, node.tag = f" {node.text or ''}", f" {node.tail or ''}", _LISTED_TAG
    strip_tags(tree, _LISTED_TAG)
    for node in tree.iter():  # one text each: trafilatura takes quadratic time for neighbouring ones
        node.text, node.tail = node.text, node.tail
    for node in tree.xpath("//math"):
        strip_elements(node, "annotation", "annotation-xml", with_tail=False)
        strip_tags(node, "*")
        node.tag = "span"
    extract = partial(
        trafilatura.bare_extraction,
        with_metadata=True,
        include_comments=False,
        include_tables=True,
        date_extraction_params={"extensive_search": False, "original_date": True},
    )
    extraction = extract(deepcopy(tree))
    if extraction and len(extraction.body.findall(".//table")) < tree.xpath(_TABLES):
        # trafilatura prefers an extractor without tables where they outnumber paragraphs
        extraction = max(extraction, extract(tree, fast=True) or extraction, key=lambda one: len(one.text or ""))
    text, title, date = (extraction.text, extraction.title, extraction.date) if extraction else (None, None, None)
    if text:
        text = _ROW.sub(_table_row, _RULE.sub("", text))
    else:  # the page is too short for the extractor
        tree = trafilatura.load_html(page)
        title = tree.findtext(".//title")
        text, omitted = flow_text(tree)
    return " ".join((title or "").split()), (text or "").strip(), date, omitted


def _table_row(row: re.Match[str]) -> str:
    return format_row(cell.replace("\\|", "|") for cell in row[1].split(" | "))


def flow_text(tree: Any) -> tuple[str, Counter[str]]:
    """Return the visible text of an lxml element, cells separated by tabs, and counts by kind of what it leaves out."""
    from lxml.etree import iterwalk

    flow = _Flow()
    skipped = None
    walker = iterwalk(tree, events=("start", "end", "comment", "pi"))
    for event, node in walker:
        if event == "end" and node is not skipped:
            flow.end(node)
        elif event != "start":  # the end of a skipped element, or a comment
            flow.add(node.tail)
        elif flow.start(node):
            flow.add(node.text)
        else:
            skipped = node
            walker.skip_subtree()
    flow.close(2)
    return "".join(flow.parts).strip(), flow.omitted


class _Flow:
    """The text of a walk over elements, and what it leaves out."""

    def __init__(self) -> None:
        self.parts: list[str] = []  # paragraphs, and the line breaks between them
        self.omitted: Counter[str] = Counter()
        self._line: list[str] = []
        self._gap = self._cells = self._preformatted = 0

    def start(self, node: Any) -> bool:
        """Begin an element; return False for one whose content is not text."""
        kind = HIDDEN if is_hidden(node) else _SKIPPED.get(node.tag)
        if kind is not None:
            self.omitted += Counter([kind] if kind else [])
            return False
        if node.tag == "br":
            self._line.append("\n")
        elif node.tag == "img":
            self.omitted += Counter(["image"] if node.get("alt", "").strip() else [])
        elif _is_cell(node):
            self._line.append("\t" if self._line and node.getprevious() is not None else "")
            self._cells += 1
        elif gap := _gap(node):
            self.close(gap)
        self._preformatted += node.tag == "pre"
        return True

    def end(self, node: Any) -> None:
        self._cells -= _is_cell(node)
        if gap := _gap(node):
            self.close(gap)
        self._preformatted -= node.tag == "pre"
        self.add(node.tail)

    def add(self, text: str | None) -> None:
        if text and not self._preformatted:
            text = _BLANKS.sub(" ", text)
            if not self._line or self._line[-1][-1:] in ("", " ", "\t", "\n"):
                text = text.lstrip(" ")
        if text:
            self._line.append(text)

    def close(self, gap: int) -> None:
        """End a paragraph; in a cell of a table, that is a space."""
        if self._cells:
            self.add(" ")
            return
        text = re.sub(r"(?<! ) +(?=[\t\n])", "", "".join(self._line)).rstrip().strip("\n")
        if text.strip():
            self.parts += ["\n" * self._gap if self.parts else "", text]
            self._gap = 0
        self._gap, self._line = max(self._gap, gap), []


def _is_cell(node: Any) -> bool:
    """Return whether an element is a cell of a table, and not of a layout."""
    return node.tag in _CELLS and node.find(".//table") is None


def _gap(node: Any) -> int:
    return 2 if node.tag in _CELLS and not _is_cell(node) else _GAPS.get(node.tag, 0)


@cache
def _trafilatura() -> Any:
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # outcomes are counted instead
    return trafilatura
