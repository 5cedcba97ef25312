"""Links between the passages of a corpus: given hyperlinks, or titles that stand in other passages' texts."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realmops.corpus.snapshot_reader import Snapshot
from realmops.search.bm25 import Bm25, Scores, top
from realmops.text.languages import composed

SEEDS = 20  # passages whose links are followed
LINKED_SHARE = 0.5  # of a seed's score, for what it is linked with
COLUMN = "links"  # of a document: the titles that it links to
_WORD = re.compile(r"\w+")
_LONGEST_TITLE = 12  # words
Words = tuple[str, ...]


class Links:
    """Which passages are linked: by a link from one's document to the other's, or by being of one document.

    Where documents carry a column "links" with the titles that they link to, those are the links. Otherwise a passage
    links to every document whose title stands in its text, whole words in the same case, without what the title has
    in brackets.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        from scipy.sparse import csr_array

        names = snapshot.column("document_id")
        number = {name: n for n, name in enumerate(dict.fromkeys(names))}
        self._document_P = np.array([number[name] for name in names], dtype=np.int64)
        by_title: dict[Words, set[int]] = defaultdict(set)
        for title, document in zip(snapshot.column("title"), self._document_P.tolist(), strict=True):
            by_title[_words(title.partition(" (")[0])].add(document)
        by_title.pop((), None)
        given = [json.loads(extra).get(COLUMN) if extra else None for extra in snapshot.column("extra")]
        if any(given):
            named = [[_words(str(title).partition(" (")[0]) for title in titles or ()] for titles in given]
        else:
            longest = min(_LONGEST_TITLE, max(map(len, by_title), default=0))
            named = [list(_runs(_words(text), longest)) for text in snapshot.column("text")]
        pairs = {
            (p, document) for p, titles in enumerate(named) for title in titles for document in by_title.get(title, ())
        }
        passages, documents = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2).T
        shape = (len(names), len(number))

        def table(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Any:
            return csr_array((np.ones(len(rows), np.int8), (rows, columns)), shape=shape)

        self._targets_PD = table(passages, documents)
        self._sources_DP = self._targets_PD.T.tocsr()
        self._members_DP = table(np.arange(len(names)), self._document_P).T.tocsr()

    def of(self, passage: int) -> NDArray[np.int64]:
        """The passages that this one is linked with, in either direction, in ascending order, itself left out."""
        own = self._document_P[passage]
        documents = [*_row(self._targets_PD, passage), own]
        found = [_row(self._sources_DP, own), *(_row(self._members_DP, document) for document in documents)]
        linked: NDArray[np.int64] = np.setdiff1d(np.concatenate(found), [passage]).astype(np.int64)
        return linked


def _row(table: Any, row: int) -> NDArray[np.int64]:
    columns: NDArray[np.int64] = table.indices[table.indptr[row] : table.indptr[row + 1]]
    return columns


def _words(text: str) -> Words:
    return tuple(_WORD.findall(composed(text)))


def _runs(words: Sequence[str], longest: int) -> Iterator[Words]:
    """All runs of up to ``longest`` words."""
    for start in range(len(words)):
        for end in range(start + 1, min(start + longest, len(words)) + 1):
            yield tuple(words[start:end])


class Graph:
    """BM25 with one step over links between documents, as GraphRetriever expands its paragraphs (Min et al. 2019).

    The score is BM25's plus ``LINKED_SHARE`` of the best of the ``SEEDS`` first passages that a passage is linked with.
    """

    def __init__(self, bm25: Bm25, links: Links) -> None:
        self._bm25, self._links = bm25, links

    def scores(self, query: str) -> Scores:
        """BM25 and what links add, of every passage, [P]."""
        own_P = self._bm25.scores(query)
        linked_P = np.zeros_like(own_P)
        for seed in top(own_P, SEEDS)[::-1]:  # the best seed has the last word
            linked_P[self._links.of(int(seed))] = own_P[seed]
        return own_P + LINKED_SHARE * linked_P
