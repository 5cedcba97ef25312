"""Fusion weights of embeddings, BM25 and reader scores, fitted to held-out questions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np
import torch

from realmops.answering.answer import Answer
from realmops.answering.retrieval import RetrieveAndRead
from realmops.model.retriever import FusionWeights
from realmops.questions.question_sets import Question
from realmops.search.hybrid import fit_fusion_weights

FIT_DEPTH = 50  # passages by embeddings and by BM25 that each query contributes to the fit of a hybrid's weights
READING_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


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
