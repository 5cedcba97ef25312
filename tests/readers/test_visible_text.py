"""What a person sees of a page, a text or a table is what is read, or it is counted as left out."""

import bz2
import codecs
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

from realmops.readers.documents import Document, Dropped, Rejected
from realmops.readers.html import decode_page, flow_text
from realmops.readers.sources import list_sources


def rows(path: Path, content: str | bytes) -> list[tuple[str, str]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [(one.title, one.text) for one in outcomes_of(path) if isinstance(one, Document)]


PROSE = "The windmill of Tarrow grinds oats for four villages and is open to visitors on each first Sunday. " * 4


# Web pages


def test_the_rows_of_a_table_are_text(tmp_path: Path) -> None:
    table = "<table><tr><th>Flour</th><th>Sack</th></tr><tr><td>Oats</td><td>21 marks</td></tr></table>"
    page = f"<html><title>Mill</title><body><article><h1>Mill</h1><p>{PROSE}</p>{table}<p>{PROSE}</p></article></body>"
    text = read_document(tmp_path / "a.html", page).text
    assert "Flour\tSack\nOats\t21 marks\n" in text
    assert "|" not in text


def test_a_table_in_a_table_of_the_layout_is_read_once(tmp_path: Path) -> None:
    inner = "<table><tr><td>Oats</td><td>21 marks</td></tr></table>"
    page = f"<html><title>Mill</title><body><table><tr><td>Menu</td><td><p>{PROSE}</p>{inner}</td></tr></table></body>"
    assert read_document(tmp_path / "a.html", page).text.count("21 marks") == 1


def test_images_of_the_main_text_are_counted(tmp_path: Path) -> None:
    images = "<img src=a.png alt='The mill at dusk'><img src=b.png alt=''><nav><img src=c.png alt='Home'></nav>"
    page = f"<html><title>Mill</title><body><article><p>{PROSE}</p>{images}</article></body></html>"
    assert read_document(tmp_path / "a.html", page).omitted == (("image", 1),)


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


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_read_with_and_without_its_mark(tmp_path: Path, codec: str) -> None:
    assert decode_page("<p>Mühle</p>".encode(codec), None) == "<p>Mühle</p>"
    assert read_document(tmp_path / "a.txt", "Die Mühle steht still.".encode(codec)).text == "Die Mühle steht still."
    assert rows(tmp_path / "a.csv", "title\ttext\nMühle\tSie steht.\n".encode(codec)) == [("Mühle", "Sie steht.")]
    line = json.dumps({"title": "Mühle", "text": "Sie steht.\u2028Noch."}, ensure_ascii=False) + "\n"
    assert rows(tmp_path / "a.jsonl", (2 * line).encode(codec)) == 2 * [("Mühle", "Sie steht.\u2028Noch.")]


def test_utf_16_that_is_cut_in_half_is_named_and_loses_nothing_else(tmp_path: Path) -> None:
    table = "title\ttext\nA\tOne.\nB\tTwo.\n".encode("utf-16")[:-1]
    assert rows(tmp_path / "a.csv", table) == [("A", "One."), ("B", "Two.\ufffd")]
    with pytest.raises(ValueError, match=r"a\.json:item 2: no valid JSON"):
        rows(tmp_path / "a.json", '[{"text": "One."}, {"text": "Two."}]'.encode("utf-16")[:-9])


@pytest.mark.parametrize("hidden", ["<td hidden>x</td>", "<td style='display: none'><p>x</p></td>"])
def test_a_hidden_cell_costs_no_other_text(hidden: str) -> None:
    page = f"<table><tr>{hidden}<td>a</td><td><p>b</p><p>c</p></td></tr></table><pre hidden>x</pre><p>d   e</p><p>f</p>"
    assert flow_text(lxml.html.fromstring(f"<div>{page}</div>"))[0] == "a\tb c\n\nd e\n\nf"


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


# Markdown


def test_markdown_with_html_is_read_as_a_browser_shows_it(tmp_path: Path) -> None:
    source = """# Mill

<details>
<summary>Summer</summary>
The mill opens at 08:15.
</details>

<table><tr><td>Oats</td><td>21 marks</td></tr></table>

| Flour | Sack |
|---|---|
| Rye | 18 marks |

<p align="center">The miller is <b>Jorun</b> Vell.<br>She bakes.</p>

![The wheel](wheel.png) turns &copy; 2030.

```
x = 1
  y = 2
```
"""
    document = read_document(tmp_path / "a.md", source)
    assert document.title == "Mill"
    assert document.text == (
        "Summer\nThe mill opens at 08:15.\n\nOats\t21 marks\n\nFlour\tSack\nRye\t18 marks\n\n"
        "The miller is Jorun Vell.\nShe bakes.\n\nturns © 2030.\n\nx = 1\n  y = 2"
    )
    assert document.omitted == (("image", 1),)


@pytest.mark.parametrize(
    ("source", "title", "text", "extra"),
    [
        ("---\n\n# Mill\n\nFirst.\n\n---\n\nLast.\n", "Mill", "First.\n\nLast.", ""),
        ("---\ntitle: >\n  The old\n  mill\nyear: 1912\n---\nText.\n", "The old mill", "Text.", '{"year":1912}'),
        ("---\ntitle: Mill\n...\nText.\n", "Mill", "Text.", ""),
        ("---\ntitle: Mill: a history\n---\nText.\n", "Mill: a history", "Text.", ""),
        ("---\nThe miller: she bakes.\n\n---\nText.\n", "a", "Text.", '{"The miller":"she bakes."}'),
        ('+++\ntitle = "Mill"\nday = 2030-04-01\n+++\nText.\n', "Mill", "Text.", '{"day":"2030-04-01"}'),
        ("---\na: &a [x, x]\nb: [*a, *a]\n---\nText.\n", "a", "Text.", '{"a":["x","x"]}'),
        ("Text.\n\n---\n\ntitle: no\n\n---\n", "a", "Text.\n\ntitle: no", ""),
    ],
)
def test_metadata_is_told_from_a_rule(tmp_path: Path, source: str, title: str, text: str, extra: str) -> None:
    document = read_document(tmp_path / "a.md", source)
    assert (document.title, document.text, document.extra) == (title, text, extra)


def test_markdown_with_elements_of_react_loses_its_imports(tmp_path: Path) -> None:
    source = 'import Tabs from "./Tabs"\n\n# Prices\n\n<Tabs>\n<Tab label="x">21 marks for oats.</Tab>\n</Tabs>\n'
    document = read_document(tmp_path / "a.mdx", source)
    assert (document.title, document.text) == ("Prices", "21 marks for oats.")


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


def test_a_damaged_compressed_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(gzip.compress(PROSE.encode())[:-20])
    [source] = list_sources(path, "auto")
    [rejected] = source.format.records(path)
    assert isinstance(rejected, Rejected)
    assert (
        "the compressed file ends in the middle" in rejected.problem or "no valid compressed data" in rejected.problem
    )


def test_the_index_of_a_dump_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("The mill stands.")
    (tmp_path / "wiki-multistream-index.txt.bz2").write_bytes(bz2.compress(b"615:1:Mill\n615:2:Oats\n"))
    dropped = [one for one in outcomes_of(tmp_path) if isinstance(one, Dropped)]
    assert [one.reason for one in dropped] == ["dump_index"]


# Web archives


def archive(path: Path, *records: tuple[str, str, str, bytes]) -> Path:
    """A WARC of (type, address, content type, content)."""
    heads = [
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {address}\r\nWARC-Date: 2030-04-01T00:00:00Z\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(content)}\r\n\r\n"
        for kind, address, content_type, content in records
    ]
    path.write_bytes(
        b"".join(head.encode() + record[3] + b"\r\n" * 2 for head, record in zip(heads, records, strict=True))
    )
    return path


def test_records_of_a_crawler_are_no_documents(tmp_path: Path) -> None:
    command = b'"--http-password=hidden"'
    path = archive(
        tmp_path / "a.warc",
        ("resource", "metadata://gnu.org/software/wget/warc/wget_arguments.txt", "text/plain", command),
        ("resource", "urn:X-wpull:log", "text/plain", b"Fetched http://example.org/"),
        ("resource", "http://example.org/mill.txt", "text/plain", b"The mill stands."),
        ("conversion", "http://example.org/oats", "text/plain", "Hafer für Mühlen.".encode()),
    )
    found = outcomes_of(path)
    assert [one.reason if isinstance(one, Dropped) else type(one).__name__ for one in found] == [
        "tool_record", "tool_record", "Document", "Document"
    ]  # fmt: skip
    assert [one.text for one in found if isinstance(one, Document)] == ["The mill stands.", "Hafer für Mühlen."]


def test_a_page_in_a_bad_encoding_ends_no_archive(tmp_path: Path) -> None:
    page = (
        b"<html><meta charset=gb2312><title>t</title><p>"
        + "喆园的磨坊在上午九点开始。".encode("gbk")
        + b"\xff</p></html>"
    )
    path = archive(tmp_path / "a.warc", *(("resource", f"http://example.org/{n}", "text/html", page) for n in range(2)))
    assert [type(one) for one in outcomes_of(path)] == [Document, Document]


# Tables and JSON


@pytest.mark.parametrize(
    "content",
    [
        "title,text\nMill,It grinds.\n",
        "title, text\nMill, It grinds.\n",
        'title,text\n"Mill", "It grinds."\n',
        "Title,TEXT\nMill,It grinds.\n",
        "# made in 2030\n# by hand\ntitle,text\nMill,It grinds.\n",
        "title|text\nMill|It grinds.\n",
        "sep=;\ntitle;text\nMill;It grinds.\n",
        ",title,text\n0,Mill,It grinds.\n",
        "title,text,\nMill,It grinds.,\n",
        "title\ttext\nMill\tIt gr\0inds.\n",
    ],
)
def test_tables_as_programs_write_them(tmp_path: Path, content: str) -> None:
    [document] = (read_document(tmp_path / "a.csv", content),)
    assert (document.title, document.text, document.extra) == ("Mill", "It grinds.", "")


def test_a_row_of_another_length_and_a_backslash_before_a_quote_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("# made\ntitle,text,year\nMill,It grinds.\nOats,They grow.,1912\n")
    short, _ = outcomes_of(path)
    assert isinstance(short, Rejected)
    assert (short.place, short.problem) == (f"{path}:3", "the row has 2 columns, expected 3 as in the header")
    path.write_text('title,text\nMill,"The \\"old\\" mill"\n')
    with pytest.raises(ValueError, match=r"a\.csv:2: no valid CSV .*double the quotation marks in quoted values"):
        outcomes_of(path)


@pytest.mark.parametrize(
    "content",
    [
        '[{"title": "Mill", "text": "It grinds."}, {"title": "Oats", "text": "They grow."}]',
        '[\n  {\n    "title": "Mill",\n    "text": "It grinds."\n  },\n  {"title": "Oats", "text": "They grow."}\n]\n',
        '{\n  "title": "Mill",\n  "text": "It grinds."\n}\n{\n  "title": "Oats",\n  "text": "They grow."\n}\n',
        '\x1e{"title": "Mill", "text": "It grinds."}\n\x1e{"title": "Oats", "text": "They grow."}\n',
        '{"title": "Mill", "text": "It grinds.", "score": NaN}\n{"title": "Oats", "text": "They grow."}\n',
        '{"title": "Mill", "text": "It gri\\u0000nds."}\n{"title": "Oats", "text": "They grow."}\n',
    ],
)
def test_json_as_programs_write_it(tmp_path: Path, content: str) -> None:
    for mark in (b"", codecs.BOM_UTF8):
        found = rows(tmp_path / "a.json", mark + content.encode())
        assert found == [("Mill", "It grinds."), ("Oats", "They grow.")]


def test_a_document_needs_a_text_alone(tmp_path: Path) -> None:
    assert rows(tmp_path / "a.jsonl", '{"text": "x"}\n{"title": null, "text": "y", "id": 2.0}\n') == [
        ("", "x"),
        ("", "y"),
    ]
    assert rows(tmp_path / "a.csv", "text\nx\n") == [("", "x")]
    [_, second] = outcomes_of(tmp_path / "a.jsonl")
    assert isinstance(second, Document)
    assert second.id == "2"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('[{"text": "x"}, 7]', r"a\.json:item 2: found '7\]', expected a JSON object"),
        ('[{"text": "x"}, {"text": ]', r"a\.json:item 2: no valid JSON \(Expecting value"),
        ('[{"text": "x"}', r"a\.json:item 2: the list does not end"),
    ],
)
def test_a_broken_list_is_named_at_its_item(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=problem):
        outcomes_of(tmp_path / "a.json")


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
