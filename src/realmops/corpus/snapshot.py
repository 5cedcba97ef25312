"""The corpus snapshot: passages cut, tokenised and hashed once, then only read.

Content-addressed: a passage's id depends on its title and text alone, the corpus hash on the ids in order,
so that the same documents and settings give the same bytes whatever the number of workers. Writing is one
pass in flat memory: batches of documents go to the workers and come back in order, everything is appended to
files, and ids seen before are kept in a temporary database on disk. ``Snapshot`` describes the files.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import multiprocessing
import os
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tokenizers import Tokenizer

from realmops.artifacts import digest_of, read_manifest, write_manifest
from realmops.corpus.documents import Document, read_documents
from realmops.corpus.flat import FlatArray, FlatOffsets, load_flat
from realmops.corpus.passages import SPECIAL_TOKENS_PER_DOCUMENT, PassageBatch, cut_passages
from realmops.corpus.spans import Spans, SpansWriter
from realmops.corpus.vocabulary import (
    UNCASED,
    Casing,
    build_tokenizer,
    read_vocabulary,
    vocabulary_bytes,
    vocabulary_hash,
)

# Shape legend: P passages, T wordpieces of all bodies, S sentences; t and s those of one passage.

KIND = "snapshot"
GIVEN_SPANS = "given_spans"
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024
_ROWS_PER_GROUP = 1024
_GROUPS_IN_MEMORY = 64
_IDS = ".ids.sqlite"
_COLUMNS = ("passage_id", "document_id", "title", "text")
Ints = NDArray[np.int32]
_Progress = Callable[[int], None]
_Cut = Callable[[list[Document]], PassageBatch]


def is_navigation_title(title: str) -> bool:
    """Whether REALM leaves out this Wikipedia article: a list, index, outline or disambiguation."""
    return title.startswith(("List of", "Index of", "Outline of")) or "(disambiguation)" in title


def write_snapshot(
    paths: Iterable[Path],
    folder: Path,
    *,
    vocabulary: Sequence[str],
    block_wordpieces: int,
    casing: Casing = UNCASED,
    whole_documents: bool = False,
    drop_titles: bool = False,
    language: str = "en",
    workers: int = 1,
    progress: _Progress | None = None,
) -> dict[str, Any]:
    """Write a snapshot of JSON-lines files into an existing empty folder; returns its manifest.

    Wrap it in ``artifacts.atomic_folder``: after an error the folder holds rubbish.

    Args:
        vocabulary: WordPieces in the order of their ids (``train_vocabulary`` makes one).
        block_wordpieces: most wordpieces of [CLS] title [SEP] body [SEP]; the paper has 288.
        casing: what the tokenizer does to capitals and accents.
        whole_documents: each document is one passage, whatever its length; what does not fit is cut when encoded.
        drop_titles: leave out the Wikipedia articles of ``is_navigation_title``.
        language: code of the language for the sentence splitter.
        workers: processes that tokenise; with 1 it happens in this process, on one thread.
        progress: called with the number of documents done since the last call.

    Raises ValueError naming file and line for bad input, and when nothing is left to retrieve.
    """
    if block_wordpieces <= SPECIAL_TOKENS_PER_DOCUMENT:
        raise ValueError(
            f"block_wordpieces is {block_wordpieces}; it must leave room beside the "
            f"{SPECIAL_TOKENS_PER_DOCUMENT} special tokens (the paper has 288)"
        )
    if workers < 1:
        raise ValueError(f"workers is {workers}, wanted 1 or more")
    paths = list(paths)
    settings = {
        "block_wordpieces": block_wordpieces,
        "casing": asdict(casing),
        "whole_documents": whole_documents,
        "drop_titles": drop_titles,
        "language": language,
    }
    most = None if whole_documents else block_wordpieces
    with ExitStack() as stack:
        writer = stack.enter_context(closing(_Writer(folder, vocabulary)))
        run = stack.enter_context(_runner(workers, vocabulary, casing, most, language))
        for documents, batch in run(_batches(writer.admit(read_documents(paths), drop_titles))):
            writer.append(documents, batch)
            if progress is not None:
                progress(len(documents))
        return writer.finish(settings, paths)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in groups whose borders depend on the corpus alone."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


_Runner = Callable[[Iterator[list[Document]]], Iterator[tuple[list[Document], PassageBatch]]]
_worker_tokenizer: Tokenizer | None = None


def _start_worker(vocabulary: list[str], casing: Casing) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = build_tokenizer(vocabulary, casing)


def _cut_in_worker(documents: list[Document], block_wordpieces: int | None, language: str) -> PassageBatch:
    assert _worker_tokenizer is not None
    return cut_passages(documents, _worker_tokenizer, block_wordpieces=block_wordpieces, language=language)


@contextmanager
def _runner(
    workers: int, vocabulary: Sequence[str], casing: Casing, block_wordpieces: int | None, language: str
) -> Iterator[_Runner]:
    """A function that cuts batches in order: here with one worker, else in processes of their own."""
    if workers == 1:
        here = partial(
            cut_passages,
            tokenizer=build_tokenizer(vocabulary, casing),
            block_wordpieces=block_wordpieces,
            language=language,
        )
        with _one_thread():
            yield lambda batches: ((batch, here(batch)) for batch in batches)
        return
    there = partial(_cut_in_worker, block_wordpieces=block_wordpieces, language=language)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(list(vocabulary), casing)
    ) as pool:
        try:
            yield partial(_in_order, pool, there, 2 * workers)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _in_order(
    pool: ProcessPoolExecutor, cut: _Cut, ahead: int, batches: Iterator[list[Document]]
) -> Iterator[tuple[list[Document], PassageBatch]]:
    """Results in the order of the batches, at most ``ahead`` batches in memory."""
    waiting: deque[tuple[list[Document], Future[PassageBatch]]] = deque()
    for batch in batches:
        waiting.append((batch, pool.submit(cut, batch)))
        if len(waiting) == ahead:
            done, future = waiting.popleft()
            yield done, future.result()
    for done, future in waiting:
        yield done, future.result()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep ``tokenizers`` from starting a thread per core: the number of workers is the user's choice."""
    key = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(key)
    os.environ[key] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


class _Writer:
    """Appends passages to the files of a snapshot folder."""

    def __init__(self, folder: Path, vocabulary: Sequence[str]) -> None:
        self.folder = folder
        self.vocabulary = vocabulary
        wordpiece = np.dtype(np.uint16 if len(vocabulary) <= 1 << 16 else np.int32)
        self.tokens = FlatArray(folder / "tokens.npy", wordpiece)
        self.token_chars = FlatArray(folder / "token_chars.npy", np.dtype(np.int32), (2,))
        self.token_offsets = FlatOffsets(folder / "token_offsets.npy")
        self.title_tokens = FlatArray(folder / "title_tokens.npy", wordpiece)
        self.title_offsets = FlatOffsets(folder / "title_offsets.npy")
        self.sentences = FlatArray(folder / "sentences.npy", np.dtype(np.int32), (3,))
        self.sentence_offsets = FlatOffsets(folder / "sentence_offsets.npy")
        self.seen = _SeenIds(folder / _IDS)
        schema = pa.schema([(name, pa.string()) for name in _COLUMNS])
        self.texts = pq.ParquetWriter(folder / "passages.parquet", schema, compression="zstd")
        self.rows: dict[str, list[str]] = {name: [] for name in _COLUMNS}
        self.corpus_hash = hashlib.sha256()
        self.documents = 0
        self.dropped: Counter[str] = Counter(navigation_title=0, empty_text=0, no_wordpieces=0)
        self.spans: SpansWriter | None = None

    def admit(self, documents: Iterator[Document], drop_titles: bool) -> Iterator[Document]:
        """The documents that become passages, the others counted; ValueError for an id that came before."""
        for document in documents:
            self.documents += 1
            if document.id is not None:
                self.seen.check_document(document.id, document.place)
            if drop_titles and is_navigation_title(document.title):
                self.dropped["navigation_title"] += 1
            elif not document.text.strip():
                self.dropped["empty_text"] += 1
            else:
                yield document

    def append(self, documents: Sequence[Document], batch: PassageBatch) -> None:
        """Add the passages of a batch."""
        first = self.token_offsets.items
        self._append_arrays(first, batch)
        for row, passage in enumerate(batch.passages):
            document = documents[passage.document]
            text = document.text[slice(*passage.chars)]
            copies = self.seen.count_passage(passage.digest)
            passage_id = passage.digest if copies == 1 else f"{passage.digest}-{copies}"
            self.corpus_hash.update(f"{passage_id}\n".encode())
            document_id = document.id or f"document-{digest_of([document.title, document.text])[:32]}"
            for name, value in zip(_COLUMNS, (passage_id, document_id, document.title, text), strict=True):
                self.rows[name].append(value)
            if len(self.rows["text"]) == _ROWS_PER_GROUP:
                self._write_rows()
            if document.spans or self.spans is not None:
                self._append_spans(document, batch, row, first + row)
        self.dropped["no_wordpieces"] += batch.empty

    def finish(self, settings: dict[str, Any], paths: Sequence[Path]) -> dict[str, Any]:
        """Finish all files and write the manifest."""
        passages, sentences, tokens = self.token_offsets.items, len(self.sentences), len(self.tokens)
        if passages == 0:
            raise ValueError(
                f"no passage is left of {self.documents} documents in {', '.join(map(str, paths))} "
                f"(dropped: {dict(self.dropped)}); give documents with text"
            )
        if self.rows["text"]:
            self._write_rows()
        vocabulary = vocabulary_hash(self.vocabulary)
        corpus = self.corpus_hash.hexdigest()
        if self.spans is not None:
            self.spans.close(corpus_hash=corpus, vocabulary_hash=vocabulary, source="the corpus")
        (self.folder / "vocab.txt").write_bytes(vocabulary_bytes(self.vocabulary))
        self.close()
        return write_manifest(
            self.folder,
            KIND,
            corpus_hash=corpus,
            vocabulary_hash=vocabulary,
            passages=passages,
            documents=self.documents,
            sentences=sentences,
            tokens=tokens,
            dropped=dict(self.dropped),
            settings=settings,
        )

    def close(self) -> None:
        """Close every file and remove the scratch database."""
        for array in (
            self.tokens,
            self.token_chars,
            self.token_offsets,
            self.title_tokens,
            self.title_offsets,
            self.sentences,
            self.sentence_offsets,
        ):
            array.close()
        if self.spans is not None:
            self.spans.abandon()
        self.texts.close()
        self.seen.close()

    def _append_arrays(self, first: int, batch: PassageBatch) -> None:
        """The flat arrays and their offsets; ``first`` is the batch's first passage."""
        titles = [batch.titles[passage.document] for passage in batch.passages]
        passages = np.arange(first, first + len(titles), dtype=np.int32)
        sentences = [end - start for start, end in (p.sentences for p in batch.passages)]
        self.token_offsets.append_lengths([end - start for start, end in (p.tokens for p in batch.passages)])
        self.title_offsets.append_lengths([len(title) for title in titles])
        self.sentence_offsets.append_lengths(sentences)
        self.tokens.append(batch.ids)
        self.token_chars.append(batch.chars)
        self.title_tokens.append(np.fromiter(itertools.chain.from_iterable(titles), np.int32))
        self.sentences.append(np.column_stack([np.repeat(passages, sentences), batch.sentences]))

    def _append_spans(self, document: Document, batch: PassageBatch, row: int, index: int) -> None:
        """The document's own spans that begin in this passage."""
        if self.spans is None:
            (self.folder / GIVEN_SPANS).mkdir()
            self.spans = SpansWriter(self.folder / GIVEN_SPANS)
            nothing = np.empty((0, 2), np.int32)
            for _ in range(index):
                self.spans.add([], nothing, nothing, 0)
        passage = batch.passages[row]
        low = passage.chars[0]
        following = batch.passages[row + 1 : row + 2]
        last = not following or following[0].document != passage.document
        until = len(document.text) if last else following[0].chars[0]
        since = 0 if row == 0 or batch.passages[row - 1].document != passage.document else low
        spans = [
            (start - low, end - low, label) for start, end, label in document.spans if since <= start < until
        ]
        first_sentence = len(self.sentences) - len(batch.sentences) + passage.sentences[0]
        self.spans.add(
            spans,
            batch.chars[slice(*passage.tokens)],
            batch.sentences[slice(*passage.sentences)],
            first_sentence,
        )

    def _write_rows(self) -> None:
        self.texts.write_table(pa.table(self.rows, schema=self.texts.schema), row_group_size=_ROWS_PER_GROUP)
        self.rows = {name: [] for name in _COLUMNS}


class _SeenIds:
    """Document ids and passage digests that came before, in a scratch database: exact, and flat in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database = sqlite3.connect(path, isolation_level=None)
        self._execute("PRAGMA journal_mode = OFF")
        self._execute("PRAGMA synchronous = OFF")
        self._execute("CREATE TABLE documents (id TEXT PRIMARY KEY, place TEXT) WITHOUT ROWID")
        self._execute("CREATE TABLE passages (digest BLOB PRIMARY KEY, copies INT) WITHOUT ROWID")
        self._execute("BEGIN")

    def check_document(self, identifier: str, place: str) -> None:
        """Remember a document id; ValueError naming both places when it came before."""
        try:
            self._execute("INSERT INTO documents VALUES (?, ?)", (identifier, place))
        except sqlite3.IntegrityError:
            query = "SELECT place FROM documents WHERE id = ?"
            (earlier,) = self._execute(query, (identifier,)).fetchone()
            raise ValueError(
                f"{place}: the id {identifier!r} was used at {earlier}; give each document its own id"
            ) from None

    def count_passage(self, digest: str) -> int:
        """Remember a passage; returns how many times it came, this one included."""
        statement = (
            "INSERT INTO passages VALUES (?, 1) "
            "ON CONFLICT DO UPDATE SET copies = copies + 1 RETURNING copies"
        )
        ((copies,),) = self._execute(statement, (bytes.fromhex(digest),)).fetchall()
        return int(copies)

    def _execute(self, statement: str, values: tuple[str | bytes, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, values)
        except sqlite3.OperationalError as error:  # in a database of our own only the disk can be at fault
            code = errno.ENOSPC if error.sqlite_errorname == "SQLITE_FULL" else errno.EIO
            raise OSError(code, str(error), str(self._path)) from None

    def close(self) -> None:
        """Remove the database; closing again does nothing."""
        self._database.close()
        self._path.unlink(missing_ok=True)


class Snapshot:
    """A snapshot folder, memory-mapped; passages go by their number 0 .. P-1.

    Files:
        passages.parquet: passage_id, document_id, title, text.
        tokens.npy: uint16 (int32 for a vocabulary over 65,536) [T], wordpieces of all bodies;
            token_offsets.npy int64 [P + 1]; token_chars.npy int32 [T, 2], characters in the passage's text.
        title_tokens.npy, title_offsets.npy: the same for the titles.
        sentences.npy: int32 [S, 3], passage, first and end wordpiece in the passage's body;
            sentence_offsets.npy int64 [P + 1].
        vocab.txt: the wordpieces.
        given_spans/: a spans folder, when documents carry spans of their own.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.corpus_hash: str = manifest["corpus_hash"]
        self.vocabulary_hash: str = manifest["vocabulary_hash"]
        self.block_wordpieces: int = manifest["settings"]["block_wordpieces"]
        self.casing = Casing(**manifest["settings"]["casing"])
        self.tokens: NDArray[Any] = load_flat(folder / "tokens.npy")
        self.token_chars: Ints = load_flat(folder / "token_chars.npy")
        self.token_offsets: NDArray[np.int64] = load_flat(folder / "token_offsets.npy")
        self.title_flat: NDArray[Any] = load_flat(folder / "title_tokens.npy")
        self.title_offsets: NDArray[np.int64] = load_flat(folder / "title_offsets.npy")
        self.sentence_rows: Ints = load_flat(folder / "sentences.npy")
        self.sentence_offsets: NDArray[np.int64] = load_flat(folder / "sentence_offsets.npy")
        self._parquet = pq.ParquetFile(folder / "passages.parquet", memory_map=True)
        self._group = lru_cache(_GROUPS_IN_MEMORY)(self._parquet.read_row_group)

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> Snapshot:
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
        """The document's title."""
        return self._value("title", index)

    def text(self, index: int) -> str:
        """The passage's text, title left out."""
        return self._value("text", index)

    def column(self, name: str) -> list[str]:
        """One of passage_id, document_id, title, text for all passages, in memory."""
        values: list[str] = self._parquet.read(columns=[name]).column(name).to_pylist()
        return values

    def body(self, index: int) -> NDArray[np.int64]:
        """[t] wordpieces of the passage's text."""
        return self.tokens[self.token_offsets[index] : self.token_offsets[index + 1]].astype(np.int64)

    def title_tokens(self, index: int) -> NDArray[np.int64]:
        """The title's wordpieces."""
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
        return read_vocabulary(self.folder / "vocab.txt")

    @cached_property
    def continues_word(self) -> NDArray[np.bool_]:
        """For each wordpiece of the vocabulary whether it continues a word ("##ing")."""
        return np.array([piece.startswith("##") for piece in self.vocabulary])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the snapshot."""
        return build_tokenizer(self.vocabulary, self.casing)

    def given_spans(self) -> Spans | None:
        """The spans that the documents carried, if any did."""
        folder = self.folder / GIVEN_SPANS
        return Spans.open(folder, corpus_hash=self.corpus_hash) if folder.is_dir() else None

    def _value(self, column: str, index: int) -> str:
        group, row = divmod(range(len(self))[index], _ROWS_PER_GROUP)
        return self._group(group).column(column)[row].as_py()  # type: ignore[no-any-return]
