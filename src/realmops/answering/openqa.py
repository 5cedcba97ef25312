"""Answering questions by a span of a passage: which spans there are, and which one is the answer (section 3.2, ORQA).

One softmax goes over all answer spans of the passages that were read; the score of a span is the reader's plus the
retriever's f(x, z).

Shape suffixes: K passages that are read, D width, T wordpieces of all sequences, S answer spans of all sequences.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realmops.answering.answer import Answer, Found, Read, Span
from realmops.answering.decoding import CANDIDATES, minimum_risk
from realmops.answering.retrieval import RetrieveAndRead
from realmops.corpus.question_sets import Question
from realmops.devices import autocast, send
from realmops.model.likelihood import log_sum_correct
from realmops.model.packed import Packed
from realmops.model.reader import enumerate_spans
from realmops.model.sequences import join_reader
from realmops.text.answer_matching import answer_token_spans, same_form


class OpenQa(RetrieveAndRead):
    """Retriever and reader as one model that answers by a span, with ORQA's span head."""

    kind = "spans"

    def __post_init__(self) -> None:
        assert self.reader.spans is not None, "the reader needs a span head"
        super().__post_init__()

    def spans(self, tokens: Sequence[np.ndarray], passages: Sequence[Sequence[int]]) -> tuple[Tensor, np.ndarray]:
        """Scores of all spans of up to ``answer_wordpieces`` in the passages of each question.

        Returns the scores S and, for each, the row (question, rank of the passage, first wordpiece of the
        body, last wordpiece).
        """
        limit = self.options.query_wordpieces - 2
        read = [(b, rank, passage) for b, ids in enumerate(passages) for rank, passage in enumerate(ids)]
        bodies = [self.reader.document(self.snapshot, passage) for _, _, passage in read]
        score_S, spans = self.score_spans([tokens[b][:limit] for b, _, _ in read], bodies)
        counts = [len(some) for some in spans]
        of_pair = np.repeat([[b, rank] for b, rank, _ in read], counts, axis=0)
        return score_S, np.column_stack([of_pair, np.concatenate(spans)])

    def score_spans(
        self, questions: Sequence[np.ndarray], bodies: Sequence[np.ndarray]
    ) -> tuple[Tensor, list[np.ndarray]]:
        """The reader's scores S of all spans in bodies that are each read behind a question.

        Also, for each body, the rows (first wordpiece of the body, last wordpiece) of its spans.
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
            hidden_TD = self.reader.encode(Packed(sequences, segments))
            score_S: Tensor = self.reader.spans(hidden_TD, *send(self.device, torch.cat(starts), torch.cat(ends)))
        return score_S, spans

    def gold(self, question: Question, passages: Sequence[int]) -> set[tuple[int, int, int]]:
        """(rank, first, last wordpiece) of every span that matches an answer, cut by character offsets."""
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
        """For each row of ``spans`` whether it matches an answer."""
        gold = [
            (b, *span)
            for b, (question, ids) in enumerate(zip(questions, passages, strict=True))
            for span in sorted(self.gold(question, ids))
        ]
        if not gold:
            return np.zeros(len(rows), bool)
        wanted = np.array(gold)
        shape = np.maximum(rows.max(0), wanted.max(0)) + 1
        return np.isin(np.ravel_multi_index(rows.T, shape), np.ravel_multi_index(wanted.T, shape))

    @torch.no_grad()
    def read(self, found: Sequence[Found], asked_about: Sequence[str | None] = ()) -> list[Answer]:
        """Read what was found for some questions, all in one packed batch.

        ``asked_about`` has an answer y for each question whose probability is wanted; None is the answer given.
        """
        score, rows = np.empty(0, np.float32), np.empty((0, 4), np.int64)
        if any(one.passages for one in found):
            tokens = [self.wordpieces(one.question.question) for one in found]
            score_S, rows = self.spans(tokens, [one.passages for one in found])
            score = score_S.float().cpu().numpy()
        gold_S = self.is_gold(rows, [one.question for one in found], [one.passages for one in found])
        answers = []
        for b, (one, y) in enumerate(zip(found, asked_about or [None] * len(found), strict=True)):
            mine = rows[:, 0] == b
            answers.append(self._answer(one, y, score[mine], rows[mine], gold_S[mine]))
        return answers

    def _answer(
        self, found: Found, y: str | None, score_S: NDArray[np.float32], rows: np.ndarray, gold_S: NDArray[np.bool_]
    ) -> Answer:
        """``rows`` are those of ``spans`` for this question."""
        passages, rank_S = found.passages, rows[:, 1]
        reading = np.float32(self.retriever.mixture.reading)
        logit_S = score_S + reading * np.array(found.relevance, np.float32)[rank_S]
        best = self.choose(rows, logit_S, passages)
        says_S = self.says(best.text, rows, passages) if best else np.zeros(len(rows), bool)
        y_S = says_S if y is None else self.says(y, rows, passages)
        p_S = np.zeros(0)
        log_p = -math.inf
        if best:
            exact_S = torch.from_numpy(logit_S).double()
            log_p = log_sum_correct(exact_S[None], torch.from_numpy(says_S)[None]).item()
            p_S = exact_S.softmax(0).numpy()
        p_y_K = np.bincount(rank_S, p_S * y_S, minlength=len(passages)).tolist()  # p(y, z|x)
        p_y = sum(p_y_K)

        def of_passage(rank: int, which_S: np.ndarray) -> Span | None:
            return self.best((rank_S == rank) & which_S, rows, logit_S, passages)

        all_S = np.ones(len(rows), bool)
        read = tuple(
            Read(passage, prior, p, p / p_y if p_y else None, of_passage(rank, all_S), of_passage(rank, y_S))
            for rank, (passage, prior, p) in enumerate(zip(passages, found.log_prior, p_y_K, strict=True))
        )
        gold = self.best(gold_S, rows, logit_S, passages)
        said = (best.text if best else "") if y is None else y
        return Answer(found.question.question, best, log_p, said, p_y, read, gold, list(found.ranked))

    def says(self, text: str, rows: np.ndarray, read: Sequence[int]) -> np.ndarray:
        """Which spans of one question, rows of ``spans``, are an answer y: those with the normal form of its text."""
        says_S = np.zeros(len(rows), bool)
        for rank, passage in enumerate(read):
            [of_z] = np.nonzero(rows[:, 1] == rank)
            chars = self.snapshot.chars(passage)
            spans = np.column_stack([chars[rows[of_z, 2], 0], chars[rows[of_z, 3], 1]])
            says_S[of_z] = same_form(self.snapshot.text(passage), text, spans, self.snapshot.languages[0])
        return says_S

    def choose(self, rows: np.ndarray, logit_S: np.ndarray, read: Sequence[int]) -> Span | None:
        """The answer to one question among all its spans, rows of ``spans``, by ``finetune.decoding``."""
        if self.options.decoding == "best_span" or not len(rows):
            return self.best(np.ones(len(rows), bool), rows, logit_S, read)
        places = np.argsort(-logit_S, kind="stable")[:CANDIDATES]
        p = np.exp(logit_S[places].astype(np.float64) - logit_S[places[0]])
        spans = [self._cut(rows[place], logit_S[place], read) for place in places]
        return spans[minimum_risk([span.text for span in spans], p, self.snapshot.languages[0])]

    def best(self, chosen_S: np.ndarray, rows: np.ndarray, logit_S: np.ndarray, read: Sequence[int]) -> Span | None:
        """The best of the chosen spans of one question, rows of ``spans``."""
        places = np.flatnonzero(chosen_S)
        if not len(places):
            return None
        place = places[logit_S[places].argmax()]
        return self._cut(rows[place], logit_S[place], read)

    def _cut(self, row: np.ndarray, score: float, read: Sequence[int]) -> Span:
        """A span, a row of ``spans``, cut from the text by characters."""
        _, rank, first, last = row.tolist()
        characters = self.snapshot.chars(read[rank])
        start, end = int(characters[first, 0]), int(characters[last, 1])
        return Span(self.snapshot.text(read[rank])[start:end], read[rank], (start, end), float(score))
