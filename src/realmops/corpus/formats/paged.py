"""Paged formats, one document per file: PDF (by pypdfium2), Word, PowerPoint and Excel.

Slides and sheets count as pages. A worker receives the path of a file, so that large files are not all in memory at
once, and reads it in a child process with a memory limit (``sandbox``). Nothing is unpacked to disk, and a file cannot
reference another file to read.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import date, datetime, time
from functools import partial
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from realmops.corpus.documents import (
    LINE_LIMIT,
    PAGE_WITHOUT_TEXT,
    Document,
    Format,
    Outcome,
    RawRecord,
    Rejected,
    parse_document_or_drop,
    printable_path,
)
from realmops.corpus.formats.sandbox import convert_in_child
from realmops.text.compressed import open_raw

PDF = "pdf"  # the name of the format
_FILE_LIMIT = 512 << 20  # bytes
_UNPACKED_LIMIT = 512 << 20  # bytes of an Office file with its pictures
_XML_LIMIT = 64 << 20  # bytes of its XML, which takes about ten times as much memory when parsed
_CELL_LIMIT = 10_000_000  # per workbook, including empty cells between others
_PARAGRAPH = "\n\n"
_PLACEHOLDER_TITLES = {"", "untitled", "powerpoint presentation", "word document"}  # default titles of programs
_OLE_MAGIC = b"\xd0\xcf\x11\xe0"  # the container of old Office files and of password-protected ones
_ENCRYPTED_STREAM = "EncryptedPackage".encode("utf-16-le")
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_ELEMENT_TEXT = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}

# PDFium writes U+FFFE for a hyphen that splits a word at a line end.
_REMOVED = re.compile("\r(?=\n)|[\ufffe\0]")

Box = tuple[float, float, float, float]  # left, bottom, right, top: points from the lower left corner of the page
Pages = tuple[str, Iterable[str]]  # the title in the metadata, and the text of each page


class _UnreadableError(Exception):
    """Error for a file that cannot be read, counted under ``kind``; its message states problem and remedy."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


def _records(path: Path) -> Iterator[RawRecord | Rejected]:
    with open_raw(path) as file:
        size = os.fstat(file.fileno()).st_size
    yield RawRecord(str(path), path, size)


def convert(name: str, raw: RawRecord) -> Outcome:
    """Convert the file at ``raw.data``, in a format of ``PAGED``, to a document; ``Rejected`` if it cannot be read."""
    try:
        with open_raw(raw.data) as file:
            if os.fstat(file.fileno()).st_size > _FILE_LIMIT:
                raise _UnreadableError("too_large", f"the file is larger than {_FILE_LIMIT >> 20} MiB; split it")
            data = file.read()  # read(n) would allocate n bytes up front, which count against the memory limit
        title, pages = _READERS[name](data)
        title = " ".join(title.split())
        if title.lower() in _PLACEHOLDER_TITLES:
            title = printable_path(raw.data.stem).replace("_", " ")
        outcome = _join_pages(title, pages, raw.place)
        if name == PDF and isinstance(outcome, Document) and (empty := _empty_pages(outcome)):
            outcome = replace(outcome, omitted=((PAGE_WITHOUT_TEXT, empty),))
        # Word files do not record page breaks.
        return replace(outcome, pages=()) if name == "docx" and isinstance(outcome, Document) else outcome
    except _UnreadableError as error:
        return Rejected(raw.place, str(error), kind=error.kind)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # the libraries raise any exception for broken files
        problem = f"the {name} file cannot be read ({type(error).__name__}: {str(error)[:200]}); save it again"
        return Rejected(raw.place, problem.encode(errors="backslashreplace").decode(), kind=f"broken_{name}")


def _join_pages(title: str, pages: Iterable[str], place: str) -> Outcome:
    texts: list[str] = []
    remaining = LINE_LIMIT
    for page in pages:
        texts.append(page.strip())
        remaining -= len(page)
        _check_remaining(remaining)
    if not any(texts):
        raise _UnreadableError("no_text", "no page contains text; run OCR on scanned pages first")
    parts = [text and text + _PARAGRAPH for text in texts]
    outcome = parse_document_or_drop({"title": title, "text": "".join(parts).strip()}, place)
    starts = accumulate(map(len, parts[:-1]), initial=0)
    return replace(outcome, pages=tuple(starts)) if isinstance(outcome, Document) else outcome


def _empty_pages(document: Document) -> int:
    ends = (*document.pages[1:], len(document.text))
    return sum(start >= end for start, end in zip(document.pages, ends, strict=True))


def _check_remaining(remaining: int) -> None:
    """Raise ``_UnreadableError`` if more than ``LINE_LIMIT`` characters were read."""
    if remaining < 0:
        raise _UnreadableError("too_large", f"the text is longer than {LINE_LIMIT >> 20} Mi characters; split the file")


def read_pdf(data: bytes) -> Pages:
    """Return the title of a PDF and the text of each page."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error) or "security" in str(error):
            raise _UnreadableError("encrypted", "the PDF needs a password; save it without one") from None
        raise

    def texts() -> Iterator[str]:
        with document:
            for page in document:
                text = page.get_textpage().get_text_range()
                page.close()
                yield _REMOVED.sub("", text)

    return document.get_metadata_value("Title"), texts()


def bounding_boxes(path: Path, start: int, end: int) -> Iterator[tuple[int, Box]]:
    """Yield the bounding boxes of the characters ``start`` to ``end`` of a PDF's text.

    A snapshot does not store them: locating a few citations costs less than recording every character.

    Yields:
        (page number from 1, box), at least one for each line.
    """
    import pypdfium2

    with open_raw(path) as file, pypdfium2.PdfDocument(file.read()) as document:
        page_start = 0  # in characters of the document's text
        for number, page in enumerate(document, start=1):
            textpage = page.get_textpage()
            text = textpage.get_text_range()
            units = [*accumulate((len(c.encode("utf-16-le", "surrogatepass")) // 2 for c in text), initial=0)]
            removed = {position for match in _REMOVED.finditer(text) for position in range(*match.span())}
            positions = [position for position in range(len(text)) if position not in removed]
            remaining = "".join(text[position] for position in positions)
            first = len(remaining) - len(remaining.lstrip())
            positions = positions[first : first + len(remaining.strip())]
            cited = positions[max(0, start - page_start) : max(0, end - page_start)]
            if cited:
                character = pypdfium2.raw.FPDFText_GetCharIndexFromTextIndex
                low, high = (character(textpage.raw, units[position]) for position in (cited[0], cited[-1]))
                for rectangle in range(textpage.count_rects(low, high - low + 1)):
                    yield number, textpage.get_rect(rectangle)
            page_start += len(positions) + len(_PARAGRAPH) if positions else 0
            page.close()
            if page_start >= end:
                return


def _open_office(data: bytes) -> BytesIO:
    """Check that an Office file is a ZIP whose declared size is within the limits; the memory limit covers the rest."""
    if data.startswith(_OLE_MAGIC) and _ENCRYPTED_STREAM in data:
        raise _UnreadableError("encrypted", "the file needs a password; save it without one")
    try:
        parts = ZipFile(BytesIO(data)).infolist()
    except BadZipFile:
        raise ValueError("not a file of Office 2007 or later") from None
    xml = sum(part.file_size for part in parts if part.filename.lower().endswith((".xml", ".rels")))
    if xml > _XML_LIMIT or sum(part.file_size for part in parts) > _UNPACKED_LIMIT:
        raise _UnreadableError(
            "too_large",
            f"the file unpacks to more than {_XML_LIMIT >> 20} MiB of text or {_UNPACKED_LIMIT >> 20} MiB; split it",
        )
    return BytesIO(data)


def read_docx(data: bytes) -> Pages:
    """Return the title of a Word file and its text as one page."""
    import docx

    document = docx.Document(_open_office(data))
    text = _PARAGRAPH.join(_paragraphs(document.element.body, _WORD))
    return document.core_properties.title, [text]


def read_pptx(data: bytes) -> Pages:
    """Return the title of a PowerPoint file and the text of each slide with its notes."""
    import pptx

    slides = pptx.Presentation(_open_office(data))

    def texts() -> Iterator[str]:
        for slide in slides.slides:
            paragraphs = [*_paragraphs(slide.element, _DRAWING)]
            if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame):
                paragraphs.append(notes.text)
            yield _PARAGRAPH.join(paragraphs)

    return slides.core_properties.title, texts()


def _paragraphs(root: Any, namespace: str) -> Iterator[str]:
    """Yield the paragraphs in document order, including tables, text boxes and content controls, without fields."""
    paragraph_tag, text_tag, run_tag = f"{namespace}p", f"{namespace}t", f"{namespace}r"
    replacements = {f"{namespace}{name}": text for name, text in _ELEMENT_TEXT.items()}
    for paragraph in root.iter(paragraph_tag):
        if next(paragraph.iterancestors(_FALLBACK), None) is not None:
            continue  # a duplicate for old programs
        text = "".join(
            replacements.get(node.tag) or node.text or ""
            for node in paragraph.iter(text_tag, *replacements)
            if node.getparent().tag in (run_tag, paragraph_tag) and next(node.iterancestors(paragraph_tag)) is paragraph
        ).strip()
        if text:
            yield text


def read_xlsx(data: bytes) -> Pages:
    """Return the title of an Excel file and the text of each sheet."""
    import openpyxl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # openpyxl warns of parts without text
        book = openpyxl.load_workbook(_open_office(data), read_only=True, data_only=True)
    return book.properties.title or "", _sheets(book)


def _sheets(book: Any) -> Iterator[str]:
    """Yield each sheet: its name, then its rows with tabs between the cells.

    Characters are counted before a row is joined, because many cells may share one long string.
    """
    cells, remaining = 0, LINE_LIMIT
    for sheet in book.worksheets:
        sheet.reset_dimensions()  # the declared dimensions may be wrong
        rows = []
        for row in sheet.iter_rows(values_only=True):
            cells += 1 + len(row)
            if cells > _CELL_LIMIT:
                raise _UnreadableError("too_large", f"the workbook has more than {_CELL_LIMIT:,} cells; split it")
            texts = [*map(_format_cell, row)]
            remaining -= sum(map(len, texts))
            _check_remaining(remaining)
            if line := "\t".join(texts).strip():
                rows.append(line)
        yield _PARAGRAPH.join([sheet.title, *rows]) if rows else ""


def _format_cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case datetime() if value.time() == time():
            return value.date().isoformat()
        case date() | time():
            return value.isoformat()
        case float() if value.is_integer():
            return str(int(value))
    return str(value)


_READERS: dict[str, Callable[[bytes], Pages]] = {PDF: read_pdf, "docx": read_docx, "pptx": read_pptx, "xlsx": read_xlsx}
_PACKAGES = {PDF: "pypdfium2", "docx": "docx", "pptx": "pptx", "xlsx": "openpyxl"}
PAGED = tuple(
    Format(name, _records, partial(convert_in_child, __name__, name), is_document=True, needs=_PACKAGES[name])
    for name in _READERS
)
