"""Stage ``evaluate``: exact match, F1, recall of all retrievers, ceilings, predictions with evidence, plots, report."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from realmops import artifacts
from realmops.answering.confidence import Confidence
from realmops.answering.retrieval import Answering, Ranker, RetrieveAndRead
from realmops.baselines.rankers import ranker_of
from realmops.baselines.rule import answers_by_rule
from realmops.config import Evaluate, Finetune, QuestionFiles, RunOptions, defaults
from realmops.corpus.cloze import Sources
from realmops.corpus.question_sets import Question
from realmops.corpus.snapshot_reader import Snapshot
from realmops.devices import device_and_dtype
from realmops.evaluate.calibration import confidence_figures
from realmops.evaluate.ceilings import ceilings
from realmops.evaluate.exact_match import Score, closed_book_floor, em_rules, score_predictions
from realmops.evaluate.predictions import (
    FIRST_HITS,
    PREDICTIONS,
    failure_shares,
    predictions_of,
    write_first_hits,
    write_predictions,
)
from realmops.evaluate.recall import (
    RECALL_AT,
    ZERO_SHOT,
    Rows,
    hit_ranks_by_rule,
    padded,
    recall_intervals,
    recall_metrics,
)
from realmops.evaluate.run_report import write_report
from realmops.model.checkpoint_files import cpu_state, load_models
from realmops.model.retriever import Retriever
from realmops.search.approximate import Approximate, approximate
from realmops.search.bm25 import Bm25
from realmops.search.embed import embed, query_sequences
from realmops.search.embeddings import INDEX, load_index
from realmops.search.exact import PassageIndex, exact
from realmops.search.hybrid import Hybrid
from realmops.stages import JOURNAL, METRICS, Job
from realmops.stages.common import open_snapshot, question_queries, questions_of, rank, sampled, warn_of_timeouts
from realmops.stages.sharded_work import embeddings_of
from realmops.stages.tuned_model import open_tuned

TRAINED = ("ict", "pretrain", "finetune")
HYBRID = "hybrid_"  # behind that, where words count beside embeddings
DEPTH = max(RECALL_AT)


def run(job: Job) -> dict[str, Any]:
    """Answer the test questions and write everything that a person wants to see; returns all figures."""
    options = job.section(Finetune)
    bootstrap = {"seed": job.section(RunOptions).seed, "resamples": job.section(Evaluate).bootstrap}
    snapshot = open_snapshot(job)
    questions = questions_of(job, snapshot, "test")
    match_rule, em_rule = questions[0].match_rule, em_rules(questions)[0]
    model = open_tuned(job.inputs["finetune"], options, snapshot, *device_and_dtype(job.section(RunOptions)))
    bar = job.report.progress("test questions", len(questions))
    answers = model.answer(questions, ranked=DEPTH, progress=bar)

    def score(said: list[str], rule: str) -> Score:
        return score_predictions(questions, said, rule=rule, **bootstrap)

    right = {rule: score([answer.text for answer in answers], rule) for rule in em_rules(questions)}
    metrics: dict[str, Any] = {"questions": len(questions), **right[em_rule].figures("")}
    metrics |= {f"em_{rule}": found.em.mean for rule, found in right.items() if len(right) > 1}
    confidence = Confidence.load(job.inputs["finetune"])
    if confidence is None:
        job.report.say("evaluate: the model was not calibrated on dev questions, so its answers have no confidence")
    else:
        metrics |= confidence_figures(confidence, answers, right[em_rule].correct, **bootstrap)
        if confidence.holds_all:
            job.report.say("evaluate: every answer is held back: none reached wanted_precision at the calibration")
    if cloze := sum(bool(question.not_in) for question in questions):
        metrics["cloze_questions"] = cloze
        job.report.say(
            f"evaluate: {cloze} of {len(questions)} test questions were made from the corpus: exact match says whether "
            "the training worked, not how well questions of people are answered"
        )
    training = questions_of(job, snapshot, "train")
    _warn_of_other_questions(job, training, questions)
    if not all(question.is_regex for question in training):
        metrics["closed_book_em"] = closed_book_floor(training, questions)[1]
    if isinstance(model, RetrieveAndRead) and (structure := approximate(model.passages)) is not None:
        metrics["index_recall"] = _index_recall(job, model, structure, questions)
    bm25 = ranker_of("bm25", snapshot) if job.section(Evaluate).bm25 else None
    rankings = {"": padded([answer.ranked for answer in answers], DEPTH)}
    rankings |= _rankings(job, snapshot, questions, model, bm25)
    if bm25 is not None:
        texts = answers_by_rule(snapshot, questions, rankings["bm25_"][:, 0].tolist())
        metrics |= score(texts, em_rule).figures("rule_")
        if isinstance(model, RetrieveAndRead):
            bar = job.report.progress("the same over BM25's passages", len(questions))
            over_bm25 = model.over(bm25).answer(questions, ranked=DEPTH, progress=bar)
            metrics |= score([answer.text for answer in over_bm25], em_rule).figures("bm25_")
    hits = {}
    for prefix, ranked in rankings.items():
        texts_in_order = snapshot.texts(ranked.ravel().tolist())  # read in the order of the file
        ranks = hit_ranks_by_rule(questions, ranked, texts_in_order.__getitem__)
        metrics |= recall_metrics(ranks, prefix=prefix)
        metrics |= recall_intervals(ranks[match_rule], match_rule, prefix=prefix, **bootstrap)
        hits[prefix] = ranks[match_rule]
    metrics["recall_at_5"] = metrics[f"recall_at_5_{match_rule}"]
    limits = {"passages": options.reader_candidates, "wordpieces": options.answer_wordpieces}
    possible = ceilings(snapshot, questions, rankings[""], hits[""], match_rule, **limits)
    if options.reads_passages:
        metrics |= {f"ceiling_{name}": limit for name, limit in limits.items()}
        metrics |= {f"ceiling_{name}": float(values.mean()) for name, values in possible.items()}
    else:
        metrics["ceiling_in_corpus"] = float(possible["in_corpus"].mean())
    predictions = predictions_of(
        snapshot,
        questions,
        answers,
        right[em_rule],
        hits[""],
        possible["in_corpus"],
        options.reader_candidates,
        confidence,
    )
    metrics |= failure_shares([prediction.failed_at for prediction in predictions])
    metrics |= warn_of_timeouts(job, questions)
    write_predictions(job.out / PREDICTIONS, predictions)
    write_first_hits(job.out / FIRST_HITS, questions, hits, DEPTH)
    _report(job, snapshot, metrics)
    return metrics


def _rankings(
    job: Job, snapshot: Snapshot, questions: list[Question], model: Answering, bm25: Ranker | None
) -> dict[str, Rows]:
    """The first passages by every retriever beside the model, by its prefix in the metrics, [Q, K].

    Passages that a question was made from are left out, and others take their places.
    """
    depth = DEPTH + max(len(question.not_in) for question in questions)
    queries = question_queries(snapshot, questions, job.section(Finetune).query_wordpieces)
    found: dict[str, Rows] = {}
    if isinstance(model, RetrieveAndRead) and model.hybrid:
        assert model.passages is not None
        found["dense_"] = rank(model.retriever, model.passages, queries, depth, model.dtype)
    made: dict[str, PassageIndex] = {}
    if isinstance(model, RetrieveAndRead) and (own := model.passages) is not None:
        learned = load_models(job.inputs["finetune"], snapshot.vocabulary_hash)[0]  # the model's own is rounded
        made[_embeds_as(learned)] = exact(own.vectors(slice(None)), learned.vectors) if approximate(own) else own
    for name, prefix in ZERO_SHOT.items():
        if name in job.inputs:  # not where a fine-tuned model was imported
            by_kind = _zero_shot(job, name, snapshot, questions, queries, depth, made)
            found |= {prefix + kind: ids for kind, ids in by_kind.items()}
    if bm25 is not None:
        found["bm25_"] = np.stack([bm25(question.question, depth) for question in questions])
    sources = Sources(snapshot)
    return {
        prefix: padded(sources.left_out(questions, ids)[:, :DEPTH].tolist(), DEPTH) for prefix, ids in found.items()
    }


def _index_recall(job: Job, model: RetrieveAndRead, passages: Approximate, questions: list[Question]) -> float:
    """What an approximate index finds of the exact search's passages; warned of when that is less than was wanted."""
    chosen = model.queries([question.question for question in sampled(questions, job.section(RunOptions).seed)])
    depth = DEPTH * model.retriever.vectors
    recall = passages.recall(embed(model.retriever.query, query_sequences(chosen), model.dtype), depth)
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
    named = job.section(QuestionFiles).train
    if trained_on not in (None, named):
        job.report.warn(
            f"the model was fine-tuned with questions.train={trained_on}, and now that is {named}: were --set, "
            "--preset or --params of the training left out?"
        )
    known = {question.question for question in training}
    if seen := sum(question.question in known for question in questions):
        job.report.warn(f"{seen} of {len(questions)} test questions are training questions too: EM is too high")


def _embeds_as(retriever: Retriever) -> str:
    """The same for two retrievers that give a passage the same embedding."""
    return hashlib.sha256(save(cpu_state(retriever.document)) + str(retriever.vectors).encode()).hexdigest()


def _zero_shot(
    job: Job,
    name: str,
    snapshot: Snapshot,
    questions: list[Question],
    queries: list[np.ndarray],
    depth: int,
    made: dict[str, PassageIndex],
) -> dict[str, Rows]:
    """The first passages by the embeddings of a stage's retriever and, where it is one, by its hybrid, ids [Q, K].

    ``made`` has the exact indexes that are there, by ``_embeds_as``, and takes those that are made here.
    """
    device, dtype = device_and_dtype(job.section(RunOptions))
    retriever = load_models(job.inputs[name], snapshot.vocabulary_hash)[0]
    key = _embeds_as(retriever)
    retriever.to(device)
    if (job.inputs[name] / INDEX).is_file():  # imported
        made[key] = exact(load_index(job.inputs[name], snapshot), retriever.vectors)
    elif key not in made:
        made[key] = exact(embeddings_of(job, retriever, snapshot), retriever.vectors)
    passages = made[key]
    query_QE = embed(retriever.query, query_sequences(queries), dtype)
    found = {"": passages.search(query_QE, depth)[1].cpu().numpy()}
    if retriever.mixture.lexical:
        search = Hybrid(passages, Bm25.of(snapshot), retriever.mixture, retriever.scale)
        found[HYBRID] = search.search(query_QE, [question.question for question in questions], depth).id_QK.numpy()
    return found


def _report(job: Job, snapshot: Snapshot, metrics: dict[str, Any]) -> None:
    """report.html, plots and the data of ``dvc plots``."""
    stages = [name for name in ("snapshot", *TRAINED) if name in job.inputs]
    known = {name: artifacts.read_json(job.inputs[name] / METRICS) for name in stages}
    journals: list[Path] = [job.inputs[name] / JOURNAL for name in stages]
    options = _options(job)
    about = {
        "evaluated on": datetime.now(UTC).strftime("%d %B %Y"),
        "corpus": snapshot.corpus_hash[:12],
        "documents": f"{known.get('snapshot', {}).get('documents', '?')} in {len(snapshot)} passages",
    }
    if job.presets:
        about["presets"] = ", ".join(job.presets)
    if "snapshot.documents" in options:
        about["of"] = options["snapshot.documents"]
    write_report(
        job.out,
        about=about,
        options=options,
        journals=[path for path in journals if path.is_file()],
        metrics={**known, "evaluate": metrics},
        predictions=job.out / PREDICTIONS,
    )


def _options(job: Job) -> dict[str, Any]:
    """What differs from the defaults in the options that the stages were run with, by section.key."""
    sections: dict[str, Any] = {}
    manifests = [job.inputs[name] / artifacts.MANIFEST for name in ("snapshot", *TRAINED) if name in job.inputs]
    for path in manifests:  # the later one has the say
        sections |= artifacts.read_json(path).get("sections", {}) if path.is_file() else {}
    sections |= {name: section.model_dump() for name, section in job.sections.items()}
    usual = defaults()
    return {
        f"{name}.{key}": value
        for name, keys in sorted(sections.items())
        for key, value in keys.items()
        if usual.get(name, {}).get(key) != value
    }
