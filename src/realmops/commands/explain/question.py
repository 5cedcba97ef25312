"""What the fine-tuned model makes of a question of one's own: its answer, and what each passage that it read is worth.

Where the probabilities come from is in ``evaluate/posterior.py``. Fine-tuning has no null document, and its reader
answers from passages only: there is no answer without retrieval to compare with.

    run = open_run(Path("."))
    found = run.explain("Where was Ada Lovelace born?")
    print(found.prediction, found.probability)
    for candidate in found.candidates:
        print(candidate.title, candidate.span, candidate.p_z, candidate.p_z_given_y)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from realmops import artifacts
from realmops.bert import device_and_dtype, tune_process
from realmops.commands.explain.render import Sheet, passage_name
from realmops.commands.explain.trained import Generation, options_of, sections_of, trained_steps
from realmops.commands.update import CorpusState, of_pipeline
from realmops.corpus.snapshot import Snapshot
from realmops.evaluate.posterior import check_question, find, read
from realmops.evaluate.tuned import open_tuned
from realmops.index.embeddings import INDEX
from realmops.stages import METRICS, STAGES
from realmops.train.finetune import OpenQa
from realmops.train.passages import passage_steps


@dataclass(frozen=True)
class QuestionCandidate:
    """One passage z that was read."""

    title: str
    passage_id: str
    p_z: float  # p(z|x), over the passages that were read
    p_z_given_y: float | None  # p(z|x, y); None where no span that was read is y
    p_y_z: float  # p(y, z|x)
    span: str | None  # the best one in this passage; None where it has none
    score: float | None  # its score


@dataclass(frozen=True)
class QuestionExplanation:
    """A question answered. ``y`` is the answer that was given, or else the prediction."""

    question: str
    y: str
    index: Generation
    prediction: str  # the span with the best score, empty where there is none
    probability: float  # p(y|x) of the prediction
    p_y: float  # p(y|x) of y
    candidates: tuple[QuestionCandidate, ...]  # by p(z|x)

    def sheet(self) -> Sheet:
        """It as text."""
        rows = tuple(
            (
                f"{c.p_z:.3f}",
                "-" if c.p_z_given_y is None else f"{c.p_z_given_y:.3f}",
                f"{c.p_y_z:.3g}",
                "-" if c.score is None else f"{c.score:.2f}",
                f"{passage_name(c.title, c.passage_id)}: {c.span or '(none)'}",
            )
            for c in self.candidates
        )
        said = (
            f"answer: {self.prediction or '(none)'}  (p = {self.probability:.3g})",
            f"y = {self.y}: p(y|x) = {self.p_y:.3g}",
            f"index: {self.index}",
        )
        return Sheet(self.question, said, ("p(z|x)", "p(z|x,y)", "p(y,z|x)", "score", "passage: its best span"), rows)


@dataclass(frozen=True)
class OpenedRun:
    """The model of a finished run, in evaluation mode, over a corpus with its index."""

    model: OpenQa
    index: Generation

    def explain(self, question: str, answer: str | None = None) -> QuestionExplanation:
        """Answer a question and say what the answer rests on; ``answer`` is y, if not the prediction.

        Raises ValueError when the question is empty or too long.
        """
        model, snapshot = self.model, self.model.snapshot
        check_question(model, question)
        [found] = read(model, find(model, [question]), [answer])
        candidates = tuple(
            QuestionCandidate(
                snapshot.title(one.passage),
                snapshot.passage_id(one.passage),
                one.p_z,
                one.p_z_given_y,
                one.p_y_z,
                one.best.text if one.best else None,
                one.best.score if one.best else None,
            )
            for one in found.read
        )
        return QuestionExplanation(question, found.y, self.index, found.text, found.probability, found.p_y, candidates)


def open_run(root: Path, where: CorpusState | None = None) -> OpenedRun:
    """Open the model that ``finetune`` left under ``root``, ready to be asked.

    Args:
        where: the corpus that is searched, with its index: that of an update, or without one the pipeline's own.

    Raises ValueError when fine-tuning has not run, and for a model that answers without reading.
    """
    where = where or of_pipeline(root)
    options, run = options_of(root, ("finetune", "evaluate"), ("finetune", "run"))
    tune_process(run.threads)
    device, dtype = device_and_dtype(run)
    snapshot = Snapshot.open(where.snapshot / "corpus")
    if not options.reads_passages:
        raise ValueError(
            f"{where.finetune} answers without reading (finetune.reader is {options.reader}): no passage explains it"
        )
    model = open_tuned(where.finetune, options, snapshot, device, dtype)
    model.retriever.eval()
    model.reader.eval()
    return OpenedRun(model, _generation(root, where, model))


def _generation(root: Path, where: CorpusState, model: OpenQa) -> Generation:
    """The index that the model searches."""
    options, passages = model.options, len(model.snapshot)
    if model.ranker is not None:
        return Generation(None, passages, options.retriever, None)
    stage: str = options.retriever
    trained_here = bool(sections_of(root, "finetune"))
    step = trained_steps(root, stage) if trained_here else None
    if options.retriever_training == "passages" and options.retriever_epochs and trained_here:
        metrics = artifacts.read_json(root / STAGES["finetune"].folder / METRICS)
        stage, step = "finetune", passage_steps(metrics["passages_with_questions"], options)
    return Generation(str(where.finetune / INDEX), passages, stage, step)
