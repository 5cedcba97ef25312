"""Scorers over records of answers, in ``mlflow.genai.evaluate`` of the installed mlflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from realmops.tracking.client import default_uri


def record(answer: str, *, abstained: bool = False, start: int = 122, quote: str = "Oslo") -> dict[str, Any]:
    """An answer from a passage that begins at character 100: "Anna Berg was born in Oslo."."""
    passage = {"passage_id": "p1", "text": "Anna Berg was born in Oslo.", "start": 100, "end": 127}
    citation = {"passage_id": "p1", "quote": quote, "start": start, "end": start + len(quote)}
    return {"answer": answer, "abstained": abstained, "citations": [citation], "passages": [passage]}


# Record, expectations, and what exact_match, citation_holds and abstained_rightly say of them.
CASES: tuple[tuple[dict[str, Any], dict[str, Any], tuple[bool, bool, bool]], ...] = (
    (record("Oslo"), {"answers": ["Bergen", "oslo."]}, (True, True, True)),
    (record("Oslo"), {"expected_response": "Bergen"}, (False, True, False)),
    (record("Oslo", abstained=True), {"expected_response": "Bergen"}, (False, True, True)),
    (record("Oslo", abstained=True), {"answers": ["Oslo"]}, (True, True, False)),
    (record("Oslo", start=121), {"answers": ["Oslo"]}, (True, False, True)),
    (record("Bergen"), {"answers": ["Bergen"]}, (True, False, True)),
    (record("Oslo"), {"answers": ["das Oslo"]}, (False, True, False)),
    (record("Oslo"), {"answers": ["das Oslo"], "language": "de"}, (True, True, True)),
    (
        {"answer": "", "abstained": True, "citations": [], "passages": []},
        {"answers": ["Oslo"]},
        (False, True, True),
    ),
)


def test_evaluate_gives_what_the_records_deserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    from realmops.tracking.scorers import SCORERS

    monkeypatch.setenv("MLFLOW_GENAI_EVAL_MAX_WORKERS", "1")
    mlflow.set_tracking_uri(default_uri(tmp_path))
    try:
        mlflow.create_experiment("scorers", artifact_location=(tmp_path / "artifacts").as_uri())
        experiment = mlflow.set_experiment("scorers")
        rows = [
            {"inputs": {"question": f"Where? {n}"}, "outputs": found, "expectations": wanted}
            for n, (found, wanted, _) in enumerate(CASES)
        ]
        result = mlflow.genai.evaluate(data=rows, scorers=list(SCORERS))
        traces = mlflow.search_traces(locations=[experiment.experiment_id], return_type="list")
    finally:
        mlflow.set_tracking_uri(None)
    names = ("exact_match", "citation_holds", "abstained_rightly")
    found = {
        str(trace.data.request): {one.name: one.value for one in trace.info.assessments if one.name in names}
        for trace in traces
    }
    for n, (*_, wanted) in enumerate(CASES):
        [said] = [values for request, values in found.items() if f"Where? {n}" in request]
        assert said == dict(zip(names, wanted, strict=True)), n
    for place, name in enumerate(names):
        share = sum(wanted[place] for *_, wanted in CASES) / len(CASES)
        assert result.metrics[f"{name}/mean"] == pytest.approx(share)


def test_without_a_wanted_answer_nothing_is_scored() -> None:
    from realmops.tracking.scorers import exact_match

    with pytest.raises(ValueError, match="expectations name no answer"):
        exact_match(outputs=record("Oslo"), expectations={})
