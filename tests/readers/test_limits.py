"""Limits of readers: memory, text, cells and time of files that hold more than their size suggests."""

import bz2
import gzip
import json
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damaged_files import WRITERS, dump, page
from paged_files import docx, drawn_forms, pdf, pptx, xlsx

from realmops.corpus.ingest import iter_batches, parse_records
from realmops.readers import sandbox
from realmops.readers.documents import Document, Dropped, Outcome, RawRecord
from realmops.readers.paged import convert
from realmops.readers.sources import FORMATS, list_sources


def read(path: Path, data: str | bytes | None = None) -> list[Outcome]:
    """Return the outcomes of a file, read in this process, so that a test can set its limits."""
    if data is not None:
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    [source] = list_sources(path, "auto")
    records = source.format.records(path)
    if source.format.is_document:
        return [convert(source.format.name, raw) for raw in records if isinstance(raw, RawRecord)]
    return [source.format.convert(raw) if isinstance(raw, RawRecord) else raw for raw in records]


def kinds(outcomes: list[Outcome]) -> list[str]:
    """Return "kept", the reason, the kind of an unread file or "rejected" for each outcome."""
    return [
        "kept" if isinstance(outcome, Document) else outcome.reason if isinstance(outcome, Dropped)
        else outcome.kind or "rejected" for outcome in outcomes
    ]  # fmt: skip


def edited(data: bytes, part: str, old: str, new: str) -> bytes:
    """Return an Office file with a text of one part replaced."""
    whole, file = zipfile.ZipFile(BytesIO(data)), BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        for name in whole.namelist():
            content = whole.read(name)
            out.writestr(name, content.replace(old.encode(), new.encode(), 1) if name == part else content)
    return file.getvalue()


CSV = 'title,text\nA,"a\nb\nc"\n' + 'A,"a\nb\nc"\n' * 2  # rows of ten characters
CHARACTERS = {f"{module}.LINE_LIMIT": 10 for module in ("contents", "paged", "spreadsheet")}
REVISIONS = {"mediawiki.LINE_LIMIT": 100_000}
REVISION = f"<revision><id>1</id><text>{'old ' * 15_000}</text></revision>"
LINE = '{"title": "A", "text": "%s"}\n'
LIMITS: list[tuple[dict[str, int], str, str | bytes, list[str]]] = [  # limits, file, content, outcomes
    ({"delimited.LINE_LIMIT": 30}, "a.csv", f'{CSV}B,"{"d" * 26}"\nC,"{"d" * 26}e"\n', ["kept"] * 4 + ["rejected"]),
    ({"delimited.LINE_LIMIT": 30}, "a.csv", f"{CSV}C," + '"\n",' * 9, ["kept"] * 3 + ["rejected"]),
    *((REVISIONS, "a.xml", dump(f"<page><title>A</title><ns>0</ns>{REVISION * n}</page>"), ["kept"]) for n in (1, 3)),
    *((REVISIONS, "a.xml", dump(page("A.") + odd.format("<a/>" * 40_000)), ["kept", "rejected"])
      for odd in ("<x>{}</x>", "<page>{}</page>", "<revision>{}</revision>", "<page><revision>{}</revision></page>")),
    ({"mediawiki._NAMESPACE_LIMIT": 1}, "a.xml", dump(page("A.")), ["kept"]),
    ({"mediawiki._NAMESPACE_LIMIT": 0}, "a.xml", dump(page("A.")), ["rejected"]),
    ({"documents.LINE_LIMIT": 1000}, "a.jsonl", "".join(LINE % (n * "a") for n in (973, 9000, 1, 974)),
     ["kept", "rejected", "kept", "rejected"]),
    ({}, "a.jsonl", "[" * 100_000, ["rejected"]),
    ({}, "a.jsonl", '{"text": ' + "[" * 100_000, ["rejected"]),
    *(({limit: 1000}, "a.docx", docx("x"), ["too_large"])
      for limit in ("paged._FILE_LIMIT", "contents._XML_LIMIT", "contents._UNPACKED_LIMIT")),
    *(({"text.LINE_LIMIT": 10}, "a.txt", "x" * size, [kind]) for size, kind in ((10, "kept"), (11, "rejected"))),
    (CHARACTERS, "a.pdf", pdf("abcde", "", "fghij"), ["kept"]),
    (CHARACTERS, "a.pdf", pdf("abcde", "", "fghijk"), ["too_large"]),
    (CHARACTERS, "a.xlsx", xlsx({"A": [["ef"]]}), ["kept"]),
    (CHARACTERS, "a.xlsx", xlsx({"A": [["ab", "cd"], ["ef"]]}), ["too_large"]),  # with the name and separators
]  # fmt: skip


@pytest.mark.parametrize(("limits", "name", "content", "expected"), LIMITS, ids=range(len(LIMITS)))
def test_content_over_a_limit_is_rejected_and_content_at_it_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, int],
    name: str,
    content: str | bytes,
    expected: list[str],
) -> None:
    monkeypatch.setattr("csv.field_size_limit", lambda _: 0)  # of the process: other tests read longer fields
    for limit, value in limits.items():
        monkeypatch.setattr(f"realmops.readers.{limit}", value)
    assert kinds(read(tmp_path / name, content)) == expected


# Tables


STRINGS = pa.array(["x", "y" * 50, None])
VALUES = [  # of three rows: the second holds 50 characters and values or more, the others fewer
    STRINGS,
    STRINGS.cast(pa.large_string()),
    STRINGS.dictionary_encode(),
    pa.array([[1], [7] * 50, None]),
    pa.array([["x"], ["y" * 25, "z" * 25], None]),
    pa.array([{"a": "x", "b": [1]}, {"a": "y" * 25, "b": [7] * 25}, None]),
    pa.array([[("a", 1)], [("b" * 50, 2)], None], pa.map_(pa.string(), pa.int64())),
    pa.array([[[1]], [[7] * 25, [], [8] * 25], [[]]]),
]


@pytest.mark.parametrize("values", VALUES, ids=lambda values: str(values.type))
def test_row_over_the_limit_rejects_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: pa.Array
) -> None:
    monkeypatch.setattr("realmops.readers.tables.LINE_LIMIT", 45)
    monkeypatch.setattr("realmops.readers.tables._SLICE", 30)
    for order in ([0, 1, 2], [2, 0, 1]):
        table = pa.table({"title": ["T"] * 3, "text": ["x"] * 3, "more": values}).take(order)
        pq.write_table(table, tmp_path / "a.parquet")
        assert kinds(read(tmp_path / "a.parquet")) == ["rejected" if row == 1 else "kept" for row in order]


@pytest.mark.parametrize("decoded", [1 << 30, 100])
def test_text_shared_by_rows_is_that_of_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: int) -> None:
    monkeypatch.setattr("realmops.readers.tables._DECODED", decoded)
    rows = [{"title": f"T{n % 2}", "text": "ab" * 20, "more": ["c" * 30, None], "n": n} for n in range(600)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=300)
    documents = [document for document in read(tmp_path / "a.parquet") if isinstance(document, Document)]
    read_rows = [{"title": one.title, "text": one.text, **json.loads(one.extra)} for one in documents]
    assert read_rows == rows


def test_list_column_with_too_many_values_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.readers.tables._LIST_VALUES", 10)
    rows = {"title": ["T"] * 2, "text": ["x"] * 2, "ten": [[1] * 9, [2]], "eleven": [[1], [2] * 10], "n": [3, 4]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    first = read(tmp_path / "a.parquet")[0]
    assert isinstance(first, Document)
    assert json.loads(first.extra) == {"n": 3, "ten": [1] * 9}


# Office files and the child process


OFFICE = {
    "a.docx": (docx("Seen."), "word/document.xml"),
    "a.pptx": (pptx("Seen."), "ppt/slides/slide1.xml"),
    "a.xlsx": (xlsx({"A": [["Seen."]]}), "xl/worksheets/sheet1.xml"),
}


@pytest.mark.parametrize("name", OFFICE)
def test_office_file_resolves_no_entities_and_is_named_if_broken(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"SECRET")
    data, part = OFFICE[name]
    content = zipfile.ZipFile(BytesIO(data)).read(part).decode()
    head, mark, body = content.partition("?>") if content.startswith("<?xml") else ("", "", content)
    bomb = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(9))
    file = f'<!ENTITY e SYSTEM "{(tmp_path / "secret").as_uri()}">'
    for entities, used in ((file, "&e;"), (f'<!ENTITY e0 "lol">{bomb}', "&e9;")):
        evil = f"{head}{mark}<!DOCTYPE x [{entities}]>{body.replace('Seen.', f'{used}Seen.')}"
        [outcome] = read(tmp_path / name, edited(data, part, content, evil))
        text = outcome.text if isinstance(outcome, Document) else str(outcome)
        assert "SECRET" not in text
        assert "lollol" not in text
        assert len(text) < 1000
    old = b"\xd0\xcf\x11\xe0" + bytes(600)  # of programs before Office 2007, or encrypted
    for broken in (data[: len(data) // 2], b"", old):
        assert kinds(read(tmp_path / name, broken)) == [f"broken_{name[2:]}"]
    assert kinds(read(tmp_path / name, edited(data, part, "<", "<<"))) == [
        "broken_docx" if name == "a.docx" else "no_text"  # a slide or sheet costs only itself
    ]
    assert kinds(read(tmp_path / name, old + "EncryptedPackage".encode("utf-16-le"))) == ["encrypted"]
    large = edited(data, part, "Seen.", "lol " * (17 << 20))
    assert len(large) < 1 << 20
    assert kinds(read(tmp_path / name, large)) == ["too_large"]


def read_in_child(path: Path) -> Any:
    return FORMATS[path.suffix[1:]].convert(RawRecord(str(path), path, 0))


SLOW = ("html", "<p " + " ".join(f"a{n}" for n in range(30_000)) + ">Text.")  # libxml2 takes quadratic time


@pytest.mark.parametrize(
    ("limit", "value", "suffix", "bad", "kind", "problem"),
    [
        ("MEMORY_LIMIT", 100 << 20, "pdf", drawn_forms(10, 6), "broken_pdf", "takes more than 100 MiB of memory"),
        ("MEMORY_LIMIT", 30 << 20, "txt", "y " * (7 << 20), "too_large", "takes more than 30 MiB of memory"),
        ("TIME_LIMIT", 0.5, *SLOW, "too_slow", "takes more than 0.5 s of processor time"),
    ],
)
def test_file_that_ends_the_child_process_rejects_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: float,
    suffix: str,
    bad: Any,
    kind: str,
    problem: str,
) -> None:
    for name, data in (("a.pdf", pdf("x")), (f"b.{suffix}", bad), ("c.txt", "y" * 4000)):
        (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    sandbox.stop_child()
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, limit, value)
        outcomes = [
            outcome for batch in iter_batches(list_sources(tmp_path, "auto")) for outcome in parse_records(batch)
        ]
    sandbox.stop_child()  # the next child has the previous limit
    assert kinds(outcomes) == ["kept", kind, "kept"]
    assert problem in str(outcomes[1])


def test_threads_that_read_at_once_get_their_own_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.docx" for n in range(2)]
    for path in paths:
        path.write_bytes(docx(f"Text of {path.stem}."))
    with ThreadPoolExecutor(4) as threads:
        texts = [outcome.text for outcome in threads.map(read_in_child, paths * 20)]
    assert texts == ["Text of 0.", "Text of 1."] * 20


# Time and memory


CHART = "http://schemas.openxmlformats.org/drawingml/2006/chart"
RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"


def chart(series: str) -> bytes:
    """Return a Word file with a chart."""
    link, kind = (
        f'<Relationship Id="c" Type="{RELATION}/chart" Target="c.xml"/>',
        "vnd.openxmlformats-officedocument.drawingml.chart+xml",
    )
    data = edited(docx("Seen."), "word/_rels/document.xml.rels", "</Rel", f"{link}</Rel")
    data = edited(
        data, "[Content_Types].xml", "</T", f'<Override PartName="/word/c.xml" ContentType="application/{kind}"/></T'
    )
    data = edited(
        data, "word/document.xml", "<w:sect", f'<c:chart xmlns:c="{CHART}" xmlns:r="{RELATION}" r:id="c"/><w:sect'
    )
    file = BytesIO(data)
    with zipfile.ZipFile(file, "a") as out:
        out.writestr("word/c.xml", f'<c:chart xmlns:c="{CHART}"><c:ser>{series}</c:ser></c:chart>')
    return file.getvalue()


def sheet(cell: str) -> bytes:
    return edited(
        xlsx({"A": [["x"]]}), "xl/worksheets/sheet1.xml", "</sheetData>", f'<row r="2">{cell}</row></sheetData>'
    )


def page_of(body: str) -> str:
    return f"<html><body><main>{body}</main></body></html>"


PIECES = ["{{a|", "[[a|", "{|\n|a\n", "<b>", "<ref>", "[//a ", "{{{a|", "[[a\n{{", "==a", "<nowiki>", "(,"]
POINT, KEY, NUMBERS = '<c:pt idx="0"><c:v>n%d</c:v></c:pt>', '"k%d": 1, ', range(60_000)
LOOPS: dict[str, tuple[str, Callable[[], str | bytes]]] = {  # quadratic loops took 30 seconds or more
    "points of a chart": ("a.docx", lambda: chart(f"<c:cat>{''.join(map(POINT.__mod__, NUMBERS))}</c:cat>")),
    "blanks after a formula": ("a.xlsx", lambda: sheet(f'<c r="A2"><f>1</f>{" " * 90_000}<v>1</v></c>')),
    "formulas that do not end": ("a.xlsx", lambda: sheet("<f " * 90_000)),
    "hidden elements": ("a.html", lambda: page_of("<p>" + "<b hidden>x</b>text of the page " * 50_000)),
    "items in a cell": ("a.html", lambda: page_of(f"<table><tr><td><ul>{'<li>item of a list</li>' * 40_000}")),
    "blanks of a page": ("a.md", lambda: f"    a{' ' * 100_000}b"),
    "keys of an object": ("a.jsonl", lambda: f'{{"text": "a", {"".join(map(KEY.__mod__, NUMBERS))}"k59999": 1}}'),
    "columns of a table": ("a.csv", lambda: f"a,{'TITLE,' * 40_000}b\n"),
    "elements of a page": ("a.xml", lambda: dump(f"<page>{'<a/>' * 40_000}{'<revision/>' * 40_000}</page>")),
    **{f"wikitext {piece!r}": ("a.xml", lambda piece=piece: dump(page(escape(piece * 90_000)))) for piece in PIECES},
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_time_of_what_a_file_repeats_is_linear(tmp_path: Path, name: str) -> None:
    file, make = LOOPS[name]
    data = make()
    handler = signal.signal(signal.SIGPROF, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_PROF, 6)  # seconds of processor time
    try:
        outcomes = read(tmp_path / file, data)
    except KeyboardInterrupt:  # readers reject a file for any other error
        outcomes = []
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
    assert outcomes


def test_dump_is_read_in_constant_memory(tmp_path: Path) -> None:
    def peak(pages: int) -> int:
        path = tmp_path / f"{pages}.xml"
        path.write_text(dump(page("A.") * pages))
        tracemalloc.start()
        assert sum(1 for _ in FORMATS["mediawiki"].records(path)) == pages
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(400)  # imports and caches
    assert peak(1600) < 1.5 * peak(400)


MIB = 1 << 20
SCALE = 16  # limits and files are smaller by this factor
BOUND = (2 << 30) // SCALE  # bytes; docs/data.md allows 2 GiB for one file or record
CODE = 64 * MIB  # of libraries that are loaded for it
PEAK = """
import collections, pathlib, resource, sys
scale, bound, small, large = (int(word) if word.isdecimal() else word for word in sys.argv[1:])
from realmops.readers.sources import list_sources
from realmops.corpus.ingest import iter_batches, parse_records

for name, module in sys.modules.items():
    if name.startswith(("realmops.corpus", "realmops.readers")):
        for limit, value in vars(module).items():
            if type(value) is int and value >= 10_000:
                setattr(module, limit, value // scale)

def run(path):
    kinds = collections.Counter()
    try:
        for batch in iter_batches(list_sources(pathlib.Path(path), "auto")):
            for outcome in parse_records(batch):
                kinds[getattr(outcome, "reason", "") or type(outcome).__name__] += 1
    except ValueError:
        kinds["ends"] += 1
    return kinds

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("VmHWM", "VmSize"))}
    return sizes["VmHWM:"], sizes["VmSize:"]

run(small)
before, mapped = peak()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 4 * bound,) * 2)  # a failure must not take all memory
kinds = run(large)
print(peak()[0] - before, *kinds)
"""


def repeated(
    first: bytes, piece: bytes, count: int, last: bytes, pack: Callable[[bytes], bytes] = gzip.compress
) -> bytes:
    """Return packed members of a file: the first, ``count`` members with about a MiB of pieces, the last."""
    return b"".join([pack(first), pack(piece * (MIB // len(piece))) * count, pack(last)])


def shared_values(rows: int, size: int, *, in_lists: bool = False) -> bytes:
    """Return a Parquet file with one long text in all rows, or as often in the list of one row."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * size]))
    lists = pa.ListArray.from_arrays(pa.array([0, rows], pa.int32()), texts)
    columns = {"text": ["x."], "more": lists} if in_lists else {"text": texts}
    sink = pa.BufferOutputStream()
    table = pa.table({"title": ["T"] * (1 if in_lists else rows), **columns})
    pq.write_table(table, sink, compression="zstd", dictionary_pagesize_limit=1 << 30)
    return sink.getvalue().to_pybytes()


PAGE_HEAD, PAGE_END = b"<mediawiki><page><title>A</title><revision><text>", b"</text></revision></page></mediawiki>"
ENTITY = b"<!DOCTYPE m [<!ENTITY a '%b'>]>" % (b"x" * 9000)
LISTS = b'{"title": "T", "text": "x.", "m": ['
LARGE: dict[str, tuple[str, Callable[[], bytes], str]] = {  # file, its content, outcome
    "text of a page": ("a.xml.bz2", lambda: repeated(PAGE_HEAD, b"word ", 192, PAGE_END, bz2.compress), "ends"),
    "elements of a page": ("a.xml.gz", lambda: repeated(b"<mediawiki><page>", b"<a/>", 8, b"</page>"), "ends"),
    "entities": ("a.xml", lambda: ENTITY + PAGE_HEAD + b"&a;" * 20_000 + PAGE_END, "ends"),
    "rows that share a text": ("a.parquet", lambda: shared_values(256, 15 * MIB // 16), "Document"),
    "a list that repeats a text": ("a.parquet", lambda: shared_values(4096, MIB // 16, in_lists=True), "Rejected"),
    "an endless row": ("a.csv.gz", lambda: repeated(b"title,text\n", b'"a\nb",', 20, b"x"), "ends"),
    "an endless line": ("a.jsonl.gz", lambda: repeated(b'{"title": "', b"a", 208, b'"}'), "Rejected"),
    "objects": ("a.jsonl.gz", lambda: gzip.compress(LISTS + b'{"":0},' * (15 * MIB // 16 // 7) + b"0]}"), "Document"),
}  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux reports the memory of a process")
@pytest.mark.parametrize("name", LARGE)
def test_small_file_takes_little_memory_whatever_it_unpacks_to(tmp_path: Path, name: str) -> None:
    file, make, kind = LARGE[name]
    small, large = tmp_path / "small" / file, tmp_path / "large" / file
    pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(small.suffix, bytes)
    plain = WRITERS[small.with_suffix("").name if pack is not bytes else file]("x.")
    for path, data in ((small, pack(plain)), (large, make())):
        path.parent.mkdir()
        path.write_bytes(data)
    assert large.stat().st_size < 8 * MIB
    command = [sys.executable, "-c", PEAK, str(SCALE), str(BOUND), str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, *kinds = done.stdout.split()
    assert kinds[-1] == kind
    assert int(peak) < BOUND + CODE
