"""Exact match, its intervals and the closed-book floor."""

import numpy as np
import pytest
from scipy.stats import t

from realmops.corpus.questions import Question
from realmops.evaluate.openqa import (
    bootstrap_interval,
    bootstrap_over_seeds,
    closed_book_floor,
    paired_bootstrap,
    score_predictions,
)

QUESTIONS = [
    Question("q1", "Where was Ada Vell born?", ("Tor Hollow", "Torhollow")),
    Question("q2", "Who built the Lintel Bridge?", ("the Moors",)),
    Question("q3", "When did it burn?", ("1871",)),
    Question("q4", "Where?", ("Tor Hollow",)),
]


def test_exact_match_counts_normal_forms() -> None:
    score = score_predictions(QUESTIONS, ["torhollow!", "Moors", "in 1871", ""], seed=0)
    assert score.correct.tolist() == [True, True, False, False]
    assert score.em.mean == 0.5
    assert 0 <= score.em.low < 0.5 < score.em.high <= 1
    # "in 1871" against "1871": precision 1/2, recall 1, F1 2/3; nothing said has no word in common.
    assert score.f1_Q.tolist() == [1.0, 1.0, pytest.approx(2 / 3), 0.0]
    assert score.f1.mean == pytest.approx(2 / 3)
    assert 0 <= score.f1.low < score.f1.mean < score.f1.high <= 1


def test_f1_of_expressions_is_exact_match_by_the_same_rule() -> None:
    year = Question("q", "When?", (r"18\d\d",), is_regex=True)
    said = ["in 1871"]
    assert score_predictions([year], said, seed=0, rule="regex_search").f1_Q.tolist() == [1.0]
    assert score_predictions([year], said, seed=0, rule="regex_match").f1_Q.tolist() == [0.0]


def test_bootstrap_interval_is_the_binomial_one() -> None:
    # 100 questions, half right: the standard error is sqrt(.25 / 100) = .05, the interval .5 -+ 1.96 * .05.
    interval = bootstrap_interval([1.0] * 50 + [0.0] * 50, seed=0)
    assert interval.mean == 0.5
    assert interval.low == pytest.approx(0.402, abs=0.01)
    assert interval.high == pytest.approx(0.598, abs=0.01)
    assert interval == bootstrap_interval([1.0] * 50 + [0.0] * 50, seed=0)


def test_bootstrap_of_equal_values_has_no_width() -> None:
    interval = bootstrap_interval([1, 1, 1], seed=3)
    assert (interval.low, interval.mean, interval.high) == (1, 1, 1)


def test_runs_on_different_questions_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="3 and 2 questions"):
        paired_bootstrap([1, 0, 1], [1, 0], seed=0)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval([], seed=0)


def test_closed_book_floor_is_the_most_frequent_training_answer() -> None:
    # "tor hollow" stands in q1 and q4; "moors" and "1871" in one question each.
    answer, em = closed_book_floor(QUESTIONS, [*QUESTIONS[:2], QUESTIONS[3]])
    assert answer == "tor hollow"
    assert em == pytest.approx(2 / 3)


def test_closed_book_floor_counts_a_question_once_and_breaks_ties_by_name() -> None:
    training = [Question("a", "?", ("Zoe", "zoe", "The Zoe")), Question("b", "?", ("Abe",))]
    assert closed_book_floor(training, training) == ("abe", 0.5)


def test_over_seeds_is_of_one_seed_the_bootstrap_over_questions() -> None:
    ours, theirs = np.array([1, 1, 0, 1]), np.array([0, 1, 0, 0])
    for shared in (True, False):
        assert bootstrap_over_seeds([ours - theirs], shared=shared, seed=1) == paired_bootstrap(ours, theirs, seed=1)


def test_seeds_whose_questions_agree_have_the_interval_of_student() -> None:
    """Of eight seeds: each one's questions all differ by its own figure, so that drawing questions changes nothing."""
    means = np.array([0.02, 0.05, 0.07, 0.1, 0.11, 0.13, 0.15, 0.17])
    half = t.ppf(0.975, 7) * means.std(ddof=1) / 8**0.5
    for shared in (True, False):
        found = bootstrap_over_seeds([np.full(20, mean) for mean in means], shared=shared, seed=0)
        assert found.mean == pytest.approx(0.1)
        assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.05)
        assert found == bootstrap_over_seeds([np.full(20, mean) for mean in means], shared=shared, seed=0)


def test_questions_of_seeds_that_agree_count_as_they_are() -> None:
    """Five seeds of 400 questions, a quarter of them won: shared ones are 400 questions, own ones are 2,000."""
    won = [(np.arange(400) % 4 == 0).astype(float)] * 5
    deviation = (0.25 * 0.75) ** 0.5
    for shared, count in ((True, 400), (False, 2000)):
        found = bootstrap_over_seeds(won, shared=shared, seed=0)
        assert (found.high - found.low) / 2 == pytest.approx(1.96 * deviation / count**0.5, rel=0.05)
        assert found.p_better == 1.0


def test_a_seed_with_more_questions_counts_no_more() -> None:
    found = bootstrap_over_seeds([np.ones(3), np.zeros(300)], shared=False, seed=0)
    assert found.mean == 0.5
    assert (found.low, found.high) == (-1.0, 1.0), "two seeds say next to nothing"
