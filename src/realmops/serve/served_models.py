"""Where generations come from, and how a new one takes the place of the old one while that serves on."""

import gc
import logging
import re
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from realmops import artifacts
from realmops.answering.record import Record
from realmops.commands.answers import Generation, generation_of_run, manifests_of
from realmops.commands.promote import COPIED_TAG, DIGEST_TAG, STEPS_TAG, open_promoted
from realmops.commands.trained import sections_of
from realmops.commands.update import of_pipeline
from realmops.corpus.cloze import CLOZE_ID
from realmops.evaluate.confidence import Confidence
from realmops.evaluate.predictions import read_results
from realmops.serve.batching import Answerer
from realmops.stages import CLOZE
from realmops.tracking.registry import CHAMPION, ModelVersion, Registry
from realmops.tracking.runs import tracking_folder

_LOG = logging.getLogger(__name__)
_ALIAS = re.compile(rf"models:/([\w-]+)@{CHAMPION}")
EXAMPLES = 6
AGAIN_AFTER = 60.0  # seconds until a generation that was refused is tried again, unchanged


class Origin(Protocol):
    """Where generations come from."""

    @property
    def name(self) -> str:
        """The model, as clients call it."""

    @property
    def root(self) -> Path:
        """The folder in whose work folder feedback is kept."""

    def mark(self) -> Hashable:
        """What changes when there is another generation; cheap. ConnectionError when it cannot be told now."""

    def open(self) -> Generation:
        """The newest generation. Any error means that it cannot serve."""

    def before(self, generation: Generation) -> Generation | None:
        """The same model over the corpus of before all updates; None where it was not updated."""

    def examples(self) -> Sequence[str]:
        """Questions to try; none where nobody knows any."""


@dataclass(frozen=True)
class RunFolder:
    """A run's folder: what its stages made, or the newest update of that."""

    root: Path
    name: str = "realmops"

    def mark(self) -> Hashable:
        """The manifests that are there, as the disk knows them."""
        return manifests_of(self.root)

    def open(self) -> Generation:
        """The newest generation, every file compared with its digest."""
        return generation_of_run(self.root)

    def before(self, generation: Generation) -> Generation | None:
        """What the stages made; None too where they made another model since."""
        if generation.number == 0:
            return None
        found = generation_of_run(self.root, of_pipeline(self.root))
        return found if found.version == generation.version else None

    def examples(self) -> Sequence[str]:
        """Some of the test questions that are answered and answered rightly, from all over their file.

        None that was made from the corpus: such questions are words in disorder.
        """
        try:
            asked = Path(sections_of(self.root, "evaluate").get("questions", {}).get("test", ""))
            rows = [] if Path(CLOZE) in asked.parents else read_results(self.root)
            confidence = Confidence.load(of_pipeline(self.root).finetune)
        except (OSError, ValueError):  # it was not tested
            return ()
        least = confidence.threshold if confidence else 0.0  # of now: results may be older
        right = [one for one in rows if one.em and not one.abstained and (one.confidence or 0.0) >= least]
        questions = list(dict.fromkeys(one.question for one in right if not one.question_id.startswith(CLOZE_ID)))
        return questions[:: max(1, len(questions) // EXAMPLES)][:EXAMPLES]


class Champion:
    """The version of a registered model that has the alias ``champion``.

    Args:
        uri: models:/NAME@champion.
        root: the folder of the run whose local registry is asked, where MLFLOW_TRACKING_URI names no server.
    """

    def __init__(self, uri: str, root: Path) -> None:
        found = _ALIAS.fullmatch(uri)
        if not found:
            raise ValueError(f"--model is {uri!r}, wanted models:/NAME@{CHAMPION}, as 'realmops promote' registers it")
        self.name, self.root = found[1], root
        self._registry = Registry(self.name, tracking_folder(root), "realmops")

    def mark(self) -> Hashable:
        """The version, and what it is made of."""
        version = self._version()
        return version.number, version.tags.get(DIGEST_TAG)

    def open(self) -> Generation:
        """The champion, every file compared with what was registered."""
        version = self._version()
        held = tempfile.TemporaryDirectory(prefix="realmops-champion-")
        if version.tags.get(COPIED_TAG):
            folder = self._registry.fetch(version, "", Path(held.name))
            registered = folder / artifacts.MANIFEST
        else:
            registered = self._registry.fetch(version, artifacts.MANIFEST, Path(held.name))
            folder = Path(self._registry.settings(version)["folder"])
        found = open_promoted(folder, registered)
        step = version.tags.get(STEPS_TAG)
        return replace(found, version=version.uri, weights_step=None if step is None else int(step), held=held)

    def before(self, generation: Generation) -> None:
        """A registered model is not updated."""

    def examples(self) -> Sequence[str]:
        """None are registered."""
        return ()

    def _version(self) -> ModelVersion:
        version = self._registry.champion()
        if version is None:
            raise ValueError(f"no version of {self.name} is its {CHAMPION}: run 'realmops promote --name {self.name}'")
        return version


class GenerationWatcher:
    """Looks whether there is another generation, loads it beside the one that serves, and lets it take over.

    A generation that cannot be opened, or does not answer, is refused, and the old one serves on.

    Args:
        tell: is told of each generation that was tried, whether it serves.
    """

    def __init__(
        self, origin: Origin, answerer: Answerer, mark: Hashable, tell: Callable[[Generation | None], None]
    ) -> None:
        self.origin = origin
        self.refused: Record | None = None  # why the newest generation does not serve, since (in seconds since 1970)
        self.away: str = ""  # why the origin could not be asked
        self.examples = origin.examples()
        self._answerer, self._mark, self._tell = answerer, mark, tell
        self._tried = time.monotonic()
        self._stop = threading.Event()
        self._swapped = False
        self._opening = threading.Lock()
        self._before: tuple[weakref.ref[Generation], Generation | None] | None = None

    def before(self) -> Generation | None:
        """The corpus of before all updates, with the model that serves; None where there is none.

        It is opened when it is asked for first, and held until another generation serves. Raises ValueError when it
        cannot be opened.
        """
        now = self._answerer.generation
        if now.number == 0:
            return None
        with self._opening:
            if self._before is None or self._before[0]() is not now:
                self._before = None  # never two of them in memory
                found = self.origin.before(now)
                if found is not None:
                    found.probe()
                self._before = weakref.ref(now), found
            return self._before[1]

    def start(self, every: float) -> None:
        """Look so often (seconds), in a thread of its own."""

        def look() -> None:
            while not self._stop.wait(every):
                self.look()

        self._thread = threading.Thread(target=look, name="generations", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; one that is being loaded is left."""
        self._stop.set()

    def look(self) -> bool:
        """Look once; whether another generation serves now."""
        if self._swapped:  # what held the old one is gone by now
            gc.collect()
            self._swapped = False
        try:
            mark = self.origin.mark()
        except Exception as error:
            if not self.away:
                _LOG.warning("%s cannot be looked up, and serves on as it is: %s", self.origin.name, error)
            self.away = str(error)
            return False
        self.away = ""
        patient = self.refused is None or time.monotonic() - self._tried < AGAIN_AFTER
        if mark == self._mark and patient:
            return False
        self._tried = time.monotonic()
        self._mark = mark
        try:
            generation = self.origin.open()
            generation.quicken()
            generation.probe()
        except Exception as error:  # whatever is wrong with it, the old one serves on
            self.refused = {"reason": str(error) or type(error).__name__, "since": time.time()}
            _LOG.error("a new generation of %s is refused, the old one serves on: %s", self.origin.name, error)
            self._tell(None)
            return False
        self.refused = None
        serves = self._answerer.generation
        if (generation.about, generation.content) == (serves.about, serves.content):
            return False
        self._answerer.swap(generation)
        with self._opening:
            self._before = None
        self.examples = self.origin.examples()
        self._swapped = True
        _LOG.warning("%s: another generation serves now: %s", self.origin.name, generation.about)
        self._tell(generation)
        return True
