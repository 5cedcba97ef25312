"""Writer of the corpus snapshot: one pass in constant memory, the same bytes for any number of workers."""

import hashlib
import itertools
import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike

from realmops.artifacts import canonical_json, write_manifest
from realmops.corpus.document_cutter import DocumentCutter
from realmops.corpus.ingest import Batch, OutcomeCounts, process_batches
from realmops.corpus.languages import AUTO, ENGLISH, check_language
from realmops.corpus.npy_files import NpyWriter, OffsetsWriter
from realmops.corpus.passages import PassageBatch
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
)
from realmops.corpus.spans import SpansWriter
from realmops.corpus.tokenizer import is_inside_word
from realmops.corpus.vocabulary import UNCASED, Casing, vocabulary_bytes, vocabulary_hash
from realmops.hub import TOKENIZER, VOCABULARY
from realmops.readers.documents import PAGES, Document, Outcome, Rejected, printable_path
from realmops.readers.sources import Source

_IDS = "ids.sqlite"
_RECORDS_BETWEEN_CHECKS = 1000
_REJECTS_SHOWN = 10
# 64-bit offsets: whole documents may exceed 2 GiB in a batch
_SCHEMA = pa.schema([(name, pa.large_string()) for name in TEXT_COLUMNS])


def write_snapshot(
    sources: Sequence[Source],
    folder: Path,
    *,
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
    """Write a snapshot into an empty folder, which is incomplete after an error, and return its manifest.

    ``block_wordpieces`` limits [CLS] title [SEP] body [SEP] (288 in the paper); ``whole_documents`` makes each
    document one passage. ``tokenizer`` is a tokenizer.json, None for BERT's WordPiece; ``earlier`` is a snapshot with
    the same settings, whose passages are reused. Broken records up to ``broken_share`` are skipped.
    """
    check_language(language)
    settings = {
        "block_wordpieces": block_wordpieces,
        "casing": asdict(casing),
        "whole_documents": whole_documents,
        "drop_titles": drop_titles,
        "language": language,
    }
    cutter = DocumentCutter(vocabulary, tokenizer, settings, earlier)
    with (
        closing(_Writer(folder, vocabulary, tokenizer, sources, broken_share, language == AUTO)) as writer,
        closing(process_batches(sources, cutter, workers=workers, on_progress=progress)) as batches,
    ):
        for batch, (outcomes, passages) in batches:
            writer.append(batch, outcomes, passages)
        return writer.finish(settings)


class _Writer:
    def __init__(
        self,
        folder: Path,
        vocabulary: Sequence[str],
        tokenizer: str | None,
        sources: Sequence[Source],
        broken_share: float,
        languages: bool,
    ) -> None:
        self._folder = folder
        self._vocabulary, self._tokenizer = vocabulary, tokenizer
        self._sources = sources
        self._broken_share = broken_share
        wordpiece = np.uint16 if len(vocabulary) <= 1 << 16 else np.int32
        with ExitStack() as files:  # closes open files if the disk is full

            def array(name: str, dtype: DTypeLike, *shape: int) -> NpyWriter:
                return files.enter_context(closing(NpyWriter(folder / name, dtype, shape)))

            def offsets(name: str) -> OffsetsWriter:
                return files.enter_context(closing(OffsetsWriter(folder / name)))

            self._tokens = array("tokens.npy", wordpiece)
            self._token_chars = array("token_chars.npy", np.int32, 2)
            self._continues = None if tokenizer is None else array(CONTINUES, np.bool_)
            self._token_offsets = offsets("token_offsets.npy")
            self._title_tokens = array("title_tokens.npy", wordpiece)
            self._title_offsets = offsets("title_offsets.npy")
            self._sentences = array("sentences.npy", np.int32, 3)
            self._sentence_offsets = offsets("sentence_offsets.npy")
            self._places = array(PLACES, np.int64, 2)
            self._documents = array(DOCUMENTS, np.uint64, 2)
            self._languages = array(LANGUAGES, np.uint8, 2) if languages else None
            self._rejects = files.enter_context(open(folder / REJECTS, "xb"))
            self._source_lines = files.enter_context(open(folder / SOURCES, "xb"))
            self._seen = files.enter_context(closing(SeenIds(folder / _IDS)))
            texts = files.enter_context(pa.OSFile(str(folder / TEXTS), "wb"))
            self._texts = files.enter_context(pa.ipc.new_file(texts, _SCHEMA))
            self._files = files.pop_all()
        self.close = self._files.close
        self._pending = _SCHEMA.empty_table()  # rows of passages.arrow that do not fill a batch yet
        self._corpus = hashlib.sha256()
        self._spans: SpansWriter | None = None  # until a document gives spans
        self._shown: dict[bool, list[str]] = {False: [], True: []}  # first broken records, first unreadable files
        self._source = 0
        self._counts = OutcomeCounts()  # of the current source
        self._total = OutcomeCounts()

    def append(self, batch: Batch, outcomes: Sequence[Outcome], passages: PassageBatch) -> None:
        duplicates = self._count(batch, iter(outcomes))
        documents = [outcome for outcome in outcomes if isinstance(outcome, Document)]
        if duplicates:
            passages = replace(passages, passages=[p for p in passages.passages if p.document not in duplicates])
        self._append_arrays(passages)
        self._append_texts(documents, passages)
        if self._continues is not None:
            for passage in passages.passages:
                text = documents[passage.document].text[slice(*passage.chars)]
                self._continues.append(is_inside_word(text, passage.token_chars))
        self._append_spans(documents, passages)

    def finish(self, settings: dict[str, Any]) -> dict[str, Any]:
        folder = self._folder
        self._finish_sources(len(self._sources))
        self._check_rejects()
        passages, sentences, tokens = self._token_offsets.items, len(self._sentences), len(self._tokens)
        if passages == 0:
            names = ", ".join(str(source.path) for source in self._sources[:3])
            raise ValueError(
                f"no passage is left of {self._total.records} documents in {names} (dropped: {self._total.dropped}); "
                "give documents with text, or the right snapshot.format" + "".join(self._shown[True])
            )
        if self._pending.num_rows:
            self._texts.write_table(self._pending.combine_chunks())
        corpus = self._corpus.hexdigest()
        if self._tokenizer is None:
            vocabulary = vocabulary_hash(self._vocabulary)
            (folder / VOCABULARY).write_bytes(vocabulary_bytes(self._vocabulary))
        else:
            vocabulary = hashlib.sha256(self._tokenizer.encode()).hexdigest()
            (folder / TOKENIZER).write_text(self._tokenizer, encoding="utf-8")
        self.close()  # all files; also removes the temporary database
        if self._spans is not None:
            self._spans.close(corpus_hash=corpus, vocabulary_hash=vocabulary, source="the corpus")
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
        for source, _, records in batch:
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
                for counts in (self._counts, self._total):
                    counts.add(outcome)
                if isinstance(outcome, Rejected):
                    line = {"place": outcome.place, "problem": outcome.problem}
                    if outcome.kind:
                        line["kind"] = outcome.kind
                    self._rejects.write(canonical_json(line) + b"\n")
                    shown = self._shown["kind" in line]
                    shown += [f"\n  {outcome.place}: {outcome.problem}"] * (len(shown) < _REJECTS_SHOWN)
                if self._total.records % _RECORDS_BETWEEN_CHECKS == 0:
                    self._check_rejects()
        return duplicates

    def _finish_sources(self, source: int) -> None:
        if self._source < source:
            base = os.path.commonpath([item.path.absolute().parent for item in self._sources])
        while self._source < source:
            item = self._sources[self._source]
            name = printable_path(item.path.absolute().relative_to(base).as_posix())
            line = {"source": name, "format": item.format.name, "bytes": item.size, **asdict(self._counts)}
            self._source_lines.write(canonical_json(line) + b"\n")
            self._source, self._counts = self._source + 1, OutcomeCounts()

    def _check_rejects(self) -> None:
        rejected, records = self._total.rejected, self._total.records
        if rejected <= self._broken_share * records:
            return
        raise ValueError(
            "".join(self._shown[False]).lstrip()
            + f"\n  {rejected} of the first {records} records are broken, more than snapshot.broken_share="
            f"{self._broken_share:g}: correct them, set the right snapshot.format, or raise snapshot.broken_share"
        )

    def _append_arrays(self, batch: PassageBatch) -> None:
        if not batch.passages:
            return
        number = self._token_offsets.items
        documents = list(dict.fromkeys(passage.document for passage in batch.passages))
        digests = b"".join(batch.digests[document] for document in documents)
        self._documents.append(np.frombuffer(digests, "<u8").reshape(-1, 2))
        first_document = self._total.documents - len(documents)  # every counted document has a passage
        document_number = {document: first_document + index for index, document in enumerate(documents)}
        places = [(document_number[passage.document], passage.chars[0]) for passage in batch.passages]
        titles = [batch.titles[passage.document] for passage in batch.passages]
        sentences = [len(passage.sentences) for passage in batch.passages]
        self._token_offsets.append_lengths([len(passage.ids) for passage in batch.passages])
        self._title_offsets.append_lengths([len(title) for title in titles])
        self._sentence_offsets.append_lengths(sentences)
        self._tokens.append(np.concatenate([passage.ids for passage in batch.passages]))
        self._token_chars.append(np.concatenate([passage.token_chars for passage in batch.passages]))
        self._title_tokens.append(np.fromiter(itertools.chain.from_iterable(titles), np.int32))
        self._places.append(np.array(places, np.int64))
        if self._languages is not None:
            codes = "".join(batch.languages[passage.document] for passage in batch.passages).encode()
            self._languages.append(np.frombuffer(codes, np.uint8).reshape(-1, 2))
        numbers = np.repeat(np.arange(number, number + len(titles), dtype=np.int32), sentences)
        self._sentences.append(
            np.column_stack([numbers, np.concatenate([passage.sentences for passage in batch.passages])])
        )

    def _append_texts(self, documents: Sequence[Document], batch: PassageBatch) -> None:
        names = {index: document_name(documents[index]) for index in {p.document for p in batch.passages}}
        rows = []
        for passage in batch.passages:
            document, name = documents[passage.document], names[passage.document]
            identifier, text = self._seen.passage_id(passage.digest), document.text[slice(*passage.chars)]
            self._corpus.update(f"{identifier}\n".encode())
            rows.append((identifier, name, document.title, text, _extra(document, passage.chars)))
        if rows:
            columns = [pa.array(column, pa.large_string()) for column in zip(*rows, strict=True)]
            self._pending = pa.concat_tables([self._pending, pa.table(columns, schema=_SCHEMA)])
        while self._pending.num_rows >= ROWS_PER_BATCH:
            self._texts.write_table(self._pending.slice(0, ROWS_PER_BATCH).combine_chunks())
            self._pending = self._pending.slice(ROWS_PER_BATCH)

    def _append_spans(self, documents: Sequence[Document], batch: PassageBatch) -> None:
        """Append the spans given by documents, each to the passage in which it begins."""
        if not any(document.spans for document in documents):
            if self._spans is not None:
                self._spans.add_without(len(batch.passages))
            return
        if self._spans is None:
            (self._folder / GIVEN_SPANS).mkdir()
            self._spans = self._files.enter_context(SpansWriter(self._folder / GIVEN_SPANS))
            self._spans.add_without(self._token_offsets.items - len(batch.passages))
        sentence = len(self._sentences) - sum(len(passage.sentences) for passage in batch.passages)
        for row, passage in enumerate(batch.passages):
            document = documents[passage.document]
            low = passage.chars[0]
            following = batch.passages[row + 1 : row + 2]
            is_last = not following or following[0].document != passage.document
            until = len(document.text) if is_last else following[0].chars[0]
            since = 0 if row == 0 or batch.passages[row - 1].document != passage.document else low
            self._spans.add(
                [(start - low, end - low, label) for start, end, label in document.spans if since <= start < until],
                passage.token_chars,
                passage.sentences,
                sentence,
            )
            sentence += len(passage.sentences)


def _extra(document: Document, chars: tuple[int, int]) -> str:
    """Return the document's extra columns, with the pages of a passage for ``Snapshot.page``."""
    if not document.pages:
        return document.extra
    first, end = bisect_right(document.pages, chars[0]), bisect_left(document.pages, chars[1])
    begins = [[first, 0], *([page + 1, document.pages[page] - chars[0]] for page in range(first, end))]
    fields = json.loads(document.extra) if document.extra else {}
    if any(page in document.scans for page, _ in begins):
        fields["ocr"] = True
    return canonical_json({**fields, PAGES: begins}).decode()
