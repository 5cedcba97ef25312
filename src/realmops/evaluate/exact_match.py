"""Exact match (the paper's section 4) and F1 (SQuAD) over questions, with confidence intervals.

``questions/answer_matching.py`` has the rules; for regular expressions F1 is exact match, 0 or 1.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from realmops.artifacts import seed_for
from realmops.corpus.languages import ENGLISH
from realmops.questions.answer_matching import REGEX_RULES, contains_answer, exact_match, normalize_answer, token_f1
from realmops.questions.question_sets import Question, answers_are_regex

EM_RULES = ("exact_match", *REGEX_RULES)
RESAMPLES = 10_000
CONFIDENCE = 0.95
_DRAWS_PER_BATCH = 1 << 22  # limits memory


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    def figures(self, name: str) -> dict[str, float]:
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}


@dataclass(frozen=True)
class Difference(Interval):
    """A mean difference of two runs; ``p_better`` is the share of resamples above 0, one of 0 counts as half."""

    p_better: float


@dataclass(frozen=True)
class Score:
    """Exact match, ``correct`` bool [Q], and F1, ``f1_Q`` float64 [Q], of one run by one rule."""

    em: Interval
    correct: npt.NDArray[np.bool_]
    f1: Interval
    f1_Q: npt.NDArray[np.float64]

    def figures(self, prefix: str) -> dict[str, float]:
        return self.em.figures(f"{prefix}em") | self.f1.figures(f"{prefix}f1")


def em_rules(questions: Sequence[Question]) -> tuple[str, ...]:
    return REGEX_RULES if answers_are_regex(questions) else EM_RULES[:1]


def score_predictions(
    questions: Sequence[Question],
    predictions: Sequence[str],
    *,
    seed: int,
    rule: str | None = None,
    resamples: int = RESAMPLES,
) -> Score:
    """Score one answer per question with exact match and F1, by a rule of ``EM_RULES`` (default: the release's)."""
    rule = rule or em_rules(questions)[0]
    pairs = list(zip(predictions, questions, strict=True))
    correct = np.array([is_exact_match(text, question, rule) for text, question in pairs], bool)
    f1_Q = np.array([f1_of(text, question, rule) for text, question in pairs], np.float64)
    em, f1 = (bootstrap_interval(values, seed=seed, resamples=resamples) for values in (correct, f1_Q))
    return Score(em, correct, f1, f1_Q)


def f1_of(prediction: str, question: Question, rule: str) -> float:
    """Return F1 of one prediction, 0 without one; for regular expressions 1 for a match by the rule, otherwise 0."""
    if not prediction:
        return 0.0
    if question.is_regex:
        return float(is_exact_match(prediction, question, rule))
    return token_f1(prediction, question.answers, question.language or ENGLISH)


def is_exact_match(prediction: str, question: Question, rule: str | None = None) -> bool:
    rule = rule or em_rules([question])[0]
    if rule == "exact_match":
        return exact_match(prediction, question.answers, question.language or ENGLISH)
    return contains_answer(prediction, question.answers, rule)


def bootstrap_interval(values: npt.ArrayLike, *, seed: int, resamples: int = RESAMPLES) -> Difference:
    """Return the mean of one value per question with its 95 % percentile bootstrap interval over questions."""
    from scipy.stats import bootstrap

    sample = np.asarray(values, np.float64)
    if sample.size == 0:
        raise ValueError("no questions: an interval needs at least one value")
    mean = float(sample.mean())
    means, low, high = np.full(1, mean), mean, mean
    if sample.size > 1 and np.isfinite(mean):
        rng, batch = np.random.default_rng(seed_for(seed, "bootstrap")), max(1, _DRAWS_PER_BATCH // sample.size)
        drawn = bootstrap((sample,), np.mean, n_resamples=resamples, batch=batch, method="percentile", rng=rng)
        means, (low, high) = drawn.bootstrap_distribution, map(float, drawn.confidence_interval)
    return Difference(mean, low, high, float((means > 0).mean() + (means == 0).mean() / 2))


def paired_bootstrap(first: npt.ArrayLike, second: npt.ArrayLike, *, seed: int) -> Difference:
    """Return the mean difference of two runs on the same questions; an interval without 0 shows a difference."""
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if first.shape != second.shape:
        raise ValueError(f"the runs have {first.size} and {second.size} questions; compare runs on the same ones")
    return bootstrap_interval(first - second, seed=seed)


def interval_over_seeds(
    values: Sequence[npt.ArrayLike], *, shared: bool, seed: int, least: float = -1.0, resamples: int = RESAMPLES
) -> Difference:
    """Return the mean over seeds with its 95 % interval for a new seed and new questions of the same population.

    The value is mean + a_s + b_q + e_sq, all three random. If each seed has separate questions, it is Student's t
    of the S means. If all are ``shared``, the variance of b_q is added, from the mean squares of the two-way layout,
    and the quantiles for S - 1 and Q - 1 degrees of freedom are weighted by the variances (Cochran and Cox 1957,
    section 4.14). With one seed, or an estimated variance of 0, it is ``paired_bootstrap``.
    The mean is between ``least`` and 1.
    """
    from scipy.stats import t

    samples = [np.asarray(seed_values, np.float64) for seed_values in values]
    if len(samples) == 1:
        return bootstrap_interval(samples[0], seed=seed, resamples=resamples)
    means_S = np.array([seed_values.mean() for seed_values in samples])
    mean = float(means_S.mean())
    variance, freedom = [means_S.var(ddof=1) / len(samples)], [len(samples) - 1]  # of the mean, from a_s and e_sq
    if shared and samples[0].size > 1:
        value_SQ = np.stack(samples)
        means_Q = value_SQ.mean(0)
        residual_SQ = value_SQ - means_S[:, None] - means_Q + mean
        freedom.append(len(means_Q) - 1)
        residual_variance = (
            (residual_SQ**2).sum() / (freedom[0] * freedom[1]) / len(samples)
        )  # contribution of e_sq to the variance of means_Q
        variance.append(np.maximum(means_Q.var(ddof=1) - residual_variance, 0.0) / len(means_Q))
    error = float(np.sum(variance)) ** 0.5
    if error == 0:
        return interval_over_seeds([np.concatenate(samples)], shared=False, seed=seed, resamples=resamples)
    half = error * float(np.average(t.ppf((1 + CONFIDENCE) / 2, freedom), weights=variance))
    p_better = float(np.average(t.cdf(mean / error, freedom), weights=variance))
    return Difference(mean, max(mean - half, least), min(mean + half, 1.0), p_better)


def closed_book_floor(training: Sequence[Question], test: Sequence[Question]) -> tuple[str, float]:
    counts = Counter(
        answer
        for question in training
        if not question.is_regex
        for answer in sorted(
            {normalize_answer(answer, question.language or ENGLISH) or answer for answer in question.answers}
        )
    )
    if not counts:
        raise ValueError("the closed-book floor needs at least one training question with an answer")
    answer = min(counts, key=lambda text: (-counts[text], text))
    rule = em_rules(test)[0]
    return answer, sum(is_exact_match(answer, question, rule) for question in test) / len(test)
