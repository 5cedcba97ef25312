"""Stage ``ict``: its log of crops, and the retriever that it keeps if they made it worse."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from small_project import Quiet, model_tensors, stage, write_project

from realmops.config import load_params
from realmops.stages import Job, ict

CROPS = {"crops": 2, "steps": 20, "epochs": 0, "batch_size": 8, "reader_steps": 0, "removal": 0.0}


def job_of(found: list[float], monkeypatch: pytest.MonkeyPatch, *, kept: bool = False) -> tuple[Job, Quiet]:
    """A job whose crops found so many passages, step by step; with ``kept``, all that were left in their passage."""
    values = {"accuracy_kept": [1.0] * len(found) if kept else [], "accuracy_removed": found}
    monkeypatch.setattr(ict, "JournalValues", lambda journal: SimpleNamespace(of=values.__getitem__))
    report = Quiet()
    return cast(Job, SimpleNamespace(journal=None, report=report)), report


def test_the_first_and_the_last_steps_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    job, report = job_of([0.4] * 10 + [0.0] * 5 + [0.7] * 10, monkeypatch)
    assert ict.crops_helped(job)
    assert report.said == ["ict: in-batch accuracy of crops is 0.40 in the first 10 steps and 0.70 in the last 10"]
    job, report = job_of([0.71] * 10 + [0.72] * 10, monkeypatch)
    assert ict.crops_helped(job)
    assert "ict.steps=0 keeps the initial weights" in report.said[1]
    job, report = job_of([0.71] * 10 + [0.7] * 10, monkeypatch, kept=True)
    assert ict.crops_helped(job), "no more than chance"
    assert "0.85 in the last 10" in report.said[0]
    job, report = job_of([0.71] * 10 + [0.65] * 10, monkeypatch)
    assert not ict.crops_helped(job)
    assert "keeps its initial weights" in report.warned[0]
    for few in ([], [0.9] * 10 + [0.1] * 9):
        job, report = job_of(few, monkeypatch)
        assert ict.crops_helped(job), "too few steps to tell"
        assert not report.said


@pytest.mark.parametrize("helped", [True, False])
def test_a_retriever_that_crops_made_worse_stays_as_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helped: bool
) -> None:
    def weights(name: str, **changes: Any) -> dict[str, Any]:
        folder = tmp_path / name
        folder.mkdir()
        values = load_params(write_project(folder, ict={**CROPS, **changes}))
        for one in ("snapshot", "tag", "ict"):
            stage(one, values, folder, folder / "root")
        return model_tensors(folder / "root/models/ict", "retriever")

    asked: list[Job] = []
    monkeypatch.setattr(ict, "crops_helped", lambda job: asked.append(job) or helped)
    trained, untouched = weights("trained"), weights("untouched", steps=0)
    assert len(asked) == 1
    assert all(trained[name].equal(untouched[name]) for name in untouched) is not helped
