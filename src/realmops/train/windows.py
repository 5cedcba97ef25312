"""The reader learns to point at answers in windows: one passage with the answer, later one hard negative beside it.

ORQA and REALM read the first five whole passages for every question. A window around the answer is six to eight times
as fast, and short trainings on real text live by the number of questions that they see. What is read at evaluation are
whole passages all the same.

Shape suffixes: B questions, S answer spans of all windows, T wordpieces of all sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realmops.answering.openqa import OpenQa
from realmops.config import Finetune, Optimiser
from realmops.corpus.question_sets import Question
from realmops.model.likelihood import marginal_span_loss
from realmops.search.embed import Progress, no_progress
from realmops.train.fine_tuning import by_group, finetune_steps
from realmops.train.loop import Context, DeferredMetrics, epoch_rows, fit
from realmops.train.optimiser import Group

WINDOW = 96  # wordpieces of a passage
NEGATIVES_FROM = 0.55  # share of the steps after which a window without an answer is read beside the right one
HARDEST = 10  # passages without an answer, of which one is drawn


@dataclass(frozen=True)
class Window:
    """A part of a passage that is read beside a question."""

    passage: int
    begin: int  # wordpieces of the passage
    end: int
    relevance: float  # f(x, z) of the passage
    gold: frozenset[tuple[int, int]]  # first and last wordpiece of the window


@dataclass(frozen=True)
class WindowLesson:
    """A question, the best passage that answers it with all places of an answer, and the best that do not."""

    question: np.ndarray  # wordpieces
    passage: int
    gold: list[tuple[int, int]]  # first and end wordpiece
    relevance: float  # f(x, z) of the passage
    negatives: list[int]
    negative_relevance: list[float]


def lessons_of(
    model: OpenQa, questions: Sequence[Question], depth: int, progress: Progress = no_progress, together: int = 64
) -> list[WindowLesson]:
    """What each question teaches; one whose ``depth`` best passages hold no answer span teaches nothing."""
    model.retriever.eval()
    lessons = []
    for first in range(0, len(questions), together):
        some = questions[first : first + together]
        with torch.no_grad():
            relevance_BK, id_BK = model.evidence(some, depth)
        for question, ids, relevance in zip(some, id_BK.tolist(), relevance_BK.tolist(), strict=True):
            if lesson := _lesson(model, question, ids, relevance):
                lessons.append(lesson)
        progress(len(some))
    return lessons


def _lesson(model: OpenQa, question: Question, ids: Sequence[int], relevance: Sequence[float]) -> WindowLesson | None:
    right = model.is_correct(question, ids)
    wrong = [k for k in range(len(ids)) if not right[k] and ids[k] >= 0][:HARDEST]
    for k in np.flatnonzero(right).tolist():
        if gold := sorted((first, last + 1) for _, first, last in model.gold(question, [ids[k]])):
            options = model.options
            room = min(options.query_wordpieces - 2, options.reader_wordpieces - 3 - options.answer_wordpieces)
            tokens = model.wordpieces(question.question)[:room]
            return WindowLesson(
                tokens, ids[k], gold, relevance[k], [ids[i] for i in wrong], [relevance[i] for i in wrong]
            )
    return None


def place_window(length: int, span: tuple[int, int] | None, size: int, rng: np.random.Generator) -> int:
    """Where a window of ``size`` wordpieces begins that holds the span, uniform among all such places."""
    low, high = 0, max(0, length - size)
    if span is not None:
        low, high = max(low, span[1] - size), min(high, span[0])
    return int(rng.integers(low, high + 1))


def draw_windows(model: OpenQa, lesson: WindowLesson, rng: np.random.Generator, *, negatives: bool) -> list[Window]:
    """A window with one of the right spans and, with ``negatives``, one of a passage without an answer.

    They have ``WINDOW`` wordpieces, or what ``finetune.reader_wordpieces`` leaves beside the question.
    """
    size = min(WINDOW, model.options.reader_wordpieces - 3 - len(lesson.question))
    read = [(lesson.passage, lesson.relevance, lesson.gold)]
    if negatives and lesson.negatives:
        k = int(rng.integers(len(lesson.negatives)))
        read.append((lesson.negatives[k], lesson.negative_relevance[k], []))
    windows = []
    for passage, relevance, spans in read:
        length = len(model.snapshot.body(passage))
        around = spans[int(rng.integers(len(spans)))] if spans else None
        begin = place_window(length, around, size, rng)
        gold = frozenset((low - begin, high - begin - 1) for low, high in spans)
        windows.append(Window(passage, begin, min(begin + size, length), relevance, gold))
    return windows


def is_gold(spans: np.ndarray, window: Window) -> np.ndarray:
    """Which rows (first, last wordpiece) are one of the window's right spans."""
    gold = np.zeros(len(spans), dtype=bool)
    for first, last in window.gold:
        gold |= (spans[:, 0] == first) & (spans[:, 1] == last)
    return gold


def windows_loss(
    model: OpenQa, lessons: Sequence[WindowLesson], windows: Sequence[Sequence[Window]]
) -> tuple[Tensor, DeferredMetrics]:
    """-log of the share of the right spans among all spans of a question's windows, the mean over questions.

    To a span's score comes the weighted f(x, z) of its passage, as at evaluation.
    """
    read = [(b, lesson, window) for b, lesson in enumerate(lessons) for window in windows[b]]
    bodies = [model.reader.document(model.snapshot, w.passage)[w.begin : w.end] for _, _, w in read]
    score_S, spans = model.score_spans([lesson.question for _, lesson, _ in read], bodies)
    counts = [len(some) for some in spans]
    gold_S = torch.from_numpy(np.concatenate([is_gold(some, w) for (_, _, w), some in zip(read, spans, strict=True)]))
    prior_S = torch.from_numpy(np.repeat(np.array([w.relevance for _, _, w in read], np.float32), counts))
    logit_S = score_S + model.retriever.mixture.reading * prior_S.to(score_S.device)
    question_S = np.repeat([b for b, _, _ in read], counts)
    logit_BW, gold_BW = by_group(logit_S, gold_S, question_S, len(lessons))
    loss_B = marginal_span_loss(logit_BW, gold_BW)
    best_B = gold_BW.gather(1, logit_BW.argmax(-1, keepdim=True))[:, 0]

    def metrics(loss_B: Tensor, best_B: Tensor) -> dict[str, float]:
        return {"span_loss": loss_B.mean().item(), "span_accuracy": float(best_B.float().mean())}

    return loss_B.mean(), DeferredMetrics((loss_B, best_B), metrics)


def train_in_windows(
    context: Context, model: OpenQa, lessons: Sequence[WindowLesson], options: Finetune, optimiser: Optimiser
) -> int:
    """Train the reader; returns the journal's length at the end."""
    rows_of = epoch_rows(context, len(lessons), options.batch_size)
    steps = finetune_steps(len(lessons), options)
    reader = model.reader
    assert reader.spans is not None

    def step_loss(step: int) -> tuple[Tensor, DeferredMetrics]:
        reader.train()
        rng = context.rng("windows", step)
        negatives = step >= NEGATIVES_FROM * steps
        some = [lessons[row] for row in rows_of(step)]
        drawn = [(lesson, draw_windows(model, lesson, rng, negatives=negatives)) for lesson in some]
        mine, weight = context.team.share(drawn)
        loss, later = windows_loss(model, [lesson for lesson, _ in mine], [windows for _, windows in mine])
        return weight * loss, later

    groups = [
        Group("spans", reader.spans, options.span_learning_rate),
        Group("reader", reader, options.reader_learning_rate),
    ]
    return fit(context, groups, optimiser, step_loss, steps=steps, checkpoint_every=options.checkpoint_every)
