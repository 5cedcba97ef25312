"""Contents of a file that is one document, and the rules for hidden text and tables that all readers share."""

import re
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from io import BytesIO
from itertools import groupby
from typing import Any
from zipfile import BadZipFile, ZipFile

from realmops.readers.documents import LINE_LIMIT
from realmops.readers.numbering import WORD

PARAGRAPH = "\n\n"
HIDDEN = "hidden text"  # kind of ``Contents.omitted``
_HIDDEN_MARKS = {f"{WORD}r": f"{WORD}rPr/{WORD}vanish", f"{WORD}tr": f"{WORD}trPr/{WORD}hidden"}
_OFF = ("0", "false", "off")
_HIDDEN_STYLE = re.compile(
    r"(?<![\w-])(?:display\s*:\s*none|visibility\s*:\s*hidden|opacity\s*:\s*0*\.?0+(?![\d.])|"
    r"(?:left|right|text-indent|top)\s*:\s*-\d{4})",
    re.IGNORECASE,
)
_NO_SIZE = re.compile(r"(?<![\w-])font-size\s*:\s*0+(?![\d.])", re.IGNORECASE)  # of the element itself, not of parts
_POWER = re.compile(r"[-+\u2212\u2013]?(?:\d+(?:[.,/]\d+)*|[^\W\d_])[-+\u2212\u2013]?")
_PLAIN_SUPERSCRIPT = re.compile(r"[^\W\d_]{2,}\.?|[aeo\u00aa\u00ba]|[^\w+\u2212\u2013-]+")  # 1st, 2e, daggers
_UNPACKED_LIMIT = 512 << 20  # bytes of an archive with its pictures
_XML_LIMIT = 64 << 20  # bytes of its XML, which takes about ten times as much memory when parsed
_XML_SUFFIXES = (".xml", ".rels", ".opf", ".xhtml", ".html", ".htm")


class UnreadableError(Exception):
    """Error for a file that cannot be read, counted under ``kind``."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


@dataclass
class Contents:
    """Contents of a file."""

    title: str  # the title in the file's metadata, may be empty
    pages: Iterable[str]  # the text of each page, read while it is iterated
    omitted: Counter[str] = field(default_factory=Counter)  # what the pages iterated so far lack, by kind
    scans: list[int] = field(default_factory=list)  # numbers, from 1, of those pages that were read by OCR


def is_hidden(node: Any, names: Set[str] = frozenset()) -> bool:
    """Return whether a viewer hides an element, or a style sheet ``names``, its tag, .class or #id."""
    is_marked = node.get("state") in ("hidden", "veryHidden") or node.get("show") in _OFF
    if is_marked or node.get("hidden", "0") not in (*_OFF, "until-found"):
        return True
    if path := _HIDDEN_MARKS.get(node.tag):
        mark = node.find(path)
        return mark is not None and mark.get(f"{WORD}val") not in _OFF
    if node.tag in ("html", "body") or (not node.attrib and node.tag != "dialog" and not names):
        return False  # many pages hide their body until a script runs
    style, own_names = node.get("style", ""), [node.tag, f"#{node.get('id')}"]
    own_names += [f".{name}" for name in node.get("class", "").split()]
    is_closed = node.tag == "dialog" and node.get("open") is None
    is_empty = len(node) == 0 and _NO_SIZE.search(style) is not None
    return is_closed or is_empty or _HIDDEN_STYLE.search(style) is not None or not names.isdisjoint(own_names)


def superscript(before: str, text: str, is_reference: bool) -> str:
    """Return a superscript as text that follows ``before``: " [3]" for a reference, "^6", "^(n+1)", or plain "th"."""
    text = " ".join(text.split())
    last = before[-1:].strip()
    is_note = text[:1].isdigit() and last in tuple(".,;:!?'\"\u2019\u201d\u00bb")
    if text.strip("[]() ") and (is_reference or is_note or (text.startswith("[") and text.endswith("]"))):
        return f"{' ' if last else ''}[{text.strip('[]() ')}]"
    is_power = last.isalnum() or last in tuple(")]")
    is_ion = last.isalpha() and text[-1:] in tuple("+-\u2212\u2013")
    if not is_power or is_ion or not text or _PLAIN_SUPERSCRIPT.fullmatch(text):
        return text
    return f"^{text}" if _POWER.fullmatch(text) or text.startswith("(") else f"^({text})"


def format_row(cells: Iterable[str]) -> str:
    return "\t".join(" ".join(cell.split()) for cell in cells).rstrip("\t")


def format_table(rows: Iterable[Iterable[str]]) -> str:
    """Return a table: its rows are lines, except those of one cell, which are paragraphs."""
    lines = filter(str.strip, map(format_row, rows))
    groups = groupby(lines, lambda line: "\t" in line)
    return PARAGRAPH.join(("\n" if has_cells else PARAGRAPH).join(group) for has_cells, group in groups)


def check_remaining(remaining: int) -> None:
    if remaining < 0:
        raise UnreadableError("too_large", f"the text is longer than {LINE_LIMIT >> 20} Mi characters; split the file")


def open_package(data: bytes) -> ZipFile:
    """Open a ZIP archive of XML whose declared size is within the limits; the memory limit covers the rest."""
    if "EncryptedPackage".encode("utf-16-le") in data:  # the name of a part of files with a password
        raise UnreadableError("encrypted", "the file needs a password; save it without one")
    try:
        package = ZipFile(BytesIO(data))
    except BadZipFile:
        raise ValueError("not a ZIP archive, as Office 2007 or later and EPUB write it") from None
    parts = package.infolist()
    xml = sum(part.file_size for part in parts if part.filename.lower().endswith(_XML_SUFFIXES))
    if xml > _XML_LIMIT or sum(part.file_size for part in parts) > _UNPACKED_LIMIT:
        limits = f"{_XML_LIMIT >> 20} MiB of text or {_UNPACKED_LIMIT >> 20} MiB"
        raise UnreadableError("too_large", f"the file unpacks to more than {limits}; split it")
    return package
