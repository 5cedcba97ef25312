"""Documents as people have them: whatever stands in one, it is cut or rejected by name, and the others go on."""

import bz2
import gzip
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencex
from damaged_files import SEEDS, WHOLE, WRITERS, damage, dump, fuzz, page, parquet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from read_documents import outcomes_of

from realmops.artifacts import atomic_folder
from realmops.corpus.passages import split_sentences
from realmops.corpus.snapshot_reader import REJECTS, Snapshot, read_rejects
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.vocabulary import SPECIAL_TOKENS
from realmops.readers.documents import Document, RawRecord, Rejected
from realmops.readers.sources import FORMATS, list_sources
from realmops.readers.wikitext import wikitext_to_text

VOCABULARY = [*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz.", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
BLANKS = [chr(c) for c in range(sys.maxunicode + 1) if chr(c).isspace()]
CONTROLS = [chr(c) for c in (*range(32), *range(0x7F, 0xA0), 0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F))]
VITAMIN = "It is rich in vitamin{0}A{0}. Carrots have it."
ENDS = ["A", "A.", "Dr.", "No. 1", "u.s.", "(", ")", '"', "...", "?!", "\u3002", "\n\n"]
MARKS = ["<b>", "&amp;", "{{", "[[", "|", "'''", "\ufeff", "\ufffd", "\uffff"]
SCRIPTS = [
    "\u0301", "e\u0301.", "\u05d0\u05d1 \u05d2.", "\u0645\u0631\u062d.", "\U0001f469\u200d\U0001f467", "\U0001f1e9",
]  # fmt: skip
PIECES = st.sampled_from([*BLANKS, *CONTROLS, *ENDS, *MARKS, *SCRIPTS])
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=6)), max_size=40).map("".join)


def snapshot(documents: Path, folder: Path, **options: Any) -> Snapshot:
    options = {"block_wordpieces": 30, **options}
    with atomic_folder(folder / "snapshot") as out:
        write_snapshot(list_sources(documents, "auto"), out, vocabulary=VOCABULARY, **options)
    return Snapshot.open(folder / "snapshot")


def write_lines(path: Path, *texts: str) -> Path:
    lines = [json.dumps({"title": f"T{number}", "text": text}) for number, text in enumerate(texts)]
    path.write_text("\n".join(lines))
    return path


def check_places(found: Snapshot, documents: list[Document]) -> None:
    """Every passage is the slice of its document that its place says; wordpieces and sentences lie inside, in order."""
    for index in range(len(found)):
        text, document = found.text(index), documents[int(found.places[index, 0])]
        assert document.text[found.start(index) :].startswith(text)
        assert found.title(index) == document.title
        chars, sentences = found.chars(index), found.sentences(index)
        assert (chars[:, 0] < chars[:, 1]).all()
        assert (chars[1:, 0] >= chars[:-1, 1]).all()
        assert chars.min() >= 0
        assert chars.max() <= len(text)
        assert (sentences[:, 0].tolist(), int(sentences[-1, 1])) == ([0, *sentences[:-1, 1].tolist()], len(chars))


def check_sentences(text: str) -> None:
    bounds = split_sentences(text)
    assert all(start < end for start, end in bounds)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(bounds))
    assert all(text[start:end] == text[start:end].strip() for start, end in bounds)
    covered = "".join(text[start:end] for start, end in bounds)
    assert "".join(covered.split()) == "".join(text.split())


# One document


@pytest.mark.parametrize("blank", [blank for blank in BLANKS if blank not in "\n\r"], ids=ascii)
def test_any_blank_may_follow_a_capital(blank: str) -> None:
    text = VITAMIN.format(blank)
    check_sentences(text)
    assert text[slice(*split_sentences(text)[-1])].endswith("Carrots have it.")


@settings(max_examples=400, deadline=None)
@given(TEXTS)
def test_any_text_has_sentences(text: str) -> None:
    check_sentences(text)


@pytest.mark.parametrize("workers", [1, 2])
def test_one_hostile_document_costs_no_other(tmp_path: Path, workers: int) -> None:
    texts = [
        VITAMIN.format("\xa0"), "A word. " * 50, "x" * (1 << 20), "a" + "\u200d" * 1000 + "b.", "\0\0 a.",
        "\u202ea \u05d0.", *BLANKS,
    ]  # fmt: skip
    path = write_lines(tmp_path / "a.jsonl", *texts)
    found = snapshot(path, tmp_path, workers=workers)
    check_places(found, [one for one in outcomes_of(path) if isinstance(one, Document)])
    assert {found.title(index) for index in range(len(found))} == {f"T{n}" for n in range(6)}


def test_many_titles_alike(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"title": "Alike", "text": f"a {n}."}) for n in range(2_000)))
    found = snapshot(path, tmp_path)
    assert len(found) == len(set(found.column("document_id"))) == 2_000


def test_a_document_that_a_library_fails_at_is_rejected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    segment = sentencex.segment

    def fails(language: str, text: str) -> list[str]:
        if "mark" in text:
            raise Panic("at the disco \ud800" + 1000 * "!")
        return list(segment(language, text))

    monkeypatch.setattr(sentencex, "segment", fails)
    path = write_lines(tmp_path / "a.jsonl", *(f"number {n}." for n in range(150)), "a mark.", "after it.")
    found = snapshot(path, tmp_path)
    [rejected] = [json.loads(line) for line in (found.folder / REJECTS).read_text().splitlines()]
    assert (rejected["place"], len(found)) == (f"{path}:151", 151)
    assert "Panic: at the disco \\ud800!" in rejected["problem"]
    assert len(rejected["problem"]) < 400
    with pytest.raises(ValueError, match=r"a\.jsonl:151: .*Panic"):
        snapshot(path, tmp_path / "strict", broken_share=0.0)


def test_an_interrupt_rejects_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(language: str, text: str) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(sentencex, "segment", ends)
    with pytest.raises(KeyboardInterrupt):
        snapshot(write_lines(tmp_path / "a.jsonl", "a."), tmp_path)


# Every reader


def test_every_format_has_hostile_documents(tmp_path: Path) -> None:
    for name, write in WRITERS.items():
        (tmp_path / name).write_bytes(write("a"))
    used = {list_sources(tmp_path / name, "auto")[0].format.name for name in WRITERS}
    assert used == FORMATS.keys() - {"dataset", "beir"}, "their rows are those of Parquet and JSON lines"


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(TEXTS, st.text(st.characters(), max_size=30)))
def test_any_text_passes_through_every_reader(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(WRITERS[name](text))
    [outcome] = outcomes_of(path)
    assert str(path) in outcome.place
    if isinstance(outcome, Document):
        outcome.text.encode()
        check_sentences(outcome.text)
    else:
        assert not isinstance(outcome, Rejected) or outcome.problem


def documents_of(path: Path, format: str) -> int:
    """Read a file; the number of its documents. ValueError must name it."""
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
def test_any_damaged_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(WHOLE[name])
    format = list_sources(path, "auto")[0].format.name
    assert documents_of(path, format) > 0

    @fuzz
    @given(st.binary(max_size=200) | SEEDS)
    def read_one(change: bytes | int) -> None:
        path.write_bytes(damage(WHOLE[name], change) if isinstance(change, int) else change)
        documents_of(path, format)

    read_one()


@pytest.mark.timeout(0)
def test_a_damaged_dataset_is_read_or_refused(tmp_path: Path) -> None:
    """Any file of the folder; Arrow believes offsets, so that damage could reach into memory."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = tmp_path / "saved"
    rows = {"title": ["A", "B"], "text": ["a text", "b text"], "tags": [["x"], []]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder))
    assert documents_of(folder, "dataset") == 2
    files = {path: path.read_bytes() for path in sorted(folder.iterdir())}

    @fuzz
    @given(st.sampled_from(sorted(files)), SEEDS)
    def read_one(path: Path, seed: int) -> None:
        path.write_bytes(damage(files[path], seed))
        documents_of(folder, "dataset")
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
    text = wikitext_to_text(source)
    if "<nowiki>" not in tokens:
        assert not any(mark in text for mark in ("[[", "]]", "{{", "}}", "{|", "|}", "''", "<ref>", "<br/>"))


# What ends a file


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def random_text(number: int) -> str:
    return " ".join(f"{(number * 7919 + n) ** 3 % 1000003:x}" for n in range(40))


LINES = "".join(json.dumps({"title": f"T{n}", "text": random_text(n)}) + "\n" for n in range(400)).encode()
DUMP = dump("".join(page(n, random_text(n)) for n in range(400))).encode()
CUT = {
    "a.jsonl.gz": cut(gzip.compress(LINES)), "a.jsonl.bz2": cut(bz2.compress(LINES)), "a.xml": cut(DUMP),
    "a.xml.gz": cut(gzip.compress(DUMP)),
    "a.parquet": cut(parquet("A text.")),
}  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_a_cut_file_ends_the_stage_whatever_share_may_be_broken(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(CUT[name])
    with pytest.raises(ValueError, match=rf"{name}.*records of the file were read before\); or remove the file"):
        snapshot(tmp_path / "in", tmp_path, broken_share=1.0)
    assert not (tmp_path / "snapshot").exists()


# Names of columns, files and folders


def test_parquet_columns_of_bytes_are_text(tmp_path: Path) -> None:
    texts, ids = pa.array([b"caf\xc3\xa9.", b"caf\xe9."], pa.binary()), pa.array([b"1", b"2"], pa.binary())
    table = pa.table({"title": pa.array([b"A", b"B"], pa.large_binary()), "text": texts, "id": ids})
    pq.write_table(table, tmp_path / "a.parquet")
    first, second = outcomes_of(tmp_path / "a.parquet")
    assert (first.title, first.text, first.id) == ("A", "café.", "1")
    assert isinstance(second, Rejected)
    assert "'text' is invalid UTF-8 at byte 3" in second.problem


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_file_name_that_is_no_utf_8_is_escaped(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "in").mkdir()
    name = os.path.join(os.fsencode(tmp_path / "in"), b"caf\xe9" + suffix.encode())
    text = "a b." if suffix == ".txt" else '{"title": "caf\\\\xe9", "text": "a b."}\nbroken'
    try:
        with open(name, "w") as file:
            file.write(text)
    except OSError:
        pytest.skip("this disk takes no such name")
    found = snapshot(tmp_path / "in", tmp_path, broken_share=0.5)
    assert (found.title(0), found.uri(0)) == ("caf\\xe9", f"caf\\xe9{suffix}")
    if suffix == ".jsonl":
        [rejected] = [json.loads(line) for line in (found.folder / REJECTS).read_text().splitlines()]
        assert rejected["place"].endswith("caf\\xe9.jsonl:2")


def test_odd_elements_of_a_dump_cost_no_page(tmp_path: Path) -> None:
    pages = [page(1, "a b", "A", "<upload><filename>x</filename></upload>"), page(2, "a b", "")]
    pages += [page(3, "a b", "C", "long ago"), page(4, "a b", "D", "<new/>")]
    (tmp_path / "a.xml").write_text(dump("".join(pages)))
    found = outcomes_of(tmp_path / "a.xml")
    assert [one.title for one in found if isinstance(one, Document)] == ["A", "", "C", "D"]


# Small files that hold much

MIB = 1 << 20
SCALE = 16  # limits are so many times smaller here, and files with them
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
    kinds, found = collections.Counter(), list_sources(pathlib.Path(path), "auto")
    try:
        for batch in iter_batches(found):
            for one in parse_records([(found[n].format.name, records) for n, records in batch]):
                kinds[getattr(one, "reason", "") or type(one).__name__] += 1
    except ValueError:
        kinds["ends"] += 1
    return kinds

def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("VmHWM", "VmSize"))}
    return sizes["VmHWM:"], sizes["VmSize:"]

run(small)
before, mapped = peak()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 4 * bound,) * 2)  # what fails shall not take all memory
kinds = run(large)
print(peak()[0] - before, *kinds)
"""


def repeated(
    first: bytes, piece: bytes, size: int, last: bytes, pack: Callable[[bytes], bytes] = gzip.compress
) -> bytes:
    """Packed members of a file: the first, one with about a MiB of a piece until ``size`` bytes are there, the last."""
    piece *= MIB // len(piece)
    return b"".join([pack(first), pack(piece) * (size // len(piece)), pack(last)])


def shared_values(rows: int, size: int, *, in_lists: bool = False) -> bytes:
    """Parquet: one long text that is in all rows, or as often in the list of one row."""
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
LARGE: dict[str, tuple[str, Callable[[], bytes], str]] = {  # the file, what is in it, and what becomes of it
    "text of a page": ("a.xml.bz2", lambda: repeated(PAGE_HEAD, b"word ", 192 * MIB, PAGE_END, bz2.compress), "ends"),
    "elements of a page": (
        "a.xml.gz",
        lambda: repeated(b"<mediawiki><page>", b"<a/>", 8 * MIB, b"</page></mediawiki>"),
        "ends",
    ),
    "entities": ("a.xml", lambda: ENTITY + PAGE_HEAD + b"&a;" * 20_000 + PAGE_END, "ends"),
    "rows that share a text": ("a.parquet", lambda: shared_values(256, 15 * MIB // 16), "Document"),
    "a list that repeats a text": ("a.parquet", lambda: shared_values(4096, MIB // 16, in_lists=True), "Rejected"),
    "a row without end": ("a.csv.gz", lambda: repeated(b"title,text\n", b'"a\nb",', 20 * MIB, b"x"), "ends"),
    "a line without end": ("a.jsonl.gz", lambda: repeated(b'{"title": "', b"a", 208 * MIB, b'"}'), "Rejected"),
    "objects": ("a.jsonl.gz", lambda: gzip.compress(LISTS + b'{"":0},' * (15 * MIB // 16 // 7) + b"0]}"), "Document"),
    "tables of contents": (
        "a.rst",
        lambda: b"".join(b"T%d\n====\n\n" % n for n in range(300)) + b".. contents::\n\n" * 300,
        "Document",
    ),
    "escapes": ("a.md", lambda: b"\\." * (MIB // 16), "Document"),
    "attributes": ("a.html", lambda: b"<html><p %b>Text." % b" ".join(b"a%d" % n for n in range(30_000)), "too_long"),
}
SMALL: dict[str, Callable[[], bytes]] = {
    "a.xml.bz2": lambda: bz2.compress(PAGE_HEAD + b"x." + PAGE_END),
    "a.xml.gz": lambda: gzip.compress(PAGE_HEAD + b"x." + PAGE_END),
    "a.csv.gz": lambda: gzip.compress(b"title,text\nT,x.\n"),
    "a.jsonl.gz": lambda: gzip.compress(b'{"title": "T", "text": "x."}'),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the memory of a process")
@pytest.mark.parametrize("name", LARGE)
def test_a_small_file_takes_little_memory_whatever_it_unpacks_to(tmp_path: Path, name: str) -> None:
    file, make, kind = LARGE[name]
    small, large = tmp_path / "small" / file, tmp_path / "large" / file
    for path, data in ((small, SMALL[file]() if file in SMALL else WRITERS[file]("x.")), (large, make())):
        path.parent.mkdir()
        path.write_bytes(data)
    assert large.stat().st_size < 8 * MIB
    command = [sys.executable, "-c", PEAK, str(SCALE), str(BOUND), str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, *kinds = done.stdout.split()
    assert kinds[-1] == kind
    assert int(peak) < BOUND + CODE


def test_a_document_whose_passages_would_repeat_too_much_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realmops.corpus.document_cutter._REPEATED", 1000)
    title, more = "a" * 20, "b" * 20  # with {"more":""} 51 characters; of 19 passages 969, of 20 one more than allowed
    lines = [{"title": title, "text": f"{'a' * 26}. " * count, "more": more} for count in (19, 20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = snapshot(tmp_path / "a.jsonl", tmp_path, broken_share=0.5)
    [rejected] = read_rejects(found.folder)
    assert (rejected["place"], len(found)) == (f"{tmp_path / 'a.jsonl'}:2", 19)
    assert "repeated in each of 20 passages" in rejected["problem"]
