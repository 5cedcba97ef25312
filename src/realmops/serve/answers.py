"""One generation, and the record of an answer: every word of it with its source."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realmops.artifacts import digest_of, read_manifest, sha256_file
from realmops.commands.explain.question import open_run
from realmops.commands.explain.trained import tuned_steps
from realmops.commands.promote import cited
from realmops.commands.update import CorpusState, newest_state
from realmops.evaluate.confidence import Confidence
from realmops.evaluate.posterior import Found, Posterior, check_question, find, read
from realmops.model.files import READER, RETRIEVER
from realmops.stages import STAGES
from realmops.train.finetune import OpenQa

Record = dict[str, Any]
SPANS_TOGETHER = 64 << 20  # bytes of the spans of a batch in the reader's last layer; more are slower
PROBE = "Where?"  # asked of a generation before it serves


@dataclass(frozen=True)
class Asked:
    """A question, and the ids of passages that must not be read for it."""

    question: str
    without: Collection[str] = field(default=())


@dataclass(frozen=True, eq=False)
class Generation:
    """A model over a corpus with its index: what one answer comes from, whole.

    ``number`` counts the updates of the corpus, 0 is what the stages made.
    """

    model: OpenQa
    version: str
    weights_step: int | None
    number: int
    confidence: Confidence | None  # None of a model that was imported: nothing is calibrated
    held: Any = None  # what must live as long, as a folder of downloaded files

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
        """ValueError when a question is empty, too long or no text."""
        try:
            asked.question.encode()
        except UnicodeEncodeError:
            raise ValueError("the question holds half a surrogate pair; write it whole") from None
        check_question(self.model, asked.question)

    def find(self, asked: Sequence[Asked]) -> list[Found]:
        """What is read for each question."""
        return find(self.model, [one.question for one in asked], [one.without for one in asked])

    def sources(self, found: Found) -> Record:
        """What is known of an answer before anything was read: its passages, and what they come from."""
        return {
            "question": found.question,
            "passages": [self._passage(p, p_z) for p, p_z in zip(found.passages, found.p_z, strict=True)],
            "model": self.about,
        }

    def read(self, found: Sequence[Found]) -> list[Record]:
        """The records of answers; all are read in one packed batch."""
        return [self._record(one) for one in read(self.model, found)]

    def answer(self, asked: Sequence[Asked]) -> list[Record]:
        """``find`` and ``read``, one question after another."""
        return [self.read([one])[0] for one in self.find(asked)]

    def probe(self) -> None:
        """Answer one question; ValueError when the generation cannot serve."""
        self.model.retriever.eval()
        self.model.reader.eval()
        snapshot = self.model.snapshot
        _ = snapshot.places, snapshot.continues_word  # read now what is read but once
        [record] = self.answer([Asked(PROBE)])
        if not 0 <= record["probability"] <= 1 + 1e-6:  # NaN is no number between
            raise ValueError(f"p(y|x) of a first answer is {record['probability']}: the weights are damaged")

    def _sure(self, found: Posterior) -> Record:
        """How probable it is that the answer is right, without a calibration p(y|x), and whether it is held back."""
        p_y, calibrated = min(found.probability, 1.0), self.confidence
        if calibrated is None:
            return {"probability": p_y, "p_y": p_y, "threshold": None, "abstained": not found.text}
        sure = {"probability": calibrated.probability(found), "p_y": p_y, "threshold": calibrated.threshold}
        return sure | {"abstained": calibrated.abstains(found)}

    def _record(self, found: Posterior) -> Record:
        """The answer, and of each passage that has it the best span that is it: the one that was chosen first."""
        best = found.prediction
        citing = [one for one in found.read if one.best_of_y is not None] if best else []
        citing.sort(key=lambda one: (one.best_of_y != best, -one.p_y_z))
        spans = [one.best_of_y.characters for one in citing if one.best_of_y]
        return {
            "question": found.question,
            "answer": found.text,
            **self._sure(found),
            "citations": [
                {**cited(self.model.snapshot, one.passage, span), "p_z": one.p_z, "p_z_given_y": one.p_z_given_y}
                for one, span in zip(citing, spans, strict=True)
            ],
            "passages": [
                self._passage(one.passage, one.p_z)
                | {"p_z_given_y": one.p_z_given_y, "span": one.best.text if one.best else None}
                for one in found.read
            ],
            "model": self.about,
        }

    def _passage(self, passage: int, p_z: float) -> Record:
        snapshot = self.model.snapshot
        text = snapshot.text(passage)
        place = cited(snapshot, passage, (0, len(text)))
        return {**{name: value for name, value in place.items() if name != "quote"}, "text": text, "p_z": p_z}


def generation_of_run(root: Path, where: CorpusState | None = None) -> Generation:
    """The newest generation under a run's folder: what the stages made, or the newest update of it.

    Args:
        where: another one of them.

    Raises ValueError when a stage has not run, for files that were changed, and for a corpus of a version before.
    """
    read_manifest(root / STAGES["finetune"].folder, "finetune")
    where = where or newest_state(root)
    model = open_run(root, where).model
    weights = digest_of([sha256_file(where.finetune / name) for name in (RETRIEVER, READER)])
    return Generation(model, weights[:12], tuned_steps(root), where.number, Confidence.load(where.finetune))
