"""Where towers start that are made from the passages: LSI against a slow version, and what they are good for."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from small_world import DOCUMENTS, World, section, tiny_models

from realmops.model.build import build_models
from realmops.model.packed import PackedBatch
from realmops.model.retriever import BagOfWords, Retriever
from realmops.model.sequences import join_query
from realmops.search.embed import document_sequences, embed, query_sequences
from realmops.train import initialisation
from realmops.train.initialisation import (
    init_towers,
    latent_directions,
    wordpiece_idf,
)

FP32 = torch.float32


def no_bar(label: str, total: int) -> Callable[[int], None]:
    return lambda count: None


def bag_of(world: World, seed: int = 0, **changes: Any) -> Retriever:
    options = section("retriever", **{"tower": "bag", "head": "cosine", "embedding_width": 8, **changes})
    size = world.snapshot.tokenizer.get_vocab_size()
    retriever, _ = build_models(section("bert", width=16, heads=2), options, section("reader"), size, seed)
    init_towers(retriever, world.snapshot, seed, no_bar)
    return retriever


# ---- LSI


def test_rare_wordpieces_weigh_more_and_absent_ones_nothing() -> None:
    """Of 10 passages 1 and 9 have it: log(1 + 9.5 / 1.5) and log(1 + 1.5 / 9.5)."""
    idf_V = wordpiece_idf(np.array([1, 9, 0]), 10)
    assert idf_V.tolist() == pytest.approx([math.log(1 + 9.5 / 1.5), math.log(1 + 1.5 / 9.5), 0.0])


def test_directions_are_the_singular_vectors() -> None:
    """Of a matrix with a clear order, against numpy's whole decomposition."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((n, 12)))[0] for n in (60, 40))
    matrix = (left * 2.0 ** -np.arange(12)) @ right.T
    found_VE = latent_directions(csr_matrix(matrix.astype(np.float32)), 6, seed=0)
    theirs_VE = np.linalg.svd(matrix)[2][:6].T
    assert np.abs((found_VE * theirs_VE).sum(0)) == pytest.approx(np.ones(6), abs=1e-4)
    assert found_VE.T @ found_VE == pytest.approx(np.eye(6), abs=1e-4)
    assert (found_VE[np.abs(found_VE).argmax(0), range(6)] > 0).all(), "the sign is fixed"


@pytest.mark.parametrize(("passages", "words", "width"), [(3, 40, 8), (60, 9, 9), (1, 5, 5)])
def test_directions_beyond_the_rank_are_orthogonal_too(passages: int, words: int, width: int) -> None:
    matrix = np.random.default_rng(0).random((passages, words)).astype(np.float32)
    found_VE = latent_directions(csr_matrix(matrix), width, seed=0)
    assert found_VE.T @ found_VE == pytest.approx(np.eye(width), abs=1e-3)


def test_a_bag_starts_as_lsi_times_idf(world: World) -> None:
    """In full width, cosines are those of tf-idf vectors themselves: an orthogonal turn of all dimensions."""
    size = world.snapshot.tokenizer.get_vocab_size()
    retriever = bag_of(world, embedding_width=size)
    sequences = document_sequences(world.snapshot, range(12))
    special = {world.snapshot.tokenizer.token_to_id(f"[{name}]") for name in ("CLS", "SEP", "MASK", "UNK", "PAD")}
    count_PV = np.zeros((12, size))
    for passage, (tokens, _) in enumerate(sequences):
        for token in tokens:
            count_PV[passage, token] += token not in special
    idf_V = wordpiece_idf((count_PV > 0).sum(0), 12)
    slow_PV = count_PV * idf_V
    slow_PV /= np.linalg.norm(slow_PV, axis=1, keepdims=True)
    embedding_PE = embed(retriever.document, sequences, FP32).numpy()
    assert embedding_PE @ embedding_PE.T == pytest.approx(slow_PV @ slow_PV.T, abs=1e-3)


def test_special_wordpieces_have_no_vector(world: World) -> None:
    bag = bag_of(world).query
    assert isinstance(bag, BagOfWords)
    special = world.special
    ids = [special.cls, special.sep, special.mask, special.unknown, special.padding]
    assert not bag.word.weight[ids].any()
    assert not bag.counts_V[ids].any()
    assert float(bag.counts_V.sum()) == len(bag.counts_V) - 5
    masked = join_query(np.array([special.mask, special.unknown]), special, 64)
    assert not bag(PackedBatch([masked])).any()


def test_a_bag_finds_the_passage_of_its_words(world: World) -> None:
    """Before any training; a query is some words of a passage."""
    retriever = bag_of(world, embedding_width=64)
    queries = ["the cold sea novel", "karl lund painter", "fjell town in norway", "maria holm sang 1972"]
    joined = [join_query(world.wordpieces(text), world.special, 64) for text in queries]
    query_QE = embed(retriever.query, query_sequences(joined), FP32)
    document_PE = embed(retriever.document, document_sequences(world.snapshot, range(12)), FP32)
    best = (query_QE @ document_PE.T).argmax(-1).tolist()
    assert [DOCUMENTS[p][0] for p in best] == ["The Cold Sea", "Karl Lund", "Fjell", "Maria Holm"]


def test_the_start_is_a_function_of_passages_and_seed(world: World) -> None:
    def weight(seed: int, **changes: Any) -> torch.Tensor:
        bag = bag_of(world, seed, **changes).document
        assert isinstance(bag, BagOfWords)
        return bag.word.weight

    torch.manual_seed(7)
    first = weight(0)
    torch.manual_seed(8)
    assert torch.equal(first, weight(0))


def test_large_corpora_are_sampled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialisation, "LSI_PASSAGES", 5)
    monkeypatch.setattr(initialisation, "_BATCH", 2)
    seen: list[int] = []
    real = initialisation.document_sequences

    def spy(snapshot: Any, rows: list[int]) -> Any:
        assert len(rows) <= 2, "some passages at a time"
        seen.extend(rows)
        return real(snapshot, rows)

    monkeypatch.setattr(initialisation, "document_sequences", spy)
    told: list[int] = []
    options = section("retriever", tower="bag", head="cosine", embedding_width=8)
    size = world.snapshot.tokenizer.get_vocab_size()
    retriever, _ = build_models(section("bert"), options, section("reader"), size, 0)
    init_towers(retriever, world.snapshot, 0, lambda label, total: told.append)
    assert len(set(seen)) == 5
    assert seen == sorted(seen)
    assert sum(told) == 5


@pytest.mark.parametrize("form", [{}, {"projection": "identity", "embedding_width": 0}])
def test_other_towers_do_not_change(world: World, form: dict[str, Any]) -> None:
    retriever, _ = tiny_models(world, **form)
    before = {name: tensor.clone() for name, tensor in retriever.state_dict().items()}
    init_towers(retriever, world.snapshot, 0, no_bar)
    assert all(torch.equal(tensor, before[name]) for name, tensor in retriever.state_dict().items())
