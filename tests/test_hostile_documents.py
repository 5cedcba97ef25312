"""Documents as people have them: whatever stands in one, it is cut or rejected by name, and the others go on."""

import bz2
import gzip
import html
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_files import docx, pdf, pptx, xlsx

from realmops.artifacts import atomic_folder
from realmops.corpus.documents import Document, Rejected
from realmops.corpus.formats import FORMATS, sources
from realmops.corpus.ingest import batches, convert
from realmops.corpus.passages import split_sentences
from realmops.corpus.snapshot import REJECTS, Snapshot, rejects
from realmops.corpus.snapshot_writer import write_snapshot
from realmops.corpus.vocabulary import SPECIAL_TOKENS

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
        write_snapshot(sources(documents, "auto"), out, work=folder / "work", vocabulary=VOCABULARY, **options)
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
def test_any_blank_stands_beside_a_capital(blank: str) -> None:
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
    check_places(found, [one for one in converted(path) if isinstance(one, Document)])
    assert {found.title(index) for index in range(len(found))} == {f"T{n}" for n in range(6)}


def test_many_titles_alike(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"title": "Alike", "text": f"a {n}."}) for n in range(10_000)))
    found = snapshot(path, tmp_path)
    assert len(found) == len(set(found.column("document_id"))) == 10_000


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


def test_the_wish_to_end_is_no_fault_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(language: str, text: str) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(sentencex, "segment", ends)
    with pytest.raises(KeyboardInterrupt):
        snapshot(write_lines(tmp_path / "a.jsonl", "a."), tmp_path)


# Every reader


def converted(path: Path) -> list[Any]:
    found = sources(path, "auto")
    return [one for batch in batches(found) for one in convert([(found[n].format.name, r) for n, r in batch.runs])]


def valid(text: str) -> str:
    """Without halves of surrogate pairs, which only JSON can hold."""
    return text.encode("utf-8", "ignore").decode()


def xml(text: str) -> str:
    """Without the characters that XML does not know."""
    kept = "".join(c for c in valid(text) if c in "\t\n\r" or (ord(c) >= 0x20 and ord(c) not in (0xFFFE, 0xFFFF)))
    return html.escape(kept)


def warc(text: str) -> bytes:
    page = f"<html><title>T</title><p>{html.escape(valid(text))}</p></html>".encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + page
    head = "WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a/\r\nContent-Type: application/http\r\n"
    head += f"Content-Length: {len(answer)}\r\n\r\n"
    return head.encode() + answer + b"\r\n\r\n"


def page(number: int, text: str, title: str = "T", more: str = "") -> str:
    head = f"<page><title>{title}</title><ns>0</ns><id>{number}</id>"
    return f"{head}{more}<revision><timestamp>{more}</timestamp><text>{text}</text></revision></page>"


def dump(pages: str) -> str:
    return f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{pages}</mediawiki>'


def parquet(text: str) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"title": ["T"], "text": [valid(text)]}), sink)
    return sink.getvalue().to_pybytes()


_BRACKETS = dict.fromkeys(map(ord, "()\\"))
WRITERS: dict[str, Callable[[str], bytes]] = {
    "a.jsonl": lambda text: json.dumps({"title": "T", "text": text, "more": text}).encode(),
    "a.txt": lambda text: valid(text).encode(),
    "a.md": lambda text: f"# T\n\n{valid(text)}".encode(),
    "a.html": lambda text: f"<html><title>T</title><p>{html.escape(valid(text))}</p></html>".encode(),
    "a.parquet": parquet,
    "a.csv": lambda text: 'title,text\nT,"{}"'.format(valid(text).replace('"', '""')).encode(),
    "a.rst": lambda text: valid(text).encode(),
    "a.pdf": lambda text: pdf("x", title=text.encode("cp1252", "ignore").decode("cp1252").translate(_BRACKETS)),
    "a.docx": lambda text: docx(xml(text)),
    "a.pptx": lambda text: pptx(xml(text)),
    "a.xlsx": lambda text: xlsx({"A": [["x", "".join(c for c in xml(text) if c >= " ")]]}),
    "a.xml": lambda text: dump(page(1, xml(text))).encode(),
    "a.warc": warc,
}


def test_every_format_has_hostile_documents(tmp_path: Path) -> None:
    for name, write in WRITERS.items():
        (tmp_path / name).write_bytes(write("a"))
    used = {sources(tmp_path / name, "auto")[0].format.name for name in WRITERS}
    assert used == FORMATS.keys() - {"dataset"}, "a dataset's rows are those of Parquet"


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(TEXTS, st.text(st.characters(), max_size=30)))
def test_any_text_passes_through_every_reader(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(WRITERS[name](text))
    [outcome] = converted(path)
    assert str(path) in outcome.place
    if isinstance(outcome, Document):
        outcome.text.encode()
        check_sentences(outcome.text)
    else:
        assert not isinstance(outcome, Rejected) or outcome.problem


def test_half_a_surrogate_pair_is_a_named_reject(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"title": "T", "text": "a \\ud800 b"}\n{"title": "U", "text": "c"}')
    first, second = converted(tmp_path / "a.jsonl")
    assert isinstance(first, Rejected)
    assert "half a surrogate pair at character 2" in first.problem
    assert isinstance(second, Document)


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
    "a.parquet": cut(parquet("A text.")), "a.warc": warc("Text. " * 40) + cut(warc("Text. " * 40)),
    "a.warc.gz": cut(gzip.compress(warc(random_text(1)) * 9)),
}  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_a_cut_file_ends_the_stage_whatever_share_may_be_broken(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(CUT[name])
    with pytest.raises(ValueError, match=rf"{name}.*records of the file were read before\); or take the file out"):
        snapshot(tmp_path / "in", tmp_path, broken_share=1.0)
    assert not (tmp_path / "snapshot").exists()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.bz2", "a.xml.gz", "a.warc.gz"])
def test_a_download_that_never_came_ends_the_stage_or_is_named_among_mixed_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in/whole.jsonl", "a b.")
    (tmp_path / "in" / name).touch()
    if "jsonl" in name:
        with pytest.raises(ValueError, match=rf"{name}: the file is empty"):
            snapshot(tmp_path / "in", tmp_path, broken_share=1.0)
        return
    [told] = rejects(snapshot(tmp_path / "in", tmp_path, broken_share=0.0).folder, unread=True)
    assert told["place"].endswith(name)
    assert "the file is empty" in told["problem"]


# Names of columns, files and folders


def test_parquet_columns_of_bytes_are_text(tmp_path: Path) -> None:
    texts, ids = pa.array([b"caf\xc3\xa9.", b"caf\xe9."], pa.binary()), pa.array([b"1", b"2"], pa.binary())
    table = pa.table({"title": pa.array([b"A", b"B"], pa.large_binary()), "text": texts, "id": ids})
    pq.write_table(table, tmp_path / "a.parquet")
    first, second = converted(tmp_path / "a.parquet")
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


def test_a_link_to_a_folder_is_followed_once(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside / "own", outside / "deep"):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("a")
    (inside / "b").symlink_to(outside)
    (inside / "c").symlink_to(outside / "deep")  # read once, whichever way
    (inside / "d").symlink_to(inside / "own")  # read anyway
    (outside / "deep" / "up").symlink_to(inside)
    (outside / "deep" / "round").symlink_to(outside)
    found = [source.path.relative_to(inside).as_posix() for source in sources(inside, "auto")]
    assert found == ["c/a.txt", "own/a.txt"]


@pytest.mark.parametrize(("name", "pack"), [("A.JSONL.GZ", gzip.compress), ("a.jsonl.BZ2", bz2.compress)])
def test_suffixes_may_be_upper_case(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / name).write_bytes(pack(b'{"title": "T", "text": "a"}'))
    [document] = converted(tmp_path / name)
    assert document.text == "a"


def test_odd_elements_of_a_dump_cost_no_page(tmp_path: Path) -> None:
    pages = [page(1, "a b", "A", "<upload><filename>x</filename></upload>"), page(2, "a b", "")]
    pages += [page(3, "a b", "C", "long ago"), page(4, "a b", "D", "<new/>")]
    (tmp_path / "a.xml").write_text(dump("".join(pages)))
    found = converted(tmp_path / "a.xml")
    assert [one.title for one in found if isinstance(one, Document)] == ["A", "", "C", "D"]
