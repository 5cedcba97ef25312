"""PDF by pypdfium2: the text of each page as printed, with the values of forms; pictures of pages by Pillow."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from ctypes import c_ulong, create_string_buffer
from io import BytesIO
from math import hypot
from typing import Any

from realmops.readers.containers import parse_xml
from realmops.readers.contents import HIDDEN, Contents, UnreadableError, check_remaining
from realmops.readers.documents import LINE_LIMIT, PAGE_WITHOUT_TEXT
from realmops.readers.ocr import SIDE, read_picture
from realmops.readers.running_lines import find_running_lines

# PDFium writes U+FFFE for a hyphen at a line end, with the line break; other signs than - keep theirs.
_REMOVED = re.compile("\r(?=\n)|\0|(?P<hyphen>\ufffe|(?<=\\w)[\xad\u2010]\r\n(?=\\w))")
_BEFORE, _AFTER = re.compile(r"[\w-]+\Z"), re.compile(r"[\w-]+")
_WORD = re.compile(r"(?<![\w\ufffe-])\w+(?:-\w+)*(?![\w\ufffe-])")  # not broken at a line end
_LINE_END = re.compile("(?<=[\n\ufffe])")
_BROKEN_AT_PAGE_END = re.compile("(?<=\\w)[-\xad\u2010\ufffe][^\\S\f]*\f[^\\S\f]*([^\\W_]\\S*)")
_HIDDEN_FLAGS = 1 << 1 | 1 << 5  # Hidden and NoView: annotations that a viewer does not show
_INVISIBLE = (3, 7)  # modes of text that draw nothing
# Signs of fonts that do not map their glyphs to characters, in most words of a page
_PRINTED = re.compile(r"[^ \r\n]+")
_UNMAPPED = re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\ufffd]")
_XFA_DATA = "{http://www.xfa.org/schema/xfa-data/1.0/}data"
_LONGEST_WORD = 64  # characters
_CONJUNCTIONS = {"and", "or", "und", "oder"}  # "pre- and post-war"
_FIRST_WORDS = {"all", "cross", "half", "self", "well"}  # of English compounds with a hyphen
_SUFFIX = 3  # characters of the longest ending: selfish, crossing
_SCALE = 300 / 72  # of pages for OCR, to 300 dots per inch


def read_pdf(data: bytes, ocr: Sequence[str] = ()) -> Contents:
    import pypdfium2
    from pypdfium2.raw import FORMTYPE_XFA_FULL

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error) or "security" in str(error):
            raise UnreadableError("encrypted", "the PDF needs a password; save it without one") from None
        raise
    logging.getLogger("pypdfium2").setLevel(logging.ERROR)  # it warns of XFA forms
    document.init_forms()
    contents = Contents(document.get_metadata_value("Title"), ())
    contents.omitted["embedded object"] = document.count_attachments()

    def texts() -> Iterator[str]:
        with document:
            if document.get_formtype() == FORMTYPE_XFA_FULL:
                yield _read_xfa(document, contents.omitted)
            else:
                yield from _join_words(_pages(document, ocr, contents), contents.omitted)

    contents.pages = texts()
    return contents


def read_image(data: bytes, ocr: Sequence[str]) -> Contents:
    """Return the text of a picture, turned as its camera noted, or of all pictures of a TIFF file, as a PDF."""
    from PIL import Image, ImageOps

    image, file = Image.open(BytesIO(data)), BytesIO()  # Pillow refuses 179 million pixels
    is_tiff = image.format == "TIFF"
    (image if is_tiff else ImageOps.exif_transpose(image)).save(file, "PDF", save_all=is_tiff)
    return read_pdf(file.getvalue(), ocr)


def _join_words(texts: Iterable[str], omitted: Counter[str]) -> Iterator[str]:
    """Yield pages without running lines, and with each word that a line end or a page end breaks in one piece."""
    lines = [_LINE_END.split(text.replace("\f", " ")) for text in texts]
    running = find_running_lines(lines)
    omitted["running line"] += len(running)
    pages = (
        "".join(line for n, line in enumerate(page) if (number, n) not in running) for number, page in enumerate(lines)
    )
    printed = _BROKEN_AT_PAGE_END.sub("\ufffe\\1\f", "\f".join(pages)).split("\f")
    words = _whole_words(printed)
    for text in printed:
        yield _REMOVED.sub(lambda match: "-" * _keeps_hyphen(match, words), text)


def _read_xfa(document: Any, omitted: Counter[str]) -> str:
    """Return the text of a form that most viewers show as a page that asks to wait: the values last, with captions."""
    import pypdfium2.raw as pdfium
    from lxml.etree import QName, XMLSyntaxError

    texts, captions, values = [], {}, []
    size = c_ulong()
    for number in range(pdfium.FPDF_GetXFAPacketCount(document)):
        pdfium.FPDF_GetXFAPacketContent(document, number, None, 0, size)
        packet = create_string_buffer(size.value)
        pdfium.FPDF_GetXFAPacketContent(document, number, packet, size, size)
        with suppress(XMLSyntaxError):  # the first and the last packet are halves of an element
            root = parse_xml(packet.raw)
            texts += ["".join(node.itertext()) for node in root.iterfind(".//{*}draw/{*}value")]
            for node in root.iter("{*}field"):
                captions[node.get("name")] = "".join(node.xpath("*[local-name() = 'caption']//text()"))
            leaves = (node for node in root.iterfind(f".//{_XFA_DATA}//*") if not len(node) and node.text)
            values += [(QName(node).localname, node.text) for node in leaves]
    texts += [f"{captions.get(name, '')} {value}" for name, value in values]
    omitted["XFA form"] += not texts
    return "\n".join(" ".join(text.split()) for text in texts)


def _pages(document: Any, ocr: Sequence[str], contents: Contents) -> Iterator[str]:
    from pypdfium2 import PdfiumError

    remaining = LINE_LIMIT
    for number in range(len(document)):
        text = ""
        try:
            text = _read_page(document, number, ocr, contents)
        except PdfiumError:
            contents.omitted["broken page"] += 1
        remaining -= len(text)
        check_remaining(remaining)
        yield text


def _read_page(document: Any, number: int, ocr: Sequence[str], contents: Contents) -> str:
    """Return the text that a viewer shows on a page, forms' values and other text of annotations last."""
    import pypdfium2.raw as pdfium

    page = document[number]
    if _draws_annotations(page, contents.omitted):
        pdfium.FPDFPage_Flatten(page, pdfium.FLAT_NORMALDISPLAY)  # page.flatten() needs a form
        page.close()
        page = document[number]  # the annotations are part of its content now
    textpage = page.get_textpage()
    if hidden := [item for item in _hidden_texts(page, textpage, contents.omitted) if item.extract().strip()]:
        contents.omitted[HIDDEN] += len(hidden)
        textpage.close()
        for item in hidden:
            page.remove_obj(item)
        textpage = page.get_textpage()
    text: str = textpage.get_text_range()
    if sum(len(word) for word in _PRINTED.findall(text) if _UNMAPPED.search(word)) > len(text) / 2:
        text = ""
    if not text.strip() and ocr:
        scale = min(_SCALE, SIDE / max(page.get_size()))
        text = read_picture(page.render(scale=scale, grayscale=True).to_pil(), ocr, number + 1, contents)
    elif not text.strip():
        contents.omitted[PAGE_WITHOUT_TEXT] += 1
    page.close()
    return text


def _draws_annotations(page: Any, omitted: Counter[str]) -> bool:
    """Return whether annotations print text on a page; count the others that have text."""
    import pypdfium2.raw as pdfium

    is_drawn = False
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
    return is_drawn


def _hidden_texts(page: Any, textpage: Any, omitted: Counter[str]) -> Iterator[Any]:
    """Yield texts off the page, smaller than a point, or invisible, except the text of a scan; count images."""
    import pypdfium2.raw as pdfium

    objects = [*page.get_objects(max_depth=1, textpage=textpage)]
    pictures = [item.get_bounds() for item in objects if item.type == pdfium.FPDF_PAGEOBJ_IMAGE]
    texts = [item for item in objects if item.type == pdfium.FPDF_PAGEOBJ_TEXT]
    omitted["image"] += len(pictures)
    invisible = [pdfium.FPDFTextObj_GetTextRenderMode(text) in _INVISIBLE for text in texts]
    shown = page.get_bbox()
    for text, is_invisible in zip(texts, invisible, strict=True):
        bounds = text.get_bounds()
        height = bounds[3] - bounds[1]
        is_tiny = height < 1 and text.get_font_size() * hypot(*text.get_matrix().get()[2:4]) < 1
        is_scan = all(invisible) or any(_overlap(bounds, picture) for picture in pictures)
        if (is_invisible and not is_scan) or is_tiny or not _overlap(bounds, shown, margin=height):
            yield text


def _overlap(a: Sequence[float], b: Sequence[float], margin: float = 0) -> bool:
    """Return whether two boxes (left, bottom, right, top) are at most ``margin`` apart."""
    return all(a[n] <= b[n + 2] + margin and b[n] <= a[n + 2] + margin for n in (0, 1))


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
