"""Calibration and abstention: the curve, its error and thresholds against slow ones, and their use in the stages."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import calibration
from small_project import Quiet, cli, question_records, stage, toy_values, write_json_lines

from realmops import artifacts
from realmops.answering.answer import Answer
from realmops.answering.confidence import ALWAYS_ABSTAIN, FILE, MIN_CALIBRATION, Confidence, log_odds
from realmops.evaluate.calibration import (
    BINS,
    calibration_error,
    confidence_figures,
    coverage_curve,
    fit_confidence,
    most_certain,
    platt_scaling,
    reliability_bins,
    threshold_for,
)
from realmops.evaluate.predictions import FAILED_AT, read_predictions, read_results

VALUES = toy_values(pretrain={"steps": 0, "builder": "external"})


def answer(p: float, text: str = "Oslo") -> Answer:
    return Answer("", None, math.log(p) if p else -math.inf, generated=text)


def drawn(count: int, slope: float = 0.5, intercept: float = -1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return log odds, and answers that are right with the probability of a curve over them."""
    rng = np.random.default_rng(0)
    odds = rng.normal(0, 3, count)
    return odds, rng.random(count) < 1 / (1 + np.exp(-(slope * odds + intercept)))


def test_log_odds_by_hand() -> None:
    odds = log_odds([math.log(0.75), math.log(0.25), -50.0, 0.0, -math.inf])
    assert odds[:3].tolist() == pytest.approx([math.log(3), -math.log(3), -50.0])
    assert (20 < odds[3] < 40, odds[4]) == (True, -math.inf), "a probability of 1 stays finite"


def test_the_curve_has_the_largest_likelihood_of_platts_targets() -> None:
    """The gradient in slope and intercept is 0; a fit of swapped labels has the slope 0 and their mean target."""
    odds, correct = drawn(300)
    right, wrong = (correct.sum() + 1) / (correct.sum() + 2), 1 / ((~correct).sum() + 2)
    slope, intercept = platt_scaling(odds, correct)
    residual = 1 / (1 + np.exp(-(slope * odds + intercept))) - np.where(correct, right, wrong)
    assert (abs(residual.sum()), abs((residual * odds).sum())) < (1e-4, 1e-4)
    slope, intercept = platt_scaling(-odds, correct)
    assert slope == 0, "more p(y|x) never means less confidence"
    assert 1 / (1 + math.exp(-intercept)) == pytest.approx(np.where(correct, right, wrong).mean())


@pytest.mark.parametrize(
    ("p", "correct", "precision", "probability", "threshold"),
    [
        ([0.2, 0.5, 0.9] * 4, [1] * 12, 0.8, 13 / 14, 0.0),  # Platt: (n + 1) / (n + 2)
        ([0.2, 0.5, 0.9] * 4, [0] * 12, 0.0, 1 / 14, 0.0),  # 1 / (n + 2)
        ([0.9] * 4, [1, 0, 1, 0], 0.5, 0.5, ALWAYS_ABSTAIN),
        ([0.1, 0.2, 0.8, 0.9], [1, 1, 0, 0], 0.1, 0.5, 0.0),
    ],
)
def test_a_score_without_information_gives_every_answer_one_probability(
    p: list[float], correct: list[int], precision: float, probability: float, threshold: float
) -> None:
    fitted = fit_confidence([answer(x) for x in p], np.array(correct, bool), precision)
    assert [fitted.probability(answer(x)) for x in p] == pytest.approx([probability] * len(p), abs=1e-4)
    assert (fitted.threshold, fitted.holds_all) == (threshold, threshold == ALWAYS_ABSTAIN)
    assert all(fitted.abstains(answer(x)) is fitted.holds_all for x in p)


def test_certain_and_missing_answers_have_a_probability() -> None:
    """P of 1, p of almost 0, and no answer, which is never right, always held back, and no point of the curve."""
    answers = [*[answer(1.0)] * 6, *[answer(0.7)] * 6, *[answer(1e-30)] * 6]
    correct = np.array([True] * 12 + [False] * 6)
    missing = [answer(0.0, "")] * 4
    alone, fitted = (
        fit_confidence([*answers, *more], np.append(correct, np.zeros(len(more), bool)), 0.8) for more in ([], missing)
    )
    assert (fitted.slope, fitted.intercept) == (alone.slope, alone.intercept)
    probabilities = [fitted.probability(x) for x in (answers[0], answers[6], answers[12], missing[0])]
    assert probabilities == sorted(probabilities, reverse=True)
    assert probabilities[-1] == 0.0 < probabilities[-2]
    assert fitted.threshold == probabilities[1], "the answer at the threshold is given"
    assert [fitted.abstains(x) for x in (answers[0], answers[6], answers[12], missing[0])] == [False, False, True, True]
    assert replace(fitted, threshold=0.0).abstains(missing[0])
    assert platt_scaling(np.full(3, -np.inf), np.zeros(3, bool)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("right", "wrong_at", "precision", "shown"),
    [
        (10, [], 0.8, 0),  # .8 ** 10 > .1: ten right answers are likely with less
        (11, [], 0.8, 11),
        (40, [10], 0.8, 0),  # the eleventh: the first threshold that is tested fails
        (40, [11], 0.8, 11),  # 11 of 12 fail, as would all later thresholds be skipped
        (40, [17], 0.8, 40),  # 17 of 18: 1 - P(X >= 17 | 18, .8) = .901
        (40, [16], 0.8, 16),
        (200, [11], 0.8, 200),  # 20 is the first that is tested: 19 of 20
        (50, range(0, 50, 2), 0.0, 50),
        (300, [], 1.0, 0),  # no number of answers is certain
    ],
)
def test_the_threshold_is_where_the_first_bound_fails(
    right: int, wrong_at: Sequence[int], precision: float, shown: int
) -> None:
    correct = np.isin(np.arange(right), [*wrong_at], invert=True)
    threshold = threshold_for(np.linspace(0.99, 0.01, right), correct, precision)
    assert (np.linspace(0.99, 0.01, right) >= threshold).sum() == shown
    assert (threshold == ALWAYS_ABSTAIN) == (shown == 0)
    assert (threshold == 0.0) == (shown == right)


@pytest.mark.parametrize(
    ("questions", "accuracy", "shown"),
    [
        *((questions, accuracy, most) for questions in (20, 50, 200) for accuracy, most in ((0.4, 0), (0.78, 100))),
        (20, None, 70),
        (50, None, 400),
        (200, None, 1_000),
    ],
)
def test_the_promise_holds_in_nine_of_ten_fits(questions: int, accuracy: float | None, shown: int) -> None:
    """Of scores without information, and of probabilities x, above which (1 + x) / 2 of the answers are right."""
    rng, broken, given = np.random.default_rng(questions), 0, 0
    for _ in range(1_000):
        x = rng.random(questions)
        threshold = threshold_for(x, rng.random(questions) < (x if accuracy is None else accuracy), 0.8)
        precision = (1 + threshold) / 2 if accuracy is None else accuracy
        given += threshold != ALWAYS_ABSTAIN
        broken += threshold != ALWAYS_ABSTAIN and precision < 0.8
    assert broken <= 100
    assert given <= shown
    assert given >= shown / 2 or accuracy, "answers that can be told apart are shown"


def test_the_calibration_error_by_hand_and_against_a_slow_one() -> None:
    """Two answers at .85 and .95, one right: |1.0 - .85| and |0 - .95|; two at .25, one right: |.5 - .25|."""
    probability, correct = np.array([0.85, 0.95, 0.25, 0.25]), np.array([True, False, True, False])
    assert calibration_error(probability, correct) == pytest.approx((0.15 + 0.95 + 2 * 0.25) / 4)
    assert reliability_bins(probability, correct) == [(0.25, 0.5, 2), (0.85, 1.0, 1), (0.95, 0.0, 1)]
    rng = np.random.default_rng(2)
    probability = np.append(rng.random(500), [0.0, 1.0])
    correct = rng.random(502) < probability**2
    slow = 0.0
    for low in range(BINS):
        rows = [n for n, p in enumerate(probability) if low / BINS <= p < (low + 1) / BINS or (low == 9 and p == 1)]
        slow += len(rows) / 502 * abs(correct[rows].mean() - probability[rows].mean())
    assert calibration_error(probability, correct) == pytest.approx(slow)


def test_coverage_and_the_most_certain_answers_keep_ties_together() -> None:
    probability, correct = np.array([0.2, 0.9, 0.6, 0.6]), np.array([False, True, False, True])
    curve = coverage_curve(probability, correct)
    assert curve.threshold.tolist() == [0.9, 0.6, 0.2]
    assert curve.coverage.tolist() == [0.25, 0.75, 1.0]
    assert curve.precision.tolist() == [1.0, pytest.approx(2 / 3), 0.5]
    assert most_certain(probability, 0.25).tolist() == [False, True, False, False]
    assert most_certain(probability, 0.3).tolist() == [False, True, True, True]


def test_a_calibration_of_some_questions_holds_on_others() -> None:
    odds, correct = drawn(2_000, intercept=-1.5)
    answers = [answer(1 / (1 + math.exp(-x))) for x in odds]
    fitted = fit_confidence(answers[:1_000], correct[:1_000], 0.6)
    figures = confidence_figures(fitted, answers[1_000:], correct[1_000:], seed=0, resamples=200)
    assert figures["ece"] < 2 * figures["ece_if_perfect"] < 0.3 * figures["ece_uncalibrated"]
    assert figures["answered_precision_low"] < 0.6 < figures["answered_precision_high"]
    assert figures["precision_at_30_low"] < figures["precision_at_30"] < figures["precision_at_30_high"]
    never = confidence_figures(calibration(0.99), [answer(0.5)], np.array([True]), seed=0, resamples=10)
    assert (never["answered"], "answered_precision" in never) == (0.0, False)


def test_a_calibration_is_saved_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    assert Confidence.load(tmp_path) is None
    for threshold in (0.5, ALWAYS_ABSTAIN):
        saved = Confidence(0.1 + 0.2, -1 / 3, threshold, 0.8, 308, "questions.dev")
        saved.save(tmp_path)
        assert Confidence.load(tmp_path) == saved
    stored = json.loads((tmp_path / FILE).read_text())
    for damage in ({"slope": math.nan}, {"threshold": None}, {"intercept": "a"}, {"more": 1}):
        (tmp_path / FILE).write_text(json.dumps(stored | damage))
        with pytest.raises(ValueError, match=r"is not a calibration of this version: found .*; .* delete"):
            Confidence.load(tmp_path)


# ---- in the stages


@pytest.fixture(scope="module")
def project(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(trained, tmp_path_factory.mktemp("confidence") / "project"))


def with_generated(project: Path, split: str, people: int) -> None:
    """Mark all questions of a split after the first ones as generated."""
    rows = [row | {"is_generated": n >= people} for n, row in enumerate(question_records(split))]
    write_json_lines(project / f"questions.{split}.jsonl", rows)


def run(project: Path, *stages: str) -> tuple[Quiet, list[dict[str, Any]]]:
    report = Quiet()
    return report, [dict(stage(name, VALUES, project, project / "root", report)) for name in stages]


def test_finetune_fits_a_calibration_and_evaluate_applies_it(project: Path) -> None:
    root = project / "root"
    report, [tuned, measured] = run(project, "finetune", "evaluate")
    assert {"dev_em", "dev_ece", "dev_precision_at_30", "dev_answered"} <= tuned.keys()
    [line] = [line for line in report.said if "wanted_precision" in line]
    stored = json.loads((root / f"models/finetune/{FILE}").read_text())
    assert (stored["questions"], stored["wanted_precision"], stored["source"]) == (20, 0.8, "questions.dev")
    assert ("the model abstains on every question" in line) == (stored["threshold"] == ALWAYS_ABSTAIN)
    assert FILE in artifacts.read_json(root / "models/finetune/manifest.json")["files"]
    rows = read_predictions(root / "results/predictions.parquet")
    assert all(row.confidence is not None and 0 < row.confidence < 1 for row in rows)
    assert [row.abstained for row in rows] == [(row.confidence or 0) < stored["threshold"] for row in rows]
    for name in ("ece", "ece_uncalibrated", "ece_if_perfect", "precision_at_30", "precision_at_30_low", "answered"):
        assert 0 <= measured[name] <= 1
    page = (root / "results/report.html").read_text()
    assert ("The model abstains from every question" in page) == all(row.abstained for row in rows)
    assert "<td>bert.vocabulary</td><td>150</td>" in page
    assert "<td>bert.positions</td>" not in page, "as the defaults have it"
    assert "Confidence and precision" in page
    assert f"confidence: {rows[0].confidence:.2f}" in cli("explain", "--root", root).stdout


def test_fewer_than_twenty_questions_of_people_give_no_calibration(project: Path) -> None:
    root = project / "root"
    with_generated(project, "dev", MIN_CALIBRATION - 1)
    report, [tuned, measured] = run(project, "finetune", "evaluate")
    assert [line for line in report.said if "no calibration: questions of people in questions.dev: 19;" in line]
    assert not (root / f"models/finetune/{FILE}").exists()
    assert [name for name in tuned if name.startswith("dev_")] == ["dev_em", "dev_f1"]
    assert not [name for name in measured if name.startswith("ece") or "answered" in name]
    rows = read_predictions(root / "results/predictions.parquet")
    assert [(row.confidence, row.abstained) for row in rows] == [(None, None)] * 2
    assert "Confidence and precision" not in (root / "results/report.html").read_text()


def test_questions_without_answers_measure_abstention_alone(project: Path) -> None:
    """They count as wrongly answered in the calibration, and not in EM; models are not trained on them."""
    root, results = project / "root", []
    for extra in (0, 5):
        for split in ("train", "dev", "test"):
            without = [{"id": f"none-{n}", "question": f"Who sank ship {n}?", "answers": []} for n in range(extra)]
            write_json_lines(project / f"questions.{split}.jsonl", [*question_records(split), *without])
        report, [tuned, measured] = run(project, "finetune", "evaluate")
        stored = json.loads((root / f"models/finetune/{FILE}").read_text())
        results.append((tuned, measured, stored))
        assert stored["questions"] == 20 + extra
        assert any("5 training questions have no answer" in line for line in report.said) == (extra == 5)
        assert len(read_predictions(root / "results/predictions.parquet")) == measured["questions"] == 2
    (plain, plain_test, curve), (tuned, measured, lower) = results
    assert "right_abstentions" not in plain_test
    assert measured["unanswerable_questions"] == 5
    assert {name: measured[name] for name in ("em", "f1")} == {name: plain_test[name] for name in ("em", "f1")}
    assert (tuned["dev_em"], tuned["questions"]) == (plain["dev_em"], plain["questions"])
    assert (lower["slope"], lower["intercept"]) != (curve["slope"], curve["intercept"])
    asked = cli("ask", "--root", root, "--from", project / "questions.test.jsonl")
    assert f"{measured['right_abstentions'] * 5:.0f} of 5 questions without answers" in asked.stderr, asked.stderr
    for split in ("train", "dev", "test"):
        write_json_lines(project / f"questions.{split}.jsonl", question_records(split))


def test_metrics_of_answers_are_those_of_questions_of_people(project: Path) -> None:
    root = project / "root"
    with_generated(project, "dev", 0)
    with_generated(project, "test", 1)
    _, [tuned, mixed] = run(project, "finetune", "evaluate")
    assert not [name for name in tuned if name.startswith("dev_")]
    rows = read_results(root)
    assert [row.is_generated for row in rows] == [False, True]
    assert (rows[1].em, rows[1].f1, rows[1].failed_at) == (None, None, None)
    assert (mixed["questions"], mixed["generated_questions"]) == (2, 1)
    assert (mixed["em"], mixed["f1"]) == (rows[0].em, rows[0].f1)
    assert mixed["recall_at_5"] == sum(0 <= row.first_hit < 5 for row in rows) / 2
    assert sum(mixed[f"failed_at_{name}"] for name in FAILED_AT if name != "correct") + mixed["em"] == 1
    shown = cli("explain", "--root", root).stdout
    assert shown.startswith("2 questions, 1 generated from the documents, to measure retrieval only")
    with_generated(project, "test", 0)
    _, [generated] = run(project, "evaluate")
    assert not [name for name in generated if "em" in name.split("_") or "f1" in name or name.startswith("failed_at")]
    assert {"bm25_recall_at_5_token_boundary", "recall_at_5", "ceiling_in_corpus"} <= generated.keys()
    page = (root / "results/report.html").read_text()
    assert not [
        text for text in ("correct</span>", "wrong</span>", "<th>EM</th>", "EM (test questions)") if text in page
    ]
    for text in (page, cli("report", "--root", root).stdout.replace("\n", " ")):
        assert "hey measure retrieval only. Label twenty of your own" in text
