"""Two runs on the same questions: is the first better than the second, and how sure is that."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from realmops.evaluate.exact_match import Difference, paired_bootstrap
from realmops.evaluate.predictions import Prediction, read_results


@dataclass(frozen=True)
class Comparison:
    """One measure of two runs, as shares of their questions."""

    measure: str
    questions: int
    first: float
    second: float
    difference: Difference


def read_paired(first: Path, second: Path) -> tuple[list[Prediction], list[Prediction]]:
    """The predictions of two runs, in the order of the first.

    Args:
        first, second: results folders, or folders of runs that hold one.

    Raises ValueError when they answer different questions, be it under the same ids, or by different rules.
    """
    ours, theirs = ({p.question_id: p for p in read_results(folder)} for folder in (first, second))
    if ours.keys() != theirs.keys():
        raise ValueError(
            f"{first} and {second} answer different questions ({len(ours)} and {len(theirs)}): "
            f"{_named([name for name in ours if name not in theirs])} only in the first, "
            f"{_named([name for name in theirs if name not in ours])} only in the second; "
            "evaluate both runs on the same questions"
        )
    for name, one in ours.items():
        other = theirs[name]
        if one.asked != other.asked:
            sides = [f"{p.question!r} with the answers {', '.join(map(repr, p.answers[:3]))}" for p in (one, other)]
            raise ValueError(
                f"the id {name!r} is another question in {first} ({sides[0]}) than in {second} ({sides[1]}); "
                "evaluate both runs on the same questions"
            )
        if None not in (rules := (one.answer_rule, other.answer_rule)) and rules[0] != rules[1]:
            raise ValueError(
                f"the answers to {name!r} are judged by the rules of {rules[0]!r} in {first} and of {rules[1]!r} in "
                f"{second}; name the 'language' in the question file and evaluate both runs on it"
            )
    return list(ours.values()), [theirs[name] for name in ours]


def compare(first: Path, second: Path, *, seed: int) -> list[Comparison]:
    """EM and recall@5 of the first run against the second, by a paired bootstrap over questions."""
    pair = read_paired(first, second)
    values = {
        "EM": [correct(run) for run in pair],
        "recall@5": [np.array([0 <= p.first_hit < 5 for p in run]) for run in pair],
    }
    return [
        Comparison(
            measure, len(ours), float(ours.mean()), float(theirs.mean()), paired_bootstrap(ours, theirs, seed=seed)
        )
        for measure, (ours, theirs) in values.items()
    ]


def correct(run: Sequence[Prediction]) -> npt.NDArray[np.bool_]:
    return np.array([prediction.em for prediction in run], bool)


def sentence(row: Comparison) -> str:
    difference = row.difference
    return (
        f"{row.measure}: {row.first:.3f} against {row.second:.3f}, difference {difference.mean:+.3f}, "
        f"95 % interval {difference.low:+.3f} to {difference.high:+.3f} (paired bootstrap over {row.questions} "
        f"questions), p(first better than second) {difference.p_better:.3f}"
    )


def _named(ids: Sequence[str]) -> str:
    return f"{len(ids)} ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})" if ids else "none"
