"""Formats that the library xberg converts to Markdown, from which title, text and tables are read."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from realmops.readers.contents import HIDDEN, PARAGRAPH, Contents
from realmops.readers.text import decode_text, render_markdown

_OPEN_DOCUMENT = "application/vnd.oasis.opendocument"
TYPES = {  # by suffix; xberg would guess another type from the content
    "odt": f"{_OPEN_DOCUMENT}.text",
    "ods": f"{_OPEN_DOCUMENT}.spreadsheet",
    "odp": f"{_OPEN_DOCUMENT}.presentation",
    "rtf": "application/rtf",
    "doc": "application/msword",
    "xls": "application/vnd.ms-excel",
    "msg": "application/vnd.ms-outlook",
    "adoc": "text/asciidoc",
    "org": "text/org",
    "fb2": "application/x-fictionbook+xml",
    "rst": "text/prs.fallenstein.rst",
    "vtt": "text/vtt",
    "srt": "",
}
SHEETS = ("ods", "xls")
_NOTE = re.compile(r"^(\[\^[^\]\n]+\]):\s+", re.MULTILINE)  # Markdown without this extension takes it for a link
_ROLE = re.compile(r":[A-Za-z][\w:+.-]{0,40}:`[~!]?([^`<]{1,200}?)(?:\s{0,9}<[^`>]{0,200}>)?`")  # of Sphinx
_DIRECTIVE = re.compile(r"^([ \t]*)\.\.[ \t]+([A-Za-z][\w:+.-]*)::[ \t]*(.*)(?:\n[ \t]+:[\w-]+:.*)*", re.MULTILINE)
_BLOCKS, _TABLES = ("code", "code-block", "math", "parsed-literal", "sourcecode"), ("csv-table", "list-table")
_FILES = ("contents", "figure", "image", "include", "literalinclude", "raw", "toctree")
_ENCODED = ("adoc", "org", "rst", "vtt")  # as our text files; xberg guesses other encodings
_CUE = re.compile(  # a cue's number and times, in the spellings of players, or a tag
    r"^(?:\d+[ \t]*\n)?[ \t]*\d[\d:., \t]*-{1,2}>[ \t]*\d.*$|</?(?:[bisu]|font\b[^<>]{0,99})>", re.MULTILINE
)


def read_other(kind: str, data: bytes) -> Contents:
    """Return the contents of a file of one of ``TYPES``; each sheet of a workbook is a page."""
    import xberg

    omitted: Counter[str] = Counter()
    if kind == "srt":  # not as WebVTT, whose cues end at an empty line
        blocks = _CUE.sub("", decode_text(data, is_html=False)).split("\n\n")
        return Contents("", [PARAGRAPH.join(" ".join(block.split()) for block in blocks)], omitted)
    if kind in _ENCODED:
        text = decode_text(data, is_html=False)
        data = (_plain_rst(text, omitted) if kind == "rst" else text).encode()
    source = xberg.ExtractInput(kind="bytes", bytes=data, mime_type=TYPES[kind])
    config = xberg.ExtractionConfig(output_format="markdown", disable_ocr=True, use_cache=False)
    [document] = asyncio.run(xberg.extract(source, config)).results
    title = document.metadata.title or ""
    if kind in SHEETS:
        return Contents(title, list(_sheets(document, omitted)), omitted)
    title, text, left_out = render_markdown(_NOTE.sub(r"\1 ", document.content), title)
    return Contents(title, [text], omitted + left_out)


def _plain_rst(source: str, omitted: Counter[str]) -> str:
    """Replace roles, and directives other than blocks and tables, by their text; remove options and file names."""

    def replace(match: re.Match[str]) -> str:
        indent, name, argument = match.groups()
        omitted["image"] += name in ("figure", "image")
        if name in _FILES:
            return ""
        if name in _TABLES:
            return f"{indent}{argument}\n\n{indent}.. {name}::"
        return f"{indent}.. {name}:: {argument}" if name in _BLOCKS else f"{indent}{argument}"

    return _DIRECTIVE.sub(replace, _ROLE.sub(r"\1", source))


def _sheets(document: Any, omitted: Counter[str]) -> Iterator[str]:
    for sheet in document.pages:
        is_hidden = f"## {sheet.sheet_name} (hidden)\n" in document.content
        omitted[HIDDEN] += is_hidden
        _, text, _ = render_markdown("" if is_hidden else sheet.content)
        yield text and PARAGRAPH.join([sheet.sheet_name, text])
