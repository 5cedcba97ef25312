"""Masking schemes for pre-training sentences (paper, section 3.4 and Table 2); positions count wordpieces from 0."""

from collections.abc import Iterator

import numpy as np

from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.spans import Spans

MASKED_SHARE = 0.15
SPAN_CONTINUATION = 0.8  # a random span ends after each word with probability 0.2
MAX_RANDOM_SPAN = 10  # words
MAX_PASSAGES = 50  # per recurring span: a more frequent one hardly narrows the search
_WORDPIECES_PER_CHUNK = 1 << 24
_BASE = np.uint64(0x9E3779B97F4A7C15)


def choose_mask_positions(
    scheme: str, rng: np.random.Generator, salient: tuple[int, int], is_continuation: np.ndarray, limit: int
) -> np.ndarray:
    """Return sorted positions to mask, at least one and at most ``limit``; ``is_continuation`` is bool [t].

    ``salient`` and ``recurring`` mask the span (REALM); ``random_token`` 15 % of the wordpieces (BERT); ``random_span``
    whole words of geometric length, p = 0.2, at most 10, until 15 % are masked (SpanBERT); ``matched_span`` shifts the
    salient span by a random offset, with wrap-around.
    """
    length = len(is_continuation)
    assert 0 <= salient[0] < salient[1] <= length, (salient, length)
    span = np.arange(salient[0], min(salient[1], salient[0] + limit))
    if scheme in ("salient", "recurring"):
        return span
    if scheme == "matched_span":
        return np.sort((span + rng.integers(length)) % length)
    budget = min(limit, max(1, round(MASKED_SHARE * length)))
    if scheme == "random_token":
        return np.sort(rng.permutation(length)[:budget])
    assert scheme == "random_span", scheme
    return _random_spans(rng, np.flatnonzero(~is_continuation), length, budget)


def _random_spans(rng: np.random.Generator, word_starts: np.ndarray, length: int, budget: int) -> np.ndarray:
    if len(word_starts) == 0 or word_starts[0] != 0:  # a sentence cut inside a word
        word_starts = np.concatenate([[0], word_starts])
    bounds = np.concatenate([word_starts, [length]])
    masked: set[int] = set()
    while len(masked) < budget:
        # the geometric distribution is memoryless: modulo 10 truncates it at 10 words, with mean 3.8
        words = (int(rng.geometric(1 - SPAN_CONTINUATION)) - 1) % MAX_RANDOM_SPAN + 1
        first = int(rng.integers(len(word_starts)))
        last = min(first + words, len(word_starts))
        new = [row for row in range(int(bounds[first]), int(bounds[last])) if row not in masked]
        masked.update(new[: budget - len(masked)])
    return np.array(sorted(masked))


def is_recurring(snapshot: Snapshot, rows: np.ndarray, limit: int) -> np.ndarray:
    count = count_passages(snapshot, rows, limit)
    return (count >= 2) & (count <= MAX_PASSAGES)


def count_passages(snapshot: Snapshot, rows: np.ndarray, limit: int) -> np.ndarray:
    """Count the passages in which each salient span, cut to ``limit`` wordpieces, occurs as whole words."""
    count = np.zeros(len(rows), np.int64)
    length = np.minimum(rows[:, 4] - rows[:, 3], limit)
    position = snapshot.token_offsets[rows[:, 0]] + rows[:, 3]
    for size in np.unique(length).tolist():
        selected = np.flatnonzero(length == size)
        span_hashes, inverse = np.unique(_hashes_at(snapshot.tokens, position[selected], size), return_inverse=True)
        passage_counts = np.zeros(len(span_hashes), np.int64)
        for passages, hashes in _windows(snapshot, size):
            index = np.minimum(np.searchsorted(span_hashes, hashes), len(span_hashes) - 1)
            is_hit = span_hashes[index] == hashes
            pairs = np.unique(np.stack([index[is_hit], passages[is_hit]]), axis=1)  # a passage counts once
            np.add.at(passage_counts, pairs[0], 1)
        count[selected] = passage_counts[inverse]
    return count


def _hashes_at(tokens: np.ndarray, position: np.ndarray, size: int) -> np.ndarray:
    value = np.zeros(len(position), np.uint64)
    for offset in range(size):
        value = value * _BASE + tokens[position + offset].astype(np.uint64) + np.uint64(1)
    return value


def _windows(snapshot: Snapshot, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (passages, hashes) of all n-grams of ``size`` wordpieces on word boundaries, one chunk at a time."""
    offsets = snapshot.token_offsets
    first = 0
    while first < len(snapshot):
        end = max(first + 1, int(np.searchsorted(offsets, offsets[first] + _WORDPIECES_PER_CHUNK, side="right")) - 1)
        tokens = snapshot.tokens[offsets[first] : offsets[end]].astype(np.int64)
        passage = np.repeat(np.arange(first, end), np.diff(offsets[first : end + 1]))
        position = np.arange(max(0, len(tokens) - size + 1))
        begins = np.append(~snapshot.is_continuation(int(offsets[first]), int(offsets[end])), True)
        begins[(offsets[first:end] - offsets[first])[np.diff(offsets[first : end + 1]) > 0]] = True
        has_one_passage = passage[position] == passage[position + size - 1]
        position = position[has_one_passage & begins[position] & begins[position + size]]
        yield passage[position], _hashes_at(tokens, position, size)
        first = end


class SentencesWithSpans:
    """Spans as rows (passage, sentence start, end, span start, end) in wordpieces of the body, computed on access."""

    def __init__(self, snapshot: Snapshot, spans: Spans) -> None:
        if not len(spans.rows):
            raise ValueError(
                f"{spans.folder} holds no salient span; masking needs at least one: see the tag section of params.yaml"
            )
        self._spans, self._sentences = spans.rows, snapshot.sentence_rows

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        span = self._spans[index]
        rows = np.empty((*span.shape[:-1], 5), np.int64)
        rows[..., 0], rows[..., 1:3] = span[..., 0], self._sentences[span[..., 1], 1:]
        rows[..., 3:] = span[..., 2:4]
        return rows
