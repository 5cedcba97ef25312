"""Input sequences of the encoders (paper, section 3.2: join_BERT).

All functions take and return one-dimensional int64 arrays of wordpiece ids without padding.
"""

import numpy as np

from realmops.corpus.special_tokens import SpecialTokens as SpecialTokens


def join_query(x: np.ndarray, special: SpecialTokens, limit: int) -> np.ndarray:
    """Build [CLS] prompt x [SEP] for the retriever's query tower."""
    return join_text(x, special, limit, special.query)


def join_text(x: np.ndarray, special: SpecialTokens, limit: int, prompt: tuple[int, ...] = ()) -> np.ndarray:
    """Build [CLS] prompt x [SEP], with x truncated to ``limit`` wordpieces in all; the reader gets no prompt."""
    prefix = [*special.begin, *prompt]
    return np.concatenate([prefix, x[: max(0, limit - 1 - len(prefix))], [special.sep]]).astype(np.int64)


def join_document(
    title: np.ndarray, body: np.ndarray, special: SpecialTokens, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Build [CLS] prompt title [SEP] body [SEP] for the retriever, and its segments (0 title, 1 body).

    The body is truncated before the title is. The null document is the empty title with the empty body.
    """
    return _join_pair(title, body, special, limit, special.document)


def _join_pair(
    title: np.ndarray, body: np.ndarray, special: SpecialTokens, limit: int, prompt: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    prefix = [*special.begin, *prompt]
    title = title[: max(0, limit - 2 - len(prefix))]
    body = body[: max(0, limit - 2 - len(prefix) - len(title))]
    tokens = np.concatenate([prefix, title, [special.sep], body, [special.sep]]).astype(np.int64)
    segments = np.zeros(len(tokens), dtype=np.int64)
    segments[len(prefix) + len(title) + 1 :] = 1
    return tokens, segments


def join_reader(
    x: np.ndarray, body: np.ndarray, special: SpecialTokens, limit: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Build [CLS] x [SEP] body [SEP], its segments (0 x, 1 body) and the index of the body's first wordpiece.

    The body is truncated before ``x`` is. There is no title, as in the released code.
    """
    tokens, segments = _join_pair(x, body, special, limit, ())
    longest_x = limit - 2 - len(special.begin)
    return tokens, segments, len(special.begin) + min(len(x), longest_x) + 1
