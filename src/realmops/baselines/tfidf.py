"""TF-IDF retrieval with hashed unigrams and bigrams, as in DrQA (Chen et al. 2017, section 3.1)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from realmops.corpus.languages import normalize_unicode
from realmops.search.bm25 import Scores

BUCKETS = 1 << 24  # of hashed unigrams and bigrams


class TfIdf:
    """TF-IDF scores of all passages.

    The weight of an n-gram is log(1 + tf) log((P - n + .5) / (n + .5)), with n the number of passages that contain it.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        from sklearn.feature_extraction.text import HashingVectorizer

        self._vectorizer = HashingVectorizer(
            stop_words="english",
            ngram_range=(1, 2),
            n_features=BUCKETS,
            norm=None,
            alternate_sign=False,
            preprocessor=lambda text: normalize_unicode(text).lower(),
        )
        counts: Any = self._vectorizer.transform(texts)
        buckets, n = np.unique(counts.indices, return_counts=True)
        idf = np.maximum(np.log((len(texts) - n + 0.5) / (n + 0.5)), 0.0)
        self._buckets, self._idf = buckets, idf
        counts.data = np.log1p(counts.data) * idf[np.searchsorted(buckets, counts.indices)]
        self._weights = counts.tocsc()

    def scores(self, query: str) -> Scores:
        """Return the inner product of the query with every passage, float32 [P]."""
        counts: Any = self._vectorizer.transform([query])
        is_known = np.isin(counts.indices, self._buckets)
        buckets = counts.indices[is_known]
        weight = np.log1p(counts.data[is_known]) * self._idf[np.searchsorted(self._buckets, buckets)]
        score_P: Scores = (self._weights[:, buckets] @ weight).astype(np.float32)
        return score_P
