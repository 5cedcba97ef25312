"""Excel files: the text that a person sees, and counts of what is left out."""

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime, time
from io import BytesIO
from itertools import zip_longest
from typing import Any
from zipfile import ZipFile

from lxml.etree import iterparse

from realmops.readers.containers import parse_xml
from realmops.readers.contents import HIDDEN, PARAGRAPH, Contents, check_remaining, format_table, is_hidden
from realmops.readers.documents import LINE_LIMIT
from realmops.readers.strict import open_office

_COLUMNS = 1 << 14  # of a sheet
_WITHOUT_VALUE = re.compile(rb"(?:</(?:\w+:)?f>|<(?:\w+:)?f\b[^<>]*/>)\s*+(?:<v\s*+/>|<v>\s*+</v>)?+\s*+</(?:\w+:)?c>")
_LINK = re.compile(r'=\s*HYPERLINK\s*\(\s*"(?:[^"]|"")*"\s*(?:[,;]\s*"((?:[^"]|"")*)"\s*)?\)', re.IGNORECASE)


def read_xlsx(data: bytes) -> Contents:
    """Return the contents of an Excel file: each sheet is a page."""
    import openpyxl

    file, package = open_office(data)
    sheets = [name for name in package.namelist() if name.startswith("xl/worksheets/") and name.endswith(".xml")]
    has_gaps = any(_WITHOUT_VALUE.search(package.read(name)) for name in sheets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # openpyxl warns of parts without text
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        formulas = openpyxl.load_workbook(file, read_only=True) if has_gaps else None
    omitted: Counter[str] = Counter()
    for name in package.namelist():
        if name.startswith("xl/drawings/") and name.endswith(".xml"):
            _count_drawing(package.read(name), omitted)
        elif re.fullmatch(r"xl/(?:comments\w*|threadedComments/\w+)\.xml", name):
            omitted["comment"] += len(re.findall(rb"<(?:\w+:)?(?:comment|threadedComment)\b", package.read(name)))
        omitted["embedded object"] += name.startswith("xl/embeddings/")
    return Contents(book.properties.title or "", _sheets(package, book, formulas, omitted), omitted)


def _count_drawing(data: bytes, omitted: Counter[str]) -> None:
    root = parse_xml(data)
    omitted["image"] += sum(1 for _ in root.iter("{*}pic"))
    omitted["chart"] += sum(1 for _ in root.iter("{*}chart"))
    boxes = root.iter("{*}sp")
    omitted["text box"] += sum(any(node.text for node in box.iter("{*}t")) for box in boxes)


def _sheets(package: ZipFile, book: Any, formulas: Any, omitted: Counter[str]) -> Iterator[str]:
    """Yield each sheet's name and rows, counted before they are joined: many cells may share one long string."""
    name = next(name for name in package.namelist() if name.endswith("workbook.xml"))
    hidden_sheets = {node.get("name") for node in parse_xml(package.read(name)).iter("{*}sheet") if is_hidden(node)}
    remaining = LINE_LIMIT

    def rows(sheet: Any, sheet_formulas: Any) -> Iterator[list[str]]:
        nonlocal remaining
        sheet.reset_dimensions()  # the declared dimensions may be wrong
        of_formulas: Iterator[Any] = iter(())
        if sheet_formulas is not None:
            sheet_formulas.reset_dimensions()
            of_formulas = sheet_formulas.iter_rows()
        hidden = _hidden_lines(package.read(sheet._worksheet_path))
        for index, (row, formula_row) in enumerate(zip_longest(sheet.iter_rows(), of_formulas, fillvalue=()), start=1):
            texts = [_format_cell(cell.value) for cell in row]
            for column, (cell, formula) in enumerate(zip(row, formula_row, strict=False)):
                if cell.value is None and cell.data_type == "n" and formula.data_type == "f":
                    link = _LINK.fullmatch(str(formula.value))
                    texts[column] = (link[1] or "").replace('""', '"') if link else ""
                    omitted["formula without value"] += not texts[column]
            remaining -= sum(map(len, texts))
            check_remaining(remaining)
            shown = [text for column, text in enumerate(texts, 1) if {index, -column}.isdisjoint(hidden)]
            omitted[HIDDEN] += sum(map(len, texts)) > sum(map(len, shown))
            yield shown

    for sheet, sheet_formulas in zip_longest(book.worksheets, formulas.worksheets if formulas else ()):
        omitted[HIDDEN] += sheet.title in hidden_sheets
        table = "" if sheet.title in hidden_sheets else format_table(rows(sheet, sheet_formulas))
        yield table and PARAGRAPH.join([sheet.title, table])


def _hidden_lines(data: bytes) -> set[int]:
    """Return the numbers of the hidden rows of a sheet, and those of its hidden columns as negative numbers."""
    hidden: set[int] = set()
    if b"hidden=" in data:
        for _, node in iterparse(BytesIO(data), tag=("{*}row", "{*}col")):
            if is_hidden(node) and node.tag.endswith("row"):
                hidden.add(int(node.get("r", 0)))
            elif is_hidden(node):
                hidden.update(range(-min(int(node.get("max")), _COLUMNS), 1 - int(node.get("min"))))
            node.clear()
    return hidden


def _format_cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case datetime() if value.time() == time():
            return value.date().isoformat()
        case date() | time():
            return value.isoformat()
        case float() if value.is_integer():
            return str(int(value))
    return str(value)
