"""The ablation table (the paper's Table 2): variants over several seeds, paired with the reference by question."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from realmops.evaluate.charts import line_chart
from realmops.evaluate.exact_match import interval_over_seeds
from realmops.evaluate.report_page import render_page
from realmops.evaluate.run_report import FigureTable
from realmops.journal import Series

REFERENCE = "realm"
TITLES = ("title", "uses")  # a variant's name, and its resources besides the corpus
MASKING = (REFERENCE, "random_token", "random_span", "matched_span")
STALE = (REFERENCE, "stale_3x", "stale_10x", "stale_30x")
STALENESS = ("index_staleness_steps", "index_staleness_seconds", "top_k_change")  # means over pre-training
# Columns with means of pre-training metrics, and the names of those metrics.
MEANS = {"masked_accuracy": "masked_accuracy", "hit_at_5": "hit_at_5_after"} | {name: name for name in STALENESS}
Row = Mapping[str, Any]  # values by the columns of table.csv; NaN: the variant has no such value


@dataclass(frozen=True)
class VariantOutcome:
    """Results of a variant and seed: ``hit``, ``correct`` [Q] of 0 and 1, ``correct`` NaN for generated questions."""

    variant: str
    seed: int
    asked: Sequence[tuple[str, str, tuple[str, ...], str]]  # ``Question.asked`` and ``answer_rule``
    correct: npt.NDArray[np.float64]
    hit: npt.NDArray[np.float64]  # in the top 5 of the zero-shot retriever; NaN without one
    figures: Mapping[str, float]  # metrics of pre-training; empty without one
    utility: Series  # retrieval utility over the steps of pre-training

    @property
    def em(self) -> float | None:
        em = float(_measured(self.correct).mean())
        return None if math.isnan(em) else em

    @property
    def recall_at_5(self) -> float | None:
        return None if np.isnan(self.hit).any() else float(self.hit.mean())


def table_rows(outcomes: Sequence[VariantOutcome], variants: Mapping[str, Mapping[str, str]]) -> list[Row]:
    """Compute one row per variant with outcomes; differences use the seeds that variant and reference share."""
    by_variant = {name: {o.seed: o for o in outcomes if o.variant == name} for name in variants}
    rows: list[Row] = []
    for name, by_seed in by_variant.items():
        if not by_seed:
            continue
        pairs = [(by_seed[seed], other) for seed, other in by_variant[REFERENCE].items() if seed in by_seed]
        if not pairs:
            raise ValueError(f"{name} and {REFERENCE} have no seed in common; run {REFERENCE} with the same --seeds")
        for outcome, other in pairs:
            if outcome.asked != other.asked:
                raise ValueError(
                    f"{name} and {REFERENCE} answer other questions with seed {outcome.seed}: a preset changes "
                    "questions.test, their language or the section sample; compare variants on the same questions"
                )
        variant_outcomes = list(by_seed.values())
        shared = all(outcome.asked == variant_outcomes[0].asked for outcome in variant_outcomes)
        row: dict[str, Any] = {"variant": name, **variants[name], "seeds": len(by_seed), "paired_seeds": len(pairs)}
        for column, values_of in (("em", attrgetter("correct")), ("recall_at_5", attrgetter("hit"))):
            values = [_measured(values_of(outcome)) for outcome in variant_outcomes]
            row |= interval_over_seeds(values, shared=shared, seed=0, least=0).figures(column)
        em, recall = (
            interval_over_seeds([_measured(of(outcome) - of(other)) for outcome, other in pairs], shared=shared, seed=0)
            for of in (attrgetter("correct"), attrgetter("hit"))
        )
        row |= em.figures("em_difference") | recall.figures("recall_difference")
        for column, figure in MEANS.items():
            row[column] = float(np.mean([o.figures.get(figure, math.nan) for o in by_seed.values()]))
        row["questions"] = len(pairs[0][0].asked) if shared else sum(len(outcome.asked) for outcome, _ in pairs)
        rows.append(row | {"p_better": em.p_better})
    return rows


def _measured(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    measured: npt.NDArray[np.float64] = values[~np.isnan(values)]
    return measured if len(measured) else values


def _figure(value: float, form: str) -> str:
    return "–" if math.isnan(value) else f"{value:{form}}"


def _with_interval(row: Row, name: str, form: str) -> str:
    mean, low, high = (_figure(row[name + end], form) for end in ("", "_low", "_high"))
    return "–" if math.isnan(row[name]) else f"{mean} ({low} to {high})"


def _seeds(row: Row) -> str:
    seeds, paired = row["seeds"], row["paired_seeds"]
    text = f"{seeds}" if paired == seeds else f"{seeds}, of differences {paired}"
    return f"{text}: interval over questions alone" if paired == 1 else text


def _staleness(row: Row) -> str:
    figures = [_figure(row[name], form) for name, form in zip(STALENESS, (".0f", ".0f", ".2f"), strict=True)]
    return figures[0] if figures[0] == "–" else "; ".join(figures)


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "variant": lambda row: row["title"],
    "may use": lambda row: row["uses"],
    "EM and 95 % interval": lambda row: _with_interval(row, "em", ".3f"),
    "zero-shot recall@5 and 95 % interval": lambda row: _with_interval(row, "recall_at_5", ".3f"),
    "hit@5 of masked sentences": lambda row: _figure(row["hit_at_5"], ".3f"),
    "masked words right": lambda row: _figure(row["masked_accuracy"], ".3f"),
    "index: steps old; seconds; share of the candidates that a refresh changes": _staleness,
    "EM, difference and 95 % interval": lambda row: _with_interval(row, "em_difference", "+.3f"),
    "zero-shot recall@5, difference and 95 % interval": lambda row: _with_interval(row, "recall_difference", "+.3f"),
    "seeds": _seeds,
}


def figure_table(rows: Sequence[Row]) -> FigureTable:
    cells = [[cell(row) for cell in COLUMNS.values()] for row in rows]
    return FigureTable("Ablations", tuple(COLUMNS), [cells])


def to_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def mean_series(name: str, series: Sequence[Series]) -> Series:
    """Return the mean over seeds at each step that all of them have."""
    steps = sorted(set.intersection(*(set(line.steps) for line in series)))
    values = [dict(zip(line.steps, line.values, strict=True)) for line in series]
    return Series(name, steps, [float(np.mean([v[step] for v in values])) for step in steps])


def utility_chart(rows: Sequence[Row], outcomes: Sequence[VariantOutcome]) -> str:
    """Draw retrieval utility over steps by masking scheme (the paper's Figure 4); "" with fewer than two points."""
    lines = [
        mean_series(row["title"], [outcome.utility for outcome in outcomes if outcome.variant == row["variant"]])
        for row in rows
        if row["variant"] in MASKING
    ]
    lines = [line for line in lines if len(line.steps) > 1]
    return line_chart("Retrieval utility", "nats over no document", lines) if lines else ""


def staleness_chart(rows: Sequence[Row]) -> str:
    """Draw zero-shot recall@5 and, if measured, EM over the mean staleness of the index; "" without two variants."""
    stale = [row for row in rows if row["variant"] in STALE]
    if len(stale) < 2:
        return ""
    points = sorted((round(row["index_staleness_steps"]), row["recall_at_5"], row["em"]) for row in stale)
    ages, recalls, ems = zip(*points, strict=True)
    lines = [Series("zero-shot recall@5", ages, recalls)]
    lines += [] if any(map(math.isnan, ems)) else [Series("EM", ages, ems)]
    return line_chart("Effect of staleness", "share of questions", lines, across="mean staleness of the index, steps")


def render_report(rows: Sequence[Row], outcomes: Sequence[VariantOutcome], seeds: int) -> str:
    reference = next(row["title"] for row in rows if row["variant"] == REFERENCE)
    note = (
        f"{seeds} seeds; each has its own sample world and its own training. Differences are to {reference}, on the "
        "same questions. Intervals account for another seed and other questions, by Student's t; with one seed "
        "they account for other questions only, not for the variance between trainings."
    )
    sections = [
        f'<div class="card scroll">{figure_table(rows).to_html()}</div>',
        f'<p class="soft">{escape(note)}</p>',
        f'<div class="charts">{utility_chart(rows, outcomes)}{staleness_chart(rows)}</div>',
    ]
    return render_page("Ablations", sections)
