from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from realmops.index import mips
from realmops.index.mips import GROUP, search


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
    monkeypatch.setattr(mips, "_LARGE", 1000)
    monkeypatch.setattr(mips, "_CHUNK", {"cpu": 4096})
    monkeypatch.setattr(mips, "_GROUPS", 1)
    for rows in (4096 * 2, 4096 * 3 + 5, 4096 * 2 + 700):
        check(normal(3, 7), normal(rows, 8), 9)
