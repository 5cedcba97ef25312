"""Masked sentences, the training examples of REALM (paper, section 3.4): drawn by seed and step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from realmops.corpus.masking import SentencesWithSpans, choose_mask_positions, is_recurring
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.spans import Spans
from realmops.model.sequences import SpecialTokens
from realmops.options import Pretrain

MAX_MASKS = 10  # masked wordpieces of an example, as in the release
NULL = -1  # a passage id: the null document, or no passage of the corpus


@dataclass(frozen=True)
class Example:
    """A masked sentence x with the masks' positions, their targets and the passage it is from."""

    passage: int  # NULL when x is not from the corpus that is searched
    original: np.ndarray
    x: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    visible_text: str  # x as text without the masked words, the query of a lexical search
    cut: bool = False  # whether the last mask ends inside a word


def outside_sentences(spans: Spans, rows: Sequence[int]) -> np.ndarray:
    """Return which spans, N, are outside of the sentences of these rows; all if none is."""
    sentence_N = spans.rows[:, 1]
    is_outside_N: np.ndarray = ~np.isin(sentence_N, sentence_N[list(rows)])
    return is_outside_N if is_outside_N.any() else ~is_outside_N


class Examples:
    """Masked sentences of the corpus that is searched or, ``elsewhere``, of another text (CC-News in Table 1)."""

    def __init__(self, snapshot: Snapshot, spans: Spans, options: Pretrain, *, elsewhere: bool = False) -> None:
        self.snapshot, self.options, self.elsewhere = snapshot, options, elsewhere
        self.special = SpecialTokens.of(snapshot.tokenizer)
        self.spans, self.rows = spans, SentencesWithSpans(snapshot, spans)
        self.usable = np.ones(len(self.rows), dtype=bool)
        if options.masking == "recurring":
            self.usable = is_recurring(snapshot, self.rows[:], MAX_MASKS)
            if not self.usable.any():
                raise ValueError(
                    f"{spans.folder}: no salient span occurs in a second passage; set pretrain.masking to salient"
                )
        self._draw_from(self.usable)

    def _draw_from(self, usable: np.ndarray) -> None:
        self.drawn = np.flatnonzero(usable).astype(np.int32)
        offset = np.searchsorted(self.drawn, self.spans.offsets)
        has_span = offset[1:] > offset[:-1]
        self.first_row, self.end_row = offset[:-1][has_span], offset[1:][has_span]

    def hold_out(self, rows: Sequence[int]) -> None:
        """Stop drawing spans from the sentences of these rows, unless no other span would be left."""
        remaining = self.usable & outside_sentences(self.spans, rows)
        if remaining.any():
            self._draw_from(remaining)

    def draw(self, rng: np.random.Generator) -> Example:
        """Draw a passage uniformly among those with a span, then one of its spans; x is the span's sentence."""
        chosen = int(rng.integers(len(self.first_row)))
        row = int(self.drawn[rng.integers(self.first_row[chosen], self.end_row[chosen])])
        return self.example(row, rng)

    def example(self, row: int, rng: np.random.Generator) -> Example:
        """Return the masked sentence of span number ``row``."""
        passage, first, end, start, stop = self.rows[row].tolist()
        limit = min(self.options.query_wordpieces - 2, self.options.reader_wordpieces - 3)
        if start >= first + limit:  # the span is beyond the limit: keep the sentence's end instead of its start
            first, end = max(first, min(start, stop - limit)), stop
        end = min(end, first + limit)
        original = self.snapshot.body(passage)[first:end]
        salient = (start - first, min(stop, end) - first)
        continues = self.snapshot.continues(passage)[first:end]
        positions = choose_mask_positions(self.options.masking, rng, salient, continues, MAX_MASKS)
        x = original.copy()
        x[positions] = self.special.mask
        visible = visible_text(self.snapshot.text(passage), self.snapshot.chars(passage)[first:end], positions)
        cut = bool(continues[positions[-1] + 1 : positions[-1] + 2].any())
        return Example(NULL if self.elsewhere else passage, original, x, positions, original[positions], visible, cut)


def visible_text(text: str, chars: np.ndarray, positions: np.ndarray) -> str:
    """Return the text of N consecutive wordpieces, ``chars`` (N x 2) of a passage, with ``positions`` blanked out."""
    visible = list(text[chars[0, 0] : chars[-1, 1]])
    for start, end in (chars[positions] - chars[0, 0]).tolist():
        visible[start:end] = " " * (end - start)
    return "".join(visible)
