"""Stage ``finetune``: open-domain question answering over the frozen passages of the chosen retriever."""

from __future__ import annotations

import copy
from typing import Any

from realmops.config import ClosedBookOptions, Finetune
from realmops.corpus.questions import Question, read_questions
from realmops.corpus.snapshot import Snapshot
from realmops.evaluate.openqa import score_predictions
from realmops.evaluate.retrieval import RECALL_AT
from realmops.index.approximate import Approximate, index_type
from realmops.index.embed import embed, query_sequences
from realmops.model.files import add_spans, load_models, save_models
from realmops.model.reader import Reader
from realmops.model.retriever import Retriever
from realmops.stages import Job
from realmops.stages.common import (
    JournalValues,
    context,
    open_snapshot,
    passage_embeddings,
    prepare,
    question_queries,
    sampled,
    save_passages,
    searchable,
    warn_of_timeouts,
)
from realmops.stages.retrievers import DENSE, ranker_of
from realmops.train import closed_book
from realmops.train.closed_book import SAID_TOGETHER, ClosedBook, answered_in_words
from realmops.train.finetune import ANSWERED_TOGETHER, OpenQa, finetune, finetune_steps
from realmops.train.path import PathRetriever, train_paths


def start_models(job: Job, snapshot: Snapshot, options: Finetune) -> tuple[Retriever, Reader]:
    """Retriever and reader from the stages that the options name, the query tower apart from the passages'.

    Where the retriever is none of ours, that of the reader's stage keeps its place and is not used.
    """
    source = options.retriever if options.retriever in DENSE else options.reader
    for key, name in (("retriever", source), ("reader", options.reader)):
        if name not in job.inputs:
            raise ValueError(
                f"finetune.{key} is {name!r}, but that stage was not run; run it or set finetune.{key}=pretrain"
            )
    models = {name: load_models(job.inputs[name], snapshot.vocabulary_hash) for name in {source, options.reader}}
    retriever, reader = models[source][0], models[options.reader][1]
    return Retriever(copy.deepcopy(retriever.query), retriever.document), reader


def run(job: Job) -> dict[str, Any]:
    """Fine-tune, write models and passage embeddings; returns losses and exact match on the dev questions."""
    options: Finetune = job.sections["finetune"]
    book: ClosedBookOptions = job.sections["closed_book"]
    seed = job.sections["run"].seed
    device, dtype = prepare(job.sections["run"])
    snapshot = open_snapshot(job)
    form = job.sections["questions"].format
    questions = read_questions([job.inputs["questions.train"]], format=form)
    held_out = read_questions([job.inputs["questions.dev"]], format=form)
    if options.reader == "t5":
        return _closed_book(job, book, snapshot, questions, held_out)
    retriever, reader = start_models(job, snapshot, options)
    reader.to(device)
    metrics: dict[str, Any] = {}
    path, done, end = None, 0, 0
    if options.retriever == "path":
        path = PathRetriever.start(reader.bert, snapshot, options, dtype, seed)
        bar = job.report.progress("questions with paths", len(questions))
        lessons = []
        for question in questions:
            lessons += [lesson] if (lesson := path.lesson(question)) else []
            bar(1)
        metrics["questions_with_path"], done = len(lessons), finetune_steps(len(lessons), options)
        surroundings = context(job, "paths", done, "paths", prefix="path_")
        end = train_paths(surroundings, path, lessons, options, job.sections["optimiser"])
    add_spans(reader, options.span_width, seed)
    retriever.to(device)
    passages = None
    if options.retriever in DENSE:
        index_type(job.sections["index"], len(snapshot), retriever.document.projection.out_features, device)
        embedding_PE = passage_embeddings(job.inputs[options.retriever], retriever, snapshot, dtype)
        asked = question_queries(snapshot, sampled(questions, seed), options.query_wordpieces)
        passages = searchable(job, embedding_PE, retriever.query, asked, options.retriever_candidates)
    ranker = ranker_of(options, snapshot, path)
    model = OpenQa(retriever, reader, snapshot, passages, options, dtype, ranker)
    steps = finetune_steps(len(questions), options)
    surroundings = context(job, "finetune", steps, "fine-tuning", first_step=done, journal_start=end)
    finetune(surroundings, model, questions, options, job.sections["optimiser"])
    if not surroundings.team.leads:
        return {}
    if isinstance(passages, Approximate):
        metrics["index_recall"] = _fit_to_tuned(job, model, passages, sampled(held_out, seed))
    save_models(job.out, retriever, reader, snapshot.vocabulary_hash)
    if path is not None:
        path.save(job.out)
    if passages is not None:
        save_passages(job.out, passages)
    progress = job.report.progress("dev questions", len(held_out))
    answers = model.answer(held_out, ranked=5, batch_size=ANSWERED_TOGETHER, progress=progress)
    logged = JournalValues(job)
    return {
        "dev_em": _exact_match(held_out, [a.text for a in answers], seed),
        "span_loss": logged.mean("span_loss", last=50),
        "early_loss": logged.mean("early_loss", last=50),
        "no_correct_span": logged.mean("no_correct_span", last=50),
        "questions": len(questions),
        **metrics,
        **warn_of_timeouts(job, [*questions, *held_out]),
    }


def _closed_book(
    job: Job,
    options: ClosedBookOptions,
    snapshot: Snapshot,
    questions: list[Question],
    held_out: list[Question],
) -> dict[str, Any]:
    """Train and write the T5 that takes the place of retriever and reader; returns loss and dev exact match."""
    seed, optimiser = job.sections["run"].seed, job.sections["optimiser"]
    shape = load_models(job.inputs.get("ict", job.inputs["pretrain"]), snapshot.vocabulary_hash)[1].bert.config
    model = ClosedBook.build(options, snapshot, shape, seed)
    usable = answered_in_words(questions)
    surroundings = context(job, "span_corruption", options.steps, "span corruption", prefix="corrupted_")
    end = closed_book.pretrain(surroundings, model, snapshot, options, optimiser)
    steps = finetune_steps(len(usable), options)
    surroundings = context(
        job, "closed_book", steps, "fine-tuning", first_step=options.steps, journal_start=end
    )
    closed_book.finetune(surroundings, model, usable, options, optimiser)
    if not surroundings.team.leads:
        return {}
    model.save(job.out)
    progress = job.report.progress("dev questions", len(held_out))
    said = model.answer(held_out, batch_size=SAID_TOGETHER, progress=progress)
    return {
        "dev_em": _exact_match(held_out, [text for text, _ in said], seed),
        "closed_book_loss": JournalValues(job).mean("loss", last=50),
        "questions": len(usable),
    }


def _exact_match(questions: list[Question], texts: list[str], seed: int) -> float:
    predictions = {q.id: text for q, text in zip(questions, texts, strict=True)}
    return score_predictions(questions, predictions, seed=seed).em.mean


def _fit_to_tuned(job: Job, model: OpenQa, passages: Approximate, questions: list[Question]) -> float:
    """Let the index find for the tuned query tower what ``evaluate`` asks for; the recall, warned of when too low."""
    queries = question_queries(model.snapshot, questions, model.options.query_wordpieces)
    try:
        passages.widen(embed(model.retriever.query, query_sequences(queries), model.dtype), max(RECALL_AT))
    except ValueError as error:  # the training is worth keeping
        job.report.warn(str(error))
    return passages.recipe.recall
