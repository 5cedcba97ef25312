"""Sentences that programs print are found, with their places, by the words that a person sees."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from paged_files import docx, pptx, xlsx
from small_world import build_snapshot

from realmops.corpus.snapshot_reader import Snapshot
from realmops.search.bm25 import FOLDER, Bm25
from realmops.search.bm25_writer import write_bm25

SENTENCES = (
    "The officer of the ferry offered five difficult figures.",
    "Internationally renowned glassblowers congregate around Brellin.",
    "Marla Quist inherited the lighthouse in 1931.",
    "Twelve salted herrings cost fourteen crowns yesterday.",
    "A well-known surveyor measured the northern embankment.",
    "Children collected amber beneath the crumbling bastion.",
)


def found_first(folder: Path, documents: Path) -> None:
    """Assert that each sentence finds its passage, of six words at least and in any order of the document's lines."""
    snapshot = build_snapshot(folder, documents, block_wordpieces=64)
    write_bm25(folder / FOLDER, snapshot)
    index = Bm25.of(snapshot)
    for sentence in SENTENCES:
        row = int(index.search([sentence], 1)[1][0, 0])
        assert sentence in shown(snapshot, row), sentence


def shown(snapshot: Snapshot, row: int) -> str:
    return " ".join(snapshot.text(row).split())


def reportlab_pages(path: Path) -> None:
    """A narrow column, whose words reportlab hyphenates at blanks alone; headings are drawn twice."""
    from reportlab.lib.pagesizes import A5
    from reportlab.lib.styles import getSampleStyleSheet
    from reportlab.platypus import Paragraph, SimpleDocTemplate

    style = getSampleStyleSheet()["Normal"]
    SimpleDocTemplate(str(path), pagesize=A5).build([Paragraph(sentence, style) for sentence in SENTENCES])


def chromium_pages(path: Path) -> None:
    """Two columns of hyphenated text."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is not installed")
    style = "columns: 2; font: 20px serif; hyphens: auto; text-align: justify"
    page = path.with_suffix(".html")
    text = "".join(f"<p>{sentence}</p>" for sentence in SENTENCES)
    page.write_text(f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><body style="{style}">{text}</body></html>')
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}"]
    command = [program, *options, f"--print-to-pdf={path}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    page.unlink()
    shutil.rmtree(path.parent / "profile", ignore_errors=True)


def libreoffice_pages(path: Path) -> None:
    program = shutil.which("soffice") or shutil.which("libreoffice")
    if program is None:
        pytest.skip("LibreOffice is not installed")
    source = path.with_suffix(".docx")
    source.write_bytes(docx(*SENTENCES))
    profile = f"-env:UserInstallation={(path.parent / 'profile').as_uri()}"
    command = [program, profile, "--headless", "--convert-to", "pdf", "--outdir", str(path.parent), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    source.unlink()
    shutil.rmtree(path.parent / "profile", ignore_errors=True)


@pytest.mark.parametrize("write", [reportlab_pages, chromium_pages, libreoffice_pages])
def test_every_printed_sentence_is_found(tmp_path: Path, write: object) -> None:
    assert callable(write)
    (tmp_path / "documents").mkdir()
    write(tmp_path / "documents" / "a.pdf")
    found_first(tmp_path, tmp_path / "documents" / "a.pdf")


@pytest.mark.parametrize("name", ["a.docx", "a.pptx", "a.xlsx"])
def test_every_sentence_of_an_office_file_is_found(tmp_path: Path, name: str) -> None:
    made = {"a.docx": docx(*SENTENCES), "a.pptx": pptx(*SENTENCES), "a.xlsx": xlsx({"S": [[s] for s in SENTENCES]})}
    (tmp_path / name).write_bytes(made[name])
    found_first(tmp_path, tmp_path / name)
