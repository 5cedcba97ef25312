"""Stage ``evaluate``: exact match, F1, recall and nDCG of all retrievers, ceilings, predictions, plots, report."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from realmops import artifacts
from realmops.answering.confidence import Confidence
from realmops.answering.opening import open_tuned
from realmops.answering.retrieval import AnswerModel, Ranker, RetrieveAndRead
from realmops.baselines.rankers import BASELINES, build_ranker
from realmops.baselines.rule import answer_by_rule
from realmops.config import default_options
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype
from realmops.evaluate.calibration import confidence_figures
from realmops.evaluate.ceilings import compute_ceilings
from realmops.evaluate.exact_match import Score, closed_book_floor, em_rules, score_predictions
from realmops.evaluate.predictions import (
    FIRST_HITS,
    PREDICTIONS,
    build_predictions,
    failure_shares,
    write_first_hits,
    write_predictions,
)
from realmops.evaluate.ranking_measures import (
    TREC,
    measure_run,
    passage_depth,
    rank_documents,
    ranking_metrics,
    write_trec,
)
from realmops.evaluate.recall import (
    RECALL_AT,
    ZERO_SHOT,
    Rows,
    first_relevant_ranks,
    hit_ranks_by_rule,
    pad_rankings,
    recall_intervals,
    recall_metrics,
)
from realmops.evaluate.run_report import generated_note, write_report
from realmops.model.retriever_files import RETRIEVER_FOLDER, load_retriever, passage_tower_digest
from realmops.options import Evaluate, Finetune, RunOptions
from realmops.questions.cloze import SourcePassages
from realmops.questions.question_sets import JUDGED_RULE, Question, rows_of_people
from realmops.questions.relevance import RelevantPassages
from realmops.search.approximate import ApproximateIndex, unwrap_approximate
from realmops.search.bm25 import Bm25
from realmops.search.embed import embed, query_sequences
from realmops.search.embeddings import INDEX, indexed_tower, load_index
from realmops.search.exact import PassageIndex, exact_index
from realmops.search.hybrid import HybridSearch
from realmops.stages import HEADLINE, HEADLINE_METRICS, JOURNAL, METRICS, Job
from realmops.stages.common import (
    load_questions,
    load_unanswerable,
    open_snapshot,
    question_queries,
    rank_passages,
    sample_queries,
    warn_of_timeouts,
)
from realmops.stages.sharded_work import embed_in_shards

TRAINED = ("ict", "pretrain", "finetune")
RESAMPLES = 1000  # of the 95 % intervals over questions
HYBRID = "hybrid_"  # infix of metrics of BM25 plus embeddings
DEPTH = max(RECALL_AT)  # passages ranked per question; more if its documents are judged


def run(job: Job) -> dict[str, Any]:
    """Answer the test questions, write predictions and report, and return all metrics.

    EM, F1 and confidence are those of the questions of people; others measure retrieval. Any answer to a question that
    has none counts as wrong in the metrics of abstention alone.
    """
    options = job.section(Finetune)
    bootstrap = {"seed": job.section(RunOptions).seed, "resamples": RESAMPLES}
    snapshot = open_snapshot(job)
    questions = load_questions(job, snapshot, "test")
    match_rule, em_rule = questions[0].match_rule, em_rules(questions)[0]
    model = open_tuned(job.inputs["finetune"], options, job.section(RunOptions), snapshot, BASELINES)
    people = rows_of_people(questions) if model.gives_answers else []
    asked = [questions[row] for row in people]
    relevant = RelevantPassages(snapshot)
    is_judged = match_rule == JUDGED_RULE
    depth = max(DEPTH, passage_depth(relevant.largest_documents)) if is_judged else DEPTH
    bar = job.report.progress("test questions", len(questions))
    answers = model.answer(questions, ranked=depth, progress=bar)

    def score(texts: list[str], rule: str) -> Score:
        return score_predictions(asked, texts, rule=rule, **bootstrap)

    by_people = [answers[row] for row in people]
    scores = {rule: score([answer.text for answer in by_people], rule) for rule in em_rules(questions) if asked}
    metrics: dict[str, Any] = {"questions": len(questions)}
    confidence = Confidence.load(job.inputs["finetune"])
    if asked:
        metrics |= scores[em_rule].figures("")
        metrics |= {f"em_{rule}": result.em.mean for rule, result in scores.items() if len(scores) > 1}
        unanswerable = load_unanswerable(job, snapshot, "test")
        bar = job.report.progress("test questions without answers", len(unanswerable))
        to_abstain = model.answer(unanswerable, progress=bar) if unanswerable else []
        if unanswerable:
            metrics["unanswerable_questions"] = len(unanswerable)
        if confidence is not None:
            correct_Q = np.append(scores[em_rule].correct, np.zeros(len(to_abstain), bool))
            metrics |= confidence_figures(confidence, [*by_people, *to_abstain], correct_Q, **bootstrap)
            if to_abstain:
                metrics["right_abstentions"] = float(np.mean([confidence.abstains(answer) for answer in to_abstain]))
    if not model.gives_answers:
        job.report.log("evaluate: search, not answers: the run has no reader (reader.init is none)")
    elif confidence is None:
        job.report.log(
            "evaluate: the model was not calibrated on dev questions of people: its answers have a score, but no "
            "probability of being right"
        )
    elif confidence.holds_all:
        job.report.log("evaluate: the model abstains on every question: nothing reached the precision of its threshold")
    if generated := sum(question.is_generated for question in questions):
        metrics["generated_questions"] = generated
        job.report.log(f"evaluate: {' '.join(generated_note(metrics))}")
    training = load_questions(job, snapshot, "train")
    trained = {question.question for question in training}
    if overlap := sum(question.question in trained for question in questions):
        job.report.warn(
            f"{overlap} of {len(questions)} test questions are also training questions: their figures are too high"
        )
    if asked and not all(question.is_regex for question in training):
        metrics["closed_book_em"] = closed_book_floor(training, asked)[1]
    if isinstance(model, RetrieveAndRead) and (structure := unwrap_approximate(model.passages)) is not None:
        metrics["index_recall"] = _index_recall(job, model, structure, questions)
    bm25 = build_ranker("bm25", snapshot) if job.section(Evaluate).bm25 else None
    rankings = {"": pad_rankings([answer.ranked for answer in answers], depth)}
    rankings |= _rankings(job, snapshot, questions, model, bm25, depth)
    if bm25 is not None and asked:
        texts = answer_by_rule(snapshot, asked, rankings["bm25_"][people, 0].tolist())
        metrics |= score(texts, em_rule).figures("rule_")
        if isinstance(model, RetrieveAndRead):
            bar = job.report.progress("test questions over BM25's passages", len(asked))
            over_bm25 = model.with_ranker(bm25).answer(asked, ranked=DEPTH, progress=bar)
            metrics |= score([answer.text for answer in over_bm25], em_rule).figures("bm25_")
    hits = {}
    for prefix, ranked in rankings.items():
        if is_judged:
            hits[prefix] = first_relevant_ranks(questions, ranked, relevant.is_relevant)
            continue
        ranks = hit_ranks_by_rule(questions, ranked, snapshot.text)
        metrics |= recall_metrics(ranks, prefix=prefix)
        metrics |= recall_intervals(ranks[match_rule], match_rule, prefix=prefix, **bootstrap)
        hits[prefix] = ranks[match_rule]
    ndcg_of, judged_metrics = _measure_judged(job, questions, relevant, rankings)
    metrics |= judged_metrics
    metrics["recall_at_5"] = metrics[f"recall_at_5_{match_rule}"]
    limits = {"passages": options.reader_candidates, "wordpieces": options.answer_wordpieces}
    if is_judged:
        possible = {"in_corpus": np.array([bool(relevant.passages_of_documents(q)) for q in questions])}
    else:
        possible = compute_ceilings(snapshot, questions, rankings[""], hits[""], match_rule, **limits)
    if options.reads_passages and not is_judged:
        metrics |= {f"ceiling_{name}": limit for name, limit in limits.items()}
        metrics |= {f"ceiling_{name}": float(values.mean()) for name, values in possible.items()}
    else:
        metrics["ceiling_in_corpus"] = float(possible["in_corpus"].mean())
    predictions = build_predictions(
        snapshot,
        questions,
        answers,
        scores.get(em_rule),
        hits[""],
        possible["in_corpus"],
        options.reader_candidates,
        confidence,
        ndcg_of,
    )
    if asked:
        metrics |= failure_shares([prediction.failed_at for prediction in predictions if prediction.failed_at])
    metrics |= warn_of_timeouts(job, questions)
    write_predictions(job.out / PREDICTIONS, predictions)
    write_first_hits(job.out / FIRST_HITS, questions, hits, DEPTH)
    chief = {key: metrics[key] for key in HEADLINE_METRICS["evaluate"] if math.isfinite(metrics.get(key, math.nan))}
    artifacts.write_json(job.out / HEADLINE, chief)
    _report(job, snapshot, metrics)
    return metrics


def _measure_judged(
    job: Job, questions: list[Question], relevant: RelevantPassages, rankings: dict[str, Rows]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Write TREC's files; return nDCG@10 of the model by question id, and the metrics, if documents are judged."""
    qrels = relevant.qrels(questions)
    if not qrels:
        return {}, {}
    if missing := relevant.missing(qrels):
        job.report.warn(
            f"{missing} relevant documents of questions.test are not in the corpus and count as not found; check that "
            "the questions belong to these documents"
        )
    bootstrap = {"seed": job.section(RunOptions).seed, "resamples": RESAMPLES}
    metrics: dict[str, Any] = {"judged_questions": len(qrels)}
    judged = [question for question in questions if question.id in qrels]
    rows = [(row, question.id) for row, question in enumerate(questions) if question.id in qrels]
    runs = {
        prefix: {name: rank_documents(ranked[row].tolist(), relevant.document_of) for row, name in rows}
        for prefix, ranked in rankings.items()
    }
    values = {prefix: measure_run(qrels, run) for prefix, run in runs.items()}
    for prefix, measured in values.items():
        metrics |= ranking_metrics(measured, prefix=prefix, **bootstrap)
    write_trec(job.out / TREC, judged, qrels, runs)
    return dict(zip(qrels, values[""]["ndcg_at_10"].tolist(), strict=True)), metrics


def _rankings(
    job: Job, snapshot: Snapshot, questions: list[Question], model: AnswerModel, bm25: Ranker | None, depth: int
) -> dict[str, Rows]:
    """Rank by every retriever other than the model; source passages of a generated question are left out."""
    deepest = depth + max(len(question.not_in) for question in questions)
    queries = question_queries(snapshot, questions, job.section(Finetune).query_wordpieces)
    rankings: dict[str, Rows] = {}
    if isinstance(model, RetrieveAndRead) and model.hybrid:
        assert model.passages is not None
        rankings["dense_"] = rank_passages(model.retriever, model.passages, queries, deepest, model.dtype)
    indexes: dict[str, PassageIndex] = {}
    if isinstance(model, RetrieveAndRead) and (index := model.passages) is not None:
        indexes[indexed_tower(job.inputs["finetune"])] = (
            exact_index(index.vectors(slice(None)), model.retriever.vectors) if unwrap_approximate(index) else index
        )
    for name, prefix in ZERO_SHOT.items():
        if name in job.inputs:  # absent if a fine-tuned model was imported
            by_kind = _zero_shot(job, name, snapshot, questions, queries, deepest, indexes)
            rankings |= {prefix + kind: ids for kind, ids in by_kind.items()}
    if bm25 is not None:
        rankings["bm25_"] = np.stack([bm25(question.question, deepest) for question in questions])
    sources = SourcePassages(snapshot)
    return {
        prefix: pad_rankings(sources.left_out(questions, ids)[:, :depth].tolist(), depth)
        for prefix, ids in rankings.items()
    }


def _index_recall(job: Job, model: RetrieveAndRead, passages: ApproximateIndex, questions: list[Question]) -> float:
    """Measure the recall of an approximate index against exact search; warn if it is below ``target_recall``."""
    queries = model.queries([question.question for question in sample_queries(questions, job.section(RunOptions).seed)])
    depth = DEPTH * model.retriever.vectors
    recall = passages.recall(embed(model.retriever.query, query_sequences(queries), model.dtype), depth)
    if recall < passages.recipe.target_recall:
        job.report.warn(
            f"the {passages.recipe.type} index has a recall of {recall:.4f} of the exact top {depth} on the test "
            f"questions, below index.target_recall={passages.recipe.target_recall}, which lowers recall and EM; run "
            "finetune again with index.type=exact"
        )
    return recall


def _zero_shot(
    job: Job,
    name: str,
    snapshot: Snapshot,
    questions: list[Question],
    queries: list[np.ndarray],
    depth: int,
    indexes: dict[str, PassageIndex],
) -> dict[str, Rows]:
    """Rank by embeddings and, if the retriever is hybrid, by embeddings plus BM25, by infix of the metrics.

    ``indexes`` caches exact indexes by ``passage_tower_digest``.
    """
    retriever = load_retriever(job.inputs[name], snapshot.vocabulary_hash)
    device, dtype = device_and_dtype(job.section(RunOptions), retriever)
    key = passage_tower_digest(job.inputs[name] / RETRIEVER_FOLDER)
    retriever.to(device)
    if (job.inputs[name] / INDEX).is_file():  # imported
        indexes[key] = exact_index(load_index(job.inputs[name], snapshot), retriever.vectors)
    elif key not in indexes:
        indexes[key] = exact_index(embed_in_shards(job, retriever, snapshot), retriever.vectors)
    passages = indexes[key]
    query_QE = embed(retriever.query, query_sequences(queries), dtype)
    rankings = {"": passages.search(query_QE, depth)[1].cpu().numpy()}
    if retriever.mixture.lexical:
        search = HybridSearch(passages, Bm25.of(snapshot), retriever.mixture, retriever.scale)
        rankings[HYBRID] = search.search(query_QE, [question.question for question in questions], depth).id_QK.numpy()
    return rankings


def _report(job: Job, snapshot: Snapshot, metrics: dict[str, Any]) -> None:
    stages = [name for name in ("snapshot", *TRAINED) if name in job.inputs]
    stage_metrics = {name: artifacts.read_json(job.inputs[name] / METRICS) for name in stages}
    journals: list[Path] = [job.inputs[name] / JOURNAL for name in stages]
    options = _changed_options(job)
    about = {
        "evaluated on": datetime.now(UTC).strftime("%d %B %Y"),
        "corpus": snapshot.corpus_hash[:12],
        "documents": f"{stage_metrics.get('snapshot', {}).get('documents', '?')} in {len(snapshot)} passages",
    }
    if job.presets:
        about["presets"] = ", ".join(job.presets)
    write_report(
        job.out,
        about=about,
        options=options,
        journals=[path for path in journals if path.is_file()],
        metrics={**stage_metrics, "evaluate": metrics},
        predictions=job.out / PREDICTIONS,
    )


def _changed_options(job: Job) -> dict[str, Any]:
    """Return the options of the run that differ from the defaults, by section.key."""
    sections: dict[str, Any] = {}
    manifests = [job.inputs[name] / artifacts.MANIFEST for name in ("snapshot", *TRAINED) if name in job.inputs]
    for path in manifests:  # later stages take precedence
        sections |= artifacts.read_json(path).get("sections", {}) if path.is_file() else {}
    sections |= {name: section.model_dump() for name, section in job.sections.items()}
    default_values = default_options()
    return {
        f"{name}.{key}": value
        for name, keys in sorted(sections.items())
        for key, value in keys.items()
        if default_values.get(name, {}).get(key) != value
    }
