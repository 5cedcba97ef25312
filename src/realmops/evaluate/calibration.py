"""Calibration: Platt's curve and the threshold of abstention fitted on dev questions, and what both are worth.

Two parameters hold on a few hundred questions.

Shape suffixes: Q questions, R draws, N bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from realmops.answering.answer import Answer
from realmops.answering.confidence import HOLDS_ALL, Confidence, Floats, log_odds, sigmoid
from realmops.artifacts import seed_for
from realmops.evaluate.exact_match import RESAMPLES, bootstrap_interval

BINS = 10  # of equal width, for the expected calibration error
CERTAIN = 0.3  # share of the questions: the most certain ones
DRAWS = 200  # of right and wrong answers, to say what chance does to the calibration error

Bools = npt.NDArray[np.bool_]


def fit_confidence(answers: Sequence[Answer], correct_Q: Bools, wanted_precision: float) -> Confidence:
    """Fit curve and threshold to answers of which it is known whether they are right."""
    assert len(answers) == len(correct_Q) > 0
    slope, intercept = platt_scaling(log_odds([answer.log_p for answer in answers]), correct_Q)
    curve = Confidence(slope, intercept, HOLDS_ALL, wanted_precision, len(answers))
    return replace(curve, threshold=threshold_for(curve.probabilities(answers), correct_Q, wanted_precision))


def platt_scaling(odds_Q: Floats, correct_Q: Bools) -> tuple[float, float]:
    """Slope and intercept that make the right and wrong answers likeliest (Platt 1999, equation 2).

    With Platt's targets, (n+1)/(n+2) for n right answers and 1/(m+2) for m wrong ones, in the place of 1 and 0: they
    keep the curve finite where all are right, all are wrong, or one side is surer than all of the other. The slope is
    never below 0: where the model is no guide every answer gets the same probability. Log odds of -inf are left out.
    """
    from scipy.optimize import minimize

    there_Q = np.isfinite(odds_Q)
    x, right = odds_Q[there_Q], correct_Q[there_Q]
    target = np.where(right, (right.sum() + 1) / (right.sum() + 2), 1 / ((~right).sum() + 2))

    def loss(curve: Floats) -> tuple[float, Floats]:
        odds = curve[0] * x + curve[1]
        off = sigmoid(odds) - target
        value = np.logaddexp(0.0, odds) - target * odds
        return float(value.sum()), np.array([(off * x).sum(), off.sum()])

    bounds = [(0.0, None), (None, None)]
    fitted = minimize(loss, np.array([1.0, 0.0]), jac=True, bounds=bounds, options={"ftol": 1e-15, "gtol": 1e-9})
    return float(fitted.x[0]), float(fitted.x[1])


def threshold_for(probability_Q: Floats, correct_Q: Bools, wanted_precision: float) -> float:
    """The probability from which on answers are right as often as wanted, with as many answers as possible.

    Equal probabilities are on one side. 0 where all answers together reach it, ``HOLDS_ALL`` where none do.
    """
    curve = coverage_curve(probability_Q, correct_Q)
    [reached] = np.nonzero(curve.precision >= wanted_precision)
    if not len(reached):
        return HOLDS_ALL
    return 0.0 if reached[-1] == len(curve.precision) - 1 else float(curve.threshold[reached[-1]])


class Coverage(NamedTuple):
    """For each probability that there is, falling: share of the questions from there on, and how many are right."""

    threshold: Floats
    coverage: Floats
    precision: Floats


def coverage_curve(probability_Q: Floats, correct_Q: Bools) -> Coverage:
    """What is gained in precision by answering only the surest questions (El-Yaniv and Wiener 2010)."""
    order_Q = np.argsort(-probability_Q, kind="stable")
    falling_Q, answered_Q = probability_Q[order_Q], np.arange(1, len(order_Q) + 1)
    last = np.append(falling_Q[:-1] > falling_Q[1:], True)  # of equal ones
    precision_Q = correct_Q[order_Q].cumsum() / answered_Q
    return Coverage(falling_Q[last], answered_Q[last] / len(order_Q), precision_Q[last])


class Bin(NamedTuple):
    """Answers of about the same confidence: its mean, and the share of them that is right."""

    confidence: float
    right: float
    questions: int


def reliability(probability_Q: Floats, correct_Q: Bools) -> list[Bin]:
    """What a reliability diagram shows: the bins of equal width that have answers in them, in order."""
    bin_Q = _bins(probability_Q)
    return [
        Bin(float(probability_Q[mine].mean()), float(correct_Q[mine].mean()), int(mine.sum()))
        for mine in (bin_Q == n for n in np.unique(bin_Q))
    ]


def calibration_error(probability_Q: Floats, correct_Q: Bools) -> float:
    """Expected calibration error (Guo et al. 2017, equation 3): what confidence and share of right answers differ by.

    The mean over questions of the difference in their bin, of 10 of equal width.
    """
    return float(_errors(probability_Q, correct_Q[None])[0])


def chance_error(probability_Q: Floats, *, seed: int) -> float:
    """The calibration error to expect of probabilities that are exactly right.

    It is above 0, because few answers are in a bin: an error that is no larger shows nothing wrong.
    """
    generator = np.random.default_rng(seed_for(seed, "calibration error"))
    correct_RQ = generator.random((DRAWS, len(probability_Q))) < probability_Q
    return float(_errors(probability_Q, correct_RQ).mean())


def _errors(probability_Q: Floats, correct_RQ: Bools) -> Floats:
    is_in_QN = _bins(probability_Q)[:, None] == np.arange(BINS)
    excess_RN = (correct_RQ - probability_Q) @ is_in_QN.astype(np.float64)
    return np.asarray(np.abs(excess_RN).sum(-1) / len(probability_Q), np.float64)


def _bins(probability_Q: Floats) -> npt.NDArray[np.int64]:
    return np.minimum((probability_Q * BINS).astype(np.int64), BINS - 1)


def most_certain(probability_Q: Floats, share: float) -> Bools:
    """Which answers are the surest, at least this share of them; those that are as sure as the last one are too."""
    count = math.ceil(share * len(probability_Q))
    return np.asarray(probability_Q >= np.sort(probability_Q)[-count], bool)


def confidence_figures(
    confidence: Confidence, answers: Sequence[Answer], correct_Q: Bools, *, seed: int, resamples: int = RESAMPLES
) -> dict[str, float]:
    """What a calibration is worth on these questions, as metrics.

    ``ece``, beside that of p(y|x) as it is and of a perfect calibration; precision of the most certain 30 %; share of
    the questions whose answers are not held back, and precision of these. Both precisions with 95 % intervals.
    """
    probability_Q = confidence.probabilities(answers)
    raw_Q = np.exp(np.array([answer.log_p for answer in answers]))
    given_Q = ~np.array([confidence.abstains(answer) for answer in answers], bool)
    found = {
        "ece": calibration_error(probability_Q, correct_Q),
        "ece_uncalibrated": calibration_error(raw_Q, correct_Q),
        "ece_if_perfect": chance_error(probability_Q, seed=seed),
        "answered": float(given_Q.mean()),
    }
    chosen = {"precision_at_30": most_certain(probability_Q, CERTAIN), "answered_precision": given_Q}
    for name, mine_Q in chosen.items():
        if mine_Q.any():
            found |= bootstrap_interval(correct_Q[mine_Q], seed=seed, resamples=resamples).figures(name)
    return found
