"""Report of a run: a self-contained HTML page, the points of its charts as CSV files, and the summary tables."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from realmops.answering.own_questions import WHAT_THEY_BRING
from realmops.artifacts import write_bytes
from realmops.evaluate.calibration import coverage_curve, reliability_bins
from realmops.evaluate.charts import format_number, line_chart
from realmops.evaluate.predictions import Prediction, read_predictions
from realmops.evaluate.recall import SHOWN_AT, ZERO_SHOT
from realmops.evaluate.report_page import render_page, render_table
from realmops.journal import Series, metric_series, read_journal
from realmops.questions.answer_matching import REGEX_RULES, WORD_RULES
from realmops.resources import render_template

if TYPE_CHECKING:
    from rich.table import Table

SAMPLES = 12  # answers shown, at most
Metrics = Mapping[str, Mapping[str, Any]]  # content of metrics.json by stage


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
        "Retrieval utility",
        "nats over the null document",
        ("retrieval_utility", "retrieval_utility_best", "marginal_gain"),
        refreshes=True,
    ),
    Chart(
        "pretrain",
        "Retrieval during training",
        "share of questions or sentences",
        ("recall_at_5", "hit_at_5"),
        refreshes=True,
    ),
    Chart("pretrain", "Age of the index in use", "steps", ("staleness_steps",), refreshes=True, smooth=False),
    Chart("pretrain", "Top k changed by a fresh index", "share of the top k", ("top_k_change",), refreshes=True),
    Chart("pretrain", "Probability of the null document", "mean p(null|x)", ("p_null",)),
    Chart("ict", "Inverse cloze loss", "nats", ("loss",)),
    Chart("ict", "Masked words: the reader's warm start", "nats", ("reader_loss",)),
    Chart("ict", "Inverse cloze accuracy in the batch", "share", ("accuracy_removed", "accuracy_kept")),
    Chart("finetune", "Open-QA fine-tuning loss", "nats", ("loss", "span_loss", "early_loss")),
)

# Rows of the summary table: label, stage, metric. Braces in label and metric refer to other metrics of the stage.
HEADLINES = (
    ("EM (test questions)", "evaluate", "em"),
    ("F1 (test questions)", "evaluate", "f1"),
    ("EM, expression found anywhere in the answer", "evaluate", "em_regex_search"),
    ("EM of the closed-book floor", "evaluate", "closed_book_em"),
    ("precision of the most certain 30 %", "evaluate", "precision_at_30"),
    ("nDCG@10 of documents, by relevance judgements", "evaluate", "ndcg_at_10"),
    ("MRR@10 of documents", "evaluate", "mrr_at_10"),
    ("MAP@100 of documents", "evaluate", "map_at_100"),
    ("share of the questions answered (not abstained)", "evaluate", "answered"),
    ("precision of the answered questions", "evaluate", "answered_precision"),
    ("abstentions on questions without answers", "evaluate", "right_abstentions"),
    ("expected calibration error", "evaluate", "ece"),
    ("calibration error of p(y|x), uncalibrated", "evaluate", "ece_uncalibrated"),
    ("calibration error of a perfect calibration, by chance", "evaluate", "ece_if_perfect"),
    ("ceiling: an answer, or a relevant document, is in the corpus", "evaluate", "ceiling_in_corpus"),
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

# Rows of the table of retrievers and readers: label, prefix of recall metrics, prefix of EM and F1; None: not measured.
COMPARED: tuple[tuple[str, str | None, str | None], ...] = (
    ("a rule over BM25's first passage", None, "rule_"),
    ("BM25 (and the model's reader)", "bm25_", "bm25_"),
    ("embeddings before REALM", "before_realm_", None),
    ("embeddings after REALM, zero-shot", "zero_shot_", None),
    ("embeddings after REALM with BM25, zero-shot", "zero_shot_hybrid_", None),
    ("embeddings after fine-tuning", "dense_", None),
    ("the model", "", ""),
)

# Columns of that table next to nDCG@10, for questions with relevance judgements alone.
JUDGED_COLUMNS = {
    "recall@5": "recall_at_5_judged",
    "recall@100": "recall_at_100_judged",
    "MRR@10": "mrr_at_10",
    "MAP@100": "map_at_100",
}


@dataclass(frozen=True)
class FigureTable:
    """A table of formatted values, for terminal, Markdown and HTML; groups of rows are separated by a line."""

    title: str
    head: tuple[str, ...]
    groups: Sequence[Sequence[Sequence[str]]]
    are_numbers: bool = True  # all columns except the first

    def to_rich_table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(self.head[0], title=self.title)
        for name in self.head[1:]:
            table.add_column(name, justify="right" if self.are_numbers else "left")
        for rows in self.groups:
            for row in rows:
                table.add_row(*map(Text, row))  # Text: brackets are not parsed as markup
            table.add_section()
        return table

    def to_markdown(self) -> str:
        lines = [map(escape_markdown, row) for row in (self.head, *(row for group in self.groups for row in group))]
        shown = [f"| {' | '.join(line)} |\n" for line in lines]
        return "".join([shown[0], "| --- " * len(self.head) + "|\n", *shown[1:]])

    def to_html(self) -> str:
        return render_table(self.head, [row for rows in self.groups for row in rows])


def escape_markdown(cell: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#~$])", r"\\\1", " ".join(cell.split()))


def figure_tables(metrics: Metrics) -> list[FigureTable]:
    figures = (headline_rows(metrics), seconds_rows(metrics))
    tables = [FigureTable("realmops", ("measure", "value", "95 % interval over questions"), figures)]
    if compared := compared_rows(metrics):
        values = metrics["evaluate"]
        head = ("test questions", *_retrieval_columns(values), *(("EM", "F1") if "em" in values else ()))
        title = "Retrievers and readers, with 95 % intervals over questions"
        tables.append(FigureTable(title, head, [[row] for row in compared]))
    return tables


def generated_note(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return sentences on test questions generated from the corpus, from the metrics of ``evaluate``; () if none."""
    generated, questions = values.get("generated_questions", 0), values.get("questions", 0)
    if not generated:
        return ()
    if generated < questions:
        return (
            f"{generated} of {questions} test questions were generated from the documents: they measure retrieval "
            f"only; EM and confidence are measured on the other {questions - generated}.",
        )
    return (
        "Test questions were generated from the documents: they measure retrieval only. Label twenty of your own "
        "('realmops questions --label') for EM and confidence:",
        *WHAT_THEY_BRING,
    )


def headline_rows(metrics: Metrics) -> list[tuple[str, str, str]]:
    rows = []
    for label, stage, name in HEADLINES:
        values = metrics.get(stage, {})
        label, name = (text.format_map(defaultdict(str, values)) for text in (label, name))
        if name in values:
            rows.append((label, _figure(values[name]), _interval(values, name, 3)))
    return rows


def compared_rows(metrics: Metrics) -> list[list[str]]:
    """Return the metrics of each retriever and reader, each with its 95 % interval on a second line."""
    values = metrics.get("evaluate", {})
    columns = _retrieval_columns(values)
    rows = []
    for label, recall, answer in _compared_systems(metrics):
        names = ["" if recall is None else f"{recall}{name}" for name in columns.values()]
        if "em" in values:
            names += ["" if answer is None else f"{answer}{measure}" for measure in ("em", "f1")]
        cells = [f"{values[n]:.3f}\n{_interval(values, n, 2)}".rstrip() if n in values else "" for n in names]
        rows += [[label, *cells]] if any(cells) else []
    return rows if columns else []


def _retrieval_columns(values: Mapping[str, Any]) -> dict[str, str]:
    rule = next((rule for rule in (*WORD_RULES, *REGEX_RULES) if f"recall_at_5_{rule}_low" in values), "")
    columns = {f"recall@{k}": f"recall_at_{k}_{rule}" for k in SHOWN_AT} if rule else {}
    if "ndcg_at_10" in values:
        columns["nDCG@10"] = "ndcg_at_10"
        columns |= {} if rule else JUDGED_COLUMNS
    return columns


def _compared_systems(metrics: Metrics) -> Sequence[tuple[str, str | None, str | None]]:
    if "ict" not in metrics or "pretrain" not in metrics or "refreshes" in metrics["pretrain"]:
        return COMPARED
    return [
        (label.replace("after REALM", "before fine-tuning"), recall, answer)
        for label, recall, answer in COMPARED
        if recall != ZERO_SHOT["ict"]
    ]


def seconds_rows(metrics: Metrics) -> list[tuple[str, str, str]]:
    seconds = {stage: values["seconds"] for stage, values in metrics.items() if "seconds" in values}
    if seconds:
        seconds["all stages"] = sum(seconds.values())
    return [(f"seconds, {stage}", f"{value:.0f}", "") for stage, value in seconds.items()]


def _interval(values: Mapping[str, Any], name: str, digits: int) -> str:
    low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
    return "" if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


def _figure(value: Any) -> str:
    if not isinstance(value, float):
        return format_number(value)
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
    """Write report.html, ``about`` at its top, and plots/STAGE_METRIC.csv for ``dvc plots``; return its path."""
    records = [record for path in journals for record in read_journal(path)]
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    charts = []
    for chart in CHARTS:
        lines = [metric_series(records, chart.stage, metric) for metric in chart.metrics]
        lines = [line for line in lines if line.steps]
        for line in lines:
            write_bytes(folder / "plots" / f"{chart.stage}_{line.name}.csv", _csv(line))
        if lines:
            refreshed = metric_series(records, chart.stage, "refreshed") if chart.refreshes else Series("", [], [])
            marks = [int(step) for step, value in zip(refreshed.steps, refreshed.values, strict=True) if value]
            charts.append(line_chart(chart.title, chart.unit, lines, marks, smooth=chart.smooth))
    answers = read_predictions(predictions) if predictions else []
    body = render_template(
        Path(__file__).with_name("report.html"),
        metrics=metrics,
        tables=figure_tables(metrics),
        note=generated_note(metrics.get("evaluate", {})),
        charts=charts,
        calibration=confidence_charts(answers),
        answers=answers,
        shown=answers[:: -(-len(answers) // SAMPLES)] if answers else [],
        about=about,
        options=options,
    )
    page = folder / "report.html"
    write_bytes(page, render_page("REALM run", [body]).encode())
    return page


def confidence_charts(answers: Sequence[Prediction]) -> list[str]:
    rated = [(row.confidence, row.em) for row in answers if row.confidence is not None and not row.is_generated]
    if not rated:
        return []
    probability_Q, correct_Q = np.array([p for p, _ in rated]), np.array([em for _, em in rated])
    bins, curve = reliability_bins(probability_Q, correct_Q), coverage_curve(probability_Q, correct_Q)
    observed = Series("answers in 10 bins", [each.confidence for each in bins], [each.right for each in bins])
    ideal = Series("perfect calibration", [0.0, 1.0], [0.0, 1.0])
    covered = Series("most confident answers", curve.coverage.tolist(), curve.precision.tolist())
    return [
        line_chart("Reliability diagram", "share of correct answers", [observed, ideal], across="confidence"),
        line_chart("Precision by coverage", "precision", [covered], smooth=False, across="share of questions answered"),
    ]


def _csv(line: Series) -> bytes:
    rows = [f"{step},{value!r}" for step, value in zip(line.steps, line.values, strict=True)]
    return ("\n".join([f"step,{line.name}", *rows]) + "\n").encode()
