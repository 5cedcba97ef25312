"""EPUB books, messages (.eml) and Jupyter notebooks, which contain text in other formats: pages, Markdown, code."""

import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from email import message_from_bytes
from email.message import MIMEPart
from email.policy import default as email_policy
from typing import Any, cast
from urllib.parse import unquote

import lxml.html
from lxml import etree

from realmops.readers.contents import PARAGRAPH, Contents, open_package
from realmops.readers.flow import flow_text
from realmops.readers.html import decode_page
from realmops.readers.text import render_markdown

_HEADERS = ("From", "To", "Cc", "Date")  # of a message, which a person sees next to its subject
_ALTERNATIVES = ("multipart/mixed", "multipart/related", "text/html", "text/plain")  # the best first
_RESULTS = ("text/html", "html", "text/markdown", "text/latex", "latex", "text/plain", "text")
_OVERWRITTEN = re.compile(r"^[^\n]*\r(?=[^\r\n])|\x1b\[[ -?]*[@-~]|\x08+", re.MULTILINE)  # progress bars, colours


def parse_page(data: bytes, charset: str | None = None) -> Any:
    parser = lxml.html.HTMLParser(encoding="utf-8")
    return lxml.html.document_fromstring(decode_page(data, charset).encode(), parser=parser)


def parse_xml(data: bytes) -> Any:
    return etree.fromstring(data, etree.XMLParser(resolve_entities=False, no_network=True, remove_comments=True))


def read_epub(data: bytes) -> Contents:
    package = open_package(data)
    path = unquote(parse_xml(package.read("META-INF/container.xml")).find(".//{*}rootfile").get("full-path"))
    book = parse_xml(package.read(path))
    encrypted = b"".join(package.read(name) for name in package.namelist() if name == "META-INF/encryption.xml")
    files = {item.get("id"): unquote(item.get("href")) for item in book.iterfind("{*}manifest/{*}item")}
    omitted: Counter[str] = Counter()

    def texts() -> Iterator[str]:
        for chapter in book.iterfind("{*}spine/{*}itemref"):
            name = posixpath.normpath(posixpath.join(posixpath.dirname(path), files.get(chapter.get("idref"), "")))
            try:
                page = parse_page(b"" if name.encode() in encrypted else package.read(name))
            except Exception:  # there is none, or it is damaged or empty
                omitted["missing chapter"] += 1
                continue
            omitted["table of contents"] += len(page.findall(".//nav"))
            etree.strip_elements(page, "nav", with_tail=False)
            text, left_out = flow_text(page)
            omitted.update(left_out)
            yield text

    return Contents(book.findtext("{*}metadata/{http://purl.org/dc/elements/1.1/}title") or "", texts(), omitted)


def read_eml(data: bytes, headers: tuple[str, ...] = _HEADERS) -> Contents:
    """Return the contents of a message, or without headers of a page with its pictures (MHTML)."""
    omitted: Counter[str] = Counter()
    message = message_from_bytes(data.lstrip(b"\xef\xbb\xbf\r\n"), policy=email_policy)
    if headers and not message.keys():
        raise ValueError("it does not begin with the headers of a message")
    title = _headers(message, omitted, ("Subject",)).removeprefix("Subject: ") if headers else ""
    texts = [_headers(message, omitted, headers), *_part_texts(message, omitted)]
    return Contents(title, [PARAGRAPH.join(filter(None, texts))], omitted)


def _headers(message: MIMEPart, omitted: Counter[str], names: tuple[str, ...]) -> str:
    found = {key.lower(): str(value).encode("ascii", "surrogateescape") for key, value in message.raw_items()}
    lines = []
    for name in names:
        try:  # Python reads headers in ASCII alone, and raises any exception on some broken addresses
            value = email_policy.header_fetch_parse(name, decode_page(found.get(name.lower(), b""), None))
            lines += [f"{name}: {value}"] if value else []
        except Exception:
            omitted["broken header"] += 1
    return "\n".join(lines)


def _part_texts(part: MIMEPart, omitted: Counter[str]) -> Iterator[str]:
    kind, family = part.get_content_type(), part.get_content_maintype()
    if kind == "multipart/alternative":
        choices = {choice.get_content_type(): choice for choice in part.iter_parts()}
        omitted["attachment"] += len(choices.keys() - _ALTERNATIVES)
        for choice in filter(None, map(choices.get, _ALTERNATIVES)):
            if texts := [*filter(None, _part_texts(choice, omitted))]:
                yield from texts
                return
    elif part.is_multipart():
        for inner in part.iter_parts():
            if kind == "message/rfc822":
                yield _headers(inner, omitted, ("Subject", *_HEADERS))
            yield from _part_texts(inner, omitted)
    elif (kind in ("text/plain", "text/html") or family == "multipart") and not part.is_attachment():
        data, charset = cast(bytes, part.get_payload(decode=True)), part.get_content_charset()
        if kind != "text/html":  # also the text of a message that is cut before its first part
            yield decode_page(data, charset).replace("\r\n", "\n").strip()
        elif data.strip():
            text, left_out = flow_text(parse_page(data, charset))
            omitted.update(left_out)
            yield text
    else:
        omitted["image" if family == "image" else "attachment"] += 1


def _result_text(results: Mapping[str, Any], omitted: Counter[str]) -> str:
    others = {match[0] for key in results if (match := re.match("image/|application/|png|jpeg|svg", key))}
    kind = next((kind for kind in _RESULTS if kind in results and not (others and kind in _RESULTS[-2:])), "")
    source = "".join(results.get(kind, "")) or ": ".join(results[key] for key in ("ename", "evalue") if key in results)
    omitted["embedded object" if others == {"application/"} else "image"] += bool(others) and not kind
    text, left_out = _OVERWRITTEN.sub("", source), Counter[str]()  # the last state of each line
    if kind.endswith("html") and source.strip():
        text, left_out = flow_text(parse_page(source.encode()))
    elif kind == "text/markdown":
        _, text, left_out = render_markdown(source, " ")  # no heading of it is a title
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
        paragraphs += [_result_text(output.get("data", output), omitted) for output in cell.get("outputs", ())]
    return Contents(title, [PARAGRAPH.join(filter(None, paragraphs))], omitted)
