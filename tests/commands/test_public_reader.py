"""``realmops reader``: a reader made from public questions, which other runs and other programs use."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import forked
import pytest
import transformers
import yaml
from small_encoders import write_encoder
from small_project import (
    QUESTIONS,
    Quiet,
    Values,
    cli,
    command,
    litter,
    run_all_here,
    stage,
    wait_for,
    write_json_lines,
    write_params,
)
from test_init import made, with_documents

from realmops import artifacts
from realmops.answering.confidence import ALWAYS_ABSTAIN
from realmops.answering.confidence import FILE as CONFIDENCE
from realmops.config_yaml import read_params
from realmops.model.reader_files import READER_FOLDER
from realmops.stages.runner import stage_lock
from realmops.starter.public_data import stable_hash

QUESTIONS_ASKED, ARTICLES, PARAGRAPHS = 30, 12, 3
TOWNS = [f"{begin}{end}" for begin in ("Bren", "Cald", "Dorn", "Falt", "Grun", "Hald") for end in ("ac", "berg", "ov")]


def is_held_out(town: str) -> bool:
    return stable_hash(f"dev:{town}") % 10 == 0


def article(town: str) -> dict[str, Any]:
    """An article of SQuAD's form with four questions a paragraph."""
    paragraphs = []
    for n in range(PARAGRAPHS):
        year, river = 1500 + stable_hash(f"{town} {n}") % 500, f"the {town[:4]}er"
        facts = {
            f"When did {town} get its wall {n}?": str(year),
            f"Which river is at wall {n} of {town}?": river,
            f"In which year was wall {n} of {town} made?": str(year),
            f"What is the river of {town}?": river,
        }
        text = f"In {year} {town} got its wall {n}. At this wall is {river}, a river of {n} bridges."
        asked = [
            {"id": str(q), "question": question, "answers": [{"answer_start": text.index(answer), "text": answer}]}
            for q, (question, answer) in enumerate(facts.items())
        ]
        paragraphs.append({"context": text, "qas": asked})
    return {"title": town, "paragraphs": paragraphs}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with another tokenizer than that of the small project, and questions of SQuAD's form."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = write_encoder(folder / "encoder", "roberta", max_position_embeddings=514) / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text().replace('"model_max_length": 64', '"model_max_length": 512'))
    held_out = [town for n in range(100) if is_held_out(town := f"Town {n}")][:2]
    articles = [article(town) for town in (*held_out, *[t for t in TOWNS if not is_held_out(t)][:ARTICLES])]
    (folder / "squad").mkdir()
    (folder / "squad/train-v1.1.json").write_text(json.dumps({"data": articles, "version": "1.1"}))
    return folder


def options(inputs: Path) -> list[str | Path]:
    return ["--encoder", inputs / "encoder", "--from", inputs / "squad", "--questions", str(QUESTIONS_ASKED)]


@pytest.fixture(scope="module")
def done(inputs: Path) -> str:
    """The output of the command, which writes the folder ``reader`` next to its inputs."""
    return forked_output("reader", inputs / "reader", *options(inputs), log=inputs / "reader.log")


def forked_output(*words: str | Path, log: Path) -> str:
    """Return the output of a command and of its stages, which are not forked under torchrun."""
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    assert forked.realmops(*words, log=log, env=environment).wait() == 0, log.read_text()
    return log.read_text()


@pytest.fixture(scope="module")
def reader(inputs: Path, done: str) -> Path:
    return inputs / "reader"


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "project"))


def begun(project: Path, reader: Path, **finetune: float) -> Values:
    """The project's options with that reader."""
    values: Values = yaml.safe_load((project / "params.yaml").read_text())
    values["reader"]["init"] = str(reader)
    values["finetune"] |= {"epochs": 0.0, "retriever_epochs": 0.0, **finetune}
    values["ict"]["reader_steps"] = values["pretrain"]["steps"] = 0
    write_params(project / "params.yaml", values)
    return values


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_transformers_opens_the_folder_as_its_card_shows(reader: Path) -> None:
    artifacts.read_manifest(reader, "export")
    assert not litter(reader.parent), "the training left files"
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(reader)
    assert type(model).__name__ == "RobertaForQuestionAnswering"
    names: dict[str, Any] = {}
    [code] = re.findall(r"```python\n(.*?)```", (reader / "README.md").read_text(), re.DOTALL)
    exec(code.replace("FOLDER", str(reader)), names)
    assert isinstance(names["answer"], str)
    assert names["scores"].start_logits.shape == names["inputs"]["input_ids"].shape


def test_the_card_has_the_numbers_of_the_training(reader: Path, done: str) -> None:
    _, front, text = (reader / "README.md").read_text().split("---\n", 2)
    about = yaml.safe_load(front)
    assert (about["license"], about["datasets"]) == ("unknown", ["rajpurkar/squad"])
    assert "base_model" not in about, "the encoder is a folder"
    [index] = about["model-index"][0]["results"]
    assert (index["dataset"]["type"], index["dataset"]["args"]) == ("rajpurkar/squad", {"questions": 24})
    assert str(reader.parent) not in text
    facts = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE))
    questions, paragraphs, articles = map(
        int, re.findall(r"(\d+) of SQuAD 1\.1 .* about (\d+) paragraphs of (\d+) ", facts["training questions"])[0]
    )
    assert questions == QUESTIONS_ASKED
    assert articles <= paragraphs <= QUESTIONS_ASKED // 2
    assert articles > ARTICLES // 2, "few articles would teach less"
    assert f"{questions} questions about {articles} articles of SQuAD 1.1 train it, 24 about other" in done
    assert facts["encoder"] == "encoder"
    assert facts["calibration"].startswith("24 questions of SQuAD about other articles; ")
    assert json.loads((reader / CONFIDENCE).read_text())["questions"] == 24
    shown = [f"{metric['value']:.3f}" for metric in index["metrics"]]
    assert facts["EM; F1 of these questions"].split(",")[0].split("; ") == shown
    read = int(facts["read"].split()[0])
    assert 0 < read <= questions
    assert facts["epochs; steps"] == f"2; {2 * math.ceil(read / 12)}"
    em = re.findall(r"dev_em=([\d.]+)", done)[0]
    assert float(facts["EM; F1 of these questions"].split(";")[0].split()[-1]) == pytest.approx(float(em), abs=6e-4)
    assert "CC BY-SA 4.0" in text


def test_a_killed_command_resumes_and_writes_the_same_reader(inputs: Path, reader: Path) -> None:
    words = "reader", inputs / "other", *options(inputs)
    process = subprocess.Popen(
        command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    work = inputs / ".other.training"
    wait_for((work / "data/snapshot/manifest.json").is_file, 60, process)
    os.killpg(process.pid, signal.SIGKILL)  # the stages and the process that they are forked from too
    process.communicate()
    assert not (inputs / "other").exists()
    with stage_lock(work / artifacts.WORK_FOLDER, "reader"):
        assert "another process runs the stage reader" in cli(*words).stderr
    assert "snapshot: nothing to do" in forked_output(*words, log=inputs / "other.log")
    assert contents(inputs / "other") == contents(reader)
    assert not work.exists()


def no_network(*arguments: Any, **options: Any) -> Any:
    raise OSError("no network")


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("mine", [], "mine/notes.txt was not written by this command"),
        ("out", ["--encoder", "some/encoder"], "--encoder is 'some/encoder': no such folder, and the download failed"),
        ("out", ["--encoder", "mine"], "mine lacks config.json, model.safetensors, "),
        ("out", ["--from", "mine"], "mine has no train-v1.1.json or train-v1.1.json.gz; download it from https://"),
        ("out", ["--from", ""], "cannot be downloaded (no network); download train-v1.1.json from there manually"),
        (".", [], ". is the working directory or above it"),
    ],
)
def test_what_cannot_become_a_reader_is_refused_before_anything_is_written(
    name: str, changed: list[str], message: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    words = options(inputs)[:2] if changed == ["--from", ""] else [*options(inputs), *changed]
    result = cli("reader", name, *words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert contents(tmp_path) == {"mine/notes.txt": b"mine"}
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


def test_a_run_with_another_tokenizer_answers_with_it_and_its_quotations_hold(reader: Path, project: Path) -> None:
    values, root = begun(project, reader, wanted_precision=0.0), project / "root"
    stage("finetune", values, project, root)
    tuned = root / "models" / "finetune"
    assert (tuned / READER_FOLDER / "model.safetensors").read_bytes() == (reader / "model.safetensors").read_bytes()
    assert not (tuned / "metrics.jsonl").exists(), "no step"
    assert stage("evaluate", values, project, root)["questions"] == len(QUESTIONS["test"])
    answers = cli("ask", "--from", project / "questions.test.jsonl", "--root", root, "--json")
    assert answers.exit_code == 0, answers.output
    (project / "answers.jsonl").write_text(answers.stdout)
    assert all(json.loads(line)["citations"] for line in answers.stdout.splitlines())
    checked = cli("verify", project / "answers.jsonl", project / "documents.jsonl")
    assert checked.exit_code == 0, checked.output


def test_with_epochs_it_goes_on_learning(reader: Path, project: Path) -> None:
    stage("finetune", begun(project, reader, epochs=1.0), project, project / "root")
    weights = f"models/finetune/{READER_FOLDER}/model.safetensors"
    assert (project / "root" / weights).read_bytes() != (reader / "model.safetensors").read_bytes()


def test_its_calibration_holds_where_only_made_questions_could_fit_another(reader: Path, project: Path) -> None:
    values, root = begun(project, reader), project / "root"
    made = [{"id": str(n), "question": q, "answers": [a], "not_in": ["0"]} for n, (q, a) in enumerate(QUESTIONS["dev"])]
    write_json_lines(project / "questions.dev.jsonl", made)
    stage("finetune", values, project, root)
    kept, public = (json.loads((folder / CONFIDENCE).read_text()) for folder in (root / "models" / "finetune", reader))
    for key in ("slope", "intercept", "questions"):
        assert kept[key] == public[key]


@pytest.mark.parametrize(
    ("threshold", "message"),
    [
        (
            1.0,
            "finetune: answers need a confidence of at least 1.000; the threshold is of reader.init, for the precision "
            "0.6",
        ),
        (
            ALWAYS_ABSTAIN,
            "finetune: the model abstains on every question: in the calibration of reader.init nothing reached the "
            "precision 0.6; set questions.dev to at least 20 questions of people to fit it again",
        ),
    ],
)
def test_finetune_reports_a_kept_calibration_that_answers_no_dev_question(
    reader: Path, project: Path, tmp_path: Path, threshold: float, message: str
) -> None:
    """All dev questions are made, so that none of them is read."""
    other = Path(shutil.copytree(reader, tmp_path / "other"))
    public = json.loads((other / CONFIDENCE).read_text())
    artifacts.write_json(other / CONFIDENCE, {**public, "threshold": threshold, "wanted_precision": 0.6})
    values, report = begun(project, other, wanted_precision=0.9), Quiet()
    asked = [
        {"id": str(n), "question": q, "answers": [a], "not_in": ["0"]} for n, (q, a) in enumerate(QUESTIONS["dev"])
    ]
    write_json_lines(project / "questions.dev.jsonl", asked)
    metrics = stage("finetune", values, project, project / "root", report)
    assert [line for line in report.said if "reader.init" in line] == [message]
    assert not [name for name in metrics if name.startswith("dev_")]


def test_what_is_no_reader_ends_a_run_before_its_first_stage(inputs: Path, project: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, message in ((tmp_path / "empty", "empty lacks config.json"), (inputs / "encoder", "no trained span")):
        begun(project, folder)
        with pytest.raises(ValueError, match=message):
            run_all_here(project / "params.yaml", tmp_path / "root")
        assert not (tmp_path / "root" / "data").exists()


def test_init_writes_a_project_that_begins_with_it(reader: Path, tmp_path: Path) -> None:
    folder = with_documents(tmp_path / "mine")
    made(folder, "--documents", folder / "documents.jsonl", "--reader", reader, "--encoder", "some/encoder")
    assert read_params(folder / "params.yaml")[1]["reader"] == {"init": str(reader)}
