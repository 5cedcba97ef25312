"""The weights of embeddings, words and reading: f(x, z) of both by hand, and what is fitted to questions."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_world import World, section, tiny_models

from realmops.answering.answer import Answer, ReadPassage, Span
from realmops.answering.openqa import OpenQa
from realmops.evaluate.exact_match import is_exact_match
from realmops.model.build import add_span_head
from realmops.model.retriever import DEFAULT_FUSION_WEIGHTS, FusionWeights
from realmops.questions.question_sets import Question
from realmops.search.bm25 import Bm25
from realmops.search.embed import document_sequences, embed, query_sequences
from realmops.search.exact import ExactIndex
from realmops.search.hybrid import fit_fusion_weights
from realmops.train.fine_tuning import question_loss
from realmops.train.fusion_weights import fit_reading_weight, fit_weights_on_questions

QUESTIONS = [
    Question("born", "Where was Anna Berg born?", ("Oslo",)),
    Question("star", "Who built The Star?", ("Jon Vik",)),
    Question("died", "When did Maria Holm die?", ("1972",)),
]


def hybrid(world: World, mixture: FusionWeights = DEFAULT_FUSION_WEIGHTS, **changes: Any) -> OpenQa:
    retriever, reader = tiny_models(world)
    add_span_head(reader, 8, seed=0)
    retriever.mixture = mixture
    sequences = document_sequences(world.snapshot, range(12))
    passages = ExactIndex(embed(retriever.document, sequences, torch.float32))
    lengths = {"query_wordpieces": 24, "reader_wordpieces": 60, "answer_wordpieces": 4}
    options = section("finetune", **{"reader_candidates": 3, "retriever_candidates": 12, **lengths, **changes})
    words = Bm25.of(world.snapshot)
    return OpenQa(retriever, reader, world.snapshot, passages, options, torch.float32, None, words)


def test_relevance_is_f_of_both_with_a_gradient_into_the_query_tower(world: World) -> None:
    """Against every passage by hand; where the reader looks at three, the best three of all."""
    model = hybrid(world, FusionWeights(0.5, 3.0))
    asked = [q.question for q in QUESTIONS]
    relevance_BK, id_BK = model.relevance(asked, 3)
    query_BE = embed(model.retriever.query, query_sequences(model.queries(asked)), torch.float32)
    for b, question in enumerate(asked):
        bm25_P = model.bm25.score_passages(question, np.arange(12))
        dense_P = model.retriever.scale * (model.passages.embedding_PE @ query_BE[b]).numpy()
        f_P = 0.5 * dense_P + 3.0 * bm25_P / bm25_P.max()
        assert id_BK[b].tolist() == np.argsort(-f_P, kind="stable")[:3].tolist()
        assert relevance_BK[b].tolist() == pytest.approx(np.sort(f_P)[::-1][:3].tolist(), rel=1e-4)
    loss, _ = question_loss(model, QUESTIONS)
    loss.backward()
    weight = model.retriever.query.projection.weight
    assert weight.grad.abs().max() > 0


def test_weights_are_fitted_to_the_passages_that_hold_an_answer(world: World) -> None:
    """Those of ``fit_fusion_weights`` over all twelve passages, with another question that nothing answers."""
    model = hybrid(world)
    model.retriever.mixture = FusionWeights(1.0, 8.0, 0.5)
    asked = [*QUESTIONS, Question("never", "Who is she?", ("Nobody",))]
    found = fit_weights_on_questions(model, asked)
    parts = model.search([q.question for q in asked], 12, 12)
    ranked = zip(asked, parts.id_QK.tolist(), strict=True)
    correct = torch.tensor([[q.answers[0] in world.snapshot.text(p) for p in row] for q, row in ranked])
    expected = fit_fusion_weights(parts.dense_QK, parts.words_QK, parts.id_QK >= 0, correct)
    assert (found.dense, found.lexical, found.reading) == (expected.dense, expected.lexical, 0.5)
    assert fit_weights_on_questions(model, asked[-1:]) == FusionWeights(1.0, 8.0, 0.5), "nothing to fit to: as before"


def read(best: dict[int, tuple[str, float]], gold: tuple[int, str, float] | None = None) -> Answer:
    """An answer from the best span of each passage, by its text and score."""
    spans = [Span(text, passage, (0, len(text)), score) for passage, (text, score) in best.items()]
    right = None if gold is None else Span(gold[1], gold[0], (0, 1), gold[2])
    passages = tuple(ReadPassage(span.passage, 0.0, 0.0, None, span, None) for span in spans)
    return Answer("", max(spans, key=lambda span: span.score), read=passages, best_gold=right)


def test_the_weight_of_reading_by_hand() -> None:
    """f(x, z) is 4 and 0. At weight 1 scores are 5 and 3, that is 1 and 3 of the reader alone, who is right here.

    Below a weight of 0.5 the second passage wins; of 0.25 and 0 the first is nearer to the present one.
    """
    questions = [Question("q", "Q?", ("right",)), Question("r", "R?", ("same",))]
    answers = [
        read({7: ("wrong", 5.0), 8: ("right", 3.0)}, (8, "right", 3.0)),
        read({7: ("same", 9.0), 8: ("other", 1.0)}, (7, "same", 9.0)),
    ]
    relevance = {"Q?": [4.0, 0.0], "R?": [4.0, 0.0]}
    model: Any = SimpleNamespace(
        retriever=SimpleNamespace(mixture=FusionWeights(1.0, 1.0, 1.0)),
        options=SimpleNamespace(reader_candidates=2),
        generated_reading_weight=3.0,
        evidence=lambda asked, k: (torch.tensor([relevance[asked[0].question][:k]]), None),
    )
    assert fit_reading_weight(model, questions, answers, is_exact_match) == 0.25
    assert fit_reading_weight(model, questions[1:], answers[1:], is_exact_match) == 1.0, (
        "of equal weights the present one"
    )
    made = [replace(question, not_in=("its own passage",)) for question in questions]
    assert fit_reading_weight(model, made, answers, is_exact_match) == model.generated_reading_weight
    mixed = [made[0], questions[1]]
    assert fit_reading_weight(model, mixed, answers, is_exact_match) == 1.0, (
        "made questions do not count beside people's"
    )
