"""Text of pictures, read by the tesseract in xberg with language data that is installed; nothing is downloaded."""

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from glob import glob
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from realmops.readers.contents import Contents
from realmops.readers.sandbox import extend_time

AUTO, OFF = "auto", "off"  # values of snapshot.ocr other than languages
WITHOUT_TEXT, HARD_TO_READ = "scan without text", "scan hard to read"  # kinds of ``Contents.omitted``
INSTALL = (
    "install tesseract's data of the language (apt install tesseract-ocr-eng, brew install tesseract-lang, or a folder "
    "in TESSDATA_PREFIX), or set snapshot.ocr to installed languages such as eng+deu"
)
_FOLDERS = (
    *("/usr/share/tesseract-ocr/*/tessdata", "/usr/share/tessdata", "/usr/share/tesseract/tessdata"),
    *("/usr/local/share/tessdata", "/opt/homebrew/share/tessdata", f"{sys.prefix}/share/tessdata"),
)
_CODES = dict(  # tesseract's languages by ISO 639-1 code
    re.findall(
        r"(\w+) (\w+)",
        "ar ara bg bul ca cat cs ces da dan de deu el ell en eng es spa et est eu eus fa fas fi fin fr fra he heb "
        "hi hin hr hrv hu hun hy hye id ind it ita ja jpn ko kor lt lit ne nep nl nld no nor pl pol pt por ro ron "
        "ru rus sk slk sl slv sr srp sv swe ta tam th tha tr tur uk ukr vi vie zh chi_sim",
    )
)
_BROKEN_WORD = re.compile(r"(?<=\w)[-\u2010\xac]\n(?=\w)")  # becomes PDFium's mark of a hyphen at a line end
_MOST = 4  # languages at once; each takes time, and reads words of the others
_LEAST_CONFIDENCE = 60  # percent; upside-down pages have 29 to 50, bad copies 66 or more
SIDE = 4096  # pixels; xberg reduces longer sides to this
_AUTOMATIC = 3  # tesseract's page segmentation: columns and paragraphs


def find_data(ocr: str, language: str) -> tuple[str, ...]:
    """Return the paths of tesseract's data for the options of the snapshot; none if nothing is to be read by OCR.

    ``auto`` is the corpus's language, or if each document's is detected all installed ones, unless they are many.
    """
    if ocr == OFF or (ocr == AUTO and find_spec("xberg") is None):
        return ()
    if not re.fullmatch(r"\w+(\+\w+)*", ocr):
        raise ValueError(f"snapshot.ocr is {ocr!r}; expected auto, off, or languages of tesseract such as eng+deu")
    known = [_CODES[language]] if language in _CODES else [*_CODES.values()]
    names = known if ocr == AUTO else ocr.split("+")
    prefix = os.environ.get("TESSDATA_PREFIX", "")
    folders = [prefix, f"{prefix}/tessdata"] if prefix else [f for name in _FOLDERS for f in sorted(glob(name))[::-1]]
    for folder in folders:
        files = [file for name in names if os.path.isfile(file := os.path.abspath(f"{folder}/{name}.traineddata"))]
        if 0 < len(files) <= _MOST if ocr == AUTO else len(files) == len(names):
            return tuple(files)
    if ocr == AUTO:
        return ()
    places = ", ".join(folders or _FOLDERS)
    raise ValueError(f"snapshot.ocr is {ocr}, whose data is not in one folder of {places}; {INSTALL}")


def read_picture(image: Any, data: Sequence[str], number: int, contents: Contents) -> str:
    """Return the text of page ``number`` from its grey picture, turned if needed; count a page without text."""
    if missing := [file for file in data if not os.path.isfile(file)]:  # xberg would download it
        raise ValueError(f"{missing[0]} was removed while the documents were read; run again")
    image.thumbnail((SIDE, SIDE))
    darkest, brightest = image.getextrema()
    kind = WITHOUT_TEXT
    for angle in (0, 180, 90, 270) if darkest < brightest else ():
        extend_time()
        text, confidence = recognise(image.rotate(angle, expand=True), data)
        if text and confidence >= _LEAST_CONFIDENCE:
            contents.scans.append(number)
            return _BROKEN_WORD.sub("\ufffe", text)
        if not text:
            break
        kind = HARD_TO_READ
    contents.omitted[kind] += 1
    return ""


def recognise(image: Any, data: Sequence[str]) -> tuple[str, float]:
    """Return the text that tesseract reads in a picture, with the mean confidence of its words in percent."""
    import xberg

    file = BytesIO()
    image.save(file, "BMP")
    names = [Path(name).stem for name in data]
    tesseract = xberg.TesseractConfig(language=names, output_format="text", psm=_AUTOMATIC, use_cache=False)
    folder = str(Path(data[0]).parent)
    ocr = xberg.OcrConfig(backend="tesseract", language=names, tessdata_path=folder, tesseract_config=tesseract)
    config = xberg.ExtractionConfig(ocr=ocr, force_ocr=True, output_format="plain", use_cache=False)
    source = xberg.ExtractInput(kind="bytes", bytes=file.getvalue(), mime_type="image/bmp")
    [document] = asyncio.run(xberg.extract(source, config)).results
    return document.content.strip(), float(document.metadata.additional.get("mean_text_conf", 0))
