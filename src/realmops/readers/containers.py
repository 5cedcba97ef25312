"""EPUB books, messages (.eml) and Jupyter notebooks, which contain text in other formats: pages, Markdown, code."""

import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from email import message_from_bytes
from email.message import MIMEPart
from email.policy import default as email_policy
from typing import Any
from urllib.parse import unquote

from realmops.readers.contents import PARAGRAPH, Contents, UnreadableError, open_package
from realmops.readers.html import decode_page, flow_text
from realmops.readers.text import render_markdown

_HEADERS = ("From", "To", "Cc", "Date")  # of a message, which a person sees next to its subject
_ALTERNATIVES = ("multipart/mixed", "multipart/related", "text/html", "text/plain")  # the best first
_OVERWRITTEN = re.compile(r"\x1b\[[\d;]*[A-Za-z]|^[^\n]*\r(?!\n)", re.MULTILINE)  # colours, progress bars


def parse_page(data: bytes, charset: str | None = None) -> Any:
    import lxml.html

    parser = lxml.html.HTMLParser(encoding="utf-8")
    return lxml.html.document_fromstring(decode_page(data, charset).encode(), parser=parser)


def parse_xml(data: bytes) -> Any:
    from lxml import etree

    return etree.fromstring(data, etree.XMLParser(resolve_entities=False, no_network=True, remove_comments=True))


def read_epub(data: bytes) -> Contents:
    package = open_package(data)
    path = unquote(parse_xml(package.read("META-INF/container.xml")).find(".//{*}rootfile").get("full-path"))
    book = parse_xml(package.read(path))
    present = {*package.namelist()}
    files = {item.get("id"): unquote(item.get("href")) for item in book.iterfind("{*}manifest/{*}item")}
    omitted: Counter[str] = Counter()

    def texts() -> Iterator[str]:
        for chapter in book.iterfind("{*}spine/{*}itemref"):
            name = posixpath.normpath(posixpath.join(posixpath.dirname(path), files.get(chapter.get("idref"), "")))
            if name in present:
                text, left_out = flow_text(parse_page(package.read(name)))
                omitted.update(left_out)
                yield text
            else:
                omitted["missing chapter"] += 1

    return Contents(book.findtext("{*}metadata/{http://purl.org/dc/elements/1.1/}title") or "", texts(), omitted)


def read_eml(data: bytes) -> Contents:
    """Return the contents of a message: its subject, sender, receivers, date and text; attachments are counted."""
    message = message_from_bytes(data, policy=email_policy)
    if not message.keys():
        raise ValueError("it does not begin with the headers of a message")
    contents = read_mime(data)
    if not any(contents.pages) and not contents.omitted:
        raise UnreadableError("no_text", "the message is empty; leave it out")
    contents.title = str(message.get("Subject", ""))
    contents.pages = [PARAGRAPH.join([*_headers(message), *contents.pages])]
    return contents


def read_mime(data: bytes) -> Contents:
    """Return the text of a message, or of a page with its pictures (MHTML), without headers."""
    omitted: Counter[str] = Counter()
    message = message_from_bytes(data, policy=email_policy)
    return Contents("", [PARAGRAPH.join(filter(None, _part_texts(message, omitted)))], omitted)


def _headers(message: MIMEPart, names: tuple[str, ...] = _HEADERS) -> list[str]:
    lines = [f"{name}: {message[name]}" for name in names if message[name]]
    return ["\n".join(lines)] if lines else []


def _part_texts(part: MIMEPart, omitted: Counter[str]) -> Iterator[str]:
    kind = part.get_content_type()
    if kind == "multipart/alternative":
        choices = {choice.get_content_type(): choice for choice in part.iter_parts()}
        for choice in filter(None, map(choices.get, _ALTERNATIVES)):
            if texts := [*filter(None, _part_texts(choice, omitted))]:
                yield from texts
                return
        omitted["attachment"] += len(choices)
    elif part.is_multipart():
        for inner in part.iter_parts():
            if kind == "message/rfc822":
                yield from _headers(inner, ("Subject", *_HEADERS))
            yield from _part_texts(inner, omitted)
    elif kind in ("text/plain", "text/html") and not part.is_attachment():
        data, charset = part.get_payload(decode=True), part.get_content_charset()
        assert isinstance(data, bytes)
        if kind == "text/plain":
            yield decode_page(data, charset).replace("\r\n", "\n").strip()
        elif data.strip():
            text, left_out = flow_text(parse_page(data, charset))
            omitted.update(left_out)
            yield text
    else:
        omitted["image" if part.get_content_maintype() == "image" else "attachment"] += 1


def _result_text(results: Mapping[str, Any], omitted: Counter[str]) -> str:
    """Return a result as a notebook shows it: as a web page, else as text with the last state of each line."""
    if page := "".join(results.get("text/html", "")).strip():
        text, left_out = flow_text(parse_page(page.encode()))
        omitted.update(left_out)
        return text
    kind = next((kind for kind in ("text/markdown", "text/plain", "text") if kind in results), "")
    return _OVERWRITTEN.sub("", "".join(results.get(kind, ""))).strip()


def read_ipynb(data: bytes) -> Contents:
    """Return the contents of a Jupyter notebook: text, code and its printed results; the first heading is the title."""
    notebook = json.loads(data)
    cells = notebook["cells"] if "cells" in notebook else [c for s in notebook["worksheets"] for c in s["cells"]]
    omitted: Counter[str] = Counter()
    title, paragraphs = "", []
    for cell in cells:
        source = "".join(cell.get("source", cell.get("input", "")))
        if cell["cell_type"] != "markdown":
            paragraphs.append(source.strip())
        else:
            heading, text, left_out = render_markdown(source)
            omitted.update(left_out)
            paragraphs += [heading if title else "", text]
            title = title or heading
        for output in cell.get("outputs", ()):
            results = output.get("data", output)
            omitted["image"] += any(key.startswith("image/") or key in ("png", "jpeg", "svg") for key in results)
            paragraphs.append(_result_text(results, omitted))
    return Contents(title, [PARAGRAPH.join(filter(None, paragraphs))], omitted)
