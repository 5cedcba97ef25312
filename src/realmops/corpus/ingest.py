"""From files to what worker processes make of their records, in order.

Records are cut from their files in one process, which is cheap, and understood in others, batch by batch; the
results come back in the order of the batches, so that nothing depends on the number of workers.
"""

import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from realmops.corpus.documents import Document, Dropped, Outcome, Raw, Rejected, shown
from realmops.corpus.formats import FORMATS, Source

_BATCH_CHARACTERS = 1 << 20
_BATCH_RECORDS = 1024

Records = list[tuple[str, list[Raw | Rejected]]]  # by the name of their format
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records, in runs of one source each: (the source's number, records)."""

    runs: list[tuple[int, list[Raw | Rejected]]]


@dataclass(slots=True)
class OutcomeCounts:
    """Records by outcome; ``replaced`` are documents that hold U+FFFD, which stands for bytes that are no text.

    ``unread`` are the files that could not be read, by kind.
    """

    records: int = 0
    documents: int = 0
    replaced: int = 0
    rejected: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.records += 1
        if isinstance(outcome, Dropped):
            self.dropped[outcome.reason] = self.dropped.get(outcome.reason, 0) + 1
        if isinstance(outcome, Document):
            self.documents += 1
            self.replaced += "\ufffd" in outcome.title or "\ufffd" in outcome.text
        if isinstance(outcome, Rejected) and outcome.kind:
            self.unread[outcome.kind] = self.unread.get(outcome.kind, 0) + 1
        else:
            self.rejected += isinstance(outcome, Rejected)


def batches(sources: Sequence[Source], source: int = 0, record: int = 0) -> Iterator[Batch]:
    """The records of all sources in batches, from a record of a source on.

    Raises ValueError for a file that cannot be read to its end: however many records that are, nobody could say. Where
    the source may be ``broken`` it is counted as such instead.
    """
    runs: list[tuple[int, list[Raw | Rejected]]] = []
    weight = count = 0
    for number in range(source, len(sources)):
        records: list[Raw | Rejected] = []
        runs.append((number, records))
        found = sources[number].format.records(sources[number].path)
        first = record if number == source else 0
        for read, item in enumerate(itertools.islice(found, first, None), start=first):
            if isinstance(item, Rejected) and item.ends_file and sources[number].broken:
                item = replace(item, kind=sources[number].broken)
            elif isinstance(item, Rejected) and item.ends_file:
                raise ValueError(
                    f"{shown(item.place)}: {item.problem} ({read} records of the file were read before); "
                    "or take the file out of the documents"
                )
            if not item.place.isascii():
                item = replace(item, place=shown(item.place))
            records.append(item)
            count += 1
            weight += _weight(item)
            if weight >= _BATCH_CHARACTERS or count == _BATCH_RECORDS:
                yield Batch(runs)
                weight, count, records = 0, 0, []
                runs = [(number, records)]
    if count:
        yield Batch(runs)


def _weight(item: Raw | Rejected) -> int:
    """Characters or bytes of a record, about."""
    if isinstance(item, Rejected):
        return len(item.problem)
    if isinstance(item.data, Path):
        return item.position
    return _values(item.data)


def _values(value: Any) -> int:
    """Characters or bytes of strings, and how many other values there are: an empty one takes memory, too."""
    match value:
        case str() | bytes():
            return 1 + len(value)
        case dict():
            return 1 + sum(map(_values, value.values()))
        case list():
            return 1 + sum(map(_values, value))
    return 1


class Progress:
    """Tells how many bytes of the sources' files are done, batch by batch."""

    def __init__(self, sources: Sequence[Source], tell: Callable[[int], None] | None) -> None:
        self._before = [0, *itertools.accumulate(source.size for source in sources)]
        self._tell = tell
        self._told = 0

    def __call__(self, batch: Batch) -> None:
        """The batch is done."""
        number, records = batch.runs[-1]
        inside = next((record.position for record in reversed(records) if isinstance(record, Raw)), 0)
        done = max(self._told, self._before[number] + inside)
        if self._tell is not None:
            self._tell(done - self._told)
        self._told = done


def convert(records: Records) -> list[Outcome]:
    """What each record is: a document, dropped or rejected."""
    return [
        item if isinstance(item, Rejected) else FORMATS[name].convert(item) for name, items in records for item in items
    ]


@contextmanager
def workers_in_order(
    workers: int, sources: Sequence[Source], work: Callable[[Records], T]
) -> Iterator[Callable[[Iterable[Batch]], Iterator[tuple[Batch, T]]]]:
    """A function that does ``work`` on batches in order: here with one worker, else in processes of their own."""
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
    return [(sources[number].format.name, records) for number, records in batch.runs]


_work: Callable[[Records], Any] | None = None


def _start_worker(work: Callable[[Records], Any]) -> None:
    global _work
    _work = work


def _work_there(records: Records) -> Any:
    assert _work is not None
    return _work(records)


def _in_order(
    pool: ProcessPoolExecutor, ahead: int, sources: Sequence[Source], stream: Iterable[Batch]
) -> Iterator[tuple[Batch, Any]]:
    """Results in the order of the batches, at most ``ahead`` batches in memory."""
    waiting: deque[tuple[Batch, Future[Any]]] = deque()
    for batch in stream:
        waiting.append((batch, pool.submit(_work_there, _records(sources, batch))))
        if len(waiting) == ahead:
            done, future = waiting.popleft()
            yield done, future.result()
    for done, future in waiting:
        yield done, future.result()
