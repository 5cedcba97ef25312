"""Recall@k by match rule. Q questions, K ranked passages per question: rows of the snapshot, -1 is no passage."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realmops.evaluate.exact_match import bootstrap_interval
from realmops.questions.answer_matching import REGEX_RULES, WORD_RULES, contains_answer
from realmops.questions.question_sets import JUDGED_RULE, Question, answers_are_regex

RECALL_AT = (1, 5, 20, 100)
SHOWN_AT = (1, 5, 20)  # with intervals
ZERO_SHOT = {"ict": "before_realm_", "pretrain": "zero_shot_"}  # metric prefix of a retriever without fine-tuning

Rows = NDArray[np.integer[Any]]


def pad_rankings(ranked: Iterable[Sequence[int]], depth: int) -> Rows:
    return np.array([[*row] + [-1] * (depth - len(row)) for row in ranked])


def first_hit_ranks(
    questions: Sequence[Question], ranked_QK: Rows, text: Callable[[int], str], *, rule: str
) -> NDArray[np.int64]:
    """Return the rank (from 0) of the first passage with an answer by a rule of ``MATCH_RULES``, else K, int64 [Q]."""

    def has_answer(question: Question, passage: int) -> bool:
        return passage >= 0 and contains_answer(text(passage), question.answers, rule)

    return first_relevant_ranks(questions, ranked_QK, has_answer)


def first_relevant_ranks(
    questions: Sequence[Question], ranked_QK: Rows, is_relevant: Callable[[Question, int], bool]
) -> NDArray[np.int64]:
    """Return the rank (from 0) of the first relevant passage, K if none is, int64 [Q]."""
    assert len(ranked_QK) == len(questions), (ranked_QK.shape, len(questions))
    ranks = np.full(len(questions), ranked_QK.shape[1], np.int64)
    for index, (question, ranked_K) in enumerate(zip(questions, ranked_QK, strict=True)):
        for rank, passage in enumerate(ranked_K.tolist()):
            if is_relevant(question, passage):
                ranks[index] = rank
                break
    return ranks


def hit_ranks_by_rule(
    questions: Sequence[Question], ranked_QK: Rows, text: Callable[[int], str]
) -> dict[str, NDArray[np.int64]]:
    """Return ``first_hit_ranks`` under each rule for these answers; rankings have at least 100 passages, or -1."""
    assert ranked_QK.shape[1] >= max(RECALL_AT), ranked_QK.shape
    rules = REGEX_RULES if answers_are_regex(questions) else WORD_RULES
    return {rule: first_hit_ranks(questions, ranked_QK, text, rule=rule) for rule in rules}


def recall_metrics(ranks_Q: Mapping[str, NDArray[np.int64]], *, prefix: str = "") -> dict[str, float]:
    return {
        f"{prefix}recall_at_{k}_{rule}": float((ranks < k).mean()) for rule, ranks in ranks_Q.items() for k in RECALL_AT
    }


def zero_shot_recall(metrics: Mapping[str, Any], retriever: str) -> float | None:
    """Return recall@5 of the retriever before fine-tuning, itself if it has no parameters; None without retrieval."""
    names = (f"recall_at_5_{rule}" for rule in (*WORD_RULES, *REGEX_RULES, JUDGED_RULE))
    name = next((name for name in names if f"{name}_low" in metrics), "")
    value = metrics.get(ZERO_SHOT.get(retriever, "") + name)
    return None if value is None else float(value)


def recall_intervals(
    ranks_Q: NDArray[np.int64], rule: str, *, prefix: str, seed: int, resamples: int
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for k in SHOWN_AT:
        interval = bootstrap_interval(ranks_Q < k, seed=seed, resamples=resamples)
        metrics |= interval.figures(f"{prefix}recall_at_{k}_{rule}")
    return metrics
