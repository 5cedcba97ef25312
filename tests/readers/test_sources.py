"""The format of each file, and folders of mixed files: what is read, what is counted as unread, what ends the stage."""

import contextlib
import gzip
import json
import os
import socket
import sys
import zipfile
from pathlib import Path

import pytest
from damaged_files import WRITERS
from paged_files import docx, pdf, pptx, xlsx
from small_project import Quiet, stage, write_project
from small_world import build_snapshot

from realmops import compressed
from realmops.answering.record import citation_record, format_page
from realmops.artifacts import sha256_file
from realmops.config import load_params
from realmops.corpus.snapshot_reader import REJECTS, SOURCES, read_rejects
from realmops.readers.documents import RawRecord, Rejected
from realmops.readers.sources import FORMATS, list_sources

WORDS = ("Anna Berg was born in Oslo. She wrote The Cold\nSea in 1931.", "It rained. Karl Lund lives in Bergen.")


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a.json.gz", gzip.compress(b'{"title": "A"}', mtime=0), "jsonl"),
        ("noname", '\n {"title": "A"}', "jsonl"),
        ("part-0", "PAR1", "parquet"),
        ("A.JSONL", '{"title": "A"}', "jsonl"),
        ("a.MD", "# A", "text"),
        ("a.htm", "<html>", "text"),
        ("dump.xml-p10p30", '<?xml version="1.0"?>\n<mediawiki>', "mediawiki"),
        ("a.xml", "", "mediawiki"),
        ("a", pdf("x"), "pdf"),
    ],
)
def test_format_is_detected_from_content_then_name(tmp_path: Path, name: str, content: str, format: str) -> None:
    [source] = list_sources(write(tmp_path / name, content), "auto")
    assert (source.format, source.size) == (FORMATS[format], source.path.stat().st_size)


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("a.pdf", "pypdfium2", "documents"), ("a.rst", "xberg", "documents"),
     ("hf:owner/name:train", "datasets", "datasets")],
)  # fmt: skip
def test_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    documents = Path(name) if name.startswith("hf:") else write(tmp_path / name, b"x")
    with pytest.raises(ValueError, match=rf"pip install 'realmops\[{extra}\]'"):
        list_sources(documents, "auto")


def test_dataset_on_disk_is_read_with_all_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"title": "A", "text": "a", "id": 7}, {"title": "B", "text": "", "id": None}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "two"))
    for folder, splits in (("one", ["one"]), ("two", ["test", "train"])):
        sources = list_sources(tmp_path / folder, "auto")
        assert [source.path.name for source in sources] == splits
        for source in sources:
            records = [raw for raw in source.format.records(source.path) if isinstance(raw, RawRecord)]
            assert [raw.data for raw in records] == rows.to_list()
    with pytest.raises(ValueError, match="set the format to dataset"):
        list_sources(tmp_path / "one", "parquet")
    with pytest.raises(ValueError, match=r"hf:no/set: .*load_dataset\('no/set'\)\.save_to_disk"):
        list_sources(Path("hf:no/set"), "auto")


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
    "j.json": b'[{"title": "J", "text": "Pia Dal was born in Kuopio."}]',
}
UNREAD = {
    "1.png": (b"\x89PNG", "png"),
    "2.zip": (b"PK\x03\x04", "broken_archive"),
    "3.pdf": (b"%PDF-1.4", "broken_pdf"),
    "4.pdf": (pdf("x", password="secret"), "encrypted"),
    "5.pdf": (pdf("", ""), "scan"),
    "5a.pdf": (b"", "broken_pdf"),
    "6.csv": (b"name,age\nA,1\n", "broken_csv"),
    "7.json": (b'{\n  "version": 1\n}\n', "json"),
    "7a.ndjson": (b'{"name": "A"}', "ndjson"),
    "8.txt": (b"caf\xe9", "broken_text"),
    "9.parquet": (b"PAR1", "broken_parquet"),
    "LICENCE": (b"x", "other"),
    "noname": (b'{"name": "A"}', "other"),
    "w.warc": (b"WARC/1.0", "warc"),
    "x.jsonl.gz": (b"", "broken_jsonl"),
    "~$mill.docx": (b"\x05Jorun", "lock_file"),
}
SPECIAL = {"pipe.jsonl": "pipe", "socket.jsonl": "socket", "zero.jsonl": "device", "absent.txt": "broken_text"}
KINDS = {name: kind for name, (_, kind) in UNREAD.items()} | SPECIAL


def mixed(folder: Path) -> Path:
    for name, data in (MIXED | {name: data for name, (data, _) in UNREAD.items()}).items():
        write(folder / name, data)
    os.mkfifo(folder / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(folder):
        bound.bind("socket.jsonl")
    (folder / "zero.jsonl").symlink_to("/dev/zero")
    (folder / "absent.txt").symlink_to(folder / "nowhere")
    return folder


def test_mixed_folder_is_read_file_by_file(tmp_path: Path) -> None:
    folder = mixed(tmp_path / "in")
    snapshots = [build_snapshot(tmp_path / str(n), folder, block_wordpieces=40, workers=n) for n in (1, 2)]
    digests = [{path.name: sha256_file(path) for path in one.folder.iterdir() if path.is_file()} for one in snapshots]
    assert digests[0] == digests[1]
    snapshot = snapshots[0]
    text = " ".join(snapshot.column("text"))
    towns = ["Oslo", "Narva", "Turku", "Riga", "Visby", "Tromso", "Lund", "Aarhus", "Una", "Kuopio"]
    assert [town for town in towns if town in text] == towns
    unread = {
        Path(one["place"]).name.partition(":")[0]: one["kind"] for one in read_rejects(snapshot.folder, unread=True)
    }
    assert unread == KINDS
    assert [one["place"] for one in read_rejects(snapshot.folder)] == [f"{folder / 'i.jsonl'}:2"]
    per_file = {one["source"]: one for one in map(json.loads, (snapshot.folder / SOURCES).read_bytes().splitlines())}
    assert per_file.keys() == MIXED.keys() | KINDS.keys()
    assert (per_file["1.png"]["unread"], per_file["a.pdf"]["documents"]) == ({"png": 1}, 1)
    assert {snapshot.uri(p) for p in range(len(snapshot))} == MIXED.keys()


def test_stage_counts_and_names_unread_files_and_pages_without_text(tmp_path: Path) -> None:
    values = load_params(write_project(tmp_path, snapshot={"documents": "in", "format": "auto"}))
    mixed(tmp_path / "in")
    write(tmp_path / "in" / "z.pdf", pdf(*WORDS, "", ""))
    report = Quiet()
    metrics = stage("snapshot", values, tmp_path, tmp_path / "root", report)
    counts = {name.removeprefix("unread_"): count for name, count in metrics.items() if name.startswith("unread_")}
    assert counts == {kind: [*KINDS.values()].count(kind) for kind in KINDS.values()}
    assert (metrics["documents"], metrics["rejected"], metrics["omitted_page_without_text"]) == (211, 1, 2)
    [warning] = [warning for warning in report.warned if "could not be read" in warning]
    assert warning.startswith("files of corpus could not be read and are left out: 2 broken_pdf (3.pdf, 5a")
    assert REJECTS in warning
    [warning] = [warning for warning in report.warned if "wait for OCR" in warning]
    assert warning.startswith("4 scanned files and pages of corpus wait for OCR; install tesseract")
    [warning] = [warning for warning in report.warned if "page without text" in warning]
    assert warning.startswith("left out of 1 of 211 documents of corpus: page without text 2 (z.pdf: 3, 4); ")


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_unreadable_file_ends_the_stage_where_its_format_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.text", "x")
    (tmp_path / f"b{name[1:]}").symlink_to("nowhere")
    [format] = [source.format.name for source in list_sources(write(tmp_path / "c" / name, WRITERS[name]("x")), "auto")]
    with pytest.raises(ValueError, match=rf"b\{name[1:]}: cannot be read \(.*No such file or directory"):
        [list(source.format.records(source.path)) for source in list_sources(tmp_path, format)]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.xml", "a.parquet"])
def test_truncated_file_ends_the_stage_whatever_share_may_be_broken(tmp_path: Path, name: str) -> None:
    lines = "".join(json.dumps({"title": f"T{n}", "text": str(n**9)}) + "\n" for n in range(400)).encode()
    data = gzip.compress(lines) if name.endswith(".gz") else WRITERS[name]("A text.")
    write(tmp_path / "in" / name, data[: len(data) * 2 // 3])
    with pytest.raises(ValueError, match=rf"{name}.*records of the file were read before\); or remove the file"):
        build_snapshot(tmp_path, tmp_path / "in")
    assert not (tmp_path / "snapshot").exists()


def test_members_of_an_archive_are_files_up_to_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "MAX_MEMBERS", 2)
    monkeypatch.setattr(compressed, "_MAX_UNPACKED", 1000)
    (tmp_path / "in").mkdir()
    for name, sizes in (("a.zip", [5, 5, 5]), ("b.zip", [5, 2000])):
        with zipfile.ZipFile(tmp_path / "in" / name, "w") as archive:
            for number, size in enumerate(sizes):
                archive.writestr(f"{number}.txt", f"{name} {number} {'word ' * size}")
    snapshot = build_snapshot(tmp_path, tmp_path / "in")
    assert {snapshot.uri(p) for p in range(len(snapshot))} == {"a.zip/0.txt", "a.zip/1.txt", "b.zip/0.txt"}
    unread = [(Path(one["place"]).name, one["kind"]) for one in read_rejects(snapshot.folder, unread=True)]
    assert unread == [("a.zip", "too_large"), ("b.zip", "too_large")]


def test_stage_ends_where_no_file_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / "in" / "1.png", b"x")
    write(tmp_path / "in" / "2.pdf", pdf("x", password="secret"))
    with pytest.raises(ValueError, match=r"no passage is left of 2 documents(.|\n)*2\.pdf: the PDF needs a password"):
        build_snapshot(tmp_path, tmp_path / "in")


@pytest.mark.usefixtures("unlistable")
def test_unlistable_folder_is_counted_as_unread(tmp_path: Path) -> None:
    for name in ("a.jsonl", "closed/b.jsonl"):
        write(tmp_path / name, '{"title": "A", "text": "a"}')
    for format in ("auto", "jsonl"):
        _, closed = list_sources(tmp_path, format)
        [rejected] = closed.format.records(closed.path)
        assert isinstance(rejected, Rejected)
        assert rejected.kind == "folder"
        assert "in folders and whole archives that can be listed" in rejected.problem


def test_bytes_of_file_names_that_are_not_utf_8_are_escaped(tmp_path: Path) -> None:
    lines = '{"title": "caf\\\\xe9", "text": "a b."}\n' * 200 + "broken"
    try:
        write(tmp_path / "in" / os.fsdecode(b"caf\xe9.jsonl"), lines)
    except OSError:
        pytest.skip("this file system refuses the name")
    snapshot = build_snapshot(tmp_path, tmp_path / "in")
    assert (snapshot.title(0), snapshot.uri(0)) == ("caf\\xe9", "caf\\xe9.jsonl")
    assert [rejected["place"][-14:] for rejected in read_rejects(snapshot.folder)] == ["caf\\xe9.jsonl:201"[-14:]]


@pytest.mark.parametrize(("name", "data"), [("a.pdf", pdf(*WORDS)), ("a.pptx", pptx(*WORDS))])
def test_citation_names_the_page_of_its_quotation(tmp_path: Path, name: str, data: bytes) -> None:
    path = write(tmp_path / name, data)
    snapshot = build_snapshot(tmp_path, path, block_wordpieces=200)
    assert len(snapshot) == 1, "the passage runs over the end of the page"
    pages = {}
    for word in ("Anna Berg", "1931", "It rained", "Bergen"):
        start = snapshot.text(0).index(word)
        citation = citation_record(snapshot, 0, (start, start + len(word)))
        assert citation["quote"] == word
        pages[word] = citation["page"]
    assert pages == {"Anna Berg": 1, "1931": 1, "It rained": 2, "Bergen": 2}
    both = citation_record(snapshot, 0, (0, len(snapshot.text(0))))
    assert format_page(both) == ", pages 1-2"
    short = build_snapshot(tmp_path / "short", path, block_wordpieces=16)
    assert [short.page(p, 0) for p in range(len(short))] == [1, 1, 2]
    assert snapshot.extra(0) == {}, "the column of the pages is no field of the document"
