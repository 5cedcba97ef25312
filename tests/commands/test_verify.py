"""``realmops verify``: quotations in every document format, and wrong ones."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paged_files import docx, pdf, pptx, xlsx
from small_project import cli, write_json_lines
from small_world import build_snapshot

from realmops.answering.record import citation_record
from realmops.commands.verify import verify
from realmops.corpus.snapshot_reader import Snapshot

SCRIPT = Path(__file__).parents[2] / "scripts" / "verify_quotes.py"
# Combining accents, characters beyond 16 bits, and blanks shift offsets.
TEXTS = (
    "  Anna Berg was born in Oslo. She wrote\n\nThe Cold Sea in 1931. It rained.",
    "Zoe\u0308 Ibsen, a café owner 😀 from Bergen – the port. She sang \u00bd of it.\nIt ended in 1950.",
)
RECORDS = [{"id": str(n), "title": f"T{n}", "text": text} for n, text in enumerate(TEXTS)]


def jsonl(folder: Path) -> Path:
    return write_json_lines(folder / "documents.jsonl", [*RECORDS, {"title": "", "text": TEXTS[0]}])


def text(folder: Path) -> Path:
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
    """Return an answer of the last wordpieces of each passage, with its source."""
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
    alone = subprocess.run([sys.executable, "-I", SCRIPT, answers, documents], capture_output=True, text=True)
    assert write is not jsonl or alone.stdout.endswith(" quotations checked, 0 wrong\n"), alone.stderr
    assert (verdict.answers, verdict.quotations) == (len(snapshot), 2 * len(snapshot))
    uris = {snapshot.uri(p) for p in range(len(snapshot))}
    files = {path.relative_to(documents).as_posix() for path in documents.rglob("*")} or {documents.name}
    assert uris <= files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quote": "Bergen"}, "the quotation is 'Bergen'"),
        ({"document_id": "7"}, "has no document 7"),
        ({"end": 10**9}, "at 0 to 1000000000"),
    ],
)
def test_a_wrong_quotation_is_reported_by_command_and_script(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    documents = write_json_lines(tmp_path / "documents.jsonl", [{"id": "a", "title": "A", "text": "Anna Berg in Oslo"}])
    right = {"document_id": "a", "start": 0, "end": 4, "quote": "Anna"}
    several = {"answers": [{"answer": "", "citations": [right | change], "passages": []}]}
    answers = write_json_lines(
        tmp_path / "answers.jsonl", [{"answer": "Anna", "citations": [right], "passages": []}, several]
    )
    result = cli("verify", answers, documents)
    assert result.exit_code == 1
    assert "2 answers, 2 quotations in" in result.stdout
    assert message in result.stderr
    assert f"{answers}:2: citations[0]: " in result.stderr
    alone = subprocess.run([sys.executable, "-I", SCRIPT, answers, documents], capture_output=True, text=True)
    assert (alone.returncode, alone.stdout) == (1, "2 quotations checked, 1 wrong\n"), alone.stderr


def test_an_error_next_to_an_answer_does_not_hide_the_answer(tmp_path: Path) -> None:
    documents = write_json_lines(tmp_path / "documents.jsonl", [{"id": "a", "title": "A", "text": "Anna Berg in Oslo"}])
    wrong = {"document_id": "a", "start": 0, "end": 4, "quote": "Oslo"}
    both = {"error": "too late", "answer": "Oslo", "citations": [wrong], "passages": []}
    answers = write_json_lines(tmp_path / "answers.jsonl", [{"question": "Who?", "error": "too long"}, both])
    verdict = verify(answers, documents, "auto", silent)
    assert (verdict.answers, verdict.quotations) == (1, 1)
    assert verdict.problems == [
        f"{answers}:2: citations[0]: {documents}:1 has 'Anna' at 0 to 4, but the quotation is 'Oslo'",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "has no answers"),
        ('{"question": "x"}', "a.jsonl:1: not an answer record with"),
        ('{"answer": "x", "citations": [{"start": 1}], "passages": []}', "a.jsonl:1: citations[0] needs a document_id"),
        (
            '{"answer": "x", "citations": [{"document_id": "a", "start": 3, "end": 4}], "passages": []}',
            "citations[0]: 'quote' is NoneType",
        ),
    ],
)
def test_a_file_without_answer_records_is_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    result = cli("verify", tmp_path / "a.jsonl", jsonl(tmp_path))
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
