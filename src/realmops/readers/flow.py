"""The text of HTML elements as a browser shows it, and of pages without what is around their main text."""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from realmops.readers.contents import HIDDEN, format_row, is_hidden, superscript
from realmops.readers.numbering import format_number

# Elements with empty lines or a line break around their text, and without text; that of others flows on.
_PARAGRAPHS = (
    "address article aside blockquote body caption center details dialog div dl fieldset figcaption figure footer form "
    "h1 h2 h3 h4 h5 h6 header hr html layout main nav ol p pre section table template ul"
)
_EMBEDDED = "audio canvas embed iframe object video"
_UNSEEN = (
    "annotation annotation-xml datalist defs desc head metadata noscript option rp script select style template "
    "textarea title"
)
_LINES = "dd dt legend li summary tbody text tfoot thead tr"
_GAPS = dict.fromkeys(_PARAGRAPHS.split(), 2) | dict.fromkeys(_LINES.split(), 1)
_SKIPPED = dict.fromkeys(_EMBEDDED.split(), "embedded object") | {"rt": "annotation"}
_SKIPPED |= dict.fromkeys(_UNSEEN.split(), "")
_ROLES = {"table": "table", "row": "tr", "cell": "td", "gridcell": "td", "columnheader": "th", "rowheader": "th"}
# Kinds of the elements in an element of MathML
_EQUATIONS = {"msup": ("", "sup"), "msub": ("", "sub"), "msubsup": ("", "sub", "sup"), "mfrac": ("term", "divisor")}
_NUMERALS = {"a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
_LINE_END = re.compile(r"(?<! ) +(?=[\t\n])")
_BLANKS, _INTEGER, _WORD = re.compile(r"[ \t\r\n\f]+"), re.compile(r"-?\d{1,9}"), re.compile(r"\w+")
_AROUND = re.compile(  # the tag, a class, the id or the role of parts of a page around the main text
    r"^(?:aside|button) |(?:^|[\s_-])(?:ads?|advert\w*|author|banner|breadcrumbs?|byline|comments?|complementary|"
    r"consent|contentinfo|cookies?|disqus|donate|footer|login|menu|meta|modal|nav|navbar|navi|navigation|newsletter|"
    r"noprint|outbrain|overlay|pager|pagination|popup|print|promo\w*|recommend\w*|related|search|share|sharing|sidebar|"
    r"signup|skip|sociable|social|sponsor\w*|submenu|subscri\w+|taboola|tags?|teasers?|toolbar|trending|widget)"
    r"(?:$|[\s_-])",
    re.IGNORECASE,
)


@dataclass
class Paragraph:
    """A paragraph, or a row of a table."""

    text: str
    gap: int  # line breaks before it
    is_around: bool  # whether most of it is links, or parts of a page around the main text
    is_main: bool  # whether it is in <main>
    omitted: list[str]  # kinds of what its text lacks
    is_kept: bool = True  # whether it is text
    size: int = 0  # words, unless it is left out as a part around the main text


def flow_text(tree: Any) -> tuple[str, Counter[str]]:
    """Return the visible text of an lxml element, cells separated by tabs, and counts by kind of what it leaves out."""
    return join_paragraphs(read_paragraphs(tree))


def read_paragraphs(tree: Any) -> list[Paragraph]:
    from lxml.etree import iterwalk

    flow = _Flow()
    skipped = None
    walker = iterwalk(tree, events=("start", "end", "comment", "pi"))
    for event, node in walker:
        if event == "end" and node is not skipped:
            flow.end(node)
        elif event != "start":  # the end of a skipped element, or a comment
            flow.add(node.tail)
        elif flow.start(node):
            flow.add(node.text)
        else:
            skipped = node
            walker.skip_subtree()
    flow.close(2)
    return flow.paragraphs


def join_paragraphs(paragraphs: list[Paragraph], main_text: str = "") -> tuple[str, Counter[str]]:
    """Return the text of paragraphs, without those around ``main_text`` if there is one, and what is left out."""
    if main_text:
        _leave_out(paragraphs, main_text)
    kept = [paragraph for paragraph in paragraphs if paragraph.is_kept]
    omitted = Counter(chain.from_iterable(paragraph.omitted for paragraph in kept))
    omitted["boilerplate"] = sum(not one.is_kept and one.text != "" for one in paragraphs)
    return "".join("\n" * paragraph.gap + paragraph.text for paragraph in kept).strip(), +omitted


def _leave_out(paragraphs: list[Paragraph], main_text: str) -> None:
    """Leave out all but the main text, paragraphs between its own up to a tenth of it, and <main> if 70 % of it is."""
    if not any(one.is_around for one in paragraphs):
        return
    own_words, main_words = [_WORD.findall(one.text) for one in paragraphs], _WORD.findall(main_text)
    words = [*chain.from_iterable(own_words)]
    around = [one.is_around for one, own in zip(paragraphs, own_words, strict=True) for _ in own]
    page_triples = list(zip(words, words[1:], words[2:], strict=False))
    repeated = {triple for triple, is_around in zip(page_triples, around, strict=False) if not is_around}
    triples = set(zip(main_words, main_words[1:], main_words[2:], strict=False))
    shared, end = bytearray(len(words)), 0
    for place, triple in enumerate(page_triples):
        if triple in triples and not (around[place] and triple in repeated):  # as a table of contents repeats headings
            shared[place : place + 3] = b"\1\1\1"
    if not any(shared):
        return
    for one, own in zip(paragraphs, own_words, strict=True):
        start, end = end, end + len(own)
        one.is_kept = sum(shared[start:end]) > 0.5 * len(own) if one.text else not one.is_around
        one.size = len(own) * (one.is_kept or not one.is_around)
    paragraphs = [one for one in paragraphs if one.text]
    for one, following in pairwise(paragraphs):
        is_label = one.size <= 8 and not one.is_kept and one.text[-1:] not in ".?!"
        if is_label and not following.size and one.is_main == following.is_main:  # a heading of links
            one.size = 0
    kept = [place for place, one in enumerate(paragraphs) if one.is_kept]
    gaps = [paragraphs[start + 1 : end] for start, end in pairwise(kept)]
    added = [gap for gap in gaps if sum(one.size for one in gap) <= 0.1 * len(main_words)]
    main = [one for one in paragraphs if one.is_main]
    if sum(one.size * one.is_kept for one in main) >= 0.7 * sum(one.size for one in main):
        added.append(main)
    for one in chain.from_iterable(added):
        one.is_kept = one.size > 0


class _Flow:
    """The paragraphs of a walk over elements."""

    def __init__(self) -> None:
        self.paragraphs: list[Paragraph] = []
        self._omitted: list[str] = []  # of the next paragraph
        self._line: list[str] = []
        self._gap = self._around = 0  # characters of the line in links and in parts around the main text
        self._number = ""  # of a list item, before its first word
        self._depths: Counter[str] = Counter()  # of the open elements by kind
        self._open: list[tuple[str, list[str]]] = []  # tag and kinds of each
        self._next: dict[Any, int] = {}  # numbers of lists
        self._outer: list[list[str]] = []  # lines around the open cells
        self._row: list[tuple[str, int, int]] = []  # text, columns and rows of each cell
        self._merged: dict[int, tuple[str, int]] = {}  # by column: text of a cell above, and rows that repeat it
        self._parts: dict[Any, str] = {}  # kinds of the coming parts of equations
        self._scripts: list[tuple[Any, str, int]] = []  # open ones: element, kind, first part in the line

    def start(self, node: Any) -> bool:
        """Begin an element; return False for one whose content is not text."""
        kind = HIDDEN if is_hidden(node) else _SKIPPED.get(node.tag)
        if kind is not None and not node.get("shadowrootmode"):
            self._omitted += [kind] if kind else []
            return False
        tag = _ROLES.get(node.get("role"), node.tag)
        if tag in ("td", "th") and node.find(".//table") is not None:
            tag = "layout"
        if gap := _GAPS.get(tag):
            self.close(gap)
        kinds = [tag] if tag in ("a", "main", "math", "pre") else []
        kinds += ["around"] if _is_around(node) else []
        self._depths.update(kinds)
        self._open.append((tag, kinds))
        match tag:
            case "br":
                self._line.append("\n")
            case "img" if node.get("alt", "").strip():
                self._omitted.append("image")
            case "table":
                self._merged = {}
            case "td" | "th":
                self._outer.append(self._line)
                self._line = []
            case "li":
                self._number += self._next_number(node)
        self._parts.update(zip(node, _EQUATIONS.get(tag, ()), strict=False))
        is_note = tag == "a" and "noteref" in f"{node.get('epub:type')} {node.get('role')}"
        if part := self._parts.pop(node, "") or ("sup" if is_note else tag if tag in ("sub", "sup") else ""):
            self._line += ["/"] if part == "divisor" else []
            self._scripts.append((node, part, len(self._line)))
        return True

    def end(self, node: Any) -> None:
        if self._scripts and self._scripts[-1][0] is node:
            self._end_script(*self._scripts.pop())
        tag, kinds = self._open.pop()
        if gap := _GAPS.get(tag):
            self.close(gap)
        self._depths.subtract(kinds)
        match tag:
            case "td" | "th":
                cell, self._line = "".join(self._line), self._outer.pop()
                columns, rows = (min(max(1, _integer(node, name, 1)), 100) for name in ("colspan", "rowspan"))
                self._row.append((cell, columns, rows))
            case "li":
                self._number = ""
        self.add(node.tail)

    def add(self, text: str | None) -> None:
        if text and not self._depths["pre"]:
            text = _BLANKS.sub(" ", text).replace("\u2044", "/")
            if self._depths["math"] or not self._line or self._line[-1][-1:] in ("", " ", "\t", "\n"):
                text = text.lstrip(" ")
        if text:
            self._line += [self._number, text] if self._number else [text]
            self._number = ""
            self._around += len(text) * bool(self._depths["a"] or self._depths["around"])

    def close(self, gap: int) -> None:
        """End a paragraph; in a cell of a table, that is a space."""
        if self._outer:
            self.add(" ")
            return
        line = "".join([*self._end_row(), *self._line]) if self._line or self._row else ""
        text = _LINE_END.sub("", line).rstrip().strip("\n")
        if text or self._omitted:
            is_around = self._around > 0.8 * len(text) if text else self._depths["around"] > 0
            is_main = self._depths["main"] > 0
            self.paragraphs.append(Paragraph(text, self._gap * bool(text), is_around, is_main, self._omitted))
            self._gap, self._omitted = self._gap * (not text), []
        self._gap, self._line, self._around = max(self._gap, gap), [], 0

    def _next_number(self, item: Any) -> str:
        numbers = item.getparent()
        if numbers is None or numbers.tag != "ol":
            return ""
        step = 1 if numbers.get("reversed") is None else -1
        if numbers not in self._next:
            self._next[numbers] = _integer(numbers, "start", 1 if step == 1 else len(numbers.findall("li")))
        value = _integer(item, "value", self._next[numbers])
        self._next[numbers] = value + step
        return f"{format_number(value, _NUMERALS.get(numbers.get('type'), 'decimal'))}. "

    def _end_row(self) -> list[str]:
        """End a row of cells, in which merged ones are repeated; return its line, if there is one."""
        cells: list[str] = []
        for text, columns, rows in [*self._row, ("", 0, 0)] if self._row else []:
            while len(cells) in self._merged:
                above, left = self._merged.pop(len(cells))
                self._merged |= {len(cells): (above, left - 1)} if left > 1 else {}
                cells.append(above)
            self._merged |= {len(cells) + column: (text, rows - 1) for column in range(columns) if rows > 1}
            cells += [text] * columns
        is_single = len(self._row) == 1 and len(cells) == self._row[0][1]
        self._row = []
        return [format_row(cells[:1] if is_single else cells), "\t" * bool(self._line)] if cells else []

    def _end_script(self, node: Any, kind: str, place: int) -> None:
        script = "".join(self._line[place:])
        del self._line[place:]
        before = self._line[-1] if self._line else ""
        is_number = before[-1:].isdigit() and script[:1].isdigit()
        if kind == "sub":
            script = "_" * is_number + script
        elif kind != "sup":
            script = script if re.fullmatch(r"[\w.,]*", script) else f"({script})"
        elif (node.tail or "").strip()[:1] in ("/", "\u2044"):
            script = " " * is_number + script  # the numerator of a fraction
        else:
            script = superscript(before, script, _is_reference(node)) + " " * script.endswith(" ")
        self._line += [script] if script else []


def _is_around(node: Any) -> bool:
    if node.tag == "header":
        return not any(outer.tag in ("article", "main", "section") for outer in node.iterancestors())
    if node.tag == "button" and node.getparent().tag in ("dt", "h2", "h3", "h4", "h5", "h6", "summary"):
        return False  # it unfolds the text below it
    names = " ".join([node.tag, *map(node.get, ("class", "id", "role"), ("", "", ""))])
    return node.tag not in ("body", "html") and _AROUND.search(names) is not None


def _is_reference(superscript: Any) -> bool:
    """Return whether a superscript is or contains a link, or is named as a note."""
    outer = superscript.getparent()
    is_link = outer is not None and outer.tag == "a" and not (outer.text or superscript.tail)
    names = f"{superscript.get('class')} {superscript.get('role')}"
    is_link = is_link or superscript.tag == "a" or superscript.find(".//a") is not None
    return is_link or any(name in names for name in ("cite", "note", "ref"))


def _integer(node: Any, name: str, default: int) -> int:
    value = node.get(name, "")
    return int(value) if _INTEGER.fullmatch(value) else default
