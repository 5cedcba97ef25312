"""Answers that are spans of retrieved passages, from the scores of a reader (paper, section 3.2).

Shape suffixes: K passages that are read, S spans of all sequences.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realmops.answering.answer import Answer, ReadPassage, RetrievedPassages, Span
from realmops.answering.retrieval import RetrieveAndRead
from realmops.corpus.languages import ENGLISH
from realmops.questions.answer_matching import match_normal_form, matched_spans, normalize_answer, words_f1
from realmops.questions.question_sets import Question

CITATION_MARK = re.compile(r"\[\s*\d+(?:\s*[,;\u2013-]\s*\d+)*\s*\]")  # "[26]", "[3, 7]", "[4-6]"


class SpanAnswers(RetrieveAndRead):
    """Base class of models that answer with a span of a retrieved passage.

    Rows of spans are int64 S x 4: question, rank of the passage, start and end character in the passage's text.
    """

    candidate_spans: ClassVar[int] = 20  # spans with the highest scores, among which ``minimum_risk`` chooses
    temperature: ClassVar[float] = 1.0  # of their probabilities in ``minimum_risk``

    @abstractmethod
    def candidates(self, retrieved: Sequence[RetrievedPassages]) -> tuple[NDArray[np.floating], np.ndarray]:
        """Return the scores of all spans of the retrieved passages, S, and their rows, by question and rank."""

    @abstractmethod
    def log_p(self, score_S: Tensor) -> Tensor:
        """Return log p(span, z|x) of all spans of one question from their scores, in fp64."""

    @torch.no_grad()
    def read(self, retrieved: Sequence[RetrievedPassages], target_answers: Sequence[str | None] = ()) -> list[Answer]:
        score, rows = np.empty(0, np.float32), np.empty((0, 4), np.int64)
        passages = [item.passages for item in retrieved]
        if any(passages):
            score, rows = self.candidates(retrieved)
        is_answer_S = ~self.is_citation(rows, passages)
        gold_S = self._is_gold(rows, [item.question for item in retrieved], passages)[is_answer_S]
        score, rows = score[is_answer_S], rows[is_answer_S]
        answers = []
        for b, (item, y) in enumerate(zip(retrieved, target_answers or [None] * len(retrieved), strict=True)):
            selected_S = rows[:, 0] == b
            answers.append(self._answer(item, y, score[selected_S], rows[selected_S], gold_S[selected_S]))
        return answers

    def _is_gold(
        self, rows: np.ndarray, questions: Sequence[Question], passages: Sequence[Sequence[int]]
    ) -> np.ndarray:
        gold = [
            (b, rank, start, end)
            for b, (question, ids) in enumerate(zip(questions, passages, strict=True))
            for rank, passage in enumerate(ids)
            for start, end in matched_spans(self.snapshot.text(passage), question.answers, question.match_rule)
        ]
        return rows_among(rows, gold)

    def is_citation(self, rows: np.ndarray, passages: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
        is_citation_S = np.zeros(len(rows), bool)
        for b, ids in enumerate(passages):
            for rank, passage in enumerate(ids):
                marks = [match.span() for match in CITATION_MARK.finditer(self.snapshot.text(passage))]
                if not marks:
                    continue
                starts, ends = np.array(marks).T
                [indices] = np.nonzero((rows[:, 0] == b) & (rows[:, 1] == rank))
                mark = np.searchsorted(starts, rows[indices, 2], side="right") - 1
                is_citation_S[indices] = (mark >= 0) & (rows[indices, 3] <= ends[mark])
        return is_citation_S

    def _answer(
        self,
        retrieved: RetrievedPassages,
        y: str | None,
        score_S: NDArray[np.floating],
        rows: np.ndarray,
        gold_S: NDArray[np.bool_],
    ) -> Answer:
        """Choose the answer to one question among its spans."""
        passages, rank_S = retrieved.passages, rows[:, 1]
        best = self.choose(rows, score_S, passages)
        is_best_S = self.matches(best.text, rows, passages) if best else np.zeros(len(rows), bool)
        is_y_S = is_best_S if y is None else self.matches(y, rows, passages)
        p_S = np.zeros(0)
        log_p = -math.inf
        if best:
            log_p_S = self.log_p(torch.from_numpy(score_S).double())
            log_p = min(log_p_S[torch.from_numpy(is_best_S)].logsumexp(0).item(), 0.0)
            p_S = log_p_S.exp().numpy()
        p_y_K = np.bincount(rank_S, p_S * is_y_S, minlength=len(passages)).tolist()  # p(y, z|x)
        p_y = sum(p_y_K)

        def best_in(rank: int, selected_S: np.ndarray) -> Span | None:
            return self.best((rank_S == rank) & selected_S, rows, score_S, passages)

        all_S = np.ones(len(rows), bool)
        read = tuple(
            ReadPassage(passage, prior, p, p / p_y if p_y else None, best_in(rank, all_S), best_in(rank, is_y_S))
            for rank, (passage, prior, p) in enumerate(zip(passages, retrieved.log_prior, p_y_K, strict=True))
        )
        gold = self.best(gold_S, rows, score_S, passages)
        y = (best.text if best else "") if y is None else y
        return Answer(retrieved.question.question, best, log_p, y, p_y, read, gold, list(retrieved.ranked))

    def matches(self, text: str, rows: np.ndarray, passages: Sequence[int]) -> np.ndarray:
        """Return which spans of one question have the normal form of an answer text."""
        matches_S = np.zeros(len(rows), bool)
        for rank, passage in enumerate(passages):
            [indices] = np.nonzero(rows[:, 1] == rank)
            spans = rows[indices, 2:]
            matches_S[indices] = match_normal_form(self.snapshot.text(passage), text, spans, self.snapshot.languages[0])
        return matches_S

    def choose(self, rows: np.ndarray, score_S: NDArray[np.floating], passages: Sequence[int]) -> Span | None:
        if self.options.decoding == "best_span" or not len(rows):
            return self.best(np.ones(len(rows), bool), rows, score_S, passages)
        top = np.argsort(-score_S, kind="stable")[: self.candidate_spans]
        p = np.exp((score_S[top].astype(np.float64) - score_S[top[0]]) / self.temperature)
        spans = [self._to_span(rows[s], score_S[s], passages) for s in top]
        return spans[minimum_bayes_risk([span.text for span in spans], p, self.snapshot.languages[0])]

    def best(
        self, selected_S: np.ndarray, rows: np.ndarray, score_S: NDArray[np.floating], passages: Sequence[int]
    ) -> Span | None:
        indices = np.flatnonzero(selected_S)
        if not len(indices):
            return None
        s = indices[score_S[indices].argmax()]
        return self._to_span(rows[s], score_S[s], passages)

    def _to_span(self, row: np.ndarray, score: float, passages: Sequence[int]) -> Span:
        _, rank, start, end = row.tolist()
        passage = passages[rank]
        return Span(self.snapshot.text(passage)[start:end], passage, (start, end), float(score))


def rows_among(rows: np.ndarray, gold: Sequence[tuple[int, ...]]) -> NDArray[np.bool_]:
    """Return which rows of spans are among the gold ones."""
    if not gold or not len(rows):
        return np.zeros(len(rows), bool)
    gold_rows = np.array(gold)
    shape = np.maximum(rows.max(0), gold_rows.max(0)) + 1
    return np.isin(np.ravel_multi_index(rows.T, shape), np.ravel_multi_index(gold_rows.T, shape))


def minimum_bayes_risk(texts: Sequence[str], p: NDArray[np.float64], language: str = ENGLISH) -> int:
    """Return the index of the text with the highest expected score (minimum Bayes risk, Kumar and Byrne 2004).

    The score is the mean of exact match and F1. The candidates are most probable first, and the first one wins ties;
    ``p`` need not sum to 1.
    """
    p_of: dict[str, float] = {}
    forms = [normalize_answer(text, language) for text in texts]
    for form, share in zip(forms, p.tolist(), strict=True):
        p_of[form] = p_of.get(form, 0.0) + share
    words = {form: form.split() for form in p_of}

    def expected_score(answer: str) -> float:
        return sum(share * ((answer == form) + words_f1(words[answer], words[form])) for form, share in p_of.items())

    return forms.index(max(p_of, key=expected_score))
