"""Two runs on the same questions: is the first better than the second, and how sure is that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from realmops.evaluate.openqa import Difference, Prediction, paired_bootstrap, read_predictions

PREDICTIONS = "predictions.parquet"
FIRST_HITS = "first_hits.parquet"
RESULTS = "results"


@dataclass(frozen=True)
class Comparison:
    """One measure of two runs, as shares of their questions."""

    measure: str
    questions: int
    first: float
    second: float
    difference: Difference


def results_file(folder: Path) -> Path:
    """Where the predictions lie of a results folder, or of the folder of a run that holds one."""
    here = folder / PREDICTIONS
    return here if here.is_file() else folder / RESULTS / PREDICTIONS


def read_results(folder: Path) -> list[Prediction]:
    """The predictions of a results folder, or of the folder of a run that holds one."""
    return read_predictions(results_file(folder))


def read_paired(first: Path, second: Path) -> tuple[list[Prediction], list[Prediction]]:
    """The predictions of two runs, in the order of the first.

    Args:
        first, second: results folders, or folders of runs that hold one.

    Raises ValueError when they answer different questions.
    """
    pair = [read_results(folder) for folder in (first, second)]
    by_id = [{prediction.question_id: prediction for prediction in run} for run in pair]
    if by_id[0].keys() != by_id[1].keys():
        only = [
            [p.question_id for p in run if p.question_id not in other]
            for run, other in zip(pair, reversed(by_id), strict=True)
        ]
        raise ValueError(
            f"{first} and {second} answer different questions ({len(pair[0])} and {len(pair[1])}): "
            f"{_named(only[0])} only in the first, {_named(only[1])} only in the second; "
            "evaluate both runs on the same questions"
        )
    return pair[0], [by_id[1][prediction.question_id] for prediction in pair[0]]


def compare(first: Path, second: Path, *, seed: int) -> list[Comparison]:
    """EM and recall@5 of the first run against the second, by a paired bootstrap over questions."""
    pair = read_paired(first, second)
    values = {
        "EM": [correct(run) for run in pair],
        "recall@5": [np.array([0 <= p.first_hit < 5 for p in run]) for run in pair],
    }
    return [
        Comparison(
            measure,
            len(ours),
            float(ours.mean()),
            float(theirs.mean()),
            paired_bootstrap(ours, theirs, seed=seed),
        )
        for measure, (ours, theirs) in values.items()
    ]


def correct(run: Sequence[Prediction]) -> npt.NDArray[np.bool_]:
    """For each question whether its answer is right."""
    return np.array([prediction.em for prediction in run], bool)


def sentence(row: Comparison) -> str:
    """A comparison in words."""
    difference = row.difference
    return (
        f"{row.measure}: {row.first:.3f} against {row.second:.3f}, difference {difference.mean:+.3f}, "
        f"95 % interval {difference.low:+.3f} to {difference.high:+.3f} (paired bootstrap over {row.questions} "
        f"questions), p(first better than second) {difference.p_better:.3f}"
    )


def _named(ids: Sequence[str]) -> str:
    return f"{len(ids)} ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})" if ids else "none"
