"""Texts to wordpieces with the characters of each: BERT's WordPiece by a memory of words, any other as it is.

The memory gives the same wordpieces several times as fast. Most words of a text were there before. Texts are cut into
chunks at blanks and ASCII punctuation; each chunk is tokenised once, by the tokenizer itself, and looked up ever after.
No wordpiece reaches over such a border: the tokenizer takes blanks away, makes punctuation a word of its own, and
treats every other character alone, but for accents, which stay in the chunk of their letter.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from realmops.text.special import SpecialTokens, blank_before
from realmops.text.vocabulary import written_pieces

# Shape legend: N texts, T wordpieces of all texts, C chunks in memory, W wordpieces of all chunks in memory,
# V vocabulary.

_CHUNKS_IN_MEMORY = 1 << 18
_BLANKS = " \t\n\r"
_PUNCTUATION = r"!-/:-@\[-`{-~"
_CHUNK = re.compile(rf" ?(?:[^{_BLANKS}{_PUNCTUATION}]+|[{_PUNCTUATION}])|[{_BLANKS}]")
_BLANK_CODES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)
# Runs of characters that are one word; scripts without blanks have words too, which only pieces tell apart.
_WORD = regex.compile(r"(?V1)[\p{L}\p{M}\p{N}--\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]{2,}")
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wordpieces:
    """Texts as wordpieces, as if they stood on one line with a blank between each and the next."""

    ids: Ints  # [T] places in the vocabulary
    chars: Longs  # [T, 2] start and end on that line
    bases: Longs  # [N] where each text starts on it

    def borders(self) -> list[int]:
        """[N + 1] the first wordpiece of each text, and the end of the last."""
        return [*np.searchsorted(self.chars[:, 0], self.bases).tolist(), len(self.ids)]

    def by_text(self) -> list[list[int]]:
        return [self.ids[a:b].tolist() for a, b in itertools.pairwise(self.borders())]


def texts_tokenizer(tokenizer: Tokenizer) -> CachedTokenizer | WholeTokenizer:
    """What makes wordpieces of many texts: with a memory of words where no word's pieces depend on its neighbours."""
    berts = (tokenizer.model, WordPiece), (tokenizer.normalizer, BertNormalizer)
    if all(isinstance(part, kind) for part, kind in (*berts, (tokenizer.pre_tokenizer, BertPreTokenizer))):
        return CachedTokenizer(tokenizer)
    return WholeTokenizer(tokenizer)


def inside_words(text: str, chars: NDArray[Any]) -> NDArray[np.bool_]:
    """[T] whether a wordpiece begins inside a word of the text: behind a letter or digit, with one.

    ``chars`` are its characters, blanks in front of it left out.
    """
    inside = np.zeros(len(text) + 1, dtype=bool)
    for match in _WORD.finditer(text):
        inside[match.start() + 1 : match.end()] = True
    found: NDArray[np.bool_] = inside[chars[:, 0]]
    found[1:] |= chars[1:, 0] < chars[:-1, 1]  # a part of a character
    return found


class _ChunkNumbers(dict[str, int]):
    """The number of each chunk, by first appearance."""

    def __missing__(self, chunk: str) -> int:
        self[chunk] = number = len(self)
        return number


def _lengths(texts: Sequence[str]) -> Longs:
    return np.fromiter(map(len, texts), np.int64, len(texts))


class WholeTokenizer:
    """Any tokenizer: BPE or Unigram, whose pieces depend on blanks and words around them."""

    in_context = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.before_titles = blank_before(tokenizer, SpecialTokens.of(tokenizer).document)
        self._is_blank_V = np.array([not piece.strip() for piece in written_pieces(tokenizer)])

    def encode(self, texts: Sequence[str]) -> Wordpieces:
        """The wordpieces of ``Tokenizer.encode`` without special tokens; blanks before a word are not its characters.

        A piece of nothing but blanks has theirs, or none where the text has none there.
        """
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        lengths = _lengths(texts)
        bases = np.cumsum(lengths + 1) - (lengths + 1)
        ids = np.fromiter(itertools.chain.from_iterable(one.ids for one in encoded), np.int32)
        chars = np.concatenate([np.empty((0, 2), np.int64), *(_offsets(one.offsets) for one in encoded)])
        chars += np.repeat(bases, [len(one.ids) for one in encoded])[:, None]
        line = np.frombuffer(" ".join([*texts, ""]).encode("utf-32-le"), np.uint32)
        is_blank = np.isin(line, _BLANK_CODES)
        # of each character the first from there on that is no blank
        behind = np.minimum.accumulate(np.where(is_blank, len(line), np.arange(len(line)))[::-1])[::-1]
        first = np.append(behind, len(line))[chars[:, 0]]
        empty = self._is_blank_V[ids] & (first < chars[:, 1])
        chars[empty, 1] = chars[empty, 0]
        chars[:, 0] = np.where(first < chars[:, 1], first, chars[:, 0])
        return Wordpieces(ids, chars, bases)


def _offsets(offsets: Sequence[tuple[int, int]]) -> Longs:
    return np.array(offsets, np.int64).reshape(-1, 2)


class CachedTokenizer:
    """A tokenizer of ``vocabulary.build_tokenizer`` and a bounded memory of chunks that it has seen; for one thread."""

    in_context, before_titles = False, ""

    _first: Longs  # [C] the first of a chunk's wordpieces
    _count: Longs  # [C] and how many they are
    _size: Longs  # [C] characters of the chunk
    _ids: Ints  # [W]
    _chars: Longs  # [W, 2] in the chunk

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._forget()

    def encode(self, texts: Sequence[str]) -> Wordpieces:
        """The wordpieces of texts: those of ``Tokenizer.encode`` without special tokens."""
        lengths = _lengths(texts)
        bases = np.cumsum(lengths + 1) - (lengths + 1)
        chunks = _CHUNK.findall(" ".join(texts))
        if len(self._numbers) > _CHUNKS_IN_MEMORY:
            self._forget()
        number = np.fromiter(map(self._numbers.__getitem__, chunks), np.int64, len(chunks))
        self._learn(list(itertools.islice(self._numbers, len(self._size), None)))
        size, count = self._size[number], self._count[number]
        base, total = np.cumsum(size) - size, int(count.sum())
        row = np.arange(total) + np.repeat(self._first[number] - (np.cumsum(count) - count), count)
        return Wordpieces(self._ids[row], self._chars[row] + np.repeat(base, count)[:, None], bases)

    def _learn(self, chunks: Sequence[str]) -> None:
        """Tokenise chunks that are new, all on one line: one long text costs less than many short ones."""
        size = _lengths(chunks)
        base = np.cumsum(size + 1) - (size + 1)
        encoding = self._tokenizer.encode(" ".join(chunks), add_special_tokens=False)
        chars = _offsets(encoding.offsets)
        first = np.searchsorted(chars[:, 0], base)
        count = np.diff(first, append=len(chars))
        self._first = np.concatenate([self._first, len(self._ids) + first])
        self._count = np.concatenate([self._count, count])
        self._size = np.concatenate([self._size, size])
        self._ids = np.concatenate([self._ids, np.array(encoding.ids, np.int32)])
        self._chars = np.concatenate([self._chars, chars - np.repeat(base, count)[:, None]])

    def _forget(self) -> None:
        self._numbers = _ChunkNumbers()
        nothing = np.empty(0, np.int64)
        self._first, self._count, self._size = nothing, nothing, nothing
        self._ids, self._chars = np.empty(0, np.int32), np.empty((0, 2), np.int64)
