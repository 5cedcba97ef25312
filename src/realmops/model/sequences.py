"""Wordpiece sequences as the encoders take them (paper, section 3.2: join_BERT).

All functions take and give one-dimensional int64 arrays of wordpiece ids without padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of BERT's special wordpieces in one vocabulary."""

    cls: int
    sep: int
    mask: int
    unknown: int
    padding: int

    @staticmethod
    def of(tokenizer: Tokenizer) -> SpecialTokens:
        """Look the ids up by name; ValueError names the one that the vocabulary lacks."""

        def known(name: str) -> int:
            found = tokenizer.token_to_id(name)
            if found is None:
                raise ValueError(f"the vocabulary has no wordpiece {name}; use the vocabulary of a BERT encoder")
            return found

        return SpecialTokens(known("[CLS]"), known("[SEP]"), known("[MASK]"), known("[UNK]"), known("[PAD]"))


def join_query(x: np.ndarray, special: SpecialTokens, limit: int) -> np.ndarray:
    """[CLS] x [SEP], x cut so that all of it has at most ``limit`` wordpieces."""
    return np.concatenate([[special.cls], x[: limit - 2], [special.sep]])


def join_document(
    title: np.ndarray, body: np.ndarray, special: SpecialTokens, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """[CLS] title [SEP] body [SEP] and its segments (0 title, 1 body); the body is cut, the title kept.

    The null document is the empty title with the empty body.
    """
    title = title[: limit - 3]
    body = body[: limit - 3 - len(title)]
    tokens = np.concatenate([[special.cls], title, [special.sep], body, [special.sep]])
    segments = np.zeros(len(tokens), dtype=np.int64)
    segments[len(title) + 2 :] = 1
    return tokens, segments


def join_reader(
    x: np.ndarray, body: np.ndarray, special: SpecialTokens, limit: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """[CLS] x [SEP] body [SEP], its segments (0 x, 1 body) and the row of the body's first wordpiece.

    ``x`` is kept, the body is cut; the title is left out, as in the release.
    """
    tokens, segments = join_document(x, body, special, limit)
    return tokens, segments, min(len(x), limit - 3) + 2
