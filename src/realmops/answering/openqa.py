"""Extractive question answering: score the spans of retrieved passages and choose the answer (section 3.2, ORQA).

A single softmax is over the spans of all passages that were read; the score of a span is the reader's score plus the
retriever's f(x, z).

Shape suffixes: K passages that are read, D width, T wordpieces in the batch, S spans of all sequences.
"""

import math
import re
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realmops.answering.answer import Answer, ReadPassage, RetrievedPassages, Span
from realmops.answering.decoding import CANDIDATES, minimum_bayes_risk
from realmops.answering.retrieval import RetrieveAndRead
from realmops.corpus.question_sets import Question
from realmops.devices import autocast, to_device
from realmops.model.likelihood import log_sum_correct
from realmops.model.packed import PackedBatch
from realmops.model.reader import enumerate_spans
from realmops.model.sequences import join_reader
from realmops.text.answer_matching import answer_token_spans, match_normal_form

CITATION_MARK = re.compile(r"\[\s*\d+(?:\s*[,;\u2013-]\s*\d+)*\s*\]")  # "[26]", "[3, 7]", "[4-6]"


class OpenQa(RetrieveAndRead):
    """Model that answers with a span of a retrieved passage, scored by ORQA's span head."""

    kind = "spans"

    def __post_init__(self) -> None:
        assert self.reader.spans is not None, "the reader needs a span head"
        super().__post_init__()

    def spans(self, tokens: Sequence[np.ndarray], passages: Sequence[Sequence[int]]) -> tuple[Tensor, np.ndarray]:
        """Compute the reader's scores of all spans of up to ``answer_wordpieces`` in the passages of each question.

        Args:
            tokens: wordpieces of each question.
            passages: ids of the passages of each question.

        Returns:
            Scores S, and rows S x 4: question, rank of the passage, first and last wordpiece in the body.
        """
        limit = self.options.query_wordpieces - 2
        triples = [(b, rank, passage) for b, ids in enumerate(passages) for rank, passage in enumerate(ids)]
        bodies = [self.reader.document(self.snapshot, passage) for _, _, passage in triples]
        score_S, spans = self.score_spans([tokens[b][:limit] for b, _, _ in triples], bodies)
        counts = [len(rows) for rows in spans]
        prefix_S2 = np.repeat([[b, rank] for b, rank, _ in triples], counts, axis=0)
        return score_S, np.column_stack([prefix_S2, np.concatenate(spans)])

    def score_spans(
        self, questions: Sequence[np.ndarray], bodies: Sequence[np.ndarray]
    ) -> tuple[Tensor, list[np.ndarray]]:
        """Compute the reader's scores S of all spans in bodies, each read with a question.

        Also return the rows (first, last wordpiece in the body) of each body's spans.
        """
        assert self.reader.spans is not None
        sequences, segments, starts, ends, spans = [], [], [], [], []
        offset = 0
        for question, body in zip(questions, bodies, strict=True):
            sequence, segment, first = join_reader(question, body, self.special, self.options.reader_wordpieces)
            start, end = enumerate_spans(first, len(sequence) - 1 - first, self.options.answer_wordpieces)
            starts.append(torch.from_numpy(offset + start))
            ends.append(torch.from_numpy(offset + end))
            spans.append(np.column_stack([start - first, end - first]))
            sequences.append(sequence)
            segments.append(segment)
            offset += len(sequence)
        with autocast(self.device, self.dtype):
            hidden_TD = self.reader.encode(PackedBatch(sequences, segments))
            score_S: Tensor = self.reader.spans(hidden_TD, *to_device(self.device, torch.cat(starts), torch.cat(ends)))
        return score_S, spans

    def gold(self, question: Question, passages: Sequence[int]) -> set[tuple[int, int, int]]:
        """Return (rank, first, last wordpiece) of every span that matches an answer, by character offsets."""
        if not question.answers:
            return set()
        return {
            (rank, first, last - 1)
            for rank, passage in enumerate(passages)
            for first, last in answer_token_spans(
                self.snapshot.text(passage),
                question.answers,
                self.snapshot.chars(passage),
                rule=question.match_rule,
                max_wordpieces=self.options.answer_wordpieces,
            )
        }

    def is_gold(self, rows: np.ndarray, questions: Sequence[Question], passages: Sequence[Sequence[int]]) -> np.ndarray:
        """Return whether each row of ``spans`` matches an answer."""
        gold = [
            (b, *span)
            for b, (question, ids) in enumerate(zip(questions, passages, strict=True))
            for span in sorted(self.gold(question, ids))
        ]
        if not gold:
            return np.zeros(len(rows), bool)
        gold_rows = np.array(gold)
        shape = np.maximum(rows.max(0), gold_rows.max(0)) + 1
        return np.isin(np.ravel_multi_index(rows.T, shape), np.ravel_multi_index(gold_rows.T, shape))

    def is_citation(self, rows: np.ndarray, passages: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
        """Return which spans, rows of ``spans``, are in a citation mark such as "[26]", which is never an answer."""
        is_citation_S = np.zeros(len(rows), bool)
        for b, ids in enumerate(passages):
            for rank, passage in enumerate(ids):
                marks = [match.span() for match in CITATION_MARK.finditer(self.snapshot.text(passage))]
                if not marks:
                    continue
                starts, ends = np.array(marks).T
                [indices] = np.nonzero((rows[:, 0] == b) & (rows[:, 1] == rank))
                chars = self.snapshot.chars(passage)
                mark = np.searchsorted(starts, chars[rows[indices, 2], 0], side="right") - 1
                is_citation_S[indices] = (mark >= 0) & (chars[rows[indices, 3], 1] <= ends[mark])
        return is_citation_S

    @torch.no_grad()
    def read(self, retrieved: Sequence[RetrievedPassages], target_answers: Sequence[str | None] = ()) -> list[Answer]:
        """Read the retrieved passages of all questions in one packed batch.

        Args:
            retrieved: passages of each question.
            target_answers: per question, an answer y to evaluate, or None for the answer that is chosen.
        """
        score, rows = np.empty(0, np.float32), np.empty((0, 4), np.int64)
        passages = [item.passages for item in retrieved]
        if any(passages):
            tokens = [self.wordpieces(item.question.question) for item in retrieved]
            score_S, rows = self.spans(tokens, passages)
            score = score_S.float().cpu().numpy()
        is_answer_S = ~self.is_citation(rows, passages)
        gold_S = self.is_gold(rows, [item.question for item in retrieved], passages)[is_answer_S]
        score, rows = score[is_answer_S], rows[is_answer_S]
        answers = []
        for b, (item, y) in enumerate(zip(retrieved, target_answers or [None] * len(retrieved), strict=True)):
            selected_S = rows[:, 0] == b
            answers.append(self._answer(item, y, score[selected_S], rows[selected_S], gold_S[selected_S]))
        return answers

    def _answer(
        self,
        retrieved: RetrievedPassages,
        y: str | None,
        score_S: NDArray[np.float32],
        rows: np.ndarray,
        gold_S: NDArray[np.bool_],
    ) -> Answer:
        """Choose the answer to one question; ``rows`` are its rows of ``spans``."""
        passages, rank_S = retrieved.passages, rows[:, 1]
        reading = np.float32(self.retriever.mixture.reading)
        logit_S = score_S + reading * np.array(retrieved.relevance, np.float32)[rank_S]
        best = self.choose(rows, logit_S, passages)
        is_best_S = self.matches(best.text, rows, passages) if best else np.zeros(len(rows), bool)
        is_y_S = is_best_S if y is None else self.matches(y, rows, passages)
        p_S = np.zeros(0)
        log_p = -math.inf
        if best:
            exact_S = torch.from_numpy(logit_S).double()
            log_p = log_sum_correct(exact_S[None], torch.from_numpy(is_best_S)[None]).item()
            p_S = exact_S.softmax(0).numpy()
        p_y_K = np.bincount(rank_S, p_S * is_y_S, minlength=len(passages)).tolist()  # p(y, z|x)
        p_y = sum(p_y_K)

        def best_in(rank: int, selected_S: np.ndarray) -> Span | None:
            return self.best((rank_S == rank) & selected_S, rows, logit_S, passages)

        all_S = np.ones(len(rows), bool)
        read = tuple(
            ReadPassage(passage, prior, p, p / p_y if p_y else None, best_in(rank, all_S), best_in(rank, is_y_S))
            for rank, (passage, prior, p) in enumerate(zip(passages, retrieved.log_prior, p_y_K, strict=True))
        )
        gold = self.best(gold_S, rows, logit_S, passages)
        y = (best.text if best else "") if y is None else y
        return Answer(retrieved.question.question, best, log_p, y, p_y, read, gold, list(retrieved.ranked))

    def matches(self, text: str, rows: np.ndarray, passages: Sequence[int]) -> np.ndarray:
        """Return which spans of one question, rows of ``spans``, have the normal form of an answer text."""
        matches_S = np.zeros(len(rows), bool)
        for rank, passage in enumerate(passages):
            [indices] = np.nonzero(rows[:, 1] == rank)
            chars = self.snapshot.chars(passage)
            spans = np.column_stack([chars[rows[indices, 2], 0], chars[rows[indices, 3], 1]])
            matches_S[indices] = match_normal_form(self.snapshot.text(passage), text, spans, self.snapshot.languages[0])
        return matches_S

    def choose(self, rows: np.ndarray, logit_S: np.ndarray, passages: Sequence[int]) -> Span | None:
        """Choose the answer to one question among its spans, rows of ``spans``, by ``finetune.decoding``."""
        if self.options.decoding == "best_span" or not len(rows):
            return self.best(np.ones(len(rows), bool), rows, logit_S, passages)
        top = np.argsort(-logit_S, kind="stable")[:CANDIDATES]
        p = np.exp(logit_S[top].astype(np.float64) - logit_S[top[0]])
        spans = [self._to_span(rows[s], logit_S[s], passages) for s in top]
        return spans[minimum_bayes_risk([span.text for span in spans], p, self.snapshot.languages[0])]

    def best(
        self, selected_S: np.ndarray, rows: np.ndarray, logit_S: np.ndarray, passages: Sequence[int]
    ) -> Span | None:
        """Return the best of the selected spans of one question, rows of ``spans``."""
        indices = np.flatnonzero(selected_S)
        if not len(indices):
            return None
        s = indices[logit_S[indices].argmax()]
        return self._to_span(rows[s], logit_S[s], passages)

    def _to_span(self, row: np.ndarray, score: float, passages: Sequence[int]) -> Span:
        """Convert a row of ``spans`` to a span with its text and character offsets."""
        _, rank, first, last = row.tolist()
        passage = passages[rank]
        characters = self.snapshot.chars(passage)
        start, end = int(characters[first, 0]), int(characters[last, 1])
        return Span(self.snapshot.text(passage)[start:end], passage, (start, end), float(score))
