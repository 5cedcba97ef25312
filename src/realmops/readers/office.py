"""Word and PowerPoint files: the text that a person sees, and counts of what is left out.

Equations are read as their characters, charts as a table of their values, diagrams as their paragraphs.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from realmops.readers.containers import parse_page, parse_xml, read_mime
from realmops.readers.contents import (
    HIDDEN,
    PARAGRAPH,
    WORD,
    Contents,
    format_table,
    is_hidden,
    open_package,
)
from realmops.readers.html import flow_text

_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006"
_DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_SLIDE = "{http://schemas.openxmlformats.org/presentationml/2006/main}"
_CHART = "{http://schemas.openxmlformats.org/drawingml/2006/chart}"
_CHART_2014 = "{http://schemas.microsoft.com/office/drawing/2014/chartex}"
_DIAGRAM = "{http://schemas.openxmlformats.org/drawingml/2006/diagram}"
_MATH = f"{{{_OFFICE}/math}}"
_RELATION = f"{{{_OFFICE}/relationships}}"
_PICTURE = "{http://schemas.openxmlformats.org/drawingml/2006/picture}"
_OLD_DRAWING, _OLD_OFFICE = "{urn:schemas-microsoft-com:vml}", "{urn:schemas-microsoft-com:office:office}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"

_DROPPED = (_FALLBACK, f"{WORD}del", f"{WORD}moveFrom", f"{WORD}rt")
_ELEMENT_TEXT = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
_OBJECTS = (f"{_OLD_OFFICE}OLEObject", f"{_SLIDE}oleObj")
_PICTURES = (f"{_PICTURE}pic", f"{_SLIDE}pic", f"{_OLD_DRAWING}imagedata")
_OBJECT_FRAMES = (f"{WORD}object", f"{_SLIDE}oleObj")  # with a picture of the object
_CHUNK_DEPTH = 3  # Word files within Word files

_STRICT = b"http://purl.oclc.org/ooxml/"
_STRICT_NAME = re.compile(rb"http://purl\.oclc\.org/ooxml/(\w+)/(relationships/)?(\w+)")
_STRICT_NAMES = {b"extendedProperties": b"extended-properties", b"customProperties": b"custom-properties"}
_CONTENT_TYPES = "[Content_Types].xml"
_MAIN_TYPE = re.compile(rb"application/vnd\.[\w.-]*?(word|powerpoint|presentation)[\w.-]*\.main\+xml")
_FORMATS = b"application/vnd.openxmlformats-officedocument"
_KNOWN_TYPES = {b"word": _FORMATS + b".wordprocessingml.document.main+xml"}
_KNOWN_TYPES |= dict.fromkeys((b"powerpoint", b"presentation"), _FORMATS + b".presentationml.presentation.main+xml")


def open_office(data: bytes) -> tuple[BytesIO, ZipFile]:
    """Open an Office file within the limits; names of Strict, macros and templates become those that libraries know."""
    package = open_package(data)
    names = package.namelist()
    types = package.read(_CONTENT_TYPES) if _CONTENT_TYPES in names else b""
    is_strict = "_rels/.rels" in names and _STRICT in package.read("_rels/.rels")
    if is_strict or any(match[0] not in _KNOWN_TYPES.values() for match in _MAIN_TYPE.finditer(types)):
        converted = BytesIO()
        with ZipFile(converted, "w", ZIP_DEFLATED) as out:
            for name in names:
                content = package.read(name)
                if name.endswith((".xml", ".rels")):
                    content = _STRICT_NAME.sub(_transitional_name, content)
                if name == _CONTENT_TYPES:
                    content = _MAIN_TYPE.sub(lambda match: _KNOWN_TYPES[match[1]], content)
                out.writestr(name, content)
        data = converted.getvalue()
        package = ZipFile(converted)
    return BytesIO(data), package


def _transitional_name(match: re.Match[bytes]) -> bytes:
    family, relation, name = match[1], match[2] or b"", match[3]
    name = _STRICT_NAMES.get(name, name)
    if family == b"drawingml" and name not in (b"main", b"chart", b"diagram", b"picture", b"lockedCanvas"):
        return b"http://schemas.openxmlformats.org/drawingml/2006/" + name
    return b"http://schemas.openxmlformats.org/%s/2006/%s%s" % (family, relation, name)


def read_docx(data: bytes) -> Contents:
    """Return the contents of a Word file as one page: the body, then footnotes and endnotes."""
    import docx

    return _read_word(docx.Document(open_office(data)[0]), 0)


def _read_word(document: Any, depth: int) -> Contents:
    omitted: Counter[str] = Counter()
    paragraphs = [*_paragraphs(document.part, document.element.body, WORD, omitted, depth)]
    parts = defaultdict(list)
    for relation in document.part.rels.values():
        if not relation.is_external:
            parts[relation.reltype.rpartition("/")[2]].append(relation.target_part)
    for part in parts["footnotes"] + parts["endnotes"]:
        root = parse_xml(part.blob)
        for note in root.iterchildren(f"{WORD}footnote", f"{WORD}endnote"):
            if note.get(f"{WORD}type", "normal") == "normal":  # others are the lines between text and notes
                paragraphs += _paragraphs(part, note, WORD, omitted, depth)
    omitted["comment"] += sum(len(parse_xml(part.blob)) for part in parts["comments"])
    for part in parts["header"] + parts["footer"]:
        omitted["header or footer"] += any(_paragraphs(part, parse_xml(part.blob), WORD, Counter(), depth))
    return Contents(document.core_properties.title, [PARAGRAPH.join(paragraphs)], omitted)


def read_pptx(data: bytes) -> Contents:
    """Return the contents of a PowerPoint file: each slide with its notes is a page."""
    import pptx

    slides = pptx.Presentation(open_office(data)[0])
    omitted: Counter[str] = Counter()

    def texts() -> Iterator[str]:
        for slide in slides.slides:
            if is_hidden(slide.element):
                omitted[HIDDEN] += 1
                yield ""
                continue
            paragraphs = [*_paragraphs(slide.part, slide.element, _DRAWING, omitted)]
            if slide.has_notes_slide and (notes := slide.notes_slide.notes_text_frame):
                paragraphs.append(notes.text)
            for relation in slide.part.rels.values():
                if relation.reltype.endswith("/comments"):
                    omitted["comment"] += len(parse_xml(relation.target_part.blob))
            yield PARAGRAPH.join(paragraphs)

    return Contents(slides.core_properties.title, texts(), omitted)


def _paragraphs(part: Any, root: Any, namespace: str, omitted: Counter[str], depth: int = 0) -> Iterator[str]:
    """Yield the paragraphs in document order; what is not text is removed from ``root`` and counted in ``omitted``."""
    for node in list(root.iter(*_DROPPED)):
        node.getparent().remove(node)
    for node in [node for node in root.iter(f"{WORD}r", f"{_SLIDE}cNvPr") if is_hidden(node)]:
        hidden = node if node.tag == f"{WORD}r" else node.getparent().getparent()  # the shape
        omitted[HIDDEN] += any(text.text for text in hidden.iter(f"{WORD}t", f"{_DRAWING}t"))
        hidden.getparent().remove(hidden)
    _count_objects(root, omitted)
    yield from _blocks(part, root, namespace, omitted, depth)


def _blocks(part: Any, root: Any, namespace: str, omitted: Counter[str], depth: int) -> Iterator[str]:
    """Yield the paragraphs and tables of an element without hidden text; a table of the layout is its paragraphs."""
    paragraph_tag, text_tag, run_tag = f"{namespace}p", f"{namespace}t", f"{namespace}r"
    table_tag, math_tag = f"{namespace}tbl", f"{_MATH}t"
    replacements = {f"{namespace}{name}": text for name, text in _ELEMENT_TEXT.items()}
    others = (f"{WORD}altChunk", f"{_CHART}chart", f"{_DIAGRAM}relIds")
    table = None
    for paragraph in root.iter(paragraph_tag, table_tag, *others):
        if table is not None and table in paragraph.iterancestors(table_tag):
            continue
        if paragraph.tag == table_tag:
            if paragraph.find(f".//{table_tag}") is None:
                table = paragraph
                cell_blocks = partial(_blocks, part, namespace=namespace, omitted=omitted, depth=depth)
                yield format_table(
                    ["\n".join(cell_blocks(cell)) for cell in row.iter(f"{namespace}tc")]
                    for row in table.iter(f"{namespace}tr")
                )
            continue
        if paragraph.tag != paragraph_tag:
            yield from _related_paragraphs(part, paragraph, omitted, depth)
            continue
        text = "".join(
            replacements.get(node.tag) or node.text or ""
            for node in paragraph.iter(text_tag, math_tag, *replacements)
            if (node.tag == math_tag or node.getparent().tag in (run_tag, paragraph_tag))
            and next(node.iterancestors(paragraph_tag)) is paragraph
        ).strip()
        if text:
            yield text


def _count_objects(root: Any, omitted: Counter[str]) -> None:
    for node in root.iter(*_OBJECTS):
        is_equation = node.get("ProgID", node.get("progId", "")).startswith("Equation")
        omitted["equation" if is_equation else "embedded object"] += 1
    omitted["image"] += sum(next(node.iterancestors(*_OBJECT_FRAMES), None) is None for node in root.iter(*_PICTURES))
    omitted["symbol"] += sum(1 for _ in root.iter(f"{WORD}sym"))  # a character of a font of pictures
    omitted["chart"] += sum(1 for _ in root.iter(f"{_CHART_2014}chart"))


def _related_paragraphs(part: Any, node: Any, omitted: Counter[str], depth: int) -> Iterator[str]:
    """Yield the paragraphs of another part: a chart, a diagram, or text in another format (``altChunk``)."""
    relation = part.rels.get(node.get(f"{_RELATION}dm" if node.tag == f"{_DIAGRAM}relIds" else f"{_RELATION}id"))
    target = None if relation is None or relation.is_external else relation.target_part
    if node.tag == f"{WORD}altChunk":
        chunk = None if target is None else _read_chunk(target, depth)
        if chunk is None:
            omitted["embedded object"] += 1
        else:
            yield from chunk.pages
            omitted.update(chunk.omitted)
    elif target is None:
        omitted["chart" if node.tag == f"{_CHART}chart" else "embedded object"] += 1
    elif node.tag == f"{_CHART}chart":
        yield from _chart_rows(parse_xml(target.blob))
    else:
        yield from _paragraphs(target, parse_xml(target.blob), _DRAWING, omitted)


def _read_chunk(part: Any, depth: int) -> Contents | None:
    """Return the contents of an ``altChunk``; None in a format that is not read, such as RTF."""
    import docx

    kind, data = part.content_type.partition(";")[0].lower(), part.blob
    if kind in ("text/html", "application/xhtml+xml"):
        text, omitted = flow_text(parse_page(data))
        return Contents("", [text], omitted)
    if kind == "text/plain":
        return Contents("", [data.decode("utf-8-sig", "replace").strip()])
    if kind in ("message/rfc822", "multipart/related", "application/x-mimearchive"):
        return read_mime(data)
    if "wordprocessingml" in kind and depth < _CHUNK_DEPTH:
        return _read_word(docx.Document(open_office(data)[0]), depth + 1)
    return None


def _chart_rows(root: Any) -> Iterator[str]:
    """Yield title and axes' titles of a chart, then its values as a table: a row for each category."""
    for title in root.iter(f"{_CHART}title"):
        yield "".join(node.text or "" for node in title.iter(f"{_DRAWING}t", f"{_CHART}v"))
    names: list[str] = []
    # The texts of each cell by category and column, in order; every series repeats the categories, column 0
    rows: dict[int, dict[int, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for series in root.iter(f"{_CHART}ser"):
        names.append(" ".join(node.text or "" for node in series.iterfind(f"{_CHART}tx//{_CHART}v")))
        for axis, column in (("cat", 0), ("xVal", 0), ("val", len(names)), ("yVal", len(names))):
            for value in series.iterfind(f"{_CHART}{axis}//{_CHART}v"):
                rows[int(value.getparent().get("idx", 0))][column][_format_number(value.text or "")] = None
    values = (
        [*(row.pop(0, None) or [""]), *(" ".join(row.get(column, ())) for column in range(1, max(row, default=0) + 1))]
        for _, row in sorted(rows.items())
    )
    yield format_table([["", *names], *values])


def _format_number(text: str) -> str:
    try:
        return f"{float(text):.15g}"
    except ValueError:
        return text
