"""Passage search by embeddings, BM25 or both, restricted by filters on the documents' metadata.

Shape suffixes: P passages, A passages that pass the filters, U distinct metadata records, V distinct values of a field,
N pairs of a record and a value, E embedding width.
"""

import dataclasses
import json
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from realmops.corpus.languages import ENGLISH, load_languages
from realmops.corpus.snapshot_reader import Snapshot, parse_extra
from realmops.model.retriever import DENSE_ONLY, FusionWeights, Retriever
from realmops.search.bm25 import STOP_WORDS, Bm25, split_words, stem, stems, words_with_offsets
from realmops.search.embed import embed, query_sequences, text_queries
from realmops.search.exact import PassageIndex
from realmops.search.hybrid import HybridSearch

RankBy = Literal["run", "embeddings", "words"]
Where = Mapping[str, Any]
StemsByLanguage = Mapping[str, Collection[str]]  # stems by language
Ids = NDArray[np.int64]
MAX_RESULTS = 1000  # results of a search
DEPTH = 100  # candidates from embeddings and from BM25 each, before fusion
RANGES: dict[str, Callable[[Any, Any], bool]] = {
    "gte": operator.ge, "gt": operator.gt, "lte": operator.le, "lt": operator.lt
}  # fmt: skip
KINDS = {"boolean": "unquoted true or false", "string": "a quoted string", "number": "an unquoted number"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)  # as in JSON, so that 007 is a string
_MESSAGE_CHARACTERS = 60  # of a value in an error message
DOCUMENT_ID = "document_id"  # filterable in addition to the metadata fields
NO_EMBEDDINGS = (
    "there are no embeddings: the stage ict has not run, or finetune.retriever is bm25, tfidf, graph or path; "
    "search by words"
)
_BATCH = 1 << 14  # passages per matrix product
_CONTEXT = 90  # characters shown on either side of a match
_CACHED_FILTERS = 64
_CACHED_PASSAGES = 1 << 24  # of all cached filters together


class MetadataFilters:
    """Metadata filters: which passages satisfy conditions on the fields of their documents (``extra``).

    A filter maps fields to conditions, all of which must hold: a value, a list of alternatives, or a range such as
    ``{"gte": 1990, "lt": 2000}``. A field whose value is a list matches by any of its items. A number is compared with
    numbers, and with strings that are a JSON number (all CSV fields are strings); a string only with strings. Instances
    are thread-safe, and load the fields on first use.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._lock = Lock()
        self._coded = lru_cache(2)(snapshot.dictionary_encode)
        self._columns: dict[str, _Column] = {}
        self._cache: dict[bytes, Ids] = {}  # in order of last use

    def passages(self, filters: Sequence[Where]) -> Ids:
        """Return the passages that satisfy all filters, ascending int64 [A].

        Raises:
            InvalidRequest: a condition is malformed, or none of the documents that passed the previous filters has the
                field, or a value of a type that the condition can be compared with.
        """
        for where in filters:
            check_filter(where)
        try:
            key = canonical_json([*filters])
        except UnicodeEncodeError:
            raise InvalidRequest("a filter contains an unpaired surrogate; send valid Unicode") from None
        with self._lock:
            if key not in self._cache:
                passes_P = np.ones(len(self._snapshot), bool)
                for where in filters:
                    self._check_fields(where, passes_P)
                    for field, condition in where.items():
                        passes_P = passes_P & self._matching(field, condition)
                self._cache[key] = np.flatnonzero(passes_P)
            ids = self._cache[key] = self._cache.pop(key)  # the most recently used is last
            while sum(map(len, self._cache.values())) > _CACHED_PASSAGES or len(self._cache) > _CACHED_FILTERS:
                self._cache.pop(next(iter(self._cache)))
            return ids

    @cached_property
    def _extra(self) -> tuple[list[dict[str, Any]], NDArray[np.int32]]:
        """Distinct metadata records [U], and the record of each passage [P]."""
        text_U, code_P = self._coded("extra")
        return [parse_extra(text) for text in text_U], code_P

    def _check_fields(self, where: Where, passes_P: NDArray[np.bool_]) -> None:
        if not where:
            return
        fields_U, code_P = self._extra
        fields = {DOCUMENT_ID, *(name for code in np.unique(code_P[passes_P]) for name in fields_U[code])}
        for field in where:
            if field not in fields:
                raise InvalidRequest(f"no document has the field {field!r}; available: {', '.join(sorted(fields))}")
        for field, condition in where.items():
            column, code_P = self._column(field), self._codes(field)
            has_U = np.zeros(code_P.max(initial=-1) + 1, bool)
            has_U[code_P[passes_P]] = True
            values = [column.values[n] for n in np.unique(column.number_N[has_U[column.row_N]])]
            _check_kinds(field, condition, values)

    def _codes(self, field: str) -> NDArray[np.int32]:
        return self._coded(DOCUMENT_ID)[1] if field == DOCUMENT_ID else self._extra[1]

    def _matching(self, field: str, condition: Any) -> NDArray[np.bool_]:
        code_P, column = self._codes(field), self._column(field)
        passes_V, passes_U = np.zeros(len(column.values), bool), np.zeros(code_P.max(initial=-1) + 1, bool)
        passes_V[column.matching(condition)] = True
        passes_U[column.row_N[passes_V[column.number_N]]] = True
        matching: NDArray[np.bool_] = passes_U[code_P]
        return matching

    def _column(self, field: str) -> "_Column":
        if field not in self._columns:
            values = (
                self._coded(DOCUMENT_ID)[0]
                if field == DOCUMENT_ID
                else [fields.get(field) for fields in self._extra[0]]
            )
            number_of: dict[Any, int] = {}
            rows = [
                (row, number_of.setdefault(_key(item), len(number_of)))
                for row, value in enumerate(values)
                for item in (value if isinstance(value, list) else [value])
                if _is_value(item)
            ]
            self._columns[field] = _Column(number_of, *np.array(rows, np.int64).reshape(-1, 2).T)
        return self._columns[field]


@dataclasses.dataclass(frozen=True, eq=False)
class _Column:
    """Distinct values of a field, as an inverted index.

    ``number_of`` numbers the values [V] by ``_key``. Metadata record ``row_N`` has value ``number_N``; for the field
    ``document_id`` a record is a document.
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
        """Numbers of the values equal to each number, as a number or as a string."""
        by_number: dict[float, list[int]] = {}
        for n, number in enumerate(self._as_number):
            if number is not None:
                by_number.setdefault(number, []).append(n)
        return by_number

    def matching(self, condition: Any) -> list[int]:
        """Return the numbers of the values that satisfy a condition; a numeric string counts as both types."""
        if isinstance(condition, Mapping):
            passing = [*range(len(self.values))]
            for name, bound in condition.items():
                kind, holds = _kind(bound), RANGES[name]
                values = self._as_number if kind == "number" else self.values
                passing = [n for n in passing if _kind(values[n]) == kind and holds(values[n], bound)]
            return passing
        passing = []
        for value in condition if isinstance(condition, list) else [condition]:
            if _kind(value) == "number":
                passing += self._equal_to.get(value, [])
            elif (key := _key(value)) in self.number_of:
                passing.append(self.number_of[key])
        return passing


def check_filter(where: Where) -> None:
    for field, condition in where.items():
        if not isinstance(condition, Mapping):
            for value in condition if isinstance(condition, list) else [condition]:
                _key(value)
            continue
        if not condition or not set(condition) <= set(RANGES):
            keys = ", ".join(map(str, condition)) or "nothing"
            raise InvalidRequest(f"the range of {field} has {keys}; allowed: {', '.join(RANGES)}")
        for name, bound in condition.items():
            if isinstance(bound, bool) or not _is_value(bound):
                raise InvalidRequest(f"{name} of {field} is {bound!r}; expected a number or a string")


def _key(value: Any) -> tuple[bool, Any]:
    """Return a dictionary key for a value, which distinguishes true from 1."""
    if not _is_value(value):
        raise InvalidRequest(
            f"a filter has the value {value!r}; allowed: strings, numbers, true, false, or a list of them"
        )
    return isinstance(value, bool), value


def _is_value(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _kind(value: Any) -> str:
    """Return the key of ``KINDS`` for a value; "" for None."""
    if isinstance(value, bool | str):
        return "string" if isinstance(value, str) else "boolean"
    return "number" if value is not None else ""


def _number(value: Any) -> float | None:
    """Return a number, or that of a numeric string (an int if it is whole); None for other values."""
    if not isinstance(value, str):
        return None if isinstance(value, bool) else value
    text = value.strip()
    if not _NUMBER.fullmatch(text) or not math.isfinite(number := float(text)):
        return None
    return int(text) if text.lstrip("-").isdigit() else number


def _check_kinds(field: str, condition: Any, values: Sequence[Any]) -> None:
    """Raise InvalidRequest if no value of a field is comparable with a bound of a range, or with any item of a list."""
    is_range = isinstance(condition, Mapping)
    operands = [*condition.values()] if is_range else condition if isinstance(condition, list) else [condition]
    misfits = [x for x in operands if not any(_kind(x) in (_kind(v), _kind(_number(v))) for v in values)]
    if not values or not misfits or (not is_range and len(misfits) < len(operands)):
        return
    bound, example = (json.dumps(x, ensure_ascii=False)[:_MESSAGE_CHARACTERS] for x in (misfits[0], values[0]))
    raise InvalidRequest(
        f"the field {field} has no {_kind(misfits[0])} to compare with {bound}: it has {example}, for example; "
        f"compare with {KINDS[_kind(values[0])]}"
    )


@dataclasses.dataclass(frozen=True)
class PassageQuery:
    """A search request; filters (:class:`MetadataFilters`) are applied before ranking."""

    query: str  # of at least one word
    k: int = 10  # passages, 1 to ``MAX_RESULTS``
    filters: Sequence[Where] = ()
    by: RankBy = "run"  # as the run's retriever ranks; the others rank by one of both only


Ranking = tuple[Ids, list[float], list[float | None]]  # passages, their scores and scaled inner products, best first


@dataclasses.dataclass(frozen=True, eq=False)
class PassageSearch:
    """Passage search with BM25 and, if there is a retriever, its embeddings.

    ``about`` has the versions of model, corpus and index; queries are truncated to ``query_wordpieces``.
    """

    snapshot: Snapshot
    bm25: Bm25
    retriever: Retriever | None
    passages: PassageIndex | None
    query_wordpieces: int
    dtype: torch.dtype
    about: Record
    resources: Any = None  # resources with the lifetime of the search, such as a temporary folder of downloads
    filters: MetadataFilters = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "filters", MetadataFilters(self.snapshot))

    def search(self, query: str, k: int = 10, filters: Sequence[Where] = (), by: RankBy = "run") -> Record:
        return self.search_batch([PassageQuery(query, k, filters, by)])[0]

    def search_batch(self, requests: Sequence[PassageQuery]) -> list[Record]:
        """Return a record of each query: query, versions, and the top passages with their locations, best first.

        Each passage has ``score``, by which it is ranked, ``embeddings`` (the scaled inner product, the paper's
        f(x, z)), ``words`` (BM25), and ``highlights``: character offsets of query words.

        Raises:
            InvalidRequest: a query is invalid (:meth:`check`).
        """
        rankings = zip(requests, self.rank(requests), strict=True)
        return [self._result(request.query, *ranking) for request, ranking in rankings]

    def check(self, request: PassageQuery) -> Ids | None:
        """Return the passages that satisfy the filters, None without; InvalidRequest if the request is invalid."""
        if not request.query.strip():
            raise InvalidRequest("the query is empty; send at least one word")
        try:
            request.query.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the query contains an unpaired surrogate; send valid Unicode") from None
        if not 1 <= request.k <= MAX_RESULTS:
            raise InvalidRequest(f"k is {request.k}; allowed: 1 to {MAX_RESULTS}")
        if request.by == "embeddings" and self.retriever is None:
            raise InvalidRequest(NO_EMBEDDINGS)
        return self.filters.passages(request.filters) if any(request.filters) else None

    def embed(self, texts: Sequence[str], *, documents: bool = False) -> Tensor:
        """Compute embeddings of texts [N, E] (fp32): as queries, or as passages without a title, of one vector each."""
        if self.retriever is None:
            raise InvalidRequest(NO_EMBEDDINGS)
        limit = self.snapshot.block_wordpieces if documents else self.query_wordpieces
        tower = self.retriever.document if documents else self.retriever.query
        return embed(tower, query_sequences(text_queries(self.snapshot, texts, limit, documents=documents)), self.dtype)

    def rank(self, requests: Sequence[PassageQuery]) -> list[Ranking]:
        """Rank passages for each query: queries share an embedding batch, and those without filters share searches."""
        allowed = [self.check(request) for request in requests]
        has_index = self.retriever is not None and self.passages is not None
        dense = [row for row, request in enumerate(requests) if has_index and request.by != "words"]
        query_E = dict(zip(dense, self.embed([requests[row].query for row in dense]), strict=True)) if dense else {}
        rankings: dict[int, Ranking] = {}
        groups: dict[tuple[FusionWeights, int], list[int]] = {}  # rows that share a search
        for row, (request, ids) in enumerate(zip(requests, allowed, strict=True)):
            if row not in query_E or self.retriever is None:
                rankings[row] = _best_by_words(request.query, request.k, ids, self.bm25)
                continue
            mixture = DENSE_ONLY if request.by == "embeddings" else self.retriever.mixture
            if ids is None:
                groups.setdefault((mixture, request.k), []).append(row)
            else:
                rankings[row] = self._best_allowed(ids, query_E[row], request, mixture)
        for (mixture, k), rows in groups.items():
            query_QE, queries = torch.stack([query_E[row] for row in rows]), [requests[row].query for row in rows]
            rankings |= zip(rows, self._best(query_QE, queries, k, mixture), strict=True)
        return [rankings[row] for row in range(len(requests))]

    def _best(self, query_QE: Tensor, queries: Sequence[str], k: int, mixture: FusionWeights) -> Iterator[Ranking]:
        assert self.retriever is not None
        assert self.passages is not None
        hybrid = HybridSearch(self.passages, self.bm25, mixture, self.retriever.scale)
        hits = hybrid.search(query_QE, queries, k, max(k, DEPTH) if mixture.lexical else k)
        for ids, score, dense in zip(hits.id_QK, hits.relevance(mixture), hits.dense_QK, strict=True):
            is_hit = ids >= 0
            yield ids[is_hit].numpy(), score[is_hit].tolist(), dense[is_hit].tolist()

    def _best_allowed(self, allowed: Ids, query_E: Tensor, request: PassageQuery, mixture: FusionWeights) -> Ranking:
        assert self.retriever is not None
        dense = self.retriever.scale * self._inner_products(query_E, allowed)
        lexical = torch.zeros(len(allowed))
        if mixture.lexical and len(allowed):
            score_A = self.bm25.score_passages(request.query, allowed)  # normalised to 1 for the best one that passes
            lexical = torch.from_numpy(score_A / max(float(score_A.max()), 1e-6))
        score = mixture.combine(dense, lexical)
        order = torch.argsort(score, descending=True, stable=True)[: request.k]
        return allowed[order.numpy()], score[order].tolist(), dense[order].tolist()

    def _inner_products(self, query_E: Tensor, ids: Ids) -> Tensor:
        """Compute the query's largest inner product with a vector of each passage, [A], on the CPU."""
        assert self.passages is not None
        batches = []
        for first in range(0, len(ids), _BATCH):
            batch = torch.from_numpy(ids[first : first + _BATCH])
            vectors = self.passages.vectors(batch).float().view(len(batch), -1, len(query_E))
            batches.append((vectors @ query_E.to(vectors.device)).amax(-1).cpu())
        return torch.cat(batches) if batches else torch.empty(0)

    def _result(self, query: str, ids: Ids, score: list[float], dense: list[float | None]) -> Record:
        words = self.bm25.score_passages(query, ids).tolist()
        query_stems = stem_query(query, self.bm25.query_languages(query))
        rows = zip(ids.tolist(), score, dense, words, strict=True)
        return {"query": query, "passages": [self._record(*row, query_stems) for row in rows], "model": self.about}

    def _record(
        self, passage: int, score: float, dense: float | None, bm25: float, query_stems: StemsByLanguage
    ) -> Record:
        record = passage_record(self.snapshot, passage) | {"extra": self.snapshot.extra(passage)}
        record |= {"score": score, "embeddings": dense, "words": bm25}
        return {**record, "highlights": highlights(record["text"], query_stems)}


def _best_by_words(query: str, k: int, allowed: Ids | None, words: Bm25) -> Ranking:
    if allowed is None:
        score_QK, id_QK = words.search([query], k)
        is_hit = id_QK[0] >= 0
        return id_QK[0][is_hit], score_QK[0][is_hit].tolist(), [None] * int(is_hit.sum())
    score_A = words.score_passages(query, allowed)
    order = np.argsort(-score_A, kind="stable")[:k]
    order = order[score_A[order] > 0]
    return allowed[order], score_A[order].tolist(), [None] * len(order)


def highlights(text: str, query_stems: StemsByLanguage) -> list[tuple[int, int]]:
    """Return the character offsets of words in a text whose stem is one of ``query_stems``; overlaps are merged."""
    matches = {
        (start, end)
        for language, language_stems in query_stems.items()
        for word, start, end in words_with_offsets(text, language)
        if stem(word, language) in language_stems
    }
    merged: list[tuple[int, int]] = []
    for start, end in sorted(matches):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def stem_query(query: str, languages: Sequence[str]) -> StemsByLanguage:
    """Return the stems of a query's words by language, without stop words, for ``highlights``."""
    stop = {code: STOP_WORDS if code == ENGLISH else load_languages()[code].stop for code in languages}
    return {
        code: {*stems([word for word in split_words(query, code) if word not in stop[code]], code)}
        for code in languages
    }


def format_passages(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the passages of a search record as lines, with query words in brackets."""
    if not record["passages"]:
        yield "no passages found"
    for number, passage in enumerate(record["passages"], 1):
        highlights = passage["highlights"]
        first = max(0, highlights[0][0] - _CONTEXT) if highlights else 0
        end = min(len(passage["text"]), (highlights[0][1] if highlights else 0) + 2 * _CONTEXT)
        text, at = "", first
        for low, high in highlights:
            if high <= end:
                text += f"{passage['text'][at:low]}[{passage['text'][low:high]}]"
                at = high
        text = " ".join((text + passage["text"][at:end]).split())
        before, after = "… " if first else "", " …" if end < len(passage["text"]) else ""
        page = f", page {passage['page']}" if passage.get("page") else ""
        yield f"{number}. {passage['title'] or passage['document_id']}  ({passage['score']:.3g})"
        yield f"   {before}{text}{after}"
        yield f"   {passage['uri']}, characters {passage['start']} to {passage['end']}{page}"
