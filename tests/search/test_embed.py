"""Batches side by side give the bytes of one thread, and end together."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_encoders import around, byte_bpe
from small_world import World, at_once, tiny_models

from realmops.devices import eval_mode, supports_bf16
from realmops.model import packed
from realmops.model.retriever import Embedder
from realmops.model.sequences import SpecialTokens, join_document
from realmops.search import embed as embedding
from realmops.search.embed import document_sequences, embed, embed_documents, embed_passages, text_queries

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
def test_embeddings_are_those_of_one_thread(world: World, dtype: torch.dtype) -> None:
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
def test_callers_in_several_threads_get_what_each_gets_alone(world: World, dtype: torch.dtype) -> None:
    """Passages by fast products and texts by others, of a model that learns with dropout."""
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
def test_a_thread_that_begins_beside_an_embedding_has_the_threads_of_all(world: World) -> None:
    """torch gives a new thread the number that was set last, and the threads of an embedding have one each."""
    seen: list[int] = []
    rows = list(range(len(world.snapshot))) * 3

    def look(done: int) -> None:
        seen.extend(at_once(torch.get_num_threads))

    embed_documents(tiny_models(world)[0], world.snapshot, rows, torch.float32, look)
    assert set(seen) == {3}
    assert len(seen) >= 6


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


def test_a_copy_in_fp16_embeds_nearly_the_same_and_leaves_the_tower(world: World) -> None:
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
def test_an_error_in_one_thread_ends_all(world: World) -> None:
    tower, done = tiny_models(world)[0].document, list[int]()

    def refuse(rows: int) -> None:
        done.append(rows)
        raise ValueError("no more")

    tokens = np.array([world.special.cls, *range(10, 30), world.special.sep])
    with pytest.raises(ValueError, match="no more"):
        embed(tower, [(tokens, np.zeros_like(tokens))] * 400, torch.float32, refuse)
    assert len(done) <= 3
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("told", [(), (7, 8)])
@pytest.mark.parametrize("limit", [5, 9, 14, 288])
def test_documents_are_joined_together_as_they_are_one_by_one(
    world: World, monkeypatch: pytest.MonkeyPatch, limit: int, told: tuple[int, ...]
) -> None:
    snapshot, special = world.snapshot, replace(SpecialTokens.of(world.snapshot.tokenizer), document=told)
    rows = [3, 0, 3, *range(len(snapshot))]
    monkeypatch.setattr(snapshot, "block_wordpieces", limit)
    monkeypatch.setattr(SpecialTokens, "of", lambda tokenizer: special)
    for pair, row in zip(document_sequences(snapshot, rows), rows, strict=True):
        alone = join_document(snapshot.title_tokens(row), snapshot.body(row), special, limit)
        for found, expected in zip(pair, alone, strict=True):
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == expected.dtype
    assert document_sequences(snapshot, []) == []


@pytest.mark.parametrize("told", ["query", "document"])
def test_a_text_has_a_blank_in_front_behind_what_its_kind_begins_with(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A BPE of bytes has blanks in its pieces: those of " Oslo" are not those of "Oslo"."""
    tokenizer = around(byte_bpe(), "<s>", "</s>")
    special = replace(SpecialTokens.of(tokenizer), **{told: (7, 8)})
    monkeypatch.setattr(SpecialTokens, "of", lambda tokenizer: special)
    pieces = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in ("Oslo", " Oslo")}
    assert pieces["Oslo"] != pieces[" Oslo"]
    snapshot: Any = SimpleNamespace(tokenizer=tokenizer)
    for kind in ("query", "document"):
        [found] = text_queries(snapshot, ["Oslo"], 20, documents=kind == "document")
        begins, text = ([7, 8], " Oslo") if kind == told else ([], "Oslo")
        assert found.tolist() == [special.cls, *begins, *pieces[text], special.sep]


@pytest.mark.parametrize("made", [1.0, float("inf")])
def test_a_gpu_embeds_in_fp16_unless_a_number_becomes_infinite(
    world: World, monkeypatch: pytest.MonkeyPatch, made: float
) -> None:
    """As it is decided: no GPU computes here."""
    tower, calls = tiny_models(world)[0].document, list[tuple[Any, ...]]()
    assert isinstance(tower, Embedder)

    def instead(tower: Embedder, sequences: Any, dtype: torch.dtype, progress: Any, vectors: int) -> torch.Tensor:
        calls.append((dtype, tower.bert.word_vectors.dtype, progress is not embedding.no_progress))
        return torch.full((2, 3), made if len(calls) == 1 else 0.0)

    monkeypatch.setattr(embedding, "embed", instead)
    embed_passages(tower, [], torch.bfloat16, print)
    assert calls == [(torch.bfloat16, torch.float32, True)], "a CPU has no use for it"
    calls.clear()
    monkeypatch.setattr(Embedder, "device", torch.device("cuda"))
    found = embed_passages(tower, [], torch.bfloat16, print)
    in_fp16, again = (torch.float32, torch.float16, True), (torch.bfloat16, torch.float32, False)
    assert calls == ([in_fp16] if made == 1 else [in_fp16, again])
    assert bool(found.isfinite().all())
    calls.clear()
    embed_passages(tower, [], torch.float32, print)
    assert calls == [(torch.float32, torch.float32, True)], "who wants fp32 gets it"
