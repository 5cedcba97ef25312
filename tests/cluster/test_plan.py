"""The tasks of the compiled pipeline run the steps of ``realmops run all``, for every kind of project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_lab import Output
from compiled import ROOT, compiled
from small_project import Quiet, toy_values, write_project
from small_readers import write_reader

from realmops import config
from realmops.commands.run import run_stages
from realmops.config_yaml import read_yaml
from realmops.stages import CLOZE_STEP, STEPS, Job, Stage, planned_steps
from realmops.stages.option_inputs import FILES
from realmops.starter.project_files import dvc_text

PIPELINE = compiled("train")
TASKS: dict[str, Any] = PIPELINE["components"]["comp-exit-handler-1"]["dag"]["tasks"]
SAMPLE = {split: f"data/sample/questions.{split}.jsonl.gz" for split in ("train", "dev", "test")}
GENERATED = read_yaml(config.PACKAGE / "presets/documents.yaml")
UNTRAINED = read_yaml(config.PACKAGE / "presets/untrained.yaml")
NO_SPANS = {"ict": {"reader_steps": 0}, "pretrain": {"steps": 0}}
TRAIN = "ict pretrain finetune evaluate"
READER = "READER"  # a folder that the test writes
# Kinds of projects: their options on top of the small project's, which has documents and questions, and their steps.
KINDS: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "documents and questions": ({}, f"snapshot tag {TRAIN}"),
    "documents alone": (GENERATED, f"snapshot tag cloze {TRAIN}"),
    "documents alone, not trained on": (GENERATED | UNTRAINED, "snapshot ict pretrain finetune"),
    "own test questions, the others generated": (
        {"questions": {"train": "data/cloze/questions.train.jsonl"}, "tag": {"method": "dates"}},
        f"snapshot tag cloze {TRAIN}",
    ),
    "questions and a published reader": (NO_SPANS | {"reader": {"init": READER}}, f"snapshot {TRAIN}"),
    "questions, search alone": (NO_SPANS | {"reader": {"init": "none"}}, f"snapshot {TRAIN}"),
    "the sample corpus": (
        {"snapshot": {"documents": "data/sample/corpus.jsonl.gz"}, "questions": SAMPLE},
        f"sample snapshot tag {TRAIN}",
    ),
    "the sample's sentences for the tagger": (
        {"tag": {"method": "tagger", "train": "data/sample/ner.train.conll", "dev": "data/sample/ner.dev.conll"}},
        f"sample snapshot tag {TRAIN}",
    ),
}


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that ran, in order; stages and generated questions are replaced, all around them is real."""
    steps: list[str] = []

    def run(stage: Stage, job: Job) -> dict[str, Any]:
        steps.append(stage.name)
        (job.out / "report.html").write_text("")
        (job.out / "corpus").mkdir()
        (job.out / "corpus/manifest.json").write_text('{"corpus_hash": "0"}')
        return {}

    def generate(root: Path, *, seed: int) -> list[str]:
        steps.append(CLOZE_STEP)
        (root / "data/cloze").mkdir()
        (root / "data/cloze/manifest.json").write_text('{"manifest_digest": "0", "files": {}, "written": {}}')
        return []

    monkeypatch.setattr("realmops.stages.Stage.run", run)
    monkeypatch.setattr("realmops.evaluate.run_report.figure_tables", lambda metrics: [])
    for module in ("run", "questions"):
        monkeypatch.setattr(f"realmops.commands.{module}.write_cloze_questions", generate)
    return steps


def in_order() -> list[str]:
    """The tasks of the pipeline, each after those that it depends on."""
    order: list[str] = []
    while ready := [t for t in TASKS if t not in order and {*TASKS[t].get("dependentTasks", [])} <= {*order}]:
        order += ready
    return order


def run_task(task: str, options: str, root: Path, folder: Path) -> None:
    """Call the function of a task in the compiled file, without a Deployment and a registered model."""
    definition = PIPELINE["components"][f"comp-{task}"]
    executor = PIPELINE["deploymentSpec"]["executors"][definition["executorLabel"]]["container"]
    outputs = {key: Output(folder / f"{task}.{key}") for key in definition["outputDefinitions"]["artifacts"]}
    values = {"STRING": "", "NUMBER_INTEGER": 1, "NUMBER_DOUBLE": 0.0}
    given = {key: values[entry["parameterType"]] for key, entry in definition["inputDefinitions"]["parameters"].items()}
    module: dict[str, Any] = {}
    exec(executor["command"][-1], module)
    module[executor["args"][-1]](**given | {"options": options, "root": str(root)}, **outputs)
    assert all(Path(output.path).is_file() for output in outputs.values() if task != "promote"), task


@pytest.mark.parametrize("kind", KINDS)
def test_the_pipeline_runs_the_steps_of_run_all(
    kind: str, done: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, steps = KINDS[kind]
    write_project(tmp_path)
    if READER in str(changes):
        changes = json.loads(json.dumps(changes).replace(READER, str(write_reader(tmp_path, "bert"))))
    values = toy_values(**changes)
    files = {key: tmp_path / values.get(key) for key in FILES}  # a pod has no project folder
    values = values.replace({key: str(path) for key, path in files.items() if path.is_file()})
    plan = planned_steps(values)
    assert plan == tuple(steps.split())
    for _ in run_stages(plan, values, project=tmp_path, root=tmp_path / "here", report=Quiet(), force=False):
        pass
    here, done[:] = [*done], []
    capfd.readouterr()
    for task in in_order():
        run_task(task, values.model_dump_json(), tmp_path / "pods", tmp_path)
        if task in {*STEPS} - {*plan}:
            lines = capfd.readouterr().err.splitlines()
            assert lines[-1:] == [f"{task}: not needed with these options, so nothing is done"]
    assert tuple(done) == tuple(here) == plan
    assert [*yaml.safe_load(dvc_text(values, {}))["stages"]] == here


def test_every_step_has_a_task_and_this_project_runs_all_but_cloze() -> None:
    assert {*in_order()} == {*TASKS} == {*STEPS, "inputs", "promote"}
    assert planned_steps(config.load_params(ROOT / "params.yaml")) == tuple(s for s in STEPS if s != CLOZE_STEP)


def test_the_first_step_reports_a_missing_file_of_the_last_one(
    done: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Although the options do not need that task's stage."""
    write_project(tmp_path)
    files = {split: str(tmp_path / f"questions.{split}.jsonl") for split in ("train", "dev", "test")}
    values = toy_values(
        snapshot={"documents": str(tmp_path / "documents.jsonl")}, questions=files, tag={"method": "dates"}
    )
    (tmp_path / "questions.test.jsonl").unlink()
    with pytest.raises(SystemExit) as caught:
        run_task(STEPS[0], values.model_dump_json(), tmp_path / "pods", tmp_path)
    assert (caught.value.code, done) == (2, [])
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"realmops: questions.test is '{files['test']}', and {files['test']} does not exist")
