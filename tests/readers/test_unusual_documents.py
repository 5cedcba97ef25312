"""Unusual pages and files: what is read of them, what is counted, and by which reason they are refused."""

import lzma
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_documents import outcomes_of, read_document

from realmops.readers.contents import format_table
from realmops.readers.documents import Document, Outcome
from realmops.readers.html import decode_page, flow_text, page_to_document

PROSE = "The smithy of Orrel shoes the horses of nine farms and mends the bell of the chapel each winter. " * 4


def write_and_read(path: Path, content: str | bytes) -> list[Outcome]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return outcomes_of(path)


def main_text(part: str) -> Document:
    """A page with prose around ``part``; the text of its part alone."""
    page = (
        f"<html><head><title>Smithy</title></head><body><main><p>{PROSE}</p>{part}<p>{PROSE}</p></main></body></html>"
    )
    document = page_to_document(page, "a.html")
    assert isinstance(document, Document), document
    return document


def part_text(part: str) -> str:
    text = main_text(part).text.removeprefix(PROSE.strip()).removesuffix(PROSE.strip())
    assert "smithy" not in text
    return text.strip("\n")


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("<table><tr><td>Nails</td><td>3 | 4</td></tr><tr><td>Rod</td><td></td></tr></table>", "Nails\t3 | 4\nRod"),
        ("<table><caption>Wares</caption><tr><td>Nails</td><td>3</td></tr></table>", "Wares\nNails\t3"),
        ("<table><tr><td>Iron</td><td><ul><li>rod<li><a href=x>bar</a></ul></td></tr></table>", "Iron\trod bar"),
        ("<figure><img src=a.png><figcaption>The anvil.</figcaption></figure>", "The anvil."),
        ("<p>Heat <math><mi>t</mi><mo>=</mo><mn>9</mn><annotation>t=9</annotation></math> ends.</p>", "Heat t=9 ends."),
        ("<details><summary>Hours</summary><p>From six.</p></details>", "Hours\nFrom six."),
        ("<p>One<br>two</p>", "One\ntwo"),
    ],
)  # fmt: skip
def test_parts_of_the_main_text_are_read(part: str, text: str) -> None:
    assert part_text(part) == text


def test_a_page_in_one_form_keeps_its_tables() -> None:
    table = "<table><tr><td>Nails</td><td>3 marks</td></tr></table>"
    page = f"<html><body><form><p>{PROSE}</p><p>{PROSE}</p>{table}</form></body></html>"
    document = page_to_document(page, "a.html")
    assert isinstance(document, Document)
    assert "Nails\t3 marks" in document.text


def test_objects_in_the_main_text_are_counted() -> None:
    parts = "<object data=a.swf>old</object><video src=b.webm></video><footer><video src=c.webm></video></footer>"
    assert main_text(parts).omitted == (("embedded object", 2),)


CELL = st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=8)
TABLE = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(CELL, min_size=width, max_size=width), min_size=1, max_size=4)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(TABLE, st.lists(CELL, min_size=1, max_size=4)), min_size=1, max_size=3))
def test_every_word_of_tables_and_paragraphs_of_a_page_is_read_in_order(
    blocks: list[list[str] | list[list[str]]],
) -> None:
    page, words = "", []
    for number, block in enumerate(blocks):  # a long block like the one before it is left out
        if isinstance(block[0], str):
            page += f"<p>{number} {' '.join(block)} {PROSE}</p>"
            words += [str(number), *block, *PROSE.split()]
        else:
            block = [[str(number)], *block]
            rows = ["".join(f"<td>{cell}</td>" for cell in row) for row in block]
            page += f"<table><tr>{'</tr><tr>'.join(rows)}</tr></table>"
            words += [cell for row in block for cell in row]
    assert main_text(page).text.split() == [*PROSE.split(), *words, *PROSE.split()]


@pytest.mark.parametrize("label", ["iso-2022-kr", "hz-gb-2312", "replacement"])
def test_encodings_that_browsers_refuse_fall_back_to_the_next(label: str) -> None:
    assert decode_page("“Amboß”".encode("cp1252"), label) == "“Amboß”"


def test_an_xml_declaration_names_the_encoding() -> None:
    page = "<?xml version='1.0' encoding='windows-1251'?>\n<html><p>Кузница</p></html>"
    assert decode_page(page.encode("cp1251"), None) == page


# Text and Markdown


@pytest.mark.parametrize(
    "data", [lzma.compress(PROSE.encode()), b"\x89PNG\r\n\x1a\n\0\0", b"a\0b c", "Я и ты".encode("utf-16-le")]
)
def test_binary_data_is_named(tmp_path: Path, data: bytes) -> None:
    [rejected] = write_and_read(tmp_path / "a.txt", data)
    assert getattr(rejected, "problem", "").startswith("binary data that begins with b'")


def test_text_in_another_encoding_is_no_binary_data(tmp_path: Path) -> None:
    [rejected] = write_and_read(tmp_path / "a.txt", "Amboß".encode("cp1252"))
    assert getattr(rejected, "problem", "") == "invalid UTF-8 at byte 4; save the file as UTF-8"


def test_markdown_of_react_keeps_the_imports_of_its_code(tmp_path: Path) -> None:
    source = "---\ntitle: Forge\n---\n\nimport A from 'a'\nexport const b = 1\n\nText.\n\n```\nimport this\n```\n"
    document = read_document(tmp_path / "a.mdx", source)
    assert (document.title, document.text) == ("Forge", "Text.\n\nimport this")
    assert read_document(tmp_path / "a.md", "import duties fall.\n").text == "import duties fall."


def test_a_title_that_is_a_list_is_none(tmp_path: Path) -> None:
    assert read_document(tmp_path / "smithy_rules.md", "---\ntitle: [a, b]\n---\nText.\n").title == "smithy rules"


# reStructuredText


def test_rows_and_fields_of_restructured_text_are_read(tmp_path: Path) -> None:
    source = (
        "Smithy\n======\n\n:Author: Orrel\n\nFirst.\n\n:param heat: degrees\n\n"
        "=====  =====\nWare   Price\n=====  =====\nNails  3 m\nRod    5 m\n=====  =====\n\n"
        ".. csv-table:: Hours\n\n   Monday, 6\n\n.. image:: a.png\n   :alt: Anvil\n"
    )
    document = read_document(tmp_path / "a.rst", source)
    assert document.text == (
        "First.\n\nparam heat\n\ndegrees\n\nWare\tPrice\nNails\t3 m\nRod\t5 m\n\nHours\n\nMonday\t6"
    )
    assert document.omitted == (("image", 1),)


@settings(max_examples=40, deadline=None)
@given(TABLE)
def test_every_cell_of_a_table_of_restructured_text_is_read(
    tmp_path_factory: pytest.TempPathFactory, table: list[list[str]]
) -> None:
    rows = "".join(f"   * - {row}\n" for row in map("\n     - ".join, table))
    document = read_document(tmp_path_factory.mktemp("rst") / "a.rst", f"Text.\n\n.. list-table::\n\n{rows}")
    assert document.text == f"Text.\n\n{format_table(table)}"


# JSON


def test_text_after_a_list_is_not_lost(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.json:item 2: text follows the list.*put all objects into one list"):
        write_and_read(tmp_path / "a.json", '[{"text": "x"}]\n[{"text": "y"}]\n')
    assert len(write_and_read(tmp_path / "a.json", '[{"text": "x"}]\n \n')) == 1


def test_deep_equations_of_a_fragment_are_read_once() -> None:
    import lxml.html

    tree = lxml.html.fromstring("<p>v <math><semantics><mi>v</mi><annotation>v</annotation></semantics></math></p>")
    assert flow_text(tree)[0] == "v v"
