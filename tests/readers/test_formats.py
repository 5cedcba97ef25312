"""Each reader on small files of every kind: what is kept, what is dropped by which reason, what is rejected."""

import bz2
import contextlib
import gzip
import json
import math
import os
import socket
import sys
import tracemalloc
import zlib
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realmops.readers.documents import Document, Dropped, RawRecord, Rejected
from realmops.readers.html import decode_page
from realmops.readers.sources import FORMATS, list_sources
from realmops.readers.wikitext import wikitext_to_text

Outcome = Document | Dropped | Rejected


def read(path: Path, format: str = "auto") -> list[Outcome]:
    """All outcomes of a file or folder, places relative to it."""
    found = []
    for source in list_sources(path, format):
        last = 0
        for raw in source.format.records(source.path):
            if isinstance(raw, RawRecord):
                assert last <= raw.position <= source.size, "progress runs from 0 to the file's size"
                last = raw.position
            found.append(source.format.convert(raw) if isinstance(raw, RawRecord) else raw)
    return found


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = data.encode() if isinstance(data, str) else data
    packed = {".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix.lower(), lambda plain: plain)(raw)
    path.write_bytes(packed)
    return path


def kept(outcomes: list[Outcome]) -> list[tuple[str, str]]:
    return [(one.title, one.text) for one in outcomes if isinstance(one, Document)]


def kinds(outcomes: list[Outcome]) -> list[str]:
    """ "kept", the reason, or "rejected"."""
    return [
        "kept" if isinstance(one, Document) else one.reason if isinstance(one, Dropped) else "rejected"
        for one in outcomes
    ]


def problem(outcome: Outcome) -> str:
    assert isinstance(outcome, Rejected), outcome
    return outcome.problem


# Which format


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a.jsonl", '{"title": "A"}', "jsonl"),
        ("a.json.gz", '{"title": "A"}', "jsonl"),
        ("noname", '\n {"title": "A"}', "jsonl"),
        ("a.parquet", "PAR1", "parquet"),
        ("part-0", "PAR1", "parquet"),
        ("A.JSONL.GZ", '{"title": "A"}', "jsonl"),
        ("a.jsonl.BZ2", '{"title": "A"}', "jsonl"),
        ("a.txt", "plain", "text"),
        ("a.MD", "# A", "text"),
        ("a.htm", "<html>", "text"),
        ("dump.xml-p10p30.bz2", '<?xml version="1.0"?>\n<mediawiki>', "mediawiki"),
        ("a.xml", "", "mediawiki"),
    ],
)
def test_the_format_follows_from_content_then_name(tmp_path: Path, name: str, content: str, format: str) -> None:
    (source,) = list_sources(write(tmp_path / name, content), "auto")
    assert source.format is FORMATS[format]
    assert source.size == source.path.stat().st_size


def test_a_folder_of_several_formats_is_read_each_by_its_own_or_by_choice(tmp_path: Path) -> None:
    write(tmp_path / "README.md", "about")
    lines = write(tmp_path / "a.jsonl", '{"title": "A", "text": "a"}')
    found = [(one.path.name, one.format.name, one.broken) for one in list_sources(tmp_path, "auto")]
    assert found == [("README.md", "text", "broken_text"), ("a.jsonl", "jsonl", "broken_jsonl")]
    assert [(one.path, one.broken) for one in list_sources(tmp_path, "jsonl")] == [(lines, "")]


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonl", '{"title": "A", "text": "a"}', ""),
        ("a.jsonl", "broken", ""),  # one broken line of many, perhaps
        ("a.json", '\n{"title": "A", "text": "a"}', ""),
        ("a.json.gz", "{", "gz"),
        ("a.json", '[{"title": "A", "text": "a"}]', ""),
        ("a.json", '{\n  "version": 1\n}', "json"),
        ("a.ndjson", '{"name": "A"}', "ndjson"),
        ("noname", '{"name": "A"}', "other"),
        ("a.j@", "a", "other"),
    ],
)
def test_json_that_holds_no_documents_is_left_out_of_mixed_files(
    tmp_path: Path, name: str, content: str, kind: str
) -> None:
    write(tmp_path / "README.md", "about")
    path = write(tmp_path / name, content)
    [source] = [one for one in list_sources(tmp_path, "auto") if one.path == path]
    found = [one.kind for one in source.format.records(path) if isinstance(one, Rejected)]
    assert found == ([kind] if kind else [])


def test_what_is_unknown_or_absent_is_named(tmp_path: Path) -> None:
    odd = write(tmp_path / "a.odt", b"PK\x03\x04")
    for asked in (odd, tmp_path):
        with pytest.raises(
            ValueError, match=r"a\.odt.*jsonl, parquet, csv, text, rst, pdf, docx, pptx, xlsx, epub, eml, ipynb, med"
        ):
            list_sources(asked, "auto")
    with pytest.raises(ValueError, match="no file of the format csv"):
        list_sources(tmp_path, "csv")
    with pytest.raises(ValueError, match="'odt'; allowed are auto, jsonl"):
        list_sources(odd, "odt")
    with pytest.raises(ValueError, match="no such file"):
        list_sources(tmp_path / "absent", "auto")


def special(folder: Path) -> dict[str, str]:
    """Put what is no regular file into a folder; the kind of each by its name."""
    os.mkfifo(folder / "1.jsonl")
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(folder):
        bound.bind("2.jsonl")
    (folder / "3.jsonl").symlink_to("/dev/zero")
    return {"1.jsonl": "pipe", "2.jsonl": "socket", "3.jsonl": "device"}


@pytest.mark.parametrize("others", ["a.jsonl", "a.txt"])
def test_pipes_sockets_and_devices_are_counted_as_unread(tmp_path: Path, others: str) -> None:
    expected = special(tmp_path)
    write(tmp_path / others, '{"title": "A", "text": "a"}')
    outcomes = read(tmp_path)
    assert len(kept(outcomes)) == 1
    assert {Path(one.place).name: one.kind for one in outcomes if isinstance(one, Rejected)} == expected
    assert problem(outcomes[0]) == "it is a pipe; only regular files are read"
    if others == "a.jsonl":
        assert kinds(read(tmp_path, "jsonl")) == ["rejected"] * 3 + ["kept"]
    else:
        with pytest.raises(ValueError, match=r"no file of the format jsonl; .*1\.jsonl is a pipe, which is not read"):
            list_sources(tmp_path, "jsonl")


def test_a_broken_link_is_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Among JSON lines alone it ends the stage as any of them does that is damaged; in a mixed folder it is counted."""
    write(tmp_path / "a.jsonl", '{"title": "A", "text": "a"}')
    (tmp_path / "b.jsonl").symlink_to("nowhere")
    for format in ("auto", "jsonl"):
        with pytest.raises(ValueError, match=r"b\.jsonl: cannot be read \(No such file or directory\)"):
            read(tmp_path, format)
    write(tmp_path / "c.txt", "c")
    assert [one.kind for one in read(tmp_path) if isinstance(one, Rejected)] == ["broken_jsonl"]


@pytest.mark.parametrize("name", sorted({*FORMATS} - {"beir", "dataset"}))  # which have no suffix
def test_a_broken_link_ends_the_stage_where_its_format_is_named(tmp_path: Path, name: str) -> None:
    suffix = {"text": "txt", "mediawiki": "xml"}.get(name, name)
    (tmp_path / f"a.{suffix}").symlink_to("nowhere")
    with pytest.raises(ValueError, match=rf"a\.{suffix}: cannot be read \(.*No such file or directory"):
        read(tmp_path, name)


@pytest.mark.usefixtures("unlistable")
def test_a_folder_that_cannot_be_listed_is_counted_as_unread(tmp_path: Path) -> None:
    for name in ("a.jsonl", "closed/b.jsonl"):
        write(tmp_path / name, '{"title": "A", "text": "a"}')
    for format in ("auto", "jsonl"):
        document, closed = read(tmp_path, format)
        assert isinstance(document, Document)
        assert isinstance(closed, Rejected)
        assert (closed.kind, closed.problem) == ("folder", "it is a folder; cannot be listed; check its permissions")


# JSON lines, CSV, reStructuredText


def test_a_row_of_many_lines_that_is_too_long_ends_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csv.field_size_limit", lambda _: 0)  # of the process: other tests read longer fields
    monkeypatch.setattr("realmops.readers.delimited.LINE_LIMIT", 30)
    head, fits = "title,text\n", 'A,"a\nb\nc"\n' * 3  # each of ten characters
    assert kinds(read(write(tmp_path / "a.csv", head + fits))) == ["kept"] * 3
    outcomes = read(write(tmp_path / "b.csv", f'{head}{fits}B,"{"d" * 26}"\nC,"{"d" * 26}e"\n'))
    assert kinds(outcomes) == ["kept"] * 4 + ["rejected"]
    outcomes = read(write(tmp_path / "c.csv", f"{head}{fits}C," + '"\n",' * 9))
    assert kinds(outcomes) == ["kept"] * 3 + ["rejected"]
    assert "the row is longer than" in problem(outcomes[-1])


@pytest.mark.parametrize(
    ("source", "limit", "kind"),
    [
        ("a b\n" * (1 << 13), 1 << 14, "rejected"),
        (":aaaa" * 300, 1 << 14, "rejected"),  # a long line
        ("*a `b\n" * 1100, 1 << 14, "rejected"),  # many marks
        ("".join(" " * n + "- a\n\n" for n in range(400)), 1 << 18, "rejected"),  # nested too deeply for docutils
        ("\n\n".join(":aaaa" * 190 for _ in range(9)), 1 << 14, "kept"),
    ],
)
def test_restructured_text_that_takes_long_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, limit: int, kind: str
) -> None:
    for name, value in (("_LIMIT", limit), ("_LINE_LIMIT", 1000), ("_MARK_LIMIT", 2000)):
        monkeypatch.setattr(f"realmops.readers.rst.{name}", value)
    assert kinds(read(write(tmp_path / "a.rst", source))) == [kind]


def test_substitutions_and_lists_of_headings_make_no_text_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realmops.readers.rst._LIMIT", 100)
    named = ".. |a| replace:: 12345678\n.. |b| replace:: |a| x\n\n"  # 9 characters with a blank, 11 of |b|
    texts = (("|a| " * 10, "kept"), ("|a| " * 11, "rejected"), ("|b| " * 8, "kept"), ("|b| " * 9, "rejected"))
    for uses, expected in texts:  # 9 in the definition of |b|, and 90 or 99; and 88 or 99
        assert kinds(read(write(tmp_path / "a.rst", named + uses))) == [expected], uses
    heading = "A\n=\n\nB\n=\n\n.. contents::\n\n.. contents::\n\n.. sectnum::\n\n.. sectnum::\n"
    [(title, text)] = kept(read(write(tmp_path / "b.rst", heading)))
    assert (title, text.replace("\xa0", "")) == ("1 A", "2B\n\nContents\n\nContents\n\n1A\n\n2B")


# Parquet and datasets


ROWS: list[dict[str, Any]] = [
    {"title": "A", "text": "a", "id": 7, "when": datetime(2020, 1, 2), "score": math.nan, "image": b"\xff"},
    {"title": "B", "text": "", "id": None, "when": None, "score": 1.0, "image": None},
    {"title": None, "text": "c", "id": None, "when": None, "score": 1.0, "image": None},
]


def test_parquet_rows_keep_their_columns_but_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    outcomes = read(path)
    assert kinds(outcomes) == ["kept", "empty_text", "kept"]
    first = outcomes[0]
    assert isinstance(first, Document)
    assert (first.id, first.place) == ("7", f"{path}:row 1")
    assert json.loads(first.extra) == {"score": None, "when": "2020-01-02 00:00:00.000000"}


def test_rows_of_a_batch_count_as_read_together(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"title": ["T"] * 512, "text": ["x"] * 512}), path)
    size = path.stat().st_size
    positions = [raw.position for raw in FORMATS["parquet"].records(path) if isinstance(raw, RawRecord)]
    assert positions == [size // 2] * 256 + [size] * 256


def test_a_string_that_is_no_utf8_costs_its_row_only(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"title": ["A", "B", "C"], "text": texts}), path)
    assert kinds(read(path)) == ["kept", "rejected", "kept"]


STRINGS = pa.array(["x", "y" * 50, None])
VALUES = {  # of three rows: the second holds 50 characters and values or more, the others fewer
    "strings": STRINGS,
    "large strings": STRINGS.cast(pa.large_string()),
    "shared": STRINGS.dictionary_encode(),
    "lists": pa.array([[1], [7] * 50, None]),
    "lists of strings": pa.array([["x"], ["y" * 25, "z" * 25], None]),
    "structs": pa.array([{"a": "x", "b": [1]}, {"a": "y" * 25, "b": [7] * 25}, None]),
    "maps": pa.array([[("a", 1)], [("b" * 50, 2)], None], pa.map_(pa.string(), pa.int64())),
    "more lists": pa.array([[[1]], [[7] * 25, [], [8] * 25], [[]]]),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("first", [0, 2])
def test_a_row_that_holds_too_much_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: int
) -> None:
    monkeypatch.setattr("realmops.readers.tables.LINE_LIMIT", 45)
    monkeypatch.setattr("realmops.readers.tables._SLICE", 30)
    chosen = [(first + n) % 3 for n in range(3)]
    table = pa.table({"title": ["T"] * 3, "text": ["x"] * 3, "more": VALUES[name]}).take(chosen)
    pq.write_table(table, tmp_path / "a.parquet")
    outcomes = read(tmp_path / "a.parquet")
    assert kinds(outcomes) == ["rejected" if row == 1 else "kept" for row in chosen]
    assert "it has more than" in problem(outcomes[chosen.index(1)])


@pytest.mark.parametrize("decoded", [1 << 30, 100])
def test_texts_that_rows_share_are_those_of_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: int
) -> None:
    monkeypatch.setattr("realmops.readers.tables._DECODED", decoded)
    rows = [{"title": f"T{n % 2}", "text": "ab" * 20, "more": ["c" * 30, None], "n": n} for n in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=300)
    outcomes = read(tmp_path / "a.parquet")
    assert kept(outcomes) == [(f"T{n % 2}", "ab" * 20) for n in range(600)]
    assert [json.loads(one.extra)["n"] for one in outcomes if isinstance(one, Document)] == list(range(600))
    assert isinstance(outcomes[0], Document)
    assert json.loads(outcomes[0].extra) == {"more": ["c" * 30, None], "n": 0}


def test_a_column_of_lists_that_may_be_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.readers.tables._LIST_VALUES", 10)
    rows = {"title": ["T"] * 2, "text": ["x"] * 2, "ten": [[1] * 9, [2]], "eleven": [[1], [2] * 10], "n": [3, 4]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    first = read(tmp_path / "a.parquet")[0]
    assert isinstance(first, Document)
    assert json.loads(first.extra) == {"n": 3, "ten": [1] * 9}


def test_datasets_saved_on_disk_are_read_with_all_their_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "two"))
    assert kinds(read(tmp_path / "one")) == ["kept", "empty_text", "kept"]
    assert [one.path.name for one in list_sources(tmp_path / "two", "auto")] == ["test", "train"]
    assert kinds(read(tmp_path / "two", "dataset")) == ["kept", "empty_text", "kept"] * 2
    with pytest.raises(ValueError, match="set the format to dataset"):
        list_sources(tmp_path / "one", "parquet")
    (tmp_path / "two" / "linked").symlink_to(tmp_path / "one")
    assert [one.path.name for one in list_sources(tmp_path / "two", "auto")] == ["linked", "test", "train"]
    os.mkfifo(tmp_path / "two" / "test" / "data-00001-of-00002.arrow")
    with pytest.raises(ValueError, match=r"data-00001-of-00002\.arrow: is a pipe, and a saved dataset holds"):
        list_sources(tmp_path / "two", "auto")


def test_without_the_hub_the_error_names_what_to_copy() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match=r"hf:nobody/nothing: .*load_dataset\('nobody/nothing'\)\.save_to_disk"):
        list_sources(Path("hf:nobody/nothing"), "auto")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'realmops\[datasets\]'"):
        list_sources(Path("hf:owner/name:train"), "dataset")


# Text, Markdown and HTML


UTF_8_WRONG = "<p>Le café de Genève, où «Zoé» naît.</p>".encode()
SHIFT_JIS = '<meta http-equiv="Content-Type" content="text/html; charset=shift_jis">'


@pytest.mark.parametrize(
    ("data", "declared", "shown"),
    [
        ("<p>é東</p>".encode(), None, "é東"),
        ('<meta charset="iso-8859-2"><p>ěš</p>'.encode("iso-8859-2"), None, "ěš"),
        (f"{SHIFT_JIS}<p>東京</p>".encode("shift_jis"), None, "東京"),
        (f"{SHIFT_JIS}<p>東".encode("shift_jis") + b"\xfd</p>", None, "東\ufffd"),
        ("<p>é“</p>".encode("cp1252"), None, "é“"),
        (b'<meta charset="utf-8"><p>caf\xe9</p>', None, "caf\ufffd"),
        (b"<p>caf\xe9</p>", "UTF-8", "caf\ufffd"),
        (b"<p>caf\xe9</p>", "utf8", "caf\ufffd"),
        (b"<p>caf\xe9</p>", None, "café"),
        (UTF_8_WRONG + b"\xff", None, "Le café de Genève, où «Zoé» naît."),
        (UTF_8_WRONG + b"\xff", "iso-8859-1", "Le café de Genève, où «Zoé» naît."),  # what servers say of any page
        (UTF_8_WRONG[:-5] + "é".encode()[:1], None, "où «Zoé» naît\ufffd"),  # cut in a character
        ("<p>über été, où</p>".encode("cp1252"), None, "über été, où"),
        ("<p>Мир и мы</p>".encode("cp1251"), "windows-1251", "Мир и мы"),
        ("\n<p>大阪</p>".encode("utf-16-be"), "UTF-16BE", "\n<p>大阪</p>"),
        ("\n<p>大阪</p>".encode(), "UTF-16", "\n<p>大阪</p>"),
        (b"<meta charset=utf-16><p>caf\xe9</p>", None, "caf\ufffd</p>"),  # as browsers read it
    ],
)
def test_pages_are_decoded_as_they_declare_and_wrong_bytes_cost_a_character(
    data: bytes, declared: str | None, shown: str
) -> None:
    text = decode_page(data, declared)
    assert shown in text
    assert "Ã" not in text


def test_pages_that_are_not_what_they_declare_are_read_as_browsers_do() -> None:
    """A name that is none of an encoding is passed over: Python's other codecs would unpack data."""
    packed = zlib.compress(b"<p>text</p>")
    assert decode_page(packed, "zlib") == decode_page(packed, None)
    assert decode_page(b"caf\xe9 \x81", "utf-8") == "café \ufffd"


# MediaWiki


PAGE = "<page><title>A</title><ns>0</ns><id>1</id><revision><id>2</id><text>'''A''' is a.</text></revision></page>\n"


def dump(pages: str) -> str:
    namespaces = '<namespace key="0" /><namespace key="6">Datei</namespace>'
    return f"<mediawiki><siteinfo><namespaces>{namespaces}</namespaces></siteinfo>{pages}</mediawiki>"


def page(title: str, inside: str, text: str = "text", namespace: int = 0) -> str:
    revision = f"<revision><id>1</id><text>{text}</text></revision>"
    return f"<page><title>{title}</title><ns>{namespace}</ns><id>5</id>{inside}{revision}</page>"


@pytest.mark.parametrize("count", [1, 3])
def test_a_page_may_have_any_number_of_revisions_but_none_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("realmops.readers.mediawiki.LINE_LIMIT", 100_000)
    revision = f"<revision><id>1</id><text>{'old ' * 15_000}</text></revision>"
    path = write(tmp_path / "a.xml", dump(page("A", revision * count, "new") + PAGE))
    assert kept(read(path)) == [("A", "new"), ("A", "A is a.")]
    for odd in ("<x>{}</x>", "<page>{}</page>", "<revision>{}</revision>", "<page><revision>{}</revision></page>"):
        outcomes = read(write(tmp_path / "b.xml", dump(PAGE + odd.format("<a/>" * 40_000))))
        assert kinds(outcomes) == ["kept", "rejected"], odd
        assert "a revision takes more than" in problem(outcomes[1])


def test_a_dump_without_end_of_namespaces_ends(tmp_path: Path) -> None:
    for count, expected in ((1000, ["kept"]), (1001, ["rejected"])):
        names = "".join(f'<namespace key="6">N{n}</namespace>' for n in range(count))
        content = f"<mediawiki><siteinfo><namespaces>{names}</namespaces></siteinfo>{PAGE}</mediawiki>"
        assert kinds(read(write(tmp_path / "a.xml", content))) == expected


def test_a_dump_is_read_in_flat_memory(tmp_path: Path) -> None:
    def peak(pages: int) -> int:
        path = write(tmp_path / f"{pages}.xml", dump(PAGE * pages))
        tracemalloc.start()
        for _ in FORMATS["mediawiki"].records(path):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(400)  # imports, and what is made once and kept
    assert peak(1600) < 1.5 * peak(400)


@pytest.mark.parametrize(
    "piece", ["{{a|", "[[a|", "{|\n|a\n", "<b>", "<ref>", "[//a ", "{{{a|", "[[a\n{{", "==a", "<nowiki>", "(,"]
)
def test_time_grows_with_length_not_with_its_square(piece: str) -> None:
    """Measured in calls: the parser sees no bracket that never closes."""
    seen = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    def calls(copies: int) -> int:
        nonlocal seen
        seen = 0
        sys.setprofile(count)
        try:
            wikitext_to_text(piece * copies)
        except ValueError:
            pass
        finally:
            sys.setprofile(None)
        return seen

    calls(10)
    assert calls(2000) < 12 * calls(200) + 100


# Text extracted from a dump


@pytest.mark.parametrize("name", ["wiki_00", "wiki_00.bz2", "wiki_00.txt"])
def test_text_extracted_from_a_dump_is_refused_with_the_name_of_the_dump(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "in/AA" / name, '<doc id="1" url="u" title="A">\nA\n\nText.\n</doc>\n')
    for documents in (path, tmp_path / "in"):
        with pytest.raises(ValueError, match=rf"{name}: it begins with <doc.*name the dump itself"):
            list_sources(documents, "auto")
    write(tmp_path / "in/a.md", "about")
    [source] = [one for one in list_sources(tmp_path / "in", "auto") if one.path == path]
    [outcome] = source.format.records(path)
    assert isinstance(outcome, Rejected)
    assert "name the dump itself" in outcome.problem
