"""Dynamic batching: one thread answers the questions of concurrent requests in batches, each by one served model.

Requests are queued; the thread takes those that arrived while it was busy, retrieves passages for all of them at once
and reads them as packed sequences. No question waits for a batch to fill.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from realmops.answering.answer import RetrievedPassages
from realmops.answering.opened_model import Query
from realmops.answering.record import Record
from realmops.serve.served_model import ServedModel

_LOG = logging.getLogger(__name__)
WAITING = 256  # accepted and unanswered questions of all requests


class Busy(Exception):
    """Error: too many questions are pending."""


class Closed(Exception):
    """Error: the server is shutting down."""


@dataclass(eq=False)
class PendingAnswer:
    """An accepted question with futures of its retrieved passages and its record."""

    query: Query
    served: ServedModel
    retrieved: Future[RetrievedPassages] = field(default_factory=Future)
    record: Future[Record] = field(default_factory=Future)
    is_cancelled: bool = False  # the client disconnected

    def __post_init__(self) -> None:
        for future in (self.retrieved, self.record):  # a disconnecting client cannot cancel running futures
            future.set_running_or_notify_cancel()

    async def sources(self) -> Record:
        """Return the sources of the answer once its passages are retrieved."""
        return self.served.sources(await asyncio.wrap_future(self.retrieved))

    def fail(self, error: BaseException) -> None:
        """Set an error on the unfinished futures."""
        for future in (self.retrieved, self.record):
            if not future.done():
                future.set_exception(error)


class RequestBatcher:
    """Queue that answers questions in batches by the served model, which can be replaced at any time.

    A question is answered by the model that was served when it was accepted.

    Args:
        served: the initial model.
        waiting: maximum number of accepted and unanswered questions.
        on_batch: called with the number of questions of a batch and its seconds.
    """

    def __init__(
        self, served: ServedModel, *, waiting: int = WAITING, on_batch: Callable[[int, float], None] | None = None
    ) -> None:
        self.served = served  # the model of new questions
        self._waiting, self._on_batch = waiting, on_batch
        self._queue: deque[PendingAnswer] = deque()
        self.depth = 0  # accepted and unanswered questions
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def swap(self, served: ServedModel) -> None:
        """Serve this model to new questions."""
        with self._changed:
            self.served = served

    def submit(self, queries: Sequence[Query], served: ServedModel | None = None) -> list[PendingAnswer]:
        """Accept questions, all or none, for one model.

        Args:
            queries: the questions of one request.
            served: the model to use instead of the current one.

        Raises:
            InvalidRequest: a question is empty or too long.
            Busy: too many questions are pending.
            Closed: the server is shutting down.
        """
        served = served or self.served
        for query in queries:
            served.check(query)
        pending = [PendingAnswer(query, served) for query in queries]
        with self._changed:
            if self._closed:
                raise Closed("the server is shutting down; retry on another replica")
            if self.depth + len(pending) > self._waiting:
                raise Busy(
                    f"too many pending questions: {self.depth}; at most {self._waiting} are allowed; retry later"
                )
            self.depth += len(pending)
            self._queue.extend(pending)
            self._changed.notify()
        return pending

    def close(self) -> None:
        """Accept no more questions, and block until the accepted ones are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next_batch():
            try:
                self._answer(batch)
            except Exception as error:
                self._answer_singly(batch, error)
            finally:
                with self._changed:
                    self.depth -= len(batch)

    def _answer_singly(self, batch: list[PendingAnswer], error: Exception) -> None:
        """Retry a failed batch one question at a time, so that one question's error does not fail the others."""
        for pending in (pending for pending in batch if not pending.record.done()):
            try:
                if len(batch) == 1:
                    raise error
                self._answer([pending])
            except Exception as own_error:
                _LOG.error("serve: no answer to %r", pending.query.question, exc_info=own_error)
                pending.fail(own_error)

    def _next_batch(self) -> list[PendingAnswer]:
        """Collect pending questions into a batch for one served model; return an empty batch after ``close``."""
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            batch: list[PendingAnswer] = []
            while self._queue and len(batch) < self._queue[0].served.batch_size:
                if batch and self._queue[0].served is not batch[0].served:
                    break
                batch.append(self._queue.popleft())
            return batch

    def _answer(self, batch: list[PendingAnswer]) -> None:
        batch = [pending for pending in batch if not pending.is_cancelled]
        if not batch:
            return
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
