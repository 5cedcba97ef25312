"""The corpus snapshot: passages cut, tokenised and hashed once (by ``snapshot_writer``), then only read.

Content-addressed: a passage's id depends on its title and text alone, the corpus hash on the ids in order.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tokenizers import Tokenizer

from realmops.artifacts import digest_of, read_manifest
from realmops.corpus.documents import PAGES, Document
from realmops.hub import TOKENIZER, VOCABULARY
from realmops.text.flat import load_flat
from realmops.text.languages import AUTO, ENGLISH
from realmops.text.spans import Spans
from realmops.text.vocabulary import (
    Casing,
    build_tokenizer,
    continuing_pieces,
    open_tokenizer,
    pieces_of,
    read_vocabulary,
    written_pieces,
)
from realmops.text.word_shape import FORM_STEP, forms_of

# Shape legend: P passages, T wordpieces of all bodies, S sentences; t and s those of one passage.

KIND = "snapshot"
LANGUAGES = "languages.npy"
COMMON = 0.01  # share of the passages, below which no question is taken to be in a language; a few may be taken wrongly
CONTINUES = "continues.npy"
DOCUMENTS = "documents.npy"
GIVEN_SPANS = "given_spans"
PLACES = "places.npy"
REJECTS = "rejects.jsonl"
SOURCES = "sources.jsonl"
TEXTS = "passages.arrow"
TEXT_COLUMNS = ("passage_id", "document_id", "title", "text", "extra")
ROWS_PER_BATCH = 1024
_FORMS_IN_MEMORY = 4096  # passages
Ints = NDArray[np.int32]


def document_name(document: Document) -> str:
    """The document's id; where the corpus gives none, a digest of its title and text."""
    return document.id or f"document-{digest_of([document.title, document.text])[:32]}"


def rejects(folder: Path, *, unread: bool = False) -> Iterator[dict[str, str]]:
    """The broken records of a snapshot, or the files that could not be read."""
    with open(folder / REJECTS, "rb") as file:
        yield from (one for one in map(json.loads, file) if ("kind" in one) == unread)


def fields_of(extra: str) -> dict[str, Any]:
    """A document's own fields in the column ``extra``, without what we keep there."""
    found: dict[str, Any] = json.loads(extra or "{}")
    return {name: value for name, value in found.items() if name != PAGES}


def map_texts(folder: Path) -> pa.Table:
    """Map ``passages.arrow`` of a snapshot folder; the table reads from the file without a copy.

    Any number of threads may read it: Arrow's arrays are immutable, whereas a ``ParquetFile`` that two threads read
    from ends the process (SIGSEGV).
    """
    with pa.memory_map(str(folder / TEXTS)) as file, pa.ipc.open_file(file) as reader:
        return reader.read_all()


class Snapshot:
    """A snapshot folder, memory-mapped; passages go by their number 0 .. P-1. Threads may share one.

    Files:
        passages.arrow: passage_id, document_id, title, text, extra (the document's other columns as JSON, or empty),
            as an Arrow IPC file.
        tokens.npy: uint16 (int32 for a vocabulary over 65,536) [T], wordpieces of all bodies;
            token_offsets.npy int64 [P + 1]; token_chars.npy int32 [T, 2], characters in the passage's text.
        title_tokens.npy, title_offsets.npy: the same for the titles.
        sentences.npy: int32 [S, 3], passage, first and end wordpiece in the passage's body;
            sentence_offsets.npy int64 [P + 1].
        places.npy: int64 [P, 2], the number of the passage's document in the corpus, and the character of that
            document's text at which the passage begins.
        documents.npy: uint64 [D, 2], the digest of each document's title and text (``passages.text_digest``).
        languages.npy: uint8 [P, 2], the two letters of each passage's language, where each document has its own.
        vocab.txt: the wordpieces. Of another tokenizer than BERT's WordPiece instead tokenizer.json, and continues.npy:
            bool [T], which wordpieces continue a word.
        rejects.jsonl: {"place", "problem"} of every broken record; of a file that could not be read also its "kind".
        sources.jsonl: for each file of the corpus, how many records it had and what became of them.
        given_spans/: a spans folder, when documents carry spans of their own.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.corpus_hash: str = manifest["corpus_hash"]
        self.vocabulary_hash: str = manifest["vocabulary_hash"]
        self.block_wordpieces: int = manifest["settings"]["block_wordpieces"]
        self.casing = Casing(**manifest["settings"]["casing"])
        self.language: str = manifest["settings"].get("language", ENGLISH)  # of all passages, or ``AUTO``
        self.tokens: NDArray[Any] = load_flat(folder / "tokens.npy")
        self.token_chars: Ints = load_flat(folder / "token_chars.npy")
        self.token_offsets: NDArray[np.int64] = load_flat(folder / "token_offsets.npy")
        self.title_flat: NDArray[Any] = load_flat(folder / "title_tokens.npy")
        self.title_offsets: NDArray[np.int64] = load_flat(folder / "title_offsets.npy")
        self.sentence_rows: Ints = load_flat(folder / "sentences.npy")
        self.sentence_offsets: NDArray[np.int64] = load_flat(folder / "sentence_offsets.npy")
        self.places: NDArray[np.int64] = load_flat(folder / PLACES)
        has_own = CONTINUES in manifest["files"]
        self._continues: NDArray[np.bool_] | None = load_flat(folder / CONTINUES) if has_own else None
        self._texts = map_texts(folder)
        self._columns = {name: self._texts.column(name) for name in TEXT_COLUMNS}
        self._forms = lru_cache(_FORMS_IN_MEMORY)(self.forms)

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> Self:
        """Open a folder; ValueError when it is none or, with ``verify``, when a file's digest is wrong."""
        return cls(folder, read_manifest(folder, KIND, verify=verify))

    def __len__(self) -> int:
        """Number of passages P."""
        return len(self.token_offsets) - 1

    def passage_id(self, index: int) -> str:
        """Hash of title and text, with "-2", "-3" ... for the copies of a passage."""
        return self._value("passage_id", index)

    def document_id(self, index: int) -> str:
        """The id of the document that the passage was cut from."""
        return self._value("document_id", index)

    def title(self, index: int) -> str:
        return self._value("title", index)

    def text(self, index: int) -> str:
        """The passage's text, title left out."""
        return self._value("text", index)

    def extra(self, index: int) -> dict[str, Any]:
        """The document's fields beside title, text and id."""
        return fields_of(self._value("extra", index))

    def start(self, index: int) -> int:
        """The character of its document's text, as the corpus reader gave it, at which the passage begins."""
        return int(self.places[index, 1])

    def uri(self, index: int) -> str:
        """The document's URL where it came with one, else the name of its file in the corpus."""
        url = self.extra(index).get("url")
        if isinstance(url, str) and url:
            return url
        names, ends = self.sources
        return names[int(bisect_right(ends, self.places[index, 0]))]

    def page(self, index: int, character: int) -> int | None:
        """The page, from 1, on which a character of the passage stands; None of a document without pages."""
        extra = self._value("extra", index)
        begins: list[tuple[int, int]] = json.loads(extra).get(PAGES, []) if extra else []
        return max((page for page, begin in begins if begin <= character), default=None)

    @cached_property
    def code_P(self) -> NDArray[np.bytes_]:
        """The code of each passage's language, [P]."""
        if self.language != AUTO:
            return np.full(len(self), self.language, "S2")
        codes: NDArray[np.bytes_] = load_flat(self.folder / LANGUAGES).view("S2")[:, 0]
        return codes

    @cached_property
    def languages(self) -> list[str]:
        """The codes of the languages of its passages, the commonest first."""
        if self.language != AUTO:
            return [self.language]
        codes, counts = np.unique(self.code_P, return_counts=True)
        return [code.decode() for code in codes[np.argsort(-counts, kind="stable")].tolist()]

    @cached_property
    def common_languages(self) -> list[str]:
        """Those of at least ``COMMON`` of the passages, in which questions are asked."""
        least = COMMON * len(self)
        return [code for code in self.languages if np.count_nonzero(self.code_P == code.encode()) >= least]

    def language_of(self, index: int) -> str:
        """The code of a passage's language."""
        return self.language if self.language != AUTO else self.code_P[index].decode()

    @cached_property
    def sources(self) -> tuple[list[str], list[int]]:
        """The corpus's files, and how many documents there are up to the end of each."""
        rows = [json.loads(line) for line in (self.folder / SOURCES).read_bytes().splitlines()]
        return [row["source"] for row in rows], list(accumulate(row["documents"] for row in rows))

    def texts(self, indexes: Iterable[int]) -> dict[int, str]:
        """Return the texts of many passages by their numbers."""
        return {index: self.text(index) for index in indexes}

    def column(self, name: str) -> list[str]:
        """One of passage_id, document_id, title, text, extra for all passages, in memory."""
        values: list[str] = self._columns[name].to_pylist()
        return values

    def coded(self, name: str) -> tuple[list[str], NDArray[np.int32]]:
        """The different values of such a column, and which of them each passage has, [P]."""
        column = self._columns[name].dictionary_encode().unify_dictionaries()
        codes = np.concatenate([np.empty(0, np.int32), *(chunk.indices.to_numpy() for chunk in column.chunks)])
        return column.chunk(0).dictionary.to_pylist() if column.num_chunks else [], codes

    def rows(self, indexes: NDArray[np.int64], *names: str) -> Iterator[tuple[str, ...]]:
        """Yield these columns of passages in ascending order; the values of one batch are in memory at a time."""
        groups, first = np.unique(indexes // ROWS_PER_BATCH, return_index=True)
        texts = self._texts.select(names)
        for group, start, end in zip(groups.tolist(), first, [*first[1:], len(indexes)], strict=False):
            batch = texts.slice(group * ROWS_PER_BATCH, ROWS_PER_BATCH).take(indexes[start:end] % ROWS_PER_BATCH)
            yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)

    def places_in(self, earlier: Self) -> NDArray[np.int64]:
        """For each passage its number in another snapshot, [P]; -1 where that has none of its id."""
        ids, known = (snapshot._columns["passage_id"] for snapshot in (self, earlier))
        places: NDArray[np.int64] = pc.fill_null(pc.index_in(ids, value_set=known), -1).to_numpy().astype(np.int64)
        return places

    def body(self, index: int) -> NDArray[np.int64]:
        """[t] wordpieces of the passage's text."""
        return self.tokens[self.token_offsets[index] : self.token_offsets[index + 1]].astype(np.int64)

    def forms(self, index: int) -> NDArray[np.int64]:
        """[t] how the word of each wordpiece is written in the passage's text."""
        return forms_of(self.text(index), self.chars(index), self.continues(index), self.sentences(index)[:, 0])

    def continues(self, index: int) -> NDArray[np.bool_]:
        """[t] whether a wordpiece of the passage's text continues a word."""
        return self.continuing(int(self.token_offsets[index]), int(self.token_offsets[index + 1]))

    def continuing(self, first: int, end: int) -> NDArray[np.bool_]:
        """The same of a run of all passages' wordpieces."""
        if self._continues is not None:
            own: NDArray[np.bool_] = self._continues[first:end]
            return own
        found: NDArray[np.bool_] = self.continues_word[self.tokens[first:end]]
        return found

    def written(self, index: int) -> NDArray[np.int64]:
        """[t] the wordpieces of the passage's text, each with the form of its word, as ``Packed`` takes them."""
        return self.body(index) + FORM_STEP * self._forms(index)

    def title_tokens(self, index: int) -> NDArray[np.int64]:
        return self.title_flat[self.title_offsets[index] : self.title_offsets[index + 1]].astype(np.int64)

    def chars(self, index: int) -> Ints:
        """[t, 2] start and end character of each wordpiece in ``text(index)``."""
        return self.token_chars[self.token_offsets[index] : self.token_offsets[index + 1]]

    def sentences(self, index: int) -> Ints:
        """[s, 2] first and end wordpiece of each sentence in ``body(index)``."""
        return self.sentence_rows[self.sentence_offsets[index] : self.sentence_offsets[index + 1], 1:]

    @cached_property
    def vocabulary(self) -> list[str]:
        """The wordpieces in the order of their ids."""
        if self.tokenizer_json is None:
            return read_vocabulary(self.folder / VOCABULARY)
        return pieces_of(self.tokenizer)

    @cached_property
    def words(self) -> list[str]:
        """The wordpieces in lower case without what marks a blank, "##" before those that continue a word."""
        if getattr(self.tokenizer.model, "continuing_subword_prefix", None):
            return self.vocabulary
        both = zip(written_pieces(self.tokenizer), self.continues_word, strict=True)
        return [("##" if inside else "") + piece.strip().lower() for piece, inside in both]

    @cached_property
    def continues_word(self) -> NDArray[np.bool_]:
        """[V] whether a wordpiece seems to continue a word ("##ing"); ``continues`` knows it of those of passages."""
        return continuing_pieces(self.tokenizer)

    @cached_property
    def tokenizer_json(self) -> str | None:
        """The tokenizer, where it is another than BERT's WordPiece."""
        path = self.folder / TOKENIZER
        return path.read_text(encoding="utf-8") if TOKENIZER in self.manifest["files"] else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        own = self.tokenizer_json
        return build_tokenizer(self.vocabulary, self.casing) if own is None else open_tokenizer(own)

    def given_spans(self) -> Spans | None:
        """The spans that the documents carried, if any did."""
        folder = self.folder / GIVEN_SPANS
        return Spans.open(folder, corpus_hash=self.corpus_hash) if folder.is_dir() else None

    def _value(self, column: str, index: int) -> str:
        value: str = self._columns[column][index].as_py()
        return value
