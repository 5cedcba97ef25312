"""Search without answers: passages by embeddings, words or both, of those documents that a filter lets through.

Shape suffixes: P passages, A passages that a filter lets through, U different metadata, V values of a field,
N places of a value, E embedding width.
"""

import dataclasses
import json
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realmops.answering.answer import InvalidRequest
from realmops.answering.record import Record, passage_record
from realmops.artifacts import canonical_json
from realmops.corpus.snapshot_reader import Snapshot, fields_of
from realmops.model.retriever import EMBEDDINGS_ALONE, Retriever
from realmops.search.bm25 import STOP_WORDS, Bm25, placed_words, split_words, stem, stems
from realmops.search.embed import embed, query_sequences, text_queries
from realmops.search.exact import PassageIndex
from realmops.search.hybrid import Hybrid
from realmops.text.languages import ENGLISH, languages

By = Literal["run", "embeddings", "words"]
Where = Mapping[str, Any]
Wanted = Mapping[str, Collection[str]]  # stems by language
Ids = NDArray[np.int64]
MOST = 1000  # results of one search
DEPTH = 100  # passages that embeddings and words find each, of which the best are taken
RANGES: dict[str, Callable[[Any, Any], bool]] = {
    "gte": operator.ge, "gt": operator.gt, "lte": operator.le, "lt": operator.lt
}  # fmt: skip
KINDS = {"true or false": "it, without quotes", "text": "a text, in quotes", "number": "a number, without quotes"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)  # as in JSON: 007 is a name
_SHOWN = 60  # characters of a value in a message
ID = "document_id"  # can be filtered by beside the documents' own fields
NO_EMBEDDINGS = (
    "there are no embeddings: the stage ict has not run, or finetune.retriever is bm25, tfidf, graph or path; "
    "search by words"
)
_AT_ONCE = 1 << 14  # passages whose vectors are compared together
_FILTERS = 64  # that are remembered, with
_REMEMBERED = 1 << 24  # passages in all


class Filters:
    """Which passages a filter over the documents' own fields (``extra``) lets through.

    A filter has a condition for each field: a value, a list of which one is enough, or a range as
    ``{"gte": 1990, "lt": 2000}``. A document's field that is a list has each of its values. All conditions must hold.
    A number is compared with numbers, and with texts that are one as JSON writes it (fields of a CSV file are texts);
    texts are compared with texts alone. Several threads may ask; the fields are read when the first does.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._lock = Lock()
        self._coded = lru_cache(2)(snapshot.coded)
        self._columns: dict[str, _Column] = {}
        self._known: dict[bytes, Ids] = {}

    def passages(self, filters: Sequence[Where]) -> Ids:
        """The passages that all these filters let through, ascending int64 [A].

        Raises InvalidRequest for what is no condition, and where of the documents that the filters before let through
        none has the field, or none has a value there that the condition can be compared with.
        """
        for where in filters:
            check_filter(where)
        try:
            key = canonical_json([*filters])
        except UnicodeEncodeError:
            raise InvalidRequest("a filter holds half a surrogate pair; write it whole") from None
        with self._lock:
            if key not in self._known:
                there_P = np.ones(len(self._snapshot), bool)
                for where in filters:
                    self._check_fields(where, there_P)
                    for field, condition in where.items():
                        there_P = there_P & self._matching(field, condition)
                self._known[key] = np.flatnonzero(there_P)
            found = self._known[key] = self._known.pop(key)  # the last one that was asked for comes last
            while sum(map(len, self._known.values())) > _REMEMBERED or len(self._known) > _FILTERS:
                self._known.pop(next(iter(self._known)))
            return found

    @cached_property
    def _extra(self) -> tuple[list[dict[str, Any]], NDArray[np.int32]]:
        """All different metadata [U], and which of them each passage has [P]."""
        text_U, code_P = self._coded("extra")
        return [fields_of(text) for text in text_U], code_P

    def _check_fields(self, where: Where, there_P: NDArray[np.bool_]) -> None:
        if not where:
            return
        fields_U, code_P = self._extra
        fields = {ID, *(name for code in np.unique(code_P[there_P]) for name in fields_U[code])}
        for field in where:
            if field not in fields:
                raise InvalidRequest(f"no document has the field {field!r}; there are {', '.join(sorted(fields))}")
        for field, condition in where.items():
            column, has_U = self._column(field), np.zeros(len(self._coded(ID if field == ID else "extra")[0]), bool)
            has_U[self._codes(field)[there_P]] = True
            values = [column.values[n] for n in np.unique(column.number_N[has_U[column.row_N]])]
            _check_kinds(field, condition, values)

    def _codes(self, field: str) -> NDArray[np.int32]:
        return self._coded(ID)[1] if field == ID else self._extra[1]

    def _matching(self, field: str, condition: Any) -> NDArray[np.bool_]:
        code_P, column = self._codes(field), self._column(field)
        wanted_V, found_U = np.zeros(len(column.values), bool), np.zeros(code_P.max(initial=-1) + 1, bool)
        wanted_V[column.matching(condition)] = True
        found_U[column.row_N[wanted_V[column.number_N]]] = True
        matching: NDArray[np.bool_] = found_U[code_P]
        return matching

    def _column(self, field: str) -> "_Column":
        if field not in self._columns:
            values = self._coded(ID)[0] if field == ID else [one.get(field) for one in self._extra[0]]
            number_of: dict[Any, int] = {}
            rows = [
                (row, number_of.setdefault(_key(one), len(number_of)))
                for row, value in enumerate(values)
                for one in (value if isinstance(value, list) else [value])
                if _is_value(one)
            ]
            self._columns[field] = _Column(number_of, *np.array(rows, np.int64).reshape(-1, 2).T)
        return self._columns[field]


@dataclasses.dataclass(frozen=True, eq=False)
class _Column:
    """The different values of a field.

    ``number_of`` has the number of each [V], by ``_key``; ``number_N`` has metadata ``row_N`` (of the document's id:
    the id of that number).
    """

    number_of: dict[tuple[bool, Any], int]
    row_N: NDArray[np.int64]
    number_N: NDArray[np.int64]

    @cached_property
    def values(self) -> list[Any]:
        return [value for _, value in self.number_of]

    @cached_property
    def _as_number(self) -> list[float | None]:
        return [_number(value) for value in self.values]

    @cached_property
    def _equal_to(self) -> dict[float, list[int]]:
        """The values that are each number, as a number or as a text."""
        found: dict[float, list[int]] = {}
        for n, number in enumerate(self._as_number):
            if number is not None:
                found.setdefault(number, []).append(n)
        return found

    def matching(self, condition: Any) -> list[int]:
        """Return the numbers of the values that a condition lets through; a text that is a number counts as both."""
        if isinstance(condition, Mapping):
            passing = [*range(len(self.values))]
            for name, bound in condition.items():
                kind, holds = _kind(bound), RANGES[name]
                values = self._as_number if kind == "number" else self.values
                passing = [n for n in passing if _kind(values[n]) == kind and holds(values[n], bound)]
            return passing
        found = []
        for value in condition if isinstance(condition, list) else [condition]:
            if _kind(value) == "number":
                found += self._equal_to.get(value, [])
            elif (key := _key(value)) in self.number_of:
                found.append(self.number_of[key])
        return found


def check_filter(where: Where) -> None:
    """InvalidRequest for what is no condition, whatever documents there are."""
    for field, condition in where.items():
        if not isinstance(condition, Mapping):
            for value in condition if isinstance(condition, list) else [condition]:
                _key(value)
            continue
        if not condition or not set(condition) <= set(RANGES):
            has = ", ".join(map(str, condition)) or "nothing"
            raise InvalidRequest(f"the range of {field} has {has}; wanted: {', '.join(RANGES)}")
        for name, bound in condition.items():
            if isinstance(bound, bool) or not _is_value(bound):
                raise InvalidRequest(f"{name} of {field} is {bound!r}; a number or a text is wanted")


def _key(value: Any) -> tuple[bool, Any]:
    """A value as a key: true is not 1."""
    if not _is_value(value):
        raise InvalidRequest(
            f"a filter has the value {value!r}; wanted are texts, numbers, true or false, or a list of them"
        )
    return isinstance(value, bool), value


def _is_value(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _kind(value: Any) -> str:
    """The key of ``KINDS`` for a value; "" for None."""
    if isinstance(value, bool | str):
        return "text" if isinstance(value, str) else "true or false"
    return "number" if value is not None else ""


def _number(value: Any) -> float | None:
    """A number, or the finite one that a text is; an int where it is whole."""
    if not isinstance(value, str):
        return None if isinstance(value, bool) else value
    text = value.strip()
    if not _NUMBER.fullmatch(text) or not math.isfinite(number := float(text)):
        return None
    return int(text) if text.lstrip("-").isdigit() else number


def _check_kinds(field: str, condition: Any, values: Sequence[Any]) -> None:
    """InvalidRequest where none of a field's values can be compared with a bound of a range, or with any of a list."""
    is_range = isinstance(condition, Mapping)
    asked = [*condition.values()] if is_range else condition if isinstance(condition, list) else [condition]
    unfit = [one for one in asked if not any(_kind(one) in (_kind(v), _kind(_number(v))) for v in values)]
    if not values or not unfit or (not is_range and len(unfit) < len(asked)):
        return
    bound, example = (json.dumps(one, ensure_ascii=False)[:_SHOWN] for one in (unfit[0], values[0]))
    raise InvalidRequest(
        f"the field {field} has no {_kind(unfit[0])} to compare with {bound}: it has {example}, for example; "
        f"compare with {KINDS[_kind(values[0])]}"
    )


@dataclasses.dataclass(frozen=True, eq=False)
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
    held: Any = None  # what must live as long, as a folder of downloaded files
    filters: Filters = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "filters", Filters(self.snapshot))

    def search(self, query: str, k: int = 10, filters: Sequence[Where] = (), by: By = "run") -> Record:
        """The best ``k`` passages with their places, best first.

        Args:
            filters: what documents must have (:class:`Filters`), applied before the best are chosen.
            by: ``run`` ranks as the run's retriever does, by embeddings or by words and embeddings; ``embeddings`` and
                ``words`` by one of them alone.

        Each passage has ``score``, by which it is ranked, ``embeddings`` (the scaled inner product of the paper's
        equation for f(x, z)), ``words`` (BM25), and ``highlights``: where in its text words of the query stand.

        Raises InvalidRequest for an empty query, a filter that is none, and for embeddings where there are none.
        """
        if not query.strip():
            raise InvalidRequest("the query is empty: give some words")
        try:
            query.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the query holds half a surrogate pair; write it whole") from None
        if not 1 <= k <= MOST:
            raise InvalidRequest(f"k is {k}; 1 to {MOST} passages can be had")
        if by == "embeddings" and self.retriever is None:
            raise InvalidRequest(NO_EMBEDDINGS)
        allowed = self.filters.passages(filters) if any(filters) else None
        ids, score, dense = self._best(query, k, allowed, by)
        bm25, wanted = self.words.score_of(query, ids).tolist(), stems_of(query, self.words.spoken(query))
        shown = [self._shown(*each, wanted=wanted) for each in zip(ids.tolist(), score, dense, bm25, strict=True)]
        return {"query": query, "passages": shown, "model": self.about}

    def embed(self, texts: Sequence[str], *, documents: bool = False) -> Tensor:
        """Embeddings of texts [N, E] (fp32): as queries, or as passages without a title, each with one vector."""
        if self.retriever is None:
            raise InvalidRequest(NO_EMBEDDINGS)
        limit = self.snapshot.block_wordpieces if documents else self.query_wordpieces
        tower = self.retriever.document if documents else self.retriever.query
        return embed(tower, query_sequences(text_queries(self.snapshot, texts, limit, documents=documents)), self.dtype)

    def _best(self, query: str, k: int, allowed: Ids | None, by: By) -> tuple[Ids, list[float], list[float | None]]:
        """Passages, scores and scaled inner products, best first."""
        if by == "words" or self.retriever is None or self.passages is None:
            return _best_by_words(query, k, allowed, self.words)
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
            score_A = self.words.score_of(query, allowed)  # the best that is allowed counts 1
            share = torch.from_numpy(score_A / max(float(score_A.max()), 1e-6))
        score = mixture.of(dense, share)
        order = torch.argsort(score, descending=True, stable=True)[:k]
        return allowed[order.numpy()], score[order].tolist(), dense[order].tolist()

    def _inner_products(self, query_1E: Tensor, ids: Ids) -> Tensor:
        """That of the query with the nearest vector of each passage, [A], on the CPU."""
        assert self.passages is not None
        found = []
        for first in range(0, len(ids), _AT_ONCE):
            some = torch.from_numpy(ids[first : first + _AT_ONCE])
            vectors = self.passages.vectors(some).float().view(len(some), -1, query_1E.shape[1])
            found.append((vectors @ query_1E[0].to(vectors.device)).amax(-1).cpu())
        return torch.cat(found) if found else torch.empty(0)

    def _shown(self, passage: int, score: float, dense: float | None, bm25: float, *, wanted: Wanted) -> Record:
        place = passage_record(self.snapshot, passage)
        found = {"score": score, "embeddings": dense, "words": bm25, "highlights": highlights(place["text"], wanted)}
        return {**place, "extra": self.snapshot.extra(passage), **found}


def _best_by_words(query: str, k: int, allowed: Ids | None, words: Bm25) -> tuple[Ids, list[float], list[float | None]]:
    if allowed is None:
        score_QK, id_QK = words.search([query], k)
        there = id_QK[0] >= 0
        return id_QK[0][there], score_QK[0][there].tolist(), [None] * int(there.sum())
    score_A = words.score_of(query, allowed)
    order = np.argsort(-score_A, kind="stable")[:k]
    order = order[score_A[order] > 0]
    return allowed[order], score_A[order].tolist(), [None] * len(order)


def highlights(text: str, wanted: Wanted) -> list[tuple[int, int]]:
    """Where words of a text stand whose stem is wanted in a language: characters; pairs that overlap are one place."""
    found = {
        (start, end)
        for language, some in wanted.items()
        for word, start, end in placed_words(text, language)
        if stem(word, language) in some
    }
    places: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if places and start < places[-1][1]:
            places[-1] = places[-1][0], max(end, places[-1][1])
        else:
            places.append((start, end))
    return places


def stems_of(query: str, spoken: Sequence[str]) -> Wanted:
    """The stems of a query's words in languages, without words that stand everywhere: what ``highlights`` marks."""
    stop = {code: STOP_WORDS if code == ENGLISH else languages()[code].stop for code in spoken}
    return {
        code: {*stems([word for word in split_words(query, code) if word not in stop[code]], code)} for code in spoken
    }
