"""`realmops explain` over the answers under results/: which are shown, and what is said of each."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from small_project import cli
from test_compare import results
from test_predictions import PREDICTION

from realmops.commands.explain import _prediction_sheet, format_stored_answers

WRONG = replace(
    PREDICTION, question_id="q2", prediction="north", em=False, char_start=33, char_end=38, span_score=2.0,
    passage_spans=("north", None), passage_scores=(2.0, None), failed_at="reader",
)  # fmt: skip


def test_an_explanation_has_passages_scores_and_the_failure() -> None:
    assert str(_prediction_sheet(WRONG)).split("\n") == [
        "q2  Where was Ada Vell born?", "  expected: Tor Hollow", "  answer: north  (score 2.00)",
        "  confidence: 0.75", "  failed at: reader (the reader could select an answer and selected another span)",
        "  best correct span: Tor Hollow  (score 1.50)", "  first passage with an answer: number 1",
        "     p(z|x)  score  passage: its best span", "  >   0.750   2.00  Ada Vell [p7]: north",
        "      0.250      -  Tor Hollow [p2]: (none)",
    ]  # fmt: skip


def test_without_a_reader_no_answer_is_shown() -> None:
    searched = replace(WRONG, em=None, f1=None, failed_at=None, is_generated=False, confidence=None, gold_span=None)
    lines = str(_prediction_sheet(searched)).split("\n")
    assert lines[2] == "  not answered: the run has no reader"
    assert not [line for line in lines if line.startswith("  answer: ")]


def test_questions_are_chosen_by_id_and_failure() -> None:
    rows = [PREDICTION, WRONG]

    def shown(ids: Sequence[str], failures: Sequence[str]) -> list[str]:
        lines = format_stored_answers(rows, ids, failures, 9).splitlines()
        assert lines[:2] == ["2 questions", "      1  50.0%  correct: the answer is correct"]
        return [line.split()[0] for line in lines if "Where was" in line]

    assert shown((), ()) == ["q1", "q2"]
    assert shown(("q1",), ()) == ["q1"]
    assert shown((), ("reader", "too_long")) == ["q2"]
    assert shown(("q1",), ("reader",)) == []
    with pytest.raises(ValueError, match="--failed-at 'luck': expected one of correct, not_in_corpus"):
        shown((), ("luck",))


def test_the_command_explains_what_is_asked_for(tmp_path: Path) -> None:
    results(tmp_path / "results", [True, False, False, False])
    text = cli("explain", "--root", tmp_path, "--failed-at", "reader", "--limit", "2").stdout
    assert [line.split()[0] for line in text.splitlines() if "Where was" in line] == ["q1", "q2"]
    assert "1 more; select others with --limit, --question and --failed-at" in text
    assert "q3  Where" in cli("explain", "--root", tmp_path, "--question", "q3").stdout
    assert cli("explain", "--root", tmp_path, "--question", "q9").exit_code == 2
