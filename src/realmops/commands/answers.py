"""The model of a run over a corpus with its index, opened to be asked."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from realmops.answering.answer import Found, InvalidRequest
from realmops.answering.record import Record, record_of, sources_of
from realmops.answering.retrieval import RetrieveAndRead
from realmops.answering.search import Search
from realmops.artifacts import MANIFEST, digest_of, read_json, read_manifest
from realmops.commands.trained import options_of, tuned_steps
from realmops.commands.update import FOLDER as UPDATES
from realmops.commands.update import CorpusState, newest_state, of_pipeline
from realmops.config import Finetune, RunOptions
from realmops.corpus.questions import Question
from realmops.corpus.snapshot import Snapshot
from realmops.encoders.devices import device_and_dtype, pack_products, tune_process
from realmops.evaluate.confidence import Confidence
from realmops.evaluate.tuned import open_tuned
from realmops.index.embeddings import INDEX
from realmops.index.lexical import Bm25
from realmops.index.mips import searched_often
from realmops.stages import JOURNAL, METRICS, STAGES

SPANS_TOGETHER = 64 << 20  # bytes of the spans of a batch in the reader's last layer; more are slower
TRIES = 3  # to open a generation whose folders change meanwhile
PROBE = "Where?"  # asked of a generation before it serves


class ClosedBookModel(ValueError):
    """The model of a run answers without reading passages, so it can be neither queried nor explained."""


@dataclass(frozen=True)
class Asked:
    """A question, the ids of passages that must not be read for it, and the answer that is asked about, if any."""

    question: str
    without: Collection[str] = field(default=())
    y: str | None = None


@dataclass(frozen=True, eq=False)
class Generation:
    """A model over a corpus with its index: what one answer comes from, whole.

    ``number`` counts the updates of the corpus, 0 is what the stages made.
    """

    model: RetrieveAndRead
    version: str
    weights_step: int | None
    number: int
    confidence: Confidence | None  # None of a model that was imported: nothing is calibrated
    content: str = ""  # digest of every file that is read, for what has no version of a registry
    folder: Path = Path()  # of the model's files
    held: Any = None  # what must live as long, as a folder of downloaded files
    _lock: Any = field(default_factory=Lock, init=False, repr=False)
    _made: list[Search] = field(default_factory=list, init=False, repr=False)

    @property
    def about(self) -> Record:
        """Which model, corpus and index these are."""
        return {
            "version": self.version,
            "snapshot": self.model.snapshot.corpus_hash,
            "weights_step": self.weights_step,
            "index_generation": self.number,
        }

    @property
    def together(self) -> int:
        """How many questions are best answered in one batch."""
        options = self.model.options
        spans = options.reader_candidates * options.reader_wordpieces * options.answer_wordpieces
        return max(1, SPANS_TOGETHER // (4 * spans * options.span_width))

    def check(self, asked: Asked) -> None:
        """InvalidRequest when a question is empty, too long or no text, or the answer that is asked about no answer."""
        for name, text in (("question", asked.question), ("answer", asked.y or "")):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidRequest(f"the {name} holds half a surrogate pair; write it whole") from None
        if asked.y is not None and not asked.y.strip():
            raise InvalidRequest(f"the answer {asked.y!r} is blank: give the one to ask about, or none")
        self.model.check(asked.question)

    def quicken(self) -> None:
        """For who asks again and again: with copies of embeddings and weights a question takes a quarter less time.

        In place, before anybody asks; answers stay what they are.
        """
        if self.model.passages is not None:
            self.model.passages = searched_often(self.model.passages)
            pack_products(self.model.retriever.query)
        pack_products(self.model.reader)

    @property
    def searching(self) -> Search:
        """What searches its corpus; made when it is first asked for. Several threads may ask."""
        with self._lock:
            if not self._made:
                self._made.append(search_of(self))
            return self._made[0]

    def find(self, asked: Sequence[Asked]) -> list[Found]:
        """Return what is read for each question."""
        return self.model.find([Question("", one.question, (), not_in=tuple(one.without)) for one in asked])

    def sources(self, found: Found) -> Record:
        """What is known of an answer before anything was read."""
        return sources_of(self.model.snapshot, found, self.about)

    def read(self, found: Sequence[Found], asked_about: Sequence[str | None] = ()) -> list[Record]:
        """The records of answers; all are read in one packed batch. ``asked_about`` has y of each, where one is."""
        ys = asked_about or [None] * len(found)
        answers = zip(self.model.read(found, ys), ys, strict=True)
        return [record_of(self.model.snapshot, one, self.about, self.confidence, y) for one, y in answers]

    def answer(self, asked: Sequence[Asked]) -> list[Record]:
        """``find`` and ``read``, one question after another; InvalidRequest for one that cannot be asked."""
        for one in asked:
            self.check(one)
        pairs = zip(self.find(asked), asked, strict=True)
        return [self.read([found], [one.y])[0] for found, one in pairs]

    def probe(self) -> None:
        """Answer one question; ValueError when the generation cannot serve."""
        snapshot = self.model.snapshot
        _ = snapshot.places, snapshot.continues_word  # read now what is read but once
        [record] = self.answer([Asked(PROBE)])
        if not 0 <= record["p_y"] <= 1 + 1e-6:  # NaN is no number between, and calibrated it counts as 0
            raise ValueError(f"p(y|x) of a first answer is {record['p_y']}: the weights are damaged")


def search_of(generation: Generation) -> Search:
    """What searches the corpus of a model that answers."""
    model = generation.model
    words = model.words if isinstance(model.words, Bm25) else Bm25.of(model.snapshot)
    retriever = model.retriever if model.passages is not None else None
    limit, about, held = model.options.query_wordpieces, generation.about, generation.held
    return Search(model.snapshot, words, retriever, model.passages, limit, model.dtype, about, held)


def generation_of_run(root: Path, where: CorpusState | None = None) -> Generation:
    """The newest generation under a run's folder: what the stages made, or the newest update of it.

    Args:
        where: another one of them.

    Raises ValueError when a stage has not run, for files that were changed, and when
    folders are replaced again and again while they are read.
    """
    for _ in range(TRIES):
        before = manifests_of(root)
        try:
            found = _generation_of_run(root, where)
        except (OSError, ValueError, KeyError):
            if manifests_of(root) == before:  # else a part of it was read of another one
                raise
            continue
        if manifests_of(root) == before:
            return found
    raise ValueError(f"{root}: its folders were replaced {TRIES} times while they were read; wait until nothing runs")


def manifests_of(root: Path) -> tuple[tuple[str | int, ...], ...]:
    """The manifests of all that a generation may be read from, as the disk knows them: a new folder has a new one."""
    stages = [root / STAGES[stage].folder / MANIFEST for stage in ("snapshot", "finetune", "evaluate")]
    updates = sorted((root / UPDATES).glob(f"[!.]*/{MANIFEST}"))
    found: list[tuple[str | int, ...]] = []
    for path in (*stages, *updates):
        with suppress(OSError):
            disk = path.stat()
            found.append((str(path), disk.st_ino, disk.st_mtime_ns, disk.st_size))
    return tuple(found)


def _generation_of_run(root: Path, where: CorpusState | None) -> Generation:
    tuned = of_pipeline(root).finetune
    files = read_manifest(tuned, "finetune")["files"]
    where = where or newest_state(root)
    model = open_run(root, where)
    read = {name: entry["sha256"] for name, entry in files.items() if name not in (INDEX, JOURNAL, METRICS)}
    version = digest_of([read, model.options.model_dump(), str(model.dtype)])[:12]
    indexed = read_json(where.snapshot.parent / MANIFEST)["files"] if where.number else files
    index = [entry["sha256"] for name, entry in sorted(indexed.items()) if Path(name).name == INDEX]
    content = digest_of([version, model.snapshot.manifest["files"], index])
    return Generation(model, version, tuned_steps(root), where.number, Confidence.load(tuned), content, tuned)


def open_run(root: Path, where: CorpusState | None = None) -> RetrieveAndRead:
    """The model that ``finetune`` left under ``root``, in evaluation mode.

    Args:
        where: the corpus that is searched, with its index: that of an update, or without one the pipeline's own.

    Raises ValueError when fine-tuning has not run, and ClosedBookModel for one that answers without reading.
    """
    where = where or of_pipeline(root)
    options, run = options_of(root, ("finetune", "evaluate"), ("finetune", "run"))
    # an update has a copy of the model: what was calibrated again since stands beside the stage's own
    return open_reading(
        of_pipeline(root).finetune, options, run, Snapshot.open(where.snapshot / "corpus"), where.finetune
    )


def open_reading(
    folder: Path, options: Finetune, run: RunOptions, snapshot: Snapshot, index: Path | None = None
) -> RetrieveAndRead:
    """Open a fine-tuned model as ``open_tuned`` does, on the device of its run.

    Raises ClosedBookModel for one that reads nothing.
    """
    tune_process(run.threads)
    model = open_tuned(folder, options, snapshot, *device_and_dtype(run), index=index)
    if not isinstance(model, RetrieveAndRead):
        raise ClosedBookModel(
            f"{folder} answers without reading (finetune.reader is {options.reader}), so its answers cite no passage: "
            "search the run ('realmops search'), see its test answers ('realmops explain'), or fine-tune with "
            "finetune.reader=pretrain or ict"
        )
    return model
