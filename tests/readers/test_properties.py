"""Properties of every reader: the text that a viewer shows is read in order, and damage ends no process."""

import bz2
import gzip
import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import lxml.html
import pytest
import sentencex
from damaged_files import SEEDS, WHOLE, WRITERS, damage, fuzz
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_world import build_snapshot

from realmops.corpus.ingest import iter_batches, parse_records
from realmops.corpus.passages import split_sentences
from realmops.corpus.snapshot_reader import Snapshot, read_rejects
from realmops.readers.documents import Document, Outcome, RawRecord
from realmops.readers.flow import flow_text
from realmops.readers.html import decode_page, page_to_document
from realmops.readers.sources import list_sources
from realmops.readers.wikitext import wikitext_to_text

BLANKS = [chr(c) for c in range(sys.maxunicode + 1) if chr(c).isspace()]
CONTROLS = [chr(c) for c in (*range(32), *range(0x7F, 0xA0), 0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F))]
VITAMIN = "It is rich in vitamin{0}A{0}. Carrots have it."
ENDS = ["A", "A.", "Dr.", "No. 1", "u.s.", "(", ")", '"', "...", "?!", "\u3002", "\n\n"]
MARKS = ["<b>", "&amp;", "{{", "[[", "|", "'''", "\ufeff", "\ufffd", "\uffff"]
SCRIPTS = ["\u0301", "e\u0301.", "\u05d0\u05d1 \u05d2.", "\u0645\u0631\u062d.", "\U0001f469\u200d\U0001f467"]
LATIN = "abcdefyzäöüéßñçøå0123456789"
TEXTS = st.lists(st.sampled_from([*BLANKS, *CONTROLS, *ENDS, *MARKS, *SCRIPTS]) | st.text(max_size=6), max_size=40)
LETTERS = st.characters(codec="utf-8", categories=["L", "N"])
WORDS = st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=4).map(" ".join)
shared_folder = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def outcomes_of(path: Path, content: bytes | None = None) -> list[Outcome]:
    if content is not None:
        path.write_bytes(content)
    return [outcome for batch in iter_batches(list_sources(path, "auto")) for outcome in parse_records(batch)]


def document_of(path: Path, content: str | bytes) -> Document:
    [document] = outcomes_of(path, content.encode() if isinstance(content, str) else content)
    assert isinstance(document, Document), document
    return document


def check_sentences(text: str) -> None:
    bounds = split_sentences(text)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(bounds))
    sentences = [text[start:end] for start, end in bounds]
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)
    assert "".join("".join(sentences).split()) == "".join(text.split())


# Sentences and snapshots


@settings(max_examples=400, deadline=None)
@given(TEXTS.map("".join))
def test_sentences_partition_any_text(text: str) -> None:
    check_sentences(text)


def write_lines(path: Path, *texts: str) -> Path:
    path.write_text("\n".join(json.dumps({"title": f"T{number}", "text": text}) for number, text in enumerate(texts)))
    return path


def check_places(snapshot: Snapshot, documents: list[Document]) -> None:
    """Check that passages are slices of their documents, and that wordpieces and sentences are in order."""
    for index in range(len(snapshot)):
        text, document = snapshot.text(index), documents[int(snapshot.places[index, 0])]
        assert document.text[snapshot.start(index) :].startswith(text)
        assert snapshot.title(index) == document.title
        chars, sentences = snapshot.chars(index), snapshot.sentences(index)
        assert (chars[:, 0] < chars[:, 1]).all()
        assert (chars[1:, 0] >= chars[:-1, 1]).all()
        assert 0 <= chars.min() <= chars.max() <= len(text)
        assert (sentences[:, 0].tolist(), int(sentences[-1, 1])) == ([0, *sentences[:-1, 1].tolist()], len(chars))


@pytest.mark.parametrize("workers", [1, 2])
def test_unusual_documents_lose_no_other_document(tmp_path: Path, workers: int) -> None:
    texts = [VITAMIN.format("\xa0"), "A word. " * 50, "x" * (1 << 20), "a" + "\u200d" * 1000 + "b.", "\0\0 a."]
    path = write_lines(tmp_path / "a.jsonl", *texts, "\u202ea \u05d0.", *BLANKS)
    snapshot = build_snapshot(tmp_path, path, block_wordpieces=30, workers=workers)
    check_places(snapshot, [outcome for outcome in outcomes_of(path) if isinstance(outcome, Document)])
    assert set(snapshot.column("title")) == {f"T{n}" for n in range(6)}


class PanicError(BaseException):
    pass


def test_failure_of_a_library_rejects_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = sentencex.segment

    def fails(language: str, text: str) -> list[str]:
        if "mark" in text:
            raise PanicError("at the disco \ud800" + 1000 * "!")
        return list(segment(language, text))

    monkeypatch.setattr(sentencex, "segment", fails)
    path = write_lines(tmp_path / "a.jsonl", *(f"number {n}." for n in range(150)), "a mark.", "after it.")
    snapshot = build_snapshot(tmp_path, path, block_wordpieces=30)
    [rejected] = read_rejects(snapshot.folder)
    assert (rejected["place"], len(snapshot)) == (f"{path}:151", 151)
    assert "PanicError: at the disco \\ud800!" in rejected["problem"]
    assert len(rejected["problem"]) < 400


# Every format


@pytest.mark.parametrize("name", WRITERS)
@settings(shared_folder, max_examples=50)
@given(text=st.lists(st.text(LATIN, min_size=1), min_size=3).map(" ".join) | TEXTS.map("".join))
def test_words_of_every_format_are_read_in_order(tmp_path: Path, name: str, text: str) -> None:
    [outcome] = outcomes_of(tmp_path / name, WRITERS[name](text))
    if text.strip() and {*text} <= {*LATIN, " "}:
        assert isinstance(outcome, Document), outcome
        assert [word for word in outcome.text.split() if word not in ("A", "x")] == text.split()
    elif isinstance(outcome, Document):
        outcome.text.encode()
        check_sentences(outcome.text)


def count_documents(path: Path, format: str) -> int:
    """Return the number of documents of a file; an error must name the file."""
    documents = 0
    try:
        [source] = list_sources(path, format)
        for raw in source.format.records(path):
            outcome = source.format.convert(raw) if isinstance(raw, RawRecord) else raw
            assert outcome.place.startswith(str(path))
            if isinstance(outcome, Document):
                documents += 1
                assert outcome.text.strip()
                (outcome.title + outcome.text + outcome.extra).encode()
    except ValueError as error:
        if str(path) not in str(error):
            raise
    return documents


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", WHOLE)
def test_damaged_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(WHOLE[name])
    format = list_sources(path, "auto")[0].format.name
    assert count_documents(path, format) > 0

    @fuzz
    @given(st.binary(max_size=200) | SEEDS)
    def read_one(change: bytes | int) -> None:
        path.write_bytes(damage(WHOLE[name], change) if isinstance(change, int) else change)
        count_documents(path, format)

    read_one()


@pytest.mark.timeout(0)
def test_damaged_dataset_is_read_or_refused(tmp_path: Path) -> None:
    """Arrow trusts offsets, so that damage could make it read other memory."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = tmp_path / "saved"
    rows = {"title": ["A", "B"], "text": ["a text", "b text"], "tags": [["x"], []]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder))
    assert count_documents(folder, "dataset") == 2
    files = {path: path.read_bytes() for path in sorted(folder.iterdir())}

    @fuzz
    @given(st.sampled_from(sorted(files)), SEEDS)
    def read_one(path: Path, seed: int) -> None:
        path.write_bytes(damage(files[path], seed))
        count_documents(folder, "dataset")
        path.write_bytes(files[path])

    read_one()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "a.csv", "a.jsonl", "a.xml"])
def test_compressed_file_is_recognised_under_any_name(tmp_path: Path, name: str, pack: object) -> None:
    assert callable(pack)
    suffix = {gzip.compress: ".gz", bz2.compress: ".bz2"}[pack]
    for path in (tmp_path / name, tmp_path / f"{name}{suffix}"):
        assert document_of(path, pack(WRITERS[name]("The mill."))).text == "The mill."


# Web pages, tables, wikitext and lists of JSON


@pytest.mark.parametrize(
    ("data", "declared", "text"),
    [
        *((f"<meta charset={label}>{text}".encode(codec), None, text) for label, codec, text in (
            ("gb2312", "gbk", "镕"), ("gbk", "gb18030", "\u3447"), ("Shift_JIS", "cp932", "①髙"),
            ("ks_c_5601-1987", "cp949", "똠"), ("big5", "big5hkscs", "嘅"), ("iso-8859-8-i", "iso8859-8", "שלום"),
            ("latin1", "cp1252", "“€”"), ("ISO-8859-9", "cp1254", "“ğ”"), ("iso-8859-2", "iso-8859-2", "ěš"),
            ("replacement", "cp1252", "“Amboß”"),
        )),
        ("東".encode("shift_jis") + b"\xfd<p>", "shift_jis", "東\ufffd"),
        ("é東".encode(), None, "é東"),
        (b'<meta charset="utf-8"><p>caf\xe9</p>', None, "caf\ufffd"),
        (b"<p>caf\xe9</p>", "utf8", "caf\ufffd"),
        (b"<p>caf\xe9</p>", None, "café"),
        (b"<p>caf\xe9 \x81", "utf-8", "café \ufffd"),  # declared wrongly
        ("Le café, où «Zoé» naît.".encode() + b"\xff", "iso-8859-1", "Le café, où «Zoé» naît."),  # a server's default
        ("«Zoé» nait".encode() + "é".encode()[:1], None, "«Zoé» nait\ufffd"),  # truncated in a character
        ("Мир и мы".encode("cp1251"), "windows-1251", "Мир и мы"),
        ("\n<p>大阪</p>".encode("utf-16-be"), "UTF-16BE", "\n<p>大阪</p>"),
        ("\n<p>大阪</p>".encode(), "UTF-16", "\n<p>大阪</p>"),
        (b"caf\xe9", "zlib", "café"),  # no name of an encoding to browsers
    ],
)  # fmt: skip
def test_page_is_decoded_as_browsers_do(data: bytes, declared: str | None, text: str) -> None:
    assert text in decode_page(data, declared)


INLINE = WORDS | st.builds(
    str.format,
    st.sampled_from(["<b>{}</b> ", "{}<br>", "<span hidden>{}</span> ", "<img alt='{}'> ", "<!-- {} --> "]),
    WORDS,
)
INLINES = st.lists(INLINE, min_size=1, max_size=3)
BLOCK = st.one_of(
    st.builds("<details><summary>{}</summary>{}</details>".format, INLINE, INLINE),
    INLINES.map(lambda cells: f"<table><tr><td>{'</td><td>'.join(cells)}</td></tr></table>"),
    INLINES.map(lambda items: f"<ul><li>{'</li><li>'.join(items)}</li></ul><p>{items[0]}</p>"),
    WORDS.map(lambda text: f"<pre>{text}\n  {text}</pre>"),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(BLOCK, min_size=1, max_size=5))
def test_visible_words_of_a_page_are_read_and_hidden_ones_counted(blocks: list[str]) -> None:
    tree = lxml.html.fromstring(f"<html><body>{''.join(blocks)}</body></html>")
    shown = " ".join(tree.xpath(".//text()[not(ancestor::*[@hidden])]"))
    text, omitted = flow_text(tree)
    assert "".join(text.split()) == "".join(shown.split())
    assert omitted == Counter(image=len(tree.xpath("//img")), **{"hidden text": len(tree.xpath("//*[@hidden]"))})


PROSE = "The windmill of Tarrow grinds oats for four villages and is open to visitors on each first Sunday. " * 4
CELL = st.text(LETTERS, min_size=1, max_size=8)
CELLS = st.lists(CELL, min_size=1, max_size=4)
TABLE = st.integers(1, 4).flatmap(lambda width: st.lists(CELLS.map(lambda cells: (cells * 4)[:width]), min_size=1))


@settings(max_examples=40, deadline=None)
@given(st.lists(TABLE | CELLS, min_size=1, max_size=3))
def test_words_of_tables_and_paragraphs_of_a_page_are_read_in_order(blocks: list[list[str] | list[list[str]]]) -> None:
    page, words = f"<head><title>Smithy</title></head><body><main><p><b hidden>x</b>{PROSE}</p>", PROSE.split()
    for number, block in enumerate(blocks):  # trafilatura removes a long block that equals the one before it
        if isinstance(block[0], str):
            page += f"<p>{number} {' '.join(block)} {PROSE}</p>"
            words += [str(number), *block, *PROSE.split()]
        else:
            rows = [[str(number)], *block]
            page += f"<table><tr><td>{'</td></tr><tr><td>'.join(map('</td><td>'.join, rows))}</td></tr></table>"
            words += [cell for row in rows for cell in row]
    document = page_to_document(f"<html>{page}<p>{PROSE}</p></main></body></html>", "a.html", "a")
    assert isinstance(document, Document), document
    assert document.text.split() == [*words, *PROSE.split()]


TOKENS = ["{{", "}}", "[[", "]]", "{|\n", "\n|}", "|", "\n", "=", "==", "'''", "<ref>", "</ref>", "<nowiki>", "<!--"]
TOKENS += ["-->", "<br", "/>", "lang", "convert", "File:", "http://a", "[", "]", "(", ")", ",", "é", " ", "{", "&amp;"]


@pytest.mark.timeout(0)
@fuzz
@given(st.lists(st.sampled_from(TOKENS), max_size=200))
def test_wikitext_becomes_text_without_markup(tokens: list[str]) -> None:
    source = "".join(tokens)
    if source.count("{{") + source.count("[[") + source.count("{|") > 40:  # may be nested too deeply
        source = source[:80]
    text = wikitext_to_text(source)
    if "<nowiki>" not in tokens:
        assert not any(mark in text for mark in ("[[", "]]", "{{", "}}", "{|", "|}", "''", "<ref>", "<br/>"))


@settings(shared_folder, max_examples=60)
@given(
    st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=40), st.sampled_from([None, 2]), st.integers(1, 50),
    st.sampled_from(["utf-8", "utf-16"]),
)  # fmt: skip
def test_list_of_json_is_read_in_any_layout_and_any_pieces(
    tmp_path: Path, pairs: list[tuple[str, str]], indent: int | None, size: int, codec: str
) -> None:
    content = json.dumps([{"title": title, "text": text} for title, text in pairs], indent=indent, ensure_ascii=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("realmops.readers.jsonl._READ", size)
        outcomes = outcomes_of(tmp_path / "a.json", content.encode(codec))
    assert [(outcome.title, outcome.text) for outcome in outcomes if isinstance(outcome, Document)] == pairs
