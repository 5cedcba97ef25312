"""Cutting of documents into passages: greedy blocks of whole sentences (ORQA, Lee et al. 2019, section 4).

Sentences are split by ``sentencex`` (Wikimedia). Of five splitters on 22 short texts and on Wikipedia paragraphs it was
the most accurate and the fastest, and faster than the tokenizer: sentencex 20 correct at 42 MB/s, nupunkt 19 at 4.0,
pysbd 18 at 0.12, syntok 17 at 0.64, blingfire 17 at 9.3. ``tests/corpus/test_passages.py`` holds the 20 texts.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import regex
import sentencex
from numpy.typing import NDArray

from realmops.artifacts import canonical_json
from realmops.corpus.languages import AUTO, ENGLISH, detect_language
from realmops.corpus.tokenizer import CachedTokenizer, UncachedTokenizer
from realmops.readers.documents import Document

# Shape legend: T wordpieces, S sentences, P passages of a batch of documents.

_MARKS = regex.compile(r"\p{Mn}+")  # combining marks
_SPACES = re.compile(r"[^\S\n]")
# Paragraphs, and rows of tables, which are lines with tabs.
_PARAGRAPHS = re.compile(r"(?<=\n\n)(?!\n)")
_ROWS = re.compile(rf"{_PARAGRAPHS.pattern}|(?<=[^\n]\n)(?=[^\n\t]*\t)")
SPECIAL_TOKENS_PER_DOCUMENT = 3  # [CLS] title [SEP] body [SEP]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage: ranges in its document and in the flat arrays of a batch."""

    document: int  # number of the document in the batch
    chars: tuple[int, int]  # (start, end) in the document's text
    sentences: tuple[int, int]  # (first, end) row of the batch's sentences
    tokens: tuple[int, int]  # (first, end) row of the batch's wordpieces
    digest: str  # ``passage_digest`` of title and text


@dataclass(frozen=True, slots=True)
class PassageBatch:
    """Passages of a batch of documents, with flat arrays of wordpieces and sentences."""

    passages: list[Passage]
    ids: Ints  # [T] body wordpieces of all passages, concatenated
    chars: Ints  # [T, 2] start and end of each wordpiece in its passage's text
    sentences: Ints  # [S, 2] first and end wordpiece, relative to the passage's body
    titles: list[list[int]]  # title wordpieces of each document
    languages: list[str]  # language code of each document
    digests: list[bytes]  # ``text_digest`` of each document

    def documents(self) -> list[int]:
        """Return the numbers of the documents that have passages, in order."""
        return list(dict.fromkeys(passage.document for passage in self.passages))

    def without(self, documents: Collection[int]) -> PassageBatch:
        """Return the batch without the passages of some documents, with sentence and token rows renumbered."""
        passages, sentences, tokens = [], 0, 0
        is_kept = [passage.document not in documents for passage in self.passages]
        for passage in itertools.compress(self.passages, is_kept):
            ends = sentences + length(passage.sentences), tokens + length(passage.tokens)
            passages.append(replace(passage, sentences=(sentences, ends[0]), tokens=(tokens, ends[1])))
            sentences, tokens = ends
        is_kept_T = np.repeat(is_kept, [length(passage.tokens) for passage in self.passages])
        is_kept_S = np.repeat(is_kept, [length(passage.sentences) for passage in self.passages])
        arrays = self.ids[is_kept_T], self.chars[is_kept_T], self.sentences[is_kept_S]
        return PassageBatch(passages, *arrays, self.titles, self.languages, self.digests)


def length(rows: tuple[int, int]) -> int:
    """Return the number of rows of a (first, end) range."""
    return rows[1] - rows[0]


def split_sentences(text: str, language: str = ENGLISH) -> list[tuple[int, int]]:
    """Return (start, end) characters of each sentence in order, without surrounding whitespace."""
    bounds = []
    end = 0
    for piece in _pieces(text, language):
        start, end = end, end + len(piece)
        if stripped := piece.strip():
            first = start + len(piece) - len(piece.lstrip())
            bounds.append((first, first + len(stripped)))
    assert end == len(text), "the pieces do not partition the text"
    return bounds


def _pieces(text: str, language: str) -> Iterator[str]:
    """Yield sentences and the whitespace between them; their concatenation is the text.

    Paragraphs are segmented separately because sentencex loses paragraphs of texts over some thousand characters, and
    rows of tables because it joins them. Text that it still loses becomes a sentence. Non-ASCII whitespace is replaced
    by spaces for it: sentencex panics if a no-break space separates a capital and a full stop.
    """
    for paragraph in (_ROWS if "\t" in text else _PARAGRAPHS).split(text):
        plain = _SPACES.sub(" ", paragraph)
        end = 0
        for sentence in sentencex.segment(language, plain):
            start = plain.find(sentence, end)
            if start < 0:
                break
            if start > end:
                yield paragraph[end:start]
            end = start + len(sentence)
            yield paragraph[start:end]
        if end < len(paragraph):
            yield paragraph[end:]


def pack_sentences(lengths: Sequence[int], title_length: int, block_wordpieces: int) -> Iterator[tuple[int, int]]:
    """Pack whole sentences greedily into blocks without overlap; yield the (first, end) sentence of each block.

    A block fits if 3 + title + body wordpieces <= ``block_wordpieces``; a sentence that exceeds the limit alone
    becomes a block.
    """
    room = block_wordpieces - SPECIAL_TOKENS_PER_DOCUMENT - title_length
    first = used = 0
    for index, length in enumerate(lengths):
        if index > first and used + length > room:
            yield first, index
            first, used = index, 0
        used += length
    if lengths:
        yield first, len(lengths)


def text_digest(title: str, text: str) -> bytes:
    """Return a 16-byte hash of a document's title and text, distinct from the hash of any passage."""
    return hashlib.sha256(f"{len(title)} {title} {text}".encode(errors="surrogatepass")).digest()[:16]


def passage_digest(title: str, text: str) -> str:
    """Return a hash of a passage's title and text, 32 hexadecimal digits."""
    return hashlib.sha256(canonical_json([title, text])).hexdigest()[:32]


def cut_passages(
    documents: Sequence[Document],
    tokenizer: CachedTokenizer | UncachedTokenizer,
    *,
    block_wordpieces: int | None,
    language: str = ENGLISH,
) -> PassageBatch:
    """Cut a batch of documents into passages, with wordpieces and offsets.

    Every text is tokenised once as a whole; character offsets continue across texts, so that one search finds the
    wordpieces of all sentences. A tokenizer whose wordpieces depend on their context (``is_context_dependent``)
    tokenises the passages again, so that their wordpieces depend on the passage's text alone. ``block_wordpieces`` is
    the limit of ``pack_sentences``, or None: each document is one passage. ``language`` is that of all documents, or
    ``AUTO`` to detect that of each.
    """
    title_texts = [document.title and tokenizer.title_prefix + document.title for document in documents]
    titles = tokenizer.encode(title_texts).by_text()
    body = tokenizer.encode([document.text for document in documents])
    chars, bases = body.chars, body.bases.tolist()
    if not tokenizer.is_context_dependent:
        _cover_marks(documents, chars)
    languages = [detect_language(f"{d.title} {d.text}")[0] if language == AUTO else language for d in documents]
    counts, sentence_chars, sentence_tokens = _sentences(documents, languages, bases, chars)

    passages = []
    first_row = 0
    for index, document in enumerate(documents):
        rows = range(first_row, first_row + counts[index])
        first_row = rows.stop
        borders = [*(sentence_tokens[row][0] for row in rows), *(sentence_tokens[row][1] for row in rows[-1:])]
        lengths = [end - first for first, end in itertools.pairwise(borders)]  # with trailing whitespace
        room = sys.maxsize if block_wordpieces is None else block_wordpieces
        for first, end in pack_sentences(lengths, len(titles[index]), room):
            low, high = rows.start + first, rows.start + end - 1
            start, stop = sentence_chars[low][0] - bases[index], sentence_chars[high][1] - bases[index]
            tokens = sentence_tokens[low][0], sentence_tokens[high][1]
            digest = passage_digest(document.title, document.text[start:stop])
            passages.append(Passage(index, (start, stop), (low, high + 1), tokens, digest))
    digests = [text_digest(document.title, document.text) for document in documents]
    if tokenizer.is_context_dependent:
        ends = np.array(sentence_chars, np.int64)
        return _encode_passages(documents, tokenizer, passages, ends, bases, titles, languages, digests)
    sentences = _relative_sentences(sentence_tokens, passages)
    relative = _relative(chars, passages, bases)
    return PassageBatch(passages, body.ids, relative, sentences, titles, languages, digests)


def _encode_passages(
    documents: Sequence[Document],
    tokenizer: CachedTokenizer | UncachedTokenizer,
    passages: Sequence[Passage],
    sentence_chars: NDArray[np.int64],
    bases: Sequence[int],
    titles: list[list[int]],
    languages: list[str],
    digests: list[bytes],
) -> PassageBatch:
    """Tokenise the text of each passage separately; whitespace belongs to the sentence before it."""
    body = tokenizer.encode([documents[passage.document].text[slice(*passage.chars)] for passage in passages])
    chars, encoded = body.chars.copy(), []
    sentences: list[tuple[int, int]] = []
    for passage, base, (first, end) in zip(passages, body.bases, itertools.pairwise(body.borders()), strict=True):
        chars[first:end] -= base
        begins = sentence_chars[slice(*passage.sentences), 0] - bases[passage.document] - passage.chars[0]
        starts = np.unique(np.searchsorted(np.maximum.accumulate(chars[first:end, 1]), begins[1:], side="right"))
        bounds = [0, *starts[(starts > 0) & (starts < end - first)].tolist(), end - first]
        rows = len(sentences), len(sentences) + len(bounds) - 1
        encoded.append(replace(passage, tokens=(first, end), sentences=rows))
        sentences += itertools.pairwise(bounds)
    arrays = body.ids, chars.astype(np.int32), np.array(sentences, np.int32).reshape(-1, 2)
    return PassageBatch(encoded, *arrays, titles, languages, digests)


def _cover_marks(documents: Sequence[Document], chars: NDArray[np.int64]) -> None:
    """Extend wordpieces in place over the combining marks that follow them.

    The normaliser drops these marks, so that the tokenizer's offsets would cut "cafe" out of a decomposed "café".
    """
    line = " ".join(document.text for document in documents)
    if line.isascii() or not len(chars):
        return
    marks = [match.span() for match in _MARKS.finditer(line)]
    start, stop = np.array([*marks, (len(line), len(line))]).T
    ends = chars[:, 1].copy()
    run = np.searchsorted(start, ends)
    chars[:, 1] = np.where(start[run] == ends, stop[run], ends)


def _sentences(
    documents: Sequence[Document], languages: Sequence[str], bases: Sequence[int], chars: NDArray[np.int64]
) -> tuple[list[int], list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the number of sentences of each document, and (start, end) chars and (first, end) wordpieces of each.

    A sentence without wordpieces (only control characters) is dropped; sentences whose border is inside a wordpiece
    are merged.
    """
    bounds = [split_sentences(document.text, code) for document, code in zip(documents, languages, strict=True)]
    flat = np.array(
        [(start + base, end + base) for base, pairs in zip(bases, bounds, strict=True) for start, end in pairs],
        np.int64,
    ).reshape(-1, 2)
    first_tokens = np.searchsorted(chars[:, 0], flat, side="left")
    ends_before = np.concatenate([[0], chars[:, 1]])[first_tokens[:, 0]]
    rows = zip(flat.tolist(), first_tokens.tolist(), (ends_before > flat[:, 0]).tolist(), strict=True)
    counts: list[int] = []
    sentence_chars: list[tuple[int, int]] = []
    sentence_tokens: list[tuple[int, int]] = []
    for pairs in bounds:
        before = len(sentence_chars)
        for (start, end), (first, stop), is_inside in itertools.islice(rows, len(pairs)):
            if is_inside and len(sentence_chars) > before:
                start, first = sentence_chars.pop()[0], sentence_tokens.pop()[0]
            if stop > first:
                sentence_chars.append((start, end))
                sentence_tokens.append((first, stop))
        counts.append(len(sentence_chars) - before)
    return counts, sentence_chars, sentence_tokens


def _relative(chars: NDArray[np.int64], passages: Sequence[Passage], bases: Sequence[int]) -> Ints:
    """Return the characters [T, 2] of wordpieces relative to their passage."""
    lengths = [length(passage.tokens) for passage in passages]
    assert sum(lengths) == len(chars), "a wordpiece is outside all sentences"
    starts = np.asarray([bases[passage.document] + passage.chars[0] for passage in passages], np.int64)
    return (chars - np.repeat(starts, lengths)[:, None]).astype(np.int32)


def _relative_sentences(sentence_tokens: Sequence[tuple[int, int]], passages: Sequence[Passage]) -> Ints:
    """Return the wordpieces [S, 2] of sentences relative to their passage."""
    lengths = [length(passage.sentences) for passage in passages]
    starts = np.repeat(np.asarray([passage.tokens[0] for passage in passages], np.int64), lengths)
    tokens = np.asarray(sentence_tokens, np.int64).reshape(-1, 2)
    return (tokens - starts[:, None]).astype(np.int32)
