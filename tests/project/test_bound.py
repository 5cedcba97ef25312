"""Artifacts about passages name their corpus: opened with another snapshot, each is refused (table in docs/operate.md).

The other snapshot holds the same passages in another order: as many, and none at its old number.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_project import cli, stage, toy_values

from realmops.answering.corpus_states import newest_state, pipeline_state
from realmops.commands.promote import read_run
from realmops.corpus.snapshot_reader import Snapshot
from realmops.corpus.spans import Spans
from realmops.opening import open_run
from realmops.search.bm25 import FOLDER, Bm25
from realmops.search.embeddings import load_index

VALUES = toy_values()
Refusal = tuple[str, Callable[[Path, Path], object]]  # what the message names, and what opens the artifact


def reverse_documents(project: Path) -> None:
    path = project / "documents.jsonl"
    path.write_text("".join(f"{line}\n" for line in reversed(path.read_text().splitlines())))


@pytest.fixture(scope="module")
def other(answering: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose snapshot alone was made again, of the same documents in another order."""
    project = Path(shutil.copytree(answering, tmp_path_factory.mktemp("bound") / "project"))
    root = project / "root"
    shutil.copytree(root / "data" / "snapshot", project / "earlier")
    reverse_documents(project)
    stage("snapshot", VALUES, project, root)
    before, after = (Snapshot.open(folder / "corpus") for folder in (project / "earlier", root / "data" / "snapshot"))
    assert len(before) == len(after)
    assert sorted(before.column("passage_id")) == sorted(after.column("passage_id"))
    assert before.corpus_hash != after.corpus_hash
    return project


def snapshot_of(root: Path) -> Snapshot:
    return Snapshot.open(root / "data" / "snapshot" / "corpus")


def bm25_of_before(project: Path, root: Path) -> Bm25:
    """The words' index of the earlier snapshot, in the place of the new one's."""
    pair = project / "pair"
    shutil.copytree(root / "data" / "snapshot" / "corpus", pair / "corpus")
    shutil.copytree(project / "earlier" / FOLDER, pair / FOLDER)
    return Bm25.of(Snapshot.open(pair / "corpus"))


REFUSALS: dict[str, Refusal] = {
    "index": ("run 'realmops run finetune' again", lambda p, r: load_index(r / "models/finetune", snapshot_of(r))),
    "a run that is opened": ("run 'realmops run finetune' again", lambda p, r: open_run(r)),
    "evaluate": ("run 'realmops run finetune' again", lambda p, r: stage("evaluate", VALUES, p, r)),
    "results": ("run 'realmops run evaluate' first", lambda p, r: read_run(p, r)),
    "words' index": ("was made for corpus|made for corpus", bm25_of_before),
    "spans": (
        "run the tag stage again",
        lambda p, r: Spans.open(r / "data/spans/corpus", corpus_hash=snapshot_of(r).corpus_hash),
    ),
    "spans in a stage": ("run the tag stage again", lambda p, r: stage("ict", VALUES, p, r)),
}


@pytest.mark.parametrize("artifact", REFUSALS)
def test_an_artifact_of_another_corpus_is_refused_with_the_command_that_makes_it_again(
    other: Path, artifact: str
) -> None:
    message, opened = REFUSALS[artifact]
    with pytest.raises(ValueError, match=message):
        opened(other, other / "root")


def test_made_questions_of_another_corpus_are_refused(trained: Path, tmp_path: Path) -> None:
    project = Path(shutil.copytree(trained, tmp_path / "project"))
    root, files = project / "root", {split: f"data/cloze/questions.{split}.jsonl" for split in ("train", "dev", "test")}
    values = toy_values(questions=files, pretrain={"steps": 0, "builder": "external"})
    assert cli("run", "cloze", "--params", project / "params.yaml", "--root", root).exit_code == 0
    reverse_documents(project)
    for name in ("snapshot", "tag", "ict"):
        stage(name, values, project, root)
    with pytest.raises(ValueError, match=r"questions\.dev is .*, generated from corpus .*; run 'realmops run cloze'"):
        stage("pretrain", values, project, root)
    assert cli("run", "cloze", "--params", project / "params.yaml", "--root", root).exit_code == 0
    stage("pretrain", values, project, root)


def test_an_update_of_another_corpus_under_the_same_weights_does_not_serve(copy: Path) -> None:
    """As of a reader that is not trained: its weights stay what they are whatever the corpus is."""
    root, options = copy / "root", ("--params", copy / "params.yaml", "--root", copy / "root")
    with open(copy / "documents.jsonl", "a") as file:
        file.write('{"title": "Moss", "text": "Moss is a town by the sea."}\n')
    assert cli("update", *options).exit_code == 0
    newest = newest_state(root)
    assert newest.number == 1
    assert len(load_index(newest.finetune, Snapshot.open(newest.snapshot / "corpus"))) == len(snapshot_of(root)) + 1
    with pytest.raises(ValueError, match="has the embeddings of corpus"):
        load_index(newest.finetune, snapshot_of(root))
    reverse_documents(copy)
    stage("snapshot", VALUES, copy, root)
    assert newest_state(root) == pipeline_state(root)
