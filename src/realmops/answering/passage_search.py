"""Passage search by embeddings, BM25 or both, restricted by filters on the documents' metadata.

Shape suffixes: A passages that pass the filters, E embedding width.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from realmops.answering.answer import InvalidRequest, check_unicode
from realmops.answering.metadata_filters import Ids, MetadataFilters, Where
from realmops.answering.record import Record, format_page, passage_record
from realmops.answering.retrieval import HYBRID_DEPTH, group_copies
from realmops.corpus.languages import load_languages
from realmops.corpus.snapshot_reader import Snapshot
from realmops.model.retriever import DENSE_ONLY, FusionWeights, Retriever
from realmops.search.bm25 import Bm25, query_words, stem, stems, words_with_offsets
from realmops.search.embed import embed, query_sequences, text_queries
from realmops.search.exact import PassageIndex
from realmops.search.hybrid import HybridSearch

RankBy = Literal["run", "embeddings", "words"]
StemsByLanguage = Mapping[str, Collection[str]]  # stems by language
MAX_RESULTS = 1000  # results of a search
NO_EMBEDDINGS = (
    "there are no embeddings: the stage finetune has not run, or finetune.retriever is bm25, tfidf, graph or path; "
    "search by words"
)
_BATCH = 1 << 14  # passages per matrix product
_SHOWN = 270  # characters of a passage


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
        """Return a record of each query; a passage's ``embeddings`` is its scaled inner product, ``words`` its BM25."""
        rankings = zip(requests, self.rank(requests, has_spare=True), strict=True)
        return [self._result(request, *ranking) for request, ranking in rankings]

    def check(self, request: PassageQuery) -> Ids | None:
        """Return the passages that satisfy the filters, None without; InvalidRequest if the request is invalid."""
        if not request.query.strip():
            raise InvalidRequest("the query is empty; send at least one word")
        check_unicode(request.query, "query")
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

    def rank(self, requests: Sequence[PassageQuery], *, has_spare: bool = False) -> list[Ranking]:
        """Rank k passages for each query, or spare ones, with shared embedding batches and searches without filters."""
        allowed = [self.check(request) for request in requests]
        if has_spare:
            requests = [dataclasses.replace(request, k=max(2 * request.k, HYBRID_DEPTH)) for request in requests]
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
        hits = hybrid.search(query_QE, queries, k, max(k, HYBRID_DEPTH) if mixture.lexical else k)
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

    def _result(self, request: PassageQuery, ids: Ids, score: list[float], dense: list[float | None]) -> Record:
        words = self.bm25.score_passages(request.query, ids).tolist()
        query_stems = stem_query(request.query, self.bm25.query_languages(request.query))
        scores_of = dict(zip(ids.tolist(), zip(score, dense, words, strict=True), strict=True))
        passages = []
        for passage, copies in islice(group_copies(self.snapshot, scores_of).items(), request.k):
            record = passage_record(self.snapshot, passage, copies) | {"extra": self.snapshot.extra(passage)}
            record |= zip(("score", "embeddings", "words"), scores_of[passage], strict=True)
            passages.append(record | {"highlights": highlights(record["text"], query_stems)})
        return {"query": request.query, "passages": passages, "model": self.about}


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
    words = {code: (query_words(query, code), load_languages()[code].stop) for code in languages}
    return {code: {*stems([word for word in found if word not in stop], code)} for code, (found, stop) in words.items()}


def format_passages(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the passages of a search record as lines, with query words in brackets."""
    if not record["passages"]:
        yield "no passages found"
    for number, passage in enumerate(record["passages"], 1):
        text, marks = passage["text"], passage["highlights"]
        first, end = _best_window(text, marks)
        shown = text[:end]
        for low, high in reversed([mark for mark in marks if first <= mark[0] and mark[1] <= end]):
            shown = f"{shown[:low]}[{shown[low:high]}]{shown[high:]}"
        shown = " ".join(shown[first:].split())
        before, after = "… " if first else "", " …" if end < len(text) else ""
        yield f"{number}. {passage['title'] or passage['document_id']}  ({passage['score']:.3g})"
        yield f"   {before}{shown}{after}"
        yield f"   {passage['uri']}, characters {passage['start']} to {passage['end']}{format_page(passage)}"


def _best_window(text: str, marks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the offsets of up to ``_SHOWN`` characters around the most different query words close together."""
    best = 0, 0, 0  # number of different words from a mark on, minus their length, minus the mark's start
    for start, _ in marks:
        ends: dict[str, int] = {}
        for low, high in marks:
            if start <= low and high <= start + _SHOWN:
                ends.setdefault(text[low:high].casefold(), high)
        best = max(best, (len(ends), start - max(ends.values(), default=start), -start))
    first = max(0, -best[2] - (best[1] + _SHOWN) // 2)
    return first, min(len(text), first + _SHOWN)
