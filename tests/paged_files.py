"""Small files with pages, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any
from zipfile import ZipFile


def pdf(*pages: str, title: str = "", password: str = "") -> bytes:
    """Return a PDF with these pages; a page without text has a grey square."""
    from reportlab.pdfgen.canvas import Canvas

    file = BytesIO()
    canvas = Canvas(file, invariant=1, pageCompression=0, encrypt=password or None)
    canvas.setTitle(title)
    for page in pages:
        if page:
            text = canvas.beginText(72, 720)
            text.textLines(page, trim=0)
            canvas.drawText(text)
        else:
            canvas.rect(72, 72, 400, 400, fill=1)
        canvas.showPage()
    canvas.save()
    return file.getvalue()


def drawn_forms(times: int, depth: int) -> bytes:
    """Return a PDF whose page draws a form ``times`` times, which draws another one as often; the last has text."""
    use = b"/F Do " * times
    fonts = b"<< /Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    text = b"BT /F 12 Tf 72 720 Td (%s) Tj ET" % (b"word " * 200)
    forms = [(b"<< /XObject << /F %d 0 R >> >>" % (5 + n), use) for n in range(1, depth)] + [(fonts, text)]
    head = b"<< /Type /XObject /Subtype /Form /BBox [0 0 612 792] /Resources %s /Length %d >>\nstream\n%s\nendstream"
    place = b"/MediaBox [0 0 612 792] /Resources << /XObject << /F 5 0 R >> >>"
    page = b"<< /Type /Page /Parent 2 0 R %s /Contents 4 0 R >>" % place
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Count 1 /Kids [3 0 R] >>", page]
    objects += [b"<< /Length %d >>\nstream\n%s\nendstream" % (len(use), use)]
    objects += [head % (resources, len(drawn), drawn) for resources, drawn in forms]
    body = b"".join(b"%d 0 obj\n%s\nendobj\n" % (number, one) for number, one in enumerate(objects, start=1))
    return b"%PDF-1.4\n" + body + b"trailer << /Root 1 0 R >>\n%%EOF\n"


def docx(*paragraphs: str, cells: Sequence[str] = (), title: str = "") -> bytes:
    """Return a Word document; ``cells`` is a row of a table below the paragraphs."""
    from docx import Document

    document = Document()
    document.core_properties.title = title
    for paragraph in paragraphs:
        document.add_paragraph(paragraph)
    if cells:
        table = document.add_table(1, len(cells))
        for cell, text in zip(table.rows[0].cells, cells, strict=True):
            cell.text = text
    return _saved(document)


def pptx(*slides: str, notes: str = "") -> bytes:
    """Return a presentation with a text box on each slide."""
    from pptx import Presentation

    presentation = Presentation()
    for text in slides:
        slide = presentation.slides.add_slide(presentation.slide_layouts[6])
        slide.shapes.add_textbox(0, 0, 1000, 1000).text_frame.text = text
    if notes:
        slide.notes_slide.notes_text_frame.text = notes
    return _saved(presentation)


def xlsx(sheets: Mapping[str, Sequence[Sequence[Any]]]) -> bytes:
    """Return a workbook: the rows of each sheet by its name."""
    from xlsxwriter import Workbook

    file = BytesIO()
    with Workbook(file, {"constant_memory": True}) as book:
        for name, rows in sheets.items():
            sheet = book.add_worksheet(name)
            for number, row in enumerate(rows):
                sheet.write_row(number, 0, row)
    return file.getvalue()


def epub(text: str) -> bytes:
    """Return a book of one chapter; ``text`` is XML."""
    file = BytesIO()
    with ZipFile(file, "w") as book:
        book.writestr("META-INF/container.xml", '<c xmlns="x"><rootfile full-path="b.opf"/></c>')
        parts = '<manifest><item id="1" href="a.xhtml"/></manifest><spine><itemref idref="1"/></spine>'
        book.writestr("b.opf", f'<p xmlns="x">{parts}</p>')
        book.writestr("a.xhtml", f"<html><body><p>{text}</p></body></html>")
    return file.getvalue()


def _saved(document: Any) -> bytes:
    file = BytesIO()
    document.save(file)
    return file.getvalue()
