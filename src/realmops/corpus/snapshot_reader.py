"""Read access to a corpus snapshot, which is content-addressed: ids of passages depend only on title and text."""

import json
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Self
from weakref import proxy

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tokenizers import Tokenizer

from realmops.artifacts import digest_of, read_manifest
from realmops.corpus.languages import AUTO
from realmops.corpus.npy_files import load_npy
from realmops.corpus.spans import Spans
from realmops.corpus.vocabulary import (
    Casing,
    build_tokenizer,
    is_continuation,
    list_pieces,
    open_tokenizer,
    read_vocabulary,
    surface_forms,
)
from realmops.corpus.word_shape import SHAPE_STEP, classify_words
from realmops.hub import TOKENIZER, VOCABULARY
from realmops.readers.documents import PAGES, Document

# Shape legend: P passages, T wordpieces of all bodies, S sentences; t and s: wordpieces and sentences of one passage.

KIND = "snapshot"
LANGUAGES = "languages.npy"
COMMON = 0.01  # least share of passages of a language that questions may be in; detection errs on a few passages
CONTINUES = "continues.npy"
DOCUMENTS = "documents.npy"
GIVEN_SPANS = "given_spans"
PLACES = "places.npy"
REJECTS = "rejects.jsonl"
SOURCES = "sources.jsonl"
TEXTS = "passages.arrow"
TEXT_COLUMNS = ("passage_id", "document_id", "title", "text", "extra")
ROWS_PER_BATCH = 1024
_FORM_CACHE_SIZE = 4096  # passages
Ints = NDArray[np.int32]


def document_name(document: Document) -> str:
    return document.id or f"document-{digest_of([document.title, document.text])[:32]}"


def read_rejects(folder: Path, *, unread: bool = False) -> Iterator[dict[str, str]]:
    """Yield the broken records of a snapshot, or with ``unread`` its unreadable files."""
    with open(folder / REJECTS, "rb") as file:
        yield from (reject for reject in map(json.loads, file) if ("kind" in reject) == unread)


def parse_extra(extra: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(extra or "{}")
    return {name: value for name, value in fields.items() if name != PAGES}


def map_texts(folder: Path) -> pa.Table:
    """Memory-map ``passages.arrow``; unlike one ``ParquetFile``, the table can be read by many threads."""
    with pa.memory_map(str(folder / TEXTS)) as file, pa.ipc.open_file(file) as reader:
        return reader.read_all()


class Snapshot:
    """A memory-mapped snapshot folder, indexed by passage number 0 .. P-1; it is thread-safe.

    Files:
        passages.arrow: passage_id, document_id, title, text, extra (the document's other columns as JSON, or empty),
            as an Arrow IPC file.
        tokens.npy: uint16 (int32 for a vocabulary over 65,536) [T], wordpieces of all bodies;
            token_offsets.npy int64 [P + 1]; token_chars.npy int32 [T, 2], start and end in the passage's text.
        title_tokens.npy, title_offsets.npy: the same for the titles.
        sentences.npy: int32 [S, 3], passage, first and end wordpiece in the passage's body;
            sentence_offsets.npy int64 [P + 1].
        places.npy: int64 [P, 2], document number and character offset of the passage in the document's text.
        documents.npy: uint64 [D, 2], the digest of each document's title and text (``passages.text_digest``).
        languages.npy: uint8 [P, 2], the two-letter language code of each passage, if languages were detected.
        vocab.txt: the wordpieces. A tokenizer other than BERT's WordPiece has tokenizer.json instead, and
            continues.npy: bool [T], whether a wordpiece continues a word.
        rejects.jsonl: {"place", "problem"} of every broken record, and "kind" of an unreadable file.
        sources.jsonl: number of records by outcome for each file of the corpus.
        given_spans/: a spans folder, if documents have a column "spans".
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.corpus_hash: str = manifest["corpus_hash"]
        self.vocabulary_hash: str = manifest["vocabulary_hash"]
        self.block_wordpieces: int = manifest["settings"]["block_wordpieces"]
        self.casing = Casing(**manifest["settings"]["casing"])
        self.language: str = manifest["settings"]["language"]  # code, or ``AUTO``
        self.tokens: NDArray[Any] = load_npy(folder / "tokens.npy")
        self.token_chars: Ints = load_npy(folder / "token_chars.npy")
        self.token_offsets: NDArray[np.int64] = load_npy(folder / "token_offsets.npy")
        self.title_flat: NDArray[Any] = load_npy(folder / "title_tokens.npy")
        self.title_offsets: NDArray[np.int64] = load_npy(folder / "title_offsets.npy")
        self.sentence_rows: Ints = load_npy(folder / "sentences.npy")
        self.sentence_offsets: NDArray[np.int64] = load_npy(folder / "sentence_offsets.npy")
        self.places: NDArray[np.int64] = load_npy(folder / PLACES)
        has_continues = CONTINUES in manifest["files"]
        self._continues: NDArray[np.bool_] | None = load_npy(folder / CONTINUES) if has_continues else None
        self._texts = map_texts(folder)
        self._columns = {name: self._texts.column(name) for name in TEXT_COLUMNS}
        # With a cycle, only the garbage collector would free a snapshot that a server has replaced.
        self._forms = lru_cache(_FORM_CACHE_SIZE)(partial(type(self).forms, proxy(self)))

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> Self:
        return cls(folder, read_manifest(folder, KIND, verify=verify))

    def __len__(self) -> int:
        return len(self.token_offsets) - 1

    def passage_id(self, index: int) -> str:
        return self._value("passage_id", index)

    def document_id(self, index: int) -> str:
        return self._value("document_id", index)

    def title(self, index: int) -> str:
        return self._value("title", index)

    def text(self, index: int) -> str:
        return self._value("text", index)

    def extra(self, index: int) -> dict[str, Any]:
        return parse_extra(self._value("extra", index))

    def start(self, index: int) -> int:
        return int(self.places[index, 1])

    def uri(self, index: int) -> str:
        """Return the document's URL if it has one, else the name of its file in the corpus."""
        url = self.extra(index).get("url")
        if isinstance(url, str) and url:
            return url
        names, ends = self.sources
        return names[int(bisect_right(ends, self.places[index, 0]))]

    def page(self, index: int, character: int) -> int | None:
        """Return the page (from 1) of a character of the passage, or None for a document without pages."""
        extra = self._value("extra", index)
        pages: list[tuple[int, int]] = json.loads(extra).get(PAGES, []) if extra else []
        return max((page for page, begin in pages if begin <= character), default=None)

    @cached_property
    def code_P(self) -> NDArray[np.bytes_]:
        if self.language != AUTO:
            return np.full(len(self), self.language, "S2")
        codes: NDArray[np.bytes_] = load_npy(self.folder / LANGUAGES).view("S2")[:, 0]
        return codes

    @cached_property
    def languages(self) -> list[str]:
        """Language codes of the passages, most frequent first."""
        if self.language != AUTO:
            return [self.language]
        codes, counts = np.unique(self.code_P, return_counts=True)
        return [code.decode() for code in codes[np.argsort(-counts, kind="stable")].tolist()]

    @cached_property
    def common_languages(self) -> list[str]:
        """Languages of at least ``COMMON`` of the passages, in which questions are expected."""
        min_count = COMMON * len(self)
        return [code for code in self.languages if np.count_nonzero(self.code_P == code.encode()) >= min_count]

    def language_of(self, index: int) -> str:
        return self.language if self.language != AUTO else self.code_P[index].decode()

    @property
    def document_count(self) -> int:
        return self.sources[1][-1]

    @cached_property
    def sources(self) -> tuple[list[str], list[int]]:
        """Names of the corpus's files, and the cumulative number of documents at the end of each."""
        rows = [json.loads(line) for line in (self.folder / SOURCES).read_bytes().splitlines()]
        return [row["source"] for row in rows], list(accumulate(row["documents"] for row in rows))

    def column(self, name: str) -> list[str]:
        values: list[str] = self._columns[name].to_pylist()
        return values

    def dictionary_encode(self, name: str) -> tuple[list[str], NDArray[np.int32]]:
        """Return a column dictionary-encoded: its distinct values, and the index of each passage's value, [P]."""
        column = self._columns[name].dictionary_encode().unify_dictionaries()
        codes = np.concatenate([np.empty(0, np.int32), *(chunk.indices.to_numpy() for chunk in column.chunks)])
        return column.chunk(0).dictionary.to_pylist() if column.num_chunks else [], codes

    def rows(self, indexes: NDArray[np.int64], *names: str) -> Iterator[tuple[str, ...]]:
        """Yield columns of passages with ascending numbers, holding one batch of values in memory."""
        groups, first = np.unique(indexes // ROWS_PER_BATCH, return_index=True)
        texts = self._texts.select(names)
        for group, start, end in zip(groups.tolist(), first, [*first[1:], len(indexes)], strict=False):
            batch = texts.slice(group * ROWS_PER_BATCH, ROWS_PER_BATCH).take(indexes[start:end] % ROWS_PER_BATCH)
            yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)

    def match_passages(self, earlier: Self) -> NDArray[np.int64]:
        """Return the number of each passage in another snapshot, [P], found by id; -1 if it is missing there."""
        ids, earlier_ids = (snapshot._columns["passage_id"] for snapshot in (self, earlier))
        numbers = pc.fill_null(pc.index_in(ids, value_set=earlier_ids), -1).to_numpy()
        return np.asarray(numbers, np.int64)

    def body(self, index: int) -> NDArray[np.int64]:
        """Return the wordpieces of the text, int64 [t]."""
        return self.tokens[self.token_offsets[index] : self.token_offsets[index + 1]].astype(np.int64)

    def forms(self, index: int) -> NDArray[np.int64]:
        """Return the shape of each wordpiece's word as written in the passage's text, int64 [t]."""
        return classify_words(self.text(index), self.chars(index), self.continues(index), self.sentences(index)[:, 0])

    def continues(self, index: int) -> NDArray[np.bool_]:
        """Return whether each wordpiece of the text continues a word, bool [t]."""
        return self.is_continuation(int(self.token_offsets[index]), int(self.token_offsets[index + 1]))

    def is_continuation(self, first: int, end: int) -> NDArray[np.bool_]:
        """Return the same for wordpieces ``first`` to ``end`` of the flat array."""
        if self._continues is not None:
            stored: NDArray[np.bool_] = self._continues[first:end]
            return stored
        is_continuation: NDArray[np.bool_] = self.continues_word[self.tokens[first:end]]
        return is_continuation

    def written(self, index: int) -> NDArray[np.int64]:
        """Return wordpieces combined with the shape of their word, as ``Packed`` expects them, int64 [t]."""
        return self.body(index) + SHAPE_STEP * self._forms(index)

    def title_tokens(self, index: int) -> NDArray[np.int64]:
        return self.title_flat[self.title_offsets[index] : self.title_offsets[index + 1]].astype(np.int64)

    def chars(self, index: int) -> Ints:
        """Return start and end character of each wordpiece in ``text(index)``, int32 [t, 2]."""
        return self.token_chars[self.token_offsets[index] : self.token_offsets[index + 1]]

    def sentences(self, index: int) -> Ints:
        """Return first and end wordpiece of each sentence in ``body(index)``, int32 [s, 2]."""
        return self.sentence_rows[self.sentence_offsets[index] : self.sentence_offsets[index + 1], 1:]

    @cached_property
    def vocabulary(self) -> list[str]:
        if self.tokenizer_json is None:
            return read_vocabulary(self.folder / VOCABULARY)
        return list_pieces(self.tokenizer)

    @cached_property
    def words(self) -> list[str]:
        """Wordpieces in lower case without whitespace markers, with the prefix "##" if they continue a word."""
        if getattr(self.tokenizer.model, "continuing_subword_prefix", None):
            return self.vocabulary
        pieces = zip(surface_forms(self.tokenizer), self.continues_word, strict=True)
        return [("##" if is_continuation else "") + piece.strip().lower() for piece, is_continuation in pieces]

    @cached_property
    def continues_word(self) -> NDArray[np.bool_]:
        """Mask of the wordpieces that are continuations by their form ("##ing"), bool [V]; ``continues`` is exact."""
        return is_continuation(self.tokenizer)

    @cached_property
    def tokenizer_json(self) -> str | None:
        path = self.folder / TOKENIZER
        return path.read_text(encoding="utf-8") if TOKENIZER in self.manifest["files"] else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        text = self.tokenizer_json
        return build_tokenizer(self.vocabulary, self.casing) if text is None else open_tokenizer(text)

    def given_spans(self) -> Spans | None:
        folder = self.folder / GIVEN_SPANS
        return Spans.open(folder, corpus_hash=self.corpus_hash) if folder.is_dir() else None

    def _value(self, column: str, index: int) -> str:
        value: str = self._columns[column][index].as_py()
        return value
