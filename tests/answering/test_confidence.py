"""How certain answers are: the curve against scikit-learn's, its error and thresholds against slow ones, every edge."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import calibration
from small_project import Quiet, cli, question_records, stage, toy_values, write_json_lines

from realmops import artifacts
from realmops.answering.answer import Answer
from realmops.answering.confidence import (
    ALWAYS_ABSTAIN,
    FILE,
    MIN_CALIBRATION,
    Confidence,
    log_odds,
)
from realmops.corpus.snapshot_reader import Snapshot
from realmops.evaluate.calibration import (
    BINS,
    calibration_error,
    chance_error,
    confidence_figures,
    coverage_curve,
    fit_confidence,
    most_certain,
    platt_scaling,
    reliability_bins,
    threshold_for,
)
from realmops.evaluate.predictions import FAILED_AT, read_predictions, read_results


def answer(p: float, text: str = "Oslo") -> Answer:
    return Answer("", None, math.log(p) if p else -math.inf, generated=text)


def drawn(count: int, seed: int = 0, slope: float = 0.5, intercept: float = -1.0) -> tuple[np.ndarray, np.ndarray]:
    """Log odds, and answers that are right with the probability of a curve over them."""
    rng = np.random.default_rng(seed)
    odds = rng.normal(0, 3, count)
    return odds, rng.random(count) < 1 / (1 + np.exp(-(slope * odds + intercept)))


def test_log_odds_by_hand() -> None:
    """3 : 1 and 1 : 3; a probability of 1 stays finite, of which the smallest keeps its digits."""
    odds = log_odds([math.log(0.75), math.log(0.25), -50.0, 0.0, -math.inf])
    assert odds[:3].tolist() == pytest.approx([math.log(3), -math.log(3), -50.0])
    assert 20 < odds[3] < 40
    assert odds[4] == -math.inf


def test_the_curve_has_the_largest_likelihood_of_platts_targets() -> None:
    """The gradient in slope and intercept is 0; a fit of swapped labels has the slope 0 and their mean target."""
    odds, correct = drawn(300)
    right, wrong = (correct.sum() + 1) / (correct.sum() + 2), 1 / ((~correct).sum() + 2)
    slope, intercept = platt_scaling(odds, correct)
    residual = 1 / (1 + np.exp(-(slope * odds + intercept))) - np.where(correct, right, wrong)
    assert (abs(residual.sum()), abs((residual * odds).sum())) < (1e-4, 1e-4)
    slope, intercept = platt_scaling(-odds, correct)
    assert slope == 0
    assert 1 / (1 + math.exp(-intercept)) == pytest.approx(np.where(correct, right, wrong).mean())


def test_where_all_are_right_or_wrong_every_answer_gets_platts_share() -> None:
    """(n + 1) / (n + 2) for n right ones, 1 / (n + 2) for n wrong ones, however sure the model is; one is enough."""
    for sure in ([answer(0.6)], [answer(p) for p in (0.2, 0.5, 0.9)]):
        count = len(sure)
        right = fit_confidence(sure, np.ones(count, bool), 0.8)
        assert [right.probability(one) for one in sure] == pytest.approx([(count + 1) / (count + 2)] * count, abs=1e-4)
        assert right.threshold == 0.0
        assert not any(map(right.abstains, [*sure, answer(1e-9)]))
        wrong = fit_confidence(sure, np.zeros(count, bool), 0.8)
        assert [wrong.probability(one) for one in sure] == pytest.approx([1 / (count + 2)] * count, abs=1e-4)
        assert wrong.threshold == ALWAYS_ABSTAIN
        assert all(map(wrong.abstains, [*sure, answer(1.0)])), "no threshold reaches what is wanted"
        assert wrong.holds_all
        assert not right.holds_all


def test_answers_that_are_equally_sure_are_equally_right() -> None:
    """Two of four: .5 for all; a threshold has all of them or none."""
    alike, correct = [answer(0.9)] * 4, np.array([True, False, True, False])
    found = fit_confidence(alike, correct, 0.5)
    assert [found.probability(one) for one in alike] == pytest.approx([0.5] * 4, abs=1e-4)
    assert found.threshold == 0.0
    assert fit_confidence(alike, correct, 0.6).holds_all


def test_a_model_that_is_surest_where_it_is_wrong_is_no_guide() -> None:
    """The slope stays at 0: more p(y|x) never means less confidence."""
    found = fit_confidence([answer(p) for p in (0.1, 0.2, 0.8, 0.9)], np.array([True, True, False, False]), 0.8)
    assert found.slope == 0.0
    assert found.probability(answer(0.05)) == found.probability(answer(0.95)) == pytest.approx(0.5, abs=1e-4)


def test_certain_answers_and_none_at_all_break_nothing() -> None:
    """p of 1, p of almost 0, and no answer: that has no chance to be right, and is held back whatever is wanted."""
    answers = [answer(1.0), answer(0.7), answer(1e-30), answer(0.0, "")]
    found = fit_confidence(answers, np.array([True, True, False, False]), 0.8)
    assert all(map(math.isfinite, (found.slope, found.intercept)))
    probabilities = [found.probability(one) for one in answers]
    assert probabilities == sorted(probabilities, reverse=True)
    assert probabilities[-1] == 0.0 < probabilities[-2]
    assert found.abstains(answer(0.0, ""))
    assert replace(found, threshold=0.0).abstains(answer(0.0, ""))
    only_silent = fit_confidence(answers[-1:], np.array([False]), 0.8)
    assert (only_silent.probability(answers[-1]), only_silent.holds_all) == (0.0, True)


def test_the_answer_at_the_threshold_is_given() -> None:
    """The threshold is the probability of an answer that counts among the given ones."""
    answers = [answer(p) for p in (0.9, 0.7, 0.4, 0.1)]
    found = fit_confidence(answers, np.array([True, True, False, False]), 1.0)
    assert found.threshold == found.probability(answers[1])
    assert [found.abstains(one) for one in answers] == [False, False, True, True]


@pytest.mark.parametrize("damage", [{"slope": math.nan}, {"threshold": None}, {"intercept": "a"}, {"more": 1}])
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    """A published reader may bring a file of that name; under a slope of NaN no answer would be held back."""
    calibration(0.5).save(tmp_path)
    values = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(values | damage))
    with pytest.raises(ValueError, match=r"confidence\.json is not a calibration of this version .* delete the file"):
        Confidence.load(tmp_path)


def test_the_threshold_is_the_slow_one() -> None:
    """Every probability tried as one: of those that reach the precision, that with the most answers."""
    rng = np.random.default_rng(1)
    reached = 0
    for _ in range(200):
        probability = rng.integers(1, 8, 12) / 8  # many are equal
        correct = rng.random(12) < probability
        fitting = [t for t in set(probability) if correct[probability >= t].mean() >= 0.7]
        found = threshold_for(probability, correct, 0.7)
        if not fitting:
            assert found == ALWAYS_ABSTAIN > probability.max()
        else:
            assert (probability >= found).tolist() == (probability >= min(fitting)).tolist()
        reached += bool(fitting)
    assert 20 < reached < 200


def test_the_calibration_error_by_hand() -> None:
    """Two answers at .85 and .95, one right: |1.0 - .85| and |0 - .95|; two at .25, one right: |.5 - .25|."""
    probability, correct = np.array([0.85, 0.95, 0.25, 0.25]), np.array([True, False, True, False])
    assert calibration_error(probability, correct) == pytest.approx((0.15 + 0.95 + 2 * 0.25) / 4)
    assert [(one.confidence, one.right, one.questions) for one in reliability_bins(probability, correct)] == [
        (0.25, 0.5, 2),
        (0.85, 1.0, 1),
        (0.95, 0.0, 1),
    ]


def test_the_calibration_error_is_the_slow_one() -> None:
    rng = np.random.default_rng(2)
    probability = np.append(rng.random(500), [0.0, 1.0])
    correct = rng.random(502) < probability**2
    slow = 0.0
    for low in range(BINS):
        mine = [n for n, p in enumerate(probability) if low / BINS <= p < (low + 1) / BINS or (low == 9 and p == 1)]
        mean = math.fsum(probability[n] for n in mine) / len(mine)
        slow += len(mine) / 502 * abs(sum(correct[n] for n in mine) / len(mine) - mean)
    assert calibration_error(probability, correct) == pytest.approx(slow)


def test_chance_alone_makes_an_error_that_more_questions_make_smaller() -> None:
    """In one bin of n answers at p = .5 the mean of |share - .5| is sqrt(2 / pi) * .5 / sqrt(n)."""
    for count in (100, 2_500):
        expected = math.sqrt(2 / math.pi) * 0.5 / math.sqrt(count)
        assert chance_error(np.full(count, 0.5), seed=0) == pytest.approx(expected, rel=0.2)
    assert chance_error(np.ones(10), seed=0) == 0.0


def test_coverage_and_the_most_certain() -> None:
    probability, correct = np.array([0.2, 0.9, 0.6, 0.6]), np.array([False, True, False, True])
    curve = coverage_curve(probability, correct)
    assert curve.threshold.tolist() == [0.9, 0.6, 0.2]
    assert curve.coverage.tolist() == [0.25, 0.75, 1.0]
    assert curve.precision.tolist() == [1.0, pytest.approx(2 / 3), 0.5]
    assert most_certain(probability, 0.25).tolist() == [False, True, False, False]
    assert most_certain(probability, 0.3).tolist() == [False, True, True, True], "both that are equally sure"
    assert most_certain(np.array([0.5]), 0.3).tolist() == [True]


def test_a_calibration_learned_on_some_questions_holds_on_others() -> None:
    """Overconfident answers: the error of p(y|x) itself is many times larger than after the calibration."""
    odds, correct = drawn(2_000, intercept=-1.5)
    answers = [answer(1 / (1 + math.exp(-x))) for x in odds]
    found = fit_confidence(answers[:1_000], correct[:1_000], 0.6)
    figures = confidence_figures(found, answers[1_000:], correct[1_000:], seed=0, resamples=200)
    assert figures["ece"] < 2 * figures["ece_if_perfect"] < 0.3 * figures["ece_uncalibrated"]
    assert figures["answered_precision_low"] < 0.6 < figures["answered_precision_high"]
    assert figures["precision_at_30_low"] < figures["precision_at_30"] < figures["precision_at_30_high"]
    assert 0 < figures["answered"] < 1


def test_what_answers_nothing_has_no_precision() -> None:
    never = calibration(0.99)
    figures = confidence_figures(never, [answer(0.5), answer(0.6)], np.array([True, False]), seed=0, resamples=10)
    assert figures["answered"] == 0.0
    assert "answered_precision" not in figures


def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    assert Confidence.load(tmp_path) is None
    for threshold in (0.5, ALWAYS_ABSTAIN):
        saved = Confidence(0.1 + 0.2, -1 / 3, threshold, 0.8, 308, "questions.dev")
        saved.save(tmp_path)
        assert Confidence.load(tmp_path) == saved
    stored = json.loads((tmp_path / FILE).read_text())
    assert stored["threshold"] > 1
    earlier = json.dumps({name: stored[name] for name in ("slope", "intercept", "threshold", "wanted_precision")})
    for damage in (earlier, "[1]", "{"):
        (tmp_path / FILE).write_text(damage)
        with pytest.raises(ValueError, match=FILE):
            Confidence.load(tmp_path)


# ---- in the stages


@pytest.fixture(scope="module")
def project(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(trained, tmp_path_factory.mktemp("confidence") / "project"))


def test_finetune_fits_it_and_evaluate_applies_it(project: Path) -> None:
    """What is stored is part of the model; probabilities of the test questions follow from it and p(y|x) alone."""
    root, report = project / "root", Quiet()
    values = toy_values(pretrain={"steps": 0, "builder": "external"})
    tuned = stage("finetune", values, project, root, report)
    assert {"dev_em", "dev_ece", "dev_precision_at_30", "dev_answered"} <= tuned.keys()
    [said] = [line for line in report.said if "wanted_precision" in line]
    stored = json.loads((root / f"models/finetune/{FILE}").read_text())
    assert (stored["questions"], stored["wanted_precision"], stored["source"]) == (20, 0.8, "questions.dev")
    assert ("the model abstains on every question" in said) == (stored["threshold"] == ALWAYS_ABSTAIN)
    assert FILE in artifacts.read_json(root / "models/finetune/manifest.json")["files"]
    measured = stage("evaluate", values, project, root)
    rows = read_predictions(root / "results/predictions.parquet")
    assert all(row.confidence is not None and 0 < row.confidence < 1 for row in rows)
    assert [row.abstained for row in rows] == [(row.confidence or 0) < stored["threshold"] for row in rows]
    for name in ("ece", "ece_uncalibrated", "ece_if_perfect", "precision_at_30", "precision_at_30_low", "answered"):
        assert 0 <= measured[name] <= 1
    page = (root / "results/report.html").read_text()
    assert ("The model abstains from every question" in page) == all(row.abstained for row in rows)
    corpus = artifacts.read_json(root / "data/snapshot/corpus/manifest.json")["corpus_hash"]
    assert f"corpus {corpus[:12]}; documents 12 in " in page
    assert "of documents.jsonl" in page
    assert "<td>bert.vocabulary</td><td>150</td>" in page
    assert "<td>bert.positions</td>" not in page, "as the defaults have it"
    assert "Confidence and precision" in page
    shown = cli("explain", "--root", root).stdout
    assert f"confidence: {rows[0].confidence:.2f}" in shown


def test_a_model_without_a_calibration_answers_without_confidence(project: Path) -> None:
    """One question too few were of people: nothing about confidence is said, drawn or counted."""
    values = toy_values(pretrain={"steps": 0, "builder": "external"})
    root, report = project / "root", Quiet()
    with_generated(project, "dev", MIN_CALIBRATION - 1)
    tuned = stage("finetune", values, project, root, report)
    assert [line for line in report.said if "no calibration: questions.dev has 19 questions of people" in line]
    assert not (root / f"models/finetune/{FILE}").exists()
    assert [name for name in tuned if name.startswith("dev_")] == ["dev_em", "dev_f1"]
    measured = stage("evaluate", values, project, root, report)
    assert any("not calibrated on dev questions" in line for line in report.said)
    assert not [name for name in measured if name.startswith("ece") or "answered" in name]
    rows = read_predictions(root / "results/predictions.parquet")
    assert [(row.confidence, row.abstained) for row in rows] == [(None, None)] * 2
    assert "Confidence and precision" not in (root / "results/report.html").read_text()
    assert "confidence" not in cli("explain", "--root", root).stdout


def with_generated(project: Path, split: str, people: int) -> None:
    """Let all questions of a split after the first ones be as if they were generated from the first document."""
    made = Snapshot.open(project / "root/data/snapshot/corpus").passage_id(0)
    records = [record | ({"not_in": [made]} if n >= people else {}) for n, record in enumerate(question_records(split))]
    write_json_lines(project / f"questions.{split}.jsonl", records)


def test_questions_without_answers_measure_abstention_alone(project: Path) -> None:
    """They count as wrongly answered in the calibration, and not in EM; models are not trained on them."""
    root, values = project / "root", toy_values(pretrain={"steps": 0, "builder": "external"})
    results = {}
    for extra in (0, 5):
        report = Quiet()
        for split in ("train", "dev", "test"):
            without = [{"id": f"none-{n}", "question": f"Who sank ship {n}?", "answers": []} for n in range(extra)]
            write_json_lines(project / f"questions.{split}.jsonl", [*question_records(split), *without])
        tuned, measured = (stage(name, values, project, root, report) for name in ("finetune", "evaluate"))
        stored = json.loads((root / f"models/finetune/{FILE}").read_text())
        results[extra] = tuned, measured, stored
        assert stored["questions"] == 20 + extra
        assert any("5 training questions have no answer" in line for line in report.said) == (extra == 5)
        assert len(read_predictions(root / "results/predictions.parquet")) == measured["questions"] == 2
    (plain, plain_test, curve), (tuned, measured, lower) = results.values()
    assert "right_abstentions" not in plain_test
    assert "unanswerable_questions" not in plain_test
    assert measured["unanswerable_questions"] == 5
    assert measured["right_abstentions"] in {n / 5 for n in range(6)}
    for name in ("em", "f1", "questions"):
        assert measured[name] == plain_test[name]
    assert (tuned["dev_em"], tuned["questions"]) == (plain["dev_em"], plain["questions"])
    assert (lower["slope"], lower["intercept"]) != (curve["slope"], curve["intercept"])
    assert "abstentions on questions without answers" in (root / "results/report.html").read_text()
    asked = cli("ask", "--root", root, "--from", project / "questions.test.jsonl")
    assert f"{measured['right_abstentions'] * 5:.0f} of 5 questions without answers" in asked.stderr, asked.stderr
    for split in ("train", "dev", "test"):
        write_json_lines(project / f"questions.{split}.jsonl", question_records(split))


def test_generated_questions_are_never_asked_whether_answers_are_right(project: Path) -> None:
    """The metrics of answers are those of the only question of people; recall counts both."""
    values, root, report = toy_values(pretrain={"steps": 0, "builder": "external"}), project / "root", Quiet()
    with_generated(project, "dev", 0)
    assert not [name for name in stage("finetune", values, project, root, report) if name.startswith("dev_")]
    with_generated(project, "test", 1)
    mixed = stage("evaluate", values, project, root, report)
    rows = read_predictions(root / "results/predictions.parquet")
    assert [row.is_generated for row in rows] == [False, True]
    assert (rows[1].em, rows[1].f1, rows[1].failed_at) == (None, None, None)
    assert (mixed["questions"], mixed["generated_questions"]) == (2, 1)
    assert (mixed["em"], mixed["f1"]) == (rows[0].em, rows[0].f1)
    assert mixed["recall_at_5"] == sum(0 <= row.first_hit < 5 for row in rows) / 2
    assert sum(mixed[f"failed_at_{name}"] for name in FAILED_AT if name != "correct") + mixed["em"] == 1
    assert {"rule_em", "bm25_em", "closed_book_em"} <= mixed.keys()
    assert [line for line in report.said if "1 of 2 test questions were generated from the documents" in line]
    shown = cli("explain", "--root", root).stdout
    assert shown.startswith("2 questions, 1 generated from the documents, to measure retrieval only")
    assert shown.count("failed at: ") == 1
    with_generated(project, "test", 0)
    generated = stage("evaluate", values, project, root, report)
    assert not [name for name in generated if "em" in name.split("_") or "f1" in name or name.startswith("failed_at")]
    assert {"bm25_recall_at_5_token_boundary", "recall_at_5", "ceiling_in_corpus"} <= generated.keys()
    assert generated["recall_at_5"] == sum(0 <= row.first_hit < 5 for row in read_results(root)) / 2
    page = (root / "results/report.html").read_text()
    assert "correct</span>" not in page
    assert "wrong</span>" not in page
    assert "<th>EM</th>" not in page
    for text in (page, cli("report", "--root", root).stdout.replace("\n", " ")):
        assert "hey measure retrieval only. Label twenty of your own" in text
        assert "EM (test questions)" not in text


def test_a_precision_that_is_no_share_is_refused() -> None:
    refused = cli("params", "--set", "finetune.wanted_precision=80")
    assert refused.exit_code == 2
    assert "finetune.wanted_precision is 80" in refused.output
