"""Files that are one document with pages each: PDF (by pypdfium2), Word, PowerPoint and Excel.

Slides and sheets are pages too. A file goes to a worker as its path, so that many large ones are not in memory at
once, and is read in a child process with a memory limit (``limited``). Nothing is unpacked to the disk, and no part of
a file can name another file to read.
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

from realmops.corpus.documents import LINE_LIMIT, Document, Format, Outcome, Raw, Rejected, document_or_dropped, shown
from realmops.corpus.formats.limited import convert_in_child
from realmops.text.compressed import open_plain

PDF = "pdf"  # the name of the format
_FILE_LIMIT = 512 << 20
_UNPACKED_LIMIT = 512 << 20  # of an Office file with its pictures
_XML_LIMIT = 64 << 20  # of its text, which takes some ten times as much memory
_CELL_LIMIT = 10_000_000  # of a workbook, empty ones between others too
_PARAGRAPH = "\n\n"
_NO_TITLES = {"", "untitled", "powerpoint presentation", "word document"}  # what programs write by themselves
_OLD_OFFICE = b"\xd0\xcf\x11\xe0"  # what Office puts around a file with a password, too
_PASSWORD = "EncryptedPackage".encode("utf-16-le")
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_SIGNS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}

_LEFT_OUT = re.compile(
    "\r(?=\n)|[\ufffe\0]"
)  # U+FFFE is PDFium's for a hyphen at which a word goes on in the next line

Box = tuple[float, float, float, float]  # left, bottom, right, top in points from the lower left corner of the page
Pages = tuple[str, Iterable[str]]  # the title that the file gives itself, and the text of each page


class _Unread(Exception):
    """Why a file cannot be read: the kind that it is counted under, and what to do."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(problem)
        self.kind = kind


def _records(path: Path) -> Iterator[Raw | Rejected]:
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
    yield Raw(str(path), path, size)


def convert(name: str, raw: Raw) -> Outcome:
    """Return the document of a file in a format of ``PAGED``; Rejected with the kind of what cannot be read."""
    try:
        with open_plain(raw.data) as file:
            if os.fstat(file.fileno()).st_size > _FILE_LIMIT:
                raise _Unread("too_large", f"the file is longer than {_FILE_LIMIT >> 20} MiB; split it")
            data = file.read()  # a number would be taken from the memory limit before it is read
        title, pages = _READERS[name](data)
        title = " ".join(title.split())
        if title.lower() in _NO_TITLES:
            title = shown(raw.data.stem).replace("_", " ")
        found = _document(title, pages, raw.place)
        # Word stores nowhere at which pages its text ends up.
        return replace(found, pages=()) if name == "docx" and isinstance(found, Document) else found
    except _Unread as error:
        return Rejected(raw.place, str(error), kind=error.kind)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # the libraries promise nothing about broken files
        problem = f"the {name} file cannot be read ({type(error).__name__}: {str(error)[:200]}); save it again"
        return Rejected(raw.place, problem.encode(errors="backslashreplace").decode(), kind=f"broken_{name}")


def _document(title: str, pages: Iterable[str], place: str) -> Outcome:
    texts: list[str] = []
    room = LINE_LIMIT
    for page in pages:
        texts.append(page.strip())
        room -= len(page)
        _check_room(room)
    if not any(texts):
        raise _Unread("no_text", "no page holds text; of scanned pages make text first (OCR)")
    parts = [text and text + _PARAGRAPH for text in texts]
    outcome = document_or_dropped({"title": title, "text": "".join(parts).strip()}, place)
    starts = accumulate(map(len, parts[:-1]), initial=0)
    return replace(outcome, pages=tuple(starts)) if isinstance(outcome, Document) else outcome


def _check_room(room: int) -> None:
    """Raise ``_Unread`` where less than no characters are left of ``LINE_LIMIT``."""
    if room < 0:
        raise _Unread("too_large", f"the text is longer than {LINE_LIMIT >> 20} Mi characters; split the file")


def read_pdf(data: bytes) -> Pages:
    """Return the title of a PDF and the texts of its pages."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error) or "security" in str(error):
            raise _Unread("encrypted", "the PDF needs a password; save it without one") from None
        raise

    def texts() -> Iterator[str]:
        with document:
            for page in document:
                text = page.get_textpage().get_text_range()
                page.close()
                yield _LEFT_OUT.sub("", text)

    return document.get_metadata_value("Title"), texts()


def boxes(path: Path, start: int, end: int) -> Iterator[tuple[int, Box]]:
    """Where characters of a PDF's text stand: pages, from 1, and rectangles on them, one or more for each line.

    They are not kept in the snapshot: the few that are cited are found again in less time than all take to be read.
    """
    import pypdfium2

    with open_plain(path) as file, pypdfium2.PdfDocument(file.read()) as document:
        at = 0  # where the page begins in the text of the document
        for number, page in enumerate(document, start=1):
            textpage = page.get_textpage()
            text = textpage.get_text_range()
            units = [*accumulate((len(one.encode("utf-16-le", "surrogatepass")) // 2 for one in text), initial=0)]
            left_out = {place for match in _LEFT_OUT.finditer(text) for place in range(*match.span())}
            kept = [place for place in range(len(text)) if place not in left_out]
            shown = "".join(text[place] for place in kept)
            first = len(shown) - len(shown.lstrip())
            kept = kept[first : first + len(shown.strip())]
            wanted = kept[max(0, start - at) : max(0, end - at)]
            if wanted:
                character = pypdfium2.raw.FPDFText_GetCharIndexFromTextIndex
                low, high = (character(textpage.raw, units[place]) for place in (wanted[0], wanted[-1]))
                for rectangle in range(textpage.count_rects(low, high - low + 1)):
                    yield number, textpage.get_rect(rectangle)
            at += len(kept) + len(_PARAGRAPH) if kept else 0
            page.close()
            if at >= end:
                return


def _checked(data: bytes) -> BytesIO:
    """An Office file that is a ZIP of bearable size by what it declares; if it holds more, the memory limit ends it."""
    if data.startswith(_OLD_OFFICE) and _PASSWORD in data:
        raise _Unread("encrypted", "the file needs a password; save it without one")
    try:
        parts = ZipFile(BytesIO(data)).infolist()
    except BadZipFile:
        raise ValueError("this is no file of Office 2007 or later") from None
    xml = sum(part.file_size for part in parts if part.filename.lower().endswith((".xml", ".rels")))
    if xml > _XML_LIMIT or sum(part.file_size for part in parts) > _UNPACKED_LIMIT:
        raise _Unread(
            "too_large",
            f"the file unpacks to more than {_XML_LIMIT >> 20} MiB of text or {_UNPACKED_LIMIT >> 20} MiB; split it",
        )
    return BytesIO(data)


def read_docx(data: bytes) -> Pages:
    import docx

    document = docx.Document(_checked(data))
    text = _PARAGRAPH.join(_paragraphs(document.element.body, _WORD))
    return document.core_properties.title, [text]


def read_pptx(data: bytes) -> Pages:
    import pptx

    slides = pptx.Presentation(_checked(data))

    def texts() -> Iterator[str]:
        for slide in slides.slides:
            paragraphs = [*_paragraphs(slide.element, _DRAWING)]
            if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame):
                paragraphs.append(notes.text)
            yield _PARAGRAPH.join(paragraphs)

    return slides.core_properties.title, texts()


def _paragraphs(root: Any, space: str) -> Iterator[str]:
    """The paragraphs of XML in order, those of tables, text boxes and content controls too; fields are left out."""
    paragraph, text, run = f"{space}p", f"{space}t", f"{space}r"
    signs = {f"{space}{name}": sign for name, sign in _SIGNS.items()}
    for one in root.iter(paragraph):
        if next(one.iterancestors(_FALLBACK), None) is not None:
            continue  # the same again, for old programs
        said = "".join(
            signs.get(node.tag) or node.text or ""
            for node in one.iter(text, *signs)
            if node.getparent().tag in (run, paragraph) and next(node.iterancestors(paragraph)) is one
        ).strip()
        if said:
            yield said


def read_xlsx(data: bytes) -> Pages:
    import openpyxl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parts that hold no text
        book = openpyxl.load_workbook(_checked(data), read_only=True, data_only=True)
    return book.properties.title or "", _sheets(book)


def _sheets(book: Any) -> Iterator[str]:
    """Each sheet: its name, then its rows as cells between tabs.

    Many cells may share one string: characters are counted before a row is joined.
    """
    cells, room = 0, LINE_LIMIT
    for sheet in book.worksheets:
        sheet.reset_dimensions()  # what a file says of its size may be anything
        rows = []
        for row in sheet.iter_rows(values_only=True):
            cells += 1 + len(row)
            if cells > _CELL_LIMIT:
                raise _Unread("too_large", f"the workbook has more than {_CELL_LIMIT:,} cells; split it")
            texts = [*map(_cell, row)]
            room -= sum(map(len, texts))
            _check_room(room)
            if line := "\t".join(texts).strip():
                rows.append(line)
        yield _PARAGRAPH.join([sheet.title, *rows]) if rows else ""


def _cell(value: Any) -> str:
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
