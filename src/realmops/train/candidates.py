"""Which passages a masked sentence is read with: the top ones of an index, trivial ones left out (section 3.4)."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from realmops.config import Pretrain
from realmops.corpus.snapshot_reader import Snapshot
from realmops.search.bm25 import Bm25
from realmops.search.hybrid import Hybrid
from realmops.text.wordpieces import contains
from realmops.train.examples import NULL, Example
from realmops.train.index_source import Index


def depth(options: Pretrain) -> int:
    """How many passages are asked for, of which some are trivial."""
    return options.documents + 8


class Candidates:
    """Retrieval for training: the top passages of an index, trivial ones excluded."""

    def __init__(self, snapshot: Snapshot, options: Pretrain, words: Bm25 | None = None) -> None:
        self.snapshot, self.options, self.words = snapshot, options, words
        self.counts = Counter[str]()  # passages that each rule dropped, and examples short of candidates

    def retrieve(self, examples: Sequence[Example], query_BE: Tensor, index: Index) -> list[list[int]]:
        """Passage ids for each example, best first; fewer than wanted where a search 16 times deeper has no more.

        Dropped are the passage of x itself and every passage that contains the unmasked sentence.
        """
        wanted = self.options.documents
        search = Hybrid(index.passages, self.words, index.retriever.mixture, index.retriever.scale)
        ids = search.search(query_BE, [e.words for e in examples], depth(self.options)).id_QK
        result = []
        for row, example in enumerate(examples):
            kept, dropped = self._keep(example, ids[row].tolist(), wanted)
            if len(kept) < wanted and ids.shape[1] < len(self.snapshot):
                more = search.search(query_BE[row : row + 1], [example.words], 16 * depth(self.options)).id_QK
                kept, dropped = self._keep(example, more[0].tolist(), wanted)
            self.counts.update(dropped)
            self.counts["short"] += len(kept) < wanted
            result.append(kept)
        return result

    def shared(self, examples: Sequence[Example], found: Sequence[Sequence[int]]) -> list[list[int]]:
        """Each example's own candidates, and behind them what was found for the others and the passages they are from.

        A reader that reads sentences and passages apart has read them all in any case.  Trivial ones are left out.
        Where no passage is wanted (``candidates: 1``, the null document alone) there are none of others either.
        """
        if not self.options.documents:
            return [list(row) for row in found]
        pool = sorted({p for row in found for p in row} | {e.passage for e in examples if e.passage != NULL})
        result = []
        for example, own in zip(examples, found, strict=True):
            known = set(own)
            others, dropped = self._keep(example, [p for p in pool if p not in known], len(pool))
            self.counts.update(dropped)
            result.append([*own, *others])
        return result

    def _keep(self, example: Example, ids: list[int], wanted: int) -> tuple[list[int], Counter[str]]:
        dropped = Counter[str]()
        if not self.options.exclude_trivial:
            return [passage for passage in ids[:wanted] if passage >= 0], dropped
        kept: list[int] = []
        for passage in ids:
            if len(kept) == wanted or passage < 0:
                break
            if passage == example.passage:
                dropped["dropped_own"] += 1
            elif contains(self.snapshot.body(passage), example.original):
                dropped["dropped_containing"] += 1
            else:
                kept.append(passage)
        return kept, dropped
