"""Wordpiece sequences as the encoders take them (paper, section 3.2: join_BERT).

All functions take and give one-dimensional int64 arrays of wordpiece ids without padding.
"""

import numpy as np

from realmops.text.special import SpecialTokens as SpecialTokens


def join_query(x: np.ndarray, special: SpecialTokens, limit: int) -> np.ndarray:
    """[CLS] x [SEP] for the retriever, x cut so that all of it has at most ``limit`` wordpieces.

    What it is told of queries stands before x.
    """
    return _join(x, special, limit, special.query)


def join_text(x: np.ndarray, special: SpecialTokens, limit: int) -> np.ndarray:
    """The same of a document's text without a title."""
    return _join(x, special, limit, special.document)


def join_alone(x: np.ndarray, special: SpecialTokens, limit: int) -> np.ndarray:
    """The same for the reader, which is told nothing before it."""
    return _join(x, special, limit, ())


def _join(x: np.ndarray, special: SpecialTokens, limit: int, told: tuple[int, ...]) -> np.ndarray:
    before = [*special.begin, *told]
    return np.concatenate([before, x[: max(0, limit - 1 - len(before))], [special.sep]]).astype(np.int64)


def join_document(
    title: np.ndarray, body: np.ndarray, special: SpecialTokens, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """[CLS] title [SEP] body [SEP] for the retriever and its segments (0 title, 1 body).

    What it is told of documents stands before the title. The body is cut, the title kept. The null document is the
    empty title with the empty body.
    """
    return _join_pair(title, body, special, limit, special.document)


def _join_pair(
    title: np.ndarray, body: np.ndarray, special: SpecialTokens, limit: int, told: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    before = [*special.begin, *told]
    title = title[: max(0, limit - 2 - len(before))]
    body = body[: max(0, limit - 2 - len(before) - len(title))]
    tokens = np.concatenate([before, title, [special.sep], body, [special.sep]]).astype(np.int64)
    segments = np.zeros(len(tokens), dtype=np.int64)
    segments[len(before) + len(title) + 1 :] = 1
    return tokens, segments


def join_reader(
    x: np.ndarray, body: np.ndarray, special: SpecialTokens, limit: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """[CLS] x [SEP] body [SEP], its segments (0 x, 1 body) and the row of the body's first wordpiece.

    ``x`` is kept, the body is cut; the title is left out, as in the release.
    """
    tokens, segments = _join_pair(x, body, special, limit, ())
    alone = limit - 2 - len(special.begin)
    return tokens, segments, len(special.begin) + min(len(x), alone) + 1
