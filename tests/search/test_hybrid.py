"""f(x, z) of words and embeddings together: by hand, against all passages, and its weights fitted."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from small_world import World, section, tiny_models
from torch import Tensor

from realmops.model.retriever import DEFAULT_FUSION_WEIGHTS, DENSE_ONLY, FusionWeights
from realmops.search.bm25 import Bm25
from realmops.search.exact import ExactIndex, exact_index
from realmops.search.hybrid import MIN_WEIGHT, HybridSearch, fit_fusion_weights, normalised_bm25
from realmops.train.index_source import Index
from realmops.train.masked_sentences import Examples
from realmops.train.pretraining import Candidates

CPU = torch.device("cpu")

# "rains" stands in passages 3 and 11 of small_world.py's world, "painter" in 2, "zebra" nowhere
RAINS, PAINTER, UNKNOWN = "Where is it that it rains?", "a painter", "zebra"


class Table:
    """Words whose BM25 is written down: of each query a score for some passages."""

    def __init__(self, score_QP: dict[str, dict[int, float]]) -> None:
        self.score_QP = score_QP

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        score_QK, id_QK = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
        for q, query in enumerate(queries):
            for place, passage in enumerate(sorted(self.score_QP[query], key=lambda p: -self.score_QP[query][p])[:k]):
                score_QK[q, place], id_QK[q, place] = self.score_QP[query][passage], passage
        return score_QK, id_QK

    def score_passages(self, query: str, ids: np.ndarray) -> np.ndarray:
        return np.array([self.score_QP[query].get(int(p), 0.0) for p in ids], np.float32)


# Inner products with the query (1): 5, 4, 3, 2, 1, 0. BM25: 8 for passage 4, 2 for passage 5, 4 for passage 0.
EMBEDDINGS = torch.tensor([[5.0], [4.0], [3.0], [2.0], [1.0], [0.0]])
WORDS = Table({"q": {4: 8.0, 5: 2.0, 0: 4.0}, "nothing": {}, "one": {5: 3.0}})
QUERY = torch.ones(1, 1)


def by_hand(dense: float, lexical: float, scale: float = 1.0) -> HybridSearch:
    return HybridSearch(ExactIndex(EMBEDDINGS), WORDS, FusionWeights(dense, lexical), scale)


def test_f_by_hand() -> None:
    """2 q.d + 10 BM25 / 8 with a scale of 0.5: 5 + 5, 4, 3, 2, 1 + 10 and 0 + 2.5."""
    found = by_hand(2, 10, 0.5).search(QUERY, ["q"], 4, 6)
    assert found.id_QK.tolist() == [[4, 0, 1, 2]]
    assert found.dense_QK.tolist() == [[0.5, 2.5, 2.0, 1.5]]
    assert found.words_QK.tolist() == [[1.0, 0.5, 0.0, 0.0]]
    assert found.relevance(FusionWeights(2, 10)).tolist() == [[11.0, 10.0, 4.0, 3.0]]
    assert found.relevance(DENSE_ONLY).tolist() == [[0.5, 2.5, 2.0, 1.5]]


def test_only_the_best_of_both_lists_are_candidates() -> None:
    """The first two by embeddings are 0 and 1, by words 4 and 0; passage 5 has f = 2.5 and is in neither list."""
    assert by_hand(1, 10).search(QUERY, ["q"], 2).id_QK.tolist() == [[4, 0]]
    assert by_hand(1, 10).search(QUERY, ["q"], 6, 2).id_QK.tolist() == [[4, 0, 1, 2, 5, 3]], "k of each kind at least"
    # f is 5 for passage 0, the first by embeddings, 4 for 5, the first by words, and 4 + 4 x 7/8 for 1
    search = HybridSearch(ExactIndex(EMBEDDINGS), Table({"q": {5: 8.0, 1: 7.0}}), FusionWeights(1, 4), 1.0)
    assert [search.search(QUERY, ["q"], 1, depth).id_QK.tolist() for depth in (None, 1, 2)] == [[[0]], [[0]], [[1]]]


def test_words_are_added_to_the_best_of_several_vectors() -> None:
    """Two vectors of each passage: q.d is 5, 4, 3, 2, 1, and 9 where the second vector of the last is that."""
    embedding_PX = torch.cat([EMBEDDINGS, EMBEDDINGS - 1], dim=1)
    embedding_PX[5, 1] = 9.0
    found = HybridSearch(exact_index(embedding_PX, 2), WORDS, FusionWeights(1, 4), 1.0).search(QUERY, ["q"], 4, 6)
    assert found.id_QK.tolist() == [[5, 0, 4, 1]]
    assert found.relevance(FusionWeights(1, 4)).tolist() == [[10.0, 7.0, 5.0, 4.0]]


@pytest.mark.parametrize(("passage", "expected"), [(5, [5, 0, 1]), (0, [0, 3, 4])])
def test_words_alone_find_a_passage_and_ties_are_in_corpus_order(passage: int, expected: list[int]) -> None:
    """Passage 0, too, where the search by embeddings does not find it."""
    embedding_PE = EMBEDDINGS if passage else EMBEDDINGS.flip(0)
    search = HybridSearch(ExactIndex(embedding_PE), Table({"q": {passage: 3.0}}), FusionWeights(0.0, 1.0), 1.0)
    found = search.search(QUERY, ["q"], 3, 3)
    assert found.id_QK.tolist() == [expected]
    assert found.words_QK.tolist() == [[1.0, 0.0, 0.0]]


def test_missing_results_are_minus_one() -> None:
    """The first query's lists have three passages together, the second's two: the row is filled up."""
    two = torch.ones(2, 1)
    found = by_hand(1, 10).search(two, ["q", "nothing"], 2, 2)
    assert found.id_QK.tolist() == [[4, 0], [0, 1]]
    few = HybridSearch(ExactIndex(EMBEDDINGS[:3]), Table({"q": {}, "nothing": {}}), FusionWeights(1, 1), 1.0)
    assert few.search(two, ["q", "nothing"], 5).id_QK.tolist() == [[0, 1, 2], [0, 1, 2]], "no more than there are"

    class Fewer(ExactIndex):
        """Finds one passage less for the second query, as a structure might."""

        def search(self, query_QE: Tensor, k: int) -> tuple[Tensor, Tensor]:
            return torch.tensor([[5.0, 4.0], [5.0, 5.0]]), torch.tensor([[0, 1], [0, 0]])

    found = HybridSearch(Fewer(EMBEDDINGS), WORDS, FusionWeights(1, 10), 1.0).search(two, ["q", "nothing"], 3)
    assert found.id_QK.tolist() == [[4, 0, 1], [0, -1, -1]]
    assert found.relevance(FusionWeights(1, 10))[1, 1:].tolist() == [-math.inf, -math.inf]


def test_without_words_or_their_weight_it_is_the_search_of_embeddings() -> None:
    for search in (HybridSearch(ExactIndex(EMBEDDINGS), None, FusionWeights(1, 10), 3.0), by_hand(1, 0, 3.0)):
        found = search.search(QUERY, ["q"], 2, 5)
        assert found.id_QK.tolist() == [[0, 1]]
        assert found.dense_QK.tolist() == [[15.0, 12.0]]
        assert found.words_QK.tolist() == [[0.0, 0.0]]


def test_normalised_bm25_by_hand() -> None:
    """Over that of the best passage, whether it is given or not; 0 for the null document (-1)."""
    id_QK = torch.tensor([[0, 5, -1], [1, 0, -1], [5, 4, 3]])
    queries = ["q", "nothing", "one"]
    assert normalised_bm25(WORDS, FusionWeights(1, 1), queries, id_QK, CPU).tolist() == [
        [0.5, 0.25, 0],
        [0, 0, 0],
        [1, 0, 0],
    ]
    for words, mixture in ((None, FusionWeights(1, 1)), (WORDS, DENSE_ONLY)):
        assert normalised_bm25(words, mixture, queries, id_QK, CPU).tolist() == [[0.0] * 3] * 3


@pytest.fixture(scope="module")
def bm25(world: World) -> Bm25:
    return Bm25.of(world.snapshot)


@pytest.mark.parametrize("mixture", [DEFAULT_FUSION_WEIGHTS, FusionWeights(1, 1), FusionWeights(0.5, 20)])
def test_a_search_over_all_passages_is_a_sort_by_f(world: World, bm25: Bm25, mixture: FusionWeights) -> None:
    """Against f of each of the twelve passages, computed one by one."""
    generator = torch.Generator().manual_seed(3)
    embedding_PE, query_QE = torch.randn(12, 8, generator=generator), torch.randn(3, 8, generator=generator)
    queries = [RAINS, PAINTER, UNKNOWN]
    found = HybridSearch(ExactIndex(embedding_PE), bm25, mixture, 0.7).search(query_QE, queries, 5, 12)
    for q, query in enumerate(queries):
        bm25_P = bm25.score_passages(query, np.arange(12))
        best = max(bm25_P.max(), 1e-9)
        f_P = [
            mixture.dense * 0.7 * float(embedding_PE[p] @ query_QE[q]) + mixture.lexical * bm25_P[p] / best
            for p in range(12)
        ]
        expected = sorted(range(12), key=lambda p: -f_P[p])[:5]
        assert found.id_QK[q].tolist() == expected
        assert found.relevance(mixture)[q].tolist() == pytest.approx([f_P[p] for p in expected], rel=1e-5)
        share = normalised_bm25(bm25, mixture, [query], found.id_QK[q : q + 1], CPU)[0]
        torch.testing.assert_close(share, found.words_QK[q], rtol=1e-6, atol=1e-6)
    assert set(np.flatnonzero(bm25.score_passages(RAINS, np.arange(12)))) >= {3, 11}
    assert bm25.score_passages(PAINTER, np.arange(12)).nonzero()[0].tolist() == [2]
    assert found.words_QK[2].tolist() == [0.0] * 5


# ---- the weights


def sampled(dense: float, lexical: float, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries with eight passages each, of which one is correct with the probability under these weights."""
    generator = torch.Generator().manual_seed(0)
    dense_QK, words_QK = torch.randn(queries, 8, generator=generator), torch.rand(queries, 8, generator=generator)
    p_QK = (dense * dense_QK + lexical * words_QK).softmax(-1)
    right_Q1 = torch.multinomial(p_QK, 1, generator=generator)
    return dense_QK, words_QK, torch.zeros(queries, 8, dtype=torch.bool).scatter(1, right_Q1, True)


@pytest.mark.parametrize(("dense", "lexical"), [(1.0, 8.0), (3.0, 0.5), (0.2, 2.0)])
def test_the_weights_that_generated_the_data_are_fitted(dense: float, lexical: float) -> None:
    """20,000 queries; a correct passage that is missing changes nothing."""
    dense_QK, words_QK, correct_QK = sampled(dense, lexical, 20_000)
    present_QK = torch.ones_like(correct_QK)
    found = fit_fusion_weights(dense_QK, words_QK, present_QK, correct_QK)
    assert found.dense == pytest.approx(dense, rel=0.05)
    assert found.lexical == pytest.approx(lexical, abs=0.12)
    assert found.reading == 1.0
    more = [torch.cat([t, t[:, :1]], dim=1) for t in (dense_QK, words_QK)]
    there = torch.cat([present_QK, torch.zeros(20_000, 1, dtype=torch.bool)], dim=1)
    assert fit_fusion_weights(*more, there, torch.cat([correct_QK, ~there[:, -1:]], dim=1)) == found


def test_queries_without_information_do_not_count() -> None:
    """Without a correct passage, with correct ones only, or with none at all: alone, nothing is fitted."""
    dense_QK, words_QK, correct_QK = sampled(2.0, 4.0, 50)
    present_QK = torch.ones_like(correct_QK)
    found = fit_fusion_weights(dense_QK, words_QK, present_QK, correct_QK)
    none, every = torch.zeros(50, 8, dtype=torch.bool), torch.ones(50, 8, dtype=torch.bool)
    assert fit_fusion_weights(dense_QK, words_QK, present_QK, none) is None
    assert fit_fusion_weights(dense_QK, words_QK, present_QK, every) is None
    assert fit_fusion_weights(dense_QK, words_QK, none, every) is None
    doubled = [torch.cat([t, t]) for t in (dense_QK, words_QK, present_QK)]
    for nothing in (none, every):
        assert fit_fusion_weights(*doubled, torch.cat([correct_QK, nothing])) == found


def test_both_weights_stay_above_zero() -> None:
    """Words that always mislead: with weight 0 they would be skipped, and never get another weight."""
    words_QK = torch.zeros(20_000, 2)
    words_QK[:, 0] = 30.0
    correct_QK = torch.zeros(20_000, 2, dtype=torch.bool)
    correct_QK[:, 1] = True
    found = fit_fusion_weights(torch.zeros(20_000, 2), words_QK, torch.ones_like(correct_QK), correct_QK)
    assert MIN_WEIGHT <= found.lexical < 0.1


def test_pre_training_retrieves_by_words_without_the_masked_one(world: World, bm25: Bm25) -> None:
    """Embeddings here prefer passages in the order of their numbers."""
    retriever, _ = tiny_models(world)
    embedding_PE = torch.zeros(12, 8)
    embedding_PE[:, 0] = torch.arange(12, 0, -1)
    query_BE = torch.zeros(1, 8)
    query_BE[0, 0] = 1.0
    examples = Examples(world.snapshot, world.spans, section("pretrain", reader_wordpieces=60))
    masked = examples.example(int(world.spans.offsets[9]), np.random.default_rng(0))  # "Jon Vik built it in 1950."
    assert masked.visible_text.split() == ["built", "it", "in", "1950."]
    for mixture, first in ((DENSE_ONLY, [0, 1, 2]), (FusionWeights(0.001, 8.0), [8])):
        retriever.mixture = mixture
        index = Index(0, ExactIndex(embedding_PE), retriever, 0.0, True)
        options = section("pretrain", candidates=4, null_document=True, exclude_trivial=True)
        [found] = Candidates(world.snapshot, options, bm25).retrieve([masked], query_BE, index)
        assert found[: len(first)] == first
        assert len(found) == 3
