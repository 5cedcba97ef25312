"""The table of an ablation: variants of one run over seeds, each beside the reference on the same questions.

The paper's Table 2 with intervals: exact match after fine-tuning and zero-shot recall@5, their means over seeds
and their differences to the reference by a paired bootstrap over the questions of all seeds.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from realmops.evaluate.charts import line_chart
from realmops.evaluate.openqa import Difference, Interval, bootstrap_interval, paired_bootstrap
from realmops.evaluate.page import page_of, table_of
from realmops.journal import Series

STALENESS = ("index_staleness_steps", "index_staleness_seconds", "top_k_change")  # means over pre-training


@dataclass(frozen=True)
class Variant:
    """A line of the table: what it is called, and what it may use besides the corpus."""

    title: str
    uses: str


@dataclass(frozen=True)
class VariantOutcome:
    """One variant trained with one seed. ``correct`` and ``hit`` are [Q], in the same order of the questions."""

    variant: str
    seed: int
    correct: npt.NDArray[np.bool_]
    hit: npt.NDArray[np.bool_] | None  # in the top 5 of the retriever that fine-tuning starts from; None without one
    figures: Mapping[str, float]  # of its pre-training, empty where it has none
    utility: Series  # retrieval utility over the steps of pre-training

    @property
    def recall_at_5(self) -> float:
        """Zero-shot; NaN where nothing is retrieved."""
        return math.nan if self.hit is None else float(self.hit.mean())


@dataclass(frozen=True)
class Row:
    """One line of the table; differences are to the reference, on the same seeds."""

    variant: str
    title: str
    uses: str
    seeds: int
    em: Interval
    recall_at_5: Interval
    em_difference: Difference
    recall_difference: Difference
    masked_accuracy: float
    hit_at_5: float  # of masked sentences, by the retriever that pre-training hands on
    index_staleness_steps: float
    index_staleness_seconds: float
    top_k_change: float  # share of the candidates that a refresh of the index changes
    questions: int

    def figures(self) -> dict[str, Any]:
        """The line flat: an interval as three figures, of the difference also how sure it is."""
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            found |= value.figures(field.name) if isinstance(value, Interval) else {field.name: value}
        found["p_better"] = self.em_difference.p_better
        return found


def table_rows(outcomes: Sequence[VariantOutcome], variants: Mapping[str, Variant], *, reference: str) -> list[Row]:
    """A row for each variant that has outcomes, in the order of ``variants``.

    Intervals of EM and recall are over seeds, those of differences over the questions of all seeds that both have.
    What a variant does not have is NaN.
    """
    by_variant = {name: {o.seed: o for o in outcomes if o.variant == name} for name in variants}
    rows = []
    for name, variant in variants.items():
        found = by_variant[name]
        if not found:
            continue
        both = [(found[seed], other) for seed, other in by_variant[reference].items() if seed in found]
        if not both:
            raise ValueError(f"{name} and {reference} have no seed in common; run {reference} with the same --seeds")
        right = [np.concatenate([pair[i].correct for pair in both]) for i in (0, 1)]
        hits = [[pair[i].hit for pair in both] for i in (0, 1)]
        rows.append(
            Row(
                name,
                variant.title,
                variant.uses,
                len(found),
                em=bootstrap_interval([o.correct.mean() for o in found.values()], seed=0),
                recall_at_5=bootstrap_interval([o.recall_at_5 for o in found.values()], seed=0),
                em_difference=paired_bootstrap(*right, seed=0),
                recall_difference=_difference_of_hits(*hits),
                masked_accuracy=_mean_figure("masked_accuracy", found.values()),
                hit_at_5=_mean_figure("hit_at_5_after", found.values()),
                **{name: _mean_figure(name, found.values()) for name in STALENESS},
                questions=len(right[0]),
            )
        )
    return rows


def _mean_figure(name: str, outcomes: Collection[VariantOutcome]) -> float:
    """NaN where an outcome lacks the figure."""
    return float(np.mean([outcome.figures.get(name, np.nan) for outcome in outcomes]))


def _difference_of_hits(
    ours: Sequence[npt.NDArray[np.bool_] | None], theirs: Sequence[npt.NDArray[np.bool_] | None]
) -> Difference:
    known = [(one, other) for one, other in zip(ours, theirs, strict=True) if one is not None and other is not None]
    if len(known) < len(ours):
        return Difference(math.nan, math.nan, math.nan, math.nan)
    return paired_bootstrap(*map(np.concatenate, zip(*known, strict=True)), seed=0)


HEAD = (
    "variant",
    "may use",
    "EM, interval over seeds",
    "zero-shot recall@5, interval over seeds",
    "hit@5 of masked sentences",
    "masked words right",
    "index: steps old; seconds; share of the candidates that a refresh changes",
    "EM, difference and 95 % interval",
    "zero-shot recall@5, difference and 95 % interval",
    "seeds",
)


def cells(row: Row) -> tuple[str, ...]:
    """The table's line as people read it."""
    return (
        row.title,
        row.uses,
        _with_interval(row.em, ".3f"),
        _with_interval(row.recall_at_5, ".3f"),
        *("–" if np.isnan(share) else f"{share:.3f}" for share in (row.hit_at_5, row.masked_accuracy)),
        _staleness(row),
        _with_interval(row.em_difference, "+.3f"),
        _with_interval(row.recall_difference, "+.3f"),
        str(row.seeds),
    )


def _staleness(row: Row) -> str:
    """A share is not known of an index that was never refreshed."""
    if np.isnan(row.index_staleness_steps):
        return "–"
    changed = "–" if np.isnan(row.top_k_change) else f"{row.top_k_change:.2f}"
    return f"{row.index_staleness_steps:.0f}; {row.index_staleness_seconds:.0f}; {changed}"


def _with_interval(value: Interval, form: str) -> str:
    return "–" if np.isnan(value.mean) else f"{value.mean:{form}} ({value.low:{form}} to {value.high:{form}})"


def as_markdown(rows: Sequence[Row]) -> str:
    """The table for a README."""
    lines = [HEAD, ("---",) * len(HEAD), *(cells(row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_csv(rows: Sequence[Row]) -> str:
    """All figures of the table, unrounded."""
    text = io.StringIO()
    lines = [row.figures() for row in rows]
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def mean_series(name: str, series: Sequence[Series]) -> Series:
    """The mean over seeds, step by step, of the steps that all of them have."""
    steps = sorted(set.intersection(*(set(one.steps) for one in series)))
    values = [dict(zip(one.steps, one.values, strict=True)) for one in series]
    return Series(name, steps, [float(np.mean([v[step] for v in values])) for step in steps])


def utility_chart(outcomes: Sequence[VariantOutcome], known: Mapping[str, Variant], variants: Sequence[str]) -> str:
    """Retrieval utility over steps, a line for each variant (the paper's Figure 4); empty without two points."""
    lines = []
    for name in variants:
        found = [o.utility for o in outcomes if o.variant == name]
        if found and len((mean := mean_series(known[name].title, found)).steps) > 1:
            lines.append(mean)
    return line_chart("Retrieval utility", "nats over no document", lines) if lines else ""


def staleness_chart(outcomes: Sequence[VariantOutcome], variants: Sequence[str]) -> str:
    """Zero-shot recall@5 and EM against the mean staleness of the index; empty with fewer than two variants."""
    points = []
    for name in variants:
        found = [o for o in outcomes if o.variant == name]
        if found:
            measured = [(o.figures["index_staleness_steps"], o.recall_at_5, o.correct.mean()) for o in found]
            steps, recall, em = np.mean(measured, axis=0).tolist()
            points.append((round(steps), recall, em))
    if len(points) < 2:
        return ""
    points.sort()
    ages = [age for age, _, _ in points]
    lines = [Series(name, ages, [p[i] for p in points]) for i, name in ((1, "zero-shot recall@5"), (2, "EM"))]
    return line_chart("What staleness costs", "share of questions", lines, across="mean staleness of the index, steps")


def page(rows: Sequence[Row], charts: Sequence[str], note: str) -> str:
    """One HTML page that opens without a network."""
    return page_of(
        "Ablations",
        [
            f'<div class="card scroll">{table_of(HEAD, [cells(row) for row in rows])}</div>',
            f'<p class="soft">{escape(note)}</p>',
            f'<div class="charts">{"".join(charts)}</div>',
        ],
    )
