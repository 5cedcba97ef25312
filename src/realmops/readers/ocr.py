"""Text of pictures, read by the tesseract in xberg with language data that is installed; nothing is downloaded."""

import asyncio
import os
import re
import signal
from collections.abc import Sequence
from glob import glob
from importlib.util import find_spec
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from realmops.readers.contents import Contents
from realmops.readers.sandbox import TIME_LIMIT

AUTO, OFF = "auto", "off"  # values of snapshot.ocr that are no languages
INSTALL = "install tesseract-ocr-eng (apt) or tesseract-lang (brew), or set TESSDATA_PREFIX, or snapshot.ocr=eng+deu"
SIDE = 4096  # pixels; xberg reduces longer sides to this
_FOLDERS = "/usr/share/tess*/tessdata", "/usr/share/tess*/*/tessdata", "/*/share/tessdata", "/*/*/share/tessdata"
_BROKEN_WORD = re.compile(r"(?<=\w)[-\u2010\xac]\n(?=\w)")  # becomes PDFium's mark of a hyphen at a line end


def find_data(ocr: str) -> tuple[str, ...]:
    """Return the files of tesseract's data for ``snapshot.ocr``; ``auto`` is all installed languages, unless many."""
    if ocr == OFF or (ocr == AUTO and find_spec("xberg") is None):
        return ()
    folder = os.environ.get("TESSDATA_PREFIX") or max(chain.from_iterable(map(glob, _FOLDERS)), default=os.devnull)
    files = {path.stem: str(path.absolute()) for path in Path(folder).glob("*.traineddata")}
    languages = sorted(files.keys() - {"equ", "osd"}, key=lambda name: (name == "eng", name))  # accents first
    names = ocr.split("+") if ocr != AUTO else languages if len(languages) <= 4 else []  # each takes time
    if missing := [name for name in names if name not in files]:
        raise ValueError(f"snapshot.ocr is {ocr!r}: {folder} has no {', '.join(missing)}; {INSTALL}")
    return tuple(files[name] for name in names)


def read_picture(image: Any, data: Sequence[str], number: int, contents: Contents) -> str:
    """Return the text of page ``number`` from its grey picture, turned if needed; count a page without."""
    assert all(map(os.path.isfile, data)), "xberg would download it"
    darkest, brightest = image.getextrema()
    for angle in (0, 180, 90, 270) if darkest < brightest else ():
        if signal.getitimer(signal.ITIMER_PROF)[0]:  # in the child process the time of a file begins again
            signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
        try:
            text, confidence = recognise(image.rotate(angle, expand=True), data)
        except RuntimeError:  # of xberg
            break
        if confidence >= 60:  # percent; upside-down pages have 29 to 50, bad copies 66 or more
            contents.scans.append(number)
            return _BROKEN_WORD.sub("\ufffe", text)
        if not text:
            break
    contents.omitted["scan without readable text"] += 1
    return ""


def recognise(image: Any, data: Sequence[str]) -> tuple[str, float]:
    """Return the text that tesseract reads in a picture, with the mean confidence of its words in percent."""
    import xberg

    file = BytesIO()
    image.save(file, "BMP")
    source = xberg.ExtractInput(kind="bytes", bytes=file.getvalue(), mime_type="image/bmp")
    names, folder = [Path(name).stem for name in data], str(Path(data[0]).parent)
    page = xberg.TesseractConfig(language=names, output_format="text", psm=3, use_cache=False)
    ocr = xberg.OcrConfig(backend="tesseract", language=names, tessdata_path=folder, tesseract_config=page)
    config = xberg.ExtractionConfig(ocr=ocr, force_ocr=True, output_format="plain", use_cache=False)
    [document] = asyncio.run(xberg.extract(source, config)).results
    return document.content.strip(), float(document.metadata.additional.get("mean_text_conf", 0))
