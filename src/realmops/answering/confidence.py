"""The calibrated confidence of an answer: p(y|x) mapped to the share of such answers that is right, and abstention.

p(y|x) of a fine-tuned reader says which of two answers is the surer one, and rarely how often such answers are right.
Platt scaling (Platt 1999) makes it say that: a logistic curve over its log odds with two parameters, fitted on the dev
questions (``evaluate.calibration``). It is monotone, so it changes no ranking of answers.

Shape suffix: Q questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from realmops.answering.answer import Answer
from realmops.artifacts import read_json, write_json

FILE = "confidence.json"
LARGEST_LOG_P = -1e-13  # a probability of 1 has no log odds
HOLDS_ALL = 2.0  # a threshold above every probability: where none reaches the wanted precision

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Confidence:
    """The calibration of one model: sigmoid(slope * log odds of p(y|x) + intercept) is the probability of being right.

    Answers below ``threshold`` are better held back: those above it are right as often as ``wanted_precision`` says,
    on the dev ``questions`` that all was fitted on. Where no threshold reaches that it is ``HOLDS_ALL``, above 1: then
    every answer is held back.
    """

    slope: float
    intercept: float
    threshold: float
    wanted_precision: float
    questions: int

    @classmethod
    def load(cls, folder: Path) -> Confidence | None:
        """Load the calibration of a fine-tuned model; None for an imported model, which has no such file.

        ValueError names a file that is damaged.
        """
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            return cls(**read_json(path))
        except TypeError as error:
            raise ValueError(f"{path} holds no calibration of this version ({error}); fine-tune again") from None

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, asdict(self))

    @property
    def holds_all(self) -> bool:
        """Whether every answer is held back."""
        return self.threshold > 1

    def probability(self, answer: Answer) -> float:
        """How probable it is that an answer is right; 0 without an answer."""
        return float(self.probabilities([answer])[0])

    def abstains(self, answer: Answer) -> bool:
        """Whether an answer is better held back, or there is none."""
        return not answer.text or self.probability(answer) < self.threshold

    def probabilities(self, answers: Sequence[Answer]) -> Floats:
        """``probability`` of each answer, [Q]."""
        odds_Q = log_odds([answer.log_p for answer in answers])
        there_Q = np.isfinite(odds_Q)
        return np.where(there_Q, sigmoid(self.slope * np.where(there_Q, odds_Q, 0.0) + self.intercept), 0.0)


def log_odds(log_p_Q: Sequence[float]) -> Floats:
    """log(p / (1 - p)) of probabilities that are given as logarithms, -inf for 0."""
    log_p = np.minimum(np.asarray(log_p_Q, np.float64), LARGEST_LOG_P)
    return np.asarray(log_p - np.log(-np.expm1(log_p)), np.float64)


def sigmoid(odds_Q: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -odds_Q)), np.float64)
