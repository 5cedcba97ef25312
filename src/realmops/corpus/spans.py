"""Salient spans on disk: the characters, wordpieces, sentence and label of each span.

spans.npy int32 [N, 6] (``COLUMNS``), span_labels.npy uint8 [N] (index into ``labels``), span_offsets.npy int64 [P + 1].
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from realmops.artifacts import read_bound_manifest, write_manifest
from realmops.corpus.npy_files import NpyWriter, OffsetsWriter, load_npy

# Shape legend: N spans, P passages, n spans of one passage, t wordpieces and s sentences of one passage.

COLUMNS = ("passage", "sentence", "token_start", "token_end", "char_start", "char_end")
KIND = "spans"
LABEL_LIMIT = 256  # labels are stored as uint8
Ints = NDArray[np.int32]


def token_spans(
    char_spans: Sequence[tuple[int, int]], chars: Ints, sentences: Ints
) -> list[tuple[int, int, int] | None]:
    """Map (start, end) characters to (sentence, first, end wordpiece); None without wordpieces or across sentences.

    ``chars`` [t, 2] has the characters of each wordpiece, ``sentences`` [s, 2] the wordpieces of each sentence.
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
    """Writer of a spans folder, passage by passage in constant memory; a context manager that closes the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._spans = NpyWriter(folder / "spans.npy", np.int32, (len(COLUMNS),))
        self._labels = NpyWriter(folder / "span_labels.npy", np.uint8)
        self._offsets = OffsetsWriter(folder / "span_offsets.npy")
        self._names: dict[str, int] = {}
        self._dropped = 0

    def add(self, spans: Sequence[tuple[int, int, str]], chars: Ints, sentences: Ints, first_sentence: int) -> int:
        """Add the next passage's spans (start, end character, label); return the number of spans written."""
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
        self._offsets.append_lengths(np.zeros(passages, np.int64))

    def close(self, *, corpus_hash: str, vocabulary_hash: str, **fields: Any) -> dict[str, Any]:
        self.__exit__()
        return write_manifest(
            self.folder,
            KIND,
            corpus_hash=corpus_hash,
            vocabulary_hash=vocabulary_hash,
            labels=list(self._names),
            passages=self._offsets.items,
            spans=len(self._spans),
            dropped={"not_in_one_sentence": self._dropped},
            **fields,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._spans, self._labels, self._offsets):
            file.close()

    def _label(self, name: str) -> int:
        if name not in self._names:
            if len(self._names) == LABEL_LIMIT:
                raise ValueError(
                    f"over {LABEL_LIMIT} span labels (the next is {name!r}); use types of spans as labels, not names"
                )
            self._names[name] = len(self._names)
        return self._names[name]


class Spans:
    """A memory-mapped spans folder: ``rows`` [N, 6] by passage and first token, ``label_ids`` [N], ``offsets`` [P + 1].

    Tokens count from the start of the passage's body, characters from the start of its text.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.labels: list[str] = manifest["labels"]
        self.corpus_hash: str = manifest["corpus_hash"]
        self.vocabulary_hash: str = manifest["vocabulary_hash"]
        self.rows: Ints = load_npy(folder / "spans.npy")
        self.label_ids: NDArray[np.uint8] = load_npy(folder / "span_labels.npy")
        self.offsets: NDArray[np.int64] = load_npy(folder / "span_offsets.npy")

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True, corpus_hash: str | None = None) -> Self:
        return cls(folder, read_bound_manifest(folder, KIND, corpus_hash, "tag", verify=verify))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of(self, passage: int) -> Ints:
        return self.rows[self.offsets[passage] : self.offsets[passage + 1]]
