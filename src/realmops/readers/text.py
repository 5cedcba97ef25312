"""Text, Markdown and HTML files, one document each; they may be compressed."""

import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from datetime import date
from pathlib import PurePath
from typing import Any

import yaml

from realmops.compressed import DECOMPRESSION_ERRORS, bare_name, describe_damage, open_compressed, utf_16_encoding
from realmops.readers.documents import (
    LINE_LIMIT,
    RESERVED_KEYS,
    Dropped,
    Outcome,
    RawRecord,
    parse_document,
    printable_path,
)
from realmops.readers.flow import flow_text
from realmops.readers.html import decode_page, page_to_document

_MARKDOWN_SUFFIXES = (".md", ".markdown", ".mdx")
_HTML_SUFFIXES = (".html", ".htm", ".xhtml")
TEXT_SUFFIXES = (".txt", ".text", *_MARKDOWN_SUFFIXES, *_HTML_SUFFIXES)
# Metadata before the text: YAML between lines of hyphens, or TOML between lines of plus signs.
_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\n(.*?)^(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_FRONT_LINE = re.compile(r"^(\w[\w -]*+):(.*)$", re.MULTILINE)
# At the beginning of Markdown with elements of React
_MODULE_LINES = re.compile(r"(?:\s*(?:import\b.*['\"];?|export (?:const|default|function)\b.*)[ \t]*\n)*")
_PLAIN = str | int | float | date  # values of metadata, which may also be lists of them
_MAX_NULS = 0.05  # share of the bytes; more are in binary files, and in UTF-16 without a mark and Latin letters


def read_text(raw: RawRecord) -> Outcome:
    """Read a text, Markdown or HTML file; ``raw.data`` is its path."""
    try:
        with open_compressed(raw.data) as (file, _):
            data = file.read(LINE_LIMIT + 1)
    except DECOMPRESSION_ERRORS as error:
        raise ValueError(describe_damage(error, raw.data)) from None
    if len(data) > LINE_LIMIT:
        raise ValueError(f"the file is larger than {LINE_LIMIT >> 20} MiB; split it into documents")
    name = PurePath(printable_path(bare_name(raw.data)))
    suffix, stem = name.suffix.lower(), name.stem.replace("_", " ")
    if suffix in _HTML_SUFFIXES:
        return page_to_document(decode_page(data, None), raw.place, stem)
    text = decode_text(data)
    if suffix in _MARKDOWN_SUFFIXES:
        return parse_markdown(text, stem, raw.place)
    if "multistream-index" in stem and re.match(r"\d+:\d+:.+\n", text):  # of a dump of Wikipedia
        return Dropped(raw.place, "dump_index")
    return parse_document({"title": stem, "text": text.strip()}, raw.place)


def decode_text(data: bytes) -> str:
    """Decode a text file, UTF-8 or UTF-16; raise ValueError for other bytes."""
    encoding = utf_16_encoding(data)
    if not encoding and data.count(0) > _MAX_NULS * len(data):
        raise ValueError(f"binary data that begins with {data[:8]!r}; unpack it if compressed, or save text as UTF-8")
    try:
        return data.decode(encoding or "utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        name = "UTF-16" if encoding else "UTF-8"
        raise ValueError(f"invalid {name} at byte {error.start}; save the file as UTF-8") from None


def parse_markdown(source: str, name: str, place: str) -> Outcome:
    """Parse Markdown with HTML in it; the title is the front matter's, or the first heading, or the file's name."""
    columns, source = _split_front_matter(source)
    title = columns.pop("title", "")
    source = _MODULE_LINES.sub("", source, count=1)
    title, text, omitted = render_markdown(source, "" if isinstance(title, list) else str(title).strip())
    return parse_document({**columns, "title": title or name, "text": text}, place, omitted)


def render_markdown(source: str, title: str = "") -> tuple[str, str, Counter[str]]:
    """Return ``title`` or the first heading, the text without that heading, and counts of what the text lacks."""
    import lxml.html
    from markdown_it import MarkdownIt

    body = lxml.html.fromstring(f"<div>{MarkdownIt().enable('table').render(source)}</div>")
    heading = next((node for node in body.iter("h1", "h2", "h3", "h4", "h5", "h6")), None)
    if heading is not None and (words := " ".join(flow_text(heading)[0].split())) and title in ("", words):
        title = words
        heading.drop_tree()
    return title, *flow_text(body)


def _split_front_matter(source: str) -> tuple[dict[str, Any], str]:
    """Return the metadata before the text, without reserved keys, and the text; a rule (``---``) is not metadata."""
    front = _FRONT_MATTER.match(source)
    if front is None or len(front[2]) > 64 << 10:
        return {}, source
    try:
        values = yaml.safe_load(front[2]) if front[1] == "---" else tomllib.loads(front[2])
    except (yaml.YAMLError, ValueError, RecursionError):
        pairs = _FRONT_LINE.findall(front[2])  # "title: Harbour: rules" is no YAML, yet people write it
        values = {key.strip(): value.strip() for key, value in pairs}
    if not values or not isinstance(values, Mapping):
        return {}, source
    columns = {}
    for key, value in values.items():
        items = value if isinstance(value, list) else [value]  # deeper YAML may unfold without end
        if str(key) not in RESERVED_KEYS - {"title"} and all(isinstance(item, _PLAIN) for item in items):
            columns[str(key)] = value
    return columns, source[front.end() :]
