"""Open-QA on twelve passages: what counts as correct, gold spans, answers cut from the text, the loss by hand."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_open_qa import BORN, NEVER, PORT, cut, open_qa, options
from small_project import QUESTIONS
from small_world import MemoryJournal, World, build_world, tiny_context, tiny_optimiser
from torch import Tensor

from realmops.answering.openqa import OpenQa
from realmops.model.packed import PackedBatch
from realmops.model.retriever import FusionWeights
from realmops.model.sequences import join_query, join_reader
from realmops.options import finetune_steps
from realmops.questions.answer_matching import normalize_answer
from realmops.questions.question_sets import Question
from realmops.train import fine_tuning as module
from realmops.train.fine_tuning import finetune, query_steps, question_loss, train_query_tower


def span_logits(model: OpenQa, question: Question, passages: list[int]) -> list[list[tuple[float, bool]]]:
    """(score, is gold) of every span of each passage, read one by one."""
    gold = model.gold(question, passages)
    found = []
    for rank, passage in enumerate(passages):
        score_S, rows = model.spans([model.wordpieces(question.question)], [[passage]])
        is_gold = [(rank, int(first), int(last)) in gold for _, _, first, last in rows]
        found.append(list(zip(score_S.tolist(), is_gold, strict=True)))
    return found


def minus_log_share(values: Sequence[tuple[float, bool]], *, best_alone: bool = False) -> float:
    right = [math.exp(score) for score, is_gold in values if is_gold]
    return -math.log((max(right) if best_alone else sum(right)) / sum(math.exp(score) for score, _ in values))


# Of BORN: Oslo is in the first and third; of PORT: Bergen is in both.
GIVEN = {BORN.question: [0, 6, 4], PORT.question: [6, 2, -1], NEVER.question: [3, 4, -1]}


def given(world: World, **changes: Any) -> OpenQa:
    """The passages of ``GIVEN`` and no embeddings."""
    model = open_qa(world, **changes)
    model.passages = None
    model.ranker = lambda question, k: np.array([*GIVEN[question], -1, -1][:k])
    return model


@pytest.mark.parametrize("span_loss", ["marginal", "hard_em", "per_passage"])
def test_the_loss_over_given_passages_is_the_slow_one(world: World, span_loss: str) -> None:
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
    assert all(p.grad is None for p in model.retriever.parameters()), "nothing of the retriever learns"


@pytest.mark.parametrize("span_loss", ["marginal", "hard_em", "per_passage", "marginal, passages found"])
def test_a_question_without_a_gold_span_teaches_nothing_given_or_not(world: World, span_loss: str) -> None:
    model = open_qa(world) if "found" in span_loss else given(world, span_loss=span_loss)
    loss, later = question_loss(model, [NEVER])
    metrics = later.now()
    assert (metrics["span_loss"], metrics["no_correct_passage"], metrics["no_correct_span"]) == (0.0, 1.0, 1.0)
    loss.backward()
    gradients = [p.grad for m in (model.retriever, model.reader) for p in m.parameters() if p.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


def test_recall_looks_at_five_passages(world: World) -> None:
    """Oslo is in the passages 0, 1, 4 and 5: once the fifth that is found is the first with it, once the sixth is."""
    model = given(world)
    for row, recall in (([2, 3, 6, 7, 0], 1.0), ([2, 3, 6, 7, 8, 0], 0.0), ([0, 2, 3, 6, 7], 1.0)):
        model.ranker = lambda question, k, row=row: np.array(row[:k])
        assert question_loss(model, [BORN])[1].now()["recall_at_5"] == recall


def test_what_is_given_is_read_and_nothing_else(world: World) -> None:
    model = given(world)
    answers = model.answer([BORN, PORT], ranked=3, batch_size=2)
    assert [answer.passages for answer in answers] == [[0, 6, 4], [6, 2]]
    assert [answer.ranked for answer in answers] == [GIVEN[q.question] for q in (BORN, PORT)]
    assert answers[0].log_prior == pytest.approx([math.log(1 / 3)] * 3)
    assert answers[1].log_prior == pytest.approx([math.log(1 / 2)] * 2), "one each, none for what is not there"
    before = [p.clone() for p in model.retriever.parameters()]
    finetune(tiny_context(), model, [BORN, PORT], options(), tiny_optimiser())
    assert all(torch.equal(p, old) for p, old in zip(model.retriever.parameters(), before, strict=True))


def test_a_query_tower_learns_alone_from_judged_questions(world: World) -> None:
    """By hand: the softmax of the relevant passages among the best of the whole index, as the optimiser sees it."""
    model, [first, second, *_] = open_qa(world), dict.fromkeys(world.snapshot.column("document_id"))
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
    train_query_tower(tiny_context(journal=journal), model, questions, chosen, tiny_optimiser())
    losses = journal.values("early_loss")
    assert len(losses) == query_steps(2, chosen) == 15
    assert losses[0] == pytest.approx(expected / 2, rel=1e-3), "a question without a relevant passage counts 0"
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(model.passages.embedding_PE, vectors)
    assert all(torch.equal(p, old) for p, old in zip(model.reader.parameters(), reader, strict=True))


# ---- what is correct


def test_passages_that_contain_an_answer(world: World) -> None:
    """Oslo stands in the texts of passages 0, 1, 4 and 5; titles do not count."""
    model = open_qa(world)
    found = model.is_correct(BORN, range(12))
    assert np.flatnonzero(found).tolist() == [0, 1, 4, 5]
    assert model.is_correct(BORN, [5, 2, 0]).tolist() == [True, False, True]
    assert np.flatnonzero(model.is_correct(PORT, range(12))).tolist() == [2, 3, 6, 8, 11]
    assert not model.is_correct(NEVER, range(12)).any()


def test_questions_of_two_files_with_one_id_have_answers_of_their_own(world: World) -> None:
    """A hybrid looks at the dev questions first: what is right for these is not right for those of train."""
    model = open_qa(world)
    dev, train = (Question("1", q.question, q.answers) for q in (BORN, PORT))
    assert np.flatnonzero(model.is_correct(dev, range(12))).tolist() == [0, 1, 4, 5]
    assert np.flatnonzero(model.is_correct(train, range(12))).tolist() == [2, 3, 6, 8, 11]
    words, expression = (Question("1", "When?", (r"19\d\d",), is_regex=is_regex) for is_regex in (False, True))
    assert [model.is_correct(question, [0]).tolist() for question in (words, expression)] == [[False], [True]]


EXPRESSION = Question("year", "When?", (r"19\d\d\b|\s?Anna (Berg|Lund)",), is_regex=True)


def test_matches_of_an_expression_are_correct_passages_and_gold_spans(world: World) -> None:
    """1931 is in passage 0, 1950 in 2, 3 and 9, 1972 in 6, Anna Berg in 0, 1 and 4, less the blank before it."""
    model = open_qa(world)
    assert np.flatnonzero(model.is_correct(EXPRESSION, range(12))).tolist() == [0, 1, 2, 3, 4, 6, 9]
    found = model.gold(EXPRESSION, [0, 4, 6, 11])
    texts = sorted((rank, cut(world, [0, 4, 6, 11][rank], first, last)) for rank, first, last in found)
    assert texts == [(0, "1931"), (0, "Anna Berg"), (1, "Anna Berg"), (2, "1972")]


def test_the_best_right_span_is_told_beside_the_best(world: World) -> None:
    """The reader wants "a novel"; the right span has score 0 and the passage's f(x, z)."""
    model = scripted(world, "a novel", reader_candidates=12, answer_wordpieces=20)
    [answer] = model.answer([BORN], ranked=12, batch_size=1)
    assert answer.text == "a novel"
    assert answer.best_gold.text == "Oslo"
    assert answer.best_gold.score < answer.best.score
    [unanswerable] = model.answer([NEVER], ranked=12, batch_size=1)
    assert unanswerable.best_gold is None


def test_gold_spans_are_the_answers_text(world: World) -> None:
    """ "Anna Berg" begins passage 0 and stands in the middle of passages 1 and 4; once in each."""
    model = open_qa(world)
    question = Question("q", "Who?", ("Anna Berg", "1931"))
    found = model.gold(question, [1, 11, 0, 4])
    texts = sorted((rank, cut(world, [1, 11, 0, 4][rank], first, last)) for rank, first, last in found)
    assert texts == [(0, "Anna Berg"), (2, "1931"), (2, "Anna Berg"), (3, "Anna Berg")]
    assert model.gold(NEVER, [0, 1]) == set()


# ---- spans


def test_spans_are_all_those_inside_the_passages(world: World) -> None:
    """Every span of 1 to 4 wordpieces of every passage that is read, question by question."""
    model = open_qa(world)
    read = [[11, 0], [9]]
    tokens = [model.wordpieces(q.question) for q in (BORN, PORT)]
    with torch.no_grad():
        score_S, rows = model.spans(tokens, read)
    expected = [
        (b, rank, first, last)
        for b, ids in enumerate(read)
        for rank, passage in enumerate(ids)
        for first in range(len(world.snapshot.body(passage)))
        for last in range(first, min(first + 4, len(world.snapshot.body(passage))))
    ]
    assert [tuple(row) for row in rows.tolist()] == expected
    assert len(score_S) == len(expected)


def test_spans_behind_the_readers_limit_do_not_exist(world: World) -> None:
    """Room for 16: [CLS], question, [SEP], what is left of the body, [SEP]."""
    model = open_qa(world, query_wordpieces=8, reader_wordpieces=16)
    tokens = [model.wordpieces("Where?")]
    with torch.no_grad():
        _, rows = model.spans(tokens, [[0]])
    assert rows[:, 3].max() == 16 - 3 - len(tokens[0]) - 1


# ---- the loss


def slow_loss(world: World, model: OpenQa, question: Question) -> tuple[float, float]:
    """Early and span loss of one question, one passage and one span at a time, in probability space."""
    chosen, snapshot, special = model.options, world.snapshot, world.special
    tokens = model.wordpieces(question.question)
    query = model.retriever.query(PackedBatch([join_query(tokens, special, chosen.query_wordpieces)]))[0].double()
    f = [float(model.retriever.scale * query @ e.double()) for e in model.passages.embedding_PE]
    ranked = sorted(range(len(f)), key=lambda p: -f[p])[: chosen.retriever_candidates]
    has_answer = [any(answer in snapshot.text(p) for answer in question.answers) for p in ranked]
    early = 0.0
    if any(has_answer):
        right = sum(math.exp(f[p]) for p, ok in zip(ranked, has_answer, strict=True) if ok)
        early = -math.log(right / sum(math.exp(f[p]) for p in ranked))
    right, total = 0.0, 0.0
    assert model.reader.spans is not None
    for passage in ranked[: chosen.reader_candidates]:
        joined, segments, offset = join_reader(tokens, snapshot.body(passage), special, chosen.reader_wordpieces)
        hidden = model.reader.bert(PackedBatch([joined], [segments]))
        for first in range(len(snapshot.body(passage))):
            for last in range(first, min(first + chosen.answer_wordpieces, len(snapshot.body(passage)))):
                at = torch.tensor([offset + first]), torch.tensor([offset + last])
                mass = math.exp(float(model.reader.spans(hidden, *at)) + f[passage])
                total += mass
                right += mass * (cut(world, passage, first, last) in question.answers)
    return early, -math.log(right / total) if right else 0.0


def test_the_loss_is_the_slow_ones(world: World) -> None:
    """Three questions with different numbers of spans; one of them without any answer in the corpus."""
    model = open_qa(world, retriever_candidates=11, reader_candidates=10)
    questions = [BORN, PORT, NEVER]
    with torch.no_grad():
        loss, later = question_loss(model, questions)
        metrics = later.now()
        parts = [slow_loss(world, model, question) for question in questions]
    assert parts[2] == (0.0, 0.0)
    assert min(early for early, _ in parts[:2]) > 0
    assert min(span for _, span in parts[:2]) > 0
    assert metrics["early_loss"] == pytest.approx(np.mean([early for early, _ in parts]), rel=1e-4)
    assert metrics["span_loss"] == pytest.approx(np.mean([span for _, span in parts]), rel=1e-4)
    assert loss.item() == pytest.approx(np.mean([sum(part) for part in parts]), rel=1e-4)
    assert metrics["no_correct_passage"] == pytest.approx(1 / 3)
    assert metrics["no_correct_span"] == pytest.approx(1 / 3)


def test_relevance_counts_as_much_as_reading_says(world: World) -> None:
    """With a weight of 0 the loss of spans is that of their own scores alone; with any, f(x, z) comes to each."""
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


def test_the_passages_stay_and_query_and_reader_learn(world: World) -> None:
    """Gradients reach the query tower through both losses, and the reader; the embeddings are constants."""
    model = open_qa(world, retriever_candidates=11, reader_candidates=10)
    loss, later = question_loss(model, [BORN])
    metrics = later.now()
    assert metrics["no_correct_span"] == 0.0
    loss.backward()
    assert model.passages.embedding_PE.grad is None
    for name, parameter in model.retriever.query.named_parameters():
        assert (parameter.grad is not None) is parameter.requires_grad, name
    for name, parameter in [*model.reader.bert.named_parameters(), *model.reader.spans.named_parameters()]:
        assert (parameter.grad is not None) is parameter.requires_grad, name
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("candidates", [3, 12, 5000])
def test_relevance_ranks_the_frozen_passages(world: World, candidates: int) -> None:
    """The top passages by a plain product, with f(x, z) as the score; at most all of them."""
    model = open_qa(world)
    tokens = [model.wordpieces(q.question) for q in (BORN, PORT)]
    with torch.no_grad():
        score_BK, id_BK = model.relevance([q.question for q in (BORN, PORT)], candidates)
        joined = [join_query(t, world.special, model.options.query_wordpieces) for t in tokens]
        plain_BP = model.retriever.scale * model.retriever.query(PackedBatch(joined)) @ model.passages.embedding_PE.T
    count = min(candidates, 12)
    assert id_BK.tolist() == plain_BP.argsort(dim=1, descending=True)[:, :count].tolist()
    torch.testing.assert_close(score_BK, plain_BP.gather(1, id_BK))


# ---- answers


class Scripted(OpenQa):
    """Span scores by wish: the span whose text is wanted gets 100, every other 0."""

    wanted: Sequence[str]

    def spans(self, tokens: Sequence[np.ndarray], passages: Sequence[Sequence[int]]) -> tuple[Tensor, np.ndarray]:
        _, rows = super().spans(tokens, passages)
        scores = []
        for b, rank, first, last in rows.tolist():
            passage = passages[b][rank]
            characters = self.snapshot.chars(passage)
            text = self.snapshot.text(passage)[characters[first, 0] : characters[last, 1]]
            scores.append(100.0 if text == self.wanted[b] else 0.0)
        return torch.tensor(scores), rows


def scripted(world: World, *wanted: str, **changes: Any) -> Scripted:
    model = open_qa(world, **changes)
    model.__class__ = Scripted
    assert isinstance(model, Scripted)
    model.wanted = wanted
    return model


def test_answers_are_cut_from_the_text(tmp_path: Path) -> None:
    """Capitals, accents, points and commas as they stand, which wordpieces have lost; with the evidence."""
    text = "In the U.S.A., Zoë D'Arc-Lund sold 1,250 ships."
    world = build_world(tmp_path, (("Zoë", text, ("Zoë",)), ("B", "It is in Oslo.", ("Oslo",))))
    for wanted in ("U.S.A.", "Zoë", "D'Arc-Lund", "1,250"):
        model = scripted(world, wanted, answer_wordpieces=20)
        [found] = model.answer([BORN], ranked=2, batch_size=4)
        assert found.text == wanted
        assert found.best.passage == 0
        assert found.best.characters == (text.index(wanted), text.index(wanted) + len(wanted))


def test_the_best_span_over_passages_and_relevance_wins(world: World) -> None:
    """By a slow search over all spans of the passages read, score plus relevance."""
    model = open_qa(world)
    told: list[int] = []
    questions = [BORN, PORT, NEVER]
    answers = model.answer(questions, ranked=5, batch_size=2, progress=told.append)
    assert told == [2, 1]
    for question, answer in zip(questions, answers, strict=True):
        tokens = model.wordpieces(question.question)
        with torch.no_grad():
            score_BK, id_BK = model.relevance([question.question], 5)
            score_S, rows = model.spans([tokens], [id_BK[0, :3].tolist()])
        logits = [float(s) + float(score_BK[0, rank]) for s, (_, rank, _, _) in zip(score_S, rows, strict=True)]
        best = int(np.argmax(logits))
        _, rank, first, last = rows[best].tolist()
        assert answer.best.passage == id_BK[0, rank]
        assert answer.text == answer.best.text == cut(world, answer.best.passage, first, last)
        assert answer.best.score == pytest.approx(logits[best], rel=1e-4)
        for number, span in enumerate(answer.best_of_passage):
            assert span.score == pytest.approx(
                max(logit for logit, row in zip(logits, rows.tolist(), strict=True) if row[1] == number), rel=1e-4
            )
        assert answer.passages == id_BK[0, :3].tolist()
        assert answer.ranked == id_BK[0].tolist()
        prior = score_BK[0, :3].double().softmax(-1).log()
        assert answer.log_prior == pytest.approx(prior.tolist(), rel=1e-3)


def test_the_probability_of_an_answer_is_summed_over_its_places_in_all_passages(world: World) -> None:
    """By a slow search for the answer's words in the text of the passages, and one softmax over all their spans."""
    model = open_qa(world, reader_candidates=12, retriever_candidates=12)
    asked = [Question(str(n), question, ("",)) for n, (question, _) in enumerate(QUESTIONS["train"])]
    several = 0
    for question, answer in zip(asked, model.answer(asked, ranked=5, batch_size=4), strict=True):
        with torch.no_grad():
            score_BK, id_BK = model.relevance([question.question], 12)
            score_S, rows = model.spans([model.wordpieces(question.question)], id_BK.tolist())
        everything, said = 0.0, []
        for score, (_, rank, first, last) in zip(score_S.tolist(), rows.tolist(), strict=True):
            passage = int(id_BK[0, rank])
            characters, text = world.snapshot.chars(passage), world.snapshot.text(passage)
            start, end = int(characters[first, 0]), int(characters[last, 1])
            weight = math.exp(score + float(score_BK[0, rank]))
            everything += weight
            if normalize_answer(text[start:end]) == normalize_answer(answer.text):
                said.append(weight)
        several += len(said) > 1
        assert answer.log_p == pytest.approx(math.log(sum(said) / everything), rel=1e-4)
    assert several > 1


def test_batches_do_not_change_answers(world: World) -> None:
    model = open_qa(world)
    questions = [BORN, PORT, NEVER]
    together = model.answer(questions, ranked=5, batch_size=3)
    apart = model.answer(questions, ranked=5, batch_size=1)
    assert [a.text for a in together] == [a.text for a in apart]
    assert [a.ranked for a in together] == [a.ranked for a in apart]


# ---- the training


@pytest.mark.parametrize(("epochs", "steps"), [(0, 0), (1, 3), (2, 6), (0.5, 2), (0.01, 1)])
def test_a_part_of_an_epoch_is_some_of_its_batches(epochs: float, steps: int) -> None:
    """Nine questions, four at a time, are three batches."""
    assert finetune_steps(9, options(epochs=epochs, batch_size=4)) == steps


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
    finetune(tiny_context(journal=journal), model, questions, chosen, tiny_optimiser())
    lines = journal.lines()
    assert len(lines) == 25 * 3, "three batches of two an epoch, the last with one question"
    loss = journal.values("loss")
    assert np.mean(loss[-6:]) < 0.5 * np.mean(loss[:6])
    assert torch.equal(model.passages.embedding_PE, before)
    found = model.answer(questions, ranked=5, batch_size=5)
    right = [answer.text in question.answers for answer, question in zip(found, questions, strict=True)]
    assert sum(right) >= 3


def test_each_epoch_sees_each_question_once_in_an_order_of_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = open_qa(world), list[str]()

    def spy(model: OpenQa, questions: Sequence[Question]) -> Any:
        seen.extend(q.id for q in questions)
        return question_loss(model, questions)

    monkeypatch.setattr(module, "question_loss", spy)
    questions = [Question(str(i), "Where is it?", ("Oslo",)) for i in range(9)]
    finetune(tiny_context(), model, questions, options(epochs=3, batch_size=4), tiny_optimiser())
    epochs = [seen[i : i + 9] for i in (0, 9, 18)]
    assert all(sorted(epoch) == [str(i) for i in range(9)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
