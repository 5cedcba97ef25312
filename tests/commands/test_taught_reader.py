"""A reader that answers already: exported by one run, the start of another (``reader.init``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from small_project import (
    QUESTIONS,
    Quiet,
    Values,
    cli,
    question_records,
    run_all_here,
    stage,
    write_json_lines,
    write_params,
)
from test_init import made, with_documents

from realmops import artifacts, config
from realmops.answering.confidence import ALWAYS_ABSTAIN, READER_QUESTIONS
from realmops.answering.confidence import FILE as CONFIDENCE
from realmops.config_yaml import read_params
from realmops.model.checkpoint_files import MODEL, READER

MADE = [record | {"not_in": ["0"]} for record in question_records("dev")]


@pytest.fixture(scope="module")
def reader(answering: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader of a finished run, by the command."""
    folder = tmp_path_factory.mktemp("exports") / "reader"
    result = cli("export", folder, "--format", "reader", "--root", answering / "root")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{folder}: the reader of "), result.stdout
    return folder


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "project"))


def begun(project: Path, reader: Path, **finetune: float) -> Values:
    """The project's options with that reader."""
    values: Values = yaml.safe_load((project / "params.yaml").read_text())
    values["reader"]["init"] = str(reader)
    values["finetune"] |= {"epochs": 0.0, **finetune}
    write_params(project / "params.yaml", values)
    return values


def test_the_folder_has_the_reader_its_calibration_and_a_card(reader: Path, answering: Path) -> None:
    tuned = answering / "root" / "models" / "finetune"
    for name in (MODEL, READER, CONFIDENCE):
        assert (reader / name).read_bytes() == (tuned / name).read_bytes()
    manifest = artifacts.read_manifest(reader, "export")
    files = {MODEL, READER, CONFIDENCE, "tokenizer.json", "README.md"}
    encoder = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert manifest["files"].keys() == files | {f"reader_encoder/{name}" for name in encoder}
    _, front, text = (reader / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "unknown"
    for part in (
        "questions.train.jsonl",
        "documents.jsonl",
        "20 questions: questions.dev.jsonl",
        "| EM (test",
    ):
        assert part in text
    assert "runs over other documents cannot use it" in text, "its wordpieces are of its own documents"


def test_a_run_begins_with_it_and_trains_no_reader(reader: Path, project: Path) -> None:
    values = begun(project, reader)
    metrics = stage("finetune", values, project, project / "root")
    tuned = project / "root" / "models" / "finetune"
    assert (tuned / READER).read_bytes() == (reader / READER).read_bytes()
    assert not (tuned / "metrics.jsonl").exists(), "no step"
    assert metrics["questions"] == len(QUESTIONS["train"])
    assert stage("evaluate", values, project, project / "root")["questions"] == len(QUESTIONS["test"])


def test_its_calibration_holds_where_only_made_questions_could_fit_another(reader: Path, project: Path) -> None:
    values, root = begun(project, reader, wanted_precision=0.5), project / "root"
    public = json.loads((reader / CONFIDENCE).read_text())
    stage("finetune", values, project, root)
    own = json.loads((root / "models" / "finetune" / CONFIDENCE).read_text())
    assert own["wanted_precision"] == 0.5 != public["wanted_precision"], "fitted on people's questions"
    write_json_lines(project / "questions.dev.jsonl", MADE)
    stage("finetune", values, project, root)
    kept = json.loads((root / "models" / "finetune" / CONFIDENCE).read_text())
    assert kept == public | {
        "threshold": public["strict_threshold"],
        "wanted_precision": public["strict_precision"],
        "source": READER_QUESTIONS,
    }


@pytest.mark.parametrize(
    ("threshold", "message"),
    [
        (
            1.0,
            "finetune: 0 of 2 dev questions are answered, with a confidence of at least 1.000; the threshold is of "
            "reader.init, for the precision 0.6",
        ),
        (
            ALWAYS_ABSTAIN,
            "finetune: the model abstains on every question: in the calibration of reader.init nothing reached the "
            "precision 0.6 for other documents; set questions.dev to at least 20 questions of people to fit it again",
        ),
    ],
)
def test_finetune_reports_a_kept_calibration_that_answers_no_dev_question(
    reader: Path, project: Path, tmp_path: Path, threshold: float, message: str
) -> None:
    """A probability is below 1, so no answer reaches a threshold of 1. Two questions of people are too few."""
    other = Path(shutil.copytree(reader, tmp_path / "other"))
    public = json.loads((other / CONFIDENCE).read_text())
    artifacts.write_json(other / CONFIDENCE, {**public, "strict_threshold": threshold, "strict_precision": 0.6})
    artifacts.write_manifest(other, "export")
    values, report = begun(project, other, wanted_precision=0.9), Quiet()
    people = [{name: record[name] for name in record if name != "not_in"} for record in MADE[:2]]
    write_json_lines(project / "questions.dev.jsonl", [*people, *MADE[2:]])
    metrics = stage("finetune", values, project, project / "root", report)
    assert [line for line in report.said if "reader.init" in line] == [message]
    assert metrics["dev_answered"] == 0.0
    assert "dev_answered_precision" not in metrics, "there is no answer to be right"


def test_with_epochs_it_goes_on_learning(reader: Path, project: Path) -> None:
    stage("finetune", begun(project, reader, epochs=1.0), project, project / "root")
    assert (project / "root" / "models" / "finetune" / READER).read_bytes() != (reader / READER).read_bytes()


def test_a_reader_of_other_wordpieces_is_refused(reader: Path, project: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(reader, tmp_path / "other"))
    described = json.loads((other / MODEL).read_text()) | {"vocabulary_hash": "0" * 64}
    (other / MODEL).write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"set retriever\.init to the encoder that this reader was trained from"):
        stage("finetune", begun(project, other), project, project / "root", Quiet())


def test_a_folder_that_is_no_reader_ends_a_run_before_its_first_stage(project: Path, tmp_path: Path) -> None:
    begun(project, tmp_path)
    with pytest.raises(ValueError, match="it is no finished export"):
        run_all_here(project / "params.yaml", tmp_path / "root")
    assert not (tmp_path / "root" / "data").exists()


def test_init_writes_a_project_that_begins_with_it(reader: Path, tmp_path: Path) -> None:
    folder = with_documents(tmp_path / "mine")
    named = ("--documents", folder / "documents.jsonl", "--reader", reader)
    refused = cli("init", folder, *named, "--encoder", "small")
    assert refused.exit_code == 2
    assert "needs the vocabulary of its pre-trained encoder" in refused.stderr
    assert "already trained (preset reader)" in made(folder, *named, "--encoder", "some/encoder")
    presets, own = read_params(folder / "params.yaml")
    assert presets == ["squad", "minilm", "documents", "reader"]
    assert own["reader"] == {"init": str(reader)}
    values = config.load_params(folder / "params.yaml")
    assert not values["ict"]["reader_steps"]
    assert not values["finetune"]["epochs"]
    assert "${reader.init}" in (folder / "dvc.yaml").read_text()
