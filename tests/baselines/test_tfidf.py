"""DrQA's TF-IDF."""

import math

import pytest
from four_passages import TEXTS

from realmops.baselines.tfidf import TfIdf
from realmops.search.bm25 import rank


def test_tf_idf_is_drqas_formula() -> None:
    """Five texts, one of which has a word twice and a pair; idf below 0 counts as 0."""
    texts = ["red ships sail", "red boats", "green boats sail sail", "boats sink", "nothing floats"]
    scores = TfIdf(texts).scores("boats sail")
    idf = {n: math.log((5 - n + 0.5) / (n + 0.5)) for n in (1, 2, 3)}
    assert idf[3] < 0
    sail, pair = math.log(2) ** 2 * idf[2] ** 2, math.log(2) ** 2 * idf[1] ** 2
    twice = math.log(2) * math.log(3) * idf[2] ** 2
    assert scores.tolist() == pytest.approx([sail, 0.0, twice + pair, 0.0, 0.0], rel=1e-5)


def test_composed_and_decomposed_spellings_are_one_word() -> None:
    texts = ["Dvor\u030ca\u0301k rests", "İstanbul rests", "nothing", "else", "here"]
    for query, passage in (("Dvořák", 0), ("DVOR\u030cA\u0301K", 0), ("istanbul", 1), ("I\u0307stanbul", 1)):
        assert TfIdf(texts).scores(query)[passage] > 0


@pytest.mark.parametrize("query", ["", "the", "zebra quagga"])
def test_a_query_without_known_words_ranks_by_number(query: str) -> None:
    assert rank(TfIdf(TEXTS), [query], 3).tolist() == [[0, 1, 2]]
