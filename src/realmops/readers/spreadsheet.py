"""Excel files: the text that a person sees, and counts of what is left out."""

import re
from collections.abc import Iterator
from functools import cache, reduce
from io import BytesIO
from itertools import chain
from typing import Any

from lxml.etree import iterparse

from realmops.number_format import CODES, GENERAL, format_value
from realmops.readers.contents import HIDDEN, PARAGRAPH, Contents, check_remaining, format_table, is_hidden, superscript
from realmops.readers.documents import LINE_LIMIT
from realmops.readers.office import DAMAGED, LABEL, Part, Text, is_raised, open_main_part

_LINK = re.compile(r'\s*HYPERLINK\s*\(\s*"(?:[^"]|"")*"\s*[,;]\s*"((?:[^"]|"")+)"\s*\)', re.IGNORECASE)


def read_xlsx(data: bytes) -> Contents:
    """Return the contents of an Excel file: each sheet with the text of its drawings is a page."""
    main, root, title = open_main_part(data, "xl/workbook.xml")
    return Contents(title, _Workbook(main, root).pages(), main.omitted)


class _Workbook:
    """The sheets of an Excel file, and the texts and formats that their cells refer to."""

    def __init__(self, main: Part, root: Any) -> None:
        self._main, self._root, self._omitted, self._remaining = main, root, main.omitted, LINE_LIMIT
        self._is_1904 = any(node.get("date1904") in ("1", "true") for node in root.iterfind("{*}workbookPr"))
        self._strings = [_rich_text(item) for part in main.of_kind("sharedStrings") for item in part.read()]
        styles = [node for part in main.of_kind("styles") for node in part.read().iter("{*}numFmts", "{*}cellXfs")]
        codes = CODES | {node.get("numFmtId"): node.get("formatCode") for node in chain(*styles[:-1])}
        self._codes = [codes.get(node.get("numFmtId"), GENERAL) for node in chain(*styles[-1:])]

    def pages(self) -> Iterator[str]:
        for node in self._root.iter("{*}sheet"):
            identifier = next(value for key, value in node.items() if key.endswith("}id"))
            _, sheet = self._main.related.get(identifier, ("", self._main))
            self._omitted[HIDDEN] += is_hidden(node)
            blocks = [] if is_hidden(node) else [*filter(None, [self._table(sheet), *self._drawings(sheet)])]
            yield PARAGRAPH.join([node.get("name"), *blocks]) if blocks else ""

    def _drawings(self, sheet: Part) -> Iterator[str]:
        self._omitted["embedded object"] += len(sheet.of_kind("oleObject", "package"))
        self._omitted["comment"] += sum(len(part.read().findall(".//{*}comment")) for part in sheet.of_kind("comments"))
        for part in sheet.of_kind("drawing"):
            yield from Text(part).paragraphs(part, part.read())

    def _table(self, sheet: Part) -> str:
        """Return the rows of a sheet; a merged cell is repeated in the rows that have other cells."""
        rows: dict[int, dict[int, str]] = {}  # texts by row and column
        merged: list[list[int]] = []  # first column and row, last column and row
        hidden_rows, hidden_columns = set(), [range(0)]
        number = 0
        try:
            for _, node in iterparse(BytesIO(sheet.package.read(sheet.name)), tag=("{*}row", "{*}col", "{*}mergeCell")):
                is_shown = not is_hidden(node) and "0" not in (node.get("width"), node.get("ht"))
                if node.tag.endswith("}row"):
                    number, column = int(node.get("r", number + 1)), 0
                    hidden_rows.update([] if is_shown else [number])
                    for cell in node:
                        column = _column(cell.get("r").rstrip("0123456789")) if cell.get("r") else column + 1
                        if text := self._text(cell):
                            rows.setdefault(number, {})[column] = text
                            self._remaining -= len(text)
                    check_remaining(self._remaining)
                elif node.tag.endswith("}mergeCell"):
                    corners = re.findall("([A-Z]+)([0-9]+)", node.get("ref"))
                    merged.append([n for letters, digits in corners for n in (_column(letters), int(digits))])
                elif not is_shown:
                    hidden_columns.append(range(int(node.get("min")), int(node.get("max")) + 1))
                node.clear()
                while node.getprevious() is not None:
                    del node.getparent()[0]
        except DAMAGED:
            self._omitted["unreadable part"] += 1
        used, last = sorted({column for row in rows.values() for column in row}), max(rows, default=0)
        for left, top, right, bottom in merged:
            covered, text = {column for column in used if left <= column <= right}, rows.get(top, {}).get(left, "")
            for number in range(top, min(bottom, last) + 1 if 0 < len(text) <= LABEL else top):
                if (row := rows.get(number, {})).keys() - covered:
                    row |= dict.fromkeys(covered, text)
                    self._remaining -= len(text) * len(covered)
            check_remaining(self._remaining)
        shown = [column for column in used if all(column not in columns for columns in hidden_columns)]
        self._omitted[HIDDEN] += len(used) - len(shown) + len(hidden_rows.intersection(rows))
        visible = (row for number, row in sorted(rows.items()) if number not in hidden_rows)
        return format_table([row.get(column, "") for column in shown] for row in visible)

    def _text(self, cell: Any) -> str:
        kind, parts = cell.get("t", "n"), {part.tag.rpartition("}")[2]: part.text or "" for part in cell}
        value = _rich_text(cell) if "is" in parts else parts.get("v", "")
        if "f" in parts and not value and kind != "str":
            link = _LINK.fullmatch(parts["f"])
            self._omitted["formula without value"] += link is None
            return link[1].replace('""', '"') if link else ""
        if kind == "e" and cell.get("vm"):  # a picture in the cell
            self._omitted["image"] += 1
            return ""
        if not value or kind in "bde":
            return {"b0": "FALSE", "b1": "TRUE"}.get(kind + value, value.removesuffix("T00:00:00"))
        try:
            known = self._strings[int(value)] if kind == "s" else float(value) if kind == "n" else value
            shown = format_value(known, self._codes[int(cell.get("s") or 0)] if self._codes else GENERAL, self._is_1904)
        except (ArithmeticError, LookupError, ValueError):
            self._omitted["unreadable cell"] += 1
            return ""
        self._omitted[HIDDEN] += not shown.strip() and bool(str(known).strip("0. "))  # not a zero
        return re.sub("_x([0-9A-Fa-f]{4})_", lambda match: chr(int(match[1], 16)), shown)


def _rich_text(item: Any) -> str:
    """Return the text of runs, without the phonetic ones."""
    text = ""
    for node in (node for node in item.iter("{*}t") if node.text and not node.getparent().tag.endswith("}rPh")):
        text += superscript(text, node.text, is_reference=False) if is_raised(node.getparent()) else node.text
    return text


@cache
def _column(letters: str) -> int:
    return reduce(lambda number, letter: 26 * number + ord(letter) - 64, letters, 0)
