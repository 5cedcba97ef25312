"""Two runs against each other, and what a question fails at, from files of predictions written here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_project import cli
from test_predictions import PREDICTION

from realmops.evaluate.compare import compare_runs, format_comparison, question_origin, read_paired
from realmops.evaluate.exact_match import paired_bootstrap
from realmops.evaluate.predictions import write_predictions


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


def test_other_questions_are_refused(tmp_path: Path) -> None:
    ours, theirs = results(tmp_path / "a", [True] * 5), results(tmp_path / "b", [True] * 2, first=4)
    result = cli("compare", ours, theirs)
    assert result.exit_code == 2
    told = "different questions (5 and 2): 4 (q0, q1, q2, ...) only in the first, 1 (q5) only in the second"
    assert told in result.stderr
    result = cli("compare", ours, tmp_path)
    assert result.exit_code == 2
    assert "predictions.parquet does not exist; run 'realmops run evaluate' there first" in result.stderr


@pytest.mark.parametrize("other", [{"question": "Another one?"}, {"answers": ("another one",)}])
def test_an_id_alone_pairs_no_questions(tmp_path: Path, other: dict[str, Any]) -> None:
    """Ids are unique in one file only: two sets with the ids 1, 2, 3 gave an interval once."""
    rows = [replace(PREDICTION, question_id=name) for name in "123"]
    ours, theirs = results(tmp_path / "a", []), results(tmp_path / "b", [])
    write_predictions(ours / "predictions.parquet", rows)
    write_predictions(theirs / "predictions.parquet", [rows[0], *(replace(row, **other) for row in rows[1:])])
    result = cli("compare", ours, theirs)
    assert result.exit_code == 2
    assert "id '2' is a different question in" in result.stderr
    assert "evaluate both runs on the same questions" in result.stderr


@pytest.mark.parametrize(
    ("rules", "comparable"),
    [(("en", "de"), False), (("en", "regex"), False), (("de", "de"), True), ((None, "de"), True)],
)
def test_answers_that_are_judged_by_other_rules_are_not_compared(
    tmp_path: Path, rules: tuple[str | None, str], comparable: bool
) -> None:
    """ "der Mann" is "Mann" in German alone; None is of an earlier version, which did not write the rule."""
    for name, rule in zip("ab", rules, strict=True):
        write_predictions(results(tmp_path / name, []) / "predictions.parquet", [replace(PREDICTION, answer_rule=rule)])
    result = cli("compare", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == (0 if comparable else 2), result.output
    assert (
        comparable
        or f"normalised by the rules of {rules[0]!r} in {tmp_path / 'a'} and of {rules[1]!r} in" in result.stderr
    )


def test_the_order_of_the_answers_makes_no_other_question(tmp_path: Path) -> None:
    ours, theirs = results(tmp_path / "a", []), results(tmp_path / "b", [])
    for folder, answers in ((ours, ("x", "y")), (theirs, ("y", "x"))):
        write_predictions(folder / "predictions.parquet", [replace(PREDICTION, answers=answers)])
    assert compare_runs(ours, theirs, seed=0)[0].questions == 1


GENERATED = replace(PREDICTION, em=None, f1=None, failed_at=None, generated=True)


def test_generated_questions_compare_retrieval_and_nothing_else(tmp_path: Path) -> None:
    """Earlier versions scored them: their ids tell."""
    for folder, hits, row in (("a", 6, GENERATED), ("b", 2, replace(PREDICTION, em=True))):
        rows = [replace(row, question_id=f"cloze-{n}", first_hit=0 if n < hits else 5) for n in range(8)]
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


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ([PREDICTION, PREDICTION], "was evaluated on generated questions and"),
        ([PREDICTION, GENERATED], "was evaluated on generated questions and"),
    ],
)
def test_questions_of_another_origin_are_refused(tmp_path: Path, theirs: list[Any], message: str) -> None:
    for folder, rows in (("a", [GENERATED, GENERATED]), ("b", theirs)):
        named = [replace(row, question_id=f"q{n}") for n, row in enumerate(rows)]
        write_predictions(results(tmp_path / folder, []) / "predictions.parquet", named)
    refused = cli("compare", tmp_path / "a", tmp_path / "b")
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert "questions generated from the documents measure retrieval only" in refused.stderr


def test_a_question_of_another_origin_is_named(tmp_path: Path) -> None:
    for folder, rows in (("a", [GENERATED, PREDICTION]), ("b", [PREDICTION, GENERATED])):
        named = [replace(row, question_id=f"q{n}") for n, row in enumerate(rows)]
        write_predictions(results(tmp_path / folder, []) / "predictions.parquet", named)
    assert "'q0' was generated from the documents in one of" in cli("compare", tmp_path / "a", tmp_path / "b").stderr


# ---- failures


def test_the_bootstrap_of_runs_is_that_of_questions() -> None:
    ours, theirs = np.array([1, 1, 0, 1]), np.array([0, 1, 0, 0])
    assert paired_bootstrap(ours, theirs, seed=1) == paired_bootstrap(ours - theirs, [0, 0, 0, 0], seed=1)


def test_search_alone_has_another_origin_than_answers() -> None:
    """A run without a reader never replaces one that answers, however much it retrieves."""
    assert question_origin([False, False]) == "questions of people"
    assert question_origin([False, True]) == "questions of people and generated ones"
    assert question_origin([False], has_em=False) == "questions of people, without a reader"
    assert question_origin([True], has_em=False) == question_origin([True]) == "generated questions"
