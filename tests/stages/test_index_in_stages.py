"""An approximate index through the stages: pretrain (killed and not), finetune, evaluate, update and own questions."""

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import small_project
import torch
from small_world import DOCUMENTS, PAPERS_READER, write_documents

from realmops.answering.opened_model import Query
from realmops.corpus.snapshot_reader import Snapshot
from realmops.opening import open_run
from realmops.search.approximate import unwrap_approximate
from realmops.search.embeddings import INDEX, RECIPE, load_passages
from realmops.stages import STAGES
from realmops.train import loop

# 252 passages: 6 lists of which one is looked at. The target is low, as such an index of a random retriever wants.
COPIES = 21
OPTIONS = {
    "index": {"type": "ivf", "target_recall": 0.1},
    "retriever": {"pooling": "mean", "document_vectors": 2},  # and the index is one over vectors
    "reader": PAPERS_READER,
    "pretrain": {"retriever_learning_rate": 5.0e-5, "retriever_delay": 0, "masked_sentences": 4},
}


def numbered(count: int) -> tuple[Any, ...]:
    """The twelve documents so many times, each time with another year in title and text."""
    return tuple(
        (f"{title} {1900 + n}", f"{text} {1900 + n}", spans) for n in range(count) for title, text, spans in DOCUMENTS
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the stages before pretrain done under ``root``."""
    folder = tmp_path_factory.mktemp("index")
    small_project.write_project(folder, **OPTIONS)
    write_documents(folder / "documents.jsonl", numbered(COPIES))
    for name in ("snapshot", "tag", "ict"):
        small_project.stage(name, small_project.toy_values(**OPTIONS), folder, folder / "root")
    return folder


@pytest.fixture(scope="module")
def root(project: Path) -> Path:
    """All stages done."""
    for name in ("pretrain", "finetune", "evaluate"):
        small_project.stage(name, small_project.toy_values(**OPTIONS), project, project / "root")
    return project / "root"


def metrics(root: Path, name: str) -> dict[str, Any]:
    return json.loads((root / STAGES[name].folder / "metrics.json").read_text())


def test_every_generation_is_journaled_with_its_recall(root: Path) -> None:
    lines = small_project.journal(root / "models/pretrain")
    recall = {line["step"]: line["index_recall"] for line in lines if "index_recall" in line}
    assert sorted(recall) == [0, 6, 10], "steps 0, 4 and 8 were published, adopted 2 steps later"
    assert all(0.1 <= value <= 1.0 for value in recall.values())
    assert min(recall.values()) < 1.0, "or nothing was approximate here"
    assert metrics(root, "pretrain")["index_recall"] == min(recall.values())


@pytest.mark.parametrize(("killed_at", "seconds"), [(7, 60), (6, 0)])
def test_a_killed_training_ends_with_the_same_weights(
    project: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int, seconds: int
) -> None:
    """After an index was adopted, and with a checkpoint at each step, where one is adopted."""
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", seconds)
    monkeypatch.setattr(loop, "CHECKPOINT_SHARE", math.inf)
    killed = tmp_path / "killed"
    for name in ("snapshot", "tag", "ict"):
        shutil.copytree(root / STAGES[name].folder, killed / STAGES[name].folder)
    values = small_project.toy_values(**OPTIONS)
    with small_project.stopped_at(killed_at):
        small_project.stage("pretrain", values, project, killed)
    small_project.stage("pretrain", values, project, killed)
    again, calm = (small_project.model_files(folder / "models/pretrain") for folder in (killed, root))
    assert again == calm
    calm, again = (
        small_project.without_clock(small_project.journal(folder / "models/pretrain")) for folder in (root, killed)
    )
    assert again == calm


def test_evaluation_and_questions_use_the_same_index(root: Path) -> None:
    run = open_run(root)
    model = run.model
    assert model.passages is not None
    structure = unwrap_approximate(model.passages)
    assert asdict(structure.recipe) == json.loads((root / "models/finetune" / RECIPE).read_text())
    assert 0.0 < metrics(root, "evaluate")["index_recall"] <= 1.0
    [found] = run.answer([Query("Who wrote The Cold Sea?")])
    assert len(found["passages"]) == 5


def test_an_updated_corpus_is_searched_by_an_index_of_that_type(project: Path, root: Path) -> None:
    write_documents(project / "documents.jsonl", numbered(COPIES + 4))
    assert small_project.cli("update", "--params", project / "params.yaml", "--root", root).exit_code == 0
    [folder] = (root / "updates").iterdir()
    snapshot = Snapshot.open(folder / "snapshot/corpus")
    assert len(snapshot) == 12 * (COPIES + 4)
    passages = load_passages(folder / "finetune", snapshot, torch.device("cpu"), 2)
    assert unwrap_approximate(passages) is not None
    assert len(passages.embedding_PE) == len(snapshot)
    assert 0.0 < json.loads((folder / "results/metrics.json").read_text())["index_recall"] <= 1.0


def test_a_recall_out_of_reach_ends_pre_training_with_one_message(project: Path, root: Path) -> None:
    values = small_project.toy_values(**{**OPTIONS, "index": {"type": "ivf", "target_recall": 1.0}})
    with pytest.raises(ValueError, match=r"target_recall 1.0 is .* ivf finds 0\.\d+ of the exact top 20 .*; lower"):
        small_project.stage("pretrain", values, project, root)
    assert not list((root / "models").glob(".*")), "nothing half-written is left"
    assert (root / "models/pretrain" / "retriever/realmops.json").is_file(), "and what was there stays"
    assert not (root / "models/pretrain" / INDEX).exists()
