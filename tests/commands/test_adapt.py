"""A project of documents: answers before any training, ``realmops adapt``, and the way back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import small_project
import yaml
from small_project import cli, contents
from small_readers import write_reader

from realmops.config import load_params
from realmops.config_yaml import read_params
from realmops.evaluate.compare import Comparison
from realmops.evaluate.exact_match import Difference
from realmops.journal import JOURNAL
from realmops.stages import STAGES

MODELS = "models/ict", "models/pretrain", "models/finetune"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of documents after ``run all``, with a reader and twenty questions of people for ``questions.dev``."""
    folder = tmp_path_factory.mktemp("documents") / "mine"
    small_project.write_documents(folder.parent / "documents.jsonl")
    reader = write_reader(folder.parent / "reader", "bert")
    words = ("--documents", folder.parent / "documents.jsonl", "--encoder", "small", "--reader", reader)
    assert cli("init", folder, *words).exit_code == 0
    small = "--set", "retriever.embedding_width=64", "--set", "tracking.enabled=false"
    cli("params", "--params", folder / "params.yaml", *small, "--write")
    small_project.write_json_lines(folder / "own.jsonl", small_project.question_records("dev"))
    run(folder, "all")
    return folder


def run(folder: Path, stage: str) -> str:
    result = cli("run", stage, "--params", folder / "params.yaml", "--root", folder)
    assert result.exit_code == 0, result.output
    return result.stderr


def adapt(folder: Path, *words: str, code: int = 0) -> str:
    result = cli("adapt", "--params", folder / "params.yaml", "--root", folder, *words)
    assert result.exit_code == code, result.output
    return result.output


def compared(gain: float, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Make every comparison find this gain; return a list that gets the numbers of compared questions."""
    counts = []

    def compare(first: Path, second: Path, *, seed: int) -> list[Comparison]:
        folders = [folder / "results/metrics.json" for folder in (first, second)]
        counts.append([json.loads(path.read_text())["questions"] for path in folders])
        return [Comparison("recall@5", 20, 0.5 + gain, 0.5, Difference(gain, gain - 0.1, gain + 0.1, 0.9))]

    monkeypatch.setattr("realmops.commands.adapt.compare_runs", compare)
    return counts


def models(folder: Path) -> dict[str, str]:
    return {name: json.loads((folder / name / "manifest.json").read_text())["fingerprint"] for name in MODELS}


def test_run_all_trains_nothing_and_answers(published: Path) -> None:
    trained = [path for path in published.rglob(JOURNAL) if "step_seconds" in path.read_text()]
    assert trained == []
    assert not (published / "results").exists()
    assert not (published / "data/cloze").exists()
    answer = cli("ask", "Where was Anna Berg born?", "--root", published, "--json")
    record = json.loads(answer.stdout)
    assert record["passages"]
    assert "confidence" not in record or record["confidence"] is None
    update = cli("update", "--params", published / "params.yaml", "--root", published)
    assert "nothing to do" in update.stderr, update.output


@pytest.mark.parametrize("gain", [0.2, 0.0, -0.2])
def test_adapted_models_are_kept_only_if_they_are_better(
    published: Path, gain: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(published, tmp_path / "mine"))
    before, params = models(folder), (folder / "params.yaml").read_bytes()
    counts = compared(gain, monkeypatch)
    lines = adapt(folder)
    assert "adapt: trains for about 1 minutes: " in lines
    assert f"difference {gain:+.3f}, 95 % interval" in lines
    assert "on data/cloze/questions.test.jsonl" in lines
    assert counts[0][0] == counts[0][1] > 0, "the same generated questions"
    assert not (folder / ".realmops/adapt").exists()
    if gain <= 0:
        assert "the published models are kept" in lines
        assert ((folder / "params.yaml").read_bytes(), models(folder)) == (params, before)
        return
    assert read_params(folder / "params.yaml")[0] == ["squad", "documents", "reader"]
    assert load_params(folder / "params.yaml").ict.steps == 50
    assert "step_seconds" in (folder / "models/ict" / JOURNAL).read_text()
    stages = yaml.safe_load((folder / "dvc.yaml").read_text())["stages"]
    assert [*stages] == ["snapshot", "tag", "cloze", "ict", "pretrain", "finetune", "evaluate"]
    again = run(folder, "all")
    assert again.count("nothing to do") == len(STAGES), "all stages but sample, and cloze"
    assert "trains with these options already" in adapt(folder, code=2)
    assert "the models are as published" in adapt(folder, "--undo")
    assert ((folder / "params.yaml").read_bytes(), models(folder)) == (params, before)
    assert [*yaml.safe_load((folder / "dvc.yaml").read_text())["stages"]] == ["snapshot", "ict", "pretrain", "finetune"]
    assert not (folder / "results").exists()
    assert "nothing to undo" in adapt(folder, "--undo", code=2)


def test_own_questions_are_the_measure_and_an_interrupted_adaptation_resumes(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(published, tmp_path / "mine"))
    cli("params", "--params", folder / "params.yaml", "--set", "questions.dev=own.jsonl", "--write")
    (folder / "dvc.yaml").write_text("stages: {}\n")
    run(folder, "all")
    before = {name: content for name, content in contents(folder).items() if not name.startswith(".realmops")}

    def killed(*_: object, **__: object) -> None:
        raise ValueError("killed")

    monkeypatch.setattr("realmops.commands.adapt.compare_runs", killed)
    adapt(folder, code=2)
    after = {name: content for name, content in contents(folder).items() if not name.startswith(".realmops")}
    assert after == before, "the project is untouched until the decision"
    counts = compared(0.1, monkeypatch)
    lines = adapt(folder)
    assert counts == [[20, 20]]
    assert "inverse cloze task" not in lines, "the trained models of the first call"
    assert "on own.jsonl, which neither was trained on" in lines
    assert "dvc.yaml is your own: its stages must be snapshot, tag, cloze, ict, " in lines
    assert (folder / "dvc.yaml").read_text() == "stages: {}\n"
    assert load_params(folder / "params.yaml").questions.dev == "own.jsonl"
