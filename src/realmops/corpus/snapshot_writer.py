"""Writer of the corpus snapshot: one pass over the documents, in constant memory.

Workers process batches of records in order, results are appended to files, and duplicate ids are found with a temporary
database on disk. A checkpoint (synced files and their lengths) is written periodically; an interrupted writer resumes
from it. The same documents and settings give the same bytes for any number of workers.
"""

import hashlib
import itertools
import json
import os
import shutil
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from realmops.artifacts import (
    add_digest,
    canonical_json,
    has_valid_digest,
    link_or_copy,
    make_folder,
    read_json,
    sync_folder,
    write_json,
    write_manifest,
)
from realmops.corpus.document_cutter import DocumentCutter
from realmops.corpus.ingest import Batch, OutcomeCounts, Progress, iter_batches, workers_in_order
from realmops.corpus.languages import AUTO, ENGLISH, check_language
from realmops.corpus.npy_files import AppendOnlyFile, NpyWriter, OffsetsWriter
from realmops.corpus.passages import SPECIAL_TOKENS_PER_DOCUMENT, PassageBatch, length
from realmops.corpus.seen_ids import SeenIds
from realmops.corpus.snapshot_reader import (
    CONTINUES,
    DOCUMENTS,
    GIVEN_SPANS,
    KIND,
    LANGUAGES,
    PLACES,
    REJECTS,
    ROWS_PER_BATCH,
    SOURCES,
    TEXT_COLUMNS,
    TEXTS,
    document_name,
    read_rejects,
)
from realmops.corpus.spans import SpansWriter
from realmops.corpus.tokenizer import is_inside_word
from realmops.corpus.vocabulary import UNCASED, Casing, vocabulary_bytes, vocabulary_hash
from realmops.hub import TOKENIZER, VOCABULARY
from realmops.readers.documents import PAGES, Document, Outcome, Rejected, printable_path
from realmops.readers.sources import Source

_TEXTS = "passages.arrows"  # rows of passages.arrow during writing: an Arrow IPC stream
_IDS = "ids.sqlite"
_CHECKPOINT = "checkpoint.json"
_CHECKPOINT_SECONDS = 30.0
_RECORDS_BETWEEN_CHECKS = 1000
_REJECTS_SHOWN = 10
_PLACE = "place"  # column for the message about duplicate ids; not in passages.arrow
File = TypeVar("File", bound=AppendOnlyFile)
_SCHEMA = pa.schema([(name, pa.string()) for name in (*TEXT_COLUMNS, _PLACE)])


def write_snapshot(
    sources: Sequence[Source],
    folder: Path,
    *,
    work: Path,
    vocabulary: Sequence[str],
    block_wordpieces: int,
    casing: Casing = UNCASED,
    tokenizer: str | None = None,
    whole_documents: bool = False,
    drop_titles: bool = False,
    language: str = ENGLISH,
    broken_share: float = 0.01,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
    earlier: Path | None = None,
) -> dict[str, Any]:
    """Write a snapshot of documents into an existing empty folder and return its manifest.

    Wrap the call in ``artifacts.atomic_folder``: after an error the folder is incomplete.

    Args:
        sources: files of the corpus.
        folder: folder of the snapshot.
        work: folder for growing files, used by this snapshot only and on the same disk. After a kill the same call
            resumes from it and gives the same bytes. The caller removes it; invalid input removes it at once.
        vocabulary: wordpieces in the order of their ids.
        block_wordpieces: maximum wordpieces of [CLS] title [SEP] body [SEP]; the paper uses 288.
        casing: normalisation of BERT's WordPiece.
        tokenizer: contents of the tokenizer.json with this vocabulary, or None for BERT's WordPiece.
        whole_documents: each document is one passage of any length, which is truncated when it is encoded.
        drop_titles: drop the Wikipedia articles of ``is_navigation_title``.
        language: language of all documents, or ``AUTO`` to detect that of each.
        broken_share: maximum share of broken records, which are skipped.
        workers: number of processes that parse and tokenise; 1 uses this process.
        progress: called with the number of bytes read of the sources' files since the last call.
        earlier: snapshot with the same vocabulary, tokenizer and settings whose passages are reused.

    Raises:
        ValueError: If more records are broken, with the first ten of them, or if no passage is left.
    """
    if block_wordpieces <= SPECIAL_TOKENS_PER_DOCUMENT:
        raise ValueError(
            f"block_wordpieces is {block_wordpieces}; it must be larger than the number of special tokens, "
            f"{SPECIAL_TOKENS_PER_DOCUMENT} (the paper uses 288)"
        )
    if workers < 1:
        raise ValueError(f"workers is {workers}, expected 1 or more")
    check_language(language)
    settings = {
        "block_wordpieces": block_wordpieces,
        "casing": asdict(casing),
        "whole_documents": whole_documents,
        "drop_titles": drop_titles,
        "language": language,
    }
    try:
        with (
            closing(_Writer(work, vocabulary, tokenizer, sources, broken_share, language == AUTO)) as writer,
            workers_in_order(workers, sources, DocumentCutter(vocabulary, tokenizer, settings, earlier)) as cut,
        ):
            advance = Progress(sources, progress)
            for batch, (outcomes, passages) in cut(iter_batches(sources, writer.source, writer.counts.records)):
                writer.append(batch, outcomes, passages)
                advance(batch)
            return writer.finish(folder, settings)
    except ValueError:
        shutil.rmtree(work, ignore_errors=True)
        raise


class _Writer:
    """Writer that appends to files in ``work`` and hard-links them into the snapshot at the end.

    ``source`` and ``counts.records`` are the position at which to resume reading.
    """

    def __init__(
        self,
        work: Path,
        vocabulary: Sequence[str],
        tokenizer: str | None,
        sources: Sequence[Source],
        broken_share: float,
        languages: bool,
    ) -> None:
        self._work = work
        self._vocabulary, self._tokenizer = vocabulary, tokenizer
        self._sources = sources
        self._broken_share = broken_share
        state = _restore_checkpoint(work)
        sizes: dict[str, int] = state.get("bytes", {})
        self._files: dict[str, AppendOnlyFile] = {}

        def growing(name: str, kind: Callable[..., File], *shape: Any) -> File:
            self._files[name] = file = kind(work / name, *shape, size=sizes.get(name))
            opened.callback(file.close)
            return file

        wordpiece = np.uint16 if len(vocabulary) <= 1 << 16 else np.int32
        with ExitStack() as opened:  # closes open files if the disk is full
            self._tokens = growing("tokens.npy", NpyWriter, wordpiece)
            self._token_chars = growing("token_chars.npy", NpyWriter, np.int32, (2,))
            self._continues = None if tokenizer is None else growing(CONTINUES, NpyWriter, np.bool_)
            self._token_offsets = growing("token_offsets.npy", OffsetsWriter)
            self._title_tokens = growing("title_tokens.npy", NpyWriter, wordpiece)
            self._title_offsets = growing("title_offsets.npy", OffsetsWriter)
            self._sentences = growing("sentences.npy", NpyWriter, np.int32, (3,))
            self._sentence_offsets = growing("sentence_offsets.npy", OffsetsWriter)
            self._places = growing(PLACES, NpyWriter, np.int64, (2,))
            self._documents = growing(DOCUMENTS, NpyWriter, np.uint64, (2,))
            self._languages = growing(LANGUAGES, NpyWriter, np.uint8, (2,)) if languages else None
            logs = (growing(name, AppendOnlyFile) for name in (_TEXTS, REJECTS, SOURCES))
            self._texts, self._rejects, self._source_lines = logs
            (work / GIVEN_SPANS).mkdir(exist_ok=True)
            self._spans = SpansWriter(work / GIVEN_SPANS, state.get("spans"))
            opened.callback(self._spans.abandon)
            self._seen = SeenIds(work / _IDS)
            opened.callback(self._seen.close)
            self._spans_given: bool = state.get("spans_given", False)
            self.source: int = state.get("source", 0)
            self.counts = OutcomeCounts(**state.get("counts", {}))  # of the current source
            self._total = OutcomeCounts(**state.get("total", {}))
            if not self._texts.size:
                self._texts.write(_SCHEMA.serialize())
            for rows in self._read_texts() if state else ():
                self._seen.remember(*(rows.column(name).to_pylist() for name in ("passage_id", "document_id", _PLACE)))
            self.close = opened.pop_all().close
        self._synced = time.monotonic()

    def append(self, batch: Batch, outcomes: Sequence[Outcome], passages: PassageBatch) -> None:
        """Count the outcomes of a batch and append its passages; raise ValueError if too many records are broken."""
        duplicates = self._count(batch, iter(outcomes))
        documents = [outcome for outcome in outcomes if isinstance(outcome, Document)]
        if duplicates:
            passages = passages.without(duplicates)
        self._append_arrays(passages)
        self._append_texts(documents, passages)
        if self._continues is not None:
            for passage in passages.passages:
                text = documents[passage.document].text[slice(*passage.chars)]
                self._continues.append(is_inside_word(text, passages.chars[slice(*passage.tokens)]))
        self._append_spans(documents, passages)
        if time.monotonic() - self._synced > _CHECKPOINT_SECONDS:
            self._checkpoint()

    def finish(self, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
        self._finish_sources(len(self._sources))
        self._check_rejects()
        passages, sentences, tokens = self._token_offsets.items, len(self._sentences), len(self._tokens)
        if passages == 0:
            raise ValueError(self._empty_corpus_message())
        self._checkpoint()
        corpus = self._write_texts(folder)
        if self._tokenizer is None:
            vocabulary = vocabulary_hash(self._vocabulary)
            (folder / VOCABULARY).write_bytes(vocabulary_bytes(self._vocabulary))
        else:
            vocabulary = hashlib.sha256(self._tokenizer.encode()).hexdigest()
            (folder / TOKENIZER).write_text(self._tokenizer, encoding="utf-8")
        self.close()  # all files; also removes the temporary database
        for name in sorted(self._files.keys() - {_TEXTS}):
            link_or_copy(self._work / name, folder / name)
        if self._spans_given:
            self._spans.close(corpus_hash=corpus, vocabulary_hash=vocabulary, source="the corpus")
            (folder / GIVEN_SPANS).mkdir()
            for path in sorted((self._work / GIVEN_SPANS).iterdir()):
                link_or_copy(path, folder / GIVEN_SPANS / path.name)
        return write_manifest(
            folder,
            KIND,
            corpus_hash=corpus,
            vocabulary_hash=vocabulary,
            passages=passages,
            sentences=sentences,
            tokens=tokens,
            settings=settings,
            **asdict(self._total),
        )

    def _count(self, batch: Batch, outcomes: Iterator[Outcome]) -> set[int]:
        """Count outcomes by source; return the numbers of the documents with duplicate ids."""
        duplicates = set()
        document_numbers = itertools.count()
        for source, records in batch:
            self._finish_sources(source)
            for outcome in itertools.islice(outcomes, len(records)):
                if isinstance(outcome, Document):
                    number = next(document_numbers)
                    problem = self._seen.check_document(outcome.id, outcome.place) if outcome.id else ""
                    if problem:
                        duplicates.add(number)
                        outcome = Rejected(outcome.place, problem)
                is_file = self._sources[source].format.is_document
                if isinstance(outcome, Rejected) and is_file and not outcome.kind:
                    outcome = replace(outcome, kind=self._sources[source].broken)
                for counts in (self.counts, self._total):
                    counts.add(outcome)
                if isinstance(outcome, Rejected):
                    line = {"place": outcome.place, "problem": outcome.problem}
                    if outcome.kind:
                        line["kind"] = outcome.kind
                    self._rejects.write(canonical_json(line) + b"\n")
                if self._total.records % _RECORDS_BETWEEN_CHECKS == 0:
                    self._check_rejects()
        return duplicates

    def _finish_sources(self, source: int) -> None:
        if self.source < source:
            base = os.path.commonpath([item.path.absolute().parent for item in self._sources])
        while self.source < source:
            item = self._sources[self.source]
            name = printable_path(item.path.absolute().relative_to(base).as_posix())
            line = {"source": name, "format": item.format.name, "bytes": item.size, **asdict(self.counts)}
            self._source_lines.write(canonical_json(line) + b"\n")
            self.source, self.counts = self.source + 1, OutcomeCounts()

    def _check_rejects(self) -> None:
        """Raise ValueError with the first broken records if there are too many."""
        rejected, records = self._total.rejected, self._total.records
        if rejected <= self._broken_share * records:
            return
        self._rejects.sync()
        first = list(itertools.islice(read_rejects(self._work), _REJECTS_SHOWN))
        raise ValueError(
            "\n  ".join(f"{reject['place']}: {reject['problem']}" for reject in first)
            + f"\n  {rejected} of the first {records} records are broken, more than snapshot.broken_share="
            f"{self._broken_share:g}: correct them, set the right snapshot.format, or raise snapshot.broken_share"
        )

    def _empty_corpus_message(self) -> str:
        names = ", ".join(str(source.path) for source in self._sources[:3]) or "no file was given"
        if self._total.records == 0:
            remedy = 'give at least one line of the form {"title": "...", "text": "..."}, or another format'
            return f"the corpus holds no documents ({names}): {remedy}"
        self._rejects.sync()
        unread = itertools.islice(read_rejects(self._work, unread=True), _REJECTS_SHOWN)
        return (
            f"no passage is left of {self._total.records} documents in {names} (dropped: {self._total.dropped}); "
            "give documents with text" + "".join(f"\n  {reject['place']}: {reject['problem']}" for reject in unread)
        )

    def _append_arrays(self, batch: PassageBatch) -> None:
        first = self._token_offsets.items
        titles = [batch.titles[passage.document] for passage in batch.passages]
        passages = np.arange(first, first + len(titles), dtype=np.int32)
        documents = batch.documents()
        digests = b"".join(batch.digests[document] for document in documents)
        self._documents.append(np.frombuffer(digests, "<u8").reshape(-1, 2))
        first_number = self._total.documents - len(documents)  # every counted document has a passage
        number = {document: first_number + index for index, document in enumerate(documents)}
        places = [(number[passage.document], passage.chars[0]) for passage in batch.passages]
        sentences = [length(passage.sentences) for passage in batch.passages]
        self._token_offsets.append_lengths([length(passage.tokens) for passage in batch.passages])
        self._title_offsets.append_lengths([len(title) for title in titles])
        self._sentence_offsets.append_lengths(sentences)
        self._tokens.append(batch.ids)
        self._token_chars.append(batch.chars)
        self._title_tokens.append(np.fromiter(itertools.chain.from_iterable(titles), np.int32))
        self._places.append(np.array(places, np.int64).reshape(-1, 2))
        if self._languages is not None:
            codes = "".join(batch.languages[passage.document] for passage in batch.passages).encode()
            self._languages.append(np.frombuffer(codes, np.uint8).reshape(-1, 2))
        self._sentences.append(np.column_stack([np.repeat(passages, sentences), batch.sentences]))

    def _append_texts(self, documents: Sequence[Document], batch: PassageBatch) -> None:
        names = {index: document_name(documents[index]) for index in batch.documents()}
        rows = []
        for passage in batch.passages:
            document, name = documents[passage.document], names[passage.document]
            identifier, text = self._seen.passage_id(passage.digest), document.text[slice(*passage.chars)]
            extra, place = _extra(document, passage.chars), document.place if document.id else ""
            rows.append((identifier, name, document.title, text, extra, place))
        if rows:
            columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
            self._texts.write(pa.record_batch(columns, _SCHEMA).serialize())

    def _append_spans(self, documents: Sequence[Document], batch: PassageBatch) -> None:
        """Append the spans given by documents, each to the passage in which it begins."""
        if not any(document.spans for document in documents):
            self._spans.add_without(len(batch.passages))
            return
        self._spans_given = True
        first_sentence = len(self._sentences) - len(batch.sentences)
        for row, passage in enumerate(batch.passages):
            document = documents[passage.document]
            low = passage.chars[0]
            following = batch.passages[row + 1 : row + 2]
            is_last = not following or following[0].document != passage.document
            until = len(document.text) if is_last else following[0].chars[0]
            since = 0 if row == 0 or batch.passages[row - 1].document != passage.document else low
            self._spans.add(
                [(start - low, end - low, label) for start, end, label in document.spans if since <= start < until],
                batch.chars[slice(*passage.tokens)],
                batch.sentences[slice(*passage.sentences)],
                first_sentence + passage.sentences[0],
            )

    def _checkpoint(self) -> None:
        state = {
            "bytes": {name: file.sync() for name, file in self._files.items()},
            "spans": self._spans.sync(),
            "spans_given": self._spans_given,
            "source": self.source,
            "counts": asdict(self.counts),
            "total": asdict(self._total),
        }
        sync_folder(self._work)
        write_json(self._work / _CHECKPOINT, add_digest(state))
        self._synced = time.monotonic()

    def _read_texts(self) -> Iterator[pa.RecordBatch]:
        with pa.OSFile(str(self._work / _TEXTS)) as file, pa.ipc.open_stream(file) as reader:
            yield from reader

    def _write_texts(self, folder: Path) -> str:
        """Write passages.arrow in batches of ``ROWS_PER_BATCH`` rows and return the corpus hash."""
        digest = hashlib.sha256()
        # 64-bit offsets: whole documents may exceed 2 GiB in a batch
        schema = pa.schema([(name, pa.large_string()) for name in TEXT_COLUMNS])
        pending = schema.empty_table()
        with pa.OSFile(str(folder / TEXTS), "wb") as file, pa.ipc.new_file(file, schema) as out:
            for rows in self._read_texts():
                digest.update("".join(f"{name}\n" for name in rows.column("passage_id").to_pylist()).encode())
                pending = pa.concat_tables([pending, pa.Table.from_batches([rows.select(TEXT_COLUMNS)]).cast(schema)])
                while pending.num_rows >= ROWS_PER_BATCH:
                    out.write_table(pending.slice(0, ROWS_PER_BATCH).combine_chunks())
                    pending = pending.slice(ROWS_PER_BATCH)
            if pending.num_rows:
                out.write_table(pending.combine_chunks())
        return digest.hexdigest()


def _extra(document: Document, chars: tuple[int, int]) -> str:
    """Return the document's extra columns, with the pages of a passage for ``Snapshot.page``."""
    if not document.pages:
        return document.extra
    first, end = bisect_right(document.pages, chars[0]), bisect_left(document.pages, chars[1])
    begins = [[first, 0], *([page + 1, document.pages[page] - chars[0]] for page in range(first, end))]
    fields = json.loads(document.extra) if document.extra else {}
    return canonical_json({**fields, PAGES: begins}).decode()


def _restore_checkpoint(work: Path) -> dict[str, Any]:
    """Return the checkpoint of an interrupted writer if its files are complete; otherwise empty ``work``."""
    with suppress(OSError, ValueError):
        state: dict[str, Any] = read_json(work / _CHECKPOINT)
        sizes = state["bytes"] if has_valid_digest(state) else {}
        if DOCUMENTS in sizes and all((work / name).stat().st_size >= size for name, size in sizes.items()):
            return state
    shutil.rmtree(work, ignore_errors=True)
    make_folder(work)
    return {}
