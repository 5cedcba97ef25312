"""Stage ``finetune``: open-domain question answering over the frozen passages of the chosen retriever."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from realmops.answering.answer import Answer
from realmops.answering.confidence import Confidence
from realmops.answering.openqa import OpenQa
from realmops.answering.retrieval import Answering, RetrieveAndRead
from realmops.baselines import t5
from realmops.config import ClosedBookOptions, Finetune, Optimiser, ReaderOptions, RunOptions
from realmops.corpus.question_sets import Question
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype, keep_freed_memory
from realmops.evaluate.calibration import confidence_figures, fit_confidence
from realmops.evaluate.exact_match import is_right, score_predictions
from realmops.evaluate.recall import RECALL_AT
from realmops.journal import JournalValues
from realmops.model.checkpoint_files import add_spans, load_models
from realmops.search.approximate import Approximate, approximate
from realmops.search.embed import embed, query_sequences
from realmops.stages import ENCODER, Job
from realmops.stages.common import (
    StageTrainings,
    open_snapshot,
    question_queries,
    questions_of,
    sampled,
    warn_of_timeouts,
)
from realmops.stages.finetune_retriever import EVIDENCE, ready_to_find, start_models
from realmops.stages.tuned_model import save_tuned
from realmops.train.fine_tuning import finetune, finetune_steps
from realmops.train.fusion_weights import READING_OF_MADE, fit_reading, fit_to_questions
from realmops.train.parallel import team
from realmops.train.windows import lessons_of, train_in_windows


@dataclass(frozen=True)
class Tuned:
    """A model that was fine-tuned, its answers to the dev questions, and what there is to say about its training."""

    model: Answering
    answers: list[Answer]
    metrics: Mapping[str, Any]


def run(job: Job) -> dict[str, Any]:
    """Fine-tune, write the model; returns losses and exact match on the dev questions."""
    snapshot = open_snapshot(job)
    questions, held_out = (questions_of(job, snapshot, split) for split in ("train", "dev"))
    tuned = TRAINERS[job.section(Finetune).reader](StageTrainings(job), snapshot, questions, held_out)
    if not team().leads:
        return {}
    save_tuned(job.out, tuned.model)
    return {**_dev_figures(job, held_out, tuned.answers), **tuned.metrics}


def _open_qa(
    trainings: StageTrainings, snapshot: Snapshot, questions: list[Question], held_out: list[Question]
) -> Tuned:
    """Retriever and reader that answer by a span."""
    job = trainings.job
    options, seed = job.section(Finetune), job.section(RunOptions).seed
    device, dtype = device_and_dtype(job.section(RunOptions))
    retriever, reader = start_models(job, snapshot, options.reader)
    reader.to(device)
    finder = ready_to_find(trainings, retriever, reader, snapshot, questions)
    if reader.spans is None:  # reader.init brings one
        add_spans(reader, options.span_width, seed)
    retriever, metrics = finder.retriever, dict[str, Any](finder.metrics)
    model = OpenQa(retriever, reader, snapshot, finder.passages, options, dtype, finder.ranker, finder.words)
    if model.hybrid:
        retriever.mixture = fit_to_questions(model, held_out)
        keep_freed_memory()
    reader.encoder.word_vectors.requires_grad_(not options.freeze_words)
    if options.epochs:
        metrics |= _learn_to_read(trainings, model, questions)
    if not team().leads:
        return Tuned(model, [], {})
    if (structure := approximate(model.passages)) is not None:
        metrics["index_recall"] = _fit_to_tuned(job, model, structure, sampled(held_out, seed))
    if model.hybrid and options.reader_training == "passages":  # the query tower learned beside the reader
        retriever.mixture = fit_to_questions(model, held_out)
    if model.hybrid and all(question.not_in for question in held_out):  # what fit_reading says of them, once read
        retriever.mixture = replace(retriever.mixture, reading=READING_OF_MADE)
    answers = model.answer(held_out, ranked=5, progress=job.report.progress("dev questions", len(held_out)))
    if model.hybrid:
        before = retriever.mixture.reading
        weight = fit_reading(model, held_out, answers, is_right)
        retriever.mixture = replace(retriever.mixture, reading=weight)
        if weight != before:  # p(y|x) is over all spans, which nothing kept
            answers = model.answer(held_out, ranked=5, progress=job.report.progress("the same again", len(held_out)))
        metrics |= {f"weight_{name}": value for name, value in asdict(retriever.mixture).items()}
        job.report.say(
            f"finetune: f(x, z) = {retriever.mixture.dense:g} x the embeddings' + {retriever.mixture.lexical:g} x BM25 "
            f"over that of the best passage, fitted on {len(held_out)} dev questions; "
            f"it counts {weight:g} times beside a span's score"
        )
    losses = {
        name: JournalValues(job.journal).mean(name, last=50) for name in ("span_loss", "early_loss", "no_correct_span")
    }
    timeouts = warn_of_timeouts(job, [*questions, *held_out])
    return Tuned(model, answers, {**losses, "questions": len(questions), **metrics, **timeouts})


def _learn_to_read(trainings: StageTrainings, model: OpenQa, questions: list[Question]) -> dict[str, int]:
    """Train the reader by ``finetune.reader_training``; returns how many questions had evidence."""
    job, options = trainings.job, model.options
    if options.reader_training == "passages":
        surroundings = trainings.context("finetune", finetune_steps(len(questions), options), "fine-tuning")
        finetune(surroundings, model, questions, options, job.section(Optimiser))
        return {}
    lessons = lessons_of(model, questions, EVIDENCE, job.report.progress("evidence", len(questions)))
    if not lessons:
        raise ValueError(
            f"no training question has an answer in its first {EVIDENCE} passages: the reader cannot learn from "
            "windows; check that questions.train belongs to these documents, or set "
            "finetune.reader_training=passages"
        )
    surroundings = trainings.context("finetune", finetune_steps(len(lessons), options), "fine-tuning")
    train_in_windows(surroundings, model, lessons, options, job.section(Optimiser))
    return {"questions_with_evidence": len(lessons)}


def _closed_book(
    trainings: StageTrainings, snapshot: Snapshot, questions: list[Question], held_out: list[Question]
) -> Tuned:
    """A model that takes the place of retriever and reader."""
    job = trainings.job
    options, seed = job.section(ClosedBookOptions), job.section(RunOptions).seed
    reader = load_models(job.inputs.get("ict", job.inputs["pretrain"]), snapshot.vocabulary_hash)[1]
    model = t5.ClosedBook.build(options, snapshot, reader.encoder.model.config, seed)
    usable, optimiser = t5.answered_in_words(questions), job.section(Optimiser)
    corruption = trainings.context("span_corruption", options.steps, "span corruption", "corrupted_")
    trainings.end = t5.pretrain(corruption, model, snapshot, options, optimiser)
    answering = trainings.context("closed_book", finetune_steps(len(usable), options), "fine-tuning")
    t5.finetune(answering, model, usable, options, optimiser)
    if not team().leads:
        return Tuned(model, [], {})
    answers = model.answer(held_out, progress=job.report.progress("dev questions", len(held_out)))
    return Tuned(
        model, answers, {"closed_book_loss": JournalValues(job.journal).mean("loss", last=50), "questions": len(usable)}
    )


# By ``finetune.reader``: the stage whose reader starts, or a reader of another kind.
TRAINERS: Mapping[str, Callable[[StageTrainings, Snapshot, list[Question], list[Question]], Tuned]] = {
    "pretrain": _open_qa,
    "ict": _open_qa,
    "t5": _closed_book,
}


def _dev_figures(job: Job, questions: list[Question], answers: list[Answer]) -> dict[str, float]:
    """Exact match, F1 and calibration on the dev questions; writes the calibration, which is fitted on them."""
    seed, wanted = job.section(RunOptions).seed, job.section(Finetune).wanted_precision
    score = score_predictions(questions, [answer.text for answer in answers], seed=seed)
    kept = _of_the_public(job, questions)
    confidence = kept or fit_confidence(answers, score.correct, wanted)
    confidence.save(job.out)
    figures = confidence_figures(confidence, answers, score.correct, seed=seed)
    job.report.say(f"finetune: {_answered(confidence, figures, len(questions), came=kept is not None)}")
    return {
        "dev_em": score.em.mean,
        "dev_f1": score.f1.mean,
        **{f"dev_{name}": value for name, value in figures.items()},
    }


def _answered(confidence: Confidence, figures: Mapping[str, float], questions: int, *, came: bool) -> str:
    """Which dev questions are answered, and why; ``came``: the calibration came with ``reader.init``."""
    reached = f"wanted_precision={confidence.wanted_precision:g}"
    if confidence.holds_all and came:
        return (
            f"every answer is held back by the calibration of reader.init: none reached its {reached}; set "
            "questions.dev to questions that people asked, and it is fitted again on these"
        )
    if confidence.holds_all:
        return (
            f"no confidence reaches finetune.{reached} on the {questions} dev questions, so every answer is held back; "
            "set a lower one, or train on more questions"
        )
    source = (
        f"reader.init brought this threshold, for {reached}" if came else f"the threshold is for finetune.{reached}"
    )
    right = figures.get("answered_precision")  # not there where no question is answered
    return (
        f"{figures['answered'] * questions:.0f} of {questions} dev questions are answered with a confidence of "
        f"{confidence.threshold:.3f} or more"
        f"{'' if right is None else f', and {right:.0%} of these answers are right'}; {source}"
    )


def _of_the_public(job: Job, questions: list[Question]) -> Confidence | None:
    """The calibration that came with ``reader.init``, where nothing was learned here and no dev question is a person's.

    Questions made from the documents say little of how often people's are answered rightly.
    """
    fits = job.section(Finetune).epochs or job.section(ReaderOptions).init == ENCODER
    return None if fits or not all(q.not_in for q in questions) else Confidence.load(job.inputs["reader.init"])


def _fit_to_tuned(job: Job, model: RetrieveAndRead, passages: Approximate, questions: list[Question]) -> float:
    """Let the index find for the tuned query tower what ``evaluate`` asks for; the recall, warned of when too low."""
    queries = question_queries(model.snapshot, questions, model.options.query_wordpieces)
    most = max(RECALL_AT) * model.retriever.vectors
    try:
        passages.widen(embed(model.retriever.query, query_sequences(queries), model.dtype), most)
    except ValueError as error:  # the training is worth keeping
        job.report.warn(str(error))
    return passages.recipe.recall
