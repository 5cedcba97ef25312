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
from small_project import Quiet, stage, write_project

from realmops.answering.record import citation_record, format_page
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
    [source] = list_sources(path, "auto", find_data(ocr, "en"))
    [raw] = source.format.records(source.path)
    return source.format.convert(raw) if isinstance(raw, RawRecord) else raw


SCANS: list[tuple[str, bytes, list[int], dict[str, int]]] = [  # file, content, pages with text, what is left out
    ("a.pdf", encoded("PDF", picture(), EMPTY, picture(90), PHOTO, picture(270)), [1, 3, 5], {"without text": 2}),
    ("a.tif", encoded("TIFF", picture(), EMPTY, HARD, picture(180)), [1, 4], {"hard to read": 1, "without text": 1}),
    ("a.tiff", encoded("TIFF", picture().convert("1"), compression="group4"), [1], {}),
    ("a.jpg", encoded("JPEG", picture(90), exif=TURNED), [1], {}),
    ("a.png", encoded("PNG", BEHIND), [1], {}),
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
    assert "apt install tesseract-ocr-eng" in getattr(waiting, "problem", "")


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(
    ("content", "kind"), [(EMPTY, "without text"), (PHOTO, "without text"), (HARD, "hard to read")]
)
def test_picture_without_readable_text_is_counted(tmp_path: Path, content: Picture, kind: str) -> None:
    outcome = read(tmp_path / "a.png", encoded("PNG", content), "eng")
    assert getattr(outcome, "kind", "") == "no_text"
    assert f"(left out: scan {kind} 1)" in getattr(outcome, "problem", "")


@pytest.mark.usefixtures("data")
def test_picture_has_a_limit_of_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realmops.readers.pdf._PIXELS", 300 * 400 - 1)
    assert getattr(read(tmp_path / "a.png", encoded("PNG", picture()), "eng"), "kind", "") == "too_large"


@pytest.mark.usefixtures("data")
def test_each_page_that_is_read_by_ocr_extends_the_time_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = [sandbox.TIME_LIMIT]
    monkeypatch.setattr("signal.getitimer", lambda _: (timers[-1], 0.0))
    monkeypatch.setattr("signal.setitimer", lambda _, seconds: timers.append(seconds))
    record = RawRecord("a.tif", Path("a.tif"), 0)
    sandbox.extend_time()
    assert timers == [sandbox.TIME_LIMIT, sandbox.TIME_LIMIT + sandbox.PAGE_TIME]
    timers.append(0.0)  # no limit: not a child process
    sandbox.extend_time()
    assert timers[-1] == 0
    assert record.ocr == ()


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
    options = replace_option(values, "off")
    counts = stage("snapshot", options, tmp_path, tmp_path / "root", report)
    assert (counts["documents"], counts["unread_png"]) == (1, 2)


def replace_option(options: Any, value: str) -> Any:
    return options.replace({"snapshot.ocr": value})


def test_identity_of_a_snapshot_has_the_data_where_documents_may_be_scans(tmp_path: Path, data: Path) -> None:
    project = write_project(tmp_path, snapshot={"documents": "in", "language": "de"})
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


def test_data_is_found_for_the_corpus_language_or_named_and_never_fetched(tmp_path: Path, data: Path) -> None:
    def names(ocr: str, language: str) -> list[str]:
        return [Path(file).name.partition(".")[0] for file in find_data(ocr, language)]

    (data / "deu.traineddata").touch()
    (data / "osd.traineddata").touch()
    assert [names("auto", language) for language in ("en", "de", "auto", "fr")] == [
        ["eng"],
        ["deu"],
        ["deu", "eng"],
        [],
    ]
    assert [names(ocr, "fr") for ocr in ("off", "eng+deu")] == [[], ["eng", "deu"]]
    for name in ("fra", "ita", "spa"):
        (data / f"{name}.traineddata").touch()
    assert names("auto", "auto") == []  # too many to read with all of them
    with pytest.raises(
        ValueError, match=r"snapshot\.ocr is nld, whose data is not in one folder of .*tesseract-ocr-eng"
    ):
        find_data("nld", "en")
    with pytest.raises(ValueError, match=r"snapshot\.ocr is '\.\./eng'; expected auto, off, or languages"):
        find_data("../eng", "en")
