"""The WordPiece tokenizer with a memory of words: the same wordpieces, several times as fast.

Most words of a text were there before. Texts are cut into chunks at blanks and ASCII punctuation; each chunk is
tokenised once, by the tokenizer itself, and looked up ever after. No wordpiece reaches over such a border: the
tokenizer takes blanks away, makes punctuation a word of its own, and treats every other character alone, but
for accents, which stay in the chunk of their letter.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

# Shape legend: N texts, T wordpieces of all texts, C chunks in memory, W wordpieces of all chunks in memory.

_CHUNKS_IN_MEMORY = 1 << 18
_BLANKS = " \t\n\r"
_PUNCTUATION = r"!-/:-@\[-`{-~"
_CHUNK = re.compile(rf" ?(?:[^{_BLANKS}{_PUNCTUATION}]+|[{_PUNCTUATION}])|[{_BLANKS}]")
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wordpieces:
    """Texts as wordpieces, as if they stood on one line with a blank between each and the next."""

    ids: Ints  # [T] places in the vocabulary
    chars: Longs  # [T, 2] start and end on that line
    bases: Longs  # [N] where each text starts on it

    def by_text(self) -> list[list[int]]:
        borders = np.searchsorted(self.chars[:, 0], self.bases).tolist()
        return [self.ids[a:b].tolist() for a, b in itertools.pairwise([*borders, len(self.ids)])]


class _ChunkNumbers(dict[str, int]):
    """The number of each chunk, by first appearance."""

    def __missing__(self, chunk: str) -> int:
        self[chunk] = number = len(self)
        return number


def _lengths(texts: Sequence[str]) -> Longs:
    return np.fromiter(map(len, texts), np.int64, len(texts))


class CachedTokenizer:
    """A tokenizer of ``vocabulary.build_tokenizer`` and the chunks that it has seen, in bounded memory."""

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
        chars = np.array(encoding.offsets, np.int64).reshape(-1, 2)
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
