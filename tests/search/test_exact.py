import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from realmops.search import exact
from realmops.search import inner_products as module
from realmops.search.exact import ExactIndex, MaxSimIndex, exact_index, prepare_for_serving
from realmops.search.inner_products import GROUP, search


def obvious(query_QE: Tensor, embedding_PE: Tensor, k: int) -> np.ndarray:
    """Ids of the k largest inner products, by sorting all of them."""
    score_QP = (query_QE.double() @ embedding_PE.double().T).numpy()
    return np.argsort(-score_QP, axis=1, kind="stable")[:, :k]


def normal(rows: int, seed: int, width: int = 8) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(query_QE: Tensor, embedding_PE: Tensor, k: int) -> None:
    score_QK, id_QK = search(query_QE, embedding_PE, k)
    np.testing.assert_array_equal(id_QK.numpy(), obvious(query_QE, embedding_PE, k))
    own = torch.einsum("qe,qke->qk", query_QE, embedding_PE[id_QK])
    torch.testing.assert_close(score_QK, own)
    assert (score_QK.diff(dim=1) <= 0).all(), "best first"


def test_by_hand() -> None:
    embedding_PE = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0], [1.0, 1.0]])
    score_QK, id_QK = search(torch.tensor([[1.0, 0.0], [0.0, -1.0]]), embedding_PE, 2)
    assert score_QK.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert sorted(id_QK[0].tolist()) == [0, 3]
    assert sorted(id_QK[1].tolist()) == [0, 2]
    score_QK, id_QK = search(torch.tensor([[2.0, 1.0]]), embedding_PE, 9)
    assert id_QK.tolist() == [[3, 0, 1, 2]] or id_QK.tolist() == [[3, 1, 0, 2]], "k is cut to the number"
    assert score_QK.tolist() == [[3.0, 2.0, 2.0, -6.0]]


@pytest.mark.parametrize("rows", [50_000, 50_001, 51_200, 60_123])
@pytest.mark.parametrize("k", [1, 15])
def test_groups_find_what_plain_search_finds(rows: int, k: int) -> None:
    check(normal(4, 1), normal(rows, 2), k)


def test_more_results_than_groups() -> None:
    rows = 50_001
    check(normal(2, 3), normal(rows, 4), rows // GROUP + 1)


def test_the_best_may_all_lie_in_one_group_or_in_the_rest() -> None:
    """Ten neighbours that beat everybody: inside one group of 256, and behind the last whole group."""
    query_QE, embedding_PE = normal(3, 5), normal(50_100, 6)
    for first in (1024, 50_090):
        crowded_PE = embedding_PE.clone()
        crowded_PE[first : first + 10] = 50 * query_QE[0] + torch.arange(10)[:, None] * query_QE[0]
        check(query_QE, crowded_PE, 12)
        assert search(query_QE[:1], crowded_PE, 10)[1].tolist() == [list(range(first + 9, first - 1, -1))]


def test_parts_of_a_large_corpus_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part may have fewer rows than k."""
    monkeypatch.setattr(module, "_LARGE", 1000)
    monkeypatch.setattr(module, "_CHUNK", {"cpu": 4096})
    monkeypatch.setattr(module, "_GROUPS", 1)
    for rows in (4096 * 2, 4096 * 3 + 5, 4096 * 2 + 700):
        check(normal(3, 7), normal(rows, 8), 9)


# ---- candidates by a product in bf16


WIDTH = 8
QUERIES = 20


@pytest.fixture
def with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that multiplies bf16, whatever this one does, and for small corpora."""
    monkeypatch.setattr(module, "supports_bf16", lambda: True)
    monkeypatch.setattr(module, "_LARGE", 1000)


def refused(*_: object) -> None:
    raise AssertionError("the whole product in fp32")


@pytest.fixture
def only_bf16(with_bf16: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the whole product in fp32 must not be needed."""
    for part in (module, exact):
        monkeypatch.setattr(part, "search", refused)
    monkeypatch.setattr(exact, "FEW", 1)


def whole(rows: int, seed: int, most: int = 1000) -> Tensor:
    """Whole numbers, whose products and sums fp32 has without any rounding, and bf16 has not."""
    assert WIDTH * most**2 < 2**24
    numbers = torch.randint(-most, most + 1, (rows, WIDTH), generator=torch.Generator().manual_seed(seed))
    return numbers.float()


def check_scores(query_QE: Tensor, embedding_PE: Tensor, k: int, use_int8: bool = False) -> None:
    """All scores are those of the best, to the last bit, each that of its passage, and no passage comes twice."""
    score_QK, id_QK = ExactIndex(embedding_PE, use_int8).search(query_QE, k)
    true_QP = query_QE.double() @ embedding_PE.double().T
    assert torch.equal(score_QK.double(), true_QP.topk(min(k, len(embedding_PE)), dim=1).values)
    assert torch.equal(true_QP.gather(1, id_QK), score_QK.double())
    assert all(len(set(row)) == len(row) for row in id_QK.tolist())


@pytest.mark.usefixtures("only_bf16")
@pytest.mark.parametrize("rows", [8192, 8193, 8191 + 16, 3 * 4096 + 15, 20_000])
@pytest.mark.parametrize("k", [1, 3])
def test_halves_find_what_fp32_finds(rows: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the borders of groups, of products and of parts."""
    monkeypatch.setattr(module, "_PART", 4096)
    monkeypatch.setattr(module, "_SCORES", QUERIES * 1000)
    monkeypatch.setattr(module, "_RESCORED_ROWS", 700)
    check_scores(whole(QUERIES, 1), whole(rows, 2), k)


@pytest.mark.usefixtures("only_bf16")
def test_halves_find_the_best_in_one_group_and_behind_the_last() -> None:
    query_QE = whole(1, 3, most=30).expand(QUERIES, -1)
    for first in (1024, 8192):
        embedding_PE = whole(8192 + 10, 4, most=30)
        embedding_PE[first : first + 10] = 40 * query_QE[0] + torch.arange(10)[:, None] * query_QE[0].sign()
        check_scores(query_QE, embedding_PE, 8)
        assert (
            ExactIndex(embedding_PE).search(query_QE, 8)[1].tolist()
            == [list(range(first + 9, first + 1, -1))] * QUERIES
        )


@pytest.mark.usefixtures("only_bf16")
@pytest.mark.parametrize("power", [-30, 30])
def test_halves_of_tiny_and_of_large_numbers(power: int) -> None:
    check_scores(whole(QUERIES, 5) * 2.0**power, whole(9000, 6) * 2.0**power, 3)


@pytest.mark.usefixtures("only_bf16")
def test_halves_where_all_scores_are_negative_or_nearly_the_same() -> None:
    """What all passages have in common does not count."""
    query_QE = torch.full((QUERIES, WIDTH), 900.0) + whole(QUERIES, 7, most=50)
    for sign in (-1, 1):
        embedding_PE = torch.full((9000, WIDTH), sign * 900.0) + whole(9000, 8, most=50)
        assert ((query_QE @ embedding_PE.T).sign() == sign).all()
        check_scores(query_QE, embedding_PE, 3)


@pytest.mark.usefixtures("with_bf16")
def test_halves_where_many_passages_are_as_good() -> None:
    """Copies of a few passages, one alone, numbers that cancel each other, and products too small for a float."""
    query_QE, few = whole(QUERIES, 9), whole(9, 10)
    check_scores(query_QE, few[torch.arange(9000) % 9].contiguous(), 12)
    check_scores(query_QE, few[:1].expand(9000, -1).contiguous(), 12)
    cancel = whole(9000, 11)
    cancel[:, WIDTH // 2 :] = -cancel[:, : WIDTH // 2]
    query_QE[:, WIDTH // 2 :] = query_QE[:, : WIDTH // 2]
    check_scores(query_QE, cancel, 12)
    tiny_PE = normal(9000, 12, WIDTH).float() * 1e-22
    score_QK, id_QK = ExactIndex(tiny_PE).search(query_QE * 1e-22, 12)
    found = search(query_QE * 1e-22, tiny_PE, 12)
    assert torch.equal(score_QK, found[0])
    assert torch.equal(id_QK, found[1])


@pytest.mark.usefixtures("with_bf16")
def test_a_crowd_near_the_best_is_scored_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 17 queries more groups than are looked at hold a passage that bf16 cannot tell from the best."""
    asked = []

    def counted(query_QE: Tensor, embedding_PE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        asked.append(len(query_QE))
        return search(query_QE, embedding_PE, k)

    monkeypatch.setattr(module, "search", counted)
    query_QE, embedding_PE = whole(80, 13), whole(40_000, 14)
    crowd = torch.arange(20) * 40
    query_QE[:17] = 900.0
    embedding_PE[crowd] = 1000.0 - torch.arange(20.0)[:, None] / 8 * torch.eye(WIDTH)[0]
    check_scores(query_QE, embedding_PE, 3)
    [count] = asked
    assert 17 <= count <= 20, "some other query may be near too"
    assert ExactIndex(embedding_PE).search(query_QE, 3)[1][0].tolist() == crowd[:3].tolist()


def worst(rows: int, seed: int) -> Tensor:
    """Numbers that lose half a unit in the last place of bf16 each, all towards 0."""
    sign = normal(rows, seed, WIDTH).sign()
    return (sign * (1 + 2**-8 - 2**-20) * 2.0 ** torch.arange(rows).remainder(3)[:, None]).float()


@pytest.mark.usefixtures("with_bf16")
@pytest.mark.parametrize("missing", [None, "max_error", "max_norm", "_ROUNDING"])
def test_the_bound_holds_for_every_passage(missing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64; and without one of its parts it does not, so these numbers are hard enough."""
    broken = 0
    for seed, scale in enumerate((1.0, 2.0**-40, 2.0**40)):
        wide = (normal(9008, seed, WIDTH) * 10.0 ** normal(9008, seed + 10, 1)).float()
        for query_QE, embedding_PE in ((worst(64, seed), worst(9008, seed + 20)), (wide[:64], wide)):
            prefilter = module.Bf16Prefilter.build(embedding_PE * scale)
            most_QG, group_QG = prefilter._best_groups(query_QE, 9008 // module.SMALL_GROUP)
            true_QP = query_QE.double() @ (embedding_PE * scale).double().T
            true_QG = true_QP.view(64, -1, module.SMALL_GROUP).amax(2).gather(1, group_QG)
            if missing == "_ROUNDING":
                monkeypatch.setattr(module, missing, 0.0)
            elif missing:
                prefilter = replace(prefilter, **{missing: 0.0})
            bound_QG = torch.stack([prefilter.bound(query_QE, most_Q) for most_Q in most_QG.T], dim=1)
            broken += int((bound_QG < true_QG).sum())
    assert (broken > 0) == (missing is not None)


def test_without_bf16_in_hardware_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "supports_bf16", lambda: False)
    query_QE, embedding_PE = whole(QUERIES, 17), whole(50_001, 18)
    index = ExactIndex(embedding_PE)
    found, plain = index.search(query_QE, 5), search(query_QE, embedding_PE, 5)
    assert index.bf16_copy is None
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])


@pytest.mark.usefixtures("with_bf16")
def test_a_few_queries_need_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    for copied in (module.Bf16Prefilter, module.Int8Prefilter):
        monkeypatch.setattr(copied, "build", staticmethod(lambda embedding_PE: pytest.fail("a copy")))
    index = ExactIndex(whole(9000, 19))
    assert index.search(whole(15, 20), 3)[1].shape == (15, 3)


# ---- candidates of a few queries by a product in int8


FEW = 15  # queries


@pytest.fixture
def with_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """For small corpora, and wherever sums are exact, whatever multiplies."""
    exact_mm = torch._int_mm
    monkeypatch.setattr(module, "_LARGE", 1000)
    if not module.supports_int8():
        exact_mm = lambda one, other: one.int() @ other.int()  # noqa: E731
    monkeypatch.setattr(module, "supports_int8", lambda: True)
    monkeypatch.setattr(torch, "_int_mm", exact_mm)


@pytest.fixture
def only_int8(with_int8: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the whole product in fp32 must not be needed."""
    for part in (module, exact):
        monkeypatch.setattr(part, "search", refused)


def check_often(query_QE: Tensor, embedding_PE: Tensor, k: int) -> None:
    check_scores(query_QE, embedding_PE, k, use_int8=True)


@pytest.mark.usefixtures("only_int8")
@pytest.mark.parametrize("queries", [1, 2, FEW])
@pytest.mark.parametrize("rows", [8192, 8191 + 16, 20_000])
def test_what_is_searched_often_has_a_copy_for_a_few_queries(queries: int, rows: int) -> None:
    query_QE, embedding_PE = whole(queries, 21), whole(rows, 22)
    check_often(query_QE, embedding_PE, 10)
    check_often(query_QE * 2.0**-30, embedding_PE * 2.0**30, 3)
    other = object()
    assert prepare_for_serving(other) is other  # type: ignore[arg-type,comparison-overlap]


@pytest.mark.usefixtures("only_int8")
@pytest.mark.parametrize("queries", [1, FEW])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_of_passages_with_several_vectors_the_best_one_counts(queries: int, count: int) -> None:
    query_QE, embedding_PE = whole(queries, 31), whole(9000, 32)
    embedding_PE[100 * count + 1] = 0.5 * (embedding_PE[100 * count] + embedding_PE[7 * count])  # a passage near two
    score_QK, id_QK = prepare_for_serving(MaxSimIndex(ExactIndex(embedding_PE), count)).search(query_QE, 10)
    true_QP = (query_QE.double() @ embedding_PE.double().T).view(queries, -1, count).amax(2)
    assert torch.equal(score_QK.double(), true_QP.topk(10, dim=1).values)
    assert torch.equal(true_QP.gather(1, id_QK), score_QK.double())
    assert all(len(set(row)) == len(row) for row in id_QK.tolist())


@pytest.mark.usefixtures("with_int8")
@pytest.mark.parametrize("strange", [math.nan, math.inf, 3.4e38])
def test_passages_with_several_vectors_and_strange_numbers_are_found_as_in_fp32(strange: float) -> None:
    query_QE, embedding_PE = whole(FEW, 33), whole(9000, 34)
    embedding_PE[7, 3] = strange
    plain = MaxSimIndex(ExactIndex(embedding_PE), 3)
    for k in (10, 4000):
        found, expected = (index.search(query_QE, k) for index in (prepare_for_serving(plain), plain))
        assert torch.equal(found[0].nan_to_num(-1.0), expected[0].nan_to_num(-1.0))
        assert found[1].shape == expected[1].shape


@pytest.mark.usefixtures("only_int8")
def test_bytes_find_what_lies_behind_the_last_group_and_has_much_in_common() -> None:
    query_QE = torch.full((FEW, WIDTH), 900.0) + whole(FEW, 23, most=50)
    for sign in (-1, 1):
        embedding_PE = torch.full((9003, WIDTH), sign * 900.0) + whole(9003, 24, most=50)
        embedding_PE[-2:] += 50
        check_often(query_QE, embedding_PE, 3)


@pytest.mark.usefixtures("with_int8")
def test_bytes_where_many_passages_are_as_good() -> None:
    """Copies of a few passages, one alone, no direction, and products too small for a float."""
    query_QE, few = whole(FEW, 25), whole(9, 26)
    check_often(query_QE, few[torch.arange(9000) % 9].contiguous(), 12)
    check_often(query_QE, few[:1].expand(9000, -1).contiguous(), 12)
    check_often(0 * query_QE, whole(9000, 27), 12)
    check_often(query_QE, 0 * whole(9000, 27), 12)
    check_often(query_QE[:1], whole(1600, 27), 101)
    tiny_PE, tiny_QE = normal(9000, 28, WIDTH).float() * 1e-22, query_QE * 1e-22
    assert torch.equal(prepare_for_serving(ExactIndex(tiny_PE)).search(tiny_QE, 12)[0], search(tiny_QE, tiny_PE, 12)[0])


@pytest.mark.usefixtures("with_bf16", "with_int8")
@pytest.mark.parametrize(("queries", "use_int8"), [(QUERIES, False), (FEW, True)])
@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 3.4e38])
def test_strange_numbers_are_found_as_in_fp32(strange: float, queries: int, use_int8: bool) -> None:
    """In a passage, and in a query; products and sums of the last one are too large for a float."""
    query_QE, embedding_PE = whole(queries, 15), whole(9000, 16)
    for numbers in (embedding_PE, query_QE):
        kept = numbers[7].clone()
        numbers[7, 3] = strange
        found, plain = ExactIndex(embedding_PE, use_int8).search(query_QE, 3), search(query_QE, embedding_PE, 3)
        assert torch.equal(found[0].nan_to_num(1.5), plain[0].nan_to_num(1.5))
        assert torch.equal(found[0].isnan(), plain[0].isnan())
        numbers[7] = kept


@pytest.mark.usefixtures("with_int8")
def test_a_passage_is_scored_again_as_far_below_the_best_product_as_two_may_be_wrong() -> None:
    """By hand: 10 is 9 in its copy, 9.5 is 10.4, and neither is farther off than 1."""
    embedding_PE, byte_PE = torch.zeros(64, WIDTH), torch.zeros(64, WIDTH, dtype=torch.int8)
    embedding_PE[5, 0], byte_PE[5, 0] = 10.0, 90
    embedding_PE[40, 0], byte_PE[40, 0] = 9.5, 104
    copied = module.Int8Prefilter(
        embedding_PE, byte_PE, torch.full((64,), 0.1), max_norm=10.4, max_error=1.0, max_original_norm=11.4
    )
    score_QK, id_QK = copied.search(torch.eye(1, WIDTH), 1)
    assert (score_QK.tolist(), id_QK.tolist()) == ([[10.0]], [[5]])


@pytest.mark.parametrize("copies", [module.Bf16Prefilter, module.Int8Prefilter])
def test_nothing_is_sure_where_a_sum_could_overflow(copies: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2 ** 120 on, of lengths of a query and a passage; no passage is longer than is known."""
    for name in ("_is_large", "supports_bf16", "supports_int8"):
        monkeypatch.setattr(module, name, lambda *_: True)
    embedding_PE = 2.0**60 * (1 + 0.1 * normal(64, 0, WIDTH)).float()
    copied, query_QE = copies.build(embedding_PE), torch.eye(1, WIDTH)
    sure, unsure = (
        copied.bound(scale * query_QE, *([torch.zeros(1)] if copies is module.Bf16Prefilter else []))
        for scale in (2.0**40, 2.0**60)
    )
    assert sure.isfinite().all()
    assert unsure.isinf().all()


@pytest.mark.usefixtures("with_int8")
def test_no_passage_is_longer_than_is_known_of_it() -> None:
    """With its mean: passages that have much in common are far from 0."""
    embedding_PE = (5 + normal(9008, 0, WIDTH)).float()
    copied = module.Int8Prefilter.build(embedding_PE)
    assert copied is not None
    length_P = embedding_PE.double().norm(dim=1)
    assert float(length_P.max() + embedding_PE.double().mean(0).norm()) <= copied.max_original_norm


@pytest.mark.usefixtures("with_int8")
@pytest.mark.parametrize("missing", [None, "max_error", "max_norm"])
def test_no_product_in_bytes_is_farther_off_than_the_bound(missing: str | None) -> None:
    """In fp64; and without one of its parts one is, so these numbers are hard enough."""
    broken = 0
    for seed, scale in enumerate((1.0, 2.0**-40, 2.0**40)):
        wide = (normal(9008, seed, WIDTH) * 10.0 ** normal(9008, seed + 10, 1)).float() * scale
        copied, query_QE = module.Int8Prefilter.build(wide), wide[:64]
        assert copied is not None
        byte_QE, factor_Q = module._to_int8(query_QE)
        product_QP = (byte_QE.int() @ copied.int8_PE.int().T).double() * copied.scale_P * factor_Q[:, None].double()
        true_QP = query_QE.double() @ (wide.double() - wide.mean(0)).T
        bound_Q = (replace(copied, **{missing: 0.0}) if missing else copied).bound(query_QE)
        broken += int(((product_QP - true_QP).abs() > bound_Q[:, None]).sum())
    assert (broken > 0) == (missing is not None)


def test_without_int8_in_hardware_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "supports_int8", lambda: False)
    query_QE, index = whole(FEW, 31), prepare_for_serving(ExactIndex(whole(50_001, 32)))
    assert index.int8_copy is None  # type: ignore[attr-defined]
    assert torch.equal(index.search(query_QE, 5)[0], search(query_QE, index.embedding_PE, 5)[0])  # type: ignore[attr-defined]


# ---- several vectors of a passage


@pytest.mark.parametrize("vectors", [1, 2, 5])
@pytest.mark.parametrize("k", [1, 4, 60, 99])
def test_a_passage_is_found_once_by_its_best_vector(vectors: int, k: int) -> None:
    query_QE, embedding_PX = normal(7, 1), normal(60, 2, 8 * vectors)
    index = exact_index(embedding_PX, vectors)
    assert torch.equal(index.embedding_PE, embedding_PX)
    score_QK, id_QK = index.search(query_QE, k)
    best_QP = torch.einsum("qe,pme->qpm", query_QE, embedding_PX.view(60, vectors, 8)).amax(-1)
    assert id_QK.tolist() == np.argsort(-best_QP.numpy(), axis=1, kind="stable")[:, :k].tolist()
    torch.testing.assert_close(score_QK, best_QP.gather(1, id_QK))


def test_passages_are_found_whose_vectors_are_behind_all_of_another() -> None:
    """All five vectors of the first are nearer than any of the others."""
    embedding_PE = torch.tensor([[9.0, 8.0, 7.0, 6.0, 5.0], [1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 2.0]])
    score_QK, id_QK = exact_index(embedding_PE, 5).search(torch.ones(1, 1), 2)
    assert (id_QK.tolist(), score_QK.tolist()) == ([[0, 2]], [[9.0, 2.0]])
