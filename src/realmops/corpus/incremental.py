"""Reuse of passages from an earlier snapshot: unchanged documents are not cut and tokenised again."""

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from realmops.corpus.npy_files import load_npy
from realmops.corpus.passages import Passage, PassageBatch, passage_digest, text_digest
from realmops.corpus.snapshot_reader import DOCUMENTS, Snapshot, map_texts
from realmops.readers.documents import Document

# Shape legend: D documents of the earlier snapshot, P its passages.

Cut = Callable[[Sequence[Document]], PassageBatch]
# document, chars and digest of a ``Passage``; then its wordpieces, their chars, its sentences
_Row = tuple[int, tuple[int, int], str, NDArray[Any], NDArray[Any], NDArray[Any]]


class EarlierSnapshot:
    """An earlier snapshot with the same tokenizer and settings; a document is found by digest of title and text."""

    def __init__(self, folder: Path) -> None:
        self._snapshot = Snapshot.open(folder, verify=False)
        digest_D2 = load_npy(folder / DOCUMENTS)
        self._order_D = np.lexsort((digest_D2[:, 1], digest_D2[:, 0]))
        self._digest_D2 = digest_D2[self._order_D]
        self._first_D = np.searchsorted(self._snapshot.places[:, 0], np.arange(len(digest_D2) + 1))
        self._length_P = pc.utf8_length(map_texts(folder).column("text")).to_numpy()

    def cut(self, documents: Sequence[Document], cut: Cut) -> PassageBatch:
        """Return the passages of documents, calling ``cut`` only for documents that the earlier snapshot lacks."""
        digests = [text_digest(document.title, document.text) for document in documents]
        numbers = self._numbers(digests)
        fresh = cut([document for document, number in zip(documents, numbers, strict=True) if number < 0])
        fresh_passages = {index: list(group) for index, group in groupby(fresh.passages, lambda p: p.document)}
        old, new = self._snapshot, 0
        rows: list[_Row] = []
        titles: list[list[int]] = []
        languages: list[str] = []
        for index, (document, number) in enumerate(zip(documents, numbers, strict=True)):
            if number < 0:
                for passage in fresh_passages.get(new, ()):
                    tokens, sentences = slice(*passage.tokens), slice(*passage.sentences)
                    arrays = fresh.ids[tokens], fresh.chars[tokens], fresh.sentences[sentences]
                    rows.append((index, passage.chars, passage.digest, *arrays))
                titles.append(fresh.titles[new])
                languages.append(fresh.languages[new])
                new += 1
                continue
            first, end = self._first_D[number], self._first_D[number + 1]
            for row in range(first, end):
                chars = old.start(row), old.start(row) + int(self._length_P[row])
                digest = passage_digest(document.title, document.text[slice(*chars)])
                rows.append((index, chars, digest, old.body(row), old.chars(row), old.sentences(row)))
            titles.append(old.title_tokens(first).tolist())
            languages.append(old.language_of(first))
        return _batch(rows, titles, languages, digests)

    def _numbers(self, digests: Sequence[bytes]) -> list[int]:
        """Return the number of each document in the earlier snapshot, -1 if it is missing there."""
        query_N2 = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        index_N = np.searchsorted(self._digest_D2[:, 0], query_N2[:, 0]).clip(max=len(self._digest_D2) - 1)
        is_equal_N = (self._digest_D2[index_N] == query_N2).all(axis=1)
        numbers: list[int] = np.where(is_equal_N, self._order_D[index_N], -1).tolist()
        return numbers


def _batch(rows: Sequence[_Row], titles: list[list[int]], languages: list[str], digests: list[bytes]) -> PassageBatch:
    def flat(column: int, *width: int) -> NDArray[np.int32]:
        return np.concatenate([np.empty((0, *width), np.int32), *(row[column] for row in rows)], dtype=np.int32)

    tokens = pairwise(accumulate((len(row[3]) for row in rows), initial=0))
    sentences = pairwise(accumulate((len(row[5]) for row in rows), initial=0))
    passages = [
        Passage(document, chars, *bounds, digest)
        for (document, chars, digest, *_), bounds in zip(rows, zip(sentences, tokens, strict=True), strict=True)
    ]
    return PassageBatch(passages, flat(3), flat(4, 2), flat(5, 2), titles, languages, digests)
