"""Calibrated confidence of answers: p(y|x) mapped to the probability of being right, with a threshold to abstain.

p(y|x) of a fine-tuned reader ranks answers well, but is rarely the fraction of such answers that are right. Platt
scaling (Platt 1999) corrects it: a logistic regression on its log odds with two parameters, fitted on the dev questions
of people (``evaluate.calibration``). It is monotone and keeps the ranking of answers.

Shape suffix: Q questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from realmops.answering.answer import Answer
from realmops.artifacts import read_json, write_json

FILE = "confidence.json"
MIN_CALIBRATION = 20  # questions of people: fewer cannot determine two parameters and a threshold
LARGEST_LOG_P = -1e-13  # upper bound, since the log odds of 1 are infinite
ALWAYS_ABSTAIN = 2.0  # threshold above every probability, if no threshold is sure to have the required precision
TOO_FEW_RIGHT = "too few right answers in the calibration to promise wanted_precision"
OWN_QUESTIONS, READER_QUESTIONS = "questions.dev", "the reader's public questions"  # ``Confidence.source``

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Confidence:
    """Calibration of a model: P(right) = sigmoid(slope * log odds of p(y|x) + intercept).

    The model abstains below ``threshold``. Above it, answers to questions like those of the fit have at least the
    precision ``wanted_precision``, with a certainty of .9. With too few right answers for that, ``threshold`` is
    ``ALWAYS_ABSTAIN``, and the model abstains without a probability. It was fitted on ``questions`` of people.
    """

    slope: float
    intercept: float
    threshold: float
    wanted_precision: float
    questions: int
    source: str

    @classmethod
    def load(cls, folder: Path) -> Confidence | None:
        """Load the calibration of a fine-tuned model; None without its file, ValueError if it is damaged."""
        path = folder / FILE
        if not path.is_file():
            return None
        values = read_json(path)
        try:
            return cls(**values)
        except (TypeError, ValueError):
            raise ValueError(
                f"{path} is not a calibration of this version: found {values}; fine-tune again, or delete the file"
            ) from None

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, asdict(self))

    @property
    def description(self) -> str:
        return f"fitted on {self.questions} questions: {self.source}"

    @property
    def holds_all(self) -> bool:
        return self.threshold > 1

    def probability(self, answer: Answer) -> float:
        return float(self.probabilities([answer])[0])

    def abstains(self, answer: Answer) -> bool:
        return not answer.text or self.probability(answer) < self.threshold

    def probabilities(self, answers: Sequence[Answer]) -> Floats:
        """Return the probability of each answer, [Q]."""
        odds_Q = log_odds([answer.log_p for answer in answers])
        is_finite_Q = np.isfinite(odds_Q)
        return np.where(is_finite_Q, sigmoid(self.slope * np.where(is_finite_Q, odds_Q, 0.0) + self.intercept), 0.0)


def log_odds(log_p_Q: Sequence[float]) -> Floats:
    """Compute log(p / (1 - p)) from log p; -inf for p = 0."""
    log_p = np.minimum(np.asarray(log_p_Q, np.float64), LARGEST_LOG_P)
    return np.asarray(log_p - np.log(-np.expm1(log_p)), np.float64)


def sigmoid(odds_Q: Floats) -> Floats:
    """Compute 1 / (1 + exp(-x)) without overflow."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -odds_Q)), np.float64)
