"""The benchmarks' arithmetic and tables; nothing is measured here."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from against import BENCHMARKS, Goal, Row, Spread, table

FOLDER = Path(__file__).parents[2] / "benchmarks"
ROW = Row("embedding", "another", "docs/s", (10.0, 20.0, 60.0), (5.0, 5.0, 10.0), Goal(4))  # ratios 2, 4 and 6


def test_the_ratio_is_the_median_over_pairs_and_a_goal_is_met_at_its_limit() -> None:
    assert ROW.ratio == Spread(4.0, 2.0, 6.0)
    assert Row("a", "b", "s", (8.0, 10.0, 30.0), (2.0, 10.0, 10.0)).ratio == Spread(3.0, 1.0, 4.0)
    goals = {Goal(4): "met", Goal(4.1): "missed", Goal(4, at_most=True): "met", Goal(3.9, at_most=True): "missed"}
    assert {goal: replace(ROW, goal=goal).verdict for goal in goals} == goals
    assert table([("encode", ROW)]).splitlines()[2] == (
        "| encode | embedding | 20 (10 to 60) docs/s | another | 5 (5 to 10) docs/s | 4 (2 to 6) | at least 4 | met |"
    )
    assert Row.from_json(json.loads(json.dumps(ROW.to_json()))) == ROW


@pytest.mark.parametrize("name", ["against", *BENCHMARKS, "quality", "real_text", "seeds", "whole_run", "first_second"])
def test_help_answers(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {name}.py")
    assert ("--repeats" if name in ("against", *BENCHMARKS) else "--out") in shown
