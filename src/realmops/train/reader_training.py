"""Train a published reader of spans on passages: one with the answer and, later in training, one without.

The loss of a passage is -log p(y|x, z), the sum over all spans that match the answer, or -log p of the null answer if
none does. A part of the passage around the answer is read instead of the whole.

Shape suffixes: N passages, L wordpieces of the longest passage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realmops.answering.extractive import ExtractiveQa
from realmops.devices import autocast, to_device
from realmops.model.extractive_reader import ExtractiveReader, PassageWindow
from realmops.options import Finetune, Optimiser
from realmops.questions.answer_matching import CharSpan, answer_token_spans, matched_spans
from realmops.questions.question_sets import Question
from realmops.search.embed import Progress, no_progress
from realmops.train.fine_tuning import finetune_steps
from realmops.train.loop import DeferredMetrics, TrainingContext, epoch_rows, fit
from realmops.train.optimiser import Group
from realmops.train.windows import HARDEST, NEGATIVES_FROM, place_window

PART = 128  # wordpieces of a passage that are read
QUESTIONS_AT_ONCE = 64  # questions retrieved in one batch


@dataclass(frozen=True)
class PassageExample:
    """A question, its best passage with an answer, and its best passages without one."""

    question: Question
    passage: int
    spans: list[CharSpan]  # of every answer in the passage
    negatives: list[int]


def build_passage_examples(
    model: ExtractiveQa, questions: Sequence[Question], depth: int, progress: Progress = no_progress
) -> list[PassageExample]:
    """Return a training example per question; skip questions without an answer in the top ``depth`` passages."""
    model.retriever.eval()
    examples = []
    for first in range(0, len(questions), QUESTIONS_AT_ONCE):
        batch = questions[first : first + QUESTIONS_AT_ONCE]
        with torch.no_grad():
            _, id_BK = model.evidence(batch, depth)
        for question, ids in zip(batch, id_BK.tolist(), strict=True):
            passages = [passage for passage in ids if passage >= 0]
            spans = [matched_spans(model.snapshot.text(p), question.answers, question.match_rule) for p in passages]
            if right := [k for k, matches in enumerate(spans) if matches]:
                negatives = [passage for passage, matches in zip(passages, spans, strict=True) if not matches]
                examples.append(PassageExample(question, passages[right[0]], spans[right[0]], negatives[:HARDEST]))
        progress(len(batch))
    return examples


def draw_part(reader: ExtractiveReader, text: str, spans: Sequence[CharSpan], rng: np.random.Generator) -> str:
    """Draw a part of ``PART`` wordpieces of a passage that contains one of the spans, if there are any."""
    offsets = reader.tokenize(text).offsets
    if len(offsets) <= PART:
        return text
    span = None
    if spans:
        start, end = spans[int(rng.integers(len(spans)))]
        inside = [n for n, (a, b) in enumerate(offsets) if a < end and b > start]
        span = (inside[0], inside[-1] + 1) if inside else None
    begin = place_window(len(offsets), span, PART, rng)
    return text[offsets[begin][0] : offsets[begin + PART - 1][1]]


def draw_pairs(
    model: ExtractiveQa, example: PassageExample, rng: np.random.Generator, *, negatives: bool
) -> list[tuple[str, str, Sequence[str]]]:
    """Draw question, text and answers of the passage with the answer and, with ``negatives``, of one without."""
    question, reader = example.question, model.reader
    text = draw_part(reader, model.snapshot.text(example.passage), example.spans, rng)
    pairs: list[tuple[str, str, Sequence[str]]] = [(question.question, text, question.answers)]
    if negatives and example.negatives:
        passage = example.negatives[int(rng.integers(len(example.negatives)))]
        pairs.append((question.question, draw_part(reader, model.snapshot.text(passage), (), rng), ()))
    return pairs


def target_positions(
    window: PassageWindow, text: str, answers: Sequence[str], rule: str, longest: int
) -> list[tuple[int, int]]:
    """Return (start, end) wordpieces of the answers in a sequence, or the null answer if there are no answers."""
    if not answers:
        return [(null, null) for null in window.null_positions[:1]]
    spans = answer_token_spans(text, answers, window.chars(text), rule=rule, max_wordpieces=longest)
    return [(window.first + first, window.first + end - 1) for first, end in spans]


def passages_loss(
    model: ExtractiveQa, pairs: Sequence[tuple[str, str, Sequence[str]]], rules: Sequence[str]
) -> tuple[Tensor, DeferredMetrics]:
    """Return the mean over passages of -log p of their answers, and metrics; ``rules`` match answers in passages."""
    reader, longest = model.reader, model.options.answer_wordpieces
    windows = {w.pair: w for w in reversed(reader.windows([pair[:2] for pair in pairs], reader.longest))}  # the first
    ordered = [windows[n] for n in range(len(pairs))]
    with autocast(model.device, model.dtype):
        log_start_NL, log_end_NL = reader.log_probabilities(ordered)
    targets = [
        (n, start, end)
        for n, (window, (_, text, answers), rule) in enumerate(zip(ordered, pairs, rules, strict=True))
        for start, end in target_positions(window, text, answers, rule, longest)
    ]
    n_T, start_T, end_T = to_device(model.device, *torch.tensor(targets, dtype=torch.int64).reshape(-1, 3).T)
    log_p_T = log_start_NL[n_T, start_T] + log_end_NL[n_T, end_T]
    total_N = log_p_T.new_full((len(pairs), len(targets)), -torch.inf)
    total_N = total_N.index_put((n_T, torch.arange(len(targets), device=model.device)), log_p_T).logsumexp(-1)
    loss_N = -total_N[torch.isin(torch.arange(len(pairs), device=model.device), n_T)]

    def metrics(loss_N: Tensor) -> dict[str, float]:
        return {"span_loss": loss_N.mean().item(), "no_correct_span": 1 - len(loss_N) / len(pairs)}

    return loss_N.sum() / max(len(loss_N), 1), DeferredMetrics((loss_N,), metrics)


def train_reader(
    context: TrainingContext,
    model: ExtractiveQa,
    examples: Sequence[PassageExample],
    options: Finetune,
    optimiser: Optimiser,
) -> int:
    """Train the reader on passages. Return the journal's length at the end."""
    rows_of = epoch_rows(context, len(examples), options.batch_size)
    steps = finetune_steps(len(examples), options)
    reader = model.reader
    reader.freeze_unseen_biases()

    def step_loss(step: int) -> tuple[Tensor, DeferredMetrics]:
        reader.train()
        rng = context.rng("passages", step)
        negatives = step >= NEGATIVES_FROM * steps
        drawn = [
            (pair, examples[row].question.match_rule)
            for row in rows_of(step)
            for pair in draw_pairs(model, examples[row], rng, negatives=negatives)
        ]
        local, weight = context.processes.split_batch(drawn)
        loss, metrics = passages_loss(model, [pair for pair, _ in local], [rule for _, rule in local])
        return weight * loss, metrics

    groups = [
        Group("spans", reader.head, options.span_learning_rate),
        Group("reader", reader, options.reader_learning_rate),
    ]
    return fit(context, groups, optimiser, step_loss, steps=steps, checkpoint_every=options.checkpoint_every)
