"""Fine-tuning on twelve passages: the losses by hand, and the weights fitted after it."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_open_qa import BORN, NEVER, PORT, cut, open_qa, options, span_scores
from small_world import MemoryJournal, World, section, tiny_context, tiny_models
from torch import Tensor

from realmops.answering.answer import Answer, ReadPassage, Span
from realmops.answering.openqa import OpenQa
from realmops.evaluate.exact_match import is_exact_match
from realmops.model.packed import PackedBatch
from realmops.model.retriever import FusionWeights, Retriever
from realmops.model.sequences import join_query
from realmops.options import Finetune
from realmops.questions.question_sets import Question
from realmops.search.bm25 import Bm25
from realmops.search.embed import document_sequences
from realmops.search.hybrid import fit_fusion_weights
from realmops.train import fine_tuning as module
from realmops.train import in_batch_negatives as in_batch
from realmops.train.fine_tuning import (
    finetune,
    fit_reading_weight,
    fit_weights_on_questions,
    question_loss,
    train_query_tower,
)
from realmops.train.in_batch_negatives import NEIGHBOURS, group_by_passage, passage_batches, train_by_passages
from realmops.train.loop import TrainingContext
from realmops.train.parallel import ProcessGroup


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


# ---- the loss


@pytest.mark.parametrize("reading", [0.0, 0.5, 1.0])
def test_the_loss_equals_the_slow_one(world: World, reading: float) -> None:
    """Three questions with different numbers of spans, one of them without any answer in the corpus."""
    model, questions = open_qa(world, retriever_candidates=11, reader_candidates=10), [BORN, PORT, NEVER]
    model.retriever.mixture = FusionWeights(1.0, 0.0, reading)
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
            span[n] = minus_log_share([(score + reading * f[p], right) for p, row in rows for score, right in row])
    metrics = later.now()
    assert metrics["early_loss"] == pytest.approx(np.mean(early), rel=1e-4)
    assert metrics["span_loss"] == pytest.approx(np.mean(span), rel=1e-4)
    assert loss.item() == pytest.approx(np.mean(early) + np.mean(span), rel=1e-4)
    assert metrics["no_correct_passage"] == metrics["no_correct_span"] == pytest.approx(1 / 3)


# ---- the training


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


# ---- both towers learn from questions with in-batch negatives


# Passages 0, 1, 4 and 5 hold Oslo, 2, 3 and 9 hold 1950, 6 alone 1972, 8 and 2 Karl Lund
PAIRED = [
    Question("born", "Where was Anna Berg born?", ("Oslo",)),
    Question("until", "Until when did he live in Bergen?", ("1950",)),
    Question("died", "When did Maria Holm die?", ("1972",)),
    Question("never", "Who is she?", ("Nobody",)),
    Question("sold", "To whom did he sell a ship?", ("Karl Lund",)),
    Question("capital", "Which city is the capital?", ("Oslo",)),
    Question("poet", "Where is the poet from?", ("Oslo",)),
]
POSITIVES = group_by_passage([[0], [2], [6], [], [8], [5], [0]])
PASSAGES = list(POSITIVES)


def passage_options(**changes: Any) -> Finetune:
    values = {"retriever_epochs": 2, "retriever_batch_size": 2, "retriever_learning_rate": 3e-3}
    return section("finetune", **{**values, "query_wordpieces": 24, **changes})


def test_positives_by_hand() -> None:
    assert list(POSITIVES.items()) == [(0, [0, 6]), (2, [1]), (5, [5]), (6, [2]), (8, [4])]
    assert group_by_passage([[], []]) == {}


@pytest.mark.parametrize(("count", "batch_size"), [(50, 16), (50, 7), (5, 2), (3, 32), (8, 8), (1, 1)])
def test_each_epoch_has_each_passage_once_next_to_its_neighbours(count: int, batch_size: int) -> None:
    """In another order in each epoch and for each seed, in runs of eight (the first and the last may be shorter)."""
    per_epoch = math.ceil(count / batch_size)
    orders = []
    for seed, epoch in itertools.product(range(2), range(4)):
        batch = passage_batches(tiny_context(seed=seed), count, batch_size)
        batches = [batch(epoch * per_epoch + step) for step in range(per_epoch)]
        assert all(len(rows) == batch_size for rows in batches[:-1])
        order = [row for rows in batches for row in rows]
        assert sorted(order) == list(range(count))
        assert len(np.flatnonzero(np.diff(order) != 1)) <= math.ceil(count / NEIGHBOURS)
        orders.append(tuple(order))
    assert count < 50 or len({*orders}) == 8


def slow_loss(world: World, retriever: Retriever, rows: list[int], chosen: Finetune) -> float:
    """Return the mean over all questions of -log of the own passage's share among irrelevant passages."""
    losses = []
    with torch.no_grad():
        documents = {}
        for row in rows:
            [document] = document_sequences(world.snapshot, [PASSAGES[row]])
            documents[row] = retriever.document(PackedBatch([document[0]], [document[1]]))[0].double()
        for own in rows:
            for asked in POSITIVES[PASSAGES[own]]:
                question = PAIRED[asked]
                tokens = join_query(world.wordpieces(question.question), world.special, chosen.query_wordpieces)
                query, total = retriever.query(PackedBatch([tokens]))[0].double(), 0.0
                f = {row: float(retriever.scale * query @ document) for row, document in documents.items()}
                for row in rows:
                    holds = question.answers[0] in world.snapshot.text(PASSAGES[row])
                    total += math.exp(f[row]) if row == own or not holds else 0.0
                losses.append(-math.log(math.exp(f[own]) / total))
    return float(np.mean(losses))


def train_passages(world: World, chosen: Finetune, **changes: Any) -> tuple[Retriever, MemoryJournal]:
    retriever, _ = tiny_models(world, dropout=changes.pop("dropout", 0.0), seed=changes.pop("start", 0))
    context = tiny_context(**{"journal": MemoryJournal(), "checkpoint_every": 2, **changes})
    arguments = retriever, world.snapshot, PAIRED, POSITIVES, chosen
    train_by_passages(context, *arguments)
    assert isinstance(context.journal, MemoryJournal)
    return retriever, context.journal


def test_the_first_loss_equals_the_slow_one(world: World) -> None:
    """0 and 5 contain Oslo, 2 and 8 Karl Lund; neither is a negative of the other."""
    chosen = passage_options(retriever_batch_size=5, retriever_epochs=1)
    start, _ = tiny_models(world)
    _, journal = train_passages(world, chosen)
    expected = slow_loss(world, start, [0, 1, 2, 3, 4], chosen)
    assert journal.values("loss") == pytest.approx([expected], rel=1e-5)
    assert 0 <= journal.values("accuracy")[0] <= 1


# ---- several processes


@dataclass(frozen=True)
class Together(ProcessGroup):
    """One of several processes that run one after the other; the embeddings of all are gathered in a first pass."""

    gathered: list[Tensor] = field(default_factory=list)

    def gather(self, x_BD: Tensor) -> Tensor:
        if len(self.gathered) < self.size:
            self.gathered.append(x_BD.detach())
            return torch.cat([x_BD] * self.size)
        assert torch.equal(self.gathered[self.rank], x_BD)
        return torch.cat([x_BD if rank == self.rank else other for rank, other in enumerate(self.gathered)])

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        pass


@pytest.mark.parametrize("processes", [2, 3, 7])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [4, 0], [3]])
def test_the_mean_loss_of_processes_is_that_of_the_batch(
    world: World, rows: list[int], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a passage has more questions than another, and for more processes than passages."""
    monkeypatch.setattr(in_batch, "passage_batches", lambda *_: lambda step: rows)
    losses: list[float] = []

    def one_step(context: TrainingContext, groups: Any, step_loss: Any, **rest: Any) -> int:
        losses.append(step_loss(0)[0].item())
        return 0

    monkeypatch.setattr(in_batch, "fit", one_step)
    gathered: list[Tensor] = []
    for _ in range(2):
        losses.clear()
        for rank in range(processes):
            train_passages(world, passage_options(), processes=Together(rank, processes, gathered))
    assert len(losses) == processes
    start, _ = tiny_models(world)
    assert sum(losses) / processes == pytest.approx(slow_loss(world, start, rows, passage_options()), rel=1e-5)
