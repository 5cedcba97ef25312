"""A deterministic WordPiece vocabulary, and tokenizers built from one.

The trainer of ``tokenizers`` is not deterministic; these byte-pair merges (Sennrich et al. 2016) depend on counts only.
"""

import hashlib
import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORD_LIMIT = 100  # characters; longer words become [UNK], as in BERT
_PREFIX = "##"
_BYTE_BLANK, _SENTENCE_BLANK = "\u0120", "\u2581"  # word prefixes of byte-level and SentencePiece vocabularies
_Pair = tuple[str, str]


@dataclass(frozen=True)
class Casing:
    """Normalization of text by a BERT tokenizer."""

    lowercase: bool
    strip_accents: bool


UNCASED = Casing(lowercase=True, strip_accents=True)


def bert_words(counts: Mapping[str, int]) -> Counter[str]:
    """Count words after BERT's normalizer and pre-tokenizer: in lower case, without accents, punctuation split off."""
    normalizer, pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    words: Counter[str] = Counter()
    for run, count in counts.items():
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(run)):
            if len(word) <= WORD_LIMIT:
                words[word] += count
    return words


def learn_pieces(words: Mapping[str, int], *, size: int, min_count: int = 2) -> list[str]:
    """Learn at most ``size`` pieces with the special tokens; equal word counts give equal vocabularies.

    Characters take at most half of them, so that a corpus with many scripts still has longer pieces.
    """
    if size < 4 * len(SPECIAL_TOKENS):
        raise ValueError(f"a vocabulary of {size} pieces is too small; allow at least {4 * len(SPECIAL_TOKENS)}")
    assert min_count >= 1, min_count
    alphabet = _alphabet(words, (size - len(SPECIAL_TOKENS)) // 2, min_count)
    characters = {piece.removeprefix(_PREFIX) for piece in alphabet}
    encodable = {word: count for word, count in words.items() if characters.issuperset(word)}
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *alphabet])
    pairs = _PairCounts(encodable)
    while len(pieces) < size and (pair := pairs.best(min_count)) is not None:
        pieces[pairs.merge(pair)] = None
    return list(pieces)


def _alphabet(words: Mapping[str, int], limit: int, min_count: int) -> list[str]:
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    alphabet: list[str] = []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        forms = [character] if _is_own_word(character) else [character, _PREFIX + character]
        if count < min_count or len(alphabet) + len(forms) > limit:
            break
        alphabet += forms
    return sorted(alphabet)


def _is_own_word(character: str) -> bool:
    normal = BertNormalizer(lowercase=True).normalize_str(f"a{character}a")
    return len(BertPreTokenizer().pre_tokenize_str(normal)) > 1


class _PairCounts:
    """Words as lists of pieces, with up-to-date counts of all adjacent pairs."""

    def __init__(self, words: Mapping[str, int]) -> None:
        ordered = sorted(words.items())
        self._counts = [count for _, count in ordered]
        inner = {character: _PREFIX + character for character in set().union(*words)}  # one shared string each
        self._words = [[word[0], *(inner[character] for character in word[1:])] for word, _ in ordered]
        self._pairs: defaultdict[_Pair, int] = defaultdict(int)
        self._where: defaultdict[_Pair, set[int]] = defaultdict(set)
        for index, (pieces, count) in enumerate(zip(self._words, self._counts, strict=True)):
            for pair in pairwise(pieces):
                self._pairs[pair] += count
                self._where[pair].add(index)
        self._heap = [(-count, *pair) for pair, count in self._pairs.items()]
        heapq.heapify(self._heap)

    def best(self, min_count: int) -> _Pair | None:
        while self._heap:
            count, left, right = heapq.heappop(self._heap)
            current = self._pairs.get((left, right), 0)
            if current == -count:
                return (left, right) if current >= min_count else None
            if 0 < current < -count:  # it decreased since it was pushed; increased counts are pushed by merge
                heapq.heappush(self._heap, (-current, left, right))
        return None

    def merge(self, pair: _Pair) -> str:
        piece = pair[0] + pair[1].removeprefix(_PREFIX)
        increased: set[_Pair] = set()
        for index in self._where[pair]:
            before = self._words[index]
            after = _join(before, pair, piece)
            if len(after) == len(before):
                continue  # an earlier merge removed the pair from this word
            self._words[index] = after
            count = self._counts[index]
            for old in pairwise(before):
                self._pairs[old] -= count
            for new in pairwise(after):
                self._pairs[new] += count
                if piece in new:
                    self._where[new].add(index)
                    increased.add(new)
        del self._pairs[pair], self._where[pair]
        for new in increased:
            if self._pairs[new] > 0:
                heapq.heappush(self._heap, (-self._pairs[new], *new))
        return piece


def _join(pieces: list[str], pair: _Pair, piece: str) -> list[str]:
    joined: list[str] = []
    for right in pieces:
        if joined and (joined[-1], right) == pair:
            joined[-1] = piece
        else:
            joined.append(right)
    return joined


def build_tokenizer(vocabulary: Sequence[str], casing: Casing = UNCASED) -> Tokenizer:
    """Build BERT's WordPiece tokenizer; special tokens never match in text: "[MASK]" in a document is three words."""
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    if len(ids) < len(vocabulary):
        duplicate = next(piece for index, piece in enumerate(vocabulary) if ids[piece] != index)
        raise ValueError(f"the vocabulary has {duplicate!r} twice; use the original vocabulary file")
    missing = [token for token in SPECIAL_TOKENS if token not in ids]
    if missing:
        raise ValueError(f"the vocabulary lacks {', '.join(missing)}; use a BERT WordPiece vocabulary")
    tokenizer = Tokenizer(WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=WORD_LIMIT))
    tokenizer.normalizer = BertNormalizer(lowercase=casing.lowercase, strip_accents=casing.strip_accents)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder()
    return tokenizer


def open_tokenizer(text: str) -> Tokenizer:
    """Load a tokenizer from JSON, without truncation, padding, and matching of special tokens in text."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def list_pieces(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.id_to_token(index) or "" for index in range(tokenizer.get_vocab_size())]


def is_continuation(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return which wordpieces [V] continue a word: by WordPiece's mark, else by no blank before a letter or digit."""
    if prefix := getattr(tokenizer.model, "continuing_subword_prefix", None):
        return np.array([piece.startswith(prefix) for piece in list_pieces(tokenizer)])
    surface = surface_forms(tokenizer)
    if not any(piece.startswith(" ") for piece in surface):  # a vocabulary of whole words
        return np.zeros(len(surface), dtype=bool)
    return np.array([piece[:1].isalnum() for piece in surface])


def surface_forms(tokenizer: Tokenizer) -> list[str]:
    """Return the pieces as they appear in text, with their leading blank if any."""
    pieces = list_pieces(tokenizer)
    if any(piece.startswith(_BYTE_BLANK) for piece in pieces):
        decoder = ByteLevel()
        return [decoder.decode([piece]) for piece in pieces]
    return [piece.replace(_SENTENCE_BLANK, " ") for piece in pieces]


def vocabulary_bytes(vocabulary: Sequence[str]) -> bytes:
    return "".join(f"{piece}\n" for piece in vocabulary).encode()


def vocabulary_hash(vocabulary: Sequence[str]) -> str:
    return hashlib.sha256(vocabulary_bytes(vocabulary)).hexdigest()


def read_vocabulary(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: invalid UTF-8 at byte {error.start}; use the original vocabulary file") from None
    # Not splitlines: pieces may contain characters that Python treats as line ends.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
