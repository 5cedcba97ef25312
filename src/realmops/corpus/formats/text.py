"""Text, Markdown and HTML files, one document each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from realmops.corpus.documents import LINE_LIMIT, Format, Outcome, Raw, Rejected, document_or_dropped, shown
from realmops.corpus.formats.html import decode_page, page_outcome
from realmops.text.compressed import open_plain

if TYPE_CHECKING:
    from markdown_it.tree import SyntaxTreeNode

PLAIN = (".txt", ".text")
MARKDOWN = (".md", ".markdown")
PAGES = (".html", ".htm", ".xhtml")
_MARKDOWN_LIMIT = 2 << 20  # characters
_MARKS = re.compile(r"[\[*_`#|]")
_MARK_LIMIT = 50_000  # the parser takes quadratic time for marks that never close
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*\n", re.DOTALL | re.MULTILINE)
_FRONT_TITLE = re.compile(r"^title:(.*)$", re.MULTILINE)


def whole_file(path: Path) -> Iterator[Raw | Rejected]:
    """The file as one record: its name and its bytes."""
    with open_plain(path) as file:
        data = file.read(LINE_LIMIT + 1)
    if len(data) > LINE_LIMIT:
        yield Rejected(str(path), f"the file is longer than {LINE_LIMIT >> 20} MiB; split it into documents")
    else:
        yield Raw(str(path), {"name": shown(path.name), "bytes": data}, len(data))


def _understand(raw: Raw) -> Outcome:
    name, data = PurePath(raw.data["name"]), raw.data["bytes"]
    suffix = name.suffix.lower()
    stem = name.stem.replace("_", " ")
    text = decode(data, is_page=suffix in PAGES)
    if suffix in PAGES:
        return page_outcome(text, raw.place, title=stem)
    title = ""
    if suffix in MARKDOWN:
        if len(text) > _MARKDOWN_LIMIT or sum(1 for _ in _MARKS.finditer(text)) > _MARK_LIMIT:
            raise ValueError(
                f"the Markdown is longer than {_MARKDOWN_LIMIT >> 20} Mi characters or has more than "
                f"{_MARK_LIMIT:,} marks; split it into documents"
            )
        title, text = _read_markdown(text)
    return document_or_dropped({"title": title or stem, "text": text.strip()}, raw.place)


def decode(data: bytes, *, is_page: bool) -> str:
    """The text of a file in UTF-8, or of a page as it declares; ValueError for other bytes."""
    if is_page:
        return decode_page(data, None)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}; save the file as UTF-8") from None


def _read_markdown(source: str) -> tuple[str, str]:
    """(title, text): the front matter's title or the first heading, and the text without its marks."""
    from markdown_it import MarkdownIt
    from markdown_it.tree import SyntaxTreeNode

    title = ""
    if front := _FRONT_MATTER.match(source):
        source = source[front.end() :]
        named = _FRONT_TITLE.search(front[1])
        title = named[1].strip().strip("\"'") if named else ""
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
    """What a reader sees of inline marks: no image, no HTML tag, links as their text."""
    if node.type == "image":
        return ""
    if node.children:
        return "".join(map(_inline_text, node.children))
    return node.content if node.type in ("text", "code_inline") else _BREAKS.get(node.type, "")


TEXT = Format("text", whole_file, _understand, is_document=True)
