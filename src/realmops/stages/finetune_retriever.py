"""The retriever's part of ``finetune``: what it starts from, what it learns, and its index or ranker."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from realmops.answering.retrieval import Ranker
from realmops.baselines.path import PathRetriever, train_paths
from realmops.baselines.rankers import DENSE, ranker_of
from realmops.config import Finetune, IndexOptions, Optimiser, ReaderOptions, RunOptions
from realmops.corpus.cloze import Sources
from realmops.corpus.question_sets import Question
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype
from realmops.model.checkpoint_files import load_models, load_reader
from realmops.model.reader import Reader
from realmops.model.retriever import EMBEDDINGS_ALONE, Retriever
from realmops.refresh.trainer import Policy
from realmops.search.approximate import index_type
from realmops.search.bm25 import Bm25
from realmops.search.corpus_statistics import start_matches
from realmops.search.embeddings import INDEX, load_index
from realmops.search.exact import PassageIndex, exact
from realmops.stages import ENCODER, Job
from realmops.stages.common import StageTrainings, question_queries, sampled, searchable
from realmops.stages.sharded_work import embeddings_of
from realmops.text.answer_matching import contains_answer
from realmops.train.fine_tuning import finetune_steps
from realmops.train.index_refresh import BuilderSettings, exchange
from realmops.train.index_source import IndexSource, Refresh
from realmops.train.loop import Context
from realmops.train.parallel import team
from realmops.train.passage_batches import Positives, passage_steps, train_by_passages

SHARD_ROWS = 512  # passages that the index builder embeds and commits at a time
BUILDER_TIMEOUT = 900.0  # seconds to wait for an index
EVIDENCE = 20  # best passages among which the one that answers a training question is looked for


@dataclass(frozen=True)
class Finder:
    """What finds passages while the reader learns, and what there is to say about how it learned."""

    retriever: Retriever
    passages: PassageIndex | None
    ranker: Ranker | None
    words: Bm25 | None
    metrics: dict[str, int]


def start_models(job: Job, snapshot: Snapshot, stage: str) -> tuple[Retriever, Reader]:
    """The reader of a stage or of ``reader.init``, and the retriever that the options name.

    The query tower is apart from the passages' where it learns alone.

    Where the retriever is none of ours, that of the reader's stage keeps its place and is not used.
    """
    options = job.section(Finetune)
    source = options.retriever if options.retriever in DENSE else stage
    for key, name in (("retriever", source), ("reader", stage)):
        if name not in job.inputs:
            raise ValueError(
                f"finetune.{key} is {name!r}, but that stage was not run; run it or set finetune.{key}=pretrain"
            )
    models = {name: load_models(job.inputs[name], snapshot.vocabulary_hash) for name in {source, stage}}
    retriever, reader = models[source][0], models[stage][1]
    if job.section(ReaderOptions).init != ENCODER:
        reader = load_reader(job.inputs["reader.init"], snapshot.vocabulary_hash)
        start_matches(reader, snapshot, job.section(RunOptions).seed, job.report.progress)
    reader.encoder.set_dropout(options.reader_dropout)
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


def ready_to_find(
    trainings: StageTrainings, retriever: Retriever, reader: Reader, snapshot: Snapshot, questions: list[Question]
) -> Finder:
    """Train what ``finetune.retriever`` and ``retriever_training`` want trained before the reader, and index it."""
    job = trainings.job
    options, seed = job.section(Finetune), job.section(RunOptions).seed
    metrics: dict[str, int] = {}
    if options.retriever not in DENSE:
        path = None
        if options.retriever == "path":
            path, metrics["questions_with_path"] = _learn_paths(trainings, reader, snapshot, questions)
        retriever.to(reader.device)
        return Finder(retriever, None, ranker_of(options.retriever, snapshot, path), None, metrics)
    retriever.to(reader.device)
    index_type(job.section(IndexOptions), len(snapshot) * retriever.vectors, retriever.document.width, reader.device)
    words = Bm25.of(snapshot) if retriever.mixture.lexical else None
    if options.retriever_training == "passages":
        if options.retriever_epochs:
            metrics["passages_with_questions"] = _learn_by_passages(trainings, retriever, snapshot, questions)
        if options.reader_training == "passages":  # the query tower goes on learning
            retriever = _with_query_apart(retriever)
        embedding_PE = _embedded(job, retriever, snapshot)
    elif (job.inputs[options.retriever] / INDEX).is_file():  # imported with the model
        embedding_PE = load_index(job.inputs[options.retriever], snapshot)
    else:
        embedding_PE = _embedded(job, retriever, snapshot)
    asked = question_queries(snapshot, sampled(questions, seed), options.query_wordpieces)
    passages = searchable(job, embedding_PE, retriever.query, asked, options.retriever_candidates)
    return Finder(retriever, passages, None, words, metrics)


def _learn_paths(
    trainings: StageTrainings, reader: Reader, snapshot: Snapshot, questions: list[Question]
) -> tuple[PathRetriever, int]:
    """A retriever of paths over links, and how many questions have one to learn from."""
    job = trainings.job
    options, run = job.section(Finetune), job.section(RunOptions)
    path = PathRetriever.start(reader.encoder, snapshot, options, device_and_dtype(run)[1], run.seed)
    bar = job.report.progress("questions with paths", len(questions))
    walks = []
    for question in questions:
        walks += [walk] if (walk := path.lesson(question)) else []
        bar(1)
    surroundings = trainings.context("paths", finetune_steps(len(walks), options), "paths", "path_")
    trainings.end = train_paths(surroundings, path, walks, options, job.section(Optimiser))
    return path, len(walks)


def _learn_by_passages(
    trainings: StageTrainings, retriever: Retriever, snapshot: Snapshot, questions: list[Question]
) -> int:
    """Train all of the retriever; returns how many passages answer a question."""
    job = trainings.job
    options = job.section(Finetune)
    positives = _positives(job, snapshot, questions)
    steps = passage_steps(len(positives.passages), options)
    surroundings = trainings.context("retriever", steps, "retriever", "retriever_")
    learned = (questions, positives, options, job.section(Optimiser))
    with _refreshed(job, surroundings, retriever, snapshot, steps) as (surroundings, source):
        trainings.end = train_by_passages(surroundings, retriever, snapshot, *learned, source)
    return len(positives.passages)


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
    site = BuilderSettings(job.work, job.section(RunOptions).threads, job.report.say)
    device = surroundings.device

    def passages(embedding_PE: Tensor, searcher: Retriever) -> PassageIndex:
        return exact(embedding_PE.to(device), searcher.vectors)

    with exchange(surroundings, site, refresh, snapshot, retriever, passages) as found:
        yield found


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
    all_of_us.broadcast([embedding_PE])
    return embedding_PE
