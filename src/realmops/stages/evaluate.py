"""Stage ``evaluate``: exact match, recall before and after, ceilings, predictions with evidence, plots and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realmops import artifacts
from realmops.config import Finetune
from realmops.corpus.questions import Question, read_questions
from realmops.corpus.snapshot import Snapshot
from realmops.evaluate.openqa import (
    Interval,
    Prediction,
    bootstrap_interval,
    closed_book_floor,
    score_predictions,
    write_predictions,
)
from realmops.evaluate.report import write_report
from realmops.evaluate.retrieval import (
    RECALL_AT,
    answer_fits_reader,
    answered_in_corpus,
    bm25_ranking,
    hit_ranks_by_rule,
    hits_at,
    reader_can_answer,
    recall_metrics,
)
from realmops.model.files import load_models
from realmops.stages import JOURNAL, METRICS, Job
from realmops.stages.common import (
    load_index,
    open_snapshot,
    passage_embeddings,
    prepare,
    question_queries,
    rank,
)
from realmops.train.finetune import MATCH_RULE, Answer, OpenQa

PREDICTIONS = "predictions.parquet"
TRAINED = ("ict", "pretrain", "finetune")


def run(job: Job) -> dict[str, Any]:
    """Answer the test questions and write everything that a person wants to see; returns all figures."""
    options: Finetune = job.sections["finetune"]
    seed = job.sections["run"].seed
    device, dtype = prepare(job.sections["run"])
    snapshot = open_snapshot(job)
    questions = read_questions([job.inputs["questions.test"]])
    depth = max(RECALL_AT)
    retriever, reader = load_models(job.inputs["finetune"], snapshot.vocabulary_hash)
    embedding = load_index(job.inputs["finetune"], snapshot)
    model = OpenQa(retriever.to(device), reader.to(device), snapshot, embedding, options, dtype)
    progress = job.report.progress("test questions", len(questions))
    answers = model.answer(questions, ranked=depth, batch_size=32, progress=progress)
    resamples = job.sections["evaluate"].bootstrap
    texts = {q.id: a.text for q, a in zip(questions, answers, strict=True)}
    score = score_predictions(questions, texts, seed=seed, resamples=resamples)
    ranked = _padded([answer.ranked for answer in answers], depth)
    metrics: dict[str, Any] = {"questions": len(questions), **_interval("em", score.em)}
    metrics |= {"closed_book_em": closed_book_floor(read_questions([job.inputs["questions.train"]]), questions)[1]}
    ranks = hit_ranks_by_rule(questions, ranked, snapshot.text)
    metrics |= _retrieval(job, ranks, "")
    metrics["recall_at_5"] = metrics[f"recall_at_5_{MATCH_RULE}"]
    queries = question_queries(snapshot, questions, options.query_wordpieces)
    for name, prefix in (("ict", "before_realm_"), ("pretrain", "zero_shot_")):
        if name not in job.inputs:
            continue  # a fine-tuned model was imported
        zero_shot = load_models(job.inputs[name], snapshot.vocabulary_hash)[0].to(device)
        passages = passage_embeddings(job.inputs[name], zero_shot, snapshot, dtype)
        found = rank(zero_shot, passages, queries, depth, dtype)
        metrics |= _retrieval(job, hit_ranks_by_rule(questions, _padded(found.tolist(), depth), snapshot.text), prefix)
    lexical = bm25_ranking(
        [f"{snapshot.title(i)} {snapshot.text(i)}" for i in range(len(snapshot))],
        [q.question for q in questions],
        depth,
    )
    metrics |= _retrieval(job, hit_ranks_by_rule(questions, lexical, snapshot.text), "bm25_")
    over_bm25 = model.answer(questions, ranked=depth, batch_size=32, given=lexical)
    texts = {q.id: a.text for q, a in zip(questions, over_bm25, strict=True)}
    metrics["bm25_em"] = score_predictions(questions, texts, seed=seed, resamples=resamples).em.mean
    metrics |= _ceilings(snapshot, questions, ranked, hits_at(ranks[MATCH_RULE], depth))
    predictions = [
        _prediction(q, a, snapshot, bool(c)) for q, a, c in zip(questions, answers, score.correct, strict=True)
    ]
    write_predictions(job.out / PREDICTIONS, predictions)
    _report(job, metrics)
    return metrics


def _interval(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _padded(ranked: Sequence[Sequence[int]], depth: int) -> np.ndarray:
    return np.array([[*row] + [-1] * (depth - len(row)) for row in ranked])


def _retrieval(job: Job, ranks: Mapping[str, np.ndarray], prefix: str) -> dict[str, float]:
    """Recall under each match rule, with an interval for recall@5 by token boundaries."""
    hits = hits_at(ranks[MATCH_RULE], 5)
    resamples = job.sections["evaluate"].bootstrap
    interval = bootstrap_interval(hits, seed=job.sections["run"].seed, resamples=resamples)
    name = f"{prefix}recall_at_5_{MATCH_RULE}"
    return recall_metrics(ranks, prefix=prefix) | {f"{name}_low": interval.low, f"{name}_high": interval.high}


def _ceilings(
    snapshot: Snapshot, questions: list[Question], ranked: np.ndarray, known: np.ndarray
) -> dict[str, float]:
    """What the best reader could reach: the share of questions answerable at each narrowing."""

    def count(text: str) -> int:
        return len(snapshot.tokenizer.encode(text, add_special_tokens=False).ids)

    texts = (snapshot.text(i) for i in range(len(snapshot)))
    readable = reader_can_answer(questions, ranked, snapshot.text, snapshot.chars, rule=MATCH_RULE)
    return {
        "ceiling_in_corpus": float(answered_in_corpus(questions, texts, rule=MATCH_RULE, known_Q=known).mean()),
        "ceiling_short_answer": float(answer_fits_reader(questions, count).mean()),
        "ceiling_in_top_5": float(readable.mean()),
    }


def _prediction(question: Question, answer: Answer, snapshot: Snapshot, correct: bool) -> Prediction:
    evidence = snapshot.text(answer.passage) if answer.passage is not None else ""
    return Prediction(
        question_id=question.id,
        question=question.question,
        prediction=answer.text,
        answers=question.answers,
        em=correct,
        passage_ids=tuple(snapshot.passage_id(p) for p in answer.passages),
        titles=tuple(snapshot.title(p) for p in answer.passages),
        p_z=tuple(float(np.exp(value)) for value in answer.log_prior),
        evidence=evidence,
        evidence_rank=answer.passages.index(answer.passage) if answer.passage is not None else -1,
        char_start=answer.characters[0],
        char_end=answer.characters[1],
        span_score=answer.span_score,
    )


def _report(job: Job, metrics: dict[str, Any]) -> None:
    """report.html, plots and the data of ``dvc plots``."""
    stages = [name for name in ("snapshot", *TRAINED) if name in job.inputs]
    known = {name: artifacts.read_json(job.inputs[name] / METRICS) for name in stages}
    journals: list[Path] = [job.inputs[name] / JOURNAL for name in stages]
    write_report(
        job.out,
        journals=[path for path in journals if path.is_file()],
        metrics={**known, "evaluate": metrics},
        predictions=job.out / PREDICTIONS,
    )
