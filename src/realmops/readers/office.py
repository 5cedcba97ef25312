"""Word and PowerPoint files: the text that a person sees, and counts of what is left out."""

import posixpath
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from copy import copy
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any
from zipfile import BadZipFile, ZipFile

from lxml.etree import Element, XMLSyntaxError, iterwalk

from realmops.readers.containers import parse_xml, read_eml
from realmops.readers.contents import HIDDEN, PARAGRAPH, Contents, format_table, is_hidden, open_package, superscript
from realmops.readers.numbering import WORD, Numbering, format_number, read_number, read_value

_RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
_STRICT_NAME = re.compile(rb"http://purl\.oclc\.org/ooxml/(\w+)/(main|math|relationships)\b")
_TRANSITIONAL_NAME = rb"http://schemas.openxmlformats.org/\1/2006/\2"
DAMAGED = (KeyError, EOFError, NotImplementedError, BadZipFile, zlib.error, XMLSyntaxError)
_SIGNS = {"br": "\n", "cr": "\n", "noBreakHyphen": "-", "ptab": "\t", "tab": "\t"}
_NOTES = {f"{WORD}footnoteReference": "decimal", f"{WORD}endnoteReference": "lowerRoman"}  # formats of their marks
_INLINE = [*_NOTES, *(f"{{*}}{name}" for name in ("t", *_SIGNS))]
_EQUATION_MARKS = {"num": "", "den": "/", "lim": "_", "nary sub": "_", "rad e": "√", "sup": "^"}
_EQUATION_GAPS = {"d e": "|", "eqArr e": "; ", "func e": " ", "m mr": "; ", "mr e": " ", "nary e": " "}
_COLUMNS = 63  # of a table in Word
LABEL = 200  # characters of a merged cell that is repeated; a longer one is no label of its rows
_BULLETS = {"alphaLc": "lowerLetter", "alphaUc": "upperLetter", "romanLc": "lowerRoman", "romanUc": "upperRoman"}


class Part:
    """A part of an Office file, which other parts refer to; the package itself has the name ""."""

    def __init__(self, package: ZipFile, name: str, omitted: Counter[str]) -> None:
        self.package, self.name, self.omitted = package, name, omitted

    def read(self) -> Any:
        """Return the root element; if the part is missing or damaged, count it and return an empty one."""
        try:
            return parse_xml(_STRICT_NAME.sub(_TRANSITIONAL_NAME, self.package.read(self.name)))
        except DAMAGED:
            self.omitted["unreadable part"] += 1
            return Element("unreadable")

    @cached_property
    def related(self) -> dict[str, tuple[str, "Part"]]:
        folder, name = posixpath.split(self.name)
        links = Part(self.package, posixpath.join(folder, "_rels", f"{name}.rels"), self.omitted)
        parts = {}
        for node in links.read() if links.name in self.package.NameToInfo else ():
            if node.get("TargetMode") != "External":
                target = posixpath.normpath(posixpath.join("/", folder, node.get("Target", ""))).lstrip("/")
                part = Part(self.package, target, self.omitted)
                parts[node.get("Id")] = posixpath.basename(node.get("Type", "")), part
        return parts

    def of_kind(self, *kinds: str) -> list["Part"]:
        return [part for kind, part in self.related.values() if kind in kinds]


def open_main_part(data: bytes, usual_name: str) -> tuple[Part, Any, str]:
    """Return the main part of a file, its root element, and the title in the properties."""
    package = Part(open_package(data), "", Counter())
    main = next(iter(package.of_kind("officeDocument")), Part(package.package, usual_name, package.omitted))
    root = main.read()
    if root.tag.rpartition("}")[2] != posixpath.basename(usual_name).removesuffix(".xml"):
        raise ValueError(f"{main.name} is missing, damaged or not of the kind of {usual_name}")
    return main, root, "".join(part.read().findtext("{*}title") or "" for part in package.of_kind("core-properties"))


def read_docx(data: bytes, depth: int = 0) -> Contents:
    """Return the contents of a Word file as one page; a note follows its paragraph."""
    document, root, title = open_main_part(data, "word/document.xml")
    omitted, paragraphs = document.omitted, [*Text(document, depth).paragraphs(document, root)]
    omitted["comment"] += sum(len(part.read()) for part in document.of_kind("comments"))
    omitted["header or footer"] += sum(_remove(part.read()) for part in document.of_kind("header", "footer"))
    return Contents(title, [PARAGRAPH.join(paragraphs)], omitted)


def read_pptx(data: bytes) -> Contents:
    """Return the contents of a PowerPoint file: each slide with its notes is a page."""
    presentation, root, title = open_main_part(data, "ppt/presentation.xml")
    text, ids = Text(presentation), [node.get(f"{_RELATION}id") for node in root.iter("{*}sldId")]
    slides = [presentation.related[one][1] for one in ids if one in presentation.related]
    return Contents(title, (PARAGRAPH.join(_slide_paragraphs(part, text)) for part in slides), presentation.omitted)


def _slide_paragraphs(slide: Part, text: "Text") -> Iterator[str]:
    for part in (slide, *slide.of_kind("notesSlide")):
        root = part.read()
        if is_hidden(root):
            text.omitted[HIDDEN] += 1
            return
        for node in [node for node in root.iter("{*}ph") if node.get("type") in ("dt", "ftr", "hdr", "sldNum")]:
            text.omitted["header or footer"] += _remove(node.getparent().getparent().getparent())
        for tree in [*root.iter("{*}spTree", "{*}grpSp")]:
            shapes = [shape for shape in tree if next(shape.iter("{*}t", "{*}graphicFrame"), None) is not None]
            row, end, order = 0, 0, []
            for (top, bottom, left), shape in sorted(zip(map(_box, shapes), shapes, strict=True), key=itemgetter(0)):
                if top > end - 91_440:  # English metric units: below the first of the row
                    row, end = row + 1, bottom
                order.append((row, left, top, shape))
            tree.extend(shape for *_, shape in sorted(order, key=itemgetter(0, 1, 2)))  # which moves them
        yield from text.paragraphs(part, root)
    text.omitted["comment"] += sum(len(part.read()) for part in slide.of_kind("comments"))


def _box(shape: Any) -> tuple[int, int, int]:
    """Return top, bottom and left edge; a title is above all, a placeholder without them at the top."""
    box = next(shape.iter("{*}xfrm"), ())
    if any(node.get("type") in ("title", "ctrTitle") for node in shape.iterfind("*/{*}nvPr/{*}ph")):
        return (-1 << 40,) * 3
    values = {key: int(value) for node in box[:2] for key, value in node.items() if re.fullmatch(r"-?\d+", value)}
    top = values.get("y", 0)
    return top, top + values.get("cy", 0), values.get("x", 0)


class Text:
    """The text of the parts of a file, with the numbers of its paragraphs and notes."""

    def __init__(self, main: Part, depth: int = 0) -> None:
        self.omitted, self._depth = main.omitted, depth
        nodes = [node for part in main.of_kind("numbering", "styles") for node in part.read()]
        self._styles = {node.get(f"{WORD}styleId"): [node] for node in nodes}  # each with those that it is based on
        for styles in self._styles.values():
            while (base := self._styles.get(read_value(styles[-1], "*basedOn"))) and base[0] not in styles:
                styles.append(base[0])
        self._numbering = Numbering(nodes)
        notes = [(part, node) for part in main.of_kind("footnotes", "endnotes") for node in part.read()]
        self._notes = {(f"{node.tag}Reference", node.get(f"{WORD}id")): (part, node) for part, node in notes}
        self._note_counts: Counter[str] = Counter()
        self._pending: list[tuple[Part, Any, str]] = []  # notes of the last paragraph, with their marks
        self._bullets: dict[tuple[str, str, str], int] = {}  # last numbers in a shape by level, kind and first number

    def paragraphs(self, part: Part, root: Any) -> Iterator[str]:
        """Yield the paragraphs and tables of a part in the order of its elements, each before its notes."""
        self._remove_rest(root)
        for block in chain(self._blocks(part, root), [""]):
            yield from filter(None, [block])
            while self._pending:
                note_part, note, mark = self._pending.pop(0)
                yield mark + PARAGRAPH.join(self.paragraphs(note_part, note))

    def _remove_rest(self, root: Any) -> None:
        """Remove and count what is not shown, and write equations and symbols as text."""
        for node in [*root.iter("{*}Fallback", "{*}cellDel", "{*}del", "{*}moveFrom", "{*}rt", "{*}showingPlcHdr")]:
            holder = node.getparent()
            if holder.tag != f"{WORD}rPr":  # of the mark of a paragraph
                _remove(holder.getparent() if holder.tag.endswith("Pr") else node)
        for node in root.iter(f"{WORD}rStyle"):
            for style in self._styles.get(node.get(f"{WORD}val"), ()):
                for mark in style.iter(f"{WORD}vanish", f"{WORD}vertAlign"):
                    if node.getparent().find(mark.tag) is None:
                        node.getparent().append(copy(mark))
        for node in [*root.iter("{*}vanish", "{*}hidden", "{*}cNvPr")]:
            holder = node.getparent().getparent()  # a run, a row or a shape
            if is_hidden(holder) or is_hidden(node):
                self.omitted[HIDDEN] += _remove(holder)
        for node in [*root.iter("{*}oMath", f"{WORD}sym", f"{WORD}checkBox", f"{WORD}ddList")]:
            text = _equation(node) if node.tag.endswith("}oMath") else _sign(node)
            self.omitted["symbol"] += not text
            node.clear()
            node.tag, node.text = f"{WORD}t", text
        for node in root.iter("{*}OLEObject", "{*}oleObj"):
            is_equation = node.get("ProgID", node.get("progId", "")).startswith("Equation")
            self.omitted["equation" if is_equation else "embedded object"] += 1
        for node in root.iter("{*}pic", "{*}imagedata"):  # an object has a picture of itself
            self.omitted["image"] += next(node.iterancestors("{*}object", "{*}oleObj"), None) is None

    def _blocks(self, part: Part, root: Any) -> Iterator[str]:
        text = ""
        walker = iterwalk(root, ("start",), ["{*}altChunk", "{*}chart", "{*}p", "{*}relIds", "{*}tbl"])
        for _, node in walker:
            if node.tag.endswith("}tbl"):
                walker.skip_subtree()
                yield from self._table(part, node)
            elif not node.tag.endswith("}p"):
                yield from self._related(part, node)
            else:
                text += self._text(node)
                if not node.xpath("*/w:rPr/w:del | */w:rPr/w:moveFrom", namespaces={"w": WORD[1:-1]}):
                    yield f"{self._label(node, text)} {text}".strip()
                    text = ""  # else it goes on in the next paragraph
        yield text.strip()

    def _table(self, part: Part, table: Any) -> Iterator[str]:
        """Yield a table: rows are lines; the paragraphs of a row that has one cell, or a table in it, are their own."""
        columns = len(table.findall("{*}tblGrid/{*}gridCol"))
        is_layout = all(len(row.findall("{*}tc")) < columns for row in table.iterfind("{*}tr"))
        rows: list[list[str]] = [[]]
        for row in (row for row in table.iter("{*}tr") if next(row.iterancestors("{*}tbl")) is table):
            cells = [cell for cell in row.iter("{*}tc") if next(cell.iterancestors("{*}tbl")) is table]
            if sum(cell.get("hMerge") is None for cell in cells) < 2 or row.find(".//{*}tbl") is not None:
                yield from chain([format_table(rows)], self._blocks(part, row))
                rows = [[]]
                continue
            rows.append([""] * min(read_number(row, "*trPr/*gridBefore"), _COLUMNS))
            for cell in cells:
                place, span = len(rows[-1]), max(1, min(read_number(cell, "*tcPr/*gridSpan"), _COLUMNS))
                is_below = cell.get("vMerge") or read_value(cell, "*tcPr/*vMerge") not in ("", "restart")
                if cell.get("hMerge") or is_below:
                    repeated = rows[-1][-1:] if cell.get("hMerge") else rows[-2][place : place + 1]
                    text = "".join(label for label in repeated if len(label) <= LABEL)
                else:
                    text = "\n".join(self._blocks(part, cell))
                rows[-1] += [text, *[text if len(text) <= LABEL and not is_layout else ""] * (span - 1)]
        yield format_table(rows)

    def _text(self, paragraph: Any) -> str:
        text = raised = ""
        for node in paragraph.iter(*_INLINE):
            kind, parent = node.tag.rpartition("}")[2], node.getparent()
            if next(node.iterancestors("{*}p")) is not paragraph or (kind == "tab" and not parent.tag.endswith("}r")):
                continue  # of a paragraph in a shape, or the position of a tab
            if kind == "t" and is_raised(parent):
                raised += node.text or ""
            else:
                text, raised = text + superscript(text, raised, is_reference=False) if raised else text, ""
                mark = self._note_mark(node) if node.tag in _NOTES else ""
                text += superscript(text, mark, is_reference=True) if mark else _SIGNS.get(kind, node.text or "")
        return text + superscript(text, raised, is_reference=False)

    def _note_mark(self, reference: Any) -> str:
        kind, mark = reference.tag, ""
        if reference.get(f"{WORD}customMarkFollows", "0") in ("0", "false", "off"):
            self._note_counts[kind] += 1
            mark = format_number(self._note_counts[kind], _NOTES[kind])
        if note := self._notes.pop((kind, reference.get(f"{WORD}id")), None):
            self._pending.append((*note, mark and f"[{mark}] "))
        return mark

    def _label(self, paragraph: Any, text: str) -> str:
        """Return the automatic number of the next paragraph; hidden ones, and empty ones of slides, have none."""
        if paragraph.tag.startswith(WORD):
            is_hidden = not text and paragraph.find(f"{WORD}pPr/{WORD}rPr/{WORD}vanish") is not None
            styles = self._styles.get(read_value(paragraph, "*pPr/*pStyle"), ())
            return "" if is_hidden else self._numbering.label(paragraph, styles)
        if next(paragraph.itersiblings(paragraph.tag, preceding=True), None) is None:
            self._bullets = {}
        properties: Any = next(paragraph.iterfind("{*}pPr"), {})
        bullet: Any = next(paragraph.iterfind("{*}pPr/{*}buAutoNum"), {})
        key = level, kind, start = properties.get("lvl", "0"), bullet.get("type", ""), bullet.get("startAt", "1")
        if not text:
            return ""
        self._bullets = {one: last for one, last in self._bullets.items() if one[0] < level or one == key}
        self._bullets[key] = number = self._bullets.get(key, int(start) - 1) + 1
        if not kind:
            return ""
        end = ")" if "Paren" in kind else "." if "Period" in kind else ""
        return f"{'(' if 'Both' in kind else ''}{format_number(number, _BULLETS.get(kind[:7], ''))}{end}"

    def _related(self, part: Part, node: Any) -> Iterator[str]:
        """Yield the paragraphs of another part: a chart, a diagram, or text in another format (``altChunk``)."""
        kind = node.tag.rpartition("}")[2]
        _, target = part.related.get(node.get(f"{_RELATION}dm", node.get(f"{_RELATION}id")), ("", None))
        try:
            if target and kind == "relIds":
                yield from self.paragraphs(target, target.read())
            elif target and kind == "chart" and "/2014/" not in node.tag:  # a later form
                yield from _chart_rows(target.read())
            elif target and kind == "altChunk":
                chunk = _read_chunk(target.package.read(target.name), self._depth)
                yield from chunk.pages
                self.omitted.update(chunk.omitted)
            else:
                self.omitted["chart" if kind == "chart" else "embedded object"] += 1
        except (*DAMAGED, ValueError):
            self.omitted["unreadable part"] += 1


def _read_chunk(data: bytes, depth: int) -> Contents:
    """Return the contents of an ``altChunk``, whose format its beginning shows."""
    if data.startswith(b"PK") and depth < 3:
        return read_docx(data, depth + 1)
    if not re.match(rb"(?is).{,2000}mime-version:", data):
        kind = b"x/x" if re.match(rb"PK|{\\rtf", data) else b"text/html" if b"<" in data[:9] else b"text/plain"
        data = b"Content-Type: %b\n\n%b" % (kind, data)
    return read_eml(data, headers=())


def is_raised(run: Any) -> bool:
    properties = run.find("{*}rPr")
    marks = () if properties is None else (properties, *properties)
    return any("superscript" in mark.values() or re.match("[1-9]", mark.get("baseline", "")) for mark in marks)


def _remove(node: Any) -> bool:
    """Remove an element; return whether it has text."""
    if (parent := node.getparent()) is not None:
        parent.remove(node)
    return any(text.text for text in node.iter("{*}t"))


def _sign(node: Any) -> str:
    """Return a box or a choice of a form, or a character by its code; "" if that is private, of a picture."""
    if node.tag == f"{WORD}checkBox":
        return "☒" if (read_value(node, "*checked") or read_value(node, "*default")) in ("1", "true", "on") else "☐"
    if choices := node.findall("{*}listEntry")[read_number(node, "*result") :]:
        return str(choices[0].get(f"{WORD}val", ""))
    code = re.fullmatch(r"[\da-cA-C][\da-fA-F]{3}", node.get(f"{WORD}char", ""))
    return chr(int(code[0], 16)) if code else ""


def _equation(node: Any) -> str:
    """Return an equation on one line: ``x^2``, ``(a+b)/c``; an index is next to its letter, as in other text."""
    kind = node.tag.rpartition("}")[2]
    signs = {sign.tag.rpartition("}")[2]: "".join(sign.values()) for sign in node.iterfind(f"{{*}}{kind}Pr/*")}
    line = node.text or "" if kind == "t" else signs.get("chr", "∫") if kind == "nary" else ""
    for child in node.iterchildren("*"):
        name, text = child.tag.rpartition("}")[2], _equation(child)
        mark = _EQUATION_MARKS.get(f"{kind} {name}", _EQUATION_MARKS.get(name))
        if text and mark is not None:
            is_simple = re.fullmatch(r"[-+−]?\w+(?:[.,]\w+)*|∞|\([^()]*\)", text)
            text = mark + (text if is_simple else f"({text})")
        line += (signs.get("sepChr", _EQUATION_GAPS.get(f"{kind} {name}", "")) if line else "") + text
    return f"{signs.get('begChr', '(')}{line}{signs.get('endChr', ')')}" if kind == "d" else line


def _chart_rows(root: Any) -> Iterator[str]:
    """Yield the titles of a chart and its axes, then its values as a table: a row for each category."""
    for title in root.iter("{*}title"):
        yield "".join(node.text or "" for node in title.iter("{*}t", "{*}v"))
    cells: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)  # levels of categories share a cell
    number = 0
    for number, series in enumerate(root.iter("{*}ser"), start=1):
        for axis, column in (("tx", number), ("cat", 0), ("xVal", 0), ("val", number), ("yVal", number)):
            for value in series.iterfind(f"{{*}}{axis}//{{*}}v"):
                row, text = int(value.getparent().get("idx", -1)) if axis != "tx" else -1, value.text or ""
                is_number = re.fullmatch(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", text)
                cells[row, column][f"{float(text):.15g}" if is_number else text] = None
    rows = sorted({row for row, _ in cells})
    yield format_table([" ".join(cells.get((row, column), ())) for column in range(number + 1)] for row in rows)
