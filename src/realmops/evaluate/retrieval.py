"""Recall@k under both named match rules, the ceilings above EM, and BM25 as the reference.

Legend: Q questions, K ranked passages a question. Passages are rows of the snapshot, -1 is no passage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realmops.corpus.answers import (
    MATCH_RULES,
    MAX_ANSWER_WORDPIECES,
    answer_token_spans,
    contains_answer,
)
from realmops.corpus.questions import Question

RECALL_AT = (1, 5, 20, 100)
READER_PASSAGES = 5

Rows = NDArray[np.integer[Any]]


def first_hit_ranks(
    questions: Sequence[Question],
    ranked_QK: Rows,
    text: Callable[[int], str],
    *,
    rule: str,
) -> NDArray[np.int64]:
    """Rank (from 0) of the first passage that contains an answer, K where none does.

    Args:
        ranked_QK: passages of each question, best first.
        text: the text of a passage.
        rule: a name of ``corpus.answers.MATCH_RULES``.

    Returns:
        int64 [Q].
    """
    assert len(ranked_QK) == len(questions), (ranked_QK.shape, len(questions))
    ranks = np.full(len(questions), ranked_QK.shape[1], np.int64)
    for index, (question, ranked_K) in enumerate(zip(questions, ranked_QK, strict=True)):
        for rank, passage in enumerate(ranked_K.tolist()):
            if passage >= 0 and contains_answer(text(passage), question.answers, rule):
                ranks[index] = rank
                break
    return ranks


def hits_at(ranks_Q: NDArray[np.int64], k: int) -> NDArray[np.bool_]:
    """For each question whether one of its first k passages contains an answer (for the bootstrap)."""
    return ranks_Q < k


def hit_ranks_by_rule(
    questions: Sequence[Question], ranked_QK: Rows, text: Callable[[int], str]
) -> dict[str, NDArray[np.int64]]:
    """``first_hit_ranks`` under each rule, of rankings deep enough for every recall@k.

    Raises ValueError when a question has fewer than 100 ranked passages, which only a corpus of fewer allows:
    such a corpus is ranked whole and padded with -1.
    """
    if ranked_QK.shape[1] < max(RECALL_AT):
        raise ValueError(
            f"recall@{max(RECALL_AT)} needs as many passages a question, this has {ranked_QK.shape[1]}; "
            "retrieve more, or pad the ranking of a smaller corpus with -1"
        )
    return {rule: first_hit_ranks(questions, ranked_QK, text, rule=rule) for rule in MATCH_RULES}


def recall_metrics(ranks_Q: Mapping[str, NDArray[np.int64]], *, prefix: str = "") -> dict[str, float]:
    """``{prefix}recall_at_{k}_{rule}`` for k = 1, 5, 20, 100 and each rule of ``hit_ranks_by_rule``."""
    return {
        f"{prefix}recall_at_{k}_{rule}": float(hits_at(ranks, k).mean())
        for rule, ranks in ranks_Q.items()
        for k in RECALL_AT
    }


def answered_in_corpus(
    questions: Sequence[Question],
    texts: Iterable[str],
    *,
    rule: str,
    known_Q: NDArray[np.bool_] | None = None,
    progress: Callable[[int], None] | None = None,
) -> NDArray[np.bool_]:
    """For each question whether any passage contains an answer: nothing can be right above this share.

    One pass over the corpus; a question is dropped once it is answered. ``known_Q`` marks those that a
    ranking answered already (``hits_at``), which spares most of the work.

    Returns:
        bool [Q].
    """
    answered = np.zeros(len(questions), bool) if known_Q is None else known_Q.copy()
    open_questions = np.flatnonzero(~answered).tolist()
    for text in texts:
        for index in open_questions:
            answered[index] = contains_answer(text, questions[index].answers, rule)
        open_questions = [index for index in open_questions if not answered[index]]
        if progress:
            progress(1)
    return answered


def answer_fits_reader(
    questions: Sequence[Question], count_wordpieces: Callable[[str], int]
) -> NDArray[np.bool_]:
    """For each question whether an answer has at most 10 wordpieces, the reader's longest span."""
    return np.array(
        [
            any(count_wordpieces(answer) <= MAX_ANSWER_WORDPIECES for answer in question.answers)
            for question in questions
        ],
        bool,
    )


def reader_can_answer(
    questions: Sequence[Question],
    ranked_QK: Rows,
    text: Callable[[int], str],
    chars: Callable[[int], NDArray[np.integer[Any]]],
    *,
    rule: str,
) -> NDArray[np.bool_]:
    """For each question whether one of the top 5 passages holds an answer as a span of at most 10 wordpieces.

    Args:
        chars: [t, 2] start and end character of each wordpiece of a passage.
    """
    return np.array(
        [
            any(
                passage >= 0
                and answer_token_spans(text(passage), question.answers, chars(passage), rule=rule)
                for passage in ranked_K.tolist()
            )
            for question, ranked_K in zip(questions, ranked_QK[:, :READER_PASSAGES], strict=True)
        ],
        bool,
    )


def bm25_ranking(texts: Sequence[str], queries: Sequence[str], k: int = max(RECALL_AT)) -> NDArray[np.int64]:
    """The best k passages of each query by BM25 (bm25s's defaults, English stop words, Snowball stems).

    Returns:
        int64 [Q, k]; columns that a corpus of fewer passages cannot fill are -1.
    """
    import bm25s
    import Stemmer

    stemmer = Stemmer.Stemmer("english")

    def tokens(strings: Sequence[str]) -> list[list[str]]:
        found = bm25s.tokenize(
            list(strings), stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False
        )
        return [list(words) for words in found]

    index = bm25s.BM25(backend="numpy")
    index.index(tokens(texts), show_progress=False)
    ranking = np.full((len(queries), k), -1, np.int64)
    filled = min(k, len(texts))
    found, _ = index.retrieve(tokens(queries), k=filled, show_progress=False, backend_selection="numpy")
    ranking[:, :filled] = found
    return ranking
