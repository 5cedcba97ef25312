"""A WordPiece vocabulary that is the same bytes on every machine, and the tokenizer built from it.

The trainer of ``tokenizers`` gives different ids in two processes. Ours merges the most frequent pair of
neighbouring pieces (byte-pair encoding over characters, Sennrich et al. 2016) and breaks ties by the pieces'
code points: the order is total, so that the result depends on nothing but the word counts.
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
WORD_LIMIT = 100
_PREFIX = "##"
_BYTE_BLANK, _SENTENCE_BLANK = "\u0120", "\u2581"  # what byte-level and SentencePiece vocabularies put before a word
_Pair = tuple[str, str]


@dataclass(frozen=True)
class Casing:
    """What a BERT tokenizer does to text before it looks words up."""

    lowercase: bool
    strip_accents: bool


UNCASED = Casing(lowercase=True, strip_accents=True)


def bert_words(counts: Mapping[str, int]) -> Counter[str]:
    """Word counts after BERT's normaliser and pre-tokeniser (lower case, no accents, punctuation apart)."""
    normalizer, pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    words: Counter[str] = Counter()
    for run, count in counts.items():
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(run)):
            if len(word) <= WORD_LIMIT:
                words[word] += count
    return words


def learn_pieces(words: Mapping[str, int], *, size: int, min_count: int = 2) -> list[str]:
    """WordPiece vocabulary of at most ``size`` pieces; equal word counts give equal vocabularies.

    Characters may take half of the room, the most frequent first, so that a small vocabulary of a corpus with
    many scripts still has pieces; the words of other characters become [UNK].
    """
    if size < 4 * len(SPECIAL_TOKENS):
        raise ValueError(f"a vocabulary of {size} pieces is too small; allow at least {4 * len(SPECIAL_TOKENS)}")
    assert min_count >= 1, min_count
    alphabet = _alphabet(words, (size - len(SPECIAL_TOKENS)) // 2, min_count)
    characters = {piece.removeprefix(_PREFIX) for piece in alphabet}
    known = {word: count for word, count in words.items() if characters.issuperset(word)}
    pieces = dict.fromkeys([*SPECIAL_TOKENS, *alphabet])
    merges = _Merges(known)
    while len(pieces) < size and (pair := merges.best(min_count)) is not None:
        pieces[merges.merge(pair)] = None
    return list(pieces)


def _alphabet(words: Mapping[str, int], limit: int, min_count: int) -> list[str]:
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    alphabet: list[str] = []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        forms = [character] if _stands_alone(character) else [character, _PREFIX + character]
        if count < min_count or len(alphabet) + len(forms) > limit:
            break
        alphabet += forms
    return sorted(alphabet)


def _stands_alone(character: str) -> bool:
    """Whether BERT's pre-tokeniser makes this character a word of its own wherever it stands."""
    normal = BertNormalizer(lowercase=True).normalize_str(f"a{character}a")
    return len(BertPreTokenizer().pre_tokenize_str(normal)) > 1


class _Merges:
    """Words as lists of pieces, with the count of every neighbouring pair kept up to date."""

    def __init__(self, words: Mapping[str, int]) -> None:
        ordered = sorted(words.items())
        self._counts = [count for _, count in ordered]
        inner = {character: _PREFIX + character for character in set().union(*words)}  # one string for all places
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
        """The most frequent pair, ties by code points; None when none occurs ``min_count`` times."""
        while self._heap:
            count, left, right = heapq.heappop(self._heap)
            current = self._pairs.get((left, right), 0)
            if current == -count:
                return (left, right) if current >= min_count else None
            if 0 < current < -count:  # its count fell since it was pushed; a risen one was pushed again
                heapq.heappush(self._heap, (-current, left, right))
        return None

    def merge(self, pair: _Pair) -> str:
        """Replace the pair by one piece in all words; returns the piece."""
        piece = pair[0] + pair[1].removeprefix(_PREFIX)
        risen: set[_Pair] = set()
        for index in self._where[pair]:
            before = self._words[index]
            after = _join(before, pair, piece)
            if len(after) == len(before):
                continue  # another merge has taken the pair out of this word
            self._words[index] = after
            count = self._counts[index]
            for old in pairwise(before):
                self._pairs[old] -= count
            for new in pairwise(after):
                self._pairs[new] += count
                if piece in new:
                    self._where[new].add(index)
                    risen.add(new)
        del self._pairs[pair], self._where[pair]
        for new in risen:
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
    """BERT's WordPiece tokenizer; ids are places in the vocabulary, offsets are characters.

    The special tokens are known by name (``token_to_id``) but never found in text: "[MASK]" in a document is
    three words. Raises ValueError when a piece stands twice or a special token is missing.
    """
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    if len(ids) < len(vocabulary):
        twice = next(piece for index, piece in enumerate(vocabulary) if ids[piece] != index)
        raise ValueError(f"the vocabulary holds {twice!r} twice; take the vocabulary file as it was made")
    missing = [token for token in SPECIAL_TOKENS if token not in ids]
    if missing:
        raise ValueError(f"the vocabulary lacks {', '.join(missing)}; use a BERT WordPiece vocabulary")
    tokenizer = Tokenizer(WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=WORD_LIMIT))
    tokenizer.normalizer = BertNormalizer(lowercase=casing.lowercase, strip_accents=casing.strip_accents)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder()
    return tokenizer


def open_tokenizer(text: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json; its special tokens are never found in text, and nothing is cut or padded."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def pieces_of(tokenizer: Tokenizer) -> list[str]:
    """The pieces in the order of their ids; "" for an id without one."""
    return [tokenizer.id_to_token(index) or "" for index in range(tokenizer.get_vocab_size())]


def continuing_pieces(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """[V] whether a wordpiece continues a word, as the tokenizer's model marks it.

    WordPiece marks the pieces that continue a word. Byte-level and SentencePiece vocabularies mark those behind a
    blank: of the others, one that begins with a letter or a digit continues a word.
    """
    if prefix := getattr(tokenizer.model, "continuing_subword_prefix", None):
        return np.array([piece.startswith(prefix) for piece in pieces_of(tokenizer)])
    written = written_pieces(tokenizer)
    if not any(piece.startswith(" ") for piece in written):  # a vocabulary of whole words
        return np.zeros(len(written), dtype=bool)
    return np.array([piece[:1].isalnum() for piece in written])


def written_pieces(tokenizer: Tokenizer) -> list[str]:
    """The pieces as they stand in text, with the blank before them where they have one."""
    pieces = pieces_of(tokenizer)
    if any(piece.startswith(_BYTE_BLANK) for piece in pieces):
        bytes_of = ByteLevel()
        return [bytes_of.decode([piece]) for piece in pieces]
    return [piece.replace(_SENTENCE_BLANK, " ") for piece in pieces]


def vocabulary_bytes(vocabulary: Sequence[str]) -> bytes:
    """The content of vocab.txt: one piece a line."""
    return "".join(f"{piece}\n" for piece in vocabulary).encode()


def vocabulary_hash(vocabulary: Sequence[str]) -> str:
    return hashlib.sha256(vocabulary_bytes(vocabulary)).hexdigest()


def read_vocabulary(path: Path) -> list[str]:
    """The pieces of a vocab.txt, in the order of their ids."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: invalid UTF-8 at byte {error.start}; take the vocabulary file as it was made"
        ) from None
    # Not splitlines: a vocabulary may hold characters that Python takes for line ends.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
