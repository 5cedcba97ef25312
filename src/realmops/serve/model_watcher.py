"""Exchange of the served model: a newer one is opened next to it and replaces it without a pause."""

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable

from realmops.answering.record import Record
from realmops.serve.batching import RequestBatcher
from realmops.serve.served_model import ModelSource, ServedModel

_LOG = logging.getLogger(__name__)
RETRY_SECONDS = 60.0  # until a model that was refused is opened again, unchanged


class ModelWatcher:
    """Polls a source for a newer model, opens it next to the served one, and lets it take over.

    A model that cannot be opened, or does not answer, is rejected, and the old one serves on.

    Args:
        on_change: called with each newer model that serves, and with None for one that was rejected.
    """

    def __init__(
        self,
        source: ModelSource,
        batcher: RequestBatcher,
        mark: Hashable,
        on_change: Callable[[ServedModel | None], None],
    ) -> None:
        self.source = source
        self.refused: Record | None = None  # why the newest model does not serve, since (in seconds since 1970)
        self.away: str = ""  # why the source could not be polled
        self.examples = source.examples()
        self._batcher, self._mark, self._on_change = batcher, mark, on_change
        self._tried = time.monotonic()
        self._stop = threading.Event()
        self._swapped = False
        self._opening = threading.Lock()
        self._before: tuple[weakref.ref[ServedModel], ServedModel | None] | None = None

    def before(self) -> ServedModel | None:
        """Return the served model over the corpus before all updates; None where there is none.

        It is opened at the first call, and held until another model serves. Raises ValueError when it cannot be opened.
        """
        now = self._batcher.served
        if now.number == 0:
            return None
        with self._opening:
            if self._before is None or self._before[0]() is not now:
                self._before = None  # never two of them in memory
                before = None
                if (opened := self.source.before(now)) is not None:
                    before = ServedModel.of(opened)
                    before.probe()
                self._before = weakref.ref(now), before
            return self._before[1]

    def start(self, every: float) -> None:
        """Poll in a thread, ``every`` so many seconds."""

        def run() -> None:
            while not self._stop.wait(every):
                self.poll()

        self._thread = threading.Thread(target=run, name="models", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; a model that is being opened is left."""
        self._stop.set()

    def poll(self) -> bool:
        """Poll once; returns whether another model serves now."""
        if self._swapped:  # what held the old one is gone by now
            gc.collect()
            self._swapped = False
        try:
            mark = self.source.mark()
        except Exception as error:
            if not self.away:
                _LOG.warning("%s cannot be looked up, and serves on as it is: %s", self.source.name, error)
            self.away = str(error)
            return False
        self.away = ""
        patient = self.refused is None or time.monotonic() - self._tried < RETRY_SECONDS
        if mark == self._mark and patient:
            return False
        self._tried = time.monotonic()
        self._mark = mark
        try:
            newer = ServedModel.of(self.source.open())
            newer.warm_up()
            newer.probe()
        except Exception as error:  # whatever is wrong with it, the old one serves on
            self.refused = {"reason": str(error) or type(error).__name__, "since": time.time()}
            _LOG.error("a new model of %s is refused, the old one serves on: %s", self.source.name, error)
            self._on_change(None)
            return False
        self.refused = None
        served = self._batcher.served
        if (newer.about, newer.content) == (served.about, served.content):
            return False
        self._batcher.swap(newer)
        with self._opening:
            self._before = None
        self.examples = self.source.examples()
        self._swapped = True
        _LOG.warning("%s: another model serves now: %s", self.source.name, newer.about)
        self._on_change(newer)
        return True
