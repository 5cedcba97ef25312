"""Stage ``finetune``: open-domain question answering over the frozen passages of the chosen retriever."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from realmops.baselines.path import PathRetriever, train_paths
from realmops.baselines.rankers import DENSE, ranker_of
from realmops.baselines.t5 import ClosedBook
from realmops.bert import device_and_dtype
from realmops.config import ClosedBookOptions, Finetune, IndexOptions, Optimiser, RunOptions
from realmops.corpus.answers import contains_answer
from realmops.corpus.cloze import Sources
from realmops.corpus.questions import Question
from realmops.corpus.snapshot import Snapshot
from realmops.evaluate.confidence import Confidence, confidence_figures
from realmops.evaluate.openqa import is_right, score_predictions
from realmops.evaluate.retrieval import RECALL_AT
from realmops.index.approximate import Approximate, approximate, index_type
from realmops.index.embed import embed, query_sequences
from realmops.index.embeddings import INDEX, load_index, save_passages
from realmops.index.lexical import Bm25
from realmops.index.mips import exact
from realmops.index.trainer import Policy
from realmops.journal import JournalValues
from realmops.model.files import add_spans, load_models, save_models
from realmops.model.reader import Reader
from realmops.model.retriever import EMBEDDINGS_ALONE, Retriever
from realmops.stages import Job
from realmops.stages.common import (
    Course,
    open_snapshot,
    question_queries,
    questions_of,
    sampled,
    searchable,
    warn_of_timeouts,
)
from realmops.stages.shards import embeddings_of
from realmops.train.exchange import Refresh, Site, exchange
from realmops.train.finetune import ANSWERED_TOGETHER, Answer, OpenQa, finetune, finetune_steps
from realmops.train.loop import Context
from realmops.train.mixture import fit_reading, fit_to_questions
from realmops.train.parallel import team
from realmops.train.passages import Positives, passage_steps, train_by_passages
from realmops.train.pretrain import IndexSource
from realmops.train.windows import WindowLesson, lessons_of, train_in_windows

SHARD_ROWS = 512  # passages that the index builder embeds and commits at a time
BUILDER_TIMEOUT = 900.0  # seconds to wait for an index
EVIDENCE = 20  # best passages among which the one that answers a training question is looked for


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
    reader.bert.set_dropout(options.reader_dropout)
    if options.retriever not in DENSE:
        retriever.mixture = EMBEDDINGS_ALONE
    if options.retriever_training == "passages":
        return retriever, reader
    return _with_query_apart(retriever), reader


def _with_query_apart(retriever: Retriever) -> Retriever:
    """The same with a query tower of its own, which can learn over frozen passages."""
    apart = Retriever(copy.deepcopy(retriever.query), retriever.document, retriever.vectors)
    apart.mixture = retriever.mixture
    return apart


def run(job: Job) -> dict[str, Any]:
    """Fine-tune, write models and passage embeddings; returns losses and exact match on the dev questions."""
    options, seed = job.section(Finetune), job.section(RunOptions).seed
    device, dtype = device_and_dtype(job.section(RunOptions))
    snapshot = open_snapshot(job)
    questions = questions_of(job, snapshot, "train")
    held_out = questions_of(job, snapshot, "dev")
    if not options.reads_passages:
        return _closed_book(job, snapshot, questions, held_out)
    retriever, reader = start_models(job, snapshot, options)
    reader.to(device)
    course = Course(job)
    metrics: dict[str, Any] = {}
    path, passages, words = None, None, None
    if options.retriever == "path":
        path, metrics["questions_with_path"] = _learn_paths(course, reader, snapshot, questions, dtype)
    add_spans(reader, options.span_width, seed)
    retriever.to(device)
    if options.retriever in DENSE:
        index_type(job.section(IndexOptions), len(snapshot) * retriever.vectors, retriever.document.width, device)
        words = Bm25.of(snapshot) if retriever.mixture.lexical else None
        if options.retriever_training == "passages":
            if options.retriever_epochs:
                metrics["passages_with_questions"] = _learn_by_passages(course, retriever, snapshot, questions)
            if options.reader_training == "passages":  # the query tower goes on learning
                retriever = _with_query_apart(retriever)
            embedding_PE = _embedded(job, retriever, snapshot)
        elif (job.inputs[options.retriever] / INDEX).is_file():  # imported with the model
            embedding_PE = load_index(job.inputs[options.retriever], snapshot)
        else:
            embedding_PE = _embedded(job, retriever, snapshot)
        asked = question_queries(snapshot, sampled(questions, seed), options.query_wordpieces)
        passages = searchable(job, embedding_PE, retriever.query, asked, options.retriever_candidates)
    ranker = ranker_of(options.retriever, snapshot, path)
    model = OpenQa(retriever, reader, snapshot, passages, options, dtype, ranker, words)
    if model.hybrid:
        retriever.mixture = fit_to_questions(model, held_out)
    reader.bert.word.weight.requires_grad_(not options.freeze_words)
    if options.reader_training == "windows":
        lessons = _lessons(job, model, questions)
        metrics["questions_with_evidence"] = len(lessons)
        surroundings = course.context("finetune", finetune_steps(len(lessons), options), "fine-tuning")
        train_in_windows(surroundings, model, lessons, options, job.section(Optimiser))
    else:
        surroundings = course.context("finetune", finetune_steps(len(questions), options), "fine-tuning")
        finetune(surroundings, model, questions, options, job.section(Optimiser))
    if not surroundings.team.leads:
        return {}
    if (structure := approximate(passages)) is not None:
        metrics["index_recall"] = _fit_to_tuned(job, model, structure, sampled(held_out, seed))
    if model.hybrid and options.reader_training == "passages":  # the query tower learned beside the reader
        retriever.mixture = fit_to_questions(model, held_out)
    progress = job.report.progress("dev questions", len(held_out))
    answers = model.answer(held_out, ranked=5, batch_size=ANSWERED_TOGETHER, progress=progress)
    if model.hybrid:
        before = retriever.mixture.reading
        weight = fit_reading(model, held_out, answers, is_right)
        retriever.mixture = replace(retriever.mixture, reading=weight)
        if weight != before:  # p(y|x) is over all spans, which nothing kept
            answers = model.answer(held_out, ranked=5, batch_size=ANSWERED_TOGETHER)
        metrics |= {f"weight_{name}": value for name, value in asdict(retriever.mixture).items()}
        job.report.say(
            f"finetune: f(x, z) = {retriever.mixture.dense:g} x the embeddings' + {retriever.mixture.lexical:g} x BM25 "
            f"over that of the best passage, fitted on {len(held_out)} dev questions; "
            f"it counts {weight:g} times beside a span's score"
        )
    save_models(job.out, retriever, reader, snapshot.vocabulary_hash)
    if path is not None:
        path.save(job.out)
    if passages is not None:
        save_passages(job.out, passages)
    logged = JournalValues(job.journal)
    return {
        **_dev_figures(job, held_out, answers),
        "span_loss": logged.mean("span_loss", last=50),
        "early_loss": logged.mean("early_loss", last=50),
        "no_correct_span": logged.mean("no_correct_span", last=50),
        "questions": len(questions),
        **metrics,
        **warn_of_timeouts(job, [*questions, *held_out]),
    }


def _learn_paths(
    course: Course, reader: Reader, snapshot: Snapshot, questions: list[Question], dtype: torch.dtype
) -> tuple[PathRetriever, int]:
    """A retriever of paths over links, and how many questions have one to learn from."""
    job = course.job
    options = job.section(Finetune)
    path = PathRetriever.start(reader.bert, snapshot, options, dtype, job.section(RunOptions).seed)
    bar = job.report.progress("questions with paths", len(questions))
    walks = []
    for question in questions:
        walks += [walk] if (walk := path.lesson(question)) else []
        bar(1)
    surroundings = course.context("paths", finetune_steps(len(walks), options), "paths", "path_")
    course.end = train_paths(surroundings, path, walks, options, job.section(Optimiser))
    return path, len(walks)


def _learn_by_passages(course: Course, retriever: Retriever, snapshot: Snapshot, questions: list[Question]) -> int:
    """Train all of the retriever; returns how many passages answer a question."""
    job = course.job
    options = job.section(Finetune)
    positives = _positives(job, snapshot, questions)
    steps = passage_steps(len(positives.passages), options)
    surroundings = course.context("retriever", steps, "retriever", "retriever_")
    learned = (questions, positives, options, job.section(Optimiser))
    with _refreshed(job, surroundings, retriever, snapshot, steps) as (surroundings, source):
        course.end = train_by_passages(surroundings, retriever, snapshot, *learned, source)
    return len(positives.passages)


def _lessons(job: Job, model: OpenQa, questions: list[Question]) -> list[WindowLesson]:
    """What the reader learns from in windows; ValueError where no question teaches anything."""
    lessons = lessons_of(model, questions, EVIDENCE, job.report.progress("evidence", len(questions)))
    if not lessons:
        raise ValueError(
            f"no training question has an answer in its first {EVIDENCE} passages: the reader cannot learn from "
            "windows; check that questions.train belongs to these documents, or set "
            "finetune.reader_training=passages"
        )
    return lessons


@contextmanager
def _refreshed(
    job: Job, surroundings: Context, retriever: Retriever, snapshot: Snapshot, steps: int
) -> Iterator[tuple[Context, IndexSource | None]]:
    """A training, with a builder beside it where ``finetune.retriever_refresh_every`` wants new indexes."""
    every = job.section(Finetune).retriever_refresh_every
    if not every:
        yield surroundings, None
        return
    policy = Policy("fixed_lag", None, "wait", BUILDER_TIMEOUT)
    refresh = Refresh(steps, every, every // 2, 0, "child", "auto", SHARD_ROWS, policy)
    site = Site(job.work, job.section(RunOptions).threads, job.report.say)
    device = surroundings.device
    with exchange(
        surroundings, site, refresh, snapshot, retriever, lambda found, by: exact(found.to(device), by.vectors)
    ) as joined:
        yield joined


def _positives(job: Job, snapshot: Snapshot, questions: list[Question]) -> Positives:
    """For each question the best of BM25's first passages that holds an answer."""
    words, sources = Bm25.of(snapshot), Sources(snapshot)
    bar = job.report.progress("passages of questions", len(questions))
    found = []
    for question in questions:
        _, [ids] = words.search([question.question], EVIDENCE)
        own = sources.of(question)
        right = (p for p in ids.tolist() if p >= 0 and p not in own)
        right = (p for p in right if contains_answer(snapshot.text(p), question.answers, question.match_rule))
        found.append(next(right, -1))
        bar(1)
    if max(found, default=-1) < 0:
        raise ValueError(
            f"no training question has an answer in one of BM25's first {EVIDENCE} passages: the retriever cannot "
            "learn from them; check that questions.train belongs to these documents, or set "
            "finetune.retriever_training=queries"
        )
    return Positives.of(found)


def _embedded(job: Job, retriever: Retriever, snapshot: Snapshot) -> Tensor:
    """Embeddings P x E of all passages, which the first of several processes has made and the others are sent."""
    all_of_us = team()
    if all_of_us.leads:
        embedding_PE = embeddings_of(job, retriever, snapshot)
    else:
        embedding_PE = torch.empty(len(snapshot), retriever.width)
    all_of_us.send([embedding_PE])
    return embedding_PE


def _closed_book(job: Job, snapshot: Snapshot, questions: list[Question], held_out: list[Question]) -> dict[str, Any]:
    """Train and write a model that takes the place of retriever and reader; returns loss and dev exact match."""
    options, seed = job.section(ClosedBookOptions), job.section(RunOptions).seed
    shape = load_models(job.inputs.get("ict", job.inputs["pretrain"]), snapshot.vocabulary_hash)[1].bert.config
    model = ClosedBook.build(options, snapshot, shape, seed)
    learned = model.train(Course(job), snapshot, questions, options, job.section(Optimiser))
    if not team().leads:
        return {}
    model.save(job.out)
    answers = model.answer(held_out, progress=job.report.progress("dev questions", len(held_out)))
    return {
        **_dev_figures(job, held_out, answers),
        "closed_book_loss": JournalValues(job.journal).mean("loss", last=50),
        "questions": learned,
    }


def _dev_figures(job: Job, questions: list[Question], answers: list[Answer]) -> dict[str, float]:
    """Exact match, F1 and calibration on the dev questions; writes the calibration, which is fitted on them."""
    seed, wanted = job.section(RunOptions).seed, job.section(Finetune).wanted_precision
    score = score_predictions(questions, [answer.text for answer in answers], seed=seed)
    confidence = Confidence.fit(answers, score.correct, wanted)
    confidence.save(job.out)
    figures = confidence_figures(confidence, answers, score.correct, seed=seed)
    if confidence.threshold is None:
        job.report.say(
            f"finetune: no confidence reaches finetune.wanted_precision={wanted:g} on the {len(questions)} dev "
            "questions, so no answer is held back; ask for less, or look at the confidence of each answer"
        )
    else:
        job.report.say(
            f"finetune: {figures['answered'] * len(questions):.0f} of {len(questions)} dev questions are answered with "
            f"a confidence of {confidence.threshold:.3f} or more, and {figures['answered_precision']:.0%} of these "
            f"answers are right; finetune.wanted_precision is {wanted:g}"
        )
    return {
        "dev_em": score.em.mean,
        "dev_f1": score.f1.mean,
        **{f"dev_{name}": value for name, value in figures.items()},
    }


def _fit_to_tuned(job: Job, model: OpenQa, passages: Approximate, questions: list[Question]) -> float:
    """Let the index find for the tuned query tower what ``evaluate`` asks for; the recall, warned of when too low."""
    queries = question_queries(model.snapshot, questions, model.options.query_wordpieces)
    most = max(RECALL_AT) * model.retriever.vectors
    try:
        passages.widen(embed(model.retriever.query, query_sequences(queries), model.dtype), most)
    except ValueError as error:  # the training is worth keeping
        job.report.warn(str(error))
    return passages.recipe.recall
