"""Paired bootstrap of two runs: EM on questions of people, recall on those generated from the corpus."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from realmops.evaluate.exact_match import Difference, paired_bootstrap
from realmops.evaluate.predictions import Prediction, read_results
from realmops.questions.answer_matching import REGEX_RULES, WORD_RULES

SAME_ORIGIN = (
    "EM is measured on questions of people, and questions generated from the documents measure retrieval only; "
    "evaluate both runs on the same questions"
)


@dataclass(frozen=True)
class Comparison:
    """One metric of two runs, as shares of their questions."""

    measure: str
    questions: int
    first: float
    second: float
    difference: Difference


def read_paired(first: Path, second: Path) -> tuple[list[Prediction], list[Prediction]]:
    """Read the predictions of two runs, in the order of the first; ValueError unless both answer the same questions."""
    first_run, second_run = ({p.question_id: p for p in read_results(folder)} for folder in (first, second))
    origins = [question_origin([p.is_generated for p in run.values()]) for run in (first_run, second_run)]
    if origins[0] != origins[1]:
        raise ValueError(f"{first} was evaluated on {origins[0]} and {second} on {origins[1]}; {SAME_ORIGIN}")
    for name in {**first_run, **second_run}:
        pair = first_run.get(name), second_run.get(name)
        sides = [p and (*p.asked[1:], p.answer_rule, *(["generated"] if p.is_generated else [])) for p in pair]
        if sides[0] != sides[1]:
            raise ValueError(
                f"{first} and {second} answer different questions: {name!r} is {sides[0] or 'missing'} in the first "
                f"and {sides[1] or 'missing'} in the second (text, answers, language); evaluate both on the same ones"
            )
    return list(first_run.values()), [second_run[name] for name in first_run]


def question_origin(are_generated: Collection[bool], *, has_em: bool = True) -> str:
    """Return the origin of test questions: people, the corpus that they were generated from, or both."""
    if all(are_generated):
        return "generated questions"
    origin = "questions of people and generated ones" if any(are_generated) else "questions of people"
    return origin if has_em else f"{origin}, without a reader"


def compare_runs(first: Path, second: Path, *, seed: int) -> list[Comparison]:
    """Compare two runs by paired bootstrap over questions: EM of people's questions, recall@5, nDCG@10 if judged."""
    pair = read_paired(first, second)
    people = [[p for p in run if not p.is_generated] for run in pair]
    gives_answers = all(prediction.em is not None for run in people for prediction in run)  # not search alone
    values: dict[str, list[npt.NDArray[Any]]] = {}
    if people[0] and gives_answers:
        values["EM"] = [correct_mask(run) for run in people]
    recall = "recall@5" if people[0] else "recall@5 (retrieval: all questions were generated from the documents)"
    values[recall] = [np.array([0 <= p.first_hit < 5 for p in run]) for run in pair]
    ndcg = [[p.ndcg_at_10 for p in run] for run in pair]
    if all(value is not None for run in ndcg for value in run):
        by_ndcg = {"nDCG@10": [np.array(run, np.float64) for run in ndcg]}
        values = values | by_ndcg if any(p.answers for p in pair[0]) else by_ndcg | values
    return [
        Comparison(measure, len(x_Q), float(x_Q.mean()), float(y_Q.mean()), paired_bootstrap(x_Q, y_Q, seed=seed))
        for measure, (x_Q, y_Q) in values.items()
    ]


def deciding_metric(metrics: Mapping[str, Any]) -> str:
    """Return the metric that decides between runs: em, ndcg_at_10 for judgements alone, or recall_at_5."""
    if "em" in metrics:
        return "em"
    has_answers = any(f"recall_at_5_{rule}" in metrics for rule in (*WORD_RULES, *REGEX_RULES))
    return "ndcg_at_10" if "ndcg_at_10" in metrics and not has_answers else "recall_at_5"


def correct_mask(run: Sequence[Prediction]) -> npt.NDArray[np.bool_]:
    return np.array([prediction.em for prediction in run], bool)


def format_comparison(row: Comparison) -> str:
    difference = row.difference
    return (
        f"{row.measure}: {row.first:.3f} against {row.second:.3f}, difference {difference.mean:+.3f}, "
        f"95 % interval {difference.low:+.3f} to {difference.high:+.3f} (paired bootstrap over {row.questions} "
        f"questions), p(first better than second) {difference.p_better:.3f}"
    )
