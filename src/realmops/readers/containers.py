"""EPUB books, messages (.eml) and Jupyter notebooks, which contain text in other formats: pages, Markdown, code."""

import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from email import message_from_bytes
from email.message import MIMEPart
from email.policy import default as email_policy
from itertools import groupby
from typing import Any
from urllib.parse import unquote

from realmops.readers.contents import PARAGRAPH, Contents, UnreadableError, open_package
from realmops.readers.html import decode_page, flow_text
from realmops.readers.text import render_markdown

_HEADERS = ("From", "To", "Cc", "Date")  # of a message, which a person sees next to its subject
_ALTERNATIVES = ("multipart/mixed", "multipart/related", "text/html", "text/plain")  # the best first
_ENCRYPTION = "META-INF/encryption.xml"  # lists fonts, too
_SOFT_BREAK = re.compile(r"^(?!>|-- $)(.*) \n(?!>)", re.MULTILINE)  # not in a quotation, nor before a signature
_RESULTS = ("text/html", "html", "text/markdown", "text/latex", "latex", "text/plain", "text")
_OVERWRITTEN = re.compile(  # progress bars; colours, links and cursor of a terminal
    r"^[^\n]*\r(?=[^\r\n])|\x1b(?:\[[ -?]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])|\x08+", re.MULTILINE
)


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
    encryption = parse_xml(package.read(_ENCRYPTION)) if _ENCRYPTION in package.namelist() else None
    locked = {} if encryption is None else {unquote(node.get("URI")) for node in encryption.iter("{*}CipherReference")}
    items = {item.get("id"): item for item in book.iterfind("{*}manifest/{*}item")}
    omitted: Counter[str] = Counter()

    def texts() -> Iterator[str]:
        for chapter in book.iterfind("{*}spine/{*}itemref"):
            item = items.get(chapter.get("idref"), {})
            name = posixpath.normpath(posixpath.join(posixpath.dirname(path), unquote(item.get("href", ""))))
            if name in locked:
                raise UnreadableError("encrypted", "the chapters of the book are encrypted (DRM); get it without")
            if item.get("media-type", "").startswith("image/"):
                omitted["image"] += 1
                continue
            try:
                page = parse_page(package.read(name))
            except MemoryError:
                raise
            except Exception:  # no such file, a damaged or an empty one
                omitted["missing chapter"] += 1
                continue
            for contents in [*page.iter("nav")]:
                omitted["table of contents"] += 1
                contents.drop_tree()
            text, left_out = flow_text(page)
            omitted.update(left_out)
            yield text

    return Contents(book.findtext("{*}metadata/{http://purl.org/dc/elements/1.1/}title") or "", texts(), omitted)


def read_eml(data: bytes) -> Contents:
    """Return the contents of a message: its subject, sender, receivers, date and text; attachments are counted."""
    message = message_from_bytes(data.lstrip(b"\xef\xbb\xbf\r\n"), policy=email_policy)
    if not message.keys():
        raise ValueError("it does not begin with the headers of a message")
    omitted: Counter[str] = Counter()
    texts = [*filter(None, _part_texts(message, omitted))]
    if not texts and not omitted:
        raise UnreadableError("no_text", "the message is empty; leave it out")
    title = _header(message, "Subject", omitted)
    return Contents(title, [PARAGRAPH.join([*_headers(message, omitted), *texts])], omitted)


def read_mime(data: bytes) -> Contents:
    """Return the text of a message, or of a page with its pictures (MHTML), without headers."""
    omitted: Counter[str] = Counter()
    message = message_from_bytes(data, policy=email_policy)
    return Contents("", [PARAGRAPH.join(filter(None, _part_texts(message, omitted)))], omitted)


def _header(message: MIMEPart, name: str, omitted: Counter[str]) -> str:
    try:
        raw = next((str(value) for key, value in message.raw_items() if key.lower() == name.lower()), "")
        text = decode_page(raw.encode("ascii", "surrogateescape"), None)  # Python knows ASCII alone
        return str(email_policy.header_fetch_parse(name, text))
    except Exception:  # Python's parser raises any on some broken addresses
        omitted["broken header"] += 1
        return ""


def _headers(message: MIMEPart, omitted: Counter[str], names: tuple[str, ...] = _HEADERS) -> list[str]:
    values = {name: _header(message, name, omitted) for name in names}
    lines = [f"{name}: {value}" for name, value in values.items() if value]
    return ["\n".join(lines)] if lines else []


def _part_texts(part: MIMEPart, omitted: Counter[str]) -> Iterator[str]:
    kind, family = part.get_content_type(), part.get_content_maintype()
    if kind == "multipart/alternative":
        choices = {choice.get_content_type(): choice for choice in part.iter_parts()}
        omitted["attachment"] += "text/calendar" in choices
        for choice in filter(None, map(choices.get, _ALTERNATIVES)):
            if texts := [*filter(None, _part_texts(choice, omitted))]:
                yield from texts
                return
        omitted["attachment"] += len(choices.keys() - {"text/calendar"})
    elif part.is_multipart():
        for inner in part.iter_parts():
            if kind == "message/rfc822":
                yield from _headers(inner, omitted, ("Subject", *_HEADERS))
            yield from _part_texts(inner, omitted)
    elif (kind in ("text/plain", "text/html") or family == "multipart") and not part.is_attachment():
        data, charset = part.get_payload(decode=True), part.get_content_charset()
        assert isinstance(data, bytes)
        if kind != "text/html":  # also the text of a message that is cut before its first part
            text = decode_page(data, charset).replace("\r\n", "\n").strip()
            is_flowed = part.get_param("format") == "flowed"
            joint = "" if part.get_param("delsp") == "yes" else " "
            yield _SOFT_BREAK.sub(rf"\1{joint}", text) if is_flowed else text
        elif data.strip():
            text, left_out = flow_text(parse_page(data, charset))
            omitted.update(left_out)
            yield text
    else:
        omitted["image" if family == "image" else "attachment"] += 1


def _result_text(results: Mapping[str, Any], omitted: Counter[str]) -> str:
    """Return a result in the format that a notebook shows; text with the last state of each line."""
    kind = next((kind for kind in _RESULTS if kind in results), "")
    source = "".join(results.get(kind, "")).strip("\n")
    left_out: Counter[str] = Counter()
    has_image = any(key.startswith("image/") or key in ("png", "jpeg", "svg") for key in results)
    has_object = any(key.startswith("application/") for key in results)
    if kind.endswith("html") and source.strip():
        text, left_out = flow_text(parse_page(source.encode()))
    elif kind == "text/markdown":
        _, text, left_out = render_markdown(source, " ")  # no heading of it is a title
    elif kind in _RESULTS[-2:] and (has_image or has_object):
        text, left_out["embedded object"] = "", has_object  # the text names a class
    else:
        text = _OVERWRITTEN.sub("", f"{results['ename']}: {results['evalue']}" if "ename" in results else source)
    left_out["image"] += has_image
    omitted.update(left_out)
    return text.strip()


def read_ipynb(data: bytes) -> Contents:
    """Return the contents of a Jupyter notebook: text, code and its printed results; the first heading is the title."""
    notebook = json.loads(data)
    cells = notebook["cells"] if "cells" in notebook else [c for s in notebook["worksheets"] for c in s["cells"]]
    omitted: Counter[str] = Counter()
    title, paragraphs = "", []
    for cell in cells:
        text = "".join(cell.get("source", cell.get("input", "")))
        if cell["cell_type"] in ("markdown", "heading"):
            title, text, left_out = render_markdown("# " * (cell["cell_type"] == "heading") + text, title)
            omitted.update(left_out)
        paragraphs.append(text.strip())
        for stream, outputs in groupby(
            cell.get("outputs", ()), lambda output: output.get("name", output.get("stream"))
        ):
            results = [output.get("data", output) for output in outputs]
            if stream:  # it may be in pieces
                results = [{"text": [piece for result in results for piece in result["text"]]}]
            paragraphs += [_result_text(result, omitted) for result in results]
    return Contents(title, [PARAGRAPH.join(filter(None, paragraphs))], omitted)
