"""Candidate passages of a masked sentence: the top results of an index without trivial ones (section 3.4)."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from realmops.corpus.snapshot_reader import Snapshot
from realmops.options import Pretrain
from realmops.search.bm25 import Bm25
from realmops.search.hybrid import HybridSearch
from realmops.train.examples import NULL, Example
from realmops.train.index_source import Index
from realmops.train.wordpieces import contains_run


def retrieval_depth(options: Pretrain) -> int:
    """Return how many passages to retrieve per sentence: some of them are trivial and dropped."""
    return options.documents + 8


class Candidates:
    """Retrieval for training: the top passages of an index, trivial ones excluded."""

    def __init__(self, snapshot: Snapshot, options: Pretrain, bm25: Bm25 | None = None) -> None:
        self.snapshot, self.options, self.bm25 = snapshot, options, bm25
        self.counts = Counter[str]()  # passages that each rule dropped, and examples short of candidates

    def retrieve(self, examples: Sequence[Example], query_BE: Tensor, index: Index) -> list[list[int]]:
        """Return up to ``options.documents`` passage ids for each example, best first.

        Drops the passage of x itself and every passage that contains the unmasked sentence. If too few are left, the
        search is repeated 16 times deeper; a list is shorter than ``options.documents`` only if that is not enough.
        """
        limit = self.options.documents
        search = HybridSearch(index.passages, self.bm25, index.retriever.mixture, index.retriever.scale)
        id_QK = search.search(query_BE, [e.visible_text for e in examples], retrieval_depth(self.options)).id_QK
        result = []
        for row, example in enumerate(examples):
            passages, dropped = self._filter(example, id_QK[row].tolist(), limit)
            if len(passages) < limit and id_QK.shape[1] < len(self.snapshot):
                query_1E = query_BE[row : row + 1]
                deeper_1K = search.search(query_1E, [example.visible_text], 16 * retrieval_depth(self.options)).id_QK
                passages, dropped = self._filter(example, deeper_1K[0].tolist(), limit)
            self.counts.update(dropped)
            self.counts["short"] += len(passages) < limit
            result.append(passages)
        return result

    def shared(self, examples: Sequence[Example], candidates: Sequence[Sequence[int]]) -> list[list[int]]:
        """Extend each example's candidates by those of the whole batch and the passages its sentences are from.

        For a late-interaction reader, which encodes each passage of a batch once in any case. Trivial candidates are
        left out. With ``candidates: 1`` (the null document alone) nothing is added.
        """
        if not self.options.documents:
            return [list(row) for row in candidates]
        pool = sorted({p for row in candidates for p in row} | {e.passage for e in examples if e.passage != NULL})
        result = []
        for example, own in zip(examples, candidates, strict=True):
            own_set = set(own)
            added, dropped = self._filter(example, [p for p in pool if p not in own_set], len(pool))
            self.counts.update(dropped)
            result.append([*own, *added])
        return result

    def _filter(self, example: Example, ids: list[int], limit: int) -> tuple[list[int], Counter[str]]:
        dropped = Counter[str]()
        if not self.options.exclude_trivial:
            return [passage for passage in ids[:limit] if passage >= 0], dropped
        passages: list[int] = []
        for passage in ids:
            if len(passages) == limit or passage < 0:
                break
            if passage == example.passage:
                dropped["dropped_own"] += 1
            elif contains_run(self.snapshot.body(passage), example.original):
                dropped["dropped_containing"] += 1
            else:
                passages.append(passage)
        return passages, dropped
