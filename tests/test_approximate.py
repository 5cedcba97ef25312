"""FAISS behind the interface of exact search: recall measured and reached, exact scores, and the rule of auto."""

import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_world import section
from torch import Tensor

from realmops.index import approximate
from realmops.index.approximate import (
    EXACT_PASSAGES,
    Approximate,
    Faiss,
    Recipe,
    fitting_type,
    index_type,
    memory_of,
    passage_index,
)
from realmops.index.mips import Exact, PassageIndex, search

CPU = torch.device("cpu")
WIDTH = 32


def clustered(rows: int, seed: int) -> Tensor:
    """Vectors around 40 centres, rows x WIDTH."""
    centre_CE = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    near = torch.randint(0, 40, (rows,), generator=generator)
    return centre_CE[near] + 0.3 * torch.randn(rows, WIDTH, generator=generator)


def scattered(rows: int, seed: int, width: int = WIDTH) -> Tensor:
    """Vectors without any clusters."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def built(embedding_PE: Tensor, query_QE: Tensor, k: int = 10, *, seed: int = 0, **options: Any) -> PassageIndex:
    return passage_index(embedding_PE, section("index", **options), CPU, seed, lambda: query_QE, k)


@pytest.mark.parametrize("kind", ["ivf", "hnsw", "pq"])
def test_each_type_reaches_its_recall_with_exact_scores(kind: str) -> None:
    embedding_PE, query_QE = clustered(5000, 1), clustered(100, 2)
    index = built(embedding_PE, query_QE, type=kind, target_recall=0.95)
    assert isinstance(index, Approximate)
    assert index.recipe.type == kind
    assert index.recipe.k == 10
    score_QK, id_QK = index.search(query_QE, 10)
    exact_id = search(query_QE, embedding_PE, 10)[1]
    found = [len(set(a) & set(b)) / 10 for a, b in zip(id_QK.tolist(), exact_id.tolist(), strict=True)]
    assert sum(found) / 100 == pytest.approx(index.recipe.recall, abs=1e-9), "counted by ids, without any tolerance"
    assert index.recipe.recall >= 0.95
    torch.testing.assert_close(score_QK, torch.einsum("qe,qke->qk", query_QE, embedding_PE[id_QK]))
    assert (score_QK.diff(dim=1) <= 0).all(), "best first"
    assert all(len(set(row)) == 10 for row in id_QK.tolist())


@pytest.mark.parametrize("kind", ["ivf", "hnsw", "pq"])
def test_the_same_embeddings_and_seed_give_the_same_index(kind: str) -> None:
    embedding_PE, query_QE = clustered(1500, 1), clustered(50, 2)
    first, second = (built(embedding_PE, query_QE, seed=7, type=kind, target_recall=0.8) for _ in range(2))
    assert isinstance(first, Approximate)
    assert isinstance(second, Approximate)
    assert first.recipe == second.recipe
    again = type(first)(embedding_PE, first.recipe)
    for query_E in clustered(20, 3):
        results = [index.search(query_E[None], 10) for index in (first, second, again)]
        for score_QK, id_QK in results[1:]:
            assert torch.equal(id_QK, results[0][1])
            assert torch.equal(score_QK, results[0][0])


@pytest.mark.parametrize("kind", ["ivf", "pq"])
def test_passages_added_some_at_a_time_give_the_index_of_all_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It learns from 12 x 64 of 70,000 passages, drawn by the seed."""
    embedding_PE, query_QE = scattered(70_000, 1, 8), scattered(50, 2, 8)
    learned = Recipe(kind, 5, 12, 3, 0.0, 10, 0.5)
    results = []
    for together in (1 << 30, 1 << 16):
        monkeypatch.setattr(approximate, "_TOGETHER", together)
        results.append(Faiss(embedding_PE, learned).search(query_QE, 10))
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0], results[1][0])
    other = Faiss(embedding_PE, replace(learned, seed=6)).search(query_QE, 10)
    assert not torch.equal(other[1], results[0][1])


def test_a_sample_is_drawn_without_repeats_from_all_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "READ", 7)
    embedding_PE = torch.arange(1000.0)[:, None]
    sample_R = approximate._sample(embedding_PE, 400, 1)[:, 0]
    assert len(set(sample_R.tolist())) == 400
    assert (sample_R.diff() > 0).all()
    assert 440 < sample_R.mean() < 560
    assert torch.equal(approximate._sample(embedding_PE, 400, 1)[:, 0], sample_R)
    assert not torch.equal(approximate._sample(embedding_PE, 400, 2)[:, 0], sample_R)
    assert torch.equal(approximate._sample(embedding_PE, 1000, 1), embedding_PE)


def test_it_looks_at_no_more_than_the_target_needs() -> None:
    embedding_PE, query_QE = scattered(5000, 1), scattered(100, 2)
    recipes = []
    for target in (0.2, 0.5):
        index = built(embedding_PE, query_QE, type="ivf", target_recall=target)
        assert isinstance(index, Approximate)
        recipes.append(index.recipe)
    low, high = recipes
    assert low.width < high.width
    assert 0.2 <= low.recall < high.recall
    assert low.lists == high.lists == 5000 // 39


@pytest.mark.parametrize(("kind", "widest"), [("ivf", 16), ("pq", 32), ("hnsw", 1024)])
def test_a_search_looks_at_a_part_of_the_lists_at_most(kind: str, widest: int) -> None:
    """A quarter of 64 lists, of short codes a half: with more an exact search is no slower."""
    embedding_PE = torch.randn(64 * 39, 8, generator=torch.Generator().manual_seed(0))
    assert Faiss(embedding_PE, Recipe(kind, 0, 64, 1, 0.0, 8, 0.0)).widest == widest


@pytest.mark.parametrize("kind", ["ivf", "pq"])
def test_a_recall_that_cannot_be_reached_is_an_error_with_both_figures(kind: str) -> None:
    """Without clusters a quarter of the lists holds far fewer than .99 of what is searched for."""
    embedding_PE, query_QE = scattered(5000, 1, 64), scattered(100, 2, 64)
    said = rf"type {kind} finds (0\.\d{{4}}) of the exact top 10 at most, and index.target_recall is 0.99; .*index.type"
    with pytest.raises(ValueError, match=said) as error:
        built(embedding_PE, query_QE, type=kind, target_recall=0.99)
    found = re.search(said, str(error.value))
    assert 0.3 < float(found[1]) < 0.99


def test_a_query_that_the_lists_have_too_few_passages_for_is_searched_exactly() -> None:
    embedding_PE, query_QE = clustered(2000, 1), clustered(30, 2)
    index = built(embedding_PE, query_QE, k=5, type="ivf", target_recall=0.1)
    assert isinstance(index, Approximate)
    assert index.recipe.width == 1
    assert len(embedding_PE) / index.recipe.lists < 500, "one list holds fewer"
    score_QK, id_QK = index.search(query_QE, 1500)
    expected_QK, expected_id = search(query_QE, embedding_PE, 1500)
    assert torch.equal(id_QK, expected_id)
    assert torch.equal(score_QK, expected_QK)
    assert index.search(query_QE, 5000)[1].shape == (30, 2000), "k is cut to the number"


def test_equal_passages_are_equally_good() -> None:
    """A collapsed retriever gives all passages one embedding: whichever are found, nothing is missed."""
    embedding_PE = torch.ones(300, WIDTH)
    index = built(embedding_PE, scattered(5, 1), type="ivf", target_recall=1.0)
    assert isinstance(index, Approximate)
    assert index.recipe.recall == 1.0


def test_exact_is_plain_search() -> None:
    embedding_PE, query_QE = scattered(300, 1), scattered(3, 2)
    index = built(embedding_PE, query_QE, type="exact")
    assert isinstance(index, Exact)
    assert torch.equal(index.search(query_QE, 7)[1], search(query_QE, embedding_PE, 7)[1])
    assert isinstance(built(embedding_PE, query_QE, type="auto"), Exact)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("passages", "width", "memory", "expected"),
    [
        (1_000_000, 128, 8 * GIB, "exact"),  # 0.5 GB of 8
        (13_000_000, 128, 16 * GIB, "pq"),  # 6.7 GB are more than a quarter of 17
        (13_000_000, 128, 32 * GIB, "exact"),  # but less than a quarter of 34
        (20_000_000, 128, 64 * GIB, "exact"),
        (20_000_001, 128, 64 * GIB, "ivf"),
        (100_000_000, 128, 256 * GIB, "ivf"),  # 51 GB of 275
        (100_000_000, 128, 64 * GIB, "pq"),
        (1_000_000_000, 128, 1024 * GIB, "pq"),
        (2, 1, 32, "exact"),  # exactly a quarter
        (2, 1, 31, "pq"),
    ],
)
def test_the_rule_of_auto(passages: int, width: int, memory: int, expected: str) -> None:
    assert fitting_type(passages, width, memory) == expected
    assert fitting_type(passages, width, memory, on_gpu=True) == expected.replace("ivf", "exact")


def test_auto_goes_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "memory_of", lambda device: 64 * GIB)
    assert index_type(section("index", type="auto"), EXACT_PASSAGES + 1, 128, CPU) == "ivf"
    assert index_type(section("index", type="hnsw"), EXACT_PASSAGES + 1, 128, CPU) == "hnsw"
    assert memory_of(CPU) > 100 << 20


def test_without_faiss_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    for kind in ("ivf", "hnsw", "pq"):
        with pytest.raises(ValueError, match=rf"type {kind} needs FAISS.*realmops\[faiss\].*index.type=exact"):
            index_type(section("index", type=kind), 5000, 128, CPU)
    assert index_type(section("index", type="exact"), 5000, 128, CPU) == "exact"


def test_pq_wants_passages_to_learn_its_codes_from() -> None:
    with pytest.raises(ValueError, match=r"wants 256 passages or more.* 255 of width 32: set index.type=exact"):
        built(scattered(255, 1), scattered(5, 2), type="pq")
    assert isinstance(built(scattered(256, 1), scattered(5, 2), type="pq", target_recall=0.1), Approximate)
