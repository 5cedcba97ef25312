"""Dynamic batching: threads process concurrent requests in batches, each of one served model.

Requests are queued; a thread takes those that arrived while it was busy, and retrieves passages for all of them at
once. Questions and searches have a queue each, so that searches do not wait for reading. No request waits for a batch
to fill, and requests start in the order of their arrival.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from realmops.answering.answer import InvalidRequest, RetrievedPassages
from realmops.answering.opened_model import OpenedModel, Query
from realmops.answering.passage_search import PassageQuery
from realmops.answering.record import Record
from realmops.serve import WAITING

_LOG = logging.getLogger(__name__)
_SEARCHES = 32  # per batch


class Busy(Exception):
    """Error: too many requests are pending."""


class Closed(Exception):
    """Error: the server is shutting down."""


Q = TypeVar("Q", PassageQuery, Query)


@dataclass(eq=False)
class Pending(Generic[Q]):
    """An accepted request with a future of its record and, of a question, of its retrieved passages."""

    served: OpenedModel
    query: Q
    record: Future[Record] = field(default_factory=Future)
    retrieved: Future[RetrievedPassages] = field(default_factory=Future)

    def start(self) -> bool:
        """Return whether a batch takes the request: not if its record was cancelled; afterwards it cannot be."""
        self.retrieved.set_running_or_notify_cancel()
        return self.record.set_running_or_notify_cancel()

    async def sources(self) -> Record:
        return self.served.sources(await asyncio.wrap_future(self.retrieved))

    def fail(self, error: BaseException) -> None:
        for future in (self.record, self.retrieved):
            if not future.done():
                future.set_exception(error)


class BatchQueue(Generic[Q]):
    """Bounded queue of requests (``waiting``: accepted and unanswered) with a thread that processes them in batches.

    A request that is cancelled leaves the queue.
    """

    def __init__(
        self,
        name: str,
        process: Callable[[list[Pending[Q]]], None],
        batch_size: Callable[[OpenedModel], int],
        waiting: int,
    ) -> None:
        self._process: Callable[[list[Pending[Q]]], None] = process
        self._name, self._batch_size, self._waiting = name, batch_size, waiting
        self._queue: deque[Pending[Q]] = deque()
        self._processing = 0  # requests of the current batch
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Number of accepted and unanswered requests."""
        with self._changed:
            self._queue = deque(pending for pending in self._queue if not pending.record.cancelled())
            return len(self._queue) + self._processing

    def put(self, pending: Sequence[Pending[Q]]) -> None:
        """Accept requests, all or none; raise Busy or Closed."""
        with self._changed:
            if self._closed:
                raise Closed("the server is shutting down; retry on another replica")
            if self.depth + len(pending) > self._waiting:
                raise Busy(
                    f"too many pending {self._name}: {self.depth}; at most {self._waiting} are allowed; retry later"
                )
            self._queue.extend(pending)
            self._changed.notify()

    def close(self) -> None:
        """Accept no more requests, and block until the accepted ones are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while self._queue or not self._closed:
            self._process_batch()

    def _process_batch(self) -> None:
        """Process the next batch; afterwards the thread refers to no request, and so to no replaced model."""
        batch = self._next_batch()
        try:
            if batch:
                self._process(batch)
        except Exception as error:
            self._process_singly(batch, error)
        finally:
            self._processing = 0

    def _process_singly(self, batch: list[Pending[Q]], error: Exception) -> None:
        """Retry a failed batch one request at a time, so that one request's error does not fail the others."""
        for pending in (pending for pending in batch if not pending.record.done()):
            try:
                if len(batch) == 1:
                    raise error
                self._process([pending])
            except Exception as own_error:
                _LOG.error("serve: no answer to %r", pending.query, exc_info=own_error)
                pending.fail(own_error)

    def _next_batch(self) -> list[Pending[Q]]:
        """Wait for requests, and take those of one model; none if they were cancelled or the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return []
            served = self._queue[0].served
            size = self._batch_size(served)
            batch: list[Pending[Q]] = []
            while self._queue and len(batch) < size and self._queue[0].served is served:
                pending = self._queue.popleft()
                if pending.start():
                    batch.append(pending)
            self._processing = len(batch)
            return batch


class RequestBatcher:
    """Answers questions and searches in batches by the served model, which can be replaced at any time.

    A request is answered by the model that was served when it was accepted. ``on_batch`` is called with the number of
    questions of a batch and its seconds.
    """

    def __init__(
        self, served: OpenedModel, *, waiting: int = WAITING, on_batch: Callable[[int, float], None] | None = None
    ) -> None:
        self.served = served  # the model of new requests
        self._on_batch = on_batch
        self._answers = BatchQueue[Query]("questions", self._answer, lambda served: served.batch_size, waiting)
        self._searches = BatchQueue[PassageQuery]("searches", self._search, lambda served: _SEARCHES, waiting)

    @property
    def depth(self) -> int:
        return self._answers.depth

    def submit(self, queries: Sequence[Query], served: OpenedModel | None = None) -> list[Pending[Query]]:
        """Accept questions, all or none, for one model; raise InvalidRequest, Busy or Closed."""
        served = served or self.served
        for query in queries:
            served.check(query)
        pending = [Pending(served, query) for query in queries]
        self._answers.put(pending)
        return pending

    def search(self, query: PassageQuery) -> Pending[PassageQuery]:
        pending = Pending(self.served, query)
        self._searches.put([pending])
        return pending

    def close(self) -> None:
        self._answers.close()
        self._searches.close()

    def _search(self, batch: list[Pending[PassageQuery]]) -> None:
        valid = []
        for pending in batch:
            try:
                pending.served.passage_search.check(pending.query)
                valid.append(pending)
            except InvalidRequest as error:
                pending.fail(error)
        if valid:
            records = valid[0].served.passage_search.search_batch([pending.query for pending in valid])
            for pending, record in zip(valid, records, strict=True):
                pending.record.set_result(record)

    def _answer(self, batch: list[Pending[Query]]) -> None:
        started = time.perf_counter()
        served = batch[0].served
        retrieved = served.find([pending.query for pending in batch])
        for pending, passages in zip(batch, retrieved, strict=True):
            if not pending.retrieved.done():
                pending.retrieved.set_result(passages)
        for pending, record in zip(batch, served.read(retrieved), strict=True):
            pending.record.set_result(record)
        if self._on_batch is not None:
            self._on_batch(len(batch), time.perf_counter() - started)
