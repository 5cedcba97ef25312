"""Batch tokenization of texts to wordpieces with character offsets, with a cache for BERT's WordPiece.

Chunks between blanks and ASCII punctuation are tokenized once. No wordpiece crosses their borders: the tokenizer drops
blanks, splits off punctuation, and handles every other character alone, except accents, which are with their letter.
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

from realmops.corpus.special_tokens import SpecialTokens, prompt_separator
from realmops.corpus.vocabulary import surface_forms

# Shape legend: N texts, T wordpieces of all texts, C cached chunks, W wordpieces of all cached chunks, V vocabulary.

_CACHE_CHUNKS = 1 << 18
_BLANKS = " \t\n\r"
_PUNCTUATION = r"!-/:-@\[-`{-~"
_CHUNK = re.compile(rf" ?(?:[^{_BLANKS}{_PUNCTUATION}]+|[{_PUNCTUATION}])|[{_BLANKS}]")
_BLANK_CODES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)
# Runs of characters that are one word; words in scripts without blanks cannot be found this way.
_WORD = regex.compile(r"(?V1)[\p{L}\p{M}\p{N}--\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]{2,}")
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wordpieces:
    """Wordpieces of a batch of texts, with offsets in one line: the texts joined by single blanks."""

    ids: Ints  # [T] vocabulary ids
    chars: Longs  # [T, 2] start and end character in the line
    bases: Longs  # [N] start of each text in the line

    def borders(self) -> list[int]:
        """Return the first wordpiece of each text and the end of the last [N + 1]."""
        return [*np.searchsorted(self.chars[:, 0], self.bases).tolist(), len(self.ids)]

    def by_text(self) -> list[list[int]]:
        return [self.ids[a:b].tolist() for a, b in itertools.pairwise(self.borders())]


def build_batch_tokenizer(tokenizer: Tokenizer) -> CachedTokenizer | UncachedTokenizer:
    """Return a batch tokenizer, cached if a word's wordpieces do not depend on its neighbours."""
    bert_parts = (tokenizer.model, WordPiece), (tokenizer.normalizer, BertNormalizer)
    if all(isinstance(part, kind) for part, kind in (*bert_parts, (tokenizer.pre_tokenizer, BertPreTokenizer))):
        return CachedTokenizer(tokenizer)
    return UncachedTokenizer(tokenizer)


def is_inside_word(text: str, chars: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which wordpieces, ``chars`` [T, 2], begin with a letter or digit directly after another, bool [T]."""
    inside = np.zeros(len(text) + 1, dtype=bool)
    for match in _WORD.finditer(text):
        inside[match.start() + 1 : match.end()] = True
    is_inside: NDArray[np.bool_] = inside[chars[:, 0]]
    is_inside[1:] |= chars[1:, 0] < chars[:-1, 1]  # the rest of a character that several wordpieces share
    return is_inside


class _ChunkNumbers(dict[str, int]):
    def __missing__(self, chunk: str) -> int:
        self[chunk] = number = len(self)
        return number


def _lengths(texts: Sequence[str]) -> Longs:
    return np.fromiter(map(len, texts), np.int64, len(texts))


class UncachedTokenizer:
    """Batch tokenizer without a cache, for BPE and Unigram models, whose wordpieces depend on their context."""

    is_context_dependent = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.title_prefix = prompt_separator(tokenizer, SpecialTokens.of(tokenizer).document)
        self._is_blank_V = np.array([not piece.strip() for piece in surface_forms(tokenizer)])

    def encode(self, texts: Sequence[str]) -> Wordpieces:
        """Tokenize texts without special tokens; the offsets of a wordpiece exclude blanks before it."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        lengths = _lengths(texts)
        bases = np.cumsum(lengths + 1) - (lengths + 1)
        ids = np.fromiter(itertools.chain.from_iterable(e.ids for e in encoded), np.int32)
        chars = np.concatenate([np.empty((0, 2), np.int64), *(_offsets(e.offsets) for e in encoded)])
        chars += np.repeat(bases, [len(e.ids) for e in encoded])[:, None]
        line = np.frombuffer(" ".join([*texts, ""]).encode("utf-32-le"), np.uint32)
        is_blank = np.isin(line, _BLANK_CODES)
        # for each character, the next that is not blank
        next_visible = np.minimum.accumulate(np.where(is_blank, len(line), np.arange(len(line)))[::-1])[::-1]
        first = np.append(next_visible, len(line))[chars[:, 0]]
        empty = self._is_blank_V[ids] & (first < chars[:, 1])
        chars[empty, 1] = chars[empty, 0]
        chars[:, 0] = np.where(first < chars[:, 1], first, chars[:, 0])
        return Wordpieces(ids, chars, bases)


def _offsets(offsets: Sequence[tuple[int, int]]) -> Longs:
    return np.array(offsets, np.int64).reshape(-1, 2)


class CachedTokenizer:
    """Batch tokenizer with a bounded cache of chunks, for ``vocabulary.build_tokenizer``; not thread-safe."""

    is_context_dependent, title_prefix = False, ""

    _first: Longs  # [C] first wordpiece of each chunk
    _count: Longs  # [C] number of its wordpieces
    _size: Longs  # [C] number of its characters
    _ids: Ints  # [W] vocabulary ids
    _chars: Longs  # [W, 2] start and end character in the chunk

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._clear()

    def encode(self, texts: Sequence[str]) -> Wordpieces:
        lengths = _lengths(texts)
        bases = np.cumsum(lengths + 1) - (lengths + 1)
        chunks = _CHUNK.findall(" ".join(texts))
        if len(self._numbers) > _CACHE_CHUNKS:
            self._clear()
        number = np.fromiter(map(self._numbers.__getitem__, chunks), np.int64, len(chunks))
        self._add(list(itertools.islice(self._numbers, len(self._size), None)))
        size, count = self._size[number], self._count[number]
        base, total = np.cumsum(size) - size, int(count.sum())
        row = np.arange(total) + np.repeat(self._first[number] - (np.cumsum(count) - count), count)
        return Wordpieces(self._ids[row], self._chars[row] + np.repeat(base, count)[:, None], bases)

    def _add(self, chunks: Sequence[str]) -> None:
        """Tokenize new chunks as one line, which is faster than one by one, and cache them."""
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

    def _clear(self) -> None:
        self._numbers = _ChunkNumbers()
        empty = np.empty(0, np.int64)
        self._first, self._count, self._size = empty, empty, empty
        self._ids, self._chars = np.empty(0, np.int32), np.empty((0, 2), np.int64)
