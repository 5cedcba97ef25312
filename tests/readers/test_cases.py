"""Input files of every family with the expected outcomes: ``cases/NAME.SUFFIX`` and ``cases/NAME.expected``.

``python tests/readers/test_cases.py`` writes the expected files of new cases, for you to check.
"""

from pathlib import Path

import pytest

from realmops.readers.documents import Document, Dropped, RawRecord, Rejected
from realmops.readers.sources import list_sources

FOLDER = Path(__file__).parent / "cases"
CASES = sorted(path for path in FOLDER.iterdir() if path.suffix != ".expected")


def describe(path: Path) -> str:
    """Return the outcomes of a file's records: documents with their properties, reasons and problems."""
    try:
        records = [(source, list(source.format.records(source.path))) for source in list_sources(path, "auto")]
    except ValueError as error:
        return f"not read: {str(error).removeprefix(f'{path}: ')}\n"
    parts = []
    for source, raws in records:
        positions = [0, *(raw.position for raw in raws if isinstance(raw, RawRecord)), source.size]
        assert positions == sorted(positions), "progress runs from 0 to the file's size"
    for source, raw in ((source, raw) for source, raws in records for raw in raws):
        outcome = source.format.convert(raw) if isinstance(raw, RawRecord) else raw
        place = outcome.place.removeprefix(str(path)).lstrip(":")
        match outcome:
            case Document():
                named = {name: getattr(outcome, name) for name in ("id", "extra", "spans", "pages", "omitted")}
                properties = [f"{name}: {value}" for name, value in named.items() if value]
                parts.append("\n".join([f"[{place}] {outcome.title}", *properties, "", outcome.text]))
            case Dropped():
                parts.append(f"[{place}] dropped: {outcome.reason}")
            case Rejected():
                kind = f" as {outcome.kind}" if outcome.kind else ", with the rest" if outcome.ends_file else ""
                parts.append(f"[{place}] rejected{kind}: {outcome.problem}")
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_case_has_the_expected_outcomes(path: Path) -> None:
    assert describe(path) == path.with_suffix(".expected").read_bytes().decode()


if __name__ == "__main__":
    for case in CASES:
        if not case.with_suffix(".expected").exists():
            case.with_suffix(".expected").write_bytes(describe(case).encode())
