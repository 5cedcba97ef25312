"""Platt scaling and the abstention threshold, fitted on dev questions of people. Q questions, R draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from realmops.answering.answer import Answer
from realmops.answering.confidence import ALWAYS_ABSTAIN, OWN_QUESTIONS, Confidence, Floats, log_odds
from realmops.artifacts import seed_for
from realmops.evaluate.exact_match import RESAMPLES, bootstrap_interval

BROKEN_PROMISES = 0.1  # share of the fits above whose threshold the precision may be below the target
FIRST_TESTED = 0.1  # coverage of the first threshold that is tested
BINS = 10  # equal-width bins of the expected calibration error
CERTAIN = 0.3  # fraction of the questions, the most confident ones
DRAWS = 200  # simulations of correctness, for the calibration error expected by chance

Bools = npt.NDArray[np.bool_]


def fit_confidence(answers: Sequence[Answer], correct_Q: Bools, target_precision: float) -> Confidence:
    assert len(answers) == len(correct_Q) > 0
    slope, intercept = platt_scaling(log_odds([answer.log_p for answer in answers]), correct_Q)
    curve = Confidence(slope, intercept, ALWAYS_ABSTAIN, target_precision, len(answers), OWN_QUESTIONS)
    return replace(curve, threshold=threshold_for(curve.probabilities(answers), correct_Q, target_precision))


def platt_scaling(odds_Q: Floats, correct_Q: Bools) -> tuple[float, float]:
    """Return slope, at least 0, and intercept that maximise the likelihood of the labels (Platt 1999, equation 2).

    Targets (n+1)/(n+2) for n correct and 1/(m+2) for m wrong answers keep both finite. Log odds of -inf are ignored.
    """
    from sklearn.linear_model import LogisticRegression

    is_finite_Q = np.isfinite(odds_Q)
    x, correct = odds_Q[is_finite_Q], correct_Q[is_finite_Q]
    target = np.where(correct, (correct.sum() + 1) / (correct.sum() + 2), 1 / ((~correct).sum() + 2))
    if not len(x):
        return 1.0, 0.0
    # A target between 0 and 1 is one correct and one wrong answer, weighted by it; C: no regularisation.
    fitted = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000).fit(
        np.concatenate([x, x])[:, None],
        np.repeat([True, False], len(x)),
        sample_weight=np.concatenate([target, 1 - target]),
    )
    slope, intercept = float(fitted.coef_[0, 0]), float(fitted.intercept_[0])
    # The likelihood is concave: if its maximum has a negative slope, that of slopes from 0 is at 0.
    return (slope, intercept) if slope >= 0 else (0.0, math.log(target.mean() / (1 - target.mean())))


def threshold_for(probability_Q: Floats, correct_Q: Bools, target_precision: float) -> float:
    """Return the smallest threshold whose precision is at least the target, but for one fit in ten.

    That is 0 if all answers may be shown, ``ALWAYS_ABSTAIN`` if none. A threshold passes if the lower bound of Clopper
    and Pearson (1934) reaches the target. A fixed sequence of tests needs no correction: downwards, to the first that
    fails, from a tenth of the questions on, and from a number whose bound can pass (for .8: 11, all right).
    """
    from scipy.stats import beta

    curve = coverage_curve(probability_Q, correct_Q)
    answered = np.rint(curve.coverage * len(correct_Q))
    right = np.rint(curve.precision * answered)
    lower = np.nan_to_num(beta.ppf(BROKEN_PROMISES, right, answered - right + 1))  # not a number without a right answer
    is_tested = (answered >= FIRST_TESTED * len(correct_Q)) & (BROKEN_PROMISES ** (1 / answered) >= target_precision)
    [tested] = np.nonzero(is_tested)
    kept = tested[np.logical_and.accumulate(lower[tested] >= target_precision)]
    if not len(kept):
        return ALWAYS_ABSTAIN
    return 0.0 if kept[-1] == len(answered) - 1 else float(curve.threshold[kept[-1]])


class Coverage(NamedTuple):
    """Coverage and precision at each distinct probability as the threshold, in descending order."""

    threshold: Floats
    coverage: Floats
    precision: Floats


def coverage_curve(probability_Q: Floats, correct_Q: Bools) -> Coverage:
    """Return precision against coverage, the most confident answers first (El-Yaniv and Wiener 2010)."""
    order_Q = np.argsort(-probability_Q, kind="stable")
    sorted_Q, answered_Q = probability_Q[order_Q], np.arange(1, len(order_Q) + 1)
    is_last = np.append(sorted_Q[:-1] > sorted_Q[1:], True)  # of equal probabilities
    precision_Q = correct_Q[order_Q].cumsum() / answered_Q
    return Coverage(sorted_Q[is_last], answered_Q[is_last] / len(order_Q), precision_Q[is_last])


class Bin(NamedTuple):
    """A bin of answers of similar confidence: mean confidence, share of correct answers, number of questions."""

    confidence: float
    right: float
    questions: int


def reliability_bins(probability_Q: Floats, correct_Q: Bools) -> list[Bin]:
    bin_Q = np.minimum((probability_Q * BINS).astype(np.int64), BINS - 1)
    return [
        Bin(float(probability_Q[mask].mean()), float(correct_Q[mask].mean()), int(mask.sum()))
        for mask in (bin_Q == n for n in np.unique(bin_Q))
    ]


def calibration_error(probability_Q: Floats, correct_Q: Bools) -> float:
    """Return the expected calibration error over 10 equal-width bins (Guo et al. 2017, equation 3)."""
    bins = reliability_bins(probability_Q, correct_Q)
    return sum(each.questions * abs(each.right - each.confidence) for each in bins) / len(probability_Q)


def chance_error(probability_Q: Floats, *, seed: int) -> float:
    """Return the calibration error of perfectly calibrated probabilities, which is positive because bins are small."""
    generator = np.random.default_rng(seed_for(seed, "calibration error"))
    correct_RQ = generator.random((DRAWS, len(probability_Q))) < probability_Q
    return float(np.mean([calibration_error(probability_Q, correct_Q) for correct_Q in correct_RQ]))


def most_certain(probability_Q: Floats, share: float) -> Bools:
    count = math.ceil(share * len(probability_Q))
    return np.asarray(probability_Q >= np.sort(probability_Q)[-count], bool)


def confidence_figures(
    confidence: Confidence, answers: Sequence[Answer], correct_Q: Bools, *, seed: int, resamples: int = RESAMPLES
) -> dict[str, float]:
    """Return the metrics of a calibration on these questions; both precisions have 95 % intervals."""
    probability_Q = confidence.probabilities(answers)
    raw_Q = np.exp(np.array([answer.log_p for answer in answers]))
    is_answered_Q = ~np.array([confidence.abstains(answer) for answer in answers], bool)
    metrics = {
        "ece": calibration_error(probability_Q, correct_Q),
        "ece_uncalibrated": calibration_error(raw_Q, correct_Q),
        "ece_if_perfect": chance_error(probability_Q, seed=seed),
        "answered": float(is_answered_Q.mean()),
    }
    selections = {"precision_at_30": most_certain(probability_Q, CERTAIN), "answered_precision": is_answered_Q}
    for name, selected_Q in selections.items():
        if selected_Q.any():
            metrics |= bootstrap_interval(correct_Q[selected_Q], seed=seed, resamples=resamples).figures(name)
    return metrics
