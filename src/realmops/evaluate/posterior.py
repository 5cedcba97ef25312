"""A question's answer, and what each passage that was read is worth for it.

One softmax goes over all answer spans of the passages that were read; the score of a span is the reader's plus the
retriever's f(x, z) (paper, section 3.2; ORQA). p(y|x) is the sum over all spans with the normal form of y, p(y, z|x)
the part of it that lies in z, and p(z|x, y) that part's share. p(z|x) is the retriever's, before reading.

Shape suffixes: B questions, K passages that are read, S answer spans of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from realmops.model.likelihood import log_prior
from realmops.train.finetune import OpenQa, Span


@dataclass(frozen=True)
class Found:
    """What the retriever found for a question."""

    question: str
    passages: tuple[int, ...]  # to read, best first
    relevance: tuple[float, ...]  # f(x, z)
    p_z: tuple[float, ...]  # p(z|x), over these passages


@dataclass(frozen=True)
class Read:
    """One passage z that was read."""

    passage: int
    p_z: float
    p_z_given_y: float | None  # None where no span that was read is y
    p_y_z: float  # p(y, z|x)
    best: Span | None  # of all spans in it; None where it has none
    best_of_y: Span | None  # of those that are y


@dataclass(frozen=True)
class Posterior:
    """A question answered. ``y`` is the answer that was given, or else the prediction's text."""

    question: str
    y: str
    prediction: Span | None  # the span with the best score
    probability: float  # p(y|x) of the prediction
    p_y: float  # p(y|x) of y
    read: tuple[Read, ...]  # by p(z|x)

    @property
    def log_p(self) -> float:
        """log p(y|x) of the prediction, -inf without one."""
        return math.log(self.probability) if self.probability else -math.inf

    @property
    def text(self) -> str:
        """The prediction's, "" without one."""
        return self.prediction.text if self.prediction else ""


def check_question(model: OpenQa, question: str) -> None:
    """ValueError when a question is empty or longer than what is read of it."""
    tokens, options = model.wordpieces(question), model.options
    limit = min(options.query_wordpieces - 2, options.reader_wordpieces - 4)
    if not 0 < len(tokens) <= limit:
        shown = question if len(question) <= 200 else f"{question[:200]}…"
        raise ValueError(f"the question {shown!r} has {len(tokens)} wordpieces, 1 to {limit} are read: change it")


@torch.no_grad()
def find(model: OpenQa, questions: Sequence[str], without: Sequence[Collection[str]] = ()) -> list[Found]:
    """The passages to read of each question; ``without`` are ids of passages that are not wanted for it."""
    k = model.options.reader_candidates
    without = without or [()] * len(questions)
    relevance_BK, id_BK = model.relevance(questions, k + max(map(len, without)))
    found = []
    for question, leave, relevance_K, id_K in zip(questions, without, relevance_BK.cpu(), id_BK.tolist(), strict=True):
        rows = [row for row, passage in enumerate(id_K) if passage >= 0]
        if leave:
            rows = [row for row in rows if model.snapshot.passage_id(id_K[row]) not in leave]
        kept_K = relevance_K[rows[:k]]
        p_K = log_prior(kept_K.double()).exp().tolist() if rows else []
        found.append(Found(question, tuple(id_K[row] for row in rows[:k]), tuple(kept_K.tolist()), tuple(p_K)))
    return found


@torch.no_grad()
def read(model: OpenQa, found: Sequence[Found], answers: Sequence[str | None] = ()) -> list[Posterior]:
    """Read what was found for some questions, all in one packed batch."""
    score, rows = np.empty(0), np.empty((0, 4), np.int64)
    if any(one.passages for one in found):
        tokens = [model.wordpieces(one.question) for one in found]
        score_S, rows = model.spans(tokens, [one.passages for one in found])
        score = score_S.double().cpu().numpy()
    posteriors = []
    for b, (one, answer) in enumerate(zip(found, answers or [None] * len(found), strict=True)):
        mine = rows[:, 0] == b
        posteriors.append(_posterior(model, one, answer, score[mine], rows[mine]))
    return posteriors


def _posterior(
    model: OpenQa, found: Found, answer: str | None, score_S: NDArray[np.float64], rows: NDArray[np.int64]
) -> Posterior:
    """``rows`` are those of ``OpenQa.spans`` for this question."""
    passages, rank_S = found.passages, rows[:, 1]
    logit_S = score_S + model.retriever.mixture.reading * np.array(found.relevance)[rank_S]
    p_S = np.exp(logit_S - np.logaddexp.reduce(logit_S)) if len(rows) else logit_S
    prediction = model.choose(rows, logit_S, passages)
    said_S = model.says(prediction.text, rows, passages) if prediction else np.zeros(0, bool)
    y_S = said_S if answer is None else model.says(answer, rows, passages)
    p_y_K = np.bincount(rank_S, p_S * y_S, minlength=len(passages)).tolist()  # p(y, z|x)
    p_y = sum(p_y_K)
    return Posterior(
        found.question,
        (prediction.text if prediction else "") if answer is None else answer,
        prediction,
        float(p_S[said_S].sum()),
        p_y,
        tuple(
            Read(
                passage,
                found.p_z[rank],
                p_y_K[rank] / p_y if p_y else None,
                p_y_K[rank],
                model.best(rank_S == rank, rows, logit_S, passages),
                model.best((rank_S == rank) & y_S, rows, logit_S, passages),
            )
            for rank, passage in enumerate(passages)
        ),
    )
