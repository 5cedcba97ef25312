"""Open-domain question answering: fine-tune query tower and reader over frozen passages (paper, section 3.2; ORQA).

Shape suffixes: B questions, P passages, K passages that are read, E embedding width, D reader width,
T wordpieces of all sequences, S answer spans of all sequences, W most spans of one question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realmops.artifacts import seed_for
from realmops.bert import Packed, autocast
from realmops.config import Finetune, Optimiser
from realmops.corpus.answers import answer_token_spans, contains_answer
from realmops.corpus.questions import Question
from realmops.corpus.snapshot import Snapshot
from realmops.index.mips import search
from realmops.model.joins import SpecialTokens, join_query, join_reader
from realmops.model.likelihood import marginal_span_loss
from realmops.model.reader import Reader, enumerate_spans
from realmops.model.retriever import Retriever
from realmops.train.loop import Context, fit
from realmops.train.optimiser import Group

ANSWERED_TOGETHER = 4  # questions; the spans of more are tensors of hundreds of MB, slower and no better


@dataclass(frozen=True)
class Span:
    """A span that the reader could choose: the text between two characters of a passage.

    ``score`` is the reader's plus the retriever's f(x, z); one softmax goes over all spans of a question.
    """

    text: str
    passage: int
    characters: tuple[int, int]
    score: float


@dataclass(frozen=True)
class Answer:
    """The best span of one question, and the evidence that was read for it."""

    best: Span | None
    best_of_passage: list[Span | None]  # of each passage that was read
    best_gold: Span | None  # of the spans that match an answer
    passages: list[int]  # read, best first
    log_prior: list[float]  # log p(z|x) over the passages that were read
    ranked: list[int]  # the top passages of the whole corpus, for recall

    @property
    def text(self) -> str:
        """The answer, empty when there was no span to choose."""
        return self.best.text if self.best else ""


class OpenQa:
    """Retriever and reader as one question answering model over a corpus whose embeddings are fixed."""

    def __init__(
        self,
        retriever: Retriever,
        reader: Reader,
        snapshot: Snapshot,
        embedding_PE: Tensor,
        options: Finetune,
        dtype: torch.dtype,
    ) -> None:
        assert reader.spans is not None, "the reader needs a span head"
        self.retriever, self.reader, self.snapshot, self.options, self.dtype = (
            retriever,
            reader,
            snapshot,
            options,
            dtype,
        )
        self.device = reader.bert.word.weight.device
        self.embedding_PE = embedding_PE.to(self.device)
        self.special = SpecialTokens.of(snapshot.tokenizer)
        self._correct: dict[str, dict[int, bool]] = {}

    def relevance(self, tokens: Sequence[np.ndarray], k: int) -> tuple[Tensor, Tensor]:
        """Scores f(x, z) and ids of the top k passages, best first, B x k, with gradient into the query tower."""
        queries = Packed([join_query(t, self.special, self.options.query_wordpieces) for t in tokens])
        with autocast(self.device, self.dtype):
            query_BE = self.retriever.query(queries)
        if k >= len(self.embedding_PE):
            score_BP: Tensor = self.retriever.scale * query_BE @ self.embedding_PE.T
            return torch.sort(score_BP, dim=1, descending=True)
        with torch.no_grad():
            _, id_BK = search(query_BE.detach(), self.embedding_PE, k)
        return self.retriever.relevance(query_BE, self.embedding_PE[id_BK]), id_BK

    def wordpieces(self, text: str) -> np.ndarray:
        """A text's wordpieces."""
        return np.array(self.snapshot.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def is_correct(self, question: Question, passages: Sequence[int]) -> np.ndarray:
        """Whether each passage contains an answer, by the question's rule."""
        known = self._correct.setdefault(question.id, {})
        for p in passages:
            if p not in known:
                known[p] = contains_answer(self.snapshot.text(p), question.answers, question.match_rule)
        return np.array([known[p] for p in passages], dtype=bool)

    def spans(self, tokens: Sequence[np.ndarray], passages: Sequence[Sequence[int]]) -> tuple[Tensor, np.ndarray]:
        """Scores of all spans of up to ``answer_wordpieces`` in the passages of each question.

        Returns the scores S and, for each, the row (question, rank of the passage, first wordpiece of the
        body, last wordpiece).
        """
        options = self.options
        sequences, segments, starts, ends, rows = [], [], [], [], []
        offset = 0
        for b, (question, ids) in enumerate(zip(tokens, passages, strict=True)):
            x = question[: options.query_wordpieces - 2]
            for rank, passage in enumerate(ids):
                body = self.snapshot.body(passage)
                sequence, segment, first = join_reader(x, body, self.special, options.reader_wordpieces)
                length = len(sequence) - 1 - first
                start, end = enumerate_spans(first, length, options.answer_wordpieces)
                starts.append(offset + start)
                ends.append(offset + end)
                rows.append(
                    np.column_stack([np.full(len(start), b), np.full(len(start), rank), start - first, end - first])
                )
                sequences.append(sequence)
                segments.append(segment)
                offset += len(sequence)
        assert self.reader.spans is not None
        with autocast(self.device, self.dtype):
            hidden_TD = self.reader.bert(Packed(sequences, segments))
            score_S = self.reader.spans(
                hidden_TD,
                torch.from_numpy(np.concatenate(starts)).to(self.device),
                torch.from_numpy(np.concatenate(ends)).to(self.device),
            )
        return score_S, np.concatenate(rows)

    def gold(self, question: Question, passages: Sequence[int]) -> set[tuple[int, int, int]]:
        """(rank, first, last wordpiece) of every span that matches an answer, cut by character offsets."""
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

    def _is_gold(
        self, rows: np.ndarray, questions: Sequence[Question], passages: Sequence[Sequence[int]]
    ) -> np.ndarray:
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

    def loss(self, questions: Sequence[Question], tokens: Sequence[np.ndarray]) -> tuple[Tensor, dict[str, float]]:
        """The early retriever loss over the top passages plus the span loss over those that are read."""
        options = self.options
        relevance_BP, id_BP = self.relevance(tokens, options.retriever_candidates)
        ids = id_BP.cpu().tolist()
        correct_BP = torch.from_numpy(
            np.stack([self.is_correct(q, row) for q, row in zip(questions, ids, strict=True)])
        )
        early_B = marginal_span_loss(relevance_BP, correct_BP.to(self.device))
        read = [row[: options.reader_candidates] for row in ids]
        score_S, rows = self.spans(tokens, read)
        rank_S, question_S = torch.from_numpy(rows[:, 1]).to(self.device), torch.from_numpy(rows[:, 0]).to(self.device)
        logit_S = score_S + relevance_BP[question_S, rank_S]
        is_gold = torch.from_numpy(self._is_gold(rows, questions, read)).to(self.device)
        logit_BW, gold_BW = _by_question(logit_S, is_gold, rows[:, 0], len(questions))
        span_B = marginal_span_loss(logit_BW, gold_BW)
        metrics = {
            "early_loss": early_B.mean().item(),
            "span_loss": span_B.mean().item(),
            "no_correct_passage": float((~correct_BP.any(-1)).float().mean()),
            "no_correct_span": float((~gold_BW.any(-1)).float().mean()),
            "recall_at_5": float(correct_BP[:, :5].any(-1).float().mean()),
        }
        return (early_B + span_B).mean(), metrics

    @torch.no_grad()
    def answer(
        self,
        questions: Sequence[Question],
        *,
        ranked: int,
        batch_size: int,
        given: np.ndarray | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Answer questions; ``ranked`` passages of each are returned for recall.

        ``given`` (questions x ranked, -1 for none) takes the place of the retriever: its first passages are
        read, all with the same p(z|x).
        """
        self.retriever.eval()
        self.reader.eval()
        answers: list[Answer] = []
        for start in range(0, len(questions), batch_size):
            batch = questions[start : start + batch_size]
            tokens = [self.wordpieces(q.question) for q in batch]
            if given is None:
                relevance_BK, id_BK = self.relevance(tokens, max(ranked, self.options.reader_candidates))
            else:
                id_BK = torch.from_numpy(given[start : start + batch_size])
                relevance_BK = torch.zeros(id_BK.shape, device=self.device)
            relevance_BK = relevance_BK[:, : self.options.reader_candidates]
            read = [[p for p in row if p >= 0] for row in id_BK[:, : self.options.reader_candidates].tolist()]
            score_S, rows = self.spans(tokens, read)
            at_S = torch.from_numpy(rows).to(self.device)
            logit_S = (score_S + relevance_BK[at_S[:, 0], at_S[:, 1]]).cpu().numpy()
            gold_S = self._is_gold(rows, batch, read)
            log_prior_BK = relevance_BK.log_softmax(-1).cpu().tolist()
            for b in range(len(batch)):
                mine = rows[:, 0] == b
                at = [mine & (rows[:, 1] == rank) for rank in range(len(read[b]))]
                best, gold, *best_of_passage = (
                    self._best(chosen, rows, logit_S, read[b]) for chosen in (mine, mine & gold_S, *at)
                )
                ranked_ids = id_BK[b, :ranked].tolist()
                answers.append(Answer(best, best_of_passage, gold, read[b], log_prior_BK[b], ranked_ids))
            if progress is not None:
                progress(len(batch))
        return answers

    def _best(self, chosen_S: np.ndarray, rows: np.ndarray, logit_S: np.ndarray, read: Sequence[int]) -> Span | None:
        """The best of the chosen spans of one question, cut from the text by characters."""
        places = np.flatnonzero(chosen_S)
        if not len(places):
            return None
        place = places[logit_S[places].argmax()]
        _, rank, first, last = rows[place].tolist()
        characters = self.snapshot.chars(read[rank])
        start, end = int(characters[first, 0]), int(characters[last, 1])
        text = self.snapshot.text(read[rank])[start:end]
        return Span(text, read[rank], (start, end), float(logit_S[place]))


def _by_question(logit_S: Tensor, gold_S: Tensor, question_S: np.ndarray, count: int) -> tuple[Tensor, Tensor]:
    """Rows of spans, grouped by question, as B x W with -inf where a question has fewer spans."""
    sizes = np.bincount(question_S, minlength=count)
    width = int(sizes.max())
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    place = torch.from_numpy(question_S * width + np.arange(len(question_S)) - first[question_S]).to(logit_S.device)
    logit_BW = logit_S.new_full((count * width,), -torch.inf).index_copy(0, place, logit_S)
    gold_BW = gold_S.new_zeros(count * width).index_copy(0, place, gold_S)
    return logit_BW.view(count, width), gold_BW.view(count, width)


def finetune_steps(questions: int, options: Finetune) -> int:
    """Steps of so many epochs; the last one may be cut short."""
    return math.ceil(options.epochs * math.ceil(questions / options.batch_size))


def finetune(
    context: Context, model: OpenQa, questions: Sequence[Question], options: Finetune, optimiser: Optimiser
) -> None:
    """Train query tower and reader; every epoch sees the questions in an order of its own."""
    tokens = [model.wordpieces(q.question) for q in questions]
    per_epoch = -(-len(questions) // options.batch_size)
    orders: dict[int, np.ndarray] = {}

    def step_loss(step: int) -> tuple[Tensor, dict[str, float]]:
        model.retriever.train()
        model.reader.train()
        epoch, place = divmod(step, per_epoch)
        if epoch not in orders:
            rng = np.random.default_rng(seed_for(context.seed, context.stream, "order", epoch))
            orders.clear()
            orders[epoch] = rng.permutation(len(questions))
        rows = orders[epoch][place * options.batch_size : (place + 1) * options.batch_size]
        return model.loss([questions[i] for i in rows], [tokens[i] for i in rows])

    groups = [
        Group("query", model.retriever.query, options.retriever_learning_rate),
        Group("reader", model.reader, options.reader_learning_rate),
    ]
    fit(
        context,
        groups,
        optimiser,
        step_loss,
        steps=finetune_steps(len(questions), options),
        checkpoint_every=options.checkpoint_every,
    )
