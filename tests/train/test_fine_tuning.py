"""Open-QA on twelve passages: relevant passages, gold spans, answers from the text, and the losses by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_open_qa import BORN, NEVER, PORT, cut, open_qa, options, span_scores
from small_project import QUESTIONS
from small_world import MemoryJournal, World, build_world, tiny_context
from torch import Tensor

from realmops.answering.answer import Answer, ReadPassage, Span
from realmops.answering.openqa import OpenQa
from realmops.evaluate.exact_match import is_exact_match
from realmops.model.packed import PackedBatch
from realmops.model.retriever import FusionWeights
from realmops.questions.answer_matching import normalize_answer
from realmops.questions.question_sets import Question
from realmops.search.bm25 import Bm25
from realmops.search.embed import embed, query_sequences
from realmops.search.hybrid import fit_fusion_weights
from realmops.train import fine_tuning as module
from realmops.train.fine_tuning import (
    finetune,
    fit_reading_weight,
    fit_weights_on_questions,
    question_loss,
    train_query_tower,
)


def span_logits(model: OpenQa, question: Question, passages: Sequence[int]) -> list[list[tuple[float, bool]]]:
    """Return (score, is gold) of every span of each passage, one passage and one span at a time."""
    x, scores = model.wordpieces(question.question), []
    for passage in passages:
        row = span_scores(model, x, model.snapshot.body(passage)).items()
        scores.append([(score, cut(model, passage, *span) in question.answers) for span, score in row])
    return scores


def minus_log_share(values: Sequence[tuple[float, bool]], *, best_alone: bool = False) -> float:
    right = [math.exp(score) for score, is_gold in values if is_gold]
    return -math.log((max(right) if best_alone else sum(right)) / sum(math.exp(score) for score, _ in values))


# Oslo is in the first and third passage of BORN, Bergen in both of PORT.
GIVEN = {BORN.question: [0, 6, 4], PORT.question: [6, 2, -1], NEVER.question: [3, 4, -1]}


def given(world: World, **changes: Any) -> OpenQa:
    """The passages of ``GIVEN`` and no embeddings."""
    model = open_qa(world, **changes)
    model.passages = None
    model.ranker = lambda question, k: np.array([*GIVEN[question], -1, -1][:k])
    return model


@pytest.mark.parametrize("span_loss", ["marginal", "hard_em", "per_passage"])
def test_the_loss_over_given_passages_equals_the_slow_one(world: World, span_loss: str) -> None:
    model = given(world, span_loss=span_loss)
    questions = [BORN, PORT]
    loss, later = question_loss(model, questions)
    metrics = later.now()
    expected = []
    for question in questions:
        spans = span_logits(model, question, [p for p in GIVEN[question.question] if p >= 0])
        if span_loss == "per_passage":
            losses = [minus_log_share(one) for one in spans if any(is_gold for _, is_gold in one)]
            assert len(losses) == 2
            expected.append(sum(losses) / 2)
        else:
            together = [pair for one in spans for pair in one]
            expected.append(minus_log_share(together, best_alone=span_loss == "hard_em"))
    assert metrics["span_loss"] == pytest.approx(sum(expected) / 2, rel=1e-4)
    loss.backward()
    assert all(p.grad is None for p in model.retriever.parameters())


@pytest.mark.parametrize("span_loss", ["marginal", "hard_em", "per_passage", "marginal, passages found"])
def test_a_question_without_a_gold_span_has_no_gradient(world: World, span_loss: str) -> None:
    model = open_qa(world) if "found" in span_loss else given(world, span_loss=span_loss)
    loss, later = question_loss(model, [NEVER])
    metrics = later.now()
    assert (metrics["span_loss"], metrics["no_correct_passage"], metrics["no_correct_span"]) == (0.0, 1.0, 1.0)
    loss.backward()
    gradients = [p.grad for m in (model.retriever, model.reader) for p in m.parameters() if p.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


def test_recall_is_of_five_passages(world: World) -> None:
    """Oslo is in the passages 0, 1, 4 and 5."""
    model = given(world)
    for row, recall in (([2, 3, 6, 7, 0], 1.0), ([2, 3, 6, 7, 8, 0], 0.0), ([0, 2, 3, 6, 7], 1.0)):
        model.ranker = lambda question, k, row=row: np.array(row[:k])
        assert question_loss(model, [BORN])[1].now()["recall_at_5"] == recall


def test_a_ranker_determines_the_passages_and_the_retriever_does_not_learn(world: World) -> None:
    model = given(world)
    answers = model.answer([BORN, PORT], ranked=3, batch_size=2)
    assert [answer.passages for answer in answers] == [[0, 6, 4], [6, 2]]
    assert [answer.ranked for answer in answers] == [GIVEN[q.question] for q in (BORN, PORT)]
    assert answers[0].log_prior == pytest.approx([math.log(1 / 3)] * 3)
    assert answers[1].log_prior == pytest.approx([math.log(1 / 2)] * 2)
    before = [p.clone() for p in model.retriever.parameters()]
    finetune(tiny_context(), model, [BORN, PORT], options())
    assert all(torch.equal(p, old) for p, old in zip(model.retriever.parameters(), before, strict=True))


def test_the_query_tower_alone_learns_from_judged_questions(world: World) -> None:
    """The softmax of the relevant passages among the best of the whole index, by hand."""
    model, [first, _, _, second, *_] = open_qa(world), dict.fromkeys(world.snapshot.column("document_id"))
    questions = [Question("a", "Where was the poet born?", (), relevant=((second, 1), (first, 0)))]
    questions.append(Question("b", "Who?", (), relevant=(("of another corpus", 1),)))
    chosen = options(retriever_epochs=15, retriever_batch_size=2, retriever_candidates=11)
    reader = [p.clone() for p in model.reader.parameters()]
    vectors, journal = model.passages.embedding_PE.clone(), MemoryJournal()
    with torch.no_grad():
        query_E = model.retriever.query(PackedBatch(model.queries([questions[0].question])))[0]
        f = sorted(float(model.retriever.scale * query_E @ e) for e in vectors)[1:]
        own = [n for n, name in enumerate(world.snapshot.column("document_id")) if name == second]
        relevant = [float(model.retriever.scale * query_E @ vectors[n]) for n in own]
    assert min(relevant) >= f[0], "the twelfth passage is another one"
    expected = math.log(sum(map(math.exp, f))) - math.log(sum(map(math.exp, relevant)))
    train_query_tower(tiny_context(journal=journal), model, questions, chosen)
    losses = journal.values("early_loss")
    assert len(losses) == 15
    assert losses[0] == pytest.approx(expected / 2, rel=1e-3), "a question without a relevant passage counts 0"
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(model.passages.embedding_PE, vectors)
    assert all(torch.equal(p, old) for p, old in zip(model.reader.parameters(), reader, strict=True))


# ---- relevant passages and gold spans

EXPRESSION = Question("year", "When?", (r"19\d\d\b|\s?Anna (Berg|Lund)",), is_regex=True)


@pytest.mark.parametrize(
    ("question", "correct"),
    [(BORN, [0, 1, 4, 5]), (PORT, [2, 3, 6, 8, 11]), (NEVER, []), (EXPRESSION, [0, 1, 2, 3, 4, 6, 9])],
)
def test_passages_that_contain_an_answer_are_correct(world: World, question: Question, correct: list[int]) -> None:
    """In their text; titles do not count."""
    model = open_qa(world)
    assert np.flatnonzero(model.is_correct(question, range(12))).tolist() == correct
    order = [5, 2, 0]
    assert model.is_correct(question, order).tolist() == [p in correct for p in order]


def test_answers_of_two_questions_with_one_id_are_separate(world: World) -> None:
    model = open_qa(world)
    dev, train = (Question("1", q.question, q.answers) for q in (BORN, PORT))
    assert np.flatnonzero(model.is_correct(dev, range(12))).tolist() == [0, 1, 4, 5]
    assert np.flatnonzero(model.is_correct(train, range(12))).tolist() == [2, 3, 6, 8, 11]
    words, expression = (Question("1", "When?", (r"19\d\d",), is_regex=is_regex) for is_regex in (False, True))
    assert [model.is_correct(question, [0]).tolist() for question in (words, expression)] == [[False], [True]]


@pytest.mark.parametrize(
    ("question", "passages", "texts"),
    [
        (EXPRESSION, [0, 4, 6, 11], [(0, "1931"), (0, "Anna Berg"), (1, "Anna Berg"), (2, "1972")]),
        (
            Question("q", "Who?", ("Anna Berg", "1931")), [1, 11, 0, 4],
            [(0, "Anna Berg"), (2, "1931"), (2, "Anna Berg"), (3, "Anna Berg")],
        ),
        (NEVER, [0, 1], []),
    ],
)  # fmt: skip
def test_gold_spans_are_the_answers_text(
    world: World, question: Question, passages: list[int], texts: list[tuple[int, str]]
) -> None:
    gold = open_qa(world).gold(question, passages)
    assert sorted((rank, cut(world, passages[rank], first, last)) for rank, first, last in gold) == texts


def test_the_best_gold_span_is_returned_with_the_best(world: World) -> None:
    model = scripted(world, "a novel", reader_candidates=12, answer_wordpieces=20)
    [answer] = model.answer([BORN], ranked=12, batch_size=1)
    assert (answer.text, answer.best_gold.text) == ("a novel", "Oslo")
    assert answer.best_gold.score < answer.best.score
    [unanswerable] = model.answer([NEVER], ranked=12, batch_size=1)
    assert unanswerable.best_gold is None


# ---- spans


@pytest.mark.parametrize(("limit", "words"), [(60, "Where was Anna Berg born?"), (16, "Where?")])
def test_spans_are_all_those_within_passages_and_the_readers_limit(world: World, limit: int, words: str) -> None:
    """Every span of 1 to 4 wordpieces of [CLS] question [SEP] body [SEP], question by question."""
    model = open_qa(world, query_wordpieces=8 if limit == 16 else 24, reader_wordpieces=limit)
    read, tokens = [[11, 0], [9]], [model.wordpieces(words)] * 2
    with torch.no_grad():
        score_S, rows = model.spans(tokens, read)
    expected = []
    for b, ids in enumerate(read):
        for rank, passage in enumerate(ids):
            length = min(len(world.snapshot.body(passage)), limit - 3 - len(tokens[0]))
            expected += [
                (b, rank, first, last) for first in range(length) for last in range(first, min(first + 4, length))
            ]
    assert [tuple(row) for row in rows.tolist()] == expected
    assert len(score_S) == len(expected)


# ---- the loss


def test_the_loss_equals_the_slow_one(world: World) -> None:
    """Three questions with different numbers of spans, one of them without any answer in the corpus."""
    model, questions = open_qa(world, retriever_candidates=11, reader_candidates=10), [BORN, PORT, NEVER]
    early, span = [0.0] * 3, [0.0] * 3
    with torch.no_grad():
        loss, later = question_loss(model, questions)
        for n, question in enumerate(questions[:2]):
            query = model.retriever.query(PackedBatch(model.queries([question.question])))[0].double()
            f = [float(model.retriever.scale * query @ e.double()) for e in model.passages.embedding_PE]
            ranked = sorted(range(12), key=lambda p: -f[p])[:11]
            is_correct = [any(answer in world.snapshot.text(p) for answer in question.answers) for p in ranked]
            early[n] = minus_log_share([(f[p], right) for p, right in zip(ranked, is_correct, strict=True)])
            rows = zip(ranked, span_logits(model, question, ranked[:10]), strict=False)
            span[n] = minus_log_share([(score + f[p], right) for p, row in rows for score, right in row])
    metrics = later.now()
    assert metrics["early_loss"] == pytest.approx(np.mean(early), rel=1e-4)
    assert metrics["span_loss"] == pytest.approx(np.mean(span), rel=1e-4)
    assert loss.item() == pytest.approx(np.mean(early) + np.mean(span), rel=1e-4)
    assert metrics["no_correct_passage"] == metrics["no_correct_span"] == pytest.approx(1 / 3)


def test_f_of_x_and_z_is_added_to_span_scores_with_the_weight_of_reading(world: World) -> None:
    model = open_qa(world, reader_candidates=12, retriever_candidates=12)
    with torch.no_grad():
        relevance_BK, id_BK = model.evidence([BORN], 12)
        spans = span_logits(model, BORN, id_BK[0].tolist())
        for weight in (0.0, 0.5, 1.0):
            model.retriever.mixture = FusionWeights(1.0, 0.0, weight)
            added = [weight * f for f in relevance_BK[0].tolist()]
            whole = [(score + f, right) for f, one in zip(added, spans, strict=True) for score, right in one]
            found = question_loss(model, [BORN])[1].now()["span_loss"]
            assert found == pytest.approx(minus_log_share(whole), rel=1e-4)


def test_query_tower_and_reader_learn_and_embeddings_are_constant(world: World) -> None:
    model = open_qa(world, retriever_candidates=11, reader_candidates=10)
    loss, later = question_loss(model, [BORN])
    assert later.now()["no_correct_span"] == 0.0
    loss.backward()
    assert model.passages.embedding_PE.grad is None
    for part in (model.retriever.query, model.reader.bert, model.reader.spans):
        for name, parameter in part.named_parameters():
            assert (parameter.grad is not None) is parameter.requires_grad, name


# ---- answers


class Scripted(OpenQa):
    """A model that scores the span with one text 100, every other 0."""

    best_text: str

    def spans(self, tokens: Sequence[np.ndarray], passages: Sequence[Sequence[int]]) -> tuple[Tensor, np.ndarray]:
        _, rows = super().spans(tokens, passages)
        scores = []
        for b, rank, first, last in rows.tolist():
            characters, text = self.snapshot.chars(passages[b][rank]), self.snapshot.text(passages[b][rank])
            scores.append(100.0 * (text[characters[first, 0] : characters[last, 1]] == self.best_text))
        return torch.tensor(scores), rows


def scripted(world: World, best_text: str, **changes: Any) -> Scripted:
    model = open_qa(world, **changes)
    model.__class__ = Scripted
    assert isinstance(model, Scripted)
    model.best_text = best_text
    return model


def test_answers_are_cut_from_the_text(tmp_path: Path) -> None:
    """With capitals, accents, points and commas, which wordpieces lack."""
    text = "In the U.S.A., Zoë D'Arc-Lund sold 1,250 ships."
    world = build_world(tmp_path, (("Zoë", text, ("Zoë",)), ("B", "It is in Oslo.", ("Oslo",))))
    for part in ("U.S.A.", "Zoë", "D'Arc-Lund", "1,250"):
        [answer] = scripted(world, part, answer_wordpieces=20).answer([BORN], ranked=2, batch_size=4)
        assert (answer.text, answer.best.passage) == (part, 0)
        assert answer.best.characters == (text.index(part), text.index(part) + len(part))


def test_the_answer_is_the_best_span_and_its_probability_that_of_its_text(world: World) -> None:
    """By a slow search over all spans, score plus relevance; the same answers in batches as alone."""
    model = open_qa(world, reader_candidates=12, retriever_candidates=12)
    questions = [Question(str(n), question, ("",)) for n, (question, _) in enumerate(QUESTIONS["train"])]
    counted: list[int] = []
    answers, repeated = model.answer(questions, ranked=12, batch_size=4, progress=counted.append), 0
    assert counted == [4, 2]
    for question, answer in zip(questions, answers, strict=True):
        with torch.no_grad():
            score_BK, id_BK = model.relevance([question.question], 12)
            score_S, rows = model.spans([model.wordpieces(question.question)], id_BK.tolist())
        logits = [float(s) + float(score_BK[0, rank]) for s, (_, rank, _, _) in zip(score_S, rows, strict=True)]
        texts = [cut(world, int(id_BK[0, rank]), first, last) for _, rank, first, last in rows.tolist()]
        best = int(np.argmax(logits))
        assert (answer.best.passage, answer.text) == (int(id_BK[0, rows[best, 1]]), texts[best])
        assert answer.best.score == pytest.approx(logits[best], rel=1e-4)
        for number, span in enumerate(answer.best_of_passage):
            of_passage = [logit for logit, row in zip(logits, rows.tolist(), strict=True) if row[1] == number]
            assert span.score == pytest.approx(max(of_passage), rel=1e-4)
        assert answer.passages == answer.ranked == id_BK[0].tolist()
        assert answer.log_prior == pytest.approx(score_BK[0].double().softmax(-1).log().tolist(), rel=1e-3)
        normal = normalize_answer(answer.text)
        same = [math.exp(v) for v, text in zip(logits, texts, strict=True) if normalize_answer(text) == normal]
        assert answer.log_p == pytest.approx(math.log(sum(same) / sum(map(math.exp, logits))), rel=1e-4)
        repeated += len(same) > 1
    assert repeated > 1
    alone = model.answer(questions, ranked=12, batch_size=1)
    assert [(a.text, a.ranked) for a in alone] == [(a.text, a.ranked) for a in answers]


# ---- the training


def test_training_learns_the_answers(world: World) -> None:
    questions = [
        BORN,
        Question("capital", "What is the capital of Norway?", ("Oslo",)),
        Question("wrote", "Who wrote The Cold Sea?", ("Anna Berg",)),
        Question("star", "Who built The Star?", ("Jon Vik",)),
        Question("sang", "Who sang in Bergen?", ("Maria Holm",)),
    ]
    model, journal = open_qa(world, reader_candidates=5), MemoryJournal()
    before = model.passages.embedding_PE.clone()
    chosen = options(epochs=25, reader_candidates=5, retriever_learning_rate=3e-3, reader_learning_rate=3e-3)
    finetune(tiny_context(journal=journal), model, questions, chosen)
    lines = journal.lines()
    assert len(lines) == 25 * 3, "three batches of at most two an epoch"
    loss = journal.values("loss")
    assert np.mean(loss[-6:]) < 0.5 * np.mean(loss[:6])
    assert torch.equal(model.passages.embedding_PE, before)
    found = model.answer(questions, ranked=5, batch_size=5)
    right = [answer.text in question.answers for answer, question in zip(found, questions, strict=True)]
    assert sum(right) >= 3


def test_each_epoch_shuffles_the_questions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = open_qa(world), list[str]()

    def spy(model: OpenQa, questions: Sequence[Question]) -> Any:
        seen.extend(q.id for q in questions)
        return question_loss(model, questions)

    monkeypatch.setattr(module, "question_loss", spy)
    questions = [Question(str(i), "Where is it?", ("Oslo",)) for i in range(9)]
    finetune(tiny_context(), model, questions, options(epochs=3, batch_size=4))
    epochs = [seen[i : i + 9] for i in (0, 9, 18)]
    assert all(sorted(epoch) == [str(i) for i in range(9)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


# ---- fusion weights


def hybrid(world: World, mixture: FusionWeights) -> OpenQa:
    model = open_qa(world, retriever_candidates=12)
    model.retriever.mixture, model.bm25 = mixture, Bm25.of(world.snapshot)
    return model


HYBRID = [BORN, Question("star", "Who built The Star?", ("Jon Vik",)), Question("d", "When did she die?", ("1972",))]


def test_relevance_of_a_hybrid_combines_embeddings_and_bm25(world: World) -> None:
    """Against every passage by hand, with a gradient into the query tower."""
    model, questions = hybrid(world, FusionWeights(0.5, 3.0)), [q.question for q in HYBRID]
    relevance_BK, id_BK = model.relevance(questions, 3)
    query_BE = embed(model.retriever.query, query_sequences(model.queries(questions)), torch.float32)
    for b, question in enumerate(questions):
        bm25_P = model.bm25.score_passages(question, np.arange(12))
        dense_P = model.retriever.scale * (model.passages.embedding_PE @ query_BE[b]).numpy()
        f_P = 0.5 * dense_P + 3.0 * bm25_P / bm25_P.max()
        assert id_BK[b].tolist() == np.argsort(-f_P, kind="stable")[:3].tolist()
        assert relevance_BK[b].tolist() == pytest.approx(np.sort(f_P)[::-1][:3].tolist(), rel=1e-4)
    question_loss(model, HYBRID)[0].backward()
    assert model.retriever.query.projection.weight.grad.abs().max() > 0


def test_fusion_weights_are_fitted_to_relevant_passages(world: World) -> None:
    model, questions = hybrid(world, FusionWeights(1.0, 8.0, 0.5)), [*HYBRID, NEVER]
    fitted = fit_weights_on_questions(model, questions)
    parts = model.search([q.question for q in questions], 12, 12)
    ranked = zip(questions, parts.id_QK.tolist(), strict=True)
    correct = torch.tensor([[q.answers[0] in world.snapshot.text(p) for p in row] for q, row in ranked])
    expected = fit_fusion_weights(parts.dense_QK, parts.words_QK, parts.id_QK >= 0, correct)
    assert (fitted.dense, fitted.lexical, fitted.reading) == (expected.dense, expected.lexical, 0.5)
    assert fit_weights_on_questions(model, [NEVER]) == FusionWeights(1.0, 8.0, 0.5), "nothing to fit to"


def read(best: dict[int, tuple[str, float]]) -> Answer:
    """An answer from the best span of each passage, by its text and score."""
    spans = [Span(text, passage, (0, len(text)), score) for passage, (text, score) in best.items()]
    passages = tuple(ReadPassage(span.passage, 0.0, 0.0, None, span, None) for span in spans)
    return Answer("", max(spans, key=lambda span: span.score), read=passages)


def test_the_weight_of_reading_by_hand() -> None:
    """f(x, z) is 4 and 0. At weight 1 the scores of "Q?" are 5 and 3, without f(x, z) 1 and 3.

    Below a weight of 0.5 the second passage wins; of 0.25 and 0 the first is nearer to the present one.
    """
    questions = [Question("q", "Q?", ("right",)), Question("r", "R?", ("same",))]
    answers = [read({7: ("wrong", 5.0), 8: ("right", 3.0)}), read({7: ("same", 9.0), 8: ("other", 1.0)})]
    model: Any = SimpleNamespace(
        retriever=SimpleNamespace(mixture=FusionWeights(1.0, 1.0, 1.0)),
        options=SimpleNamespace(reader_candidates=2),
        generated_reading_weight=3.0,
        evidence=lambda questions, k: (torch.tensor([[4.0, 0.0][:k]]), None),
    )
    generated = [replace(question, not_in=("its own passage",)) for question in questions]
    for rows, weight in ((questions, 0.25), ([generated[0], questions[1]], 1.0), (generated, 3.0)):
        assert fit_reading_weight(model, rows, answers, is_exact_match) == weight
    assert fit_reading_weight(model, questions[1:], answers[1:], is_exact_match) == 1.0, "equal: the present weight"
