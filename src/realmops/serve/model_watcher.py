"""Hot reload: a newer model is opened next to the served one and replaces it without downtime."""

import gc
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence

from realmops.answering.opened_model import OpenedModel
from realmops.answering.record import Record
from realmops.serve.batching import RequestBatcher
from realmops.serve.model_sources import ModelSource, RunFolder

_LOG = logging.getLogger(__name__)
RETRY_SECONDS = 60.0  # until a rejected model is opened again, unchanged


class ModelWatcher:
    """Polls a source for a newer model, and swaps it in; one that cannot be opened or does not answer is rejected.

    ``mark`` is the source's mark of the served model; ``on_change`` is called with each newer model that is served, and
    with None for a rejected one.
    """

    def __init__(
        self,
        source: ModelSource,
        batcher: RequestBatcher,
        mark: Hashable,
        on_change: Callable[[OpenedModel | None], None],
    ) -> None:
        self.source = source
        self.refused: Record | None = None  # reason and time (seconds since 1970) of the newest model's rejection
        self.poll_error = ""  # why the source could not be polled
        self.examples = _examples(source)
        self._batcher, self._mark, self._on_change = batcher, mark, on_change
        self._tried = time.monotonic()
        self._stop = threading.Event()
        self._swapped = False
        self._opening = threading.Lock()
        self._before: tuple[OpenedModel, OpenedModel | None] | None = None

    def before_updates(self) -> OpenedModel | None:
        """Return the served model over the corpus before all updates, cached until a swap; None without updates."""
        current = self._batcher.served
        if current.number == 0 or not isinstance(self.source, RunFolder):
            return None
        with self._opening:
            if self._before is None or self._before[0] is not current:
                self._before = None  # so that two of them are never in memory
                before = self.source.before_updates(current)
                if before is not None:
                    before.probe()
                self._before = current, before
            return self._before[1]

    def start(self, every: float) -> None:
        def run() -> None:
            while not self._stop.wait(every):
                self.poll()

        self._thread = threading.Thread(target=run, name="models", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop polling, without waiting for a model that is being opened."""
        self._stop.set()

    def poll(self) -> bool:
        """Poll once; return whether another model is served now."""
        if self._swapped:  # by now no request refers to the old model
            gc.collect()
            self._swapped = False
        try:
            mark = self.source.mark()
        except Exception as error:
            if not self.poll_error:
                _LOG.warning("serve: cannot poll %s; the current model stays: %s", self.source.name, error)
            self.poll_error = str(error)
            return False
        self.poll_error = ""
        is_too_early = self.refused is None or time.monotonic() - self._tried < RETRY_SECONDS
        if mark == self._mark and is_too_early:
            return False
        self._tried = time.monotonic()
        self._mark = mark
        try:
            newer = self.source.open()
            newer.warm_up()
            newer.probe()
        except Exception as error:  # any error keeps the old model
            self._on_change(None)  # counted before it is shown
            self.refused = {"reason": str(error) or type(error).__name__, "since": time.time()}
            _LOG.error("serve: a new model of %s is rejected; the old one stays: %s", self.source.name, error)
            return False
        self.refused = None
        served = self._batcher.served
        if (newer.about, newer.content) == (served.about, served.content):
            return False
        self._batcher.served = newer
        with self._opening:
            self._before = None
        self.examples = _examples(self.source)
        self._swapped = True
        _LOG.warning("serve: %s has a new model: %s", self.source.name, newer.about)
        self._on_change(newer)
        return True


def _examples(source: ModelSource) -> Sequence[str]:
    return source.examples() if isinstance(source, RunFolder) else ()
