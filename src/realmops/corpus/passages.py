"""Cutting of documents into passages: greedy blocks of whole sentences (ORQA, Lee et al. 2019, section 4).

``sentencex`` was the most accurate (20 of 22 short texts) and the fastest (42 MB/s) of five sentence splitters.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
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
_SEGMENT = 10_000  # characters that sentencex segments at once, in quadratic time
_SPECIAL_TOKENS = 3  # [CLS] title [SEP] body [SEP]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of a batch of documents."""

    document: int  # number of the document in the batch
    chars: tuple[int, int]  # (start, end) in the document's text
    digest: str  # ``passage_digest`` of title and text
    ids: Ints  # [t] wordpieces of the body
    token_chars: Ints  # [t, 2] start and end of each wordpiece in the passage's text
    sentences: Ints  # [s, 2] first and end wordpiece


@dataclass(frozen=True, slots=True)
class PassageBatch:
    """Passages of a batch of documents, and what the passages of a document share."""

    passages: list[Passage]
    titles: list[list[int]]  # title wordpieces of each document
    languages: list[str]  # language code of each document
    digests: list[bytes]  # ``text_digest`` of each document


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

    sentencex loses paragraphs of long texts and joins rows of tables, so each is segmented alone. It panics at a
    no-break space between a capital and a full stop, so non-ASCII whitespace is replaced.
    """
    for paragraph in (_ROWS if "\t" in text else _PARAGRAPHS).split(text):
        for segment in _segments(paragraph, language):
            borders = [0, *itertools.chain(*_sentence_bounds(segment, language)), len(segment)]
            yield from (segment[start:end] for start, end in itertools.pairwise(borders))


def _segments(paragraph: str, language: str) -> Iterator[str]:
    """Yield a paragraph, a long one in segments, cut before a sentence with enough text after it, else at a blank."""
    begin = 0
    while len(paragraph) - begin > _SEGMENT:
        text = paragraph[begin : begin + _SEGMENT]
        starts = [start for start, _ in _sentence_bounds(text, language) if _SEGMENT // 2 < start < _SEGMENT * 9 // 10]
        end = max(starts, default=text.replace("\n", " ").rfind(" ", _SEGMENT // 2) + 1) or _SEGMENT
        yield text[:end]
        begin += end
    yield paragraph[begin:]


def _sentence_bounds(text: str, language: str) -> Iterator[tuple[int, int]]:
    plain, end = _SPACES.sub(" ", text), 0
    for sentence in sentencex.segment(language, plain):
        if (start := plain.find(sentence, end)) < 0:
            return
        end = start + len(sentence)
        yield start, end


def pack_sentences(lengths: Sequence[int], title_length: int, block_wordpieces: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) sentence of each block: 3 + title + body wordpieces fit, but a long sentence is a block."""
    room = block_wordpieces - _SPECIAL_TOKENS - title_length
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
    return hashlib.sha256(canonical_json([title, text])).hexdigest()[:32]


def cut_passages(
    documents: Sequence[Document],
    tokenizer: CachedTokenizer | UncachedTokenizer,
    *,
    block_wordpieces: int | None,
    language: str = ENGLISH,
) -> PassageBatch:
    """Cut a batch of documents into passages; each document is one passage if ``block_wordpieces`` is None.

    Texts are tokenised once; a tokenizer whose wordpieces depend on their context tokenises the passages again.
    """
    title_texts = [document.title and tokenizer.title_prefix + document.title for document in documents]
    titles = tokenizer.encode(title_texts).by_text()
    body = tokenizer.encode([document.text for document in documents])
    chars, bases = body.chars, body.bases.tolist()
    if not tokenizer.is_context_dependent:
        _cover_marks(documents, chars)
    languages = [detect_language(f"{d.title} {d.text}")[0] if language == AUTO else language for d in documents]
    room = sys.maxsize if block_wordpieces is None else block_wordpieces
    passages: list[Passage] = []
    starts: list[list[int]] = []  # characters at which the sentences of each passage begin
    for index, sentences in enumerate(_sentences(documents, languages, bases, chars)):
        title, text = documents[index].title, documents[index].text
        borders = [*(first for _, _, first, _ in sentences), *(end for *_, end in sentences[-1:])]
        lengths = [end - first for first, end in itertools.pairwise(borders)]  # with trailing whitespace
        for block in itertools.starmap(slice, pack_sentences(lengths, len(titles[index]), room)):
            base, _, first, _ = sentences[block][0]
            _, stop, _, end = sentences[block][-1]
            span = base - bases[index], stop - bases[index]
            rows = np.array([sentence[2:] for sentence in sentences[block]], np.int32) - first
            token_chars = (chars[first:end] - base).astype(np.int32)
            digest = passage_digest(title, text[slice(*span)])
            passages.append(Passage(index, span, digest, body.ids[first:end], token_chars, rows))
            starts.append([start - base for start, *_ in sentences[block]])
    if tokenizer.is_context_dependent:
        passages = _encode_passages(documents, tokenizer, passages, starts)
    else:
        assert sum(len(passage.ids) for passage in passages) == len(chars), "a wordpiece is outside all sentences"
    digests = [text_digest(document.title, document.text) for document in documents]
    return PassageBatch(passages, titles, languages, digests)


def _encode_passages(
    documents: Sequence[Document],
    tokenizer: CachedTokenizer | UncachedTokenizer,
    passages: Sequence[Passage],
    starts: Sequence[list[int]],
) -> list[Passage]:
    """Tokenise the text of each passage separately; whitespace belongs to the sentence before it."""
    body = tokenizer.encode([documents[passage.document].text[slice(*passage.chars)] for passage in passages])
    encoded = []
    ranges = itertools.pairwise(body.borders())
    for passage, begins, base, (first, end) in zip(passages, starts, body.bases, ranges, strict=True):
        chars = body.chars[first:end] - base
        tokens = np.unique(np.searchsorted(np.maximum.accumulate(chars[:, 1]), begins[1:], side="right"))
        bounds = [0, *tokens[(tokens > 0) & (tokens < len(chars))].tolist(), len(chars)]
        sentences = np.array([*itertools.pairwise(bounds)], np.int32)
        arrays = {"ids": body.ids[first:end], "token_chars": chars.astype(np.int32), "sentences": sentences}
        encoded.append(replace(passage, **arrays))
    return encoded


def _cover_marks(documents: Sequence[Document], chars: NDArray[np.int64]) -> None:
    """Extend wordpieces in place over the combining marks after them, which the normaliser drops."""
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
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield the sentences of each document: start and end character in the line, first and end wordpiece."""
    bounds = [split_sentences(document.text, code) for document, code in zip(documents, languages, strict=True)]
    flat = np.array(
        [(start + base, end + base) for base, pairs in zip(bases, bounds, strict=True) for start, end in pairs],
        np.int64,
    ).reshape(-1, 2)
    first_tokens = np.searchsorted(chars[:, 0], flat, side="left")
    ends_before = np.concatenate([[0], chars[:, 1]])[first_tokens[:, 0]]
    rows = zip(flat.tolist(), first_tokens.tolist(), (ends_before > flat[:, 0]).tolist(), strict=True)
    for pairs in bounds:
        sentences: list[tuple[int, int, int, int]] = []
        for (start, end), (first, stop), is_inside in itertools.islice(rows, len(pairs)):
            if is_inside and sentences:
                start, _, first, _ = sentences.pop()
            if stop > first:
                sentences.append((start, end, first, stop))
        yield sentences
