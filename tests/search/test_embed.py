"""Embedding in several threads: the bytes of one; sequences of passages and queries; fp16 on a GPU."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small_project
import torch
from forked import Forked
from small_encoders import around, byte_bpe
from small_world import World, at_once, embed_documents, tiny_models

from realmops import Passage, Searcher
from realmops.devices import eval_mode, supports_bf16
from realmops.model import packed
from realmops.model.retriever import Embedder
from realmops.model.sequences import SpecialTokens, join_document
from realmops.search import embed as embedding
from realmops.search.embed import document_sequences, embed, embed_passages, text_queries

PRECISIONS = [torch.float32, *([torch.bfloat16] if supports_bf16() else [])]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three of them, for batches of 40 wordpieces."""
    before = torch.get_num_threads()
    monkeypatch.setitem(packed.BATCH_WORDPIECES, "cpu", 40)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_embeddings_of_several_threads_equal_those_of_one(world: World, dtype: torch.dtype) -> None:
    retriever = tiny_models(world)[0]
    rows, seen = list(range(len(world.snapshot))) * 3, list[int]()
    several = embed_documents(retriever, world.snapshot, rows, dtype, seen.append)
    assert sum(seen) == len(rows)
    assert len(seen) >= 6, "as many batches as are shared among three threads"
    assert (torch.get_num_threads(), retriever.training) == (3, True)
    torch.set_num_threads(1)
    assert torch.equal(several, embed_documents(retriever, world.snapshot, rows, dtype))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_concurrent_callers_get_the_embeddings_that_each_gets_alone(world: World, dtype: torch.dtype) -> None:
    """Passages and texts, of a model in training mode with dropout."""
    retriever = tiny_models(world, dropout=0.5)[0]
    rows = [list(range(first, len(world.snapshot))) * count for first, count in ((0, 9), (3, 1), (5, 4), (0, 20))]
    texts = [document_sequences(world.snapshot, some) for some in rows]
    calls = [
        *(partial(embed_documents, retriever, world.snapshot, some, dtype) for some in rows),
        *(partial(embed, retriever.document, some, dtype) for some in texts),
    ]
    alone = [call() for call in calls]
    for _ in range(5):
        for found_NE, expected_NE in zip(at_once(*calls), alone, strict=True):
            assert torch.equal(found_NE, expected_NE)
    assert (torch.get_num_threads(), retriever.training) == (3, True)


@pytest.mark.usefixtures("threads")
def test_a_thread_that_starts_during_an_embedding_has_the_threads_of_the_process(world: World) -> None:
    """torch gives a new thread the number that was set last, and the threads of an embedding have one each."""
    counts: list[int] = []
    rows = list(range(len(world.snapshot))) * 3
    report = lambda done: counts.extend(at_once(torch.get_num_threads))  # noqa: E731
    embed_documents(tiny_models(world)[0], world.snapshot, rows, torch.float32, report)
    assert set(counts) == {3}
    assert len(counts) >= 6


def test_the_last_of_several_callers_restores_the_mode() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(0.5))
    for learns in (True, False):
        module.train(learns)
        first, second = eval_mode(module), eval_mode(module)
        modes = []
        for step in (first.__enter__, second.__enter__, partial(first.__exit__, None, None, None)):
            step()
            modes += [part.training for part in module.modules()]
        assert not any(modes)
        second.__exit__(None, None, None)
        assert [part.training for part in module.modules()] == [learns, learns]


def test_a_copy_in_fp16_embeds_nearly_the_same_and_does_not_change_the_tower(world: World) -> None:
    tower = tiny_models(world, dropout=0.5)[0].document
    assert isinstance(tower, Embedder)
    texts = document_sequences(world.snapshot, range(len(world.snapshot)))
    before = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
    expected_NE, encoder = embed(tower, texts, torch.float32), tower.encoder.in_fp16()
    assert encoder is not None
    half = tower.with_encoder(encoder)
    half_NE, again_NE = at_once(partial(embed, half, texts, torch.float32), partial(embed, tower, texts, torch.float32))
    assert torch.equal(again_NE, expected_NE)
    assert not torch.equal(half_NE, expected_NE)
    torch.testing.assert_close(half_NE, expected_NE, rtol=0.02, atol=0.02)
    assert half.encoder.word_vectors.dtype == torch.float16
    assert all(torch.equal(tensor, before[name]) for name, tensor in tower.state_dict().items())
    assert tower.training


@pytest.mark.usefixtures("threads")
def test_an_error_in_one_thread_stops_all(world: World) -> None:
    tower, done = tiny_models(world)[0].document, list[int]()

    def refuse(rows: int) -> None:
        done.append(rows)
        raise ValueError("no more")

    tokens = np.array([world.special.cls, *range(10, 30), world.special.sep])
    with pytest.raises(ValueError, match="no more"):
        embed(tower, [(tokens, np.zeros_like(tokens))] * 400, torch.float32, refuse)
    assert len(done) <= 3
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("prompt", [(), (7, 8)])
@pytest.mark.parametrize("limit", [5, 9, 14, 288])
def test_documents_are_joined_as_one_by_one(
    world: World, monkeypatch: pytest.MonkeyPatch, limit: int, prompt: tuple[int, ...]
) -> None:
    snapshot, special = world.snapshot, replace(SpecialTokens.of(world.snapshot.tokenizer), document=prompt)
    rows = [3, 0, 3, *range(len(snapshot))]
    monkeypatch.setattr(snapshot, "block_wordpieces", limit)
    monkeypatch.setattr(SpecialTokens, "of", lambda tokenizer: special)
    for pair, row in zip(document_sequences(snapshot, rows), rows, strict=True):
        alone = join_document(snapshot.title_tokens(row), snapshot.body(row), special, limit)
        for found, expected in zip(pair, alone, strict=True):
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == expected.dtype
    assert document_sequences(snapshot, []) == []


@pytest.mark.parametrize("prompted", ["query", "document"])
def test_a_text_has_a_blank_after_the_prompt_of_its_kind(prompted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A BPE of bytes has blanks in its pieces: those of " Oslo" are not those of "Oslo"."""
    tokenizer = around(byte_bpe(), "<s>", "</s>")
    special = replace(SpecialTokens.of(tokenizer), **{prompted: (7, 8)})
    monkeypatch.setattr(SpecialTokens, "of", lambda tokenizer: special)
    pieces = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in ("Oslo", " Oslo")}
    assert pieces["Oslo"] != pieces[" Oslo"]
    snapshot: Any = SimpleNamespace(tokenizer=tokenizer)
    for kind in ("query", "document"):
        [found] = text_queries(snapshot, ["Oslo"], 20, documents=kind == "document")
        begins, text = ([7, 8], " Oslo") if kind == prompted else ([], "Oslo")
        assert found.tolist() == [special.cls, *begins, *pieces[text], special.sep]


@pytest.mark.parametrize("made", [1.0, float("inf")])
def test_a_gpu_embeds_in_fp16_unless_a_number_becomes_infinite(
    world: World, monkeypatch: pytest.MonkeyPatch, made: float
) -> None:
    """The decision alone: no GPU computes here."""
    tower, calls = tiny_models(world)[0].document, list[tuple[Any, ...]]()
    assert isinstance(tower, Embedder)

    def instead(tower: Embedder, sequences: Any, dtype: torch.dtype, progress: Any, vectors: int) -> torch.Tensor:
        calls.append((dtype, tower.bert.word_vectors.dtype, progress is not embedding.no_progress))
        return torch.full((2, 3), made if len(calls) == 1 else 0.0)

    monkeypatch.setattr(embedding, "embed", instead)
    embed_passages(tower, [], torch.bfloat16, print)
    assert calls == [(torch.bfloat16, torch.float32, True)], "not on a CPU"
    calls.clear()
    monkeypatch.setattr(Embedder, "device", torch.device("cuda"))
    found = embed_passages(tower, [], torch.bfloat16, print)
    in_fp16, again = (torch.float32, torch.float16, True), (torch.bfloat16, torch.float32, False)
    assert calls == ([in_fp16] if made == 1 else [in_fp16, again])
    assert bool(found.isfinite().all())
    calls.clear()
    embed_passages(tower, [], torch.float32, print)
    assert calls == [(torch.float32, torch.float32, True)], "fp32 stays fp32"


def search_all(searcher: Searcher, queries: list[str]) -> dict[str, list[Passage]]:
    return {query: searcher.search(query, 10) for query in queries}


def search_concurrently(root: Path) -> None:
    alone = Searcher.open(root)
    texts = alone._search.snapshot.column("text")
    queries = [text[:40] for text in texts[:: len(texts) // 24]]
    expected = search_all(alone, queries)
    for seed in range(40):
        searcher, rng = Searcher.open(root), random.Random(seed)  # whose first searches meet
        calls = [partial(search_all, searcher, rng.sample(queries, len(queries))) for _ in range(8)]
        assert all(results == expected for results in at_once(*calls))


def test_concurrent_first_searches_find_the_passages_of_one_thread(tmp_path: Path) -> None:
    """In another process, which a race could crash; the 40,000 passages fill forty batches of the file of texts."""
    small_project.write_project(tmp_path)
    rng = np.random.default_rng(0)
    with open(tmp_path / "documents.jsonl", "w") as file:
        for number, row in enumerate(rng.integers(0, 400, (40_000, 8)).tolist()):
            text = f"Item{number} {' '.join(f'word{word}' for word in row)}."
            file.write(json.dumps({"id": f"d{number}", "title": f"t{number % 97}", "text": text}) + "\n")
    result = small_project.cli("run", "snapshot", "--params", tmp_path / "params.yaml", "--root", tmp_path)
    assert result.exit_code == 0, result.output
    process = Forked(partial(search_concurrently, tmp_path), log=tmp_path / "log")
    assert process.wait() == 0, (tmp_path / "log").read_text()
