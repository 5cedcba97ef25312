"""One page about a run that opens without a network, the points of its charts as files, and the closing tables.

Input are what the stages leave behind: journals (metrics.jsonl: one JSON object a line with "stage", "step",
"time" and numbers by name), metrics.json files and the predictions. A figure that no stage wrote is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from realmops.artifacts import write_bytes
from realmops.evaluate.calibration import coverage_curve, reliability
from realmops.evaluate.charts import line_chart, number
from realmops.evaluate.predictions import Prediction, read_predictions
from realmops.evaluate.recall import SHOWN_AT
from realmops.evaluate.report_page import page_of, table_of
from realmops.journal import Series, read_journal, series_of
from realmops.text.answer_matching import REGEX_RULES, WORD_RULES

if TYPE_CHECKING:
    from rich.table import Table

SAMPLES = 12
HELD_BACK = "Every answer is held back: no confidence reached <code>wanted_precision</code> at the calibration."
Metrics = Mapping[str, Mapping[str, Any]]  # the content of metrics.json by stage


@dataclass(frozen=True)
class Chart:
    """A chart of one stage's step metrics; ``metrics`` are their names in the journal."""

    stage: str
    title: str
    unit: str
    metrics: tuple[str, ...]
    refreshes: bool = False
    smooth: bool = True


CHARTS = (
    Chart("pretrain", "REALM pre-training loss", "nats", ("loss",)),
    Chart(
        "pretrain",
        "What retrieval is worth to the reader",
        "nats over no document",
        ("retrieval_utility", "retrieval_utility_best", "marginal_gain"),
        refreshes=True,
    ),
    Chart(
        "pretrain",
        "Retrieval while it learns",
        "share of questions or sentences",
        ("recall_at_5", "hit_at_5"),
        refreshes=True,
    ),
    Chart("pretrain", "Age of the index in use", "steps", ("staleness_steps",), refreshes=True, smooth=False),
    Chart("pretrain", "What a fresh index would change", "share of the top k", ("top_k_change",), refreshes=True),
    Chart("pretrain", "Probability of the null document", "mean p(null|x)", ("p_null",)),
    Chart("ict", "Inverse cloze loss", "nats", ("loss",)),
    Chart("ict", "Masked words: the reader's warm start", "nats", ("reader_loss",)),
    Chart("ict", "Inverse cloze accuracy in the batch", "share", ("accuracy_removed", "accuracy_kept")),
    Chart("finetune", "Open-QA fine-tuning loss", "nats", ("loss", "span_loss", "early_loss")),
)

# Rows of the closing table: label, stage and name of a figure, both with figures of that stage in braces; its interval
# stands under _low and _high.
HEADLINES = (
    ("EM (test questions)", "evaluate", "em"),
    ("F1 (test questions)", "evaluate", "f1"),
    ("EM, expression found anywhere in the answer", "evaluate", "em_regex_search"),
    ("EM of the closed-book floor", "evaluate", "closed_book_em"),
    ("precision of the most certain 30 %", "evaluate", "precision_at_30"),
    ("share of the questions not abstained from", "evaluate", "answered"),
    ("precision of their answers", "evaluate", "answered_precision"),
    ("expected calibration error", "evaluate", "ece"),
    ("the same of p(y|x), not calibrated", "evaluate", "ece_uncalibrated"),
    ("the same of a perfect calibration, by chance", "evaluate", "ece_if_perfect"),
    ("ceiling: an answer is in the corpus", "evaluate", "ceiling_in_corpus"),
    (
        "ceiling: as a span of at most {ceiling_wordpieces} wordpieces in the {ceiling_passages} passages read",
        "evaluate",
        "ceiling_in_top_{ceiling_passages}",
    ),
    ("hit@5 of masked sentences before REALM", "pretrain", "hit_at_5_before"),
    ("hit@5 of masked sentences after REALM", "pretrain", "hit_at_5_after"),
    ("retrieval utility at the end (nats)", "pretrain", "retrieval_utility"),
    ("index refreshes", "pretrain", "refreshes"),
    ("mean staleness (steps)", "pretrain", "index_staleness_steps"),
)

EARLIER_LIMITS = {"ceiling_passages": 5, "ceiling_wordpieces": 10}  # of a run that does not say which it had

# Rows of the table of what retrieves and what reads, with the prefixes of recall and of EM and F1; None has none.
COMPARED: tuple[tuple[str, str | None, str | None], ...] = (
    ("a rule over BM25's first passage", None, "rule_"),
    ("BM25 (and the model's reader)", "bm25_", "bm25_"),
    ("embeddings before REALM", "before_realm_", None),
    ("embeddings after REALM, zero-shot", "zero_shot_", None),
    ("the same with words", "zero_shot_hybrid_", None),
    ("embeddings after fine-tuning", "dense_", None),
    ("the model", "", ""),
)


@dataclass(frozen=True)
class FigureTable:
    """Figures as text, for a terminal and for a page; a line parts the groups of rows."""

    title: str
    head: tuple[str, ...]
    groups: Sequence[Sequence[Sequence[str]]]
    are_numbers: bool = True  # all columns but the first

    def for_console(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(self.head[0], title=self.title)
        for name in self.head[1:]:
            table.add_column(name, justify="right" if self.are_numbers else "left")
        for rows in self.groups:
            for row in rows:
                table.add_row(*map(Text, row))  # brackets in texts are no markup
            table.add_section()
        return table

    def as_markdown(self) -> str:
        lines = [map(as_text, row) for row in (self.head, *(row for group in self.groups for row in group))]
        shown = [f"| {' | '.join(line)} |\n" for line in lines]
        return "".join([shown[0], "| --- " * len(self.head) + "|\n", *shown[1:]])

    def as_html(self) -> str:
        return table_of(self.head, [row for rows in self.groups for row in rows])


def as_text(cell: str) -> str:
    """A text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$])", r"\\\1", " ".join(cell.split()))


def figure_tables(metrics: Metrics) -> list[FigureTable]:
    """What ``make run`` and the page end with: the figures of all stages, and those of ``evaluate`` side by side."""
    figures = (headline_rows(metrics), seconds_rows(metrics))
    tables = [FigureTable("realmops", ("measure", "value", "95 % interval over questions"), figures)]
    if compared := compared_rows(metrics):
        head = ("test questions", *(f"recall@{k}" for k in SHOWN_AT), "EM", "F1")
        title = "What retrieves and what reads, with 95 % intervals over questions"
        tables.append(FigureTable(title, head, [[row] for row in compared]))
    return tables


def headline_rows(metrics: Metrics) -> list[tuple[str, str, str]]:
    """Label, figure and 95 % interval of what the stages measured."""
    rows = []
    for label, stage, name in HEADLINES:
        found = metrics.get(stage, {})
        label, name = (text.format_map(EARLIER_LIMITS | dict(found)) for text in (label, name))
        if name in found:
            rows.append((label, _figure(found[name]), _interval(found, name, 3)))
    return rows


def compared_rows(metrics: Metrics) -> list[list[str]]:
    """What ``evaluate`` measured of each retriever and reader, each figure with its 95 % interval below it."""
    found = metrics.get("evaluate", {})
    rule = next((rule for rule in (*WORD_RULES, *REGEX_RULES) if f"recall_at_5_{rule}_low" in found), "")
    rows = []
    for label, recall, answer in COMPARED:
        names = ["" if recall is None else f"{recall}recall_at_{k}_{rule}" for k in SHOWN_AT]
        names += ["" if answer is None else f"{answer}{measure}" for measure in ("em", "f1")]
        cells = [_cell(found, name) if name in found else "" for name in names]
        rows += [[label, *cells]] if any(cells) else []
    return rows if rule else []


def _cell(found: Mapping[str, Any], name: str) -> str:
    return f"{found[name]:.3f}\n{_interval(found, name, 2)}".rstrip()


def seconds_rows(metrics: Metrics) -> list[tuple[str, str, str]]:
    """The seconds that each stage took, and their sum."""
    seconds = {stage: found["seconds"] for stage, found in metrics.items() if "seconds" in found}
    if seconds:
        seconds["all stages"] = sum(seconds.values())
    return [(f"seconds, {stage}", f"{value:.0f}", "") for stage, value in seconds.items()]


def _interval(found: Mapping[str, Any], name: str, digits: int) -> str:
    low, high = found.get(f"{name}_low"), found.get(f"{name}_high")
    return "" if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


def _figure(value: Any) -> str:
    if not isinstance(value, float):
        return number(value)
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def write_report(
    folder: Path,
    *,
    journals: Sequence[Path],
    metrics: Metrics,
    predictions: Path | None = None,
    about: Mapping[str, str] = MappingProxyType({}),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write report.html and plots/STAGE_METRIC.csv (for ``dvc plots``); the page's path.

    Args:
        about: what run it is, in words.
        options: those that differ from the defaults.
    """
    records = [record for path in journals for record in read_journal(path)]
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    charts = []
    for chart in CHARTS:
        lines = [series_of(records, chart.stage, metric) for metric in chart.metrics]
        lines = [line for line in lines if line.steps]
        for line in lines:
            write_bytes(folder / "plots" / f"{chart.stage}_{line.name}.csv", _csv(line))
        if lines:
            marks = refresh_steps(records, chart.stage) if chart.refreshes else []
            charts.append(line_chart(chart.title, chart.unit, lines, marks, smooth=chart.smooth))
    answers = read_predictions(predictions) if predictions else []
    page = folder / "report.html"
    write_bytes(page, _page(metrics, charts, answers, about, options).encode())
    return page


def confidence_charts(answers: Sequence[Prediction]) -> list[str]:
    """How often answers of a confidence are right, and precision where only the surest are given.

    Empty where answers have no confidence.
    """
    known = [(answer.confidence, answer.em) for answer in answers if answer.confidence is not None]
    if not known:
        return []
    probability_Q, correct_Q = np.array([p for p, _ in known]), np.array([right for _, right in known])
    bins, curve = reliability(probability_Q, correct_Q), coverage_curve(probability_Q, correct_Q)
    seen = Series("answers, in tenths", [one.confidence for one in bins], [one.right for one in bins])
    ideal = Series("as it should be", [0.0, 1.0], [0.0, 1.0])
    surest = Series("the surest answers", curve.coverage.tolist(), curve.precision.tolist())
    title, unit, answered = "Precision, if only the surest are given", "share that is right", "share of the questions"
    return [
        line_chart("Confidence, and what it is worth", unit, [seen, ideal], across="confidence"),
        line_chart(title, unit, [surest], smooth=False, across=f"{answered} that are answered"),
    ]


def refresh_steps(records: Iterable[Mapping[str, Any]], stage: str) -> list[int]:
    """The steps at which the stage logged ``refreshed``: a new index was taken into use."""
    adopted = series_of(records, stage, "refreshed")
    return [int(step) for step, value in zip(adopted.steps, adopted.values, strict=True) if value]


def _csv(line: Series) -> bytes:
    rows = [f"{step},{value!r}" for step, value in zip(line.steps, line.values, strict=True)]
    return ("\n".join([f"step,{line.name}", *rows]) + "\n").encode()


def _page(
    metrics: Metrics,
    charts: Sequence[str],
    answers: Sequence[Prediction],
    about: Mapping[str, str],
    options: Mapping[str, Any],
) -> str:
    sections = [f'<p class="soft">{escape("; ".join(f"{name} {value}" for name, value in about.items()))}</p>']
    sections += ["<h2>Results</h2>"]
    sections += [f'<div class="card scroll figures">{table.as_html()}</div>' for table in figure_tables(metrics)]
    trust = confidence_charts(answers)
    for heading, some in (("While it trained", charts), ("How certain it is, and how often it is right", trust)):
        if some:
            sections += [f"<h2>{heading}</h2>", f'<div class="charts">{"".join(some)}</div>']
    if answers and all(answer.abstained for answer in answers):
        sections.append(f'<p class="card">{HELD_BACK}</p>')
    if answers:
        shown = answers[:: -(-len(answers) // SAMPLES)]
        sections += [
            "<h2>Answers and what they rest on</h2>",
            f'<p class="soft">{len(shown)} of {len(answers)} questions, evenly spaced over the file.</p>',
            f'<div class="answers">{"".join(map(_answer, shown))}</div>',
        ]
    sections += ["<h2>Every figure</h2>", *(_all_figures(stage, found) for stage, found in metrics.items())]
    if options:
        sections += ["<h2>What it was run with</h2>", _all_figures("options that differ from the defaults", options)]
    return page_of("REALM run", sections)


def _all_figures(stage: str, found: Mapping[str, Any]) -> str:
    figures = table_of(("figure", "value"), [(name, json.dumps(value)) for name, value in found.items()])
    return f'<details><summary>{escape(stage)}</summary><div class="card scroll">{figures}</div></details>'


def _certainty(row: Prediction) -> str:
    if row.confidence is None:
        return ""
    return f"; confidence {row.confidence:.2f}{', abstained' if row.abstained else ''}"


def _answer(row: Prediction) -> str:
    verdict = '<span class="right">&#10003; right</span>' if row.em else '<span class="wrong">&#10007; wrong</span>'
    source = f"; the answer is from number {row.evidence_rank + 1}" if row.evidence_rank >= 0 else ""
    source += f", page {row.page}" if row.page else ""
    before, after = row.evidence[: row.char_start], row.evidence[row.char_end :]
    candidates = "".join(
        f'<tr><td>{p:.3f}</td><td><span class="bar" style="width: {130 * min(p, 1):.0f}px"></span></td>'
        f'<td>{escape(title)} <span class="soft">{escape(passage_id)}</span></td></tr>'
        for p, title, passage_id in zip(row.p_z, row.titles, row.passage_ids, strict=True)
    )
    return (
        f'<div class="card"><p class="question">{escape(row.question)}</p>'
        f"<p>{verdict}: <b>{escape(row.prediction) or '(no answer)'}</b> "
        f'<span class="soft">wanted: {escape("; ".join(row.answers))}; F1 {row.f1:.2f}; '
        f"span score {row.span_score:.2f}{_certainty(row)}</span></p>"
        f"<p>{escape(before)}<mark>{escape(row.prediction)}</mark>{escape(after)}</p>"
        f'<details><summary class="soft">p(z|x) of the {len(row.p_z)} passages read{source}</summary>'
        f'<div class="scroll"><table class="candidates">{candidates}</table></div></details></div>'
    )
