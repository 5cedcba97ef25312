"""Fine-tuning over frozen passage embeddings: query tower and reader (paper, section 3.2; ORQA), or the tower alone.

Then the fusion weights of embeddings, BM25 and reader scores are fitted to held-out questions.

Shape suffixes: B questions, P passages, K passages that are read, S answer spans of all sequences,
W maximum of spans per question.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from realmops.answering.answer import Answer
from realmops.answering.openqa import OpenQa
from realmops.answering.retrieval import RetrieveAndRead
from realmops.devices import to_device
from realmops.model.likelihood import hard_em_span_loss, marginal_span_loss
from realmops.model.retriever import FusionWeights
from realmops.options import Finetune
from realmops.questions.question_sets import Question
from realmops.search.hybrid import fit_fusion_weights
from realmops.train.loop import DeferredMetrics, LossAndMetrics, TrainingContext, fit_epochs
from realmops.train.optimiser import Group

FIT_DEPTH = 50  # passages by embeddings and by BM25 that each query contributes to the fit of a hybrid's weights
READING_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
SPAN_LEARNING_RATE = 1e-3  # of a new span head
SEARCHED = 256  # passages in the early loss of the query tower alone: at most 75 MB for 32 questions and six vectors


def question_loss(model: OpenQa, questions: Sequence[Question]) -> LossAndMetrics:
    """Return the mean of early retriever loss (over the top passages) plus span loss (over those read), and metrics."""
    options = model.options
    depth = options.retriever_candidates if model.ranker is None else max(5, options.reader_candidates)
    early_B, relevance_BP, id_BP, retrieval = early_loss(model, questions, depth)
    passages = [[p for p in row if p >= 0] for row in id_BP[:, : options.reader_candidates].tolist()]
    score_S, rows = model.spans([model.wordpieces(q.question) for q in questions], passages)
    question_S, rank_S = to_device(model.device, torch.from_numpy(rows[:, :2].T))[0]
    logit_S = score_S + model.retriever.mixture.reading * relevance_BP[question_S, rank_S]
    gold_S = torch.from_numpy(model.is_gold(rows, questions, passages))
    span_B, has_gold_B = _span_loss(options.span_loss, logit_S, gold_S, rows, len(questions))

    def metrics(early_B: Tensor, span_B: Tensor, has_gold_B: Tensor) -> dict[str, float]:
        no_correct_span = float((~has_gold_B).float().mean())
        return retrieval(early_B) | {"span_loss": span_B.mean().item(), "no_correct_span": no_correct_span}

    return (early_B + span_B).mean(), DeferredMetrics((early_B, span_B, has_gold_B), metrics)


def early_loss(
    model: RetrieveAndRead, questions: Sequence[Question], depth: int
) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], dict[str, float]]]:
    """Compute -log p of the relevant passages among the top ``depth`` of each question; 0 if none is relevant.

    Returns:
        The loss, B; f(x, z) and ids (on the CPU) of the top passages, B x P; and the metrics of the loss.
    """
    relevance_BP, id_BP = model.evidence(questions, depth)
    correct_BP = torch.from_numpy(
        np.stack([model.is_correct(q, row) for q, row in zip(questions, id_BP.tolist(), strict=True)])
    )
    loss_B = marginal_span_loss(relevance_BP, to_device(model.device, correct_BP)[0])

    def metrics(loss_B: Tensor) -> dict[str, float]:
        return {
            "early_loss": loss_B.mean().item(),
            "no_correct_passage": float((~correct_BP.any(-1)).float().mean()),
            "recall_at_5": float(correct_BP[:, :5].any(-1).float().mean()),
        }

    return loss_B, relevance_BP, id_BP, metrics


def _span_loss(kind: str, logit_S: Tensor, gold_S: Tensor, rows: np.ndarray, count: int) -> tuple[Tensor, Tensor]:
    """Return the loss of each of ``count`` questions by ``finetune.span_loss``, and whether it has a gold span."""
    logit_BW, gold_BW = by_group(logit_S, gold_S, rows[:, 0], count)
    has_gold_B = gold_BW.any(-1)
    if kind != "per_passage":
        loss = {"marginal": marginal_span_loss, "hard_em": hard_em_span_loss}[kind]
        return loss(logit_BW, gold_BW), has_gold_B
    ranks = int(rows[:, 1].max()) + 1
    logit_NW, gold_NW = by_group(logit_S, gold_S, rows[:, 0] * ranks + rows[:, 1], count * ranks)
    has_gold_BK = gold_NW.any(-1).view(count, ranks)
    loss_BK = marginal_span_loss(logit_NW, gold_NW).view(count, ranks)
    return loss_BK.sum(-1) / has_gold_BK.sum(-1).clamp(min=1), has_gold_B


def by_group(logit_S: Tensor, gold_S: Tensor, group_S: np.ndarray, count: int) -> tuple[Tensor, Tensor]:
    """Pad logits and gold labels of the spans of each group (a question or one of its passages) to ``count`` x W.

    ``gold_S`` is on the CPU and ``group_S`` ascending; both results are on the device of the logits.
    """
    sizes = np.bincount(group_S, minlength=count)
    width = int(sizes.max())
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    position_S = torch.from_numpy(group_S * width + np.arange(len(group_S)) - first[group_S])
    gold_BW = gold_S.new_zeros(count * width).index_copy(0, position_S, gold_S)
    position_S, gold_BW = to_device(logit_S.device, position_S, gold_BW)
    logit_BW = logit_S.new_full((count * width,), -torch.inf).index_copy(0, position_S, logit_S)
    return logit_BW.view(count, width), gold_BW.view(count, width)


def finetune(context: TrainingContext, model: OpenQa, questions: Sequence[Question], options: Finetune) -> None:
    """Train query tower and reader; every epoch shuffles the questions."""

    def loss(batch: Sequence[Question]) -> LossAndMetrics:
        model.retriever.train()
        model.reader.train()
        return question_loss(model, batch)

    groups = [Group("reader", model.reader, options.reader_learning_rate)]
    if model.ranker is None:
        groups.insert(0, Group("query", model.retriever.query, options.retriever_learning_rate))
    fit_epochs(
        context, groups, questions, lambda batch, step: batch, loss,
        batch_size=options.batch_size, epochs=options.epochs,
    )  # fmt: skip


def train_query_tower(
    context: TrainingContext, model: RetrieveAndRead, questions: Sequence[Question], options: Finetune
) -> None:
    """Train the query tower alone by the early loss, with the top passages of the whole index as negatives.

    f(x, z) is that of the search: if it includes BM25, the embeddings learn what the words lack.
    """

    def loss(batch: Sequence[Question]) -> LossAndMetrics:
        model.retriever.train()
        loss_B, _, _, metrics = early_loss(model, batch, min(SEARCHED, options.retriever_candidates))
        return loss_B.mean(), DeferredMetrics([loss_B], metrics)

    groups = [Group("query", model.retriever.query, options.retriever_learning_rate)]
    fit_epochs(
        context, groups, questions, lambda batch, step: batch, loss, batch_size=options.retriever_batch_size,
        epochs=options.retriever_epochs,
    )  # fmt: skip


def fit_weights_on_questions(model: RetrieveAndRead, questions: Sequence[Question]) -> FusionWeights:
    """Return the weights of BM25 and embeddings that rank relevant passages highest, unchanged without such questions.

    Questions generated from the corpus are ignored: they consist of its words, so BM25 would get too high a weight.
    """
    start = model.retriever.mixture
    questions = [question for question in questions if not question.is_generated]
    if not questions:
        return start
    result = model.search([question.question for question in questions], FIT_DEPTH, FIT_DEPTH)
    correct = [model.is_correct(q, row) for q, row in zip(questions, result.id_QK.tolist(), strict=True)]
    fitted = fit_fusion_weights(
        result.dense_QK, result.words_QK, result.id_QK >= 0, torch.from_numpy(np.stack(correct))
    )
    return start if fitted is None else replace(fitted, reading=start.reading)


def fit_reading_weight(
    model: RetrieveAndRead,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    is_right: Callable[[str, Question], bool],
) -> float:
    """Return the weight of f(x, z) relative to a span's score with the highest exact match, and the smallest change.

    The best span of a passage is the same under any weight, so the reader does not run again. Questions generated from
    the corpus are ignored: their source passage is excluded, so f(x, z) is less informative than for human questions.
    ``answers`` are those of ``model`` to the held-out ``questions``.
    """
    before = model.retriever.mixture.reading
    human = [(q, answer) for q, answer in zip(questions, answers, strict=True) if q.measures_answers]
    if not human:
        return model.generated_reading_weight
    questions, answers = zip(*human, strict=True)
    with torch.no_grad():
        relevance = [model.evidence([q], model.options.reader_candidates)[0][0].tolist() for q in questions]

    def best_text(answer: Answer, relevance: Sequence[float], change: float) -> str:
        spans = [(span, f) for span, f in zip(answer.best_of_passage, relevance, strict=False) if span is not None]
        return max(((span.score + change * f, span.text) for span, f in spans), key=itemgetter(0), default=(0.0, ""))[1]

    def exact_matches(weight: float) -> float:
        texts = [best_text(answer, f, weight - before) for answer, f in zip(answers, relevance, strict=True)]
        return sum(map(is_right, texts, questions))

    return max(sorted(READING_WEIGHTS, key=lambda w: abs(w - before)), key=exact_matches)
