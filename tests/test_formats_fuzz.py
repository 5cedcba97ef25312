"""Every reader on bytes of any kind and on damaged files: documents, counted rejects or one ValueError, in time.

REALMOPS_FUZZ is the number of files for each reader; without it there are 100.
"""

import bz2
import gzip
import io
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_files import docx, pdf, pptx, xlsx

from realmops.corpus.documents import Document, Dropped, Raw, Rejected
from realmops.corpus.formats import FORMATS, sources
from realmops.corpus.formats.wikitext import plain_text

FILES = int(os.environ.get("REALMOPS_FUZZ", "100"))
fuzz = settings(
    max_examples=FILES,
    deadline=20_000,  # milliseconds for one file; they take a few
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

PAGE = (
    "<html><head><title>Oslo</title><meta charset='utf-8'></head><body><h1>Oslo</h1><p>Oslo is the capital of "
    "Norway &amp; its largest city, at the end of a long fjord.</p><ul><li>one</li></ul></body></html>"
)
WIKITEXT = (
    "{{Infobox|a=[[b]]}}'''Oslo''' is a [[city|town]] ([[:de:Oslo]]) of {{convert|5|km}}.<ref name=x>a</ref>"
    "\n== Life ==\n[[File:a.jpg|thumb|a [[b]]]]\n{| class=x\n|-\n| a || b\n|}\n* one\n*: [http://a b] &nbsp; <br/>"
    "\n== See also ==\n* [[Bergen]]\n<!-- c -->{{{1|d}}} <math>x</math> <nowiki>[[e]]</nowiki> [[fr:Oslo]]"
)
XML = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/"><siteinfo><namespaces><namespace key="6">Datei'
    "</namespace></namespaces></siteinfo><page><title>Oslo</title><ns>0</ns><id>1</id><revision><id>2</id><model>"
    f"wikitext</model><text>{WIKITEXT.replace('&', '&amp;').replace('<', '&lt;')}</text></revision></page><page>"
    '<title>A</title><ns>0</ns><id>2</id><redirect title="Oslo"/><revision><id>3</id><text>x</text></revision></page>'
    "</mediawiki>"
)
LINES = '{"title": "A", "text": "é", "id": 1, "spans": [[0, 1, "X"]], "n": [1.5, {}]}\n{"title": "B", "text": ""}\n'
MARKDOWN = "---\ntitle: A\n---\n# A *b*\n\n[c](d) `e`\n\n- f\n\n| g |\n|---|\n| 1 |\n\n```\ni\n```\n<b>\n"


def warc_record(kind: str, block: str, **headers: str) -> bytes:
    lines = {"WARC-Type": kind, "WARC-Target-URI": "http://a/b", "Content-Length": str(len(block.encode())), **headers}
    head = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
    return f"WARC/1.0\r\n{head}\r\n{block}\r\n\r\n".encode()


WARC = [
    warc_record("warcinfo", "software: none"),
    warc_record("response", f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n{PAGE}"),
    warc_record(
        "response",
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ),
    warc_record("resource", PAGE, **{"Content-Type": "text/html"}),
]


def parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    rows = [{"title": f"t{n}", "text": f"text {n}", "id": n, "extra": [1.0, None]} for n in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=4)
    return file.getvalue()


VALID: dict[tuple[str, str], bytes] = {
    ("jsonl", "a.jsonl"): LINES.encode(),
    ("jsonl", "a.jsonl.gz"): gzip.compress(LINES.encode(), mtime=0),
    ("parquet", "a.parquet"): parquet(),
    ("csv", "a.csv"): 'id,title,text,n\n1,A,"é ""b"", c",2\n,B,d,\n'.encode(),
    (
        "rst",
        "a.rst",
    ): b"A\n=\n\n*b* :c:`d <e>`\n\n.. note:: f\n\n== ==\nA  B\n== ==\n\n- h_\n\n.. _h: i\n",
    ("pdf", "a.pdf"): pdf("Oslo is a city.", "Bergen too.", title="A"),
    ("docx", "a.docx"): docx("Oslo is a city.", cells=["a", "b"]),
    ("pptx", "a.pptx"): pptx("Oslo is a city.", "Bergen too.", notes="a"),
    ("xlsx", "a.xlsx"): xlsx({"A": [["Oslo", 1.5]], "B": [[None, True]]}),
    ("text", "a.txt"): "Oslo is a city é.\r\n".encode(),
    ("text", "a.md"): MARKDOWN.encode(),
    ("text", "a.html"): PAGE.encode(),
    ("mediawiki", "a.xml"): XML.encode(),
    ("mediawiki", "a.xml.gz"): gzip.compress(XML.encode(), mtime=0),
    ("mediawiki", "a.xml.bz2"): bz2.compress(XML.encode()),
    ("warc", "a.warc"): b"".join(WARC),
    ("warc", "a.warc.gz"): b"".join(gzip.compress(record, mtime=0) for record in WARC),
}


INSERTED = (*b"< > [[ ]] {{ }} {| \0 \xff \" & -1 \\ ( ) ' : ,".split(), b"\t", b"\n", b"\r\n\r\n", b"9" * 20)


def damage(valid: bytes, seed: int) -> bytes:
    """The file with up to six pieces replaced, left out, inserted, repeated or moved, and now and then its end cut."""
    random = Random(seed)
    data = valid
    for _ in range(random.randint(1, 6)):
        start = random.randint(0, len(data))
        stop = min(len(data), start + random.choice((0, 1, 1, 2, 8, 40)))
        piece = random.choice(
            (b"", random.randbytes(random.randint(1, 4)), random.choice(INSERTED), data[start:stop] * 9)
        )
        data = data[:start] + piece + data[stop:]
    return data if random.random() < 0.8 else data[: random.randint(0, len(data))]


SEEDS = st.integers(0, 2**32 - 1)


def check(name: str, path: Path) -> int:
    """Read a file as the format ``name``; returns the number of documents."""
    documents = 0
    try:
        for outcome in outcomes(name, path):
            assert outcome.place.startswith(str(path))
            if isinstance(outcome, Document):
                documents += 1
                assert outcome.text.strip()
                (outcome.title + outcome.text + outcome.extra).encode()
    except ValueError as error:
        if str(path) not in str(error):
            raise
    return documents


def outcomes(name: str, path: Path) -> Iterator[Document | Dropped | Rejected]:
    (source,) = sources(path, name)
    for raw in source.format.records(source.path):
        outcome = source.format.convert(raw) if isinstance(raw, Raw) else raw
        assert isinstance(outcome, Document | Dropped | Rejected)
        yield outcome


@pytest.mark.parametrize(("name", "file"), VALID)
def test_the_files_to_damage_are_whole(tmp_path: Path, name: str, file: str) -> None:
    path = tmp_path / file
    path.write_bytes(VALID[name, file])
    assert check(name, path) > 0


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", sorted({name for name, _ in VALID}))
def test_any_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    files = [(file, whole) for (format, file), whole in VALID.items() if format == name]

    @fuzz
    @given(st.sampled_from(files), st.binary(max_size=200) | SEEDS)
    def read_one(valid: tuple[str, bytes], change: bytes | int) -> None:
        file, whole = valid
        path = tmp_path / file
        path.write_bytes(damage(whole, change) if isinstance(change, int) else change)
        check(name, path)

    read_one()


@pytest.mark.timeout(0)
def test_a_damaged_dataset_is_read_or_refused(tmp_path: Path) -> None:
    """Any file of the folder; Arrow believes offsets, so that damage could reach into memory."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = tmp_path / "saved"
    rows = {"title": ["A", "B"], "text": ["a text", "b text"], "tags": [["x"], []]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder))
    assert check("dataset", folder) == 2
    files = {path: path.read_bytes() for path in sorted(folder.iterdir())}

    @fuzz
    @given(st.sampled_from(sorted(files)), SEEDS)
    def read_one(path: Path, seed: int) -> None:
        path.write_bytes(damage(files[path], seed))
        check("dataset", folder)
        path.write_bytes(files[path])

    read_one()


TOKENS = ["{{", "}}", "[[", "]]", "{|\n", "\n|}", "|", "\n", "=", "==", "'''", "<ref>", "</ref>", "<nowiki>", "<!--"]
TOKENS += ["-->", "<br", "/>", "lang", "convert", "File:", "http://a", "[", "]", "(", ")", ",", "é", " ", "{", "&amp;"]


@pytest.mark.timeout(0)
@fuzz
@given(st.lists(st.sampled_from(TOKENS), max_size=200))
def test_any_wikitext_becomes_text_without_brackets(tokens: list[str]) -> None:
    source = "".join(tokens)
    if source.count("{{") + source.count("[[") + source.count("{|") > 40:  # may be nested too deeply
        source = source[:80]
    text = plain_text(source)
    if "<nowiki>" not in tokens:
        assert not any(mark in text for mark in ("[[", "]]", "{{", "}}", "{|", "|}", "''", "<ref>", "<br/>"))


def test_every_format_is_fuzzed() -> None:
    assert {name for name, _ in VALID} | {"dataset"} == FORMATS.keys()
