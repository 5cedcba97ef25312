"""Minimum risk against a slow search, and the answers that come of it."""

import itertools

import numpy as np
import pytest
from small_open_qa import BORN, NEVER, PORT, cut, open_qa
from small_world import World

from realmops.answering.decoding import minimum_bayes_risk
from realmops.answering.openqa import OpenQa
from realmops.questions.answer_matching import exact_match, token_f1
from realmops.questions.question_sets import Question

WORDS = ("the port", "of", "Bergen", "1992", "May", "in")


def expected_score(said: str, texts: list[str], p: np.ndarray) -> float:
    """The mean of exact match and F1, if one of the texts is drawn by p and is the right answer."""
    scores = [(exact_match(said, [right]) + token_f1(said, [right])) / 2 for right in texts]
    return float(np.dot(scores, p))


def test_the_text_is_the_one_with_the_highest_expected_score() -> None:
    rng = np.random.default_rng(0)
    all_texts = [" ".join(some) for n in (1, 2, 3) for some in itertools.permutations(WORDS, n)]
    others = 0
    for _ in range(300):
        texts = [all_texts[k] for k in rng.integers(len(all_texts), size=8)]
        p = np.sort(rng.dirichlet(np.full(8, 0.7)))[::-1]
        chosen = minimum_bayes_risk(texts, p * 3)
        scores = [expected_score(text, texts, p) for text in texts]
        assert scores[chosen] == pytest.approx(max(scores), rel=1e-9)
        others += chosen != 0
    assert 30 < others < 270, "neither always the first nor never"


@pytest.mark.parametrize(
    ("texts", "p", "chosen"),
    [
        (["Apple", "Walkman", "the Walkman"], [0.4, 0.35, 0.25], 1),  # two that say the same
        (["1994", "May 1992", "1992", "in May 1992"], [0.3, 0.25, 0.25, 0.2], 1),  # words in common
        (["Oslo", "Bergen"], [0.5, 0.5], 0),
        (["Oslo", "Bergen"], [0.6, 0.4], 0),
        (["the", "a", "Bergen"], [0.4, 0.2, 0.4], 0),  # texts without a word have one normal form
        (["Oslo"], [0.0], 0),
    ],
)
def test_what_a_person_would_choose(texts: list[str], p: list[float], chosen: int) -> None:
    assert minimum_bayes_risk(texts, np.array(p)) == chosen


def test_the_answer_is_that_of_a_slow_search_and_explained_as_such(world: World) -> None:
    """The best of all spans of the passages, their texts compared one by one."""
    model = open_qa(world, decoding="minimum_risk")
    plain = open_qa(world)
    questions = [BORN, PORT, NEVER]
    answers = model.answer(questions, ranked=5, batch_size=2)
    others = 0
    for question, answer, highest in zip(
        questions, answers, plain.answer(questions, ranked=5, batch_size=2), strict=True
    ):
        score_S, rows = model.spans([model.wordpieces(question.question)], [answer.passages])
        prior = np.array(answer.log_prior)[rows[:, 1]]
        logit_S = score_S.detach().double().numpy() + prior
        order = np.argsort(-logit_S, kind="stable")[: OpenQa.candidate_spans]
        texts = [cut(world, answer.passages[rank], first, last) for _, rank, first, last in rows[order].tolist()]
        p = np.exp(logit_S[order] - logit_S.max())
        scores = [expected_score(text, texts, p / p.sum()) for text in texts]
        assert scores[texts.index(answer.text)] == pytest.approx(max(scores), rel=1e-4)
        assert answer.best_of_passage == highest.best_of_passage
        others += answer.text != highest.text
        [explained] = model.read(model.find([Question("", question.question, ())]))
        assert explained.y == answer.text
        assert np.log(explained.p_y) == pytest.approx(answer.log_p, rel=1e-3)
    assert others, "one of these questions has another answer than its best span"
