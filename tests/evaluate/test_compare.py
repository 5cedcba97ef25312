"""Two runs against each other, and what a question fails at, from files of predictions written here."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_predictions import PREDICTION

from realmops.evaluate.compare import compare_runs, format_comparison, question_origin, read_paired
from realmops.evaluate.exact_match import paired_bootstrap
from realmops.evaluate.predictions import Prediction, write_predictions


def results(folder: Path, right: list[bool], first: int = 0, first_hit: int = 0) -> Path:
    """The results of a run on questions q0, q1, ... of which some are right."""
    folder.mkdir(parents=True)
    rows = [
        replace(PREDICTION, question_id=f"q{first + i}", em=em, first_hit=first_hit, failed_at=name)
        for i, em in enumerate(right)
        for name in ["correct" if em else "reader"]
    ]
    write_predictions(folder / "predictions.parquet", rows)
    return folder


def test_a_paired_difference_with_its_certainty(tmp_path: Path) -> None:
    """50 against 40 of 100 right, each of the 40 among the 50: .1 -+ 1.96 * sqrt(.1 * .9 / 100)."""
    ours = results(tmp_path / "a" / "results", [i < 50 for i in range(100)])
    theirs = results(tmp_path / "b", [i < 40 for i in range(100)], first_hit=5)
    em, recall = compare_runs(tmp_path / "a", theirs, seed=0)
    assert (em.measure, em.questions, em.first, em.second) == ("EM", 100, 0.5, 0.4)
    assert em.difference.mean == pytest.approx(0.1)
    assert em.difference.low == pytest.approx(0.0412, abs=0.011)
    assert em.difference.p_better > 0.999
    assert (recall.measure, recall.first, recall.second) == ("recall@5", 1.0, 0.0)
    assert recall.difference.low == recall.difference.high == 1.0
    assert format_comparison(em).startswith("EM: 0.500 against 0.400, difference +0.100, 95 % interval +0.0")
    worse, _ = compare_runs(theirs, ours, seed=0)
    assert worse.difference.p_better == pytest.approx(1 - em.difference.p_better)


def test_equal_runs_are_a_toss_up() -> None:
    difference = paired_bootstrap([1, 0, 1], [1, 0, 1], seed=0)
    assert (difference.mean, difference.low, difference.high, difference.p_better) == (0, 0, 0, 0.5)
    # One question won and one lost: as often one way as the other, and both ways cancel in half of the resamples.
    assert paired_bootstrap([1, 0], [0, 1], seed=0).p_better == pytest.approx(0.5, abs=0.02)


def test_questions_are_paired_by_id(tmp_path: Path) -> None:
    ours = results(tmp_path / "a", [True, False])
    write_predictions(
        results(tmp_path / "b", []) / "predictions.parquet",
        [replace(PREDICTION, question_id="q1", em=True), replace(PREDICTION, question_id="q0", em=False)],
    )
    pair = read_paired(ours, tmp_path / "b")
    assert [[p.question_id for p in run] for run in pair] == [["q0", "q1"]] * 2
    assert compare_runs(ours, tmp_path / "b", seed=0)[0].difference.mean == 0


GENERATED = replace(PREDICTION, em=None, f1=None, failed_at=None, is_generated=True)
PERSON, FIVE = [PREDICTION, PREDICTION], [PREDICTION] * 5


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (FIVE, [replace(PREDICTION, question_id="q6")], "'q0' is .*Ada Vell.* in the first and missing in the second"),
        (PERSON, [PREDICTION, replace(PREDICTION, question="Another one?")], "'q1' is .*'Another one"),
        (PERSON, [PREDICTION, replace(PREDICTION, answers=("another",))], "'q1' is .*'another'"),
        ([PREDICTION], [replace(PREDICTION, answer_rule="de")], "'en'.* in the first .*'de'.* in the second"),
        ([GENERATED] * 2, PERSON, "generated questions and .* questions of people; EM is"),
        ([GENERATED] * 2, [PREDICTION, GENERATED], "generated questions and .* questions of people and generated ones"),
        ([GENERATED, PREDICTION], [PREDICTION, GENERATED], "'q0' is .*'generated'.* in the first"),
    ],
)  # fmt: skip
def test_runs_on_other_questions_are_refused(
    ours: list[Prediction], theirs: list[Prediction], message: str, tmp_path: Path
) -> None:
    for folder, rows in (("a", ours), ("b", theirs)):
        named = [row if row.question_id != "q1" else replace(row, question_id=f"q{n}") for n, row in enumerate(rows)]
        write_predictions(results(tmp_path / folder, []) / "predictions.parquet", named)
    with pytest.raises(ValueError, match=message):
        read_paired(tmp_path / "a", tmp_path / "b")


def test_the_order_of_the_answers_makes_no_other_question(tmp_path: Path) -> None:
    ours, theirs = results(tmp_path / "a", []), results(tmp_path / "b", [])
    for folder, answers in ((ours, ("x", "y")), (theirs, ("y", "x"))):
        write_predictions(folder / "predictions.parquet", [replace(PREDICTION, answers=answers)])
    assert compare_runs(ours, theirs, seed=0)[0].questions == 1


def test_generated_questions_compare_retrieval_and_nothing_else(tmp_path: Path) -> None:
    for folder, hits in (("a", 6), ("b", 2)):
        rows = [replace(GENERATED, question_id=f"cloze-{n}", first_hit=0 if n < hits else 5) for n in range(8)]
        write_predictions(results(tmp_path / folder, []) / "predictions.parquet", rows)
    [recall] = compare_runs(tmp_path / "a", tmp_path / "b", seed=0)
    assert (recall.questions, recall.first, recall.second) == (8, 0.75, 0.25)
    assert format_comparison(recall).startswith(
        "recall@5 (retrieval: all questions were generated from the documents): 0.750 against 0.250"
    )


def test_in_a_mixture_em_is_that_of_people(tmp_path: Path) -> None:
    for folder, right in (("a", True), ("b", False)):
        rows = [replace(PREDICTION, em=right), *(replace(GENERATED, question_id=f"cloze-{n}") for n in range(3))]
        write_predictions(results(tmp_path / folder, []) / "predictions.parquet", rows)
    em, recall = compare_runs(tmp_path / "a", tmp_path / "b", seed=0)
    assert (em.measure, em.questions, em.first, em.second) == ("EM", 1, 1.0, 0.0)
    assert (recall.measure, recall.questions) == ("recall@5", 4)


def test_search_alone_has_another_origin_than_answers() -> None:
    """A run without a reader never replaces one that answers, however much it retrieves."""
    assert question_origin([False, False]) == "questions of people"
    assert question_origin([False, True]) == "questions of people and generated ones"
    assert question_origin([False], has_em=False) == "questions of people, without a reader"
    assert question_origin([True], has_em=False) == question_origin([True]) == "generated questions"
