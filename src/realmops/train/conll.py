"""Named entities in CoNLL files: one token and tag per line, a blank line between sentences."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from realmops.compressed import DECOMPRESSION_ERRORS, open_compressed

_BLANKS = re.compile(r"[ \t]+")


@dataclass(frozen=True)
class TaggedSentence:
    """A sentence's words and their IOB2 tags, of equal length."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


def read_conll(path: Path) -> list[TaggedSentence]:
    """Read the sentences of a CoNLL file (plain, .gz or .bz2): the first column is the token, the last the tag.

    Numbered lines as in UNER (number, token, tag, annotator) are read too. IO, IOB1 and IOB2 tags become IOB2.

    Raises:
        ValueError: the file has no entity, or a line cannot be read; the message names file and line.
    """
    sentences = list(_sentences(path))
    if not any(tag != "O" for s in sentences for tag in s.tags):
        raise ValueError(
            f"{path}: no entity in {len(sentences)} sentences; expected lines of 'token tag' with tags such as B-PER"
        )
    return sentences


def _sentences(path: Path) -> Iterator[TaggedSentence]:
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; set tag.train and tag.dev to CoNLL files, or tag.method to dates or given"
        )
    rows: list[tuple[int, list[str]]] = []
    has_comment = False
    try:
        with open_compressed(path) as (raw, _), TextIOWrapper(raw, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                columns = _BLANKS.split(line.strip(" \t\n"))  # a no-break space is part of a word
                if not line.strip() or columns[0] == "-DOCSTART-":
                    if rows:
                        yield _sentence(path, rows, has_comment)
                    rows, has_comment = [], False
                elif line.startswith("# ") and not rows:
                    has_comment = True
                else:
                    rows.append((number, columns))
    except (UnicodeDecodeError, *DECOMPRESSION_ERRORS) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from None
    if rows:
        yield _sentence(path, rows, has_comment)


def _sentence(path: Path, rows: Sequence[tuple[int, list[str]]], has_comment: bool) -> TaggedSentence:
    """Take the first column as token and the last as tag; second and third in numbered lines after a comment."""
    is_numbered = has_comment and all(len(c) > 2 and c[0] == str(n) for n, (_, c) in enumerate(rows, start=1))
    words, tags = [], []
    for number, columns in rows:
        if is_numbered:
            columns = columns[1:3]
        if len(columns) < 2:
            raise ValueError(f"{path}:{number}: {' '.join(columns)!r} has one column; expected 'token tag'")
        tag = next((c for c in reversed(columns[1:]) if c != "-"), "-")
        if tag != "O" and not (tag[:2] in ("B-", "I-") and tag[2:]):
            raise ValueError(f"{path}:{number}: the tag {tag!r} is not O, B-TYPE or I-TYPE")
        words.append(columns[0])
        tags.append(tag)
    return TaggedSentence(tuple(words), tuple(iob2(tags)))


def iob2(tags: Sequence[str]) -> list[str]:
    """Return IO, IOB1 or IOB2 tags as IOB2: the first tag of an entity is B."""
    pairs = zip(["O", *tags], tags, strict=False)
    return ["B" + tag[1:] if tag[0] == "I" and previous[2:] != tag[2:] else tag for previous, tag in pairs]


def entity_spans(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return (first word, end, kind) of each entity in strict IOB2 tags: B begins an entity, I continues it."""
    spans: list[tuple[int, int, str]] = []
    start: int | None = None
    for index, tag in enumerate([*tags, "O"]):
        if start is not None and tag != f"I-{tags[start][2:]}":
            spans.append((start, index, tags[start][2:]))
            start = None
        if tag[0] == "B":
            start = index
    return spans


def entity_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return ``f1`` over all entities and ``f1_KIND`` per kind, by exact match of boundaries and kind."""
    sides = [{(n, *span) for n, tags in enumerate(side) for span in entity_spans(tags)} for side in (gold, predicted)]
    kinds = sorted({entity[3] for side in sides for entity in side})

    def f1(kind: str | None) -> float:
        expected, actual = ({entity for entity in side if kind in (None, entity[3])} for side in sides)
        return 2 * len(expected & actual) / max(len(expected) + len(actual), 1)

    return {"f1": f1(None), **{f"f1_{kind}": f1(kind) for kind in kinds}}
