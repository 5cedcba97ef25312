"""Named entities in CoNLL files: a token and its tag per line, a blank line between sentences."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from realmops.text.compressed import DAMAGE, open_compressed

_BLANKS = re.compile(r"[ \t]+")


@dataclass(frozen=True)
class TaggedSentence:
    """Words and their IOB2 tags, of equal number."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


def read_conll(path: Path) -> list[TaggedSentence]:
    """Sentences of a CoNLL file (plain, .gz or .bz2): first column the token, last column the tag.

    UNER's numbered lines (number, token, tag, annotator) are read too. IO, IOB1 and IOB2 tags all become IOB2.
    ``-DOCSTART-`` lines, and lines that start with ``# `` in front of a sentence, are skipped.  ValueError names the
    file and line of what cannot be read.
    """
    sentences = list(_sentences(path))
    if not any(tag != "O" for s in sentences for tag in s.tags):
        raise ValueError(
            f"{path}: no entity in {len(sentences)} sentences; lines of 'token tag' with tags as B-PER are wanted"
        )
    return sentences


def _sentences(path: Path) -> Iterator[TaggedSentence]:
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; set tag.train and tag.dev to CoNLL files, or tag.method to dates or given"
        )
    rows: list[tuple[int, list[str]]] = []
    commented = False
    try:
        with open_compressed(path) as (raw, _), TextIOWrapper(raw, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                columns = _BLANKS.split(line.strip(" \t\n"))  # a no-break space is part of a word
                if not line.strip() or columns[0] == "-DOCSTART-":
                    if rows:
                        yield _sentence(path, rows, commented)
                    rows, commented = [], False
                elif line.startswith("# ") and not rows:
                    commented = True
                else:
                    rows.append((number, columns))
    except (UnicodeDecodeError, *DAMAGE) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from None
    if rows:
        yield _sentence(path, rows, commented)


def _sentence(path: Path, rows: Sequence[tuple[int, list[str]]], commented: bool) -> TaggedSentence:
    """First column the token, last the tag; in lines numbered from 1 behind a comment, the second and the third."""
    counted = all(len(columns) > 2 and columns[0] == str(n) for n, (_, columns) in enumerate(rows, start=1))
    numbered = commented and counted
    words, tags = [], []
    for number, columns in rows:
        if numbered:
            columns = columns[1:3]
        if len(columns) < 2:
            raise ValueError(f"{path}:{number}: {' '.join(columns)!r} has one column; 'token tag' is wanted")
        tag = next((c for c in reversed(columns[1:]) if c != "-"), "-")
        if tag != "O" and not (tag[:2] in ("B-", "I-") and tag[2:]):
            raise ValueError(f"{path}:{number}: the tag {tag!r} is not O, B-TYPE or I-TYPE")
        words.append(columns[0])
        tags.append(tag)
    return TaggedSentence(tuple(words), tuple(_iob2(tags)))


def _iob2(tags: Sequence[str]) -> Iterator[str]:
    previous = "O"
    for tag in tags:
        yield "B-" + tag[2:] if tag.startswith("I-") and previous[2:] != tag[2:] else tag
        previous = tag


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """First word, end and kind of each entity in IOB2 tags, read strictly: it begins with B, and I goes on with it."""
    found: set[tuple[int, int, str]] = set()
    begun: int | None = None
    for place, tag in enumerate([*tags, "O"]):
        kind = tag[2:]
        if begun is not None and tag != f"I-{tags[begun][2:]}":
            found.add((begun, place, tags[begun][2:]))
            begun = None
        if tag == f"B-{kind}":
            begun = place
    return found


def entity_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """``f1`` over all entities of sentences, and ``f1_KIND`` of each kind; both ends of an entity must be right."""
    sides = [{(n, *one) for n, tags in enumerate(side) for one in entities(tags)} for side in (gold, predicted)]
    kinds = sorted({one[3] for side in sides for one in side})

    def f1(kind: str | None) -> float:
        true, said = ({one for one in side if kind in (None, one[3])} for side in sides)
        return 2 * len(true & said) / max(len(true) + len(said), 1)

    return {"f1": f1(None), **{f"f1_{kind}": f1(kind) for kind in kinds}}
