"""Scans: what is read by OCR, how it is marked and counted, and where its data comes from.

The machine of the tests has no data of tesseract; a stand-in reads a page with a dark square in its upper left corner.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from paged_files import pdf
from PIL import Image
from small_project import Quiet, cli, stage, write_json_lines, write_project

from realmops.answering.record import citation_record, format_page
from realmops.commands.verify import verify
from realmops.config import load_params
from realmops.corpus.snapshot_reader import Snapshot
from realmops.readers import sandbox
from realmops.readers.documents import Document, Outcome, RawRecord
from realmops.readers.ocr import find_data
from realmops.readers.paged import convert
from realmops.readers.sources import FORMATS, list_sources
from realmops.stages import STAGES, fingerprint
from realmops.stages.runner import stage_inputs

TEXT = "Anna Berg was born in Oslo and wrote the nov-\nel The Cold Sea. Karl Lund lived\nin Bergen until 1950."
READ = TEXT.replace("-\n", "")
Picture = Image.Image


def picture(turn: int = 0, dark: int = 0) -> Picture:
    """Return a page with a square, turned counterclockwise; a lighter one is hard to read."""
    page = Image.new("L", (300, 400), 250)
    page.paste(dark, (20, 20, 100, 100))
    return page.rotate(turn, expand=True)


def encoded(format: str, *pictures: Picture, **options: Any) -> bytes:
    file = BytesIO()
    first, *others = (page.copy() for page in pictures)  # saving changes a picture
    first.save(file, format, **({"save_all": True, "append_images": others} if others else {}), **options)
    return file.getvalue()


EMPTY, HARD = Image.new("L", (300, 400), 250), picture(dark=120)
PHOTO = Image.linear_gradient("L").resize((300, 400))
BEHIND = Image.merge("LA", [Image.new("L", (300, 400)), picture().point(lambda value: 255 - value)])  # black on nothing
TURNED = Image.Exif()
TURNED[0x0112] = 6  # to be turned clockwise


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a stand-in of tesseract, and read files in this process."""

    def recognise(image: Picture, data: Sequence[str]) -> tuple[str, float]:
        assert [Path(file).name for file in data] == ["eng.traineddata"]
        assert image.mode == "L"
        corner = image.getpixel((image.width // 6, image.height // 6))
        assert isinstance(corner, int)
        is_text = image.getextrema()[0] < 128 and image.resize((1, 1)).getpixel((0, 0)) > 200
        return (TEXT, 95 if corner < 60 else 40) if is_text else ("", 0)

    monkeypatch.setattr("realmops.readers.ocr.recognise", recognise)
    monkeypatch.setenv("TESSDATA_PREFIX", str(tmp_path / "tessdata"))
    for name in ("pdf", "image"):
        monkeypatch.setitem(FORMATS, name, replace(FORMATS[name], parse=partial(convert, name)))
    (tmp_path / "tessdata").mkdir()
    (tmp_path / "tessdata" / "eng.traineddata").write_bytes(b"1")
    return tmp_path / "tessdata"


def read(path: Path, content: bytes, ocr: str) -> Outcome:
    path.write_bytes(content)
    [source] = list_sources(path, "auto", find_data(ocr))
    [raw] = source.format.records(source.path)
    return source.format.convert(raw) if isinstance(raw, RawRecord) else raw


SCANS: list[tuple[str, bytes, list[int], dict[str, int]]] = [  # file, content, pages with text, what is left out
    (
        "a.pdf",
        encoded("PDF", picture(), EMPTY, picture(90), PHOTO, picture(270)),
        [1, 3, 5],
        {"without readable text": 2},
    ),
    ("a.tif", encoded("TIFF", picture(), EMPTY, HARD, picture(180)), [1, 4], {"without readable text": 2}),
    ("a.tiff", encoded("TIFF", picture().convert("1"), compression="group4"), [1], {}),
    ("a.jpg", encoded("JPEG", picture(90), exif=TURNED), [1], {}),
    ("a.png", encoded("PNG", BEHIND.convert("RGBA")), [1], {}),
    ("a.WEBP", encoded("WEBP", picture(), lossless=True), [1], {}),
    ("a.gif", encoded("GIF", picture(), HARD), [1], {}),  # the first picture of an animation
    ("a.bmp", encoded("BMP", picture().convert("RGB")), [1], {}),
]


@pytest.mark.parametrize(("name", "content", "scans", "omitted"), SCANS, ids=[name for name, *_ in SCANS])
@pytest.mark.usefixtures("data")
def test_scan_is_read_page_by_page_and_waits_where_ocr_is_off(
    tmp_path: Path, name: str, content: bytes, scans: list[int], omitted: dict[str, int]
) -> None:
    document = read(tmp_path / name, content, "auto")
    assert isinstance(document, Document)
    assert document.text == "\n\n".join([READ] * len(scans))
    assert document.scans == tuple(scans)
    assert {kind: count for kind, count in document.omitted if kind != "image"} == {
        f"scan {kind}": count for kind, count in omitted.items()
    }
    waiting = read(tmp_path / name, content, "off")
    assert getattr(waiting, "kind", "") == ("scan" if name == "a.pdf" else name[2:].lower())
    assert "install tesseract-ocr-eng (apt)" in getattr(waiting, "problem", "")


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("content", [EMPTY, PHOTO, HARD])
def test_picture_without_readable_text_is_counted(tmp_path: Path, content: Picture) -> None:
    outcome = read(tmp_path / "a.png", encoded("PNG", content), "eng")
    assert getattr(outcome, "kind", "") == "no_text"
    assert "scan without readable text 1" in getattr(outcome, "problem", "")


@pytest.mark.usefixtures("data")
def test_time_of_a_file_begins_again_with_each_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[float] = []
    monkeypatch.setattr("signal.getitimer", lambda _: (7.0, 0.0))
    monkeypatch.setattr("signal.setitimer", lambda _, seconds: timers.append(seconds))
    read(tmp_path / "a.tif", encoded("TIFF", picture(), EMPTY, picture()), "eng")
    assert timers == [sandbox.TIME_LIMIT] * 2


def test_scans_of_a_corpus_are_marked_in_quotations_and_counted(tmp_path: Path, data: Path) -> None:
    values = load_params(write_project(tmp_path, snapshot={"documents": "in", "block_wordpieces": 30}))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.pdf").write_bytes(pdf("Jon Vik built The Star in the harbour of Narvik.\nIt rained all day."))
    (tmp_path / "in" / "b.png").write_bytes(encoded("PNG", picture()))
    (tmp_path / "in" / "c.png").write_bytes(encoded("PNG", EMPTY))
    report = Quiet()
    counts = stage("snapshot", values, tmp_path, tmp_path / "root", report)
    assert (counts["documents"], counts["unread_no_text"]) == (2, 1)
    assert not any("wait for OCR" in warning for warning in report.warned)
    snapshot = Snapshot.open(tmp_path / "root" / "data" / "snapshot" / "corpus")
    records = [citation_record(snapshot, row, (0, 10)) for row in range(len(snapshot))]
    assert {record["uri"]: record.get("ocr", False) for record in records} == {"a.pdf": False, "b.png": True}
    assert {format_page(record) for record in records} == {", page 1", ", page 1, read from a scan"}
    answers = write_json_lines(tmp_path / "answers", [{"answer": None, "citations": records, "passages": []}])
    verdict = verify(answers, tmp_path / "in", "auto", lambda *_: lambda _: None, root=tmp_path / "root")
    assert (verdict.quotations, verdict.problems) == (len(records), [])
    values = values.replace({"snapshot.ocr": "off"})
    counts = stage("snapshot", values, tmp_path, tmp_path / "root", report)
    assert (counts["documents"], counts["unread_png"]) == (1, 2)


def test_a_new_project_reads_a_scan_for_its_language_or_names_what_waits(tmp_path: Path, data: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(encoded("PNG", EMPTY))
    (tmp_path / "in" / "b.tif").write_bytes(encoded("TIFF", picture()))
    printed = cli("init", tmp_path / "new", "--documents", tmp_path / "in").stdout
    assert "documents: 1 of a sample of 2 files read: b.tif\n" in printed
    assert "wait for OCR" not in printed
    (data / "eng.traineddata").unlink()
    refused = cli("init", tmp_path / "other", "--documents", tmp_path / "in")
    assert refused.stderr.count("it is a picture, which OCR reads; install tesseract") == 2
    (tmp_path / "in" / "c.txt").write_text("Anna Berg was born in Oslo.")
    printed = cli("init", tmp_path / "new2", "--documents", tmp_path / "in").stdout
    assert "documents: 2 scanned files of this sample wait for OCR" in printed


def test_identity_of_a_snapshot_has_the_data_where_documents_may_be_scans(tmp_path: Path, data: Path) -> None:
    project = write_project(tmp_path, snapshot={"documents": "in"})
    options, snapshot = load_params(project), STAGES["snapshot"]
    (tmp_path / "in").mkdir()
    keys = set()
    for name, content in (("a.txt", None), ("a.txt", "1"), ("b.pdf", None), ("b.pdf", "1"), ("b.pdf", "2")):
        (tmp_path / "in" / name).write_bytes(b"x")
        if content is not None:
            (data / "deu.traineddata").write_text(content)
        else:
            (data / "deu.traineddata").unlink(missing_ok=True)
        keys.add(fingerprint(snapshot, options, stage_inputs(snapshot, options, tmp_path, tmp_path)))
    assert len(keys) == 4


def test_data_is_that_of_few_installed_or_named_languages(data: Path) -> None:
    def names(ocr: str) -> list[str]:
        return [Path(file).name.partition(".")[0] for file in find_data(ocr)]

    for name in ("deu", "fra", "osd"):
        (data / f"{name}.traineddata").touch()
    assert [names(ocr) for ocr in ("auto", "off", "eng+deu")] == [["deu", "fra", "eng"], [], ["eng", "deu"]]
    for name in ("ita", "spa"):
        (data / f"{name}.traineddata").touch()
    assert names("auto") == []
    with pytest.raises(ValueError, match=r"snapshot\.ocr is 'nld': .*tessdata has no nld; install tesseract-ocr-eng"):
        find_data("nld")
    with pytest.raises(ValueError, match=r"has no \.\./eng"):
        find_data("../eng")
