"""Exact match, its intervals and the closed-book floor."""

import numpy as np
import pytest
from scipy.stats import t

from realmops.evaluate.exact_match import (
    bootstrap_interval,
    closed_book_floor,
    interval_over_seeds,
    paired_bootstrap,
    score_predictions,
)
from realmops.questions.question_sets import Question

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


def test_closed_book_floor_can_be_an_answer_without_a_normal_form() -> None:
    """Two of three questions of a test with the choices A and B have the answer A."""
    asked = [Question(str(n), "Which?", (answer,)) for n, answer in enumerate("AAB")]
    assert closed_book_floor(asked, asked) == ("A", pytest.approx(2 / 3))


def test_seeds_with_separate_questions_have_the_interval_of_student() -> None:
    """Means .2, .4 and .6: standard deviation .2, standard error .2 / sqrt(3) = .11547, and t(2) at .975 is 4.3027."""
    seeds = [np.array([0.0, 0.4]), np.array([0.4]), np.array([0.4, 0.6, 0.8])]
    found = interval_over_seeds(seeds, shared=False, seed=0)
    assert found.mean == pytest.approx(0.4)
    assert (found.low, found.high) == (pytest.approx(0.4 - 0.49683, abs=1e-4), pytest.approx(0.4 + 0.49683, abs=1e-4))
    assert found.p_better == pytest.approx(t.cdf(0.4 / 0.11547, 2), abs=1e-4)
    kept = interval_over_seeds(seeds, shared=False, seed=0, least=0)
    assert (kept.low, kept.high) == (0.0, found.high), "no share is below 0"
    assert interval_over_seeds([one / 2 + 0.7 for one in seeds], shared=False, seed=0).high == 1.0


def test_questions_that_all_seeds_share_add_their_variance() -> None:
    """Two seeds of four questions: means .75 and .25 of seeds, 1, .5, .5 and 0 of questions; mean .5.

    Seeds: variance 1/8, of the mean 1/16. What neither explains is .25 or -.25 in all eight places: mean square
    8 * .0625 / 3 = 1/6. Questions: variance 1/6, of which 1/12 is that rest; of the mean (1/6 - 1/12) / 4 = 1/48.
    """
    values = [np.array([1.0, 1.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0, 0.0])]
    found = interval_over_seeds(values, shared=True, seed=0)
    error, times = (1 / 16 + 1 / 48) ** 0.5, (3 / 4) * t.ppf(0.975, 1) + (1 / 4) * t.ppf(0.975, 3)
    assert found.mean == 0.5
    assert (found.low, found.high) == (-1.0, 1.0), "two seeds of four questions show next to nothing"
    small = interval_over_seeds([one / 100 for one in values], shared=True, seed=0)
    assert small.high - small.mean == small.mean - small.low == pytest.approx(times * error / 100)
    assert small.p_better == pytest.approx((3 / 4) * t.cdf(0.5 / error, 1) + (1 / 4) * t.cdf(0.5 / error, 3))


def test_seeds_with_the_same_mean_by_chance_have_an_interval() -> None:
    """Two seeds of 50 questions, half of them right: of the 100 the standard error is .05."""
    found = interval_over_seeds([[1.0] * 25 + [0.0] * 25] * 2, shared=False, seed=0)
    assert found.mean == 0.5
    assert (found.low, found.high) == (pytest.approx(0.402, abs=0.01), pytest.approx(0.598, abs=0.01))


def test_no_difference_is_as_often_above_as_below() -> None:
    for shared in (True, False):
        same = interval_over_seeds([np.zeros(4)] * 2, shared=shared, seed=0)
        assert (same.mean, same.low, same.high, same.p_better) == (0, 0, 0, 0.5)
        missing = interval_over_seeds([np.full(4, np.nan)] * 2, shared=shared, seed=0)
        assert np.isnan([missing.mean, missing.low, missing.high]).all()
