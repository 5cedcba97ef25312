"""Links between the passages of a corpus: given hyperlinks, or titles that occur in the texts of other passages."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realmops.corpus.languages import normalize_unicode
from realmops.corpus.snapshot_reader import Snapshot
from realmops.search.bm25 import Bm25, Scores, top_k

SEEDS = 20  # passages whose links are followed
LINKED_SHARE = 0.5  # of a seed's score, added to the passages that it is linked with
COLUMN = "links"  # column of documents: titles of link targets
_WORD = re.compile(r"\w+")
_MAX_TITLE = 12  # words
Words = tuple[str, ...]


class PassageLinks:
    """Undirected links between passages: a link between their documents, or the same document.

    The column "links" of a document has the titles that it links to. If no document has it, a passage links to every
    document whose title, without a suffix in parentheses, occurs in its text as whole words in the same case.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        from scipy.sparse import csr_array

        names = snapshot.column("document_id")
        number = {name: n for n, name in enumerate(dict.fromkeys(names))}
        self._document_P = np.array([number[name] for name in names], dtype=np.int64)
        by_title: dict[Words, set[int]] = defaultdict(set)
        for title, document in zip(snapshot.column("title"), self._document_P.tolist(), strict=True):
            by_title[_title_words(title)].add(document)
        by_title.pop((), None)
        column = [json.loads(extra).get(COLUMN) if extra else None for extra in snapshot.column("extra")]
        if any(column):
            titles_P = [[_title_words(str(title)) for title in titles or ()] for titles in column]
        else:
            max_words = min(_MAX_TITLE, max(map(len, by_title), default=0))
            titles_P = [list(_ngrams(_words(text), max_words)) for text in snapshot.column("text")]
        pairs = {(p, d) for p, titles in enumerate(titles_P) for title in titles for d in by_title.get(title, ())}
        passages, documents = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2).T
        shape = (len(names), len(number))

        def matrix(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Any:
            return csr_array((np.ones(len(rows), np.int8), (rows, columns)), shape=shape)

        self._targets_PD = matrix(passages, documents)
        self._sources_DP = self._targets_PD.T.tocsr()
        self._members_DP = matrix(np.arange(len(names)), self._document_P).T.tocsr()

    def of(self, passage: int) -> NDArray[np.int64]:
        """Return the passages linked with this one in either direction, ascending, without the passage itself."""
        own_document = self._document_P[passage]
        documents = [*_row(self._targets_PD, passage), own_document]
        parts = [_row(self._sources_DP, own_document), *(_row(self._members_DP, d) for d in documents)]
        linked: NDArray[np.int64] = np.setdiff1d(np.concatenate(parts), [passage]).astype(np.int64)
        return linked


def _row(matrix: Any, row: int) -> NDArray[np.int64]:
    columns: NDArray[np.int64] = matrix.indices[matrix.indptr[row] : matrix.indptr[row + 1]]
    return columns


def _words(text: str) -> Words:
    return tuple(_WORD.findall(normalize_unicode(text)))


def _title_words(title: str) -> Words:
    return _words(title.partition(" (")[0])


def _ngrams(words: Sequence[str], max_words: int) -> Iterator[Words]:
    for start in range(len(words)):
        for end in range(start + 1, min(start + max_words, len(words)) + 1):
            yield tuple(words[start:end])


class LinkedBm25:
    """BM25 with one step over links between documents, as GraphRetriever expands its paragraphs (Min et al. 2019).

    score(z) = BM25(z) + ``LINKED_SHARE`` max BM25(s), over the seeds s that are linked with z, where the seeds are the
    ``SEEDS`` best passages.
    """

    def __init__(self, bm25: Bm25, links: PassageLinks) -> None:
        self._bm25, self._links = bm25, links

    def scores(self, query: str) -> Scores:
        """Return the score of every passage, float32 [P]."""
        own_P = self._bm25.scores(query)
        linked_P = np.zeros_like(own_P)
        for seed in top_k(own_P, SEEDS)[::-1]:  # ascending, so that the best seed overwrites the others
            linked_P[self._links.of(int(seed))] = own_P[seed]
        return own_P + LINKED_SHARE * linked_P
