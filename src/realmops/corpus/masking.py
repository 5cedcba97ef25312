"""Which wordpieces of a sentence are masked (paper, section 3.4 and Table 2).

Positions are rows of the sentence's wordpieces, from 0.
"""

from collections.abc import Iterator

import numpy as np

from realmops.corpus.snapshot_reader import Snapshot

MASKED_SHARE = 0.15
SPAN_CONTINUES = 0.8  # a random span ends after each word with probability 0.2
LONGEST_RANDOM_SPAN = 10
MOST_PASSAGES = 50  # with a recurring span: one that stands everywhere says little about where to look
_TOKENS_TOGETHER = 1 << 24
_BASE = np.uint64(0x9E3779B97F4A7C15)


def mask_positions(
    scheme: str, rng: np.random.Generator, salient: tuple[int, int], is_continuation: np.ndarray, limit: int
) -> np.ndarray:
    """Sorted positions to mask, at least one and at most ``limit``, under one of the schemes.

    - ``salient`` and ``recurring``: the wordpieces from ``salient[0]`` to before ``salient[1]`` (REALM).
    - ``random_token``: 15 % of the wordpieces, each on its own (BERT).
    - ``random_span``: spans of whole words of geometric length, p = 0.2, at most 10 words, until 15 %
      are masked (SpanBERT).
    - ``matched_span``: the salient span moved round the sentence by a random offset, so that number and
      length of the masks are the salient scheme's and only the place is random.

    ``is_continuation`` says of each wordpiece of the sentence whether it continues a word.
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
        # a geometric length has no memory: taken modulo 10 it is the one of at most 10 words, with mean 3.8
        words = (int(rng.geometric(1 - SPAN_CONTINUES)) - 1) % LONGEST_RANDOM_SPAN + 1
        first = int(rng.integers(len(word_starts)))
        last = min(first + words, len(word_starts))
        new = [row for row in range(int(bounds[first]), int(bounds[last])) if row not in masked]
        masked.update(new[: budget - len(masked)])
    return np.array(sorted(masked))


def recurring(snapshot: Snapshot, rows: np.ndarray, limit: int) -> np.ndarray:
    """Which salient spans also stand in another passage, as whole words, and in no more than ``MOST_PASSAGES``.

    Only those can be found by looking elsewhere.
    """
    count = passages_with(snapshot, rows, limit)
    return (count >= 2) & (count <= MOST_PASSAGES)


def passages_with(snapshot: Snapshot, rows: np.ndarray, limit: int) -> np.ndarray:
    """In how many passages each salient span stands as whole words.

    ``rows`` are (passage, sentence start, sentence end, span start, span end); of a span over ``limit`` wordpieces the
    first ones count, as only those are masked.
    """
    count = np.zeros(len(rows), np.int64)
    length = np.minimum(rows[:, 4] - rows[:, 3], limit)
    place = snapshot.token_offsets[rows[:, 0]] + rows[:, 3]
    for size in np.unique(length).tolist():
        mine = np.flatnonzero(length == size)
        wanted, back = np.unique(_hashes_at(snapshot.tokens, place[mine], size), return_inverse=True)
        found = np.zeros(len(wanted), np.int64)
        for passages, hashes in _windows(snapshot, size):
            at = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
            hit = wanted[at] == hashes
            pairs = np.unique(np.stack([at[hit], passages[hit]]), axis=1)  # a passage counts once
            np.add.at(found, pairs[0], 1)
        count[mine] = found[back]
    return count


def _hashes_at(tokens: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    """A number for each run of ``size`` wordpieces that begins at a place; equal runs have equal ones."""
    value = np.zeros(len(place), np.uint64)
    for offset in range(size):
        value = value * _BASE + tokens[place + offset].astype(np.uint64) + np.uint64(1)
    return value


def _windows(snapshot: Snapshot, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Passage and number of every run of ``size`` wordpieces that begins and ends with a word, some at a time."""
    offsets = snapshot.token_offsets
    first = 0
    while first < len(snapshot):
        end = max(first + 1, int(np.searchsorted(offsets, offsets[first] + _TOKENS_TOGETHER, side="right")) - 1)
        tokens = snapshot.tokens[offsets[first] : offsets[end]].astype(np.int64)
        passage = np.repeat(np.arange(first, end), np.diff(offsets[first : end + 1]))
        place = np.arange(max(0, len(tokens) - size + 1))
        begins = np.append(~snapshot.continuing(int(offsets[first]), int(offsets[end])), True)
        begins[(offsets[first:end] - offsets[first])[np.diff(offsets[first : end + 1]) > 0]] = True
        inside = (passage[place] == passage[place + size - 1]) & begins[place] & begins[place + size]
        place = place[inside]
        yield passage[place], _hashes_at(tokens, place, size)
        first = end
