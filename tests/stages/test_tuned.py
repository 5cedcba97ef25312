"""Fine-tuning as a stage with words beside embeddings, batches of passages and windows; killed in each of its parts."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_project
import torch
from small_world import Killed, write_documents

from realmops.answering.answer import Answer
from realmops.answering.openqa import OpenQa
from realmops.corpus.snapshot_reader import Snapshot
from realmops.journal import Journal
from realmops.model.reader_files import load_models
from realmops.questions.question_sets import Question
from realmops.refresh import shards
from realmops.refresh.versions import VersionStore
from realmops.search import embeddings
from realmops.search.embeddings import embed_corpus, load_index
from realmops.stages import Job, resolve_models
from realmops.stages import finetune as stage

QUERY, READER = "retriever/model.safetensors", "reader/model.safetensors"
OPTIONS: dict[str, dict[str, Any]] = {
    "bert": {"dropout": 0.1},
    "retriever": {"hybrid": True},
    "reader": {"copies": True, "apart": True},
    "pretrain": {"steps": 0, "builder": "external"},
    "finetune": {
        "retriever_training": "passages",
        "retriever_batch_size": 2,
        "reader_training": "windows",
        "reader_dropout": 0.1,
    },
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    small_project.write_project(folder, **OPTIONS)
    for name in ("snapshot", "tag", "ict", "pretrain"):
        small_project.stage(name, small_project.toy_values(**OPTIONS), folder, folder / "root")
    return folder


def tune(project: Path, report: small_project.Quiet | None = None, **changes: Any) -> dict[str, Any]:
    values = small_project.toy_values(**{**OPTIONS, "finetune": {**OPTIONS["finetune"], **changes}})
    return small_project.stage("finetune", values, project, project / "root", report)


def files(project: Path) -> dict[str, bytes]:
    return small_project.model_files(project / "root/models/finetune")


def dying(count: int, usual: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which at its call of this number, from 1, ends the process instead."""
    calls = [0]

    def call(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            raise Killed
        return usual(*given, **named)

    return call


def test_made_questions_are_answered_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight of f(x, z) in reading is known before."""
    usual, answer, answered = stage.load_questions, OpenQa.answer, list[int]()

    def made(job: Job, snapshot: Snapshot, split: str) -> list[Question]:
        return [replace(question, not_in=(snapshot.passage_id(0),)) for question in usual(job, snapshot, split)]

    def counted(model: OpenQa, questions: list[Question], **named: Any) -> list[Answer]:
        answered.append(len(questions))
        return answer(model, questions, **named)

    monkeypatch.setattr(stage, "load_questions", made)
    monkeypatch.setattr(OpenQa, "answer", counted)
    metrics = tune(project)
    assert (answered, metrics["weight_reading"]) == ([20], OpenQa.generated_reading_weight)
    shutil.rmtree(project / "root/models/finetune")


def test_killed_in_each_of_its_parts_it_ends_with_the_same_bytes(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps of the retriever, the embeddings, six of the reader, with dropout and a checkpoint at every second."""
    monkeypatch.setattr(shards, "SHARD_ROWS", 5)
    report = small_project.Quiet()
    metrics = tune(project, report)
    assert (metrics["passages_with_questions"], metrics["questions_with_evidence"]) == (6, 6)
    [said] = [line for line in report.said if line.startswith("finetune: f(x, z) = ")]
    counts = f"its weight next to the span score is {metrics['weight_reading']:g}"
    assert said.endswith(f"fitted on dev questions of people (20); {counts}")
    expected, lines = files(project), small_project.journal(project / "root/models/finetune")
    assert ["retriever_loss" in line for line in lines] == [True] * 6 + [False] * 6
    assert ["span_accuracy" in line for line in lines] == [False] * 6 + [True] * 6
    assert json.loads(expected["retriever/realmops.json"])["share_embedders"], "one tower, which made the embeddings"
    embedded: list[int] = []
    usual = embeddings.make_document_embedder

    def counted(*given: Any) -> Any:
        make = usual(*given)
        return lambda rows, progress: (embedded.append(len(rows)), make(rows, progress))[1]

    monkeypatch.setattr(embeddings, "make_document_embedder", counted)
    shutil.rmtree(project / "root/models/finetune")
    for place, name, count in ((Journal, "log", 4), (VersionStore, "publish", 5), (Journal, "log", 4)):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, dying(count, getattr(place, name)))
            with pytest.raises(Killed):
                tune(project)
    assert embedded == [5, 5, 2, 2], "in the life that was killed as the last shard was committed, and in the next"
    tune(project)
    assert embedded == [5, 5, 2, 2]
    assert files(project) == expected
    assert small_project.without_clock(
        small_project.journal(project / "root/models/finetune")
    ) == small_project.without_clock(lines)


def test_the_readers_dropout_is_its_own(project: Path) -> None:
    """That of ``bert.dropout`` stays with the retriever."""
    found = {}
    for dropout in (0.0, 0.3):
        tune(project, reader_dropout=dropout)
        found[dropout] = files(project)
        snapshot = Snapshot.open(project / "root/data/snapshot/corpus")
        retriever, reader = load_models(project / "root/models/finetune", snapshot.vocabulary_hash)
        assert retriever.query.encoder.dropout == 0.1
        assert reader.encoder.dropout == dropout
    assert found[0.0][QUERY] == found[0.3][QUERY]
    assert found[0.0][READER] != found[0.3][READER]


def test_a_query_tower_that_goes_on_learning_leaves_the_passages_tower_alone(project: Path) -> None:
    """Passages of an update are embedded by the saved tower: it must be the one that embedded the others."""
    tune(project, reader_training="passages", freeze_words=True, epochs=1)
    folder, root = project / "root/models/finetune", project / "root"
    snapshot = Snapshot.open(root / "data/snapshot/corpus")
    retriever, _ = load_models(folder, snapshot.vocabulary_hash)
    assert torch.equal(embed_corpus(retriever, snapshot, torch.float32), load_index(folder, snapshot))
    pairs = zip(retriever.query.parameters(), retriever.document.parameters(), strict=True)
    assert any(not torch.equal(query, document) for query, document in pairs)
    before, after = (small_project.model_tensors(root / "models" / n, "reader") for n in ("pretrain", "finetune"))
    same = {name.partition("embeddings.")[2] for name in before if torch.equal(before[name], after[name])}
    assert "word_embeddings.weight" in same, "frozen"
    assert "position_embeddings.weight" not in same


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"BM25's top 20 passages, so the retriever cannot .*finetune\.retriever_training=queries"),
        ({"retriever_training": "queries"}, r"top 20 passages, so the reader .*finetune\.epochs=0"),
    ],
)
def test_questions_that_nothing_answers_are_refused(
    project: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_documents(tmp_path / "documents.jsonl")
    for split, answer in (("train", "Nobody at all"), ("dev", "Oslo"), ("test", "Oslo")):
        asked = {"id": "1", "question": "Who?", "answers": [answer]}
        small_project.write_json_lines(tmp_path / f"questions.{split}.jsonl", [asked])
    (tmp_path / "tagged.conll").write_text(small_project.TAGGED)
    values = small_project.toy_values(**{**OPTIONS, "finetune": {**OPTIONS["finetune"], **changes}})
    shutil.copytree(project / "root", tmp_path / "root", ignore=shutil.ignore_patterns("finetune"))
    with pytest.raises(ValueError, match=message):
        small_project.stage("finetune", values, tmp_path, tmp_path / "root")


def test_folders_of_models_are_resolved_against_the_project(tmp_path: Path) -> None:
    """Wherever the command runs; the words that name no folder stay, also beside a folder of that name."""
    for name in ("reader", "none", "small"):
        (tmp_path / name).mkdir()
    untrained = {"ict": {"reader_steps": 0}, "pretrain": {"steps": 0}}
    values = small_project.toy_values(reader={"init": "reader"}, retriever={"init": "some/encoder"}, **untrained)
    resolved = resolve_models(values, tmp_path)
    assert resolved.reader.init == str(tmp_path / "reader")
    assert resolved.retriever.init == "hf:some/encoder", "not the working directory's folder of that name"
    assert resolve_models(small_project.toy_values(reader={"init": "none"}), tmp_path).reader.init == "none"
    assert resolve_models(small_project.toy_values(), tmp_path).retriever.init == "small"
    assert values.reader.init == "reader", "the options of manifests and keys"
