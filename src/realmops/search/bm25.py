"""Retrieval by words, which is not trained: BM25, in any language.

Legend: Q questions, K ranked passages, P passages, W words, N postings (one for each word of each passage), n those of
one word, G languages, L lengths. Passages go by their number, -1 is none.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from realmops.artifacts import read_bound_manifest
from realmops.corpus.snapshot_reader import Snapshot
from realmops.text.flat import load_flat
from realmops.text.languages import ENGLISH, composed, detect, languages, placed, word_spans

Rows = NDArray[np.int64]
Scores = NDArray[np.float32]
Query = str | NDArray[np.uint64]
"""A text; or ``codes``, as an index of wordpieces wants them."""
FOLDER = "lexical"  # of the BM25 index, beside the snapshot that it is of
KIND = "lexical"
K1, B = 1.5, 0.75  # how soon more of a word counts no more; how much a passage's length counts
WORD = re.compile(r"\b\w\w+\b")
STOP_WORDS = frozenset({  # Lucene's
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not",
    "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was",
    "will", "with",
})  # fmt: skip
_NONE = np.empty(0, np.int32)
_FEW = 1 << 16  # passages that are all scored: to leave some takes longer
_TOGETHER = 1 << 13  # postings that are weighed at a time: what that takes stays in the processor's cache
_SURE = 1 - 1e-5  # of a score: sums of single precision differ by their order, but not by so much


class Lexical(Protocol):
    """Ranks the passages that it was made of."""

    def scores(self, query: str) -> Scores:
        """The score of every passage, [P]."""


def rank(retriever: Lexical, queries: Sequence[str], k: int) -> Rows:
    """The best k passages of each query, best first, int64 [Q, K]; -1 where there are fewer passages."""
    if isinstance(retriever, Bm25):
        ranking = retriever.search(queries, k)[1]
        for found in ranking:  # passages without a word of the query all score 0: the first ones follow
            matching = int((found >= 0).sum())
            others = np.setdiff1d(np.arange(min(k, len(retriever))), found)[: k - matching]
            found[matching : matching + len(others)] = others
        return ranking
    ranking = np.full((len(queries), k), -1, np.int64)
    for row, query in enumerate(queries):
        best = top(retriever.scores(query), k)
        ranking[row, : len(best)] = best
    return ranking


def top(score_P: Scores, k: int) -> Rows:
    """The k passages with the highest scores, best first, of equal ones the first."""
    k = min(k, len(score_P))
    if not k:
        return np.empty(0, np.int64)
    least = np.partition(score_P, -k)[-k]
    above, level = np.flatnonzero(score_P > least), np.flatnonzero(score_P == least)
    found = np.concatenate([above, level[: k - len(above)]])
    best: Rows = found[np.argsort(-score_P[found], kind="stable")]
    return best


def titled_texts(snapshot: Snapshot) -> list[str]:
    """What a retriever by words reads of each passage: title and text."""
    pairs = zip(snapshot.column("title"), snapshot.column("text"), strict=True)
    return [f"{title} {text}" for title, text in pairs]


def split_words(text: str, language: str = ENGLISH) -> list[str]:
    """The words of a composed text in lower case: two letters, digits or underscores at least (``word_spans``)."""
    return WORD.findall(composed(text).lower()) if language == ENGLISH else [word for word, _, _ in word_spans(text)]


def placed_words(text: str, language: str = ENGLISH) -> Iterator[tuple[str, int, int]]:
    """Yield the words of ``split_words`` with their start and end characters in the text."""
    return placed(_english_words, text) if language == ENGLISH else word_spans(text)


def _english_words(text: str) -> Iterator[tuple[str, int, int]]:
    return ((match[0], *match.span()) for match in WORD.finditer(text.lower()))


def stop_words(language: str = ENGLISH) -> frozenset[str]:
    """Words that are not looked for: English ones. Lists for German, Spanish and Romanian found .1 to .3 % less."""
    return STOP_WORDS if language == ENGLISH else frozenset()


@lru_cache(1 << 15)
def stem(word: str, language: str = ENGLISH) -> str:
    """The Snowball stem of a word; of common ones it is remembered."""
    return stems([word], language)[0]


def stems(words: Sequence[str], language: str = ENGLISH) -> list[str]:
    """The Snowball stem of each word; the word itself in a language without a stemmer."""
    import Stemmer

    stemmer = languages()[language].stemmer
    found: list[str] = Stemmer.Stemmer(stemmer, 0).stemWords(words) if stemmer else list(words)
    return found


def query_stems(query: str, spoken: Sequence[str]) -> list[str]:
    """The stems of a query's words, stop words left out; of several languages those that the first does not have, too.

    Args:
        spoken: codes of the languages that the query may be in.
    """
    found: list[str] = []
    for language in spoken:
        stopped = stop_words(language)
        said = stems([word for word in split_words(query, language) if word not in stopped], language)
        found += (Counter(said) - Counter(found)).elements() if found else said
    return found


def codes(words: Sequence[str]) -> NDArray[np.uint64]:
    """What stands for each stem in the index: 64 bits of its BLAKE2b digest.

    Two of ten million words share theirs with a probability of 3 in a million; they would count as one.
    """
    digests = b"".join(hashlib.blake2b(word.encode(), digest_size=8).digest() for word in words)
    return np.frombuffer(digests, "<u8")


def inverse_document_frequency(passages: int, with_word: int) -> np.float32:
    """log(1 + (P - n + .5) / (n + .5)): Lucene's, which is never below 0 (Kamphuis et al. 2020)."""
    return np.float32(math.log(1 + (passages - with_word + 0.5) / (with_word + 0.5)))


def saturation(length: NDArray[Any], mean_length: float) -> NDArray[np.float64]:
    """k1 (1 - b + b length / mean length): how often a passage must have a word for half of its weight."""
    found: NDArray[np.float64] = K1 * ((1 - B) + B * length / mean_length)
    return found


def _least(score_n: Scores, k: int) -> float:
    """The k-th best score, less what single precision may take from it."""
    return _SURE * float(np.partition(score_n, -k)[-k])


class Bm25:
    """BM25 of a snapshot's passages, memory-mapped: Lucene's formula over the stems of title and text.

    The score is the sum, over the words of the query, of ``inverse_document_frequency`` times count / (``saturation`` +
    count). A query reads the postings of its own words only; ``bm25_writer.write_bm25`` makes the folder.

    Files:
        words.npy: uint64 [W], the ``codes`` of all words, ascending.
        posting_offsets.npy: int64 [W + 1], the postings of each word.
        postings.npy: int32 [N], the passages that have the word, ascending.
        counts.npy: uint8 (uint16 or uint32 where a passage has a word more often) [N], how often.
        lengths.npy: int32 [P], words of each passage, repetitions counted, stop words not.
        groups.npy: uint8 [P], which of the manifest's ``languages`` each passage is in; only where there are several.
            The words of a query in one of them are then as rare, and passages as long, as among those of the language.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.corpus_hash: str = manifest["corpus_hash"]
        self.word_W, self.offset_W, self.posting_N, self.count_N, self.length_P = (
            np.asarray(load_flat(folder / f"{name}.npy"))
            for name in ("words", "posting_offsets", "postings", "counts", "lengths")
        )
        self.languages: list[str] = manifest.get("languages", [ENGLISH])
        self.group_P: NDArray[np.uint8] = np.broadcast_to(np.uint8(0), self.length_P.shape)
        self._place_P = self.length_P  # of each passage's saturation among those of all lengths
        if len(self.languages) > 1:
            self.group_P = np.asarray(load_flat(folder / "groups.npy"))
            self._place_P = self.length_P + (manifest["longest"] + 1) * self.group_P.astype(np.int32)
        self._half_L = self._saturations()
        self._there_P: NDArray[np.bool_] | None = None  # what counts for how rare a word is, if not all does
        self._views: dict[str, Self] = {}

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True, corpus_hash: str | None = None) -> Self:
        """Open a folder; ValueError when it is damaged or, with ``corpus_hash``, made for another corpus."""
        return cls(folder, read_bound_manifest(folder, KIND, corpus_hash, "snapshot", verify=verify))

    @classmethod
    def of(cls, snapshot: Snapshot, *, verify: bool = False) -> Self:
        """The index that was written beside a snapshot; ValueError when there is none."""
        return cls.open(snapshot.folder.with_name(FOLDER), verify=verify, corpus_hash=snapshot.corpus_hash)

    def _saturations(self) -> NDArray[np.float64]:
        """That of each length [L], or [G L] of passages of each language; by their mean length."""
        length_L = np.arange(self.manifest["longest"] + 1)
        if len(self.languages) == 1:
            means = [self.manifest["tokens"] / max(self.manifest["passages"], 1)]
        else:
            of_groups = [self.length_P[self.group_P == group] for group in range(len(self.languages))]
            means = [float(some.mean()) if len(some) else 0.0 for some in of_groups]
        return np.concatenate([saturation(length_L, mean or 1.0) for mean in means])

    def spoken(self, query: str) -> tuple[str, ...]:
        """The languages that a query may be in, of the common ones: one where that is sure, else two."""
        return detect(query, self.languages[: self.manifest.get("common_languages", 1)])

    def _asked(self, query: Query) -> tuple[Self, list[int]]:
        """This index with the statistics of a query's language, and the numbers of the query's words."""
        if not isinstance(query, str):
            return self, self._numbers(query)
        spoken = self.spoken(query)
        numbers = self._numbers(codes(query_stems(query, spoken)))
        return (self._view(spoken[0]) if len(self.languages) > len(spoken) == 1 else self), numbers

    def _view(self, language: str) -> Self:
        if language not in self._views:
            view = copy(self)
            view._there_P = self.group_P == self.languages.index(language)
            self._views[language] = view
        return self._views[language]

    def __len__(self) -> int:
        """Number of passages P."""
        return len(self.length_P)

    def scores(self, query: str) -> Scores:
        """BM25 of every passage, [P]."""
        index, words = self._asked(query)
        return index._add_all(words, np.zeros(len(self), np.float32))

    def _add_all(self, words: Sequence[int], score_P: Scores) -> Scores:
        for word in words:
            passage_n, weight_n = self._weights(word)
            score_P[passage_n] += weight_n
        return score_P

    def search(self, queries: Sequence[Query], k: int) -> tuple[Scores, Rows]:
        """Scores and passages of the best k of each query, [Q, K]: best first, of equal ones the first.

        Only passages with a word of the query are found; behind them come -inf and -1.
        """
        assert k > 0, k
        score_QK = np.full((len(queries), k), -np.inf, np.float32)
        id_QK = np.full((len(queries), k), -1, np.int64)
        score_P = np.zeros(len(self), np.float32)
        for row, (index, words) in enumerate(map(self._asked, queries)):
            if len(self) <= _FEW:
                passage_n: NDArray[Any] = np.flatnonzero(index._add_all(words, score_P))
                score_n = score_P.take(passage_n)
                score_P.fill(0)
            else:
                passage_n = index._candidates(words, k, score_P)
                score_n = index._scores_of(words, passage_n)
            best = top(score_n, k)
            id_QK[row, : len(best)], score_QK[row, : len(best)] = passage_n[best], score_n[best]
        return score_QK, id_QK

    def _candidates(self, words: Sequence[int], k: int, score_P: Scores) -> NDArray[np.int32]:
        """Passages among which the best k are, ascending; ``score_P`` is zero before and after.

        The rarest words come first. What the words behind can add at most is known: once that is less than the k-th
        best score, no passage that has only these can be one of the best, and of their postings only those of passages
        that are still possible are looked at (MaxScore, Turtle and Flood 1995).
        """
        count = {word: words.count(word) for word in words}
        bound = {word: times * float(self._idf(word)) for word, times in count.items()}
        order = sorted(count, key=lambda word: (-bound[word], word))
        left = np.cumsum([0.0, *(bound[word] for word in order[::-1])])[::-1].tolist()  # by words before
        found = [_NONE]
        size = done = 0
        for word in order:
            if k <= size < self._with_word(word) and left[done] < _least(score_P[np.concatenate(found)], k):
                break
            found.append(self._add(word, count[word], score_P))
            size, done = size + len(found[-1]), done + 1
        matching = np.concatenate(found)
        score_n = score_P[matching]
        score_P[matching] = 0
        for place in range(done, len(order) + 1):
            if len(matching) > k:
                possible_n = score_n + left[place] >= _least(score_n, k)
                matching, score_n = matching[possible_n], score_n[possible_n]
            if place < len(order):
                score_n += count[order[place]] * self._scores_of(order[place : place + 1], matching)
        matching.sort()
        return matching

    def _add(self, word: int, times: int, score_P: Scores) -> NDArray[np.int32]:
        """Add to the scores what a word is worth; returns the passages that had none before."""
        passage_n, weight_n = self._weights(word)
        before_n = score_P.take(passage_n)
        score_P[passage_n] = before_n + times * weight_n
        new: NDArray[np.int32] = passage_n[before_n == 0]
        return new

    def score_of(self, query: str, ids: Rows) -> Scores:
        """BM25 of these passages, [K]; 0 where no word matches, and for -1."""
        index, words = self._asked(query)
        return index._scores_of(words, ids.astype(np.int32))

    def _scores_of(self, words: Sequence[int], wanted_K: NDArray[np.int32]) -> Scores:
        score_K = np.zeros(len(wanted_K), np.float32)
        for word in words:
            start, end = self.offset_W[word : word + 2].tolist()
            posting_n = self.posting_N[start:end]
            place_K = np.minimum(np.searchsorted(posting_n, wanted_K), end - start - 1)
            has_K = posting_n[place_K] == wanted_K
            score_K[has_K] += self._weight(word, self.count_N[start + place_K[has_K]], wanted_K[has_K])
        return score_K

    def _numbers(self, code: NDArray[np.uint64]) -> list[int]:
        """The numbers of words in the order of a query, repetitions too, without those that no passage has."""
        place = np.searchsorted(self.word_W, code)
        known = place < len(self.word_W)
        known[known] = self.word_W[place[known]] == code[known]
        numbers: list[int] = place[known].tolist()
        return numbers

    def _with_word(self, word: int) -> int:
        start, end = self.offset_W[word : word + 2].tolist()
        return int(end - start)

    def _idf(self, word: int) -> np.float32:
        if self._there_P is None:
            return inverse_document_frequency(len(self), self._with_word(word))
        posting_n = self.posting_N[slice(*self.offset_W[word : word + 2].tolist())]
        counts = (int(np.count_nonzero(there)) for there in (self._there_P, self._there_P[posting_n]))
        return inverse_document_frequency(*counts)

    def _weights(self, word: int) -> tuple[NDArray[np.int32], Scores]:
        """The passages that have a word, and what it adds to their scores, [n] each."""
        start, end = self.offset_W[word : word + 2].tolist()
        passage_n = self.posting_N[start:end]
        return passage_n, self._weight(word, self.count_N[start:end], passage_n)

    def _weight(self, word: int, count_n: NDArray[Any], passage_n: NDArray[np.int32]) -> Scores:
        weight_n, idf = np.empty(len(passage_n), np.float32), float(self._idf(word))
        for low in range(0, len(passage_n), _TOGETHER):
            some = slice(low, low + _TOGETHER)
            half = self._half_L.take(self._place_P.take(passage_n[some]))
            weight_n[some] = idf * (count_n[some] / (half + count_n[some]))
        return weight_n
