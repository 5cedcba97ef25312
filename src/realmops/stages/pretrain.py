"""Stage ``pretrain``: REALM pre-training with asynchronous index refresh over the exchange."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from realmops.artifacts import seed_for
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype
from realmops.evaluate.recall import first_relevant_ranks
from realmops.journal import JournalValues
from realmops.model.reader_files import copy_models, load_models, save_models
from realmops.model.retriever import Retriever
from realmops.model.retriever_files import TextFormat
from realmops.options import Pretrain, RunOptions
from realmops.questions.cloze import SourcePassages
from realmops.questions.question_sets import answers_are_regex
from realmops.questions.relevance import RelevantPassages
from realmops.search.approximate import RECALL_QUERIES, unwrap_approximate
from realmops.search.bm25 import Bm25
from realmops.search.exact import PassageIndex, exact_index
from realmops.stages import Job
from realmops.stages.common import (
    StageTrainings,
    build_index,
    index_options,
    load_questions,
    open_snapshot,
    open_spans,
    question_queries,
    rank_passages,
)
from realmops.stages.sharded_work import embed_in_shards
from realmops.train import held_out_sentences
from realmops.train.held_out_sentences import BestCheckpoint
from realmops.train.index_source import ExchangeSource, Index, open_exchange
from realmops.train.masked_sentences import Example, Examples
from realmops.train.parallel import process_group
from realmops.train.pretraining import pretrain, retrieval_depth
from realmops.train.realm import Realm


def run(job: Job) -> dict[str, Any]:
    """Pre-train and write both models; return utility, staleness, refreshes, and recall before and after.

    With 0 steps the models of ``ict`` are copied and nothing is measured.
    """
    options, run_options = job.section(Pretrain), job.section(RunOptions)
    if not options.steps:
        if process_group().is_main_process:
            copy_models(job.inputs["ict"], job.out)
        return {}
    if options.steps <= options.retriever_delay:
        job.report.warn(
            f"pretrain: the retriever is not trained: pretrain.steps is {options.steps}, and the first "
            f"pretrain.retriever_delay={options.retriever_delay} steps train only the reader; raise the former or "
            "lower the latter"
        )
    snapshot = open_snapshot(job)
    rows, masked = _held_out(job, snapshot)
    examples = _examples(job, snapshot)
    examples.hold_out(rows)
    retriever, reader = load_models(job.inputs["ict"], snapshot.vocabulary_hash)
    device, dtype = device_and_dtype(run_options, retriever, reader)
    context = StageTrainings(job).context(dtype, "pretrain", options.steps, "pre-training")
    retriever.to(device).train()
    reader.to(device).train()
    bm25 = Bm25.of(snapshot) if retriever.mixture.lexical else None
    realm = Realm(retriever, reader, snapshot, options, dtype, bm25)
    vectors = len(snapshot) * retriever.vectors
    index_options(job, vectors, retriever.query.width, device)  # fails before training
    rng = np.random.default_rng(seed_for(run_options.seed, "index", "queries"))
    sampled = [examples.draw(rng) for _ in range(RECALL_QUERIES)]  # to measure the recall of an approximate index

    def passages(embedding_PE: Tensor, searcher: Retriever) -> PassageIndex:
        return build_index(job, embedding_PE, searcher.query, realm.queries(sampled), retrieval_depth(options))

    best = BestCheckpoint(job.work / "best", TextFormat.of(snapshot))
    measure = _build_measure(job, masked, realm, best)
    with open_exchange(context, options, snapshot, retriever, passages, job.work, job.report.log) as (context, source):
        pretrain(context, realm, examples, source, evaluate=measure, warn=job.report.warn)
    if not context.processes.is_main_process:
        return {}
    final = _final_index(job, retriever, snapshot, options.steps)
    after = measure(final)
    if best.step != options.steps:
        job.report.log(best.describe(after))
        retriever, reader = best.models()
        realm = Realm(retriever.to(device), reader.to(device), snapshot, options, dtype, bm25)
        final, after = _final_index(job, retriever, snapshot, best.step), best.figures
    save_models(job.out, retriever, reader, TextFormat.of(snapshot))
    metrics = _metrics(job, after, source) | {"best_step": best.step}
    if masked:
        metrics |= held_out_sentences.evaluate_masked_words(
            realm, masked, final, job.report.progress("masked sentences", len(masked))
        )
    return metrics


def _examples(job: Job, corpus: Snapshot, **changes: Any) -> Examples:
    """Build the masked sentences of the corpus or, with ``pretrain.examples: warmup``, of the warm-up text."""
    options = job.section(Pretrain).model_copy(update=changes)
    if options.examples == "warmup" and not (job.inputs["snapshot"] / "warmup").is_dir():
        raise ValueError(
            f"pretrain.examples is warmup, but {job.inputs['snapshot']} has no warm-up text; set snapshot.warmup, or "
            "set pretrain.examples=corpus"
        )
    text = corpus if options.examples == "corpus" else open_snapshot(job, "warmup")
    spans = open_spans(job, text, options.examples)
    return Examples(text, spans, options, elsewhere=text is not corpus)


def _held_out(job: Job, snapshot: Snapshot) -> tuple[list[int], list[Example]]:
    """Return the held-out rows of the spans, and their sentences with salient spans masked, for any ``masking``."""
    salient, seed = _examples(job, snapshot, masking="salient", exclude_trivial=True), job.section(RunOptions).seed
    rows = held_out_sentences.held_out_rows(len(salient.rows), seed, salient.options.masked_sentences)
    return rows, held_out_sentences.mask_spans(salient, rows, seed)


def _metrics(job: Job, after: Mapping[str, float], source: ExchangeSource) -> dict[str, Any]:
    logged = JournalValues(job.journal)
    names = ("loss", "retrieval_utility", "retrieval_utility_top", "retrieval_utility_best", "marginal_gain", "p_null")
    metrics: dict[str, Any] = {name: logged.mean(name, last=50) for name in names}
    for name in (name for name in ("recall_at_5", "hit_at_5") if name in after):
        metrics |= {f"{name}_before": (logged.of(name) or [after[name]])[0], f"{name}_after": after[name]}
    spent = sum(logged.of("between_seconds")) + sum(logged.of("step_seconds"))
    return metrics | {
        "refreshes": source.refreshes,
        "index_staleness_steps": logged.mean("staleness_steps"),
        "index_staleness_seconds": logged.mean("staleness_seconds"),
        "top_k_change": logged.mean("top_k_change"),
        **({"index_recall": min(recalls)} if (recalls := logged.of("index_recall")) else {}),
        "wait_share": source.waited / max(spent, 1e-9),
        "collapsed": max(logged.of("collapsed"), default=0.0),
        "dropped_own": sum(logged.of("dropped_own")),
        "dropped_containing": sum(logged.of("dropped_containing")),
        "step_seconds": logged.mean("step_seconds"),
    }


def _build_measure(
    job: Job, masked: list[Example], realm: Realm, best: BestCheckpoint
) -> Callable[[Index], dict[str, float]]:
    """Return a function that measures the models with a newly adopted index and offers them to ``best``.

    It returns recall@5 on the dev questions by embeddings only, hit@5 and log p(y|x) on held-out masked sentences, and
    for an approximate index ``index_recall``, its recall against exact search.
    """
    snapshot = realm.snapshot
    questions = load_questions(job, snapshot, "dev")
    answers_are_regex(questions)  # raises if match rules are mixed
    queries = question_queries(snapshot, questions, realm.options.query_wordpieces)
    sources, relevant = SourcePassages(snapshot), RelevantPassages(snapshot)
    excluded = max(len(question.not_in) for question in questions)

    def measure(index: Index) -> dict[str, float]:
        ids = sources.left_out(
            questions, rank_passages(index.retriever, index.passages, queries, 5 + excluded, realm.dtype)
        )
        hits = first_relevant_ranks(questions, ids, relevant.is_relevant) < 5
        figures = {"recall_at_5": float(hits.mean())}
        if (structure := unwrap_approximate(index.passages)) is not None:
            figures["index_recall"] = structure.recipe.recall
        figures |= held_out_sentences.measure(realm, masked, index)
        best.offer(index.step, figures, index.retriever, realm.reader)
        return figures

    return measure


def _final_index(job: Job, retriever: Retriever, snapshot: Snapshot, step: int) -> Index:
    return Index(
        step, exact_index(embed_in_shards(job, retriever, snapshot), retriever.vectors), retriever, time.time(), True
    )
