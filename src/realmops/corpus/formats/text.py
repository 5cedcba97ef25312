"""Text, Markdown and HTML files, one document each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from realmops.corpus.documents import (
    LINE_LIMIT,
    Format,
    Outcome,
    RawRecord,
    Rejected,
    parse_document_or_drop,
    printable_path,
)
from realmops.corpus.formats.html import decode_page, page_to_document
from realmops.text.compressed import open_raw

if TYPE_CHECKING:
    from markdown_it.tree import SyntaxTreeNode

PLAIN_SUFFIXES = (".txt", ".text")
MARKDOWN_SUFFIXES = (".md", ".markdown")
HTML_SUFFIXES = (".html", ".htm", ".xhtml")
_MARKDOWN_LIMIT = 2 << 20  # characters
_MARKS = re.compile(r"[\[*_`#|]")
_MARK_LIMIT = 50_000  # markdown-it takes quadratic time for marks that never close
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*\n", re.DOTALL | re.MULTILINE)
_FRONT_TITLE = re.compile(r"^title:(.*)$", re.MULTILINE)


def read_whole_file(path: Path) -> Iterator[RawRecord | Rejected]:
    """Yield the file as one record with its name and bytes; ``Rejected`` if it exceeds ``LINE_LIMIT`` bytes."""
    with open_raw(path) as file:
        data = file.read(LINE_LIMIT + 1)
    if len(data) > LINE_LIMIT:
        yield Rejected(str(path), f"the file is larger than {LINE_LIMIT >> 20} MiB; split it into documents")
    else:
        yield RawRecord(str(path), {"name": printable_path(path.name), "bytes": data}, len(data))


def _parse_record(raw: RawRecord) -> Outcome:
    name, data = PurePath(raw.data["name"]), raw.data["bytes"]
    suffix = name.suffix.lower()
    stem = name.stem.replace("_", " ")
    text = decode_text(data, is_html=suffix in HTML_SUFFIXES)
    if suffix in HTML_SUFFIXES:
        return page_to_document(text, raw.place, title=stem)
    title = ""
    if suffix in MARKDOWN_SUFFIXES:
        if len(text) > _MARKDOWN_LIMIT or sum(1 for _ in _MARKS.finditer(text)) > _MARK_LIMIT:
            raise ValueError(
                f"the Markdown is longer than {_MARKDOWN_LIMIT >> 20} Mi characters or has more than "
                f"{_MARK_LIMIT:,} marks; split it into documents"
            )
        title, text = _read_markdown(text)
    return parse_document_or_drop({"title": title or stem, "text": text.strip()}, raw.place)


def decode_text(data: bytes, *, is_html: bool) -> str:
    """Decode a UTF-8 file, or an HTML page in the encoding it declares; raise ValueError for invalid bytes."""
    if is_html:
        return decode_page(data, None)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}; save the file as UTF-8") from None


def _read_markdown(source: str) -> tuple[str, str]:
    """Return (title, text): the front matter's title or the first heading, and the text without markup."""
    from markdown_it import MarkdownIt
    from markdown_it.tree import SyntaxTreeNode

    title = ""
    if front := _FRONT_MATTER.match(source):
        source = source[front.end() :]
        title_line = _FRONT_TITLE.search(front[1])
        title = title_line[1].strip().strip("\"'") if title_line else ""
    blocks = []
    for node in SyntaxTreeNode(MarkdownIt().enable("table").parse(source)).walk():
        if node.type in ("fence", "code_block"):
            blocks.append(node.content.strip())
        elif node.type == "inline":
            words = _inline_text(node).strip()
            if not title and node.parent is not None and node.parent.type == "heading":
                title = words
            elif words != title or blocks:
                blocks.append(words)
    return title, "\n\n".join(filter(None, blocks))


_BREAKS = {"softbreak": " ", "hardbreak": "\n"}


def _inline_text(node: SyntaxTreeNode) -> str:
    """Return the visible text of inline markup: links as their text, no images, no HTML tags."""
    if node.type == "image":
        return ""
    if node.children:
        return "".join(map(_inline_text, node.children))
    return node.content if node.type in ("text", "code_inline") else _BREAKS.get(node.type, "")


TEXT = Format("text", read_whole_file, _parse_record, is_document=True)
