"""Train a reader on parts of passages: one with the answer and, later in training, one without.

A part around the answer is read six to eight times as fast as ORQA's five whole passages; evaluation reads those.

Shape suffixes: B questions, S answer spans of all windows, N passages, L wordpieces of the longest passage.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from realmops.answering.extractive import ExtractiveQa
from realmops.answering.openqa import OpenQa
from realmops.answering.span_answers import SpanAnswers
from realmops.devices import autocast, to_device
from realmops.model.likelihood import marginal_span_loss
from realmops.options import Finetune, epoch_steps
from realmops.questions.answer_matching import answer_token_spans, matched_spans
from realmops.questions.question_sets import Question
from realmops.search.embed import Progress, no_progress
from realmops.train.fine_tuning import SPAN_LEARNING_RATE, by_group
from realmops.train.loop import DeferredMetrics, LossAndMetrics, TrainingContext, fit_epochs
from realmops.train.optimiser import Group

NEGATIVES_FROM = 0.55  # fraction of the steps after which each question also gets a window without an answer
HARDEST = 10  # top passages without an answer that a negative is drawn from
QUESTIONS_AT_ONCE = 64  # questions retrieved in one batch

Spans = Sequence[tuple[int, int]]  # first and end wordpiece of the reader


@dataclass(frozen=True)
class ReaderExample:
    """A question, its best passage with an answer, and its best passages without one."""

    question: Question
    passage: int
    spans: Spans  # of every answer in the passage
    relevance: float  # f(x, z) of the passage
    negatives: Sequence[tuple[int, float]]  # passages and their f(x, z)


@dataclass(frozen=True)
class Window:
    """Part of a passage, read together with a question."""

    passage: int
    begin: int  # wordpieces of the passage
    end: int
    relevance: float
    spans: Spans  # of answers, relative to ``begin``; some are outside of the window


Drawn = tuple[ReaderExample, list[Window]]


class ReaderTrainer(ABC):
    """Training of a reader of spans, whose ``head`` scores them and has its own learning rate."""

    longest_window: ClassVar[int]  # wordpieces

    def __init__(self, model: SpanAnswers, head: nn.Module) -> None:
        self.base, self.head = model, head

    @abstractmethod
    def spans(self, question: Question, passage: int) -> Spans:
        """Return the spans of the answers in a passage."""

    @abstractmethod
    def length(self, passage: int) -> int:
        """Return the length of a passage in wordpieces of the reader."""

    def room(self, question: Question) -> int:
        """Return the longest window next to a question."""
        return self.longest_window

    @abstractmethod
    def loss(self, drawn: Sequence[Drawn]) -> LossAndMetrics:
        """Return the mean loss of windows, and metrics."""

    def examples(
        self, questions: Sequence[Question], depth: int, progress: Progress = no_progress
    ) -> list[ReaderExample]:
        """Return an example per question; skip questions without an answer span in the top ``depth`` passages."""
        self.base.retriever.eval()
        examples = []
        for first in range(0, len(questions), QUESTIONS_AT_ONCE):
            batch = questions[first : first + QUESTIONS_AT_ONCE]
            with torch.no_grad():
                relevance_BK, id_BK = self.base.evidence(batch, depth)
            for question, ids, relevance in zip(batch, id_BK.tolist(), relevance_BK.tolist(), strict=True):
                if example := self._example(question, ids, relevance):
                    examples.append(example)
            progress(len(batch))
        return examples

    def _example(self, question: Question, ids: Sequence[int], relevance: Sequence[float]) -> ReaderExample | None:
        is_correct = self.base.is_correct(question, ids)
        wrong = [(ids[k], relevance[k]) for k in range(len(ids)) if not is_correct[k] and ids[k] >= 0]
        for k in np.flatnonzero(is_correct).tolist():
            if spans := self.spans(question, ids[k]):
                return ReaderExample(question, ids[k], spans, relevance[k], wrong[:HARDEST])
        return None

    def draw(self, example: ReaderExample, rng: np.random.Generator, *, negatives: bool) -> list[Window]:
        """Draw a window around an answer and, with ``negatives``, one of a passage without an answer."""
        passages: list[tuple[int, float, Spans]] = [(example.passage, example.relevance, example.spans)]
        if negatives and example.negatives:
            passages.append((*example.negatives[int(rng.integers(len(example.negatives)))], ()))
        size, windows = self.room(example.question), []
        for passage, relevance, spans in passages:
            length = self.length(passage)
            span = spans[int(rng.integers(len(spans)))] if spans else None
            begin = place_window(length, span, size, rng)
            inside = [(first - begin, end - begin) for first, end in spans]
            windows.append(Window(passage, begin, min(begin + size, length), relevance, inside))
        return windows

    def train(self, context: TrainingContext, examples: Sequence[ReaderExample], options: Finetune) -> None:
        steps = epoch_steps(len(examples), options.batch_size, options.epochs)

        def draw(batch: Sequence[ReaderExample], step: int) -> list[Drawn]:
            rng, negatives = context.rng("windows", step), step >= NEGATIVES_FROM * steps
            return [(example, self.draw(example, rng, negatives=negatives)) for example in batch]

        def loss(drawn: Sequence[Drawn]) -> LossAndMetrics:
            self.base.reader.train()
            return self.loss(drawn)

        groups = [
            Group("spans", self.head, SPAN_LEARNING_RATE),
            Group("reader", self.base.reader, options.reader_learning_rate),
        ]
        fit_epochs(
            context, groups, examples, draw, loss,
            batch_size=options.batch_size, epochs=options.epochs,
        )  # fmt: skip


class SpanHeadTrainer(ReaderTrainer):
    """Training of the reader of masked words with ORQA's span head: one softmax over all windows of a question."""

    longest_window = 96

    def __init__(self, model: OpenQa) -> None:
        assert model.reader.spans is not None
        super().__init__(model, model.reader.spans)
        self.model = model

    def spans(self, question: Question, passage: int) -> Spans:
        return sorted((first, last + 1) for _, first, last in self.model.gold(question, [passage]))

    def length(self, passage: int) -> int:
        return len(self.model.snapshot.body(passage))

    def wordpieces(self, question: Question) -> np.ndarray:
        """Return the wordpieces of a question, cut so that an answer fits after it."""
        options = self.model.options
        limit = min(options.query_wordpieces - 2, options.reader_wordpieces - 3 - options.answer_wordpieces)
        return self.model.wordpieces(question.question)[:limit]

    def room(self, question: Question) -> int:
        return min(self.longest_window, self.model.options.reader_wordpieces - 3 - len(self.wordpieces(question)))

    def loss(self, drawn: Sequence[Drawn]) -> LossAndMetrics:
        """Return the mean over questions of the negative log probability of their gold spans, and metrics.

        As at evaluation, the weighted relevance f(x, z) of its passage is added to a span's score.
        """
        model = self.model
        inputs = [(b, example, window) for b, (example, windows) in enumerate(drawn) for window in windows]
        bodies = [model.reader.document(model.snapshot, w.passage)[w.begin : w.end] for _, _, w in inputs]
        score_S, spans = model.score_spans([self.wordpieces(example.question) for _, example, _ in inputs], bodies)
        counts = [len(rows) for rows in spans]
        gold = [is_gold(rows, window) for (_, _, window), rows in zip(inputs, spans, strict=True)]
        gold_S = torch.from_numpy(np.concatenate(gold))
        relevance_S = torch.from_numpy(np.repeat(np.array([w.relevance for _, _, w in inputs], np.float32), counts))
        logit_S = score_S + model.retriever.mixture.reading * relevance_S.to(score_S.device)
        question_S = np.repeat([b for b, _, _ in inputs], counts)
        logit_BW, gold_BW = by_group(logit_S, gold_S, question_S, len(drawn))
        loss_B = marginal_span_loss(logit_BW, gold_BW)
        best_B = gold_BW.gather(1, logit_BW.argmax(-1, keepdim=True))[:, 0]

        def metrics(loss_B: Tensor, best_B: Tensor) -> dict[str, float]:
            return {"span_loss": loss_B.mean().item(), "span_accuracy": float(best_B.float().mean())}

        return loss_B.mean(), DeferredMetrics((loss_B, best_B), metrics)


class ExtractiveTrainer(ReaderTrainer):
    """Training of a published reader, whose probabilities are of one passage: that of its answers, or of none."""

    longest_window = 128

    def __init__(self, model: ExtractiveQa) -> None:
        super().__init__(model, model.reader.head)
        self.model = model
        model.reader.freeze_unseen_biases()

    def spans(self, question: Question, passage: int) -> Spans:
        text = self.model.snapshot.text(passage)
        offsets = self.model.reader.tokenize(text).offsets
        spans = []
        for start, end in matched_spans(text, question.answers, question.match_rule):
            if inside := [n for n, (low, high) in enumerate(offsets) if low < end and high > start]:
                spans.append((inside[0], inside[-1] + 1))
        return spans

    def length(self, passage: int) -> int:
        return len(self.model.reader.tokenize(self.model.snapshot.text(passage)).offsets)

    def text(self, window: Window) -> str:
        text = self.model.snapshot.text(window.passage)
        offsets = self.model.reader.tokenize(text).offsets[window.begin : window.end]
        return text[offsets[0][0] : offsets[-1][1]] if offsets else ""

    def loss(self, drawn: Sequence[Drawn]) -> LossAndMetrics:
        pairs = [(example.question, window) for example, windows in drawn for window in windows]
        texts = [(q.question, self.text(window), q.answers if window.spans else ()) for q, window in pairs]
        return passages_loss(self.model, texts, [question.match_rule for question, _ in pairs])


def reader_trainer(model: SpanAnswers) -> ReaderTrainer:
    if isinstance(model, ExtractiveQa):
        return ExtractiveTrainer(model)
    assert isinstance(model, OpenQa)
    return SpanHeadTrainer(model)


def place_window(length: int, span: tuple[int, int] | None, size: int, rng: np.random.Generator) -> int:
    """Draw the start of a window of ``size`` wordpieces, uniformly among those whose window contains the span."""
    low, high = 0, max(0, length - size)
    if span is not None:
        low, high = max(low, span[1] - size), min(high, span[0])
    return int(rng.integers(low, max(low, high) + 1))


def is_gold(spans: np.ndarray, window: Window) -> np.ndarray:
    """Return which spans (first, last wordpiece; shape S x 2) are answers of the window."""
    gold = np.zeros(len(spans), dtype=bool)
    for first, end in window.spans:
        gold |= (spans[:, 0] == first) & (spans[:, 1] == end - 1)
    return gold


def passages_loss(
    model: ExtractiveQa, pairs: Sequence[tuple[str, str, Sequence[str]]], rules: Sequence[str]
) -> LossAndMetrics:
    """Return the mean over passages of -log p of their answers, and metrics.

    p is the sum over all spans that match an answer, or that of the null answer without answers. A passage none of
    whose spans is an answer does not count. ``pairs`` are question, text and answers of each passage, ``rules`` the
    match rules of the answers.
    """
    reader, longest = model.reader, model.options.answer_wordpieces
    windows = {w.pair: w for w in reversed(reader.windows([pair[:2] for pair in pairs], reader.longest))}  # the first
    ordered = [windows[n] for n in range(len(pairs))]
    with autocast(model.device, model.dtype):
        log_start_NL, log_end_NL = reader.log_probabilities(ordered)
    targets: list[tuple[int, int, int]] = []
    for n, (window, (_, text, answers), rule) in enumerate(zip(ordered, pairs, rules, strict=True)):
        spans = answer_token_spans(text, answers, window.chars(text), rule=rule, max_wordpieces=longest)
        targets += [(n, window.first + first, window.first + end - 1) for first, end in spans]
        targets += [(n, null, null) for null in window.null_positions[:1] if not answers]
    n_T, start_T, end_T = to_device(model.device, *torch.tensor(targets, dtype=torch.int64).reshape(-1, 3).T)
    log_p_T = log_start_NL[n_T, start_T] + log_end_NL[n_T, end_T]
    total_N = log_p_T.new_full((len(pairs), len(targets)), -torch.inf)
    total_N = total_N.index_put((n_T, torch.arange(len(targets), device=model.device)), log_p_T).logsumexp(-1)
    loss_N = -total_N[torch.isin(torch.arange(len(pairs), device=model.device), n_T)]

    def metrics(loss_N: Tensor) -> dict[str, float]:
        return {"span_loss": loss_N.mean().item(), "no_correct_span": 1 - len(loss_N) / len(pairs)}

    return loss_N.sum() / max(len(loss_N), 1), DeferredMetrics((loss_N,), metrics)
