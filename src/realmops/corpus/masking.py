"""Which wordpieces of a sentence are masked (paper, section 3.4 and Table 2).

Positions are rows of the sentence's wordpieces, from 0.
"""

from __future__ import annotations

import numpy as np

MASKED_SHARE = 0.15
SPAN_CONTINUES = 0.8  # a random span ends after each word with probability 0.2
LONGEST_RANDOM_SPAN = 10


def mask_positions(
    scheme: str,
    rng: np.random.Generator,
    salient: tuple[int, int],
    is_continuation: np.ndarray,
    limit: int,
) -> np.ndarray:
    """Sorted positions to mask, at least one and at most ``limit``, under one of four schemes.

    - ``salient``: the wordpieces from ``salient[0]`` to before ``salient[1]`` (REALM).
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
    if scheme == "salient":
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
