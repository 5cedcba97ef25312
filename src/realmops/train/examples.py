"""Masked sentences, which REALM learns from (paper, section 3.4): drawn by seed and step."""

from dataclasses import dataclass

import numpy as np

from realmops.config import Pretrain
from realmops.corpus.masking import mask_positions, recurring
from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.sequences import SpecialTokens
from realmops.text.spans import Spans
from realmops.train.inverse_cloze import SentencesWithSpans

NULL = -1  # in the place of a passage: the null document, or no passage of the corpus


@dataclass(frozen=True)
class Example:
    """A masked sentence: ``x`` with [MASK] in place, where the masks are, what they hid, where it is from."""

    passage: int  # NULL when x is not from the corpus that is searched
    original: np.ndarray
    x: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    words: str  # x as text without what is masked, for a search by words
    cut: bool = False  # whether the last mask ends inside a word


class Examples:
    """Masked sentences of a text, drawn by seed and step.

    The text is the corpus that is searched, or (``elsewhere``) another one, as CC-News in the paper's Table 1.
    """

    def __init__(self, snapshot: Snapshot, spans: Spans, options: Pretrain, *, elsewhere: bool = False) -> None:
        self.snapshot, self.options, self.elsewhere = snapshot, options, elsewhere
        self.special = SpecialTokens.of(snapshot.tokenizer)
        self.spans, self.rows = spans, SentencesWithSpans(snapshot, spans)
        self.usable = np.ones(len(self.rows), dtype=bool)
        if options.masking == "recurring":
            self.usable = recurring(snapshot, self.rows[:], options.max_masks)
            if not self.usable.any():
                raise ValueError(
                    f"{spans.folder}: no salient span stands in a second passage; set pretrain.masking to salient"
                )
        self._draws_from(self.usable)

    def _draws_from(self, usable: np.ndarray) -> None:
        self.drawn = np.flatnonzero(usable).astype(np.int32)
        place = np.searchsorted(self.drawn, self.spans.offsets)
        there = place[1:] > place[:-1]
        self.first_row, self.end_row = place[:-1][there], place[1:][there]

    def hold_out(self, rows: np.ndarray) -> None:
        """Draw no span of the sentences of these rows from now on; where nothing would be left, they are drawn."""
        sentence_N = self.spans.rows[:, 1]
        held_S = np.zeros(len(self.snapshot.sentence_rows), dtype=bool)
        held_S[sentence_N[rows]] = True
        left = self.usable & ~held_S[sentence_N]
        if left.any():
            self._draws_from(left)

    def draw(self, rng: np.random.Generator) -> Example:
        """A passage uniform among those with a span, then one of its spans uniform; x is the span's sentence."""
        chosen = int(rng.integers(len(self.first_row)))
        row = int(self.drawn[rng.integers(self.first_row[chosen], self.end_row[chosen])])
        return self.example(row, rng)

    def example(self, row: int, rng: np.random.Generator) -> Example:
        """The sentence of one span, masked."""
        passage, first, end, start, stop = self.rows[row].tolist()
        limit = min(self.options.query_wordpieces - 2, self.options.reader_wordpieces - 3)
        if start >= first + limit:  # the span lies behind the limit: take the sentence's end instead of its start
            first, end = max(first, min(start, stop - limit)), stop
        end = min(end, first + limit)
        original = self.snapshot.body(passage)[first:end]
        salient = (start - first, min(stop, end) - first)
        continues = self.snapshot.continues(passage)[first:end]
        at = mask_positions(self.options.masking, rng, salient, continues, self.options.max_masks)
        x = original.copy()
        x[at] = self.special.mask
        words = unmasked_text(self.snapshot.text(passage), self.snapshot.chars(passage)[first:end], at)
        cut = bool(continues[at[-1] + 1 : at[-1] + 2].any())
        return Example(NULL if self.elsewhere else passage, original, x, at, original[at], words, cut)


def unmasked_text(text: str, chars: np.ndarray, positions: np.ndarray) -> str:
    """The text of a run of wordpieces without those at ``positions``; ``chars`` are the run's characters in it."""
    if not len(chars):
        return ""
    kept = list(text[chars[0, 0] : chars[-1, 1]])
    for start, end in (chars[positions] - chars[0, 0]).tolist():
        kept[start:end] = " " * (end - start)
    return "".join(kept)
