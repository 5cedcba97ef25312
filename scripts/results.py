"""Write the tables of docs/results.md from the records of benchmarks/records/; benchmarks/LOG.md links the others.

python scripts/results.py

A record has figures with their command, commit, date, processor and seeds, each null where nobody kept it. Where the
commit is null, ``recorded`` names the one that brought the figures into the repository. A ``note`` goes below the
table.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
RECORDS = ROOT / "benchmarks" / "records"
PLACE = re.compile(r"<!-- record: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def origin(record: dict[str, Any]) -> str:
    """Where the figures of a record come from."""
    command = f"`{record['command']}`" if record["command"] else "No command was kept"
    commit = f"commit {record['commit']}, {record['date']}" if record["commit"] else f"recorded in {record['recorded']}"
    processor = record["processor"] or "processor not recorded"
    return f"{command}; {processor}; {record['seeds'] or 'seeds not recorded'}; {commit}."


def table(record: dict[str, Any]) -> str:
    """Where the figures of a record come from, the figures, and what they show."""
    head, *rows = (
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |"
        for line in (record["columns"], *record["rows"])
    )
    note = ["", record["note"]] if "note" in record else []
    return "\n".join([origin(record), "", head, "|" + "---|" * len(record["columns"]), *rows, *note])


def page(text: str) -> str:
    """The page with the table of its record between each pair of markers."""

    def place(found: re.Match[str]) -> str:
        record = json.loads((RECORDS / f"{found[1]}.json").read_text(encoding="utf-8"))
        return f"<!-- record: {found[1]} -->\n{table(record)}\n<!-- end -->"

    return PLACE.sub(place, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
