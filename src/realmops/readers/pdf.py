"""PDF by pypdfium2: the text of each page as printed, with the values of forms; pictures of pages by Pillow."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_float
from functools import partial
from io import BytesIO
from itertools import chain
from typing import Any

from realmops.readers.contents import HIDDEN, Contents, UnreadableError
from realmops.readers.documents import PAGE_WITHOUT_TEXT
from realmops.readers.ocr import SIDE, read_picture
from realmops.readers.running_lines import find_running_lines

# PDFium writes U+FFFE for a hyphen at a line end, with the line break; other signs than - keep theirs.
_HYPHEN = re.compile("\ufffe|(?<=\\w)[\xad\u2010]\n(?=\\w)")
_BEFORE, _AFTER = re.compile(r"[\w-]+\Z"), re.compile(r"[\w-]+")
_WORD = re.compile(r"(?<![\w\ufffe-])\w+(?:-\w+)*(?![\w\ufffe-])")  # not broken at a line end
_BROKEN_AT_PAGE_END = re.compile("(?<=\\w)[-\xad\u2010\ufffe][^\\S\f]*\f[^\\S\f]*([^\\W_]\\S*)")
_HIDDEN_FLAGS = 1 << 1 | 1 << 5  # Hidden and NoView: annotations that a viewer does not show
_INVISIBLE = (3, 7)  # modes of text that draw nothing
_PRINTED = re.compile(r"[^ \r\n]+")
_UNMAPPED = re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\ufffd]")  # by a font without Unicode
_LONGEST_WORD = 64  # characters
_CONJUNCTIONS = {"and", "or", "und", "oder"}  # "pre- and post-war"
_FIRST_WORDS = {"all", "cross", "half", "self", "well"}  # of English compounds with a hyphen


def read_pdf(data: bytes, ocr: Sequence[str] = ()) -> Contents:
    import pypdfium2
    from pypdfium2.raw import FORMTYPE_XFA_FULL

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error) or "security" in str(error):
            raise UnreadableError("encrypted", "the PDF needs a password; save it without one") from None
        raise
    if document.get_formtype() == FORMTYPE_XFA_FULL:
        raise UnreadableError("xfa_form", "it is an XFA form, which only viewers of Adobe show; print it to a PDF")
    document.init_forms()
    contents = Contents(document.get_metadata_value("Title"), ())
    contents.omitted["embedded object"] = document.count_attachments()
    contents.pages = _join_words(_pages(document, ocr, contents), contents.omitted)
    return contents


def read_image(data: bytes, ocr: Sequence[str]) -> Contents:
    """Return the text of a picture, turned as its camera noted, or of all pictures of a TIFF file, as a PDF."""
    from PIL import Image, ImageOps

    image, file = Image.open(BytesIO(data)), BytesIO()  # Pillow refuses 179 million pixels
    ImageOps.exif_transpose(image, in_place=True)
    image.save(file, "PDF", resolution=300, save_all=image.format == "TIFF")
    return read_pdf(file.getvalue(), ocr)


def _join_words(texts: Iterable[str], omitted: Counter[str]) -> Iterator[str]:
    """Yield pages without running lines, and with each word that a line end or a page end breaks in one piece."""
    plain = (text.replace("\r\n", "\n").replace("\0", "").replace("\f", " ") for text in texts)
    lines = [text.replace("\ufffe", "\ufffe\n").split("\n") for text in plain]
    running = find_running_lines(lines)
    omitted["running line"] += len(running)
    kept = [[line for n, line in enumerate(page) if (number, n) not in running] for number, page in enumerate(lines)]
    joined = "\f".join(map("\n".join, kept)).replace("\ufffe\n", "\ufffe")
    printed = _BROKEN_AT_PAGE_END.sub("\ufffe\\1\f", joined).split("\f")
    is_broken = any(map(_HYPHEN.search, printed))
    words = set(chain.from_iterable(_WORD.findall(text.lower()) for text in printed)) if is_broken else set()
    for text in printed:
        yield _HYPHEN.sub(lambda match: "-" * _keeps_hyphen(match, words), text)


def _pages(document: Any, ocr: Sequence[str], contents: Contents) -> Iterator[str]:
    from pypdfium2 import PdfiumError

    with document:
        for number in range(len(document)):
            try:
                yield _read_page(document, number, ocr, contents)
            except PdfiumError:
                contents.omitted["broken page"] += 1
                yield ""


def _read_page(document: Any, number: int, ocr: Sequence[str], contents: Contents) -> str:
    """Return the text that a viewer shows on a page, forms' values and other text of annotations last."""
    import pypdfium2.raw as pdfium

    page, omitted = document[number], contents.omitted
    is_drawn = False  # whether annotations print text on the page
    for index in range(pdfium.FPDFPage_GetAnnotCount(page)):
        annotation = pdfium.FPDFPage_GetAnnot(page, index)
        kind = pdfium.FPDFAnnot_GetSubtype(annotation)
        if kind == pdfium.FPDF_ANNOT_FILEATTACHMENT:
            omitted["embedded object"] += 1
        elif kind not in (pdfium.FPDF_ANNOT_LINK, pdfium.FPDF_ANNOT_POPUP):
            is_visible = pdfium.FPDFAnnot_HasKey(annotation, b"AP")
            has_text = pdfium.FPDFAnnot_GetStringValue(annotation, b"Contents", None, 0) > len("\0".encode("utf-16-le"))
            if pdfium.FPDFAnnot_GetFlags(annotation) & _HIDDEN_FLAGS:
                omitted[HIDDEN] += has_text
            elif kind in (pdfium.FPDF_ANNOT_WIDGET, pdfium.FPDF_ANNOT_FREETEXT, pdfium.FPDF_ANNOT_STAMP) and is_visible:
                is_drawn = True
            elif kind != pdfium.FPDF_ANNOT_WIDGET:
                omitted["annotation"] += has_text
        pdfium.FPDFPage_CloseAnnot(annotation)
    if is_drawn:
        pdfium.FPDFPage_Flatten(page, pdfium.FLAT_NORMALDISPLAY)  # page.flatten() needs a form
        page.close()
        page = document[number]  # the annotations are part of its content now
    _remove_hidden_text(page, omitted)
    text: str = page.get_textpage().get_text_range()
    if _UNMAPPED.search(text) and sum(map(len, filter(_UNMAPPED.search, _PRINTED.findall(text)))) > len(text) / 2:
        text = ""
    if not text.strip() and ocr:
        scale = min(300 / 72, SIDE / max(page.get_size()))  # to 300 dots per inch
        text = read_picture(page.render(scale=scale, grayscale=True).to_pil(), ocr, number + 1, contents)
    elif not text.strip():
        omitted[PAGE_WITHOUT_TEXT] += 1
    page.close()
    return text


def _remove_hidden_text(page: Any, omitted: Counter[str]) -> None:
    """Remove and count text off the page, and invisible text unless it is that of a scan; count images."""
    import pypdfium2.raw as pdfium

    items = [*map(partial(pdfium.FPDFPage_GetObject, page), range(pdfium.FPDFPage_CountObjects(page)))]
    modes = [*map(pdfium.FPDFTextObj_GetTextRenderMode, items)]  # -1 of images and others
    texts = [(item, mode) for item, mode in zip(items, modes, strict=True) if mode >= 0]
    kinds = [pdfium.FPDFPageObj_GetType(item) for item, mode in zip(items, modes, strict=True) if mode < 0]
    omitted["image"] += kinds.count(pdfium.FPDF_PAGEOBJ_IMAGE)
    invisible = sum(map(modes.count, _INVISIBLE))
    is_scan = invisible == len(texts) or (pdfium.FPDF_PAGEOBJ_IMAGE in kinds and invisible >= len(texts) / 2)
    x_0, y_0, x_1, y_1 = page.get_bbox()
    left, bottom, right, top = (c_float() for _ in range(4))
    for text, mode in texts:
        pdfium.FPDFPageObj_GetBounds(text, left, bottom, right, top)
        height = top.value - bottom.value  # 0 of blanks
        is_near = x_0 - right.value < height > left.value - x_1 and y_0 - top.value < height > bottom.value - y_1
        if height and (not is_near or (mode in _INVISIBLE and not is_scan)):
            pdfium.FPDFPage_RemoveObject(page, text)
            pdfium.FPDFPageObj_Destroy(text)
            omitted[HIDDEN] += 1


def _keeps_hyphen(match: re.Match[str], words: set[str]) -> bool:
    """Return whether a hyphen at a line end is that of a compound by its form (COVID-19) or by ``words``."""
    start, end = match.span()
    first = _BEFORE.search(match.string, max(0, start - _LONGEST_WORD), start)
    second = _AFTER.match(match.string, end, end + _LONGEST_WORD)
    if first is None or second is None:
        return False
    left, right = first[0], second[0]
    is_name = (right[0].isupper() and not left.isupper()) or right[0].isdigit() or left[-1].isdigit()
    left, right = left.lower(), right.lower()
    if is_name or right in _CONJUNCTIONS or f"{left}{right}" in words:
        return is_name or right in _CONJUNCTIONS
    is_compound = f"{left}-{right}" in words or (left in _FIRST_WORDS and len(right) > 3)  # selfish, crossing are none
    return is_compound or ("-" in left + right and left.rpartition("-")[2] in words)
