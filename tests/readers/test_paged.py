"""PDF and Office files: text, pages, what cannot be read; and folders that mix them with all the rest."""

from __future__ import annotations

import json
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from io import BytesIO
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from paged_files import PASSWORD, docx, drawn_forms, pdf, pptx, xlsx
from small_project import Quiet, stage, write_project
from small_world import build_snapshot
from yaml import safe_load

from realmops.answering.record import citation_record, format_record
from realmops.artifacts import sha256_file
from realmops.corpus.snapshot_reader import REJECTS, SOURCES, read_rejects
from realmops.readers import sandbox
from realmops.readers.documents import Document, RawRecord, Rejected
from realmops.readers.paged import convert
from realmops.readers.sources import list_sources
from realmops.serve.page import _passages

PAGED = "realmops.readers.paged"
WORDS = (
    "Anna Berg was born in Oslo. She wrote The Cold\nSea in 1931.",
    "It rained. Karl Lund lives in Bergen.",
)


def read(path: Path) -> Any:
    """The one outcome of a file."""
    [source] = list_sources(path, "auto")
    [raw] = source.format.records(path)
    assert isinstance(raw, RawRecord)
    return source.format.convert(raw)


def test_threads_that_read_at_once_get_each_their_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is held up between its request and its reply, until the second one has had time for both."""
    paths = [written(tmp_path / f"{n}.docx", docx(f"Text of number {n}.")) for n in range(2)]
    assert [read(path).text for path in paths] == ["Text of number 0.", "Text of number 1."]
    child = sandbox._start_child(PAGED)
    asked = Event()

    class Held:
        def write(self, data: bytes) -> None:
            child.stdin.write(data)

        def flush(self) -> None:
            child.stdin.flush()
            if not asked.is_set():
                asked.set()
                time.sleep(1)

    held = SimpleNamespace(stdin=Held(), stdout=child.stdout)
    monkeypatch.setattr(sandbox, "_start_child", lambda *_: held)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(read, paths[0])
        assert asked.wait(60)
        second = threads.submit(read, paths[1])
        assert [first.result().text, second.result().text] == ["Text of number 0.", "Text of number 1."]


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def refused(path: Path) -> tuple[str, str]:
    """Kind and problem."""
    outcome = read(path)
    assert isinstance(outcome, Rejected), outcome
    return outcome.kind, outcome.problem


# PDF


def test_a_pdf_is_one_document_with_its_pages(tmp_path: Path) -> None:
    found = read(written(tmp_path / "on_paper.pdf", pdf(WORDS[0], "", WORDS[1])))
    assert (found.title, found.text) == ("on paper", "\n\n".join(WORDS))
    assert found.pages == (0, len(WORDS[0]) + 2, len(WORDS[0]) + 2)
    assert read(written(tmp_path / "b.pdf", pdf("x", title="A café"))).title == "A café"
    assert read(written(tmp_path / "no suffix", pdf("x"))).text == "x"
    assert (
        read(written(tmp_path / "c.pdf", pdf("It is of inter-\nnational fame."))).text == "It is of international fame."
    )


@pytest.mark.parametrize("form", ["pdf", "pptx"])
def test_a_citation_names_the_page_of_its_quotation(tmp_path: Path, form: str) -> None:
    make = {"pdf": pdf, "pptx": pptx}[form]
    path = written(tmp_path / f"a.{form}", make(*WORDS))
    snapshot = build_snapshot(tmp_path, path, block_wordpieces=200)
    assert len(snapshot) == 1, "the passage runs over the end of the page"
    pages = {}
    for word in ("Anna Berg", "1931", "It rained", "Bergen"):
        start = snapshot.text(0).index(word)
        citation = citation_record(snapshot, 0, (start, start + len(word)))
        assert citation["quote"] == word
        pages[word] = citation["page"]
    assert pages == {"Anna Berg": 1, "1931": 1, "It rained": 2, "Bergen": 2}
    short = build_snapshot(tmp_path / "short", path, block_wordpieces=16)
    assert [short.page(p, 0) for p in range(len(short))] == [1, 1, 2]
    assert snapshot.extra(0) == {}, "what we keep there is no field of the document"
    assert json.loads(snapshot.column("extra")[0]) == {"realmops_pages": [[1, 0], [2, snapshot.text(0).index("It r")]]}


def test_the_printed_answer_names_the_page(tmp_path: Path) -> None:
    snapshot = build_snapshot(tmp_path, written(tmp_path / "a.pdf", pdf(*WORDS)), block_wordpieces=200)
    start = snapshot.text(0).index("Bergen")
    citation = {**citation_record(snapshot, 0, (start, start + 6)), "p_z": 0.5}
    passage = {**citation_record(snapshot, 0, (0, len(snapshot.text(0)))), "text": snapshot.text(0)}
    record = {"question": "", "answer": "Bergen", "probability": 0.5, "abstained": False, "threshold": None}
    record["model"] = {"reader": "spans"}
    lines = format_record({**record, "citations": [citation], "passages": [passage]})
    name = snapshot.document_id(0)
    assert lines[2] == f"    document {name}, a.pdf, page 2, characters {start} to {start + 6}, p(z|x) 0.50"
    [shown] = _passages({"question": "", "passages": [passage]}, {passage["passage_id"]: citation}, (), {})
    assert (passage["page"], shown.record["page"], shown.quoted) == (1, 2, "Bergen")


# Office


def test_word_documents_keep_tables_and_signs(tmp_path: Path) -> None:
    path = written(tmp_path / "a.docx", docx("One\ttwo\nthree.", "Four.", cells=("Oslo", "1931")))
    found = read(path)
    assert (found.title, found.text, found.pages) == ("a", "One\ttwo\nthree.\n\nFour.\n\nOslo\t1931", ())
    assert read(written(tmp_path / "b.docx", docx("x", title=" A  title "))).title == "A title"
    inserted = "<w:ins><w:r><w:t>new</w:t></w:r></w:ins><w:del><w:r><w:delText>old</w:delText></w:r></w:del>"
    control = f"<w:sdt><w:sdtContent><w:p>{inserted}</w:p></w:sdtContent></w:sdt>"
    changed = edited(docx("x"), "word/document.xml", "<w:body>", f"<w:body>{control}")
    assert read(written(tmp_path / "c.docx", changed)).text == "new\n\nx"


def test_slides_are_pages_and_notes_belong_to_them(tmp_path: Path) -> None:
    found = read(written(tmp_path / "a.pptx", pptx("One\nof two", "Second.", notes="Say it.")))
    assert (found.title, found.text) == ("a", "One\n\nof two\n\nSecond.\n\nSay it.")
    assert found.pages == (0, 13)


def test_sheets_are_pages_with_their_names(tmp_path: Path) -> None:
    sheets = {
        "Towns": [["name", "since"], ["Oslo", datetime(1948, 5, 1)], [None, 3.0]],
        "Empty": [],
        "Z": [[True, 1.5]],
    }
    found = read(written(tmp_path / "a.xlsx", xlsx(sheets)))
    assert found.text == "Towns\n\nname\tsince\nOslo\t1948-05-01\n\t3\n\nZ\n\nTrue\t1.5"
    assert [found.text[start:][:5].strip() for start in found.pages] == ["Towns", "Z\n\nTr", "Z\n\nTr"]


def edited(data: bytes, part: str, old: str, new: str) -> bytes:
    """An Office file with a text of one part replaced."""
    whole, file = zipfile.ZipFile(BytesIO(data)), BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        for name in whole.namelist():
            content = whole.read(name)
            if name == part:
                assert old.encode() in content
                content = content.replace(old.encode(), new.encode(), 1)
            out.writestr(name, content)
    return file.getvalue()


OFFICE = {
    "a.docx": (docx("Seen."), "word/document.xml", "Seen."),
    "a.pptx": (pptx("Seen."), "ppt/slides/slide1.xml", "Seen."),
    "a.xlsx": (xlsx({"A": [["Seen."]]}), "xl/worksheets/sheet1.xml", "Seen."),
}


@pytest.mark.parametrize("name", OFFICE)
def test_entities_of_an_office_file_are_never_read(tmp_path: Path, name: str) -> None:
    secret = written(tmp_path / "secret", b"SECRET")
    data, part, seen = OFFICE[name]
    bomb = "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(9))
    for entities, used in ((f'<!ENTITY e SYSTEM "{secret.as_uri()}">', "&e;"), (f'<!ENTITY e0 "lol">{bomb}', "&e9;")):
        content = zipfile.ZipFile(BytesIO(data)).read(part).decode()
        head, _, rest = content.partition("?>") if content.startswith("<?xml") else ("", "", content)
        evil = f"<!DOCTYPE x [{entities}]>{rest.replace(seen, f'{used}{seen}')}"
        outcome = read(written(tmp_path / name, edited(data, part, content, f"{head}?>{evil}" if head else evil)))
        text = outcome.text if isinstance(outcome, Document) else outcome.problem
        assert "SECRET" not in text
        assert "lollol" not in text
        assert len(text) < 1000


@pytest.mark.parametrize("name", OFFICE)
def test_an_office_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, name: str) -> None:
    data, part, seen = OFFICE[name]
    path = written(tmp_path / name, edited(data, part, seen, "lol " * (17 << 20)))
    assert path.stat().st_size < 1 << 20
    kind, problem = refused(path)
    assert (kind, "unpacks to more than 64 MiB" in problem) == ("too_large", True)


@pytest.mark.parametrize("name", OFFICE)
def test_an_office_file_that_is_none_is_named(tmp_path: Path, name: str) -> None:
    data, part, _ = OFFICE[name]
    broken = f"broken_{name[2:]}"
    assert refused(written(tmp_path / name, data[: len(data) // 2]))[0] == broken
    assert refused(written(tmp_path / name, b""))[0] == broken
    assert refused(written(tmp_path / name, edited(data, part, "<", "<<")))[0] == broken
    old = b"\xd0\xcf\x11\xe0" + bytes(600)
    assert refused(written(tmp_path / name, old))[0] == broken
    assert refused(written(tmp_path / name, old + "EncryptedPackage".encode("utf-16-le")))[0] == "encrypted"


def kind_here(path: Path) -> str:
    """What becomes of a file that this process reads: a limit of a test does not reach the child process."""
    outcome = convert(path.suffix[1:], RawRecord(str(path), path, 0))
    return outcome.kind if isinstance(outcome, Rejected) else type(outcome).__name__


def test_cells_are_counted_over_all_rows_and_sheets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.readers.office._CELL_LIMIT", 20)  # a row is as much as a cell
    for rows, kind in ((5, "Document"), (6, "too_large")):
        one = written(tmp_path / "one.xlsx", xlsx({"A": [["x", None, "y"]] * rows}))
        two = written(tmp_path / "two.xlsx", xlsx({"A": [["x", None, "y"]] * 3, "B": [["x", None, "y"]] * (rows - 3)}))
        assert kind_here(one) == kind_here(two) == kind
    for last, kind in ((18, "Document"), (19, "too_large")):  # rows that are left out are empty: 1, those, and 2
        row = f'<row r="{last + 1}"><c r="A{last + 1}"><v>1</v></c></row>'
        data = edited(xlsx({"A": [[]]}), "xl/worksheets/sheet1.xml", "</sheetData>", f"{row}</sheetData>")
        assert kind_here(written(tmp_path / "gap.xlsx", data)) == kind


def test_characters_are_counted_over_all_pages_and_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("contents", "office", "paged", "pdf"):
        monkeypatch.setattr(f"realmops.readers.{module}.LINE_LIMIT", 10)
    for last, kind in (("fghij", "Document"), ("fghijk", "too_large")):
        assert kind_here(written(tmp_path / "a.pdf", pdf("abcde", "", last))) == kind
    rows = [["ab", "cd"], ["ef"]]  # "A", 6 characters and 5 between them are more than 10, half of them are not
    for sheet, kind in ((rows[1:], "Document"), (rows, "too_large")):
        assert kind_here(written(tmp_path / "a.xlsx", xlsx({"A": sheet}))) == kind


def test_a_file_that_ends_its_reader_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MEMORY_LIMIT", 100 << 20)
    sandbox._stop_child(PAGED)
    good, bad = written(tmp_path / "a.pdf", pdf("x")), written(tmp_path / "b.pdf", drawn_forms(10, 6))
    before, ended, after = (read(path) for path in (good, bad, good))
    sandbox._stop_child(PAGED)  # it ends, and the next one has the limit of before
    assert before.text == after.text == "x"
    assert (ended.kind, "takes more than 100 MiB of memory" in ended.problem) == ("broken_pdf", True)


@pytest.mark.parametrize(("name", "module"), [("a.pdf", "pypdfium2"), ("a.docx", "docx"), ("a.rst", "docutils")])
def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    written(tmp_path / name, b"x")
    written(tmp_path / "b.txt", b"x")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"{name}: .*pip install 'realmops\[documents\]'"):
        list_sources(tmp_path, "auto")
    assert len(list_sources(tmp_path, "text")) == 1


# Folders of mixed files

MIXED = {
    "a.pdf": pdf(*WORDS),
    "b.docx": docx("Ole Dahl was born in Narva."),
    "c.pptx": pptx("First slide.", "Ida Moe was born in Turku."),
    "d.xlsx": xlsx({"Births": [["Ada Vik", "Riga"], ["Per Holm", "Malmö"]]}),
    "e.rst": b"Title\n=====\n\nEva Lie was born in *Visby*.\n",
    "f.csv": b"id,title,text\n1,F,Jon Aas was born in Tromso.\n",
    "g.md": b"# G\n\nLiv Ek was born in **Lund**.\n",
    "h.html": b"<title>H</title><p>Tor Krag was born in Aarhus.</p>",
    "i.jsonl": b'{"title": "I", "text": "Una Berg was born."}\nbroken\n' + b'{"title": "I", "text": "x y."}\n' * 200,
}
LEFT_OUT = {
    "1.png": (b"\x89PNG", "png"),
    "2.zip": (b"PK\x03\x04", "zip"),
    "3.pdf": (b"%PDF-1.4", "broken_pdf"),
    "4.pdf": (pdf("x", trailer=PASSWORD), "encrypted"),
    "5.pdf": (pdf("", ""), "no_text"),
    "5a.pdf": (b"", "broken_pdf"),
    "5b.pdf": (pdf(*WORDS)[:300], "broken_pdf"),
    "6.csv": (b"name,age\nA,1\n", "broken_csv"),
    "7.json": (b'{\n  "version": 1\n}\n', "json"),
    "8.txt": (b"caf\xe9", "broken_text"),
    "9.parquet": (b"PAR1", "broken_parquet"),
    "LICENCE": (b"x", "other"),
    "x.jsonl.gz": (b"", "broken_jsonl"),
    "y.png": (b"", "png"),
}


def mixed(folder: Path) -> Path:
    folder.mkdir()
    for name, data in MIXED.items():
        written(folder / name, data)
    for name, (data, _) in LEFT_OUT.items():
        written(folder / name, data)
    (folder / "z.txt").symlink_to(folder / "absent")
    return folder


def test_a_folder_of_mixed_files_is_read_each_by_its_format(tmp_path: Path) -> None:
    folder = mixed(tmp_path / "in")
    found = [build_snapshot(tmp_path / str(n), folder, block_wordpieces=40, workers=n) for n in (1, 2)]
    digests = [{path.name: sha256_file(path) for path in one.folder.iterdir() if path.is_file()} for one in found]
    assert digests[0] == digests[1]
    snapshot = found[0]
    whole = " ".join(snapshot.column("text"))
    assert all(town in whole for town in ["Oslo", "Narva", "Turku", "Riga", "Visby", "Tromso", "Lund", "Aarhus"])
    left_out = {
        Path(one["place"]).name.partition(":")[0]: one["kind"] for one in read_rejects(snapshot.folder, unread=True)
    }
    assert left_out == {name: kind for name, (_, kind) in LEFT_OUT.items()} | {"z.txt": "broken_text"}
    assert [one["place"] for one in read_rejects(snapshot.folder)] == [f"{folder / 'i.jsonl'}:2"]
    per_file = {one["source"]: one for one in map(json.loads, (snapshot.folder / SOURCES).read_bytes().splitlines())}
    assert per_file.keys() == MIXED.keys() | LEFT_OUT.keys() | {"z.txt"}
    assert (per_file["1.png"]["unread"], per_file["a.pdf"]["documents"]) == ({"png": 1}, 1)
    assert {snapshot.uri(p) for p in range(len(snapshot))} == MIXED.keys()


def test_the_stage_counts_and_names_what_it_left_out(tmp_path: Path) -> None:
    values = safe_load(write_project(tmp_path, snapshot={"documents": "in", "format": "auto"}).read_text())
    mixed(tmp_path / "in")
    report = Quiet()
    metrics = stage("snapshot", values, tmp_path, tmp_path / "root", report)
    kinds = [kind for _, kind in LEFT_OUT.values()]
    counted = {name.removeprefix("unread_"): count for name, count in metrics.items() if name.startswith("unread_")}
    assert counted == {kind: kinds.count(kind) + (kind == "broken_text") for kind in kinds}
    assert (metrics["documents"], metrics["rejected"]) == (209, 1)
    [told] = [warning for warning in report.warned if "could not be read" in warning]
    assert told.startswith(
        "15 files of corpus could not be read and are left out: 3 broken_pdf (3.pdf, 5a.pdf, 5b.pdf); 2 broken_text ("
    )
    assert "1 encrypted (4.pdf)" in told
    assert REJECTS in told
    only = safe_load(write_project(tmp_path, snapshot={"documents": "in", "format": "jsonl"}).read_text())
    with pytest.raises(ValueError, match="the file is empty"):
        stage("snapshot", only, tmp_path, tmp_path / "other")


def test_pages_without_text_are_counted_and_named(tmp_path: Path) -> None:
    values = safe_load(write_project(tmp_path, snapshot={"documents": "in", "format": "auto"}).read_text())
    (tmp_path / "in").mkdir()
    written(tmp_path / "in" / "a.pdf", pdf(*WORDS[:2], "", ""))
    written(tmp_path / "in" / "b.pdf", pdf(*WORDS))
    report = Quiet()
    metrics = stage("snapshot", values, tmp_path, tmp_path / "root", report)
    assert (metrics["documents"], metrics["omitted_page_without_text"]) == (2, 2)
    assert [told for told in report.warned if "page without text" in told] == [
        f"left out of 1 of 2 documents of corpus: page without text 2 (a.pdf: 3, 4); "
        f"data/snapshot/corpus/{SOURCES} under the root has the counts by file"
    ]
    lines = (tmp_path / "root/data/snapshot/corpus" / SOURCES).read_text().splitlines()
    counted = [json.loads(line) for line in lines]
    assert [(one["incomplete"], one["omitted"]) for one in counted] == [(1, {"page without text": 2}), (0, {})]


def test_where_nothing_can_be_read_the_stage_ends(tmp_path: Path) -> None:
    written(tmp_path / "1.png", b"x")
    written(tmp_path / "2.pdf", pdf("x", trailer=PASSWORD))
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"no passage is left of 2 documents(.|\n)*2\.pdf: the PDF needs a password"):
        build_snapshot(tmp_path / "out", tmp_path, block_wordpieces=40)


def test_many_broken_files_are_no_broken_records(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(9):
        written(folder / f"{number}.pdf", b"%PDF-1.4")
    written(folder / "9.pdf", pdf(*WORDS))
    assert build_snapshot(tmp_path, folder, block_wordpieces=40).manifest["unread"] == {"broken_pdf": 9}
