"""Documents that an earlier snapshot has, whose passages are taken from there: they are not cut and tokenised again."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from realmops.corpus.documents import Document
from realmops.corpus.passages import Passage, PassageBatch, passage_digest, text_digest
from realmops.corpus.snapshot_reader import DOCUMENTS, Snapshot, map_texts
from realmops.text.flat import load_flat

# Shape legend: D documents of the earlier snapshot, P its passages.

Cut = Callable[[Sequence[Document]], PassageBatch]


class Earlier:
    """An earlier snapshot of the same tokenizer and the same settings; its texts are those of the new one's documents.

    A document is known by the digest of its title and its text.
    """

    def __init__(self, folder: Path) -> None:
        self._snapshot = Snapshot.open(folder, verify=False)
        digest_D2 = load_flat(folder / DOCUMENTS)
        self._order_D = np.lexsort((digest_D2[:, 1], digest_D2[:, 0]))
        self._digest_D2 = digest_D2[self._order_D]
        self._first_D = np.searchsorted(self._snapshot.places[:, 0], np.arange(len(digest_D2) + 1))
        self._length_P = pc.utf8_length(map_texts(folder).column("text")).to_numpy()

    def cut(self, documents: Sequence[Document], cut: Cut) -> PassageBatch:
        """What ``cut`` makes of the documents; it is asked for those alone that are not known."""
        digests = [text_digest(one.title, one.text) for one in documents]
        found = self._numbers(digests)
        fresh = cut([one for one, number in zip(documents, found, strict=True) if number < 0])
        of_fresh = {index: list(some) for index, some in groupby(fresh.passages, lambda one: one.document)}
        made, old, new = _Growing(), self._snapshot, 0
        for index, (document, number) in enumerate(zip(documents, found, strict=True)):
            if number < 0:
                for one in of_fresh.get(new, ()):
                    rows = fresh.ids[slice(*one.tokens)], fresh.chars[slice(*one.tokens)]
                    made.add(index, one.chars, one.digest, *rows, fresh.sentences[slice(*one.sentences)])
                made.titles.append(fresh.titles[new])
                made.languages.append(fresh.languages[new])
                new += 1
                continue
            first, end = self._first_D[number], self._first_D[number + 1]
            for row in range(first, end):
                chars = old.start(row), old.start(row) + int(self._length_P[row])
                digest = passage_digest(document.title, document.text[slice(*chars)])
                made.add(index, chars, digest, old.body(row).astype(np.int32), old.chars(row), old.sentences(row))
            made.titles.append(old.title_tokens(first).tolist())
            made.languages.append(old.language_of(first))
        return made.batch(digests)

    def _numbers(self, digests: Sequence[bytes]) -> list[int]:
        """The number of each document here, -1 where it is not known."""
        wanted_N2 = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        at_N = np.searchsorted(self._digest_D2[:, 0], wanted_N2[:, 0]).clip(max=len(self._digest_D2) - 1)
        same_N = (self._digest_D2[at_N] == wanted_N2).all(axis=1)
        numbers: list[int] = np.where(same_N, self._order_D[at_N], -1).tolist()
        return numbers


class _Growing:
    """A batch passage by passage."""

    def __init__(self) -> None:
        self.titles: list[list[int]] = []
        self.languages: list[str] = []
        self._passages: list[Passage] = []
        self._rows: tuple[list[NDArray[np.int32]], ...] = ([], [], [])
        self._tokens = self._sentences = 0

    def add(self, document: int, chars: tuple[int, int], digest: str, *rows: NDArray[np.int32]) -> None:
        """``rows`` are a passage's wordpieces, their characters and its sentences, as ``PassageBatch`` has them."""
        ends = self._sentences + len(rows[2]), self._tokens + len(rows[0])
        self._passages.append(Passage(document, chars, (self._sentences, ends[0]), (self._tokens, ends[1]), digest))
        self._sentences, self._tokens = ends
        for flat, some in zip(self._rows, rows, strict=True):
            flat.append(some)

    def batch(self, digests: list[bytes]) -> PassageBatch:
        ids, chars, sentences = (
            np.concatenate([np.empty(shape, np.int32), *some], dtype=np.int32)
            for shape, some in zip(((0,), (0, 2), (0, 2)), self._rows, strict=True)
        )
        return PassageBatch(self._passages, ids, chars, sentences, self.titles, self.languages, digests)
