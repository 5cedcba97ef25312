"""Documents cut into passages: greedy blocks of whole sentences (ORQA, Lee et al. 2019, section 4).

Sentences come from ``sentencex`` (Wikimedia's splitter). Of five splitters tried on 22 short texts and on Wikipedia
paragraphs it was right most often and fastest, and faster than the tokenizer: sentencex 20 right and 42 MB/s, nupunkt
19 and 4.0, pysbd 18 and 0.12, syntok 17 and 0.64, blingfire 17 and 9.3. ``tests/corpus/test_passages.py`` keeps the 20.
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
from realmops.corpus.documents import Document
from realmops.text.languages import AUTO, ENGLISH, detect
from realmops.text.tokenizer import CachedTokenizer, WholeTokenizer

# Shape legend: T wordpieces, S sentences, P passages of a batch of documents.

_MARKS = regex.compile(r"\p{Mn}+")  # accents that stand on the character before
_BLANKS = re.compile(r"[^\S\n]")
_PARAGRAPHS = re.compile(r"(?<=\n\n)(?!\n)")
SPECIAL_TOKENS_PER_DOCUMENT = 3  # [CLS] title [SEP] body [SEP]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Passage:
    """A block: where it lies in its document and in the batch's flat arrays.

    ``sentences`` and ``tokens`` are (first, end) rows of the batch's arrays, ``chars`` is (start, end) in
    the document's text.
    """

    document: int
    chars: tuple[int, int]
    sentences: tuple[int, int]
    tokens: tuple[int, int]
    digest: str


@dataclass(frozen=True, slots=True)
class PassageBatch:
    """The passages of some documents."""

    passages: list[Passage]
    ids: Ints  # [T] body wordpieces of all passages, one after another
    chars: Ints  # [T, 2] start and end of each wordpiece in its passage's text
    sentences: Ints  # [S, 2] first and end wordpiece, relative to the passage's body
    titles: list[list[int]]  # the title's wordpieces of each document
    languages: list[str]  # of each document
    digests: list[bytes]  # of each document's title and text

    def documents(self) -> list[int]:
        """The documents that have passages, in order."""
        return list(dict.fromkeys(passage.document for passage in self.passages))

    def without(self, documents: Collection[int]) -> PassageBatch:
        """The same batch without the passages of some documents; rows of sentences and tokens are counted anew."""
        kept, sentences, tokens = [], 0, 0
        keep = [passage.document not in documents for passage in self.passages]
        for passage in itertools.compress(self.passages, keep):
            ends = sentences + length(passage.sentences), tokens + length(passage.tokens)
            kept.append(replace(passage, sentences=(sentences, ends[0]), tokens=(tokens, ends[1])))
            sentences, tokens = ends
        of_token = np.repeat(keep, [length(passage.tokens) for passage in self.passages])
        of_sentence = np.repeat(keep, [length(passage.sentences) for passage in self.passages])
        rows = self.ids[of_token], self.chars[of_token], self.sentences[of_sentence]
        return PassageBatch(kept, *rows, self.titles, self.languages, self.digests)


def length(rows: tuple[int, int]) -> int:
    """How many rows lie from a first one to an end."""
    return rows[1] - rows[0]


def split_sentences(text: str, language: str = ENGLISH) -> list[tuple[int, int]]:
    """(start, end) characters of each sentence, in order, blanks around it left out."""
    bounds = []
    end = 0
    for piece in _pieces(text, language):
        start, end = end, end + len(piece)
        if bare := piece.strip():
            first = start + len(piece) - len(piece.lstrip())
            bounds.append((first, first + len(bare)))
    assert end == len(text), "the pieces are no partition of the text"
    return bounds


def _pieces(text: str, language: str) -> Iterator[str]:
    """Sentences with the blanks between them: joined they are the text.

    sentencex loses paragraphs of texts over some thousand characters; given one by one they stay. What is still
    missing becomes a sentence. Blanks that are not ASCII (a no-break space) it sees as spaces: it panics at a capital
    and a full stop with one between.
    """
    for paragraph in _PARAGRAPHS.split(text):
        plain = _BLANKS.sub(" ", paragraph)
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
    """(first, end) sentence of each block: as many whole sentences as fit, in order, without overlap.

    A block fits when 3 + title + body wordpieces <= ``block_wordpieces``; a sentence that is longer alone is
    its own block.
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
    """16 bytes that depend on nothing but a document's title and text; not those of any passage."""
    return hashlib.sha256(f"{len(title)} {title} {text}".encode(errors="surrogatepass")).digest()[:16]


def passage_digest(title: str, text: str) -> str:
    """32 hexadecimal digits that depend on nothing but title and text."""
    return hashlib.sha256(canonical_json([title, text])).hexdigest()[:32]


def cut_passages(
    documents: Sequence[Document],
    tokenizer: CachedTokenizer | WholeTokenizer,
    *,
    block_wordpieces: int | None,
    language: str = ENGLISH,
) -> PassageBatch:
    """The passages of a batch of documents, wordpieces and offsets included.

    Without ``block_wordpieces`` each document is one passage. ``language`` is that of all, or ``AUTO``.
    Every text is tokenised once, whole; characters of all texts are counted on in one line, so that one
    search finds the wordpieces of all sentences. A tokenizer whose wordpieces depend on what stands around them does
    so again with the passages, so that theirs are those of the passage's text alone.
    """
    written = [document.title and tokenizer.before_titles + document.title for document in documents]
    titles = tokenizer.encode(written).by_text()
    body = tokenizer.encode([document.text for document in documents])
    chars, bases = body.chars, body.bases.tolist()
    if not tokenizer.in_context:
        _cover_marks(documents, chars)
    languages = [detect(f"{one.title} {one.text}")[0] if language == AUTO else language for one in documents]
    counts, sentence_chars, sentence_tokens = _sentences(documents, languages, bases, chars)

    passages = []
    first_row = 0
    for index, document in enumerate(documents):
        rows = range(first_row, first_row + counts[index])
        first_row = rows.stop
        borders = [*(sentence_tokens[row][0] for row in rows), *(sentence_tokens[row][1] for row in rows[-1:])]
        lengths = [end - first for first, end in itertools.pairwise(borders)]  # with the blanks behind it
        room = sys.maxsize if block_wordpieces is None else block_wordpieces
        for first, end in pack_sentences(lengths, len(titles[index]), room):
            low, high = rows.start + first, rows.start + end - 1
            start, stop = sentence_chars[low][0] - bases[index], sentence_chars[high][1] - bases[index]
            tokens = sentence_tokens[low][0], sentence_tokens[high][1]
            digest = passage_digest(document.title, document.text[start:stop])
            passages.append(Passage(index, (start, stop), (low, high + 1), tokens, digest))
    digests = [text_digest(document.title, document.text) for document in documents]
    if tokenizer.in_context:
        ends = np.array(sentence_chars, np.int64)
        return _apart(documents, tokenizer, passages, ends, bases, titles, languages, digests)
    sentences = _relative_sentences(sentence_tokens, passages)
    relative = _relative(chars, passages, bases)
    return PassageBatch(passages, body.ids, relative, sentences, titles, languages, digests)


def _apart(
    documents: Sequence[Document],
    tokenizer: CachedTokenizer | WholeTokenizer,
    passages: Sequence[Passage],
    sentence_chars: NDArray[np.int64],
    bases: Sequence[int],
    titles: list[list[int]],
    languages: list[str],
    digests: list[bytes],
) -> PassageBatch:
    """The batch with the wordpieces of each passage's text on its own; blanks belong to the sentence before them."""
    body = tokenizer.encode([documents[one.document].text[slice(*one.chars)] for one in passages])
    chars, made = body.chars.copy(), []
    sentences: list[tuple[int, int]] = []
    for one, base, (first, end) in zip(passages, body.bases, itertools.pairwise(body.borders()), strict=True):
        chars[first:end] -= base
        begins = sentence_chars[slice(*one.sentences), 0] - bases[one.document] - one.chars[0]
        starts = np.unique(np.searchsorted(np.maximum.accumulate(chars[first:end, 1]), begins[1:], side="right"))
        bounds = [0, *starts[(starts > 0) & (starts < end - first)].tolist(), end - first]
        made.append(replace(one, tokens=(first, end), sentences=(len(sentences), len(sentences) + len(bounds) - 1)))
        sentences += itertools.pairwise(bounds)
    found = np.array(sentences, np.int32).reshape(-1, 2)
    return PassageBatch(made, body.ids, chars.astype(np.int32), found, titles, languages, digests)


def _cover_marks(documents: Sequence[Document], chars: NDArray[np.int64]) -> None:
    """Let a wordpiece end after the accents that follow it as characters of their own.

    The normaliser drops them, so that the tokenizer's offsets would cut "cafe" out of a decomposed "café".
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
    """Sentences per document, and of each sentence its (start, end) characters and (first, end) wordpieces.

    A sentence without wordpieces (nothing but control characters) is left out; a border inside a wordpiece
    is none.
    """
    bounds = [split_sentences(one.text, language) for one, language in zip(documents, languages, strict=True)]
    flat = np.array(
        [(start + base, end + base) for base, found in zip(bases, bounds, strict=True) for start, end in found],
        np.int64,
    ).reshape(-1, 2)
    first_tokens = np.searchsorted(chars[:, 0], flat, side="left")
    ends_before = np.concatenate([[0], chars[:, 1]])[first_tokens[:, 0]]
    rows = zip(flat.tolist(), first_tokens.tolist(), (ends_before > flat[:, 0]).tolist(), strict=True)
    counts: list[int] = []
    sentence_chars: list[tuple[int, int]] = []
    sentence_tokens: list[tuple[int, int]] = []
    for found in bounds:
        before = len(sentence_chars)
        for (start, end), (first, stop), inside in itertools.islice(rows, len(found)):
            if inside and len(sentence_chars) > before:
                start, first = sentence_chars.pop()[0], sentence_tokens.pop()[0]
            if stop > first:
                sentence_chars.append((start, end))
                sentence_tokens.append((first, stop))
        counts.append(len(sentence_chars) - before)
    return counts, sentence_chars, sentence_tokens


def _relative(chars: NDArray[np.int64], passages: Sequence[Passage], bases: Sequence[int]) -> Ints:
    """Characters [T, 2] counted from the start of each wordpiece's passage."""
    lengths = [length(passage.tokens) for passage in passages]
    assert sum(lengths) == len(chars), "a wordpiece lies outside all sentences"
    starts = np.asarray([bases[passage.document] + passage.chars[0] for passage in passages], np.int64)
    return (chars - np.repeat(starts, lengths)[:, None]).astype(np.int32)


def _relative_sentences(sentence_tokens: Sequence[tuple[int, int]], passages: Sequence[Passage]) -> Ints:
    """Wordpieces [S, 2] of each sentence counted from the start of its passage."""
    lengths = [length(passage.sentences) for passage in passages]
    starts = np.repeat(np.asarray([passage.tokens[0] for passage in passages], np.int64), lengths)
    tokens = np.asarray(sentence_tokens, np.int64).reshape(-1, 2)
    return (tokens - starts[:, None]).astype(np.int32)
