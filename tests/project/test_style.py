"""Language of the project: the field's own words, also in names of tests.

A line may use a word of ``WORDS`` only where the right meaning is the plain one: ``ALLOWED`` lists such lines by file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Words that everyday English uses where the field has a term, and what to write instead.
WORDS = {
    r"told|tells?|says?|said|saying": "log, print, report, return",
    r"wanted|wants": "required, requested, expected, needs",
    r"behind|in front": "after, before, following",
    r"beside": "next to, alongside, together with",
    r"stands?|stood|lies": "is",
    r"anew|afresh": "again, from scratch",
    r"in the place of": "instead of",
    r"nobody|somebody|who": "a process, a caller, the user",
    r"hand(?:ed)? on": "passed on, saved",
    r"mend(?:s|ed)?": "fix",
    r"ma[dk]e again": "recomputed, rebuilt",
    r"of (?:its|their|our|his) own": "its, separate",
    r"as (?:it is|they are)": "unchanged",
    r"so (?:many|much|long)": "n, at most",
    r"(?:looks?|looked|looking)(?! ?up)": "poll, check, inspect",
    r"signs? of life": "heartbeat",
    r"way back": "backward pass",
    r"in which numbers": "dtype",
    r"ask a run": "query",
    r"turns?": "repeat",
}
PATTERN = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(WORDS)})(?![A-Za-z])", re.IGNORECASE)

# Where a word is the right one: an option, methods of Python, question words and examples of questions.
RIGHT = re.compile(r"wanted_precision|\.tell\b|[\"'][Ww]ho\b[^\"']*[\"']|\"who (?:built|wrote)")
ALLOWED: dict[str, tuple[str, ...]] = {  # file -> parts of the lines that may use a word
    "README.md": ("What does the contract say",),
    "docs/data.md": ("What does the contract say",),
    "docs/real-text.md": ("benchmarks/quality.py --preset squad --preset minilm",),
    "src/realmops/baselines/rule.py": ('"what", "when", "where", "which"', "whom|whose|where"),
    "src/realmops/corpus/dates.py": ('"stand-alone"',),
    "src/realmops/corpus/special_tokens.py": ('_PROMPT = "told-"',),
}


def private_words(path: Path) -> Iterator[str]:
    """Yield file, line and word of each line that uses a word of ``WORDS`` and is not allowed."""
    name = path.relative_to(ROOT).as_posix()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if any(part in line for part in ALLOWED.get(name, ())):
            continue
        for match in PATTERN.finditer(RIGHT.sub("", line)):
            yield f"{name}:{number}: {match[0]!r} in {line.strip()!r}"


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_fields_words_are_used(path: Path) -> None:
    assert list(private_words(path)) == []


def names_of_tests() -> Iterator[str]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield node.name


def test_names_of_tests_use_the_fields_words() -> None:
    assert [name for name in names_of_tests() if PATTERN.search(name.replace("_", " "))] == []


def test_changelog_has_short_lines_in_keep_a_changelogs_sections() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if len(line) > 120] == []
    sections = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= sections
    released = re.findall(r"^## \[(.*?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)
    assert released[0] == ("Unreleased", "")
    assert all(date for _, date in released[1:])
    assert len(re.findall(r"^## ", text, re.MULTILINE)) == len(released)
