"""Retrievers by words, which are not trained: BM25, TF-IDF of DrQA, and BM25 with an expansion over links.

Legend: Q questions, K ranked passages, P passages. Passages go by their number, -1 is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from realmops.corpus.snapshot import Snapshot
from realmops.index.links import Links

Rows = NDArray[np.int64]
DRQA_BUCKETS = 1 << 24  # of hashed words and pairs of words (Chen et al. 2017)
SEEDS = 20  # passages whose links are followed
LINKED_SHARE = 0.5  # of a seed's score, for what it is linked with


class Lexical(Protocol):
    """Ranks the passages that it was made of."""

    def scores(self, query: str) -> NDArray[np.float32]:
        """The score of every passage, [P]."""


def rank(retriever: Lexical, queries: Sequence[str], k: int) -> Rows:
    """The best k passages of each query, best first, int64 [Q, K]; -1 where there are fewer passages."""
    ranking = np.full((len(queries), k), -1, np.int64)
    for row, query in enumerate(queries):
        best = top(retriever.scores(query), k)
        ranking[row, : len(best)] = best
    return ranking


def top(score_P: NDArray[np.float32], k: int) -> Rows:
    """The k passages with the highest scores, best first, of equal ones the first."""
    k = min(k, len(score_P))
    least = np.partition(score_P, -k)[-k]
    above, level = np.flatnonzero(score_P > least), np.flatnonzero(score_P == least)
    found = np.concatenate([above, level[: k - len(above)]])
    best: Rows = found[np.argsort(-score_P[found], kind="stable")]
    return best


def titled_texts(snapshot: Snapshot) -> list[str]:
    """What a retriever by words reads of each passage: title and text."""
    pairs = zip(snapshot.column("title"), snapshot.column("text"), strict=True)
    return [f"{title} {text}" for title, text in pairs]


class Bm25:
    """BM25 with bm25s's defaults, English stop words and Snowball stems."""

    def __init__(self, texts: Sequence[str]) -> None:
        import bm25s
        import Stemmer

        self._stemmer = Stemmer.Stemmer("english")
        self._count = len(texts)
        self._index = bm25s.BM25(backend="numpy")
        self._index.index(self._tokens(texts), show_progress=False)

    def _tokens(self, texts: Sequence[str]) -> list[list[str]]:
        import bm25s

        found = bm25s.tokenize(
            list(texts), stopwords="en", stemmer=self._stemmer, return_ids=False, show_progress=False
        )
        return [list(words) for words in found]

    def scores(self, query: str) -> NDArray[np.float32]:
        """BM25 of every passage, [P]."""
        [words] = self._tokens([query])
        if not words:
            return np.zeros(self._count, np.float32)
        score_P: NDArray[np.float32] = self._index.get_scores(words)
        return score_P


class TfIdf:
    """DrQA's retriever: words and pairs of words, hashed (Chen et al. 2017, section 3.1).

    The score is the inner product of log(1 + tf) log((P - n + .5) / (n + .5)), n the passages with the pair or word.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        from sklearn.feature_extraction.text import HashingVectorizer

        self._vectorizer = HashingVectorizer(
            stop_words="english", ngram_range=(1, 2), n_features=DRQA_BUCKETS, norm=None, alternate_sign=False
        )
        counts: Any = self._vectorizer.transform(texts)
        buckets, n = np.unique(counts.indices, return_counts=True)
        idf = np.maximum(np.log((len(texts) - n + 0.5) / (n + 0.5)), 0.0)
        self._buckets, self._idf = buckets, idf
        counts.data = np.log1p(counts.data) * idf[np.searchsorted(buckets, counts.indices)]
        self._weights = counts.tocsc()

    def scores(self, query: str) -> NDArray[np.float32]:
        """The inner product with every passage, [P]."""
        wanted: Any = self._vectorizer.transform([query])
        known = np.isin(wanted.indices, self._buckets)
        buckets = wanted.indices[known]
        weight = np.log1p(wanted.data[known]) * self._idf[np.searchsorted(self._buckets, buckets)]
        score_P: NDArray[np.float32] = (self._weights[:, buckets] @ weight).astype(np.float32)
        return score_P


class Graph:
    """BM25 with one step over links between documents, as GraphRetriever expands its paragraphs (Min et al. 2019).

    The score is BM25's plus ``LINKED_SHARE`` of the best of the ``SEEDS`` first passages that a passage is linked with.
    """

    def __init__(self, bm25: Bm25, links: Links) -> None:
        self._bm25, self._links = bm25, links

    def scores(self, query: str) -> NDArray[np.float32]:
        """BM25 and what links add, of every passage, [P]."""
        own_P = self._bm25.scores(query)
        linked_P = np.zeros_like(own_P)
        for seed in top(own_P, SEEDS)[::-1]:  # the best seed has the last word
            linked_P[self._links.of(int(seed))] = own_P[seed]
        return own_P + LINKED_SHARE * linked_P
