"""What Office files, PDFs, books, messages and notebooks show is text, once; what is left out is counted."""

from __future__ import annotations

import json
import zipfile
from email.message import EmailMessage
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_files import docx, pdf, pptx, xlsx

from realmops.readers.documents import Document, RawRecord
from realmops.readers.paged import convert

W = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
IMAGE = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c626001000000050001a5f645400000000049454e44ae426082"
)


def read(folder: Path, name: str, data: bytes) -> Any:
    path = folder / name
    path.write_bytes(data)
    outcome = convert(path.suffix[1:], RawRecord(str(path), path, 0))
    assert isinstance(outcome, Document), outcome
    return outcome


def changed(data: bytes, part: str = "", old: str = "", new: str = "", **added: str) -> bytes:
    """An Office file with text of one part replaced, and parts added (names without folder, in word/)."""
    whole, file = zipfile.ZipFile(BytesIO(data)), BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for name in whole.namelist():
            content = whole.read(name).decode("utf-8", "surrogateescape")
            if name == part:
                assert old in content
                content = content.replace(old, new, 1)
            if added and name == "word/_rels/document.xml.rels":
                base = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
                links = [f'<Relationship Id="n{kind}" Type="{base}/{kind}" Target="{kind}.xml"/>' for kind in added]
                content = content.replace("</Relationships>", "".join(links) + "</Relationships>")
            out.writestr(name, content.encode("utf-8", "surrogateescape"))
        for name, text in added.items():
            out.writestr(f"word/{name}.xml", text)
    return file.getvalue()


def word(body: str, **added: str) -> bytes:
    """A Word file with XML before its only paragraph, "End."."""
    new = f"<w:body {W}>{body}"
    return changed(docx("End."), "word/document.xml", "<w:body>", new, **added)


def run(text: str) -> str:
    return f"<w:r><w:t>{text}</w:t></w:r>"


@pytest.mark.parametrize(
    ("body", "text", "omitted"),
    [
        (f"<w:p>{run('E is ')}<m:oMath><m:r><m:t>mc</m:t></m:r></m:oMath>{run('.')}</w:p>", "E is mc.", {}),
        (
            f"<w:p><w:moveFrom>{run('moved')}</w:moveFrom></w:p><w:p><w:moveTo>{run('moved')}</w:moveTo></w:p>",
            "moved",
            {},
        ),
        (f"<w:p><w:del>{run('gone')}</w:del>{run('kept')}</w:p>", "kept", {}),
        (
            f"<w:p><w:r><w:ruby><w:rt>{run('aid')}</w:rt><w:rubyBase>{run('base')}</w:rubyBase></w:ruby></w:r></w:p>",
            "base",
            {},
        ),
        (
            f"<w:p><w:r><w:rPr><w:vanish/></w:rPr><w:t>unseen</w:t></w:r>{run('seen')}</w:p>",
            "seen",
            {"hidden text": 1},
        ),
        (f'<w:p>{run("a")}<w:r><w:sym w:font="Wingdings" w:char="F04A"/></w:r></w:p>', "a", {"symbol": 1}),
    ],
    ids=["equation", "moved", "deleted", "ruby", "hidden", "symbol"],
)
def test_a_word_file_shows_each_text_once(tmp_path: Path, body: str, text: str, omitted: dict[str, int]) -> None:
    document = read(tmp_path, "a.docx", word(body))
    assert (document.text, dict(document.omitted)) == (f"{text}\n\nEnd.", omitted)


def test_notes_follow_the_body_and_comments_are_counted(tmp_path: Path) -> None:
    space = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    line = f'<w:footnote w:type="separator"><w:p>{run("line")}</w:p></w:footnote>'
    notes = f"<w:footnotes {space}>{line}<w:footnote><w:p>{run('A note.')}</w:p></w:footnote></w:footnotes>"
    comments = f"<w:comments {space}><w:comment><w:p>{run('Why?')}</w:p></w:comment></w:comments>"
    document = read(tmp_path, "a.docx", word("", footnotes=notes))
    assert document.text == "End.\n\nA note."
    assert dict(read(tmp_path, "b.docx", changed(word(""), comments=comments)).omitted) == {"comment": 1}


def test_a_strict_file_is_read_like_a_transitional_one(tmp_path: Path) -> None:
    for name, data in (
        ("a.docx", docx("One.", cells=("a", "b"))),
        ("a.pptx", pptx("One.")),
        ("a.xlsx", xlsx({"S": [["One."]]})),
    ):
        strict, whole = BytesIO(), zipfile.ZipFile(BytesIO(data))
        with zipfile.ZipFile(strict, "w") as out:
            for part in whole.namelist():
                content = whole.read(part)
                for family in (
                    b"officeDocument",
                    b"wordprocessingml",
                    b"presentationml",
                    b"spreadsheetml",
                    b"drawingml",
                ):
                    new = b"http://purl.oclc.org/ooxml/" + family
                    content = content.replace(b"http://schemas.openxmlformats.org/" + family + b"/2006", new)
                out.writestr(part, content)
        assert read(tmp_path, name, strict.getvalue()).text == read(tmp_path, name, data).text != ""


def test_slides_show_the_values_of_charts_and_count_pictures(tmp_path: Path) -> None:
    from pptx import Presentation
    from pptx.chart.data import CategoryChartData
    from pptx.enum.chart import XL_CHART_TYPE

    deck, values = Presentation(), CategoryChartData()
    values.categories = ["spring", "autumn"]
    values.add_series("eels", (4.5, 12))
    slide = deck.slides.add_slide(deck.slide_layouts[6])
    slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, 0, 0, 9999, 9999, values)
    slide.shapes.add_picture(BytesIO(IMAGE), 0, 0)
    file = BytesIO()
    deck.save(file)
    document = read(tmp_path, "a.pptx", file.getvalue())
    assert document.text == "eels\nspring\t4.5\nautumn\t12"
    assert dict(document.omitted) == {"image": 1}


def test_hidden_slides_sheets_rows_and_columns_are_left_out_and_counted(tmp_path: Path) -> None:
    hidden = changed(pptx("Seen.", "Unseen.", "End."), "ppt/slides/slide2.xml", "<p:sld ", '<p:sld show="0" ')
    slides = read(tmp_path, "a.pptx", hidden)
    assert (slides.text, slides.pages, slides.omitted) == ("Seen.\n\nEnd.", (0, 7, 7), (("hidden text", 1),))
    book = xlsx({"S": [["a", "x", "b"], ["y"], ["c", "", "d"]], "H": [["z"]]})
    state = 'name="H" sheetId="2" state="%s"'
    book = changed(book, "xl/workbook.xml", state % "visible", state % "hidden")
    part = "xl/worksheets/sheet1.xml"
    book = changed(book, part, "<sheetData>", '<cols><col min="2" max="2" hidden="1"/></cols><sheetData>')
    book = changed(book, part, '<row r="2"', '<row r="2" hidden="1"')
    sheets = read(tmp_path, "a.xlsx", book)
    assert (sheets.text, sheets.omitted) == ("S\n\na\tb\nc\td", (("hidden text", 3),))


def test_links_have_their_labels_and_formulas_without_value_are_counted(tmp_path: Path) -> None:
    rows = [["total", "=SUM(A2:A3)"], ["guide", '=HYPERLINK("https://example.org","rope guide")'], [1, 2]]
    document = read(tmp_path, "a.xlsx", xlsx({"S": rows}))
    assert document.text == "S\n\ntotal\n\nguide\trope guide\n1\t2"
    assert dict(document.omitted) == {"formula without value": 1}


def test_the_values_of_a_form_are_text(tmp_path: Path) -> None:
    from reportlab.pdfgen import canvas

    file = BytesIO()
    page = canvas.Canvas(file)
    for shift in (0, 0.3):  # bold, drawn twice
        page.drawString(72 + shift, 720, "Name of the owner")
    page.acroForm.textfield(name="n", x=72, y=600, value="Olga Vind", width=100, height=20)
    page.textAnnotation("Who is she?", (300, 300, 320, 320))
    page.save()
    document = read(tmp_path, "a.pdf", file.getvalue())
    assert document.text == "Name of the owner\nOlga Vind"
    assert dict(document.omitted) == {"annotation": 1}


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("of inter-\nnational fame", "of international fame"),
        ("an Anglo-\nSaxon word", "an Anglo-Saxon word"),
        ("COVID-\n19 in state-of-the-\nart pre-\nand more; the", "COVID-19 in state-of-the-art pre-and more; the"),
        ("a sea-\nside and sea-side", "a sea-side and sea-side"),
        ("a well-\nknown man", "a well-known man"),
    ],
)
def test_a_compound_keeps_its_hyphen_at_a_line_end(tmp_path: Path, lines: str, text: str) -> None:
    assert read(tmp_path, "a.pdf", pdf(lines)).text == text


@pytest.mark.parametrize(
    "title",
    ["(anonymous)", "(unspecified)", "Microsoft Word - Draft.doc", "PowerPoint Presentation", "Slide 1", "x.docx"],
)
def test_a_title_that_a_program_wrote_is_none(tmp_path: Path, title: str) -> None:
    escaped = title.replace("(", r"\(").replace(")", r"\)")
    assert read(tmp_path, "ferry.pdf", pdf("Text.", title=escaped)).title == "ferry"
    assert read(tmp_path, "b.docx", docx("x", title=title)).title == "b"
    assert read(tmp_path, "b.docx", docx("x", title="Slides of 1931")).title == "Slides of 1931"


def test_a_book_is_read_in_the_order_of_its_chapters(tmp_path: Path) -> None:
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as book:
        book.writestr("META-INF/container.xml", '<c xmlns="x"><rootfile full-path="o/b.opf"/></c>')
        items = '<item id="1" href="one%20a.xhtml"/><item id="2" href="two.xhtml"/>'
        order = '<itemref idref="2"/><itemref idref="1"/>'
        title = '<metadata><d:title xmlns:d="http://purl.org/dc/elements/1.1/">Eels</d:title></metadata>'
        book.writestr("o/b.opf", f'<p xmlns="x">{title}<manifest>{items}</manifest><spine>{order}</spine></p>')
        book.writestr("o/one a.xhtml", "<html><body><p>Last.</p><img alt='eel'/></body></html>")
        book.writestr("o/two.xhtml", "<html><body><h1>First</h1><p>Caf\u00e9.</p></body></html>")
    document = read(tmp_path, "a.epub", file.getvalue())
    assert (document.title, document.text, document.pages) == ("Eels", "First\n\nCaf\u00e9.\n\nLast.", ())
    assert dict(document.omitted) == {"image": 1}


def test_a_message_has_its_best_text_and_counts_attachments(tmp_path: Path) -> None:
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = "Caf\u00e9", "Olga Vind <o@example.org>", "b@example.org"
    message.set_content("Plain.")
    message.add_alternative("<p>The ferry <b>leaves</b> at nine.</p>", subtype="html")
    message.add_attachment(b"x", maintype="application", subtype="pdf", filename="a.pdf")
    document = read(tmp_path, "a.eml", bytes(message))
    assert document.title == "Caf\u00e9"
    assert document.text == "From: Olga Vind <o@example.org>\nTo: b@example.org\n\nThe ferry leaves at nine."
    assert dict(document.omitted) == {"attachment": 1}


def test_a_notebook_has_text_code_and_results(tmp_path: Path) -> None:
    shown = [{"data": {"text/plain": ["7"]}}, {"data": {"image/png": "", "text/plain": "<Figure>"}}]
    cells = [
        {"cell_type": "markdown", "source": ["# Eels\n", "They **swim**."]},
        {"cell_type": "code", "source": "3 + 4", "outputs": shown},
    ]
    document = read(tmp_path, "a.ipynb", json.dumps({"cells": cells}).encode())
    assert (document.title, document.text) == ("Eels", "They swim.\n\n3 + 4\n\n7\n\n<Figure>")
    assert dict(document.omitted) == {"image": 1}


LETTERS = st.text(st.characters(categories=["L", "N"], exclude_characters="\ufffe"), min_size=1, max_size=12)


@settings(max_examples=15, deadline=None)
@given(words=st.lists(LETTERS, min_size=1, max_size=5))
def test_the_characters_of_every_paragraph_come_out(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    folder, expected = tmp_path_factory.mktemp("p"), "\n\n".join(words)
    message = EmailMessage()
    message["Subject"] = "x"
    message.set_content(expected)
    notebook = json.dumps({"cells": [{"cell_type": "code", "source": word} for word in words]})
    made = {
        "a.docx": docx(*words),
        "a.pptx": pptx(*words),
        "a.xlsx": xlsx({"S": [[f"{word}."] for word in words]}),
        "a.eml": bytes(message),
        "a.ipynb": notebook.encode(),
    }
    for name, data in made.items():
        text = read(folder, name, data).text
        assert text.removeprefix("S\n\n").replace(".", "") == expected, name
