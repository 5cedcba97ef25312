"""Formats that the library xberg converts to Markdown, from which title, text and tables are read."""

import asyncio
import re
from collections import Counter

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
_MARK = re.compile(r"^(\[\^[^\]\n]+\]):\s+|\[![A-Z]+\] ?", re.MULTILINE)  # of a note, of an admonition
_OPTIONS = r"(?:\n[ \t]+:[\w-]+:.*)*"  # of a directive
_DIRECTIVE = r"^([ \t]*)(\.\.[ \t]+(?:%s)::)[ \t]*(.*)"
_BLOCKS = _DIRECTIVE % "code|code-block|math|parsed-literal|sourcecode"
_GROUP = r"(?:\\.|[^{}\\])*+"  # of RTF, within other groups
for _ in range(9):
    _GROUP = rf"(?:\\.|[^{{}}\\]|\{{{_GROUP}\}})*+"
# By kind: what is replaced before xberg reads it, by what, and under which kind it is counted
_REPLACED: dict[str, tuple[tuple[str, str, str], ...]] = {
    "adoc": (
        (r"^(?:include|ifn?def|ifeval|endif|toc)::.*|\bfootnote:\w{0,99}\[\]", "", ""),  # a second mark of a note
        (r"\bimage::?[^\[\s]{0,300}\[[^\]\n]{0,999}\]", "", "image"),
        (r"\bfootnote:\w{0,99}\[([^\]\n]{0,999})\]", r" (\1)", ""),
        (r"<<[^,>\n]{0,300},([^>\n]{0,300})>>|\bxref:[^\[\s]{0,300}\[([^\]\n]{0,300})\]", r"\1\2", ""),
    ),
    "org": (
        (r"^#\+title:", "*", ""),
        (r"^[ \t]*#\+caption(?:\[.*\])?:", "", ""),
        (r"\[\[[^\]\n]{0,300}\.(?:gif|jpe?g|png|svg)\]\]", "", "image"),
        (  # except in blocks: comments, keywords and drawers
            r"(^[ \t]*#\+begin_(src|example)\b.*\n(?:(?![ \t]*#\+begin_).*\n)*?[ \t]*#\+end_\2)"
            r"|^[ \t]*#\+begin_(comment|export)\b.*\n(?:(?![ \t]*#\+begin_).*\n)*?[ \t]*#\+end_\3.*"
            r"|^[ \t]*:[\w-]+:[ \t]*\n(?:.*\n){0,99}?[ \t]*:end:[ \t]*$"
            r"|^[ \t]*#(?:[ \t].*)?$|^[ \t]*#\+(?!begin_|end_)\w+(?:\[.*\])?:.*",
            r"\1",
            "",
        ),
    ),
    "rst": (
        (r":[A-Za-z][\w:+.-]{0,40}:`[~!]?([^`<]{1,200}?)(?:\s{0,9}<[^`>]{0,200}>)?`", r"\1", ""),  # roles of Sphinx
        (_DIRECTIVE % "figure|image" + _OPTIONS, "", "image"),
        (_DIRECTIVE % "contents|include|literalinclude|only|raw|toctree" + _OPTIONS, "", ""),
        (rf"{_BLOCKS}({_OPTIONS}?)\n[ \t]+:caption:(.*)", r"\1\5\n\n\1\2 \3\4", ""),
        (_BLOCKS + _OPTIONS, r"\1\2 \3", ""),
        (_DIRECTIVE % "csv-table|list-table" + _OPTIONS, r"\1\3\n\n\1\2", ""),
        (_DIRECTIVE % r"(?!code|math\b|parsed-l|sourcecode|csv-t|list-t)[A-Za-z][\w:+.-]*?" + _OPTIONS, r"\1\3", ""),
    ),
    "rtf": (
        (rf"\{{\\(?:header|footer)[lrf]?\b{_GROUP}\}}", "", "header or footer"),
        (r"\\v(?![a-z0-9])", r"\g<0>", HIDDEN),  # xberg leaves it out
    ),
}
_ENDS = {"fb2": b"</FictionBook>", "rtf": b"}"}  # of whole files
_ENCODED = ("adoc", "org", "rst", "vtt")  # as our text files; xberg guesses other encodings
_CUE = re.compile(  # a cue's number and times, in the spellings of players, or a tag
    r"^(?:\d+[ \t]*\n)?[ \t]*\d[\d:., \t]*-{1,2}>[ \t]*\d.*$|</?(?:[bisu]|font\b[^<>]{0,99})>", re.MULTILINE
)


def read_other(kind: str, data: bytes) -> Contents:
    """Return the contents of a file of one of ``TYPES``; each sheet of a workbook is a page."""
    import xberg

    omitted: Counter[str] = Counter()
    if kind == "srt":  # not as WebVTT, whose cues end at an empty line
        blocks = _CUE.sub("", decode_text(data)).split("\n\n")
        return Contents("", [PARAGRAPH.join(" ".join(block.split()) for block in blocks)], omitted)
    if not data.rstrip(b"\0\r\n\t ").endswith(_ENDS.get(kind, b"")):
        raise ValueError("it ends in the middle; copy or download it again")
    text = decode_text(data) if kind in _ENCODED else data.decode("latin-1")
    for pattern, replacement, counted in _REPLACED.get(kind, ()):
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE | re.IGNORECASE)
        omitted[counted] += count if counted else 0
    data = text.encode() if kind in _ENCODED else text.encode("latin-1")
    source = xberg.ExtractInput(kind="bytes", bytes=data, mime_type=TYPES[kind])
    config = xberg.ExtractionConfig(output_format="markdown", disable_ocr=True, use_cache=False)
    [document] = asyncio.run(xberg.extract(source, config)).results
    title = document.metadata.title or ""
    if kind not in SHEETS:
        title, text, left_out = render_markdown(_MARK.sub(r"\1 ", document.content), title)
        return Contents(title, [text], omitted + left_out)
    sheets = []
    for sheet in document.pages or ():
        is_hidden = f"## {sheet.sheet_name} (hidden)\n" in document.content
        omitted[HIDDEN] += is_hidden
        _, text, _ = render_markdown("" if is_hidden else sheet.content)
        sheets.append(text and PARAGRAPH.join([str(sheet.sheet_name), text]))
    return Contents(title, sheets, omitted)
