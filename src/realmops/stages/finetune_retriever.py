"""The retriever in stage ``finetune``: initialisation, training, and its index or ranker."""

import copy
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from realmops.answering.retrieval import Ranker
from realmops.baselines.path import PathRetriever, train_paths
from realmops.baselines.rankers import DENSE_RETRIEVERS, build_ranker
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype
from realmops.hub import READER, encoder_folder
from realmops.model.extractive_reader import ExtractiveReader, load_extractive_reader
from realmops.model.reader import Reader
from realmops.model.reader_files import load_models
from realmops.model.retriever import DENSE_ONLY, Retriever
from realmops.options import ENCODER, NO_READER, Finetune, RunOptions, epoch_steps
from realmops.questions.cloze import SourcePassages
from realmops.questions.question_sets import JUDGED_RULE, Question
from realmops.questions.relevance import RelevantPassages
from realmops.search.bm25 import Bm25
from realmops.search.embed import text_queries
from realmops.search.embeddings import INDEX, load_index
from realmops.search.exact import PassageIndex
from realmops.stages import READER_INIT, Job
from realmops.stages.common import StageTrainings, build_index, index_options, sample_queries
from realmops.stages.sharded_work import embed_in_shards
from realmops.train.in_batch_negatives import Positives, group_by_passage, train_by_passages
from realmops.train.parallel import process_group

EVIDENCE_DEPTH = 20  # top passages that are searched for the answer of a training question


@dataclass(frozen=True)
class PassageFinder:
    """The retrieval of passages while the reader is trained, and the metrics of its training."""

    retriever: Retriever
    passages: PassageIndex | None
    ranker: Ranker | None
    bm25: Bm25 | None
    metrics: dict[str, int]


def start_models(
    job: Job, snapshot: Snapshot, stage: str
) -> tuple[Retriever, Reader, Reader | ExtractiveReader | None]:
    """Load the retriever that the options name, the reader of ``stage``, and the one of ``reader.init`` to answer with.

    The query tower is a separate copy if only it is trained. For a retriever without embeddings, such as BM25, the
    returned retriever is that of ``stage`` and unused.
    """
    options = job.section(Finetune)
    source = options.retriever if options.retriever in DENSE_RETRIEVERS else stage
    for key, name in (("retriever", source), ("reader", stage)):
        if name not in job.inputs:
            raise ValueError(
                f"finetune.{key} is {name!r}, but that stage was not run; run it or set finetune.{key}=pretrain"
            )
    models = {name: load_models(job.inputs[name], snapshot.vocabulary_hash) for name in {source, stage}}
    retriever, own_reader = models[source][0], models[stage][1]
    reader = _start_reader(job, own_reader)
    if options.retriever not in DENSE_RETRIEVERS:
        retriever.mixture = DENSE_ONLY
    if options.retriever_training == "passages":
        return retriever, own_reader, reader
    return _with_query_copy(retriever), own_reader, reader


def _start_reader(job: Job, own_reader: Reader) -> Reader | ExtractiveReader | None:
    """Return the reader of ``reader.init``; the reader of masked words is ``own_reader``."""
    options, init = job.section(Finetune), job.sections[READER_INIT]
    own_reader.encoder.set_dropout(options.reader_dropout)
    if init == ENCODER:
        return own_reader
    if init == NO_READER:
        return None
    seed = job.section(RunOptions).seed if options.epochs else None
    reader = load_extractive_reader(encoder_folder(init, READER), seed=seed, warn=job.report.warn)
    reader.set_dropout(options.reader_dropout)
    return reader


def _with_query_copy(retriever: Retriever) -> Retriever:
    result = Retriever(copy.deepcopy(retriever.query), retriever.document, retriever.vectors)
    result.mixture = retriever.mixture
    return result


def prepare_retrieval(
    trainings: StageTrainings, retriever: Retriever, reader: Reader, snapshot: Snapshot, questions: list[Question]
) -> PassageFinder:
    """Train the retriever as far as ``retriever_training`` requires before the reader, and index the passages."""
    job = trainings.job
    options, seed = job.section(Finetune), job.section(RunOptions).seed
    metrics: dict[str, int] = {}
    if options.retriever not in DENSE_RETRIEVERS:
        path = None
        if options.retriever == "path":
            path, metrics["questions_with_path"] = _train_paths(trainings, reader, snapshot, questions)
        retriever.to(reader.device)
        return PassageFinder(retriever, None, build_ranker(options.retriever, snapshot, path), None, metrics)
    retriever.to(reader.device)
    index_options(job, len(snapshot) * retriever.vectors, retriever.document.width, reader.device)
    bm25 = Bm25.of(snapshot) if retriever.mixture.lexical else None
    if options.retriever_training == "passages":
        if options.retriever_epochs:
            metrics["passages_with_questions"] = _train_by_passages(trainings, retriever, snapshot, questions)
        if options.reader_training == "passages":  # the query tower is trained further
            retriever = _with_query_copy(retriever)
        embedding_PE = _embed_all(job, retriever, snapshot)
    elif (job.inputs[options.retriever] / INDEX).is_file():  # imported with the model
        embedding_PE = load_index(job.inputs[options.retriever], snapshot)
    else:
        embedding_PE = _embed_all(job, retriever, snapshot)
    texts = [question.question for question in sample_queries(questions, seed)]
    texts = texts or [snapshot.text(passage) for passage in sample_queries(range(len(snapshot)), seed)]
    queries = text_queries(snapshot, texts, options.query_wordpieces)
    passages = build_index(job, embedding_PE, retriever.query, queries, options.retriever_candidates)
    return PassageFinder(retriever, passages, None, bm25, metrics)


def _train_paths(
    trainings: StageTrainings, reader: Reader, snapshot: Snapshot, questions: list[Question]
) -> tuple[PathRetriever, int]:
    job = trainings.job
    options, run = job.section(Finetune), job.section(RunOptions)
    path = PathRetriever.start(reader.encoder, snapshot, options, device_and_dtype(run, reader.encoder)[1], run.seed)
    bar = job.report.progress("questions with paths", len(questions))
    walks = []
    for question in questions:
        walks += [walk] if (walk := path.training_example(question)) else []
        bar(1)
    steps = epoch_steps(len(walks), options.batch_size, options.epochs)
    context = trainings.context(path.dtype, "paths", steps, "paths", "path_")
    train_paths(context, path, walks, options)
    return path, len(walks)


def _train_by_passages(
    trainings: StageTrainings, retriever: Retriever, snapshot: Snapshot, questions: list[Question]
) -> int:
    job = trainings.job
    options = job.section(Finetune)
    positives = _positives(job, snapshot, questions)
    steps = epoch_steps(len(positives), options.retriever_batch_size, options.retriever_epochs)
    dtype = device_and_dtype(job.section(RunOptions), retriever)[1]
    context = trainings.context(dtype, "retriever", steps, "retriever", "retriever_")
    train_by_passages(context, retriever, snapshot, questions, positives, options)
    return len(positives)


def _positives(job: Job, snapshot: Snapshot, questions: list[Question]) -> Positives:
    """Return the relevant passages of each question.

    For a judged question it is the best passage by BM25 of each relevant document, for another one the best among
    BM25's top ``EVIDENCE_DEPTH`` that contains an answer.
    """
    bm25, sources, relevant = Bm25.of(snapshot), SourcePassages(snapshot), RelevantPassages(snapshot)
    bar = job.report.progress("passages of questions", len(questions))
    positives: list[list[int]] = []
    for question in questions:
        if question.match_rule == JUDGED_RULE:
            documents = relevant.passages_of_documents(question)
            positives.append([int(ids[bm25.score_passages(question.question, ids).argmax()]) for ids in documents])
        else:
            _, [ids] = bm25.search([question.question], EVIDENCE_DEPTH)
            excluded = sources.of(question)
            matches = (p for p in ids.tolist() if p not in excluded and relevant.is_relevant(question, p))
            positives.append([*islice(matches, 1)])
        bar(1)
    if not any(positives):
        raise ValueError(
            f"no training question has a relevant document, or an answer in BM25's top {EVIDENCE_DEPTH} passages, so "
            "the retriever cannot be trained on passages; check that questions.train belongs to these documents, or "
            "set finetune.retriever_training=queries"
        )
    return group_by_passage(positives)


def _embed_all(job: Job, retriever: Retriever, snapshot: Snapshot) -> Tensor:
    """Return the embeddings of all passages, P x E; rank 0 computes them and broadcasts them to the others."""
    group = process_group()
    if group.is_main_process:
        embedding_PE = embed_in_shards(job, retriever, snapshot)
    else:
        embedding_PE = torch.empty(len(snapshot), retriever.width)
    group.broadcast([embedding_PE])
    return embedding_PE
