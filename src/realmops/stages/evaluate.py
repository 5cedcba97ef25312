"""Stage ``evaluate``: exact match, F1, recall and nDCG of all retrievers, ceilings, predictions, plots, report."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realmops import artifacts
from realmops.answering.answer import Answer
from realmops.answering.confidence import Confidence
from realmops.answering.retrieval import AnswerModel, Ranker, RetrieveAndRead
from realmops.baselines.rankers import build_ranker
from realmops.baselines.rule import answer_by_rule
from realmops.config import parse_sections, recorded_options
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
from realmops.evaluate.run_report import write_report
from realmops.model.retriever_files import RETRIEVER_FOLDER, load_retriever, passage_tower_digest
from realmops.opening import open_tuned
from realmops.options import Evaluate, Finetune, QuestionFiles, RunOptions
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


@dataclass
class Evaluation:
    """State of one evaluation: what its measures share, and what later ones read of earlier ones."""

    job: Job
    snapshot: Snapshot
    model: AnswerModel
    questions: list[Question]
    asked: list[Question]  # those of people: answers to questions generated from the corpus are not scored
    relevant: RelevantPassages
    answers: list[Answer]
    bm25: Ranker | None
    confidence: Confidence | None
    bootstrap: dict[str, int]
    rankings: dict[str, Rows] = field(default_factory=dict)  # passage ids [Q, K] by prefix of the metrics
    hits: dict[str, NDArray[np.int64]] = field(default_factory=dict)  # rank of the first relevant passage, by prefix
    score: Score | None = None  # of ``asked``
    ndcg_of: dict[str, float] = field(default_factory=dict)  # nDCG@10 by question id

    @property
    def rule(self) -> str:
        return self.questions[0].match_rule

    def score_texts(self, texts: Iterable[str], rule: str) -> Score:
        return score_predictions(self.asked, [*texts], rule=rule, **self.bootstrap)


def run(job: Job) -> dict[str, Any]:
    """Answer the test questions, write predictions and report, and return all metrics.

    Questions that nothing answers are in the metrics of abstention alone, where every answer to them is wrong.
    """
    snapshot = open_snapshot(job)
    questions = load_questions(job, snapshot, "test")
    model = open_tuned(job.inputs["finetune"], job.section(Finetune), job.section(RunOptions), snapshot)
    relevant, depth = RelevantPassages(snapshot), DEPTH
    if questions[0].match_rule == JUDGED_RULE:
        depth = max(DEPTH, passage_depth(relevant.largest_documents))
    bar = job.report.progress("test questions", len(questions))
    evaluation = Evaluation(
        job, snapshot, model, questions,
        [questions[row] for row in rows_of_people(questions)] if model.gives_answers else [],
        relevant,
        model.answer(questions, ranked=depth, progress=bar),
        build_ranker("bm25", snapshot) if job.section(Evaluate).bm25 else None,
        Confidence.load(job.inputs["finetune"]),
        {"seed": job.section(RunOptions).seed, "resamples": RESAMPLES},
    )  # fmt: skip
    evaluation.rankings[""] = pad_rankings([answer.ranked for answer in evaluation.answers], depth)
    evaluation.rankings |= _rankings(evaluation, depth)
    metrics: dict[str, Any] = {"questions": len(questions)}
    for measure in (_answers, _confidence, _recall, _baselines, _judged, _ceilings):
        metrics |= measure(evaluation)
    metrics["recall_at_5"] = metrics[f"recall_at_5_{evaluation.rule}"]
    metrics |= warn_of_timeouts(job, questions)
    write_first_hits(job.out / FIRST_HITS, questions, evaluation.hits, DEPTH)
    chief = {key: metrics[key] for key in HEADLINE_METRICS["evaluate"] if math.isfinite(metrics.get(key, math.nan))}
    artifacts.write_json(job.out / HEADLINE, chief)
    _report(job, snapshot, metrics)
    return metrics


def _answers(evaluation: Evaluation) -> dict[str, Any]:
    """Return EM and F1, and EM of the most frequent training answer."""
    job, questions = evaluation.job, evaluation.questions
    metrics: dict[str, Any] = {}
    if generated := sum(question.is_generated for question in questions):
        metrics["generated_questions"] = generated
    tuning, named = recorded_options(job.inputs["finetune"]), job.section(QuestionFiles).train
    if tuning and tuning.questions.train != named:
        job.report.warn(
            f"questions.train is {named}, but the model was fine-tuned with questions.train="
            f"{tuning.questions.train}; evaluate with the --set, --preset and --params of the training"
        )
    training = load_questions(job, evaluation.snapshot, "train")
    trained = {question.question for question in training}
    if overlap := sum(question.question in trained for question in questions):
        job.report.warn(
            f"{overlap} of {len(questions)} test questions are also training questions: their figures are too high"
        )
    if not evaluation.asked:
        return metrics
    texts = [a.text for a, q in zip(evaluation.answers, questions, strict=True) if q.measures_answers]
    scores = {rule: evaluation.score_texts(texts, rule) for rule in em_rules(questions)}
    evaluation.score = next(iter(scores.values()))
    metrics |= evaluation.score.figures("")
    metrics |= {f"em_{rule}": result.em.mean for rule, result in scores.items() if len(scores) > 1}
    if not all(question.is_regex for question in training):
        metrics["closed_book_em"] = closed_book_floor(training, evaluation.asked)[1]
    return metrics


def _confidence(evaluation: Evaluation) -> dict[str, Any]:
    job, model, confidence = evaluation.job, evaluation.model, evaluation.confidence
    if evaluation.score is None:
        return {}
    unanswerable = load_unanswerable(job, evaluation.snapshot, "test")
    metrics: dict[str, Any] = {"unanswerable_questions": len(unanswerable)} if unanswerable else {}
    bar = job.report.progress("test questions without answers", len(unanswerable))
    to_abstain = model.answer(unanswerable, progress=bar) if unanswerable else []
    if confidence is not None:
        pairs = zip(evaluation.answers, evaluation.questions, strict=True)
        answers = [*(answer for answer, question in pairs if question.measures_answers), *to_abstain]
        correct_Q = np.append(evaluation.score.correct, np.zeros(len(to_abstain), bool))
        metrics |= confidence_figures(confidence, answers, correct_Q, **evaluation.bootstrap)
        if to_abstain:
            metrics["right_abstentions"] = float(np.mean([confidence.abstains(answer) for answer in to_abstain]))
    return metrics


def _recall(evaluation: Evaluation) -> dict[str, Any]:
    """Return recall@k of every ranking, unless documents are judged, and of an approximate index."""
    questions, rule, model = evaluation.questions, evaluation.rule, evaluation.model
    metrics: dict[str, Any] = {}
    for prefix, ranked in evaluation.rankings.items():
        if rule == JUDGED_RULE:
            evaluation.hits[prefix] = first_relevant_ranks(questions, ranked, evaluation.relevant.is_relevant)
            continue
        ranks = hit_ranks_by_rule(questions, ranked, evaluation.snapshot.text)
        metrics |= recall_metrics(ranks, prefix=prefix)
        metrics |= recall_intervals(ranks[rule], rule, prefix=prefix, **evaluation.bootstrap)
        evaluation.hits[prefix] = ranks[rule]
    if isinstance(model, RetrieveAndRead) and (structure := unwrap_approximate(model.passages)) is not None:
        metrics["index_recall"] = _index_recall(evaluation.job, model, structure, questions)
    return metrics


def _baselines(evaluation: Evaluation) -> dict[str, Any]:
    """Return EM and F1 of the rule-based reader and of the reader over BM25's passages."""
    model, bm25, asked = evaluation.model, evaluation.bm25, evaluation.asked
    if bm25 is None or not asked:
        return {}
    rule, people = em_rules(evaluation.questions)[0], rows_of_people(evaluation.questions)
    by_rule = answer_by_rule(evaluation.snapshot, asked, evaluation.rankings["bm25_"][people, 0].tolist())
    metrics: dict[str, Any] = evaluation.score_texts(by_rule, rule).figures("rule_")
    if isinstance(model, RetrieveAndRead):
        bar = evaluation.job.report.progress("test questions over BM25's passages", len(asked))
        over_bm25 = model.with_ranker(bm25).answer(asked, ranked=DEPTH, progress=bar)
        metrics |= evaluation.score_texts([answer.text for answer in over_bm25], rule).figures("bm25_")
    return metrics


def _judged(evaluation: Evaluation) -> dict[str, Any]:
    """Return the measures of ranked documents for questions with judgements, and write TREC's files."""
    job, relevant, questions = evaluation.job, evaluation.relevant, evaluation.questions
    qrels = relevant.qrels(questions)
    if not qrels:
        return {}
    if missing := relevant.missing(qrels):
        job.report.warn(
            f"{missing} relevant documents of questions.test are not in the corpus and count as not found; check that "
            "the questions belong to these documents"
        )
    metrics: dict[str, Any] = {"judged_questions": len(qrels)}
    judged = [(row, question) for row, question in enumerate(questions) if question.id in qrels]
    runs = {
        prefix: {q.id: rank_documents(ranked[row].tolist(), relevant.document_of) for row, q in judged}
        for prefix, ranked in evaluation.rankings.items()
    }
    for prefix, run in runs.items():
        values = measure_run(qrels, run)
        metrics |= ranking_metrics(values, prefix=prefix, **evaluation.bootstrap)
        if not prefix:
            evaluation.ndcg_of = dict(zip(qrels, values["ndcg_at_10"].tolist(), strict=True))
    write_trec(job.out / TREC, [question for _, question in judged], qrels, runs)
    return metrics


def _ceilings(evaluation: Evaluation) -> dict[str, Any]:
    """Return the upper bounds of EM and the share of questions that failed at each step, and write the predictions."""
    job, questions, options = evaluation.job, evaluation.questions, evaluation.job.section(Finetune)
    limits = {"passages": options.reader_candidates, "wordpieces": options.answer_wordpieces}
    if evaluation.rule == JUDGED_RULE:
        possible = {"in_corpus": np.array([bool(evaluation.relevant.passages_of_documents(q)) for q in questions])}
    else:
        possible = compute_ceilings(
            evaluation.snapshot, questions, evaluation.rankings[""], evaluation.hits[""], evaluation.rule, **limits
        )
    metrics: dict[str, Any] = {}
    if options.reads_passages and evaluation.rule != JUDGED_RULE:
        metrics |= {f"ceiling_{name}": limit for name, limit in limits.items()}
        metrics |= {f"ceiling_{name}": float(values.mean()) for name, values in possible.items()}
    else:
        metrics["ceiling_in_corpus"] = float(possible["in_corpus"].mean())
    predictions = build_predictions(
        evaluation.snapshot, questions, evaluation.answers, evaluation.score, evaluation.hits[""],
        possible["in_corpus"], options.reader_candidates, evaluation.confidence, evaluation.ndcg_of,
    )  # fmt: skip
    write_predictions(job.out / PREDICTIONS, predictions)
    failures = [prediction.failed_at for prediction in predictions if prediction.failed_at]
    return metrics | (failure_shares(failures) if evaluation.asked else {})


def _rankings(evaluation: Evaluation, depth: int) -> dict[str, Rows]:
    """Rank by every retriever other than the model; source passages of a generated question are left out."""
    job, snapshot, questions = evaluation.job, evaluation.snapshot, evaluation.questions
    model, bm25 = evaluation.model, evaluation.bm25
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
    job: Job, name: str, snapshot: Snapshot, questions: list[Question], queries: list[np.ndarray], depth: int,
    indexes: dict[str, PassageIndex],
) -> dict[str, Rows]:  # fmt: skip
    """Rank by embeddings and, if the retriever is hybrid, by embeddings plus BM25; by infix of the metrics.

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
    paths = [job.inputs[name] / artifacts.MANIFEST for name in ("snapshot", *TRAINED) if name in job.inputs]
    layers = [(str(path), artifacts.read_json(path).get("sections", {})) for path in paths if path.is_file()]
    own = {name: section.model_dump() for name, section in job.sections.items()}
    changed = parse_sections(*layers, ("evaluate", own)).model_dump(exclude_defaults=True)
    return {f"{name}.{key}": value for name, keys in sorted(changed.items()) for key, value in keys.items()}
