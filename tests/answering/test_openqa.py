"""The reader of ORQA on twelve passages: relevant passages, gold spans, and answers from the text."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_open_qa import BORN, NEVER, PORT, cut, open_qa
from small_project import QUESTIONS
from small_world import World, build_world
from torch import Tensor

from realmops.answering.openqa import OpenQa
from realmops.questions.answer_matching import normalize_answer
from realmops.questions.question_sets import Question

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
