"""Stage ``evaluate``: shared embeddings, and warnings."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_project import Quiet
from small_world import section

from realmops.artifacts import MANIFEST, write_json
from realmops.config import load_params
from realmops.stages import evaluate
from realmops.stages.runner import run_stage


def test_embeddings_of_the_same_tower_are_made_once(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of REALM, and fine-tuning trains no document tower: what finetune embedded is all that there is."""
    values = load_params(copy / "params.yaml")
    embed, made = evaluate.embed_in_shards, count()

    def counted(*arguments: Any) -> Any:
        next(made)
        return embed(*arguments)

    def figures() -> dict[str, Any]:
        root = copy / "root"
        metrics = run_stage("evaluate", values, project=copy, root=root, report=Quiet(), force=True)
        return {name: value for name, value in metrics.items() if name != "seconds"}

    monkeypatch.setattr(evaluate, "embed_in_shards", counted)
    once = figures()
    assert next(made) == 0
    assert {"before_realm_recall_at_5_token_boundary", "zero_shot_recall_at_5_token_boundary"} <= once.keys()
    names = count()
    monkeypatch.setattr(evaluate, "passage_tower_digest", lambda folder: str(next(names)))
    assert figures() == once, "with embeddings of their own"
    assert next(made) == 1 + len(evaluate.ZERO_SHOT)


def test_other_training_questions_than_those_of_the_model_are_warned_of(copy: Path) -> None:
    values, report = load_params(copy / "params.yaml"), Quiet()
    values = values.replace({"questions.train": values.questions.dev})
    run_stage("evaluate", values, project=copy, root=copy / "root", report=report, force=True)
    [line] = [line for line in report.warned if "was fine-tuned with questions.train=" in line]
    assert line.startswith(f"questions.train is {values.questions.dev}, but")


def test_report_shows_the_changed_options_of_one_section_from_all_stages(tmp_path: Path) -> None:
    recorded = {"ict": {"reader": {"copies": False, "apart": False}}, "finetune": {"reader": {"init": "some/reader"}}}
    for name, sections in recorded.items():
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / MANIFEST, {"sections": sections})
    inputs = {name: tmp_path / name for name in recorded}
    job: Any = SimpleNamespace(sections={"evaluate": section("evaluate", bm25=False)}, inputs=inputs)
    expected = {"evaluate.bm25": False, "reader.apart": False, "reader.copies": False, "reader.init": "some/reader"}
    assert evaluate._changed_options(job) == expected
