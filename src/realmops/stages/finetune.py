"""Stage ``finetune``: open-domain question answering over the frozen passage embeddings of a retriever."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from realmops.answering.answer import Answer
from realmops.answering.confidence import MIN_CALIBRATION, READER_QUESTIONS, TOO_FEW_RIGHT, Confidence
from realmops.answering.extractive import ExtractiveQa
from realmops.answering.openqa import OpenQa
from realmops.answering.retrieval import AnswerModel, RetrieveAndRead, SearchOnly
from realmops.answering.span_answers import SpanAnswers
from realmops.baselines import t5
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype
from realmops.evaluate.calibration import confidence_figures, fit_confidence
from realmops.evaluate.exact_match import is_exact_match, score_predictions
from realmops.evaluate.recall import RECALL_AT
from realmops.hub import READER, encoder_folder
from realmops.journal import JournalValues
from realmops.model.build import add_span_head
from realmops.model.extractive_reader import ExtractiveReader
from realmops.model.reader import SPAN_WIDTH
from realmops.model.reader_files import load_models
from realmops.opening import save_tuned
from realmops.options import ENCODER, NO_READER, ClosedBookOptions, Finetune, RunOptions, epoch_steps
from realmops.process import configure_malloc
from realmops.questions.question_sets import Question, rows_of_people
from realmops.search.approximate import ApproximateIndex, unwrap_approximate
from realmops.search.embed import embed, query_sequences
from realmops.stages import READER_INIT, Job
from realmops.stages.common import (
    StageTrainings,
    load_questions,
    load_unanswerable,
    open_snapshot,
    question_queries,
    sample_queries,
    warn_of_timeouts,
)
from realmops.stages.finetune_retriever import EVIDENCE_DEPTH, prepare_retrieval, start_models
from realmops.train.fine_tuning import finetune, fit_reading_weight, fit_weights_on_questions, train_query_tower
from realmops.train.loop import TrainingContext
from realmops.train.parallel import process_group
from realmops.train.reader_training import reader_trainer


@dataclass(frozen=True)
class FineTuned:
    """A fine-tuned model, its answers to the dev questions, and the metrics of its training."""

    model: AnswerModel
    answers: list[Answer]
    metrics: Mapping[str, Any]


def run(job: Job) -> dict[str, Any]:
    """Fine-tune and write the model; return losses and exact match on the dev questions."""
    snapshot = open_snapshot(job)
    questions, held_out = (load_questions(job, snapshot, split) for split in ("train", "dev"))
    if untaught := len(load_unanswerable(job, snapshot, "train")):
        job.report.log(f"finetune: {untaught} training questions have no answer; models are not trained on them")
    tuned = TRAINERS[job.section(Finetune).reader](StageTrainings(job), snapshot, questions, held_out)
    if not process_group().is_main_process:
        return {}
    save_tuned(job.out, tuned.model)
    metrics = _dev_metrics(job, snapshot, held_out, tuned) if tuned.model.gives_answers else {}
    return {**metrics, **tuned.metrics}


def _open_qa(
    trainings: StageTrainings, snapshot: Snapshot, questions: list[Question], held_out: list[Question]
) -> FineTuned:
    job = trainings.job
    options, seed = job.section(Finetune), job.section(RunOptions).seed
    retriever, own_reader, reader = start_models(job, snapshot, options.reader)
    device, dtype = device_and_dtype(job.section(RunOptions), retriever, reader)
    own_reader.to(device)
    finder = prepare_retrieval(trainings, retriever, own_reader, snapshot, questions)
    retriever, metrics = finder.retriever, dict[str, Any](finder.metrics)
    kind: type[RetrieveAndRead] = SearchOnly
    if isinstance(reader, ExtractiveReader):
        reader.to(device)
        kind = ExtractiveQa
    elif reader is not None:
        if reader.spans is None:  # an imported reader has a span head
            add_span_head(reader, SPAN_WIDTH, seed)
        kind = OpenQa
    model = kind(retriever, reader, snapshot, finder.passages, options, dtype, finder.ranker, finder.bm25)
    if kind is not OpenQa and finder.passages is not None and options.retriever_training == "queries":
        steps = epoch_steps(len(questions), options.retriever_batch_size, options.retriever_epochs)
        context = trainings.context(dtype, "query", steps, "query tower", "query_")
        train_query_tower(context, model, questions, options)
    if model.hybrid:
        retriever.mixture = fit_weights_on_questions(model, held_out)
        configure_malloc()
    if options.epochs:
        metrics |= _learn_to_read(trainings, model, questions)
    if not process_group().is_main_process:
        return FineTuned(model, [], {})
    if held_out and (structure := unwrap_approximate(model.passages)) is not None:
        metrics["index_recall"] = _widen_index(job, model, structure, sample_queries(held_out, seed))
    if model.hybrid and options.reader_training == "passages":  # the query tower was trained together with the reader
        retriever.mixture = fit_weights_on_questions(model, held_out)
    if model.hybrid and not any(question.measures_answers for question in held_out):
        # no dev question has answers of people: the value that fit_reading_weight returns for them
        retriever.mixture = replace(retriever.mixture, reading=model.generated_reading_weight)
    answers = model.answer(held_out, ranked=5, progress=job.report.progress("dev questions", len(held_out)))
    if model.hybrid:
        before = retriever.mixture.reading
        weight = fit_reading_weight(model, held_out, answers, is_exact_match)
        retriever.mixture = replace(retriever.mixture, reading=weight)
        if weight != before:  # p(y|x) sums over all spans, which are not stored
            bar = job.report.progress("dev questions again", len(held_out))
            answers = model.answer(held_out, ranked=5, progress=bar)
        metrics |= {f"weight_{name}": value for name, value in asdict(retriever.mixture).items()}
        count = sum(not question.is_generated for question in held_out)
        fitted = f"fitted on dev questions of people ({count})" if count else "fixed: no dev question is of people"
        job.report.log(
            f"finetune: f(x, z) = {retriever.mixture.dense:g} * embedding score + {retriever.mixture.lexical:g} * BM25 "
            f"/ maximum BM25, {fitted}; its weight next to the span score is {weight:g}"
        )
    losses = {
        name: JournalValues(job.journal).mean(name, last=50) for name in ("span_loss", "early_loss", "no_correct_span")
    }
    timeouts = warn_of_timeouts(job, [*questions, *held_out])
    return FineTuned(model, answers, {**losses, "questions": len(questions), **metrics, **timeouts})


def _learn_to_read(trainings: StageTrainings, model: RetrieveAndRead, questions: list[Question]) -> dict[str, int]:
    if not isinstance(model, SpanAnswers):
        return {}
    job, options = trainings.job, model.options
    model.reader.word_vectors.requires_grad_(not options.freeze_words)

    def context(examples: int) -> TrainingContext:
        steps = epoch_steps(examples, options.batch_size, options.epochs)
        return trainings.context(model.dtype, "finetune", steps, "fine-tuning")

    if isinstance(model, OpenQa) and options.reader_training == "passages":
        finetune(context(len(questions)), model, questions, options)
        return {}
    trainer = reader_trainer(model)
    examples = trainer.examples(questions, EVIDENCE_DEPTH, job.report.progress("evidence", len(questions)))
    if not examples:
        raise ValueError(
            f"no training question has an answer in its top {EVIDENCE_DEPTH} passages, so the reader cannot be trained "
            "on them; check that questions.train belongs to these documents, or set finetune.epochs=0"
        )
    trainer.train(context(len(examples)), examples, options)
    return {"questions_with_evidence": len(examples)}


def _closed_book(
    trainings: StageTrainings, snapshot: Snapshot, questions: list[Question], held_out: list[Question]
) -> FineTuned:
    job = trainings.job
    options, seed = job.section(ClosedBookOptions), job.section(RunOptions).seed
    reader = load_models(job.inputs.get("ict", job.inputs["pretrain"]), snapshot.vocabulary_hash)[1]
    model = t5.ClosedBook.build(options, snapshot, reader.encoder.model.config, seed)
    usable = t5.drop_regex_questions(questions)
    dtype = device_and_dtype(job.section(RunOptions), model.net)[1]
    corruption = trainings.context(dtype, "span_corruption", options.steps, "span corruption", "corrupted_")
    t5.pretrain(corruption, model, snapshot, options)
    steps = epoch_steps(len(usable), t5.BATCH_SIZE, options.epochs)
    answering = trainings.context(dtype, "closed_book", steps, "fine-tuning")
    t5.finetune(answering, model, usable, options)
    if not process_group().is_main_process:
        return FineTuned(model, [], {})
    answers = model.answer(held_out, progress=job.report.progress("dev questions", len(held_out)))
    return FineTuned(
        model, answers, {"closed_book_loss": JournalValues(job.journal).mean("loss", last=50), "questions": len(usable)}
    )


# By ``finetune.reader``.
TRAINERS: Mapping[str, Callable[[StageTrainings, Snapshot, list[Question], list[Question]], FineTuned]] = {
    "pretrain": _open_qa,
    "ict": _open_qa,
    "t5": _closed_book,
}


def _dev_metrics(job: Job, snapshot: Snapshot, held_out: list[Question], tuned: FineTuned) -> dict[str, float]:
    """Write the calibration, if there is one; return exact match, F1 and its metrics on the dev questions of people.

    Any answer to a dev question without answers counts as wrong in the calibration. EM and F1 exclude these questions.
    """
    seed, precision = job.section(RunOptions).seed, job.section(Finetune).wanted_precision
    rows = rows_of_people(held_out)
    questions, answers = [held_out[row] for row in rows], [tuned.answers[row] for row in rows]
    score = score_predictions(questions, [answer.text for answer in answers], seed=seed) if questions else None
    unanswerable = load_unanswerable(job, snapshot, "dev") if questions else []
    if unanswerable:
        bar = job.report.progress("dev questions without answers", len(unanswerable))
        answers += tuned.model.answer(unanswerable, progress=bar)
    correct_Q = np.zeros(len(answers), bool)
    if score is not None:
        correct_Q[: len(questions)] = score.correct
    if len(answers) >= MIN_CALIBRATION:
        confidence: Confidence | None = fit_confidence(answers, correct_Q, precision)
    else:
        confidence = _inherited_calibration(job)
    figures = {}
    if confidence is not None:
        confidence.save(job.out)
        figures = confidence_figures(confidence, answers, correct_Q, seed=seed) if answers else {}
    job.report.log(f"finetune: {_describe(confidence, figures, len(answers))}")
    if unanswerable:
        job.report.log(f"finetune: {len(unanswerable)} of these dev questions have no answer: the model should abstain")
    if score is None:
        return {}
    return {f"dev_{name}": v for name, v in {"em": score.em.mean, "f1": score.f1.mean, **figures}.items()}


def _describe(confidence: Confidence | None, figures: Mapping[str, float], questions: int) -> str:
    """Return a sentence on the threshold and the dev questions of people above it."""
    if confidence is None:
        return (
            f"no calibration: questions of people in questions.dev: {questions}; answers have a score, but no "
            "probability of being right, and are shown below the passages; set questions.dev to at least "
            f"{MIN_CALIBRATION} questions of people"
        )
    origin = " in the calibration of reader.init" if confidence.source == READER_QUESTIONS else ""
    target = f"finetune.wanted_precision={confidence.wanted_precision:g}{origin}"
    if confidence.holds_all:
        return f"the model abstains on every question: {TOO_FEW_RIGHT} ({target}); add questions to questions.dev"
    answered = f"; of {questions} dev questions {figures['answered']:.0%} are answered" if figures else ""
    correct = f", {figures['answered_precision']:.0%} of them correctly" if "answered_precision" in figures else ""
    return f"answers need a confidence of at least {confidence.threshold:.3f} for {target}{answered}{correct}"


def _inherited_calibration(job: Job) -> Confidence | None:
    """Return the calibration of ``reader.init``; None if the reader is another or was trained."""
    options, init = job.section(Finetune), job.sections[READER_INIT]
    is_own = options.epochs or not options.reads_passages or init in (ENCODER, NO_READER)
    calibration = None if is_own else Confidence.load(encoder_folder(init, READER))
    return None if calibration is None else replace(calibration, source=READER_QUESTIONS)


def _widen_index(job: Job, model: RetrieveAndRead, passages: ApproximateIndex, questions: list[Question]) -> float:
    """Widen the search for the tuned query tower until it reaches ``target_recall``; return the recall.

    A recall below the target is only a warning, so that the training is not lost.
    """
    queries = question_queries(model.snapshot, questions, model.options.query_wordpieces)
    depth = max(RECALL_AT) * model.retriever.vectors  # as ``evaluate`` needs
    try:
        passages.tune_search_width(embed(model.retriever.query, query_sequences(queries), model.dtype), depth)
    except ValueError as error:
        job.report.warn(str(error))
    return passages.recipe.recall
