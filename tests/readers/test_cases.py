"""Files of every family with what is read of them: ``cases/NAME.SUFFIX`` and ``cases/NAME.expected``.

``python tests/readers/test_cases.py`` writes the expected files of new cases, for you to check.
"""

from pathlib import Path

import pytest

from realmops.readers.documents import Document, Dropped, RawRecord, Rejected
from realmops.readers.sources import list_sources

FOLDER = Path(__file__).parent / "cases"
CASES = sorted(path for path in FOLDER.iterdir() if path.suffix != ".expected")


def describe(path: Path) -> str:
    """Return what a reader makes of the records of a file: documents with their properties, reasons and problems."""
    [source] = list_sources(path, "auto")
    parts = []
    for raw in source.format.records(path):
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
                parts.append(f"[{place}] rejected{', with the rest' * outcome.ends_file}: {outcome.problem}")
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_a_file_is_read_as_expected(path: Path) -> None:
    assert describe(path) == path.with_suffix(".expected").read_bytes().decode()


if __name__ == "__main__":
    for case in CASES:
        if not case.with_suffix(".expected").exists():
            case.with_suffix(".expected").write_bytes(describe(case).encode())
