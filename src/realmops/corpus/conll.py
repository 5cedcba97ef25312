"""Named entities in CoNLL files: a token and its tag per line, a blank line between sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TaggedSentence:
    """Words and their IOB2 tags, of equal number."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


def read_conll(path: Path) -> list[TaggedSentence]:
    """Sentences of a CoNLL file (plain or .gz): first column the token, last column the tag.

    IO, IOB1 and IOB2 tags all become IOB2.  ``-DOCSTART-`` lines, and lines that start with ``# `` in front
    of a sentence, are skipped.  ValueError names the file and line of what cannot be read.
    """
    sentences = list(_sentences(path))
    if not any(tag != "O" for s in sentences for tag in s.tags):
        raise ValueError(
            f"{path}: no entity in {len(sentences)} sentences; lines of 'token tag' with tags as B-PER are wanted"
        )
    return sentences


def _sentences(path: Path) -> Iterator[TaggedSentence]:
    import gzip
    import zlib

    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; set tag.train and tag.dev to CoNLL files, or tag.method to dates or given"
        )
    opener = gzip.open if path.suffix == ".gz" else open
    words: list[str] = []
    tags: list[str] = []
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                columns = line.split()
                if not columns or columns[0] == "-DOCSTART-":
                    if words:
                        yield TaggedSentence(tuple(words), tuple(_iob2(tags)))
                    words, tags = [], []
                elif line.startswith("# ") and not words:
                    continue
                elif len(columns) < 2:
                    raise ValueError(f"{path}:{number}: {line.strip()!r} has one column; 'token tag' is wanted")
                else:
                    tag = _tag(columns, f"{path}:{number}")
                    words.append(columns[0])
                    tags.append(tag)
    except (UnicodeDecodeError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from None
    if words:
        yield TaggedSentence(tuple(words), tuple(_iob2(tags)))


def _tag(columns: Sequence[str], place: str) -> str:
    """The last column that looks like a tag (some sets have dashes behind it)."""
    for column in reversed(columns[1:]):
        if column == "O" or (column[:2] in ("B-", "I-") and len(column) > 2):
            return column
        if column != "-":
            break
    raise ValueError(f"{place}: the tag {columns[-1]!r} is not O, B-TYPE or I-TYPE")


def _iob2(tags: Sequence[str]) -> Iterator[str]:
    previous = "O"
    for tag in tags:
        yield "B-" + tag[2:] if tag.startswith("I-") and previous[2:] != tag[2:] else tag
        previous = tag
