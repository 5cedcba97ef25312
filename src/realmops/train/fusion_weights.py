"""The weights of embeddings, words and reading, fitted to questions that were held out."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from realmops.answering.answer import Answer
from realmops.answering.retrieval import RetrieveAndRead
from realmops.corpus.question_sets import Question
from realmops.model.retriever import Mixture
from realmops.search.hybrid import fit_mixture

FITTED = 50  # passages of either kind for each query, by which the weights of a hybrid are fitted
READING_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
READING_OF_MADE = 3.0  # where only made questions are there; good for people's (benchmarks/LOG.md, documents alone)


def fit_to_questions(model: RetrieveAndRead, questions: Sequence[Question]) -> Mixture:
    """The weights of words and embeddings under which questions best find the passages that hold an answer.

    Where no question can tell, the weights stay as they are.
    """
    start = model.retriever.mixture
    found = model.search([question.question for question in questions], FITTED, FITTED)
    correct = [model.is_correct(q, row) for q, row in zip(questions, found.id_QK.tolist(), strict=True)]
    there_QK = (found.id_QK >= 0).numpy() & ~model.sources.among(questions, found.id_QK.numpy())
    fitted = fit_mixture(
        found.dense_QK, found.words_QK, torch.from_numpy(there_QK), torch.from_numpy(np.stack(correct) & there_QK)
    )
    return start if fitted is None else replace(fitted, reading=start.reading)


def fit_reading(
    model: RetrieveAndRead,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    is_right: Callable[[str, Question], bool],
) -> float:
    """The weight of f(x, z) beside a span's score that has the highest exact match.

    Of equal ones the nearest to the present weight is taken. The best span of a passage is the same under any weight,
    so nothing has to be read again. ``is_right`` says whether an answer to a question is.

    Questions made from the corpus do not count: without the passage that they were made from, f(x, z) says less of
    where their answer stands than it does for people's questions. Where there are no others it is ``READING_OF_MADE``.
    """
    before = model.retriever.mixture.reading
    asked = [(q, answer) for q, answer in zip(questions, answers, strict=True) if not q.not_in]
    if not asked:
        return READING_OF_MADE
    questions, answers = zip(*asked, strict=True)
    with torch.no_grad():
        relevance = [model.evidence([q], model.options.reader_candidates)[0][0].tolist() for q in questions]

    def right(weight: float) -> float:
        texts = [_text(answer, f, weight - before) for answer, f in zip(answers, relevance, strict=True)]
        return sum(map(is_right, texts, questions))

    return max(sorted(READING_WEIGHTS, key=lambda w: abs(w - before)), key=right)


def _text(answer: Answer, relevance: Sequence[float], change: float) -> str:
    """Which text is the answer when f(x, z) counts for so much more."""
    spans = [
        (span.score + change * f, span.text)
        for span, f in zip(answer.best_of_passage, relevance, strict=False)
        if span is not None
    ]
    return max(spans, key=lambda span: span[0], default=(0.0, ""))[1]
