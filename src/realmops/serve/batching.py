"""Questions of many callers answered in batches by one thread, each batch by one served model.

Callers put their questions into a queue; the thread takes those that arrived while it was busy, finds the passages of
all of them at once and reads them packed. No question waits for a batch to fill.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from realmops.answering.answer import Found
from realmops.answering.opened_model import Query
from realmops.answering.record import Record
from realmops.serve.served_model import ServedModel

_LOG = logging.getLogger(__name__)
WAITING = 256  # questions that wait or are being answered, of all callers


class Busy(Exception):
    """Too many questions are pending to accept more."""


class Closed(Exception):
    """The server is shutting down and accepts no more questions."""


@dataclass(eq=False)
class PendingAnswer:
    """One accepted question: first what is read for it, then its record."""

    query: Query
    served: ServedModel
    found: Future[Found] = field(default_factory=Future)
    record: Future[Record] = field(default_factory=Future)
    gone: bool = False  # the caller hung up

    def __post_init__(self) -> None:
        for future in (self.found, self.record):  # a caller who hangs up cannot cancel them
            future.set_running_or_notify_cancel()

    async def sources(self) -> Record:
        """Return the sources of the answer, as soon as they are known."""
        return self.served.sources(await asyncio.wrap_future(self.found))

    def fail(self, error: BaseException) -> None:
        for future in (self.found, self.record):
            if not future.done():
                future.set_exception(error)


class RequestBatcher:
    """Answers queued questions in batches by the served model, which can be replaced at any time.

    A question is answered by the model that served when it was accepted.

    Args:
        waiting: maximum of questions that are accepted and not yet answered.
        on_batch: called with the number of questions of a batch and the seconds that it took.
    """

    def __init__(
        self, served: ServedModel, *, waiting: int = WAITING, on_batch: Callable[[int, float], None] | None = None
    ) -> None:
        self.served = served  # the model of new questions
        self._waiting, self._on_batch = waiting, on_batch
        self._queue: deque[PendingAnswer] = deque()
        self.depth = 0  # accepted and not yet answered
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def swap(self, served: ServedModel) -> None:
        """Answer new questions by this model from now on."""
        with self._changed:
            self.served = served

    def submit(self, queries: Sequence[Query], served: ServedModel | None = None) -> list[PendingAnswer]:
        """Accept questions, all or none, for one model.

        Args:
            served: another model than the one that serves.

        Raises InvalidRequest for a question that cannot be asked, Busy when too many wait, Closed at the end.
        """
        served = served or self.served
        for query in queries:
            served.check(query)
        tickets = [PendingAnswer(query, served) for query in queries]
        with self._changed:
            if self._closed:
                raise Closed("the server is shutting down: retry on another replica")
            if self.depth + len(tickets) > self._waiting:
                raise Busy(f"{self.depth} questions wait, at most {self._waiting} may: ask again a little later")
            self.depth += len(tickets)
            self._queue.extend(tickets)
            self._changed.notify()
        return tickets

    def close(self) -> None:
        """Accept no more questions, and wait until those that were accepted are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next_batch():
            try:
                self._answer(batch)
            except Exception as error:
                self._answer_apart(batch, error)
            finally:
                with self._changed:
                    self.depth -= len(batch)

    def _answer_apart(self, batch: list[PendingAnswer], error: Exception) -> None:
        """After an error, so that one question never costs another its answer."""
        for ticket in (ticket for ticket in batch if not ticket.record.done()):
            try:
                if len(batch) == 1:
                    raise error
                self._answer([ticket])
            except Exception as own:
                _LOG.error("no answer to %r", ticket.query.question, exc_info=own)
                ticket.fail(own)

    def _next_batch(self) -> list[PendingAnswer]:
        """Collect pending requests into a batch for one served model; empty at the end."""
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
        batch = [ticket for ticket in batch if not ticket.gone]
        if not batch:
            return
        started = time.perf_counter()
        served = batch[0].served
        found = served.find([ticket.query for ticket in batch])
        for ticket, one in zip(batch, found, strict=True):
            if not ticket.found.done():
                ticket.found.set_result(one)
        for ticket, record in zip(batch, served.read(found), strict=True):
            ticket.record.set_result(record)
        if self._on_batch is not None:
            self._on_batch(len(batch), time.perf_counter() - started)
