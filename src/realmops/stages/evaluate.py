"""Stage ``evaluate``: exact match, F1, recall of all retrievers, ceilings, predictions with evidence, plots, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realmops import artifacts
from realmops.config import Finetune
from realmops.corpus.cloze import Sources
from realmops.corpus.questions import Question, read_questions
from realmops.corpus.snapshot import Snapshot
from realmops.evaluate.ceilings import answer_fits_reader, answered_in_corpus, reader_can_answer
from realmops.evaluate.compare import FIRST_HITS, PREDICTIONS
from realmops.evaluate.explain import failed_at, failure_shares
from realmops.evaluate.openqa import (
    Interval,
    Prediction,
    Score,
    bootstrap_interval,
    closed_book_floor,
    em_rules,
    score_predictions,
    write_first_hits,
    write_predictions,
)
from realmops.evaluate.report import write_report
from realmops.evaluate.retrieval import (
    RECALL_AT,
    SHOWN_AT,
    hit_ranks_by_rule,
    hits_at,
    recall_metrics,
)
from realmops.evaluate.rule import nearest_span
from realmops.index.approximate import Approximate
from realmops.index.embed import embed, query_sequences
from realmops.index.hybrid import Hybrid
from realmops.index.lexical import Bm25
from realmops.index.mips import Exact
from realmops.model.files import load_models
from realmops.stages import JOURNAL, METRICS, Job
from realmops.stages.common import (
    open_snapshot,
    passage_embeddings,
    prepare,
    question_queries,
    rank,
    sampled,
    warn_of_timeouts,
)
from realmops.stages.retrievers import open_tuned, ranker_of
from realmops.train.closed_book import SAID_TOGETHER, ClosedBook
from realmops.train.finetune import ANSWERED_TOGETHER, Answer, OpenQa

TRAINED = ("ict", "pretrain", "finetune")
ZERO_SHOT = {"ict": "before_realm_", "pretrain": "zero_shot_"}  # what recall is called of retrievers not fine-tuned
HYBRID = "hybrid_"  # behind that, where words count beside embeddings


def run(job: Job) -> dict[str, Any]:
    """Answer the test questions and write everything that a person wants to see; returns all figures."""
    options: Finetune = job.sections["finetune"]
    dtype = prepare(job.sections["run"])[1]
    snapshot = open_snapshot(job)
    form = job.sections["questions"].format
    questions = read_questions([job.inputs["questions.test"]], format=form)
    rule, em_rule = questions[0].match_rule, em_rules(questions)[0]
    depth = max(RECALL_AT)
    sources = Sources(snapshot)
    model, answers = _answers(job, snapshot, questions, depth)
    right = _scores(job, questions, [answer.text for answer in answers])
    ranked = _padded([answer.ranked for answer in answers], depth)
    metrics: dict[str, Any] = {"questions": len(questions), **_figures("", right[em_rule])}
    metrics |= {f"em_{name}": score.em.mean for name, score in right.items() if len(right) > 1}
    if cloze := sum(bool(question.not_in) for question in questions):
        metrics["cloze_questions"] = cloze
        job.report.say(
            f"evaluate: {cloze} of {len(questions)} test questions were made from the corpus: exact match says whether "
            "the training worked, not how well questions of people are answered"
        )
    training = read_questions([job.inputs["questions.train"]], format=form)
    _warn_of_other_questions(job, training, questions)
    if not all(question.is_regex for question in training):
        metrics["closed_book_em"] = closed_book_floor(training, questions)[1]
    queries = question_queries(snapshot, questions, options.query_wordpieces)
    if model is not None and isinstance(model.passages, Approximate):
        metrics["index_recall"] = _index_recall(job, model, model.passages, queries, depth)
    rankings = {"": ranked}
    if model is not None and model.hybrid:
        assert model.passages is not None
        rankings["dense_"] = rank(model.retriever, model.passages, queries, depth, dtype)
    for name, prefix in ZERO_SHOT.items():
        if name in job.inputs:  # not where a fine-tuned model was imported
            found = _zero_shot(job, name, snapshot, questions, queries, depth)
            rankings |= {prefix + kind: ids for kind, ids in found.items()}
    if job.sections["evaluate"].bm25:
        bm25 = ranker_of(replace(options, retriever="bm25"), snapshot)
        assert bm25 is not None
        found_by_words = np.stack([bm25(question.question, depth) for question in questions])
        rankings["bm25_"] = sources.left_out(questions, found_by_words)
        by_rule = _by_rule(snapshot, questions, rankings["bm25_"][:, 0].tolist())
        metrics |= _figures("rule_", _scores(job, questions, by_rule)[em_rule])
        if model is not None:
            reading = OpenQa(model.retriever, model.reader, snapshot, None, options, model.dtype, bm25)
            over_bm25 = reading.answer(questions, ranked=depth, batch_size=ANSWERED_TOGETHER)
            metrics |= _figures("bm25_", _scores(job, questions, [a.text for a in over_bm25])[em_rule])
    hits = {
        prefix: _hit_ranks(questions, _padded(sources.left_out(questions, ids).tolist(), depth), snapshot)
        for prefix, ids in rankings.items()
    }
    for prefix, found_at in hits.items():
        metrics |= _retrieval(job, found_at, rule, prefix)
    metrics["recall_at_5"] = metrics[f"recall_at_5_{rule}"]
    ranks = hits[""]
    ceilings = _ceilings(snapshot, questions, ranked, hits_at(ranks[rule], depth), rule)
    metrics |= {f"ceiling_{name}": float(values.mean()) for name, values in ceilings.items()}
    failures = [
        failed_at(
            correct=bool(right[em_rule].correct[i]),
            in_corpus=bool(ceilings["in_corpus"][i]),
            retrieved=bool(ranks[rule][i] < options.reader_candidates),
            choosable=answer.best_gold is not None,
        )
        for i, answer in enumerate(answers)
    ]
    metrics |= failure_shares(failures)
    predictions = [
        _prediction(snapshot, *row)
        for row in zip(
            questions, answers, right[em_rule].correct, right[em_rule].f1_Q, ranks[rule], failures, strict=True
        )
    ]
    metrics |= warn_of_timeouts(job, questions)
    write_predictions(job.out / PREDICTIONS, predictions)
    write_first_hits(job.out / FIRST_HITS, questions, {prefix: found[rule] for prefix, found in hits.items()}, depth)
    _report(job, metrics)
    return metrics


def _index_recall(job: Job, model: OpenQa, passages: Approximate, queries: list[np.ndarray], depth: int) -> float:
    """What an approximate index finds of the exact search's passages; warned of when that is less than was wanted."""
    chosen = query_sequences(sampled(queries, job.sections["run"].seed))
    recall = passages.recall(embed(model.retriever.query, chosen, model.dtype), depth)
    if recall < passages.recipe.target_recall:
        job.report.warn(
            f"the {passages.recipe.type} index finds {recall:.4f} of the exact top {depth} for the test questions, "
            f"index.target_recall was {passages.recipe.target_recall}: recall and EM are too low by that; run finetune "
            "again with index.type=exact"
        )
    return recall


def _warn_of_other_questions(job: Job, training: list[Question], questions: list[Question]) -> None:
    """Say it when the model was trained on others than ``questions.train`` names, or on the test questions."""
    path = job.inputs["finetune"] / artifacts.MANIFEST  # an update is not finished yet
    manifest = artifacts.read_json(path) if path.is_file() else {}
    trained_on = manifest.get("sections", {}).get("questions", {}).get("train")
    named = job.sections["questions"].train
    if trained_on not in (None, named):
        job.report.warn(
            f"the model was fine-tuned with questions.train={trained_on}, and now that is {named}: were --set, "
            "--preset or --params of the training left out?"
        )
    known = {question.question for question in training}
    if seen := sum(question.question in known for question in questions):
        job.report.warn(f"{seen} of {len(questions)} test questions are training questions too: EM is too high")


def _answers(job: Job, snapshot: Snapshot, questions: list[Question], depth: int) -> tuple[OpenQa | None, list[Answer]]:
    """The fine-tuned model, None where it reads nothing, and its answers with the first ``depth`` passages of each."""
    options: Finetune = job.sections["finetune"]
    device, dtype = prepare(job.sections["run"])
    tuned = job.inputs["finetune"]
    progress = job.report.progress("test questions", len(questions))
    if options.reader == "t5":
        book = ClosedBook.load(tuned, snapshot)
        book.net.to(device)
        nothing = [-1] * depth
        said = book.answer(questions, batch_size=SAID_TOGETHER, progress=progress)
        return None, [Answer(None, [], None, [], [], nothing, text, log_p) for text, log_p in said]
    model = open_tuned(tuned, options, snapshot, device, dtype)
    return model, model.answer(questions, ranked=depth, batch_size=ANSWERED_TOGETHER, progress=progress)


def _zero_shot(
    job: Job, name: str, snapshot: Snapshot, questions: list[Question], queries: list[np.ndarray], depth: int
) -> dict[str, np.ndarray]:
    """The first passages by the embeddings of a stage's retriever and, where it is one, by its hybrid, ids [Q, K]."""
    device, dtype = prepare(job.sections["run"])
    retriever = load_models(job.inputs[name], snapshot.vocabulary_hash)[0].to(device)
    passages = Exact(passage_embeddings(job.inputs[name], retriever, snapshot, dtype))
    query_QE = embed(retriever.query, query_sequences(queries), dtype)
    found = {"": passages.search(query_QE, depth)[1].cpu().numpy()}
    if retriever.mixture.lexical:
        search = Hybrid(passages, Bm25.of(snapshot), retriever.mixture, retriever.scale)
        found[HYBRID] = search.search(query_QE, [question.question for question in questions], depth).id_QK.numpy()
    return found


def _by_rule(snapshot: Snapshot, questions: list[Question], first: list[int]) -> list[str]:
    """The answers that ``nearest_span`` finds in one passage of each question."""
    texts = snapshot.texts(first)
    answers = []
    for question, passage in zip(questions, first, strict=True):
        text = texts[passage] if passage >= 0 else ""
        span = nearest_span(question.question, text)
        answers.append(text[slice(*span)] if span else "")
    return answers


def _scores(job: Job, questions: list[Question], said: list[str]) -> dict[str, Score]:
    """The score of an answer to each question under each rule for these questions."""
    texts = {question.id: text for question, text in zip(questions, said, strict=True)}
    seed, resamples = job.sections["run"].seed, job.sections["evaluate"].bootstrap
    return {
        rule: score_predictions(questions, texts, seed=seed, rule=rule, resamples=resamples)
        for rule in em_rules(questions)
    }


def _figures(prefix: str, score: Score) -> dict[str, float]:
    return _interval(f"{prefix}em", score.em) | _interval(f"{prefix}f1", score.f1)


def _interval(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _hit_ranks(
    questions: Sequence[Question], ranked_QK: NDArray[np.integer[Any]], snapshot: Snapshot
) -> dict[str, NDArray[np.int64]]:
    """``hit_ranks_by_rule`` over texts that are read in the order of the file."""
    return hit_ranks_by_rule(questions, ranked_QK, snapshot.texts(ranked_QK.ravel().tolist()).__getitem__)


def _padded(ranked: Sequence[Sequence[int]], depth: int) -> np.ndarray:
    return np.array([[*row] + [-1] * (depth - len(row)) for row in ranked])


def _retrieval(job: Job, ranks: Mapping[str, np.ndarray], rule: str, prefix: str) -> dict[str, float]:
    """Recall under each match rule, by ``rule`` with intervals for ``SHOWN_AT``."""
    seed, resamples = job.sections["run"].seed, job.sections["evaluate"].bootstrap
    found = recall_metrics(ranks, prefix=prefix)
    for k in SHOWN_AT:
        interval = bootstrap_interval(hits_at(ranks[rule], k), seed=seed, resamples=resamples)
        found |= _interval(f"{prefix}recall_at_{k}_{rule}", interval)
    return found


def _ceilings(
    snapshot: Snapshot, questions: list[Question], ranked: np.ndarray, known: np.ndarray, rule: str
) -> dict[str, np.ndarray]:
    """What the best reader could reach: which questions are answerable at each narrowing."""

    def count(text: str) -> int:
        return len(snapshot.tokenizer.encode(text, add_special_tokens=False).ids)

    texts = (snapshot.text(i) for i in range(len(snapshot)))
    found = {
        "in_corpus": answered_in_corpus(questions, texts, rule=rule, known_Q=known),
        "in_top_5": reader_can_answer(questions, ranked, snapshot.text, snapshot.chars, rule=rule),
    }
    if not questions[0].is_regex:  # an expression has no length
        found["short_answer"] = answer_fits_reader(questions, count)
    return found


def _prediction(
    snapshot: Snapshot, question: Question, answer: Answer, correct: bool, f1: float, first_hit: int, failure: str
) -> Prediction:
    best, gold = answer.best, answer.best_gold
    return Prediction(
        question_id=question.id,
        question=question.question,
        prediction=answer.text,
        answers=question.answers,
        em=bool(correct),
        f1=float(f1),
        passage_ids=tuple(snapshot.passage_id(p) for p in answer.passages),
        titles=tuple(snapshot.title(p) for p in answer.passages),
        p_z=tuple(float(np.exp(value)) for value in answer.log_prior),
        evidence=snapshot.text(best.passage) if best else "",
        evidence_rank=answer.passages.index(best.passage) if best else -1,
        char_start=best.characters[0] if best else 0,
        char_end=best.characters[1] if best else 0,
        span_score=best.score if best else answer.said_log_p,
        passage_spans=tuple(span.text if span else None for span in answer.best_of_passage),
        passage_scores=tuple(span.score if span else None for span in answer.best_of_passage),
        gold_span=gold.text if gold else None,
        gold_score=gold.score if gold else None,
        first_hit=int(first_hit) if first_hit < len(answer.ranked) else -1,
        failed_at=failure,
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
