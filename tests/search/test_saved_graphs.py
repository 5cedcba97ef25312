"""Saved graphs: they compute what the modules do, are used by search and ask, and are replaced with the model."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_open_qa import FP32
from small_readers import ANSWER, LIMIT, questions_and_passages, write_left_padded, write_reader
from small_world import World, tiny_models

from realmops import artifacts
from realmops.model import checkpoint_files
from realmops.model.encoder import Encoder
from realmops.model.extractive_reader import ExtractiveReader, load_extractive_reader
from realmops.search import saved_graphs
from realmops.search.embed import embed, query_sequences, text_queries
from realmops.search.saved_graphs import GraphReader, GraphTower, SavedGraphs

pytest.importorskip("openvino")
QUERIES = ["Where was Anna Berg born?", "Star", "Who built the Star that Jon Vik saw in Oslo?"]


def unusable(*args: Any, **options: Any) -> Any:
    raise AssertionError("transformers is used")


def test_queries_have_the_embeddings_of_the_tower(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever, reader = tiny_models(world)
    (folder := tmp_path / "model").mkdir()
    checkpoint_files.save_models(folder, retriever.eval(), reader, world.snapshot.vocabulary_hash)
    graphs = SavedGraphs(tmp_path / "graphs")
    graphs.retriever(folder, world.snapshot.vocabulary_hash)
    monkeypatch.setattr(Encoder, "forward", unusable)
    opened = graphs.retriever(folder, world.snapshot.vocabulary_hash)
    monkeypatch.undo()
    sequences = query_sequences(text_queries(world.snapshot, QUERIES, 64))
    for ours, tower in ((opened.query, retriever.query), (opened.document, retriever.document)):
        assert isinstance(ours, GraphTower)
        torch.testing.assert_close(embed(ours, sequences, FP32), embed(tower, sequences, FP32), rtol=1e-4, atol=1e-5)
    assert (opened.scale, opened.mixture, opened.width) == (retriever.scale, retriever.mixture, retriever.width)
    with pytest.raises(ValueError, match="trained with the vocabulary"):
        graphs.retriever(folder, "another")

    [before] = graphs.folder.iterdir()
    with torch.no_grad():
        next(retriever.parameters()).mul_(2)
    shutil.rmtree(folder)
    folder.mkdir()
    checkpoint_files.save_models(folder, retriever, reader, world.snapshot.vocabulary_hash)
    graphs.retriever(folder, world.snapshot.vocabulary_hash)
    [after] = graphs.folder.iterdir()
    assert after != before, "graphs of another model are removed"
    (after / "query.bin").write_bytes(b"")
    assert isinstance(graphs.retriever(folder, world.snapshot.vocabulary_hash).query, GraphTower)
    assert (after / "query.bin").stat().st_size, "damaged graphs are saved again"


@pytest.mark.parametrize("family", ["bert", "roberta", "left"])
def test_passages_have_the_spans_of_the_reader(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    if family == "left":
        write_left_padded(source)
    else:
        write_reader(source, family)
    reader = load_extractive_reader(source).eval()
    reader.save(folder := _made(tmp_path / "model" / checkpoint_files.READER_FOLDER))
    graphs = SavedGraphs(tmp_path / "graphs")
    graphs.reader(folder.parent)
    monkeypatch.setattr(saved_graphs, "load_extractive_reader", unusable)
    opened = graphs.reader(folder.parent)
    assert isinstance(opened, GraphReader)
    assert opened.longest_question(LIMIT) == reader.longest_question(LIMIT)
    pairs = questions_and_passages(range(6))
    for ours, theirs in zip(_read(opened, pairs), _read(reader, pairs), strict=True):
        assert (ours.chars == theirs.chars).all()
        torch.testing.assert_close(torch.from_numpy(ours.log_p), torch.from_numpy(theirs.log_p), rtol=1e-3, atol=1e-4)


def test_a_module_that_has_no_right_graph_is_opened_as_usual(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retriever, reader = tiny_models(world)
    (folder := tmp_path / "model").mkdir()
    checkpoint_files.save_models(folder, retriever, reader, world.snapshot.vocabulary_hash)
    monkeypatch.setattr(saved_graphs, "is_near", lambda *tensors: False)
    graphs = SavedGraphs(tmp_path / "graphs")
    texts = query_sequences(text_queries(world.snapshot, ["Where?", "Anna Berg was born in Bergen."], 64))
    expected = embed(retriever.eval().query, texts, FP32)
    for _ in range(2):
        opened = graphs.retriever(folder, world.snapshot.vocabulary_hash).eval()
        assert not isinstance(opened.query, GraphTower)
        torch.testing.assert_close(embed(opened.query, texts, FP32), expected)
    with monkeypatch.context() as full:
        full.setattr(artifacts, "write_manifest", no_space)
        opened = SavedGraphs(tmp_path / "full").retriever(folder, world.snapshot.vocabulary_hash).eval()
    torch.testing.assert_close(embed(opened.query, texts, FP32), expected)
    read_only = SavedGraphs(Path("/proc/graphs"))
    assert not isinstance(read_only.retriever(folder, world.snapshot.vocabulary_hash).query, GraphTower)


def test_a_search_imports_no_transformers_after_the_first(copy: Path) -> None:
    program = (
        "import sys; from realmops.cli import main; main(standalone_mode=False); print('transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", program, "search", "Where?", "--root", str(copy / "root"), "--json"]
    records = []
    shutil.rmtree(copy / "root" / artifacts.WORK_FOLDER / saved_graphs.FOLDER, ignore_errors=True)
    for is_imported in ("True", "False"):
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=copy)
        record, imported = done.stdout.splitlines()
        records.append(json.loads(record))
        assert imported == is_imported, done.stderr
    assert records[0] == records[1]


def no_space(*args: Any, **named: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _read(reader: ExtractiveReader, pairs: list[tuple[str, str]]) -> list[Any]:
    return reader.read(pairs, limit=LIMIT, answer_wordpieces=ANSWER, dtype=FP32)
