"""Write the tables of docs/results.md from the records in benchmarks/records/; benchmarks/LOG.md links the others.

python scripts/results.py

A record has figures with their command, commit, date, processor and seeds, each null if it is unknown. If the commit is
null, ``recorded`` is the commit that added the figures to the repository. A ``note`` is printed below the table.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
RECORDS = ROOT / "benchmarks" / "records"
MARKERS = re.compile(r"<!-- record: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def origin(record: dict[str, Any]) -> str:
    """Return the provenance of a record: command, processor, seeds and commit."""
    command = f"`{record['command']}`" if record["command"] else "Command not recorded"
    commit = f"commit {record['commit']}, {record['date']}" if record["commit"] else f"recorded in {record['recorded']}"
    processor = record["processor"] or "processor not recorded"
    return f"{command}; {processor}; {record['seeds'] or 'seeds not recorded'}; {commit}."


def table(record: dict[str, Any]) -> str:
    """Return the provenance of a record, its table, and its note."""
    head, *rows = (
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |"
        for line in (record["columns"], *record["rows"])
    )
    note = ["", record["note"]] if "note" in record else []
    return "\n".join([origin(record), "", head, "|" + "---|" * len(record["columns"]), *rows, *note])


def page(text: str) -> str:
    """Return the page with each pair of markers filled with the table of its record."""

    def fill(marker: re.Match[str]) -> str:
        record = json.loads((RECORDS / f"{marker[1]}.json").read_text(encoding="utf-8"))
        return f"<!-- record: {marker[1]} -->\n{table(record)}\n<!-- end -->"

    return MARKERS.sub(fill, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
