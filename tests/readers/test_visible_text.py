"""What a person sees of a page, a text or a table is what is read, or it is counted as left out."""

import bz2
import gzip
import json
from collections import Counter
from pathlib import Path

import lxml.html
import pytest
from damaged_files import WRITERS
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_files import pdf
from read_documents import outcomes_of, read_document

from realmops.readers.contents import format_table
from realmops.readers.documents import Document, Rejected
from realmops.readers.html import decode_page, flow_text, page_to_document


def rows(path: Path, content: str | bytes) -> list[tuple[str, str]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [(one.title, one.text) for one in outcomes_of(path) if isinstance(one, Document)]


PROSE = "The windmill of Tarrow grinds oats for four villages and is open to visitors on each first Sunday. " * 4


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [
        ("gb2312", "gbk", "镕"),
        ("gbk", "gb18030", "\u3447"),
        ("Shift_JIS", "cp932", "①髙"),
        ("x-sjis", "cp932", "髙"),
        ("ks_c_5601-1987", "cp949", "똠"),
        ("euc-kr", "cp949", "펲"),
        ("big5", "big5hkscs", "嘅"),
        ("iso-8859-8-i", "iso8859-8", "שלום"),
        ("latin1", "cp1252", "“€”"),
        ("ISO-8859-9", "cp1254", "“ğ”"),
        ("tis-620", "cp874", "“ก”"),
        ("x-mac-cyrillic", "mac_cyrillic", "Паром"),
    ],
)
def test_encodings_have_the_names_that_browsers_know(label: str, codec: str, text: str) -> None:
    data = text.encode(codec)
    assert decode_page(data + b" x", label) == f"{text} x"
    assert decode_page(f"<meta charset={label}>".encode() + data, None).endswith(text)


def test_a_bad_byte_costs_one_character() -> None:
    page = "방앗간은 아홉 시".encode("cp949") + b"\xff" + "에 엽니다".encode("cp949")
    assert decode_page(page, "euc-kr") == "방앗간은 아홉 시\ufffd에 엽니다"


@pytest.mark.parametrize("hidden", ["<td hidden>x</td>", "<td style='display: none'><p>x</p></td>"])
def test_a_hidden_cell_costs_no_other_text(hidden: str) -> None:
    page = f"<table><tr>{hidden}<td>a</td><td><p>b</p><p>c</p></td></tr></table><pre hidden>x</pre><p>d   e</p><p>f</p>"
    assert flow_text(lxml.html.fromstring(f"<div>{page}</div>"))[0] == "a\tb c\n\nd e\n\nf"


@pytest.mark.parametrize("label", ["iso-2022-kr", "hz-gb-2312", "replacement"])
def test_encodings_that_browsers_refuse_fall_back_to_the_next(label: str) -> None:
    assert decode_page("“Amboß”".encode("cp1252"), label) == "“Amboß”"


WORD = st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=6)
WORDS = st.lists(WORD, min_size=1, max_size=4).map(" ".join)
INLINE = st.one_of(
    WORDS,
    WORDS.map(lambda text: f"<b>{text}</b> "),
    WORDS.map(lambda text: f"{text}<br>"),
    WORDS.map(lambda text: f"<span hidden>{text}</span> "),
    WORDS.map(lambda text: f"<img alt='{text}'> "),
    WORDS.map(lambda text: f"<!-- {text} --> "),
)
SEVERAL = st.lists(INLINE, min_size=1, max_size=3)
BLOCK = st.one_of(
    INLINE.map(lambda text: f"<p>{text}</p>"),
    INLINE.map(lambda text: f"<details><summary>{text}</summary>{text}</details>"),
    st.lists(INLINE, min_size=1, max_size=3).map(
        lambda cells: f"<table><tr><td>{'</td><td>'.join(cells)}</td></tr></table>"
    ),
    st.lists(INLINE, min_size=1, max_size=3).map(lambda items: f"<ul><li>{'</li><li>'.join(items)}</li></ul>"),
    WORDS.map(lambda text: f"<pre>{text}\n  {text}</pre>"),
)


def seen(node: lxml.html.HtmlElement) -> list[str]:
    """Words that a person sees, by another way: those of the text nodes outside of hidden elements."""
    nodes = node.xpath(".//text()[not(ancestor::*[@hidden])][not(parent::title)]")
    return [word for text in nodes for word in text.split()]


@settings(max_examples=150, deadline=None)
@given(st.lists(BLOCK, min_size=1, max_size=5))
def test_every_visible_word_is_read_and_the_others_are_counted(blocks: list[str]) -> None:
    tree = lxml.html.fromstring(f"<html><body>{''.join(blocks)}</body></html>")
    text, omitted = flow_text(tree)
    assert text.split() == seen(tree)
    assert omitted == Counter(image=len(tree.xpath("//img")), **{"hidden text": len(tree.xpath("//*[@hidden]"))})


def main_text(part: str) -> Document:
    """A page with prose around ``part``; the text of its part alone."""
    page = (
        f"<html><head><title>Smithy</title></head><body><main><p>{PROSE}</p>{part}<p>{PROSE}</p></main></body></html>"
    )
    document = page_to_document(page, "a.html", "a")
    assert isinstance(document, Document), document
    return document


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


@settings(max_examples=40, deadline=None)
@given(TABLE)
def test_every_cell_of_a_table_of_restructured_text_is_read(
    tmp_path_factory: pytest.TempPathFactory, table: list[list[str]]
) -> None:
    rows = "".join(f"   * - {row}\n" for row in map("\n     - ".join, table))
    document = read_document(tmp_path_factory.mktemp("rst") / "a.rst", f"Text.\n\n.. list-table::\n\n{rows}")
    assert document.text == f"Text.\n\n{format_table(table)}"


# Compressed files


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_compressed_files_are_known_by_their_first_bytes(tmp_path: Path, pack: object) -> None:
    assert callable(pack)
    suffix = {gzip.compress: ".gz", bz2.compress: ".bz2"}[pack]
    for name, content, text in (
        ("a.txt", "The mill stands.", "The mill stands."),
        ("a.md", "# A\n\nThe *mill* stands.", "The mill stands."),
        ("a.html", f"<html><title>A</title><body><p>{PROSE}</p></body></html>", PROSE.strip()),
        ("a.csv", "title,text\nA,The mill stands.\n", "The mill stands."),
        ("a.json", '[{"text": "The mill stands."}]', "The mill stands."),
    ):
        for path in (tmp_path / name, tmp_path / f"{name}{suffix}"):
            assert read_document(path, pack(content.encode())).text == text


# Tables and JSON


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=40), st.sampled_from([None, 2]), st.integers(1, 50),
    st.sampled_from(["utf-8", "utf-16"]),
)  # fmt: skip
def test_a_list_is_read_whatever_its_layout(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], indent: int | None, size: int, codec: str
) -> None:
    """Also in pieces of a few characters."""
    path = tmp_path_factory.mktemp("json") / "a.json"
    content = json.dumps([{"title": title, "text": text} for title, text in pairs], indent=indent, ensure_ascii=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("realmops.readers.jsonl._READ", size)
        assert rows(path, content.encode(codec)) == pairs


def test_lock_files_of_office_programs_are_no_broken_documents(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("The mill stands.")
    (tmp_path / "~$mill.docx").write_bytes(b"\x05Jorun")
    (tmp_path / "c.md").write_text("Oats grow.")
    kinds = [one.kind for one in outcomes_of(tmp_path) if isinstance(one, Rejected)]
    assert kinds == ["lock_file"]


@pytest.mark.parametrize("name", sorted(WRITERS))
@settings(max_examples=25, deadline=None)
@given(words=st.lists(st.text("abcdefghijklmnopqrstuvwxyzäöüéßñçøåž0123456789", min_size=1, max_size=9), min_size=3))
def test_the_words_of_every_format_come_out_in_order(
    tmp_path_factory: pytest.TempPathFactory, name: str, words: list[str]
) -> None:
    path = tmp_path_factory.mktemp("in") / name
    path.write_bytes(pdf(*map(latin, words)) if name == "a.pdf" else WRITERS[name](" ".join(words)))
    expected = [*map(latin, words)] if name == "a.pdf" else words
    [document] = outcomes_of(path)
    assert isinstance(document, Document), document
    assert [word for word in document.text.split() if word not in ("A", "x")] == [
        word for word in expected if word not in ("A", "x")
    ]


def latin(word: str) -> str:
    """Without the letter that the font of the small PDF lacks."""
    return word.replace("ž", "z")
