"""Salient spans on disk: which characters and wordpieces of which sentence, with a label each.

Files: spans.npy int32 [N, 6] (columns ``COLUMNS``), span_labels.npy uint8 [N] (index into the manifest's
``labels``), span_offsets.npy int64 [P + 1] (rows by passage).
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from realmops.artifacts import read_bound_manifest, sync_folder, write_manifest
from realmops.text.flat import FlatArray, FlatOffsets, load_flat

# Shape legend: N spans, P passages, n spans of one passage, t wordpieces and s sentences of one passage.

COLUMNS = ("passage", "sentence", "token_start", "token_end", "char_start", "char_end")
KIND = "spans"
LABEL_LIMIT = 256
Ints = NDArray[np.int32]


def token_spans(
    char_spans: Sequence[tuple[int, int]], chars: Ints, sentences: Ints
) -> list[tuple[int, int, int] | None]:
    """(sentence, first token, end token) for each (start, end) in characters of one passage's text.

    ``chars`` [t, 2] are the characters of each wordpiece, ``sentences`` [s, 2] the first and end wordpiece of each
    sentence. Every wordpiece that shares a character with the span belongs to it. None for a span without wordpieces,
    for one that does not lie inside one sentence, and for one that reaches over the passage's wordpieces.
    """
    if not char_spans or not len(chars):
        return [None] * len(char_spans)
    bounds = np.asarray(char_spans, np.int64)
    first = np.searchsorted(chars[:, 1], bounds[:, 0], side="right")
    end = np.searchsorted(chars[:, 0], bounds[:, 1], side="left")
    sentence = np.searchsorted(sentences[:, 1], first, side="right")
    within = (bounds[:, 0] >= chars[0, 0]) & (bounds[:, 1] <= chars[-1, 1]) & (first < end)
    columns = (array.tolist() for array in (sentence, first, end, within))
    return [
        (row, low, high) if inside and high <= sentences[row, 1] else None
        for row, low, high, inside in zip(*columns, strict=True)
    ]


class SpansWriter:
    """Writes a spans folder passage by passage in flat memory; ``close`` writes the manifest.

    The folder must exist (wrap it in ``artifacts.atomic_folder``); leaving ``with`` closes the files. With the
    ``state`` of a writer that was killed, it goes on where that one was when it gave the state.
    """

    def __init__(self, folder: Path, state: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        state = state or {"bytes": {}, "names": [], "dropped": 0}
        sizes = state["bytes"]
        with ExitStack() as opened:  # closes what is open where another cannot be
            self._spans = FlatArray(folder / "spans.npy", np.int32, (len(COLUMNS),), size=sizes.get("spans"))
            opened.callback(self._spans.close)
            self._labels = FlatArray(folder / "span_labels.npy", np.uint8, size=sizes.get("labels"))
            opened.callback(self._labels.close)
            self._offsets = FlatOffsets(folder / "span_offsets.npy", sizes.get("offsets"))
            opened.callback(self._offsets.close)
            self._opened = opened.pop_all()
        self._names = {name: number for number, name in enumerate(state["names"])}
        self._dropped: int = state["dropped"]

    def sync(self) -> dict[str, Any]:
        """Make everything so far durable; returns the state to go on from, as JSON values."""
        files = {"spans": self._spans, "labels": self._labels, "offsets": self._offsets}
        sizes = {name: file.sync() for name, file in files.items()}
        sync_folder(self.folder)
        return {"bytes": sizes, "names": list(self._names), "dropped": self._dropped}

    def add(self, spans: Sequence[tuple[int, int, str]], chars: Ints, sentences: Ints, first_sentence: int) -> int:
        """Add the next passage's spans (character start, character end, label); returns how many were kept.

        Kept are those that lie inside one sentence, once each (``token_spans``); the rest is counted as dropped. A
        passage without spans must be added too. ``first_sentence`` is the row of its first one in sentences.npy.
        """
        located = token_spans([(start, end) for start, end, _ in spans], chars, sentences)
        rows = sorted(
            {
                (first_sentence + place[0], place[1], place[2], start, end, label)
                for (start, end, label), place in zip(spans, located, strict=True)
                if place is not None
            },
            key=lambda row: (row[1], row[2], row[3:]),
        )
        self._dropped += located.count(None)
        passage = self._offsets.items
        self._spans.append(np.array([(passage, *row[:5]) for row in rows], np.int32).reshape(-1, len(COLUMNS)))
        self._labels.append(np.array([self._label(row[5]) for row in rows], np.uint8))
        self._offsets.append_lengths([len(rows)])
        return len(rows)

    def add_without(self, passages: int) -> None:
        """Add so many passages that have no spans."""
        self._offsets.append_lengths(np.zeros(passages, np.int64))

    def close(self, *, corpus_hash: str, vocabulary_hash: str, **fields: Any) -> dict[str, Any]:
        """Finish the files and write the manifest; returns it."""
        passages, spans = self._offsets.items, len(self._spans)
        self.abandon()
        return write_manifest(
            self.folder,
            KIND,
            corpus_hash=corpus_hash,
            vocabulary_hash=vocabulary_hash,
            labels=list(self._names),
            passages=passages,
            spans=spans,
            dropped={"not_in_one_sentence": self._dropped},
            **fields,
        )

    def abandon(self) -> None:
        """Close the files without a manifest, each of them, also where another cannot write its last bytes."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abandon()

    def _label(self, name: str) -> int:
        if name not in self._names:
            if len(self._names) == LABEL_LIMIT:
                raise ValueError(
                    f"over {LABEL_LIMIT} span labels (the next is {name!r}); a label is a type, not a name"
                )
            self._names[name] = len(self._names)
        return self._names[name]


class Spans:
    """A spans folder, memory-mapped.

    ``rows`` [N, 6] are sorted by passage and first token; tokens are relative to the passage's body, characters to its
    text.  ``label_ids`` [N] are indexes into ``labels``, ``offsets`` [P + 1] the rows of each passage.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.labels: list[str] = manifest["labels"]
        self.corpus_hash: str = manifest["corpus_hash"]
        self.vocabulary_hash: str = manifest["vocabulary_hash"]
        self.rows: Ints = load_flat(folder / "spans.npy")
        self.label_ids: NDArray[np.uint8] = load_flat(folder / "span_labels.npy")
        self.offsets: NDArray[np.int64] = load_flat(folder / "span_offsets.npy")

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True, corpus_hash: str | None = None) -> Self:
        """Open a folder; ValueError when it is damaged or, with ``corpus_hash``, made for another corpus."""
        return cls(folder, read_bound_manifest(folder, KIND, corpus_hash, "tag", verify=verify))

    def __len__(self) -> int:
        """Number of passages."""
        return len(self.offsets) - 1

    def of(self, passage: int) -> Ints:
        """[n, 6] spans of a passage."""
        return self.rows[self.offsets[passage] : self.offsets[passage + 1]]
