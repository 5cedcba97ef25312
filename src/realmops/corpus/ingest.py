"""Processing of the records of many files by worker processes; results do not depend on their number."""

import itertools
import multiprocessing
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from realmops.readers.contents import HIDDEN
from realmops.readers.documents import (
    PAGE_WITHOUT_TEXT,
    Document,
    Dropped,
    Outcome,
    RawRecord,
    Rejected,
    printable_path,
)
from realmops.readers.sources import FORMATS, Source

_BATCH_CHARACTERS = 1 << 20
_BATCH_RECORDS = 1024
_MINOR_KINDS = ("image", "header or footer", "boilerplate", "table of contents", HIDDEN)  # most documents have some
_NAMED_FILES, _NAMED_PAGES = 20, 20

# Consecutive records by source: (source number, format name, records)
Batch = list[tuple[int, str, list[RawRecord | Rejected]]]
T = TypeVar("T")


@dataclass(slots=True)
class OutcomeCounts:
    """Number of records by outcome."""

    records: int = 0  # all records
    documents: int = 0  # records that became documents
    replaced: int = 0  # documents with U+FFFD, the replacement character of undecodable bytes
    rejected: int = 0  # broken records
    dropped: dict[str, int] = field(default_factory=dict)  # dropped records by reason
    unread: dict[str, int] = field(default_factory=dict)  # unreadable files by kind
    incomplete: int = 0  # documents that lack something other than ``_MINOR_KINDS``
    omitted: dict[str, int] = field(default_factory=dict)  # what was left out of documents by kind, for example images
    # Numbers of the first pages without text, of the first files with such pages
    empty_pages: dict[str, list[int]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.records += 1
        if isinstance(outcome, Dropped):
            self.dropped[outcome.reason] = self.dropped.get(outcome.reason, 0) + 1
        if isinstance(outcome, Document):
            self.documents += 1
            self.replaced += "\ufffd" in outcome.title or "\ufffd" in outcome.text
            self.incomplete += any(kind not in _MINOR_KINDS for kind, _ in outcome.omitted)
            for kind, count in outcome.omitted:
                self.omitted[kind] = self.omitted.get(kind, 0) + count
                if kind == PAGE_WITHOUT_TEXT and len(self.empty_pages) < _NAMED_FILES:
                    self.empty_pages[Path(outcome.place).name] = outcome.pages_without_text()[:_NAMED_PAGES]
        if isinstance(outcome, Rejected) and outcome.kind:
            self.unread[outcome.kind] = self.unread.get(outcome.kind, 0) + 1
        else:
            self.rejected += isinstance(outcome, Rejected)


def iter_batches(sources: Sequence[Source], share: float = 1.0) -> Iterator[Batch]:
    """Yield the records of all sources in batches, or a random ``share`` of them, drawn with a fixed seed.

    A file that cannot be read to its end raises ValueError, unless its source has ``broken``.
    """
    batch: Batch = []
    generator = random.Random(0)
    weight = count = 0
    for number, source in enumerate(sources):
        records: list[RawRecord | Rejected] = []
        batch.append((number, source.format.name, records))
        for read, item in enumerate(source.format.records(source.path)):
            if share < 1 and generator.random() >= share:
                continue
            if isinstance(item, Rejected) and item.ends_file and source.broken:
                item = replace(item, kind=source.broken)
            elif isinstance(item, Rejected) and item.ends_file:
                raise ValueError(
                    f"{printable_path(item.place)}: {item.problem} ({read} records of the file were read before); "
                    "or remove the file from the documents"
                )
            if not item.place.isascii():
                item = replace(item, place=printable_path(item.place))
            records.append(item)
            count += 1
            weight += _weight(item)
            if weight >= _BATCH_CHARACTERS or count == _BATCH_RECORDS:
                yield batch
                weight, count, records = 0, 0, []
                batch = [(number, source.format.name, records)]
    if count:
        yield batch


def _weight(value: Any) -> int:
    """Return the approximate characters or bytes of a record; empty values take memory, too."""
    match value:
        case Rejected():
            return len(value.problem)
        case RawRecord(data=Path()):
            return value.position
        case RawRecord():
            return _weight(value.data)
        case str() | bytes():
            return 1 + len(value)
        case dict():
            return 1 + sum(map(_weight, value.values()))
        case list():
            return 1 + sum(map(_weight, value))
    return 1


def parse_records(batch: Batch) -> list[Outcome]:
    records = ((name, record) for _, name, records in batch for record in records)
    return [record if isinstance(record, Rejected) else FORMATS[name].convert(record) for name, record in records]


def process_batches(
    sources: Sequence[Source],
    work: Callable[[Batch], T],
    *,
    workers: int = 1,
    on_progress: Callable[[int], None] | None = None,
    share: float = 1.0,
) -> Generator[tuple[Batch, T], None, None]:
    """Yield each batch with ``work(batch)``, in order; ``on_progress`` gets the file bytes read since its last call."""
    offsets = [0, *itertools.accumulate(source.size for source in sources)]
    reported = 0
    for batch, result in _in_order(iter_batches(sources, share), work, workers):
        yield batch, result
        number, _, records = batch[-1]
        position = next((record.position for record in reversed(records) if isinstance(record, RawRecord)), 0)
        finished = max(reported, offsets[number] + position)
        if on_progress is not None:
            on_progress(finished - reported)
        reported = finished


def _in_order(batches: Iterable[Batch], work: Callable[[Batch], T], workers: int) -> Iterator[tuple[Batch, T]]:
    if workers == 1:
        yield from ((batch, work(batch)) for batch in batches)
        return
    context = multiprocessing.get_context("spawn")
    pending: deque[tuple[Batch, Future[T]]] = deque()
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(work,)) as pool:
        try:
            for batch in batches:
                pending.append((batch, pool.submit(_call_work, batch)))
                if len(pending) == 2 * workers:  # batches in memory
                    first, future = pending.popleft()
                    yield first, future.result()
            for batch, future in pending:
                yield batch, future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def follow_parent() -> None:
    """Leave Ctrl-C to the parent of this worker process, and end with it, also if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


_work: Callable[[Batch], Any] | None = None


def _start_worker(work: Callable[[Batch], Any]) -> None:
    global _work
    _work = work
    follow_parent()


def _call_work(batch: Batch) -> Any:
    assert _work is not None
    return _work(batch)
