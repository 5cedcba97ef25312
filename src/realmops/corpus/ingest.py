"""Ordered processing of the records of many files by worker processes.

The main process cuts files into records, which is cheap; worker processes parse them, batch by batch. Results keep the
order of the batches, so that no result depends on the number of workers.
"""

import itertools
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
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
_MINOR_KINDS = ("image", "header or footer", HIDDEN)  # most documents have some
_NAMED_FILES, _NAMED_PAGES = 20, 20

Records = list[tuple[str, list[RawRecord | Rejected]]]  # (format name, records)
Batch = list[tuple[int, list[RawRecord | Rejected]]]  # consecutive records by source: (source number, records)
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
    incomplete: int = (
        0  # documents of which the reader left out something other than images, headers, footers and hidden text
    )
    omitted: dict[str, int] = field(default_factory=dict)  # what was left out of documents by kind, for example images
    # Numbers of the first pages without text, of the first files with such pages
    empty_pages: dict[str, list[int]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
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


def iter_batches(sources: Sequence[Source]) -> Iterator[Batch]:
    """Yield the records of all sources in batches.

    Raises:
        ValueError: If a file cannot be read to its end, because the number of lost records is unknown. A source with
            ``broken`` set is counted as unread instead.
    """
    batch: Batch = []
    weight = count = 0
    for number, source in enumerate(sources):
        records: list[RawRecord | Rejected] = []
        batch.append((number, records))
        for read, item in enumerate(source.format.records(source.path)):
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
                batch = [(number, records)]
    if count:
        yield batch


def _weight(item: RawRecord | Rejected) -> int:
    """Return the approximate size of a record in characters or bytes."""
    if isinstance(item, Rejected):
        return len(item.problem)
    if isinstance(item.data, Path):
        return item.position
    return _values(item.data)


def _values(value: Any) -> int:
    """Return characters or bytes of all strings, plus one per value: empty values take memory, too."""
    match value:
        case str() | bytes():
            return 1 + len(value)
        case dict():
            return 1 + sum(map(_values, value.values()))
        case list():
            return 1 + sum(map(_values, value))
    return 1


class Progress:
    """Progress in bytes of the sources' files: ``on_progress`` gets those since the last call, after each batch."""

    def __init__(self, sources: Sequence[Source], on_progress: Callable[[int], None] | None) -> None:
        self._offsets = [0, *itertools.accumulate(source.size for source in sources)]
        self._on_progress = on_progress
        self._reported = 0

    def __call__(self, batch: Batch) -> None:
        """Report a finished batch."""
        number, records = batch[-1]
        position = next((record.position for record in reversed(records) if isinstance(record, RawRecord)), 0)
        finished = max(self._reported, self._offsets[number] + position)
        if self._on_progress is not None:
            self._on_progress(finished - self._reported)
        self._reported = finished


def parse_records(records: Records) -> list[Outcome]:
    """Parse records; each becomes a Document, Dropped or Rejected."""
    return [
        item if isinstance(item, Rejected) else FORMATS[name].convert(item) for name, items in records for item in items
    ]


@contextmanager
def workers_in_order(
    workers: int, sources: Sequence[Source], work: Callable[[Records], T]
) -> Iterator[Callable[[Iterable[Batch]], Iterator[tuple[Batch, T]]]]:
    """Yield a function that maps ``work`` over batches in order: in this process with one worker, else in a pool."""
    if workers == 1:
        yield lambda stream: ((batch, work(_records(sources, batch))) for batch in stream)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(work,)) as pool:
        try:
            yield partial(_in_order, pool, 2 * workers, sources)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _records(sources: Sequence[Source], batch: Batch) -> Records:
    return [(sources[number].format.name, records) for number, records in batch]


_work: Callable[[Records], Any] | None = None


def _start_worker(work: Callable[[Records], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the pool


def _call_work(records: Records) -> Any:
    assert _work is not None
    return _work(records)


def _in_order(
    pool: ProcessPoolExecutor, ahead: int, sources: Sequence[Source], stream: Iterable[Batch]
) -> Iterator[tuple[Batch, Any]]:
    """Yield results in the order of the batches, with at most ``ahead`` batches in memory."""
    pending: deque[tuple[Batch, Future[Any]]] = deque()
    for batch in stream:
        pending.append((batch, pool.submit(_call_work, _records(sources, batch))))
        if len(pending) == ahead:
            first, future = pending.popleft()
            yield first, future.result()
    for batch, future in pending:
        yield batch, future.result()
