"""Train the reader on windows of passages: one with the answer and, later in training, one hard negative.

ORQA and REALM read the first five whole passages for every question. A window around the answer is six to eight times
as fast, and short trainings on real text depend on the number of questions they see. Evaluation reads whole passages.

Shape suffixes: B questions, S answer spans of all windows, T wordpieces of all sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realmops.answering.openqa import OpenQa
from realmops.model.likelihood import marginal_span_loss
from realmops.options import Finetune, Optimiser
from realmops.questions.question_sets import Question
from realmops.search.embed import Progress, no_progress
from realmops.train.fine_tuning import by_group, finetune_steps
from realmops.train.loop import DeferredMetrics, TrainingContext, epoch_rows, fit
from realmops.train.optimiser import Group

WINDOW = 96  # wordpieces of a passage
NEGATIVES_FROM = 0.55  # fraction of the steps after which each question also gets a window without an answer
HARDEST = 10  # top passages without an answer that a negative is drawn from


@dataclass(frozen=True)
class Window:
    """Part of a passage, read together with a question."""

    passage: int
    begin: int  # wordpieces of the passage
    end: int
    relevance: float  # f(x, z) of the passage
    gold: frozenset[tuple[int, int]]  # first and last wordpiece of the window


@dataclass(frozen=True)
class WindowExample:
    """A question, its best passage with an answer, and its best passages without one."""

    question: np.ndarray  # wordpieces
    passage: int
    gold: list[tuple[int, int]]  # first and end wordpiece of every answer in the passage
    relevance: float  # f(x, z) of the passage
    negatives: list[int]
    negative_relevance: list[float]


def build_window_examples(
    model: OpenQa, questions: Sequence[Question], depth: int, progress: Progress = no_progress, batch_size: int = 64
) -> list[WindowExample]:
    """Return a training example per question; skip questions without an answer span in the top ``depth`` passages."""
    model.retriever.eval()
    examples = []
    for first in range(0, len(questions), batch_size):
        batch = questions[first : first + batch_size]
        with torch.no_grad():
            relevance_BK, id_BK = model.evidence(batch, depth)
        for question, ids, relevance in zip(batch, id_BK.tolist(), relevance_BK.tolist(), strict=True):
            if example := _window_example(model, question, ids, relevance):
                examples.append(example)
        progress(len(batch))
    return examples


def _window_example(
    model: OpenQa, question: Question, ids: Sequence[int], relevance: Sequence[float]
) -> WindowExample | None:
    is_correct = model.is_correct(question, ids)
    wrong = [k for k in range(len(ids)) if not is_correct[k] and ids[k] >= 0][:HARDEST]
    for k in np.flatnonzero(is_correct).tolist():
        if gold := sorted((first, last + 1) for _, first, last in model.gold(question, [ids[k]])):
            options = model.options
            limit = min(options.query_wordpieces - 2, options.reader_wordpieces - 3 - options.answer_wordpieces)
            tokens = model.wordpieces(question.question)[:limit]
            return WindowExample(
                tokens, ids[k], gold, relevance[k], [ids[i] for i in wrong], [relevance[i] for i in wrong]
            )
    return None


def place_window(length: int, span: tuple[int, int] | None, size: int, rng: np.random.Generator) -> int:
    """Draw the start of a window of ``size`` wordpieces, uniformly among those whose window contains the span."""
    low, high = 0, max(0, length - size)
    if span is not None:
        low, high = max(low, span[1] - size), min(high, span[0])
    return int(rng.integers(low, high + 1))


def draw_windows(model: OpenQa, example: WindowExample, rng: np.random.Generator, *, negatives: bool) -> list[Window]:
    """Draw a window around a gold span and, with ``negatives``, one of a passage without an answer.

    Windows have ``WINDOW`` wordpieces, fewer if ``finetune.reader_wordpieces`` leaves less after the question.
    """
    size = min(WINDOW, model.options.reader_wordpieces - 3 - len(example.question))
    passages = [(example.passage, example.relevance, example.gold)]
    if negatives and example.negatives:
        k = int(rng.integers(len(example.negatives)))
        passages.append((example.negatives[k], example.negative_relevance[k], []))
    windows = []
    for passage, relevance, spans in passages:
        length = len(model.snapshot.body(passage))
        span = spans[int(rng.integers(len(spans)))] if spans else None
        begin = place_window(length, span, size, rng)
        gold = frozenset((low - begin, high - begin - 1) for low, high in spans)
        windows.append(Window(passage, begin, min(begin + size, length), relevance, gold))
    return windows


def is_gold(spans: np.ndarray, window: Window) -> np.ndarray:
    """Return which spans (first, last wordpiece; shape S x 2) are gold spans of the window."""
    gold = np.zeros(len(spans), dtype=bool)
    for first, last in window.gold:
        gold |= (spans[:, 0] == first) & (spans[:, 1] == last)
    return gold


def windows_loss(
    model: OpenQa, examples: Sequence[WindowExample], windows: Sequence[Sequence[Window]]
) -> tuple[Tensor, DeferredMetrics]:
    """Return the mean over questions of the negative log probability of their gold spans, and metrics.

    The softmax is over all spans of a question's windows. As at evaluation, the weighted relevance f(x, z) of its
    passage is added to a span's score.
    """
    inputs = [(b, example, window) for b, example in enumerate(examples) for window in windows[b]]
    bodies = [model.reader.document(model.snapshot, w.passage)[w.begin : w.end] for _, _, w in inputs]
    score_S, spans = model.score_spans([example.question for _, example, _ in inputs], bodies)
    counts = [len(rows) for rows in spans]
    gold_S = torch.from_numpy(np.concatenate([is_gold(rows, w) for (_, _, w), rows in zip(inputs, spans, strict=True)]))
    relevance_S = torch.from_numpy(np.repeat(np.array([w.relevance for _, _, w in inputs], np.float32), counts))
    logit_S = score_S + model.retriever.mixture.reading * relevance_S.to(score_S.device)
    question_S = np.repeat([b for b, _, _ in inputs], counts)
    logit_BW, gold_BW = by_group(logit_S, gold_S, question_S, len(examples))
    loss_B = marginal_span_loss(logit_BW, gold_BW)
    best_B = gold_BW.gather(1, logit_BW.argmax(-1, keepdim=True))[:, 0]

    def metrics(loss_B: Tensor, best_B: Tensor) -> dict[str, float]:
        return {"span_loss": loss_B.mean().item(), "span_accuracy": float(best_B.float().mean())}

    return loss_B.mean(), DeferredMetrics((loss_B, best_B), metrics)


def train_in_windows(
    context: TrainingContext, model: OpenQa, examples: Sequence[WindowExample], options: Finetune, optimiser: Optimiser
) -> int:
    """Train the reader on windows. Return the journal's length at the end."""
    rows_of = epoch_rows(context, len(examples), options.batch_size)
    steps = finetune_steps(len(examples), options)
    reader = model.reader
    assert reader.spans is not None

    def step_loss(step: int) -> tuple[Tensor, DeferredMetrics]:
        reader.train()
        rng = context.rng("windows", step)
        negatives = step >= NEGATIVES_FROM * steps
        batch = [examples[row] for row in rows_of(step)]
        drawn = [(example, draw_windows(model, example, rng, negatives=negatives)) for example in batch]
        local, weight = context.processes.split_batch(drawn)
        loss, metrics = windows_loss(model, [example for example, _ in local], [windows for _, windows in local])
        return weight * loss, metrics

    groups = [
        Group("spans", reader.spans, options.span_learning_rate),
        Group("reader", reader, options.reader_learning_rate),
    ]
    return fit(context, groups, optimiser, step_loss, steps=steps, checkpoint_every=options.checkpoint_every)
