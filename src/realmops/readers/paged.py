"""Formats whose files are one document each, read in a child process with limits (``sandbox``).

A worker receives the path of a file, so that large files are not all in memory at once; nothing is unpacked to disk.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from realmops.compressed import open_raw
from realmops.credentials import error_line
from realmops.readers.containers import read_eml, read_epub, read_ipynb
from realmops.readers.contents import PARAGRAPH, Contents, UnreadableError, check_remaining
from realmops.readers.documents import (
    LINE_LIMIT,
    PAGE_WITHOUT_TEXT,
    Document,
    Format,
    Outcome,
    RawRecord,
    Rejected,
    call_guarded,
    parse_document,
    printable_path,
)
from realmops.readers.ocr import INSTALL
from realmops.readers.office import read_docx, read_pptx
from realmops.readers.other import SHEETS, TYPES, read_other
from realmops.readers.pdf import read_image, read_pdf
from realmops.readers.sandbox import convert_in_child
from realmops.readers.spreadsheet import read_xlsx
from realmops.readers.text import TEXT_SUFFIXES, read_text

PDF, IMAGE, TEXT = "pdf", "image", "text"  # names of the formats that OCR reads, and of that of compressed files
IMAGES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".bmp", ".gif")
SCANS = (PAGE_WITHOUT_TEXT, "scan", *(suffix[1:] for suffix in IMAGES))  # kinds of what waits for OCR
_FILE_LIMIT = 512 << 20  # bytes
# Titles that programs write instead of a person: defaults, and names of files.
_PROGRAM_TITLE = re.compile(
    r"|\(?(?:anonymous|none|null|unbenannt|unknown|unnamed|unspecified|untitled|sans titre|book|doc|document|dokument"
    r"|folie|mappe|slide|tabelle|word document)\)?(?:[ -]?\d+)?"
    r"|microsoft (?:office )?(?:excel|outlook|powerpoint|publisher|visio|word)(?: - .*)?"
    r"|powerpoint[- ]pr\w+|\w+ (?:d[eio] )?powerpoint"
    r"|.*\.(?:docx?|dvi|eps|indd|odt|pages|pdf|pptx?|ps|qxd|rtf|tex|wpd|xlsx?)",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?:…。！？．।۔][^\w\s]*\d{0,2}\s*\Z")  # and the number of a footnote
_LETTER = re.compile(r"(?:\d+(?:[.,]\d+)*\s|[(\"'“„«‘「])?(\w)")  # the first one, also of: 812,000 crowns
_READERS: dict[str, tuple[Callable[..., Any], str, str]] = {  # reader, the package that it needs, suffixes
    TEXT: (read_text, "", " ".join(TEXT_SUFFIXES)),
    PDF: (read_pdf, "pypdfium2", ".pdf"),
    IMAGE: (read_image, "", " ".join(IMAGES)),
    "docx": (read_docx, "", ".docx .docm .dotx .dotm"),
    "pptx": (read_pptx, "", ".pptx .pptm .ppsx .ppsm .potx .potm"),
    "xlsx": (read_xlsx, "", ".xlsx .xlsm .xltx .xltm"),
    "epub": (read_epub, "", ".epub"),
    "eml": (read_eml, "", ".eml"),
    "ipynb": (read_ipynb, "", ".ipynb"),
    **{kind: (partial(read_other, kind), "xberg", f".{kind}") for kind in TYPES},
}
_WITH_PAGES = (PDF, IMAGE, "pptx", "xlsx", *SHEETS)


def read_file(path: Path, ocr: tuple[str, ...] = ()) -> Iterator[RawRecord | Rejected]:
    with open_raw(path) as file:
        size = file.seek(0, os.SEEK_END)
    if ocr or not path.name.lower().endswith(IMAGES):
        yield RawRecord(str(path), path, size, ocr)
    else:
        yield Rejected(str(path), f"it is a picture, which OCR reads; {INSTALL}", kind=path.suffix[1:].lower())


def convert(name: str, raw: RawRecord) -> Outcome:
    """Convert the file at ``raw.data``, in a format of ``FILES``, to a document; ``Rejected`` if it cannot be read."""
    if name == TEXT:
        return call_guarded(partial(read_text, raw), raw.place)
    try:
        if raw.position > _FILE_LIMIT:
            raise UnreadableError("too_large", f"the file is larger than {_FILE_LIMIT >> 20} MiB; split it")
        with open_raw(raw.data) as file:
            data = file.read()  # read(n) would allocate n bytes up front, which count against the memory limit
        reader = _READERS[name][0]
        contents = reader(data, raw.ocr) if name in (PDF, IMAGE) else reader(data)
        title = " ".join(contents.title.replace("\0", "").split())
        if _PROGRAM_TITLE.fullmatch(title):
            title = printable_path(raw.data.stem).replace("_", " ")
        return _join_pages(name, replace(contents, title=title), raw.place)
    except UnreadableError as error:
        return Rejected(raw.place, str(error), kind=error.kind)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # the libraries raise any exception for broken files
        problem = f"the {name} file cannot be read ({error_line(error)}); save it again"
        return Rejected(raw.place, problem.encode(errors="backslashreplace").decode(), kind=f"broken_{name}")


def _join_pages(name: str, contents: Contents, place: str) -> Outcome:
    texts: list[str] = []
    remaining = LINE_LIMIT
    for page in contents.pages:
        texts.append(page.strip())
        remaining -= len(page)
        check_remaining(remaining)
    omitted = contents.omitted
    if not any(texts):
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(omitted.items()) if count) or "nothing"
        kind, advice = ("scan", INSTALL) if omitted[PAGE_WITHOUT_TEXT] else ("no_text", "add text, or leave it out")
        raise UnreadableError(kind, f"the file contains no text (left out: {counts}); {advice}")
    parts = [text and text + PARAGRAPH for text in texts]
    if name in (PDF, IMAGE):
        for (n, text), (_, following) in pairwise((n, text) for n, text in enumerate(texts) if text):
            if _goes_on(text, following):
                parts[n] = f"{text}\n"
    record = {"title": contents.title, "text": "".join(parts).strip()}
    outcome = parse_document(record, place, dict(sorted(omitted.items())))
    if name in _WITH_PAGES and isinstance(outcome, Document):
        outcome = replace(outcome, pages=tuple(accumulate(map(len, parts[:-1]), initial=0)), scans=(*contents.scans,))
    return outcome


def _goes_on(text: str, following: str) -> bool:
    """Return whether a sentence goes on over a page end: in lower case, or from it to a line too long for a heading."""
    last, first = text.rpartition("\n")[2], following.partition("\n")[0]
    is_lower = [letter is not None and letter[1].islower() for letter in map(_LETTER.match, (last, first))]
    return not _SENTENCE_END.search(last) and (is_lower[1] or (is_lower[0] and len(first) > 30))


FILES = tuple(
    Format(name, read_file, partial(convert_in_child, name), is_document=True, needs=needs, suffixes=(*names.split(),))
    for name, (_, needs, names) in _READERS.items()
)
