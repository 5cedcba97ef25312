"""Questions of many callers answered together, by one thread, each from one generation.

Callers put their questions into a queue; the thread takes what has gathered there while it was at work, finds the
passages of all of them at once and reads them packed. Nobody waits for a batch to fill.
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
from realmops.answering.record import Record
from realmops.commands.answers import Asked, Generation

_LOG = logging.getLogger(__name__)
WAITING = 256  # questions that wait or are being answered, of all callers


class Busy(Exception):
    """So many questions wait that no more are taken."""


class Closed(Exception):
    """No questions are taken any more: the process is about to end."""


@dataclass(eq=False)
class PendingAnswer:
    """One question on its way through: first what it is read from, then the record."""

    asked: Asked
    generation: Generation
    found: Future[Found] = field(default_factory=Future)
    record: Future[Record] = field(default_factory=Future)
    gone: bool = False  # the caller hung up

    def __post_init__(self) -> None:
        for future in (self.found, self.record):  # a caller who hangs up cannot cancel them
            future.set_running_or_notify_cancel()

    async def sources(self) -> Record:
        """What the question is read from, as soon as that is known."""
        return self.generation.sources(await asyncio.wrap_future(self.found))

    def fail(self, error: BaseException) -> None:
        for future in (self.found, self.record):
            if not future.done():
                future.set_exception(error)


class Answerer:
    """Answers questions from the generation that it holds; another one can take its place at any time.

    Questions that were accepted are answered from the generation that was there when they were accepted.

    Args:
        waiting: questions that are accepted at most and not yet answered.
        tell: is told how many questions were answered together, in how many seconds of the thread.
    """

    def __init__(
        self, generation: Generation, *, waiting: int = WAITING, tell: Callable[[int, float], None] | None = None
    ) -> None:
        self.generation = generation  # what new questions are answered from
        self._waiting, self._tell = waiting, tell
        self._queue: deque[PendingAnswer] = deque()
        self.depth = 0  # accepted and not yet answered
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def swap(self, generation: Generation) -> None:
        """From now on new questions are answered from this generation."""
        with self._changed:
            self.generation = generation

    def ask(self, asked: Sequence[Asked], generation: Generation | None = None) -> list[PendingAnswer]:
        """Accept questions, all or none, for one generation.

        Args:
            generation: another one than that which serves.

        Raises InvalidRequest for a question that cannot be asked, Busy when too many wait, Closed at the end.
        """
        generation = generation or self.generation
        for one in asked:
            generation.check(one)
        tickets = [PendingAnswer(one, generation) for one in asked]
        with self._changed:
            if self._closed:
                raise Closed("the server is about to end: ask another one")
            if self.depth + len(tickets) > self._waiting:
                raise Busy(f"{self.depth} questions wait, at most {self._waiting} may: ask again a little later")
            self.depth += len(tickets)
            self._queue.extend(tickets)
            self._changed.notify()
        return tickets

    def close(self) -> None:
        """Take no more questions, and wait until those that were accepted are answered."""
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
                _LOG.error("no answer to %r", ticket.asked.question, exc_info=own)
                ticket.fail(own)

    def _next_batch(self) -> list[PendingAnswer]:
        """What has gathered, of one generation; empty at the end."""
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            batch: list[PendingAnswer] = []
            while self._queue and len(batch) < self._queue[0].generation.together:
                if batch and self._queue[0].generation is not batch[0].generation:
                    break
                batch.append(self._queue.popleft())
            return batch

    def _answer(self, batch: list[PendingAnswer]) -> None:
        batch = [ticket for ticket in batch if not ticket.gone]
        if not batch:
            return
        started = time.perf_counter()
        generation = batch[0].generation
        found = generation.find([ticket.asked for ticket in batch])
        for ticket, one in zip(batch, found, strict=True):
            if not ticket.found.done():
                ticket.found.set_result(one)
        for ticket, record in zip(batch, generation.read(found), strict=True):
            ticket.record.set_result(record)
        if self._tell is not None:
            self._tell(len(batch), time.perf_counter() - started)
