"""Exact search: by hand, in groups, through copies of lower precision, and over several vectors of a passage."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from realmops.search import exact
from realmops.search import inner_products as module
from realmops.search.exact import ExactIndex, MaxSimIndex, exact_index, prepare_for_serving
from realmops.search.inner_products import GROUP, Bf16Prefilter, Int8Prefilter, search

WIDTH = 8
QUERIES = {"bf16": 20, "int8": 15}  # int8 is for fewer than 16
each_copy = pytest.mark.parametrize("kind", QUERIES)


def normal(rows: int, seed: int, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(rows: int, seed: int, most: int = 1000) -> Tensor:
    """Whole numbers, whose products and sums fp32 represents without any rounding, unlike bf16."""
    assert WIDTH * most**2 < 2**24
    numbers = torch.randint(-most, most + 1, (rows, WIDTH), generator=torch.Generator().manual_seed(seed))
    return numbers.float()


# ---- the whole product


def check(query_QE: Tensor, embedding_PE: Tensor, k: int) -> None:
    score_QK, id_QK = search(query_QE, embedding_PE, k)
    score_QP = (query_QE.double() @ embedding_PE.double().T).numpy()
    np.testing.assert_array_equal(id_QK.numpy(), np.argsort(-score_QP, axis=1, kind="stable")[:, :k])
    torch.testing.assert_close(score_QK, torch.einsum("qe,qke->qk", query_QE, embedding_PE[id_QK]))
    assert (score_QK.diff(dim=1) <= 0).all(), "best first"


def test_search_by_hand() -> None:
    embedding_PE = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0], [1.0, 1.0]])
    score_QK, id_QK = search(torch.tensor([[1.0, 0.0], [0.0, -1.0]]), embedding_PE, 2)
    assert score_QK.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert [sorted(ids) for ids in id_QK.tolist()] == [[0, 3], [0, 2]]
    score_QK, id_QK = search(torch.tensor([[2.0, 1.0]]), embedding_PE, 9)
    assert id_QK.tolist() in ([[3, 0, 1, 2]], [[3, 1, 0, 2]]), "k is capped at the number of passages"
    assert score_QK.tolist() == [[3.0, 2.0, 2.0, -6.0]]


@pytest.mark.parametrize("rows", [50_000, 50_001, 51_200, 60_123])
@pytest.mark.parametrize("k", [1, 15, 50_001 // GROUP + 1])
def test_a_search_by_groups_equals_a_sort_of_all(rows: int, k: int) -> None:
    check(normal(4, 1), normal(rows, 2), k)


@pytest.mark.parametrize("first", [1024, 50_090])
def test_the_best_are_found_in_one_group_and_in_the_remainder(first: int) -> None:
    query_QE, embedding_PE = normal(3, 5), normal(50_100, 6)
    embedding_PE[first : first + 10] = 50 * query_QE[0] + torch.arange(10)[:, None] * query_QE[0]
    check(query_QE, embedding_PE, 12)
    assert search(query_QE[:1], embedding_PE, 10)[1].tolist() == [list(range(first + 9, first - 1, -1))]


def test_chunks_of_a_large_corpus_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part may have fewer rows than k."""
    monkeypatch.setattr(module, "_LARGE", 1000)
    monkeypatch.setattr(module, "_CHUNK", {"cpu": 4096})
    monkeypatch.setattr(module, "_GROUPS", 1)
    for rows in (4096 * 2, 4096 * 3 + 5, 4096 * 2 + 700):
        check(normal(3, 7), normal(rows, 8), 9)


# ---- copies in bf16, and in int8 for few queries


@pytest.fixture
def with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies for small corpora on any processor; sums of int8 products are exact."""
    if not module.supports_int8():
        monkeypatch.setattr(torch, "_int_mm", lambda one, other: one.int() @ other.int())
    monkeypatch.setattr(module, "_LARGE", 1000)
    for name in ("supports_bf16", "supports_int8"):
        monkeypatch.setattr(module, name, lambda: True)


@pytest.fixture
def only_copies(with_copies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole product in fp32 fails the test."""
    for part in (module, exact):
        monkeypatch.setattr(part, "search", lambda *_: pytest.fail("the whole product in fp32"))


def index_of(embedding_PE: Tensor, kind: str) -> ExactIndex:
    return ExactIndex(embedding_PE, use_int8=kind == "int8")


def check_copy(query_QE: Tensor, embedding_PE: Tensor, k: int, kind: str) -> None:
    """Scores are the best ones to the last bit, each that of its passage, and no passage is found twice."""
    check_results(index_of(embedding_PE, kind).search(query_QE, k), query_QE.double() @ embedding_PE.double().T, k)


def check_results(found: tuple[Tensor, Tensor], true_QP: Tensor, k: int) -> None:
    score_QK, id_QK = found
    assert torch.equal(score_QK.double(), true_QP.topk(min(k, true_QP.shape[1]), dim=1).values)
    assert torch.equal(true_QP.gather(1, id_QK), score_QK.double())
    assert all(len(set(row)) == len(row) for row in id_QK.tolist())


@each_copy
@pytest.mark.usefixtures("only_copies")
@pytest.mark.parametrize("rows", [8192, 8193, 8191 + 16, 3 * 4096 + 15, 20_000])
@pytest.mark.parametrize("k", [1, 3])
def test_a_prefilter_finds_the_results_of_fp32(kind: str, rows: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the borders of groups, products and parts."""
    monkeypatch.setattr(module, "_PART", 4096)
    monkeypatch.setattr(module, "_SCORES", 20_000)
    monkeypatch.setattr(module, "_RESCORED_ROWS", 700)
    check_copy(whole(QUERIES[kind], 1), whole(rows, 2), k, kind)


@each_copy
@pytest.mark.usefixtures("only_copies")
@pytest.mark.parametrize("first", [1024, 8192])
def test_a_prefilter_finds_the_best_in_one_group_and_after_the_last(kind: str, first: int) -> None:
    query_QE, embedding_PE = whole(1, 3, most=30).expand(QUERIES[kind], -1), whole(8192 + 10, 4, most=30)
    embedding_PE[first : first + 10] = 40 * query_QE[0] + torch.arange(10)[:, None] * query_QE[0].sign()
    check_copy(query_QE, embedding_PE, 8, kind)
    found = index_of(embedding_PE, kind).search(query_QE, 8)[1].tolist()
    assert found == [list(range(first + 9, first + 1, -1))] * QUERIES[kind]


@each_copy
@pytest.mark.usefixtures("only_copies")
@pytest.mark.parametrize("power", [-30, 30])
def test_a_prefilter_finds_tiny_and_large_numbers(kind: str, power: int) -> None:
    check_copy(whole(QUERIES[kind], 5) * 2.0**power, whole(9000, 6) * 2.0**power, 3, kind)


@each_copy
@pytest.mark.usefixtures("only_copies")
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_common_offset_of_all_passages_does_not_matter(kind: str, sign: int) -> None:
    query_QE = torch.full((QUERIES[kind], WIDTH), 900.0) + whole(QUERIES[kind], 7, most=50)
    embedding_PE = torch.full((9003, WIDTH), sign * 900.0) + whole(9003, 8, most=50)
    assert ((query_QE @ embedding_PE.T).sign() == sign).all()
    check_copy(query_QE, embedding_PE, 3, kind)


@each_copy
@pytest.mark.usefixtures("with_copies")
def test_ties_and_zeros_are_found_as_in_fp32(kind: str) -> None:
    """Copies of few passages or of one, numbers that cancel, zeros, and products too small for a float."""
    query_QE, few = whole(QUERIES[kind], 9), whole(9, 10)
    check_copy(query_QE, few[torch.arange(9000) % 9].contiguous(), 12, kind)
    check_copy(query_QE, few[:1].expand(9000, -1).contiguous(), 12, kind)
    check_copy(0 * query_QE, whole(9000, 27), 12, kind)
    check_copy(query_QE, 0 * whole(9000, 27), 12, kind)
    check_copy(query_QE[:1], whole(1600, 27), 101, kind)
    cancel_PE, cancel_QE = whole(9000, 11), query_QE.clone()
    cancel_PE[:, WIDTH // 2 :] = -cancel_PE[:, : WIDTH // 2]
    cancel_QE[:, WIDTH // 2 :] = query_QE[:, : WIDTH // 2]
    check_copy(cancel_QE, cancel_PE, 12, kind)
    tiny_PE, tiny_QE = normal(9000, 12).float() * 1e-22, query_QE * 1e-22
    assert torch.equal(index_of(tiny_PE, kind).search(tiny_QE, 12)[0], search(tiny_QE, tiny_PE, 12)[0])


@each_copy
@pytest.mark.usefixtures("with_copies")
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf, 3.4e38])
def test_infinities_and_nan_are_found_as_in_fp32(kind: str, special: float) -> None:
    """In a passage, and in a query; products and sums of the last one are too large for a float."""
    query_QE, embedding_PE = whole(QUERIES[kind], 15), whole(9000, 16)
    for numbers in (embedding_PE, query_QE):
        before = numbers[7].clone()
        numbers[7, 3] = special
        found, expected = index_of(embedding_PE, kind).search(query_QE, 3), search(query_QE, embedding_PE, 3)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0, equal_nan=True)
        numbers[7] = before


@each_copy
def test_without_hardware_support_there_is_no_copy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("supports_bf16", "supports_int8"):
        monkeypatch.setattr(module, name, lambda: False)
    query_QE, index = whole(QUERIES[kind], 17), index_of(whole(50_001, 18), kind)
    assert index.bf16_copy is index.int8_copy is None
    assert torch.equal(index.search(query_QE, 5)[0], search(query_QE, index.embedding_PE, 5)[0])


@pytest.mark.usefixtures("with_copies")
def test_few_queries_make_no_copy_unless_the_index_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for copy in (Bf16Prefilter, Int8Prefilter):
        monkeypatch.setattr(copy, "build", staticmethod(lambda embedding_PE: pytest.fail("a copy")))
    assert ExactIndex(whole(9000, 19)).search(whole(15, 20), 3)[1].shape == (15, 3)
    other = object()
    assert prepare_for_serving(other) is other  # type: ignore[arg-type,comparison-overlap]


@pytest.mark.usefixtures("with_copies")
def test_many_passages_near_the_best_are_scored_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 17 queries more groups than are rescored have a passage that bf16 cannot tell from the best."""
    searched = []

    def counted(query_QE: Tensor, embedding_PE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        searched.append(len(query_QE))
        return search(query_QE, embedding_PE, k)

    monkeypatch.setattr(module, "search", counted)
    query_QE, embedding_PE = whole(80, 13), whole(40_000, 14)
    crowd = torch.arange(20) * 40
    query_QE[:17] = 900.0
    embedding_PE[crowd] = 1000.0 - torch.arange(20.0)[:, None] / 8 * torch.eye(WIDTH)[0]
    check_copy(query_QE, embedding_PE, 3, "bf16")
    [count] = searched
    assert 17 <= count <= 20, "some other query may be near too"
    assert ExactIndex(embedding_PE).search(query_QE, 3)[1][0].tolist() == crowd[:3].tolist()


def worst(rows: int, seed: int) -> Tensor:
    """Numbers that lose half a unit in the last place of bf16 each, all towards 0."""
    sign = normal(rows, seed).sign()
    return (sign * (1 + 2**-8 - 2**-20) * 2.0 ** torch.arange(rows).remainder(3)[:, None]).float()


def bf16_violations(query_QE: Tensor, embedding_PE: Tensor, changed: dict[str, float]) -> int:
    copy = Bf16Prefilter.build(embedding_PE)
    assert copy is not None
    max_QG, group_QG = copy._best_groups(query_QE, len(embedding_PE) // module.SMALL_GROUP)
    true_QP = query_QE.double() @ embedding_PE.double().T
    true_QG = true_QP.view(len(query_QE), -1, module.SMALL_GROUP).amax(2).gather(1, group_QG)
    bound_QG = torch.stack([replace(copy, **changed).bound(query_QE, max_Q) for max_Q in max_QG.T], dim=1)
    return int((bound_QG < true_QG).sum())


def int8_violations(query_QE: Tensor, embedding_PE: Tensor, changed: dict[str, float]) -> int:
    copy = Int8Prefilter.build(embedding_PE)
    assert copy is not None
    byte_QE, scale_Q = module._to_int8(query_QE)
    product_QP = (byte_QE.int() @ copy.int8_PE.int().T).double() * copy.scale_P * scale_Q[:, None].double()
    true_QP = query_QE.double() @ (embedding_PE.double() - embedding_PE.mean(0)).T
    return int(((product_QP - true_QP).abs() > replace(copy, **changed).bound(query_QE)[:, None]).sum())


@pytest.mark.usefixtures("with_copies")
@pytest.mark.parametrize("violations", [bf16_violations, int8_violations])
@pytest.mark.parametrize("missing", [None, "max_error", "max_norm", "_ROUNDING"])
def test_the_bound_holds_for_every_passage_and_needs_each_of_its_parts(
    violations: Callable[[Tensor, Tensor, dict[str, float]], int], missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "_ROUNDING":
        if violations is int8_violations:
            return  # its products are exact
        monkeypatch.setattr(module, missing, 0.0)
    changed = {missing: 0.0} if missing in ("max_error", "max_norm") else {}
    broken = 0
    for seed, scale in enumerate((1.0, 2.0**-40, 2.0**40)):
        wide = (normal(9008, seed) * 10.0 ** normal(9008, seed + 10, 1)).float()
        for query_QE, embedding_PE in ((worst(64, seed), worst(9008, seed + 20)), (wide[:64], wide)):
            broken += violations(query_QE, embedding_PE * scale, changed)
    assert (broken > 0) == (missing is not None)


# ---- several vectors of a passage


@pytest.mark.parametrize("vectors", [1, 2, 5])
@pytest.mark.parametrize("k", [1, 4, 60, 99])
def test_a_passage_is_found_once_by_its_best_vector(vectors: int, k: int) -> None:
    query_QE, embedding_PX = normal(7, 1), normal(60, 2, 8 * vectors)
    index = exact_index(embedding_PX, vectors)
    assert torch.equal(index.embedding_PE, embedding_PX)  # type: ignore[attr-defined]
    score_QK, id_QK = index.search(query_QE, k)
    best_QP = torch.einsum("qe,pme->qpm", query_QE, embedding_PX.view(60, vectors, 8)).amax(-1)
    assert id_QK.tolist() == np.argsort(-best_QP.numpy(), axis=1, kind="stable")[:, :k].tolist()
    torch.testing.assert_close(score_QK, best_QP.gather(1, id_QK))


def test_a_passage_is_found_although_all_vectors_of_another_are_nearer() -> None:
    embedding_PE = torch.tensor([[9.0, 8.0, 7.0, 6.0, 5.0], [1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 2.0]])
    score_QK, id_QK = exact_index(embedding_PE, 5).search(torch.ones(1, 1), 2)
    assert (id_QK.tolist(), score_QK.tolist()) == ([[0, 2]], [[9.0, 2.0]])


@pytest.mark.usefixtures("only_copies")
@pytest.mark.parametrize("queries", [1, QUERIES["int8"]])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_served_passage_is_found_by_its_best_vector_in_int8(queries: int, count: int) -> None:
    query_QE, embedding_PE = whole(queries, 31), whole(9000, 32)
    embedding_PE[100 * count + 1] = 0.5 * (embedding_PE[100 * count] + embedding_PE[7 * count])  # near two passages
    index = prepare_for_serving(MaxSimIndex(ExactIndex(embedding_PE), count))
    true_QP = (query_QE.double() @ embedding_PE.double().T).view(queries, -1, count).amax(2)
    check_results(index.search(query_QE, 10), true_QP, 10)


@pytest.mark.usefixtures("with_copies")
@pytest.mark.parametrize("special", [math.nan, math.inf, 3.4e38])
def test_served_passages_with_infinities_and_nan_are_found_as_in_fp32(special: float) -> None:
    query_QE, embedding_PE = whole(QUERIES["int8"], 33), whole(9000, 34)
    embedding_PE[7, 3] = special
    plain = MaxSimIndex(ExactIndex(embedding_PE), 3)
    for k in (10, 4000):
        found, expected = (index.search(query_QE, k) for index in (prepare_for_serving(plain), plain))
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0, equal_nan=True)
        assert found[1].shape == expected[1].shape
