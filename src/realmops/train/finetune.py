"""Open-domain question answering: fine-tune query tower and reader over frozen passages (paper, section 3.2; ORQA).

Shape suffixes: B questions, P passages, K passages that are read, E embedding width, D reader width,
T wordpieces of all sequences, S answer spans of all sequences, W most spans of one question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from realmops.bert import Packed, autocast, send
from realmops.config import ClosedBookOptions, Finetune, Optimiser
from realmops.corpus.answers import answer_token_spans, contains_answer, same_form
from realmops.corpus.cloze import Sources
from realmops.corpus.questions import Question
from realmops.corpus.snapshot import Snapshot
from realmops.index.embed import Progress, embed, query_sequences, untold
from realmops.index.hybrid import Found, Hybrid, Words
from realmops.index.mips import PassageIndex
from realmops.model.likelihood import hard_em_span_loss, log_prior, log_sum_correct, marginal_span_loss
from realmops.model.reader import Reader, enumerate_spans
from realmops.model.retriever import Retriever
from realmops.model.sequences import SpecialTokens, join_query, join_reader
from realmops.train.decoding import CANDIDATES, minimum_risk
from realmops.train.loop import Context, Later, epoch_rows, fit
from realmops.train.optimiser import Group

Ranker = Callable[[str, int], np.ndarray]  # a question's k best passages, best first, -1 for none
HYBRID_DEPTH = 100  # passages that embeddings and words find each, of which the best are taken
ANSWERED_TOGETHER = 4  # questions; the spans of more are tensors of hundreds of MB, slower and no better
_QUESTIONS_IN_MEMORY = 1024


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
    said: str = ""  # by a model that reads nothing
    log_p: float = -math.inf  # log p(y|x) of the text, the sum over passages; 0 has none

    @property
    def text(self) -> str:
        """The answer, empty when there was no span to choose."""
        return self.best.text if self.best else self.said


@dataclass(eq=False)
class OpenQa:
    """Retriever and reader as one question answering model over a corpus whose embeddings are fixed.

    Where a ``ranker`` is given, it finds the passages of a question, all with the same p(z|x): nothing of the retriever
    is used or learns, and no embeddings are needed.
    """

    retriever: Retriever
    reader: Reader
    snapshot: Snapshot
    passages: PassageIndex | None
    options: Finetune
    dtype: torch.dtype
    ranker: Ranker | None = None
    words: Words | None = None

    def __post_init__(self) -> None:
        assert self.reader.spans is not None, "the reader needs a span head"
        self.device = self.reader.bert.word.weight.device
        self.special = SpecialTokens.of(self.snapshot.tokenizer)
        self.sources = Sources(self.snapshot)
        self._correct: dict[str, dict[int, bool]] = {}
        encode = self.snapshot.tokenizer.encode
        # A question is looked at several times: its length is checked, it is embedded, and it is read.
        self._wordpieces = lru_cache(_QUESTIONS_IN_MEMORY)(
            lambda text: np.array(encode(text, add_special_tokens=False).ids, dtype=np.int64)
        )

    def relevance(self, questions: Sequence[str], k: int) -> tuple[Tensor, Tensor]:
        """Scores f(x, z) of the top k passages, best first, B x k, with gradient into the query tower; ids on the CPU.

        A ranker's scores are 0; where it finds fewer passages the id is -1 and the score -inf.
        """
        if self.ranker is not None:
            id_BK = torch.from_numpy(np.stack([self.ranker(question, k) for question in questions]))
            (missing_BK,) = send(self.device, id_BK < 0)
            return torch.zeros(id_BK.shape, device=self.device).masked_fill(missing_BK, -torch.inf), id_BK
        assert self.passages is not None, "without embeddings there must be a ranker"
        embedding_PE = self.passages.embedding_PE
        with autocast(self.device, self.dtype):
            query_BE = self.retriever.query(Packed(self.queries(questions)))
        if self.hybrid:
            found = self._search(query_BE, questions, k, max(k, HYBRID_DEPTH))
            place_BK, missing_BK = found.id_QK.clamp(min=0), found.id_QK < 0
            place_BK, missing_BK, words_BK = send(embedding_PE.device, place_BK, missing_BK, found.words_QK.float())
            dense_BK = self.retriever.relevance(query_BE, embedding_PE[place_BK].to(self.device))
            relevance_BK = self.retriever.mixture.of(dense_BK, words_BK.to(self.device))
            return relevance_BK.masked_fill(missing_BK.to(self.device), -torch.inf), found.id_QK
        if k >= len(embedding_PE):
            score_BP: Tensor = self.retriever.scores(query_BE, embedding_PE.to(self.device))
            score_BP, id_BP = torch.sort(score_BP, dim=1, descending=True)
            return score_BP, id_BP.cpu()
        with torch.no_grad():
            _, id_BK = self.passages.search(query_BE.detach(), k)
            found_BKE = embedding_PE[id_BK.to(embedding_PE.device)].to(self.device)
        return self.retriever.relevance(query_BE, found_BKE), id_BK.cpu()

    def evidence(self, questions: Sequence[Question], k: int) -> tuple[Tensor, Tensor]:
        """``relevance`` without the passages that a question was made from.

        A question of which fewer than k are left has id -1 and score -inf behind them.
        """
        most = max(len(question.not_in) for question in questions)
        relevance_BK, id_BK = self.relevance([question.question for question in questions], k + most)
        if not most:
            return relevance_BK, id_BK
        source_BK = torch.from_numpy(self.sources.among(questions, id_BK.numpy()))
        order_BK = torch.argsort(source_BK.long(), dim=1, stable=True)[:, :k]
        id_BK = id_BK.masked_fill(source_BK, -1).gather(1, order_BK)
        source_BK, order_BK = send(self.device, source_BK, order_BK)
        return relevance_BK.masked_fill(source_BK, -torch.inf).gather(1, order_BK), id_BK

    @property
    def hybrid(self) -> bool:
        """Whether words count beside embeddings."""
        return self.words is not None and self.retriever.mixture.lexical > 0

    def queries(self, questions: Sequence[str]) -> list[np.ndarray]:
        """[CLS] question [SEP] of each question."""
        limit = self.options.query_wordpieces
        return [join_query(self.wordpieces(question), self.special, limit) for question in questions]

    def find(self, questions: Sequence[str], k: int, depth: int) -> Found:
        """The best k passages of each question among the ``depth`` best of embeddings and words, with both scores."""
        query_QE = embed(self.retriever.query, query_sequences(self.queries(questions)), self.dtype)
        return self._search(query_QE, questions, k, depth)

    def _search(self, query_BE: Tensor, questions: Sequence[str], k: int, depth: int) -> Found:
        assert self.passages is not None
        search = Hybrid(self.passages, self.words, self.retriever.mixture, self.retriever.scale)
        return search.search(query_BE.detach(), questions, k, depth)

    def wordpieces(self, text: str) -> np.ndarray:
        """A text's wordpieces; only to be read."""
        return self._wordpieces(text)

    def is_correct(self, question: Question, passages: Sequence[int]) -> np.ndarray:
        """Whether each passage contains an answer, by the question's rule."""
        known = self._correct.setdefault(question.id, {})
        for p in passages:
            if p not in known:
                known[p] = p >= 0 and contains_answer(self.snapshot.text(p), question.answers, question.match_rule)
        return np.array([known[p] for p in passages], dtype=bool)

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

    def loss(self, questions: Sequence[Question]) -> tuple[Tensor, Later]:
        """The early retriever loss over the top passages plus the span loss over those that are read."""
        options = self.options
        depth = options.retriever_candidates if self.ranker is None else max(5, options.reader_candidates)
        relevance_BP, id_BP = self.evidence(questions, depth)
        correct_BP = torch.from_numpy(
            np.stack([self.is_correct(q, row) for q, row in zip(questions, id_BP.tolist(), strict=True)])
        )
        early_B = marginal_span_loss(relevance_BP, send(self.device, correct_BP)[0])
        _, rows, logit_S, gold_S = self._read(questions, relevance_BP, id_BP)
        span_B, has_gold_B = self._span_loss(logit_S, torch.from_numpy(gold_S), rows, len(questions))

        def metrics(early_B: Tensor, span_B: Tensor, has_gold_B: Tensor) -> dict[str, float]:
            return {
                "early_loss": early_B.mean().item(),
                "span_loss": span_B.mean().item(),
                "no_correct_passage": float((~correct_BP.any(-1)).float().mean()),
                "no_correct_span": float((~has_gold_B).float().mean()),
                "recall_at_5": float(correct_BP[:, :5].any(-1).float().mean()),
            }

        return (early_B + span_B).mean(), Later((early_B, span_B, has_gold_B), metrics)

    def _read(
        self, questions: Sequence[Question], relevance_BP: Tensor, id_BP: Tensor
    ) -> tuple[list[list[int]], np.ndarray, Tensor, np.ndarray]:
        """Read the first passages of each question: these, the rows of their spans, logits, and which are right."""
        read = [[p for p in row if p >= 0] for row in id_BP[:, : self.options.reader_candidates].tolist()]
        score_S, rows = self.spans([self.wordpieces(q.question) for q in questions], read)
        question_S, rank_S = send(self.device, torch.from_numpy(rows[:, :2].T))[0]
        logit_S = score_S + self.retriever.mixture.reading * relevance_BP[question_S, rank_S]
        return read, rows, logit_S, self._is_gold(rows, questions, read)

    def _span_loss(self, logit_S: Tensor, is_gold: Tensor, rows: np.ndarray, count: int) -> tuple[Tensor, Tensor]:
        """The loss of each of ``count`` questions by ``finetune.span_loss``, and whether it has a gold span."""
        logit_BW, gold_BW = by_group(logit_S, is_gold, rows[:, 0], count)
        has_gold_B = gold_BW.any(-1)
        if self.options.span_loss != "per_passage":
            loss = {"marginal": marginal_span_loss, "hard_em": hard_em_span_loss}[self.options.span_loss]
            return loss(logit_BW, gold_BW), has_gold_B
        most = int(rows[:, 1].max()) + 1
        logit_NW, gold_NW = by_group(logit_S, is_gold, rows[:, 0] * most + rows[:, 1], count * most)
        has_gold_BK = gold_NW.any(-1).view(count, most)
        logit_NW = torch.where(has_gold_BK.view(-1, 1), logit_NW, 0.0)  # a passage without gold teaches nothing
        loss_BK = marginal_span_loss(logit_NW, gold_NW).view(count, most)
        return loss_BK.sum(-1) / has_gold_BK.sum(-1).clamp(min=1), has_gold_B

    @torch.no_grad()
    def answer(
        self, questions: Sequence[Question], *, ranked: int, batch_size: int, progress: Progress = untold
    ) -> list[Answer]:
        """Answer questions; ``ranked`` passages of each are returned for recall."""
        self.retriever.eval()
        self.reader.eval()
        answers: list[Answer] = []
        for start in range(0, len(questions), batch_size):
            batch = questions[start : start + batch_size]
            relevance_BK, id_BK = self.evidence(batch, max(ranked, self.options.reader_candidates))
            relevance_BK = relevance_BK[:, : self.options.reader_candidates]
            read, rows, score_S, gold_S = self._read(batch, relevance_BK, id_BK)
            logit_S = score_S.cpu().numpy()
            log_prior_BK = log_prior(relevance_BK).cpu().tolist()
            for b in range(len(batch)):
                mine = rows[:, 0] == b
                at = [mine & (rows[:, 1] == rank) for rank in range(len(read[b]))]
                best = self.choose(rows[mine], logit_S[mine], read[b])
                gold, *best_of_passage = (self.best(some, rows, logit_S, read[b]) for some in (mine & gold_S, *at))
                answers.append(
                    Answer(
                        best=best,
                        best_of_passage=best_of_passage,
                        best_gold=gold,
                        passages=read[b],
                        log_prior=log_prior_BK[b][: len(read[b])],
                        ranked=id_BK[b, :ranked].tolist(),
                        log_p=self._log_p(best, rows[mine], logit_S[mine], read[b]) if best else -math.inf,
                    )
                )
            progress(len(batch))
        return answers

    def says(self, text: str, rows: np.ndarray, read: Sequence[int]) -> np.ndarray:
        """Which spans of one question, rows of ``spans``, are an answer y: those with the normal form of its text."""
        says_S = np.zeros(len(rows), bool)
        for rank, passage in enumerate(read):
            [of_z] = np.nonzero(rows[:, 1] == rank)
            chars = self.snapshot.chars(passage)
            spans = np.column_stack([chars[rows[of_z, 2], 0], chars[rows[of_z, 3], 1]])
            says_S[of_z] = same_form(self.snapshot.text(passage), text, spans)
        return says_S

    def _log_p(self, best: Span, rows: np.ndarray, logit_S: np.ndarray, read: Sequence[int]) -> float:
        """log p(y|x) of the best span's text y, from all spans of one question.

        One softmax goes over the spans of all passages: those that say y add up (section 3.2, fine-tuning).
        """
        says_1S = torch.from_numpy(self.says(best.text, rows, read))[None]
        return log_sum_correct(torch.from_numpy(logit_S)[None].double(), says_1S).item()

    def choose(self, rows: np.ndarray, logit_S: np.ndarray, read: Sequence[int]) -> Span | None:
        """The answer to one question among all its spans, rows of ``spans``, by ``finetune.decoding``."""
        if self.options.decoding == "best_span" or not len(rows):
            return self.best(np.ones(len(rows), bool), rows, logit_S, read)
        places = np.argsort(-logit_S, kind="stable")[:CANDIDATES]
        p = np.exp(logit_S[places].astype(np.float64) - logit_S[places[0]])
        spans = [self._cut(rows[place], logit_S[place], read) for place in places]
        return spans[minimum_risk([span.text for span in spans], p)]

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


def by_group(logit_S: Tensor, gold_S: Tensor, group_S: np.ndarray, count: int) -> tuple[Tensor, Tensor]:
    """Rows of spans by their group (a question, or a passage of it), as count x W with -inf where it has fewer.

    Which are gold is told on the CPU; both results are where the logits are.
    """
    sizes = np.bincount(group_S, minlength=count)
    width = int(sizes.max())
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    place = torch.from_numpy(group_S * width + np.arange(len(group_S)) - first[group_S])
    gold_BW = gold_S.new_zeros(count * width).index_copy(0, place, gold_S)
    place, gold_BW = send(logit_S.device, place, gold_BW)
    logit_BW = logit_S.new_full((count * width,), -torch.inf).index_copy(0, place, logit_S)
    return logit_BW.view(count, width), gold_BW.view(count, width)


def finetune_steps(questions: int, options: Finetune | ClosedBookOptions) -> int:
    """Steps of so many epochs; the last one may be cut short."""
    return math.ceil(options.epochs * math.ceil(questions / options.batch_size))


def finetune(
    context: Context, model: OpenQa, questions: Sequence[Question], options: Finetune, optimiser: Optimiser
) -> None:
    """Train query tower and reader; every epoch sees the questions in an order of its own."""
    rows_of = epoch_rows(context, len(questions), options.batch_size)

    def step_loss(step: int) -> tuple[Tensor, Later]:
        model.retriever.train()
        model.reader.train()
        mine, weight = context.team.share([questions[row] for row in rows_of(step)])
        loss, later = model.loss(mine)
        return weight * loss, later

    groups = [Group("reader", model.reader, options.reader_learning_rate)]
    if model.ranker is None:
        groups.insert(0, Group("query", model.retriever.query, options.retriever_learning_rate))
    steps = finetune_steps(len(questions), options)
    fit(context, groups, optimiser, step_loss, steps=steps, checkpoint_every=options.checkpoint_every)
