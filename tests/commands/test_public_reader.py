"""``realmops reader``: a reader trained on public questions, for other runs and other programs."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
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
    cli,
    contents,
    litter,
    run_all_here,
    stage,
    write_json_lines,
    write_params,
)

from realmops import artifacts
from realmops.answering.confidence import FILE as CONFIDENCE
from realmops.config import load_params
from realmops.model.reader_files import READER_FOLDER
from realmops.options import Options
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
def reader(inputs: Path) -> Path:
    """The folder that the command writes; its output is in ``reader.log`` next to it."""
    log = inputs / "reader.log"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}  # the stages are not forked
    words = "reader", inputs / "reader", *options(inputs)
    assert forked.realmops(*words, log=log, env=environment).wait() == 0, log.read_text()
    return inputs / "reader"


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "project"))


def begun(project: Path, reader: Path, **finetune: float) -> Options:
    """The project's options with that reader."""
    changes = {"reader.init": str(reader), "ict.reader_steps": 0, "pretrain.steps": 0}
    tuning = {"epochs": 0.0, "retriever_epochs": 0.0, **finetune}
    changes |= {f"finetune.{key}": value for key, value in tuning.items()}
    options = load_params(project / "params.yaml").replace(changes)
    write_params(project / "params.yaml", options)
    return options


def test_transformers_opens_the_folder_as_its_card_shows(reader: Path) -> None:
    artifacts.read_manifest(reader, "trained reader")
    assert not litter(reader.parent), "the training left files"
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(reader)
    assert type(model).__name__ == "RobertaForQuestionAnswering"
    names: dict[str, Any] = {}
    [code] = re.findall(r"```python\n(.*?)```", (reader / "README.md").read_text(), re.DOTALL)
    exec(code.replace("FOLDER", str(reader)), names)
    assert isinstance(names["answer"], str)
    assert names["scores"].start_logits.shape == names["inputs"]["input_ids"].shape


def test_the_card_has_the_numbers_of_the_training(reader: Path) -> None:
    _, front, text = (reader / "README.md").read_text().split("---\n", 2)
    log = (reader.parent / "reader.log").read_text()
    about = yaml.safe_load(front)
    assert (about["license"], about["datasets"]) == ("unknown", ["rajpurkar/squad"])
    [index] = about["model-index"][0]["results"]
    assert index["dataset"]["args"] == {"questions": 24}
    assert str(reader.parent) not in text
    facts = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE))
    [counts] = re.findall(r"(\d+) of SQuAD 1\.1 .* about (\d+) paragraphs of (\d+) ", facts["training questions"])
    questions, paragraphs, articles = map(int, counts)
    assert questions == QUESTIONS_ASKED
    assert ARTICLES // 2 < articles <= paragraphs <= QUESTIONS_ASKED // 2, "few articles would teach less"
    assert f"{questions} questions about {articles} articles of SQuAD 1.1 train it, 24 about other" in log
    assert facts["calibration"].startswith("24 questions of SQuAD about other articles; ")
    scores = [f"{metric['value']:.3f}" for metric in index["metrics"]]
    assert facts["EM; F1 of these questions"].split(",")[0].split("; ") == scores
    assert float(scores[0]) == pytest.approx(float(re.findall(r"dev_em=([\d.]+)", log)[0]), abs=6e-4)
    assert facts["epochs; steps"] == f"2; {2 * math.ceil(int(facts['read'].split()[0]) / 12)}"


def no_network(*arguments: Any, **options: Any) -> Any:
    raise OSError("no network")


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("mine", [], "mine/notes.txt was not written by this command"),
        ("out", ["--encoder", "mine"], "mine lacks config.json, model.safetensors, "),
        ("out", ["--from", "mine"], "mine has no train-v1.1.json or train-v1.1.json.gz; download it from https://"),
        ("out", ["--from", ""], "cannot be downloaded (no network); download train-v1.1.json from there manually"),
    ],
)
def test_unusable_input_is_refused_before_anything_is_written(
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
    assert stage("evaluate", values, project, root)["questions"] == len(QUESTIONS["test"])
    answers = cli("ask", "--from", project / "questions.test.jsonl", "--root", root, "--json")
    assert answers.exit_code == 0, answers.output
    (project / "answers.jsonl").write_text(answers.stdout)
    assert all(json.loads(line)["citations"] for line in answers.stdout.splitlines())
    checked = cli("verify", project / "answers.jsonl", project / "documents.jsonl")
    assert checked.exit_code == 0, checked.output
    stage("finetune", begun(project, reader, epochs=1.0), project, root)
    assert (tuned / READER_FOLDER / "model.safetensors").read_bytes() != (reader / "model.safetensors").read_bytes()


def test_its_calibration_is_kept_if_all_dev_questions_are_generated(reader: Path, project: Path) -> None:
    values, root = begun(project, reader), project / "root"
    records = [{"id": q, "question": q, "answers": [a], "not_in": ["0"]} for q, a in QUESTIONS["dev"]]
    write_json_lines(project / "questions.dev.jsonl", records)
    stage("finetune", values, project, root)
    kept, public = (json.loads((folder / CONFIDENCE).read_text()) for folder in (root / "models" / "finetune", reader))
    for key in ("slope", "intercept", "questions"):
        assert kept[key] == public[key]


def test_a_folder_without_a_reader_ends_a_run_before_its_first_stage(
    inputs: Path, project: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for folder, message in ((tmp_path / "empty", "empty lacks config.json"), (inputs / "encoder", "no trained span")):
        begun(project, folder)
        with pytest.raises(ValueError, match=message):
            run_all_here(project / "params.yaml", tmp_path / "root")
        assert not (tmp_path / "root" / "data").exists()
