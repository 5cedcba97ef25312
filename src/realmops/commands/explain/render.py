"""How explanations of sentences and of questions are shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from realmops.evaluate.page import page_of, table_of

if TYPE_CHECKING:
    from dataclasses import Field

    from rich.table import Table

SIDES = ("before", "after")
_ID_SHOWN = 12


@dataclass(frozen=True)
class Sheet:
    """An explanation as text: what is asked, lines about it, and a table of its candidates."""

    title: str
    said: tuple[str, ...]
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Explanation(Protocol):
    """An explanation: a dataclass that can be shown."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def sheet(self) -> Sheet:
        """It as text."""


def passage_name(title: str, passage_id: str) -> str:
    """A passage in words; the null document has no id."""
    return f"{title} [{passage_id[:_ID_SHOWN]}]" if passage_id else title


def lines(sheet: Sheet) -> list[str]:
    """For a terminal."""
    table = [sheet.head, *sheet.rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    rows = ("  ".join([*map(str.rjust, row, widths), row[-1]]) for row in table)
    return [sheet.title, *(f"  {line}" for line in (*sheet.said, *rows))]


def side_by_side(before: Explanation, after: Explanation) -> Table:
    """Two explanations for rich's console, line beside line."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*SIDES)
    for pair in zip_longest(lines(before.sheet()), lines(after.sheet()), fillvalue=""):
        table.add_row(*map(Text, pair))
    return table


def as_json(found: Sequence[Explanation]) -> str:
    """One explanation, or two as "before" and "after", with everything that they hold."""
    values = [asdict(one) for one in found]
    return json.dumps(
        values[0] if len(values) == 1 else dict(zip(SIDES, values, strict=True)), ensure_ascii=False, indent=1
    )


def as_page(found: Sequence[Explanation]) -> str:
    """One explanation, or two beside each other, as an HTML page that opens without a network."""
    sheets = [one.sheet() for one in found]
    headings = [""] if len(sheets) == 1 else [f"<h2>{side}</h2>" for side in SIDES]
    sides = (f"<div>{heading}{_cards(sheet)}</div>" for heading, sheet in zip(headings, sheets, strict=True))
    return page_of(sheets[0].title, [f'<div class="sides">{"".join(sides)}</div>'])


def _cards(sheet: Sheet) -> str:
    said = "".join(f"<p>{escape(line)}</p>" for line in sheet.said)
    return f'<div class="card">{said}</div><div class="card scroll">{table_of(sheet.head, sheet.rows)}</div>'
