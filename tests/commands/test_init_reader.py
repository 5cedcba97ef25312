"""``realmops init`` proposes a published reader, or reports that the project only searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_project
import yaml
from huggingface_hub.hf_api import ModelInfo
from small_project import cli

from realmops.config import load_params
from realmops.starter.choose_models import MULTILINGUAL_READERS, READERS

SIZES = {READERS[0]: 260_783_000, READERS[1]: 496_254_442, MULTILINGUAL_READERS[0]: 1_109_800_000}
LICENCES = {READERS[0]: "apache-2.0", READERS[1]: "cc-by-4.0"}
GERMAN = "Die Stadt wurde von ihren Bewohnern am Fluss erbaut, und viele Menschen leben heute dort. " * 30


@pytest.fixture
def sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Readers on a hub without encoders, by name with their bytes; the cache is empty."""
    known = dict(SIZES)

    def model_info(api: object, name: str, **options: object) -> ModelInfo:
        files = [{"rfilename": "model.safetensors", "size": known[name]}, {"rfilename": "model.bin", "size": 1 << 40}]
        return ModelInfo(id=name, siblings=files, cardData={"license": LICENCES.get(name)})

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return known


def created(folder: Path, *words: str | Path, text: str = "") -> tuple[list[str], str, dict[str, Any]]:
    """The lines of ``init``, its line about the reader, and the options of the project."""
    documents = folder.parent / "documents.jsonl"
    if text:
        small_project.write_json_lines(documents, [{"title": "", "text": text}])
    else:
        small_project.write_documents(documents)
    result = cli("init", folder, "--documents", documents, "--encoder", "some/encoder", *words)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    return lines, next((line for line in lines if line.startswith("reader: ")), ""), load_params(folder / "params.yaml")


@pytest.mark.usefixtures("sizes")
def test_a_small_reader_is_proposed_with_licence_and_size_and_a_better_one_is_named(tmp_path: Path) -> None:
    _, proposal, values = created(tmp_path / "mine")
    assert f"{READERS[0]} (apache-2.0, 261 MB), loaded by the first run" in proposal
    assert f"--reader {READERS[1]} (cc-by-4.0, 496 MB); --no-reader" in proposal
    assert (values.reader.init, values.finetune.epochs) == (READERS[0], 0)
    _, proposal, values = created(tmp_path / "named", "--reader", READERS[1])
    assert proposal == f"reader: {READERS[1]} (cc-by-4.0, 496 MB), loaded by the first run"
    assert values.reader.init == READERS[1]
    _, proposal, values = created(tmp_path / "german", text=GERMAN)
    assert f"{MULTILINGUAL_READERS[0]} (unknown, 1,110 MB)" in proposal
    assert values.reader.init == MULTILINGUAL_READERS[0]


def test_without_a_reader_the_first_line_is_search_not_answers(tmp_path: Path, sizes: dict[str, int]) -> None:
    lines, _, values = created(tmp_path / "asked", "--no-reader")
    assert (lines[0], values.reader.init) == ("search, not answers: no reader, by --no-reader", "none")
    sizes.clear()
    lines, _, values = created(tmp_path / "alone")
    assert lines[0].startswith("search, not answers: no reader can be loaded")
    assert values.reader.init == "none"


def test_a_reader_is_trained_further_on_questions_of_people(tmp_path: Path, sizes: dict[str, int]) -> None:
    records = [{"question": f"Who wrote book {n}?", "answers": ["Anna Berg"]} for n in range(60)]
    questions = small_project.write_json_lines(tmp_path / "questions.jsonl", records)
    _, proposal, values = created(tmp_path / "mine", "--questions", questions)
    assert "trained 2 epochs further on your questions" in proposal
    assert values.finetune.epochs == 2
    stages = yaml.safe_load((tmp_path / "mine" / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    assert "tag" not in stages, "nothing reads spans"
    sizes.clear()
    _, proposal, values = created(tmp_path / "own", "--questions", questions)
    assert "trained on your questions from the encoder" in proposal
    assert values.reader.init == "encoder"
