"""Search without answers: passages by embeddings, words or both, of those documents that a filter lets through.

Shape suffixes: P passages, A passages that a filter lets through, U different metadata, E embedding width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realmops.answering.record import Record, cited
from realmops.artifacts import canonical_json
from realmops.corpus.snapshot import Snapshot
from realmops.index.embed import embed, query_sequences, text_queries
from realmops.index.hybrid import Hybrid
from realmops.index.lexical import STOP_WORDS, WORD, Bm25, split_words, stems
from realmops.index.mips import PassageIndex
from realmops.model.retriever import EMBEDDINGS_ALONE, Retriever

By = Literal["run", "embeddings", "words"]
Where = Mapping[str, Any]
Ids = NDArray[np.int64]
MOST = 1000  # results of one search
DEPTH = 100  # passages that embeddings and words find each, of which the best are taken
RANGES = {"gte": ">=", "gt": ">", "lte": "<=", "lt": "<"}
ID = "document_id"  # can be filtered by beside the documents' own fields
_AT_ONCE = 1 << 14  # passages whose vectors are compared together
_FILTERS = 64  # that are remembered


class Filters:
    """Which passages a filter over the documents' own fields (``extra``) lets through.

    A filter has a condition for each field: a value, a list of which one is enough, or a range as
    ``{"gte": 1990, "lt": 2000}``. A document's field that is a list has each of its values. All conditions must hold.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        texts = np.array(snapshot.column("extra"), dtype=object)
        unique_U, code_P = np.unique(texts, return_inverse=True)
        self._fields_U: list[dict[str, Any]] = [json.loads(text) if text else {} for text in unique_U]
        self._code_P = code_P
        self._snapshot = snapshot
        self._columns: dict[str, dict[Any, Ids]] = {}
        self._known: dict[bytes, Ids] = {}

    def passages(self, filters: Sequence[Where]) -> Ids:
        """The passages that all these filters let through, ascending int64 [A].

        Raises ValueError for what is no condition, and for a field that no document has of those that the filters
        before let through: these may say what somebody is allowed to know of.
        """
        key = canonical_json(list(filters))
        found = self._known.get(key)
        if found is None:
            there_P = np.ones(len(self._code_P), bool)
            for where in filters:
                self._check(where, there_P)
                for field, condition in where.items():
                    there_P = there_P & self._matching(field, condition)
            found = np.flatnonzero(there_P)
            if len(self._known) >= _FILTERS:
                self._known.clear()  # in one step, because other threads ask at the same time
            self._known[key] = found
        return found

    def _check(self, where: Where, there_P: NDArray[np.bool_]) -> None:
        fields = {ID, *(name for code in np.unique(self._code_P[there_P]) for name in self._fields_U[code])}
        for field in where:
            if field not in fields:
                raise ValueError(f"no document has the field {field!r}; there are {', '.join(sorted(fields))}")

    def _matching(self, field: str, condition: Any) -> NDArray[np.bool_]:
        column = self._column(field)
        if isinstance(condition, Mapping):
            wanted = [value for value in column if _in_range(value[1], condition, field)]
        else:
            wanted = [_key(value) for value in (condition if isinstance(condition, list) else [condition])]
        rows = [column[value] for value in wanted if value in column]
        found = np.zeros(len(self._code_P) if field == ID else len(self._fields_U), bool)
        if rows:
            found[np.concatenate(rows)] = True
        return found if field == ID else found[self._code_P]

    def _column(self, field: str) -> dict[Any, Ids]:
        """The rows that have each value of a field: of different metadata, or of passages for the document's id."""
        if field not in self._columns:
            rows: dict[Any, list[int]] = {}
            values = self._snapshot.column(ID) if field == ID else [fields.get(field) for fields in self._fields_U]
            for row, value in enumerate(values):
                for one in value if isinstance(value, list) else [value]:
                    if isinstance(one, str | int | float):
                        rows.setdefault(_key(one), []).append(row)
            self._columns[field] = {value: np.array(found) for value, found in rows.items()}
        return self._columns[field]


def _key(value: Any) -> tuple[bool, Any]:
    """A value as a key: true is not 1."""
    if not isinstance(value, str | int | float):
        raise ValueError(
            f"a filter has the value {value!r}; wanted are texts, numbers, true or false, or a list of them"
        )
    return isinstance(value, bool), value


def _in_range(value: Any, bounds: Mapping[str, Any], field: str) -> bool:
    if not bounds or not set(bounds) <= set(RANGES):
        raise ValueError(
            f"the range of {field} has {', '.join(map(str, bounds)) or 'nothing'}; wanted: {', '.join(RANGES)}"
        )
    for name, bound in bounds.items():
        if isinstance(bound, bool) or not isinstance(bound, str | int | float):
            raise ValueError(f"{name} of {field} is {bound!r}; a number or a text is wanted")
        if isinstance(value, bool) or isinstance(value, str) != isinstance(bound, str):
            return False
        if not {"gte": value >= bound, "gt": value > bound, "lte": value <= bound, "lt": value < bound}[name]:
            return False
    return True


@dataclass(frozen=True, eq=False)
class Search:
    """What finds passages: a retriever with its embeddings, if there is one, and BM25.

    ``about`` says which model, corpus and index these are; queries are embedded up to ``query_wordpieces``.
    """

    snapshot: Snapshot
    words: Bm25
    retriever: Retriever | None
    passages: PassageIndex | None
    query_wordpieces: int
    dtype: torch.dtype
    about: Record

    @cached_property
    def filters(self) -> Filters:
        """Of the corpus; made when first asked for."""
        return Filters(self.snapshot)

    def search(self, query: str, k: int = 10, filters: Sequence[Where] = (), by: By = "run") -> Record:
        """The best ``k`` passages with their places, best first.

        Args:
            filters: what documents must have (:class:`Filters`), applied before the best are chosen.
            by: ``run`` ranks as the run's retriever does, by embeddings or by words and embeddings; ``embeddings`` and
                ``words`` by one of them alone.

        Each passage has ``score``, by which it is ranked, ``embeddings`` (the scaled inner product of the paper's
        equation for f(x, z)), ``words`` (BM25), and ``highlights``: where in its text words of the query stand.

        Raises ValueError for an empty query, a filter that is none, and for embeddings where there are none.
        """
        if not query.strip():
            raise ValueError("the query is empty: give some words")
        try:
            query.encode()
        except UnicodeEncodeError:
            raise ValueError("the query holds half a surrogate pair; write it whole") from None
        if not 1 <= k <= MOST:
            raise ValueError(f"k is {k}; 1 to {MOST} passages can be had")
        if by == "embeddings" and self.retriever is None:
            raise ValueError("there are no embeddings yet: run the stage ict, or search by words")
        allowed = self.filters.passages(filters) if any(filters) else None
        ids, score, dense = self._best(query, k, allowed, by)
        bm25 = self.words.score_of(query, ids).tolist()
        shown = [
            self._shown(*each, wanted=stems_of(query)) for each in zip(ids.tolist(), score, dense, bm25, strict=True)
        ]
        return {"query": query, "passages": shown, "model": self.about}

    def embed(self, texts: Sequence[str], *, documents: bool = False) -> Tensor:
        """Embeddings of texts [N, E] (fp32): as queries, or as passages without a title, each with one vector."""
        if self.retriever is None:
            raise ValueError("there are no embeddings yet: run the stage ict")
        limit = self.snapshot.block_wordpieces if documents else self.query_wordpieces
        tower = self.retriever.document if documents else self.retriever.query
        return embed(tower, query_sequences(text_queries(self.snapshot, texts, limit)), self.dtype)

    def _best(self, query: str, k: int, allowed: Ids | None, by: By) -> tuple[Ids, list[float], list[float | None]]:
        """Passages, scores and scaled inner products, best first."""
        if by == "words" or self.retriever is None or self.passages is None:
            return self._best_by_words(query, k, allowed)
        mixture = EMBEDDINGS_ALONE if by == "embeddings" else self.retriever.mixture
        query_E = self.embed([query])
        if allowed is None:
            hybrid = Hybrid(self.passages, self.words, mixture, self.retriever.scale)
            hits = hybrid.search(query_E, [query], k, max(k, DEPTH) if mixture.lexical else k)
            there = hits.id_QK[0] >= 0
            ids, dense = hits.id_QK[0][there].numpy(), hits.dense_QK[0][there]
            return ids, hits.relevance(mixture)[0][there].tolist(), dense.tolist()
        dense = self.retriever.scale * self._inner_products(query_E, allowed)
        share = torch.zeros(len(allowed))
        if mixture.lexical and len(allowed):
            words = self.words.score_of(query, allowed)  # the best that is allowed counts 1: nothing tells of others
            share = torch.from_numpy(words / max(float(words.max()), 1e-6))
        score = mixture.of(dense, share)
        order = torch.argsort(score, descending=True, stable=True)[:k]
        return allowed[order.numpy()], score[order].tolist(), dense[order].tolist()

    def _best_by_words(self, query: str, k: int, allowed: Ids | None) -> tuple[Ids, list[float], list[float | None]]:
        if allowed is None:
            score_QK, id_QK = self.words.search([query], k)
            there = id_QK[0] >= 0
            return id_QK[0][there], score_QK[0][there].tolist(), [None] * int(there.sum())
        score_A = self.words.score_of(query, allowed)
        order = np.argsort(-score_A, kind="stable")[:k]
        order = order[score_A[order] > 0]
        return allowed[order], score_A[order].tolist(), [None] * len(order)

    def _inner_products(self, query_1E: Tensor, ids: Ids) -> Tensor:
        """That of the query with the nearest vector of each passage, [A], on the CPU."""
        assert self.passages is not None
        found = []
        for first in range(0, len(ids), _AT_ONCE):
            some = torch.from_numpy(ids[first : first + _AT_ONCE])
            vectors = self.passages.vectors(some).float().view(len(some), -1, query_1E.shape[1])
            found.append((vectors @ query_1E[0].to(vectors.device)).amax(-1).cpu())
        return torch.cat(found) if found else torch.empty(0)

    def _shown(self, passage: int, score: float, dense: float | None, bm25: float, *, wanted: set[str]) -> Record:
        text = self.snapshot.text(passage)
        place = cited(self.snapshot, passage, (0, len(text)))
        del place["quote"]
        found = {"score": score, "embeddings": dense, "words": bm25, "highlights": list(highlights(text, wanted))}
        return {**place, "text": text, "extra": self.snapshot.extra(passage), **found}


def highlights(text: str, wanted: set[str]) -> Iterator[tuple[int, int]]:
    """Where words of a text stand whose stem is wanted: characters."""
    places = [match.span() for match in WORD.finditer(text)]
    for (start, end), stem in zip(places, stems([text[start:end].lower() for start, end in places]), strict=True):
        if stem in wanted:
            yield start, end


def stems_of(query: str) -> set[str]:
    """The stems of a query's words, without words that stand everywhere: what ``highlights`` marks."""
    return set(stems([word for word in split_words(query) if word not in STOP_WORDS]))
