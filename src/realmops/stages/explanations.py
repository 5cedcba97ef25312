"""What explanations of sentences and of questions share: the index they rest on, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from realmops import artifacts
from realmops.config import parse_section
from realmops.evaluate.report import page_of, table_of
from realmops.stages import METRICS, STAGES

if TYPE_CHECKING:
    from dataclasses import Field

    from rich.table import Table

SIDES = ("before", "after")
_ID_SHOWN = 12


@dataclass(frozen=True)
class Generation:
    """The index that was searched, and which weights embedded its passages."""

    file: str | None  # None: embedded now, for this explanation
    passages: int
    stage: str  # whose weights, or what ranks without embeddings, as bm25
    step: int | None  # of that stage's training; None where it is not known, as of imported weights

    def __str__(self) -> str:
        if self.stage not in STAGES:
            return f"{self.passages} passages, ranked by {self.stage}"
        step = "at a step that is not known" if self.step is None else f"after step {self.step}"
        return f"{self.passages} passages, {self.file or 'embedded now'}, with the weights of {self.stage} {step}"


@dataclass(frozen=True)
class Sheet:
    """An explanation as text: what is asked, lines about it, and a table of its candidates."""

    title: str
    said: tuple[str, ...]
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Explained(Protocol):
    """An explanation: a dataclass that can be shown."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def sheet(self) -> Sheet:
        """It as text."""


def options_of(root: Path, stages: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Sections of params.yaml as the first of these stages was run with them, not imported.

    ValueError when a stage up to that one is missing, or when all were imported.
    """
    for stage in stages:
        folder = root / STAGES[stage].folder
        artifacts.read_manifest(folder, stage)
        if sections := sections_of(root, stage):
            return [parse_section(name, sections[name], str(folder)) for name in names]
    raise ValueError(f"{folder} was imported, so the options that it was trained with are not known; train it here")


def sections_of(root: Path, stage: str) -> dict[str, dict[str, Any]]:
    """What a stage was run with; empty where its output was imported or is not there."""
    path = root / STAGES[stage].folder / artifacts.MANIFEST
    sections: dict[str, dict[str, Any]] = artifacts.read_json(path).get("sections", {}) if path.is_file() else {}
    return sections


def trained_steps(root: Path, stage: str) -> int | None:
    """The step whose weights ``ict`` or ``pretrain`` handed on; None where they were imported."""
    steps: int | None = sections_of(root, stage).get(stage, {}).get("steps")
    if steps is None:
        return None
    return int(artifacts.read_json(root / STAGES[stage].folder / METRICS).get("best_step", steps))


def passage_name(title: str, passage_id: str) -> str:
    """A passage in words; the null document has no id."""
    return f"{title} [{passage_id[:_ID_SHOWN]}]" if passage_id else title


def lines(sheet: Sheet) -> list[str]:
    """For a terminal."""
    table = [sheet.head, *sheet.rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    rows = ("  ".join([*map(str.rjust, row, widths), row[-1]]) for row in table)
    return [sheet.title, *(f"  {line}" for line in (*sheet.said, *rows))]


def side_by_side(before: Explained, after: Explained) -> Table:
    """Two explanations for rich's console, line beside line."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*SIDES)
    for pair in zip_longest(lines(before.sheet()), lines(after.sheet()), fillvalue=""):
        table.add_row(*map(Text, pair))
    return table


def as_json(found: Sequence[Explained]) -> str:
    """One explanation, or two as "before" and "after", with everything that they hold."""
    values = [asdict(one) for one in found]
    return json.dumps(
        values[0] if len(values) == 1 else dict(zip(SIDES, values, strict=True)), ensure_ascii=False, indent=1
    )


def as_page(found: Sequence[Explained]) -> str:
    """One explanation, or two beside each other, as an HTML page that opens without a network."""
    sheets = [one.sheet() for one in found]
    headings = [""] if len(sheets) == 1 else [f"<h2>{side}</h2>" for side in SIDES]
    sides = (f"<div>{heading}{_cards(sheet)}</div>" for heading, sheet in zip(headings, sheets, strict=True))
    return page_of(sheets[0].title, [f'<div class="sides">{"".join(sides)}</div>'])


def _cards(sheet: Sheet) -> str:
    said = "".join(f"<p>{escape(line)}</p>" for line in sheet.said)
    return f'<div class="card">{said}</div><div class="card scroll">{table_of(sheet.head, sheet.rows)}</div>'
