"""Quotations stand where answers say: in every document format, and what is wrong is told."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from paged_files import docx, pdf, pptx, xlsx
from small_project import cli, write_json_lines
from small_world import build_snapshot

from realmops.answering.record import citation_record
from realmops.commands.verify import verify
from realmops.corpus.snapshot_reader import Snapshot

SCRIPT = Path(__file__).parents[2] / "scripts" / "verify_quotes.py"
# Accents of their own, characters beyond 16 bits, blanks around and inside: what moves characters.
TEXTS = (
    "  Anna Berg was born in Oslo. She wrote\n\nThe Cold Sea in 1931. It rained.",
    "Zoe\u0308 Ibsen, a café owner 😀 from Bergen – the port. She sang \u00bd of it.\nIt ended in 1950.",
)
RECORDS = [{"id": str(n), "title": f"T{n}", "text": text} for n, text in enumerate(TEXTS)]


def jsonl(folder: Path) -> Path:
    return write_json_lines(folder / "documents.jsonl", [*RECORDS, {"title": "", "text": TEXTS[0]}])


def parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(RECORDS), folder / "documents.parquet")
    return folder / "documents.parquet"


def text(folder: Path) -> Path:
    """Plain text, Markdown and a page in one folder."""
    files = folder / "texts"
    files.mkdir()
    (files / "a.txt").write_text(TEXTS[0])
    (files / "b.md").write_text(f"# A *heading*\n\nSee [the port](http://b.no).\n\n{TEXTS[1]}\n\n- one\n- two\n")
    (files / "c.html").write_text(f"<html><title>C</title><p>{TEXTS[1]}</p><p>Oslo.</p></html>")
    return files


def paged(folder: Path) -> Path:
    files = folder / "paged"
    files.mkdir()
    pages = "Anna Berg wrote The Cold\nSea. It rained in Oslo.", "A café owner from Bergen sang of it."
    (files / "a.pdf").write_bytes(pdf(*pages))
    (files / "b.docx").write_bytes(docx(*TEXTS, cells=pages))
    (files / "c.pptx").write_bytes(pptx(*TEXTS, notes=pages[0]))
    (files / "d.xlsx").write_bytes(xlsx({"A": [[*pages]], "B": [[1.5, *pages]]}))
    return files


def answers_of(snapshot: Snapshot) -> list[dict[str, Any]]:
    """For each passage an answer that is its last wordpieces, with all that is said of its source."""
    answers = []
    for p in range(len(snapshot)):
        chars, whole = snapshot.chars(p), snapshot.text(p)
        citation = citation_record(snapshot, p, (int(chars[-3:][0, 0]), int(chars[-1, 1])))
        passage = {**citation_record(snapshot, p, (0, len(whole))), "text": whole}
        answers.append({"answer": citation["quote"], "citations": [citation], "passages": [passage]})
    return answers


def silent(label: str, total: int, unit: str) -> Callable[[int], None]:
    return lambda done: None


@pytest.mark.parametrize("write", [jsonl, text, paged], ids=lambda write: write.__name__)
def test_every_quotation_is_in_its_source(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    documents = write(tmp_path)
    snapshot = build_snapshot(tmp_path, documents, block_wordpieces=24)
    assert len(snapshot) > 2, "documents are cut, so that passages begin inside of them"
    assert snapshot.places[:, 1].max() > 0
    answers = write_json_lines(tmp_path / "answers.jsonl", answers_of(snapshot))
    verdict = verify(answers, documents, "auto", silent)
    assert verdict.problems == []
    assert (verdict.answers, verdict.quotations) == (len(snapshot), 2 * len(snapshot))
    uris = {snapshot.uri(p) for p in range(len(snapshot))}
    files = {path.relative_to(documents).as_posix() for path in documents.rglob("*")} or {documents.name}
    assert uris <= files


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"start": 1}, "has 'n"),
        ({"quote": "Bergen"}, "the quotation is 'Bergen'"),
        ({"document_id": "7"}, "has no document 7"),
        ({"end": 10**9}, "at 0 to 1000000000"),
    ],
)
def test_a_wrong_quotation_is_reported_by_command_and_script(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    documents = write_json_lines(tmp_path / "documents.jsonl", [{"id": "a", "title": "A", "text": "Anna Berg in Oslo"}])
    right = {"document_id": "a", "start": 0, "end": 4, "quote": "Anna"}
    several = {"answers": [{"answer": "", "citations": [right | change], "passages": []}]}
    answers = write_json_lines(
        tmp_path / "answers.jsonl", [{"answer": "Anna", "citations": [right], "passages": []}, several]
    )
    result = cli("verify", answers, documents)
    assert result.exit_code == 1
    assert "2 answers, 2 quotations in" in result.stdout
    assert told in result.stderr
    assert f"{answers}:2: citations[0]: " in result.stderr
    alone = subprocess.run([sys.executable, "-I", SCRIPT, answers, documents], capture_output=True, text=True)
    assert (alone.returncode, alone.stdout) == (1, "2 quotations checked, 1 wrong\n"), alone.stderr


def test_an_error_next_to_an_answer_does_not_hide_the_answer(tmp_path: Path) -> None:
    """A record with an error alone is no answer; one with both is checked, and its wrong quotation is found."""
    documents = write_json_lines(tmp_path / "documents.jsonl", [{"id": "a", "title": "A", "text": "Anna Berg in Oslo"}])
    wrong = {"document_id": "a", "start": 0, "end": 4, "quote": "Oslo"}
    both = {"error": "too late", "answer": "Oslo", "citations": [wrong], "passages": []}
    answers = write_json_lines(tmp_path / "answers.jsonl", [{"question": "Who?", "error": "too long"}, both])
    verdict = verify(answers, documents, "auto", silent)
    assert (verdict.answers, verdict.quotations) == (1, 1)
    assert verdict.problems == [
        f"{answers}:2: citations[0]: {documents}:1 has 'Anna' at 0 to 4, but the quotation is 'Oslo'",
    ]


def test_the_script_knows_documents_by_id_and_by_digest(tmp_path: Path) -> None:
    documents = jsonl(tmp_path)
    answers = write_json_lines(tmp_path / "answers.jsonl", answers_of(build_snapshot(tmp_path, documents, 24)))
    alone = subprocess.run([sys.executable, "-I", SCRIPT, answers, documents], capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.endswith(" quotations checked, 0 wrong\n")
    assert len(SCRIPT.read_text().splitlines()) < 40


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "has no answers"),
        ("{", "a.jsonl:1: not valid JSON"),
        ('{"question": "x"}', "a.jsonl:1: not an answer record with"),
        ('{"answer": "x", "citations": [{"start": 1}], "passages": []}', "a.jsonl:1: citations[0] needs a document_id"),
        (
            '{"answer": "x", "citations": [{"document_id": "a", "start": 3, "end": 1, "quote": ""}], "passages": []}',
            "0 <= start <= end",
        ),
        (
            '{"answer": "x", "citations": [{"document_id": "a", "start": 3, "end": 4}], "passages": []}',
            "citations[0]: 'quote' is NoneType",
        ),
    ],
)
def test_what_holds_no_answers_is_refused(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    result = cli("verify", tmp_path / "a.jsonl", jsonl(tmp_path))
    assert result.exit_code == 2
    assert told in result.stderr


def test_documents_are_numbered_over_files_and_batches(tmp_path: Path) -> None:
    """Two documents with the same text follow each other in two files; what is dropped or rejected has no number."""
    folder = tmp_path / "many"
    folder.mkdir()
    same = {"title": "T", "text": "Oslo is a city. It rains."}
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (same, {"title": "", "text": " "}, same)))
    write_json_lines(
        folder / "b.jsonl", [same, {"id": "x", **same}, {"title": "", "text": "\x01"}, {"id": "y", **same}]
    )
    snapshot = build_snapshot(tmp_path, folder)
    assert np.array_equal(snapshot.places, [[0, 0], [1, 0], [2, 0], [3, 0], [4, 0]])
    assert [snapshot.uri(p) for p in range(5)] == ["a.jsonl", "a.jsonl", "b.jsonl", "b.jsonl", "b.jsonl"]
