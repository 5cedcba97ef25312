"""PDF by pypdfium2: the text of each page as printed, with the values of forms; pictures of pages by Pillow."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO
from typing import Any

from realmops.readers.contents import HIDDEN, Contents, UnreadableError, check_remaining
from realmops.readers.documents import LINE_LIMIT, PAGE_WITHOUT_TEXT
from realmops.readers.ocr import SIDE, read_picture

# PDFium writes U+FFFE for a hyphen at a line end, with the line break; other signs than - keep theirs.
_REMOVED = re.compile("\r(?=\n)|\0|(?P<hyphen>\ufffe|(?<=\\w)[\xad\u2010]\r\n(?=\\w))")
_BEFORE, _AFTER = re.compile(r"[\w-]+\Z"), re.compile(r"[\w-]+")
_WORD = re.compile(r"(?<![\w\ufffe-])\w+(?:-\w+)*(?![\w\ufffe-])")  # not broken at a line end
_HIDDEN_FLAGS = 1 << 1 | 1 << 5  # Hidden and NoView: annotations that a viewer does not show
_LONGEST_WORD = 64  # characters
_CONJUNCTIONS = {"and", "or", "und", "oder"}  # "pre- and post-war"
_FIRST_WORDS = {"all", "cross", "half", "self", "well"}  # of English compounds with a hyphen
_SUFFIX = 3  # characters of the longest ending: selfish, crossing
_SCALE = 300 / 72  # of pages for OCR, to 300 dots per inch
_PIXELS = 100_000_000  # of a picture, which then takes 1 GiB


def read_pdf(data: bytes, ocr: Sequence[str] = ()) -> Contents:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error) or "security" in str(error):
            raise UnreadableError("encrypted", "the PDF needs a password; save it without one") from None
        raise
    document.init_forms()
    contents = Contents(document.get_metadata_value("Title"), ())
    contents.omitted["embedded object"] = document.count_attachments()

    def texts() -> Iterator[str]:
        with document:
            yield from _join_words(_pages(document, ocr, contents))

    contents.pages = texts()
    return contents


def read_image(data: bytes, ocr: Sequence[str]) -> Contents:
    """Return the text of a picture by OCR, turned as its camera noted; each picture of a TIFF file is a page."""
    from PIL import Image, ImageOps, ImageSequence

    Image.MAX_IMAGE_PIXELS = None  # the limit is _PIXELS, checked for each page
    image = Image.open(BytesIO(data))
    contents = Contents("", ())

    def texts() -> Iterator[str]:
        for number, frame in enumerate(ImageSequence.Iterator(image), start=1):
            if frame.width * frame.height > _PIXELS:
                raise UnreadableError("too_large", f"the picture has more than {_PIXELS:,} pixels; make it smaller")
            shown = ImageOps.exif_transpose(frame)
            if shown.has_transparency_data:
                shown = Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown.convert("RGBA"))
            yield read_picture(shown.convert("L"), ocr, number, contents)
            if image.format != "TIFF":  # one picture, or an animation
                return

    contents.pages = _join_words(texts())
    return contents


def _join_words(texts: Iterable[str]) -> Iterator[str]:
    printed = [*texts]
    words = _whole_words(printed)
    for text in printed:
        yield _REMOVED.sub(lambda match: "-" * _keeps_hyphen(match, words), text)


def _pages(document: Any, ocr: Sequence[str], contents: Contents) -> Iterator[str]:
    """Yield the text of each page, forms' values and other text of annotations last."""
    import pypdfium2.raw as pdfium

    omitted = contents.omitted
    remaining = LINE_LIMIT
    for number in range(len(document)):
        page = document[number]
        is_drawn = False  # whether annotations print text on the page
        for index in range(pdfium.FPDFPage_GetAnnotCount(page)):
            annotation = pdfium.FPDFPage_GetAnnot(page, index)
            kind = pdfium.FPDFAnnot_GetSubtype(annotation)
            is_visible = pdfium.FPDFAnnot_HasKey(annotation, b"AP")
            # Two bytes are the end of an empty text.
            has_text = pdfium.FPDFAnnot_GetStringValue(annotation, b"Contents", None, 0) > 2
            if pdfium.FPDFAnnot_GetFlags(annotation) & _HIDDEN_FLAGS:
                omitted[HIDDEN] += has_text
            elif kind in (pdfium.FPDF_ANNOT_WIDGET, pdfium.FPDF_ANNOT_FREETEXT, pdfium.FPDF_ANNOT_STAMP) and is_visible:
                is_drawn = True
            elif kind == pdfium.FPDF_ANNOT_FILEATTACHMENT:
                omitted["embedded object"] += 1
            elif kind not in (pdfium.FPDF_ANNOT_WIDGET, pdfium.FPDF_ANNOT_LINK, pdfium.FPDF_ANNOT_POPUP):
                omitted["annotation"] += has_text
            pdfium.FPDFPage_CloseAnnot(annotation)
        objects = map(partial(pdfium.FPDFPage_GetObject, page), range(pdfium.FPDFPage_CountObjects(page)))
        omitted["image"] += sum(pdfium.FPDFPageObj_GetType(item) == pdfium.FPDF_PAGEOBJ_IMAGE for item in objects)
        if is_drawn:
            pdfium.FPDFPage_Flatten(page, pdfium.FLAT_NORMALDISPLAY)  # page.flatten() needs a form
            page.close()
            page = document[number]  # the annotations are part of its content now
        text = page.get_textpage().get_text_range()
        if not text.strip() and ocr:
            scale = min(_SCALE, SIDE / max(page.get_size()))
            text = read_picture(page.render(scale=scale, grayscale=True).to_pil(), ocr, number + 1, contents)
        elif not text.strip():
            omitted[PAGE_WITHOUT_TEXT] += 1
        remaining -= len(text)
        check_remaining(remaining)
        yield text
        page.close()


def _whole_words(texts: Sequence[str]) -> set[str]:
    """Return the words of a document that no line end breaks; none if it breaks no word."""
    if not any(match["hyphen"] for text in texts for match in _REMOVED.finditer(text)):
        return set()
    return {match[0].lower() for text in texts for match in _WORD.finditer(text)}


def _keeps_hyphen(match: re.Match[str], words: set[str]) -> bool:
    """Return whether a hyphen at a line end belongs to a compound (Anglo-Saxon, COVID-19), not to a broken word.

    If the joined word is not elsewhere in the document, other compounds are evidence (well-known, state-of-the-art).
    """
    if not match["hyphen"]:
        return False
    start, end = match.span()
    first = _BEFORE.search(match.string, max(0, start - _LONGEST_WORD), start)
    second = _AFTER.match(match.string, end, end + _LONGEST_WORD)
    if first is None or second is None:
        return False
    left, right = first[0], second[0]
    if (right[0].isupper() and not left.isupper()) or right[0].isdigit() or left[-1].isdigit():
        return True
    left, right = left.lower(), right.lower()
    if right in _CONJUNCTIONS:
        return True
    if f"{left}{right}" in words:
        return False
    if f"{left}-{right}" in words or (left in _FIRST_WORDS and len(right) > _SUFFIX):
        return True
    return "-" in left + right and left.rpartition("-")[2] in words
