"""A stage's journal: written, resumed, read."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from realmops.journal import Journal, JournalValues, Series, metric_series, read_journal

RECORDS = [
    {"stage": "pretrain", "step": 0, "time": 1.0, "loss": 4.0},
    {"stage": "pretrain", "step": 1, "time": 2.0, "loss": None},
    {"stage": "pretrain", "step": 2, "time": 3.0, "loss": 2.0},
    {"stage": "ict", "step": 1, "time": 4.0, "loss": 9.0},
]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_journal_writes_one_line_a_step(tmp_path: Path) -> None:
    with Journal(tmp_path / "run" / "metrics.jsonl", "ict") as journal:
        journal.log(1, loss=2.5)
        journal.log(2, loss=float("nan"), refreshes=3)
    first, second = lines(journal.path)
    assert time.time() - first.pop("time") < 600
    assert first == {"stage": "ict", "step": 1, "loss": 2.5}
    assert (second["loss"], second["refreshes"]) == (None, 3)


def test_journal_resumes_at_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Journal(path, "ict") as journal:
        journal.log(1, loss=3.0)
        position = journal.position()
        journal.log(2, loss=2.0)
    with open(path, "a") as file:
        file.write('{"stage": "ict", "st')  # of a killed process
    with Journal(path, "ict") as journal:
        journal.truncate(position)
        journal.log(2, loss=1.0)
    assert [(line["step"], line["loss"]) for line in lines(path)] == [(1, 3.0), (2, 1.0)]


def test_journal_shorter_than_its_checkpoint_is_an_error(tmp_path: Path) -> None:
    with Journal(tmp_path / "metrics.jsonl", "ict") as journal, pytest.raises(ValueError, match=r"metrics.jsonl.*900"):
        journal.truncate(900)


def test_series_omit_values_that_are_not_finite() -> None:
    assert metric_series(RECORDS, "pretrain", "loss") == Series("loss", [0, 2], [4.0, 2.0])


def test_a_mean_over_a_value_that_is_not_finite_is_nan(tmp_path: Path) -> None:
    """The mean of the finite values would pass for that of all; a step without the metric has no value."""
    with Journal(tmp_path / "metrics.jsonl", "ict") as journal:
        for step, loss in enumerate([float("nan"), 4.0, 2.0]):
            journal.log(step, loss=loss, **({"accuracy": 0.5} if step == 1 else {}))
        logged = JournalValues(journal)
    assert math.isnan(logged.mean("loss"))
    assert math.isnan(logged.mean("loss", last=3))
    assert logged.mean("loss", last=2) == 3.0
    assert logged.mean("accuracy") == 0.5
    assert math.isnan(logged.mean("never"))


def test_journal_of_a_running_stage_may_end_within_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS) + '{"stage": "pretr')
    assert read_journal(path) == RECORDS


@pytest.mark.parametrize("line", ["no json", '{"stage": "ict"}', "[1]", '{"stage": "ict", "step": null}'])
def test_a_damaged_journal_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"stage": "ict", "step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: .*run its stage again"):
        read_journal(path)
