"""Extractive question answering by ORQA's span head (paper, section 3.2).

A single softmax is over the spans of all passages that were read; the score of a span is the reader's score plus the
retriever's f(x, z).

Shape suffixes: K passages that are read, D width, T wordpieces in the batch, S spans of all sequences.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realmops.answering.answer import RetrievedPassages
from realmops.answering.span_answers import SpanAnswers, rows_among
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import autocast, to_device
from realmops.model.packed import PackedBatch
from realmops.model.reader import Reader, enumerate_spans
from realmops.model.reader_files import load_reader
from realmops.model.sequences import join_reader
from realmops.questions.answer_matching import answer_token_spans
from realmops.questions.question_sets import Question


class OpenQa(SpanAnswers):
    """Model that answers with a span of a retrieved passage, scored by ORQA's span head.

    In the methods ``spans``, ``gold`` and ``is_gold``, for training, rows are in wordpieces instead of characters.
    """

    kind = "spans"
    reader: Reader

    def __post_init__(self) -> None:
        assert self.reader.spans is not None, "the reader needs a span head"
        super().__post_init__()

    @classmethod
    def load_reader(cls, folder: Path, snapshot: Snapshot) -> Reader:
        return load_reader(folder, snapshot.vocabulary_hash)

    def spans(self, tokens: Sequence[np.ndarray], passages: Sequence[Sequence[int]]) -> tuple[Tensor, np.ndarray]:
        """Compute the reader's scores of all spans of up to ``answer_wordpieces`` in the passages of each question.

        Scores [S], and rows [S, 4]: question, rank of the passage, first and last wordpiece in the body.
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
        """Compute the reader's scores S of all spans in bodies, each read with a question, and the rows of spans."""
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
        gold = [
            (b, *span)
            for b, (question, ids) in enumerate(zip(questions, passages, strict=True))
            for span in sorted(self.gold(question, ids))
        ]
        return rows_among(rows, gold)

    @torch.no_grad()
    def candidates(self, retrieved: Sequence[RetrievedPassages]) -> tuple[NDArray[np.floating], np.ndarray]:
        passages = [item.passages for item in retrieved]
        score_S, rows = self.spans([self.wordpieces(item.question.question) for item in retrieved], passages)
        reading = np.float32(self.retriever.mixture.reading)
        relevance = [np.array(item.relevance, np.float32) for item in retrieved]
        logits = score_S.float().cpu().numpy()
        for b, ids in enumerate(passages):
            for rank, passage in enumerate(ids):
                selected = np.flatnonzero((rows[:, 0] == b) & (rows[:, 1] == rank))
                chars = self.snapshot.chars(passage)
                logits[selected] += reading * relevance[b][rank]
                rows[selected, 2] = chars[rows[selected, 2], 0]
                rows[selected, 3] = chars[rows[selected, 3], 1]
        return logits, rows

    def log_p(self, score_S: Tensor) -> Tensor:
        return score_S.log_softmax(0)
