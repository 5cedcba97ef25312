"""BM25 lexical retrieval, in any language.

Legend: Q queries, K ranked passages, P passages, W words, N postings (one per word and passage), n postings of one
word, G languages, L lengths. A passage is its row in the snapshot, -1 is none.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from realmops.artifacts import read_bound_manifest
from realmops.corpus.languages import (
    ENGLISH,
    WordSpan,
    detect_language,
    find_with_offsets,
    load_languages,
    normalize_unicode,
    token_spans,
)
from realmops.corpus.npy_files import load_npy
from realmops.corpus.snapshot_reader import Snapshot

Rows = NDArray[np.int64]
Scores = NDArray[np.float32]
Query = str | NDArray[np.uint64]
"""A text; or keys of words, for an index of wordpieces."""
FOLDER = "lexical"  # folder of the BM25 index, next to its snapshot
KIND = "lexical"
K1, B = 1.5, 0.75  # term frequency saturation and length normalisation
STOP_WORDS = frozenset({  # Lucene's, and the pronoun
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "i", "if", "in", "into", "is", "it", "no",
    "not", "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was",
    "will", "with",
})  # fmt: skip
_IN_CAPITALS = STOP_WORDS | {"us", "who"}  # other words in capitals
_DROPPED = re.compile(r"['’][sS]$|(?<=\d)[ .,](?=\d{3}(?!\d))")  # the possessive, and signs of thousands
_JOINTS = re.compile(r"[-'’&/@‐–]|\+(?=\w)|(?<=\d)[+#]+|(?<!\d)\.|\.(?!\d)|(?<=[^\W\d])(?=\d+\.\d)")  # v3.1 has two
_LIMITS = re.compile(r"[-., '’&/@+#‐–]")
_NONE = np.empty(0, np.int32)
_EXHAUSTIVE = 1 << 16  # up to this many passages, scoring all is faster than MaxScore
_CHUNK = 1 << 13  # postings scored at a time: they fit the processor's cache
_TOLERANCE = 1 - 1e-5  # factor of a threshold: fp32 sums in another order differ by less


class LexicalRetriever(Protocol):
    """A lexical retriever over a fixed list of passages."""

    def scores(self, query: str) -> Scores:
        """Return the score of every passage, [P]."""


def rank(retriever: LexicalRetriever, queries: Sequence[str], k: int) -> Rows:
    """Return the best k passages of each query, best first, int64 [Q, K], padded with -1."""
    if isinstance(retriever, Bm25):
        ranking = retriever.search(queries, k)[1]
        for row_K in ranking:  # passages without a word of the query score 0: they follow in the corpus's order
            matches = int((row_K >= 0).sum())
            fill = np.setdiff1d(np.arange(min(k, len(retriever))), row_K)[: k - matches]
            row_K[matches : matches + len(fill)] = fill
        return ranking
    ranking = np.full((len(queries), k), -1, np.int64)
    for row, query in enumerate(queries):
        best = top_k(retriever.scores(query), k)
        ranking[row, : len(best)] = best
    return ranking


def top_k(score_P: Scores, k: int) -> Rows:
    """Return the k passages with the highest scores, best first; of equal scores the first."""
    k = min(k, len(score_P))
    if not k:
        return np.empty(0, np.int64)
    threshold = np.partition(score_P, -k)[-k]
    above, equal = np.flatnonzero(score_P > threshold), np.flatnonzero(score_P == threshold)
    passages = np.concatenate([above, equal[: k - len(above)]])
    best: Rows = passages[np.argsort(-score_P[passages], kind="stable")]
    return best


def titled_texts(snapshot: Snapshot) -> list[str]:
    """Return title and text of each passage, joined for a lexical retriever."""
    pairs = zip(snapshot.column("title"), snapshot.column("text"), strict=True)
    return [f"{title} {text}" for title, text in pairs]


def word_forms(token: str, language: str = ENGLISH) -> list[str]:
    """Return the words that a token is found by: its parts, and joined if they are few or short (US of U.S., email).

    They are in lower case without stop words; IT and US are also kept as written.
    """
    stop = STOP_WORDS if language == ENGLISH else ()  # lists of three others lowered recall by 0.1 to 0.3 %
    if token.isalnum() and not token.isupper():
        word = normalize_unicode(token.lower())
        return [] if word in stop else [word]
    token = _DROPPED.sub("", token)
    parts = _JOINTS.split(token)
    joined = token[: token[0] == "."] + "".join(parts)
    words = [part for part in parts if len(part) > 1 and token[-2:-1] not in ("'", "’")]
    if len(words) < 2 or (joined.isalpha() and len(min(parts, key=len)) < 3):
        words.append(joined)
    forms = dict.fromkeys(normalize_unicode(word.lower()) for word in words)
    in_capitals = [joined] if stop and joined.isupper() and joined.lower() in _IN_CAPITALS else []
    return [word for word in forms if word not in stop] + in_capitals


def token_length(token: str, language: str = ENGLISH) -> int:
    """Return what a token counts in the length of a passage: its parts of two characters, but not stop words."""
    stop = STOP_WORDS if language == ENGLISH else ()
    return sum(len(part) > 1 and part.lower() not in stop for part in _LIMITS.split(token))


def words_with_offsets(text: str, language: str = ENGLISH) -> Iterator[WordSpan]:
    """Yield the ``word_forms`` of the tokens of a text with the token's start and end characters."""
    spans = find_with_offsets(partial(token_spans, language=language), text)
    return ((form, start, end) for token, start, end in spans for form in word_forms(token, language))


@lru_cache(1 << 15)
def stem(word: str, language: str = ENGLISH) -> str:
    """Return the Snowball stem of a word, cached for common words."""
    return stems([word], language)[0]


def stems(words: Sequence[str], language: str = ENGLISH) -> list[str]:
    """Return the Snowball stem of each word; the word itself in a language without a stemmer."""
    import Stemmer

    stemmer = load_languages()[language].stemmer
    stemmed: list[str] = Stemmer.Stemmer(stemmer, 0).stemWords(words) if stemmer else list(words)
    return stemmed


def query_words(query: str, language: str = ENGLISH) -> list[str]:
    """Return the words of a query: a word in capitals is not searched in lower case, unless all of the query is."""
    text = query.lower() if query.isupper() and len(query.split()) > 1 else query
    words = [word for word, _, _ in words_with_offsets(text, language)]
    in_capitals = {word.lower() for word in words if word.isupper()}
    return [word for word in words if word not in in_capitals]


def query_stems(query: str, languages: Sequence[str]) -> list[str]:
    """Return a query's stems in the first language, then those that only further ones have."""
    result: list[str] = []
    for language in languages:
        stemmed = stems(query_words(query, language), language)
        result += (Counter(stemmed) - Counter(result)).elements() if result else stemmed
    return result


def stem_hashes(words: Sequence[str]) -> NDArray[np.uint64]:
    """Return the key of each stem in the index: 64 bits of its BLAKE2b digest.

    Among ten million stems, two collide with a probability of 3 in a million; they would count as one.
    """
    digests = b"".join(hashlib.blake2b(word.encode(), digest_size=8).digest() for word in words)
    return np.frombuffer(digests, "<u8")


def inverse_document_frequency(passages: int, with_word: int) -> np.float32:
    """Return log(1 + (P - n + .5) / (n + .5)): Lucene's variant, which is never negative (Kamphuis et al. 2020)."""
    return np.float32(math.log(1 + (passages - with_word + 0.5) / (with_word + 0.5)))


def saturation(length: NDArray[Any], mean_length: float) -> NDArray[np.float64]:
    """Return k1 (1 - b + b length / mean length): the term frequency with half of the maximum weight."""
    result: NDArray[np.float64] = K1 * ((1 - B) + B * length / mean_length)
    return result


def _kth_score(score_n: Scores, k: int) -> float:
    """Return the k-th best score, lowered by the tolerance of fp32 sums."""
    return _TOLERANCE * float(np.partition(score_n, -k)[-k])


class Bm25:
    """BM25 over a snapshot's passages, memory-mapped: Lucene's formula over the stems of title and text.

    The score is the sum, over the words of the query, of ``inverse_document_frequency`` times count / (``saturation`` +
    count). A query reads only the postings of its words; ``bm25_writer.write_bm25`` writes the folder.

    Files:
        words.npy: uint64 [W], keys of all words (``stem_hashes``), ascending.
        posting_offsets.npy: int64 [W + 1], offsets of each word's postings.
        postings.npy: int32 [N], passages that contain the word, ascending.
        counts.npy: uint8 (uint16 or uint32 for larger counts) [N], term frequencies.
        lengths.npy: int32 [P], number of words in each passage, with repetitions (``token_length``).
        groups.npy: uint8 [P], index of each passage's language in the manifest's ``load_languages``; only if there are
            several. Document frequencies and mean length are then those of the query's language.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.corpus_hash: str = manifest["corpus_hash"]
        self.word_W, self.offset_W, self.posting_N, self.count_N, self.length_P = (
            np.asarray(load_npy(folder / f"{name}.npy"))
            for name in ("words", "posting_offsets", "postings", "counts", "lengths")
        )
        self.languages: list[str] = manifest.get("languages", [ENGLISH])
        self.group_P: NDArray[np.uint8] = np.broadcast_to(np.uint8(0), self.length_P.shape)
        self._saturation_index_P = self.length_P  # index into _saturation_L
        if len(self.languages) > 1:
            self.group_P = np.asarray(load_npy(folder / "groups.npy"))
            self._saturation_index_P = self.length_P + (manifest["longest"] + 1) * self.group_P.astype(np.int32)
        self._saturation_L = self._saturation_table()
        self._in_language_P: NDArray[np.bool_] | None = None  # passages that document frequencies count; None: all
        self._views: dict[str, Self] = {}

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True, corpus_hash: str | None = None) -> Self:
        """Open a folder; ValueError if it is damaged or, with ``corpus_hash``, belongs to another corpus."""
        return cls(folder, read_bound_manifest(folder, KIND, corpus_hash, "snapshot", verify=verify))

    @classmethod
    def of(cls, snapshot: Snapshot, *, verify: bool = False) -> Self:
        """Open the index next to a snapshot; ValueError if there is none."""
        return cls.open(snapshot.folder.with_name(FOLDER), verify=verify, corpus_hash=snapshot.corpus_hash)

    def _saturation_table(self) -> NDArray[np.float64]:
        """Return the saturation of each length [L], or [G L] by language, relative to the mean length."""
        length_L = np.arange(self.manifest["longest"] + 1)
        if len(self.languages) == 1:
            means = [self.manifest["tokens"] / max(self.manifest["passages"], 1)]
        else:
            lengths = [self.length_P[self.group_P == group] for group in range(len(self.languages))]
            means = [float(length_p.mean()) if len(length_p) else 0.0 for length_p in lengths]
        return np.concatenate([saturation(length_L, mean or 1.0) for mean in means])

    def query_languages(self, query: str) -> tuple[str, ...]:
        """Return the corpus's common languages that a query may be in: one if detection is certain, otherwise two."""
        return detect_language(query, self.languages[: self.manifest.get("common_languages", 1)])

    def _parse_query(self, query: Query) -> tuple[Self, list[int]]:
        """Return the index with the statistics of the query's language, and the indices of the query's words."""
        if not isinstance(query, str):
            return self, self._word_indices(query)
        languages = self.query_languages(query)
        numbers = self._word_indices(stem_hashes(query_stems(query, languages)))
        return (self._view(languages[0]) if len(self.languages) > len(languages) == 1 else self), numbers

    def _view(self, language: str) -> Self:
        if language not in self._views:
            view = copy(self)
            view._in_language_P = self.group_P == self.languages.index(language)
            self._views[language] = view
        return self._views[language]

    def __len__(self) -> int:
        """Return the number of passages P."""
        return len(self.length_P)

    def scores(self, query: str) -> Scores:
        """Return BM25 of every passage, [P]."""
        index, words = self._parse_query(query)
        return index._add_words(words, np.zeros(len(self), np.float32))

    def _add_words(self, words: Sequence[int], score_P: Scores) -> Scores:
        for word in words:
            passage_n, weight_n = self._weights(word)
            score_P[passage_n] += weight_n
        return score_P

    def search(self, queries: Sequence[Query], k: int) -> tuple[Scores, Rows]:
        """Return scores and ids of the best k passages of each query, [Q, K], best first; of equal scores the first.

        Only passages with a word of the query are returned; the rest is padded with -inf and -1.
        """
        assert k > 0, k
        score_QK = np.full((len(queries), k), -np.inf, np.float32)
        id_QK = np.full((len(queries), k), -1, np.int64)
        score_P = np.zeros(len(self), np.float32)
        for row, (index, words) in enumerate(map(self._parse_query, queries)):
            if len(self) <= _EXHAUSTIVE:
                passage_n: NDArray[Any] = np.flatnonzero(index._add_words(words, score_P))
                score_n = score_P.take(passage_n)
                score_P.fill(0)
            else:
                passage_n = index._candidates(words, k, score_P)
                score_n = index._score_passages(words, passage_n)
            best = top_k(score_n, k)
            id_QK[row, : len(best)], score_QK[row, : len(best)] = passage_n[best], score_n[best]
        return score_QK, id_QK

    def _candidates(self, words: Sequence[int], k: int, score_P: Scores) -> NDArray[np.int32]:
        """Return candidates that include the best k passages, ascending; ``score_P`` is zero before and after.

        MaxScore (Turtle and Flood 1995): words are processed by decreasing upper bound. Once the bounds of the
        remaining words add up to less than the k-th best score, no passage with only these words can be among the best
        k. From then on, their postings are read only for passages that can still rank there.
        """
        count = {word: words.count(word) for word in words}
        bound = {word: times * float(self._idf(word)) for word, times in count.items()}
        order = sorted(count, key=lambda word: (-bound[word], word))
        remaining = np.cumsum([0.0, *(bound[word] for word in order[::-1])])[::-1].tolist()  # by words processed
        matches = [_NONE]
        size = processed = 0
        for word in order:
            can_stop = k <= size < self._document_frequency(word)
            if can_stop and remaining[processed] < _kth_score(score_P[np.concatenate(matches)], k):
                break
            matches.append(self._add_word(word, count[word], score_P))
            size, processed = size + len(matches[-1]), processed + 1
        matching = np.concatenate(matches)
        score_n = score_P[matching]
        score_P[matching] = 0
        for position in range(processed, len(order) + 1):
            if len(matching) > k:
                possible_n = score_n + remaining[position] >= _kth_score(score_n, k)
                matching, score_n = matching[possible_n], score_n[possible_n]
            if position < len(order):
                score_n += count[order[position]] * self._score_passages(order[position : position + 1], matching)
        matching.sort()
        return matching

    def _add_word(self, word: int, times: int, score_P: Scores) -> NDArray[np.int32]:
        """Add a word's weight to the scores and return the passages that scored 0 before."""
        passage_n, weight_n = self._weights(word)
        before_n = score_P.take(passage_n)
        score_P[passage_n] = before_n + times * weight_n
        new: NDArray[np.int32] = passage_n[before_n == 0]
        return new

    def score_passages(self, query: str, ids: Rows) -> Scores:
        """Return BM25 of given passages, [K]; 0 without a matching word, and for -1."""
        index, words = self._parse_query(query)
        return index._score_passages(words, ids.astype(np.int32))

    def _score_passages(self, words: Sequence[int], id_K: NDArray[np.int32]) -> Scores:
        score_K = np.zeros(len(id_K), np.float32)
        for word in words:
            start, end = self.offset_W[word : word + 2].tolist()
            posting_n = self.posting_N[start:end]
            place_K = np.minimum(np.searchsorted(posting_n, id_K), end - start - 1)
            has_K = posting_n[place_K] == id_K
            score_K[has_K] += self._weight(word, self.count_N[start + place_K[has_K]], id_K[has_K])
        return score_K

    def _word_indices(self, key: NDArray[np.uint64]) -> list[int]:
        """Return the indices of a query's words in order, with repetitions, without words that are not in the index."""
        position = np.searchsorted(self.word_W, key)
        is_known = position < len(self.word_W)
        is_known[is_known] = self.word_W[position[is_known]] == key[is_known]
        indices: list[int] = position[is_known].tolist()
        return indices

    def _document_frequency(self, word: int) -> int:
        start, end = self.offset_W[word : word + 2].tolist()
        return int(end - start)

    def _idf(self, word: int) -> np.float32:
        if self._in_language_P is None:
            return inverse_document_frequency(len(self), self._document_frequency(word))
        posting_n = self.posting_N[slice(*self.offset_W[word : word + 2].tolist())]
        counts = (int(np.count_nonzero(mask)) for mask in (self._in_language_P, self._in_language_P[posting_n]))
        return inverse_document_frequency(*counts)

    def _weights(self, word: int) -> tuple[NDArray[np.int32], Scores]:
        """Return the passages that contain a word, and their weights, [n] each."""
        start, end = self.offset_W[word : word + 2].tolist()
        passage_n = self.posting_N[start:end]
        return passage_n, self._weight(word, self.count_N[start:end], passage_n)

    def _weight(self, word: int, count_n: NDArray[Any], passage_n: NDArray[np.int32]) -> Scores:
        weight_n, idf = np.empty(len(passage_n), np.float32), float(self._idf(word))
        for low in range(0, len(passage_n), _CHUNK):
            part = slice(low, low + _CHUNK)
            saturation_n = self._saturation_L.take(self._saturation_index_P.take(passage_n[part]))
            weight_n[part] = idf * (count_n[part] / (saturation_n + count_n[part]))
        return weight_n
